"""Column bounds of FlashMask (startend_row_indices).

FlashMask (Wang et al., arXiv:2410.01359, section 4.1) gives for each key the rows (queries) that are masked:

    causal  last axis  masked rows of a key, besides those above the diagonal
    True    1          [LTS, q_len)
    True    2          [LTS, LTE)
    False   2          [LTS, q_len) and [0, UTE)
    False   4          [LTS, LTE) and [UTS, UTE)        in the order LTS, LTE, UTS, UTE

Where q_len != kv_len, the diagonal is aligned at the ends, as in this library.
"""

from __future__ import annotations

import numpy as np
import torch

from ..blocks import checks
from ..blocks.block_list import Array, Size
from ..layout import BlockLayout
from .block_arrays import check_layout, host
from .key_runs import layout_of_runs, merged, runs_of

_BOUNDS = {True: (1, 2), False: (2, 4)}


def from_flashmask(
    startend_row_indices: torch.Tensor,
    q_len: int,
    *,
    causal: bool,
    block_size: int | Size = 128,
    heads: int | None = None,
) -> BlockLayout:
    """The layout of FlashMask's column bounds, exact, on the host, in O(nnz).

    startend_row_indices  integers (batch, kv_heads | 1, kv_len, 1 | 2 | 4), at least 0; values above q_len mean q_len
    q_len       query tokens
    causal      as in flashmask_attention: True also masks above the diagonal, and selects the meaning of the bounds
    block_size  tokens per side of a block of the layout, or (block_q, block_kv)
    heads       query heads, over which the masks of the key heads are repeated; None: the heads of the tensor
    returns     BlockLayout of shape (batch, heads, q_len, kv_len)
    raises      ValueError for a wrong shape, dtype, negative bounds or heads; TypeError if causal is not a bool
    """
    q_len, sides = checks.length(q_len, "q_len"), checks.sides(block_size)
    bounds = _read_bounds(startend_row_indices, causal)
    if heads is not None:
        group, rest = divmod(checks.axis(heads, "heads"), bounds.shape[1])
        if rest:
            raise ValueError(f"heads must be a multiple of the mask's heads, {bounds.shape[1]}, got {heads}")
        bounds = np.repeat(bounds, group, axis=1)
    batch, n_heads, kv_len, n_bounds = bounds.shape
    bounds = np.minimum(bounds, q_len).reshape(-1, n_bounds)
    lower, upper = _masked(bounds, causal, q_len)
    # move empty intervals to the end, where they split nothing
    for begin, end in (lower, upper):
        empty = end <= begin
        begin[empty] = end[empty] = q_len
    swap = upper[0] < lower[0]
    first = [np.where(swap, upper[i], lower[i]) for i in range(2)]
    second = [np.where(swap, lower[i], upper[i]) for i in range(2)]
    lines = np.arange(batch * n_heads * kv_len)
    start = np.zeros_like(lines)
    if causal:
        start = np.clip(lines % max(kv_len, 1) - (kv_len - q_len), 0, q_len)
    # queries that attend: before the first masked interval, between the two, and after both
    between = np.maximum(start, first[1])
    attending = merged(
        np.tile(lines, 3),
        np.concatenate([start, between, np.maximum(between, second[1])]),
        np.concatenate([first[0], second[0], np.full_like(lines, q_len)]),
        q_len,
    )
    return layout_of_runs(attending, (batch, n_heads), q_len=kv_len, kv_len=q_len, block_size=sides[::-1]).T


def _read_bounds(tensor: object, causal: object) -> Array:
    """int64 (batch, heads, kv_len, bounds) of the caller's tensor."""
    name = "startend_row_indices"
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    if not isinstance(tensor, (torch.Tensor, np.ndarray)):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    array = host(tensor) if isinstance(tensor, torch.Tensor) else tensor
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    if array.ndim != 4 or 0 in array.shape[:2]:
        raise ValueError(f"{name} must have shape (batch, heads, kv_len, bounds), got {array.shape}")
    if array.shape[3] not in _BOUNDS[causal]:
        raise ValueError(
            f"{name} must end in {' or '.join(map(str, _BOUNDS[causal]))} bounds with causal={causal}, "
            f"got shape {array.shape}"
        )
    if array.size and array.min() < 0:
        where = tuple(int(i) for i in np.argwhere(array < 0)[0])
        raise ValueError(f"{name} must not be negative, got {array[where]} at {where}")
    # uint64 values beyond int64 mean q_len
    return (
        np.minimum(array, np.iinfo(np.int64).max).astype(np.int64)
        if array.dtype == np.uint64
        else array.astype(np.int64)
    )


