"""The demo: runs end to end, resumes after an interruption, and fails if the model has not learned."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra [demo]")

from benchmarks.lra import demo, first_result, floors, listops

# 6 steps of 4 expressions through one layer of 16 features: it learns nothing, in a second
TINY = "--steps 6 --steps-per-epoch 3 --batch-size 4 --n-validation 8 --n-test 40 --embed-dim 16"
TINY += " --num-heads 1 --n-layers 1"


@pytest.fixture(autouse=True)
def lightning_leaves_no_trace() -> Iterator[None]:
    """seed_everything changes global streams; Ctrl-C makes Lightning ignore the next one."""
    import signal

    before = signal.getsignal(signal.SIGINT)
    with torch.random.fork_rng():
        yield
    signal.signal(signal.SIGINT, before)


def run(out: Path, *more: str) -> int:
    return demo.main([*TINY.split(), "--out", str(out), *more], agree=True)


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = run(tmp_path)
    found = results(tmp_path)
    assert exit_code == (0 if found["test_accuracy"] >= found["required"] else 1)
    for name in ("layout.png", "learning_curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model.ckpt").exists()
    assert not (tmp_path / "unfinished.ckpt").exists()
    assert [point["step"] for point in found["curve"]] == [3, 6]
    assert found["samples"] == 24
    assert found["density"] <= 0.5
    printed = capsys.readouterr().out
    assert f"density {found['density']:.3f}" in printed
    *_, guesses, last = printed.splitlines()
    assert last.startswith("FAILED: " if exit_code else "PASSED: ")
    assert f"{found['required']:.1%} was required" in last
    assert f"from the root operator alone (the floor): {found['floor']:.1%}" in guesses


def test_a_first_result_comes_before_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_result.first_result(256)
    printed = capsys.readouterr().out
    assert "local | global_tokens on 256 tokens" in printed
    # 4 x 4 blocks; the first row is stored as a whole
    assert "\n####\n" in printed
    assert "gradients agree with plain PyTorch" in printed


def test_wrong_gradients_fail_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = first_result.attention

    def attention(*leaves: torch.Tensor, backend: str = "auto", **options: object) -> torch.Tensor:
        return right(*leaves, backend=backend, **options) * (1.0 if backend == "reference" else 1.01)

    monkeypatch.setattr(first_result, "attention", attention)
    assert not first_result.first_result(256)
    assert "gradients DIFFER from plain PyTorch" in capsys.readouterr().out
    monkeypatch.setattr(demo, "MARGIN", -1.0)
    assert demo.main([*TINY.split(), "--out", str(tmp_path)], agree=False) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("; gradients differ from plain PyTorch")


def test_a_slow_machine_is_warned_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "wall_milliseconds", lambda call, runs: {"ms": 1e6})
    run(tmp_path)
    printed = capsys.readouterr().out
    assert "training: 6 steps, about 6000 s; it stops after 220 s" in printed
    assert printed.index("warning: this machine is slow or busy") < printed.index("samples in")


def test_the_floor_is_that_of_the_test_set(tmp_path: Path) -> None:
    run(tmp_path, "--seed", "5")
    test = listops.splits(listops.PRESETS["small"], n_train=0, n_validation=0, n_test=40, seed=5).test
    found = results(tmp_path)
    roots, labels = np.array([(sample.tokens[0], sample.label) for sample in test]).T
    assert found["floor"] == floors.best_guess(roots, labels)[0]
    assert found["required"] == pytest.approx(found["floor"] + 0.05)
    assert found["second_level"] == listops.oracle_accuracy(test, depth=1)


@pytest.mark.parametrize(("margin", "exit_code"), [(-1.0, 0), (1.0, 1)])
def test_the_exit_code_says_whether_the_floor_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float, exit_code: int
) -> None:
    monkeypatch.setattr(demo, "MARGIN", margin)
    assert run(tmp_path) == exit_code


def test_an_interrupted_run_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # temporary files may be on another disk, from which a checkpoint cannot be renamed
    monkeypatch.setattr(tempfile, "tempdir", "missing")
    run(tmp_path / "whole")

    def interrupt(task: demo.Task) -> None:
        if task.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo.Task, "on_train_batch_start", lambda task, batch, batch_idx: interrupt(task))
        assert run(tmp_path / "parts") == 130
    assert not (tmp_path / "parts" / "results.json").exists()
    capsys.readouterr()
    run(tmp_path / "parts")
    assert "going on from step 3 of 6" in capsys.readouterr().out
    whole, parts = results(tmp_path / "whole"), results(tmp_path / "parts")
    assert whole["curve"] == parts["curve"]
    assert whole["test_accuracy"] == parts["test_accuracy"]
    weights = [
        torch.load(tmp_path / name / "model.ckpt", weights_only=True)["state_dict"] for name in ("whole", "parts")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_that_is_interrupted_in_its_test_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it ended with status 1, without a word."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo.Task, "test_step", interrupt)
        assert run(tmp_path) == 130
    assert "interrupted; run the same command to continue" in capsys.readouterr().err
    run(tmp_path)
    assert "going on from step 6 of 6" in capsys.readouterr().out and results(tmp_path)["samples"] == 24


@pytest.mark.parametrize("content", [b"", b"hi", b"PK half of a checkpoint"])
def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    """Regression: a traceback."""
    (tmp_path / "unfinished.ckpt").write_bytes(content)
    with pytest.raises(SystemExit, match=r"the demo: .*unfinished\.ckpt is not a whole checkpoint .*, or remove it"):
        run(tmp_path)


def test_two_demos_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """Regression: each renamed what the other was writing."""
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'a+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(SystemExit, match=r"the demo: process .* trains in .*: wait for it or end it"):
            run(tmp_path)
        other.kill()
    assert not (tmp_path / "layout.png").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"the demo: .*file"):
        run(tmp_path / "file")


def test_other_settings_start_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(task: demo.Task) -> None:
        if task.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo.Task, "on_train_batch_start", lambda task, batch, batch_idx: interrupt(task))
        run(tmp_path)
    run(tmp_path, "--seed", "1")
    assert "starting afresh" in capsys.readouterr().out
    assert results(tmp_path)["samples"] == 24


def test_nesting_counts_the_brackets_around_a_token() -> None:
    tokens = torch.tensor([list(listops.parse("[MAX 4 [MIN 2 [SM 1 1 ] ] 3 ]"))])
    assert demo.nesting_depths(tokens).tolist() == [[0, 1, 1, 2, 2, 3, 3, 2, 1, 1, 0]]


def test_the_answer_does_not_depend_on_the_padding() -> None:
    settings = demo.Settings(embed_dim=16, num_heads=1, n_layers=2)
    encoder = demo.Encoder(settings, demo.build_layout(settings))
    tokens, lengths, _ = demo.padded(listops.generate(3, listops.PRESETS["small"], seed=0)).tensors
    filled = torch.where(torch.arange(demo.LENGTH) >= lengths[:, None], 7, tokens)
    torch.testing.assert_close(encoder(filled, lengths), encoder(tokens, lengths))


def test_a_slow_machine_is_warned_that_the_training_may_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = demo.Settings(batch_size=1, embed_dim=16, num_heads=1, n_layers=1)
    monkeypatch.setattr(demo, "wall_milliseconds", lambda call, runs: {"ms": 1000 * demo.PATIENCE / 50})
    demo.warn_if_slow(settings, demo.build_layout(settings), 100)
    assert "Training may stop after about 50 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be 1 or more, got 0"),
        (["--seed", "-1"], "seed must be from 0 to 2**32 - 1, got -1"),
        (["--seed", str(2**32)], "seed must be from 0 to 2**32 - 1, got 4294967296"),
        (["--learning-rate", "nan"], "learning_rate must be positive and finite, got nan"),
        (["--embed-dim", "65"], "embed_dim must be a multiple of num_heads"),
        (["--global-tokens", "1000"], "tokens: expected int, a number of tokens, from 0 to 256, got 1000"),
    ],
)
def test_wrong_options_are_refused_before_the_first_result(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(options)
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
