"""masks.sink_window, a_shape and tri_shape: sinks, the recent window and the last queries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, EDGE_GRIDS, EDGES, GRIDS, assert_attends, both


def attends(q_pos: int, kv_pos: int, lengths: tuple[int, int], sinks: int, window: int, last: int = 0) -> bool:
    q_len, kv_len = lengths
    distance = q_pos + kv_len - q_len - kv_pos
    return distance >= 0 and (kv_pos < sinks or distance < window or q_pos >= q_len - last)


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# nothing; one part alone; less than a block; about a block; more than the length
@pytest.mark.parametrize(
    ("sinks", "window"), [(0, 0), (0, 1), (3, 0), (4, 20), (48, 48), (16, 65), (70, 3), (999, 1), (1, 999)]
)
def test_sink_window_double_loop(length, block_size, sinks, window):
    layout = masks.sink_window(length, sinks=sinks, window=window, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, length, sinks, window))


@pytest.mark.parametrize(("length", "block_size"), EDGE_GRIDS)
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("kind", ["sinks", "window", "last"])
def test_parts_that_end_about_the_edges_of_blocks(length, block_size, edge, kind):
    """Edges that mask a single pair, row or column of a block."""
    sizes = {"sinks": 3, "window": 5, "last": 0, kind: edge if kind != "last" else max(0, length - edge)}
    layout = masks.tri_shape(length, **sizes, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, (length, length), **sizes))


@given(grid=ANY_GRID, sinks=st.integers(0, 80), window=st.integers(0, 200), last=st.integers(0, 120))
@settings(deadline=None, max_examples=40)
def test_any_tri_shape_on_any_grid(grid, sinks, window, last):
    length, block_size = grid
    layout = masks.tri_shape(length, sinks=sinks, window=window, last=last, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, both(length), sinks, window, last))


@given(grid=ANY_GRID, sinks=st.integers(0, 80), window=st.integers(0, 200))
@settings(deadline=None, max_examples=25)
def test_any_sink_window_is_sinks_and_a_causal_window(grid, sinks, window):
    length, block_size = grid
    layout = masks.sink_window(length, sinks=sinks, window=window, block_size=block_size)
    assert layout == masks.tri_shape(length, sinks=sinks, window=window, last=0, block_size=block_size)
    assert layout == masks.a_shape(length, sinks=sinks, window=window, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, both(length), sinks, window))


def test_the_window_counts_the_token_itself():
    assert masks.sink_window(1000, sinks=0, window=300) == masks.local(1000, window=(299, 0))


def test_the_shapes_of_minference_have_its_sizes():
    assert masks.a_shape(8192) == masks.sink_window(8192, sinks=128, window=3968)
    # every query beyond the first 4,096 sees as many keys
    assert (masks.a_shape(5000).to_dense().sum(-1)[0, 0, 4096:] == 4096).all()
    triangle = masks.tri_shape(5000)
    assert triangle & masks.a_shape(5000) == masks.a_shape(5000)
    assert (triangle.to_dense()[0, 0, -100:].sum(-1) == masks.causal(5000).to_dense()[0, 0, -100:].sum(-1)).all()
    assert not (triangle - masks.a_shape(5000)).to_dense()[0, 0, :-100].any()


def test_a_sink_window_needs_few_bitmasks():
    # the diagonal, the far edge of the window, the sinks, and where the far edge meets the sinks
    assert len(masks.sink_window(65536, sinks=4, window=512).bitmasks) <= 4


def test_sizes_beyond_the_length_are_causal():
    for sizes in ({"sinks": 10**30, "window": 0}, {"sinks": 0, "window": 10**30}):
        assert masks.sink_window((100, 300), **sizes) == masks.causal((100, 300))
    assert masks.tri_shape(300, sinks=0, window=0, last=10**30) == masks.causal(300)
    assert masks.sink_window(300, sinks=0, window=0).nnz == 0
    assert masks.tri_shape(0).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sinks": -1}, ValueError, "sinks: .* at least 0, got -1"),
        ({"window": -2}, ValueError, "window: .* at least 0, got -2"),
        ({"last": -3}, ValueError, "last: .* at least 0, got -3"),
        ({"sinks": 1.5}, TypeError, "sinks: .* got 1.5"),
        ({"window": (3, 0)}, TypeError, r"window: .* got \(3, 0\)"),
        ({"last": None}, TypeError, "last: .* got None"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.tri_shape(256, **arguments)
    if "last" not in arguments:
        with pytest.raises(error, match=message):
            masks.sink_window(256, **{"sinks": 1, "window": 1, **arguments})
        with pytest.raises(error, match=message):
            masks.a_shape(256, **arguments)
