"""Combines the partial results of selected blocks: out and lse by log-sum-exp, dq, dk and dv by summation.

The partial results of a round lie in a workspace, see hopper/selected_forward.py. Each is added in a fixed order, so
results are bitwise reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...blocks.block_list import Size
from ...plan_format import SelectedSizes
from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..selected_shapes import RowLayout, row_layout_of
from .tile import head_base, log_sum

# keys per program of reduce_dkdv_kernel
SUM_KEYS = 16


# fmt: off
@triton.jit
def first_entry_of_round(indptr_ptr, first_query_block, n_query_blocks):
    """Index into key_blocks of the round's first entry: the slot of an entry is its index minus this."""
    return tl.load(indptr_ptr + first_query_block + first_query_block // n_query_blocks)


@triton.jit
def row_pointers(ptr, strides, i_batch, i_head, i_block, o_row):
    """Pointers to rows of a query block. strides: see selected_shapes.RowLayout."""
    p_block = head_base(ptr, strides, i_batch, i_head) + i_block.to(tl.int64) * strides[2]
    return p_block + o_row.to(tl.int64) * strides[3]


@triton.jit(do_not_specialize=["first_query_block", "total_query_blocks", "n_heads", "n_query_blocks", "n_queries"])
def combine_out_kernel(
    # the plan
    indptr_ptr, key_blocks_ptr,
    # partial results, and their lse in base 2
    partial_ptr, partial_lse_ptr,
    # outputs
    out_ptr, lse_ptr,
    # first query block of the round; n_heads: heads that select, per batch; n_query_blocks of one of them; strides and
    # n_queries: see selected_shapes.RowLayout
    first_query_block, out_strides, lse_strides, total_query_blocks, n_heads, n_query_blocks, n_queries,
    # compile time; BLOCK_ROWS of a query block, columns of out and of a partial result
    BLOCK_ROWS: tl.constexpr, V_DIM: tl.constexpr, DIM_V: tl.constexpr,
):
    """out and lse of one query block."""
    query_block = first_query_block + tl.program_id(0)
    if query_block < total_query_blocks:
        batch_head, i_block = query_block // n_query_blocks, query_block % n_query_blocks
        first_entry = first_entry_of_round(indptr_ptr, first_query_block, n_query_blocks)
        begin, end = tl.load(indptr_ptr + query_block + batch_head), tl.load(indptr_ptr + query_block + batch_head + 1)
        o_row, o_dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, DIM_V)
        b_out = tl.zeros([BLOCK_ROWS, DIM_V], tl.float32)
        # finite, since -inf - (-inf) = nan, and below every score
        b_max, b_sum = tl.full([BLOCK_ROWS], -3.0e38, tl.float32), tl.zeros([BLOCK_ROWS], tl.float32)
        for i_entry in tl.range(begin, end, num_stages=3):
            is_used = tl.load(key_blocks_ptr + i_entry) >= 0
            o_slot = (i_entry - first_entry) * BLOCK_ROWS + o_row
            b_lse = tl.load(partial_lse_ptr + o_slot, mask=is_used & (o_row >= 0), other=float("-inf"))
            p_partial = partial_ptr + o_slot.to(tl.int64)[:, None] * DIM_V + o_dim[None, :]
            b_partial = tl.load(p_partial, mask=is_used & (o_dim >= 0)[None, :], other=0.0).to(tl.float32)
            b_new_max = tl.maximum(b_max, b_lse)
            b_weight, b_decay = tl.math.exp2(b_lse - b_new_max), tl.math.exp2(b_max - b_new_max)
            b_out = b_out * b_decay[:, None] + b_partial * b_weight[:, None]
            b_sum = b_sum * b_decay + b_weight
            b_max = b_new_max
        is_empty = b_sum == 0.0
        b_sum = tl.where(is_empty, 1.0, b_sum)
        is_query = i_block * BLOCK_ROWS + o_row < n_queries
        p_out = row_pointers(out_ptr, out_strides, batch_head // n_heads, batch_head % n_heads, i_block, o_row)
        b_out = (b_out / b_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(p_out[:, None] + o_dim[None, :], b_out, mask=is_query[:, None] & (o_dim < V_DIM)[None, :])
        p_lse = row_pointers(lse_ptr, lse_strides, batch_head // n_heads, batch_head % n_heads, i_block, o_row)
        tl.store(p_lse, tl.where(is_empty, float("-inf"), log_sum(b_max, b_sum)), mask=is_query)


@triton.jit(do_not_specialize=["first_query_block", "total_query_blocks", "n_heads", "n_query_blocks", "n_queries"])
def reduce_dq_kernel(
    indptr_ptr, key_blocks_ptr, partial_ptr, dq_ptr,
    first_query_block, dq_strides, total_query_blocks, n_heads, n_query_blocks, n_queries,
    BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KEY_SPLITS: tl.constexpr,
):
    """dq of one query block.

    dq_strides, n_queries  see selected_shapes.RowLayout
    KEY_SPLITS  partial results of each entry
    """
    query_block = first_query_block + tl.program_id(0)
    if query_block < total_query_blocks:
        batch_head, i_block = query_block // n_query_blocks, query_block % n_query_blocks
        first_entry = first_entry_of_round(indptr_ptr, first_query_block, n_query_blocks)
        begin, end = tl.load(indptr_ptr + query_block + batch_head), tl.load(indptr_ptr + query_block + batch_head + 1)
        o_row, o_dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, DIM)
        b_dq = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
        for i_partial in tl.range(begin * KEY_SPLITS, end * KEY_SPLITS, num_stages=3):
            is_used = tl.load(key_blocks_ptr + i_partial // KEY_SPLITS) >= 0
            o_slot = (i_partial - first_entry * KEY_SPLITS) * BLOCK_ROWS + o_row
            p_partial = partial_ptr + o_slot.to(tl.int64)[:, None] * DIM + o_dim[None, :]
            b_dq += tl.load(p_partial, mask=is_used & (o_dim >= 0)[None, :], other=0.0).to(tl.float32)
        p_dq = row_pointers(dq_ptr, dq_strides, batch_head // n_heads, batch_head % n_heads, i_block, o_row)
        m_dq = (i_block * BLOCK_ROWS + o_row < n_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
        tl.store(p_dq[:, None] + o_dim[None, :], b_dq.to(dq_ptr.dtype.element_ty), mask=m_dq)


@triton.jit
def items_of(work_item_offsets_ptr, i_list, first_list, end_list):
    """(first work item, one past the last) of a list; none if it is not one of the round's."""
    is_listed = (i_list >= first_list) & (i_list < end_list)
    return (
        tl.load(work_item_offsets_ptr + i_list, mask=is_listed, other=0),
        tl.load(work_item_offsets_ptr + i_list + 1, mask=is_listed, other=0),
    )


@triton.jit(
    do_not_specialize=[
        "first_query_block", "first_list", "end_list", "kv_heads", "n_query_blocks", "n_key_blocks", "kv_len",
    ]
)
def reduce_dkdv_kernel(
    # the plan; dk, then dv, of each work item of the round
    work_item_offsets_ptr, partial_dkdv_ptr,
    # outputs, to which it ADDs
    dk_ptr, dv_ptr,
    # (batch, head, row) strides behind the integers of the round
    first_query_block, first_list, end_list, dk_strides, dv_strides,
    kv_heads, n_query_blocks, n_key_blocks, kv_len, scale,
    # compile time; GROUP: heads per KV head
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    KEYS: tl.constexpr, CHUNK_KEYS: tl.constexpr, ADD: tl.constexpr,
):
    """dk and dv of CHUNK_KEYS keys: the sum over the work items of their key block."""
    CHUNKS: tl.constexpr = KEYS // CHUNK_KEYS
    i_block, i_chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    kv_batch_head, i_key_block = i_block // n_key_blocks, i_block % n_key_blocks
    first_item = tl.load(work_item_offsets_ptr + first_list)
    o_row = i_chunk * CHUNK_KEYS + tl.arange(0, CHUNK_KEYS)
    o_dim, o_dim_v = tl.arange(0, DIM), tl.arange(0, DIM_V)
    o_kv = i_key_block * KEYS + o_row
    p_dk = head_base(dk_ptr, dk_strides, kv_batch_head // kv_heads, kv_batch_head % kv_heads)
    p_dk += o_kv.to(tl.int64)[:, None] * dk_strides[2] + o_dim[None, :]
    p_dv = head_base(dv_ptr, dv_strides, kv_batch_head // kv_heads, kv_batch_head % kv_heads)
    p_dv += o_kv.to(tl.int64)[:, None] * dv_strides[2] + o_dim_v[None, :]
    m_dk = (o_kv < kv_len)[:, None] & (o_dim < HEAD_DIM)[None, :]
    m_dv = (o_kv < kv_len)[:, None] & (o_dim_v < V_DIM)[None, :]
    # lists of the round begin with those of the head of its first query block
    first_batch_head = first_query_block // n_query_blocks
    n_items = 0
    for i_head in range(GROUP):
        i_list = first_list + (kv_batch_head * GROUP + i_head - first_batch_head) * n_key_blocks + i_key_block
        begin, end = items_of(work_item_offsets_ptr, i_list, first_list, end_list)
        n_items += end - begin
    # skip sums that do not change
    if n_items > 0 or not ADD:
        b_dk, b_dv = tl.zeros([CHUNK_KEYS, DIM], tl.float32), tl.zeros([CHUNK_KEYS, DIM_V], tl.float32)
        if ADD:
            b_dk, b_dv = tl.load(p_dk, mask=m_dk, other=0.0), tl.load(p_dv, mask=m_dv, other=0.0)
        for i_head in range(GROUP):
            i_list = first_list + (kv_batch_head * GROUP + i_head - first_batch_head) * n_key_blocks + i_key_block
            begin, end = items_of(work_item_offsets_ptr, i_list, first_list, end_list)
            for i_item in tl.range(0, end - begin):
                p_partial = partial_dkdv_ptr + (begin - first_item + i_item).to(tl.int64) * (KEYS * (DIM + DIM_V))
                b_dk += tl.load(p_partial + o_row[:, None] * DIM + o_dim[None, :]) * scale
                b_dv += tl.load(p_partial + KEYS * DIM + o_row[:, None] * DIM_V + o_dim_v[None, :])
        tl.store(p_dk, b_dk.to(dk_ptr.dtype.element_ty), mask=m_dk)
        tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), mask=m_dv)
# fmt: on


def _query_block_sizes(sizes: SelectedSizes, row_layout: RowLayout) -> dict[str, int]:
    """Sizes of launches over the query blocks of a round."""
    numbers = {
        "total_query_blocks": sizes.total_query_blocks,
        "n_heads": row_layout.heads,
        "n_query_blocks": sizes.n_query_blocks,
    }
    return {**numbers, "n_queries": row_layout.n_queries, "BLOCK_ROWS": sizes.query_rows}


def combine_out(sizes: SelectedSizes, out: TensorSpec, dim_v: int) -> Launch:
    """The launch of combine_out_kernel for a round. dim_v: columns of a partial result."""
    _, heads, q_len, v_dim = out.shape
    row_layout = row_layout_of(sizes, out.shape)
    strides = {
        "out_strides": row_layout.strides(out.strides),
        "lse_strides": row_layout.strides((heads * q_len, q_len, 1)),
    }
    columns = {"V_DIM": v_dim, "DIM_V": dim_v}
    rest = {**_query_block_sizes(sizes, row_layout), **strides, **columns, "num_warps": 4}
    return Launch(combine_out_kernel, (sizes.query_blocks_per_round,), rest)


def reduce_dq(sizes: SelectedSizes, key_splits: int, dq: TensorSpec, dim: int) -> Launch:
    """The launch of reduce_dq_kernel for a round.

    key_splits  partial results of each entry
    dim         columns of a partial result
    """
    row_layout = row_layout_of(sizes, dq.shape)
    rest = {
        **_query_block_sizes(sizes, row_layout),
        "dq_strides": row_layout.strides(dq.strides),
        "HEAD_DIM": dq.shape[3],
        "DIM": dim,
    }
    return Launch(reduce_dq_kernel, (sizes.query_blocks_per_round,), {**rest, "KEY_SPLITS": key_splits, "num_warps": 4})


def reduce_dkdv(
    sizes: SelectedSizes, group: int, dk: TensorSpec, dv: TensorSpec, padded_dims: Size, scale: float, *, adds: bool
) -> Launch:
    """The launch of reduce_dkdv_kernel for a round.

    group        query heads per KV head
    dk, dv       specs of the outputs
    padded_dims  columns of dk and of dv of a work item
    adds         to sums over rounds
    """
    n_programs = sizes.n_batch_heads // group * sizes.n_key_blocks * (sizes.keys // SUM_KEYS)
    _, kv_heads, kv_len, head_dim = dk.shape
    numbers = {
        "kv_heads": kv_heads,
        "n_query_blocks": sizes.n_query_blocks,
        "n_key_blocks": sizes.n_key_blocks,
        "kv_len": kv_len,
        "scale": scale,
    }
    strides = {"dk_strides": dk.strides[:3], "dv_strides": dv.strides[:3]}
    columns = dict(zip(("HEAD_DIM", "V_DIM", "DIM", "DIM_V"), (head_dim, dv.shape[3], *padded_dims), strict=True))
    rest = {**numbers, **strides, **columns, "GROUP": group, "KEYS": sizes.keys, "CHUNK_KEYS": SUM_KEYS, "ADD": adds}
    return Launch(reduce_dkdv_kernel, (n_programs,), {**rest, "num_warps": 4})
