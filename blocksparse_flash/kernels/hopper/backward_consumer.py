"""Consumer warpgroups of the Hopper backward: the products of each step, and the stores of dQ, dK and dV.

Two warpgroups have 64 keys of a work tile each. backward.py has an overview, backward_producer.py the producer and the
pipelines.

Each step adds its dq to the sum of dQ, unless another launch computes dQ:

    by TMA                     one warpgroup computes all of a step's dq, the other one that of the next step. So they
                               drift apart, and one computes exponentials while the other one multiplies
    by atomics from registers  each warpgroup computes half of every step's dq (dq_share)

dk and dv stay in registers until the work tile ends, and what it is decides where they go:

    a whole tile column                 to dK and dV, by TMA                  epilogue
    a split of a tile column            to the workspace of splits            store_splits
    a tile column for one query head    to sums over query heads, by atomics  add_to_sums
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ..triton.tile import TILE, clamped_kv_len, head_base
from .backward_producer import q_start_of, read_work_tile, steps_of_head
from .barriers import CONSUMERS_BARRIER, DQ_BARRIER, consumer_release, consumer_wait, named_barrier
from .bitmask import pair_mask
from .registers import (
    CONSUMER_WARPS,
    WARPGROUP_ROWS,
    accumulator,
    add_product,
    atomic_add_sum,
    in_register_order,
    opaque,
    product,
    store_split,
    wait_for_products,
    zero_keys_from,
)
from .score_mods import apply_score_mods, load_slope, round_p_ds_with_mods
from .tma import store_rows, tma_reduce_add
from .work_tiles import END

# values of a row of the descriptor with which TMA adds to the sum of dQ
DQ_SUM_COLS = gl.constexpr(32)

# ---- state ----


class Staging(NamedTuple):
    """Shared memory of the consumers alone.

    ds      [2, 128, BLOCK_Q], both warpgroups' keys; by parity of the step
    dq      float32, a step's, from which TMA adds to the sum of dQ
    dk, dv  the descriptors' blocks, from which TMA stores them; they may share memory with ds and dq. With a tail, they
            overwrite K and V instead
    """

    ds: Any
    dq: Any
    dk: Any
    dv: Any


class Sums(NamedTuple):
    """dk and dv of this warpgroup's keys in registers, [64, DIM | DIM_V], and their tails or 0."""

    dk: Any
    dk_tail: Any
    dv: Any
    dv_tail: Any


@gluon.jit
def zero_sums(kv):
    """Sums of 0 for keys and values in these KVBuffers."""
    DIM: gl.constexpr = kv.k.shape[4]
    DIM_V: gl.constexpr = kv.v.shape[4]
    b_dk_tail, b_dv_tail = 0, 0
    b_dk = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, accumulator(DIM))
    if kv.k_tail is not None:
        TAIL: gl.constexpr = kv.k_tail.shape[4]
        b_dk_tail = gl.zeros([WARPGROUP_ROWS, TAIL], gl.float32, accumulator(TAIL))
    b_dv = gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, accumulator(DIM_V))
    if kv.v_tail is not None:
        TAIL_V: gl.constexpr = kv.v_tail.shape[4]
        b_dv_tail = gl.zeros([WARPGROUP_ROWS, TAIL_V], gl.float32, accumulator(TAIL_V))
    return Sums(dk=b_dk, dk_tail=b_dk_tail, dv=b_dv, dv_tail=b_dv_tail)


# ---- one step ----


