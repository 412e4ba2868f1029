"""masks.block_diffusion: noised blocks see themselves and the clean past."""

from __future__ import annotations

import numpy as np
import pytest

import masks
from tests.support.double_loop import assert_attends


def attends(q_pos: int, kv_pos: int, length: int, size: int) -> bool:
    """The three parts of the paper's mask, one by one."""
    query_is_noised, key_is_noised = q_pos < length, kv_pos < length
    query_block, key_block = q_pos % length // size, kv_pos % length // size
    block_diagonal = query_is_noised and key_is_noised and query_block == key_block
    offset_block_causal = query_is_noised and not key_is_noised and key_block < query_block
    block_causal = not query_is_noised and not key_is_noised and key_block <= query_block
    return block_diagonal or offset_block_causal or block_causal


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64), (64, 16)])
@pytest.mark.parametrize("seed", range(8))
def test_double_loop(seed, block_size):
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 150))
    # one token a block, a few, a block size, nearly everything, more than everything
    size = int(random.choice([1, 2, 5, 16, 33, 64, length, 10**9]))
    layout = masks.block_diffusion(length, size=size, block_size=block_size)
    assert layout.shape == (1, 1, 2 * length, 2 * length)
    assert_attends(layout, lambda q, kv: attends(q, kv, length, size))


@pytest.mark.parametrize(("length", "size"), [(150, 1), (150, 2), (137, 1), (200, 3)])
def test_more_diffusion_blocks_than_two_sides_have_tokens(length, size):
    # the block with the border of the halves meets clean keys of its own number, and far from it
    layout = masks.block_diffusion(length, size=size, block_size=16)
    assert_attends(layout, lambda q, kv: attends(q, kv, length, size))


def test_halves_that_end_inside_a_block_cost_few_bitmasks():
    layout = masks.block_diffusion(50_000, size=16)
    # 50,000 = 390 * 128 + 80: the row and the col with the border, and the shift between the halves
    assert len(layout.bitmasks) < 40
    assert masks.block_diffusion(65_536, size=128).bitmasks.shape[0] == 0


def test_one_block_is_two_dense_squares():
    layout = masks.block_diffusion(128, size=128, block_size=128)
    assert layout.nnz == 2 and len(layout.bitmasks) == 0
    assert masks.block_diffusion(0, size=4).nnz == 0


@pytest.mark.parametrize(
    ("length", "arguments", "error", "message"),
    [
        (100, {"size": 0}, ValueError, "size: .* at least 1, got 0"),
        (100, {"size": 2.0}, TypeError, "size: .* got 2.0"),
        (-1, {"size": 4}, ValueError, "length: .* got -1"),
        ((64, 64), {"size": 4}, TypeError, "length: expected int"),
        (100, {"size": 4, "block_size": 100}, ValueError, "block_size: .* got 100"),
    ],
)
def test_refused(length, arguments, error, message):
    with pytest.raises(error, match=message):
        masks.block_diffusion(length, **arguments)
