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
from ..blocks.transfer import may_pin, sent, to_device, views, zeros

TILE = 128
# int32 words of a record of row_items / col_items
RECORD = 8
# taken from the index of a partial tile; above every index, as lengths are below 2^31
PARTIAL = 1 << 24
# which quarters of a partial tile attend, at this bit of its entry: bit 2 * half of its queries + half of its keys. All four, as
# PARTIAL alone sets them: the bitmask says which pairs
QUARTERS_BIT, ALL_QUARTERS = 25, 15
# a line with more than one of so many parts of its head's tiles may be worth splitting; so a head has fewer
LONG = 64
# of the tiles of a list
_NONE = np.zeros(0, np.intp)


class Plan(NamedTuple):
    """Tiles of a layout, by rows (for the output and dq) and by columns (for dk and dv). All int32, on one device.

    row_items    (batch | 1, heads | 1, tile rows, 8), one record a tile row, in launch order (longest row first):
                 row, begin, n_tiles, n_partial, position, n_quartered, n_single, n_long
    row_indices  tile columns: entries begin .. begin + n_tiles - 1 are the tiles of that row, n_partial partial ones, of which
                 the last n_quartered are made of whole quarters, 64 x 64, of which to the last n_single only one half of their
                 keys attend, and then the full ones, each kind ascending; a partial one is listed less PARTIAL = 2^24, so that
                 its sign says so, its lowest 24 bits are the tile column, and of a quartered one bits 25 to 28 say which
                 quarters attend
    row_ids      which bitmask each of these tiles has; 0, and never read, for a full one. Longer than row_indices by 8 for
                 each record at the front that is worth splitting, and a rest below 8, which is odd where a tile is made of
                 whole quarters
    col_*        the same by tile columns (col_indices are tile rows; n_single: of which only one half of their queries attend)
    words        (distinct, 128, 4): bit j of word w of row i is the pair (query i, key 32 w + j) of the tile

    `position` of record i is where the record of row i stands, to find a given row. `n_long` (the same in every record)
    counts the records at the front whose work is over twice the mean, but never all: a launch takes those of all heads first. A tile
    is full only if all of its 128 x 128 pairs exist and attend, so a kernel neither masks nor bounds-checks it; tiles on
    a ragged edge are partial, with zeros past the end.

    Worth splitting among programs is a line with over 1/64 of its head's tiles, and over twice the mean. How many there
    are, of the head that has most, stands in a length, and so does whether a tile is made of whole quarters: a launch decides
    by shapes, without waiting for the device.
    """

    row_items: torch.Tensor
    row_indices: torch.Tensor
    row_ids: torch.Tensor
    col_items: torch.Tensor
    col_indices: torch.Tensor
    col_ids: torch.Tensor
    words: torch.Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Plan:
        """The same plan on another device."""
        return of_any_length(Plan(*to_device(self, device, non_blocking=non_blocking)))


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
        quarters = np.concatenate([quarters_of(words), _edge_quarters(*last)]).take(ids[partial])
    has_quarters = bool((quarters < ALL_QUARTERS).any())
    most, n_long = long_lines(work, nnz, frame)
    shapes: list[tuple[int, ...]] = []
    for side, (_, n_split) in zip((by_rows, by_cols), n_long, strict=True):
        n_indices, n_ids = list_lengths(nnz, n_split, of_rows=side is by_rows, has_quarters=has_quarters)
        shapes += (frame.batch, frame.heads, side.n_lines // frame.leads, RECORD), (n_indices,), (n_ids,)
    shapes.append((len(words) + 3, TILE, TILE // 32))
    packed, places = zeros(shapes, is_pinned=may_pin(device))
    row_items, row_indices, row_ids, col_items, col_indices, col_ids, of_words = views(packed, places)
    _list(by_rows, ids, partial, quarters, row_indices[:nnz], row_ids[:nnz], of_rows=True)
    _list(by_cols, ids, partial, quarters, col_indices[:nnz], col_ids[:nnz], of_rows=False)
    records = _records(by_rows, by_cols, partial, quarters, work, most, [n for n, _ in n_long], frame)
    row_items[...] = records[: by_rows.n_lines].reshape(row_items.shape)
    col_items[...] = records[by_rows.n_lines :].reshape(col_items.shape)
    of_words[:-3], of_words[-3:] = words.view(np.int32), _edge_words(*last)
    return of_any_length(Plan(*sent(packed, places, device, non_blocking=non_blocking)))


def of_any_length(plan: Plan) -> Plan:
    """Tells torch.compile that the lists may have any length, so that another layout does not recompile.

    What torch._dynamo.maybe_mark_dynamic does, which would import the whole compiler: 3 s.
    """
    for tensor in (plan.row_indices, plan.row_ids, plan.col_indices, plan.col_ids, plan.words):
        tensor._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
    return plan


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


def quarters_of(words: Array) -> Array:
    """Of which quarters each bitmask is made, as an entry of a list says it; ALL_QUARTERS of one that is not made of whole ones.

    words  32 bits (distinct, 128, 4)
    """
    # of most that are not, the first row of each half tells
    left, right = words[:, :: TILE // 2, ::2], words[:, :: TILE // 2, 1::2]
    is_made = ((left == right) & ((left == 0) | (~left == 0))).all(axis=(1, 2))
    made = words[is_made].reshape(-1, 2, TILE // 2, TILE // 32)
    is_made[is_made] = (made == made[:, :, :1]).all(axis=(1, 2, 3))
    quarters = np.full(len(words), ALL_QUARTERS, np.int32)
    quarters[is_made] = (left[is_made] != 0).reshape(-1, 4) @ np.array([1, 2, 4, 8], np.int32)
    return quarters


@functools.lru_cache(maxsize=256)
def _edge_quarters(n_queries: int, n_keys: int) -> Array:
    """`quarters_of` what `_edge_words` has; read only."""
    return quarters_of(_edge_words(n_queries, n_keys))


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
    quarters   of these, as `quarters_of` has them
    of_rows    the lines are rows, and come one after another
    """
    if not len(partial):
        indices[:] = side.minor if of_rows else side.minor.take(_order(side.line, side.n_lines))
        return
    rank, minor = 4 * side.line + 3, side.minor.copy()
    rank[partial] -= 3 - (quarters < ALL_QUARTERS) - _is_single(quarters, of_rows=of_rows)
    minor[partial] -= PARTIAL + ((ALL_QUARTERS - quarters) << QUARTERS_BIT)
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
    quarters  of these, as `quarters_of` has them
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
        is_quartered = quarters < ALL_QUARTERS
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


def list_lengths(n_tiles: int, n_long: int, *, of_rows: bool, has_quarters: bool = False) -> tuple[int, int]:
    """How long the list of n_tiles tiles is with zeros behind it, and that of their bitmasks.

    n_long        records at the front that are worth splitting
    has_quarters  whether a tile is listed as made of whole quarters

    At least one zero: kernels read an index ahead. Lengths of different residues mod 8 keep torch.compile from taking two
    that happen to agree for one symbol, which would recompile for the next layout where they differ.
    """
    # 1 mod 8, and at least 9
    length = 8 * max(1, -(-n_tiles // 8)) + 1
    return length, length + 8 * n_long + (2 if of_rows else 4) + has_quarters
