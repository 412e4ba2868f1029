"""masks.local and causal: exact at every edge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from blocksparse_flash import BlockLayout
from masks.local import past_of
from tests.support.double_loop import ANY_GRID, EDGE_GRIDS, EDGES, GRIDS, assert_attends, both

# the diagonal; less than a block; a block's side and its neighbors; more than any length; one-sided; skewed
WINDOWS = [0, 1, 15, 16, 47, 48, 49, 64, 1000, (5, 0), (0, 70), (33, 3), (None, 0), (10, None), (None, None)]


def attends(distance: int, window: int | tuple[int | None, int | None]) -> bool:
    left, right = window if isinstance(window, tuple) else (window, window)
    return (left is None or distance <= left) and (right is None or -distance <= right)


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_local_double_loop(length, block_size, window):
    q_len, kv_len = length
    layout = masks.local(length, window=window, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos + kv_len - q_len - kv_pos, window))


@pytest.mark.parametrize(("length", "block_size"), EDGE_GRIDS)
@pytest.mark.parametrize("side", EDGES)
@pytest.mark.parametrize("kind", ["both", "left", "right"])
def test_windows_about_the_edges_of_blocks(length, block_size, side, kind):
    """The largest distances within blocks are 16 k - 1, so a window of 16 k - 2 masks one pair of a block."""
    window = {"both": (side, side), "left": (side, 0), "right": (0, side)}[kind]
    layout = masks.local(length, window=window, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos - kv_pos, window))


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
def test_causal_double_loop(length, block_size):
    q_len, kv_len = length
    layout = masks.causal(length, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: kv_pos <= q_pos + kv_len - q_len)
    assert layout == masks.local(length, window=(None, 0), block_size=block_size)


@given(grid=ANY_GRID, left=st.none() | st.integers(0, 200), right=st.none() | st.integers(0, 200))
@settings(deadline=None, max_examples=40)
def test_any_window_on_any_grid(grid, left, right):
    (q_len, kv_len), block_size = both(grid[0]), both(grid[1])
    layout = masks.local(grid[0], window=(left, right), block_size=grid[1])
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos + kv_len - q_len - kv_pos, (left, right)))
    # left and right swap in the transpose
    assert layout.T == masks.local((kv_len, q_len), window=(right, left), block_size=block_size[::-1])


@given(grid=ANY_GRID)
@settings(deadline=None, max_examples=25)
def test_causal_on_any_grid(grid):
    q_len, kv_len = both(grid[0])
    layout = masks.causal(grid[0], block_size=grid[1])
    assert_attends(layout, lambda q_pos, kv_pos: kv_pos <= q_pos + kv_len - q_len)


def test_a_window_has_two_distinct_bitmasks_and_causal_one():
    # whole blocks, a window of whole blocks: one block is cut by the left edge, one by the right edge
    assert len(masks.local(65536, window=512).bitmasks) == 2
    assert len(masks.causal(65536).bitmasks) == 1


def test_closed_form_counts():
    # 64 blocks, each with 4 on either side, less those beyond the 2 ends
    assert masks.local(8192, window=512).nnz == 64 * 9 - 2 * (1 + 2 + 3 + 4)
    assert masks.local(8192, window=0).nnz == 64
    assert masks.causal(8192).nnz == 64 * 65 // 2
    assert masks.local(8192, window=(None, None)).density == 1.0


def test_a_window_beyond_the_length_attends_to_everything():
    assert masks.local((100, 300), window=10**30).density == 1.0


def test_a_block_that_the_window_covers_is_full():
    layout = masks.local(1024, window=255, block_size=128)
    # distances in the diagonal block and in its neighbors are at most 255
    assert (layout.bitmask_ids == -1).sum() == 8 + 7 + 7


def test_queries_before_the_first_key_attend_to_nothing():
    layout = masks.causal((300, 100), block_size=64)
    assert not layout.to_dense()[0, 0, :200].any()
    assert layout.to_dense()[0, 0, 200, 0]


def test_nothing_has_no_blocks():
    assert masks.local(0, window=1).nnz == 0
    assert masks.causal((0, 64)).nnz == 0
    assert masks.causal((64, 0)).nnz == 0


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (-1, ValueError, "window: .* at least 0, got -1"),
        ((3, -2), ValueError, "window: .* at least 0, got -2"),
        ((1, 2, 3), ValueError, "window: .* got 3 entries"),
        (None, TypeError, "window: expected an int .* got NoneType"),
        (1.5, TypeError, "window: .* got 1.5"),
        ((1, 2.0), TypeError, "window: .* got 2.0"),
        (True, TypeError, "window: .* got True"),
        ("3", TypeError, "window: .* got '3'"),
    ],
)
def test_refused_window(window, error, message):
    with pytest.raises(error, match=message):
        masks.local(256, window=window)


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
def test_the_past_of_a_layout_is_what_causal_leaves(length, block_size):
    q_len, kv_len = length
    generator = torch.Generator().manual_seed(q_len)
    layout = BlockLayout.from_dense(torch.rand(2, 3, q_len, kv_len, generator=generator) < 0.7, block_size=block_size)
    assert past_of(layout) == layout & masks.causal(length, block_size=block_size)
