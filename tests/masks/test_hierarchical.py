"""masks.hierarchical: cells nearby are whole, siblings farther away are summaries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, both


def attends(q_pos: int, kv_pos: int, size: int, levels: int, unit: int) -> bool:
    """Go up until both are in one cell: one level below, their cells are siblings."""
    if q_pos < 0:
        return False
    q_cell, kv_cell, level = q_pos // size, kv_pos // size, 0
    if q_cell == kv_cell:
        return True
    while q_cell // 2 != kv_cell // 2:
        q_cell, kv_cell, level = q_cell // 2, kv_cell // 2, level + 1
    if level == 0:
        return True
    period = unit * 2**level
    return level < levels and kv_pos % period in range(period - unit, period)


def all_levels(size: int, kv_len: int) -> int:
    return max(1, math.ceil(math.log2(math.ceil(kv_len / size)))) if kv_len else 1


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
@pytest.mark.parametrize(("size", "unit"), [(1, 1), (5, 1), (16, 16), (16, 4), (30, 10), (48, 48), (100, 50)])
def test_double_loop(length, block_size, size, unit):
    shift = length[1] - length[0]
    for levels in {1, all_levels(size, length[1])}:
        layout = masks.hierarchical(length, size=size, levels=levels, unit=unit, block_size=block_size)
        assert_attends(layout, lambda q, kv, levels=levels: attends(q + shift, kv, size, levels, unit))


# shifts with which the diagonal masks one pair of a block, or none
@pytest.mark.parametrize("length", [(50, 64), (49, 64)])
@pytest.mark.parametrize(("size", "unit"), [(5, 1), (16, 4), (48, 48)])
def test_causal_about_the_edges_of_blocks(length, size, unit):
    shift, levels = length[1] - length[0], all_levels(size, length[1])
    layout = masks.hierarchical(length, size=size, unit=unit, causal=True, block_size=16)
    assert_attends(layout, lambda q, kv: attends(q + shift, kv, size, levels, unit) and kv <= q + shift)


@given(grid=ANY_GRID, size=st.integers(1, 12) | st.integers(1, 130), causal=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_hierarchy_on_any_grid(grid, size, causal, data):
    length, block_size = grid
    q_len, kv_len = both(length)
    levels = data.draw(st.none() | st.integers(1, all_levels(size, kv_len)), label="levels")
    unit = data.draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]), label="unit")
    layout = masks.hierarchical(length, size=size, levels=levels, unit=unit, causal=causal, block_size=block_size)
    kept = all_levels(size, kv_len) if levels is None else levels
    shift = kv_len - q_len
    assert_attends(layout, lambda q, kv: attends(q + shift, kv, size, kept, unit) and (kv <= q + shift or not causal))


def test_a_row_grows_with_the_logarithm():
    # own cell and sibling, and one block for each of the 8 levels above
    layout = masks.hierarchical(65536, size=128)
    assert (layout.indptr.diff() == 2 + 8).all()
    assert len(layout.bitmasks) == 0
    # equally many keys per row for every unit
    dense = masks.hierarchical(1024, size=16, unit=4).to_dense()
    assert (dense.sum(-1) == 2 * 16 + 5 * 16).all()


def test_one_level_is_block_diagonal():
    for causal in (False, True):
        layout = masks.hierarchical(1000, size=50, levels=1, causal=causal)
        assert layout == masks.block_diagonal(1000, size=100, causal=causal)
    assert masks.hierarchical(1000, size=10**30).density == 1.0


def test_without_queries_or_keys_there_are_no_blocks():
    for length in (0, (9, 0), (0, 9), (0, 300)):
        assert masks.hierarchical(length, size=4).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size: .* at least 1, got 0"),
        ({"size": 16.0}, TypeError, "size: .* got 16.0"),
        ({"levels": 0}, ValueError, "levels: .* from 1 to 4, got 0"),
        ({"levels": 5}, ValueError, "levels: .* from 1 to 4, got 5"),
        ({"unit": 3}, ValueError, "unit: expected a divisor of size, 16 tokens, got 3"),
        ({"unit": 17}, ValueError, "unit: .* from 1 to 16, got 17"),
        ({"causal": 1}, TypeError, "causal: .* got 1"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.hierarchical(256, **{"size": 16, **arguments})
