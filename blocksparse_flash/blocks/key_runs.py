"""Masks as runs: the maximal ranges of consecutive keys that each query attends to.

    query 0 | 1 1 0 0 1 |  ->  runs [0, 2) and [4, 5)

Time and memory grow with the number of runs and stored blocks, not with q_len * kv_len. Runs of queries per key are
those of the transposed blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import block_list
from .block_list import FULL, Array, BlockList, Frame


class Runs(NamedTuple):
    """Keys first .. stop - 1 of line = batch_head * q_len + q_pos, int64 (n,) each.

    Ascending by (line, first); the runs of a line neither overlap nor touch, and none is empty.
    """

    lines: Array
    first: Array
    stop: Array


def merged(lines: Array, first: Array, stop: Array, length: int) -> Runs:
    """Runs of the union of intervals in any order. Empty intervals are dropped. length is the number of keys."""
    is_kept = stop > first
    if not is_kept.all():
        lines, first, stop = lines[is_kept], first[is_kept], stop[is_kept]
    # a gap of 1 between lines, so that intervals of different lines never touch
    starts = lines * (length + 1) + first
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate((lines * (length + 1) + stop)[order])
    is_last = np.ones(len(starts), np.bool_)
    is_last[:-1] = starts[1:] > reach[:-1]
    lines, first = np.divmod(starts[np.roll(is_last, 1)], length + 1)
    return Runs(lines, first, reach[is_last] - lines * (length + 1))


def complement(runs: Runs, n_lines: int, length: int) -> Runs:
    """The runs of keys outside the given runs, in lines 0 .. n_lines - 1."""
    origins, lines = np.arange(n_lines) * (length + 1), runs.lines * (length + 1)
    # a line of n runs has n + 1 gaps: each begins where a run stops and ends where the next begins
    begins = np.sort(np.concatenate([origins, lines + runs.stop]), kind="stable")
    ends = np.sort(np.concatenate([lines + runs.first, origins + length]), kind="stable")
    is_kept = ends > begins
    lines, first = np.divmod(begins[is_kept], length + 1)
    return Runs(lines, first, ends[is_kept] - lines * (length + 1))


# --------------------------------------------------------------------------------------------------- blocks -> runs


def runs_of(found: BlockList, frame: Frame) -> Runs:
    """The runs of a block list. Adjacent full blocks are merged before they are split into queries."""
    (block_q, block_kv), is_full = frame.block_size, found.ids == FULL
    tile_lines, cols = np.divmod(found.keys[is_full], max(frame.n_cols, 1))
    spans = merged(tile_lines, cols, cols + 1, frame.n_cols)
    batch_heads, rows = np.divmod(spans.lines, max(frame.n_rows, 1))
    heights = np.minimum(block_q, frame.q_len - rows * block_q)
    full_lines = block_list.ranges(batch_heads * frame.q_len + rows * block_q, heights)
    full_first = np.repeat(spans.first * block_kv, heights)
    full_stop = np.repeat(np.minimum(spans.stop * block_kv, frame.kv_len), heights)

    # runs of each distinct bitmask, then of the blocks that have it
    masks, queries, first, stop = _runs_of_bitmasks(found.bitmasks, block_kv)
    bounds = np.searchsorted(masks, np.arange(len(found.bitmasks) + 1))
    ids = found.ids[~is_full]
    counts = np.diff(bounds)[ids]
    source = block_list.ranges(bounds[ids], counts)
    batch_heads, rows, cols = frame.positions(found.keys[~is_full])
    lines = np.repeat(batch_heads * frame.q_len + rows * block_q, counts) + queries[source]
    origin = np.repeat(cols * block_kv, counts)
    return merged(
        np.concatenate([full_lines, lines]),
        np.concatenate([full_first, origin + first[source]]),
        np.concatenate([full_stop, origin + stop[source]]),
        frame.kv_len,
    )


def _runs_of_bitmasks(bitmasks: Array, block_kv: int) -> list[Array]:
    """[bitmask, query, first, stop] of every run in bitmasks, ascending."""
    found: list[tuple[Array, ...]] = [(np.zeros(0, np.int64),) * 4]
    for part in block_list.chunks(len(bitmasks), bitmasks.shape[1] * block_kv):
        # 0 around each row, so that every run has a begin and an end
        steps = np.diff(block_list.unpack(bitmasks[part], block_kv).view(np.int8), prepend=0, append=0)
        mask, query, first = np.nonzero(steps == 1)
        found.append((mask + part.start, query, first, np.nonzero(steps == -1)[2]))
    return [np.concatenate(arrays) for arrays in zip(*found, strict=True)]


# --------------------------------------------------------------------------------------------------- runs -> blocks


def blocks_of_runs(runs: Runs, frame: Frame) -> BlockList:
    """The canonical block list of runs."""
    (block_q, block_kv), n_cols = frame.block_size, frame.n_cols
    batch_heads, q_pos = np.divmod(runs.lines, max(frame.q_len, 1))
    lines = batch_heads * frame.n_rows + q_pos // block_q
    # blocks with a pair that attends
    spans = merged(lines, runs.first // block_kv, (runs.stop - 1) // block_kv + 1, n_cols)
    keys = block_list.ranges(spans.lines * n_cols + spans.first, spans.stop - spans.first)
    is_partial = np.ones(len(keys), np.bool_)
    is_partial[np.searchsorted(keys, _full_keys(runs, lines, frame))] = False
    partial, ids = keys[is_partial], np.full(len(keys), FULL, np.int64)
    ids[is_partial] = np.arange(len(partial))
    collector = block_list.BitmaskCollector(block_list.in_bounds_bitmasks(frame))
    kinds = block_list.edge_kinds(partial, frame)
    for part in block_list.chunks(len(partial), block_q * (block_kv + 1)):
        collector.add(_bitmasks_of_runs(partial[part], runs, lines, q_pos % block_q, frame), kinds[part])
    return collector.canonical(keys, ids)


def _full_keys(runs: Runs, lines: Array, frame: Frame) -> Array:
    """Keys of the blocks that a run crosses in every query, ascending; a ragged last col is never among them.

    lines  block row of each run
    """
    (block_q, block_kv), n_cols = frame.block_size, frame.n_cols
    first, stop = -(-runs.first // block_kv), runs.stop // block_kv
    crossed = stop > first
    origins = lines[crossed] * (n_cols + 1)
    # +1 where a run begins, -1 where it ends: a col is full where the running sum is the height of the row
    places = np.concatenate([origins + first[crossed], origins + stop[crossed]])
    order = np.argsort(places, kind="stable")
    starts, lengths = block_list.run_lengths(places[order])
    # sums after all changes at a place
    crossing = np.cumsum(np.where(order < len(origins), 1, -1))[starts + lengths - 1]
    begins = places[order[starts]]
    widths = np.diff(begins, append=begins[-1:])
    rows, cols = np.divmod(begins, n_cols + 1)
    heights = np.minimum(block_q, frame.q_len - rows % max(frame.n_rows, 1) * block_q)
    is_full = crossing == heights
    return block_list.ranges((rows * n_cols + cols)[is_full], widths[is_full])


def _bitmasks_of_runs(keys: Array, runs: Runs, lines: Array, queries: Array, frame: Frame) -> Array:
    """uint32 (blocks, block_q, words): the bitmasks of the blocks with these ascending keys.

    lines, queries  block row of each run, and its query in there
    """
    (block_q, block_kv), n_cols = frame.block_size, frame.n_cols
    # runs ascend, so the runs of these block rows are contiguous
    begin, end = np.searchsorted(lines, [keys[0] // n_cols, keys[-1] // n_cols + 1])
    here = slice(int(begin), int(end))
    rows, first, stop = lines[here] * n_cols, runs.first[here], runs.stop[here]
    low = np.searchsorted(keys, rows + first // block_kv)
    counts = np.searchsorted(keys, rows + (stop - 1) // block_kv, side="right") - low
    block, run = block_list.ranges(low, counts), np.repeat(np.arange(len(low)), counts)
    origin = keys[block] % n_cols * block_kv
    query = queries[here][run]
    first, stop = np.maximum(first[run] - origin, 0), np.minimum(stop[run] - origin, block_kv)
    line = block * block_q + query
    if np.bincount(line).max(initial=0) <= 1:
        # one run for each query: its words are those before `stop` without those before `first`
        before = block_list.pack(np.tri(block_kv + 1, block_kv, -1, dtype=np.bool_)[None])[0]
        words = np.zeros((len(keys) * block_q, before.shape[1]), before.dtype)
        words[line] = before[stop] ^ before[first]
        return words.reshape(len(keys), block_q, -1)
    steps = np.zeros((len(keys), block_q, block_kv + 1), np.int8)
    # runs of a query do not touch, so no two begin or end at the same place
    steps[block, query, first] += 1
    steps[block, query, stop] -= 1
    return block_list.pack(np.cumsum(steps, axis=2, dtype=np.int8)[:, :, :block_kv].view(np.bool_))
