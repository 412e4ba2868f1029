"""Every operation on block lists gives the canonical list of the dense result."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from blocksparse_flash.blocks import block_list, set_operations
from blocksparse_flash.blocks.block_list import EMPTY, FULL, BlockList, Frame
from tests.support import dense_masks
from tests.support.dense_masks import Problem, problems


def assert_same(actual: BlockList, expected: BlockList) -> None:
    for name, one, other in zip(BlockList._fields, actual, expected, strict=True):
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, err_msg=name)


def assert_canonical(found: BlockList, frame: Frame) -> None:
    """The definition in block_list.py, block by block."""
    (q_len, kv_len, block_size), batch_heads = frame[2:], frame.batch_heads
    assert (found.keys.dtype, found.ids.dtype, found.bitmasks.dtype) == (np.int64, np.int32, np.uint32)
    assert found.bitmasks.shape[1:] == (block_size[0], -(-block_size[1] // 32))
    n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    assert (np.diff(found.keys) > 0).all()
    assert not len(found.keys) or (found.keys[0] >= 0 and found.keys[-1] < batch_heads * n_rows * n_cols)
    seen: list[int] = []
    for key, number in zip(found.keys.tolist(), found.ids.tolist(), strict=True):
        if number == FULL:
            continue
        row, col = key // n_cols % n_rows, key % n_cols
        rows_here, cols_here = min(block_size[0], q_len - row * block_size[0]), kv_len - col * block_size[1]
        bits = (found.bitmasks[number][..., None] >> np.arange(32, dtype=np.uint32) & 1).reshape(block_size[0], -1) == 1
        cols_here = min(block_size[1], cols_here)
        assert bits.any(), "an empty block is stored"
        assert not bits[:rows_here, :cols_here].all(), "a full block is stored as partial"
        assert not bits[rows_here:].any() and not bits[:, cols_here:].any(), (
            "a bit of a pair that does not exist is set"
        )
        if number not in seen:
            seen.append(number)
    assert seen == list(range(len(found.bitmasks))), "bitmasks are not numbered by first appearance"
    assert len({bitmask.tobytes() for bitmask in found.bitmasks}) == len(found.bitmasks), "two bitmasks are equal"


def framed(mask: np.ndarray, block_size: tuple[int, int]) -> Frame:
    return Frame(*mask.shape, block_size)


def from_mask(mask: np.ndarray, block_size: tuple[int, int]) -> BlockList:
    """The list of a mask (batch, heads, q_len, kv_len)."""
    return block_list.from_mask(mask.reshape(mask.shape[0] * mask.shape[1], *mask.shape[2:]), framed(mask, block_size))


def to_mask(found: BlockList, frame: Frame) -> np.ndarray:
    return block_list.to_mask(found, frame).reshape(frame[:4])


@given(st.sampled_from(dense_masks.SIDES), st.integers(0, 2**32 - 1))
def test_packing_puts_key_0_in_the_lowest_bit(block_kv: int, seed: int) -> None:
    bits = np.random.default_rng(seed).random((3, 16, block_kv)) < 0.5
    words = block_list.pack(bits)
    assert words.shape == (3, 16, block_list.words_per_query(block_kv)) and words.dtype == np.uint32
    for key in range(block_kv):
        np.testing.assert_array_equal(words[..., key // 32] >> np.uint32(key % 32) & np.uint32(1), bits[..., key])
    np.testing.assert_array_equal(block_list.unpack(words, block_kv), bits)


@given(problems())
def test_existing_pairs_are_those_inside_the_lengths(problem: Problem) -> None:
    frame, (block_q, block_kv) = framed(problem.mask, problem.block_size), problem.block_size
    keys = np.arange(frame.n_blocks)
    exists = block_list.unpack(block_list.in_bounds_bitmasks(frame), block_kv)[block_list.edge_kinds(keys, frame)]
    _, rows, cols = (index[:, None, None] for index in frame.positions(keys))
    q_pos, kv_pos = rows * block_q + np.arange(block_q)[:, None], cols * block_kv + np.arange(block_kv)
    np.testing.assert_array_equal(exists, (q_pos < frame.q_len) & (kv_pos < frame.kv_len))
    interior, last_col, last_row, corner = block_list.in_bounds_bitmasks(frame)
    if frame.q_len % block_q == 0:
        assert np.array_equal(interior, last_row) and np.array_equal(last_col, corner)
    if frame.kv_len % block_kv == 0:
        assert np.array_equal(interior, last_col) and np.array_equal(last_row, corner)


@given(problems())
def test_positions_take_keys_apart(problem: Problem) -> None:
    frame = framed(problem.mask, problem.block_size)
    batch_heads, rows, cols = frame.positions(np.arange(frame.n_blocks))
    places = np.indices((frame.batch_heads, frame.n_rows, frame.n_cols)).reshape(3, -1)
    np.testing.assert_array_equal([batch_heads, rows, cols], places)


@given(problems())
def test_a_mask_becomes_a_canonical_list_and_comes_back(problem: Problem) -> None:
    frame = framed(problem.mask, problem.block_size)
    found = from_mask(problem.mask, problem.block_size)
    assert_canonical(found, frame)
    np.testing.assert_array_equal(to_mask(found, frame), problem.mask)


def test_the_canonical_check_sees_every_fault() -> None:
    mask = np.zeros((1, 1, 40, 40), np.bool_)
    mask[..., :20, :20] = True
    frame = framed(mask, (16, 16))
    keys, ids, bitmasks = from_mask(mask, (16, 16))
    assert ids.tolist() == [FULL, 0, 1, 2]
    whole = np.full_like(bitmasks[:1], 0xFFFF)
    faults = [
        (keys[::-1], ids, bitmasks),
        (np.append(keys[:-1], 9), ids, bitmasks),
        (keys, ids, bitmasks[[1, 0, 2]]),
        (keys, np.array([FULL, 1, 0, 2], np.int32), bitmasks),
        (keys, ids, np.concatenate([bitmasks, whole])),
        (keys, np.array([FULL, 0, 1, 0], np.int32), bitmasks),
        (keys, ids, np.concatenate([whole, bitmasks[1:]])),
        (keys, ids, bitmasks * 0),
        (keys, ids, bitmasks[[0, 1, 1]]),
        (keys + 4, ids, bitmasks),
        (keys, ids.astype(np.int64), bitmasks),
    ]
    assert_canonical(BlockList(keys, ids, bitmasks), frame)
    seen = 0
    for fault in faults:
        try:
            assert_canonical(BlockList(*fault), frame)
            seen += not np.array_equal(to_mask(BlockList(*fault), frame), mask)
        except (AssertionError, IndexError):
            seen += 1
    assert seen == len(faults)


@pytest.mark.parametrize("op", ["|", "&", "-", "^"])
@given(problem=problems(n_masks=2))
def test_combining_lists_combines_masks(op: Any, problem: Problem) -> None:
    (a, b), size = problem.masks, problem.block_size
    expected = {"|": a | b, "&": a & b, "-": a & ~b, "^": a ^ b}[op]
    found = set_operations.combine(from_mask(a, size), from_mask(b, size), op, framed(a, size))
    assert_same(found, from_mask(expected, size))


@given(problems())
def test_complement_and_transpose_are_those_of_the_mask(problem: Problem) -> None:
    mask, size = problem.mask, problem.block_size
    found, frame = from_mask(mask, size), framed(mask, size)
    assert_same(set_operations.complement(found, frame), from_mask(~mask, size))
    assert_same(set_operations.transpose(found, frame), from_mask(mask.swapaxes(2, 3), size[::-1]))


@given(problems())
def test_canonical_undoes_any_other_way_to_store_a_mask(problem: Problem) -> None:
    """Every block stored, each with its own bitmask, in any order, with bits set beyond the lengths."""
    mask, (block_q, block_kv) = problem.mask, problem.block_size
    frame = framed(mask, problem.block_size)
    keys = np.arange(frame.n_blocks)
    padded = np.ones((frame.batch_heads, frame.n_rows * block_q, frame.n_cols * block_kv), np.bool_)
    padded[:, : frame.q_len, : frame.kv_len] = mask.reshape(frame.batch_heads, *mask.shape[2:])
    split = padded.reshape(frame.batch_heads, frame.n_rows, block_q, frame.n_cols, block_kv)
    words = block_list.pack(split.swapaxes(2, 3).reshape(len(keys), block_q, block_kv))
    order = problem.random.permutation(len(keys))
    ids = np.empty(len(keys), np.int32)
    ids[order] = np.arange(len(keys))
    expected = from_mask(mask, problem.block_size)
    assert_same(block_list.canonical(BlockList(keys, ids, words[order]), frame), expected)
    assert_same(block_list.canonical(expected, frame), expected)


@given(problems())
def test_regrouping_changes_the_blocks_and_not_the_mask(problem: Problem) -> None:
    mask, old, new = problem.mask, problem.block_size, problem.new_block_size
    found = from_mask(mask, old)
    moved = block_list.regroup(found, framed(mask, old), new)
    assert_same(moved, from_mask(mask, new))
    assert_same(block_list.regroup(moved, framed(mask, new), old), found)


# every pair of old and new side: which one divides the other, or neither (48 and 80 against 128)
@pytest.mark.parametrize("old", dense_masks.SIDES)
@pytest.mark.parametrize("new", [16, 48, 64, 128, 240, 256])
def test_regrouping_is_exact_for_any_two_sides(old: int, new: int) -> None:
    random = np.random.default_rng(old * 1000 + new)
    # 300 and 333: both tails ragged for every side
    mask = random.random((1, 1, 300, 333)) < 0.5
    mask[..., 32:160, 64:320] = True
    mask[..., 160:, :200] = False
    found = block_list.regroup(from_mask(mask, (old, 64)), framed(mask, (old, 64)), (64, new))
    assert_same(found, from_mask(mask, (64, new)))


@given(problems(n_masks=2, axes_differ=True))
def test_broadcasting_repeats_axes_of_size_1(problem: Problem) -> None:
    mask, other = problem.masks
    new = max(mask.shape[0], other.shape[0]), max(mask.shape[1], other.shape[1])
    size = problem.block_size
    found = set_operations.broadcast(from_mask(mask, size), framed(mask, size), new)
    assert_same(found, from_mask(np.broadcast_to(mask, (*new, *mask.shape[2:])), size))


def test_a_hash_collision_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality is verified after hashing: if the first hash maps everything to 0, a second one is used."""
    random = np.random.default_rng(0)
    mask = random.random((1, 2, 200, 200)) < 0.5
    found, expected = from_mask(mask, (32, 48)), from_mask(mask, (64, 64))
    true_mix, seeds = block_list._mix, []

    def weak_mix(values: np.ndarray, seed: int) -> np.ndarray:
        seeds.append(seed)
        return true_mix(values, seed) * np.uint64(seed > 1)

    monkeypatch.setattr(block_list, "_mix", weak_mix)
    assert_same(block_list.regroup(found, framed(mask, (32, 48)), (64, 64)), expected)
    assert max(seeds) >= 2


