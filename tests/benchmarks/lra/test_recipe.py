"""Stages of a recipe run in order, resume, and stop at the first that fails."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")

from benchmarks.lra import __main__ as command
from benchmarks.lra import recipe, reporting, weights
from benchmarks.run import measure

CHAIN = ["pathfinder32", "pathx-64", "pathx", "path256-128", "path256"]


def name_of(config: str) -> str:
    return Path(config).stem


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run, whose fit leaves a checkpoint of the last step."""
    monkeypatch.chdir(tmp_path)
    made: list[list[str]] = []

    def run(command: list[str]) -> int:
        _, _, _, verb, _, config, *more = command
        made.append([verb, name_of(config), *more])
        if verb == "fit":
            save(config, recipe.Stage.read(Path(config)).steps)
        return 0

    monkeypatch.setattr(recipe, "_run", run)
    monkeypatch.setattr(recipe.reporting, "report", lambda **_: None)
    return made


def save(config: str, steps: int, **settings: Any) -> None:
    checkpoint = recipe.Stage.read(Path(config)).checkpoint
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": steps, "settings": settings}, checkpoint)


def line_of_a_test(stage: recipe.Stage, n: int, **more: Any) -> str:
    return json.dumps({"steps": stage.steps, "test_seed": 0, "n": n, **more}) + "\n"


def test_each_stage_begins_with_the_one_before(commands: list[list[str]]) -> None:
    recipe.run("path256")
    assert commands == [*(["fit", name] for name in CHAIN), ["test", "path256", "--ckpt_path", "last"]]


@pytest.mark.parametrize(("loss", "warns"), [(0.692, True), (0.6, False)])
def test_a_stage_that_learned_nothing_is_named(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str], loss: float, warns: bool
) -> None:
    first = recipe.stages("path256")[0]
    for version, losses in (("version_0", [0.6]), ("version_1", [0.6, loss])):
        log = first.root / version / "metrics.csv"
        log.parent.mkdir(parents=True)
        log.write_text("step,validation_loss\n" + "".join(f"{step},{each}\n" for step, each in enumerate(losses)))
    recipe.run("path256")
    assert [verb for verb, *_ in commands] == ["fit"] * len(CHAIN) + ["test"]
    message = f"{first.config.stem} ended with a validation loss of {loss}"
    assert (message in capsys.readouterr().err) is warns


def test_trained_stages_are_skipped_and_the_next_one_resumes(commands: list[list[str]]) -> None:
    first, second, third = recipe.stages("pathx")
    save(str(first.config), first.steps)
    save(str(second.config), second.steps - 1)
    recipe.run("pathx")
    assert commands == [
        ["fit", "pathx-64", "--ckpt_path", "last"],
        ["fit", "pathx"],
        ["test", "pathx", "--ckpt_path", "last"],
    ]
    third.root.joinpath("test.jsonl").write_text(line_of_a_test(third, 20_000))
    commands.clear()
    recipe.run("pathx")
    assert commands == []
    # a test on a few samples does not replace it
    third.root.joinpath("test.jsonl").write_text(line_of_a_test(third, 200))
    recipe.run("pathx")
    assert commands == [["test", "pathx", "--ckpt_path", "last"]]
    commands.clear()
    recipe.run("pathx", test_seed=1)
    assert commands == [["test", "pathx", "--ckpt_path", "last", "--data.test_seed", "1"]]


def test_a_new_checkpoint_is_tested_again(commands: list[list[str]]) -> None:
    _, _, stage = recipe.stages("pathx")
    save(str(stage.config), stage.steps)
    line = line_of_a_test(stage, 20_000, checkpoint=recipe.digest(stage.checkpoint))
    stage.root.joinpath("test.jsonl").write_text(line)
    recipe.run("pathx")
    assert commands == []
    save(str(stage.config), stage.steps, seed=1)
    recipe.run("pathx")
    assert commands == [["test", "pathx", "--ckpt_path", "last"]]


