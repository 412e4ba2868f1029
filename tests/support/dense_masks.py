"""Dense masks for property tests: small bool arrays with full, empty and partial blocks of any size.

Each problem is drawn from one seed: hypothesis repeats parts that it draws separately, so that few of fifty examples
would differ in all parts. A failure names the seed; problem(seed, n_masks, axes_differ) is the example.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np

SIDES = list(range(16, 257, 16))
# 0, and lengths around special multiples of 16
_SPECIAL_LENGTHS = [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300]
_KINDS = ["rectangles", "disturbed", "pairs", "causal", "full", "empty"]


@dataclass(frozen=True)
class Problem:
    """Masks bool (batch | 1, heads | 1, q_len, kv_len), two block sizes, and a generator for the test."""

    seed: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    new_block_size: tuple[int, int]
    masks: tuple[np.ndarray, ...]
    random: np.random.Generator

    @property
    def mask(self) -> np.ndarray:
        return self.masks[0]

    def __repr__(self) -> str:
        shapes = [mask.shape for mask in self.masks]
        return f"Problem(seed={self.seed}, {shapes=}, blocks {self.block_size}, {self.new_block_size})"


def _length(random: np.random.Generator) -> int:
    return int(random.choice(_SPECIAL_LENGTHS)) if random.random() < 0.3 else int(random.integers(0, 200))


def _block_size(random: np.random.Generator) -> tuple[int, int]:
    # small sides are more frequent, for several blocks
    sides = [SIDES[int(random.integers(0, 4 if random.random() < 0.5 else 16))] for _ in range(2)]
    return (sides[0], sides[0] if random.random() < 0.3 else sides[1])


def _mask(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    kind = random.choice(_KINDS, p=[0.3, 0.3, 0.15, 0.15, 0.05, 0.05])
    if kind == "pairs":
        return random.random(shape) < random.random()
    if kind == "causal":
        ahead = random.integers(-40, 40, (*shape[:-2], 1, 1))
        return np.arange(shape[-1]) <= np.arange(shape[-2])[:, None] + ahead
    if kind in ("full", "empty"):
        return np.full(shape, kind == "full")
    # full and empty rectangles on a grid, like most layouts
    side = int(random.choice([16, 32, 64]))
    cells = random.random((*shape[:-2], -(-shape[-2] // side), -(-shape[-1] // side))) < random.random()
    rectangles = cells.repeat(side, -2).repeat(side, -1)[..., : shape[-2], : shape[-1]]
    # a few pairs flipped
    return rectangles ^ (random.random(shape) < 0.0005) if kind == "disturbed" else rectangles


def problem(seed: int, n_masks: int = 1, axes_differ: bool = False) -> Problem:
    """The problem of a seed; axes_differ: masks may have different batch and head axes."""
    random = np.random.default_rng(seed)
    q_len, kv_len = _length(random), _length(random)
    axes = int(random.choice([1, 1, 2])), int(random.choice([1, 1, 3]))
    masks = []
    for _ in range(n_masks):
        own_axes = [1 if axes_differ and random.random() < 0.4 else size for size in axes]
        masks.append(_mask(random, (*own_axes, q_len, kv_len)))
    return Problem(seed, q_len, kv_len, _block_size(random), _block_size(random), tuple(masks), random)


def problems(n_masks: int = 1, axes_differ: bool = False) -> st.SearchStrategy[Problem]:
    return st.integers(0, 2**32 - 1).map(lambda seed: problem(seed, n_masks, axes_differ))