@given(problems(n_masks=2))
def test_small_chunks_give_the_same_lists(problem: Problem) -> None:
    (a, b), size = problem.masks, problem.block_size
    frame = framed(a, size)

    def everything() -> list[BlockList]:
        one, other = from_mask(a, size), from_mask(b, size)
        return [
            one,
            set_operations.combine(one, other, "|", frame),
            set_operations.transpose(one, frame),
            block_list.regroup(one, frame, problem.new_block_size),
            BlockList(*(to_mask(one, frame),) * 3),
        ]

    whole = everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_list, "_CHUNK_BYTES", 5000)
        for actual, expected in zip(everything(), whole, strict=True):
            assert_same(actual, expected)


@given(st.lists(st.integers(0, 500)), st.sampled_from([501, 10**9]))
def test_distinct_is_unique(codes: list[int], limit: int) -> None:
    """10**9 codes are sorted, 501 are counted."""
    values, inverse = block_list.distinct(np.array(codes, np.int64), limit)
    np.testing.assert_array_equal(values, sorted(set(codes)))
    np.testing.assert_array_equal(values[inverse], np.array(codes, np.int64))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1))))
def test_run_lengths_cover_equal_values(pairs: list[tuple[int, int]]) -> None:
    one, other = np.array(pairs, np.int64).reshape(-1, 2).T
    runs = [(value, len(list(run))) for value, run in itertools.groupby(pairs)]
    starts, lengths = block_list.run_lengths(one, other)
    assert list(zip(zip(one[starts], other[starts], strict=True), lengths, strict=True)) == runs


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_ranges_lie_one_after_another(pairs: list[tuple[int, int]]) -> None:
    starts, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    expected = [start + step for start, count in pairs for step in range(count)]
    np.testing.assert_array_equal(block_list.ranges(starts, counts), np.array(expected, np.int64))


