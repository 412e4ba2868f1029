"""How does the portable Triton backward run? dq, dk and dv from out, lse and their gradients; sm80 and later.

With p = exp(scale q k^T - lse), dp = dout v^T and delta = rowsum(dout * out) - dlse:
    ds = p * (dp - delta)      dv = p^T dout      dk = scale ds^T q      dq = scale ds k
Three launches: the statistics of each query (lse, delta); dk and dv, one program a block of keys of a key head, walking
the columns of the plan (for each query head of the group); dq, one program a block of queries, walking the rows. On Hopper the
latter two are one where that pays (`joint_pays`): of plain calls at head_dim 128 always. No atomics, no workspace beyond
the statistics (8 bytes a query and head), and the same bits every time. Rows without keys (lse -inf) give zeros. What the options of the scores do to them (score_tile.py) is done again, and its derivative goes
into ds; the gradients of slopes and biases are summed by the launch of dq, a row and a piece of a tile at a time.

Knows: a plan's tensors, strides, launch configurations. Does not know: layouts, autograd, how a backend is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..seen import Kind, Seen, kind_of
from .launch import TILE as TILE_SIDE
from .launch import (
    Config,
    Describer,
    Launch,
    Memory,
    Options,
    Shape,
    Walk,
    allocator,
    axis_strides,
    constants,
    contiguous,
    device_seed,
    multiprocessors,
    options_of,
    padded_dim,
    score_arguments,
    see_scores,
    see_walk,
    walk,
    walk_strides,
    wants_descriptors,
)
from .score_tile import changed_scores, distances, store_sums
from .scores import Scores, sums_shape
from .tile import (
    LOG2_E,
    TILE,
    WITHOUT_SIGN,
    add_product,
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

# queries of a program of statistics_kernel; 64 spill on sm100
STATISTICS_ROWS = 32
# up to so many programs a multiprocessor one launch has dk, dv and dq; causal without a layout
JOINT_PROGRAMS = 8
TRIANGLE_PROGRAMS = 64


def config_keys(
    dim: int,
    element_size: int,
    *,
    major: int,
    tma: bool,
    dropout: bool,
    shared_memory: int,
    changed: bool = False,
) -> Config:
    """The launch table of dk and dv: block_kv is owned, block_q walked.

    H200, (1, 2048 / dim, 16384, dim) bf16 dense, milliseconds. 128, tma: 64x64 4 warps 2 stages (two programs a
    multiprocessor) 7.5; 64x128 8 warps 8.9, 32x64 8.9, 64x64 8 warps 16.5. 64, tma: 64x64 4 warps 3 stages 9.4;
    2 stages 9.4, 128x64 9.0 to 9.7 but it spills, 64x128 8 warps 12.2. Dropout, of (256, 2, 1024, 32), (1, 32, 8192, 64),
    (1, 16, 8192, 128): 32x64 2 stages 0.90, 4.24, 3.15; 3 stages 0.97, 4.24, 2.99; 64x64 3 stages 0.97, 4.19; 2 stages 1.03,
    4.23, 2.85 but it spills at 128; without dropout 0.39, 2.28, 1.85. Pointers: more than 32x64 spills, 4 warps spill without
    wgmma, 8 warps make ptxas serialise it (C7515). float32: 4 warps spill. sm100, where nothing was
    run, and changed scores, which were not: what is nearest and does not spill.
    """
    if element_size == 4:
        return Config(32, 32, 8, 2) if dim <= 64 else Config(32 if dim <= 128 else 16, 32, 8, 1)
    if dim <= 128 and changed:
        if major == 10:
            return Config(32, 32, 8 if dim <= 64 else 4, 2)
        return Config(32, 64, 8, 2 if major == 9 else 1)
    if dim <= 128:
        if tma and dropout and major == 9:
            return Config(64 if 32 < dim <= 64 else 32, 64, 4, 2 if dim <= 32 else 3)
        if tma and not dropout:
            if major == 10 and dim <= 64:
                return Config(32, 64, 8, 3)
            return Config(64, 64, 4, 3 if dim <= 64 else 2)
        if major == 9:
            return Config(32, 64, 4, 1 if dim > 64 and not tma else 2)
        return Config(32, 64, 8, 1 if dropout or major == 10 else 2)
    return Config(32, 32, 4, 1) if shared_memory < 160 * 1024 else Config(32, 64, 8, 2)


def config_queries(
    dim: int,
    element_size: int,
    *,
    major: int,
    tma: bool,
    dropout: bool,
    shared_memory: int,
    changed: bool = False,
) -> Config:
    """The launch table of dq: block_q is owned, block_kv walked.

    As at `config_keys`. 128, tma: 64x64 4 warps 2 stages 5.4; 3 stages 5.9, 128x64 8 warps 5.5, 128x64 4 warps 14.0.
    64, tma: 128x64 4 warps 3 stages 5.0; 2 stages 5.8, 64x64 3 stages 5.8. Dropout, as there: 64x64 4 warps 3 stages 0.48, 2.33,
    2.09; 2 stages 0.50, 2.45, 1.85; 128x64 8 warps 0.56, 3.26, 2.05; 64x64 8 warps 1.06, 4.65, 4.98 (serialised); without
    dropout 0.32, 1.35, 1.41.
    """
    small = shared_memory < 160 * 1024
    if element_size == 4:
        return Config(64, 32, 8, 2) if dim <= 64 else Config(32 if dim <= 128 else 16, 32, 8, 1)
    if dim <= 128 and changed:
        if major >= 9:
            return Config(128, 64, 8, 3) if dim <= 64 else Config(64, 32, 8 if major == 10 else 4, 2)
        return Config(64, 32, 4, 2) if dim <= 64 else Config(64, 64, 8, 2)
    if dim <= 128 and dropout:
        return Config(64, 64, 4, 3 if dim <= 64 else 2) if tma and major == 9 else Config(64, 64, 8, 2)
    if dim <= 64:
        return Config(128, 64, 4, 3) if tma else Config(128, 64, 8, 3)
    if dim <= 128:
        return Config(64, 64, 8 if major == 10 and not tma else 4, 2)
    return Config(32, 32, 4, 1) if small else Config(64, 32, 8, 2)


def config_joint(
    dim: int,
    element_size: int,
    *,
    major: int,
    tma: bool,
    dropout: bool,
    changed: bool = False,
    group: int = 1,
) -> tuple[Config, Config] | None:
    """The launch table where dk, dv and dq share a launch: of programs of keys, and of queries. None where that was not run.

    Grouped heads spill at 128 (40 bytes; 664 with lengths), and lengths make ptxas serialise wgmma there.
    """
    if major != 9 or element_size != 2 or dim > 128 or group > 1 or dropout or changed:
        return None
    if tma:
        # both read the same blocks, by the same descriptors
        chosen = Config(64, 64, 4, 3 if dim <= 64 else 2)
        return chosen, chosen
    stages = 1 if dim > 64 else 2
    return Config(32, 64, 4, stages), Config(64, 64, 4, stages)


def joint_pays(n_programs: int, dim: int, tma: bool, options: Options, *, has_layout: bool) -> bool:
    """Whether one launch is done sooner than two, which wait for each other's last programs and cost the host more.

    H200, hidden size 2048, microseconds of the GPU alone, two launches and one; dense, causal, local, butterfly:
        512 tokens   128  38.4 26.6  35.7 25.2  39.8 26.7  33.8 23.7    64  32.6 28.3  33.3 25.6  34.4 29.5  30.5 26.1
        1,024        128  70.6 66.0  66.1 54.3  67.8 62.1  47.3 43.4    64  76.9 77.6  70.0 55.0  77.4 71.7  51.8 52.7
        2,048        128  237  231   185  152   138  130   99.6 93.9    64  248  260   185  156   157  155   110  115
        8,192        128  2988 2933  1678 1591  502  487   428  418     64  3386 3514  1872 1810  584  606   498  517
    16,384, dense and causal, milliseconds: 128  12.3 12.2  6.29 6.27    64  13.8 14.3  6.90 6.99. At 64 programs of queries
    hold less than they do in a launch of their own. Without descriptors only small calls were run.
    """
    if tma and dim > 64:
        return True
    is_triangle = tma and options.causal and not has_layout
    return n_programs <= (TRIANGLE_PROGRAMS if is_triangle else JOINT_PROGRAMS) * multiprocessors(options.device)


# fmt: off
@triton.jit(do_not_specialize=["n_heads", "n_axes", "q_len", "n_padded", "n_cleared", "n_counts"])
def statistics_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, pairs_ptr, lines_ptr, cleared_ptr, queue_ptr, dout_strides, n_heads, n_axes, q_len, n_padded,
    n_cleared, n_counts,
    V_DIM: tl.constexpr, DIM_V: tl.constexpr, CLEARED: tl.constexpr, ROWS: tl.constexpr,
):
    """What every step of the backward wants of a query, n_padded a head so that no step bounds-checks them.

    lse    in base 2; +inf past q_len and for a row without keys, so that p is 0
    delta  rowsum(dout * out) - dlse; 0 past q_len

    Written as pairs, and as lines (every lse, then every delta), to those that are given. And zeros to the CLEARED numbers
    of each query, those past q_len included, of the first n_cleared heads at cleared_ptr, which the next launch adds to, and to
    the n_counts numbers at queue_ptr, no more than ROWS a program, with which it counts. The launch may have fewer heads than the
    n_axes that lines are of.
    """
    i_axis = tl.program_id(1)
    if queue_ptr is not None:
        i_count = (i_axis * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        tl.store(queue_ptr + i_count, tl.zeros([ROWS], tl.int32), mask=i_count < n_counts)
    o_q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if cleared_ptr is not None:
        o_cleared = tl.arange(0, CLEARED)
        p_cleared = cleared_ptr + (i_axis.to(tl.int64) * n_padded + o_q.to(tl.int64)[:, None]) * CLEARED + o_cleared[None, :]
        tl.store(p_cleared, tl.zeros([ROWS, CLEARED], tl.float32), mask=i_axis < n_cleared)
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
    b_lse = tl.load(lse_ptr + o_line, mask=m_q, other=float("-inf"))
    if dlse_ptr is not None:
        b_delta -= tl.load(dlse_ptr + o_line, mask=m_q, other=0.0)
    o_line = i_axis.to(tl.int64) * n_padded + o_q
    m_padded = o_q < n_padded
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)
    if pairs_ptr is not None:
        # [ROWS, 2]
        o_pair = o_line[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(pairs_ptr + o_pair, tl.join(b_lse, b_delta), mask=m_padded[:, None])
    if lines_ptr is not None:
        tl.store(lines_ptr + o_line, b_lse, mask=m_padded)
        o_line += n_axes.to(tl.int64) * n_padded
        tl.store(lines_ptr + o_line, b_delta, mask=m_padded)


@triton.jit
def load_statistics(statistics_ptr, i_axis, q_start, n_padded, ROWS: tl.constexpr):
    """lse in base 2 and delta of ROWS queries: [ROWS] each.

    One load of pairs: two loads of fewer values than the program has threads would take their user's layout, in which
    many threads hold, and copy, the same value (Triton 3.6: 70 copies a thread instead of 8).
    """
    o_line = i_axis.to(tl.int64) * n_padded + q_start + tl.arange(0, ROWS)
    return tl.split(tl.load(statistics_ptr + o_line[:, None] * 2 + tl.arange(0, 2)[None, :]))


@triton.jit
def keys_program(
    # which one
    pid,
    # inputs
    q_ref, k_ref, v_ref, dout_ref, statistics_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr,
    # outputs, contiguous
    dk_ptr, dv_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides,
    # sizes: n_heads key heads, n_axes = batch * n_heads, n_lines = tile columns (blocks of keys without a layout)
    n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
    # compile time
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """dk and dv of a block of keys of a key head, walking the columns of the plan for each query head of the group."""
    HAS_LAYOUT: tl.constexpr = items_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    CHANGED: tl.constexpr = cap is not None or slopes_ptr is not None or tables_ptr is not None
    STEPS: tl.constexpr = TILE // BLOCK_Q
    if HAS_LAYOUT:
        i_axis, p_record, i_part = find_record(
            items_ptr, items_strides, pid, n_lines, n_heads, n_axes, TILE // BLOCK_KV, GROUP
        )
        kv_start = tl.load(p_record) * TILE + i_part * BLOCK_KV
    else:
        i_axis = pid // n_lines
        kv_start = pid % n_lines * BLOCK_KV
    i_batch = i_axis // n_heads
    i_kv_head = i_axis % n_heads
    limit = kv_len
    if LIMITED:
        limit = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)

    b_k = load_tile(k_ref, k_strides, i_batch, i_kv_head, kv_start, limit, HEAD_DIM, BLOCK_KV, DIM, TMA, True, LIMITED)
    b_v = load_tile(v_ref, v_strides, i_batch, i_kv_head, kv_start, limit, V_DIM, BLOCK_KV, DIM_V, TMA, True, LIMITED)
    b_dk = tl.zeros([BLOCK_KV, DIM], tl.float32)
    b_dk_lost = tl.zeros([BLOCK_KV, DIM], tl.float32)
    b_dv = tl.zeros([BLOCK_KV, DIM_V], tl.float32)
    b_dv_lost = tl.zeros([BLOCK_KV, DIM_V], tl.float32)
    factor = scale_log2
    if CHANGED:
        factor = 1.0

    for i_member in tl.range(0, GROUP):
        i_head = i_kv_head * GROUP + i_member
        i_q_axis = i_batch * n_heads * GROUP + i_head
        slope = 0.0
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + i_head) * LOG2_E
        # steps of BLOCK_Q queries: the partial tiles of the column, then the full ones
        if HAS_LAYOUT:
            p_member = p_record
            if GROUP > 1:
                # heads of a group may have layouts, and so launch orders, of their own
                p_member = find_line(items_ptr, items_strides, i_batch, i_head, kv_start // TILE)
            first = tl.load(p_member + 1) * STEPS
            end = first + tl.load(p_member + 2) * STEPS
            q_next = tile_start(indices_ptr, first, BLOCK_Q, STEPS)
        else:
            first, full, end = dense_queries(kv_start, q_len, kv_len, CAUSAL, BLOCK_Q, BLOCK_KV)
            n_full = q_len // BLOCK_Q
            q_next = first * BLOCK_Q
        for i_step in tl.range(first, end):
            q_start = q_next
            if HAS_LAYOUT:
                is_partial = q_start < 0
                q_start = q_start & WITHOUT_SIGN
                q_next = tile_start(indices_ptr, i_step + 1, BLOCK_Q, STEPS)
            else:
                is_partial = (i_step < full) | (i_step >= n_full)
                q_next = q_start + BLOCK_Q
            # [BLOCK_Q, DIM]
            b_q = load_tile(q_ref, q_strides, i_batch, i_head, q_start, q_len, HEAD_DIM, BLOCK_Q, DIM, TMA, True, False)
            b_q = with_sign(b_q, SIGN)
            # [BLOCK_Q]
            b_lse, b_delta = load_statistics(statistics_ptr, i_q_axis, q_start, n_padded, BLOCK_Q)
            # [BLOCK_KV, BLOCK_Q]
            b_scores = product(b_k, tl.trans(b_q), PRECISION)
            if CHANGED:
                b_scores, b_tanh = changed_scores(
                    b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, tables_strides, i_batch, i_head,
                    i_step // STEPS, q_start, kv_start, kv_len - q_len, PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV, True,
                )
            if LIMITED:
                m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
                b_scores = tl.where(m_kv[:, None], b_scores, float("-inf"))
            b_p = tl.math.exp2(b_scores * factor - b_lse[None, :])
            if is_partial:
                i_bitmask = 0
                if HAS_LAYOUT:
                    i_bitmask = tl.load(ids_ptr + i_step // STEPS)
                m_pairs = attending_pairs(
                    words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                    HAS_LAYOUT, CAUSAL, BLOCK_Q, BLOCK_KV, True,
                )  # fmt: skip
                b_p = tl.where(m_pairs, b_p, 0.0)
            # [BLOCK_Q, DIM_V]
            b_dout = load_tile(
                dout_ref, dout_strides, i_batch, i_head, q_start, q_len, V_DIM, BLOCK_Q, DIM_V, TMA, True, False
            )
            if DROPOUT:
                m_kept = kept_pairs(seed_ptr, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, True)
                b_kept_p = tl.where(m_kept, b_p * keep_scale, 0.0)
                b_dv, b_dv_lost = add_product(b_kept_p.to(b_dout.dtype), b_dout, b_dv, b_dv_lost, PRECISION)
                b_dp = product(b_v, tl.trans(b_dout), PRECISION)
                b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
            else:
                b_dv, b_dv_lost = add_product(b_p.to(b_dout.dtype), b_dout, b_dv, b_dv_lost, PRECISION)
                b_dp = product(b_v, tl.trans(b_dout), PRECISION)
            b_ds = b_p * (b_dp - b_delta[None, :])
            if cap is not None:
                b_ds = b_ds * (1.0 - b_tanh * b_tanh)
            b_dk, b_dk_lost = add_product(b_ds.to(b_q.dtype), b_q, b_dk, b_dk_lost, PRECISION)

    b_dk = b_dk * scale
    o_axis = i_axis.to(tl.int64) * kv_len
    store_tile(dk_ptr + o_axis * HEAD_DIM, kv_start, kv_len, b_dk, HEAD_DIM, BLOCK_KV, DIM)
    store_tile(dv_ptr + o_axis * V_DIM, kv_start, kv_len, b_dv, V_DIM, BLOCK_KV, DIM_V)


@triton.jit
def queries_program(
    # which one
    pid,
    # inputs
    q_ref, k_ref, v_ref, dout_ref, statistics_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr,
    # outputs, contiguous; sums_ptr: of ds, dslopes_ptr: of -ds * distance a query
    dq_ptr, sums_ptr, dslopes_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides, sums_strides,
    # sizes: n_axes = batch * heads, n_lines = tile rows (blocks of queries without a layout)
    n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
    # compile time
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """dq of a block of queries of a head, walking the rows of the plan."""
    HAS_LAYOUT: tl.constexpr = items_ptr is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    CHANGED: tl.constexpr = cap is not None or slopes_ptr is not None or tables_ptr is not None
    STEPS: tl.constexpr = TILE // BLOCK_KV
    if HAS_LAYOUT:
        i_axis, p_record, i_part = find_record(
            items_ptr, items_strides, pid, n_lines, n_heads, n_axes, TILE // BLOCK_Q, 1
        )
        q_start = tl.load(p_record) * TILE + i_part * BLOCK_Q
    else:
        i_axis = pid // n_lines
        q_start = (n_lines - 1 - pid % n_lines) * BLOCK_Q
    i_batch = i_axis // n_heads
    i_head = i_axis % n_heads
    i_kv_head = i_head // GROUP
    limit = kv_len
    if LIMITED:
        limit = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(tl.int32)

    b_q = load_tile(q_ref, q_strides, i_batch, i_head, q_start, q_len, HEAD_DIM, BLOCK_Q, DIM, TMA, True, False)
    b_q = with_sign(b_q, SIGN)
    b_dout = load_tile(dout_ref, dout_strides, i_batch, i_head, q_start, q_len, V_DIM, BLOCK_Q, DIM_V, TMA, True, False)
    b_lse, b_delta = load_statistics(statistics_ptr, i_axis, q_start, n_padded, BLOCK_Q)
    b_dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    b_dq_lost = tl.zeros([BLOCK_Q, DIM], tl.float32)
    factor = scale_log2
    slope = 0.0
    if CHANGED:
        factor = 1.0
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + i_head) * LOG2_E
        if dslopes_ptr is not None:
            b_dslope = tl.zeros([BLOCK_Q], tl.float32)

    # steps of BLOCK_KV keys: the partial tiles of the row, then the full ones, as in the forward
    if HAS_LAYOUT:
        first = tl.load(p_record + 1) * STEPS
        end = first + tl.load(p_record + 2) * STEPS
        kv_next = tile_start(indices_ptr, first, BLOCK_KV, STEPS)
    else:
        n_full, end = dense_keys(q_start, q_len, kv_len, limit, CAUSAL, BLOCK_Q, BLOCK_KV)
        first = 0
        kv_next = 0
    for i_step in tl.range(first, end):
        kv_start = kv_next
        if HAS_LAYOUT:
            is_partial = kv_start < 0
            kv_start = kv_start & WITHOUT_SIGN
            kv_next = tile_start(indices_ptr, i_step + 1, BLOCK_KV, STEPS)
        else:
            is_partial = i_step >= n_full
            kv_next = kv_start + BLOCK_KV
        # [BLOCK_KV, DIM], [BLOCK_KV, DIM_V]
        b_k = load_tile(k_ref, k_strides, i_batch, i_kv_head, kv_start, limit, HEAD_DIM, BLOCK_KV, DIM, TMA, True, LIMITED)
        b_v = load_tile(v_ref, v_strides, i_batch, i_kv_head, kv_start, limit, V_DIM, BLOCK_KV, DIM_V, TMA, True, LIMITED)
        # [BLOCK_Q, BLOCK_KV]
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        if CHANGED:
            b_scores, b_tanh = changed_scores(
                b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, tables_strides, i_batch, i_head, i_step // STEPS,
                q_start, kv_start, kv_len - q_len, PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV, False,
            )
        b_dp = product(b_dout, tl.trans(b_v), PRECISION)
        if LIMITED and HAS_LAYOUT:
            m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
            b_scores = tl.where(m_kv[None, :], b_scores, float("-inf"))
        b_p = tl.math.exp2(b_scores * factor - b_lse[:, None])
        if is_partial:
            i_bitmask = 0
            if HAS_LAYOUT:
                i_bitmask = tl.load(ids_ptr + i_step // STEPS)
            m_pairs = attending_pairs(
                words_ptr, i_bitmask, q_start, kv_start, q_len, kv_len, limit,
                HAS_LAYOUT, CAUSAL, BLOCK_Q, BLOCK_KV, False,
            )  # fmt: skip
            b_p = tl.where(m_pairs, b_p, 0.0)
        if DROPOUT:
            m_kept = kept_pairs(seed_ptr, threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, False)
            b_dp = tl.where(m_kept, b_dp * keep_scale, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if dslopes_ptr is not None:
            b_dslope -= tl.sum(b_ds * distances(q_start, kv_start, kv_len - q_len, BLOCK_Q, BLOCK_KV, False), 1)
        if sums_ptr is not None:
            store_sums(
                sums_ptr, sums_strides, i_batch, i_head, i_step // STEPS, q_start, kv_start, b_ds,
                PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV,
            )
        if cap is not None:
            b_ds = b_ds * (1.0 - b_tanh * b_tanh)
        b_dq, b_dq_lost = add_product(b_ds.to(b_k.dtype), b_k, b_dq, b_dq_lost, PRECISION)
    o_axis = i_axis.to(tl.int64) * q_len
    store_tile(dq_ptr + o_axis * HEAD_DIM, q_start, q_len, b_dq * scale, HEAD_DIM, BLOCK_Q, DIM)
    if dslopes_ptr is not None:
        o_q = q_start + tl.arange(0, BLOCK_Q)
        tl.store(dslopes_ptr + o_axis + o_q, b_dslope, mask=o_q < q_len)


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "n_padded", "threshold"])
def keys_kernel(
    q_ref, k_ref, v_ref, dout_ref, statistics_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr,
    dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides,
    n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """dk and dv, a program a block of keys; the arguments are those of `keys_program`."""
    keys_program(
        tl.program_id(0), q_ref, k_ref, v_ref, dout_ref, statistics_ptr, items_ptr, indices_ptr, ids_ptr, words_ptr,
        kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr, dk_ptr, dv_ptr,
        q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides,
        n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
        SIGN, GROUP, CAUSAL, DROPOUT, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV,
    )


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "n_padded", "threshold"])
def queries_kernel(
    q_ref, k_ref, v_ref, dout_ref, statistics_ptr,
    items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr,
    dq_ptr, sums_ptr, dslopes_ptr,
    q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides, sums_strides,
    n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
    SIGN: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    PIECE_Q: tl.constexpr, PIECE_KV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):
    """dq, a program a block of queries; the arguments are those of `queries_program`."""
    queries_program(
        tl.program_id(0), q_ref, k_ref, v_ref, dout_ref, statistics_ptr, items_ptr, indices_ptr, ids_ptr, words_ptr,
        kv_lengths_ptr, seed_ptr, slopes_ptr, tables_ptr, dq_ptr, sums_ptr, dslopes_ptr,
        q_strides, k_strides, v_strides, dout_strides, items_strides, tables_strides, sums_strides,
        n_heads, n_axes, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
        SIGN, GROUP, CAUSAL, DROPOUT, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, PIECE_Q, PIECE_KV, BLOCK_Q, BLOCK_KV,
    )


@triton.jit(do_not_specialize=["n_heads", "n_axes", "n_cols", "n_rows", "n_keys", "q_len", "kv_len", "n_padded"])
def joint_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, statistics_ptr, col_items_ptr, col_indices_ptr, col_ids_ptr,
    row_items_ptr, row_indices_ptr, row_ids_ptr, words_ptr,
    # outputs, contiguous
    dq_ptr, dk_ptr, dv_ptr,
    # strides in elements: (batch, head, row)
    q_strides, k_strides, v_strides, dout_strides, col_items_strides, row_items_strides,
    # sizes: n_axes = batch * heads; the first n_keys programs have keys, the others queries
    n_heads, n_axes, n_cols, n_rows, n_keys, q_len, kv_len, n_padded, scale_log2, scale,
    # compile time
    SIGN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    KEYS_BLOCK_Q: tl.constexpr, KEYS_BLOCK_KV: tl.constexpr, QUERIES_BLOCK_Q: tl.constexpr, QUERIES_BLOCK_KV: tl.constexpr,
):
    """dk, dv and dq of a call without grouped heads, lengths, dropout and what changes scores: see `keys_program`, `queries_program`."""
    pid = tl.program_id(0)
    if pid < n_keys:
        # the walked queries carry the sign of the scale
        keys_program(
            pid, q_ref, k_ref, v_ref, dout_ref, statistics_ptr, col_items_ptr, col_indices_ptr, col_ids_ptr, words_ptr,
            None, None, None, None, dk_ptr, dv_ptr,
            q_strides, k_strides, v_strides, dout_strides, col_items_strides, None,
            n_heads, n_axes, n_cols, q_len, kv_len, n_padded, scale_log2, scale * SIGN, 0, 1.0, None,
            SIGN, 1, CAUSAL, False, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, 0, 0, KEYS_BLOCK_Q, KEYS_BLOCK_KV,
        )
    else:
        queries_program(
            pid - n_keys, q_ref, k_ref, v_ref, dout_ref, statistics_ptr, row_items_ptr, row_indices_ptr, row_ids_ptr,
            words_ptr, None, None, None, None, dq_ptr, None, None,
            q_strides, k_strides, v_strides, dout_strides, row_items_strides, None, None,
            n_heads, n_axes, n_rows, q_len, kv_len, n_padded, scale_log2, scale, 0, 1.0, None,
            SIGN, 1, CAUSAL, False, PRECISION, TMA, HEAD_DIM, V_DIM, DIM, DIM_V, 0, 0, QUERIES_BLOCK_Q, QUERIES_BLOCK_KV,
        )
# fmt: on


def prepare_statistics(
    dout: Seen, n_padded: int, cleared: tuple[int, int] = (0, 0), n_counts: int = 0, n_told: int | None = None
) -> Launch:
    """The launch of statistics_kernel on a gradient of such a kind, and on numbers to be cleared.

    cleared   numbers of each query, and heads, those of all batch entries
    n_counts  numbers more
    n_told    heads, of all batch entries, whose statistics are wanted; None: all
    """
    batch, heads, q_len, v_dim = dout.shape
    n_told = batch * heads if n_told is None else n_told
    # the rest would be counted from what was there
    assert n_counts <= n_padded * n_told, (n_counts, dout.shape)
    return Launch(
        statistics_kernel,
        (n_padded // STATISTICS_ROWS, n_told),
        {
            "dout_strides": dout.strides[:3],
            "n_heads": heads,
            "n_axes": batch * heads,
            "q_len": q_len,
            "n_padded": n_padded,
            "n_cleared": cleared[1],
            "n_counts": n_counts,
            "V_DIM": v_dim,
            "DIM_V": padded_dim(v_dim),
            "CLEARED": cleared[0],
            "ROWS": STATISTICS_ROWS,
            "num_warps": 4,
        },
    )


class Prepared(NamedTuple):
    """The launches, None for a gradient without elements, and the memory of dq, dk, dv and the statistics.

    joint  does what keys and queries do, without lengths, where that pays
    """

    statistics: Launch
    keys: Launch | None
    queries: Launch | None
    joint: Launch | None
    memory: tuple[Memory, ...]
    bias_sums: tuple[int, ...] | None


def bias_sums_shape(
    batch: int, heads: int, items: Shape | None, chosen: Config, options: Options
) -> tuple[int, ...] | None:
    """The shape of what the launch of dq adds up for the gradient of a bias, None where that is not wanted."""
    scores = options.scores
    if scores is None or scores.pieces is None or items is None or not scores.wanted[2]:
        return None
    shared = (batch if items[0] == 1 else 1, heads if items[1] == 1 else 1)
    tables = scores.tables[0]
    assert tables is not None
    return sums_shape(shared, tables.shape[2], scores.pieces, (chosen.block_q, chosen.block_kv))


def lines_and_programs(items: Shape | None, length: int, block: int, n_axes: int) -> tuple[int, int]:
    """Lines of each of n_axes heads, tiles of a plan or blocks without one, and the programs of all, which hold a block each."""
    n_lines = items[2] if items else -(-length // block)
    return n_lines, n_lines * (TILE_SIDE // block if items else 1) * n_axes


def describers_of(kind: Kind, chosen: Config, dim: int, dim_v: int) -> dict[str, Describer]:
    """Of q, k, v and dout, by blocks of a configuration."""
    q, k, v, dout = kind.tensors
    block_q, block_kv = chosen.block_q, chosen.block_kv
    return {
        "q_ref": Describer(q, (1, 1, block_q, dim)),
        "k_ref": Describer(k, (1, 1, block_kv, dim)),
        "v_ref": Describer(v, (1, 1, block_kv, dim_v)),
        "dout_ref": Describer(dout, (1, 1, block_q, dim_v)),
    }


@functools.lru_cache(maxsize=1024)
def prepare(kind: Kind, rows: Walk, cols: Walk, options: Options) -> Prepared:
    """How a call on such q, k, v and dout is launched."""
    q, k, v, dout = kind.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    tma = wants_descriptors(options.major, q, k, v, dout)
    fixed = constants(head_dim, v_dim, heads // kv_heads, tma, options)
    dim, dim_v = fixed["DIM"], fixed["DIM_V"]
    n_padded = -(-q_len // TILE_SIDE) * TILE_SIDE
    statistics = prepare_statistics(dout, n_padded)
    asked: dict[str, Any] = {
        "major": options.major,
        "tma": tma,
        "dropout": options.dropout_p > 0,
        "shared_memory": options.shared_memory,
        "changed": options.changes_scores,
    }
    keys_config = config_keys(max(dim, dim_v), q.dtype.itemsize, **asked)
    queries_config = config_queries(max(dim, dim_v), q.dtype.itemsize, **asked)

    common = {
        "q_strides": q.strides[:3],
        "k_strides": k.strides[:3],
        "v_strides": v.strides[:3],
        "dout_strides": dout.strides[:3],
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        **fixed,
    }

    def walking(
        kernel: Any, chosen: Config, items: Shape | None, heads: int, length: int, block: int, **added: Any
    ) -> Launch:
        n_lines, n_programs = lines_and_programs(items, length, block, batch * heads)
        rest = {
            **common,
            "items_strides": walk_strides(items),
            "n_heads": heads,
            "n_axes": batch * heads,
            "n_lines": n_lines,
            **added,
            **chosen.arguments,
        }
        return Launch(kernel, (n_programs,), rest, describers_of(kind, chosen, dim, dim_v) if tma else None)

    keys = queries = None
    shape = bias_sums_shape(batch, heads, rows[0], queries_config, options)
    scale = options.scale
    if batch * kv_heads * kv_len:
        # the walked queries carry the sign
        added = {"scale": abs(scale), **score_arguments(options, 1)}
        keys = walking(keys_kernel, keys_config, cols[0], kv_heads, kv_len, keys_config.block_kv, **added)
    if batch * heads * q_len:
        added = {"scale": scale, **score_arguments(options, 0), "sums_strides": shape and axis_strides(shape)}
        queries = walking(queries_kernel, queries_config, rows[0], heads, q_len, queries_config.block_q, **added)
    memory = [contiguous(seen.dtype, *seen.shape) for seen in (q, k, v)]
    memory.append(contiguous(torch.float32, batch, heads, n_padded, 2))
    joint = None
    if keys is not None and queries is not None:
        joint = prepare_joint(kind, (rows[0], cols[0]), common, options, tma=tma)
    return Prepared(statistics, keys, queries, joint, tuple(memory), shape)


def prepare_joint(
    kind: Kind, walked: tuple[Shape | None, Shape | None], common: dict[str, Any], options: Options, *, tma: bool
) -> Launch | None:
    """The launch of joint_kernel, for calls without lengths; None where two launches are taken.

    walked  the shapes of the records of rows and columns
    common  the arguments that the kernels share
    """
    q, k, _, _ = kind.tensors
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = q.shape, k.shape
    dim, dim_v = common["DIM"], common["DIM_V"]
    chosen = config_joint(
        max(dim, dim_v),
        q.dtype.itemsize,
        major=options.major,
        tma=tma,
        dropout=options.dropout_p > 0,
        changed=options.changes_scores,
        group=heads // kv_heads,
    )
    if chosen is None:
        return None
    (of_keys, of_queries), (rows, cols) = chosen, walked
    n_cols, n_keys = lines_and_programs(cols, kv_len, of_keys.block_kv, batch * heads)
    n_rows, n_queries = lines_and_programs(rows, q_len, of_queries.block_q, batch * heads)
    if not joint_pays(n_keys + n_queries, max(dim, dim_v), tma, options, has_layout=rows is not None):
        return None
    rest = {
        **{name: value for name, value in common.items() if name in joint_kernel.arg_names},
        "col_items_strides": walk_strides(cols),
        "row_items_strides": walk_strides(rows),
        "n_heads": heads,
        "n_axes": batch * heads,
        "n_cols": n_cols,
        "n_rows": n_rows,
        "n_keys": n_keys,
        "scale": options.scale,
        "KEYS_BLOCK_Q": of_keys.block_q,
        "KEYS_BLOCK_KV": of_keys.block_kv,
        "QUERIES_BLOCK_Q": of_queries.block_q,
        "QUERIES_BLOCK_KV": of_queries.block_kv,
        "num_warps": of_keys.num_warps,
        "num_stages": of_keys.num_stages,
    }
    describers = describers_of(kind, of_keys, dim, dim_v) if tma else None
    return Launch(joint_kernel, (n_keys + n_queries,), rest, describers)


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
    scores: Scores | None = None,
    wanted: Sequence[bool] = (),
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, contiguous and in q's type. out and lse are the forward's.

    With options of the scores also the gradients of sinks, slopes and bias, as far as `wanted` (bool for each), else empty.
    """
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    seed = device_seed(seed, q.device)
    options = options_of(q, scale, causal, dropout_p, out, lse, dlse, kv_lengths, seed)
    slopes = rows = cols = sums = dslopes = None
    if scores is not None:
        slopes, rows, cols = scores.alibi_slopes, scores.tables(0, base_2=True), scores.tables(1, base_2=True)
        options = options._replace(scores=see_scores(scores, rows, cols, wanted=wanted))
    by_rows, by_cols = walk(plan, 0), walk(plan, 3)
    ready = prepare(kind_of(q, k, v, dout), see_walk(by_rows), see_walk(by_cols), options)
    if scores is not None:
        dslopes = torch.empty_like(lse) if wanted[1] else None
        sums = None if ready.bias_sums is None else scores.new_sums(ready.bias_sums)
    empty = allocator(q)
    dq, dk, dv, statistics = [empty(*memory) for memory in ready.memory]
    if lse.numel() > 0:
        ready.statistics(out, dout, lse, dlse, statistics, None, None, None)

    if ready.joint is not None and kv_lengths is None:
        ready.joint(q, k, v, dout, statistics, *by_cols[:3], *by_rows, dq, dk, dv)
    else:
        if ready.keys is not None:
            ready.keys(q, k, v, dout, statistics, *by_cols, kv_lengths, seed, slopes, cols, dk, dv)
        if ready.queries is not None:
            ready.queries(q, k, v, dout, statistics, *by_rows, kv_lengths, seed, slopes, rows, dq, sums, dslopes)
    if scores is None:
        return dq, dk, dv
    delta = statistics[:, :, : q.shape[2], 1]
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, dslopes, sums)
