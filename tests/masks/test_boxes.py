"""masks/boxes.py: candidate blocks are few on any grid, in any order. test_grid.py tests that layouts are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

import masks
from masks import boxes
from masks.boxes import Axis
from masks.canvas import read_canvas

LENGTH = 65536
# kernels and dilations below and above a block; power-of-two and ragged sides; short and long lines
NEIGHBORHOODS = {
    "line": ((LENGTH,), {"kernel": 257}),
    "line, far apart": ((LENGTH,), {"kernel": 7, "dilation": LENGTH // 7}),
    "line, far apart, ragged": ((60_001,), {"kernel": 5, "dilation": 3000}),
    "square": ((256, 256), {"kernel": 7}),
    "square, dilated": ((256, 256), {"kernel": 7, "dilation": 36}),
    "ragged": ((250, 262), {"kernel": 9}),
    "short lines": ((21_845, 3), {"kernel": (1001, 3)}),
    "long lines": ((3, 21_845), {"kernel": (3, 1001)}),
    "frames": ((16, 64, 64), {"kernel": 5}),
    "ragged frames": ((17, 60, 63), {"kernel": (3, 5, 7)}),
    "frames, causal": ((16, 64, 64), {"kernel": (4, 5, 5), "causal": (True, False, False)}),
}
ORDERS = {
    "tiles": lambda grid: masks.tile_order(grid, tile=8),
    "morton": masks.morton_order,
    "hilbert": masks.hilbert_order,
}


@pytest.fixture
def n_looked_at(monkeypatch):
    """A list that receives, for every layout built, the number of candidates and of distinct candidates."""
    counts = []

    def counted(canvas, rows, cols):
        found = boxes_distinct(canvas, rows, cols)
        counts.append((rows.size, found[0].size))
        return found

    boxes_distinct = boxes.distinct_blocks
    monkeypatch.setattr(boxes, "distinct_blocks", counted)
    return counts


@pytest.mark.parametrize("name", NEIGHBORHOODS)
def test_row_major_candidates_are_few(name, n_looked_at):
    grid, arguments = NEIGHBORHOODS[name]
    layout = masks.neighborhood(grid, **arguments)
    [(n_listed, n_distinct)] = n_looked_at
    assert n_distinct <= 1.5 * layout.nnz
    assert n_listed <= 12 * layout.nnz


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["square", "square, dilated", "ragged", "frames"])
def test_candidates_in_order_are_few(name, order, n_looked_at):
    grid, arguments = NEIGHBORHOODS[name]
    layout = masks.neighborhood(grid, **arguments, order=ORDERS[order](grid))
    [(n_listed, n_distinct)] = n_looked_at
    assert n_distinct <= 2 * layout.nnz
    assert n_listed <= 64 * layout.nnz


# lines shorter than a block, and lines longer than its keys, which are split
@pytest.mark.parametrize(("grid", "block_size"), [((9, 14), 16), ((9, 20), (64, 16))])
def test_any_ranges(grid, block_size):
    """Ranges that no family has: random ones that contain the coordinate, or begin at it."""
    generator = np.random.default_rng(0)
    canvas = read_canvas(math.prod(grid), block_size)
    for number in range(20):
        axes = [
            Axis(
                place - generator.integers(0, place + 1) * (number % 2),
                place + generator.integers(0, side - place),
            )
            for side, place in ((side, np.arange(side)) for side in grid)
        ]
        expected = np.ones((canvas.q_len, canvas.q_len), dtype=bool)
        for axis, place in zip(axes, np.unravel_index(np.arange(canvas.q_len), grid), strict=True):
            expected &= (axis.low[place][:, None] <= place) & (place <= axis.high[place][:, None])
        for order in (None, generator.permutation(canvas.q_len)):
            found = boxes.boxes(canvas, grid, axes, order).to_dense()[0, 0].numpy()
            assert np.array_equal(found, expected if order is None else expected[order][:, order])
