"""masks.fixed: the fixed attention of the paper, for every head."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, assert_heads_attend, both


def attends(q_pos: int, kv_pos: int, shift: int, stride: int, summary: int, causal: bool, vertical: int = 0) -> bool:
    q_pos += shift
    if causal and kv_pos > q_pos:
        return False
    # the places counted from the end of a chunk, 0 the last one
    from_end = stride - 1 - kv_pos % stride
    return q_pos // stride == kv_pos // stride or vertical * summary <= from_end < (vertical + 1) * summary


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# everything; less than a block; no divisor of one; about a block; several blocks; beyond the length
@pytest.mark.parametrize(("stride", "summary"), [(1, 1), (7, 2), (16, 16), (33, 1), (48, 10), (100, 70), (1000, 3)])
def test_double_loop(length, block_size, stride, summary, causal):
    shift = length[1] - length[0]
    layout = masks.fixed(length, stride=stride, summary=summary, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q, kv, shift, stride, summary, causal))


@given(grid=ANY_GRID, stride=st.integers(1, 200), causal=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=30)
def test_any_heads_on_any_grid(grid, stride, causal, data):
    length, block_size = grid
    q_len, kv_len = both(length)
    summary = data.draw(st.integers(1, stride), label="summary")
    verticals = data.draw(st.integers(1, min(4, stride // summary)), label="verticals")
    heads = data.draw(st.integers(1, 5), label="heads")
    layout = masks.fixed(
        length,
        stride=stride,
        summary=summary,
        causal=causal,
        heads=heads,
        verticals=verticals,
        block_size=block_size,
    )
    assert_heads_attend(
        layout,
        [
            lambda q, kv, vertical=head % verticals: attends(q, kv, kv_len - q_len, stride, summary, causal, vertical)
            for head in range(heads)
        ],
    )


def test_closed_form_counts():
    # 64 blocks in chunks of 8; the last block of each of the 7 other chunks holds its summary
    assert masks.fixed(8192, stride=1024, summary=4).nnz == 64 * (8 + 7)
    # causal: 1 to 8 blocks of the own chunk, and one for each chunk before it
    assert masks.fixed(8192, stride=1024, summary=4, causal=True).nnz == 8 * 36 + 8 * 28
    assert len(masks.fixed(8192, stride=1024, summary=4, causal=True).bitmasks) == 2


def test_stride_one_attends_to_everything():
    assert masks.fixed(1000, stride=1).density == 1.0
    assert masks.fixed((100, 300), stride=1, causal=True) == masks.causal((100, 300))
    assert masks.fixed(1000, stride=10**30).density == 1.0
    assert masks.fixed(0, stride=4).nnz == 0


def test_one_head_is_the_shared_mask():
    shared, single = masks.fixed(300, stride=50), masks.fixed(300, stride=50, heads=1)
    assert shared == single
    assert masks.fixed(300, stride=50, heads=3).shape[:2] == (1, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride: .* at least 1, got 0"),
        ({"stride": 4.0}, TypeError, "stride: .* got 4.0"),
        ({"stride": 4, "summary": 0}, ValueError, "summary: .* from 1 to 4, got 0"),
        ({"stride": 4, "summary": 5}, ValueError, "summary: .* from 1 to 4, got 5"),
        ({"stride": 4, "summary": 2, "heads": 4, "verticals": 3}, ValueError, "verticals: .* from 1 to 2, got 3"),
        ({"stride": 4, "verticals": 2}, ValueError, "verticals: expected 1 .* got 2. Give heads"),
        ({"stride": 4, "heads": 0}, ValueError, "heads: .* from 1 to 65536, got 0"),
        ({"stride": 4, "heads": True}, TypeError, "heads: .* got True"),
        ({"stride": 4, "causal": None}, TypeError, "causal: .* got None"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.fixed(256, **arguments)


def test_more_verticals_than_heads_take_no_time():
    assert masks.fixed(20, stride=2**70, heads=3, verticals=2**70) == masks.fixed(20, stride=60, heads=3, verticals=60)
