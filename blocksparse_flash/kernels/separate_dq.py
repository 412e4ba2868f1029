"""Whether the Hopper backward computes dQ in a launch of its own; from shapes alone.

Summed over tile columns, dQ needs a float32 sum that one launch zeroes and another converts: some 10 bytes per element,
however few tiles contribute. A launch of its own needs two more products per tile, which is cheaper for few tiles, and
gives the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan_format import TILE

# up to this padded head dimension and this mean number of tiles per row, from this number of tile rows of all heads on:
# their sum is far larger than an L2 cache. H200, head_dim 64, summed and in a launch of its own: 2 tiles per row 5.73
# and 5.47 ms, 8 tiles 0.82 and 0.88 ms (hopper/TUNING.md)
MAX_DIM, MAX_TILES, MIN_ROWS = 64, 3, 8192


def is_dq_separate(plan: Sequence[torch.Tensor], q_shape: Sequence[int], dim: int, *, deterministic: bool) -> bool:
    """Whether a call computes dQ in a launch of its own.

    plan           the tensors of plan_format.Plan; empty: dense or causal
    q_shape        (batch, heads, q_len, head_dim)
    dim            the larger of head_dim and v_head_dim
    deterministic  the result must have the same bits in every run
    """
    if deterministic or not plan or dim > MAX_DIM:
        return deterministic
    n_rows = -(-q_shape[2] // TILE)
    n_plan_rows = plan[0].shape[0] * plan[0].shape[1] * n_rows
    # rounded down, since the list ends with some padding
    return q_shape[0] * q_shape[1] * n_rows >= MIN_ROWS and plan[1].shape[0] // n_plan_rows <= MAX_TILES
