"""How does the portable Triton backward run? dq, dk and dv from out, lse and their gradients; sm80 and later.

With p = exp(scale q k^T - lse), dp = dout v^T and delta = rowsum(dout * out) - dlse:
    ds = p * (dp - delta)      dv = p^T dout      dk = scale ds^T q      dq = scale ds k
Three launches: delta; dk and dv, one program a block of keys of a key head, walking the columns of the plan (for each
query head of the group); dq, one program a block of queries, walking the rows. No atomics, no workspace beyond delta
(batch, heads, q_len) float32, and the same bits every time. Rows without keys (lse -inf) give zeros.

Knows: a plan's tensors, strides, launch configurations. Does not know: layouts, autograd, how a backend is chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import (
    Config,
    can_describe,
    device_limits,
    dot_precision,
    dropout,
    padded_dim,
    references,
    score_scale,
    walk,
)
from .tile import (
    LOG2_E,
    TILE,
    attending_pairs,
    dense_keys,
    dense_queries,
    find_line,
    find_record,
    head_base,
    kept_pairs,
    load_tile,
    product,
    store_tile,
    tile_start,
    with_sign,
)


def config_keys(dim: int, element_size: int, *, tma: bool, shared_memory: int) -> Config:
    """The launch table of dk and dv: block_kv is owned, block_q walked.

    H200, (1, 16, 16384, 128) bf16 dense, both launches, TFLOP/s of five products: tma 64x64 4 warps 2 stages (two
    programs a multiprocessor) 407; pointers 64x128 8 warps 2 stages 369. head_dim 64: tma 383, pointers 319.
    """
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(32, 64, 4, 2) if dim <= 64 else Config(32, 32, 4, 1)
    if dim <= 64:
        return Config(64, 64, 4, 3) if tma else Config(64, 128, 8, 2)
    if dim <= 128:
        return Config(64, 64, 4, 2) if tma else (Config(32, 64, 4, 2) if small else Config(64, 128, 8, 2))
    return Config(32, 32, 4, 1) if small else Config(32, 64, 8, 2)


def config_queries(dim: int, element_size: int, *, tma: bool, shared_memory: int) -> Config:
    """The launch table of dq: block_q is owned, block_kv walked. Figures at `config_keys`."""
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(64, 32, 4, 2) if dim <= 64 else Config(32, 32, 4, 1)
    if dim <= 64:
        return Config(128, 64, 4, 2) if tma else Config(128, 64, 8, 3)
    if dim <= 128:
        return Config(64, 64, 4, 2) if tma else (Config(64, 32, 4, 2) if small else Config(128, 64, 8, 2))
    return Config(32, 32, 4, 1) if small else Config(64, 32, 8, 2)


# fmt: off
@triton.jit(do_not_specialize=["n_heads", "q_len"])
def delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, dout_strides, n_heads, q_len,
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr,
):
    """delta = rowsum(dout * out) - dlse; out, dlse and delta are contiguous."""
    i_axis = tl.program_id(1)
    o_q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_dim = tl.arange(0, DIM_V)
    m_q = o_q < q_len
    m_tile = m_q[:, None] & (o_dim < V_DIM)[None, :]
    # [ROWS, DIM_V]
    p_out = out_ptr + i_axis.to(tl.int64) * q_len * V_DIM + o_q.to(tl.int64)[:, None] * V_DIM + o_dim[None, :]
    p_dout = head_base(dout_ptr, dout_strides, i_axis // n_heads, i_axis % n_heads)
    p_dout += o_q.to(tl.int64)[:, None] * dout_strides[2] + o_dim[None, :]
    b_out = tl.load(p_out, mask=m_tile, other=0.0).to(tl.float32)
    b_dout = tl.load(p_dout, mask=m_tile, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_out * b_dout, 1)
    o_line = i_axis.to(tl.int64) * q_len + o_q
    if dlse_ptr is not None:
        b_delta -= tl.load(dlse_ptr + o_line, mask=m_q, other=0.0)
    tl.store(delta_ptr + o_line, b_delta, mask=m_q)


@triton.jit
def load_statistics(lse_ptr, delta_ptr, i_axis, q_start, q_len, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """lse in base 2, +inf for a row without keys (so that p is 0), and delta: [ROWS] each."""
    o_q = q_start + tl.arange(0, ROWS)
    p_line = i_axis.to(tl.int64) * q_len + o_q
    if BOUNDED:
        b_lse = tl.load(lse_ptr + p_line, mask=o_q < q_len, other=float("inf"))
        b_delta = tl.load(delta_ptr + p_line, mask=o_q < q_len, other=0.0)
        b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    else:
        b_lse = tl.load(lse_ptr + p_line)
        b_delta = tl.load(delta_ptr + p_line)
    return b_lse * LOG2_E, b_delta


@triton.jit
def collect_keys(
    b_k, b_v, b_dk, b_dv,
    q_ref, dout_ref, lse_ptr, delta_ptr, indices_ptr, ids_ptr, words_ptr, seed_ptr,
    q_strides, dout_strides,
    i_batch, i_head, i_axis, kv_start, first_step, n_range, last_step, n_steps, q_len, kv_len, limit, scale_log2,
    threshold, keep_scale,
    HAS_LAYOUT: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, SIGN: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """Add n_steps steps of BLOCK_Q queries of one head to dk and dv: the partial or the full tiles of a column.

    Without a layout the steps are first_step .. first_step + n_range - 1, then last_step. A key past `limit` was
    zeroed when it was loaded and its dk and dv are dropped when they are stored, so full tiles need no mask.
    """
    STEPS: tl.constexpr = TILE // BLOCK_Q
    q_next = first_step * BLOCK_Q
    i_bitmask_next = 0
    if HAS_LAYOUT:
        q_next = tile_start(indices_ptr, 0, BLOCK_Q, STEPS)
        if MASKED:
            i_bitmask_next = tl.load(ids_ptr)
    elif MASKED:
        q_next = tl.where(n_range > 0, q_next, last_step * BLOCK_Q)
    for i_step in tl.range(0, n_steps):
        q_start = q_next
        i_bitmask = i_bitmask_next
        if HAS_LAYOUT:
            q_next = tile_start(indices_ptr, i_step + 1, BLOCK_Q, STEPS)
            if MASKED:
                i_bitmask_next = tl.load(ids_ptr + (i_step + 1) // STEPS)
        elif MASKED:
            q_next = tl.where(i_step + 1 < n_range, q_start + BLOCK_Q, last_step * BLOCK_Q)
        else:
            q_next = q_start + BLOCK_Q
        # [BLOCK_Q, DIM]
        b_q = load_tile(q_ref, q_strides, i_batch, i_head, q_start, q_len, HEAD_DIM, BLOCK_Q, DIM, TMA, MASKED, False)
        b_q = with_sign(b_q, SIGN)
        b_lse, b_delta = load_statistics(lse_ptr, delta_ptr, i_axis, q_start, q_len, BLOCK_Q, MASKED)
        # [BLOCK_KV, BLOCK_Q]
        b_zero = tl.zeros([BLOCK_KV, BLOCK_Q], tl.float32)
        b_scores = product(b_k, tl.trans(b_q), b_zero, PRECISION)
        b_p = tl.math.exp2(b_scores * scale_log2 - b_lse[None, :])
        if MASKED:
            m_pairs = attending_pairs(
                words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                HAS_LAYOUT, True, CAUSAL, False, BLOCK_Q, BLOCK_KV, True,
            )
            b_p = tl.where(m_pairs, b_p, 0.0)
        # [BLOCK_Q, DIM_V]
        b_dout = load_tile(
            dout_ref, dout_strides, i_batch, i_head, q_start, q_len, V_DIM, BLOCK_Q, DIM_V, TMA, MASKED, False
        )
        if DROPOUT:
            m_kept = tl.trans(kept_pairs(seed_ptr, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV))
            b_dv = product(tl.where(m_kept, b_p * keep_scale, 0.0).to(b_dout.dtype), b_dout, b_dv, PRECISION)
            b_dp = product(b_v, tl.trans(b_dout), b_zero, PRECISION)
            b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
        else:
            b_dv = product(b_p.to(b_dout.dtype), b_dout, b_dv, PRECISION)
            b_dp = product(b_v, tl.trans(b_dout), b_zero, PRECISION)
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_dk = product(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "threshold"])
def keys_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, lse_ptr, delta_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr,
    # outputs, contiguous
    dk_ptr, dv_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, dout_strides, items_strides,
    # sizes: n_heads key heads, n_axes = batch * n_heads, n_lines = tile columns (blocks of keys without a layout)
    n_heads, n_axes, n_lines, q_len, kv_len, scale_log2, scale, threshold, keep_scale,
    # compile time
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    HAS_LAYOUT: tl.constexpr = items_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = TILE // BLOCK_Q
    if HAS_LAYOUT:
        i_axis, p_record, i_part = find_record(
            items_ptr, items_strides, tl.program_id(0), n_lines, n_heads, n_axes, TILE // BLOCK_KV, GROUP
        )
        kv_start = tl.load(p_record) * TILE + i_part * BLOCK_KV
    else:
        i_axis = tl.program_id(0) // n_lines
        kv_start = tl.program_id(0) % n_lines * BLOCK_KV
    i_batch = i_axis // n_heads
    i_kv_head = i_axis % n_heads
    limit = kv_len
    if LIMITED:
        limit = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)

    b_k = load_tile(k_ref, k_strides, i_batch, i_kv_head, kv_start, limit, HEAD_DIM, BLOCK_KV, DIM, TMA, True, LIMITED)
    b_v = load_tile(v_ref, v_strides, i_batch, i_kv_head, kv_start, limit, V_DIM, BLOCK_KV, DIM_V, TMA, True, LIMITED)
    b_dk = tl.zeros([BLOCK_KV, DIM], tl.float32)
    b_dv = tl.zeros([BLOCK_KV, DIM_V], tl.float32)

    for i_member in tl.range(0, GROUP):
        i_head = i_kv_head * GROUP + i_member
        p_partial = indices_ptr
        p_full = indices_ptr
        p_ids = ids_ptr
        if HAS_LAYOUT:
            p_member = p_record
            if GROUP > 1:
                # heads of a group may have layouts, and so launch orders, of their own
                p_member = find_line(items_ptr, items_strides, i_batch, i_head, kv_start // TILE)
            n_partial = tl.load(p_member + 2)
            n_full = tl.load(p_member + 3)
            p_partial = indices_ptr + tl.load(p_member + 1)
            p_full = p_partial + n_partial
            p_ids = ids_ptr + tl.load(p_member + 4)
            n_partial = n_partial * STEPS
            n_full = n_full * STEPS
            first = 0
            full = 0
            end = 0
            n_range = n_partial
        else:
            first, full, end = dense_queries(kv_start, q_len, kv_len, CAUSAL, BLOCK_Q, BLOCK_KV)
            n_range = full - first
            n_partial = n_range + (end * BLOCK_Q < q_len).to(tl.int32)
            n_full = end - full
        i_q_axis = i_batch * n_heads * GROUP + i_head
        b_dk, b_dv = collect_keys(
            b_k, b_v, b_dk, b_dv, q_ref, dout_ref, lse_ptr, delta_ptr, p_partial, p_ids, words_ptr, seed_ptr,
            q_strides, dout_strides, i_batch, i_head, i_q_axis, kv_start, first, n_range, end, n_partial,
            q_len, kv_len, limit, scale_log2, threshold, keep_scale,
            HAS_LAYOUT, True, CAUSAL, SIGN, DROPOUT, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, BLOCK_Q, BLOCK_KV,
        )
        b_dk, b_dv = collect_keys(
            b_k, b_v, b_dk, b_dv, q_ref, dout_ref, lse_ptr, delta_ptr, p_full, p_ids, words_ptr, seed_ptr,
            q_strides, dout_strides, i_batch, i_head, i_q_axis, kv_start, full, n_full, end, n_full,
            q_len, kv_len, limit, scale_log2, threshold, keep_scale,
            HAS_LAYOUT, False, CAUSAL, SIGN, DROPOUT, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, BLOCK_Q, BLOCK_KV,
        )

    b_dk = b_dk * scale
    if LIMITED:
        m_kv = (kv_start + tl.arange(0, BLOCK_KV) < limit)[:, None]
        b_dk = tl.where(m_kv, b_dk, 0.0)
        b_dv = tl.where(m_kv, b_dv, 0.0)
    o_axis = i_axis.to(tl.int64) * kv_len
    store_tile(dk_ptr + o_axis * HEAD_DIM, kv_start, kv_len, b_dk, HEAD_DIM, BLOCK_KV, DIM)
    store_tile(dv_ptr + o_axis * V_DIM, kv_start, kv_len, b_dv, V_DIM, BLOCK_KV, DIM_V)


@triton.jit
def collect_queries(
    b_q, b_dout, b_lse, b_delta, b_dq,
    k_ref, v_ref, indices_ptr, ids_ptr, words_ptr, seed_ptr,
    k_strides, v_strides,
    i_batch, i_head, i_kv_head, q_start, first_step, n_steps, q_len, kv_len, limit, scale_log2, threshold, keep_scale,
    HAS_LAYOUT: tl.constexpr, IS_PARTIAL: tl.constexpr, MASKED: tl.constexpr, LIMITED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """Add n_steps steps of BLOCK_KV keys to dq: the partial or the full tiles of a row."""
    STEPS: tl.constexpr = TILE // BLOCK_KV
    kv_next = first_step * BLOCK_KV
    i_bitmask_next = 0
    if HAS_LAYOUT:
        kv_next = tile_start(indices_ptr, 0, BLOCK_KV, STEPS)
        if IS_PARTIAL:
            i_bitmask_next = tl.load(ids_ptr)
    for i_step in tl.range(0, n_steps):
        kv_start = kv_next
        i_bitmask = i_bitmask_next
        if HAS_LAYOUT:
            kv_next = tile_start(indices_ptr, i_step + 1, BLOCK_KV, STEPS)
            if IS_PARTIAL:
                i_bitmask_next = tl.load(ids_ptr + (i_step + 1) // STEPS)
        else:
            kv_next = kv_start + BLOCK_KV
        # [BLOCK_KV, DIM], [BLOCK_KV, DIM_V]
        b_k = load_tile(k_ref, k_strides, i_batch, i_kv_head, kv_start, limit, HEAD_DIM, BLOCK_KV, DIM, TMA, MASKED, LIMITED)
        b_scores = product(b_q, tl.trans(b_k), tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32), PRECISION)
        b_v = load_tile(v_ref, v_strides, i_batch, i_kv_head, kv_start, limit, V_DIM, BLOCK_KV, DIM_V, TMA, MASKED, LIMITED)
        b_dp = product(b_dout, tl.trans(b_v), tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32), PRECISION)
        # [BLOCK_Q, BLOCK_KV]
        b_p = tl.math.exp2(b_scores * scale_log2 - b_lse[:, None])
        if MASKED:
            m_pairs = attending_pairs(
                words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                HAS_LAYOUT, IS_PARTIAL, CAUSAL, LIMITED, BLOCK_Q, BLOCK_KV, False,
            )
            b_p = tl.where(m_pairs, b_p, 0.0)
        if DROPOUT:
            m_kept = kept_pairs(seed_ptr, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV)
            b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = product(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)
    return b_dq


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "threshold"])
def queries_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, lse_ptr, delta_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr,
    # output, contiguous
    dq_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, dout_strides, items_strides,
    # sizes: n_axes = batch * heads, n_lines = tile rows (blocks of queries without a layout)
    n_heads, n_axes, n_lines, q_len, kv_len, scale_log2, scale, threshold, keep_scale,
    # compile time
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    HAS_LAYOUT: tl.constexpr = items_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = TILE // BLOCK_KV
    if HAS_LAYOUT:
        i_axis, p_record, i_part = find_record(
            items_ptr, items_strides, tl.program_id(0), n_lines, n_heads, n_axes, TILE // BLOCK_Q, 1
        )
        q_start = tl.load(p_record) * TILE + i_part * BLOCK_Q
    else:
        i_axis = tl.program_id(0) // n_lines
        q_start = (n_lines - 1 - tl.program_id(0) % n_lines) * BLOCK_Q
    i_batch = i_axis // n_heads
    i_head = i_axis % n_heads
    i_kv_head = i_head // GROUP
    limit = kv_len
    if LIMITED:
        limit = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)

    b_q = load_tile(q_ref, q_strides, i_batch, i_head, q_start, q_len, HEAD_DIM, BLOCK_Q, DIM, TMA, True, False)
    b_q = with_sign(b_q, SIGN)
    b_dout = load_tile(dout_ref, dout_strides, i_batch, i_head, q_start, q_len, V_DIM, BLOCK_Q, DIM_V, TMA, True, False)
    b_lse, b_delta = load_statistics(lse_ptr, delta_ptr, i_axis, q_start, q_len, BLOCK_Q, True)
    b_dq = tl.zeros([BLOCK_Q, DIM], tl.float32)

    p_partial = indices_ptr
    p_full = indices_ptr
    p_ids = ids_ptr
    if HAS_LAYOUT:
        n_partial = tl.load(p_record + 2)
        n_full = tl.load(p_record + 3)
        p_partial = indices_ptr + tl.load(p_record + 1)
        p_full = p_partial + n_partial
        p_ids = ids_ptr + tl.load(p_record + 4)
        n_partial = n_partial * STEPS
        n_full = n_full * STEPS
    else:
        n_full, n_any = dense_keys(q_start, q_len, kv_len, limit, CAUSAL, BLOCK_Q, BLOCK_KV)
        n_partial = n_any - n_full
    b_dq = collect_queries(
        b_q, b_dout, b_lse, b_delta, b_dq, k_ref, v_ref, p_partial, p_ids, words_ptr, seed_ptr, k_strides, v_strides,
        i_batch, i_head, i_kv_head, q_start, n_full, n_partial, q_len, kv_len, limit, scale_log2, threshold, keep_scale,
        HAS_LAYOUT, True, True, LIMITED, CAUSAL, DROPOUT, PRECISION, TMA,
        HEAD_DIM, V_DIM, DIM, DIM_V, BLOCK_Q, BLOCK_KV,
    )
    b_dq = collect_queries(
        b_q, b_dout, b_lse, b_delta, b_dq, k_ref, v_ref, p_full, p_ids, words_ptr, seed_ptr, k_strides, v_strides,
        i_batch, i_head, i_kv_head, q_start, 0, n_full, q_len, kv_len, limit, scale_log2, threshold, keep_scale,
        HAS_LAYOUT, False, HAS_LAYOUT and LIMITED, HAS_LAYOUT and LIMITED, False, DROPOUT, PRECISION, TMA,
        HEAD_DIM, V_DIM, DIM, DIM_V, BLOCK_Q, BLOCK_KV,
    )
    o_axis = i_axis.to(tl.int64) * q_len
    store_tile(dq_ptr + o_axis * HEAD_DIM, q_start, q_len, b_dq * scale, HEAD_DIM, BLOCK_Q, DIM)
# fmt: on


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, contiguous and in q's type. out and lse are the forward's."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    dq = q.new_empty(batch, heads, q_len, head_dim)
    dk = k.new_empty(batch, kv_heads, kv_len, head_dim)
    dv = v.new_empty(batch, kv_heads, kv_len, v_dim)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    major, shared_memory = device_limits(q.device.index)
    dim, dim_v = padded_dim(head_dim), padded_dim(v_dim)
    tma = major >= 9 and can_describe(q, k, v, dout)
    delta = torch.empty_like(lse)
    if lse.numel() > 0:
        rows = 64
        delta_kernel[(triton.cdiv(q_len, rows), batch * heads)](
            out_ptr=out, dout_ptr=dout, dlse_ptr=dlse, delta_ptr=delta, dout_strides=dout.stride()[:3],
            n_heads=heads, q_len=q_len, V_DIM=v_dim, DIM_V=dim_v, ROWS=rows, num_warps=4,
        )  # fmt: skip
    shared = {
        "lse_ptr": lse,
        "delta_ptr": delta,
        "words_ptr": plan[6] if plan else None,
        "kv_lengths_ptr": kv_lengths,
        "q_len": q_len,
        "kv_len": kv_len,
        **score_scale(scale),
        **dropout(dropout_p, seed, q.device),
        "GROUP": heads // kv_heads,
        "CAUSAL": causal,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": dot_precision(q),
        "TMA": tma,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "DIM": dim,
        "DIM_V": dim_v,
    }

    def operands(chosen: Config) -> dict[str, object]:
        return references(
            {
                "q": (q, chosen.block_q, dim),
                "k": (k, chosen.block_kv, dim),
                "v": (v, chosen.block_kv, dim_v),
                "dout": (dout, chosen.block_q, dim_v),
            },
            tma=tma,
        )

    if batch * kv_heads * kv_len > 0:
        chosen = config_keys(max(dim, dim_v), q.element_size(), tma=tma, shared_memory=shared_memory)
        n_lines = plan[3].shape[2] if plan else triton.cdiv(kv_len, chosen.block_kv)
        split = 128 // chosen.block_kv if plan else 1
        keys_kernel[(n_lines * split * batch * kv_heads,)](
            **operands(chosen), **walk(*plan[3:6] if plan else (None, None, None)), **shared, dk_ptr=dk, dv_ptr=dv,
            n_heads=kv_heads, n_axes=batch * kv_heads, n_lines=n_lines, scale=abs(scale), **chosen.blocks(),
        )  # fmt: skip
    if lse.numel() > 0:
        chosen = config_queries(max(dim, dim_v), q.element_size(), tma=tma, shared_memory=shared_memory)
        n_lines = plan[0].shape[2] if plan else triton.cdiv(q_len, chosen.block_q)
        split = 128 // chosen.block_q if plan else 1
        queries_kernel[(n_lines * split * batch * heads,)](
            **operands(chosen), **walk(*plan[:3] if plan else (None, None, None)), **shared, dq_ptr=dq,
            n_heads=heads, n_axes=batch * heads, n_lines=n_lines, scale=scale, **chosen.blocks(),
        )  # fmt: skip
    return dq, dk, dv
