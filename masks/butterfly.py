"""Flat block butterfly of Pixelated Butterfly: partners at XOR distance 2**k.

The cells of the butterfly are blocks, or with `stretch` a grid of cells laid over any lengths. Kept blocks are full.
"""

from __future__ import annotations

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, check_nnz, distinct_blocks, read_canvas, spread
from .checks import read_integer
from .public import public


def _cells(n_cells: int, n_factors: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(queries, keys) of the cells that the butterfly keeps."""
    # ceil(log2(n_cells)), in integers
    all_factors = max(n_cells - 1, 0).bit_length()
    if n_factors is None:
        n_factors = all_factors
    n_factors = read_integer("n_factors", n_factors, at_least=0, at_most=all_factors)
    # number of cells c with c ^ 2**bit < n_cells: all cells of complete periods, and part of the rest
    periods = [(n_cells % (2 << bit), 1 << bit) for bit in range(n_factors)]
    check_nnz(n_cells + sum(n_cells - rest + 2 * max(0, rest - flip) for rest, flip in periods))
    cells = np.arange(n_cells)
    flips = np.concatenate([[0], 1 << np.arange(n_factors)])
    # [n_cells, n_factors + 1]
    partners = cells[:, None] ^ flips
    is_inside = partners < n_cells
    return np.broadcast_to(cells[:, None], partners.shape)[is_inside], partners[is_inside]


def _read_stretch(stretch: int, canvas: Canvas) -> int:
    # with more cells than queries and keys, some cells would hold no token
    stretch = read_integer("stretch", stretch, at_least=1, at_most=max(1, canvas.q_len, canvas.kv_len))
    if stretch & (stretch - 1):
        raise ValueError(f"stretch: expected a power of two, as every cell needs its partners, got {stretch}")
    return stretch


def _stretched(canvas: Canvas, n_cells: int, cells: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a token pair of a kept cell pair."""
    spans = []
    for length, side in ((canvas.q_len, canvas.block_q), (canvas.kv_len, canvas.block_kv)):
        # token i is in cell i * n_cells // length, so cell c begins at ceil(c * length / n_cells)
        bounds = -(-np.arange(n_cells + 1) * length // n_cells)
        first = bounds[:-1] // side
        # a cell without tokens has no blocks
        spans.append((first, np.where(np.diff(bounds) > 0, (bounds[1:] - 1) // side + 1, first)))
    (first_row, stop_row), (first_col, stop_col) = spans
    queries, keys = cells
    sources, rows = spread(first_row[queries], stop_row[queries])
    sources, cols = spread(first_col[keys[sources]], stop_col[keys[sources]])
    return distinct_blocks(canvas, rows[sources], cols)


@public
def butterfly(
    length: Length, *, n_factors: int | None = None, stretch: int | None = None, block_size: BlockSize = 128
) -> BlockLayout:
    """Each block attends to itself, and to the blocks whose index differs from its own in exactly one bit (with
    `n_factors`, one of the lowest `n_factors` bits).

    A block is full if col == row or col == row XOR 2**k for some k < n_factors: the sum of the butterfly factors of
    strides 1, 2, 4, ... instead of their product. After log2(blocks) layers, every token can receive information from
    every other. If the number of blocks is not a power of two, partners beyond the grid are dropped.

    With stretch=n, the butterfly pairs the cells of an n x n grid laid over queries and keys of any lengths: token i is
    in cell i * n // length, and a block is full if it holds a pair of a kept cell. If n is the number of blocks and the
    cells coincide with the blocks, the result is the same.

    8 blocks with all three factors, and 4 x 8 blocks with stretch=4 (queries down, keys across):
        # # # . # . . .     # # # # # # . .
        # # . # . # . .     # # # # . . # #
        # . # # . . # .     # # . . # # # #
        . # # # . . . #     . . # # # # # #
        # . . . # # # .
        . # . . # # . #
        . . # . # . # #
        . . . # . # # #

    length      tokens, or (q_len, kv_len), which must be equal unless stretch is given
    n_factors   factors kept, 0 (block diagonal) to ceil(log2(blocks)), or log2(stretch); None means all of them
    stretch     cells per side of the butterfly, a power of two; None means one cell per block
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only
    raises      ValueError if the lengths or block counts of queries and keys differ without stretch, if stretch is not
                a power of two or exceeds both lengths, or if n_factors is out of range

    Dao et al., "Pixelated Butterfly", arXiv:2112.00029, section 3 (block butterfly, flat butterfly).

    >>> layout = butterfly(1024, block_size=128)
    >>> layout.nnz, layout.density
    (32, 0.5)
    >>> butterfly((1024, 4096), stretch=8).nnz
    128
    """
    canvas = read_canvas(length, block_size)
    if stretch is not None:
        n_cells = _read_stretch(stretch, canvas)
        rows, cols = _stretched(canvas, n_cells, _cells(n_cells, n_factors))
    elif canvas.q_len != canvas.kv_len:
        raise ValueError(
            f"length: expected as many queries as keys, got ({canvas.q_len}, {canvas.kv_len}). "
            "A butterfly pairs block indices, which needs one square grid: stretch=n lays n x n cells over any lengths"
        )
    elif canvas.n_rows != canvas.n_cols:
        raise ValueError(
            f"block_size: expected as many block rows as block cols, got {canvas.n_rows} x {canvas.n_cols} from "
            f"{canvas.block_size}. An int gives a square grid, stretch=n lays n x n cells over any blocks"
        )
    else:
        rows, cols = _cells(canvas.n_rows, n_factors)
    return canvas.from_blocks(rows, cols)
