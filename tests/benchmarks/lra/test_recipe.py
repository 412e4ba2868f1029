"""Stages of a recipe run in order, resume, and stop at the first that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonargparse", reason="needs the extra [lra]")

from benchmarks.lra import recipe

CHAIN = ["pathfinder32", "pathx-64", "pathx", "path256-128", "path256"]


def name_of(config: str) -> str:
    return Path(config).stem


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run, whose fit leaves a checkpoint of the last step."""
    monkeypatch.chdir(tmp_path)
    made: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        _, _, _, verb, _, config, *more = command
        made.append([verb, name_of(config), *more])
        if verb == "fit":
            save(config, recipe.Stage.read(Path(config)).steps)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(recipe.subprocess, "run", run)
    return made


def save(config: str, steps: int) -> None:
    checkpoint = recipe.Stage.read(Path(config)).checkpoint
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": steps}, checkpoint)


def test_each_stage_begins_with_the_one_before(commands: list[list[str]]) -> None:
    recipe.run("path256")
    assert commands == [*(["fit", name] for name in CHAIN), ["test", "path256", "--ckpt_path", "last"]]


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
    third.root.joinpath("test.jsonl").write_text(json.dumps({"steps": third.steps}) + "\n")
    commands.clear()
    recipe.run("pathx")
    assert commands == []


def test_a_failed_stage_stops_the_recipe(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3))
    with pytest.raises(SystemExit) as stop:
        recipe.run("pathx")
    assert stop.value.code == 3
    assert "pathfinder32: fit failed; run the same command again to continue" in capsys.readouterr().err


def test_a_stage_that_stops_early_stops_the_recipe(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 0))
    with pytest.raises(SystemExit, match="pathfinder32 stopped before its last step"):
        recipe.run("pathx")


def test_an_unknown_name_lists_the_configurations() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*pathx.*, got 'pathy'"):
        recipe.stages("pathy")


def test_without_the_extra_the_command_names_it() -> None:
    code = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *more: None if name == 'jsonargparse' else find(name, *more); "
        "sys.argv = ['lra']; runpy.run_module('benchmarks.lra', run_name='__main__')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert said.stderr.strip() == "python -m benchmarks.lra needs jsonargparse: pip install '.[lra]'"
