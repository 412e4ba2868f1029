"""Writes files whole, and reads those that a killed process or a broken copy may have left incomplete."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, tag: str = "") -> Iterator[Path]:
    """A path beside `path` to write to, renamed to it at the end of the block: until then the old file stays.

    tag     part of the name of this path, for files that several processes write at once
    raises  OSError that names the file and the free space of its disk
    """
    unfinished = path.with_name(f".{path.name}{tag}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        os.replace(unfinished, path)
    # PyTorch raises a RuntimeError; neither it nor NumPy says that a disk is full
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(f"{path} cannot be written, with {free / 1e6:,.1f} MB free on its disk: {error}") from error
    finally:
        # of a disk that cannot be written, the error above says more
        with suppress(OSError):
            unfinished.unlink()


def load(path: Path, keys: Collection[str] = (), **options: Any) -> dict[str, Any]:
    """A checkpoint with at least these keys, or weights, on the CPU. ValueError if the file is not whole.

    options  of torch.load
    """
    # in seconds, which processes that only write files save
    import torch

    try:
        # PyTorch would take another file for its oldest format, and fail in many ways
        if path.is_file() and not zipfile.is_zipfile(path):
            raise EOFError("its end is missing")
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, **options)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is not a whole checkpoint (PyTorch cannot read it): copy it again, or remove it"
        ) from error
    missing = [key for key in keys if key not in found] if isinstance(found, dict) else ["a dictionary"]
    if missing:
        raise ValueError(f"{path} is not a whole checkpoint (it lacks {missing[0]}): copy it again, or remove it")
    return found


def read_json(path: Path, keys: Collection[str], what: str) -> dict[str, Any]:
    """A JSON file with at least these keys; ValueError that says that it is not `what`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not {what} (it is not JSON): copy it again, or remove it") from error
    missing = [key for key in keys if key not in found] if isinstance(found, dict) else ["an object"]
    if missing:
        raise ValueError(f"{path} is not {what} (it lacks {missing[0]}): copy it again, or remove it")
    return found