def _masked(bounds: Array, causal: bool, q_len: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The two masked intervals of every key, (begin, end) each."""
    columns = [column.copy() for column in bounds.T]
    end = np.full_like(columns[0], q_len)
    if causal:
        return (columns[0], columns[1] if len(columns) == 2 else end), (end.copy(), end.copy())
    if len(columns) == 2:
        return (columns[0], end), (np.zeros_like(end), columns[1])
    return (columns[0], columns[1]), (columns[2], columns[3])


def to_flashmask(layout: BlockLayout, *, causal: bool = False, kv_heads: int | None = None) -> torch.Tensor:
    """FlashMask's column bounds of a layout, exact, on its device, in O(nnz).

    causal    causal of the call to flashmask_attention. True: no pair of the layout may lie above the diagonal, and
              each key may have one masked interval below it. False: each key may have two masked intervals
    kv_heads  key heads; all query heads of a key head must have equal masks. None: one key head per query head
    returns   int32 (batch | 1, heads | 1, kv_len, 1 | 2 | 4), with as few bounds as possible
    raises    ValueError naming the first key with more masked intervals than FlashMask can express
    """
    check_layout(layout)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r}")
    batch, heads, q_len, kv_len = layout.shape
    lines, begin, end = _gaps(layout, causal)
    counts = np.bincount(lines, minlength=batch * heads * kv_len)
    limit = 1 if causal else 2
    if (counts > limit).any():
        where = int((counts > limit).argmax())
        raise ValueError(
            f"layout masks {counts[where]} separate intervals of queries for key {_named(where, layout)}"
            f"{', besides those above the diagonal' if causal else ''}, but FlashMask can say {limit} with "
            f"causal={causal}: use to_flex_attention, or attention() of this library"
        )
    is_second = np.zeros(len(lines), np.bool_)
    is_second[1:] = lines[1:] == lines[:-1]
    is_suffix = end == q_len
    bounds = np.tile([q_len, q_len, 0, 0], (len(counts), 1))
    # LTS, LTE hold the later of two intervals, or a single one unless it covers the first queries but not the last
    is_alone, holds_first = counts[lines] == 1, (begin == 0) & ~is_suffix
    is_lower = np.where(is_alone, causal | ~holds_first, is_second)
    for column, chosen in ((0, is_lower), (2, ~is_lower)):
        bounds[lines[chosen], column] = begin[chosen]
        bounds[lines[chosen], column + 1] = end[chosen]
    if causal:
        bounds = bounds[:, :1] if is_suffix.all() else bounds[:, :2]
    elif is_suffix[is_lower].all() and (begin[~is_lower] == 0).all():
        bounds = bounds[:, [0, 3]]
    found = bounds.reshape(batch, heads, kv_len, bounds.shape[1]).astype(np.int32)
    if kv_heads is not None:
        found = _per_kv_head(found, checks.axis(kv_heads, "kv_heads"))
    return torch.from_numpy(np.ascontiguousarray(found)).to(layout.device)


def _named(line: int, layout: BlockLayout) -> str:
    lead, key = divmod(line, layout.kv_len)
    return f"{key} of batch {lead // layout.shape[1]}, head {lead % layout.shape[1]}"


def _gaps(layout: BlockLayout, causal: bool) -> tuple[Array, Array, Array]:
    """(line, begin, end) of every masked interval of queries, where line = lead * kv_len + kv_pos."""
    q_len, kv_len = layout.q_len, layout.kv_len
    seen = runs_of(layout.T)
    lines = np.arange(layout.shape[0] * layout.shape[1] * kv_len)
    start = np.zeros_like(lines)
    if causal:
        start = np.clip(lines % max(kv_len, 1) - (kv_len - q_len), 0, q_len)
        ahead = seen.first < start[seen.lines]
        if ahead.any():
            where = int(ahead.argmax())
            raise ValueError(
                f"layout must hold no pair above the diagonal with causal=True, but query {seen.first[where]} attends "
                f"to key {_named(int(seen.lines[where]), layout)}: use causal=False, or layout & masks.causal(...)"
            )
    # a key with n runs has n + 1 gaps: each begins where a run stops and ends where the next begins
    begin_lines, end_lines = np.concatenate([lines, seen.lines]), np.concatenate([seen.lines, lines])
    begin, end = np.concatenate([start, seen.stop]), np.concatenate([seen.first, np.full_like(lines, q_len)])
    by_begin, by_end = np.lexsort((begin, begin_lines)), np.lexsort((end, end_lines))
    lines, begin, end = begin_lines[by_begin], begin[by_begin], end[by_end]
    there = end > begin
    return lines[there], begin[there], end[there]


def _per_kv_head(bounds: Array, kv_heads: int) -> Array:
    """The bounds of the first head of each group; all heads of a group must have the same."""
    heads = bounds.shape[1]
    if heads == 1:
        return np.repeat(bounds, kv_heads, axis=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide the layout's heads, {heads}, got {kv_heads}")
    groups = bounds.reshape(bounds.shape[0], kv_heads, heads // kv_heads, *bounds.shape[2:])
    differs = (groups != groups[:, :, :1]).any(axis=(0, 3, 4))
    if differs.any():
        group, member = (int(i) for i in np.argwhere(differs)[0])
        first = group * groups.shape[2]
        raise ValueError(
            f"layout gives head {first + member} another mask than head {first}, but FlashMask has one for each key "
            f"head: kv_heads={kv_heads} puts them in one group"
        )
    return groups[:, :, 0]
