"""Keys of full blocks from indices, ranges, a mask or a SciPy matrix; and the SciPy matrix of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import block_list, checks
from .block_list import FULL, Array, BlockRows, Frame


def by_index(rows: object, cols: object, frame: Frame) -> Array:
    """Keys of blocks (rows[i], cols[i]) in any order; repeated blocks are refused."""
    row, col = checks.integers(rows, "rows"), checks.integers(cols, "cols")
    if len(row) != len(col):
        raise ValueError(f"rows and cols must have one entry for each block, got {len(row)} and {len(col)}")
    checks.check_range(row, frame.n_rows, "rows", "n_rows")
    checks.check_range(col, frame.n_cols, "cols", "n_cols")
    keys = row * frame.n_cols + col
    keys.sort(kind="stable")
    checks.check_distinct(keys, frame, "rows and cols")
    return keys


def by_ranges(first: object, stop: object, frame: Frame) -> Array:
    """Keys of blocks first[row] <= col < stop[row] of every row."""
    n_rows, n_cols = frame.n_rows, frame.n_cols
    begin, end = checks.integers(first, "first"), checks.integers(stop, "stop")
    for values, name in ((begin, "first"), (end, "stop")):
        if len(values) != n_rows:
            raise ValueError(f"{name} must have one entry for each of {n_rows} rows, got {len(values)}")
        checks.check_range(values, n_cols + 1, name, "(n_cols + 1)")
    counts = np.maximum(end - begin, 0)
    checks.check_nnz(int(counts.sum()))
    return block_list.ranges(np.arange(n_rows) * n_cols + begin, counts)


def by_mask(mask: Any, frame: Frame) -> tuple[Array, Frame]:
    """(keys of the True entries of a bool mask ([[batch,] heads,] n_rows, n_cols), frame with its batch and heads)."""
    array = checks.bools(mask)
    if array.shape[2:] != (frame.n_rows, frame.n_cols):
        hint = ""
        if array.shape[2:] == (frame.q_len, frame.kv_len):
            hint = "; BlockLayout.from_dense(mask) takes a mask of tokens"
        raise ValueError(
            f"mask must end in (n_rows, n_cols) = ({frame.n_rows}, {frame.n_cols}), got shape {tuple(mask.shape)}{hint}"
        )
    # smaller masks cannot have too many
    if array.size > checks.MAX_BLOCKS:
        checks.check_nnz(int(np.count_nonzero(array)))
    return array.reshape(-1).nonzero()[0], Frame(array.shape[0], array.shape[1], *frame[2:])


def by_matrix(matrix: Any, frame: Frame) -> Array:
    """Keys of the nonzeros of a scipy.sparse matrix (n_rows, n_cols); a value 2, a partial block, is refused."""
    import scipy.sparse

    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"matrix must be a scipy.sparse matrix or array, got {type(matrix).__name__}; "
            "scipy.sparse.csr_array(matrix) converts nested lists and arrays; for a tensor, first call "
            "matrix.to_dense().numpy()"
        )
    n_rows, n_cols = frame.n_rows, frame.n_cols
    if matrix.shape != (n_rows, n_cols):
        hint = ""
        if matrix.shape == (frame.q_len, frame.kv_len):
            hint = "; blocksparse_flash.interop.from_scipy_csr(matrix) takes a matrix of tokens"
        raise ValueError(f"matrix must have shape (n_rows, n_cols) = ({n_rows}, {n_cols}), got {matrix.shape}{hint}")
    # a copy, since sum_duplicates works in place
    csr = countable(matrix).tocsr(copy=True)
    csr.sum_duplicates()
    if (csr.data == 2).any():
        raise ValueError(
            "matrix has a value 2 (after adding duplicates), which marks a partial block, but the matrix does not "
            "contain its bitmask"
        )
    row = np.repeat(np.arange(n_rows), np.diff(csr.indptr))
    stored = csr.data != 0
    return by_index(row[stored], csr.indices[stored], frame)


def countable(matrix: Any) -> Any:
    """The matrix with int64 instead of narrow integers, so that sums of duplicates do not wrap: 257 ones are not 1."""
    return matrix.astype(np.int64) if matrix.dtype.kind in "iu" else matrix


def to_matrix(rows: BlockRows, frame: Frame, batch: int, head: int) -> Any:
    """The blocks of one batch and head as scipy.sparse.csr_array (n_rows, n_cols), int8: 1 full, 2 partial."""
    import scipy.sparse

    for value, name, size in ((batch, "batch", frame.batch), (head, "head", frame.heads)):
        checks.position(value, size, name, f"; the layout has {frame.batch} batches of {frame.heads} heads")
    indptr = rows.indptr[batch * frame.heads + head]
    of_batch_head = slice(indptr[0], indptr[-1])
    values = np.where(rows.ids[of_batch_head] == FULL, 1, 2).astype(np.int8)
    matrix = values, rows.cols[of_batch_head].copy(), indptr - indptr[0]
    return scipy.sparse.csr_array(matrix, shape=(frame.n_rows, frame.n_cols))
