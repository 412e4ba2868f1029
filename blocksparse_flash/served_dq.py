"""Which parts of the float32 sum of dq does hopper's backward clear and convert beside its columns? From shapes alone, without a GPU.

A section of the sum is that of the query heads of a key head, to which the columns of this key head add. Columns are launched
section by section, so that zeros have time until a section begins, and what is done can be converted while others are added to.

Knows: lengths of a plan's lists. Does not know: kernels, what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .splitting import Split, n_long

TILE = 128
# what is counted of all sections together: columns and chunks that are taken
FRONT = 2


class Service(NamedTuple):
    """How many sections the launch before clears, are cleared before the first one is converted, are converted."""

    n_cleared: int
    n_ahead: int
    n_converted: int


def service_of(
    plan: Sequence[torch.Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    split: Split,
    n_multiprocessors: int,
) -> Service | None:
    """None: a launch before clears all, one behind converts all.

    So it is where there are no columns left to do it beside: with few of them, or with long ones, of all sections, at the front.

    plan              the tensors of plan.Plan; empty: dense or causal
    q_shape, k_shape  (batch, heads, length, head_dim)
    split             of the columns
    """
    n_axes, n_lines = k_shape[0] * k_shape[1], -(-k_shape[2] // TILE)
    if split.parts > 1 or n_axes * n_lines * q_shape[2] == 0 or (plan and n_long(plan[4].shape[0], plan[5].shape[0])):
        return None
    # those of the last columns that are taken, which are walked by all programs at a time
    n_converted = n_axes - max(1, n_multiprocessors // n_lines)
    if n_converted <= 0:
        return None
    # of the first columns; and when the last column of a section is done, as many columns of later ones are under way, and as
    # long as they take there is for this section to be converted and another one to be cleared
    n_cleared, n_ahead = 1 + n_multiprocessors // n_lines, 1 + -(-2 * n_multiprocessors // n_lines)
    return Service(min(n_cleared, n_axes), min(n_ahead, n_axes), n_converted)


def n_counts(n_axes: int) -> int:
    """How many int32 are counted with: taken, and of each section what is cleared and what is computed."""
    return FRONT + 2 * n_axes
