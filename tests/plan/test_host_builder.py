"""Plans built on the host list the tiles of a mask as Plan documents; compared with a loop over the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.block_list import Frame
from blocksparse_flash.plan.host_builder import count_long, long_of, order_of
from blocksparse_flash.plan_format import FINE_TILE, N_LONG, N_PARTIAL, PARTIAL, SPLIT_SHARE, TILE, Plan
from tests.support import cases


def drawn(seed: int, axes: tuple[int, int], q_len: int, kv_len: int) -> np.ndarray:
    """bool (batch, heads, q_len, kv_len) with empty, full and partial tiles; sometimes a global query and key."""
    random = np.random.default_rng(seed)
    grid = -(-q_len // 64), -(-kv_len // 32)
    coarse = random.random((*axes, -(-q_len // TILE), -(-kv_len // TILE))) < random.random()
    mask = coarse.repeat(TILE, axis=2).repeat(TILE, axis=3)[:, :, :q_len, :kv_len]
    holes = (random.random((*axes, *grid)) < 0.1).repeat(64, axis=2).repeat(32, axis=3)
    mask = mask ^ holes[:, :, :q_len, :kv_len]
    if random.random() < 0.5:
        mask[-1, -1, q_len // 2], mask[-1, -1, :, kv_len // 2] = True, True
    return mask


def tiles_of(mask: np.ndarray, side: int) -> dict[tuple[int, int], np.ndarray]:
    """(row, col) -> side x side pairs of each tile that is not empty; pairs past the end are False."""
    q_len, kv_len = mask.shape
    padded = np.zeros((-(-q_len // side) * side, -(-kv_len // side) * side), bool)
    padded[:q_len, :kv_len] = mask
    found = {}
    for row in range(len(padded) // side):
        for col in range(padded.shape[1] // side):
            tile = padded[row * side : (row + 1) * side, col * side : (col + 1) * side]
            if tile.any():
                found[row, col] = tile
    return found


def check_side(
    plan: Plan, masks: np.ndarray, *, of_rows: bool, capacity: int | None = None, is_sorted: bool = True
) -> None:
    """Checks one direction of a plan against masks (batch, heads, q_len, kv_len).

    capacity   room of every list, if they do not follow each other; such plans know no long lines
    is_sorted  whether the longest lines come first in the launch order, else all in the order of tokens
    """
    records_of, indices, ids = (tensor.numpy() for tensor in (plan[:3] if of_rows else plan[3:6]))
    side = plan.tile
    assert plan.bitmasks.shape[1:] == (side, side // 32)
    words = np.unpackbits(plan.bitmasks.numpy().view(np.uint8), axis=-1, bitorder="little").astype(bool)
    axes = [tiles_of(mask, side) for mask in masks.reshape(-1, *masks.shape[2:])]
    n_lines = -(-masks.shape[2 if of_rows else 3] // side)
    counts = np.array([[sum(key[not of_rows] == line for key in tiles) for line in range(n_lines)] for tiles in axes])
    over = counts * counts.size > 2 * counts.sum()
    is_long = over & (counts * SPLIT_SHARE > counts.sum(1, keepdims=True))
    begin = 0
    for i_axis, (tiles, work) in enumerate(zip(axes, counts, strict=True)):
        records = records_of.reshape(len(axes), n_lines, 8)[i_axis]
        # longest first; ties keep their order
        assert records[:, 0].tolist() == sorted(range(n_lines), key=lambda line: (-work[line] * is_sorted, line))
        for line in range(n_lines):
            if capacity is not None:
                begin = (i_axis * n_lines + line) * capacity
                assert work[line] <= capacity
                # kernels read one entry ahead
                assert work[line] == capacity or indices[begin + work[line]] == 0 == ids[begin + work[line]]
            position = records[line, 4]
            number, first, n_tiles, n_partial, _, n_long, *rest = records[position].tolist()
            assert (number, first, n_tiles, rest) == (line, begin, work[line], [0, 0])
            # never all lines
            assert n_long == min(over.sum(1).max(), n_lines - 1) * is_sorted
            listed = indices[first : first + n_tiles]
            minors = (listed & (PARTIAL - 1)).tolist()
            for entries in (minors[:n_partial], minors[n_partial:]):
                assert sorted(entries) == entries
            found = {}
            for i_entry, minor in enumerate(minors):
                assert (listed[i_entry] < 0) == (i_entry < n_partial)
                tile = words[ids[first + i_entry]] if i_entry < n_partial else np.ones((side, side), bool)
                assert i_entry < n_partial or ids[first + i_entry] == 0
                if i_entry < n_partial:
                    assert listed[i_entry] == minor - PARTIAL
                    if side == TILE:
                        # kernels that only test the sign multiply by TILE in 32 bits
                        assert int(listed[i_entry]) * TILE % 2**32 == 2**31 + minor * TILE
                found[(line, minor) if of_rows else (minor, line)] = tile
            expected = {key: tile for key, tile in tiles.items() if key[not of_rows] == line}
            assert found.keys() == expected.keys()
            for key, tile in found.items():
                assert np.array_equal(tile, expected[key]) and tile.all() == (key[of_rows] in minors[n_partial:])
            begin += n_tiles
    if capacity is not None:
        begin, is_long = capacity * n_lines * len(axes), np.zeros_like(is_long)
    assert len(indices) % 8 == 1 and len(indices) > begin and not indices[begin:].any() and not ids[begin:].any()
    # a causal call has pairs in tiles whose first key is at or before the position of their last query
    ahead = masks.shape[3] - masks.shape[2]
    is_lower = all(col * side < (row + 1) * side + ahead for tiles in axes for row, col in tiles) and capacity is None
    assert plan.is_lower_triangular == is_lower
    assert len(ids) == len(indices) + 8 * (is_long.sum(1).max() + SPLIT_SHARE * is_lower) + (2 if of_rows else 4)
    assert (plan.n_split_rows if of_rows else plan.n_split_cols) == is_long.sum(1).max()


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    st.sampled_from([100, 128, 576, 640, 700]),
    st.sampled_from([100, 192, 384, 1000]),
    st.sampled_from([128, 64, (32, 256)]),
    st.sampled_from([TILE, FINE_TILE]),
)
def test_both_directions_list_the_tiles_of_the_mask(
    seed: int, axes: tuple[int, int], q_len: int, kv_len: int, block_size: int | tuple[int, int], tile: int
) -> None:
    masks = drawn(seed, axes, q_len, kv_len)
    plan = BlockLayout.from_dense(masks, block_size=block_size).plan("cpu", tile=tile)
    assert plan.tile == tile
    check_side(plan, masks, of_rows=True)
    check_side(plan, masks, of_rows=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_plans_of_the_zoo_list_the_tiles_of_the_mask(case: cases.Case, tile: int, causal: bool) -> None:
    layout = case.build()
    masks = layout.to_dense().numpy()
    if causal:
        masks = masks & np.tri(layout.q_len, layout.kv_len, layout.kv_len - layout.q_len, dtype=bool)
    plan = layout.plan("cpu", causal=causal, tile=tile)
    assert plan.tile == tile
    check_side(plan, masks, of_rows=True)
    check_side(plan, masks, of_rows=False)


def test_tiles_are_full_where_they_end_with_the_sequence() -> None:
    """192 x 320 tokens are 3 x 5 whole tiles of 64 x 64; those of 128 x 128 are ragged on both edges."""
    layout = BlockLayout.from_ranges([0] * 3, [5] * 3, 192, 320, block_size=64)
    for tile, n_partial in ((FINE_TILE, [0, 0, 0]), (TILE, [1, 3])):
        plan = layout.plan("cpu", tile=tile)
        assert plan.row_records[0, 0, :, N_PARTIAL].tolist() == n_partial
        check_side(plan, np.ones((1, 1, 192, 320), bool), of_rows=True)
        check_side(plan, np.ones((1, 1, 192, 320), bool), of_rows=False)


@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
@pytest.mark.parametrize("causal", [False, True])
def test_full_tiles_with_a_long_tile_row_and_column(causal: bool, tile: int) -> None:
    """Only the diagonal makes tiles partial; one row and one column of one head are worth splitting."""
    blocks = torch.rand((1, 2, 10, 12), generator=torch.Generator().manual_seed(0)) < 0.1
    blocks[0, 1, 3] = blocks[0, 1, :, 5] = True
    layout = BlockLayout.from_block_mask(blocks, 10 * TILE, 12 * TILE, block_size=TILE)
    masks = layout.to_dense().numpy()
    if causal:
        masks = masks & np.tri(10 * TILE, 12 * TILE, 2 * TILE, dtype=bool)
    plan = layout.plan("cpu", causal=causal, tile=tile)
    assert plan.row_records[0, 0, 0, N_LONG] > 0
    check_side(plan, masks, of_rows=True)
    check_side(plan, masks, of_rows=False)


def test_a_tile_row_of_twice_the_mean_is_notlong_of() -> None:
    assert long_of(np.array([[2, 0, 1, 1]]), 4) == (0, 0)
    assert long_of(np.array([[3, 0, 0, 1], [2, 2, 0, 0]]), 8) == (1, 1)
    assert long_of(np.zeros((1, 0), int), 0) == (0, 0)
    # every tile row of the first head is long; one is not counted
    assert long_of(np.array([[1, 1], [0, 0], [0, 0]]), 2) == (1, 2)


def test_tile_rows_can_be_long_in_a_grid_with_few_columns() -> None:
    """The mean is smaller for rows than for columns: a short column does not prove that no row is long."""
    frame = Frame(1, 1, 16 * TILE, 2 * TILE, (TILE, TILE))
    row_counts, col_counts = [2, 1, *[0] * 14], [2, 1]
    assert count_long(np.array(row_counts + col_counts), 3, frame) == (2, ((2, 2), (0, 0)))
    assert count_long(np.array([1] * 16 + [8, 8]), 16, frame) == (8, ((0, 0), (0, 0)))


@pytest.mark.parametrize("limit", [1, 2**16, 2**16 + 1, 2**20, 2**40])
def test_order_is_stable_for_any_limit(limit: int) -> None:
    """With many heads, ranks take more than 16 bits."""
    random = np.random.default_rng(0)
    values = np.append(random.integers(0, limit, 500), limit - 1).repeat(2)
    random.shuffle(values)
    assert order_of(values, limit).tolist() == np.argsort(values, kind="stable").tolist()


def test_a_loaded_layout_has_the_same_plan() -> None:
    """A constructor keeps its arrays for the plan; a loaded layout has only tensors."""
    made = BlockLayout.from_blocks([0, 1, 1], [3, 0, 1], 300, 512, block_size=TILE)
    loaded = BlockLayout.from_state_dict(made.state_dict())
    assert made._cache["rows"] is not None and loaded._cache["rows"] is None
    for tile in (TILE, FINE_TILE):
        assert all(map(torch.equal, loaded.plan("cpu", tile=tile), made.plan("cpu", tile=tile)))
