"""Which tile rows or columns are split among programs, and into how many splits; from shapes alone.

A line is a tile row of the forward, or a tile column of the backward for all query heads of a group: what one
program walks.
Where a line is longer than the fair share of a SM, the others wait for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import TILE, n_split_of

# parts of a line
MAX_PARTS = 16
# lines that are split in so many parts, over all lines of a head: what parts write has 4 bytes a number, what becomes
# of it 2
MAX_SHARE = 1 / 4
# programs a SM where all lines are split: 65,536 bytes each at head_dim 128, twice that in the backward
MAX_WAVES = 4
# what it costs, in tiles: a part more, whose program begins, ends, and writes float32; the launch that merges.
# Guesses, of which an
# H200 made, head_dim 128, bf16: long columns split, bigbird with 16 heads on 4, 65,536 and 262,144 tokens, 2.4 and 2.3
# times as fast
# backward; long rows, bigbird with 2 heads, 65,536 tokens, 3.2 times. All columns in 2 parts, 1 or 2 dense or causal
# heads of 4,096
# or 8,192 tokens, 1.15 to 1.42 times; all rows 0.81, 0.88 and 1.05 times, so that they are left whole
PART, MERGE = 2, 4
# splitting must promise to take at most this share of the time
WORTHWHILE = 0.8


def padded_dim(backend: str, head_dim: int) -> int:
    """The head dimension to which the kernels of a backend pad: tiles read zeros past head_dim."""
    if backend == "hopper":
        return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return max(16, 1 << (head_dim - 1).bit_length())


class Split(NamedTuple):
    """The first n_lines of every head in launch order, the longest ones, are split into so many programs each."""

    n_lines: int
    parts: int

    def n_programs(self, n_lines: int, n_batch_heads: int) -> int:
        """One for each of n_lines lines of n_batch_heads heads, and one for each part more."""
        return (n_lines + self.n_lines * (self.parts - 1)) * n_batch_heads

    def floats(self, columns: int, n_batch_heads: int) -> int:
        """Float32 numbers that the parts write: `columns` for each token of a line."""
        return self.n_lines * self.parts * n_batch_heads * TILE * columns if self.parts > 1 else 0


WHOLE = Split(0, 1)


def choose(
    n_lines: int, n_batch_heads: int, *, longest: int, work: int, n_long: int, is_even: bool, n_sms: int
) -> Split:
    """The split of n_lines lines for each of n_batch_heads heads; the time of either way is estimated in tiles.

    longest  tiles that a line may have; how many it has, only the GPU knows
    work     tiles of all lines of all heads
    n_long   lines at the front of each head which are much longer than the others: these are split, until they are as
             long as the fair share. Without them, or with few programs, all lines are, so that programs fill the GPU;
             see _of_shapes for rows
    is_even  the lines, but for those, are about as long as each other
    """
    n_programs, share = n_lines * n_batch_heads, work / n_sms
    if n_programs == 0 or longest <= share:
        return WHOLE
    if n_long and 2 * n_programs > n_sms:
        whole = float(longest)
        split = Split(n_long, max(1, min(math.ceil(longest / share), MAX_PARTS, int(MAX_SHARE * n_lines / n_long))))
        time = max(share, longest / split.parts + PART) + MERGE
    else:
        mean = work / n_programs
        reach = mean if is_even and not n_long else longest

        def time_of(parts: int, more: int) -> float:
            waves = math.ceil(n_programs * parts / n_sms)
            return max(waves * (mean / parts + more), reach / parts + more)

        whole = time_of(1, 0)
        most = max(2, min(MAX_PARTS, MAX_WAVES * n_sms // n_programs))
        time, parts = min((time_of(parts, PART) + MERGE, parts) for parts in range(2, most + 1))
        split = Split(n_lines, parts)
    return split if time <= WORTHWHILE * whole else WHOLE


@functools.lru_cache(maxsize=4096)
def _of_shapes(
    lists: tuple[Sequence[int], ...],
    is_of_rows: bool,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    n_sms: int,
) -> Split:
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q_shape, k_shape
    n_lines, n_others, n_batch_heads, group = -(-q_len // TILE), -(-kv_len // TILE), batch * heads, 1
    if not is_of_rows:
        n_lines, n_others, n_batch_heads, group = n_others, n_lines, batch * kv_heads, heads // max(1, kv_heads)
    of_head, long = n_lines * n_others / (2 if causal else 1), 0
    if lists:
        items, (n_indices,), (n_ids,) = lists
        of_head, long = n_indices / (items[0] * items[1]), n_split_of(n_indices, n_ids)
    return choose(
        n_lines,
        n_batch_heads,
        longest=n_others * group,
        work=round(of_head * n_batch_heads * group),
        n_long=long,
        is_even=bool(lists) or not causal,
        n_sms=n_sms,
    )


def split_of(
    plan: Sequence[torch.Tensor],
    first: int,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    n_sms: int,
) -> Split:
    """The split of the rows of query heads (first = 0), or of the columns of key heads (3), that a plan lists.

    plan              the tensors of plan.Plan; empty: dense, or `causal`
    q_shape, k_shape  (batch, heads, length, head_dim)
    """
    if first == 0 and not (plan and n_split_of(plan[1].shape[0], plan[2].shape[0])):
        # rows are split only where some are long
        return WHOLE
    lists = (plan[first].shape, plan[first + 1].shape, plan[first + 2].shape) if plan else ()
    return _of_shapes(lists, first == 0, q_shape, k_shape, causal, n_sms)
