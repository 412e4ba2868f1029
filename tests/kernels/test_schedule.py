"""Host-side scheduling: how many long lines a plan counts and which lines are split. A line: a tile row or column."""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.kernels.schedule import (
    TILE,
    WHOLE,
    Split,
    are_uneven,
    choose,
    interleaved_heads,
    split_of,
    sums_over_heads,
)
from blocksparse_flash.plan_format import N_LONG, Plan, n_split_of

# H200
N_SMS = 132


def counted(plan: Plan) -> list[int]:
    """Numbers of long tile rows and columns, which the lengths of a plan's lists encode."""
    return [n_split_of(len(lists[0]), len(lists[1])) for lists in (plan[1:3], plan[4:6])]


def shapes(length: int, heads: int, kv_heads: int, batch: int = 1) -> tuple[torch.Size, torch.Size]:
    return torch.Size((batch, heads, length, 128)), torch.Size((batch, kv_heads, length, 128))


# ---- long lines of a plan ----


def long_lines_by_loop(blocks: Tensor, *, columns: bool) -> int:
    """The most long lines in a head: over 1/64 of the head's tiles, and over twice the mean length of all heads."""
    heads = [[[bool(cell) for cell in row] for row in head] for head in blocks.flatten(0, 1).tolist()]
    if columns:
        heads = [list(map(list, zip(*head, strict=True))) for head in heads]
    sizes = [[sum(line) for line in head] for head in heads]
    mean = sum(map(sum, sizes)) / sum(map(len, sizes))
    return max(sum(64 * size > sum(head) and size > 2 * mean for size in head) for head in sizes)


@given(
    seed=st.integers(0, 10_000),
    axes=st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]),
    sides=st.sampled_from([(1, 1), (5, 9), (40, 12), (130, 130)]),
    density=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    n_global=st.integers(0, 4),
)
def test_long_lines_are_counted(
    seed: int, axes: tuple[int, int], sides: tuple[int, int], density: float, n_global: int
) -> None:
    """Each head has other dense lines. With 130 lines, those of average length are below 1/64 of the head's tiles."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(*axes, *sides, generator=generator) < density
    for head in blocks.flatten(0, 1):
        head[torch.randint(sides[0], (n_global,), generator=generator)] = True
        head[:, torch.randint(sides[1], (n_global // 2,), generator=generator)] = True
    layout = BlockLayout.from_block_mask(blocks, sides[0] * TILE, sides[1] * TILE, block_size=TILE)
    plan = layout.plan("cpu")
    assert counted(plan) == [long_lines_by_loop(blocks, columns=columns) for columns in (False, True)]
    # they are among the lines that a launch starts first
    for items, count in zip((plan.row_records, plan.col_records), counted(plan), strict=True):
        assert count <= min(63, int(items[0, 0, 0, N_LONG]))


def test_global_rows_and_columns_are_counted() -> None:
    """BigBird has two, Longformer's 300 tokens are three; no line is long if all are about equal or below 1/64."""
    length = 16384
    assert counted(masks.bigbird(length, seed=0).plan("cpu")) == [2, 2]
    longformer = masks.longformer(length, window=256, global_tokens=300)
    assert counted(longformer.plan("cpu")) == [3, 3]
    for layout in (masks.butterfly(length), masks.local(length, window=500), masks.causal(length)):
        assert counted(layout.plan("cpu")) == [0, 0], layout


