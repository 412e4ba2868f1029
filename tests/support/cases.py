"""The zoo: small named layouts that every backend must get right, built on demand.

Add a shape as a case here, not as a function elsewhere: @pytest.mark.parametrize("case", cases.LAYOUTS, ids=str).
Layouts come from BlockLayout's constructors only, so that a wrong builder in masks/ cannot hide a wrong kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from blocksparse_flash import BlockLayout


@dataclass(frozen=True)
class Case:
    """A layout by name. `build()` always gives the same object."""

    name: str
    make: Callable[[], BlockLayout]

    def build(self) -> BlockLayout:
        return _built(self)

    def __str__(self) -> str:
        return self.name


@cache
def _built(case: Case) -> BlockLayout:
    return case.make()


# 400: three tiles of 128 and a ragged one, small enough for Triton's interpreter. 113 and 203: one and two tiles, both
# ragged. 256: no tail
_LONG, _EVEN, _SHORT, _MIDDLE = 400, 256, 113, 203


def _dense(mask: torch.Tensor, block_size: int | tuple[int, int]) -> BlockLayout:
    return BlockLayout.from_dense(mask, block_size=block_size)


def _ones(q_len: int, kv_len: int, block_size: int) -> BlockLayout:
    return _dense(torch.ones(q_len, kv_len, dtype=torch.bool), block_size)


def _random_pairs(*shape: int, density: float, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def _random_blocks(q_len: int, kv_len: int, block_size: int, *, density: float, seed: int) -> BlockLayout:
    grid = -(-q_len // block_size), -(-kv_len // block_size)
    mask = _random_pairs(*grid, density=density, seed=seed)
    return BlockLayout.from_block_mask(mask, q_len, kv_len, block_size=block_size)


def _quarters(length: int) -> BlockLayout:
    """Four heads of 64 x 64 blocks with growing density, some with half of their pairs. One tile row is full."""
    grid = -(-length // 64)
    density = torch.tensor([0.3, 0.5, 0.7, 1.0])[:, None, None]
    stored = torch.rand(4, grid, grid, generator=torch.Generator().manual_seed(10)) < density
    is_full = _random_pairs(4, grid, grid, density=0.8, seed=11)
    # without the ragged block at its end, which would be partial
    is_full[3, :2], stored[3, :2, -1] = True, False
    stored, is_full = (
        each.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :length, :length] for each in (stored, is_full)
    )
    return _dense(stored & (is_full | _random_pairs(4, length, length, density=0.5, seed=12)), 64)


def _causal(q_len: int, kv_len: int, block_size: int | tuple[int, int]) -> BlockLayout:
    ahead = kv_len - q_len
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: kv_pos <= q_pos + ahead, q_len, kv_len, block_size=block_size
    )


def _window(q_len: int, kv_len: int, width: int, block_size: int | tuple[int, int]) -> BlockLayout:
    ahead = kv_len - q_len
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos + ahead - kv_pos).abs() <= width, q_len, kv_len, block_size=block_size
    )


def _global(length: int, tokens: int, block_size: int) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos < tokens) | (kv_pos < tokens), length, length, block_size=block_size
    )


def _diagonal_blocks(length: int, block_size: int) -> BlockLayout:
    rows = list(range(-(-length // block_size)))
    return BlockLayout.from_blocks(rows, rows, length, length, block_size=block_size)


def _without_rows(length: int, block_size: int) -> BlockLayout:
    """Queries without keys: a whole tile row, single queries in a partial block, and the last query."""
    mask = _random_pairs(length, length, density=0.4, seed=3)
    mask[128:256] = False
    mask[[5, 60, 300, length - 1]] = False
    return _dense(mask, block_size)


def _without_cols(length: int, block_size: int) -> BlockLayout:
    """The transpose of _without_rows: keys without queries."""
    return _dense(_without_rows(length, block_size).to_dense()[0, 0].T, block_size)


def _per_head(q_len: int, kv_len: int, block_size: int) -> BlockLayout:
    """Four heads: nothing, everything, a window, random pairs."""
    mask = torch.zeros(4, q_len, kv_len, dtype=torch.bool)
    mask[1] = True
    mask[2] = _window(q_len, kv_len, 40, 64).to_dense()[0, 0]
    mask[3] = _random_pairs(q_len, kv_len, density=0.1, seed=4)
    return _dense(mask, block_size)


def _per_batch(length: int, block_size: int) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda batch, head, q_pos, kv_pos: torch.where(batch == 0, kv_pos <= q_pos, (q_pos - kv_pos).abs() <= 30),
        length,
        length,
        block_size=block_size,
        batch=2,
    )


def _per_batch_and_head(q_len: int, kv_len: int, block_size: int) -> BlockLayout:
    return BlockLayout.from_predicate(
        lambda batch, head, q_pos, kv_pos: (q_pos - kv_pos).abs() <= 25 * head + 60 * batch,
        q_len,
        kv_len,
        block_size=block_size,
        batch=2,
        heads=4,
    )


def _everything(q_len: int, kv_len: int, block_size: int | tuple[int, int]) -> BlockLayout:
    """Causal band, first keys, random pairs, none in queries 48 .. 63: every kind of block at every block size."""
    ahead = kv_len - q_len
    noise = _random_pairs(q_len, kv_len, density=0.01, seed=5)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + ahead - kv_pos
        return (((distance >= 0) & (distance < 150)) | (kv_pos < 20) | noise[q_pos, kv_pos]) & (
            (q_pos < 48) | (q_pos >= 64)
        )

    return BlockLayout.from_predicate(attends, q_len, kv_len, block_size=block_size)


# sides that kernels or regrouping treat differently: the smallest, divisors of a tile, a tile, a multiple of it, and 48
# and 80, which do not divide a tile
_BLOCK_SIZES: list[int | tuple[int, int]] = [16, 32, 48, 64, 128, 256, (64, 32), (16, 256), (48, 80)]

LAYOUTS: list[Case] = [
    Case("full", lambda: _ones(_EVEN, _EVEN, 128)),
    Case("full-ragged", lambda: _ones(_SHORT, _MIDDLE, 64)),
    Case("empty", lambda: ~_ones(_MIDDLE, _EVEN, 64)),
    Case("one-pair", lambda: _dense(torch.arange(_MIDDLE * _SHORT).reshape(_MIDDLE, _SHORT) == 9000, 32)),
    Case("one-block", lambda: BlockLayout.from_blocks([2], [1], _LONG, _LONG, block_size=64)),
    Case("last-block", lambda: BlockLayout.from_blocks([3], [1], _MIDDLE, _SHORT, block_size=64)),
    Case("diagonal", lambda: _diagonal_blocks(_LONG, 64)),
    Case("diagonal-pairs", lambda: _window(_EVEN, _EVEN, 0, 128)),
    Case("causal", lambda: _causal(_LONG, _LONG, 128)),
    Case("causal-even", lambda: _causal(_EVEN, _EVEN, 64)),
    Case("causal-wide", lambda: _causal(_SHORT, _MIDDLE, 64)),
    Case("causal-tall", lambda: _causal(_MIDDLE, _SHORT, 64)),
    Case("window", lambda: _window(_LONG, _LONG, 50, 128)),
    Case("window-wide", lambda: _window(_SHORT, _LONG, 70, 64)),
    Case("global", lambda: _global(_LONG, 20, 64)),
    Case("window-and-global", lambda: _window(_LONG, _LONG, 40, 64) | _global(_LONG, 10, 64)),
    Case("random-blocks", lambda: _random_blocks(_LONG, _LONG, 64, density=0.3, seed=1)),
    Case("random-fine-blocks", lambda: _random_blocks(_MIDDLE, _LONG, 16, density=0.2, seed=2)),
    Case("random-pairs", lambda: _dense(_random_pairs(_SHORT, _MIDDLE, density=0.5, seed=6), 128)),
    Case("random-sparse-pairs", lambda: _dense(_random_pairs(_LONG, _EVEN, density=0.002, seed=7), 64)),
    Case("bitmask-heavy", lambda: _dense(_random_pairs(_EVEN, _MIDDLE, density=0.3, seed=8), 16)),
    Case("empty-rows", lambda: _without_rows(_LONG, 64)),
    Case("empty-cols", lambda: _without_cols(_LONG, 64)),
    Case("ragged-tail", lambda: _random_blocks(_SHORT, _MIDDLE, 48, density=0.6, seed=9)),
    Case("wide", lambda: _everything(_SHORT, _LONG, 64)),
    Case("tall", lambda: _everything(_LONG, _SHORT, 64)),
    Case("per-head", lambda: _per_head(_MIDDLE, _EVEN, 64)),
    Case("per-head-even", lambda: _per_head(_EVEN, _EVEN, 128)),
    Case("per-batch", lambda: _per_batch(_MIDDLE, 64)),
    Case("per-batch-and-head", lambda: _per_batch_and_head(_SHORT, _MIDDLE, 32)),
    *(
        Case(
            f"blocks-of-{'x'.join(map(str, size)) if isinstance(size, tuple) else size}",
            lambda size=size: _everything(_LONG, 300, size),
        )
        for size in _BLOCK_SIZES
    ),
    Case("quarters", lambda: _quarters(_LONG)),
    # every tile row of the first head is longer than twice the mean of all heads
    Case("one-head", lambda: _dense(torch.tensor([1, 0, 0, 0]).bool()[:, None, None].expand(4, _SHORT, 60), 64)),
]
