"""The tiles of each program of a launch, in launch order, and list scheduling of the programs on SMs."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan_format import N_LONG, N_PARTIAL, N_TILES, NUMBER, POSITION, TILE

Array = NDArray[Any]

# programs at the end of a launch that are simulated one by one
SIMULATED = 4096


class Lines(NamedTuple):
    """Tile counts of the lines (tile rows or columns) of every head, in launch order: int64 (lines,).

    See plan_format.Plan.

    tiles    computed tiles
    partial  tiles that are not full
    """

    tiles: Array
    partial: Array


class Sides(NamedTuple):
    """The tile rows of every query head, and the tile columns of every KV head over all its query heads."""

    rows: Lines
    cols: Lines


def of_records(records: Array, *, batch: int, heads: int, group: int = 1) -> Lines:
    """The lines of one direction of a plan from its records (batch | 1, heads | 1, lines, 8).

    group  query heads per program: the program of a KV head iterates over the tile column of each of its query heads
    """
    records = np.asarray(records, dtype=np.int64)
    n_lines = records.shape[2]
    # record i has the position of the record of line i
    by_line = np.take_along_axis(records, records[..., POSITION, None], axis=2)[..., [N_TILES, N_PARTIAL]]
    by_line = np.broadcast_to(by_line, (batch, heads, n_lines, 2)).reshape(batch, heads // group, group, n_lines, 2)
    launch = np.broadcast_to(records[..., NUMBER], (batch, heads, n_lines))[:, ::group]
    work = np.take_along_axis(by_line.sum(axis=2), launch[..., None], axis=2).reshape(-1, n_lines, 2)
    # long lines of all heads first, then head by head
    n_long = int(records[0, 0, 0, N_LONG]) if records.size else 0
    first, rest = work[:, :n_long].swapaxes(0, 1), work[:, n_long:]
    return Lines(*np.concatenate([first.reshape(-1, 2), rest.reshape(-1, 2)]).T)


def split_lines(lines: Lines, n_split: int, n_splits: int) -> Lines:
    """The programs if each of the first n_split lines is split into n_splits equal programs, in fractions of tiles.

    >>> split_lines(Lines(np.array([9, 2]), np.array([3, 0])), 1, 3).tiles.tolist()
    [3.0, 3.0, 3.0, 2.0]
    """
    if n_splits == 1:
        return lines
    shared = (np.repeat(values[:n_split] / n_splits, n_splits) for values in lines)
    return Lines(*(np.concatenate([first, values[n_split:]]) for first, values in zip(shared, lines, strict=True)))


def interleaved(lines: Lines, n_heads: int, n_interleaved: int, n_long: int = 0) -> Lines:
    """The lines of n_heads heads in the order in which kernels take them, see `schedule.interleaved_heads`.

    n_long  lines of each head that come before all others

    >>> interleaved(Lines(np.array([2, 1, 2, 1, 2, 1, 2, 1, 2, 1]), np.zeros(10)), 5, 2).tiles.tolist()
    [2, 2, 1, 1, 2, 2, 2, 1, 1, 1]
    >>> interleaved(Lines(np.array([9, 8, 2, 1, 2, 1]), np.zeros(6)), 2, 2, n_long=1).tiles.tolist()
    [9, 8, 2, 2, 1, 1]
    """
    first, rest = np.split(np.arange(len(lines.tiles)), [n_long * n_heads])
    firsts = range(n_interleaved, n_heads - n_interleaved + 1, n_interleaved)
    order = np.concatenate([first, *(heads.T.ravel() for heads in np.split(rest.reshape(n_heads, -1), firsts))])
    return Lines(*(values[order] for values in lines))


def without_layout(q_len: int, kv_len: int, *, causal: bool, n_batch_heads: int, n_kv_batch_heads: int) -> Sides:
    """The lines of a call without a layout, of batch * heads query heads and batch * kv_heads KV heads."""
    n_rows, n_cols = -(-q_len // TILE), -(-kv_len // TILE)
    row, col = np.arange(n_rows, dtype=np.int64), np.arange(n_cols, dtype=np.int64)
    # keys seen by the first and the last query of a tile row; first queries that see some and all keys of a tile column
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
    # head after head, the longest lines first: the last tile rows, the first tile columns
    group = max(1, n_batch_heads // max(1, n_kv_batch_heads))
    of_rows = Lines(*(np.tile(values[::-1], n_batch_heads) for values in rows))
    return Sides(of_rows, Lines(*(np.tile(values * group, n_kv_batch_heads) for values in cols)))


def makespan(work: Array, servers: int) -> float:
    """The end of the last program if programs start in this order, each on the first free server (list scheduling).

    Only the last SIMULATED programs are simulated; the work of earlier ones is spread evenly.

    >>> makespan(np.array([3.0, 2.0, 2.0, 1.0]), 2)
    4.0
    """
    early, late = work[:-SIMULATED], work[-SIMULATED:]
    free = [float(early.sum()) / servers] * servers
    for time in late.tolist():
        heapq.heapreplace(free, free[0] + time)
    return max(*free, float(early.max(initial=0.0)))
