"""Random blocks kept independently with one probability (Erdos and Renyi, in Gilbert's form).

The draws come from the hash of random.py: generator streams of NumPy and torch may change between versions.
"""

from __future__ import annotations

import math

import numpy as np

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, check_nnz, read_canvas
from .checks import read_fraction, read_integer
from .heads import by_head, read_heads
from .public import public
from .random import DRAWS_AT_ONCE, MAX_SEED, chances, draw_words, stream_keys

# longest gap of one draw, in blocks; longer gaps take several draws
LONGEST_GAP = 4096

# streams per head, more than any grid has rows
ROWS_OF_A_HEAD = 2**32


def _gap_table(density: float) -> np.ndarray:
    """float64 (longest gap,), descending: (1 - density)**k for k = 1, 2, ...

    Computed by repeated multiplication, which gives the same bits on every machine.
    """
    longest = min(LONGEST_GAP, math.ceil(4.0 / density))
    return np.multiply.accumulate(np.full(longest, 1.0 - density))


def _draw_rows(keys: np.ndarray, n_cols: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the kept blocks; gaps between them are geometric. rows index the stream keys."""
    table = _gap_table(density)
    longest = table.size
    expected = n_cols * density / (1.0 - table[-1])
    width = math.ceil(expected + 4.0 * math.sqrt(expected)) + 1
    found_rows, found_cols = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    pending, begin, n_drawn = np.arange(keys.size), np.zeros(keys.size, dtype=np.int64), 0
    while pending.size:
        # [pending rows, width]
        drawn = chances(draw_words(keys[pending, None], np.arange(n_drawn, n_drawn + width)))
        # number of larger powers: k with probability (1 - density)**k * density; `longest` means that no block was kept
        gaps = longest - np.searchsorted(table[::-1], drawn, side="right")
        steps = np.where(gaps < longest, gaps + 1, longest)
        ends = begin[:, None] + np.cumsum(steps, axis=1)
        is_kept = (gaps < longest) & (ends <= n_cols)
        places, draws = np.nonzero(is_kept)
        found_rows.append(pending[places])
        found_cols.append(ends[places, draws] - 1)
        goes_on = ends[:, -1] < n_cols
        pending, begin, n_drawn = pending[goes_on], ends[goes_on, -1], n_drawn + width
    return np.concatenate(found_rows), np.concatenate(found_cols)


def _one_head(canvas: Canvas, density: float, seed: int, head: int) -> BlockLayout:
    rows, cols = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    # rows per step, to bound memory
    n_rows = max(1, DRAWS_AT_ONCE // max(1, canvas.n_cols))
    # a density below the precision of float64 keeps none
    keeps_any = 1.0 - density < 1.0 and canvas.n_cols > 0
    for begin in range(0, canvas.n_rows if keeps_any else 0, n_rows):
        chunk = np.arange(begin, min(begin + n_rows, canvas.n_rows))
        places, found = _draw_rows(stream_keys(seed, head * ROWS_OF_A_HEAD + chunk), canvas.n_cols, density)
        rows.append(chunk[places])
        cols.append(found)
    return canvas.from_blocks(np.concatenate(rows), np.concatenate(cols))


@public
def erdos_renyi(
    length: Length, *, density: float, seed: int, heads: int | None = None, block_size: BlockSize = 128
) -> BlockLayout:
    """Each block is kept with probability `density`, independently of all others.

    The number of blocks in a row is binomial, unlike that of `random`, which is the same in every row. Whether a block
    is kept depends on (seed, density, head, row, col) only, so a longer sequence keeps the blocks of a shorter one.
    Time and memory are O(nnz + n_rows * n_cols / 4096): row r of head h skips from one kept block to the next, and skip
    i passes over as many blocks as there are k >= 1 with u(i) < (1 - density)**k,

        u(i) = (mix(mix(mix(seed) ^ (h * 2**32 + r)) ^ i) >> 11) * 2**-53,  mix as in `random`,

    capped at min(4096, ceil(4 / density)); a capped skip keeps no block.

    length      tokens, or (q_len, kv_len)
    density     probability of each block, 0 to 1
    seed        0 to 2**64 - 1
    heads       None: one mask shared by every head; else the number of heads, which are drawn independently
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads | 1, q_len, kv_len), of full blocks only; not symmetric, and the
                diagonal is drawn like every other block
    raises      ValueError if density, seed or heads is out of range; TypeError if one has another type

    Gilbert, "Random Graphs", 1959; as attention: Zaheer et al., "Big Bird", arXiv:2007.14062, section 2.

    >>> erdos_renyi(4096, density=0.25, seed=0).density
    0.2216796875
    """
    canvas = read_canvas(length, block_size)
    density = read_fraction("density", density)
    seed = read_integer("seed", seed, at_least=0, at_most=MAX_SEED)
    heads = read_heads(heads)
    n_blocks = canvas.n_rows * canvas.n_cols * (heads or 1)
    # ten standard deviations below the expected number
    check_nnz(int(density * n_blocks - 10 * (density * n_blocks) ** 0.5), least="at least ")
    return by_head(lambda head: _one_head(canvas, density, seed, head), range(heads or 1))
