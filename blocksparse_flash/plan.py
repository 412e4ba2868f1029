"""What does a kernel walk? A layout regrouped to 128 x 128 tiles, in both directions, as plain int32 tensors.

Knows: block lists (NumPy) and tensors. Does not know: BlockLayout, patterns, backends, head sizes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from . import blocks
from .packing import to_device

TILE = 128
# int32 words of a record of row_items / col_items
RECORD = 8
# taken from the index of a partial tile; above every index, as lengths are below 2^31
PARTIAL = 1 << 24
# a line with more than one of so many parts of its head's tiles may be worth splitting; so a head has fewer
LONG = 64


class Plan(NamedTuple):
    """Tiles of a layout, by rows (for the output and dq) and by columns (for dk and dv). All int32, on one device.

    row_items    (batch | 1, heads | 1, tile rows, 8), one record a tile row, in launch order (longest row first):
                 row, begin, n_tiles, n_partial, position, 0, 0, n_long
    row_indices  tile columns: entries begin .. begin + n_tiles - 1 are the tiles of that row, n_partial partial ones and
                 then the full ones, both ascending; a partial one is listed less PARTIAL = 2^24, so that its sign says so
    row_ids      which bitmask each of these tiles has; 0, and never read, for a full one. Longer than row_indices by 8 for
                 each record at the front that is worth splitting, and a rest below 8
    col_*        the same by tile columns (col_indices are tile rows)
    words        (distinct, 128, 4): bit j of word w of row i is the pair (query i, key 32 w + j) of the tile

    `position` of record i is where the record of row i stands, to find a given row. `n_long` (the same in every record)
    counts the records at the front whose work is over twice the mean: a launch takes those of all heads first. A tile
    is full only if all of its 128 x 128 pairs exist and attend, so a kernel neither masks nor bounds-checks it; tiles on
    a ragged edge are partial, with zeros past the end.

    Worth splitting among programs is a line with over 1/64 of its head's tiles, and over twice the mean. How many there
    are, of the head that has most, stands in a length: a launch decides by shapes, without waiting for the device.
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


