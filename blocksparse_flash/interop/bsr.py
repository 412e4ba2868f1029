"""Block-sparse-row matrices of FlashInfer, SciPy and torch.sparse, and CSR matrices over tokens.

A matrix describes one batch and one head by indptr (n_rows + 1,), indices (nnz,) and, unless all blocks are full, the
pairs of each stored block (nnz, block_q, block_kv). SciPy is imported on the first call that needs it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks
from ..blocks.block_list import FULL, Array, Size
from ..layout import BlockLayout
from .block_arrays import check_zeros_and_ones, host, layout_of, one_head, sizes, stored
from .key_runs import layout_of_runs, merged, runs_of


class Bsr(NamedTuple):
    """A block-sparse-row matrix on the host: indptr, indices int64; pairs bool (nnz, block_q, block_kv)."""

    indptr: Array
    indices: Array
    pairs: Array


def _to_bsr(layout: BlockLayout) -> Bsr:
    """The matrix of a layout of one batch and head."""
    found = stored(layout)
    indptr = host(layout.indptr)[0, 0].astype(np.int64)
    pairs = np.empty((len(found.ids), *layout.block_size), np.bool_)
    keys = found.rows * layout.n_cols + found.cols
    there = block_list.unpack(block_list.existing(**sizes(layout)), layout.block_size[1])
    is_full = found.is_full
    pairs[is_full] = there[block_list.edge_kinds(keys, **sizes(layout))[is_full]]
    pairs[~is_full] = block_list.unpack(found.bitmasks, layout.block_size[1])[found.ids[~is_full]]
    return Bsr(indptr, found.cols, pairs)


def _read_rows(indptr: Any, indices: Any, grid: Size) -> tuple[Array, Array]:
    """(indptr, indices) as int64, checked."""
    n_rows, n_cols = grid
    begins, cols = checks.integers(indptr, "indptr"), checks.integers(indices, "indices")
    counts = np.diff(begins)
    if len(begins) != n_rows + 1 or begins[0] != 0 or (counts < 0).any() or begins[-1] != len(cols):
        raise ValueError(
            f"indptr must have n_rows + 1 = {n_rows + 1} entries that ascend from 0 to len(indices) = {len(cols)}, "
            f"got {len(begins)} from {begins[:1].tolist()} to {begins[-1:].tolist()}"
        )
    checks.check_range(cols, n_cols, "indices", "n_cols")
    return begins, cols


def _from_bsr(
    indptr: Any, indices: Any, pairs: Array | None, *, q_len: int, kv_len: int, block_size: Size
) -> BlockLayout:
    """The layout of a matrix with cols in any order; pairs bool (nnz, block_q, block_kv), or None if all are full."""
    begins, cols = _read_rows(indptr, indices, block_list.grid(q_len, kv_len, block_size))
    n_cols = block_list.grid(q_len, kv_len, block_size)[1]
    keys = np.repeat(np.arange(len(begins) - 1), np.diff(begins)) * n_cols + cols
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    twice = keys[1:] == keys[:-1]
    if twice.any():
        raise ValueError(
            f"indices must name every block once, but {divmod(int(keys[twice.argmax()]), n_cols)} comes again"
        )
    ids, words = np.full(len(keys), FULL), block_list.no_bitmasks(block_size)
    if pairs is not None:
        ids, words = order, block_list.pack(pairs)
    return layout_of(keys, ids, words, (1, 1), q_len=q_len, kv_len=kv_len, block_size=block_size)


# ------------------------------------------------------------------------------------------------------- FlashInfer


class FlashInferBsr(NamedTuple):
    """Arguments of BlockSparseAttentionWrapper.plan: wrapper.plan(**bsr._asdict(), num_qo_heads=..., ...).

    indptr, indices  int32 (n_rows + 1,), (nnz,)
    M, N, R, C       q_len, kv_len, block_q, block_kv
    mask             bool (nnz, R, C), True attends; None if every block is full or packed_mask is given
    packed_mask      uint8: the bits of mask, for each block row query by query, first pair in the lowest bit
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    M: int
    N: int
    R: int
    C: int
    mask: torch.Tensor | None = None
    packed_mask: torch.Tensor | None = None


