"""Masks as runs: the maximal ranges of consecutive keys that each query attends to.

    query 0 | 1 1 0 0 1 |  ->  runs [0, 2) and [4, 5)

Time and memory grow with the number of runs and stored blocks, not with q_len * kv_len. For runs of queries per key,
use `layout.T`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..blocks import block_list
from ..blocks.block_list import EMPTY, FULL, Array, Size
from ..layout import BlockLayout
from .block_arrays import layout_of, stored

# pairs per step when bitmasks are built, to bound memory to some tens of megabytes
_PAIRS_AT_ONCE = 1 << 24


class Runs(NamedTuple):
    """Keys first .. stop - 1 of line = lead * q_len + q_pos, int64 (n,) each.

    Ascending by (line, first); the runs of a line neither overlap nor touch, and none is empty.
    """

    lines: Array
    first: Array
    stop: Array


def merged(lines: Array, first: Array, stop: Array, length: int) -> Runs:
    """Runs of the union of intervals in any order. Empty intervals are dropped. length is the number of keys."""
    there = stop > first
    if not there.all():
        lines, first, stop = lines[there], first[there], stop[there]
    # a gap of 1 between lines, so that intervals of different lines never touch
    starts = lines * (length + 1) + first
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (lines * (length + 1) + stop)[order]
    if not len(starts):
        return Runs(starts, starts, starts)
    reach = np.maximum.accumulate(ends)
    begins = np.append(True, starts[1:] > reach[:-1])
    where = np.flatnonzero(begins)
    last = np.append(where[1:], len(starts)) - 1
    lines, first = np.divmod(starts[where], length + 1)
    return Runs(lines, first, reach[last] - lines * (length + 1))


# --------------------------------------------------------------------------------------------------- layout -> runs


def runs_of(layout: BlockLayout) -> Runs:
    """The runs of a layout. Adjacent full blocks are merged before they are split into queries."""
    arrays = stored(layout)
    q_len, kv_len, (block_q, block_kv) = layout.q_len, layout.kv_len, layout.block_size
    flat_rows, is_full = arrays.leads * layout.n_rows + arrays.rows, arrays.is_full
    spans = merged(flat_rows[is_full], arrays.cols[is_full], arrays.cols[is_full] + 1, layout.n_cols)
    leads, rows = np.divmod(spans.lines, max(layout.n_rows, 1))
    heights = np.minimum(block_q, q_len - rows * block_q)
    full_lines = block_list.ranges(leads * q_len + rows * block_q, heights)
    full_first = np.repeat(spans.first * block_kv, heights)
    full_stop = np.repeat(np.minimum(spans.stop * block_kv, kv_len), heights)

    # runs of each distinct bitmask, then of the blocks that have it
    masks, queries, first, stop = _runs_of_bitmasks(arrays.bitmasks, block_kv)
    bounds = np.searchsorted(masks, np.arange(len(arrays.bitmasks) + 1))
    partial = np.flatnonzero(~is_full)
    counts = np.diff(bounds)[arrays.ids[partial]]
    source = block_list.ranges(bounds[arrays.ids[partial]], counts)
    lines = np.repeat((arrays.leads * q_len + arrays.rows * block_q)[partial], counts) + queries[source]
    origin = np.repeat(arrays.cols[partial] * block_kv, counts)
    return merged(
        np.concatenate([full_lines, lines]),
        np.concatenate([full_first, origin + first[source]]),
        np.concatenate([full_stop, origin + stop[source]]),
        kv_len,
    )


def _runs_of_bitmasks(bitmasks: Array, block_kv: int) -> tuple[Array, Array, Array, Array]:
    """(bitmask, query, first, stop) of every run in bitmasks, ascending."""
    found: list[tuple[Array, ...]] = [(np.zeros(0, np.int64),) * 4]
    for part in _chunks(len(bitmasks), bitmasks.shape[1] * block_kv):
        bits = np.pad(block_list.unpack(bitmasks[part], block_kv), ((0, 0), (0, 0), (1, 1))).view(np.int8)
        steps = np.diff(bits)
        mask, query, first = np.nonzero(steps == 1)
        found.append((mask + part.start, query, first, np.nonzero(steps == -1)[2]))
    masks, queries, first, stop = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return masks, queries, first, stop


def _chunks(count: int, pairs_each: int) -> Iterator[slice]:
    step = max(1, _PAIRS_AT_ONCE // max(1, pairs_each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


# --------------------------------------------------------------------------------------------------- runs -> layout


def layout_of_runs(runs: Runs, axes: Size, *, q_len: int, kv_len: int, block_size: Size) -> BlockLayout:
    """The layout of runs, on the host; axes is (batch, heads)."""
    n_rows, n_cols = block_list.grid(q_len, kv_len, block_size)
    block_q, block_kv = block_size
    leads, q_pos = np.divmod(runs.lines, max(q_len, 1))
    flat_rows = leads * n_rows + q_pos // block_q
    # blocks with a pair that attends
    spans = merged(flat_rows, runs.first // block_kv, (runs.stop - 1) // block_kv + 1, n_cols)
    keys = block_list.ranges(spans.lines * n_cols + spans.first, spans.stop - spans.first)
    ids = np.full(len(keys), EMPTY, np.int64)
    ids[np.searchsorted(keys, _full_keys(runs, flat_rows, q_len, kv_len, block_size))] = FULL
    partial = np.flatnonzero(ids == EMPTY)
    gathering = block_list.Gathering(block_list.existing(q_len, kv_len, block_size))
    kinds = block_list.edge_kinds(keys[partial], q_len=q_len, kv_len=kv_len, block_size=block_size)
    for part in _chunks(len(partial), block_q * (block_kv + 1)):
        gathering.add(
            _run_bitmasks(keys[partial[part]], runs, flat_rows, q_pos % block_q, n_cols, block_size), kinds[part]
        )
    ids[partial], words = gathering.ids()
    return layout_of(keys, ids, words, axes, q_len=q_len, kv_len=kv_len, block_size=block_size)


def _full_keys(runs: Runs, flat_rows: Array, q_len: int, kv_len: int, block_size: Size) -> Array:
    """Keys of the blocks that a run crosses in every query, ascending; a ragged last col is never among them."""
    n_rows, n_cols = block_list.grid(q_len, kv_len, block_size)
    first = -(-runs.first // block_size[1])
    stop = runs.stop // block_size[1]
    crossed = stop > first
    rows = flat_rows[crossed] * (n_cols + 1)
    # +1 where a run begins, -1 where it ends: a col is full where the running sum is the height of the row
    places = np.concatenate([rows + first[crossed], rows + stop[crossed]])
    changes = np.repeat([1, -1], len(rows))
    order = np.argsort(places, kind="stable")
    places, crossing = places[order], np.cumsum(changes[order])
    if not len(places):
        return places
    # sums after all changes at a place
    last = np.flatnonzero(np.append(places[1:] != places[:-1], True))
    begins, crossing = places[last], crossing[last]
    ends = np.append(begins[1:], begins[-1])
    rows, cols = np.divmod(begins, n_cols + 1)
    heights = np.minimum(block_size[0], q_len - rows % n_rows * block_size[0])
    is_full = crossing == heights
    return block_list.ranges((rows * n_cols + cols)[is_full], (ends - begins)[is_full])


def _run_bitmasks(keys: Array, runs: Runs, flat_rows: Array, queries: Array, n_cols: int, block_size: Size) -> Array:
    """uint32 (blocks, block_q, words): the bitmasks of the blocks with these ascending keys."""
    block_q, block_kv = block_size
    steps = np.zeros((len(keys), block_q, block_kv + 1), np.int8)
    # runs ascend, so the runs of these block rows are contiguous
    begin, end = np.searchsorted(flat_rows, [keys[0] // n_cols, keys[-1] // n_cols + 1])
    here = slice(int(begin), int(end))
    rows, first, stop = flat_rows[here] * n_cols, runs.first[here], runs.stop[here]
    low = np.searchsorted(keys, rows + first // block_kv)
    high = np.searchsorted(keys, rows + (stop - 1) // block_kv, side="right")
    counts = high - low
    block, run = block_list.ranges(low, counts), np.repeat(np.arange(len(low)), counts)
    origin = keys[block] % n_cols * block_kv
    query = queries[here][run]
    # runs of a query do not touch, so no two begin or end at the same place
    steps[block, query, np.maximum(first[run] - origin, 0)] += 1
    steps[block, query, np.minimum(stop[run] - origin, block_kv)] -= 1
    return block_list.pack(np.cumsum(steps, axis=2, dtype=np.int8)[:, :, :block_kv].view(np.bool_))
