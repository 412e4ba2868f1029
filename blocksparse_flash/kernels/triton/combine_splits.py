"""How do the parts of a split line become one? Sums of dk and dv, out and lse merged by lse: in order, so bits repeat.

What part p of a line wrote stands in block (p * n_split + i) * n_axes + axis of a workspace, where i counts the lines of each
head that are split: 128 rows of `columns` float32 numbers, and behind those of out 128 numbers of lse, in base 2.

Knows: the records of a plan, pointers, strides. Does not know: which lines are split, how a part is computed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..arguments import TILE as TILE_SIDE
from ..arguments import Shape, walk_strides
from ..schedule import MAX_PARTS, Split
from .tile import TILE, head_base, log_sum, record_of

# rows of a program that adds up
SUM_ROWS = 16


# fmt: off
@triton.jit
def merge_step(b_out, b_max, b_sum, b_part_max, b_part_sum, b_part):
    """Some parts more of a row, each (sum of 2^s, sum of 2^s v [DIM_V]) / 2^part_max, s in base 2; b_max starts finite."""
    b_new_max = tl.maximum(b_max, tl.max(b_part_max, 0))
    b_weight = tl.math.exp2(b_part_max - b_new_max)
    b_decay = tl.math.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_part_sum * b_weight, 0)
    b_out = b_out * b_decay + tl.sum(b_part * b_weight[:, None], 0)
    return b_out, b_new_max, b_sum


@triton.jit
def merge_end(b_out, b_max, b_sum):
    """out and lse of the row; 0 and -inf where no part has met a key."""
    m_empty = b_sum == 0.0
    b_sum = tl.where(m_empty, 1.0, b_sum)
    return b_out / b_sum, tl.where(m_empty, float("-inf"), log_sum(b_max, b_sum))


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "n_split", "n_parts", "q_len"])
def merge_rows_kernel(
    # inputs; without a plan's records the last lines come first
    parts_ptr, items_ptr,
    # outputs
    out_ptr, lse_ptr,
    # strides in elements: (batch, head), (batch, head, row)
    items_strides, out_strides,
    # sizes, as the kernel had them that wrote the parts
    n_heads, n_axes, n_lines, n_split, n_parts, q_len,
    # compile time
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr,
):
    # one query
    i_row = tl.program_id(0) % TILE
    i_line = tl.program_id(0) // TILE
    i_axis = i_line % n_axes
    if items_ptr is not None:
        i_tile = tl.load(record_of(items_ptr, items_strides, i_axis, n_heads, i_line // n_axes, 1))
    else:
        i_tile = n_lines - 1 - i_line // n_axes
    q = i_tile * TILE + i_row
    if q < q_len:
        o_part = tl.arange(0, PARTS)
        o_dim = tl.arange(0, DIM_V)
        m_part = o_part < n_parts
        p_part = parts_ptr + (o_part.to(tl.int64) * (n_split * n_axes) + i_line) * (TILE * (DIM_V + 1))
        b_lse = tl.load(p_part + TILE * DIM_V + i_row, mask=m_part, other=float("-inf"))
        # [PARTS, DIM_V]
        b_part = tl.load((p_part + i_row * DIM_V)[:, None] + o_dim[None, :], mask=m_part[:, None], other=0.0)
        b_none, b_max, b_zero = tl.zeros([DIM_V], tl.float32), tl.full([1], -3.0e38, tl.float32), tl.zeros([1], tl.float32)
        # what is divided by its sum has the sum 1
        b_out, b_max, b_sum = merge_step(b_none, b_max, b_zero, b_lse, 1.0, b_part)
        b_out, b_lse = merge_end(b_out, b_max, b_sum)
        p_out = head_base(out_ptr, out_strides, i_axis // n_heads, i_axis % n_heads) + q.to(tl.int64) * out_strides[2]
        tl.store(p_out + o_dim, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < V_DIM)
        tl.store(lse_ptr + i_axis.to(tl.int64) * q_len + q + tl.arange(0, 1), b_lse)


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_split", "n_parts", "kv_len"])
def sum_cols_kernel(
    # inputs; without a plan's records the lines are in order
    parts_ptr, items_ptr,
    # outputs
    dk_ptr, dv_ptr,
    # strides in elements: (batch, head), (batch, head, row)
    items_strides, dk_strides, dv_strides,
    # sizes, as the kernel had them that wrote the parts: n_heads key heads
    n_heads, n_axes, n_split, n_parts, kv_len, scale,
    # compile time: query heads of a key head; a row of a part is DIM columns of dk and DIM_V of dv
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = TILE // ROWS
    o_row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    i_line = tl.program_id(0) // BLOCKS
    i_axis = i_line % n_axes
    if items_ptr is not None:
        i_tile = tl.load(record_of(items_ptr, items_strides, i_axis, n_heads, i_line // n_axes, GROUP))
    else:
        i_tile = i_line // n_axes
    o_k, o_v = tl.arange(0, DIM), tl.arange(0, DIM_V)
    # [ROWS, DIM], [ROWS, DIM_V]
    b_dk, b_dv = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS, DIM_V], tl.float32)
    for i_part in tl.range(0, n_parts):
        p_part = parts_ptr + ((i_part * n_split) * n_axes + i_line).to(tl.int64) * (TILE * (DIM + DIM_V))
        b_dk += tl.load(p_part + o_row[:, None] * DIM + o_k[None, :])
        b_dv += tl.load(p_part + TILE * DIM + o_row[:, None] * DIM_V + o_v[None, :])
    o_kv = i_tile.to(tl.int64) * TILE + o_row
    i_batch, i_head = i_axis // n_heads, i_axis % n_heads
    m_kv = (o_kv < kv_len)[:, None]
    p_dk = head_base(dk_ptr, dk_strides, i_batch, i_head) + o_kv[:, None] * dk_strides[2] + o_k[None, :]
    p_dv = head_base(dv_ptr, dv_strides, i_batch, i_head) + o_kv[:, None] * dv_strides[2] + o_v[None, :]
    tl.store(p_dk, (b_dk * scale).to(dk_ptr.dtype.element_ty), mask=m_kv & (o_k < HEAD_DIM)[None, :])
    tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), mask=m_kv & (o_v < V_DIM)[None, :])
# fmt: on


def merge_rows(split: Split, items: Shape | None, out: TensorSpec, rest: dict[str, Any], dim_v: int) -> Launch | None:
    """The launch, on (parts, items, out, lse), that merges the parts of rows; rest: the arguments of the kernel before it."""
    if split.parts == 1:
        return None
    sizes = {name: rest[name] for name in ("n_heads", "n_axes", "n_lines", "n_split", "n_parts", "q_len")}
    dims = {"V_DIM": out.shape[3], "DIM_V": dim_v, "PARTS": MAX_PARTS}
    strides = {"items_strides": walk_strides(items), "out_strides": out.strides[:3]}
    n_programs = split.n_lines * rest["n_axes"] * TILE_SIDE
    return Launch(merge_rows_kernel, (n_programs,), {**sizes, **dims, **strides, "num_warps": 4})


def sum_cols(
    split: Split, items: Shape | None, dk: TensorSpec, dv: TensorSpec, rest: dict[str, Any], dims: tuple[int, int]
) -> Launch | None:
    """The launch, on (parts, items, dk, dv), that adds up the parts of columns; dims: columns of dk and dv in a part."""
    if split.parts == 1:
        return None
    sizes = {name: rest[name] for name in ("n_heads", "n_axes", "n_split", "n_parts", "kv_len", "scale", "GROUP")}
    fixed = {"HEAD_DIM": dk.shape[3], "V_DIM": dv.shape[3], "DIM": dims[0], "DIM_V": dims[1], "ROWS": SUM_ROWS}
    strides = {"items_strides": walk_strides(items), "dk_strides": dk.strides[:3], "dv_strides": dv.strides[:3]}
    n_programs = split.n_lines * rest["n_axes"] * (TILE_SIDE // SUM_ROWS)
    return Launch(sum_cols_kernel, (n_programs,), {**sizes, **fixed, **strides, "num_warps": 4})
