"""Which blocks does a flat butterfly keep?

Knows the closed form of Pixelated Butterfly: a block attends to itself and to its partners at XOR distance 2**k.
Must not know bitmasks: every kept block is full.
"""

from __future__ import annotations

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, read_canvas
from .checks import read_integer


def butterfly(length: Length, *, n_factors: int | None = None, block_size: BlockSize = 128) -> BlockLayout:
    """Each block attends to itself and to the blocks whose index differs from its own in one of the low bits.

    A block is full if col == row or col == row XOR 2**k for some k < n_factors: the sum of the butterfly factors of
    strides 1, 2, 4, ... instead of their product. After log2(blocks) layers every token has met every other one.
    On a grid whose side is no power of two, partners beyond the grid are left out.

    On 8 blocks, all three factors (queries down, keys across):
        # # # . # . . .
        # # . # . # . .
        # . # # . . # .
        . # # # . . . #
        # . . . # # # .
        . # . . # # . #
        . . # . # . # #
        . . . # . # # #

    length      tokens, queries and keys alike; (q_len, kv_len) with equal ones is the same
    n_factors   factors kept, 0 (block diagonal) to ceil(log2(blocks)); None means all of them
    block_size  tokens per side of a block, a multiple of 16
    returns     BlockLayout of shape (1, 1, length, length), shared by every head, of full blocks only
    raises      ValueError if the lengths or the block counts of queries and keys differ, or n_factors is out of range

    Dao et al., "Pixelated Butterfly", arXiv:2112.00029, section 3 (block butterfly, flat butterfly).

    >>> layout = butterfly(1024, block_size=128)
    >>> layout.nnz, layout.density
    (32, 0.5)
    """
    canvas = read_canvas(length, block_size)
    if canvas.q_len != canvas.kv_len:
        raise ValueError(
            f"length: expected as many queries as keys, got ({canvas.q_len}, {canvas.kv_len}). "
            "A butterfly pairs block indices, which needs one square grid"
        )
    if canvas.n_rows != canvas.n_cols:
        raise ValueError(
            f"block_size: expected as many block rows as block cols, got {canvas.n_rows} x {canvas.n_cols} from "
            f"{canvas.block_size}. An int gives a square grid"
        )
    n_blocks = canvas.n_rows
    # ceil(log2(n_blocks)), in integers
    all_factors = max(n_blocks - 1, 0).bit_length()
    if n_factors is None:
        n_factors = all_factors
    n_factors = read_integer("n_factors", n_factors, at_least=0, at_most=all_factors)

    rows = np.arange(n_blocks)
    flips = np.concatenate([[0], 1 << np.arange(n_factors)])
    # [n_blocks, n_factors + 1]
    cols = rows[:, None] ^ flips
    is_inside = cols < n_blocks
    rows = np.broadcast_to(rows[:, None], cols.shape)
    return BlockLayout.from_blocks(
        rows[is_inside], cols[is_inside], canvas.q_len, canvas.kv_len, block_size=canvas.block_size
    )
