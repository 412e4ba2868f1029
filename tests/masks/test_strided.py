"""masks.strided: exact in the window and far from it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, EDGE_GRIDS, EDGES, GRIDS, assert_attends, both


def attends(distance: int, stride: int, causal: bool) -> bool:
    return (abs(distance) < stride or distance % stride == 0) and (distance >= 0 or not causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# every pair; below a block; not dividing a block; near one and two blocks; beyond the length
@pytest.mark.parametrize("stride", [1, 2, 7, 16, 31, 32, 33, 48, 50, 96, 97, 128, 1000])
def test_double_loop(length, block_size, stride, causal):
    q_len, kv_len = length
    layout = masks.strided(length, stride=stride, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos + kv_len - q_len - kv_pos, stride, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size"), EDGE_GRIDS)
@pytest.mark.parametrize("stride", EDGES)
def test_strides_about_the_edges_of_blocks(length, block_size, stride, causal):
    layout = masks.strided(length, stride=stride, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos - kv_pos, stride, causal))


@given(grid=ANY_GRID, stride=st.integers(1, 170), causal=st.booleans())
@settings(deadline=None, max_examples=40)
def test_any_stride_on_any_grid(grid, stride, causal):
    q_len, kv_len = both(grid[0])
    layout = masks.strided(grid[0], stride=stride, causal=causal, block_size=grid[1])
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos + kv_len - q_len - kv_pos, stride, causal))


def test_closed_form_counts():
    # blocks of 128, stride 512: |row - col| <= 4 from the window; beyond it a multiple of 4 blocks away, and one block
    # more on either side, because a diagonal that starts in a corner is met by one block only: row - col = 4 m
    n_blocks = 64
    wanted = [
        (row, col) for row in range(n_blocks) for col in range(n_blocks) if abs(row - col) <= 4 or (row - col) % 4 == 0
    ]
    assert masks.strided(8192, stride=512).nnz == len(wanted)
    causal = masks.strided(8192, stride=512, causal=True)
    assert causal.nnz == sum(row >= col for row, col in wanted)
    # the diagonal, the far end of the window, the far diagonals
    assert len(causal.bitmasks) == 3


def test_causal_is_the_causal_half():
    whole = masks.strided((300, 500), stride=70, block_size=32)
    assert masks.strided((300, 500), stride=70, causal=True, block_size=32) == whole & masks.causal(
        (300, 500), block_size=32
    )


def test_stride_one_attends_to_everything():
    assert masks.strided(1000, stride=1).density == 1.0
    assert masks.strided(1000, stride=1, causal=True) == masks.causal(1000)


def test_a_stride_beyond_the_length_attends_to_everything():
    assert masks.strided((100, 300), stride=10**30).density == 1.0
    assert masks.strided((100, 300), stride=10**30, causal=True) == masks.causal((100, 300))


def test_nothing_has_no_blocks():
    assert masks.strided(0, stride=4).nnz == 0
    assert masks.strided((100, 0), stride=1000).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride: .* at least 1, got 0"),
        ({"stride": -3}, ValueError, "stride: .* got -3"),
        ({"stride": 2.0}, TypeError, "stride: .* got 2.0"),
        ({"stride": True}, TypeError, "stride: .* got True"),
        ({"stride": 4, "causal": 1}, TypeError, r"causal: expected a bool, got 1 \(int\)"),
        ({"stride": 4, "causal": None}, TypeError, "causal: .* got None"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.strided(256, **arguments)
