"""Block-sparse-row matrices of FlashInfer, SciPy and torch.sparse, and CSR matrices over tokens.

A matrix describes one batch and one head by indptr (n_rows + 1,), indices (nnz,) and, unless all blocks are full, the
pairs of each stored block (nnz, block_q, block_kv). SciPy is imported on the first call that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks
from ..blocks.block_list import FULL, Array, BlockList, Frame, Size
from ..blocks.constructors import countable
from ..blocks.key_runs import merged
from ..layout import BlockLayout
from .block_arrays import blocks_of, check_zeros_and_ones, host, layout_of_runs, one_head, runs_of


def _read_rows(indptr: Any, indices: Any, n_rows: int, n_cols: int) -> tuple[Array, Array]:
    """(rows, cols) of the entries, int64 (nnz,), checked."""
    begins, cols = checks.integers(indptr, "indptr"), checks.integers(indices, "indices")
    counts = np.diff(begins)
    if len(begins) != n_rows + 1 or begins[0] != 0 or (counts < 0).any() or begins[-1] != len(cols):
        raise ValueError(
            f"indptr must have n_rows + 1 = {n_rows + 1} entries that ascend from 0 to len(indices) = {len(cols)}, "
            f"got {len(begins)} from {begins[:1].tolist()} to {begins[-1:].tolist()}"
        )
    checks.check_range(cols, n_cols, "indices", "n_cols")
    return np.repeat(np.arange(n_rows), counts), cols


def _from_pairs(rows: Array, cols: Array, pairs: Array | None, frame: Frame) -> BlockLayout:
    """The layout of blocks in any order; pairs bool (nnz, block_q, block_kv), or None if all are full."""
    keys = rows * frame.n_cols + cols
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    checks.check_distinct(keys, frame, "indices")
    found = block_list.full_list(keys, frame.block_size)
    if pairs is not None:
        found = block_list.canonical(BlockList(keys, order, block_list.pack(pairs)), frame)
    return BlockLayout._from_block_list(found, frame)


def _pairs_of(found: BlockList, frame: Frame) -> Array:
    """The pairs of each block, bool (nnz, block_q, block_kv)."""
    is_full, block_kv = found.ids == FULL, frame.block_size[1]
    pairs = np.empty((len(found.ids), *frame.block_size), np.bool_)
    exists = block_list.unpack(block_list.in_bounds_bitmasks(frame), block_kv)
    pairs[is_full] = exists[block_list.edge_kinds(found.keys[is_full], frame)]
    pairs[~is_full] = block_list.unpack(found.bitmasks, block_kv)[found.ids[~is_full]]
    return pairs


# ------------------------------------------------------------------------------------------------- matrices of 0 and 1


def _from_bsr(
    indptr: Any, indices: Any, values: Array, shape: Sequence[int], name: str, *, q_len: int | None, kv_len: int | None
) -> BlockLayout:
    """The layout of a matrix of whole blocks; the last ones may reach beyond the lengths, where they must be 0.

    values  (nnz, block_q, block_kv)
    name    of the matrix, for messages
    """
    block_size = tuple(int(side) for side in values.shape[1:])
    frame = checks.frame(shape[0] if q_len is None else q_len, shape[1] if kv_len is None else kv_len, block_size)
    for length, size, side, axis in zip(frame[2:4], shape, frame.block_size, ("q_len", "kv_len"), strict=True):
        if not size - side < length <= size:
            raise ValueError(f"{axis} must end in the last block, in {size - side + 1} .. {size}, got {length}")
    check_zeros_and_ones(values, name)
    rows, cols = _read_rows(indptr, indices, frame.n_rows, frame.n_cols)
    every = block_list.full_list(rows * frame.n_cols + cols, frame.block_size)
    if ((values != 0) & ~_pairs_of(every, frame)).any():
        raise ValueError(
            f"{name} must be 0 beyond q_len x kv_len = {frame.q_len} x {frame.kv_len}, but a pair there is 1"
        )
    return _from_pairs(rows, cols, values != 0, frame)


def _from_csr(
    indptr: Any, indices: Any, values: Array, shape: Sequence[int], name: str, *, block_size: int | Size
) -> BlockLayout:
    """The layout of a matrix of single pairs."""
    frame = checks.frame(shape[0], shape[1], block_size)
    check_zeros_and_ones(values, name)
    queries, keys = _read_rows(indptr, indices, frame.q_len, frame.kv_len)
    queries, keys = queries[values != 0], keys[values != 0]
    return layout_of_runs(merged(queries, keys, keys + 1, frame.kv_len), frame)


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
    single, packed = one_head(layout, batch, head), checks.boolean(packed, "packed")
    block_q, block_kv = single.block_size
    if single.kv_len % block_kv:
        raise ValueError(
            f"layout has {single.kv_len} keys, but FlashInfer takes multiples of block_kv = {block_kv} only: "
            "pad the keys, and build the layout for the padded length"
        )
    found, frame = blocks_of(single)
    rows = block_list.by_rows(found, frame)
    arrays: dict[str, Array] = {"indptr": rows.indptr[0], "indices": rows.cols}
    if len(found.bitmasks) and packed:
        in_order = np.empty((len(found.keys) * block_q, block_kv), np.bool_)
        in_order[_query_by_query(found.keys // frame.n_cols, block_q)] = _pairs_of(found, frame)
        arrays["packed_mask"] = np.packbits(in_order, bitorder="little")
    elif len(found.bitmasks):
        arrays["mask"] = _pairs_of(found, frame)
    tensors = {name: torch.from_numpy(array).to(layout.device) for name, array in arrays.items()}
    return FlashInferBsr(M=single.q_len, N=single.kv_len, R=block_q, C=block_kv, **tensors)


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
    frame = checks.frame(q_len, kv_len, block_size)
    if mask is not None and packed_mask is not None:
        raise ValueError("mask and packed_mask must not both be given: they describe the same mask")
    rows, cols = _read_rows(indptr, indices, frame.n_rows, frame.n_cols)
    shape, pairs = (len(cols), *frame.block_size), None
    for tensor, name in ((mask, "mask"), (packed_mask, "packed_mask")):
        if tensor is not None:
            checks.check_tensor(name, tensor)
            checks.check_in_memory(tensor, name)
    if mask is not None:
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(f"mask must be bool (nnz, R, C) = {shape}, got {mask.dtype} {tuple(mask.shape)}")
        pairs = host(mask, "mask")
    if packed_mask is not None:
        pairs = _unpacked(packed_mask, rows, frame)
    return _from_pairs(rows, cols, pairs, frame)


def _query_by_query(rows: Array, block_q: int) -> Array:
    """Place of each query of each block in FlashInfer's order (block row, query, block), int64 (nnz, block_q)."""
    counts = np.bincount(rows)
    begins = np.cumsum(counts) - counts
    in_row = np.arange(len(rows)) - begins[rows]
    return (begins[rows] * block_q + in_row)[:, None] + counts[rows][:, None] * np.arange(block_q)


