"""masks.prefix_lm: every token sees the prefix, the rest is causal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, both


def attends(q_pos: int, kv_pos: int, prefix: int, shift: int) -> bool:
    return kv_pos < prefix or kv_pos <= q_pos + shift


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_double_loop(length, block_size, share):
    q_len, kv_len = length
    prefix = round(share * kv_len)
    layout = masks.prefix_lm(length, prefix=prefix, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, prefix, kv_len - q_len))


@given(grid=ANY_GRID, data=st.data())
@settings(deadline=None, max_examples=30)
def test_any_prefix_on_any_grid(grid, data):
    length, block_size = grid
    q_len, kv_len = both(length)
    prefix = data.draw(st.integers(0, kv_len), label="prefix")
    layout = masks.prefix_lm(length, prefix=prefix, block_size=block_size)
    assert_attends(layout, lambda q_pos, kv_pos: attends(q_pos, kv_pos, prefix, kv_len - q_len))


def test_no_prefix_is_causal_and_nothing_else_is_everything():
    assert masks.prefix_lm((300, 500), prefix=0) == masks.causal((300, 500))
    assert masks.prefix_lm(300, prefix=300).density == 1.0
    assert masks.prefix_lm(0, prefix=0).nnz == 0


def test_closed_form_counts():
    # 64 blocks, causal, and 8 cols full above the diagonal
    assert masks.prefix_lm(8192, prefix=1024).nnz == 64 * 65 // 2 + 7 * 8 // 2
    assert len(masks.prefix_lm(8192, prefix=1000).bitmasks) <= 3


@pytest.mark.parametrize(
    ("prefix", "error", "message"),
    [
        (-1, ValueError, "prefix: .* from 0 to 256, got -1"),
        (257, ValueError, "prefix: .* from 0 to 256, got 257"),
        (1.0, TypeError, "prefix: .* got 1.0"),
        (True, TypeError, "prefix: .* got True"),
        (None, TypeError, "prefix: .* got None"),
    ],
)
def test_refused(prefix, error, message):
    with pytest.raises(error, match=message):
        masks.prefix_lm(256, prefix=prefix)
