"""Schedule of the pre- and postprocess that overlap with the tile columns of the Hopper backward; from shapes alone.

A head group is a key head with its query heads. The preprocess of a head group zeroes its float32 sum of dQ and, for
many tile columns, computes LSE and delta; the postprocess scales the sum and converts it to dQ. Tile columns are
computed head group by head group, so a later group can be preprocessed and an earlier one postprocessed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..plan_format import TILE, n_split_of
from .schedule import Split

# counters before those of the head groups: work tiles and overlapped work items that were taken
N_QUEUE_COUNTERS = 2
# tile columns per head group from which LSE and delta overlap too: H200, microseconds of a backward, head_dim 128,
# butterfly, overlapped or not: 651 and 659 with 128 columns, 564 and 471 with 16 (see hopper/TUNING.md)
MIN_LSE_DELTA_COLUMNS = 128


class OverlapSchedule(NamedTuple):
    """Which of the head groups overlap. They are numbered in the order of their tile columns.

    n_preprocessed   groups that the preprocess launch handles; the others are preprocessed by the main kernel
    n_ahead          groups that are preprocessed before the first one is postprocessed
    n_postprocessed  groups that the main kernel postprocesses; the postprocess launch handles the others
    """

    n_preprocessed: int
    n_ahead: int
    n_postprocessed: int


def overlap_schedule_of(
    plan: Sequence[torch.Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    split: Split,
    n_sms: int,
) -> OverlapSchedule | None:
    """The schedule of a call; None if nothing overlaps.

    Dense and causal calls do not overlap, nor do calls with so few tile columns that all run at once. If long tile
    columns of all head groups come first, only the postprocess overlaps.

    plan              the tensors of plan_format.Plan; empty: dense or causal
    q_shape, k_shape  (batch, heads, length, head_dim)
    split             of the tile columns
    """
    # H200: dense and causal are 1.042 and 1.021 times as fast without overlap at head_dim 128, 0.995 and 0.999 at 64
    if not plan:
        return None
    n_batch_heads, n_tile_cols = k_shape[0] * k_shape[1], -(-k_shape[2] // TILE)
    n_long = n_split_of(plan[4].shape[0], plan[5].shape[0])
    # tile columns per head group that come after the long ones of all groups
    n_rest = n_tile_cols - max(n_long, split.n_lines if split.parts > 1 else 0)
    if n_batch_heads * n_rest * q_shape[2] <= 0:
        return None
    # the last tile columns run at the same time: nothing is left to overlap with the postprocess of their groups
    n_postprocessed = n_batch_heads - max(1, n_sms // n_rest)
    if n_postprocessed <= 0:
        return None
    if n_rest < n_tile_cols:
        # H200, bigbird, 16,384 tokens, overlapped or not: 884 and 898 microseconds at head_dim 64, 831 and 820 at 128
        return OverlapSchedule(n_batch_heads, n_batch_heads, n_postprocessed) if q_shape[3] <= 64 else None
    # n_preprocessed: groups of the first wave of tile columns. n_ahead: when a group is finished, a wave of later tile
    # columns is running; the wave after it must be preprocessed meanwhile. One group fewer: 810 instead of 706
    # microseconds (H200, local, 16,384 tokens, head_dim 128); one, two or four more: the same to 1 %
    n_preprocessed, n_ahead = 1 + n_sms // n_tile_cols, 1 + -(-2 * n_sms // n_tile_cols)
    return OverlapSchedule(min(n_preprocessed, n_batch_heads), min(n_ahead, n_batch_heads), n_postprocessed)


def overlaps_lse_delta(schedule: OverlapSchedule | None, n_batch_heads: int, n_tile_cols: int, v_dim: int) -> bool:
    """Whether LSE and delta of later head groups are computed by the main kernel, not by the preprocess launch.

    n_batch_heads  head groups of all batch elements
    n_tile_cols    tile columns per head group
    v_dim          head dimension of out, which is loaded in pieces of 16 bytes
    """
    return (
        schedule is not None
        and schedule.n_preprocessed < n_batch_heads
        and n_tile_cols >= MIN_LSE_DELTA_COLUMNS
        and v_dim % 8 == 0
    )


def n_counters(n_batch_heads: int) -> int:
    """int32 counters of a call with a schedule: two, and per head group what is preprocessed and what is computed."""
    return N_QUEUE_COUNTERS + 2 * n_batch_heads
