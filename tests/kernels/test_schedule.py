"""schedule.py: which rows and columns are split, and how many a plan marks as worth splitting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.kernels.schedule import TILE, WHOLE, Split, choose, split_of
from blocksparse_flash.plan_format import Plan, n_split_of

# an H200
MULTIPROCESSORS = 132


def counted(plan: Plan) -> list[int]:
    """Rows and columns worth splitting, as the lengths of a plan say."""
    return [n_split_of(len(lists[0]), len(lists[1])) for lists in (plan[1:3], plan[4:6])]


def shapes(length: int, heads: int, kv_heads: int, batch: int = 1) -> tuple[torch.Size, torch.Size]:
    return torch.Size((batch, heads, length, 128)), torch.Size((batch, kv_heads, length, 128))


# ---- what a plan says ----


def long_lines_by_loop(blocks: Tensor, *, columns: bool) -> int:
    """Of the head that has most: lines with over 1/64 of the head's tiles, and over twice the mean of all lines of
    all heads."""
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
def test_lines_worth_splitting_are_those_of_the_mask(
    seed: int, axes: tuple[int, int], sides: tuple[int, int], density: float, n_global: int
) -> None:
    """Some lines of each head are whole, others than in its neighbours. 130: a line of a whole diagonal is below
    1/64."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(*axes, *sides, generator=generator) < density
    for head in blocks.flatten(0, 1):
        head[torch.randint(sides[0], (n_global,), generator=generator)] = True
        head[:, torch.randint(sides[1], (n_global // 2,), generator=generator)] = True
    layout = BlockLayout.from_block_mask(blocks, sides[0] * TILE, sides[1] * TILE, block_size=TILE)
    plan = layout.plan("cpu")
    assert counted(plan) == [long_lines_by_loop(blocks, columns=columns) for columns in (False, True)]
    # they are among those that a launch takes first
    for items, count in zip((plan.row_records, plan.col_records), counted(plan), strict=True):
        assert count <= min(63, int(items[0, 0, 0, 7]))


def test_global_rows_and_columns_are_counted() -> None:
    """BigBird's two, Longformer's 300 tokens in three tiles; none where lines are about as long, or all short of a
    64th."""
    length = 16384
    assert counted(masks.bigbird(length, seed=0).plan("cpu")) == [2, 2]
    longformer = masks.longformer(length, window=256, global_tokens=300)
    assert counted(longformer.plan("cpu")) == [3, 3]
    for layout in (masks.butterfly(length), masks.local(length, window=500), masks.causal(length)):
        assert counted(layout.plan("cpu")) == [0, 0], layout


def test_a_selection_on_a_device_names_none() -> None:
    """Nobody on the host knows what was selected."""
    indices = torch.zeros(1, 1, 64, 1, dtype=torch.int32)
    plan = BlockLayout.from_topk(indices, 64 * TILE, 64 * TILE, block_size=TILE).plan("cpu")
    assert plan.col_records[0, 0, 0, 2] == 64
    assert counted(plan) == [0, 0]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_lists_of_different_kinds_never_have_a_length_in_common(kind: str) -> None:
    """Or torch.compile would take them for one symbol, and compile again where they differ. Their lengths tell them
    apart mod 8."""
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
        # the two that always agree, one value behind the last
        assert lengths[0] == lengths[2] > int(plan.row_records[..., 2].sum())
        assert all(length <= lengths[0] + 8 * 63 + 4 for length in lengths)


# ---- what is chosen ----


def bigbird(length: int) -> list[Tensor]:
    return list(masks.bigbird(length, seed=0).plan("cpu"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "cols"),
    [
        # no line is longer than the share of a SM: 16 heads of 1,500 tiles, of which a line has 128
        (16, 16, WHOLE, WHOLE),
        # one column of 4 heads is
        (16, 4, WHOLE, Split(2, 4)),
        (2, 2, Split(2, 7), Split(2, 7)),
        (1, 1, Split(2, 14), Split(2, 14)),
    ],
)
def test_long_lines_are_split_where_they_pass_the_fair_share(
    heads: int, kv_heads: int, rows: Split, cols: Split
) -> None:
    plan = bigbird(16384)
    sizes = shapes(16384, heads, kv_heads)
    assert [split_of(plan, first, *sizes, False, MULTIPROCESSORS) for first in (0, 3)] == [rows, cols]


def test_no_part_is_longer_than_the_fair_share() -> None:
    """The measured case: 262,144 tokens, 16 query heads on 4."""
    length, plan = 65536, bigbird(65536)
    split = split_of(plan, 3, *shapes(length, 16, 4), False, MULTIPROCESSORS)
    n_tiles = 16 * int(plan[3][..., 2].sum())
    assert split.n_lines == 2 and 4 * (length // TILE) / split.parts <= n_tiles / MULTIPROCESSORS
    assert 4 * (length // TILE) / (split.parts - 1) > n_tiles / MULTIPROCESSORS


@pytest.mark.parametrize(
    ("length", "heads", "causal", "expected"),
    [
        # more programs than SMs; as many, of which causal ones are uneven; half as many; so few tiles that a launch
        # more is not worth it
        (16384, 16, False, WHOLE),
        (16384, 16, True, WHOLE),
        (8192, 2, False, WHOLE),
        (8192, 2, True, Split(64, 2)),
        (8192, 1, False, Split(64, 2)),
        (4096, 1, False, Split(32, 4)),
        (1024, 1, False, WHOLE),
    ],
)
def test_without_a_layout_all_columns_are_split_to_fill_the_gpu(
    length: int, heads: int, causal: bool, expected: Split
) -> None:
    assert split_of([], 3, *shapes(length, heads, heads), causal, MULTIPROCESSORS) == expected
    # which does not pay
    assert split_of([], 0, *shapes(length, heads, heads), causal, MULTIPROCESSORS) == WHOLE


def test_columns_of_a_layout_of_few_even_lines_are_split_to_fill_the_gpu() -> None:
    """32 tile columns of 32 tiles."""
    blocks = torch.zeros(64, 32, dtype=torch.bool)
    blocks[:32] = True
    layout = BlockLayout.from_block_mask(blocks, 64 * TILE, 32 * TILE, block_size=TILE)
    q_shape, k_shape = torch.Size((1, 1, 64 * TILE, 64)), torch.Size((1, 1, 32 * TILE, 64))
    assert split_of(list(layout.plan("cpu")), 3, q_shape, k_shape, False, MULTIPROCESSORS) == Split(32, 4)
    assert split_of(list(layout.plan("cpu")), 0, q_shape, k_shape, False, MULTIPROCESSORS) == WHOLE


@pytest.mark.parametrize("shape", [(0, 2, 256, 64), (1, 2, 0, 64), (2, 0, 256, 64)])
def test_nothing_is_not_split(shape: tuple[int, ...]) -> None:
    assert split_of([], 0, torch.Size(shape), torch.Size(shape), False, MULTIPROCESSORS) == WHOLE
    assert split_of([], 3, torch.Size(shape), torch.Size(shape), False, MULTIPROCESSORS) == WHOLE


@given(
    n_lines=st.integers(1, 9000),
    n_batch_heads=st.integers(1, 300),
    others=st.integers(1, 9000),
    mean=st.floats(0.01, 1.0),
    n_long=st.integers(0, 63),
    is_even=st.booleans(),
    n_sms=st.sampled_from([1, 16, 132]),
)
def test_what_is_chosen_is_bounded(
    n_lines: int, n_batch_heads: int, others: int, mean: float, n_long: int, is_even: bool, n_sms: int
) -> None:
    """Parts take no more memory than half of a tensor of 16 bits, or few lines a SM; lines are those there are."""
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
    assert split == WHOLE or (split.n_lines in (n_long, n_lines) and 2 <= split.parts <= 16)
    if others * n_sms <= work:
        assert split == WHOLE
    of_tensor, of_line = 2 * n_lines * n_batch_heads * TILE * 128, 4 * TILE * 128
    assert 4 * split.floats(128, n_batch_heads) <= max(of_tensor / 2, 4 * n_sms * of_line)


# 4 parts would do; of 40 lines they would take more than half of the memory of what becomes of them
@pytest.mark.parametrize(("n_long", "parts"), [(4, 4), (32, 4), (40, 3), (60, 2)])
def test_many_long_lines_have_fewer_parts(n_long: int, parts: int) -> None:
    sizes = {"longest": 2048, "work": 4 * 512 * 40, "is_even": True, "n_sms": MULTIPROCESSORS}
    assert choose(512, 4, n_long=n_long, **sizes) == Split(n_long, parts)


def test_programs_and_memory() -> None:
    split = Split(2, 3)
    # 10 lines of 4 heads, two of which are three programs each
    assert split.n_programs(10, 4) == 4 * (8 + 2 * 3)
    assert split.floats(64, 4) == 4 * 2 * 3 * 128 * 64
    assert WHOLE.n_programs(10, 4) == 40 and WHOLE.floats(64, 4) == 0
