"""When dq of the Hopper backward has a launch of its own."""

from __future__ import annotations

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.kernels.separate_dq import is_dq_separate

CPU = torch.device("cpu")


def ask(layout: BlockLayout | None, batch: int, heads: int, dim: int = 64, *, deterministic: bool = False) -> bool:
    plan = [] if layout is None else list(layout.plan(CPU))
    return is_dq_separate(plan, (batch, heads, 16384, dim), dim, deterministic=deterministic)


def banded(n_tiles: int) -> BlockLayout:
    """So many tiles in every row."""
    row = torch.arange(128).repeat_interleave(n_tiles)
    col = (row + torch.arange(n_tiles).repeat(128)) % 128
    return BlockLayout.from_blocks(row.numpy(), col.numpy(), 16384, 16384, block_size=128)


@pytest.mark.parametrize(
    ("n_tiles", "batch", "dim", "expected"),
    [
        (2, 16, 64, True),
        (3, 16, 64, True),
        (2, 16, 40, True),
        (4, 16, 64, False),
        (2, 16, 128, False),
        (2, 1, 64, False),
    ],
)
def test_few_tiles_a_row_of_many_queries(n_tiles, batch, dim, expected):
    assert ask(banded(n_tiles), batch, 8, dim) == expected


def test_every_head_counts():
    layout = BlockLayout.stack_heads([banded(1), banded(3)])
    assert ask(layout, 64, 2)
    assert not ask(BlockLayout.stack_heads([banded(2), banded(6)]), 64, 2)


@pytest.mark.parametrize("layout", [None, masks.local(16384, window=2000)], ids=["dense", "local"])
def test_equal_bits_want_it_and_else_many_tiles_do_not(layout):
    assert ask(layout, 16, 8, deterministic=True)
    assert ask(layout, 16, 8, 128, deterministic=True)
    assert not ask(layout, 16, 8)
