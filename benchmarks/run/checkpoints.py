"""Checkpoints that stay whole when the process is killed, and folders in which one process trains at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from . import saved


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside the last one and then renames it.

    Lightning writes it to the folder of temporary files. If that is on another disk, the last checkpoint is overwritten
    byte by byte, and a kill leaves neither.

    keys  that a checkpoint must have when it is read
    """

    def __init__(self, keys: Collection[str] = ()) -> None:
        self.keys = ("pytorch-lightning_version", "state_dict", "global_step", *keys)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:  # noqa: ARG002 - Lightning's signature
        with saved.replacing(Path(path)) as unfinished:
            torch.save(checkpoint, unfinished)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return saved.load(Path(path), self.keys)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from the same folder, until the end of the block or of the process.

    raises  ValueError if another process has it
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ValueError(f"process {file.read() or '?'} trains in {folder}: wait for it or end it") from None
        except OSError as error:
            # some network file systems have no locks
            print(f"{folder} cannot be locked ({error}): let only one process train in it", flush=True)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