def to_flashinfer(layout: BlockLayout, batch: int = 0, head: int = 0, *, packed: bool = False) -> FlashInferBsr:
    """FlashInfer's arguments for one batch and head of a layout, exact, on the layout's device.

    FlashInfer's fa2 and fa3 backends use one pattern for all heads; the other backends take no partial blocks.

    batch, head  indices into the layout
    packed       True returns packed_mask instead of mask, in an eighth of the memory
    returns      FlashInferBsr
    raises       ValueError if kv_len is not a multiple of block_kv: FlashInfer would read keys beyond the last
    """
    single, packed = one_head(layout, batch, head), checks.switch(packed, "packed")
    (block_q, block_kv), found = single.block_size, _to_bsr(single)
    if single.kv_len % block_kv:
        raise ValueError(
            f"layout has {single.kv_len} keys, but FlashInfer takes multiples of block_kv = {block_kv} only: "
            "pad the keys, and build the layout for the padded length"
        )
    pairs = torch.from_numpy(found.pairs).to(layout.device)
    indptr, indices = (torch.from_numpy(array.astype(np.int32)).to(layout.device) for array in found[:2])
    given: dict[str, torch.Tensor] = {}
    if (single.bitmask_ids >= 0).any():
        given = {"mask": pairs}
        if packed:
            bits = np.packbits(_row_by_row(found.pairs, found.indptr), bitorder="little")
            given = {"packed_mask": torch.from_numpy(bits).to(layout.device)}
    return FlashInferBsr(indptr, indices, single.q_len, single.kv_len, block_q, block_kv, **given)


def from_flashinfer(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    q_len: int,
    kv_len: int,
    *,
    block_size: int | Size,
    mask: torch.Tensor | None = None,
    packed_mask: torch.Tensor | None = None,
) -> BlockLayout:
    """The layout of FlashInfer's block-sparse rows (M, N = q_len, kv_len; R, C = block_size), exact, on the host.

    plan(causal=True) is not converted: in each block row FlashInfer aligns the diagonal with the last key that the row
    keeps. For the diagonal of the sequence, use `layout & masks.causal(...)`.

    indptr, indices    as in FlashInferBsr, with cols in any order
    mask, packed_mask  as in FlashInferBsr, at most one; without them every block is full
    returns            BlockLayout of shape (1, 1, q_len, kv_len)
    raises             ValueError for wrong shapes, dtypes or indices, a repeated block, or both masks
    """
    q_len, kv_len = checks.length(q_len, "q_len"), checks.length(kv_len, "kv_len")
    sides = checks.sides(block_size)
    if mask is not None and packed_mask is not None:
        raise ValueError("mask and packed_mask must not both be given: they say the same")
    begins, cols = _read_rows(indptr, indices, block_list.grid(q_len, kv_len, sides))
    nnz, pairs = len(cols), None
    for tensor, name in ((mask, "mask"), (packed_mask, "packed_mask")):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if mask is not None:
        if mask.dtype != torch.bool or tuple(mask.shape) != (nnz, *sides):
            raise ValueError(f"mask must be bool (nnz, R, C) = {(nnz, *sides)}, got {mask.dtype} {tuple(mask.shape)}")
        pairs = host(mask)
    if packed_mask is not None:
        pairs = _unpacked(packed_mask, begins, nnz, q_len, sides)
    return _from_bsr(begins, cols, pairs, q_len=q_len, kv_len=kv_len, block_size=sides)


def _row_by_row(pairs: Array, indptr: Array) -> Array:
    """The pairs in the order of FlashInfer, bool (n,): block row by block row, and query by query within each."""
    parts = [pairs[begin:end].swapaxes(0, 1).reshape(-1) for begin, end in itertools.pairwise(indptr)]
    return np.concatenate([*parts, np.zeros(0, np.bool_)])