def test_a_selection_on_the_device_counts_no_long_lines() -> None:
    """The host does not know which blocks were selected."""
    indices = torch.zeros(1, 1, 64, 1, dtype=torch.int32)
    plan = BlockLayout.from_topk(indices, 64 * TILE, 64 * TILE, block_size=TILE).plan("cpu")
    assert plan.col_records[0, 0, 0, 2] == 64
    assert counted(plan) == [0, 0]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_different_lists_of_a_plan_never_have_equal_lengths(kind: str) -> None:
    """torch.compile would give equal lengths one symbol and recompile when they differ, so lengths differ mod 8."""
    for n_blocks in range(40):
        blocks = torch.zeros(1, 1, 40, 40, dtype=torch.bool)
        blocks[0, 0, 0, :n_blocks] = True
        layout = BlockLayout.from_block_mask(blocks, 40 * TILE, 40 * TILE, block_size=TILE)
        if kind == "device":
            indices = torch.arange(n_blocks).repeat(1, 1, 40, 1)
            layout = BlockLayout.from_topk(indices, 40 * TILE, 40 * TILE, block_size=TILE)
        plan = layout.plan("cpu")
        lengths = [
            len(values) for values in (plan.row_indices, plan.row_bitmask_ids, plan.col_indices, plan.col_bitmask_ids)
        ]
        assert [length % 8 for length in lengths] == [1, 3, 1, 5]
        # row_indices and col_indices always have equal lengths, with at least one value of padding
        assert lengths[0] == lengths[2] > int(plan.row_records[..., 2].sum())
        assert all(length <= lengths[0] + 8 * (63 + 64) + 4 for length in lengths)


# ---- the choice of splits ----


def bigbird(length: int) -> list[Tensor]:
    return list(masks.bigbird(length, seed=0).plan("cpu"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "cols"),
    [
        # no line is longer than an SM's share: 16 heads of 1,500 tiles, and 128 tiles in the longest line
        (16, 16, WHOLE, WHOLE),
        # a tile column of a group of 4 heads is longer
        (16, 4, WHOLE, Split(2, 4)),
        (2, 2, Split(2, 7), Split(2, 7)),
        (1, 1, Split(2, 14), Split(2, 14)),
    ],
)
def test_lines_longer_than_an_sms_share_are_split(heads: int, kv_heads: int, rows: Split, cols: Split) -> None:
    plan = bigbird(16384)
    sizes = shapes(16384, heads, kv_heads)
    assert [split_of(plan, first, *sizes, False, N_SMS) for first in (0, 3)] == [rows, cols]


