"""blocks/key_runs.py, interop/flashmask.py and magi.py, against loops over the definitions of the formats, by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.key_runs import complement, merged
from blocksparse_flash.interop import from_flashmask, from_magi, to_flashmask, to_magi
from blocksparse_flash.interop.block_arrays import layout_of_runs, runs_of
from tests.support.dense_masks import Problem, problem, problems

seeds = st.integers(0, 2**32 - 1)


def dense(layout: BlockLayout) -> np.ndarray:
    return layout.to_dense().numpy()


# ---------------------------------------------------------------------------------------------------------------- runs


@given(problems())
def test_runs_are_the_longest_of_every_query(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    found = runs_of(layout)
    expected = []
    for line, query in enumerate(problem.mask.reshape(-1, problem.kv_len) if problem.mask.size else ()):
        inside = np.flatnonzero(query)
        for part in np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1):
            if len(part):
                expected.append((line, part[0], part[-1] + 1))
    assert list(zip(*(array.tolist() for array in found), strict=True)) == expected
    assert layout_of_runs(found, layout._frame) == layout
    # runs do not depend on the block size
    again = layout_of_runs(found, layout._frame._replace(block_size=problem.new_block_size))
    assert again == BlockLayout.from_dense(problem.mask, block_size=problem.new_block_size)


@given(problems())
def test_a_few_pairs_at_once_give_the_same(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blocksparse_flash.blocks.block_list._CHUNK_BYTES", 1)
        again = layout_of_runs(runs_of(layout), layout._frame)
    assert again == layout


@given(seeds)
def test_merged_is_the_union(seed: int) -> None:
    random = np.random.default_rng(seed)
    length, n_lines, count = int(random.integers(1, 30)), int(random.integers(1, 5)), int(random.integers(0, 20))
    lines, first = random.integers(0, n_lines, count), random.integers(0, length + 1, count)
    stop = random.integers(0, length + 1, count)
    mask = np.zeros((n_lines, length), np.bool_)
    for line, begin, end in zip(lines, first, stop, strict=True):
        mask[line, begin:end] = True
    found, again = merged(lines, first, stop, length), np.zeros_like(mask)
    for line, begin, end in zip(*found, strict=True):
        assert begin < end
        assert not again[line, max(begin - 1, 0) : end + 1].any(), "runs touch"
        again[line, begin:end] = True
    np.testing.assert_array_equal(again, mask)
    outside = np.zeros_like(mask)
    for line, begin, end in zip(*complement(found, n_lines, length), strict=True):
        assert begin < end
        outside[line, begin:end] = True
    np.testing.assert_array_equal(outside, ~mask)


# ----------------------------------------------------------------------------------------------------------- FlashMask


def flashmask(bounds: np.ndarray, q_len: int, causal: bool) -> np.ndarray:
    """bool (batch, heads, q_len, kv_len): the pairs that FlashMask's column bounds keep, one pair at a time."""
    batch, heads, kv_len, n_bounds = bounds.shape
    mask = np.zeros((batch, heads, q_len, kv_len), np.bool_)
    for b, h, i, j in np.ndindex(mask.shape):
        row = [int(bound) for bound in bounds[b, h, j]]
        if causal:
            masked = j > i + kv_len - q_len or (row[0] <= i if n_bounds == 1 else row[0] <= i < row[1])
        else:
            masked = row[0] <= i or i < row[1] if n_bounds == 2 else row[0] <= i < row[1] or row[2] <= i < row[3]
        mask[b, h, i, j] = not masked
    return mask


def random_bounds(random: np.random.Generator, causal: bool, n_bounds: int) -> tuple[np.ndarray, int]:
    """Random bounds, constant over runs of keys as for documents, or independent; sometimes above q_len."""
    q_len, kv_len = (int(random.integers(0, 70)) for _ in range(2))
    if random.random() < 0.3:
        kv_len = q_len
    shape = int(random.choice([1, 2])), int(random.choice([1, 3]))
    n_different = int(random.choice([1, 3, max(kv_len, 1)]))
    which = np.sort(random.integers(0, n_different, kv_len))
    return random.integers(0, q_len + 9, (*shape, n_different, n_bounds))[:, :, which].astype(np.int32), q_len


