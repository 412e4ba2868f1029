"""masks/grid.py: exact on grids of one to three axes, in any order of the tokens."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import assert_attends

SIDES = st.sampled_from([16, 48, 64, 128])
BLOCK_SIZES = SIDES | st.tuples(SIDES, SIDES)
# a line; a square; frames; sides that divide nothing, one long and one short
GRIDS = st.one_of(
    st.tuples(st.integers(1, 250)),
    st.tuples(st.integers(1, 17), st.integers(1, 17)),
    st.tuples(st.integers(1, 4), st.integers(1, 70)),
    st.tuples(st.integers(1, 70), st.integers(1, 4)),
    st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
)


def draw_order(data: st.DataObject, grid: tuple[int, ...]) -> torch.Tensor | np.ndarray | None:
    """Token orders: mostly row-major, then the orders of the package, then a random permutation."""
    kind = data.draw(st.sampled_from(["row-major"] * 3 + ["tiles", "morton", "hilbert", "shuffled"]), label="order")
    if kind == "row-major":
        return None
    if kind == "tiles":
        return masks.tile_order(grid, tile=data.draw(st.tuples(*(st.integers(1, 5) for _ in grid)), label="tile"))
    if kind == "shuffled":
        return np.random.default_rng(data.draw(st.integers(0, 99), label="seed")).permutation(math.prod(grid))
    return masks.morton_order(grid) if kind == "morton" else masks.hilbert_order(grid)


def assert_sees(layout, grid, order, seen_from):
    """Raises unless the layout holds the pairs whose key is among seen_from(axis, query's coordinate) on all axes."""
    coordinates = list(itertools.product(*(range(side) for side in grid)))
    if order is not None:
        coordinates = [coordinates[token] for token in order.tolist()]
    seen = [[set(seen_from(axis, q)) for q in range(side)] for axis, side in enumerate(grid)]

    def attends(q_pos: int, kv_pos: int) -> bool:
        pairs = zip(coordinates[q_pos], coordinates[kv_pos], strict=True)
        return all(kv in seen[axis][q] for axis, (q, kv) in enumerate(pairs))

    assert_attends(layout, attends)


def neighbors(x: int, side: int, kernel: int, dilation: int, stride: int, causal: bool) -> list[int]:
    """The definition for one token along one axis, step by step."""
    group = [other for other in range(side) if other % dilation == x % dilation]
    place = group.index(x)
    members = [other for other in range(len(group)) if other // stride == place // stride]
    # an incomplete group has the leader of a complete one, or the last token
    leader = members[0] + (stride - 1 if causal else stride // 2)
    leader = min(leader, len(group) - 1)
    if causal:
        return [group[other] for other in range(place + 1) if leader - other < kernel]
    begin = leader - kernel // 2
    while begin < 0:
        begin += 1
    while begin + kernel > len(group):
        begin -= 1
    return group[begin : begin + kernel]


@given(grid=GRIDS, block_size=BLOCK_SIZES, data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_neighborhood(grid, block_size, data):
    kernel, dilation, stride, causal = [], [], [], []
    for side in grid:
        kernel.append(data.draw(st.integers(1, side), label="kernel"))
        dilation.append(data.draw(st.integers(1, side // kernel[-1]), label="dilation"))
        stride.append(data.draw(st.integers(1, kernel[-1]), label="stride"))
        causal.append(data.draw(st.booleans(), label="causal"))
    order = draw_order(data, grid)
    layout = masks.neighborhood(
        grid, kernel=kernel, dilation=dilation, stride=stride, causal=causal, order=order, block_size=block_size
    )

    def seen_from(axis: int, q: int) -> list[int]:
        return neighbors(q, grid[axis], kernel[axis], dilation[axis], stride[axis], causal[axis])

    assert_sees(layout, grid, order, seen_from)


@given(length=st.integers(100, 300), kernel=st.integers(1, 6), block_size=SIDES, data=st.data())
@settings(deadline=None, max_examples=30)
def test_any_wide_dilation(length, kernel, block_size, data):
    """Gaps larger than a block: windows at both ends are clipped separately for every residue."""
    dilation = data.draw(st.integers(1, length // kernel), label="dilation")
    causal = data.draw(st.booleans(), label="causal")
    layout = masks.neighborhood(length, kernel=kernel, dilation=dilation, causal=causal, block_size=block_size)
    assert_sees(layout, (length,), None, lambda axis, q: neighbors(q, length, kernel, dilation, 1, causal))


@given(grid=GRIDS, block_size=BLOCK_SIZES, data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_swin(grid, block_size, data):
    window = [data.draw(st.integers(1, side + 3), label="window") for side in grid]
    shift = [data.draw(st.integers(0, size - 1), label="shift") for size in window]
    order = draw_order(data, grid)
    layout = masks.swin(grid, window=window, shift=shift, order=order, block_size=block_size)

    def window_of(axis: int, x: int) -> int:
        # the windows begin at the shift, and before it
        return sum(x >= begin for begin in range(shift[axis], grid[axis], window[axis]))

    assert_sees(
        layout,
        grid,
        order,
        lambda axis, q: [kv for kv in range(grid[axis]) if window_of(axis, kv) == window_of(axis, q)],
    )


def test_swin_is_the_cyclic_shift_with_its_mask():
    """The published recipe: roll by -shift, cut into windows, mask pairs that were not neighbors before the roll."""
    side, window, shift = 12, 4, 2
    # the regions of the rolled map that the recipe numbers
    region = np.zeros(side, dtype=int)
    region[side - window : side - shift], region[side - shift :] = 1, 2
    rolled = (np.arange(side) - shift) % side
    layout = masks.swin((side, side), window=window, shift=shift, block_size=16)

    def seen_from(axis: int, q: int) -> np.ndarray:
        is_same_window = rolled // window == rolled[q] // window
        return np.flatnonzero(is_same_window & (region[rolled] == region[rolled[q]]))

    assert_sees(layout, (side, side), None, seen_from)


@given(grid=GRIDS, block_size=BLOCK_SIZES, data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_sliding_tile(grid, block_size, data):
    tile = [data.draw(st.integers(1, min(side, 6)), label="tile") for side in grid]
    n_tiles = [-(-side // size) for side, size in zip(grid, tile, strict=True)]
    n_seen = [data.draw(st.integers(1, count), label="tiles seen") for count in n_tiles]
    order = draw_order(data, grid)
    kernel = [count * size for count, size in zip(n_seen, tile, strict=True)]
    layout = masks.sliding_tile(grid, kernel=kernel, tile=tile, order=order, block_size=block_size)

    def seen_from(axis: int, q: int) -> list[int]:
        seen = neighbors(q // tile[axis], n_tiles[axis], n_seen[axis], 1, 1, False)
        return [kv for kv in range(grid[axis]) if kv // tile[axis] in seen]

    assert_sees(layout, grid, order, seen_from)


@given(grid=GRIDS, block_size=BLOCK_SIZES, causal=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_axial(grid, block_size, causal, data):
    axes = data.draw(st.none() | st.lists(st.integers(0, len(grid) - 1), min_size=1), label="axes")
    order = draw_order(data, grid)
    layout = masks.axial(grid, axes=axes, causal=causal, order=order, block_size=block_size)
    coordinates = list(itertools.product(*(range(side) for side in grid)))
    if order is not None:
        coordinates = [coordinates[token] for token in order.tolist()]

    def attends(q_pos: int, kv_pos: int) -> bool:
        q, kv = coordinates[q_pos], coordinates[kv_pos]
        differing = [axis for axis in range(len(grid)) if q[axis] != kv[axis]]
        allowed = range(len(grid)) if axes is None else axes
        return len(differing) == 0 or (len(differing) == 1 and differing[0] in allowed and (kv <= q or not causal))

    assert_attends(layout, attends)


def test_a_line_is_a_grid_of_one_axis():
    assert masks.neighborhood(300, kernel=31) == masks.neighborhood((300,), kernel=[31])
    assert masks.axial(300) == masks.local(300, window=(None, None))
    assert masks.axial(300, causal=True) == masks.causal(300)
    assert masks.neighborhood(300, kernel=31, causal=True) == masks.local(300, window=(30, 0))
    assert masks.swin(300, window=70) == masks.block_diagonal(300, size=70)


def test_every_token_sees_as_many():
    dense = masks.neighborhood((9, 13), kernel=(3, 5), dilation=(2, 1), block_size=16).to_dense()
    assert (dense.sum(-1) == 15).all()


def test_tiles_fill_blocks():
    grid, tile = (8, 32, 32), (4, 4, 8)
    order = masks.tile_order(grid, tile=tile)
    layout = masks.sliding_tile(grid, kernel=(4, 12, 24), tile=tile, order=order, block_size=128)
    assert len(layout.bitmasks) == 0
    # 2 * 8 * 4 tiles of one block each, and each sees 1 * 3 * 3
    assert layout.nnz == 64 * 9
    row_major = masks.sliding_tile(grid, kernel=(4, 12, 24), tile=tile)
    assert row_major.nnz > layout.nnz and len(row_major.bitmasks) > 0


def test_compact_orders_need_fewer_blocks():
    grid = (64, 64)
    row_major = masks.neighborhood(grid, kernel=9, block_size=64).nnz
    for order in (masks.tile_order(grid, tile=8), masks.morton_order(grid), masks.hilbert_order(grid)):
        assert masks.neighborhood(grid, kernel=9, order=order, block_size=64).nnz < 0.9 * row_major


@pytest.mark.parametrize(
    ("family", "arguments", "error", "message"),
    [
        ("neighborhood", {"grid": ()}, ValueError, "grid: .* at least one axis, got none"),
        ("neighborhood", {"grid": (0, 4)}, ValueError, "grid: .* at least 1, got 0"),
        ("neighborhood", {"grid": 4.0}, TypeError, "grid: .* got 4.0"),
        ("neighborhood", {"kernel": 0}, ValueError, "kernel: .* at least 1, got 0"),
        ("neighborhood", {"kernel": 9}, ValueError, r"kernel, dilation: .* 8 tokens, got 9 \* 1"),
        ("neighborhood", {"dilation": (3, 1)}, ValueError, r"kernel, dilation: .* 8 tokens, got 3 \* 3"),
        ("neighborhood", {"kernel": (3, 3, 3)}, ValueError, "kernel: .* one for each of 2 axes, got 3"),
        ("neighborhood", {"kernel": "33"}, TypeError, "kernel: .* got '33'"),
        ("neighborhood", {"dilation": 0}, ValueError, "dilation: .* at least 1, got 0"),
        ("neighborhood", {"stride": (1, 4)}, ValueError, "stride: .* the kernel, 3 tokens, got 4"),
        ("neighborhood", {"stride": 0}, ValueError, "stride: .* at least 1, got 0"),
        ("neighborhood", {"causal": (True,)}, ValueError, "causal: .* one for each of 2 axes"),
        ("neighborhood", {"causal": 1}, TypeError, "causal: expected a bool, got 1"),
        ("neighborhood", {"order": [0, 1]}, ValueError, "order: .* each of 80 positions of the grid, got 2"),
        ("neighborhood", {"order": [0] * 80}, ValueError, "order: expected every token once, got 0 80 times"),
        ("neighborhood", {"order": range(1, 81)}, ValueError, "order: expected tokens from 0 to 79, got 80"),
        ("swin", {"window": 0}, ValueError, "window: .* at least 1, got 0"),
        ("swin", {"shift": 4}, ValueError, "shift: expected less than the window, 4 tokens, got 4"),
        ("swin", {"shift": -1}, ValueError, "shift: .* at least 0, got -1"),
        ("swin", {"window": 1.5}, TypeError, "window: .* got 1.5"),
        ("sliding_tile", {"kernel": 3}, ValueError, "kernel: expected a multiple of the tile, 2 tokens, .* got 3"),
        ("sliding_tile", {"kernel": 10}, ValueError, "kernel: .* of at most 4 tiles, got 10"),
        ("sliding_tile", {"tile": 0}, ValueError, "tile: .* at least 1, got 0"),
        ("sliding_tile", {"tile": (2,)}, ValueError, "tile: .* one for each of 2 axes, got 1"),
        ("axial", {"axes": []}, ValueError, "axes: .* at least one axis, got none"),
        ("axial", {"axes": [2]}, ValueError, "axes: expected axes from 0 to 1, got 2"),
        ("axial", {"axes": [-1]}, ValueError, "axes: .* got -1"),
        ("axial", {"axes": [0.5]}, TypeError, "axes: .* got 0.5"),
        ("axial", {"causal": None}, TypeError, "causal: .* got None"),
    ],
)
def test_refused(family, arguments, error, message):
    usual = {
        "neighborhood": {"kernel": 3},
        "swin": {"window": 4},
        "sliding_tile": {"kernel": 4, "tile": 2},
        "axial": {},
    }
    arguments = {"grid": (8, 10), **usual[family], **arguments}
    with pytest.raises(error, match=message):
        getattr(masks, family)(arguments.pop("grid"), **arguments)
