"""Combining splits: out and lse of split tile rows by their lse; dk and dv of split tile columns, or dq, by sums.

Split s of a tile row is block (s * n_split_lines + i) * n_batch_heads + batch_head of a float32 workspace, where i
counts the split tile rows of a head: (SIDE, DIM_V) values of out, then SIDE of lse in base 2; for tile columns
(SIDE, DIM) values of dk, then (SIDE, DIM_V) of dv; for dq (SIDE, DIM). SIDE is 128 or 64, the tokens of a tile. Splits
are combined in order, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..arguments import Shape, strides_of_records
from ..schedule import MAX_SPLITS, Split
from .tile import NUMBER, head_base, log_sum, record_pointer

# rows per program of sum_splits_kernel
SUM_ROWS = 16


# fmt: off
@triton.jit
def combine_step(b_out, b_max, b_sum, b_split_max, b_split_sum, b_split):
    """Adds splits of a row, each (sum of 2^s, sum of 2^s v) / 2^split_max with s in base 2; b_max starts finite."""
    b_new_max = tl.maximum(b_max, tl.max(b_split_max, 0))
    b_weight = tl.math.exp2(b_split_max - b_new_max)
    b_decay = tl.math.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_split_sum * b_weight, 0)
    b_out = b_out * b_decay + tl.sum(b_split * b_weight[:, None], 0)
    return b_out, b_new_max, b_sum


@triton.jit
def combine_end(b_out, b_max, b_sum):
    """out and lse of the row; 0 and -inf without keys."""
    m_empty = b_sum == 0.0
    b_sum = tl.where(m_empty, 1.0, b_sum)
    return b_out / b_sum, tl.where(m_empty, float("-inf"), log_sum(b_max, b_sum))


@triton.jit(do_not_specialize=["n_heads", "n_batch_heads", "n_lines", "n_split_lines", "num_splits", "q_len"])
def combine_rows_kernel(
    # inputs; without records (records_ptr None) the last tile rows come first
    splits_ptr, records_ptr,
    # outputs
    out_ptr, lse_ptr,
    # strides in elements: (batch, head), (batch, head, row)
    record_strides, out_strides,
    # sizes, as in the kernel that wrote the splits
    n_heads, n_batch_heads, n_lines, n_split_lines, num_splits, q_len,
    # compile time; DIM_V: columns of a split
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, SPLITS: tl.constexpr, SIDE: tl.constexpr,
):
    # one query
    i_row = tl.program_id(0) % SIDE
    i_line = tl.program_id(0) // SIDE
    batch_head = i_line % n_batch_heads
    if records_ptr is not None:
        p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_line // n_batch_heads, 1)
        i_tile = tl.load(p_record + NUMBER)
    else:
        i_tile = n_lines - 1 - i_line // n_batch_heads
    q = i_tile * SIDE + i_row
    if q < q_len:
        o_split = tl.arange(0, SPLITS)
        BLOCK_V: tl.constexpr = triton.next_power_of_2(DIM_V)
        o_dim = tl.arange(0, BLOCK_V)
        m_split = o_split < num_splits
        p_split = splits_ptr + (o_split.to(tl.int64) * (n_split_lines * n_batch_heads) + i_line) * (SIDE * (DIM_V + 1))
        b_lse = tl.load(p_split + SIDE * DIM_V + i_row, mask=m_split, other=float("-inf"))
        # [SPLITS, BLOCK_V]
        m_value = m_split[:, None] if BLOCK_V == DIM_V else m_split[:, None] & (o_dim < DIM_V)[None, :]
        b_split = tl.load((p_split + i_row * DIM_V)[:, None] + o_dim[None, :], mask=m_value, other=0.0)
        b_none, b_max = tl.zeros([BLOCK_V], tl.float32), tl.full([1], -3.0e38, tl.float32)
        b_zero = tl.zeros([1], tl.float32)
        # splits are already divided by their sum
        b_out, b_max, b_sum = combine_step(b_none, b_max, b_zero, b_lse, 1.0, b_split)
        b_out, b_lse = combine_end(b_out, b_max, b_sum)
        p_head = head_base(out_ptr, out_strides, batch_head // n_heads, batch_head % n_heads)
        p_out = p_head + q.to(tl.int64) * out_strides[2]
        tl.store(p_out + o_dim, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < V_DIM)
        tl.store(lse_ptr + batch_head.to(tl.int64) * q_len + q + tl.arange(0, 1), b_lse)


@triton.jit(do_not_specialize=["n_heads", "n_batch_heads", "n_split_lines", "num_splits", "kv_len"])
def sum_splits_kernel(
    # inputs; without records (records_ptr None) the tile columns are in order, and the last tile rows come first
    splits_ptr, records_ptr,
    # outputs; dv_ptr None: sums dq of split tile rows, as if it were dk
    dk_ptr, dv_ptr,
    # strides in elements: (batch, head), (batch, head, row)
    record_strides, dk_strides, dv_strides,
    # sizes, as in the kernel that wrote the splits; n_heads counts KV heads
    n_heads, n_batch_heads, n_split_lines, num_splits, kv_len, scale,
    # compile time; GROUP: query heads per KV head; DIM, DIM_V: columns of a split
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr,
):
    BLOCKS: tl.constexpr = SIDE // ROWS
    COLS: tl.constexpr = DIM if dv_ptr is None else DIM + DIM_V
    o_row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    i_line = tl.program_id(0) // BLOCKS
    batch_head = i_line % n_batch_heads
    if records_ptr is not None:
        p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_line // n_batch_heads, GROUP)
        i_tile = tl.load(p_record + NUMBER)
    else:
        i_tile = i_line // n_batch_heads
        if dv_ptr is None:
            i_tile = tl.cdiv(kv_len, SIDE) - 1 - i_tile
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM)
    BLOCK_V: tl.constexpr = triton.next_power_of_2(DIM_V)
    o_k, o_v = tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    m_k = None if BLOCK == DIM else (o_k < DIM)[None, :]
    m_v = None if BLOCK_V == DIM_V else (o_v < DIM_V)[None, :]
    # [ROWS, BLOCK], [ROWS, BLOCK_V]
    b_dk, b_dv = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK_V], tl.float32)
    for i_split in tl.range(0, num_splits):
        i_block = (i_split * n_split_lines) * n_batch_heads + i_line
        p_split = splits_ptr + i_block.to(tl.int64) * (SIDE * COLS)
        b_dk += tl.load(p_split + o_row[:, None] * DIM + o_k[None, :], mask=m_k)
        if dv_ptr is not None:
            b_dv += tl.load(p_split + SIDE * DIM + o_row[:, None] * DIM_V + o_v[None, :], mask=m_v)
    o_kv = i_tile.to(tl.int64) * SIDE + o_row
    i_batch, i_head = batch_head // n_heads, batch_head % n_heads
    m_kv = (o_kv < kv_len)[:, None]
    p_dk = head_base(dk_ptr, dk_strides, i_batch, i_head) + o_kv[:, None] * dk_strides[2] + o_k[None, :]
    tl.store(p_dk, (b_dk * scale).to(dk_ptr.dtype.element_ty), mask=m_kv & (o_k < HEAD_DIM)[None, :])
    if dv_ptr is not None:
        p_dv = head_base(dv_ptr, dv_strides, i_batch, i_head) + o_kv[:, None] * dv_strides[2] + o_v[None, :]
        tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), mask=m_kv & (o_v < V_DIM)[None, :])
# fmt: on


def combine_rows(
    split: Split, record_shape: Shape | None, out: TensorSpec, rest: dict[str, Any], dim_v: int
) -> Launch | None:
    """The launch (splits, records, out, lse) that combines split tile rows; rest: arguments of the forward kernel."""
    if split.num_splits == 1:
        return None
    sizes = {
        name: rest[name] for name in ("n_heads", "n_batch_heads", "n_lines", "n_split_lines", "num_splits", "q_len")
    }
    dims = {"V_DIM": out.shape[3], "DIM_V": dim_v, "SPLITS": MAX_SPLITS, "SIDE": split.side}
    strides = {"record_strides": strides_of_records(record_shape), "out_strides": out.strides[:3]}
    n_programs = split.n_split_lines * rest["n_batch_heads"] * split.side
    return Launch(combine_rows_kernel, (n_programs,), {**sizes, **dims, **strides, "num_warps": 4})


def sum_splits(
    split: Split,
    record_shape: Shape | None,
    dk: TensorSpec,
    dv: TensorSpec | None,
    rest: dict[str, Any],
    dims: tuple[int, int],
) -> Launch | None:
    """The launch (splits, records, dk, dv) that sums split tile columns, or split tile rows.

    dv    None: the launch sums dq of split tile rows, as if it were dk
    rest  arguments of the kernel that wrote the splits
    dims  columns of dk and dv in a split
    """
    if split.num_splits == 1:
        return None
    sizes = {
        name: rest[name]
        for name in ("n_heads", "n_batch_heads", "n_split_lines", "num_splits", "kv_len", "scale", "GROUP")
    }
    v_dim, dv_strides = (0, (0, 0, 0)) if dv is None else (dv.shape[3], dv.strides[:3])
    fixed = {"HEAD_DIM": dk.shape[3], "V_DIM": v_dim, "DIM": dims[0], "DIM_V": dims[1], "ROWS": SUM_ROWS}
    strides = {
        "record_strides": strides_of_records(record_shape),
        "dk_strides": dk.strides[:3],
        "dv_strides": dv_strides,
    }
    n_programs = split.n_split_lines * rest["n_batch_heads"] * (split.side // SUM_ROWS)
    side = {"SIDE": split.side, "num_warps": 4}
    return Launch(sum_splits_kernel, (n_programs,), {**sizes, **fixed, **strides, **side})
