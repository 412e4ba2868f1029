"""Reads CIFAR-10, as pickles or plain bytes, as the gray images of the Image task."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .places import Example, Splits, candidates

FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-py", "cifar")
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
PIXELS = 32 * 32
# globals needed to unpickle an array, in Python 2, NumPy 1 and NumPy 2
HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise ValueError(f"a batch of CIFAR-10 holds arrays and lists, not {module}.{name}")
        return super().find_class(module, name)


def load(root: Path, *, gray: str = "tensorflow", split: str = "last") -> Splits[Example]:
    """45,000, 5,000 and 10,000 gray images of 1024 pixels, uint8, row by row.

    gray   "tensorflow" (0.2989, 0.587, 0.114; Long Range Arena) or "torchvision" (0.299, 0.587, 0.114); rounded down
    split  the tenth of the training images for validation: "last" (Long Range Arena), or "random" with seed 42, as in
           the PyTorch repositories
    """
    if gray not in ("tensorflow", "torchvision"):
        raise ValueError(f'gray must be "tensorflow" or "torchvision", got {gray!r}')
    if split not in ("last", "random"):
        raise ValueError(f'split must be "last" or "random", got {split!r}')
    folder, ending = _find(root)
    train = [example for batch in TRAIN for example in read(folder / (batch + ending), gray=gray)]
    test = read(folder / (TEST + ending), gray=gray)
    order = list(range(len(train)))
    if split == "random":
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(42)).tolist()
    shuffled = [train[place] for place in order]
    n_train = len(train) * 9 // 10
    return Splits(shuffled[:n_train], shuffled[n_train:], test)


def _find(root: Path) -> tuple[Path, str]:
    """The folder of the batches, and ".bin" or nothing."""
    looked = [(folder, ending) for folder in candidates(root, FOLDERS) for ending in ("", ".bin")]
    for folder, ending in looked:
        if (folder / (TRAIN[0] + ending)).exists():
            return folder, ending
    tried = "\n".join(f"    {folder / (TRAIN[0] + ending)}" for folder, ending in looked)
    raise FileNotFoundError(f"the batches of CIFAR-10 were not found under {root}. Looked for\n{tried}")


def read(path: Path, *, gray: str = "tensorflow") -> list[Example]:
    """The images of one batch, in its order."""
    content = path.read_bytes()
    if path.suffix == ".bin":
        if len(content) % (1 + 3 * PIXELS):
            raise ValueError(f"{path}: a multiple of {1 + 3 * PIXELS} octets was expected, got {len(content)}")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + 3 * PIXELS)
        labels, colours = rows[:, 0].tolist(), rows[:, 1:]
    else:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        labels, colours = batch[b"labels"], batch[b"data"]
    # thousandths, or ten-thousandths, so that rounding down is exact
    weights = np.array([2989, 5870, 1140] if gray == "tensorflow" else [2990, 5870, 1140])
    pixels = np.einsum("c,ncp->np", weights, colours.reshape(-1, 3, PIXELS).astype(np.int64)) // 10_000
    return [Example((row,), int(label)) for row, label in zip(pixels.astype(np.uint8), labels, strict=True)]
