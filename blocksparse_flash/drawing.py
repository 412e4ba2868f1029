"""What does a mask look like in text?

Knows block lists, their frame, and letters. Must not know torch, layouts or patterns.
"""

from __future__ import annotations

import numpy as np

from .blocks import FULL, Array, BlockList, Frame, Size

# what a cell holds
_EMPTY, _PARTIAL, _FULL = 0, 1, 2
# characters down and across
_LETTERS = 32


def _blocks_a_cell(frame: Frame, most: int) -> Size:
    return max(1, -(-frame.n_rows // most)), max(1, -(-frame.n_cols // most))


def _cells(found: BlockList, frame: Frame, most: int) -> tuple[Array, Size]:
    """(cells, (down, across)): the first lead in at most `most` x `most` cells of down x across blocks each.

    A cell is _FULL if all its blocks are, _EMPTY if none is stored, otherwise _PARTIAL.
    """
    n_rows, n_cols = frame.n_rows, frame.n_cols
    down, across = _blocks_a_cell(frame, most)
    height, width = -(-n_rows // down), -(-n_cols // across)
    is_first = found.keys < n_rows * n_cols
    keys, is_full = found.keys[is_first], found.ids[is_first] == FULL
    place = keys // max(n_cols, 1) // down * width + keys % max(n_cols, 1) // across
    n_all = np.outer(
        np.bincount(np.arange(n_rows) // down, minlength=height),
        np.bincount(np.arange(n_cols) // across, minlength=width),
    )
    n_stored = np.bincount(place, minlength=height * width).reshape(height, width)
    n_full = np.bincount(place[is_full], minlength=height * width).reshape(height, width)
    return np.where(n_full == n_all, _FULL, np.where(n_stored > 0, _PARTIAL, _EMPTY)), (down, across)


# ----------------------------------------------------------------------------------------------------------------- text


def text(found: BlockList, frame: Frame) -> str:
    """The sizes of a layout, and its first head drawn in letters."""
    batch, heads, q_len, kv_len, block_size = frame
    n_rows, n_cols, n_distinct = frame.n_rows, frame.n_cols, len(found.bitmasks)
    n_blocks = frame.leads * n_rows * n_cols
    density = len(found.keys) / n_blocks if n_blocks else 0.0
    lines = [
        f"BlockLayout({q_len} x {kv_len} tokens, {block_size=}, {batch=}, {heads=})",
        f"{n_rows} x {n_cols} blocks, nnz={len(found.keys)}, density={density:.4g}, {n_distinct} distinct bitmasks",
    ]
    if n_rows * n_cols == 0:
        return "\n".join(lines)
    cells, (down, across) = _cells(found, frame, _LETTERS)
    key = "# full, + partial, . empty"
    if down * across > 1:
        key += f"; a character is {down} x {across} blocks"
    if frame.leads > 1:
        key += "; batch 0, head 0"
    return "\n".join([*lines, key, *("".join(row) for row in np.array(list(".+#"))[cells])])
