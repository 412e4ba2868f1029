"""Slices of MagiAttention (q_ranges, k_ranges, attn_type_map).

The type of a slice selects some pairs of its queries [q0, q1) and keys [k0, k1) (MagiAttention, AttnSlice):

    0 full        1 causal      2 inverse     3 both
    1 1 1 1       1 1 0 0       1 1 1 1       1 1 0 0        query q sees the keys k with
    1 1 1 1       1 1 1 0       0 1 1 1       0 1 1 0        causal   k - k1 <= q - q1, aligned bottom-right
    1 1 1 1       1 1 1 1       0 0 1 1       0 0 1 1        inverse  k - k0 >= q - q0, aligned top-left

One mask is shared by all batches and heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks
from ..blocks.block_list import Array, Size
from ..blocks.key_runs import Runs, merged
from ..layout import BlockLayout
from .block_arrays import check_layout, host, layout_of_runs, runs_of

# steps of a run's first key and end from one query to the next, by type
_STEPS = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])


class MagiSlices(NamedTuple):
    """Arguments of flex_flash_attn_func, int32: q_ranges (n, 2), k_ranges (n, 2), attn_type_map (n,)."""

    q_ranges: torch.Tensor
    k_ranges: torch.Tensor
    attn_type_map: torch.Tensor


def from_magi(
    q_ranges: Any, k_ranges: Any, attn_type_map: Any, q_len: int, kv_len: int, *, block_size: int | Size = 128
) -> BlockLayout:
    """The layout of MagiAttention's slices: their union, exact, on the host.

    A pair in two slices counts once here, but twice in MagiAttention, whose kernels add slices up. Disjoint slices give
    the same result.

    q_ranges, k_ranges  integers (n, 2), tensors or lists: [start, end) of each slice
    attn_type_map       integers (n,): 0 full, 1 causal, 2 inverse causal, 3 both; None: all full
    q_len, kv_len       query and key tokens
    block_size          tokens per side of a block of the layout, or (block_q, block_kv)
    returns             BlockLayout of shape (1, 1, q_len, kv_len), in time O(queries of all slices + nnz)
    raises              ValueError for wrong shapes, types or ranges
    """
    frame = checks.frame(q_len, kv_len, block_size)
    q0, q1 = _read_ranges(q_ranges, "q_ranges", frame.q_len, "q_len")
    k0, k1 = _read_ranges(k_ranges, "k_ranges", frame.kv_len, "kv_len")
    kinds = np.zeros_like(q0) if attn_type_map is None else checks.integers(attn_type_map, "attn_type_map")
    if not len(q0) == len(k0) == len(kinds):
        raise ValueError(
            "q_ranges, k_ranges and attn_type_map must have one entry for each slice, "
            f"got {len(q0)}, {len(k0)} and {len(kinds)}"
        )
    checks.check_range(kinds, 4, "attn_type_map", "4")
    heights = q1 - q0
    which = np.repeat(np.arange(len(q0)), heights)
    lines = block_list.ranges(q0, heights)
    first_step, stop_step = _STEPS[kinds[which]].T
    first = k0[which] + first_step * (lines - q0[which])
    stop = k1[which] - stop_step * (q1[which] - 1 - lines)
    return layout_of_runs(merged(lines, first, stop, frame.kv_len), frame)


def _read_ranges(ranges: Any, name: str, limit: int, limit_name: str) -> tuple[Array, Array]:
    """(starts, ends), int64 (n,) each."""
    if isinstance(ranges, torch.Tensor):
        array = host(ranges, name)
    else:
        checks.check_not_masked(ranges, name, "leave out the ranges that do not count")
        try:
            array = np.asarray(ranges)
        except ValueError as error:
            raise ValueError(f"{name} must be integers (n, 2), [start, end) each, got {ranges!r}") from error
    if not array.size:
        array = np.zeros((0, 2), np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} must be integers (n, 2), [start, end) each, got {array.dtype} {array.shape}")
    array = checks.as_int64(array, name)
    wrong = (array[:, 0] < 0) | (array[:, 1] < array[:, 0]) | (array[:, 1] > limit)
    if wrong.any():
        where = int(wrong.argmax())
        raise ValueError(
            f"{name} must have 0 <= start <= end <= {limit_name} = {limit}, got {array[where].tolist()} at {where}"
        )
    return array[:, 0], array[:, 1]


def to_magi(layout: BlockLayout, *, max_slices: int = 65536) -> MagiSlices:
    """Disjoint slices whose union is the layout, on its device.

    Runs of keys are followed from query to query as long as they fit one of the four types, longest chains first. The
    slices are exact, and few for windows, documents and causal masks, but not always the fewest.

    layout      one mask for all: batch and head axes of size 1
    max_slices  largest number of slices; MagiAttention's time grows with it
    returns     MagiSlices
    raises      ValueError if the layout has several heads or batches, or needs more slices
    """
    check_layout(layout)
    limit = checks.integer(max_slices, "max_slices")
    if layout.shape[:2] != (1, 1):
        raise ValueError(
            f"layout must be shared by all batches and heads, which MagiAttention's slices are, got (batch, heads) "
            f"{layout.shape[:2]}: convert one head at a time, and pack a batch as documents of one sequence"
        )
    runs = runs_of(layout)
    kinds = _longest_kind(runs)
    order, starts, lengths = _chains(runs, kinds)
    if len(starts) > limit:
        raise ValueError(
            f"layout needs {len(starts)} slices, more than max_slices = {limit}: MagiAttention is made for few large "
            "slices. Raise max_slices, or use attention() of this library"
        )
    first, last = order[starts], order[starts + lengths - 1]
    # the first run has the lowest first key of the slice, the last run its highest end
    slices = (
        np.stack([runs.lines[first], runs.lines[last] + 1], axis=1),
        np.stack([runs.first[first], runs.stop[last]], axis=1),
        # a single run is full
        np.where(first == last, 0, kinds[first]),
    )
    by_query = np.lexsort((slices[1][:, 0], slices[0][:, 0]))
    return MagiSlices(*(torch.from_numpy(array[by_query].astype(np.int32)).to(layout.device) for array in slices))


def _chains(runs: Runs, kinds: Array) -> tuple[Array, Array, Array]:
    """(order, starts, lengths): runs sorted by chain; where each chain starts in that order, and its number of runs.

    A chain consists of runs of one kind in consecutive queries, each shifted by the steps of the kind.
    """
    first_step, stop_step = _STEPS[kinds].T
    first, stop = runs.first - first_step * runs.lines, runs.stop - stop_step * runs.lines
    order = np.lexsort((runs.lines, stop, first, kinds))
    # in a chain, lines ascend by 1
    offsets = runs.lines[order] - np.arange(len(order))
    return order, *block_list.run_lengths(kinds[order], first[order], stop[order], offsets)


def _longest_kind(runs: Runs) -> Array:
    """For each run the type that puts it in the longest chain; ties go to the lowest type."""
    longest = np.zeros((len(_STEPS), len(runs.lines)), np.int64)
    for kind in range(len(_STEPS)):
        order, _, lengths = _chains(runs, np.full(len(runs.lines), kind))
        longest[kind, order] = np.repeat(lengths, lengths)
    return longest.argmax(axis=0)
