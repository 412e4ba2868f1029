"""Scheduling of the kernels, from shapes alone: splits of tile rows and columns, order of heads, how dQ is summed.

A line is the unit of scheduling: a tile row of the forward or of the kernel for dQ, or a tile column of the backward
for all query heads of a group, or for one (sums_over_heads). Lines longer than an SM's fair share are split, since all
other SMs would wait for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import COL_LISTS, ROW_LISTS, TILE, is_lower_of, n_split_of, side_of, tile_of

# programs of the kernels for tiles of 64 x 64 that share an SM, on average over the kernels
PROGRAMS_PER_SM = 4
# most splits of a line
MAX_SPLITS = 16
# largest share of a head's lines that is split, times the number of splits: bounds the float32 workspace
MAX_SHARE = 1 / 4
# most programs per SM where all lines are split; each writes 65,536 bytes at head_dim 128, twice that in the backward
MAX_WAVES = 4
# cost, in tiles, of one more split (a program that starts, ends and writes float32) and of the combining launch;
# estimates, checked on an H200: see triton/TUNING.md
SPLIT_COST, COMBINE_COST = 2, 4
# of heads with at most 8 lines, interleaved_heads would choose 64 or 128 (132 SMs). 64 are no faster than 32; what 128
# read in the backward does not fit into L2
MAX_INTERLEAVED_HEADS = 32
# most waves of a static tile scheduler: the counter of the dynamic one is zeroed by a launch, 2 to 3 us of the GPU.
# More would gain little, and wait longer for SMs that a kernel of another stream occupies
MAX_STATIC_WAVES = 2
# split only if the estimated time is at most this share of the time without splitting
WORTHWHILE = 0.8
# dQ has a launch of its own up to this padded head dimension and this mean number of tiles per row, from this number of
# tile rows of all heads on, whose float32 dQ (268 MB for 8,192 of 64 columns) is far larger than an L2 cache. H200,
# head_dim 64, ms if summed and in a launch of its own: 2 tiles per row, batch 16 of 8 heads of 65,536 tokens, 5.73 and
# 5.47; 8 tiles, 32 heads of 16,384 tokens, 0.82 and 0.88; not measured again since backward_dq.py replaced a Triton
# kernel (hopper/TUNING.md)
SEPARATE_DQ_MAX_DIM, SEPARATE_DQ_MAX_TILES, SEPARATE_DQ_MIN_ROWS = 64, 3, 8192
# dQ also has a launch of its own if tile columns have LONG_COLUMN tiles and more, and a head fewer of them than there
# are SMs: those that run together belong to several heads, and add to sums of over MAX_SUM_BYTES, twice the L2 cache of
# an H100 (hopper/TUNING.md)
MAX_SUM_BYTES = 100_000_000
# with a layout, dK and dV are summed over query heads from this mean number of tiles per tile column on, for at most
# MAX_GROUP_WAVES tile columns of KV heads per SM (half the group if that is more), and at least MIN_HEAD_WAVES of query
# heads: see hopper/TUNING.md
LONG_COLUMN, MAX_GROUP_WAVES, MIN_HEAD_WAVES = 12, 4, 3
# largest head dimension at which one Hopper kernel computes dq, dk and dv
MAX_JOINT_HEAD_DIM = 128


def padded_dim(backend: str, head_dim: int) -> int:
    """The head dimension to which the kernels of a backend pad: tiles read zeros past head_dim."""
    if backend.startswith("hopper"):
        return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return max(16, 1 << (head_dim - 1).bit_length())


def forward_columns(head_dim: int, v_dim: int) -> tuple[int, int]:
    """Columns in the Hopper forward of (q and k, v and out): powers of two, 96 or 192 (hopper/tma.py).

    With 96, and beyond 128, q and k have as many as v or more, since out is staged in q's buffers.
    """
    widest = max(head_dim, v_dim)
    for low, third in ((64, 96), (128, 192)):
        if low < widest <= third:
            return third, third if v_dim > low else low
    if widest <= 128:
        return padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    return 256, 256


def backward_columns(head_dim: int, v_dim: int) -> tuple[int, int]:
    """Columns in the Hopper backward of (q and k, v and dO): powers of two, 96 up to head_dim 128, 192 beyond."""
    low, third = (128, 192) if max(head_dim, v_dim) > MAX_JOINT_HEAD_DIM else (64, 96)
    columns, columns_v = (third if low < dim <= third else padded_dim("hopper", dim) for dim in (head_dim, v_dim))
    return columns, columns_v


class Split(NamedTuple):
    """Which lines are split.

    n_split_lines  the first lines of every head in launch order, which are the longest ones
    num_splits     programs into which each of them is split
    side           tokens of a line
    """

    n_split_lines: int
    num_splits: int
    side: int = TILE

    def n_programs(self, n_lines: int, n_batch_heads: int) -> int:
        """Number of programs for n_lines lines of each of n_batch_heads heads."""
        return (n_lines + self.n_split_lines * (self.num_splits - 1)) * n_batch_heads

    def floats(self, columns: int, n_batch_heads: int) -> int:
        """Number of float32 values in the workspace of the splits, with `columns` values per token of a line."""
        return self.n_split_lines * self.num_splits * n_batch_heads * self.side * columns if self.num_splits > 1 else 0


WHOLE = Split(0, 1)


def choose(
    n_lines: int, n_batch_heads: int, *, longest: int, work: int, n_long: int, is_even: bool, n_sms: int
) -> Split:
    """The split with the shortest estimated time, or WHOLE; times are in tiles.

    n_lines  lines per head, of n_batch_heads heads
    longest  most tiles that a line can have; the actual number is known only on the GPU
    work     tiles of all lines of all heads
    n_long   lines per head that are much longer than the others. They are split until they are no longer than an SM's
             fair share; without them, or with few programs, all lines are split, so that programs fill the GPU
    is_even  whether the other lines have similar lengths
    """
    n_programs, share = n_lines * n_batch_heads, work / n_sms
    if n_programs == 0 or longest <= share:
        return WHOLE
    if n_long and 2 * n_programs > n_sms:
        whole = float(longest)
        split = Split(n_long, max(1, min(math.ceil(longest / share), MAX_SPLITS, int(MAX_SHARE * n_lines / n_long))))
        time = max(share, longest / split.num_splits + SPLIT_COST) + COMBINE_COST
    else:
        most = min(MAX_SPLITS, MAX_WAVES * n_sms // n_programs)
        if most < 2:
            return WHOLE
        mean = work / n_programs
        longest_line = mean if is_even and not n_long else longest

        def time_of(num_splits: int, overhead: int) -> float:
            # the waves of splits of a mean line, or the longest split if that takes longer
            waves = math.ceil(n_programs * num_splits / n_sms)
            return max(waves * (mean / num_splits + overhead), longest_line / num_splits + overhead)

        whole = time_of(1, 0)
        time, num_splits = min((time_of(n, SPLIT_COST) + COMBINE_COST, n) for n in range(2, most + 1))
        split = Split(n_lines, num_splits)
    return split if time <= WORTHWHILE * whole else WHOLE


@functools.lru_cache(maxsize=4096)
def _of_shapes(
    lists: tuple[Sequence[int], ...],
    is_of_rows: bool,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    n_sms: int,
    side: int,
) -> Split:
    """`split_of` by shapes, cached.

    lists  shapes of the plan's records, indices and bitmask ids; empty for dense or causal calls
    side   tokens of a line
    """
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q_shape, k_shape
    n_lines, n_others, n_batch_heads, group = -(-q_len // side), -(-kv_len // side), batch * heads, 1
    if not is_of_rows:
        n_lines, n_others, n_batch_heads, group = n_others, n_lines, batch * kv_heads, heads // max(1, kv_heads)
    of_head, long = n_lines * n_others / (2 if causal else 1), 0
    if lists:
        record_shape, (n_indices, *_), (n_ids, *_) = lists
        of_head, long = n_indices / (record_shape[0] * record_shape[1]), n_split_of(n_indices, n_ids)
    split = choose(
        n_lines,
        n_batch_heads,
        longest=n_others * group,
        work=round(of_head * n_batch_heads * group),
        n_long=long,
        is_even=bool(lists) or not causal,
        n_sms=n_sms,
    )
    return split if split == WHOLE else split._replace(side=side)


def are_uneven(plan: Sequence[torch.Tensor], causal: bool) -> bool:
    """Whether the lines differ in length as in causal calls: in these, and if no tile lies above the diagonal.

    plan  the tensors of a Plan; empty without a layout
    """
    if causal or not plan:
        return causal
    _, indices, ids = plan[ROW_LISTS:COL_LISTS]
    return is_lower_of(indices.shape[0], ids.shape[0])


def interleaved_heads(n_lines: int, n_batch_heads: int, n_sms: int, q_len: int, kv_len: int, *, is_uneven: bool) -> int:
    """Number of heads whose lines are interleaved, the longest of all of them first; 1: head after head.

    In causal calls lines get shorter in launch order, down to one tile if q_len == kv_len. Head after head, the longest
    line of the last head would begin late, and all other SMs would wait for it. The lines of interleaved heads keep
    every SM busy for as long as one such line, unless there are too few heads or MAX_INTERLEAVED_HEADS is reached. The
    last group also has the heads that are left over.

    is_uneven  whether the lines differ in length: are_uneven, and with sums over heads
    """
    # if tile rows are nearly equal, so are most tile columns
    if not is_uneven or are_causal_rows_similar(q_len, kv_len):
        return 1
    needed = math.ceil(2 * n_sms / n_lines)
    return min(1 << (needed - 1).bit_length(), MAX_INTERLEAVED_HEADS, n_batch_heads)


def are_causal_rows_similar(q_len: int, kv_len: int) -> bool:
    """Whether the shortest tile row of a causal call has more than half as many tiles as the longest."""
    return kv_len > 2 * q_len


def needs_tile_counter(n_work_tiles: int, n_sms: int, *, is_sorted: bool = False) -> bool:
    """Whether the programs of a `hopper` launch, one per SM, take work tiles from a counter (a dynamic tile scheduler).

    is_sorted  whether no work tile is longer than those before it
    """
    return n_work_tiles > n_sms * (MAX_STATIC_WAVES if is_sorted else 1)


def are_rows_sorted(q_len: int, kv_len: int, n_batch_heads: int, n_sms: int, *, causal: bool) -> bool:
    """Whether no tile row of a forward without layout and kv_lengths is longer than those launched before it.

    In causal calls only if the lines of all heads are interleaved. Counted in tile rows of 128 queries.
    """
    if not causal:
        return True
    n_rows = -(-q_len // TILE)
    return n_batch_heads < 2 * interleaved_heads(n_rows, n_batch_heads, n_sms, q_len, kv_len, is_uneven=True)


def split_of(
    plan: Sequence[torch.Tensor],
    first: int,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    n_sms: int,
) -> Split:
    """The split of the tile rows of query heads, or of the tile columns of KV heads.

    plan              the tensors of a Plan; empty for dense or causal calls
    first             ROW_LISTS or COL_LISTS
    q_shape, k_shape  (batch, heads, length, head_dim)
    n_sms             SMs, or programs that run at a time if several share an SM
    """
    lists = (plan[first].shape, plan[first + 1].shape, plan[first + 2].shape) if plan else ()
    if first == ROW_LISTS and not (lists and n_split_of(lists[1][0], lists[2][0])):
        # rows are split only where some are long
        return WHOLE
    return _of_shapes(lists, first == ROW_LISTS, q_shape, k_shape, causal, n_sms, side_of(tile_of(plan)))


def sums_over_heads(
    plan: Sequence[torch.Tensor],
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    n_sms: int,
    *,
    deterministic: bool,
) -> bool:
    """Whether a line of the backward is a tile column for one query head, with sums of dK and dV over the group.

    In causal calls with grouped heads, tile columns for all query heads of a group are few, long and of different
    lengths, and those that run together need q, dO and dQ of more heads than fit into L2. TFLOP/s with one work tile
    per group / per query head on an H200 (hopper/TUNING.md), 8,192 tokens: 64 query and 8 KV heads 502 / 534; 16 query
    heads and 1 KV head 401 / 554. With a layout, the same is true of long tile columns, if they are few for groups and
    enough for query heads.

    deterministic  True: never, since heads add to the sums in no fixed order
    """
    (batch, heads, *_), (_, kv_heads, kv_len, head_dim) = q_shape, k_shape
    if deterministic or heads == kv_heads or not (plan or causal):
        return False
    n_cols = -(-kv_len // TILE)
    if plan:
        n_lines, group = batch * kv_heads * n_cols, heads // max(1, kv_heads)
        records, indices = plan[COL_LISTS], plan[COL_LISTS + 1]
        n_plan_cols = records.shape[0] * records.shape[1] * n_cols
        is_few = n_lines <= n_sms * max(MAX_GROUP_WAVES, group // 2)
        if not is_few or n_lines * group < n_sms * MIN_HEAD_WAVES or indices.shape[0] < LONG_COLUMN * n_plan_cols:
            return False
    return split_of(plan, COL_LISTS, q_shape, (batch, heads, kv_len, head_dim), causal, n_sms).num_splits == 1


def is_dq_separate(
    plan: Sequence[torch.Tensor], q_shape: Sequence[int], dim: int, n_sms: int, *, deterministic: bool
) -> bool:
    """Whether the Hopper backward up to head_dim 128 computes dQ in a kernel of its own; beyond, it always does.

    Summed over tile columns, dQ needs a float32 sum that one launch zeroes and another converts: some 10 bytes per
    element, however few tiles contribute. A launch of its own needs two more products per tile, which is cheaper for
    few tiles, and where the sums that are added to do not stay in L2. It gives the same bits in every run.

    plan           the tensors of plan_format.Plan; empty: dense or causal
    q_shape        (batch, heads, q_len, head_dim)
    dim            the larger of head_dim and v_head_dim
    deterministic  the result must have the same bits in every run
    """
    if deterministic or not plan:
        return deterministic
    n_rows, n_heads = -(-q_shape[2] // TILE), q_shape[0] * q_shape[1]
    records, col_indices = plan[COL_LISTS], plan[COL_LISTS + 1]
    n_cols, n_plan_heads = records.shape[2], records.shape[0] * records.shape[1]
    if col_indices.shape[0] >= LONG_COLUMN * n_plan_heads * n_cols and 0 < n_cols < n_sms:
        n_together = min(n_heads, -(-n_sms // n_cols))
        if 4 * n_together * n_rows * TILE * padded_dim("hopper", dim) > MAX_SUM_BYTES:
            return True
    # rounded down, since the list ends with some padding
    is_worthwhile = dim <= SEPARATE_DQ_MAX_DIM and n_heads * n_rows >= SEPARATE_DQ_MIN_ROWS
    return is_worthwhile and plan[ROW_LISTS + 1].shape[0] // (n_plan_heads * n_rows) <= SEPARATE_DQ_MAX_TILES
