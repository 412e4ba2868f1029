"""Backward kernels: dk and dv of a block of keys, dq of a block of queries, or both in one launch; see backward.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..arguments import Strides
from .backward_preprocess import PADDED_TO, load_lse_delta
from .score_mods import apply_score_mods, distances, load_slope, store_sums
from .tile import (
    BEGIN,
    N_TILES,
    NUMBER,
    add_product,
    attending_pairs,
    begin_step,
    bitmask_of,
    clamped_kv_len,
    dense_q_steps,
    find_line_record,
    find_work_record,
    kept_pairs,
    kv_steps,
    load_seed,
    load_tile,
    product,
    result_rows,
    store_tile,
    tile_start,
    where_kept,
)


class TileLists(NamedTuple):
    """Pointers to the tile rows or tile columns of a plan; None without a layout."""

    records: Any
    indices: Any
    ids: Any
    words: Any


class Sizes(NamedTuple):
    """Integers of a launch; n_lines is the number of tile rows or tile columns, or of blocks without a layout."""

    n_heads: Any
    n_batch_heads: Any
    n_lines: Any
    q_len: Any
    kv_len: Any
    n_padded: Any


class Factors(NamedTuple):
    """Factors on scores and gradients; threshold and keep_scale are those of dropout, cap is None without a softcap."""

    scale_log2: Any
    scale: Any
    threshold: Any
    keep_scale: Any
    cap: Any


# fmt: off
@triton.jit
def keys_program(
    # program of this block
    pid,
    # inputs; tiles: the tile columns
    q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr, tiles, kv_lengths_ptr, seed,
    slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs in the memory orders of k and v
    dk_ptr, dv_ptr,
    # sizes: n_heads KV heads, n_batch_heads = batch * n_heads, n_lines = tile columns (key blocks without a layout)
    strides, sizes, factors, C: tl.constexpr,
):
    """dk and dv of a block of keys of a KV head: iterates over its tile column for each query head of the group."""
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    q_len, kv_len, scale_log2, cap = sizes.q_len, sizes.kv_len, factors.scale_log2, factors.cap
    HAS_LAYOUT: tl.constexpr = tiles.records is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = C.TILE // BLOCK_Q
    if HAS_LAYOUT:
        batch_head, p_record, i_split = find_work_record(
            tiles.records, strides.records, pid, sizes.n_lines, sizes.n_heads, sizes.n_batch_heads,
            C.TILE // BLOCK_KV, C.GROUP,
        )
        kv_start = tl.load(p_record + NUMBER) * C.TILE + i_split * BLOCK_KV
    else:
        batch_head = pid // sizes.n_lines
        kv_start = pid % sizes.n_lines * BLOCK_KV
    i_batch = batch_head // sizes.n_heads
    i_kv_head = batch_head % sizes.n_heads
    limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)

    b_k = load_tile(
        k_ref, strides.k, i_batch, i_kv_head, kv_start, limit, C.HEAD_DIM, BLOCK_KV, DIM, TMA=C.TMA, LIMITED=LIMITED
    )
    b_v = load_tile(
        v_ref, strides.v, i_batch, i_kv_head, kv_start, limit, C.V_DIM, BLOCK_KV, DIM_V, TMA=C.TMA, LIMITED=LIMITED
    )
    b_dk = tl.zeros([BLOCK_KV, DIM], tl.float32)
    b_dk_lost = tl.zeros([BLOCK_KV, DIM], tl.float32)
    b_dv = tl.zeros([BLOCK_KV, DIM_V], tl.float32)
    b_dv_lost = tl.zeros([BLOCK_KV, DIM_V], tl.float32)
    factor = 1.0 if C.MODIFIES_SCORES else scale_log2

    for i_member in tl.range(0, C.GROUP):
        i_head = i_kv_head * C.GROUP + i_member
        q_batch_head = i_batch * sizes.n_heads * C.GROUP + i_head
        slope = load_slope(slopes_ptr, i_head)
        # steps of BLOCK_Q queries: the partial tiles of the column, then the full ones
        if HAS_LAYOUT:
            p_member = p_record
            if C.GROUP > 1:
                # heads of a group may have different layouts, hence launch orders
                p_member = find_line_record(tiles.records, strides.records, i_batch, i_head, kv_start // C.TILE)
            first, full = tl.load(p_member + BEGIN) * STEPS, 0
            end = first + tl.load(p_member + N_TILES) * STEPS
            q_next = tile_start(tiles.indices, first, BLOCK_Q, C.TILE)
        else:
            first, full, end = dense_q_steps(kv_start, q_len, kv_len, C.CAUSAL, BLOCK_Q, BLOCK_KV)
            q_next = first * BLOCK_Q
        n_full = q_len // BLOCK_Q
        for i_step in tl.range(first, end):
            is_masked = (i_step < full) | (i_step >= n_full)
            q_start, is_partial, q_next = begin_step(tiles.indices, q_next, i_step, is_masked, BLOCK_Q, C.TILE)
            # [BLOCK_Q, DIM]
            b_q = load_tile(
                q_ref, strides.q, i_batch, i_head, q_start, q_len, C.HEAD_DIM, BLOCK_Q, DIM, TMA=C.TMA, LIMITED=False
            )
            # [BLOCK_Q]
            b_lse, b_delta = load_lse_delta(lse_delta_ptr, q_batch_head, q_start, sizes.n_padded, BLOCK_Q)
            # [BLOCK_KV, BLOCK_Q]
            b_scores = product(b_k, tl.trans(b_q), PRECISION)
            if C.MODIFIES_SCORES:
                b_scores, b_tanh = apply_score_mods(
                    b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, pair_bias_ptr, strides, i_batch, i_head,
                    i_tile=i_step // STEPS, q_start=q_start, kv_start=kv_start, q_len=q_len, kv_len=kv_len,
                    CELL_Q=C.CELL_Q, CELL_KV=C.CELL_KV, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV, TRANSPOSED=True,
                )
            b_p = tl.math.exp2(b_scores * factor - b_lse[None, :])
            if LIMITED:
                m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
                b_p = tl.where(m_kv[:, None], b_p, 0.0)
            if is_partial:
                m_pairs = attending_pairs(
                    tiles.words, bitmask_of(tiles.ids, i_step // STEPS), q_start, kv_start, q_len, kv_len, limit,
                    C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE, True,
                )
                b_p = tl.where(m_pairs, b_p, 0.0)
            # [BLOCK_Q, DIM_V]
            b_dout = load_tile(
                dout_ref, strides.dout, i_batch, i_head, q_start, q_len, C.V_DIM, BLOCK_Q, DIM_V,
                TMA=C.TMA, LIMITED=False,
            )
            if C.DROPOUT:
                m_kept = kept_pairs(
                    seed, factors.threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, True
                )
                b_kept_p = where_kept(m_kept, b_p, factors.keep_scale)
                b_dv, b_dv_lost = add_product(b_kept_p.to(b_dout.dtype), b_dout, b_dv, b_dv_lost, PRECISION)
                b_dp = product(b_v, tl.trans(b_dout), PRECISION)
                b_ds = b_kept_p * b_dp - b_p * b_delta[None, :]
            else:
                b_dv, b_dv_lost = add_product(b_p.to(b_dout.dtype), b_dout, b_dv, b_dv_lost, PRECISION)
                b_dp = product(b_v, tl.trans(b_dout), PRECISION)
                b_ds = b_p * (b_dp - b_delta[None, :])
            if cap is not None:
                b_ds = b_ds * (1.0 - b_tanh * b_tanh)
            b_dk, b_dk_lost = add_product(b_ds.to(b_q.dtype), b_q, b_dk, b_dk_lost, PRECISION)

    b_dk = b_dk * factors.scale
    if C.DROPOUT:
        b_dk, b_dv = b_dk * factors.keep_scale, b_dv * factors.keep_scale
    p_dk, dk_stride = result_rows(dk_ptr, batch_head, sizes.n_heads, kv_len, C.HEAD_DIM, C.K_BY_TOKEN)
    store_tile(p_dk, dk_stride, kv_start, kv_len, b_dk, C.HEAD_DIM, BLOCK_KV, DIM)
    p_dv, dv_stride = result_rows(dv_ptr, batch_head, sizes.n_heads, kv_len, C.V_DIM, C.V_BY_TOKEN)
    store_tile(p_dv, dv_stride, kv_start, kv_len, b_dv, C.V_DIM, BLOCK_KV, DIM_V)


@triton.jit
def queries_program(
    # program of this block
    pid,
    # inputs; tiles: the tile rows
    q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr, tiles, kv_lengths_ptr, seed,
    slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs, dq in the memory order of q; sums_ptr: bias sums of ds; dslopes_ptr: sum of -ds * distance per query
    dq_ptr, sums_ptr, dslopes_ptr,
    # sizes: n_batch_heads = batch * heads, n_lines = tile rows (blocks of queries without a layout)
    strides, sizes, factors, C: tl.constexpr,
):
    """dq of a block of queries of a head: iterates over its tile row."""
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    q_len, kv_len, scale_log2, cap = sizes.q_len, sizes.kv_len, factors.scale_log2, factors.cap
    HAS_LAYOUT: tl.constexpr = tiles.records is not None
    LIMITED: tl.constexpr = kv_lengths_ptr is not None
    STEPS: tl.constexpr = C.TILE // BLOCK_KV
    if HAS_LAYOUT:
        batch_head, p_record, i_split = find_work_record(
            tiles.records, strides.records, pid, sizes.n_lines, sizes.n_heads, sizes.n_batch_heads, C.TILE // BLOCK_Q, 1
        )
        q_start = tl.load(p_record + NUMBER) * C.TILE + i_split * BLOCK_Q
    else:
        batch_head = pid // sizes.n_lines
        q_start = (sizes.n_lines - 1 - pid % sizes.n_lines) * BLOCK_Q
    i_batch = batch_head // sizes.n_heads
    i_head = batch_head % sizes.n_heads
    i_kv_head = i_head // C.GROUP
    limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)

    b_q = load_tile(
        q_ref, strides.q, i_batch, i_head, q_start, q_len, C.HEAD_DIM, BLOCK_Q, DIM, TMA=C.TMA, LIMITED=False
    )
    b_dout = load_tile(
        dout_ref, strides.dout, i_batch, i_head, q_start, q_len, C.V_DIM, BLOCK_Q, DIM_V, TMA=C.TMA, LIMITED=False
    )
    b_lse, b_delta = load_lse_delta(lse_delta_ptr, batch_head, q_start, sizes.n_padded, BLOCK_Q)
    b_dq = tl.zeros([BLOCK_Q, DIM], tl.float32)
    b_dq_lost = tl.zeros([BLOCK_Q, DIM], tl.float32)
    factor = 1.0 if C.MODIFIES_SCORES else scale_log2
    slope = load_slope(slopes_ptr, i_head)
    if dslopes_ptr is not None:
        b_dslope = tl.zeros([BLOCK_Q], tl.float32)

    p_tiles = p_record if HAS_LAYOUT else None
    first, end, n_full = kv_steps(
        tiles.indices, p_tiles, q_start, q_len, kv_len, limit, C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE
    )
    kv_next = tile_start(tiles.indices, first, BLOCK_KV, C.TILE) if HAS_LAYOUT else 0
    for i_step in tl.range(first, end):
        kv_start, is_partial, kv_next = begin_step(tiles.indices, kv_next, i_step, i_step >= n_full, BLOCK_KV, C.TILE)
        # [BLOCK_KV, DIM], [BLOCK_KV, DIM_V]
        b_k = load_tile(
            k_ref, strides.k, i_batch, i_kv_head, kv_start, limit, C.HEAD_DIM, BLOCK_KV, DIM, TMA=C.TMA, LIMITED=LIMITED
        )
        b_v = load_tile(
            v_ref, strides.v, i_batch, i_kv_head, kv_start, limit, C.V_DIM, BLOCK_KV, DIM_V, TMA=C.TMA, LIMITED=LIMITED
        )
        # [BLOCK_Q, BLOCK_KV]
        b_scores = product(b_q, tl.trans(b_k), PRECISION)
        if C.MODIFIES_SCORES:
            b_scores, b_tanh = apply_score_mods(
                b_scores, scale_log2, cap, slopes_ptr, slope, tables_ptr, pair_bias_ptr, strides, i_batch, i_head,
                i_tile=i_step // STEPS, q_start=q_start, kv_start=kv_start, q_len=q_len, kv_len=kv_len,
                CELL_Q=C.CELL_Q, CELL_KV=C.CELL_KV, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV, TRANSPOSED=False,
            )
        b_dp = product(b_dout, tl.trans(b_v), PRECISION)
        b_p = tl.math.exp2(b_scores * factor - b_lse[:, None])
        if LIMITED and HAS_LAYOUT:
            m_kv = kv_start + tl.arange(0, BLOCK_KV) < limit
            b_p = tl.where(m_kv[None, :], b_p, 0.0)
        if is_partial:
            m_pairs = attending_pairs(
                tiles.words, bitmask_of(tiles.ids, i_step // STEPS), q_start, kv_start, q_len, kv_len, limit,
                C.CAUSAL, BLOCK_Q, BLOCK_KV, C.TILE, False,
            )
            b_p = tl.where(m_pairs, b_p, 0.0)
        if C.DROPOUT:
            m_kept = kept_pairs(
                seed, factors.threshold, i_batch, i_head, q_start, kv_start, BLOCK_Q, BLOCK_KV, False
            )
            b_ds = where_kept(m_kept, b_p, factors.keep_scale) * b_dp - b_p * b_delta[:, None]
        else:
            b_ds = b_p * (b_dp - b_delta[:, None])
        if dslopes_ptr is not None:
            b_dslope -= tl.sum(b_ds * distances(q_start, kv_start, kv_len - q_len, BLOCK_Q, BLOCK_KV, False), 1)
        if sums_ptr is not None:
            store_sums(
                sums_ptr, strides.sums, i_batch, i_head, i_step // STEPS, q_start, kv_start,
                b_ds * factors.keep_scale if C.DROPOUT else b_ds,
                C.CELL_Q, C.CELL_KV, BLOCK_Q, BLOCK_KV,
            )
        if cap is not None:
            b_ds = b_ds * (1.0 - b_tanh * b_tanh)
        b_dq, b_dq_lost = add_product(b_ds.to(b_k.dtype), b_k, b_dq, b_dq_lost, PRECISION)
    if C.DROPOUT:
        b_dq = b_dq * factors.keep_scale
    p_dq, dq_stride = result_rows(dq_ptr, batch_head, sizes.n_heads, q_len, C.HEAD_DIM, C.Q_BY_TOKEN)
    store_tile(p_dq, dq_stride, q_start, q_len, b_dq * factors.scale, C.HEAD_DIM, BLOCK_Q, DIM)
    if dslopes_ptr is not None:
        o_q = q_start + tl.arange(0, BLOCK_Q)
        if C.DROPOUT:
            b_dslope = b_dslope * factors.keep_scale
        tl.store(dslopes_ptr + batch_head.to(tl.int64) * q_len + o_q, b_dslope, mask=o_q < q_len)


@triton.jit(
    do_not_specialize=["seed", "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "n_padded", "threshold"]
)
def keys_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
    records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, seed: tl.int64,
    slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs
    dk_ptr, dv_ptr,
    # arguments.Strides
    strides,
    # fields of Sizes, then of Factors
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded, scale_log2, scale, threshold, keep_scale, cap,
    # arguments.Constants
    C: tl.constexpr,
):
    """One program per block of keys; see `keys_program`."""
    keys_program(
        tl.program_id(0), q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
        tiles=TileLists(records_ptr, indices_ptr, ids_ptr, words_ptr),
        kv_lengths_ptr=kv_lengths_ptr, seed=load_seed(seed_ptr, seed) if C.DROPOUT else None,
        slopes_ptr=slopes_ptr, tables_ptr=tables_ptr, pair_bias_ptr=pair_bias_ptr,
        dk_ptr=dk_ptr, dv_ptr=dv_ptr, strides=strides,
        sizes=Sizes(n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded),
        factors=Factors(scale_log2, scale, threshold, keep_scale, cap), C=C,
    )


@triton.jit(do_not_specialize=["seed", "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "threshold"])
def queries_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
    records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, seed_ptr, seed: tl.int64,
    slopes_ptr, tables_ptr, pair_bias_ptr,
    # outputs
    dq_ptr, sums_ptr, dslopes_ptr,
    # arguments.Strides
    strides,
    # fields of Sizes but the last, then of Factors
    n_heads, n_batch_heads, n_lines, q_len, kv_len, scale_log2, scale, threshold, keep_scale, cap,
    # arguments.Constants
    C: tl.constexpr,
):
    """One program per block of queries; see `queries_program`."""
    queries_program(
        tl.program_id(0), q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
        tiles=TileLists(records_ptr, indices_ptr, ids_ptr, words_ptr),
        kv_lengths_ptr=kv_lengths_ptr, seed=load_seed(seed_ptr, seed) if C.DROPOUT else None,
        slopes_ptr=slopes_ptr, tables_ptr=tables_ptr, pair_bias_ptr=pair_bias_ptr,
        dq_ptr=dq_ptr, sums_ptr=sums_ptr, dslopes_ptr=dslopes_ptr, strides=strides,
        sizes=Sizes(n_heads, n_batch_heads, n_lines, q_len, kv_len, tl.cdiv(q_len, PADDED_TO) * PADDED_TO),
        factors=Factors(scale_log2, scale, threshold, keep_scale, cap), C=C,
    )


@triton.jit(do_not_specialize=["n_heads", "n_batch_heads", "n_cols", "n_rows", "n_keys", "q_len", "kv_len", "n_padded"])
def joint_kernel(
    # inputs
    q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr, col_records_ptr, col_indices_ptr, col_ids_ptr,
    row_records_ptr, row_indices_ptr, row_ids_ptr, words_ptr,
    # outputs
    dq_ptr, dk_ptr, dv_ptr,
    # arguments.Strides, whose records are those of the tile columns
    strides, row_record_strides,
    # sizes: n_batch_heads = batch * heads; the first n_keys programs compute dk and dv, the others dq
    n_heads, n_batch_heads, n_cols, n_rows, n_keys, q_len, kv_len, n_padded, scale_log2, scale,
    # arguments.Constants of each program
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
):
    """dk, dv and dq, without grouped heads, lengths, dropout or score mods: see `keys_program`, `queries_program`."""
    pid = tl.program_id(0)
    if pid < n_keys:
        keys_program(
            pid, q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
            tiles=TileLists(col_records_ptr, col_indices_ptr, col_ids_ptr, words_ptr),
            kv_lengths_ptr=None, seed=None, slopes_ptr=None, tables_ptr=None, pair_bias_ptr=None,
            dk_ptr=dk_ptr, dv_ptr=dv_ptr, strides=strides,
            sizes=Sizes(n_heads, n_batch_heads, n_cols, q_len, kv_len, n_padded),
            factors=Factors(scale_log2, scale, 0, 1.0, None), C=KEYS,
        )
    else:
        queries_program(
            pid - n_keys, q_ref, k_ref, v_ref, dout_ref, lse_delta_ptr,
            tiles=TileLists(row_records_ptr, row_indices_ptr, row_ids_ptr, words_ptr),
            kv_lengths_ptr=None, seed=None, slopes_ptr=None, tables_ptr=None, pair_bias_ptr=None,
            dq_ptr=dq_ptr, sums_ptr=None, dslopes_ptr=None,
            strides=Strides(
                strides.q, strides.k, strides.v, strides.dout, row_record_strides, None, None, None, None, None, None
            ),
            sizes=Sizes(n_heads, n_batch_heads, n_rows, q_len, kv_len, n_padded),
            factors=Factors(scale_log2, scale, 0, 1.0, None), C=QUERIES,
        )
# fmt: on
