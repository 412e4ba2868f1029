"""Block patterns of the measurements; every stored block is full, except on a causal diagonal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout

BLOCK = 128
# width of `local` and `neighborhood`: 4 on each side and the diagonal
WINDOW_BLOCKS = 9


class Pattern(NamedTuple):
    """A pattern of blocks, bool (n_rows, n_cols); `causal` also masks pairs inside the diagonal blocks."""

    name: str
    blocks: np.ndarray
    causal: bool = False
    block_size: int = BLOCK

    @property
    def length(self) -> int:
        return self.block_size * len(self.blocks)

    @property
    def nnz(self) -> int:
        return int(self.blocks.sum())

    @property
    def density(self) -> float:
        return self.nnz / self.blocks.size

    @property
    def is_dense(self) -> bool:
        return self.name in ("dense", "causal")

    def layout(self) -> BlockLayout | None:
        """None for dense and causal, which need no layout."""
        if self.is_dense:
            return None
        return BlockLayout.from_block_mask(self.blocks, self.length, self.length, block_size=self.block_size)

    def attends(self, rows: Tensor) -> Tensor:
        """Queries, int64 (rows,), to the keys they attend to, bool (rows, length)."""
        mask = torch.from_numpy(self.blocks).to(rows.device)[rows // self.block_size]
        mask = mask.repeat_interleave(self.block_size, dim=1)
        if self.causal:
            mask &= torch.arange(self.length, device=rows.device) <= rows[:, None]
        return mask

    def flops(self, batch: int, heads: int, head_dim: int) -> int:
        """FLOPs of a forward: two products of 2 * block_size^2 * head_dim per stored block."""
        return 4 * batch * heads * self.nnz * self.block_size**2 * head_dim


def dense(length: int, *, block_size: int = BLOCK) -> Pattern:
    return Pattern("dense", np.ones((length // block_size,) * 2, dtype=bool), block_size=block_size)


def local(length: int, *, each_side: int = WINDOW_BLOCKS // 2, block_size: int = BLOCK) -> Pattern:
    """Blocks at most `each_side` blocks away."""
    block = np.arange(length // block_size, dtype=np.int32)
    return Pattern("local", abs(block[:, None] - block) <= each_side, block_size=block_size)


def neighborhood(length: int, *, kernel_blocks: int = WINDOW_BLOCKS) -> Pattern:
    """The nearest `kernel_blocks` blocks, also at the ends (Neighborhood Attention with a stride)."""
    n_blocks = length // BLOCK
    kernel_blocks = min(kernel_blocks, n_blocks)
    first = np.clip(np.arange(n_blocks) - kernel_blocks // 2, 0, n_blocks - kernel_blocks)
    col = np.arange(n_blocks)
    return Pattern("neighborhood", (col >= first[:, None]) & (col < first[:, None] + kernel_blocks))


def butterfly(length: int) -> Pattern:
    """Blocks whose row and col differ in at most one bit."""
    n_blocks = length // BLOCK
    stride = np.arange(n_blocks)[:, None] ^ np.arange(n_blocks)[None, :]
    return Pattern("butterfly", (stride & (stride - 1)) == 0)


def random(length: int, *, density: float, block_size: int = BLOCK, seed: int = 0) -> Pattern:
    """round(density * n_cols) random blocks in every row, at least one."""
    n_blocks = length // block_size
    count = max(1, round(density * n_blocks))
    keys = np.random.default_rng(seed).random((n_blocks, n_blocks))
    blocks = np.zeros((n_blocks, n_blocks), dtype=bool)
    np.put_along_axis(blocks, np.argpartition(keys, count - 1, axis=1)[:, :count], True, axis=1)
    return Pattern("random", blocks, block_size=block_size)


def in_finer_blocks(pattern: Pattern, block_size: int, *, filled: float = 1.0, seed: int = 0) -> Pattern:
    """The same mask in blocks of `block_size`, of which a random share `filled` is stored.

    The share of each coarse block is rounded so that the total is exact.
    """
    each_side = pattern.block_size // block_size
    count = np.diff((filled * each_side**2 * np.arange(pattern.nnz + 1)).round())[:, None]
    rank = np.random.default_rng(seed).random((pattern.nnz, each_side**2)).argsort(axis=1).argsort(axis=1)
    inside = np.zeros((*pattern.blocks.shape, each_side, each_side), dtype=bool)
    inside[pattern.blocks] = (rank < count).reshape(-1, each_side, each_side)
    n_blocks = each_side * len(pattern.blocks)
    blocks = inside.transpose(0, 2, 1, 3).reshape(n_blocks, n_blocks)
    return Pattern(pattern.name, blocks, causal=pattern.causal, block_size=block_size)


def patterns(length: int, *, random_density: float = 1 / 8, seed: int = 0) -> Iterator[Pattern]:
    """Dense, causal, and four block-level patterns with full blocks."""
    n_blocks = length // BLOCK
    row, col = np.arange(n_blocks)[:, None], np.arange(n_blocks)[None, :]
    generator = np.random.default_rng(seed)
    yield dense(length)
    yield Pattern("causal", col <= row, causal=True)
    yield local(length)
    yield butterfly(length)
    yield Pattern("random", (generator.random((n_blocks, n_blocks)) < random_density) | (row == col))
    drawn = generator.permuted(np.tile(np.arange(n_blocks), (n_blocks, 1)), axis=1)[:, :3]
    drawn = (drawn[:, :, None] == np.arange(n_blocks)).any(axis=1)
    yield Pattern("bigbird", (abs(row - col) <= 1) | drawn | (row < 2) | (col < 2))
