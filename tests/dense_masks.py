"""Which masks do property tests draw? Small bool arrays in which full, empty and partial blocks of any size occur."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np

SIDES = list(range(16, 257, 16))

block_sides = st.sampled_from(SIDES)
# sides of a block differ more often than not
block_sizes = st.tuples(block_sides, block_sides) | block_sides.map(lambda side: (side, side))
# both sides of every multiple of 16, and nothing at all
lengths = st.integers(0, 150) | st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 300])
# (batch, heads)
axes = st.tuples(st.sampled_from([1, 1, 2]), st.sampled_from([1, 1, 3]))


def _mask(kind: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(seed)
    q_pos, kv_pos = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    # full and empty rectangles on a grid of 16, as most layouts have
    cells = random.random((*shape[:-2], -(-shape[-2] // 16), -(-shape[-1] // 16))) < random.random()
    rectangles = cells.repeat(16, -2).repeat(16, -1)[..., : shape[-2], : shape[-1]]
    if kind == "rectangles":
        return rectangles
    if kind == "pairs":
        return random.random(shape) < random.random()
    if kind == "causal":
        return np.broadcast_to(kv_pos <= q_pos + int(random.integers(-20, 20)), shape).copy()
    if kind == "full":
        return np.ones(shape, np.bool_)
    if kind == "empty":
        return np.zeros(shape, np.bool_)
    # a few pairs against the rule
    return rectangles ^ (random.random(shape) < 0.001)


def masks(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """bool arrays of a shape whose last two axes are queries and keys."""
    kinds = st.sampled_from(["rectangles", "disturbed", "pairs", "causal", "full", "empty"])
    return st.builds(_mask, kinds, st.integers(0, 2**32 - 1), st.just(shape))