@pytest.mark.parametrize(("causal", "n_bounds"), [(True, 1), (True, 2), (False, 2), (False, 4)])
@given(seed=seeds)
def test_from_flashmask_leaves_what_the_bounds_leave(causal: bool, n_bounds: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    bounds, q_len = random_bounds(random, causal, n_bounds)
    block_size = int(random.choice([16, 48, 64])), int(random.choice([16, 48, 128]))
    expected = BlockLayout.from_dense(flashmask(bounds, q_len, causal), block_size=block_size)
    found = from_flashmask(torch.from_numpy(bounds), q_len, causal=causal, block_size=block_size)
    assert found == expected
    # intervals may touch or overlap, so fewer bounds may give the same mask
    again = to_flashmask(found, causal=causal)
    assert again.dtype == torch.int32
    assert again.shape[3] <= n_bounds
    np.testing.assert_array_equal(flashmask(again.numpy(), q_len, causal), dense(found))
    assert from_flashmask(again, q_len, causal=causal, block_size=block_size) == found


def n_masked(column: np.ndarray) -> int:
    """Number of intervals of False in each column."""
    return int((np.diff(np.concatenate([[1], column.astype(int)])) == -1).sum())


@pytest.mark.parametrize("causal", [False, True])
@given(problem=problems())
def test_to_flashmask_says_it_or_names_the_first_key(problem: Problem, causal: bool) -> None:
    mask, (q_len, kv_len) = problem.mask, problem.mask.shape[2:]
    below = np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len
    mask = mask & below if causal else mask
    layout = BlockLayout.from_dense(mask, block_size=problem.block_size)
    # `causal` masks above the diagonal, so no interval is needed there
    counted = [
        n_masked(column[seen])
        for head in mask.reshape(mask.shape[0] * mask.shape[1], q_len, kv_len)
        for column, seen in zip(head.T, below.T | (not causal), strict=True)
    ]
    limit = 1 if causal else 2
    if max(counted, default=0) <= limit:
        found = to_flashmask(layout, causal=causal)
        np.testing.assert_array_equal(flashmask(found.numpy(), q_len, causal), mask)
        return
    batch_head, key = divmod(int(np.argmax(np.array(counted) > limit)), kv_len)
    batch, head = divmod(batch_head, mask.shape[1])
    n_intervals = counted[batch_head * kv_len + key]
    words = f"masks {n_intervals} separate intervals of queries for key {key} of batch {batch}, head {head}"
    with pytest.raises(ValueError, match=words):
        to_flashmask(layout, causal=causal)


def layout_where(attends: Any, q_len: int, kv_len: int, block_size: Any = 64) -> BlockLayout:
    return BlockLayout.from_predicate(attends, q_len, kv_len, block_size=block_size)


@pytest.mark.parametrize(
    ("attends", "causal", "column"),
    [
        # key 100 of 203 queries: which are masked
        (lambda q, kv: kv <= q, True, [203]),
        (lambda q, kv: (kv <= q) & (q <= kv + 30), True, [131]),
        (lambda q, kv: (kv <= q) & ~((q > kv + 30) & (q < 180)), True, [131, 180]),
        (lambda q, kv: (q - kv).abs() <= 30, False, [131, 70]),
        (lambda q, kv: q // 50 == kv // 50, False, [150, 100]),
        (lambda q, kv: kv <= q, False, [203, 100]),
        (lambda q, kv: ((q - kv).abs() <= 30) | (q < 5) | (q > 190), False, [131, 191, 5, 70]),
        (lambda q, kv: (q < 20) | (q >= 40), False, [20, 40, 0, 0]),
        (lambda q, kv: q < 0, False, [0, 0]),
        (lambda q, kv: q >= 0, False, [203, 0]),
    ],
)
def test_flashmask_takes_as_few_bounds_as_will_do(attends: Any, causal: bool, column: list[int]) -> None:
    assert to_flashmask(layout_where(attends, 203, 203), causal=causal)[0, 0, 100].tolist() == column


def test_flashmask_of_grouped_heads() -> None:
    window = np.abs(np.arange(40)[:, None] - np.arange(40)) <= np.array([3, 3, 8, 8])[:, None, None]
    layout = BlockLayout.from_dense(window, block_size=16)
    bounds = to_flashmask(layout, kv_heads=2)
    assert bounds.shape == (1, 2, 40, 2)
    assert from_flashmask(bounds, 40, causal=False, block_size=16, heads=4) == layout
    shared = BlockLayout.from_dense(window[0], block_size=16)
    assert to_flashmask(shared, kv_heads=3).shape == (1, 3, 40, 2)
    with pytest.raises(ValueError, match=r"gives head 2 another mask than head 0.*kv_heads=1 puts them in one group"):
        to_flashmask(layout, kv_heads=1)
    with pytest.raises(ValueError, match="kv_heads must divide the layout's heads, 4, got 3"):
        to_flashmask(layout, kv_heads=3)
    with pytest.raises(ValueError, match="heads must be a multiple of the mask's heads, 2, got 3"):
        from_flashmask(bounds, 40, causal=False, block_size=16, heads=3)


def test_flashmask_of_a_million_tokens_takes_what_it_stores() -> None:
    length = 1 << 20
    window = torch.arange(4096, length + 4096, dtype=torch.int32).reshape(1, 1, length, 1)
    layout = from_flashmask(window, length, causal=True, block_size=128)
    assert (layout.nnz, len(layout.bitmasks)) == (8192 * 33 - 33 * 32 // 2, 2)
    again = to_flashmask(layout, causal=True)
    assert torch.equal(again, window.clamp(max=length))


@pytest.mark.parametrize("value", [2**63 - 1, 2**63, 2**64 - 1])
def test_flashmask_bounds_of_any_size_mean_all_queries(value: int) -> None:
    """Values beyond int64 once wrapped to negative numbers and masked every pair."""
    bounds = torch.full((1, 1, 3, 1), value, dtype=torch.uint64)
    assert (
        from_flashmask(bounds, 3, causal=True, block_size=16).to_dense()[0, 0].tolist()
        == np.tri(3, dtype=bool).tolist()
    )


good = torch.tensor([[[[2], [3], [4]]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: from_flashmask(good, 4, causal=False, block_size=16),
            ValueError,
            "must end in 2 or 4 bounds with causal=False",
        ),
        (
            lambda: from_flashmask(good.repeat(1, 1, 1, 4), 4, causal=True, block_size=16),
            ValueError,
            "must end in 1 or 2 bounds with causal=True",
        ),
        (
            lambda: from_flashmask(good - 3, 4, causal=True, block_size=16),
            ValueError,
            r"must not be negative, got -1 at \(0, 0, 0, 0\)",
        ),
        (
            lambda: from_flashmask(good.float(), 4, causal=True, block_size=16),
            ValueError,
            "must be integers, got torch.float32",
        ),
        (
            lambda: from_flashmask(good.bfloat16(), 4, causal=True, block_size=16),
            ValueError,
            "must be integers, got torch.bfloat16",
        ),
        (
            lambda: from_flashmask(good[0], 4, causal=True, block_size=16),
            ValueError,
            "must have shape .batch, heads, kv_len, bounds.",
        ),
        (lambda: from_flashmask(good, 4, causal=1, block_size=16), TypeError, "causal must be True or False, got 1"),
        (lambda: from_flashmask([[2]], 4, causal=True, block_size=16), TypeError, "must be a torch.Tensor, got list"),
        (
            lambda: from_flashmask(good, 4, causal=True, block_size=17),
            ValueError,
            "block_size must be a multiple of 16",
        ),
        (
            lambda: to_flashmask(layout_where(lambda q, kv: q >= 0, 30, 40, 16), causal=True),
            ValueError,
            "no pair above the diagonal with causal=True, but query 0 attends to key 11",
        ),
        (
            lambda: to_flashmask(layout_where(lambda q, kv: (q % 4 < 2) | (kv != 7), 30, 40, 16)),
            ValueError,
            "masks 7 separate intervals of queries for key 7 of batch 0, head 0, but FlashMask can express only 2",
        ),
        (lambda: to_flashmask(good), TypeError, "layout must be a BlockLayout, got Tensor"),
    ],
)
def test_wrong_calls_with_flashmask_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------------------------------------------------------- Magi


def magi(q_ranges: Any, k_ranges: Any, kinds: Any, q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(bool mask, how often each pair is in a slice), slice by slice and pair by pair."""
    times = np.zeros((q_len, kv_len), np.int64)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, kinds, strict=True):
        for q in range(q0, q1):
            for k in range(k0, k1):
                causal, inverse = k - k1 <= q - q1, k - k0 >= q - q0
                times[q, k] += (True, causal, inverse, causal and inverse)[kind]
    return times > 0, times


@given(seeds)
def test_from_magi_is_the_union_of_the_slices(seed: int) -> None:
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(random.integers(0, 80)) for _ in range(2))
    count = int(random.integers(0, 6))
    q_ranges, k_ranges = (np.sort(random.integers(0, length + 1, (count, 2)), axis=1) for length in (q_len, kv_len))
    kinds = random.integers(0, 4, count)
    block_size = int(random.choice([16, 48, 64])), int(random.choice([16, 48, 128]))
    found = from_magi(
        torch.from_numpy(q_ranges).int(),
        k_ranges.tolist(),
        torch.from_numpy(kinds),
        q_len,
        kv_len,
        block_size=block_size,
    )
    assert found == BlockLayout.from_dense(magi(q_ranges, k_ranges, kinds, q_len, kv_len)[0], block_size=block_size)
    if not kinds.any():
        assert from_magi(q_ranges, k_ranges, None, q_len, kv_len, block_size=block_size) == found


@pytest.mark.parametrize(
    ("lengths", "kind", "rows"),
    [
        # from the documentation of MagiAttention
        ((5, 2), 1, ["00", "00", "00", "10", "11"]),
        ((2, 5), 1, ["11110", "11111"]),
        ((5, 2), 2, ["11", "01", "00", "00", "00"]),
        ((2, 5), 2, ["11111", "01111"]),
        ((5, 2), 3, ["00", "00", "00", "00", "00"]),
        ((2, 5), 3, ["11110", "01111"]),
    ],
)
def test_from_magi_draws_their_pictures(lengths: tuple[int, int], kind: int, rows: list[str]) -> None:
    found = from_magi([[0, lengths[0]]], [[0, lengths[1]]], [kind], *lengths, block_size=16)
    assert ["".join("01"[int(pair)] for pair in row) for row in dense(found)[0, 0]] == rows


@given(seeds)
def test_to_magi_covers_every_pair_once(seed: int) -> None:
    found = problem(seed)
    layout = BlockLayout.from_dense(found.mask[:1, :1], block_size=found.block_size)
    slices = to_magi(layout, max_slices=10**9)
    assert all(tensor.dtype == torch.int32 for tensor in slices)
    mask, times = magi(*(tensor.tolist() for tensor in slices), *layout.shape[2:])
    np.testing.assert_array_equal(mask, found.mask[0, 0])
    assert times.max(initial=0) <= 1
    assert from_magi(*slices, *layout.shape[2:], block_size=layout.block_size) == layout


@pytest.mark.parametrize(
    ("attends", "slices"),
    [
        (lambda q, kv: q >= 0, [([0, 203], [0, 203], 0)]),
        (lambda q, kv: kv <= q, [([0, 203], [0, 203], 1)]),
        (lambda q, kv: kv >= q, [([0, 203], [0, 203], 2)]),
        (lambda q, kv: (kv <= q) & (q - kv <= 30), [([0, 30], [0, 30], 1), ([30, 203], [0, 203], 3)]),
        (
            lambda q, kv: q // 80 == kv // 80,
            [([0, 80], [0, 80], 0), ([80, 160], [80, 160], 0), ([160, 203], [160, 203], 0)],
        ),
        (
            lambda q, kv: (q // 80 == kv // 80) & (kv <= q),
            [([0, 80], [0, 80], 1), ([80, 160], [80, 160], 1), ([160, 203], [160, 203], 1)],
        ),
        (lambda q, kv: (kv < 50) | (kv <= q), [([0, 49], [0, 50], 0), ([49, 203], [0, 203], 1)]),
        (lambda q, kv: q < 0, []),
    ],
)
def test_to_magi_finds_the_obvious_slices(attends: Any, slices: list[Any]) -> None:
    found = to_magi(layout_where(attends, 203, 203))
    assert list(zip(*(tensor.tolist() for tensor in found), strict=True)) == slices


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: from_magi([[0, 5]], [[0, 5], [0, 1]], [0], 9, 9, block_size=16),
            "must have one entry for each slice, got 1, 2 and 1",
        ),
        (
            lambda: from_magi([[0, 10]], [[0, 5]], [0], 9, 9, block_size=16),
            r"q_ranges must have 0 <= start <= end <= q_len = 9, got \[0, 10\] at 0",
        ),
        (
            lambda: from_magi([[0, 5]], [[5, 4]], [0], 9, 9, block_size=16),
            "k_ranges must have 0 <= start <= end <= kv_len = 9",
        ),
        (
            lambda: from_magi([[0, 5]], [[0, 5]], [4], 9, 9, block_size=16),
            "attn_type_map must be in 0 .. 4 - 1 = 3, got 4 at 0",
        ),
        (lambda: from_magi([0, 5], [[0, 5]], [0], 9, 9, block_size=16), r"q_ranges must be integers \(n, 2\)"),
        (
            lambda: to_magi(BlockLayout.from_dense(torch.ones(2, 9, 9, dtype=torch.bool), block_size=16)),
            r"must be shared by all batches and heads.*got \(batch, heads\) \(1, 2\)",
        ),
        (
            lambda: to_magi(layout_where(lambda q, kv: (q + kv) % 2 == 0, 20, 20, 16), max_slices=18),
            "needs 19 slices, more than max_slices = 18",
        ),
    ],
)
def test_wrong_calls_with_magi_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_ranges_of_several_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q_ranges must be integers \(n, 2\), .* got \[\[1\], \[2, 3\]\]"):
        from_magi([[1], [2, 3]], [[0, 9], [0, 9]], None, 9, 9)