def build_plan(
    keys: np.ndarray,
    ids: np.ndarray,
    bitmasks: np.ndarray,
    *,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block_size: tuple[int, int],
    device: torch.device | str,
    non_blocking: bool = False,
) -> Plan:
    """Regroup a canonical block list (see blocks.py) to tiles and list them by rows and by columns. O(nnz log nnz)."""
    keys, ids, words = blocks.regroup(keys, ids, bitmasks, q_len=q_len, kv_len=kv_len, old=block_size, new=(TILE, TILE))
    n_rows, n_cols = -(-q_len // TILE), -(-kv_len // TILE)
    line, col = blocks.divided(keys, n_cols)
    axis, row = blocks.divided(line, n_rows)

    words = words.reshape(-1, TILE, TILE // 32)
    if q_len % TILE or kv_len % TILE:
        # a full tile on a ragged edge becomes a partial one that holds the pairs which exist
        edge = 2 * ((row == n_rows - 1) & (q_len % TILE != 0)) + ((col == n_cols - 1) & (kv_len % TILE != 0))
        ids = np.where((ids < 0) & (edge > 0), len(words) + edge - 1, ids)
    words = np.concatenate([words.view(np.int32), _edge_words(_last(q_len), _last(kv_len))])

    leads = batch * heads
    arrays: list[np.ndarray] = []
    for of_rows, lines, minor, n_major in ((True, line, col, n_rows), (False, axis * n_cols + col, row, n_cols)):
        records, *lists, n_long = _walk(lines, minor, ids, leads=leads, n_major=n_major)
        lengths = list_lengths(len(ids), n_long, of_rows=of_rows)
        arrays += [records.reshape(batch, heads, -1, RECORD), *map(_padded, lists, lengths)]
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (*arrays, words)]
    return of_any_length(Plan(*to_device(tensors, device, non_blocking=non_blocking)))


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
def _edge_words(n_queries: int, n_keys: int) -> np.ndarray:
    """Bitmasks of the pairs that exist in a tile at the right edge, at the bottom edge, in the corner: (3, 128, 4).

    n_queries, n_keys  of a last tile; read only
    """
    q_exists, kv_exists = (np.arange(TILE) < n for n in (n_queries, n_keys))
    every = np.ones(TILE, dtype=bool)
    pairs = [np.outer(q, kv) for q, kv in ((every, kv_exists), (q_exists, every), (q_exists, kv_exists))]
    return np.packbits(np.stack(pairs), axis=-1, bitorder="little").view(np.int32)


def _walk(
    line: np.ndarray, minor: np.ndarray, ids: np.ndarray, *, leads: int, n_major: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Records (leads, n_major, 8), indices and bitmask ids of one direction, and how many records are worth splitting.

    line  lead * n_major + major of each tile; tiles of a line come with their minor index ascending
    """
    n_lines = leads * n_major
    work = np.bincount(line, minlength=n_lines)
    is_partial = ids >= 0
    if is_partial.any():
        order = _order(2 * line + ~is_partial, 2 * n_lines)
        listed, listed_ids = (minor - PARTIAL * is_partial)[order], np.maximum(ids, 0)[order]
        n_partial = np.bincount(line[is_partial], minlength=n_lines)
    else:
        listed, listed_ids = minor[_order(line, n_lines)], np.zeros_like(ids)
        n_partial = np.zeros_like(work)
    launch = np.argsort(-work.reshape(leads, n_major), axis=1, kind="stable")
    record_line = launch + n_major * np.arange(leads)[:, None]
    records: np.ndarray = np.zeros((leads, n_major, RECORD), dtype=np.int32)
    records[..., 0] = launch
    records[..., 1] = (np.cumsum(work) - work)[record_line]
    records[..., 2], records[..., 3] = work[record_line], n_partial[record_line]
    records.reshape(-1, RECORD)[record_line, 4] = np.arange(n_major)
    records[..., 7], n_long = long_lines(work.reshape(leads, n_major))
    return records, listed, listed_ids, n_long


def long_lines(work: np.ndarray) -> tuple[int, int]:
    """How many lines have over twice the mean work, and of these are worth splitting, of the head that has most.

    work  tiles, int64 (heads, lines)
    """
    if not work.size:
        return 0, 0
    of_head = work.sum(axis=1, keepdims=True)
    # without a division
    is_long = work * work.size > 2 * of_head.sum()
    return int(is_long.sum(axis=1).max()), int((is_long & (LONG * work > of_head)).sum(axis=1).max())


def _order(values: np.ndarray, limit: int) -> np.ndarray | slice:
    """What np.argsort(values, kind="stable") gives for integers 0 .. limit - 1, a slice of all if they ascend already.

    16 bits at a time, lowest first: those NumPy sorts by radix, at 32,768 tiles 7 times as fast as 64 bits.
    """
    if (values[1:] >= values[:-1]).all():
        return slice(None)
    order = np.argsort(values.astype(np.uint16), kind="stable")
    for shift in range(16, (limit - 1).bit_length(), 16):
        order = order[np.argsort((values[order] >> shift).astype(np.uint16), kind="stable")]
    return order


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """The values, and zeros behind them, int32."""
    padded = np.zeros(length, np.int32)
    padded[: len(values)] = values
    return padded


def list_lengths(n_tiles: int, n_long: int, *, of_rows: bool) -> tuple[int, int]:
    """How long the list of n_tiles tiles is with zeros behind it, and that of their bitmasks.

    At least one zero: kernels read an index ahead. Lengths of different residues mod 8 keep torch.compile from taking two
    that happen to agree for one symbol, which would recompile for the next layout where they differ.
    """
    # 1 mod 8, and at least 9
    length = 8 * max(1, -(-n_tiles // 8)) + 1
    return length, length + 8 * n_long + (2 if of_rows else 4)
