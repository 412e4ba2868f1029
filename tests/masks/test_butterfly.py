"""masks.butterfly: the closed form of the paper."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, SQUARE_GRIDS, assert_attends, both


def attends(row: int, col: int, n_factors: int) -> bool:
    return col == row or any(col == row ^ 2**k for k in range(n_factors))


@pytest.mark.parametrize(("length", "block_size"), SQUARE_GRIDS)
def test_double_loop(length, block_size):
    n_blocks = math.ceil(length / block_size)
    all_factors = math.ceil(math.log2(n_blocks))
    for n_factors in [None, *range(all_factors + 1)]:
        layout = masks.butterfly(length, n_factors=n_factors, block_size=block_size)
        kept = all_factors if n_factors is None else n_factors
        assert_attends(layout, lambda q, kv, kept=kept: attends(q // block_size, kv // block_size, kept))


@given(length=st.integers(1, 300), n_factors=st.integers(0, 5), block_size=st.sampled_from([16, 48, 64, 128]))
@settings(deadline=None, max_examples=30)
def test_any_butterfly(length, n_factors, block_size):
    n_factors = min(n_factors, (math.ceil(length / block_size) - 1).bit_length())
    layout = masks.butterfly(length, n_factors=n_factors, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q // block_size, kv // block_size, n_factors))


@pytest.mark.parametrize("log_blocks", range(8))
def test_a_power_of_two_has_one_block_a_factor_and_the_diagonal(log_blocks):
    n_blocks = 2**log_blocks
    for n_factors in range(log_blocks + 1):
        layout = masks.butterfly(n_blocks * 16, n_factors=n_factors, block_size=16)
        assert layout.nnz == n_blocks * (n_factors + 1)
        assert len(layout.bitmasks) == 0


@given(length=st.integers(1, 2000), n_factors=st.integers(0, 3))
@settings(deadline=None)
def test_it_equals_its_transpose_and_grows_with_its_factors(length, n_factors):
    block_size = 48
    n_factors = min(n_factors, (math.ceil(length / block_size) - 1).bit_length())
    layout = masks.butterfly(length, n_factors=n_factors, block_size=block_size)
    assert layout.T == layout
    assert not (layout - masks.butterfly(length, block_size=block_size)).nnz
    assert (layout.indptr.diff() >= 1).all()


@given(grid=ANY_GRID, log_cells=st.integers(0, 6), data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_stretched_butterfly(grid, log_cells, data):
    """Every element of the matrix gets the value of its cell; a block with one kept element is kept."""
    length, block_size = grid
    lengths = both(length)
    stretch = 2 ** min(log_cells, max(lengths).bit_length() - 1)
    n_factors = data.draw(st.integers(0, stretch.bit_length() - 1), label="n_factors")
    layout = masks.butterfly(length, n_factors=n_factors, stretch=stretch, block_size=block_size)
    sides = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    # the cells that the tokens of each block are in
    cells = [
        [{token * stretch // n for token in range(begin, min(begin + side, n))} for begin in range(0, n, side)]
        for n, side in zip(lengths, sides, strict=True)
    ]
    kept = [
        [any(attends(row, col, n_factors) for row in rows for col in cols) for cols in cells[1]] for rows in cells[0]
    ]
    assert_attends(layout, lambda q, kv: kept[q // sides[0]][kv // sides[1]])


def test_stretched_to_one_cell_a_block_it_is_the_same():
    assert masks.butterfly(1024, stretch=8) == masks.butterfly(1024)
    assert masks.butterfly(1024, stretch=8, n_factors=1) == masks.butterfly(1024, n_factors=1)
    # as Pixelfly does: cells of 128 x 256 tokens
    assert masks.butterfly((1024, 2048), stretch=8, block_size=(128, 256)).nnz == 32
    assert masks.butterfly((1024, 0), stretch=8).nnz == masks.butterfly(0, stretch=1).nnz == 0


def test_a_pair_of_equal_lengths_is_a_length():
    assert masks.butterfly((300, 300), block_size=(64, 64)) == masks.butterfly(300, block_size=64)


def test_nothing_has_no_blocks():
    assert masks.butterfly(0).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": (128, 256)}, ValueError, r"length: expected as many queries as keys, got \(128, 256\)"),
        ({"length": 1024, "block_size": (64, 128)}, ValueError, "block_size: .* got 16 x 8"),
        ({"length": 1024, "n_factors": 4}, ValueError, "n_factors: .* from 0 to 3, got 4"),
        ({"length": 1024, "n_factors": -1}, ValueError, "n_factors: .* got -1"),
        ({"length": 1024, "n_factors": 1.0}, TypeError, r"n_factors: expected int, got 1.0 \(float\)"),
        ({"length": (128, 256)}, ValueError, "length: .* stretch=n lays"),
        ({"length": 1024, "stretch": 6}, ValueError, "stretch: expected a power of two, .* got 6"),
        ({"length": 1024, "stretch": 0}, ValueError, "stretch: .* from 1 to 1024, got 0"),
        ({"length": 1024, "stretch": 2048}, ValueError, "stretch: .* from 1 to 1024, got 2048"),
        ({"length": 1024, "stretch": 4.0}, TypeError, "stretch: .* got 4.0"),
        ({"length": 1024, "stretch": 4, "n_factors": 3}, ValueError, "n_factors: .* from 0 to 2, got 3"),
        ({"length": 1024, "n_factors": True}, TypeError, r"n_factors: expected int, got True \(bool\)"),
    ],
)
def test_refused(arguments, error, message):
    length = arguments.pop("length")
    with pytest.raises(error, match=message):
        masks.butterfly(length, **arguments)
