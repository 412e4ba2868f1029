"""Arms differ in attention alone, runs resume exactly, and the report has a line for each run."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
import tempfile
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra [lra]")

import masks
from benchmarks.lm import __main__ as command
from benchmarks.lm import corpus, curves, model, training
from benchmarks.lm.model import ARMS, TINY, LanguageModel
from benchmarks.lm.training import Training
from blocksparse_flash.interop import from_flex_attention

CHANGES = {
    "length": 300, "short": 100, "embed_dim": 32, "hidden_dim": 32, "batch_size": 2, "steps": 6, "validate_every": 2,
    "n_validation": 3,
}  # fmt: skip
SMALL = replace(TINY, **CHANGES)
OPTIONS = ["--tiny", *(text for name, value in CHANGES.items() for text in (f"--{name.replace('_', '-')}", str(value)))]

NSA = ["--arm", "nsa", "--n-layers", "2"]


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
            if ".attention." not in name:
                assert torch.equal(weights[name], weight), name
    # arms without weights of their own begin with all weights equal
    assert all(torch.equal(models["local"][name], weight) for name, weight in models["dense"].items())
    other = LanguageModel(replace(SMALL, seed=1)).state_dict()
    assert not torch.equal(other["embedding.weight"], models["dense"]["embedding.weight"])


def test_every_fourth_layer_of_a_hybrid_is_dense() -> None:
    for arm, expected in {
        "dense": [None] * 4,
        "dense-short": [None] * 4,
        "local": ["local"] * 4,
        "hybrid": [*["sparse"] * 3, None],
        "hybrid-local": [*["local"] * 3, None],
    }.items():
        layouts = {None: None, "sparse": model.sparse_layout(300, 256)}
        layouts["local"] = masks.local(300, window=(model.equal_window(300, 256) - 1, 0))
        found = [layer.attention.layout for layer in LanguageModel(replace(SMALL, arm=arm)).blocks]
        assert found == [layouts[kind] for kind in expected], arm


def test_a_sparse_layer_has_a_window_a_butterfly_and_global_tokens() -> None:
    q, k = torch.arange(512)[:, None], torch.arange(512)
    apart = (q // 32) ^ (k // 32)
    expected = (k <= q) & ((q - k < 128) | ((apart & (apart - 1)) == 0) | (k < 64))
    assert torch.equal(model.sparse_layout(512, 256).to_dense()[0, 0], expected)


@pytest.mark.parametrize("length", [512, 1000])
def test_a_local_layer_has_as_many_keys_as_a_sparse_one(length: int) -> None:
    window = model.equal_window(length, 256)
    pairs = [int(masks.local(length, window=(w - 1, 0)).to_dense().sum()) for w in (window - 1, window)]
    assert pairs[0] < int(model.sparse_layout(length, 256).to_dense().sum()) <= pairs[1]


@pytest.mark.parametrize("arm", ["dense", "hybrid", "hybrid-local", "local"])
def test_flex_gets_the_mask_of_our_layout(arm: str) -> None:
    settings = replace(SMALL, arm=arm, length=2048, short=512, keys=1024, attention="flex")
    for layer in range(4):
        peer = model.attention_of(settings, layer)
        layout = model.layout_of(settings, layer)
        expected = masks.causal(2048) if layout is None else layout
        found = from_flex_attention(peer.block_mask)
        assert torch.equal(found.to_dense(), expected.to_dense())
        # full blocks need no function
        assert int(peer.block_mask.full_kv_num_blocks.sum()) == expected.nnz - int((expected.bitmask_ids >= 0).sum())


def test_peers_have_our_weights_and_losses() -> None:
    window = torch.randint(256, (2, 301), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for arm in ("dense", "dense-short"):
        ours, peer = (LanguageModel(replace(SMALL, arm=arm, attention=attention)) for attention in ("ours", "sdpa"))
        assert all(torch.equal(weight, peer.state_dict()[name]) for name, weight in ours.state_dict().items())
        torch.testing.assert_close(ours(window), peer(window))


def test_the_short_context_begins_anew() -> None:
    short = LanguageModel(replace(SMALL, arm="dense-short"))
    window = torch.randint(256, (1, 301), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    changed = window.clone()
    changed[:, 50] ^= 1
    assert torch.equal(short(window)[:, 100:], short(changed)[:, 100:])
    # with the same tokens and weights, the first context equals that of the dense arm
    torch.testing.assert_close(short(window)[:, :100], LanguageModel(SMALL)(window)[:, :100])


def test_losses_in_chunks_are_those_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LanguageModel(SMALL)
    window = torch.randint(256, (2, 301), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = whole(window)
    monkeypatch.setattr(model, "CHUNK", 7)
    found = whole(window)
    torch.testing.assert_close(found, expected)
    for name in ("head.logits.weight", "embedding.weight"):
        weight = whole.get_parameter(name)
        gradients = [torch.autograd.grad(losses.mean(), weight, retain_graph=True)[0] for losses in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_all_arms_see_the_same_tokens_in_the_same_order(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def noted(model: LanguageModel, window: torch.Tensor) -> torch.Tensor:
        if model.training:
            seen.append(window)
        return model.embedding(window[:, :-1].long()).mean(dim=-1)

    monkeypatch.setattr(LanguageModel, "forward", noted)
    monkeypatch.setattr(training, "print_duration", lambda *_: 0.0)
    for arm in ARMS:
        assert run(path, tmp_path / arm, "--arm", arm) == 0
    expected = list(corpus.Corpus(path, 300).training_batches(2, seed=0, first_step=0, n_steps=6))
    assert len(seen) == 6 * len(ARMS)
    assert all(torch.equal(window, expected[step % 6]) for step, window in enumerate(seen))


def test_an_interrupted_run_resumes_to_the_same_losses(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted at the first step of the second epoch, after a validation at step 2."""
    assert run(path, tmp_path / "whole", *NSA) == 0
    assert "nsa: 6 steps, 3,600 tokens, about" in capsys.readouterr().out

    def interrupt(module: Training, *_: Any) -> None:
        if module.global_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Training, "on_train_batch_start", interrupt)
        assert run(path, tmp_path / "parts", *NSA) == 130
    assert [line["step"] for line in losses(tmp_path / "parts")] == ["2"]
    state = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)
    n_weights = sum(weight.numel() for weight in state["state_dict"].values())
    assert (tmp_path / "parts" / "last.ckpt").stat().st_size < 8 * n_weights + 200_000
    assert "the same command continues" in capsys.readouterr().err
    # a time limit that is far away changes nothing
    assert run(path, tmp_path / "parts", *NSA, "--minutes", "600") == 0
    assert "continues from step 2 of 6" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [line["step"] for line in losses(tmp_path / "whole")] == ["2", "4", "6"]
    ends = [torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    assert not (tmp_path / "parts" / "last.ckpt").exists()
    assert run(path, tmp_path / "parts", *NSA) == 0
    assert "finished before" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    with pytest.raises(SystemExit, match=r"has a run with other settings, another corpus .*\(other: keys, seed\): cho"):
        run(path, tmp_path / "parts", *NSA, "--seed", "1", "--keys", "512")


def test_a_run_that_is_killed_while_it_writes_its_weights_writes_them_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # temporary files may be on another disk, from which a checkpoint cannot be renamed
    monkeypatch.setattr(tempfile, "tempdir", "missing")
    assert run(path, tmp_path / "whole") == 0
    save = torch.save

    def half(state: object, file: Any, *more: Any, **options: Any) -> None:
        if file == tmp_path / "parts" / ".weights.pt.part":
            file.write_bytes(b"half")
            raise KeyboardInterrupt
        save(state, file, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        assert run(path, tmp_path / "parts") == 130
    assert not list((tmp_path / "parts").glob("*weights.pt*"))
    assert run(path, tmp_path / "parts") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ends = [torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    assert not (tmp_path / "parts" / "last.ckpt").exists()


def test_a_run_is_trained_by_one_process(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise ValueError(f"process 123 trains in {folder}")

    monkeypatch.setattr(training, "locked", refuse)
    with pytest.raises(SystemExit, match=r"train: process 123 trains in .*run"):
        run(path, tmp_path / "run")


def test_a_run_stops_within_its_minutes_and_goes_on(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path, tmp_path / "whole") == 0
    assert run(path, tmp_path / "parts", "--minutes", "0") == command.STOPPED
    assert "too little time to compile" in capsys.readouterr().out and not list(tmp_path.rglob("parts/*.csv"))

    def stop(module: Training) -> None:
        module.trainer.should_stop = module.global_step == 4

    with monkeypatch.context() as patch:
        patch.setattr(Training, "on_train_epoch_end", stop)
        assert run(path, tmp_path / "parts") == command.STOPPED
    assert "stopped by --minutes; the same command continues" in capsys.readouterr().err
    assert run(path, tmp_path / "parts") == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_does_not_begin_if_compiling_would_pass_the_deadline(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiling takes 60 s, for the first step and at most as long again for the first validation."""
    clock = [0.0]

    def compiled(*_: Any) -> float:
        clock[0] += 60
        return 0.0

    monkeypatch.setattr(training, "print_duration", compiled)
    monkeypatch.setattr(training, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Training, "set_up", 0.0)
    data = corpus.Corpus(path, 300)
    assert not training.train_all([SMALL, replace(SMALL, seed=1)], data, tmp_path, deadline=110)
    printed = capsys.readouterr().out
    assert "too little time for 2 steps, 60 s" in printed and "too little time to compile, 60 s" in printed
    assert clock[0] == 60


@pytest.mark.parametrize(("left", "is_stopped"), [(0.5, True), (60.0, False)])
def test_an_epoch_that_would_end_after_the_deadline_does_not_begin(path: Path, left: float, is_stopped: bool) -> None:
    module = Training(SMALL, corpus.Corpus(path, 300), path.parent, deadline=time.monotonic() + left)
    module._begin = time.perf_counter()
    module.trainer = types.SimpleNamespace(should_stop=None)  # type: ignore[assignment]
    module.on_train_epoch_end()
    assert module.trainer.should_stop is is_stopped


def test_a_figure_trains_what_is_left_and_reports_it(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.FIGURES, "demo", command.Plan(replace(SMALL, steps=2), ("dense", "hybrid"), (0, 1)))
    options = ["figure", "demo", "--corpus", str(path), "--out", str(tmp_path / "demo")]
    assert command.main([*options, "--minutes", "0"]) == command.STOPPED
    # each seed and arm once
    assert command.main([*options, "--seeds", "0", "0", "--arms", "dense", "hybrid", "dense"]) == 0
    assert "2 of 2 runs have finished" in capsys.readouterr().out
    assert command.main(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished before") == 2 and "4 of 4 runs have finished" in printed
    assert sorted(file.parent.name for file in (tmp_path / "demo").rglob("metrics.csv")) == [
        "dense-seed0", "dense-seed1", "hybrid-seed0", "hybrid-seed1",
    ]  # fmt: skip
    ends = {name: float(losses(tmp_path / "demo" / name)[-1]["validation_loss"]) for name in
            ("dense-seed0", "dense-seed1", "hybrid-seed0", "hybrid-seed1")}  # fmt: skip
    page = (tmp_path / "demo" / "report.md").read_text()
    assert page in printed and (tmp_path / "demo" / "curves.png").read_bytes().startswith(b"\x89PNG")
    dense, hybrid = ([ends[f"{arm}-seed{seed}"] for seed in (0, 1)] for arm in ("dense", "hybrid"))
    assert f"| {sum(hybrid) / 2:.4f} ({min(hybrid):.4f} to {max(hybrid):.4f}) |" in page
    above = [b - a for a, b in zip(dense, hybrid, strict=True)]
    assert f"| {sum(above) / 2:+.4f} ({min(above):+.4f} to {max(above):+.4f}) |" in page


def test_arms_of_a_figure_begin_with_the_weights_of_a_base(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(SMALL, arm="dense-short", steps=2)
    # weights do not change
    after = replace(SMALL, steps=2, learning_rate=1e-30)
    monkeypatch.setitem(command.FIGURES, "demo", command.Plan(after, ("dense", "dense-short"), (0, 1), base))
    options = ["figure", "demo", "--corpus", str(path), "--out", str(tmp_path / "demo")]
    assert command.main(options) == 0
    assert "6 of 6 runs have finished" in capsys.readouterr().out
    for seed in (0, 1):
        folder = tmp_path / "demo-base" / f"dense-short-seed{seed}"
        facts, (*_, end) = curves.read_run(folder)
        weights = torch.load(folder / "weights.pt")
        for arm in ("dense", "dense-short"):
            found = curves.read_run(tmp_path / "demo" / f"{arm}-seed{seed}")[0]["start"]
            assert found.items() >= {"arm": "dense-short", "seed": seed, "tokens": end["tokens"]}.items()
            kept = torch.load(tmp_path / "demo" / f"{arm}-seed{seed}" / "weights.pt")
            assert all(torch.equal(kept[name], weight) for name, weight in weights.items())
        # in the same contexts, but for the rounding of the kept weights
        same = curves.read_run(tmp_path / "demo" / f"dense-short-seed{seed}")[1][-1]
        assert same["validation_loss"] == pytest.approx(end["validation_loss"], abs=0.01)
        assert "start" not in facts
    page = (tmp_path / "demo" / "report.md").read_text()
    ends = [curves.read_run(tmp_path / "demo-base" / f"dense-short-seed{seed}")[1][-1] for seed in (0, 1)]
    losses_of_base = [end["validation_loss"] for end in ends]
    assert "begin with the weights of `dense-short` after 1,200 tokens" in page and "Not comparable" not in page
    assert f"{sum(losses_of_base) / 2:.4f} ({min(losses_of_base):.4f} to {max(losses_of_base):.4f})" in page
    # again: everything has finished
    assert command.main(options) == 0
    assert capsys.readouterr().out.count("finished before") == 6


def test_a_base_that_has_not_finished_is_trained_first(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(SMALL, arm="dense-short", steps=2)
    monkeypatch.setitem(command.FIGURES, "demo", command.Plan(replace(SMALL, steps=2), ("dense",), (0,), base))
    trained: list[str] = []

    def train(settings: model.Settings, *_: object) -> bool:
        trained.append(settings.arm)
        return False

    monkeypatch.setattr(training, "train", train)
    options = ["figure", "demo", "--corpus", str(path), "--out", str(tmp_path / "demo")]
    assert command.main(options) == command.STOPPED
    assert trained == ["dense-short"] and "0 of 2 runs have finished" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half of a checkpoint"])
@pytest.mark.parametrize("name", ["last.ckpt", "weights.pt", "run.json"])
def test_files_that_are_not_whole_are_named(path: Path, tmp_path: Path, name: str, content: bytes) -> None:
    """Regression: a traceback, or a message without the name of the file."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(path, first, "--steps", "2") == 0
    (first / name).write_bytes(content)
    # weights are read by a run that begins with them
    folder, options = (second, ["--start", str(first)]) if name == "weights.pt" else (first, [])
    with pytest.raises(SystemExit, match=rf"first/{name} is not (a whole checkpoint|the run.json of a run)"):
        run(path, folder, "--steps", "2", *options)


@pytest.mark.parametrize(
    "content", [b"", b"step,tokens,seconds\n", b"step,tokens\n2,30\n4", b"step,tokens\n2,x\n", b"\xff"]
)
def test_curves_that_are_not_whole_are_named(path: Path, tmp_path: Path, content: bytes) -> None:
    """Regression: a traceback of pandas."""
    assert run(path, tmp_path / "run", "--steps", "2") == 0
    (tmp_path / "run" / "metrics.csv").write_bytes(content)
    with pytest.raises(SystemExit, match=r"report: .*metrics\.csv is not the metrics\.csv of a run \(.*\): copy it"):
        command.main(["report", "--runs", str(tmp_path), "--out", str(tmp_path / "report")])


def test_a_run_that_has_diverged_is_reported(path: Path, tmp_path: Path) -> None:
    """Regression: NaN is no limit of an axis, so that no run was reported."""
    options = ["report", "--runs", str(tmp_path), "--out", str(tmp_path / "report")]
    assert run(path, tmp_path / "odd", "--steps", "4", "--learning-rate", "1e30") == 0
    assert losses(tmp_path / "odd")[-1]["validation_loss"] == "nan"
    assert command.main(options) == 0
    assert run(path, tmp_path / "run", "--arm", "local", "--steps", "4") == 0
    assert command.main(options) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| nan |" in page and f"| {float(losses(tmp_path / 'run')[-1]['validation_loss']):.4f} |" in page


def test_a_folder_that_cannot_be_made_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"train: .*file"):
        run(path, tmp_path / "file" / "run")


def test_a_run_resumes_only_with_the_weights_with_which_it_began(path: Path, tmp_path: Path) -> None:
    bases = [tmp_path / "base", tmp_path / "other"]
    for seed, base in enumerate(bases):
        assert run(path, base, "--steps", "2", "--seed", str(seed)) == 0
    folder, start = tmp_path / "run", ["--start", str(bases[0])]
    assert run(path, folder, *start) == 0
    with pytest.raises(SystemExit, match="has a run with other settings, another corpus"):
        run(path, folder, "--start", str(bases[1]))
    with pytest.raises(SystemExit, match="has a run with other settings, another corpus"):
        run(path, folder)
    # moved, it is still the same
    moved = bases[0].rename(tmp_path / "moved")
    assert run(path, folder, "--start", str(moved)) == 0
    with pytest.raises(SystemExit, match=r"start must be the folder of a finished run, which has weights\.pt, got"):
        run(path, tmp_path / "again", *start)
    with pytest.raises(SystemExit, match="has weights of other sizes or of nsa: train it with the same model"):
        run(path, tmp_path / "again", "--start", str(moved), "--embed-dim", "64")


def test_steps_are_timed_in_turns_and_compared_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["steps", "--size", "tiny", "--keys", "256", "--lengths", "256", "--rounds", "2"]
    options += ["--attention", "ours", "sdpa", "--out", str(tmp_path / "steps.jsonl")]
    assert command.main([*options, "--arms", "dense", "hybrid", "nsa", "dense-short"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    variants = [("dense", "blocksparse_flash"), ("dense", "sdpa"), ("hybrid", "blocksparse_flash")]
    variants += [("nsa", "blocksparse_flash"), ("dense-short", "blocksparse_flash"), ("dense-short", "sdpa")]
    assert [(line["pattern"], line["provider"]) for line in lines] == variants
    assert all(line["tokens_per_s"] == pytest.approx(1000 * 256 / line["ms"]) for line in lines)
    page, best = capsys.readouterr().out, max(line["tokens_per_s"] for line in lines[:2])
    assert f"| {lines[2]['tokens_per_s']:,.0f} | {lines[2]['tokens_per_s'] / best:.2f} |" in page
    # a peer that attends to other keys is not timed
    monkeypatch.setattr(model.F, "scaled_dot_product_attention", lambda q, k, v, **_: torch.zeros_like(q))
    assert command.main([*options, "--arms", "dense", "--lengths", "256", "384"]) == 0
    assert capsys.readouterr().out.count("dense-sdpa: WRONG") == 2
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()][len(lines) :]
    assert [(line["provider"], line["n"]) for line in lines] == [("blocksparse_flash", 256), ("blocksparse_flash", 384)]


def test_the_report_has_a_line_for_each_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "report"
    assert run(path, runs / "dense", "--arm", "dense") == 0
    shutil.copytree(runs / "dense", runs / "again")
    facts = json.loads((runs / "again" / "run.json").read_text())
    (runs / "again" / "run.json").write_text(json.dumps({**facts, "arm": "local"}))
    monkeypatch.setattr(sys, "argv", ["lm", "report", "--runs", str(runs), "--out", str(out)])
    assert command.main() == 0
    page = (out / "report.md").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    last = losses(runs / "dense")[-1]
    line, _ = (line for line in page.splitlines() if line.startswith("| dense |"))
    loss = float(last["validation_loss"])
    assert f"| {loss:.4f} | +0.0000 | {loss / math.log(2):.4f} |" in line
    assert "| arm | 0 to 38 | 38 to 76 | 76 to 152 | 152 to 300 | late |" in page and "Not comparable" not in page
    (runs / "again" / "run.json").write_text(json.dumps({**facts, "arm": "local", "seed": 5, "keys": 384}))
    assert command.main() == 0
    assert "**Not comparable: these runs differ in keys, seeds.**" in (out / "report.md").read_text()
    (runs / "again" / "run.json").write_text(json.dumps({**facts, "arm": "local", "steps": 8}))
    assert command.main() == 0
    assert "**Not all of these runs have finished.**" in (out / "report.md").read_text()
    with pytest.raises(SystemExit, match=r"no metrics\.csv under"):
        command.main(["report", "--runs", str(tmp_path / "nothing")])
    capsys.readouterr()


def test_losses_by_position_are_means_of_parts_of_the_window() -> None:
    values = torch.arange(16.0).expand(3, 16)
    settings = replace(SMALL, length=16, short=8)
    point = curves.point_of(settings, step=4, seconds=1.0, train_loss=2.0, losses=[values, values])
    assert [point[f"loss_part_{number}"] for number in range(1, 5)] == [0.5, 2.5, 5.5, 11.5]
    # positions 4 to 7 and 12 to 15
    assert (point["validation_loss"], point["loss_late"], point["tokens"]) == (7.5, 9.5, 4 * 2 * 16)
    ends = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert [end for _, end in curves.parts_of(65536)] == ends and curves.parts_of(65536)[0] == (0, 1024)


def test_a_kill_leaves_the_last_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves.write_points(tmp_path, [{"step": 1}])

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(csv.DictWriter, "writerows", kill)
        with pytest.raises(KeyboardInterrupt):
            curves.write_points(tmp_path, [{"step": 1}, {"step": 2}])
    assert (tmp_path / "metrics.csv").read_text() == "step\n1\n"


def test_a_long_run_on_a_cpu_is_announced(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training.measure, "wall_milliseconds", lambda *_, **__: {"ms": 10_000.0})
    module = Training(SMALL, corpus.Corpus(path, 300), path.parent)
    assert training.print_duration(module, torch.device("cpu"), 100) == 1000
    printed = capsys.readouterr().out
    assert "dense: 100 steps, 60,000 tokens, about 1,000 s" in printed
    assert "warning: this takes a GPU; --tiny takes about a minute on a CPU" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arm", "sparse"], "arm must be one of dense, hybrid, hybrid-local, local, dense-short, nsa, moba, got"),
        (["--attention", "math"], "attention must be one of ours, sdpa, cudnn, flex, got 'math'"),
        (["--arm", "hybrid", "--attention", "sdpa"], "attention of hybrid must be one of ours, flex, got 'sdpa'"),
        (["--arm", "nsa", "--attention", "flex"], "attention of nsa must be one of ours, got 'flex'"),
        (["--short", "70"], "short must divide length=300, got 70"),
        (["--keys", "100"], "keys must be a positive multiple of 128, got 100"),
        (["--arm", "hybrid", "--n-layers", "6"], "n_layers of hybrid must be a multiple of 4, got 6"),
        (["--steps", "7"], "steps must be a multiple of validate_every=2, got 7"),
        (["--validate-every", "0"], "validate_every must be 1 or more, got 0"),
        (["--n-validation", "0"], "n_validation must be 1 or more, got 0"),
        (["--steps", "-2"], "steps must be 1 or more, got -2"),
        (["--seed", "-5"], r"seed must be from 0 to 2\*\*32 - 1, got -5"),
        (["--seed", str(2**70)], r"seed must be from 0 to 2\*\*32 - 1, got 1180591620717411303424"),
        (["--learning-rate", "nan"], "learning_rate must be positive and finite, got nan"),
        (["--corpus", "nothing.bin"], r"no corpus at nothing\.bin: python -m benchmarks\.lm corpus"),
    ],
)
def test_wrong_options_are_refused(path: Path, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(path, tmp_path, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "nan"], "argument --minutes: must be 0 or more, got nan"),
        (["--minutes", "-1"], "argument --minutes: must be 0 or more, got -1"),
        (["--tin"], "unrecognized arguments: --tin"),
    ],
)
def test_options_that_cannot_be_parsed_are_refused(
    path: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(path, tmp_path, *options)
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "benchmarks.lm.training")
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.lm train needs lightning: pip install '\.\[lra\]'"):
        run(path, tmp_path)
