"""Whether the Hopper backward computes dq in a launch of its own; from shapes alone.

Adding dq up over tile columns needs a float32 sum that one launch clears and another converts: about 10 bytes per
value, however few tiles contribute. A launch of its own costs two more products per tile, which pays for rows of few
tiles, and makes results bitwise reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan_format import TILE

# A launch of its own pays up to this padded head dimension, with at most this many tiles per row on average, and from
# this many tile rows of all heads on, whose sum far exceeds the L2 cache. H200, head_dim 64, milliseconds of a backward
# with dq added up or in its own launch: 5.73 and 5.47 with 2 tiles per row, 0.82 and 0.88 with 8.
MAX_DIM, MAX_TILES, MIN_ROWS = 64, 3, 8192


def is_dq_separate(plan: Sequence[torch.Tensor], q_shape: Sequence[int], dim: int, *, deterministic: bool) -> bool:
    """Whether a call computes dq in its own launch; always if it must be deterministic.

    plan     the tensors of a Plan; empty for dense or causal calls
    q_shape  (batch, heads, q_len, head_dim)
    dim      the larger padded head dimension
    """
    if deterministic or not plan or dim > MAX_DIM:
        return deterministic
    n_rows = -(-q_shape[2] // TILE)
    of_plan = plan[0].shape[0] * plan[0].shape[1] * n_rows
    # rounded down: the list ends with a few padding entries
    return q_shape[0] * q_shape[1] * n_rows >= MIN_ROWS and plan[1].shape[0] // of_plan <= MAX_TILES