def test_no_split_is_longer_than_an_sms_share() -> None:
    """16 query heads on 4 KV heads, as in the measured case of 262,144 tokens."""
    length, plan = 65536, bigbird(65536)
    split = split_of(plan, 3, *shapes(length, 16, 4), False, N_SMS)
    n_tiles = 16 * int(plan[3][..., 2].sum())
    assert split.n_split_lines == 2 and 4 * (length // TILE) / split.num_splits <= n_tiles / N_SMS
    assert 4 * (length // TILE) / (split.num_splits - 1) > n_tiles / N_SMS


@pytest.mark.parametrize(
    ("length", "heads", "causal", "expected"),
    [
        # more programs than SMs; about as many, uneven if causal; half as many; too few tiles to pay for another launch
        (16384, 16, False, WHOLE),
        (16384, 16, True, WHOLE),
        (8192, 2, False, WHOLE),
        (8192, 2, True, Split(64, 2)),
        (8192, 1, False, Split(64, 2)),
        (4096, 1, False, Split(32, 4)),
        (1024, 1, False, WHOLE),
    ],
)
def test_all_columns_of_dense_attention_are_split_to_fill_the_gpu(
    length: int, heads: int, causal: bool, expected: Split
) -> None:
    assert split_of([], 3, *shapes(length, heads, heads), causal, N_SMS) == expected
    # splitting rows does not pay
    assert split_of([], 0, *shapes(length, heads, heads), causal, N_SMS) == WHOLE


def test_columns_of_a_layout_with_few_even_lines_are_split_to_fill_the_gpu() -> None:
    """32 tile columns of 32 tiles."""
    blocks = torch.zeros(64, 32, dtype=torch.bool)
    blocks[:32] = True
    layout = BlockLayout.from_block_mask(blocks, 64 * TILE, 32 * TILE, block_size=TILE)
    q_shape, k_shape = torch.Size((1, 1, 64 * TILE, 64)), torch.Size((1, 1, 32 * TILE, 64))
    assert split_of(list(layout.plan("cpu")), 3, q_shape, k_shape, False, N_SMS) == Split(32, 4)
    assert split_of(list(layout.plan("cpu")), 0, q_shape, k_shape, False, N_SMS) == WHOLE


@pytest.mark.parametrize("shape", [(0, 2, 256, 64), (1, 2, 0, 64), (2, 0, 256, 64)])
def test_empty_calls_are_not_split(shape: tuple[int, ...]) -> None:
    assert split_of([], 0, torch.Size(shape), torch.Size(shape), False, N_SMS) == WHOLE
    assert split_of([], 3, torch.Size(shape), torch.Size(shape), False, N_SMS) == WHOLE


@given(
    n_lines=st.integers(1, 9000),
    n_batch_heads=st.integers(1, 300),
    others=st.integers(1, 9000),
    mean=st.floats(0.01, 1.0),
    n_long=st.integers(0, 63),
    is_even=st.booleans(),
    n_sms=st.sampled_from([1, 16, 132]),
)
@example(n_lines=1, n_batch_heads=33, others=29, mean=0.125, n_long=0, is_even=False, n_sms=16)
def test_splits_and_their_workspace_are_bounded(
    n_lines: int, n_batch_heads: int, others: int, mean: float, n_long: int, is_even: bool, n_sms: int
) -> None:
    """The workspace is at most half of a 16-bit tensor, or 4 tile rows per SM."""
    n_long = min(n_long, n_lines)
    work = math.ceil(n_lines * n_batch_heads * others * mean)
    split = choose(
        n_lines,
        n_batch_heads,
        longest=others,
        work=work,
        n_long=n_long,
        is_even=is_even,
        n_sms=n_sms,
    )
    assert split == WHOLE or (split.n_split_lines in (n_long, n_lines) and 2 <= split.num_splits <= 16)
    if others * n_sms <= work:
        assert split == WHOLE
    of_tensor, of_line = 2 * n_lines * n_batch_heads * TILE * 128, 4 * TILE * 128
    assert 4 * split.floats(128, n_batch_heads) <= max(of_tensor / 2, 4 * n_sms * of_line)


# 4 splits would be enough; for 40 lines they would need a workspace of more than half of the result
@pytest.mark.parametrize(("n_long", "parts"), [(4, 4), (32, 4), (40, 3), (60, 2)])
def test_many_long_lines_have_fewer_splits(n_long: int, parts: int) -> None:
    sizes = {"longest": 2048, "work": 4 * 512 * 40, "is_even": True, "n_sms": N_SMS}
    assert choose(512, 4, n_long=n_long, **sizes) == Split(n_long, parts)


def test_a_split_counts_programs_and_memory() -> None:
    split = Split(2, 3)
    # 4 heads of 10 lines, two of which have three programs each
    assert split.n_programs(10, 4) == 4 * (8 + 2 * 3)
    assert split.floats(64, 4) == 4 * 2 * 3 * 128 * 64
    assert WHOLE.n_programs(10, 4) == 40 and WHOLE.floats(64, 4) == 0


def time_of_causal(n_lines: int, n_heads: int, n_interleaved: int) -> float:
    """Time until the last SM ends, as a multiple of an SM's fair share; line i of a head takes n_lines - i."""
    sections = [n_interleaved] * (n_heads // n_interleaved)
    sections[-1] += n_heads % n_interleaved
    lines = [n_lines - i for n_of_section in sections for i in range(n_lines) for _ in range(n_of_section)]
    ends = [0] * N_SMS
    for line in lines:
        heapq.heappush(ends, heapq.heappop(ends) + line)
    return max(ends) / (sum(lines) / N_SMS)


@pytest.mark.parametrize(
    ("n_lines", "n_heads", "expected"),
    [(64, 8, 8), (64, 32, 8), (64, 9, 8), (64, 15, 8), (32, 32, 16), (128, 16, 4), (16, 128, 32), (512, 8, 1)],
)
def test_causal_heads_in_turn_keep_all_sms_busy_to_the_end(n_lines, n_heads, expected):
    n_interleaved = interleaved_heads(n_lines, n_heads, N_SMS, 128 * n_lines, 128 * n_lines, is_uneven=True)
    assert n_interleaved == expected
    assert time_of_causal(n_lines, n_heads, n_interleaved) < 1.05


def test_causal_heads_after_each_other_leave_sms_idle():
    assert time_of_causal(64, 8, 1) > 1.2


def test_lines_of_causal_calls_and_of_layouts_below_the_diagonal_are_uneven() -> None:
    """The number of lines worth splitting is counted as in other layouts."""
    window, both_sides = masks.local(4096, window=(511, 0)), masks.local(4096, window=511)
    bigbird = masks.bigbird(16384, seed=0)
    for layout, expected in (
        (window, True),
        (both_sides, False),
        (bigbird, False),
        (bigbird & masks.causal(16384), True),
    ):
        plan = layout.plan("cpu")
        assert are_uneven(list(plan), False) == plan.is_lower_triangular == expected
        assert are_uneven(list(plan), True)
    assert are_uneven([], True) and not are_uneven([], False)
    assert counted((bigbird & masks.causal(16384)).plan("cpu")) == [0, 2]


def test_heads_follow_each_other_if_their_lines_are_equal_or_few():
    assert interleaved_heads(64, 8, N_SMS, 8192, 8192, is_uneven=False) == 1
    assert interleaved_heads(64, 1, N_SMS, 8192, 8192, is_uneven=True) == 1
    assert interleaved_heads(1, 999, N_SMS, 100, 100, is_uneven=True) == 32
    assert interleaved_heads(10**6, 8, N_SMS, 1 << 27, 1 << 27, is_uneven=True) == 1
    # a chunk of queries over a long cache
    assert interleaved_heads(8, 8, N_SMS, 1024, 8192, is_uneven=True) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "options", "expected"),
    [
        (32, 8, 8192, {}, True),
        (16, 1, 8192, {}, True),
        # one head per KV head; every tile column equally long; equal bits; a layout
        (8, 8, 8192, {}, False),
        (32, 8, 8192, {"causal": False}, False),
        (32, 8, 8192, {"deterministic": True}, False),
        (32, 8, 8192, {"has_layout": True}, False),
        # so few tile columns that they are split
        (2, 1, 4096, {}, False),
    ],
)
def test_query_heads_have_lines_of_their_own_in_causal_grouped_calls(heads, kv_heads, length, options, expected):
    plan = list(masks.local(length, window=128).plan("cpu")) if options.get("has_layout") else []
    causal, deterministic = options.get("causal", True), options.get("deterministic", False)
    found = sums_over_heads(plan, *shapes(length, heads, kv_heads), causal, N_SMS, deterministic=deterministic)
    assert found is expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "tiles", "expected"),
    [
        # (q_len, kv_len), tiles of a tile column
        (64, 4, (65536, 4096), 264, True),
        (64, 4, (8192, 8192), 12, True),
        (32, 8, (8192, 8192), 30, True),
        # short tile columns; with the list padded by less than one tile of each
        (64, 4, (8192, 8192), 11.9, False),
        # many by group: 1,024 for 132 SMs, or 528 at most; twice as many with groups of 16
        (64, 8, (16384, 16384), 30, False),
        (64, 4, (32768, 32768), 30, True),
        (64, 4, (65536, 65536), 30, False),
        # few by query head: 256
        (64, 4, (8192, 512), 30, False),
        (32, 8, (8192, 1024), 60, False),
        # no groups
        (64, 64, (8192, 512), 60, False),
    ],
)
def test_query_heads_have_lines_of_their_own_with_few_long_tile_columns(heads, kv_heads, lengths, tiles, expected):
    q_len, kv_len = lengths
    n_cols = -(-kv_len // TILE)
    records = torch.empty(1, 1, n_cols, 8, dtype=torch.int32)
    entries = torch.empty(round(tiles * n_cols), dtype=torch.int32)
    plan = [records, entries, entries, records, entries, entries, torch.empty(1, TILE, 4, dtype=torch.int32)]
    q_shape, k_shape = (1, heads, q_len, 128), (1, kv_heads, kv_len, 128)
    for causal in (False, True):
        assert sums_over_heads(plan, q_shape, k_shape, causal, N_SMS, deterministic=False) is expected
        assert not sums_over_heads(plan, q_shape, k_shape, causal, N_SMS, deterministic=True)
