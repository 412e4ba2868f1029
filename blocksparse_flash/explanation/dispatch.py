"""Which work has each program of a launch, in which order do they begin, and when does the last one end?

Knows: tiles, the records of a plan as NumPy arrays, causal diagonals. Does not know: seconds, tensors, what a kernel computes.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TILE = 128
# programs at the end of a launch that are followed one by one
SIMULATED = 4096


class Lines(NamedTuple):
    """The tiles of each line (tile row or tile column) of every head, in the order in which a kernel begins them: int64 (lines,).

    tiles    computed
    partial  of these not full
    quartered  of these made of whole quarters, and
    single   of these, of which one half of the keys, or for columns of the queries, attends: see plan.Plan
    """

    tiles: Array
    partial: Array
    quartered: Array
    single: Array


class Sides(NamedTuple):
    """What the kernels of a call walk: the rows of every query head, the columns of every key head with all its queries."""

    rows: Lines
    cols: Lines


def of_records(records: Array, *, batch: int, heads: int, group: int = 1) -> Lines:
    """The lines of one direction of a plan: records (batch | 1, heads | 1, lines, 8), see plan.Plan.

    group  heads that share one program: a key head's program walks the column of each of its query heads
    """
    records = np.asarray(records, dtype=np.int64)
    n_lines = records.shape[2]
    # where the record of line i stands -> the records by line
    by_line = np.take_along_axis(records, records[..., 4:5], axis=2)[..., [2, 3, 5, 6]]
    by_line = np.broadcast_to(by_line, (batch, heads, n_lines, 4)).reshape(batch, heads // group, group, n_lines, 4)
    launch = np.broadcast_to(records[..., 0], (batch, heads, n_lines))[:, ::group]
    work = np.take_along_axis(by_line.sum(axis=2), launch[..., None], axis=2).reshape(-1, n_lines, 4)
    # the longest lines of all heads first, then head after head
    n_long = int(records[0, 0, 0, 7]) if records.size else 0
    first, rest = work[:, :n_long].swapaxes(0, 1), work[:, n_long:]
    return Lines(*np.concatenate([first.reshape(-1, 4), rest.reshape(-1, 4)]).T)


def by_quarters(lines: Lines, *, is_halved: bool) -> Lines:
    """Where whole quarters are not masked pair by pair; is_halved: and of single tiles only the half that attends is computed."""
    tiles = lines.tiles - lines.single / 2 if is_halved else lines.tiles
    none = 0 * lines.partial
    return Lines(tiles, lines.partial - lines.quartered, none, none)


def in_parts(lines: Lines, n_split: int, parts: int) -> Lines:
    """The programs where the first n_split lines have so many each: tiles and partial ones shared equally, in fractions.

    >>> in_parts(Lines(np.array([9, 2]), np.array([3, 0]), np.zeros(2), np.zeros(2)), 1, 3).tiles.tolist()
    [3.0, 3.0, 3.0, 2.0]
    """
    if parts == 1:
        return lines
    shared = (np.repeat(values[:n_split] / parts, parts) for values in lines)
    return Lines(*(np.concatenate([first, values[n_split:]]) for first, values in zip(shared, lines, strict=True)))


def without_layout(q_len: int, kv_len: int, *, causal: bool, axes: int, kv_axes: int) -> Sides:
    """The lines of a dense call, or of a causal one without a layout, whose tiles no list holds.

    axes, kv_axes  batch * heads, batch * kv_heads
    """
    n_rows, n_cols = -(-q_len // TILE), -(-kv_len // TILE)
    row, col = np.arange(n_rows, dtype=np.int64), np.arange(n_cols, dtype=np.int64)
    # keys that the first and the last query of a row see, queries from which on a column is seen: in part, and whole
    sees_first, sees_last = np.full(n_rows, kv_len), np.full(n_rows, kv_len)
    from_q, whole_q = np.zeros(n_cols, np.int64), np.zeros(n_cols, np.int64)
    if causal:
        ahead = kv_len - q_len
        sees_first = np.clip(row * TILE + 1 + ahead, 0, kv_len)
        sees_last = np.clip(np.minimum((row + 1) * TILE, q_len) + ahead, 0, kv_len)
        from_q = np.clip(col * TILE - ahead, 0, q_len)
        whole_q = np.clip((col + 1) * TILE - 1 - ahead, 0, q_len)
    of_row = -(-sees_last // TILE)
    rows = of_row, of_row - np.minimum(sees_first // TILE, of_row)
    of_col = n_rows - from_q // TILE
    of_col[from_q == q_len] = 0
    cols = of_col, of_col - np.clip(q_len // TILE - -(-whole_q // TILE), 0, of_col)
    # without a layout the last rows are the longest and come first, as the first columns do
    heads, group = (axes, kv_axes), max(1, axes // max(1, kv_axes))
    return Sides(
        Lines(*(np.tile(values[::-1], heads[0]) for values in (*rows, 0 * row, 0 * row))),
        Lines(*(np.tile(values * group, heads[1]) for values in (*cols, 0 * col, 0 * col))),
    )


def makespan(work: Array, servers: int) -> float:
    """When the last program ends, if each is begun in this order by the server that is free first (list scheduling).

    Of many programs the last SIMULATED are followed one by one; what comes before them is taken as evenly spread.

    >>> makespan(np.array([3.0, 2.0, 2.0, 1.0]), 2)
    4.0
    """
    early, late = work[:-SIMULATED], work[-SIMULATED:]
    free = [float(early.sum()) / servers] * servers
    for time in late.tolist():
        heapq.heapreplace(free, free[0] + time)
    return max(*free, float(early.max(initial=0.0)))
