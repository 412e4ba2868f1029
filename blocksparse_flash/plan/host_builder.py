"""What does a kernel walk? A layout regrouped to 128 x 128 tiles, in both directions, as plain int32 tensors.

Knows: block lists (NumPy) and tensors. Does not know: BlockLayout, patterns, backends, head sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..blocks.block_list import Array, BlockRows, Frame
from ..blocks.transfer import may_pin, sent, views, zeros
from ..kernels.plan_format import (
    ALL_SUBTILES,
    LONG,
    PARTIAL,
    RECORD,
    SUBTILES_BIT,
    TILE,
    Plan,
    list_lengths,
    with_dynamic_lengths,
)

# of the tiles of a list
_NONE = np.zeros(0, np.intp)


def build_plan(tiles: BlockRows, frame: Frame, device: torch.device, *, non_blocking: bool = False) -> Plan:
    """List the tiles of a canonical list by rows and by columns. O(tiles).

    frame         of the tiles: its block_size is TILE x TILE
    non_blocking  as of packing.sent
    """
    assert frame.block_size == (TILE, TILE), frame.block_size
    words, nnz = tiles.bitmasks, len(tiles.cols)
    work, col_line = counted(tiles, frame)
    by_rows, by_cols = _sides(tiles, frame, work, col_line)
    ids, partial = _with_edges(by_rows, by_cols, tiles.ids, len(words), frame)
    last = _last(frame.q_len), _last(frame.kv_len)
    quarters = _NONE
    if len(partial):
        quarters = np.concatenate([subtiles_of(words), _edge_quarters(*last)]).take(ids[partial])
    has_subtiles = bool((quarters < ALL_SUBTILES).any())
    most, n_long = long_lines(work, nnz, frame)
    shapes: list[tuple[int, ...]] = []
    for side, (_, n_split) in zip((by_rows, by_cols), n_long, strict=True):
        n_indices, n_ids = list_lengths(nnz, n_split, of_rows=side is by_rows, has_subtiles=has_subtiles)
        shapes += (frame.batch, frame.heads, side.n_lines // frame.leads, RECORD), (n_indices,), (n_ids,)
    shapes.append((len(words) + 3, TILE, TILE // 32))
    packed, places = zeros(shapes, is_pinned=may_pin(device))
    row_records, row_indices, row_bitmask_ids, col_records, col_indices, col_bitmask_ids, of_words = views(packed, places)
    _list(by_rows, ids, partial, quarters, row_indices[:nnz], row_bitmask_ids[:nnz], of_rows=True)
    _list(by_cols, ids, partial, quarters, col_indices[:nnz], col_bitmask_ids[:nnz], of_rows=False)
    records = _records(by_rows, by_cols, partial, quarters, work, most, [n for n, _ in n_long], frame)
    row_records[...] = records[: by_rows.n_lines].reshape(row_records.shape)
    col_records[...] = records[by_rows.n_lines :].reshape(col_records.shape)
    of_words[:-3], of_words[-3:] = words.view(np.int32), _edge_words(*last)
    return with_dynamic_lengths(Plan(*sent(packed, places, device, non_blocking=non_blocking)))


def _last(length: int) -> int:
    """Tokens of the last tile."""
    return (length - 1) % TILE + 1 if length else 0


@functools.lru_cache(maxsize=256)
def _edge_words(n_queries: int, n_keys: int) -> Array:
    """Bitmasks of the pairs that exist in a tile at the right edge, at the bottom edge, in the corner: (3, 128, 4).

    n_queries, n_keys  of a last tile; read only
    """
    q_exists, kv_exists = (np.arange(TILE) < n for n in (n_queries, n_keys))
    every = np.ones(TILE, dtype=bool)
    pairs = [np.outer(q, kv) for q, kv in ((every, kv_exists), (q_exists, every), (q_exists, kv_exists))]
    return np.packbits(np.stack(pairs), axis=-1, bitorder="little").view(np.int32)


def subtiles_of(words: Array) -> Array:
    """Of which quarters each bitmask is made, as an entry of a list says it; ALL_SUBTILES of one that is not made of whole ones.

    words  32 bits (distinct, 128, 4)
    """
    # of most that are not, the first row of each half tells
    left, right = words[:, :: TILE // 2, ::2], words[:, :: TILE // 2, 1::2]
    is_made = ((left == right) & ((left == 0) | (~left == 0))).all(axis=(1, 2))
    made = words[is_made].reshape(-1, 2, TILE // 2, TILE // 32)
    is_made[is_made] = (made == made[:, :, :1]).all(axis=(1, 2, 3))
    quarters = np.full(len(words), ALL_SUBTILES, np.int32)
    quarters[is_made] = (left[is_made] != 0).reshape(-1, 4) @ np.array([1, 2, 4, 8], np.int32)
    return quarters


@functools.lru_cache(maxsize=256)
def _edge_quarters(n_queries: int, n_keys: int) -> Array:
    """`subtiles_of` what `_edge_words` has; read only."""
    return subtiles_of(_edge_words(n_queries, n_keys))


class Side(NamedTuple):
    """One direction of tiles that come by rows.

    line   lead * lines of a lead + major of each tile
    minor  its place in the line, ascending
    n_lines  of all leads
    """

    line: Array
    minor: Array
    n_lines: int


def counted(tiles: BlockRows, frame: Frame) -> tuple[Array, Array]:
    """(tiles of each row of all leads and, behind them, of each column; lead * n_cols + col of each tile)."""
    leads, n_cols, indptr, col_line = frame.leads, frame.n_cols, tiles.indptr, tiles.cols
    if leads > 1:
        col_line = col_line + (n_cols * np.arange(leads)).repeat(indptr[:, -1] - indptr[:, 0])
    n_of_rows, n_of_cols = leads * frame.n_rows, leads * n_cols
    # side by side: an operation on few lines costs the same as one on twice as many
    work = np.empty(n_of_rows + n_of_cols, np.int64)
    np.subtract(indptr[:, 1:], indptr[:, :-1], out=work[:n_of_rows].reshape(leads, frame.n_rows))
    work[n_of_rows:] = np.bincount(col_line, minlength=n_of_cols)
    return work, col_line


def _sides(tiles: BlockRows, frame: Frame, work: Array, col_line: Array) -> tuple[Side, Side]:
    """The tiles by rows, and by columns; work and col_line as `counted` has them."""
    n_of_rows = frame.leads * frame.n_rows
    row_line = np.arange(n_of_rows).repeat(work[:n_of_rows])
    row = row_line % frame.n_rows if frame.leads > 1 else row_line
    return Side(row_line, tiles.cols, n_of_rows), Side(col_line, row, len(work) - n_of_rows)


def _with_edges(by_rows: Side, by_cols: Side, ids: Array, n_bitmasks: int, frame: Frame) -> tuple[Array, Array]:
    """The ids, with those of `_edge_words` for full tiles on a ragged edge, which hold the pairs that exist; which tiles are
    partial then."""
    q_is_ragged, kv_is_ragged = frame.q_len % TILE != 0, frame.kv_len % TILE != 0
    if q_is_ragged or kv_is_ragged:
        edge = 2 * (q_is_ragged & (by_cols.minor == frame.n_rows - 1))
        edge += kv_is_ragged & (by_rows.minor == frame.n_cols - 1)
        ids = np.where((ids < 0) & (edge > 0), n_bitmasks - 1 + edge, ids)
    elif not n_bitmasks:
        return ids, _NONE
    return ids, (ids >= 0).nonzero()[0]


def _is_single(quarters: Array, *, of_rows: bool) -> Array:
    """Of each tile whether only one half of its keys, or for columns of its queries, attends."""
    shift, halves = (2, 0b0011) if of_rows else (1, 0b0101)
    return ((quarters | (quarters >> shift)) & halves) != halves


def _list(
    side: Side, ids: Array, partial: Array, quarters: Array, indices: Array, listed_ids: Array, *, of_rows: bool
) -> None:
    """Write the tiles of each line, partial ones first, and their ids; where there are 0s.

    partial    which tiles are
    quarters   of these, as `subtiles_of` has them
    of_rows    the lines are rows, and come one after another
    """
    if not len(partial):
        indices[:] = side.minor if of_rows else side.minor.take(_order(side.line, side.n_lines))
        return
    rank, minor = 4 * side.line + 3, side.minor.copy()
    rank[partial] -= 3 - (quarters < ALL_SUBTILES) - _is_single(quarters, of_rows=of_rows)
    minor[partial] -= PARTIAL + ((ALL_SUBTILES - quarters) << SUBTILES_BIT)
    order = _order(rank, 4 * side.n_lines)
    indices[:], listed_ids[:] = minor.take(order), np.maximum(ids, 0).take(order)


def _records(
    by_rows: Side,
    by_cols: Side,
    partial: Array,
    quarters: Array,
    work: Array,
    most: int,
    n_long: Sequence[int],
    frame: Frame,
) -> Array:
    """Records of the lines of both directions, one after the other, (lines, 8), in launch order: see Plan.

    partial   which tiles are
    quarters  of these, as `subtiles_of` has them
    work      tiles of each line, `most` of the longest
    n_long    of each direction
    """
    n_of_rows, lead, number = by_rows.n_lines, *_numbered(frame.leads, frame.n_rows, frame.n_cols)
    begin = work.cumsum()
    begin -= work
    begin[n_of_rows:] -= len(by_rows.line)
    fields = np.zeros((len(work), RECORD), np.int32)
    fields[:, 0], fields[:, 1], fields[:, 2] = number, begin, work
    if len(partial):
        lines = np.concatenate([by_rows.line[partial], by_cols.line[partial] + n_of_rows])
        fields[:, 3] = np.bincount(lines, minlength=len(work))
        is_quartered = quarters < ALL_SUBTILES
        if is_quartered.any():
            fields[:, 5] = np.bincount(lines[np.tile(is_quartered, 2)], minlength=len(work))
            is_single = np.concatenate([_is_single(quarters, of_rows=of_rows) for of_rows in (True, False)])
            fields[:, 6] = np.bincount(lines[is_single], minlength=len(work))
    if any(n_long):
        fields[:n_of_rows, 7], fields[n_of_rows:, 7] = n_long
    # the longest line of each lead first
    rank = lead * (most + 1)
    rank -= work
    order = _order(rank, (2 * frame.leads + 1) * (most + 1))
    records = fields.take(order, axis=0)
    records[order, 4] = number
    return records


@functools.lru_cache(maxsize=4)
def _numbered(leads: int, n_rows: int, n_cols: int) -> tuple[Array, Array]:
    """(lead, number) of the rows of all leads and then of their columns; leads are counted on, from 1. Read only.

    Kept for the masks to come of one shape or two; of long sequences with many heads these are megabytes.
    """
    n_lines = np.repeat([n_rows, n_cols], leads)
    lead = np.arange(2 * leads).repeat(n_lines)
    return lead + 1, np.arange(len(lead)) - (n_lines.cumsum() - n_lines)[lead]


Long = tuple[int, int]


def long_lines(work: Array, n_tiles: int, frame: Frame) -> tuple[int, tuple[Long, Long]]:
    """(tiles of the longest line, how many rows and how many columns are long: see `_long`).

    work  of the rows of all leads and of their columns, as `counted` has it; n_tiles of each
    """
    most, n_of_rows = int(np.maximum.reduce(work, initial=0)), frame.leads * frame.n_rows
    # without a division; of most layouts no line is
    if most * max(n_of_rows, len(work) - n_of_rows) <= 2 * n_tiles:
        return most, ((0, 0), (0, 0))
    of_rows, of_cols = (part.reshape(frame.leads, -1) for part in (work[:n_of_rows], work[n_of_rows:]))
    return most, (_long(of_rows, n_tiles), _long(of_cols, n_tiles))


def _long(work: Array, n_tiles: int) -> Long:
    """How many lines have over twice the mean work, and of these are worth splitting, of the head that has most.

    work  tiles of each line, (heads, lines), n_tiles in all

    Of the former one line less than there are: kernels divide by how many are left. Which of all comes last is all the same.
    """
    is_long = work * work.size > 2 * n_tiles
    is_split = is_long & (LONG * work > work.sum(axis=1, keepdims=True))
    return max(0, min(int(is_long.sum(axis=1).max()), work.shape[1] - 1)), int(is_split.sum(axis=1).max())


def _order(values: Array, limit: int) -> Array:
    """What np.argsort(values, kind="stable") gives for integers 0 .. limit - 1.

    16 bits at a time, lowest first: those NumPy sorts by radix, at 32,768 tiles 7 times as fast as 64 bits.
    """
    order = values.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, (limit - 1).bit_length(), 16):
        order = order.take((values.take(order) >> shift).astype(np.uint16).argsort(kind="stable"))
    return order
