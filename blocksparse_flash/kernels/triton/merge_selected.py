"""Combines the partial results of selected blocks: out and lse by log-sum-exp, dq, dk and dv by summation.

The partial results of a round lie in a workspace, see hopper/selected_forward.py. Each is added in a fixed order, so
results are bitwise reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...blocks.block_list import Size
from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..selected_shapes import Rows, SelectedShapes, rows_of
from .tile import head_base, log_sum

# keys per program of sum_keys_kernel
SUM_KEYS = 16


# fmt: off
@triton.jit
def first_slot_of(indptr_ptr, first_line, n_rows):
    """The entry of the first partial result of a round."""
    return tl.load(indptr_ptr + first_line + first_line // n_rows)


@triton.jit
def row_pointers(ptr, strides, i_batch, i_head, i_block, o_row):
    """Pointers to rows of a query block. strides: see selected_shapes.Rows."""
    p_block = head_base(ptr, strides, i_batch, i_head) + i_block.to(tl.int64) * strides[2]
    return p_block + o_row.to(tl.int64) * strides[3]


@triton.jit(do_not_specialize=["first_line", "n_lines", "n_heads", "n_rows", "n_queries"])
def merge_rows_kernel(
    # the plan
    indptr_ptr, cols_ptr,
    # partial results, and their lse in base 2
    partial_ptr, partial_lse_ptr,
    # outputs
    out_ptr, lse_ptr,
    # first line of the round; strides and n_queries: see selected_shapes.Rows; lines of all heads, selections per
    # batch, and query blocks of one
    first_line, out_strides, lse_strides, n_lines, n_heads, n_rows, n_queries,
    # compile time; ROWS of a query block, columns of out and of a partial result
    ROWS: tl.constexpr, V_DIM: tl.constexpr, DIM_V: tl.constexpr,
):
    """out and lse of one query block."""
    line = first_line + tl.program_id(0)
    if line < n_lines:
        axis, i_row = line // n_rows, line % n_rows
        first_slot = first_slot_of(indptr_ptr, first_line, n_rows)
        begin, end = tl.load(indptr_ptr + line + axis), tl.load(indptr_ptr + line + axis + 1)
        o_row, o_dim = tl.arange(0, ROWS), tl.arange(0, DIM_V)
        b_out = tl.zeros([ROWS, DIM_V], tl.float32)
        # finite, since -inf - (-inf) = nan, and below every score
        b_max, b_sum = tl.full([ROWS], -3.0e38, tl.float32), tl.zeros([ROWS], tl.float32)
        for i_entry in tl.range(begin, end, num_stages=3):
            is_used = tl.load(cols_ptr + i_entry) >= 0
            o_slot = (i_entry - first_slot) * ROWS + o_row
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
        is_query = i_row * ROWS + o_row < n_queries
        p_out = row_pointers(out_ptr, out_strides, axis // n_heads, axis % n_heads, i_row, o_row)
        b_out = (b_out / b_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(p_out[:, None] + o_dim[None, :], b_out, mask=is_query[:, None] & (o_dim < V_DIM)[None, :])
        p_lse = row_pointers(lse_ptr, lse_strides, axis // n_heads, axis % n_heads, i_row, o_row)
        tl.store(p_lse, tl.where(is_empty, float("-inf"), log_sum(b_max, b_sum)), mask=is_query)


@triton.jit(do_not_specialize=["first_line", "n_lines", "n_heads", "n_rows", "n_queries"])
def sum_rows_kernel(
    indptr_ptr, cols_ptr, partial_ptr, dq_ptr, first_line, dq_strides, n_lines, n_heads, n_rows, n_queries,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
):
    """dq of one query block.

    dq_strides, n_queries  see selected_shapes.Rows
    PARTS       partial results of each entry
    """
    line = first_line + tl.program_id(0)
    if line < n_lines:
        axis, i_row = line // n_rows, line % n_rows
        first_slot = first_slot_of(indptr_ptr, first_line, n_rows)
        begin, end = tl.load(indptr_ptr + line + axis), tl.load(indptr_ptr + line + axis + 1)
        o_row, o_dim = tl.arange(0, ROWS), tl.arange(0, DIM)
        b_dq = tl.zeros([ROWS, DIM], tl.float32)
        for i_part in tl.range(begin * PARTS, end * PARTS, num_stages=3):
            is_used = tl.load(cols_ptr + i_part // PARTS) >= 0
            o_slot = (i_part - first_slot * PARTS) * ROWS + o_row
            p_partial = partial_ptr + o_slot.to(tl.int64)[:, None] * DIM + o_dim[None, :]
            b_dq += tl.load(p_partial, mask=is_used & (o_dim >= 0)[None, :], other=0.0).to(tl.float32)
        p_dq = row_pointers(dq_ptr, dq_strides, axis // n_heads, axis % n_heads, i_row, o_row)
        m_dq = (i_row * ROWS + o_row < n_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
        tl.store(p_dq[:, None] + o_dim[None, :], b_dq.to(dq_ptr.dtype.element_ty), mask=m_dq)


@triton.jit
def items_of(list_items_ptr, i_list, first_list, end_list):
    """(first work item, one past the last) of a list; none if it is not one of the round's."""
    is_listed = (i_list >= first_list) & (i_list < end_list)
    return (
        tl.load(list_items_ptr + i_list, mask=is_listed, other=0),
        tl.load(list_items_ptr + i_list + 1, mask=is_listed, other=0),
    )