def _unpacked(packed: torch.Tensor, indptr: Array, nnz: int, q_len: int, sides: Size) -> Array:
    """bool (nnz, block_q, block_kv) of FlashInfer's packed mask, with or without the queries beyond q_len."""
    size = nnz * sides[0] * sides[1]
    absent = -q_len % sides[0] * sides[1] * int(indptr[-1] - indptr[-2]) if len(indptr) > 1 else 0
    expected = sorted({-(-size // 8), -(-(size - absent) // 8)})
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) not in expected:
        raise ValueError(
            f"packed_mask must be uint8 with {' or '.join(map(str, expected))} entries, one bit for each pair of "
            f"{nnz} blocks, got {packed.dtype} {tuple(packed.shape)}"
        )
    bits = np.unpackbits(host(packed), bitorder="little", count=size).view(np.bool_)
    pairs = np.empty((nnz, *sides), np.bool_)
    for begin, end in itertools.pairwise(indptr):
        row = bits[begin * sides[0] * sides[1] : end * sides[0] * sides[1]]
        pairs[begin:end] = row.reshape(sides[0], end - begin, sides[1]).swapaxes(0, 1)
    return pairs


# ------------------------------------------------------------------------------------------------------------ SciPy


def to_scipy_bsr(layout: BlockLayout, batch: int = 0, head: int = 0) -> Any:
    """One batch and head of a layout as scipy.sparse.bsr_array over tokens, int8: 1 where a query attends to a key.

    SciPy requires whole blocks: the shape is (n_rows * block_q, n_cols * block_kv), with 0 beyond the lengths.

    batch, head  indices into the layout
    """
    import scipy.sparse

    single = one_head(layout, batch, head)
    found = _to_bsr(single)
    return scipy.sparse.bsr_array(
        (found.pairs.view(np.int8), found.indices, found.indptr),
        shape=_padded_shape(single),
        blocksize=single.block_size,
    )


def from_scipy_bsr(matrix: Any, *, q_len: int | None = None, kv_len: int | None = None) -> BlockLayout:
    """The layout of a scipy.sparse BSR matrix over tokens, exact; its block size is the matrix's.

    matrix         scipy.sparse.bsr_array or bsr_matrix of 0 and 1; blocks stored twice are summed
    q_len, kv_len  lengths, if the last block is ragged; None: the shape of the matrix
    returns        BlockLayout of shape (1, 1, q_len, kv_len)
    raises         TypeError for another type; ValueError for other values, or a 1 beyond the lengths
    """
    import scipy.sparse

    if not scipy.sparse.issparse(matrix) or matrix.format != "bsr":
        raise TypeError(
            f"matrix must be a scipy.sparse BSR matrix, got {type(matrix).__name__}: use from_scipy_csr for tokens, "
            "from_torch_sparse for a tensor, or BlockLayout.from_dense for an array"
        )
    if not matrix.has_canonical_format:
        # copied, since sum_duplicates works in place
        matrix = _countable(matrix).copy()
        matrix.sum_duplicates()
    q_len, kv_len, sides = _lengths(matrix.shape, matrix.blocksize, q_len, kv_len)
    pairs = _checked_pairs(matrix.data, matrix.indptr, matrix.indices, q_len, kv_len, sides, "matrix")
    return _from_bsr(matrix.indptr, matrix.indices, pairs, q_len=q_len, kv_len=kv_len, block_size=sides)


def to_scipy_csr(layout: BlockLayout, batch: int = 0, head: int = 0) -> Any:
    """One batch and head of a layout as scipy.sparse.csr_array (q_len, kv_len), int8: 1 for pairs that attend.

    batch, head  indices into the layout
    """
    import scipy.sparse

    single = one_head(layout, batch, head)
    indptr, cols = _to_csr(single)
    return scipy.sparse.csr_array((np.ones(len(cols), np.int8), cols, indptr), shape=single.shape[2:])


def from_scipy_csr(matrix: Any, *, block_size: int | Size = 128) -> BlockLayout:
    """The layout of a scipy.sparse matrix over tokens (q_len, kv_len), of any format, exact, in O(its entries).

    For a matrix over blocks use `BlockLayout.from_scipy`.

    matrix      scipy.sparse matrix or array of 0 and 1; pairs stored twice are summed
    block_size  tokens per side of a block of the layout, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len)
    raises      TypeError for another type; ValueError for other values or not two axes
    """
    import scipy.sparse

    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"matrix must be a scipy.sparse matrix or array, got {type(matrix).__name__}: use from_torch_sparse for a "
            "sparse tensor, or BlockLayout.from_dense for torch.tensor(matrix)"
        )
    if matrix.ndim != 2:
        raise ValueError(f"matrix must have two axes (q_len, kv_len), got shape {matrix.shape}")
    csr = _countable(matrix).tocsr(copy=True)
    csr.sum_duplicates()
    check_zeros_and_ones(csr.data, "matrix")
    return _from_csr(csr.indptr, csr.indices, csr.data != 0, csr.shape, checks.sides(block_size))


def _countable(matrix: Any) -> Any:
    """The matrix with int64 instead of narrow integers, so that sums of duplicates do not wrap: 257 ones are not 1."""
    return matrix.astype(np.int64) if matrix.dtype.kind in "iu" else matrix


# ----------------------------------------------------------------------------------------------------- torch.sparse


def to_torch_sparse(
    layout: BlockLayout, batch: int = 0, head: int = 0, *, sparse_layout: torch.layout = torch.sparse_bsr
) -> torch.Tensor:
    """One batch and head as a sparse bool tensor over tokens, on the layout's device.

    batch, head    indices into the layout
    sparse_layout  torch.sparse_bsr: blocks of layout.block_size, with the shape rounded up to whole blocks and
                   False beyond the lengths; torch.sparse_csr: shape (q_len, kv_len), in O(pairs that attend)
    raises         ValueError for another sparse_layout
    """
    single = one_head(layout, batch, head)
    if sparse_layout == torch.sparse_bsr:
        found = _to_bsr(single)
        arrays, shape = tuple(found), _padded_shape(single)
    elif sparse_layout == torch.sparse_csr:
        rows = _to_csr(single)
        arrays, shape = (*rows, np.ones(len(rows[1]), np.bool_)), (single.q_len, single.kv_len)
    else:
        raise ValueError(f"sparse_layout must be torch.sparse_bsr or torch.sparse_csr, got {sparse_layout}")
    indptr, cols, values = (torch.from_numpy(np.ascontiguousarray(array)).to(layout.device) for array in arrays)
    return torch.sparse_compressed_tensor(indptr, cols, values, shape, layout=sparse_layout, check_invariants=True)


def from_torch_sparse(
    tensor: torch.Tensor,
    *,
    block_size: int | Size | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
) -> BlockLayout:
    """The layout of a sparse tensor over tokens, of 0 and 1, exact, on the host.

    tensor         two axes, torch.sparse_bsr or torch.sparse_csr
    block_size     tokens per side of a block of the layout; None: 128 for CSR, that of the tensor for BSR
    q_len, kv_len  lengths, if the last block of a BSR tensor is ragged; None: the shape of the tensor
    returns        BlockLayout of shape (1, 1, q_len, kv_len)
    raises         ValueError for another format, values other than 0 and 1, or a 1 beyond the lengths
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a sparse torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout not in (torch.sparse_bsr, torch.sparse_csr) or tensor.ndim != 2:
        raise ValueError(
            f"tensor must be torch.sparse_bsr or torch.sparse_csr with two axes, got {tensor.layout} with "
            f"{tensor.ndim}: call to_sparse_csr() on one head, or BlockLayout.from_dense for a dense mask"
        )
    indptr, cols, values = host(tensor.crow_indices()), host(tensor.col_indices()), host(tensor.values())
    if tensor.layout == torch.sparse_bsr:
        if block_size is not None and checks.sides(block_size) != tuple(values.shape[1:]):
            raise ValueError(
                f"block_size must be the tensor's own, {tuple(values.shape[1:])}, or None, got {block_size}"
            )
        lengths = _lengths(tuple(tensor.shape), tuple(values.shape[1:]), q_len, kv_len)
        pairs = _checked_pairs(values, indptr, cols, *lengths, "tensor")
        return _from_bsr(indptr, cols, pairs, q_len=lengths[0], kv_len=lengths[1], block_size=lengths[2])
    for length, size, name in ((q_len, tensor.shape[0], "q_len"), (kv_len, tensor.shape[1], "kv_len")):
        if length is not None and length != size:
            raise ValueError(f"{name} must be the length of the CSR tensor, {size}, or None, got {length}")
    check_zeros_and_ones(values, "tensor")
    sides = checks.sides(128 if block_size is None else block_size)
    return _from_csr(indptr, cols, values != 0, tuple(tensor.shape), sides)


# ------------------------------------------------------------------------------------------------------ over tokens


def _to_csr(layout: BlockLayout) -> tuple[Array, Array]:
    """(indptr, kv_pos) of the pairs that attend, for a layout of one batch and head."""
    runs = runs_of(layout)
    counts = runs.stop - runs.first
    per_query = np.bincount(runs.lines, weights=counts, minlength=layout.q_len).astype(np.int64)
    return np.append(0, np.cumsum(per_query)), block_list.ranges(runs.first, counts)


def _from_csr(indptr: Array, cols: Array, attends: Array, shape: tuple[int, ...], sides: Size) -> BlockLayout:
    begins, keys = _read_rows(indptr, cols, (shape[0], shape[1]))
    queries = np.repeat(np.arange(shape[0]), np.diff(begins))[attends]
    first = keys[attends]
    runs = merged(queries, first, first + 1, shape[1])
    return layout_of_runs(runs, (1, 1), q_len=shape[0], kv_len=shape[1], block_size=sides)


# ---------------------------------------------------------------------------------------------------------- lengths


def _padded_shape(layout: BlockLayout) -> Size:
    return layout.n_rows * layout.block_size[0], layout.n_cols * layout.block_size[1]


def _lengths(
    shape: tuple[int, ...], blocksize: tuple[int, ...], q_len: int | None, kv_len: int | None
) -> tuple[int, int, Size]:
    """(q_len, kv_len, block_size) of a matrix of whole blocks."""
    sides = checks.sides(tuple(int(side) for side in blocksize))
    found = []
    for length, size, side, name in zip((q_len, kv_len), shape, sides, ("q_len", "kv_len"), strict=True):
        chosen = size if length is None else checks.length(length, name)
        if not size - side < chosen <= size:
            raise ValueError(f"{name} must end in the last block, in {size - side + 1} .. {size}, got {chosen}")
        found.append(chosen)
    return found[0], found[1], sides


def _checked_pairs(values: Array, indptr: Array, cols: Array, q_len: int, kv_len: int, sides: Size, name: str) -> Array:
    """bool (nnz, block_q, block_kv) of the values of blocks: 0 and 1, and 0 beyond the lengths."""
    check_zeros_and_ones(values, name)
    pairs: Array = values != 0
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    q_pos = rows[:, None] * sides[0] + np.arange(sides[0])
    kv_pos = cols[:, None] * sides[1] + np.arange(sides[1])
    beyond = (pairs.any(axis=2) & (q_pos >= q_len)).any() or (pairs.any(axis=1) & (kv_pos >= kv_len)).any()
    if beyond:
        raise ValueError(f"{name} must be 0 beyond q_len x kv_len = {q_len} x {kv_len}, but a pair there is 1")
    return pairs
