"""Arms differ in attention alone, runs resume exactly, and the report has a line for each run."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra [lra]")

from benchmarks.lm import __main__ as command
from benchmarks.lm import corpus, curves, training
from benchmarks.lm.model import ARMS, TINY, LanguageModel
from benchmarks.lm.training import Training

SMALL = replace(
    TINY, length=300, embed_dim=32, n_layers=2, hidden_dim=32, batch_size=2, steps=6, validate_every=2, n_validation=3
)
OPTIONS = ["--tiny", "--length", "300", "--embed-dim", "32", "--hidden-dim", "32", "--batch-size", "2"]
OPTIONS += ["--steps", "6", "--validate-every", "2", "--n-validation", "3"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 packages of letters."""
    folder = tmp_path_factory.mktemp("lm")
    letters = np.random.default_rng(0).integers(ord("a"), ord("z"), (40, 20, 40), dtype=np.uint8)
    for number, lines in enumerate(letters):
        (folder / f"package{number}.py").write_bytes(b"\n".join(line.tobytes() for line in lines))
    corpus.make(folder, folder / "corpus.bin", validation_share=0.3)
    return folder / "corpus.bin"


def run(path: Path, folder: Path, *options: str) -> int:
    return command.main(["train", "--corpus", str(path), "--out", str(folder), *OPTIONS, *options])


def losses(folder: Path) -> list[dict[str, str]]:
    """The lines of metrics.csv without the seconds."""
    with (folder / "metrics.csv").open() as file:
        return [{key: value for key, value in line.items() if key != "seconds"} for line in csv.DictReader(file)]


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_of_every_arm_is_causal_and_trains_all_weights(arm: str) -> None:
    model = LanguageModel(replace(SMALL, arm=arm))
    window = torch.randint(256, (2, 301), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = model(window)
    assert found.shape == (2, 300) and found.dtype == torch.float32
    found.mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), name
    changed = window.clone()
    changed[:, 200] ^= 1
    with torch.no_grad():
        after = model(changed)
    assert torch.equal(after[:, :199], found[:, :199])
    assert not torch.equal(after[:, 199:], found[:, 199:])


def test_arms_begin_with_equal_weights_outside_attention() -> None:
    models = {arm: LanguageModel(replace(SMALL, arm=arm)).state_dict() for arm in ARMS}
    for weights in models.values():
        for name, weight in models["dense"].items():
            if not name.startswith("attention."):
                assert torch.equal(weights[name], weight), name
    # arms without weights of their own begin with all weights equal
    assert all(torch.equal(models["local"][name], weight) for name, weight in models["dense"].items())
    other = LanguageModel(replace(SMALL, seed=1)).state_dict()
    assert not torch.equal(other["embedding.weight"], models["dense"]["embedding.weight"])


def test_hybrid_alternates_local_and_dense_layers() -> None:
    def keys_of(arm: str) -> list[int]:
        """Keys of the last query in each layer."""
        layouts = [layer[1].layout for layer in LanguageModel(replace(SMALL, arm=arm)).attention]
        return [300 if layout is None else int(layout.to_dense()[0, 0, -1].sum()) for layout in layouts]

    assert (keys_of("dense"), keys_of("local"), keys_of("hybrid")) == ([300, 300], [256, 256], [256, 300])


def test_all_arms_see_the_same_tokens_in_the_same_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def noted(model: LanguageModel, window: torch.Tensor) -> torch.Tensor:
        if model.training:
            seen.append(window)
        return model.embedding(window[:, :-1].long()).mean(dim=-1)

    monkeypatch.setattr(LanguageModel, "forward", noted)
    monkeypatch.setattr(training, "print_duration", lambda *_: None)
    for arm in ARMS:
        assert run(path, tmp_path / arm, "--arm", arm) == 0
    expected = list(corpus.Corpus(path, 300).training_batches(2, seed=0, first_step=0, n_steps=6))
    assert len(seen) == 6 * len(ARMS)
    assert all(torch.equal(window, expected[step % 6]) for step, window in enumerate(seen))


