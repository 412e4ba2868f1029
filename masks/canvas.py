"""On which grid of blocks is a mask drawn?

Knows lengths, block sizes and where a block lies in tokens: rows, cols, aligned distances.
Must not know any pattern, nor how a layout is stored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .checks import read_integer

# what the builders accept: tokens, or (q_len, kv_len); a block side, or (block_q, block_kv)
Length = int | tuple[int, int]
BlockSize = int | tuple[int, int]


class Canvas(NamedTuple):
    """Lengths and block size of a layout to be built.

    Queries and keys are aligned at their ends: query i stands at key position i + shift. The distance of a pair is
    d = q_pos + shift - kv_pos, 0 on the diagonal, positive towards earlier keys.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def shift(self) -> int:
        """How many keys precede the first query; negative when there are more queries than keys."""
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
        """First and last query of each row, both existing, as positions among the keys (they may lie outside)."""
        first = row * self.block_q
        last = np.minimum(first + self.block_q, self.q_len) - 1
        return first + self.shift, last + self.shift

    def cols_between(self, first_key: np.ndarray, last_key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cols first .. stop - 1 that meet the keys first_key .. last_key, cropped to the grid."""
        first = np.clip(first_key // self.block_kv, 0, self.n_cols)
        stop = np.clip(last_key // self.block_kv + 1, 0, self.n_cols)
        return first, stop

    def distances(self, row: np.ndarray, col: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest distance in each block, as though no block were ragged."""
        corner = row * self.block_q + self.shift - col * self.block_kv
        return corner - (self.block_kv - 1), corner + (self.block_q - 1)


def _read_pair(name: str, value: object, *, at_least: int, at_most: int | None = None, unit: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list):
        side = read_integer(name, value, at_least=at_least, at_most=at_most, unit=unit)
        return side, side
    if len(value) != 2:
        raise ValueError(f"{name}: expected an int or a pair (queries, keys), got {len(value)} entries: {value!r}")
    first, second = (read_integer(name, side, at_least=at_least, at_most=at_most, unit=unit) for side in value)
    return first, second


def read_canvas(length: Length, block_size: BlockSize) -> Canvas:
    """The grid of blocks that `length` and `block_size` describe.

    length      tokens, or (q_len, kv_len)
    block_size  tokens per side of a block, or (block_q, block_kv): multiples of 16 from 16 to 256
    raises      TypeError for anything but ints, ValueError out of range

    >>> read_canvas((100, 300), 64)
    Canvas(q_len=100, kv_len=300, block_q=64, block_kv=64)
    """
    q_len, kv_len = _read_pair("length", length, at_least=0, unit="tokens")
    block_q, block_kv = _read_pair("block_size", block_size, at_least=16, at_most=256, unit="tokens")
    if block_q % 16 or block_kv % 16:
        raise ValueError(f"block_size: expected multiples of 16 from 16 to 256, got {block_size}")
    return Canvas(q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv)


def read_square_canvas(length: Length, block_size: BlockSize) -> Canvas:
    """As read_canvas, where queries and keys must have equally many blocks.

    raises  ValueError also if the block counts differ

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


def cols_of_ranges(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(range, col) of every col first[i] .. stop[i] - 1 of every range i, range after range; stop <= first is empty.

    >>> [array.tolist() for array in cols_of_ranges(np.array([4, 0]), np.array([6, 1]))]
    [[0, 0, 1], [4, 5, 0]]
    """
    counts = np.maximum(stop - first, 0)
    ranges = np.repeat(np.arange(counts.size), counts)
    # where a range begins, plus the place in it
    return ranges, np.arange(ranges.size) + np.repeat(first - np.cumsum(counts) + counts, counts)


def distinct_blocks(rows: np.ndarray, cols: np.ndarray, n_cols: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the same blocks, each once, ascending.

    >>> [array.tolist() for array in distinct_blocks(np.array([1, 0, 1]), np.array([0, 2, 0]), 3)]
    [[0, 1], [2, 0]]
    """
    keys = rows * n_cols + cols
    # made of ascending runs, mostly, which this sort merges
    keys.sort(kind="stable")
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if keys.size else keys
    return keys // max(n_cols, 1), keys % max(n_cols, 1)


def kinds_of_rows(rows: np.ndarray) -> np.ndarray:
    """Which rows of bools are equal: equal numbers for those that are.

    rows     bool (n, width)
    returns  int64 (n,), 0 for a row without True

    >>> kinds_of_rows(np.array([[False, True], [False, False], [False, True]])).tolist()
    [1, 0, 1]
    """
    kinds = np.zeros(len(rows), dtype=np.int64)
    is_marked = rows.any(axis=1)
    # [marked rows, octets]
    octets = np.packbits(rows[is_marked], axis=1)
    _, kinds[is_marked] = np.unique(octets.view(f"V{octets.shape[1]}").reshape(-1), return_inverse=True)
    kinds[is_marked] += 1
    return kinds


def kinds_of_sides(marks: np.ndarray, side: int) -> np.ndarray:
    """Which block rows (or cols) have the same marks: equal numbers for those that do.

    marks    bool (length,), one for each token
    side     tokens of a block along this axis
    returns  int64 (blocks,), 0 for a side without marks

    >>> kinds_of_sides(np.arange(100) % 32 == 5, 16).tolist()
    [1, 0, 1, 0, 1, 0, 0]
    """
    n_blocks = -(-marks.size // side)
    # [blocks, side]
    sides = np.zeros((n_blocks, side), dtype=bool)
    sides.reshape(-1)[: marks.size] = marks
    return kinds_of_rows(sides)