@gluon.constexpr_function
def dq_share(columns, tail, warpgroup, block_q):
    """(first row, first column, columns) of the 64 rows of dq [block_q, columns + tail] that a warpgroup computes.

    Where atomics add dq: half the rows, or half the columns. A tail has the 32 columns of a piece of
    `in_register_order`: one warpgroup computes it, the other one the rest.
    """
    if block_q == 128:
        return 64 * warpgroup, 0, columns
    if tail:
        return (0, 0, columns) if warpgroup == 0 else (0, columns, tail)
    return 0, warpgroup * (columns // 2), columns // 2


@gluon.jit
def rows_of(buffers, i_buffer, FIRST: gl.constexpr, N: gl.constexpr):
    """Rows FIRST to FIRST + N - 1 of a buffer [1, 1, rows, columns]: [N, columns]."""
    return buffers.index(i_buffer).reshape([buffers.shape[3], buffers.shape[4]]).slice(FIRST, N, 0)


@gluon.jit
def backward_step(
    sums, kv_stage, descs, pipelines, staging, ptrs, sizes, mods, p_bias, p_sums, work_tile, kv_limit, i_head, step,
    i_step_total, WARPGROUP: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One step: adds to dk and dv of this warpgroup's keys, and what this warpgroup computes of dq to the sum of dQ.

    kv_stage  buffer of K and V
    p_bias, p_sums  bias and sums of ds of each listed tile of the query head; None without
    i_head    query head
    step      index of the step in the tile lists; without a layout, within the head
    i_step_total  steps of this program so far: they choose the stage
    MASKED    applies bitmasks, or the diagonal and the end of the keys
    """
    q, dout, kv = pipelines.q.buffers, pipelines.dout.buffers, pipelines.kv.buffers
    dtype: gl.constexpr = q.q.dtype
    BLOCK_Q: gl.constexpr = q.q.shape[3]
    STAGES: gl.constexpr = q.q.shape[0]
    DIM: gl.constexpr = kv.k.shape[4]
    TAIL: gl.constexpr = 0 if kv.k_tail is None else kv.k_tail.shape[4]
    # products with q, and with dO: one more for the tail
    DK_PRODUCTS: gl.constexpr = 1 if kv.k_tail is None else 2
    DV_PRODUCTS: gl.constexpr = 1 if kv.v_tail is None else 2
    # of this warpgroup's keys
    FIRST: gl.constexpr = WARPGROUP * WARPGROUP_ROWS
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    query_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    stage = i_step_total % STAGES
    q_tile, dout_tile = rows_of(q.q, stage, 0, BLOCK_Q), rows_of(dout.dout, stage, 0, BLOCK_Q)
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_Q], gl.float32, score_layout)
    # otherwise values derived from it stay in registers across steps and spill; and with two stages the ptxas of Triton
    # 3.6 loses it and reads keys from invalid addresses
    kv_stage = opaque(kv_stage)
    k_half, v_half = rows_of(kv.k, kv_stage, FIRST, WARPGROUP_ROWS), rows_of(kv.v, kv_stage, FIRST, WARPGROUP_ROWS)
    dv_tail_token, dk_tail_token = None, None
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    # [WARPGROUP_ROWS, BLOCK_Q]
    scores_token = warpgroup_mma(k_half, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    if kv.k_tail is not None:
        q_tail, k_tail = rows_of(q.q_tail, stage, 0, BLOCK_Q), rows_of(kv.k_tail, kv_stage, FIRST, WARPGROUP_ROWS)
        scores_token = warpgroup_mma(k_tail, q_tail.permute((1, 0)), scores_token, is_async=True)
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    # [WARPGROUP_ROWS, BLOCK_Q]
    dp_token = warpgroup_mma(v_half, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    if kv.v_tail is not None:
        dout_tail = rows_of(dout.dout_tail, stage, 0, BLOCK_Q)
        v_tail = rows_of(kv.v_tail, kv_stage, FIRST, WARPGROUP_ROWS)
        dp_token = warpgroup_mma(v_tail, dout_tail.permute((1, 0)), dp_token, is_async=True)
    b_scores = warpgroup_mma_wait(DV_PRODUCTS, deps=(scores_token,))
    # loaded late to save registers during the products
    b_lse = q.lse.index(stage).load(query_layout)
    if p_bias is not None:
        b_lse = b_lse - gl.load(p_bias + step // (TILE // BLOCK_Q))
    o_kv = FIRST + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
    kv_start = work_tile.kv_start
    o_query = gl.arange(0, BLOCK_Q, layout=query_layout)
    if mods.slopes_ptr is not None:
        o_query = q_start_of(ptrs.indices_ptr, step, BLOCK_Q) + (sizes.kv_len - sizes.q_len) - kv_start + o_query
    b_scores, b_tanh = apply_score_mods(b_scores, mods, load_slope(mods, i_head), o_kv, o_query)
    b_p = gl.exp2(b_scores - gl.expand_dims(b_lse, 0))
    if ptrs.kv_lengths_ptr is not None:
        b_p = gl.where(gl.expand_dims(kv_start + o_kv < kv_limit, 1), b_p, 0.0)
    if MASKED:
        o_q = gl.arange(0, BLOCK_Q, layout=query_layout)
        b_p = gl.where(pair_mask(ptrs, sizes, kv_start, kv_limit, step, o_kv, o_q, CAUSAL, BLOCK_Q), b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_delta = dout.delta.index(stage).load(query_layout)
    p_sum = None
    if p_sums is not None:
        p_sum = p_sums + (step.to(gl.int64) * CONSUMER_WARPS + 4 * WARPGROUP)
    b_p16, b_ds = round_p_ds_with_mods(b_p, b_dp, b_delta, b_tanh, p_sum, mods, dtype)
    HAS_DQ: gl.constexpr = ptrs.dq_sum_ptr is not None
    TAKES_TURNS: gl.constexpr = descs.dq_sum is not None
    # two buffers: the other warpgroup may still read that of the step before. Without dq a placeholder
    ds_tile = staging.ds.index(i_step_total % 2)
    if TAKES_TURNS:
        ds_tile.slice(FIRST, WARPGROUP_ROWS, 0).store(b_ds)
        fence_async_shared()
        if i_step_total % 2 != WARPGROUP:
            # wait until TMA has read the dq of the step before, which the other warpgroup will overwrite
            tma.store_wait(0)
            named_barrier("arrive", DQ_BARRIER + 1 - WARPGROUP)
    # [WARPGROUP_ROWS, DIM_V]
    dv_token = add_product(b_p16, dout_tile, sums.dv)
    if kv.v_tail is not None:
        dv_tail_token = add_product(b_p16, dout_tail, sums.dv_tail)
    SHARE: gl.constexpr = dq_share(DIM, TAIL, WARPGROUP, BLOCK_Q)
    DQ_COLS: gl.constexpr = SHARE[2]
    if HAS_DQ and not TAKES_TURNS:
        ds_tile.slice(FIRST, WARPGROUP_ROWS, 0).store(b_ds)
        fence_async_shared()
        named_barrier("sync", CONSUMERS_BARRIER)
        ds_part = ds_tile.permute((1, 0)).slice(SHARE[0], WARPGROUP_ROWS, 0)
        if SHARE[1] < DIM:
            k_part = rows_of(kv.k, kv_stage, 0, TILE).slice(SHARE[1], DQ_COLS, 1)
        else:
            k_part = rows_of(kv.k_tail, kv_stage, 0, TILE)
        # [WARPGROUP_ROWS, DQ_COLS]
        dq_token = product(ds_part, k_part)
        b_dv, b_dv_tail = wait_for_products(1, dv_token, dv_tail_token)
        consumer_release(pipelines.dout, stage)
    # [WARPGROUP_ROWS, DIM]
    dk_token = add_product(b_ds, q_tile, sums.dk)
    if kv.k_tail is not None:
        dk_tail_token = add_product(b_ds, q_tail, sums.dk_tail)
    if HAS_DQ and not TAKES_TURNS:
        q_start = q_start_of(ptrs.indices_ptr, step, BLOCK_Q)
        b_dq = warpgroup_mma_wait(DK_PRODUCTS, deps=(dq_token,))
        first = first_of_dq(sizes, work_tile, i_head, q_start, DIM + TAIL, GROUP)
        first = first + (SHARE[0] * DIM + WARPGROUP_ROWS * SHARE[1])
        atomic_add_sum(ptrs.dq_sum_ptr + first, in_register_order(b_dq))
    else:
        b_dv, b_dv_tail = wait_for_products(DK_PRODUCTS, dv_token, dv_tail_token)
        consumer_release(pipelines.dout, stage)
    b_dk, b_dk_tail = wait_for_products(0, dk_token, dk_tail_token)
    consumer_release(pipelines.q, stage)
    if TAKES_TURNS:  # noqa: SIM102
        # after dk: ptxas serializes the products (C7512) if dk is waited for in one branch
        if i_step_total % 2 == WARPGROUP:
            # wait until the other warpgroup has stored its ds, and TMA has read the dq that it computed last
            named_barrier("sync", DQ_BARRIER + WARPGROUP)
            q_start = q_start_of(ptrs.indices_ptr, step, BLOCK_Q)
            first = first_of_dq(sizes, work_tile, i_head, q_start, DIM, GROUP)
            # [BLOCK_Q, DIM]
            b_dq = warpgroup_mma_wait(0, deps=(product(ds_tile.permute((1, 0)), rows_of(kv.k, kv_stage, 0, TILE)),))
            staging.dq.store(in_register_order(b_dq).reshape(staging.dq.shape))
            fence_async_shared()
            tma_reduce_add(descs.dq_sum, [(first // DQ_SUM_COLS).to(gl.int32), 0], staging.dq)
    return Sums(dk=b_dk, dk_tail=b_dk_tail, dv=b_dv, dv_tail=b_dv_tail)


@gluon.jit
def first_of_dq(sizes, work_tile, i_head, q_start, COLS: gl.constexpr, GROUP: gl.constexpr):
    """Index of the first value of the dq of queries from q_start on in the sum of dQ, which has COLS columns."""
    i_batch = work_tile.batch_head // sizes.n_heads
    return ((i_batch * sizes.n_heads * GROUP + i_head).to(gl.int64) * sizes.n_padded + q_start) * COLS


# ---- work tiles ----


@gluon.jit
def mma(
    descs, pipelines, staging, ptrs, record_strides, sizes, mods,
    WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Entry point of a consumer warpgroup, which computes keys 64 * WARPGROUP to 64 * WARPGROUP + 63 of each tile."""
    kv = pipelines.kv.buffers
    BLOCK_Q: gl.constexpr = pipelines.q.buffers.q.shape[3]
    KV_STAGES: gl.constexpr = kv.k.shape[0]
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head > END:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        sums = zero_sums(kv)
        # wait until TMA has read dk and dv of the previous work tile from the buffers that the steps write
        tma.store_wait(0)
        named_barrier("sync", CONSUMERS_BARRIER)
        kv_stage = i_tile % KV_STAGES
        consumer_wait(pipelines.kv, kv_stage, i_tile // KV_STAGES)
        if ptrs.kv_lengths_ptr is not None:
            zero_rows(kv.k, kv_stage, kv_start, kv_limit, WARPGROUP)
            zero_rows(kv.k_tail, kv_stage, kv_start, kv_limit, WARPGROUP)
            zero_rows(kv.v, kv_stage, kv_start, kv_limit, WARPGROUP)
            zero_rows(kv.v_tail, kv_stage, kv_start, kv_limit, WARPGROUP)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, TILE
            )
            i_batch, i_head = batch_head // sizes.n_heads, batch_head % sizes.n_heads * GROUP + i_group_head
            p_bias, p_sums = None, None
            if mods.bias_ptr is not None:
                p_bias = head_base(mods.bias_ptr, mods.bias_strides, i_batch, i_head)
            if ptrs.bias_sums_ptr is not None:
                p_sums = head_base(ptrs.bias_sums_ptr, mods.bias_strides[2:], i_batch, i_head)
            # masked steps, then full ones: two loops, so that full steps pay for no mask
            for FULL in gl.static_range(2):
                for i in range(steps.n_masked if FULL else 0, steps.n_steps if FULL else steps.n_masked):
                    sums = backward_step(
                        sums, kv_stage, descs, pipelines, staging, ptrs, sizes, mods, p_bias, p_sums, work_tile,
                        kv_limit, i_head, steps.first + i, n_done + i, WARPGROUP, MASKED=not FULL, CAUSAL=CAUSAL,
                        GROUP=GROUP,
                    )  # fmt: skip
            n_done += steps.n_steps
        HAS_TAIL: gl.constexpr = kv.k_tail is not None or kv.v_tail is not None
        if not HAS_TAIL:
            consumer_release(pipelines.kv, kv_stage)
        if descs.dq_sum is not None:
            # wait until TMA has read the last dq, whose buffer may be that of dv
            tma.store_wait(0)
        # the first two conditions are known at compile time, the third is not
        if ptrs.dk_sum_ptr is not None:
            add_to_sums(sums, kv, ptrs, sizes, work_tile, WARPGROUP)
        elif ptrs.splits_ptr is None:  # noqa: SIM114
            epilogue(sums, descs, pipelines, staging, sizes, work_tile, kv_stage, WARPGROUP)
        elif work_tile.i_block < 0:
            epilogue(sums, descs, pipelines, staging, sizes, work_tile, kv_stage, WARPGROUP)
        else:
            store_splits(sums, kv, ptrs, work_tile, WARPGROUP)
        if HAS_TAIL:
            # wait until TMA has read dk and dv from the buffers of K and V
            tma.store_wait(0)
            consumer_release(pipelines.kv, kv_stage)
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    tma.store_wait(0)


@gluon.jit
def zero_rows(buffers, kv_stage, kv_start, kv_limit, WARPGROUP: gl.constexpr):
    """Zeroes keys or values from kv_limit on, see zero_keys_from. buffers: as in KVBuffers."""
    if buffers is not None:
        zero_keys_from(buffers.index(kv_stage).reshape([TILE, buffers.shape[4]]), kv_start, kv_limit, WARPGROUP)


# ---- dk and dv of a work tile ----


@gluon.jit
def add_to_sums(sums, kv, ptrs, sizes, work_tile, WARPGROUP: gl.constexpr):
    """Adds dk and dv of one query head to the sums over the heads of its group."""
    i_row = (work_tile.batch_head // sizes.heads_per_kv).to(gl.int64) * (sizes.n_tile_cols * TILE)
    i_row = i_row + work_tile.kv_start + WARPGROUP * WARPGROUP_ROWS
    add_rows(ptrs.dk_sum_ptr, i_row, sums.dk, None if kv.k_tail is None else sums.dk_tail)
    add_rows(ptrs.dv_sum_ptr, i_row, sums.dv, None if kv.v_tail is None else sums.dv_tail)


@gluon.jit
def add_rows(sum_ptr, i_row, b_sum, b_tail):
    """Adds 64 rows to a sum in the order of `in_register_order`. b_tail: the tail of their columns, or None."""
    COLS: gl.constexpr = b_sum.shape[1]
    if b_tail is None:
        atomic_add_sum(sum_ptr + i_row * COLS, in_register_order(b_sum))
    else:
        p_rows = sum_ptr + i_row * (COLS + b_tail.shape[1])
        atomic_add_sum(p_rows, in_register_order(b_sum))
        atomic_add_sum(p_rows + WARPGROUP_ROWS * COLS, in_register_order(b_tail))


@gluon.jit
def store_splits(sums, kv, ptrs, work_tile, WARPGROUP: gl.constexpr):
    """Stores dk and dv of a split to its block of the workspace."""
    DIM: gl.constexpr = sums.dk.shape[1]
    DIM_V: gl.constexpr = sums.dv.shape[1]
    COLS: gl.constexpr = DIM if kv.k_tail is None else DIM + kv.k_tail.shape[4]
    COLS_V: gl.constexpr = DIM_V if kv.v_tail is None else DIM_V + kv.v_tail.shape[4]
    p_dk = ptrs.splits_ptr + work_tile.i_block.to(gl.int64) * (TILE * (COLS + COLS_V))
    p_dv = p_dk + TILE * COLS
    store_split(p_dk, sums.dk, WARPGROUP, COLS)
    store_split(p_dv, sums.dv, WARPGROUP, COLS_V)
    if kv.k_tail is not None:
        store_split(p_dk + DIM, sums.dk_tail, WARPGROUP, COLS)
    if kv.v_tail is not None:
        store_split(p_dv + DIM_V, sums.dv_tail, WARPGROUP, COLS_V)


@gluon.jit
def epilogue(sums, descs, pipelines, staging, sizes, work_tile, kv_stage, WARPGROUP: gl.constexpr):
    """Stores dk and dv of a whole tile column with TMA."""
    kv = pipelines.kv.buffers
    k_tail = None if kv.k_tail is None else kv.k_tail.index(kv_stage)
    v_tail = None if kv.v_tail is None else kv.v_tail.index(kv_stage)
    if kv.k_tail is not None or kv.v_tail is not None:
        dk_buffer, dv_buffer = kv.k.index(kv_stage), kv.v.index(kv_stage)
    else:
        dk_buffer, dv_buffer = staging.dk, staging.dv
    # wait until the other warpgroup has read ds, or K and V, and TMA its dq
    named_barrier("sync", CONSUMERS_BARRIER)
    stage_rows(sums.dk * sizes.scale, dk_buffer, WARPGROUP)
    stage_rows(sums.dv, dv_buffer, WARPGROUP)
    if k_tail is not None:
        stage_rows(sums.dk_tail * sizes.scale, k_tail, WARPGROUP)
    if v_tail is not None:
        stage_rows(sums.dv_tail, v_tail, WARPGROUP)
    fence_async_shared()
    named_barrier("sync", CONSUMERS_BARRIER)
    i_batch, i_head = work_tile.batch_head // sizes.n_heads, work_tile.batch_head % sizes.n_heads
    if WARPGROUP == 0:
        store_rows(descs.dk, dk_buffer, k_tail, i_batch, i_head, work_tile.kv_start)
    else:
        store_rows(descs.dv, dv_buffer, v_tail, i_batch, i_head, work_tile.kv_start)


@gluon.jit
def stage_rows(b_sum, buffer, WARPGROUP: gl.constexpr):
    """Stores this warpgroup's rows to a buffer [1, 1, 128, columns]."""
    tile = buffer.reshape([TILE, b_sum.shape[1]])
    tile.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(b_sum.to(buffer.dtype))
