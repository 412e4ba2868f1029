"""Finds the released files in the folders in which copies of the release nest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

# the archive unpacks into a folder of its own name that holds another one
NESTS = ("", "lra_release", "lra_release/lra_release")


class Example(NamedTuple):
    """documents: integer arrays (length,), one, or two for Retrieval; label: 0, 1, ..."""

    documents: tuple[np.ndarray, ...]
    label: int


Item = TypeVar("Item")


class Splits(NamedTuple, Generic[Item]):
    train: Sequence[Item]
    validation: Sequence[Item]
    test: Sequence[Item]


def candidates(root: Path, folders: Iterable[str]) -> list[Path]:
    """root / nest / folder: for the first folder every nest, then for the next."""
    return [root / nest / folder for folder in folders for nest in NESTS]


def find(root: Path, folders: Sequence[str], wanted: str) -> Path:
    """The first of the folders, in any nest of `root`, that contains `wanted`.

    raises  FileNotFoundError with every path that was tried
    """
    looked = candidates(root, folders)
    for folder in looked:
        if (folder / wanted).exists():
            return folder
    tried = "\n".join(f"    {folder / wanted}" for folder in looked)
    raise FileNotFoundError(f"{wanted} was not found under {root}. Looked for\n{tried}")