@pytest.mark.parametrize("steps", [10, 6200])
def test_a_checkpoint_with_other_settings_is_refused(commands: list[list[str]], steps: int) -> None:
    _, _, stage = recipe.stages("pathx")
    same = {"learning_rate": 0.0003, "warmup": 100, "embed_dim": 128, "betas": (0.9, 0.98), "seed": 5}
    save(str(stage.config), steps, **same)
    stage.check_settings()
    save(str(stage.config), steps, **{**same, "learning_rate": 0.03})
    with pytest.raises(ValueError, match=r"other settings than .*pathx.yaml has: learning_rate 0.03, not 0.0003"):
        recipe.run("pathx")
    assert commands == []


def test_the_last_checkpoint_is_enough_to_continue(commands: list[list[str]]) -> None:
    """Machines that are lent for minutes keep nothing: only this file has to be carried."""
    _, _, third, fourth, _ = recipe.stages("path256")
    save(str(third.config), third.steps)
    recipe.run("path256")
    assert commands[0] == ["fit", fourth.config.stem]


def test_masks_are_compared_after_the_same_stages(commands: list[list[str]]) -> None:
    recipe.run("ablation")
    fitted = [name for verb, name, *_ in commands if verb == "fit"]
    assert fitted == [*CHAIN[:3], "pathx-butterfly", "pathx-local", "pathx-random"]
    assert len({str(recipe.stages(name)[-1].start) for name in ("pathx", "ablation/pathx-local")}) == 1