def test_empty_and_full_bitmasks_are_not_stored() -> None:
    exists = block_list.in_bounds_bitmasks(Frame(1, 1, 20, 20, (16, 16)))
    words = np.stack([exists[0] * 0, exists[0], exists[1], exists[1]])
    # bits that are full at the edge, and the same bits in an interior block
    ids, kinds = np.array([0, 1, 2, 3, EMPTY]), np.array([0, 0, 1, 0])
    found = block_list.canonical_from_bitmasks(np.arange(5), ids, words, kinds, exists)
    assert found.keys.tolist() == [1, 2, 3]
    assert found.ids.tolist() == [FULL, FULL, 0]
    np.testing.assert_array_equal(found.bitmasks, exists[1:2])


@pytest.mark.parametrize("shape", [(1, 3, 5), (4, 3, 2), (2, 1, 7), (2, 0, 3), (3, 2, 0)])
def test_full_blocks_by_rows(shape: tuple[int, int, int]) -> None:
    """Each batch_head ends where the next begins, even without blocks."""
    batch_heads, n_rows, n_cols = shape
    mask = np.random.default_rng(0).random(shape) < 0.4
    mask[batch_heads // 2 :, :1] = False
    keys, frame = np.flatnonzero(mask), Frame(1, batch_heads, 16 * n_rows, 32 * n_cols, (16, 32))
    indptr, cols, ids, bitmasks = block_list.by_rows(block_list.full_list(keys, (16, 32)), frame)
    ends = mask.sum(axis=2).reshape(-1).cumsum().reshape(batch_heads, n_rows)
    firsts = np.append(0, ends[:-1, -1]) if n_rows else np.zeros(batch_heads)
    assert np.array_equal(indptr, np.column_stack([firsts, ends])) and np.array_equal(cols, mask.nonzero()[2])
    assert indptr.dtype == cols.dtype == ids.dtype == np.int32 and (ids == FULL).all() and bitmasks.shape == (0, 16, 1)


def test_a_list_without_bitmasks_is_canonical_as_it_is() -> None:
    """Full blocks on ragged edges too; the ids are copies."""
    keys, ids = np.array([0, 3, 5]), np.full(3, FULL, np.int32)
    given = BlockList(keys, ids, block_list.no_bitmasks((16, 16)))
    found = block_list.canonical(given, Frame(1, 1, 20, 40, (16, 16)))
    assert_same(found, given)
    assert not np.shares_memory(found.ids, ids)
