"""Reads the released Pathfinder images: pathfinder<R>/<difficulty>/{metadata/<batch>.npy, imgs/<batch>/sample_<i>.png}.
Metadata are text in files named .npy (the release) or NumPy arrays of strings (the generator). Empty image files are
left out. Of the two copies of pathfinder128 the top one is preferred, since the nested one was reported broken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from .places import Example, Splits, find

NUMPY_MAGIC = b"\x93NUMPY"
# folder, file, index, label
LEAST_COLUMNS = 4


class Entry(NamedTuple):
    file: Path
    label: int


class Images(Sequence[Example]):
    """Examples of one document, uint8 (R * R,), row by row; read on access."""

    def __init__(self, entries: Sequence[Entry], resolution: int) -> None:
        self.entries, self.resolution = entries, resolution

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> Example:  # type: ignore[override]
        entry = self.entries[place]
        with Image.open(entry.file) as image:
            pixels = np.asarray(image.convert("L"))
        if pixels.shape != (self.resolution, self.resolution):
            raise ValueError(f"{entry.file}: expected {self.resolution} x {self.resolution} pixels, got {pixels.shape}")
        return Example((pixels.reshape(-1),), entry.label)


def load(
    root: Path, resolution: int, *, difficulty: str = "curv_contour_length_14", split: str = "contiguous"
) -> Splits[Example]:
    """Eight, one and one tenth of the images: 160,000, 20,000 and 20,000 in the release.

    difficulty  "curv_contour_length_14" (hard, Long Range Arena), "curv_contour_length_9", "curv_baseline"
    split       "contiguous" (Long Range Arena), or "random" with seed 42, as in the PyTorch repositories
    """
    if split not in ("contiguous", "random"):
        raise ValueError(f'split must be "contiguous" or "random", got {split!r}')
    folders = [f"{prefix}pathfinder{resolution}/{difficulty}" for prefix in ("", "pathfinder/")]
    folder = find(root, folders, "metadata")
    print(f"pathfinder{resolution}: using {folder}")
    entries = read(folder)
    if split == "random":
        order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(42)).tolist()
        entries = [entries[place] for place in order]
    n_train, n_validation = len(entries) * 8 // 10, len(entries) // 10
    ends = (0, n_train, n_train + n_validation, len(entries))
    return Splits(*(Images(entries[begin:end], resolution) for begin, end in itertools.pairwise(ends)))


def read(folder: Path) -> list[Entry]:
    """The images of a difficulty that are not empty, in the order of the metadata."""
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: int(file.stem))
    if not files:
        raise FileNotFoundError(f"{folder / 'metadata'} has no file *.npy")
    entries = [entry for file in files for entry in _entries(file, folder)]
    is_there = [entry for entry in entries if entry.file.stat().st_size]
    if len(is_there) < len(entries):
        print(f"{folder}: {len(entries) - len(is_there)} empty image(s) left out")
    return is_there


def _entries(file: Path, folder: Path) -> list[Entry]:
    content = file.read_bytes()
    if content.startswith(NUMPY_MAGIC):
        rows = [[_text(word) for word in row] for row in np.load(file, allow_pickle=False)]
    else:
        rows = [line.split() for line in content.decode().splitlines() if line.strip()]
    entries = []
    for number, row in enumerate(rows, start=1):
        if len(row) < LEAST_COLUMNS or row[3] not in ("0", "1", "0.0", "1.0"):
            raise ValueError(
                f"{file}: line {number} must be a folder, a file, an index and a label 0 or 1, got "
                f"{' '.join(row)[:80]!r}"
            )
        entries.append(Entry(folder / row[0] / row[1], int(float(row[3]))))
    return entries


def _text(word: str | bytes) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
