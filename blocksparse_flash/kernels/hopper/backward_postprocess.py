"""Backward postprocess: a float32 sum of dQ, or of dK or dV over a group, scaled, converted and put in row order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec

# a block of the sum has the accumulators of 64 rows x 32 columns, 16 rows per warp: see in_register_order
SUM_ROWS = gl.constexpr(64)
SUM_COLS = gl.constexpr(32)


@gluon.constexpr_function
def dq_layout():
    """Layout of [64, 32] values in which each thread stores 8 neighbors of a row, from two of its warp's 16 rows."""
    in_thread = [[0, 1], [0, 2], [0, 4], [8, 0]]
    of_lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(in_thread, of_lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.jit(do_not_specialize=["n_heads", "n_padded", "q_len", "n_octets", "batch_octets", "head_octets", "row_octets"])
def postprocess_kernel(
    dq_sum_ptr, dq_ptr, scale, n_heads, n_padded, q_len, n_octets, batch_octets, head_octets, row_octets,
    DIM: gl.constexpr,
):  # fmt: skip
    """One block of dQ per program of four warps.

    dq_sum_ptr  (batch * heads, n_padded, DIM) float32, in the order of `in_register_order`
    dq_ptr      (batch, heads, q_len, 8 * n_octets); its strides are 8 * batch_octets, 8 * head_octets and
                8 * row_octets elements, so that the compiler sees that rows are aligned
    """
    ROW_BLOCKS: gl.constexpr = DIM // SUM_COLS
    i_block = gl.program_id(0)
    i_row = i_block // ROW_BLOCKS * SUM_ROWS
    batch_head, q_start = i_row // n_padded, i_row % n_padded
    o_value = gl.arange(0, SUM_ROWS * SUM_COLS, layout=gl.BlockedLayout([4], [32], [4], [0]))
    b_sum = gl.load(dq_sum_ptr + i_block.to(gl.int64) * (SUM_ROWS * SUM_COLS) + o_value)
    # inverse of in_register_order: warp, 8 columns, row, thread, half of the 16 rows, pair
    b_dq = (b_sum * scale).to(dq_ptr.dtype.element_ty).reshape([4, 4, 8, 4, 2, 2])
    b_dq = b_dq.permute((0, 4, 2, 1, 3, 5)).reshape([SUM_ROWS, SUM_COLS])
    layout: gl.constexpr = dq_layout()
    o_row = gl.arange(0, SUM_ROWS, layout=gl.SliceLayout(1, layout))
    o_dim = i_block % ROW_BLOCKS * SUM_COLS + gl.arange(0, SUM_COLS, layout=gl.SliceLayout(0, layout))
    o_first = (batch_head // n_heads).to(gl.int64) * batch_octets + (batch_head % n_heads).to(gl.int64) * head_octets
    p_dq = dq_ptr + (o_first + q_start.to(gl.int64) * row_octets) * 8
    p_dq = p_dq + gl.expand_dims(o_row * (8 * row_octets), 1) + gl.expand_dims(o_dim, 0)
    m_dq = gl.expand_dims(o_row < q_len - q_start, 1) & gl.expand_dims(o_dim < 8 * n_octets, 0)
    gl.store(p_dq, gl.convert_layout(b_dq, layout), mask=m_dq)


def postprocess_launch(dq_sum: TensorSpec, dq: TensorSpec, scale: float) -> Launch:
    """The launch of postprocess_kernel; its arguments are dq_sum and dq."""
    n_batch_heads, n_padded, dim = dq_sum.shape
    n_blocks = n_batch_heads * n_padded // SUM_ROWS.value * (dim // SUM_COLS.value)
    names = "batch_octets", "head_octets", "row_octets"
    octets = {name: stride // 8 for name, stride in zip(names, dq.strides[:3], strict=True)}
    sizes = {"n_heads": dq.shape[1], "n_padded": n_padded, "q_len": dq.shape[2], "n_octets": dq.shape[3] // 8, **octets}
    return Launch(postprocess_kernel, (n_blocks,), {"scale": scale, **sizes, "DIM": dim, "num_warps": 4})
