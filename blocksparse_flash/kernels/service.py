"""How much of the pre- and postprocess of the Hopper backward overlaps with its tile columns; from shapes alone.

A section is what belongs to the query heads of a key head: lse and delta, which the columns of this key head read,
and the float32
sum of dq, to which they add. Columns are launched section by section, so that a section can be prepared until they
begin, and what is
done can be converted while others are added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import TILE, n_split_of
from .schedule import Split

# what is counted of all sections together: columns and chunks that are taken
FRONT = 2
# columns of a section from which on its lse and delta are written beside others. H200, microseconds of a backward,
# written beside columns or
# by the launch before: 128 columns, 16,384 tokens, head_dim 128 butterfly 651, 659, local 711, 715, head_dim 64 735,
# 747 and 791, 803.
# 16 columns, 2,048 tokens, batch 8, and with nothing done beside: head_dim 128 butterfly 564, 471, 502, local 718,
# 648, 677, dense 1152,
# 1171, 1182, head_dim 64 butterfly 628, 517, 571, local 804, 723, 786, dense 1321, 1305, 1384; written beside, two and
# four waves of columns
# ahead in place of one and two: 128 530, 640, 1155, 64 535, 719, 1323. Between 16 and 128 nothing was run
TELLING_COLUMNS = 128


class Service(NamedTuple):
    """How many sections the launch before prepares, are prepared before the first one is converted, are converted."""

    n_cleared: int
    n_ahead: int
    n_converted: int


def service_of(
    plan: Sequence[torch.Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    split: Split,
    n_sms: int,
) -> Service | None:
    """None: a launch before prepares all, one behind converts all.

    So it is for dense and causal calls, and where there are no columns left to do it beside. With long ones, of all
    sections, at the front, all are prepared before.

    plan              the tensors of plan.Plan; empty: dense or causal
    q_shape, k_shape  (batch, heads, length, head_dim)
    split             of the columns
    """
    # overlapped, dense takes 1.042 and causal 1.021 times as long at head_dim 128 (H200; 0.995 and 0.999 at 64)
    if not plan:
        return None
    n_batch_heads, n_lines = k_shape[0] * k_shape[1], -(-k_shape[2] // TILE)
    long = n_split_of(plan[4].shape[0], plan[5].shape[0])
    # those that do not come first, in all heads
    n_rest = n_lines - max(long, split.n_lines if split.parts > 1 else 0)
    if n_batch_heads * n_rest * q_shape[2] <= 0:
        return None
    # those of the last columns that are taken, which all programs run at the same time
    n_converted = n_batch_heads - max(1, n_sms // n_rest)
    if n_converted <= 0:
        return None
    if n_rest < n_lines:
        # bigbird of 16,384 tokens on an H200: 884 for 898 microseconds at head_dim 64, 831 for 820 at 128
        return Service(n_batch_heads, n_batch_heads, n_converted) if q_shape[3] <= 64 else None
    # of the first columns; and when the last column of a section is done, as many columns of later ones are under way,
    # and as
    # long as they take there is for this section to be converted and another one to be prepared
    # one section less ahead: 16,384 tokens, head_dim 128 local 810 microseconds for 706, butterfly 792 for 690,
    # head_dim 64 899 for 838 and
    # 870 for 827; one, two, four more: the same to 1 %
    n_cleared, n_ahead = 1 + n_sms // n_lines, 1 + -(-2 * n_sms // n_lines)
    return Service(min(n_cleared, n_batch_heads), min(n_ahead, n_batch_heads), n_converted)


def are_statistics_overlapped(service: Service | None, n_batch_heads: int, n_lines: int, v_dim: int) -> bool:
    """Whether lse and delta of later sections are written beside the columns of others, not by the launch before.

    n_batch_heads, n_lines  sections, columns of each
    v_dim            of out, which comes 16 bytes at a time
    """
    return service is not None and service.n_cleared < n_batch_heads and n_lines >= TELLING_COLUMNS and v_dim % 8 == 0


def n_counts(n_batch_heads: int) -> int:
    """How many int32 are counted with: taken, and of each section what is prepared and what is computed."""
    return FRONT + 2 * n_batch_heads
