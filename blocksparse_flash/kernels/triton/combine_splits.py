"""Combining splits: out and lse of split tile rows by their lse; dk and dv of split tile columns, or dq, by sums.

Split p of a tile row is block (p * n_split_lines + i) * n_batch_heads + batch_head of a float32 workspace, where i
counts the split tile rows of a head. It has (SIDE, DIM_V) values of out, then SIDE of lse in base 2. For tile columns,
it has (SIDE, DIM) values of dk, (SIDE, DIM_V) of dv, and their tails (SIDE, TAIL) and (SIDE, TAIL_V), the last third
of 96 or 192 columns. For dq, it has (SIDE, DIM) values. SIDE is 128 or 64, the tokens of a tile. Splits are combined in
order, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..arguments import Shape, strides_of_records
from ..schedule import MAX_PARTS, Split
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
    # compile time
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
        o_dim = tl.arange(0, DIM_V)
        m_split = o_split < num_splits
        p_split = splits_ptr + (o_split.to(tl.int64) * (n_split_lines * n_batch_heads) + i_line) * (SIDE * (DIM_V + 1))
        b_lse = tl.load(p_split + SIDE * DIM_V + i_row, mask=m_split, other=float("-inf"))
        # [SPLITS, DIM_V]
        b_split = tl.load((p_split + i_row * DIM_V)[:, None] + o_dim[None, :], mask=m_split[:, None], other=0.0)
        b_none, b_max = tl.zeros([DIM_V], tl.float32), tl.full([1], -3.0e38, tl.float32)
        b_zero = tl.zeros([1], tl.float32)
        # splits are already divided by their sum
        b_out, b_max, b_sum = combine_step(b_none, b_max, b_zero, b_lse, 1.0, b_split)
        b_out, b_lse = combine_end(b_out, b_max, b_sum)
        p_head = head_base(out_ptr, out_strides, batch_head // n_heads, batch_head % n_heads)
        p_out = p_head + q.to(tl.int64) * out_strides[2]
        tl.store(p_out + o_dim, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < V_DIM)
        tl.store(lse_ptr + batch_head.to(tl.int64) * q_len + q + tl.arange(0, 1), b_lse)


@triton.jit
def sum_columns(
    p_splits, p_out, block_stride, num_splits, o_row, m_row, scale,
    FIRST: tl.constexpr, COLS: tl.constexpr, LIMIT: tl.constexpr,
):
    """Stores columns FIRST .. FIRST + COLS - 1 of scale * the sum of the splits.

    p_splits  the columns in the first split, [SIDE, COLS]
    p_out     [ROWS, 1], the output's rows, which have LIMIT columns
    """
    o_col = tl.arange(0, COLS)
    b_sum = tl.zeros([o_row.shape[0], COLS], tl.float32)
    for i_split in tl.range(0, num_splits):
        p_split = p_splits + i_split * block_stride
        b_sum += tl.load(p_split + o_row[:, None] * COLS + o_col[None, :])
    m_col = (FIRST + o_col < LIMIT)[None, :]
    tl.store(p_out + (FIRST + o_col)[None, :], (b_sum * scale).to(p_out.dtype.element_ty), mask=m_row & m_col)


@triton.jit(do_not_specialize=["n_heads", "n_batch_heads", "n_split_lines", "num_splits", "kv_len"])
def sum_splits_kernel(
    # inputs; without records (records_ptr None) the tile columns are in order
    splits_ptr, records_ptr,
    # outputs; dv_ptr None: sums dq of split tile rows, as if it were dk
    dk_ptr, dv_ptr,
    # strides in elements: (batch, head), (batch, head, row)
    record_strides, dk_strides, dv_strides,
    # sizes, as in the kernel that wrote the splits; n_heads counts KV heads
    n_heads, n_batch_heads, n_split_lines, num_splits, kv_len, scale,
    # compile time; GROUP: query heads per KV head; TAIL, TAIL_V: columns beside DIM and DIM_V
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    TAIL: tl.constexpr, TAIL_V: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
):
    BLOCKS: tl.constexpr = SIDE // ROWS
    # DIM_V and TAIL_V are 0 without dv
    COLS: tl.constexpr = DIM + DIM_V + TAIL + TAIL_V
    o_row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    i_line = tl.program_id(0) // BLOCKS
    batch_head = i_line % n_batch_heads
    if records_ptr is not None:
        p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_line // n_batch_heads, GROUP)
        i_tile = tl.load(p_record + NUMBER)
    else:
        i_tile = i_line // n_batch_heads
    o_kv = i_tile.to(tl.int64) * SIDE + o_row
    i_batch, i_head = batch_head // n_heads, batch_head % n_heads
    m_kv = (o_kv < kv_len)[:, None]
    block_stride = (n_split_lines * n_batch_heads).to(tl.int64) * (SIDE * COLS)
    p_dk_splits = splits_ptr + i_line.to(tl.int64) * (SIDE * COLS)
    p_dv_splits = p_dk_splits + SIDE * DIM
    p_tail_splits = p_dk_splits + SIDE * (DIM + DIM_V)
    p_dk = head_base(dk_ptr, dk_strides, i_batch, i_head) + o_kv[:, None] * dk_strides[2]
    sum_columns(p_dk_splits, p_dk, block_stride, num_splits, o_row, m_kv, scale, 0, DIM, HEAD_DIM)
    if TAIL > 0:
        sum_columns(p_tail_splits, p_dk, block_stride, num_splits, o_row, m_kv, scale, DIM, TAIL, HEAD_DIM)
    if dv_ptr is not None:
        p_dv = head_base(dv_ptr, dv_strides, i_batch, i_head) + o_kv[:, None] * dv_strides[2]
        sum_columns(p_dv_splits, p_dv, block_stride, num_splits, o_row, m_kv, 1.0, 0, DIM_V, V_DIM)
        if TAIL_V > 0:
            p_tail_splits += SIDE * TAIL
            sum_columns(p_tail_splits, p_dv, block_stride, num_splits, o_row, m_kv, 1.0, DIM_V, TAIL_V, V_DIM)
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
    dims = {"V_DIM": out.shape[3], "DIM_V": dim_v, "SPLITS": MAX_PARTS, "SIDE": split.side}
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
    dims  columns of dk and dv in a split, or (columns of dq, 0) without dv; the last third of 96 or 192 is a tail
    """
    if split.num_splits == 1:
        return None
    sizes = {
        name: rest[name]
        for name in ("n_heads", "n_batch_heads", "n_split_lines", "num_splits", "kv_len", "scale", "GROUP")
    }
    v_dim, dv_strides = (0, (0, 0, 0)) if dv is None else (dv.shape[3], dv.strides[:3])
    tail, tail_v = (dim // 3 if dim % 3 == 0 else 0 for dim in dims)
    fixed = {
        "HEAD_DIM": dk.shape[3],
        "V_DIM": v_dim,
        "DIM": dims[0] - tail,
        "DIM_V": dims[1] - tail_v,
        "TAIL": tail,
        "TAIL_V": tail_v,
        "ROWS": SUM_ROWS,
    }
    strides = {
        "record_strides": strides_of_records(record_shape),
        "dk_strides": dk.strides[:3],
        "dv_strides": dv_strides,
    }
    n_programs = split.n_split_lines * rest["n_batch_heads"] * (split.side // SUM_ROWS)
    side = {"SIDE": split.side, "num_warps": 4}
    return Launch(sum_splits_kernel, (n_programs,), {**sizes, **fixed, **strides, **side})
