"""masks.block_diagonal and block_causal: any chunk size, at any edge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, both

# single tokens; less than a block; no divisor of one; about a block; several blocks; more than any length
SIZES = [1, 5, 16, 31, 48, 64, 65, 100, 128, 1000]


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
@pytest.mark.parametrize("size", SIZES)
def test_double_loop(length, block_size, size):
    shift = length[1] - length[0]
    layout = masks.block_diagonal(length, size=size, block_size=block_size)
    assert_attends(layout, lambda q, kv: (q + shift) // size == kv // size)
    layout = masks.block_diagonal(length, size=size, causal=True, block_size=block_size)
    assert_attends(layout, lambda q, kv: (q + shift) // size == kv // size and kv <= q + shift)
    layout = masks.block_causal(length, size=size, block_size=block_size)
    assert_attends(layout, lambda q, kv: kv // size <= (q + shift) // size)


@given(grid=ANY_GRID, size=st.integers(1, 200), causal=st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_block_diagonal_on_any_grid(grid, size, causal):
    length, block_size = grid
    q_len, kv_len = both(length)
    layout = masks.block_diagonal(length, size=size, causal=causal, block_size=block_size)

    def attends(q_pos: int, kv_pos: int) -> bool:
        q_pos += kv_len - q_len
        return q_pos // size == kv_pos // size and (kv_pos <= q_pos or not causal)

    assert_attends(layout, attends)


@given(grid=ANY_GRID, size=st.integers(1, 200))
@settings(deadline=None, max_examples=30)
def test_any_block_causal_on_any_grid(grid, size):
    length, block_size = grid
    q_len, kv_len = both(length)
    layout = masks.block_causal(length, size=size, block_size=block_size)
    assert_attends(layout, lambda q, kv: kv // size <= (q + kv_len - q_len) // size)


def test_chunks_are_documents_of_one_size():
    bounds = np.append(np.arange(0, 1000, 300), 1000)
    for causal in (False, True):
        layout = masks.block_diagonal(1000, size=300, causal=causal, block_size=64)
        assert layout == masks.documents(bounds, causal=causal, block_size=64)


def test_chunks_of_one_token_and_of_everything():
    assert masks.block_causal((100, 300), size=1) == masks.causal((100, 300))
    assert masks.block_diagonal(1000, size=1) == masks.local(1000, window=0)
    assert masks.block_diagonal(1000, size=10**30).density == 1.0
    assert masks.block_diagonal(1000, size=10**30, causal=True) == masks.causal(1000)
    assert masks.block_causal(1000, size=10**30).density == 1.0
    assert masks.block_causal(0, size=3).nnz == masks.block_diagonal((5, 0), size=3).nnz == 0


def test_whole_blocks_need_no_bitmasks():
    assert len(masks.block_diagonal(8192, size=1024).bitmasks) == 0
    assert masks.block_diagonal(8192, size=1024).nnz == 8 * 8 * 8
    assert len(masks.block_causal(8192, size=1024).bitmasks) == 0
    assert masks.block_causal(8192, size=1024).nnz == 8 * 8 * 8 * 9 // 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "size: .* at least 1, got 0"),
        ({"size": -1}, ValueError, "size: .* at least 1, got -1"),
        ({"size": 2.0}, TypeError, "size: .* got 2.0"),
        ({"size": 4, "causal": 1}, TypeError, "causal: expected a bool, got 1"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.block_diagonal(256, **arguments)
    if "causal" not in arguments:
        with pytest.raises(error, match=message):
            masks.block_causal(256, **arguments)
