"""Builds plans on the host (NumPy): lists the tiles of a layout by tile row and by tile column."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..blocks.block_list import Array, BlockRows, Frame
from ..blocks.transfer import may_pin, sent, views, zeros
from ..plan_format import (
    BEGIN,
    FINE_TILE,
    N_LONG,
    N_PARTIAL,
    N_TILES,
    NUMBER,
    PARTIAL,
    POSITION,
    RECORD,
    SPLIT_SHARE,
    TILE,
    Plan,
    list_lengths,
    with_dynamic_lengths,
)


def build_plan(tiles: BlockRows, frame: Frame, device: torch.device, *, non_blocking: bool = False) -> Plan:
    """The plan of a canonical block list whose blocks are tiles. O(tiles).

    frame         of the tiles: its block_size is TILE x TILE or FINE_TILE x FINE_TILE
    non_blocking  as in transfer.sent
    """
    assert frame.block_size in ((TILE, TILE), (FINE_TILE, FINE_TILE)), frame.block_size
    tile = frame.block_size[0]
    bitmasks, nnz = tiles.bitmasks, len(tiles.cols)
    work, col_line = count_tiles(tiles, frame)
    by_rows, by_cols = _sides(tiles, frame, work, col_line)
    ids, partial = _with_edges(by_rows, by_cols, tiles.ids, len(bitmasks), frame)
    most, long = count_long(work, nnz, frame)
    is_lower = is_lower_triangular(tiles, frame)
    shapes: list[tuple[int, ...]] = []
    for side, lines in zip((by_rows, by_cols), long, strict=True):
        n_indices, n_ids = list_lengths(nnz, lines.n_split, of_rows=side is by_rows, is_lower=is_lower)
        shapes += (frame.batch, frame.heads, side.n_lines // frame.batch_heads, RECORD), (n_indices,), (n_ids,)
    shapes.append((len(bitmasks) + 3, tile, tile // 32))
    packed, places = zeros(shapes, is_pinned=may_pin(device))
    row_records, row_indices, row_ids, col_records, col_indices, col_ids, words = views(packed, places)
    _write_list(by_rows, ids, partial, row_indices[:nnz], row_ids[:nnz], of_rows=True)
    _write_list(by_cols, ids, partial, col_indices[:nnz], col_ids[:nnz], of_rows=False)
    n_partial = np.zeros(len(work), np.int64)
    if len(partial):
        line = np.concatenate([by_rows.line[partial], by_cols.line[partial] + by_rows.n_lines])
        n_partial = np.bincount(line, minlength=len(work))
    records = records_of(work, n_partial, most, [lines.n_long for lines in long], frame)
    row_records[...] = records[: by_rows.n_lines].reshape(row_records.shape)
    col_records[...] = records[by_rows.n_lines :].reshape(col_records.shape)
    last = _last(frame.q_len, tile), _last(frame.kv_len, tile)
    words[:-3], words[-3:] = bitmasks.view(np.int32), _edge_bitmasks(*last, tile)
    return with_dynamic_lengths(Plan(*sent(packed, places, device, non_blocking=non_blocking)))


def _last(length: int, tile: int) -> int:
    """Tokens of the last tile."""
    return (length - 1) % tile + 1 if length else 0


@functools.lru_cache(maxsize=256)
def _edge_bitmasks(n_queries: int, n_keys: int, tile: int) -> Array:
    """Existing pairs of a tile at the right edge, at the bottom edge and in the corner: (3, tile, words), read only.

    n_queries, n_keys  tokens of the last tile row and the last tile column
    """
    q_exists, kv_exists = (np.arange(tile) < n for n in (n_queries, n_keys))
    every = np.ones(tile, dtype=bool)
    pairs = [np.outer(q, kv) for q, kv in ((every, kv_exists), (q_exists, every), (q_exists, kv_exists))]
    return np.packbits(np.stack(pairs), axis=-1, bitorder="little").view(np.int32)


class Side(NamedTuple):
    """The tiles by tile row, or by tile column; both in the order of the block list.

    line     batch_head * (tile rows of a batch_head) + tile row, of each tile
    minor    its tile column
    n_lines  tile rows of all batch_heads
    """

    line: Array
    minor: Array
    n_lines: int


def count_tiles(tiles: BlockRows, frame: Frame) -> tuple[Array, Array]:
    """(tiles per tile row of all batch_heads, then per tile column; batch_head * n_cols + col of each tile)."""
    batch_heads, n_cols, indptr, col_line = frame.batch_heads, frame.n_cols, tiles.indptr, tiles.cols
    if batch_heads > 1:
        col_line = col_line + (n_cols * np.arange(batch_heads)).repeat(indptr[:, -1] - indptr[:, 0])
    n_of_rows, n_of_cols = batch_heads * frame.n_rows, batch_heads * n_cols
    # both directions in one array: on few elements, one operation costs as much as on twice as many
    work = np.empty(n_of_rows + n_of_cols, np.int64)
    np.subtract(indptr[:, 1:], indptr[:, :-1], out=work[:n_of_rows].reshape(batch_heads, frame.n_rows))
    work[n_of_rows:] = np.bincount(col_line, minlength=n_of_cols)
    return work, col_line


def is_lower_triangular(tiles: BlockRows, frame: Frame) -> bool:
    """Whether no tile has only keys after its queries, which are the last q_len of kv_len tokens."""
    first, stop = tiles.indptr[:, :-1], tiles.indptr[:, 1:]
    has_tiles = stop > first
    last, row = tiles.cols[stop[has_tiles] - 1], has_tiles.nonzero()[1]
    side = frame.block_size[0]
    return not len(row) or int((last - row).max()) <= (side - 1 + frame.kv_len - frame.q_len) // side


def _sides(tiles: BlockRows, frame: Frame, work: Array, col_line: Array) -> tuple[Side, Side]:
    """The tiles by tile row and by tile column; work, col_line from `count_tiles`."""
    n_of_rows = frame.batch_heads * frame.n_rows
    row_line = np.arange(n_of_rows).repeat(work[:n_of_rows])
    row = row_line % frame.n_rows if frame.batch_heads > 1 else row_line
    return Side(row_line, tiles.cols, n_of_rows), Side(col_line, row, len(work) - n_of_rows)


def _with_edges(by_rows: Side, by_cols: Side, ids: Array, n_bitmasks: int, frame: Frame) -> tuple[Array, Array]:
    """(ids, indices of the partial tiles); full tiles on a ragged edge become partial, with `_edge_bitmasks`."""
    q_is_ragged, kv_is_ragged = (length % frame.block_size[0] != 0 for length in (frame.q_len, frame.kv_len))
    if q_is_ragged or kv_is_ragged:
        edge = 2 * (q_is_ragged & (by_cols.minor == frame.n_rows - 1))
        edge += kv_is_ragged & (by_rows.minor == frame.n_cols - 1)
        ids = np.where((ids < 0) & (edge > 0), n_bitmasks - 1 + edge, ids)
    elif not n_bitmasks:
        return ids, np.zeros(0, np.intp)
    return ids, (ids >= 0).nonzero()[0]


def _write_list(side: Side, ids: Array, partial: Array, indices: Array, bitmask_ids: Array, *, of_rows: bool) -> None:
    """Write the list entries of all tile rows, and their bitmask ids, into arrays of zeros.

    partial  indices of the partial tiles
    """
    if not len(partial):
        indices[:] = side.minor if of_rows else side.minor.take(order_of(side.line, side.n_lines))
        return
    rank, minor = 2 * side.line + 1, side.minor.copy()
    rank[partial] -= 1
    minor[partial] -= PARTIAL
    order = order_of(rank, 2 * side.n_lines)
    indices[:], bitmask_ids[:] = minor.take(order), np.maximum(ids, 0).take(order)


def records_of(work: Array, n_partial: Array, most: int, n_long: Sequence[int], frame: Frame) -> Array:
    """Records of all tile rows, then of all tile columns, (lines, RECORD), longest of each batch_head first.

    work     tiles of each line; at most `most`
    n_partial  partial tiles of each line
    n_long   of each direction
    """
    n_of_rows = frame.batch_heads * frame.n_rows
    batch_head, number = _numbered(frame.batch_heads, frame.n_rows, frame.n_cols)
    begin = work.cumsum()
    begin -= work
    begin[n_of_rows:] -= begin[n_of_rows] if n_of_rows < len(work) else 0
    fields = np.zeros((len(work), RECORD), np.int32)
    fields[:, NUMBER], fields[:, BEGIN], fields[:, N_TILES], fields[:, N_PARTIAL] = number, begin, work, n_partial
    if any(n_long):
        fields[:n_of_rows, N_LONG], fields[n_of_rows:, N_LONG] = n_long
    rank = batch_head * (most + 1)
    rank -= work
    order = order_of(rank, (2 * frame.batch_heads + 1) * (most + 1))
    records = fields.take(order, axis=0)
    records[order, POSITION] = number
    return records


@functools.lru_cache(maxsize=4)
def _numbered(batch_heads: int, n_rows: int, n_cols: int) -> tuple[Array, Array]:
    """(batch_head, number) of the tile rows of all heads, then of their tile columns; from 1, read only.

    Few are cached: for long sequences with many heads these are megabytes.
    """
    n_lines = np.repeat([n_rows, n_cols], batch_heads)
    batch_head = np.arange(2 * batch_heads).repeat(n_lines)
    return batch_head + 1, np.arange(len(batch_head)) - (n_lines.cumsum() - n_lines)[batch_head]


class LongLines(NamedTuple):
    """Numbers of tile rows, or of tile columns, of the head that has most of them.

    n_long   with over twice the mean number of tiles
    n_split  those of them that are worth splitting
    """

    n_long: int
    n_split: int


def count_long(work: Array, n_tiles: int, frame: Frame) -> tuple[int, tuple[LongLines, LongLines]]:
    """(tiles of the longest tile row or column, (`long_of` of tile rows, of tile columns)); work from `count_tiles`."""
    most, n_of_rows = int(np.maximum.reduce(work, initial=0)), frame.batch_heads * frame.n_rows
    # the common case, found without a division: nothing is long
    if most * max(n_of_rows, len(work) - n_of_rows) <= 2 * n_tiles:
        return most, (LongLines(0, 0), LongLines(0, 0))
    of_rows, of_cols = (part.reshape(frame.batch_heads, -1) for part in (work[:n_of_rows], work[n_of_rows:]))
    return most, (long_of(of_rows, n_tiles), long_of(of_cols, n_tiles))


def long_of(work: Array, n_tiles: int) -> LongLines:
    """The LongLines of tile rows.

    work  tiles per tile row, (heads, tile rows), n_tiles in all

    At most all but one are long: kernels divide by the number of the others.
    """
    is_long = work * work.size > 2 * n_tiles
    is_split = is_long & (SPLIT_SHARE * work > work.sum(axis=1, keepdims=True))
    n_long = max(0, min(int(is_long.sum(axis=1).max()), work.shape[1] - 1))
    return LongLines(n_long, int(is_split.sum(axis=1).max()))


def order_of(values: Array, limit: int) -> Array:
    """np.argsort(values, kind="stable") of integers 0 .. limit - 1.

    Sorts 16 bits at a time, lowest first: NumPy sorts those by radix, 7 times as fast as 64 bits (32,768 tiles).
    """
    order = values.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, (limit - 1).bit_length(), 16):
        order = order.take((values.take(order) >> shift).astype(np.uint16).argsort(kind="stable"))
    return order
