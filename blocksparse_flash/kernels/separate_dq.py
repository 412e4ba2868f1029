"""Whether the Hopper backward computes dq in a launch of its own; from shapes alone.

Added up, dq costs a float32 sum, cleared by one launch and converted by another: some 10 bytes a number, however few
tiles it
is the sum of. By a launch of its own it costs two products a tile more, which few tiles make up for; and bits repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan_format import TILE

# a launch of its own pays up to this head dimension, padded, and so many tiles a row on average, from so many rows of
# tiles on, all
# heads together, whose sum is far beyond an L2 cache. H200, head_dim 64, milliseconds of the kernels of a backward, dq
# added up or
# not: 2 tiles a row, (16, 8, 65536, 64), 5.73 and 5.47; 8 tiles, (1, 32, 16384, 64), 0.82 and 0.88; dense 9.9 and
# 12.6. head_dim
# 128, 8 tiles: 0.71 and 0.84. Where equal bits want it, head_dim 128, dense, all of a backward: 12.06 for 9.41, which
# is 638 TFLOP/s of
# seven products for 584 of five, beside 727 of a large matrix product
MAX_DIM, MAX_TILES, MIN_ROWS = 64, 3, 8192


def is_dq_separate(plan: Sequence[torch.Tensor], q_shape: Sequence[int], dim: int, *, deterministic: bool) -> bool:
    """Of a call whose larger head dimension is `dim`; q_shape: (batch, heads, q_len, head_dim).

    plan           the tensors of plan.Plan, empty: dense or causal
    deterministic  equal bits are asked for: sums have no order
    """
    if deterministic or not plan or dim > MAX_DIM:
        return deterministic
    n_rows = -(-q_shape[2] // TILE)
    of_plan = plan[0].shape[0] * plan[0].shape[1] * n_rows
    # rounded down: behind the tiles stand a few fillers
    return q_shape[0] * q_shape[1] * n_rows >= MIN_ROWS and plan[1].shape[0] // of_plan <= MAX_TILES
