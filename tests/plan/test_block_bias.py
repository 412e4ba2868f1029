"""BiasIndex maps cells of tiles to blocks and blocks to cells; compared with loops over cells and blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout
from blocksparse_flash.plan.block_bias import bias_cell_of, dense
from blocksparse_flash.plan_format import PARTIAL, TILE

SIZES: list[int | tuple[int, int]] = [16, 48, 64, 80, 128, 256, (32, 176)]


def some(block_size: Any, heads: int = 2, q_len: int = 300, kv_len: int = 270) -> BlockLayout:
    """Random full and partial blocks, different for each head."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(1, heads, -(-q_len // 40), -(-kv_len // 40), generator=draw) < 0.3
    mask = mask.repeat_interleave(40, dim=2).repeat_interleave(40, dim=3)[:, :, :q_len, :kv_len]
    return BlockLayout.from_dense(mask, block_size=block_size)


def blocks_of(layout: BlockLayout) -> dict[tuple[int, int, int], int]:
    """(axis, row, col) -> index of the stored block."""
    found = {}
    for axis, lead in enumerate(layout.indptr.reshape(-1, layout.n_rows + 1).tolist()):
        for row, (begin, end) in enumerate(itertools.pairwise(lead)):
            found |= {(axis, row, int(layout.indices[place])): place for place in range(begin, end)}
    return found


def tiles_of(items: Tensor, listed: Tensor) -> dict[int, tuple[int, int, int]]:
    """Place in a plan's list -> (axis, major, minor)."""
    found = {}
    for axis, records in enumerate(items.reshape(-1, *items.shape[2:]).tolist()):
        for major, begin, n_tiles, *_ in records:
            for place in range(begin, begin + n_tiles):
                found[place] = (axis, major, int(listed[place]) % PARTIAL)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", SIZES, ids=str)
def test_cells_and_blocks_find_each_other(block_size: Any, causal: bool) -> None:
    layout = some(block_size)
    plan, index = layout.plan("cpu", causal=causal), layout.bias_index("cpu", causal=causal)
    blocks, (block_q, block_kv) = blocks_of(layout), layout.block_size
    cell_q, cell_kv = bias_cell_of(layout.block_size)
    row_tiles = tiles_of(plan.row_records, plan.row_indices)
    col_tiles = {
        place: (axis, row, col) for place, (axis, col, row) in tiles_of(plan.col_records, plan.col_indices).items()
    }
    assert sorted(row_tiles.values()) == sorted(col_tiles.values()) and len(row_tiles) > 3
    cells_of: dict[int, set[int]] = {place: set() for place in blocks.values()}
    for tiles, found in ((row_tiles, index.rows), (col_tiles, index.cols)):
        assert tuple(found.shape[1:]) == (TILE // cell_q, TILE // cell_kv)
        for place, (axis, row, col) in tiles.items():
            for down, across in itertools.product(*map(range, found.shape[1:])):
                q_pos, kv_pos = row * TILE + down * cell_q, col * TILE + across * cell_kv
                block = blocks.get((axis, q_pos // block_q, kv_pos // block_kv), layout.nnz)
                if q_pos >= layout.q_len or kv_pos >= layout.kv_len:
                    block = layout.nnz
                assert found[place, down, across] == block
                if tiles is row_tiles and block < layout.nnz:
                    cells_of[block].add((place * found.shape[1] + down) * found.shape[2] + across)
    for block, places in cells_of.items():
        assert set(index.places[block].tolist()) - {index.rows.numel()} == places


@pytest.mark.parametrize("block_size", SIZES, ids=str)
def test_every_pair_has_the_number_of_its_block(block_size: Any) -> None:
    layout = some(block_size)
    blocks, (block_q, block_kv) = blocks_of(layout), layout.block_size
    numbers = torch.arange(1.0, layout.nnz + 1)
    sizes: dict[str, Any] = {"q_len": layout.q_len, "kv_len": layout.kv_len, "block_size": layout.block_size}
    found = dense(numbers[None, None], layout.indptr, layout.indices, **sizes)
    assert found.shape == layout.shape
    for head, q_pos, kv_pos in itertools.product(range(2), range(0, layout.q_len, 13), range(0, layout.kv_len, 13)):
        place = blocks.get((head, q_pos // block_q, kv_pos // block_kv))
        assert found[0, head, q_pos, kv_pos] == (0.0 if place is None else numbers[place])


def test_it_is_made_once_for_a_device_and_causality() -> None:
    layout = some(64)
    assert layout.bias_index("cpu") is layout.bias_index(torch.device("cpu"))
    assert layout.bias_index("cpu", causal=True) is not layout.bias_index("cpu")