def _unpacked(packed: torch.Tensor, rows: Array, frame: Frame) -> Array:
    """bool (nnz, block_q, block_kv) of FlashInfer's packed mask, with or without the queries beyond q_len."""
    block_q, block_kv = frame.block_size
    n_queries = len(rows) * block_q
    n_absent = int((rows == frame.n_rows - 1).sum()) * (-frame.q_len % block_q)
    expected = sorted({-(-n * block_kv // 8) for n in (n_queries, n_queries - n_absent)})
    if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) not in expected:
        raise ValueError(
            f"packed_mask must be uint8 with {' or '.join(map(str, expected))} entries, one bit for each pair of "
            f"{len(rows)} blocks, got {packed.dtype} {tuple(packed.shape)}"
        )
    bits = np.unpackbits(host(packed, "packed_mask"), bitorder="little", count=n_queries * block_kv).view(np.bool_)
    return bits.reshape(n_queries, block_kv)[_query_by_query(rows, block_q)]


# ------------------------------------------------------------------------------------------------------------ SciPy


def to_scipy_bsr(layout: BlockLayout, batch: int = 0, head: int = 0) -> Any:
    """One batch and head of a layout as scipy.sparse.bsr_array over tokens, int8: 1 where a query attends to a key.

    SciPy requires whole blocks: the shape is (n_rows * block_q, n_cols * block_kv), with 0 beyond the lengths.

    batch, head  indices into the layout
    """
    import scipy.sparse

    found, frame = blocks_of(one_head(layout, batch, head))
    rows, (block_q, block_kv) = block_list.by_rows(found, frame), frame.block_size
    return scipy.sparse.bsr_array(
        (_pairs_of(found, frame).view(np.int8), rows.cols.astype(np.int64), rows.indptr[0].astype(np.int64)),
        shape=(frame.n_rows * block_q, frame.n_cols * block_kv),
        blocksize=frame.block_size,
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
        matrix = countable(matrix).copy()
        matrix.sum_duplicates()
    arrays = matrix.indptr, matrix.indices, matrix.data
    return _from_bsr(*arrays, matrix.shape, "matrix", q_len=q_len, kv_len=kv_len)


def to_scipy_csr(layout: BlockLayout, batch: int = 0, head: int = 0) -> Any:
    """One batch and head of a layout as scipy.sparse.csr_array (q_len, kv_len), int8: 1 for pairs that attend.

    batch, head  indices into the layout
    """
    import scipy.sparse

    single = one_head(layout, batch, head)
    runs = runs_of(single)
    counts = runs.stop - runs.first
    per_query = np.bincount(runs.lines, weights=counts, minlength=single.q_len).astype(np.int64)
    cols = block_list.ranges(runs.first, counts)
    values, indptr = np.ones(len(cols), np.int8), np.append(0, np.cumsum(per_query))
    return scipy.sparse.csr_array((values, cols, indptr), shape=single.shape[2:])


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
    csr = countable(matrix).tocsr(copy=True)
    csr.sum_duplicates()
    return _from_csr(csr.indptr, csr.indices, csr.data, csr.shape, "matrix", block_size=block_size)


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
    if sparse_layout not in (torch.sparse_bsr, torch.sparse_csr):
        raise ValueError(f"sparse_layout must be torch.sparse_bsr or torch.sparse_csr, got {sparse_layout}")
    matrix = (to_scipy_bsr if sparse_layout == torch.sparse_bsr else to_scipy_csr)(layout, batch, head)
    arrays = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data.view(np.bool_)
    indptr, cols, values = (torch.from_numpy(array).to(layout.device) for array in arrays)
    return torch.sparse_compressed_tensor(
        indptr, cols, values, matrix.shape, layout=sparse_layout, device=layout.device, check_invariants=True
    )


def from_torch_sparse(
    tensor: torch.Tensor, *, block_size: int | Size | None = None, q_len: int | None = None, kv_len: int | None = None
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
    indptr, cols, values = tensor.crow_indices(), tensor.col_indices(), host(tensor.values(), "tensor")
    if tensor.layout == torch.sparse_bsr:
        own_size = tuple(values.shape[1:])
        if block_size is not None and checks.sides(block_size) != own_size:
            raise ValueError(f"block_size must be the tensor's own, {own_size}, or None, got {block_size}")
        return _from_bsr(indptr, cols, values, tensor.shape, "tensor", q_len=q_len, kv_len=kv_len)
    for length, size, name in ((q_len, tensor.shape[0], "q_len"), (kv_len, tensor.shape[1], "kv_len")):
        if length is not None and checks.integer(length, name) != size:
            raise ValueError(f"{name} must be the length of the CSR tensor, {size}, or None, got {length}")
    block_size = 128 if block_size is None else block_size
    return _from_csr(indptr, cols, values, tensor.shape, "tensor", block_size=block_size)