def test_an_interrupted_run_resumes_to_the_same_losses(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted at the first step of the second epoch, after a validation at step 2."""
    assert run(path, tmp_path / "whole", "--arm", "nsa") == 0
    assert "nsa: 6 steps, 3,600 tokens, about" in capsys.readouterr().out

    def interrupt(module: Training, *_: Any) -> None:
        if module.global_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "on_train_batch_start", interrupt)
        assert run(path, tmp_path / "parts", "--arm", "nsa") == 130
    assert [line["step"] for line in losses(tmp_path / "parts")] == ["2"]
    assert "the same command goes on" in capsys.readouterr().err
    assert run(path, tmp_path / "parts", "--arm", "nsa") == 0
    assert "nsa: going on from step 2 of 6" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [line["step"] for line in losses(tmp_path / "whole")] == ["2", "4", "6"]
    ends = [torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"] for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    assert run(path, tmp_path / "parts", "--arm", "nsa") == 0
    assert "nsa: going on from step 6 of 6" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    with pytest.raises(SystemExit, match="has a run with other settings or another corpus"):
        run(path, tmp_path / "parts", "--arm", "nsa", "--seed", "1")


def test_the_report_has_a_line_for_each_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "report"
    assert run(path, runs / "dense", "--arm", "dense") == 0
    shutil.copytree(runs / "dense", runs / "again")
    monkeypatch.setattr(sys, "argv", ["lm", "report", "--runs", str(runs), "--out", str(out)])
    assert command.main() == 0
    page = (out / "report.md").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    last = losses(runs / "dense")[-1]
    (line,) = (line for line in page.splitlines() if line.startswith("| dense |"))
    assert f"| {float(last['validation_loss']):.4f} | {float(last['validation_loss']) / math.log(2):.4f} |" in line
    assert "| loss at positions 0 to 38 | 38 to 75 | 75 to 150 | 150 to 300 |" in page and "Not comparable" not in page
    facts = json.loads((runs / "again" / "run.json").read_text())
    (runs / "again" / "run.json").write_text(json.dumps({**facts, "seed": 5}))
    assert command.main() == 0
    assert "**Not comparable: these runs differ in seed.**" in (out / "report.md").read_text()
    with pytest.raises(SystemExit, match=r"no metrics\.csv under"):
        command.main(["report", "--runs", str(tmp_path / "nothing")])
    capsys.readouterr()


def test_losses_by_position_are_means_of_parts_of_the_window() -> None:
    values = torch.arange(16.0).expand(3, 16)
    point = curves.point_of(replace(SMALL, length=16), step=4, seconds=1.0, train_loss=2.0, losses=[values, values])
    assert [point[f"loss_part_{number}"] for number in range(1, 5)] == [0.5, 2.5, 5.5, 11.5]
    assert (point["validation_loss"], point["tokens"]) == (7.5, 4 * 2 * 16)


def test_a_long_run_on_a_cpu_is_announced(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training.measure, "wall_milliseconds", lambda *_, **__: {"ms": 10_000.0})
    training.print_duration(SMALL, corpus.Corpus(path, 300), torch.device("cpu"), 100)
    printed = capsys.readouterr().out
    assert "dense: 100 steps, 60,000 tokens, about 1,000 s" in printed
    assert "warning: this takes a GPU; --tiny takes about a minute on a CPU" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arm", "sparse"], "arm must be one of dense, local, hybrid, nsa, moba, got 'sparse'"),
        (["--steps", "7"], "steps must be a multiple of validate_every=2, got 7"),
        (["--corpus", "nothing.bin"], r"no corpus at nothing\.bin: python -m benchmarks\.lm corpus"),
    ],
)
def test_wrong_options_are_refused(path: Path, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(path, tmp_path, *options)


def test_a_missing_package_is_named_with_its_extra(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "benchmarks.lm.training")
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.lm train needs lightning: pip install '\.\[lra\]'"):
        run(path, tmp_path)
