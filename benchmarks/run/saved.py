"""Reads files that a killed process or a broken copy may have left incomplete."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch


def load(path: Path, keys: Collection[str] = (), **options: Any) -> dict[str, Any]:
    """A checkpoint with at least these keys, or weights, on the CPU. ValueError if the file is not whole.

    options  of torch.load
    """
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, **options)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is not a whole checkpoint (PyTorch cannot read it): copy it again, or remove it"
        ) from error
    if missing := [key for key in keys if key not in found]:
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
