"""masks.erdos_renyi: blocks are independent and reproducible."""

from __future__ import annotations

import math

import numpy as np
import pytest

import masks
from tests.masks.test_random import cols_of, mix


def kept(seed: int, head: int, row: int, n_cols: int, density: float) -> list[int]:
    """The definition, one skip at a time."""
    longest = min(4096, math.ceil(4 / density))
    cols, col, draw = [], -1, 0
    while col < n_cols:
        chance = (mix(mix(mix(seed) ^ (head * 2**32 + row)) ^ draw) >> 11) * 2.0**-53
        draw += 1
        gap, power = 0, 1.0 - density
        while gap < longest and chance < power:
            gap, power = gap + 1, power * (1.0 - density)
        if gap == longest:
            col += longest
            continue
        col += gap + 1
        if col < n_cols:
            cols.append(col)
    return cols


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64)])
@pytest.mark.parametrize("density", [1e-9, 0.004, 0.05, 0.3, 0.9, 1.0])
def test_every_row_is_its_skips(density, block_size):
    random = np.random.default_rng(int(density * 1000))
    q_len, kv_len = (int(length) for length in random.integers(1, 3000, 2))
    seed = int(random.integers(0, 2**63))
    layout = masks.erdos_renyi((q_len, kv_len), density=density, seed=seed, block_size=block_size)
    assert cols_of(layout) == [kept(seed, 0, row, layout.n_cols, density) for row in range(layout.n_rows)]
    assert len(layout.bitmasks) == 0


def test_every_head_is_drawn_on_its_own():
    layout = masks.erdos_renyi(1000, density=0.2, seed=5, heads=3, block_size=32)
    assert layout.shape == (1, 3, 1000, 1000)
    for head in range(3):
        blocks = layout.to_scipy(head=head).toarray()
        assert [row.nonzero()[0].tolist() for row in blocks] == [kept(5, head, row, 32, 0.2) for row in range(32)]
    shared = masks.erdos_renyi(1000, density=0.2, seed=5, block_size=32)
    assert (shared.to_scipy() != layout.to_scipy(head=0)).nnz == 0


def test_golden_blocks():
    """Fixed results: if they change, every model trained on such a layout changes."""
    assert cols_of(masks.erdos_renyi(4096, density=0.1, seed=0))[:4] == GOLDEN_ROWS


GOLDEN_ROWS = [[18], [12, 25], [1, 12, 24, 26], [14, 27]]


def test_blocks_are_kept_evenly_and_independently():
    # 512 x 512 blocks with probability 0.1: 26214 kept, deviation 154; each col 51, deviation 6.8
    blocks = masks.erdos_renyi(8192, density=0.1, seed=3, block_size=16).to_scipy().toarray().astype(float)
    assert abs(blocks.sum() - 26214) < 5 * 154
    assert abs(blocks.sum(0) - 51.2).max() < 5 * 6.8
    # adjacent blocks are both kept with probability 1/100: 2616 of 261632, deviation 51
    assert abs((blocks[:, 1:] * blocks[:, :-1]).sum() - 2616) < 5 * 51
    assert abs((blocks[1:] * blocks[:-1]).sum() - 2616) < 5 * 51


def test_a_longer_sequence_keeps_the_blocks_it_had():
    short = masks.erdos_renyi(2048, density=0.2, seed=1, block_size=64).to_scipy().toarray()
    long = masks.erdos_renyi(8192, density=0.2, seed=1, block_size=64).to_scipy().toarray()
    assert np.array_equal(short, long[:32, :32])


def test_nothing_has_no_blocks():
    assert masks.erdos_renyi(0, density=0.5, seed=0).nnz == 0
    assert masks.erdos_renyi((512, 0), density=0.5, seed=0).nnz == 0
    assert masks.erdos_renyi(512, density=0.0, seed=0).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": 1.5, "seed": 0}, ValueError, "density: .* from 0 to 1, got 1.5"),
        ({"density": None, "seed": 0}, TypeError, "density: .* got None"),
        ({"density": 0.5, "seed": -1}, ValueError, "seed: .* got -1"),
        ({"density": 0.5}, TypeError, "seed"),
        ({"density": 0.5, "seed": 0, "heads": 0}, ValueError, "heads: .* from 1 to 65536"),
        ({"density": 0.5, "seed": 0, "heads": [1]}, TypeError, "heads: .* got \\[1\\]"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.erdos_renyi(1024, **arguments)


@pytest.mark.parametrize("density", [1e-17, 5e-324])
def test_densities_below_the_precision_keep_nothing(density):
    assert masks.erdos_renyi(4096, density=density, seed=0).nnz == 0
