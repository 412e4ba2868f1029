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
