"""masks.global_tokens: whole rows and columns of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, both


def attends(q_pos: int, kv_pos: int, shift: int, tokens: set[int]) -> bool:
    return q_pos + shift in tokens or kv_pos in tokens


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# none; one; inside a block; whole blocks; everything
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 1.0])
def test_the_first_tokens_double_loop(length, block_size, share):
    q_len, kv_len = length
    count = round(share * kv_len)
    layout = masks.global_tokens(length, tokens=count, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, kv_len - q_len, set(range(count))))


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
def test_positions_double_loop(length, block_size):
    q_len, kv_len = length
    # both ends, a whole block of 64 or less, and scattered ones in any order
    tokens = [kv_len - 1, 0, *range(64, min(128, kv_len)), *range(3, kv_len, 37)]
    layout = masks.global_tokens(length, tokens=tokens, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, kv_len - q_len, set(tokens)))


@given(grid=ANY_GRID, data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_positions_on_any_grid(grid, data):
    q_len, kv_len = both(grid[0])
    tokens = data.draw(st.lists(st.integers(0, kv_len - 1), max_size=20))
    layout = masks.global_tokens(grid[0], tokens=tokens, block_size=grid[1])
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, kv_len - q_len, set(tokens)))


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda tokens: torch.tensor(tokens).int()])
def test_positions_come_in_any_container_order_and_number(make):
    expected = masks.global_tokens(500, tokens=[3, 77, 401])
    assert masks.global_tokens(500, tokens=make([401, 3, 77, 3])) == expected


def test_how_many_is_the_first_positions():
    assert masks.global_tokens(500, tokens=200) == masks.global_tokens(500, tokens=range(200))


def test_the_last_queries_of_a_sequence_keep_their_rows():
    whole = masks.global_tokens(400, tokens=[5, 350], block_size=16).to_dense()
    last = masks.global_tokens((100, 400), tokens=[5, 350], block_size=16).to_dense()
    assert torch.equal(last, whole[:, :, 300:])


def test_closed_form_counts():
    # 512 blocks a side: 2 whole block rows and cols; no bitmask is needed
    layout = masks.global_tokens(65536, tokens=256)
    assert layout.nnz == 512**2 - 510**2
    assert len(layout.bitmasks) == 0
    # one token: a row, a column, and both in the corner
    layout = masks.global_tokens(65536, tokens=1)
    assert layout.nnz == 2 * 512 - 1
    assert len(layout.bitmasks) == 3


def test_equal_places_share_their_bitmasks():
    # a global token at the same place of each of 64 blocks: all blocks share one bitmask
    layout = masks.global_tokens(8192, tokens=range(5, 8192, 128))
    assert layout.density == 1.0
    assert len(layout.bitmasks) == 1


def test_nothing_has_no_blocks():
    assert masks.global_tokens(0, tokens=0).nnz == 0
    assert masks.global_tokens(0, tokens=[]).nnz == 0
    assert masks.global_tokens(300, tokens=[]).nnz == 0
    assert masks.global_tokens((300, 0), tokens=0).nnz == 0


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (-1, ValueError, "tokens: .* from 0 to 256, got -1"),
        (257, ValueError, "tokens: .* from 0 to 256, got 257"),
        (1.0, TypeError, "tokens: .* got 1.0"),
        (True, TypeError, "tokens: .* got True"),
        (None, TypeError, "tokens: .* got None"),
        ([3, 256], ValueError, "tokens: expected positions from 0 to 255, got 256 at index 1"),
        ([-1], ValueError, "tokens: expected positions from 0 to 255, got -1 at index 0"),
        ([1.5], TypeError, "tokens: expected ints, got 1.5"),
        (torch.ones(256, dtype=torch.bool), TypeError, "tokens: expected ints, got Tensor of torch.bool"),
        (np.zeros((2, 2), dtype=int), ValueError, "tokens: expected one axis"),
        ("12", TypeError, "tokens: "),
    ],
    ids=str,
)
def test_refused(tokens, error, message):
    with pytest.raises(error, match=message):
        masks.global_tokens(256, tokens=tokens)
