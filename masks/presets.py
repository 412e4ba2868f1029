"""Combinations from papers: BigBird, Longformer and Pixelated Butterfly."""

from __future__ import annotations

import numpy as np

from blocksparse_flash import BlockLayout

from .butterfly import butterfly
from .canvas import BlockSize, Length, check_nnz, read_canvas, read_square_canvas
from .checks import read_integer
from .global_tokens import Tokens, read_tokens
from .global_tokens import global_tokens as global_tokens_layout
from .local import Window, local
from .public import public
from .random import MAX_SEED, draw_distinct


def _blocks_of_bigbird(
    n_blocks: int, *, window_blocks: int, random_blocks: int, global_blocks: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that `bigbird` keeps, without repeats."""
    n_global = min(global_blocks, n_blocks)
    n_side = min(window_blocks // 2, n_blocks)
    blocks, own = np.arange(n_blocks), np.arange(n_global, n_blocks)
    # window of each row without global cols: cols begin .. stop - 1
    begin, stop = np.maximum(own - n_side, n_global), np.minimum(own + n_side + 1, n_blocks)
    # [rows, window]
    near = own[:, None] + np.arange(-n_side, n_side + 1)
    is_near = (near >= begin[:, None]) & (near < stop[:, None])

    n_others = n_blocks - n_global - (stop - begin)
    places, numbers = draw_distinct(
        seed, own, sizes=n_others, counts=np.minimum(min(random_blocks, n_blocks), n_others)
    )
    # candidates are numbered from the last global col to the window, then after the window
    is_after = numbers >= (begin - n_global)[places]
    drawn = n_global + numbers + np.where(is_after, (stop - begin)[places], 0)

    rows = [
        np.repeat(blocks[:n_global], n_blocks),
        np.repeat(own, n_global),
        np.nonzero(is_near)[0] + n_global,
        own[places],
    ]
    cols = [np.tile(blocks, n_global), np.tile(blocks[:n_global], own.size), near[is_near], drawn]
    return np.concatenate(rows), np.concatenate(cols)


@public
def bigbird(
    length: Length,
    *,
    window_blocks: int = 3,
    random_blocks: int = 3,
    global_blocks: int = 2,
    extra_tokens: int = 0,
    seed: int,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """A window of blocks, random blocks, and global blocks at the start.

    A block is full if |row - col| <= window_blocks // 2, row < global_blocks, col < global_blocks, or if it is one of
    the random_blocks that its row draws among the remaining blocks (all of these, if there are not more). The draw is
    that of `masks.random` and depends on (seed, row, number of remaining blocks) only.

    window_blocks=3, random_blocks=1, global_blocks=1, seed=0 on 8 blocks (queries down, keys across):
        # # # # # # # #
        # # # . # . . .
        # # # # . . . #
        # # # # # . . .
        # . # # # # . .
        # # . . # # # .
        # . . # . # # #
        # . # . . . # #

    This is the internal construction of the paper, ITC. For the extended one, ETC, use extra_tokens with
    global_blocks=0: the sequence begins with extra_tokens global tokens, exact to the token, and the pattern above
    begins after them, not aligned with the blocks of the layout.

    length         tokens, extra tokens included, or (q_len, kv_len) with equal numbers of blocks
    window_blocks  width of the window in blocks, the diagonal included; odd
    random_blocks  blocks drawn in each row that is not global
    global_blocks  blocks at the start that attend to every block and to which every block attends
    extra_tokens   global tokens at the start, 0 to length; if any, q_len must equal kv_len
    seed           0 to 2**64 - 1
    block_size     tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns        BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only without extra
                   tokens
    raises         ValueError if the block counts of queries and keys differ or a number is out of range

    Zaheer et al., "Big Bird", arXiv:2007.14062, section 2 (internal and extended transformer construction).

    >>> bigbird(2048, seed=0).density
    0.5546875
    >>> etc = bigbird(2048 + 64, global_blocks=0, extra_tokens=64, seed=0)
    >>> etc.crop(q_start=64, kv_start=64) == bigbird(2048, global_blocks=0, seed=0)
    True
    """
    canvas = read_square_canvas(length, block_size)
    window_blocks = read_integer("window_blocks", window_blocks, at_least=1, unit="blocks")
    if window_blocks % 2 == 0:
        raise ValueError(f"window_blocks: expected an odd width, as many blocks on each side, got {window_blocks}")
    random_blocks = read_integer("random_blocks", random_blocks, at_least=0, unit="blocks")
    global_blocks = read_integer("global_blocks", global_blocks, at_least=0, unit="blocks")
    seed = read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    extra_tokens = read_integer("extra_tokens", extra_tokens, at_least=0, at_most=canvas.kv_len, unit="tokens")
    if extra_tokens and canvas.q_len != canvas.kv_len:
        raise ValueError(
            f"extra_tokens: expected 0 for {canvas.q_len} queries and {canvas.kv_len} keys, got {extra_tokens}. "
            "Extra tokens are queries and keys alike, which needs equally many"
        )
    q_len, kv_len = canvas.q_len - extra_tokens, canvas.kv_len - extra_tokens
    sequence = read_square_canvas((q_len, kv_len), block_size)
    in_each_row = min(sequence.n_cols, max(window_blocks // 2 + 1, random_blocks, global_blocks))
    check_nnz(sequence.n_rows * in_each_row, least="at least ")
    rows, cols = _blocks_of_bigbird(
        sequence.n_cols,
        window_blocks=window_blocks,
        random_blocks=random_blocks,
        global_blocks=global_blocks,
        seed=seed,
    )
    layout = BlockLayout.from_blocks(rows, cols, q_len, kv_len, block_size=sequence.block_size)
    if not extra_tokens:
        return layout
    ahead = (extra_tokens, 0)
    return layout.pad(q=ahead, kv=ahead) | global_tokens_layout(length, tokens=extra_tokens, block_size=block_size)


@public
def longformer(length: Length, *, window: Window, global_tokens: Tokens, block_size: BlockSize = 128) -> BlockLayout:
    """A sliding window, and global tokens.

    The union `local(length, window=window) | global_tokens(length, tokens=global_tokens)`.

    window=1, global_tokens=[0] on 5 tokens:
        1 1 1 1 1
        1 1 1 0 0
        1 1 1 1 0
        1 0 1 1 1
        1 0 0 1 1

    length         tokens, or (q_len, kv_len), aligned bottom-right
    window         tokens on each side, or (left, right), where None means unlimited
    global_tokens  number of leading tokens, or positions among the keys
    block_size     tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns        BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises         as `local` and `global_tokens` do

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1 (their w is 2 * window + 1).

    >>> longformer(1024, window=64, global_tokens=1).density
    0.53125
    """
    # report errors under the name that the argument has here
    read_tokens("global_tokens", global_tokens, read_canvas(length, block_size).kv_len)
    near = local(length, window=window, block_size=block_size)
    return near | global_tokens_layout(length, tokens=global_tokens, block_size=block_size)


@public
def pixelfly(
    length: Length,
    *,
    n_factors: int | None = None,
    global_blocks: int = 1,
    stretch: int | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """A flat butterfly, and global blocks at the start: the sparse pattern of Pixelated Butterfly.

    A block is full if `butterfly` keeps it, row < global_blocks, or col < global_blocks. The global rows and columns
    take the role of the low-rank term of the paper.

    n_factors=2, global_blocks=1 on 8 blocks (queries down, keys across):
        # # # # # # # #
        # # . # . . . .
        # . # # . . . .
        # # # # . . . .
        # . . . # # # .
        # . . . # # . #
        # . . . # . # #
        # . . . . # # #

    length         tokens, or (q_len, kv_len), which must be equal unless stretch is given
    n_factors      factors of the butterfly; None means all of them
    global_blocks  blocks at the start that attend to every block and to which every block attends
    stretch        cells per side of the butterfly, a power of two; None means one cell per block
    block_size     tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns        BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, of full blocks only
    raises         ValueError as `butterfly` does, or if global_blocks is negative

    Dao et al., "Pixelated Butterfly", arXiv:2112.00029, section 3 (flat block butterfly and low rank).

    >>> pixelfly(1024, n_factors=2).nnz
    34
    """
    canvas = read_canvas(length, block_size)
    global_blocks = read_integer("global_blocks", global_blocks, at_least=0, unit="blocks")
    flat = butterfly(length, n_factors=n_factors, stretch=stretch, block_size=block_size)
    # global rows are whole, the others have the global cols
    first = np.zeros(canvas.n_rows, dtype=np.int64)
    stop = np.where(np.arange(canvas.n_rows) < global_blocks, canvas.n_cols, min(global_blocks, canvas.n_cols))
    return flat | canvas.from_ranges(first, stop)
