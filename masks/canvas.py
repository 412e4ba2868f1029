"""Lengths, block size and alignment of a layout under construction, and arithmetic on its grid of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.block_list import ranges

from .checks import read_integer

# positions in a plan and offsets into the blocks of a layout are int32
MAX_TOKENS = MAX_BLOCKS = 2**31 - 1
# rows per step of check_rows
ROWS_AT_ONCE = 1 << 20
# tokens, or (q_len, kv_len); tokens per side of a block, or (block_q, block_kv)
Length = int | tuple[int, int]
BlockSize = int | tuple[int, int]

Predicate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DedupKey = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Canvas(NamedTuple):
    """Lengths and block size of a layout under construction.

    Queries and keys are aligned bottom-right: query i is at key position i + shift. The distance of a pair is
    d = q_pos + shift - kv_pos, 0 on the diagonal, positive toward earlier keys.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def shift(self) -> int:
        """Number of keys before the first query; negative if there are more queries than keys."""
        return self.kv_len - self.q_len

    @property
    def n_rows(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def n_cols(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def block_size(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    def row_span(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Key positions of the first and last query of each row, without padding; they may lie outside the keys."""
        first = row * self.block_q
        last = np.minimum(first + self.block_q, self.q_len) - 1
        return first + self.shift, last + self.shift

    def cols_between(self, first_key: np.ndarray, last_key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first, stop): cols first .. stop - 1 hold the keys first_key .. last_key, cropped to the grid."""
        first = np.clip(first_key // self.block_kv, 0, self.n_cols)
        stop = np.clip(last_key // self.block_kv + 1, 0, self.n_cols)
        return first, stop

    def distances(self, row: np.ndarray, col: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest distance in each block, padding included."""
        corner = row * self.block_q + self.shift - col * self.block_kv
        return corner - (self.block_kv - 1), corner + (self.block_q - 1)

    def from_blocks(self, rows: np.ndarray, cols: np.ndarray) -> BlockLayout:
        """The layout of these full blocks, in any order."""
        return BlockLayout.from_blocks(rows, cols, self.q_len, self.kv_len, block_size=self.block_size)

    def from_ranges(self, first: np.ndarray, stop: np.ndarray) -> BlockLayout:
        """The layout of full blocks first[row] .. stop[row] - 1 of each row."""
        return BlockLayout.from_ranges(first, stop, self.q_len, self.kv_len, block_size=self.block_size)

    def from_predicate(self, attends: Predicate, *, within: BlockLayout, dedup_key: DedupKey) -> BlockLayout:
        """The pairs of `within` for which attends(q_pos, kv_pos) is true.

        dedup_key  (row, col) -> int64: blocks with equal keys have equal pairs, so one of them is evaluated
        """
        return BlockLayout.from_predicate(
            attends, self.q_len, self.kv_len, block_size=self.block_size, within=within, dedup_key=dedup_key
        )


def _read_pair(name: str, value: object, *, at_least: int, at_most: int | None = None, unit: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list):
        side = read_integer(name, value, at_least=at_least, at_most=at_most, unit=unit)
        return side, side
    if len(value) != 2:
        raise ValueError(f"{name}: expected an int or a pair (queries, keys), got {len(value)} entries: {value!r}")
    first, second = (read_integer(name, side, at_least=at_least, at_most=at_most, unit=unit) for side in value)
    return first, second


def read_canvas(length: Length, block_size: BlockSize) -> Canvas:
    """The canvas of a length and a block size, checked.

    length      tokens, or (q_len, kv_len)
    block_size  tokens per side of a block, or (block_q, block_kv): multiples of 16 from 16 to 256
    raises      TypeError if a number is not an int, ValueError if it is out of range

    >>> read_canvas((100, 300), 64)
    Canvas(q_len=100, kv_len=300, block_q=64, block_kv=64)
    """
    q_len, kv_len = _read_pair("length", length, at_least=0, at_most=MAX_TOKENS, unit="tokens")
    block_q, block_kv = _read_pair("block_size", block_size, at_least=16, at_most=256, unit="tokens")
    if block_q % 16 or block_kv % 16:
        raise ValueError(f"block_size: expected multiples of 16 from 16 to 256, got {block_size}")
    return Canvas(q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv)


def read_square_canvas(length: Length, block_size: BlockSize) -> Canvas:
    """As read_canvas, for a square grid of blocks.

    raises  ValueError also if queries and keys have different numbers of blocks

    >>> read_square_canvas((100, 128), 64).n_rows
    2
    """
    canvas = read_canvas(length, block_size)
    if canvas.n_rows != canvas.n_cols:
        raise ValueError(
            f"length: expected as many block rows as block cols, got {canvas.n_rows} x {canvas.n_cols} from "
            f"{canvas.q_len} queries and {canvas.kv_len} keys in blocks of {canvas.block_size}"
        )
    return canvas


def check_nnz(nnz: int, *, least: str = "") -> None:
    """Refuse a mask with more blocks than a layout can store, before its blocks are listed.

    least  prefix of the number in the message, such as "at least " for a lower bound
    """
    if nnz > MAX_BLOCKS:
        raise ValueError(
            f"length, block_size: nnz must be below 2**31, but this mask would store {least}{nnz} blocks: use a larger "
            "block_size"
        )


def check_rows(canvas: Canvas, keys_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> None:
    """check_nnz for a mask in which every row meets one or more ranges of keys, by the longest range of each row.

    Counts a million rows at a time: all rows of the longest sequences would take gigabytes.

    keys_of  rows -> (first key, last key), (rows,) or (rows, ranges) each; last < first is an empty range
    """
    if canvas.n_rows * canvas.n_cols <= MAX_BLOCKS:
        return
    nnz = 0
    for begin in range(0, canvas.n_rows, ROWS_AT_ONCE):
        first_key, last_key = keys_of(np.arange(begin, min(begin + ROWS_AT_ONCE, canvas.n_rows)))
        first, stop = canvas.cols_between(first_key, last_key)
        counts = np.where(last_key < first_key, 0, np.maximum(stop - first, 0))
        nnz += int(counts.reshape(len(counts), -1).max(axis=1).sum())
        check_nnz(nnz, least="at least ")


def spread(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sources, numbers): the numbers first[i] .. stop[i] - 1 for each i in turn, and the i each one comes from.

    >>> [array.tolist() for array in spread(np.array([5, 0, 8]), np.array([7, 0, 11]))]
    [[0, 0, 2, 2, 2], [5, 6, 8, 9, 10]]
    """
    counts = np.maximum(stop - first, 0)
    check_nnz(int(counts.sum()), least="up to ")
    return np.repeat(np.arange(counts.size), counts), ranges(first, counts)


def blocks_between(canvas: Canvas, first_key: np.ndarray, last_key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that meet one of the key ranges of their row, unique and ascending.

    first_key  int64 (n_rows, ranges): first key of each range, in any order
    last_key   int64 (n_rows, ranges): last key of each range; last < first is an empty range
    """
    first, stop = canvas.cols_between(first_key, last_key)
    stop = np.where(last_key < first_key, first, stop)
    n_ranges = first.shape[1]
    if n_ranges > 1:
        order = np.argsort(first, axis=1, kind="stable")
        first, stop = np.take_along_axis(first, order, axis=1), np.take_along_axis(stop, order, axis=1)
        # a range begins where the ranges before it have ended
        first[:, 1:] = np.maximum(first[:, 1:], np.maximum.accumulate(stop, axis=1)[:, :-1])
    ranges, cols = spread(first.reshape(-1), stop.reshape(-1))
    return ranges // max(n_ranges, 1), cols


def distinct_blocks(canvas: Canvas, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the given blocks, unique and ascending."""
    keys = rows * canvas.n_cols + cols
    n_blocks = canvas.n_rows * canvas.n_cols
    if n_blocks > 16 * keys.size:
        # stable: merges the ascending runs that the keys are mostly made of
        keys.sort(kind="stable")
        keys = keys[np.diff(keys, prepend=-1) > 0]
    else:
        # many blocks of the grid are given: marking them is faster than sorting
        is_given = np.zeros(n_blocks, dtype=bool)
        is_given[keys] = True
        keys = np.flatnonzero(is_given)
    # without cols there are no keys
    return np.divmod(keys, max(canvas.n_cols, 1))
