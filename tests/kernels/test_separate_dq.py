"""Which backwards of `hopper` compute dQ in a launch of its own."""

from __future__ import annotations

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.kernels.schedule import is_dq_separate

CPU = torch.device("cpu")


def is_separate(
    layout: BlockLayout | None, batch: int, heads: int, dim: int = 64, *, deterministic: bool = False
) -> bool:
    plan = [] if layout is None else list(layout.plan(CPU))
    return is_dq_separate(plan, (batch, heads, 16384, dim), dim, 132, deterministic=deterministic)


def banded(n_tiles: int) -> BlockLayout:
    """n_tiles tiles in every tile row."""
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
def test_dq_is_separate_for_few_tiles_per_row_and_many_rows(n_tiles, batch, dim, expected):
    assert is_separate(banded(n_tiles), batch, 8, dim) == expected


def test_the_mean_over_all_heads_decides():
    assert is_separate(BlockLayout.stack_heads([banded(1), banded(3)]), 64, 2)
    assert not is_separate(BlockLayout.stack_heads([banded(2), banded(6)]), 64, 2)


@pytest.mark.parametrize("layout", [None, masks.local(16384, window=2000)], ids=["dense", "local"])
def test_many_tiles_per_row_separate_dq_only_if_deterministic(layout):
    assert is_separate(layout, 16, 8, deterministic=True)
    assert is_separate(layout, 16, 8, 128, deterministic=True)
    assert not is_separate(layout, 16, 8)


@pytest.mark.parametrize(
    ("lengths", "density", "heads", "dim", "expected"),
    [
        ((65536, 4095), 0.5, 64, 128, True),
        ((16384, 1023), 0.5, 64, 128, True),
        ((16384, 1023), 0.5, 64, 64, False),
        # all sums fit into L2
        ((16384, 1023), 0.5, 8, 128, False),
        # columns of one head fill the GPU, and add to the sum of one head
        ((262144, 20000), 0.5, 1, 128, False),
        # 8 tiles per column
        ((65536, 4095), 1 / 64, 64, 128, False),
    ],
)
def test_dq_is_separate_for_few_long_tile_columns_of_many_queries(lengths, density, heads, dim, expected):
    layout = BlockLayout.from_block_mask(random_blocks(lengths, density), *lengths, block_size=128)
    plan = list(layout.plan(CPU))
    assert is_dq_separate(plan, (1, heads, lengths[0], dim), dim, 132, deterministic=False) == expected


def random_blocks(lengths: tuple[int, int], density: float) -> torch.Tensor:
    """As many in each column."""
    n_rows, n_cols = (-(-length // 128) for length in lengths)
    order = torch.rand(n_rows, n_cols, generator=torch.Generator().manual_seed(0)).argsort(0)
    return order < round(density * n_rows)


@pytest.mark.parametrize("lengths", [(0, 256), (256, 0), (0, 0)])
def test_without_queries_or_keys_dq_is_not_separate(lengths):
    plan = list(BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, *lengths, block_size=128).plan(CPU))
    assert not is_dq_separate(plan, (1, 64, lengths[0], 64), 64, 132, deterministic=False)
