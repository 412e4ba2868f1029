"""Checkpoints stay whole when the process is killed, and one process trains in a folder at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra [lra]")

from benchmarks.run.checkpoints import WholeCheckpoints, locked

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("123", file=file, end="", flush=True)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_kill_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"step": 1}, path)

    def half(state: object, file: Any) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        WholeCheckpoints().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


def test_a_full_disk_leaves_the_last_checkpoint_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a traceback of PyTorch, which names neither file nor reason, and the half that was written."""
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"step": 1}, path)

    def full(state: object, file: Any) -> None:
        Path(file).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"last\.ckpt cannot be written, with [\d.,]+ MB free on its disk: .*unexpected"):
        WholeCheckpoints().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "PyTorch cannot read it"),
        (b"hi", "PyTorch cannot read it"),
        (b"data: {task: listops}", "PyTorch cannot read it"),
        ([1], "it lacks a dictionary"),
        ({"weights": 1}, "it lacks pytorch-lightning_version"),
        ({"pytorch-lightning_version": "2", "state_dict": {}, "global_step": 1}, "it lacks record"),
    ],
    ids=str,
)
def test_what_is_no_checkpoint_is_named(content: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=rf"last\.ckpt is not a whole checkpoint \({problem}\): copy it again"):
        WholeCheckpoints(["record"]).load_checkpoint(path)


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(ValueError, match=r"process 123 trains in .*: wait for it or end it"), locked(tmp_path):
            pytest.fail("two processes have it")
        other.kill()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
