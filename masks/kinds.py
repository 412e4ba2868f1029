"""Integer ids that are equal for equal things: rows of a table, marks of a block row or col, tuples of numbers."""

from __future__ import annotations

import numpy as np


def kinds_of_rows(table: np.ndarray) -> np.ndarray:
    """Equal ids, from 0 on, for equal rows of a table.

    table    (rows, columns) of any integer type
    returns  int64 (rows,)

    >>> kinds_of_rows(np.array([[1, 2], [0, 3], [1, 2]])).tolist()
    [1, 0, 1]
    """
    if not table.size:
        return np.zeros(len(table), dtype=np.int64)
    whole_rows = np.ascontiguousarray(table).view(f"V{table.shape[1] * table.itemsize}").reshape(-1)
    return np.unique(whole_rows, return_inverse=True)[1].reshape(-1)


def kinds_of_sides(marks: np.ndarray, side: int) -> np.ndarray:
    """Equal ids for block rows (or cols) with equal marks.

    marks    bool (length,), one per token
    side     tokens of a block along this axis
    returns  int64 (blocks,), 0 for a block without marks

    >>> kinds_of_sides(np.arange(100) % 32 == 5, 16).tolist()
    [1, 0, 1, 0, 1, 0, 0]
    """
    n_blocks = -(-marks.size // side)
    # [blocks, side]
    sides = np.zeros((n_blocks, side), dtype=bool)
    sides.reshape(-1)[: marks.size] = marks
    kinds = np.zeros(n_blocks, dtype=np.int64)
    is_marked = sides.any(axis=1)
    # [marked sides, bytes]
    kinds[is_marked] = kinds_of_rows(np.packbits(sides[is_marked], axis=1)) + 1
    return kinds


def joint_ids(*parts: np.ndarray) -> np.ndarray:
    """One id per entry, equal if and only if all parts are equal.

    parts    int64 (n,) each
    returns  int64 (n,), in no particular order

    >>> joint_ids(np.array([3, 3, 9]), np.array([-1, -1, -1])).tolist()
    [0, 0, 6]
    """
    joined, n_ids = np.zeros_like(parts[0]), 1
    if not joined.size:
        return joined
    for part in parts:
        lowest = int(part.min())
        size = int(part.max()) - lowest + 1
        if n_ids * size >= 2**62:
            joined = np.unique(joined, return_inverse=True)[1].reshape(-1)
            n_ids = joined.size
        joined = joined * size + (part - lowest)
        n_ids *= size
    return joined
