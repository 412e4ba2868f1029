"""Backward preprocess: lse in base 2, delta = rowsum(dout * out) - dlse, and zeroed accumulators."""

from __future__ import annotations

import triton
import triton.language as tl

from ... import philox, plan_format
from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpec
from ..schedule import padded_dim
from .tile import LOG2_E, head_base

# queries per program; 64 spill on sm100
PREPROCESS_ROWS = 32
# the backward kernels of this backend read lse and delta of a multiple of this many queries
PADDED_TO = tl.constexpr(plan_format.TILE)


# fmt: off
@triton.jit(do_not_specialize=["n_heads", "q_len", "n_padded"])
def preprocess_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse_delta_pairs_ptr, lse_delta_rows_ptr, cleared_ptr, tile_counter_ptr,
    out_strides, dout_strides, n_heads, q_len, n_padded, kept_share,
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, CLEARED: tl.constexpr, ROWS: tl.constexpr,
):
    """lse and delta of each query, padded to n_padded queries per head so that no backward step needs bounds checks.

    lse    in base 2; +inf past q_len and for a row without keys, so that p is 0
    delta  kept_share * (rowsum(dout * out) - dlse), ignoring dlse for a row without keys; 0 past q_len. kept_share, 1
           without dropout, is that of philox.py: the kernels divide the sums of p (kept dp - delta) by it

    lse_delta_pairs_ptr    (batch * heads, n_padded, 2): lse and delta interleaved, or None
    lse_delta_rows_ptr  (2, batch * heads, n_padded): all lse, then all delta, or None
    cleared_ptr  (batch * heads, n_padded, CLEARED) float32, set to 0, or None
    tile_counter_ptr  one int32, set to 0, or None
    """
    # one axis: CUDA limits the others to 65,535 programs
    n_blocks = n_padded // ROWS
    batch_head = tl.program_id(0) // n_blocks
    if tile_counter_ptr is not None:
        tl.store(tile_counter_ptr, 0, mask=tl.program_id(0) == 0)
    o_q = tl.program_id(0) % n_blocks * ROWS + tl.arange(0, ROWS)
    if cleared_ptr is not None:
        # the largest power of two that divides CLEARED
        STEP: tl.constexpr = CLEARED & -CLEARED
        o_cleared = tl.arange(0, STEP)
        p_cleared = cleared_ptr + (batch_head.to(tl.int64) * n_padded + o_q.to(tl.int64)[:, None]) * CLEARED
        for first in tl.static_range(0, CLEARED, STEP):
            tl.store(p_cleared + (first + o_cleared)[None, :], tl.zeros([ROWS, STEP], tl.float32))
    o_dim = tl.arange(0, DIM_V)
    m_q = o_q < q_len
    m_tile = m_q[:, None] & (o_dim < V_DIM)[None, :]
    # [ROWS, DIM_V]
    i_batch, i_head = batch_head // n_heads, batch_head % n_heads
    p_out = head_base(out_ptr, out_strides, i_batch, i_head)
    p_out += o_q.to(tl.int64)[:, None] * out_strides[2] + o_dim[None, :]
    p_dout = head_base(dout_ptr, dout_strides, i_batch, i_head)
    p_dout += o_q.to(tl.int64)[:, None] * dout_strides[2] + o_dim[None, :]
    b_out = tl.load(p_out, mask=m_tile, other=0.0).to(tl.float32)
    b_dout = tl.load(p_dout, mask=m_tile, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_out * b_dout, 1)
    o_row = batch_head.to(tl.int64) * q_len + o_q
    b_lse = tl.load(lse_ptr + o_row, mask=m_q, other=float("-inf"))
    if dlse_ptr is not None:
        # the lse of a row without keys is constant: its gradient is ignored
        b_dlse = tl.load(dlse_ptr + o_row, mask=m_q, other=0.0)
        b_delta -= tl.where(b_lse == float("-inf"), 0.0, b_dlse)
    b_delta *= kept_share
    o_row = batch_head.to(tl.int64) * n_padded + o_q
    m_padded = o_q < n_padded
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)
    if lse_delta_pairs_ptr is not None:
        # [ROWS, 2]
        o_pair = o_row[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(lse_delta_pairs_ptr + o_pair, tl.join(b_lse, b_delta), mask=m_padded[:, None])
    if lse_delta_rows_ptr is not None:
        tl.store(lse_delta_rows_ptr + o_row, b_lse, mask=m_padded)
        o_row += tl.num_programs(0).to(tl.int64) * ROWS
        tl.store(lse_delta_rows_ptr + o_row, b_delta, mask=m_padded)


@triton.jit
def load_lse_delta(lse_delta_pairs_ptr, batch_head, q_start, n_padded, ROWS: tl.constexpr):
    """lse in base 2 and delta of ROWS queries: [ROWS] each.

    One load of interleaved pairs: two loads smaller than the number of threads would get a layout in which many threads
    hold the same value (Triton 3.6: 70 copies per thread instead of 8).
    """
    o_row = batch_head.to(tl.int64) * n_padded + q_start + tl.arange(0, ROWS)
    return tl.split(tl.load(lse_delta_pairs_ptr + o_row[:, None] * 2 + tl.arange(0, 2)[None, :]))
# fmt: on


def preprocess_launch(
    dout: TensorSpec, out_strides: tuple[int, ...] | None, n_padded: int, cleared: int = 0, dropout_p: float = 0.0
) -> Launch:
    """The launch of preprocess_kernel.

    dout         spec of the gradient of out
    out_strides  (batch, head, row) strides of out, whose last stride is 1
    cleared      values per query to set to 0
    """
    assert out_strides is not None
    batch, heads, q_len, v_dim = dout.shape
    return Launch(
        preprocess_kernel,
        (n_padded // PREPROCESS_ROWS * batch * heads,),
        {
            "out_strides": out_strides,
            "dout_strides": dout.strides[:3],
            "n_heads": heads,
            "q_len": q_len,
            "n_padded": n_padded,
            "kept_share": philox.kept_share(dropout_p),
            "V_DIM": v_dim,
            "DIM_V": padded_dim("triton", v_dim),
            "CLEARED": cleared,
            "ROWS": PREPROCESS_ROWS,
            "num_warps": 4,
        },
    )
