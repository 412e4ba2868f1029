"""masks.random: a seed gives the same blocks everywhere, and the draw is uniform."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks import random as random_layout
from tests.support.double_loop import ANY_GRID, assert_attends, both

MASK = 2**64 - 1


def mix(word: int) -> int:
    """splitmix64, from its paper."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def drawn(seed: int, row: int, size: int, count: int) -> set[int]:
    """The definition, one draw at a time."""
    wanted = size - count if 2 * count > size else count
    found: set[int] = set()
    draw = 0
    while len(found) < wanted:
        found.add((mix(mix(mix(seed) ^ row) ^ draw) >> 32) * size >> 32)
        draw += 1
    return set(range(size)) - found if 2 * count > size else found


def cols_of(layout) -> list[list[int]]:
    bounds, cols = layout.indptr[0, 0].tolist(), layout.indices.tolist()
    return [cols[begin:end] for begin, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
@pytest.mark.parametrize(("q_len", "kv_len", "block_size"), [(300, 300, 16), (100, 1000, 32), (640, 203, (64, 16))])
def test_every_row_is_the_first_distinct_draws(seed, q_len, kv_len, block_size):
    for count in range(masks.random((q_len, kv_len), density=0.0, seed=0, block_size=block_size).n_cols + 1):
        layout = masks.random((q_len, kv_len), blocks_per_row=count, seed=seed, block_size=block_size)
        expected = [sorted(drawn(seed, row, layout.n_cols, count)) for row in range(layout.n_rows)]
        assert cols_of(layout) == expected
        assert len(layout.bitmasks) == 0


@given(grid=ANY_GRID, density=st.floats(0, 1), seed=st.integers(0, MASK))
@settings(deadline=None, max_examples=30)
def test_any_random_layout(grid, density, seed):
    (_, kv_len), (block_q, block_kv) = both(grid[0]), both(grid[1])
    layout = masks.random(grid[0], density=density, seed=seed, block_size=grid[1])
    n_cols = math.ceil(kv_len / block_kv)
    kept = [drawn(seed, row, n_cols, round(density * n_cols)) for row in range(layout.n_rows)]
    assert_attends(layout, lambda q_pos, kv_pos: kv_pos // block_kv in kept[q_pos // block_q])


def test_golden_blocks():
    """Fixed results: if they change, every model trained on a random layout changes."""
    assert mix(0) == 0xE220A8397B1DCDAF
    layout = masks.random(2048, blocks_per_row=3, seed=0)
    assert cols_of(layout)[:4] == GOLDEN_ROWS
    layout = masks.random(65536, density=0.1, seed=2024)
    checksum = sum((place + 1) * col for place, col in enumerate(layout.indices.tolist())) % 2**32
    assert (layout.nnz, checksum) == GOLDEN_LAYOUT


GOLDEN_ROWS = [[2, 5, 11], [0, 4, 5], [4, 5, 13], [3, 4, 5]]
GOLDEN_LAYOUT = (26112, 501271682)


def test_same_seed_same_layout_other_seed_another():
    layout = masks.random(8192, blocks_per_row=4, seed=7)
    assert layout == masks.random(8192, blocks_per_row=4, seed=7)
    assert layout == masks.random(8192, blocks_per_row=4, seed=np.int64(7))
    assert layout != masks.random(8192, blocks_per_row=4, seed=8)


def test_the_generators_of_numpy_and_torch_are_left_alone():
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    masks.random(1024, density=0.3, seed=0)
    assert np.array_equal(state, np.random.get_state()[1])


def test_more_queries_keep_the_rows_there_were():
    short = masks.random((1024, 4096), blocks_per_row=5, seed=3)
    long = masks.random((4096, 4096), blocks_per_row=5, seed=3)
    assert cols_of(long)[:8] == cols_of(short)


def test_more_blocks_keep_the_blocks_there_were():
    # up to half a row the draws are the same stream
    few, many = (masks.random(4096, blocks_per_row=count, seed=3) for count in (5, 16))
    assert few & many == few


@given(
    density=st.floats(0, 1),
    length=st.integers(1, 3000),
    seed=st.integers(0, MASK),
)
@settings(deadline=None)
def test_density_is_rounded_to_blocks_of_every_row(density, length, seed):
    layout = masks.random(length, density=density, seed=seed, block_size=64)
    assert (layout.indptr.diff() == round(density * layout.n_cols)).all()


def test_cols_are_drawn_evenly():
    # 4096 rows of 4 from 64 cols: each col is hit 256 times on average, with deviation below 16
    hits = np.bincount(masks.random((65536, 1024), blocks_per_row=4, seed=11, block_size=16).indices, minlength=64)
    assert abs(hits - 256).max() < 5 * 16
    chi_squared = ((hits - 256) ** 2 / 256).sum()
    # 63 degrees of freedom: mean 63, deviation 11.2
    assert abs(chi_squared - 63) < 5 * math.sqrt(2 * 63)


def test_rows_are_drawn_independently():
    # neighboring rows of 32 from 64 blocks share 16 on average, with deviation about 2 a pair, 0.06 over 1023 pairs
    rows = cols_of(masks.random((16384, 1024), blocks_per_row=32, seed=5, block_size=16))
    shared = [len(set(one) & set(other)) for one, other in itertools.pairwise(rows)]
    assert abs(np.mean(shared) - 16) < 0.4


@pytest.mark.parametrize(
    ("name", "value"),
    # few rows at a time; no more draws than are expected, so that every other row is drawn again
    [("DRAWS_AT_ONCE", 1000), ("DEVIATIONS", 0)],
)
def test_how_draws_are_made_does_not_matter(monkeypatch, name, value):
    expected = masks.random(65536, density=0.3, seed=1)
    # masks.random is the function
    monkeypatch.setattr(sys.modules["masks.random"], name, value)
    assert masks.random(65536, density=0.3, seed=1) == expected


def test_nothing_has_no_blocks():
    assert masks.random(0, density=0.5, seed=0).nnz == 0
    assert masks.random(512, blocks_per_row=0, seed=0).nnz == 0
    assert masks.random((512, 0), density=1.0, seed=0).nnz == 0
    assert masks.random(500, density=1.0, seed=0).density == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 0}, ValueError, "blocks_per_row, density: expected exactly one of the two, got neither"),
        ({"seed": 0, "blocks_per_row": 2, "density": 0.1}, ValueError, "exactly one of the two, got both"),
        ({"seed": 0, "blocks_per_row": 9}, ValueError, "blocks_per_row: .* from 0 to 8, got 9"),
        ({"seed": 0, "blocks_per_row": -1}, ValueError, "blocks_per_row: .* got -1"),
        ({"seed": 0, "blocks_per_row": 2.0}, TypeError, "blocks_per_row: .* got 2.0"),
        ({"seed": 0, "density": 1.5}, ValueError, "density: .* from 0 to 1, got 1.5"),
        ({"seed": 0, "density": float("nan")}, ValueError, "density: .* got nan"),
        ({"seed": 0, "density": "0.5"}, TypeError, "density: .* got '0.5'"),
        ({"seed": -1, "density": 0.5}, ValueError, "seed: .* got -1"),
        ({"seed": 2**64, "density": 0.5}, ValueError, "seed: .* got 18446744073709551616"),
        ({"seed": 0.0, "density": 0.5}, TypeError, "seed: .* got 0.0"),
        ({"seed": None, "density": 0.5}, TypeError, "seed: .* got None"),
        ({"density": 0.5}, TypeError, "seed"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        random_layout(1024, **arguments)