@triton.jit(do_not_specialize=["first_line", "first_list", "end_list", "kv_heads", "n_rows", "n_cols", "kv_len"])
def sum_keys_kernel(
    # the plan; partial sums of work items
    list_items_ptr, sums_ptr,
    # outputs, to which it ADDs
    dk_ptr, dv_ptr,
    # (batch, head, row) strides behind the integers of the round
    first_line, first_list, end_list, dk_strides, dv_strides, kv_heads, n_rows, n_cols, kv_len, scale,
    # compile time; GROUP: heads per KV head
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):
    """dk and dv of ROWS keys: the sum over the work items of their key block."""
    BLOCKS: tl.constexpr = KEYS // ROWS
    block, i_block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    kv_axis, i_col = block // n_cols, block % n_cols
    first_item = tl.load(list_items_ptr + first_list)
    o_row = i_block * ROWS + tl.arange(0, ROWS)
    o_dim, o_dim_v = tl.arange(0, DIM), tl.arange(0, DIM_V)
    o_kv = i_col * KEYS + o_row
    p_dk = head_base(dk_ptr, dk_strides, kv_axis // kv_heads, kv_axis % kv_heads)
    p_dk += o_kv.to(tl.int64)[:, None] * dk_strides[2] + o_dim[None, :]
    p_dv = head_base(dv_ptr, dv_strides, kv_axis // kv_heads, kv_axis % kv_heads)
    p_dv += o_kv.to(tl.int64)[:, None] * dv_strides[2] + o_dim_v[None, :]
    m_dk = (o_kv < kv_len)[:, None] & (o_dim < HEAD_DIM)[None, :]
    m_dv = (o_kv < kv_len)[:, None] & (o_dim_v < V_DIM)[None, :]
    # lists of the round begin with those of the head of its first line
    first_axis = first_line // n_rows
    n_items = 0
    for i_head in range(GROUP):
        i_list = first_list + (kv_axis * GROUP + i_head - first_axis) * n_cols + i_col
        begin, end = items_of(list_items_ptr, i_list, first_list, end_list)
        n_items += end - begin
    # skip sums that do not change
    if n_items > 0 or not ADD:
        b_dk, b_dv = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS, DIM_V], tl.float32)
        if ADD:
            b_dk, b_dv = tl.load(p_dk, mask=m_dk, other=0.0), tl.load(p_dv, mask=m_dv, other=0.0)
        for i_head in range(GROUP):
            i_list = first_list + (kv_axis * GROUP + i_head - first_axis) * n_cols + i_col
            begin, end = items_of(list_items_ptr, i_list, first_list, end_list)
            for i_item in tl.range(0, end - begin):
                p_sum = sums_ptr + (begin - first_item + i_item).to(tl.int64) * (KEYS * (DIM + DIM_V))
                b_dk += tl.load(p_sum + o_row[:, None] * DIM + o_dim[None, :]) * scale
                b_dv += tl.load(p_sum + KEYS * DIM + o_row[:, None] * DIM_V + o_dim_v[None, :])
        tl.store(p_dk, b_dk.to(dk_ptr.dtype.element_ty), mask=m_dk)
        tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), mask=m_dv)
# fmt: on


def _lines(shapes: SelectedShapes, layout: Rows) -> dict[str, int]:
    """Sizes of launches over the lines of a round."""
    sizes = {"n_lines": shapes.n_lines, "n_heads": layout.heads, "n_rows": shapes.n_rows}
    return {**sizes, "n_queries": layout.n_queries, "ROWS": shapes.query_rows}


def merge_rows(shapes: SelectedShapes, out: TensorSpec, dim_v: int) -> Launch:
    """The launch of merge_rows_kernel for a round. dim_v: columns of a partial result."""
    _, heads, q_len, v_dim = out.shape
    layout = rows_of(shapes, out.shape)
    strides = {"out_strides": layout.strides(out.strides), "lse_strides": layout.strides((heads * q_len, q_len, 1))}
    columns = {"V_DIM": v_dim, "DIM_V": dim_v}
    rest = {**_lines(shapes, layout), **strides, **columns, "num_warps": 4}
    return Launch(merge_rows_kernel, (shapes.round_lines,), rest)


def sum_rows(shapes: SelectedShapes, parts: int, dq: TensorSpec, dim: int) -> Launch:
    """The launch of sum_rows_kernel for a round.

    parts  partial results of each entry
    dim    columns of a partial result
    """
    layout = rows_of(shapes, dq.shape)
    rest = {**_lines(shapes, layout), "dq_strides": layout.strides(dq.strides), "HEAD_DIM": dq.shape[3], "DIM": dim}
    return Launch(sum_rows_kernel, (shapes.round_lines,), {**rest, "PARTS": parts, "num_warps": 4})


def sum_keys(
    shapes: SelectedShapes, group: int, dk: TensorSpec, dv: TensorSpec, padded_dims: Size, scale: float, *, adds: bool
) -> Launch:
    """The launch of sum_keys_kernel for a round.

    group        query heads per KV head
    dk, dv       specs of the outputs
    padded_dims  columns of the sums of work items, for dk and dv
    adds         to sums over rounds
    """
    n_programs = shapes.axes // group * shapes.n_cols * (shapes.keys // SUM_KEYS)
    _, kv_heads, kv_len, head_dim = dk.shape
    sizes = {"kv_heads": kv_heads, "n_rows": shapes.n_rows, "n_cols": shapes.n_cols, "kv_len": kv_len, "scale": scale}
    strides = {"dk_strides": dk.strides[:3], "dv_strides": dv.strides[:3]}
    columns = dict(zip(("HEAD_DIM", "V_DIM", "DIM", "DIM_V"), (head_dim, dv.shape[3], *padded_dims), strict=True))
    rest = {**sizes, **strides, **columns, "GROUP": group, "KEYS": shapes.keys, "ROWS": SUM_KEYS, "ADD": adds}
    return Launch(sum_keys_kernel, (n_programs,), {**rest, "num_warps": 4})
