"""masks.dilated_window: exact for the dilation of each head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, EDGE_GRIDS, EDGES, GRIDS, assert_attends, assert_heads_attend, both


def attends(distance: int, window: int, dilation: int, causal: bool) -> bool:
    return any(distance == step * dilation for step in range(0 if causal else -window, window + 1))


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# diagonal; no gaps; gaps below a block, not dividing one, near one block, several blocks; beyond the length
@pytest.mark.parametrize(
    ("window", "dilation"), [(0, 3), (20, 1), (5, 3), (1, 16), (3, 31), (2, 48), (1, 97), (2, 130), (1, 999)]
)
def test_double_loop(length, block_size, window, dilation, causal):
    shift = length[1] - length[0]
    layout = masks.dilated_window(length, window=window, dilation=dilation, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q + shift - kv, window, dilation, causal))


@pytest.mark.parametrize(("length", "block_size"), EDGE_GRIDS)
@pytest.mark.parametrize("window", EDGES)
def test_windows_about_the_edges_of_blocks(length, block_size, window):
    layout = masks.dilated_window(length, window=window, dilation=1, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: abs(q_pos - kv_pos) <= window)


@given(
    grid=ANY_GRID,
    window=st.integers(0, 12),
    dilations=st.lists(st.integers(1, 40) | st.integers(1, 200), min_size=1, max_size=4),
    causal=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_any_heads_on_any_grid(grid, window, dilations, causal):
    length, block_size = grid
    q_len, kv_len = both(length)
    layout = masks.dilated_window(length, window=window, dilation=dilations, causal=causal, block_size=block_size)
    sentences = [
        lambda q, kv, dilation=dilation: attends(q + kv_len - q_len - kv, window, dilation, causal)
        for dilation in dilations
    ]
    assert_heads_attend(layout, sentences)


def test_no_gaps_is_a_window():
    assert masks.dilated_window((300, 500), window=70, dilation=1) == masks.local((300, 500), window=70)
    assert masks.dilated_window(300, window=70, dilation=1, causal=True) == masks.local(300, window=(70, 0))


def test_sequences_arrays_and_tensors_are_alike():
    layouts = [
        masks.dilated_window(300, window=3, dilation=given)
        for given in ([1, 40], (1, 40), np.array([1, 40]), torch.tensor([1, 40]))
    ]
    assert len(set(layouts)) == 1
    assert layouts[0].shape == (1, 2, 300, 300)


def test_wide_gaps_skip_blocks():
    # 512 blocks; 2 blocks of gaps skip one on either side
    assert masks.dilated_window(65536, window=1, dilation=256).nnz == 512 + 2 * 510
    assert len(masks.dilated_window(65536, window=1, dilation=256).bitmasks) == 1


def test_numbers_beyond_the_length():
    assert masks.dilated_window(300, window=10**30, dilation=1).density == 1.0
    assert masks.dilated_window(300, window=1, dilation=10**30) == masks.local(300, window=0)
    assert masks.dilated_window(300, window=10**30, dilation=10**30) == masks.local(300, window=0)
    assert masks.dilated_window(0, window=1, dilation=2).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": -1}, ValueError, "window: .* at least 0, got -1"),
        ({"window": (1, 2)}, TypeError, "window: .* got"),
        ({"dilation": 0}, ValueError, "dilation: .* at least 1, got 0"),
        ({"dilation": [1, -2]}, ValueError, "dilation: .* at least 1, got -2"),
        ({"dilation": []}, ValueError, "dilation: .* got none"),
        ({"dilation": 1.5}, TypeError, "dilation: .* got 1.5"),
        ({"dilation": [1, 1.5]}, TypeError, "dilation: .* got 1.5"),
        ({"causal": 0}, TypeError, "causal: .* got 0"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.dilated_window(256, **{"window": 2, "dilation": 3, **arguments})