TINY = """
data: {task: listops-small, source: fresh, batch_size: 4, workers: 0, sizes: {train: 1, validation: 8, test: 40}}
model:
  START
  architecture: {embed_dim: 16, num_heads: 1, n_layers: 1, hidden_dim: 16, mask: butterfly, block_size: 16,
    dropout_p: 0.1}
  recipe: {warmup: 1}
trainer:
  max_steps: 2
  val_check_interval: 2
  log_every_n_steps: 1
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
  - {class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.5}}
  default_root_dir: out/lra/runs/ours/NAME
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two stages, trained in this process; the commands that were run."""
    before, made = signal.getsignal(signal.SIGINT), []
    (tmp_path / "configs" / "ours").mkdir(parents=True)
    for name, start in (("first", ""), ("second", "start: out/lra/runs/ours/first/checkpoints/last.ckpt")):
        text = TINY.replace("NAME", name).replace("START", start)
        (tmp_path / "configs" / "ours" / f"{name}.yaml").write_text(text)

    def run(arguments: list[str]) -> int:
        made.append(arguments[3])
        try:
            command.main(arguments[3:])
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks.lra"])
    monkeypatch.setattr(recipe, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(recipe, "_run", run)
    with torch.random.fork_rng():
        yield made
    signal.signal(signal.SIGINT, before)


def ends() -> list[dict[str, torch.Tensor]]:
    return [torch.load(stage.checkpoint)["state_dict"] for seed in (0, 1) for stage in recipe.stages("second", seed)]


@pytest.mark.thorough
def test_a_recipe_that_is_cut_at_every_step_ends_as_one_that_is_not(trained: list[str], tmp_path: Path) -> None:
    """Two stages of two steps for each of two seeds; each call ends after a step."""
    recipe.run("second", seeds=(0, 1))
    whole = ends()
    assert trained == ["fit", "fit", "test"] * 2
    (tmp_path / "out").rename(tmp_path / "whole")
    codes = []
    while not codes or codes[-1]:
        try:
            recipe.run("second", seeds=(0, 1), minutes=0)
            codes.append(0)
        except SystemExit as stop:
            codes.append(int(stop.code or 0))
    # after the last step of a stage there is too little time to begin the next one
    assert codes == [75] * 7 + [0]
    for one, other in zip(whole, ends(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(whole[1]["model.head.0.weight"], whole[3]["model.head.0.weight"])
    for seed, folder in ((0, "second"), (1, "second/seed-1")):
        (line,) = measure.read(tmp_path / "out/lra/runs/ours" / folder / "test.jsonl")
        assert (line["seed"], line["steps"], line["samples"], line["samples_before"]) == (seed, 2, 8, 8)
        assert line["device_hours"] > 0 and line["device_hours_before"] > 0 and len(line["start"]) == 12
    written = {path.name for path in (tmp_path / "out/lra/report").iterdir()}
    assert written == {"report.md", "accuracy.png", "learning-curves.png"}


def test_a_recipe_begins_with_kept_weights(trained: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    message = r"needs a weights\.ckpt of an earlier stage of second with seed 1 .*none of first;"
    with pytest.raises(ValueError, match=message):
        recipe.run("second", seeds=[1], from_kept_weights=True, results=results)
    with pytest.raises(ValueError, match=r"earlier stage of first .*none of any, since it has no earlier stage"):
        recipe.run("first", from_kept_weights=True, results=results)
    assert trained == []
    recipe.run("second", seeds=[1])
    for name in ("first", "second"):
        weights.keep(name, seed=1, results=results)
    first, second = recipe.stages("second", 1)
    whole, kept = (torch.load(path) for path in (second.checkpoint, second.kept(results)))
    assert kept["checkpoint"] == recipe.digest(second.checkpoint) and "optimizer_states" in whole.keys() - kept.keys()
    for name, weight in kept["state_dict"].items():
        rounding = 2**-8 if weight.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(weight.float(), whole["state_dict"][name], rtol=rounding, atol=0.0)
    assert {weight.dtype for weight in kept["state_dict"].values()} == {torch.bfloat16, torch.float32}
    (tmp_path / "out").rename(tmp_path / "whole")
    trained.clear()
    recipe.run("second", seeds=[1], from_kept_weights=True, results=results)
    assert trained == ["fit", "test"]
    (line,) = measure.read(second.root / "test.jsonl")
    assert (line["samples"], line["samples_before"], line["start"]) == (8, 8, recipe.digest(first.kept(results)))
    assert line["device_hours_before"] > 0
    # kept weights of the last stage can be tested, and a run's own checkpoint is left alone
    second.command("test", "--ckpt_path", str(second.kept(results)))
    assert measure.read(second.root / "test.jsonl")[1]["checkpoint"] == recipe.digest(second.kept(results))
    own = torch.load(first.checkpoint)
    torch.save({**own, "epoch": 7}, first.checkpoint)
    trained.clear()
    recipe.run("second", seeds=[1], from_kept_weights=True, results=results)
    assert trained == [] and torch.load(first.checkpoint)["epoch"] == 7


def test_kept_weights_of_another_checkpoint_are_not_replaced(
    trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they were, and a full disk left neither."""
    results = tmp_path / "results"
    recipe.run("first")
    (stage,) = recipe.stages("first")
    weights.keep("first", results=results)
    kept = stage.kept(results).read_bytes()

    def full(state: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError("unexpected pos 64 vs 0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"weights\.ckpt cannot be written"):
            weights.keep("first", results=results)
    assert stage.kept(results).read_bytes() == kept
    weights.keep("first", results=results)
    torch.save({**torch.load(stage.checkpoint), "epoch": 7}, stage.checkpoint)
    with pytest.raises(ValueError, match=r"got 'first': .*weights\.ckpt has those of another checkpoint; remove it"):
        weights.keep("first", results=results)
    assert torch.load(stage.kept(results))["epoch"] != 7


@pytest.mark.parametrize("steps", [0, 1])
def test_unfinished_weights_are_not_kept(trained: list[str], tmp_path: Path, steps: int) -> None:
    (stage,) = recipe.stages("first")
    if steps:
        save(str(stage.config), steps)
    with pytest.raises(
        ValueError, match=f"all of its 2 steps, got 'first' with {steps} in .*: train it with `recipe first`"
    ):
        weights.keep("first", results=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_kept_weights_have_the_settings_and_steps_of_their_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = recipe.RESULTS.absolute()
    monkeypatch.chdir(tmp_path)
    kept = sorted(path.parent.relative_to(results).as_posix() for path in results.rglob(recipe.WEIGHTS))
    assert kept
    for run in kept:
        name, seed = reporting.seed_of(run)
        stage = recipe.stages(name.removeprefix("ours/"), seed)[-1]
        stage.checkpoint.parent.mkdir(parents=True)
        shutil.copyfile(stage.kept(results), stage.checkpoint)
        # without settings there is nothing to check
        assert torch.load(stage.checkpoint, weights_only=True)["settings"]
        stage.check_settings()
        assert stage.trained_steps() == stage.steps


def test_a_failed_stage_stops_the_recipe(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "_run", lambda command: 3)
    with pytest.raises(SystemExit) as stop:
        recipe.run("pathx")
    assert stop.value.code == 3
    assert "pathfinder32: fit failed; run the same command again to continue" in capsys.readouterr().err


def test_an_interrupt_is_passed_on_and_waited_for(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process interrupts its parent alone, and gets it back, as if it had saved its step."""
    monkeypatch.undo()
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.5), sys.exit(130)))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert recipe._run([sys.executable, "-c", code]) == recipe.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    (stage,) = recipe.stages("pathfinder32")
    # the latter before the process has a handler
    for code, what in ((recipe.INTERRUPTED, "was interrupted and saved its last step"), (-2, "was interrupted")):
        monkeypatch.setattr(recipe, "_run", lambda command, code=code: code)
        with pytest.raises(SystemExit) as stop:
            stage.command("fit")
        assert stop.value.code == 130
        assert capsys.readouterr().err == f"pathfinder32: {what}; run the same command again to continue\n"


def test_a_stage_that_stops_early_stops_the_recipe(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "_run", lambda command: 0)
    with pytest.raises(SystemExit, match="pathfinder32 stopped before its last step"):
        recipe.run("pathx")


def test_an_unknown_name_lists_the_configurations() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*pathx.*, got 'pathy'"):
        recipe.stages("pathy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [0, -1]}, r"seeds must be from 0 to 2\*\*32 - 1, got -1"),
        ({"seeds": [2**32]}, r"seeds must be from 0 to 2\*\*32 - 1, got 4294967296"),
        ({"seeds": []}, "seeds must be one number or more, got none"),
        ({"minutes": -1.0}, r"minutes must be 0 or more, got -1\.0"),
        ({"minutes": math.nan}, "minutes must be 0 or more, got nan"),
        ({"test_seed": -1}, r"test_seed must be from 0 to 2\*\*32 - 1, got -1"),
    ],
)
def test_seeds_and_minutes_are_checked_first(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.run("listops", **options)


def test_endless_minutes_are_no_limit(commands: list[list[str]]) -> None:
    """Regression: `fit` refused them."""
    recipe.run("pathfinder32", minutes=math.inf)
    assert commands == [["fit", "pathfinder32"], ["test", "pathfinder32", "--ckpt_path", "last"]]


def test_a_group_is_not_offered_where_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `keep ablation` said that ablation was one of the names."""
    with pytest.raises(
        SystemExit, match=r"keep: name must be one of .*pathx-random \(recipe also takes ablation\), got"
    ):
        command.main(["keep", "ablation"])


def test_without_the_extra_the_command_names_it() -> None:
    code = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *more: None if name == 'jsonargparse' else find(name, *more); "
        "sys.argv = ['lra']; runpy.run_module('benchmarks.lra', run_name='__main__')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert said.stderr.strip() == "python -m benchmarks.lra needs jsonargparse: pip install '.[lra]'"


def test_a_comparison_of_masks_ends_in_a_table(
    trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = (tmp_path / "configs" / "ours" / "second.yaml").read_text()
    (tmp_path / "configs" / "ablation").mkdir()
    for name, mask in (("equal", "butterfly | local(window=0)"), ("more", "butterfly | local(window=16)")):
        text = second.replace("mask: butterfly,", f"mask: {mask},").replace("ours/second", f"ablation/{name}")
        (tmp_path / "configs" / "ablation" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(recipe, "GROUPS", {"ablation": ("second",)})
    recipe.run("ablation")
    # the first stage once, then three masks
    assert trained == ["fit", *["fit", "test"] * 3]
    text = (tmp_path / "out/lra/report/report.md").read_text()
    section = text.partition("## Masks at equal keys")[2].partition("##")[0]
    assert "| ours/second | butterfly |" in section and "| ablation/equal | butterfly \\| local(window=0) |" in section
    assert "Not compared, since keys or checkpoint differ: ablation/more (" in section
