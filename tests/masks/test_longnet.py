"""masks.longnet: the union over all scales, for every head."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, assert_heads_attend, both


def attends(q_pos: int, kv_pos: int, shift: int, scales: list[tuple[int, int]], causal: bool, head: int = 0) -> bool:
    q_pos += shift
    if q_pos < 0 or (causal and kv_pos > q_pos):
        return False
    return any(
        q_pos // segment == kv_pos // segment
        and q_pos % segment % dilation == head % dilation
        and kv_pos % segment % dilation == head % dilation
        for segment, dilation in scales
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block_size"), GRIDS)
# one scale; the paper's powers of two; dilations that divide nothing; gaps of more than a block; beyond the length
@pytest.mark.parametrize(
    ("segments", "dilations"),
    [([50], [1]), ([16, 32, 64], [1, 2, 4]), ([30, 77], [4, 5]), ([20, 200], [1, 70]), ([999], [3])],
)
def test_double_loop(length, block_size, segments, dilations, causal):
    shift = length[1] - length[0]
    layout = masks.longnet(length, segments=segments, dilations=dilations, causal=causal, block_size=block_size)
    scales = list(zip(segments, dilations, strict=True))
    assert_attends(layout, lambda q, kv: attends(q, kv, shift, scales, causal))


@given(
    grid=ANY_GRID,
    scales=st.lists(st.tuples(st.integers(1, 250), st.integers(1, 12) | st.integers(1, 150)), min_size=1, max_size=3),
    heads=st.integers(1, 4),
    causal=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_any_heads_on_any_grid(grid, scales, heads, causal):
    length, block_size = grid
    q_len, kv_len = both(length)
    scales = [(segment, min(segment, dilation)) for segment, dilation in scales]
    segments, dilations = zip(*scales, strict=True)
    layout = masks.longnet(
        length, segments=segments, dilations=dilations, causal=causal, heads=heads, block_size=block_size
    )
    sentences = [lambda q, kv, head=head: attends(q, kv, kv_len - q_len, scales, causal, head) for head in range(heads)]
    assert_heads_attend(layout, sentences)


def test_one_scale_without_gaps_is_block_diagonal():
    for causal in (False, True):
        layout = masks.longnet(1000, segments=[300], dilations=[1], causal=causal)
        assert layout == masks.block_diagonal(1000, size=300, causal=causal)


def test_heads_with_equal_offsets_are_equal():
    layout = masks.longnet(512, segments=[64, 512], dilations=[1, 2], heads=4, block_size=64)
    dense = layout.to_dense()[0]
    assert dense[0].equal(dense[2]) and dense[1].equal(dense[3]) and not dense[0].equal(dense[1])


def test_kept_positions_far_apart_skip_blocks():
    # 512 blocks in 32 segments of 16; 64 kept positions of the whole, one in every 8th block, 4 of a segment's pairs
    layout = masks.longnet(65536, segments=[2048, 65536], dilations=[1, 1024])
    assert layout.nnz == 512 * 16 + 64 * 64 - 32 * 4


def test_a_segment_of_everything_and_nothing():
    assert masks.longnet(300, segments=[10**15], dilations=[1]).density == 1.0
    assert masks.longnet(0, segments=[4], dilations=[2]).nnz == 0
    assert masks.longnet((300, 0), segments=[4], dilations=[2]).nnz == 0
    # no head of this number keeps a position
    assert masks.longnet(64, segments=[64], dilations=[64]).nnz == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"segments": []}, ValueError, "segments, dilations: .* got 0 and 2"),
        ({"segments": [], "dilations": []}, ValueError, "segments, dilations: .* at least one, got 0 and 0"),
        ({"segments": [64]}, ValueError, "segments, dilations: .* got 1 and 2"),
        ({"segments": [64, 0]}, ValueError, "segments: .* at least 1, got 0"),
        ({"dilations": [0, 2]}, ValueError, "dilations: .* from 1 to 64, got 0"),
        ({"dilations": [65, 2]}, ValueError, "dilations: .* from 1 to 64, got 65"),
        ({"segments": 64}, TypeError, "segments: .* got 64"),
        ({"dilations": [1.0, 2]}, TypeError, "dilations: .* got 1.0"),
        ({"heads": 0}, ValueError, "heads: .* got 0"),
        ({"causal": "yes"}, TypeError, "causal: .* got 'yes'"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.longnet(256, **{"segments": [64, 128], "dilations": [1, 2], **arguments})
