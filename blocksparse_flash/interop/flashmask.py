"""Column bounds of FlashMask (startend_row_indices).

FlashMask (Wang et al., arXiv:2410.01359, section 4.1) gives for each key the rows (queries) that are masked:

    causal  last axis  masked rows of a key, besides those above the diagonal
    True    1          [LTS, q_len)
    True    2          [LTS, LTE)
    False   2          [LTS, q_len) and [0, UTE)
    False   4          [LTS, LTE) and [UTS, UTE)        in the order LTS, LTE, UTS, UTE

Where q_len != kv_len, the diagonal is aligned bottom-right, as in this library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..blocks import checks
from ..blocks.block_list import Array, Frame, Size
from ..blocks.key_runs import Runs, complement, merged
from ..layout import BlockLayout
from .block_arrays import check_layout, host, layout_of_runs, runs_of

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
    heads       query heads, over which the masks of the KV heads are repeated; None: the heads of the tensor
    returns     BlockLayout of shape (batch, heads, q_len, kv_len)
    raises      ValueError for a wrong shape, dtype, negative bounds or heads; TypeError if causal is not a bool
    """
    q_len, sides, causal = checks.length(q_len, "q_len"), checks.sides(block_size), checks.boolean(causal, "causal")
    bounds = _read_bounds(startend_row_indices, causal, q_len)
    if heads is not None:
        group, rest = divmod(checks.axis(heads, "heads"), bounds.shape[1])
        if rest:
            raise ValueError(f"heads must be a multiple of the mask's heads, {bounds.shape[1]}, got {heads}")
        bounds = np.repeat(bounds, group, axis=1)
    batch, n_heads, kv_len, n_bounds = bounds.shape
    bounds = bounds.reshape(-1, n_bounds)
    begins, ends = _masked(bounds, causal, q_len, kv_len)
    masked = merged(np.tile(np.arange(len(bounds)), len(begins)), begins.reshape(-1), ends.reshape(-1), q_len)
    frame = Frame(batch, n_heads, kv_len, q_len, sides[::-1])
    return layout_of_runs(complement(masked, len(bounds), q_len), frame).T


def _read_bounds(tensor: Any, causal: bool, q_len: int) -> Array:
    """int64 (batch, heads, kv_len, bounds) of the caller's tensor, q_len at most."""
    name = "startend_row_indices"
    array = host(tensor, name)
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
    # before the conversion: uint64 has values beyond int64
    return np.minimum(array, min(q_len, np.iinfo(array.dtype).max)).astype(np.int64)


def _first_queries(n_lines: int, q_len: int, kv_len: int) -> Array:
    """The first query that a causal mask leaves to each key."""
    return np.clip(np.arange(n_lines) % max(kv_len, 1) - (kv_len - q_len), 0, q_len)


def _masked(bounds: Array, causal: bool, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """(begins, ends) of the masked intervals of every key, each (2, keys)."""
    columns = list(bounds.T)
    zero, end = np.zeros_like(columns[0]), np.full_like(columns[0], q_len)
    if causal:
        lower, upper = [*columns, end][:2], [zero, _first_queries(len(bounds), q_len, kv_len)]
    elif len(columns) == 2:
        lower, upper = [columns[0], end], [zero, columns[1]]
    else:
        lower, upper = columns[:2], columns[2:]
    return np.stack([lower[0], upper[0]]), np.stack([lower[1], upper[1]])


def to_flashmask(layout: BlockLayout, *, causal: bool = False, kv_heads: int | None = None) -> torch.Tensor:
    """FlashMask's column bounds of a layout, exact, on its device, in O(nnz).

    causal    causal of the call to flashmask_attention. True: no pair of the layout may lie above the diagonal, and
              each key may have one masked interval below it. False: each key may have two masked intervals
    kv_heads  KV heads; all query heads of a KV head must have equal masks. None: one KV head per query head
    returns   int32 (batch | 1, heads | 1, kv_len, 1 | 2 | 4), with as few bounds as possible
    raises    ValueError naming the first key with more masked intervals than FlashMask can express
    """
    check_layout(layout)
    causal = checks.boolean(causal, "causal")
    batch, heads, q_len, kv_len = layout.shape
    lines, begin, end = _gaps(layout, causal)
    counts = np.bincount(lines, minlength=batch * heads * kv_len)
    limit = 1 if causal else 2
    if (counts > limit).any():
        where = int((counts > limit).argmax())
        raise ValueError(
            f"layout masks {counts[where]} separate intervals of queries for key {_named(where, layout)}"
            f"{', besides those above the diagonal' if causal else ''}, but FlashMask can express only {limit} with "
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
    batch_head, key = divmod(line, layout.kv_len)
    return f"{key} of batch {batch_head // layout.shape[1]}, head {batch_head % layout.shape[1]}"


def _gaps(layout: BlockLayout, causal: bool) -> Runs:
    """The masked intervals of queries, in line = batch_head * kv_len + kv_pos; if causal, below the diagonal."""
    q_len, kv_len = layout.q_len, layout.kv_len
    seen, n_lines = runs_of(layout.T), layout.shape[0] * layout.shape[1] * kv_len
    if causal:
        start = _first_queries(n_lines, q_len, kv_len)
        ahead = seen.first < start[seen.lines]
        if ahead.any():
            where = int(ahead.argmax())
            raise ValueError(
                f"layout must hold no pair above the diagonal with causal=True, but query {seen.first[where]} attends "
                f"to key {_named(int(seen.lines[where]), layout)}: use causal=False, or layout & masks.causal(...)"
            )
        above = np.arange(n_lines), np.zeros_like(start), start
        lines, first, stop = map(np.concatenate, zip(seen, above, strict=True))
        seen = merged(lines, first, stop, q_len)
    return complement(seen, n_lines, q_len)


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
