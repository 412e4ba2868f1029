"""Hopper kernel for dK and dV beyond head_dim 128, in Gluon (sm90), warp-specialized.

dk and dv of 128 keys would leave two warpgroups too few registers for the scores. Here a work tile has 64 keys, and the
warpgroups divide the products instead of the keys:

    producer warp           dv warpgroup                        dk warpgroup
    TMA loads of q and dO   s^T = k q^T, p = exp2(s - lse)      dp^T = v dO^T
    for both                p to shared memory              ->  ds = p * (dp - delta)
                            dv += p^T dO                        dk += ds^T q

Both have two products per step and one of the two accumulators. p (with a softcap, p times its derivative) is passed in
float32, in register order (registers.in_register_order): s^T and dp^T have the same layout, so thread i reads what
thread i of the other warpgroup wrote.

The producer is that of the backward for smaller head dimensions (backward_producer.py).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.tile import TILE, clamped_kv_len, head_base
from .backward_producer import (
    WORK_TILE_STRIDE,
    Descriptors,
    DOutBuffers,
    KVBuffers,
    QBuffers,
    Sizes,
    load,
    q_start_of,
    read_work_tile,
    steps_of_head,
)
from .barriers import (
    CONSUMERS_BARRIER,
    Pipeline,
    allocate_mbarriers,
    allocate_pipeline,
    consumer_release,
    consumer_wait,
    named_barrier,
    producer_acquire,
    producer_commit,
)
from .bitmask import pair_mask
from .registers import (
    accumulator,
    add_product,
    from_register_order,
    in_register_order,
    opaque,
    register_order_layout,
    store_split,
    tile_at,
    wait_for_products,
    zero_keys_from,
)
from .score_mods import ScoreMods, apply_score_mods, load_slope
from .tma import allocate_rows, allocate_tail, has_tail, store_rows
from .work_tiles import END, WORK_TILE_STAGES

# keys of a work tile, and queries of a step
KEYS = gl.constexpr(64)
BLOCK_Q = gl.constexpr(64)
# buffers of p between the warpgroups
P_STAGES = gl.constexpr(2)
# registers per thread of the second consumer and of the producer warp; Triton gives the first consumer, the default
# partition, those that are left
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(32)


class Pipelines(NamedTuple):
    """The pipelines of backward_producer.Pipelines, and that of p [P_STAGES, KEYS * BLOCK_Q] float32."""

    work_tiles: Pipeline
    kv: Pipeline
    q: Pipeline
    dout: Pipeline
    p: Pipeline


# ---- dv warpgroup ----


@gluon.jit
def add_dv(
    b_dv, b_dv_tail, pipelines, ptrs, sizes, mods, p_bias, kv_start, kv_limit, i_head, step, i_step_total,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Computes p of one step, passes it to the other warpgroup, and returns dv plus p^T dO, and its tail or 0.

    p_bias  bias of each listed tile of the query head; None without a bias
    step    index of the step in the plan's lists, or without a layout within the head
    i_step_total  steps of this program so far: they choose the stage
    MASKED  applies bitmasks, or the diagonal and the end of the keys
    """
    q, dout, kv = pipelines.q.buffers, pipelines.dout.buffers, pipelines.kv.buffers
    dtype: gl.constexpr = q.q.dtype
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    query_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    STAGES: gl.constexpr = q.q.shape[0]
    stage = i_step_total % STAGES
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    b_zero = gl.zeros([KEYS, BLOCK_Q], gl.float32, score_layout)
    # [KEYS, BLOCK_Q]. opaque: otherwise wgmma descriptors of k stay in registers across steps and spill
    scores_token = warpgroup_mma(
        tile_at(kv.k, opaque(0)), tile_at(q.q, stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
    )
    if kv.k_tail is not None:
        q_tail = tile_at(q.q_tail, stage).permute((1, 0))
        scores_token = warpgroup_mma(tile_at(kv.k_tail, 0), q_tail, scores_token, is_async=True)
    b_lse = q.lse.index(stage).load(query_layout)
    if p_bias is not None:
        b_lse = b_lse - gl.load(p_bias + step // (TILE // BLOCK_Q))
    b_scores = warpgroup_mma_wait(0, deps=(scores_token,))
    consumer_release(pipelines.q, stage)
    o_kv = gl.arange(0, KEYS, layout=gl.SliceLayout(1, score_layout))
    o_q = gl.arange(0, BLOCK_Q, layout=query_layout)
    o_query = o_q
    if mods.slopes_ptr is not None:
        o_query = q_start_of(ptrs.indices_ptr, step, BLOCK_Q) + (sizes.kv_len - sizes.q_len) - kv_start + o_q
    b_scores, b_tanh = apply_score_mods(b_scores, mods, load_slope(mods, i_head), o_kv, o_query)
    b_p = gl.exp2(b_scores - gl.expand_dims(b_lse, 0))
    if ptrs.kv_lengths_ptr is not None:
        b_p = gl.where(gl.expand_dims(kv_start + o_kv < kv_limit, 1), b_p, 0.0)
    if MASKED:
        # a bitmask covers a whole tile
        o_part = kv_start % TILE
        m_pairs = pair_mask(ptrs, sizes, kv_start - o_part, kv_limit, step, o_part + o_kv, o_q, CAUSAL, BLOCK_Q)
        b_p = gl.where(m_pairs, b_p, 0.0)
    b_passed = b_p
    if mods.cap is not None:
        # ds also has the derivative of the softcap as a factor
        b_passed = b_p * (1.0 - b_tanh * b_tanh)
    i_buffer = i_step_total % P_STAGES
    producer_acquire(pipelines.p, i_buffer, i_step_total // P_STAGES)
    pipelines.p.buffers.index(i_buffer).store(in_register_order(b_passed))
    producer_commit(pipelines.p, i_buffer)
    b_p16 = b_p.to(dtype)
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    # [KEYS, DIM_V]
    dv_token, tail_token = add_product(b_p16, tile_at(dout.dout, stage), b_dv), None
    if dout.dout_tail is not None:
        tail_token = add_product(b_p16, tile_at(dout.dout_tail, stage), b_dv_tail)
    b_dv, b_dv_tail = wait_for_products(0, dv_token, tail_token)
    consumer_release(pipelines.dout, stage)
    return b_dv, b_dv_tail


@gluon.jit
def compute_dv(
    dv_desc, pipelines, ptrs, record_strides, sizes, mods,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr,
):  # fmt: skip
    """Entry point of the dv warpgroup."""
    kv = pipelines.kv
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head > END:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        b_dv, b_dv_tail = zero_sum(kv.buffers.v, kv.buffers.v_tail)
        consumer_wait(kv, 0, i_tile)
        zero_last_keys(kv.buffers, ptrs, kv_start, kv_limit, 0)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, KEYS
            )
            i_head, p_bias = batch_head % sizes.n_heads * GROUP + i_group_head, None
            if mods.bias_ptr is not None:
                p_bias = head_base(mods.bias_ptr, mods.bias_strides, batch_head // sizes.n_heads, i_head)
            # masked steps, then full ones: two loops, so that full steps pay for no mask
            for FULL in gl.static_range(2):
                for i in range(steps.n_masked if FULL else 0, steps.n_steps if FULL else steps.n_masked):
                    b_dv, b_dv_tail = add_dv(
                        b_dv, b_dv_tail, pipelines, ptrs, sizes, mods, p_bias, kv_start, kv_limit, i_head,
                        steps.first + i, n_done + i, MASKED=not FULL, CAUSAL=CAUSAL,
                    )  # fmt: skip
            n_done += steps.n_steps
        # in the block of a split, dv comes after dk
        store_sum(
            b_dv, b_dv_tail, 1.0, dv_desc, kv, kv.buffers.v, kv.buffers.v_tail, ptrs, sizes, work_tile, TILE * COLS,
            TILE * (COLS + COLS_V), COLS_V,
        )  # fmt: skip
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


# ---- dk warpgroup ----


@gluon.jit
def add_dk(b_dk, b_dk_tail, pipelines, i_step_total):
    """dk plus ds^T q of one step, and its tail or 0. i_step_total: as in add_dv."""
    q, dout, kv = pipelines.q.buffers, pipelines.dout.buffers, pipelines.kv.buffers
    dtype: gl.constexpr = q.q.dtype
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    STAGES: gl.constexpr = q.q.shape[0]
    stage = i_step_total % STAGES
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    b_zero = gl.zeros([KEYS, BLOCK_Q], gl.float32, score_layout)
    # [KEYS, BLOCK_Q]
    dp_token = warpgroup_mma(
        tile_at(kv.v, 0), tile_at(dout.dout, stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
    )
    if kv.v_tail is not None:
        dout_tail = tile_at(dout.dout_tail, stage).permute((1, 0))
        dp_token = warpgroup_mma(tile_at(kv.v_tail, 0), dout_tail, dp_token, is_async=True)
    b_delta = dout.delta.index(stage).load(gl.SliceLayout(0, score_layout))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    consumer_release(pipelines.dout, stage)
    i_buffer = i_step_total % P_STAGES
    consumer_wait(pipelines.p, i_buffer, i_step_total // P_STAGES)
    b_p = from_register_order(pipelines.p.buffers.index(i_buffer).load(register_order_layout(BLOCK_Q)), BLOCK_Q)
    consumer_release(pipelines.p, i_buffer)
    b_ds = (b_p * (b_dp - gl.expand_dims(b_delta, 0))).to(dtype)
    # p implies that q has arrived, but only threads that waited for its barrier may rely on it
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    # [KEYS, DIM]
    dk_token, tail_token = add_product(b_ds, tile_at(q.q, stage), b_dk), None
    if q.q_tail is not None:
        tail_token = add_product(b_ds, tile_at(q.q_tail, stage), b_dk_tail)
    b_dk, b_dk_tail = wait_for_products(0, dk_token, tail_token)
    consumer_release(pipelines.q, stage)
    return b_dk, b_dk_tail


@gluon.jit
def compute_dk(
    dk_desc, pipelines, ptrs, record_strides, sizes,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr,
):  # fmt: skip
    """Entry point of the dk warpgroup."""
    kv = pipelines.kv
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head > END:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        b_dk, b_dk_tail = zero_sum(kv.buffers.k, kv.buffers.k_tail)
        consumer_wait(kv, 0, i_tile)
        zero_last_keys(kv.buffers, ptrs, kv_start, kv_limit, 1)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, KEYS
            )
            for i in range(steps.n_steps):
                b_dk, b_dk_tail = add_dk(b_dk, b_dk_tail, pipelines, n_done + i)
            n_done += steps.n_steps
        store_sum(
            b_dk, b_dk_tail, sizes.scale, dk_desc, kv, kv.buffers.k, kv.buffers.k_tail, ptrs, sizes, work_tile, 0,
            TILE * (COLS + COLS_V), COLS,
        )  # fmt: skip
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


# ---- both warpgroups ----


@gluon.jit
def zero_sum(buffers, tails):
    """Accumulators of zeros: one for the columns in `buffers`, one for those in `tails`, or 0 without a tail."""
    DIM: gl.constexpr = buffers.shape[4]
    b_sum = gl.zeros([KEYS, DIM], gl.float32, accumulator(DIM))
    if tails is None:
        return b_sum, 0
    else:
        TAIL: gl.constexpr = tails.shape[4]
        return b_sum, gl.zeros([KEYS, TAIL], gl.float32, accumulator(TAIL))


@gluon.jit
def zero_last_keys(kv, ptrs, kv_start, kv_limit, WARPGROUP: gl.constexpr):
    """With kv_lengths, zeroes the keys and values from kv_limit on, half of them in each warpgroup. kv: KVBuffers."""
    if ptrs.kv_lengths_ptr is not None:
        zero_keys_from(tile_at(kv.k, 0), kv_start, kv_limit, WARPGROUP)
        zero_keys_from(tile_at(kv.v, 0), kv_start, kv_limit, WARPGROUP)
        if kv.k_tail is not None:
            zero_keys_from(tile_at(kv.k_tail, 0), kv_start, kv_limit, WARPGROUP)
        if kv.v_tail is not None:
            zero_keys_from(tile_at(kv.v_tail, 0), kv_start, kv_limit, WARPGROUP)


@gluon.jit
def store_sum(
    b_sum, b_tail, scale, desc, kv, buffers, tails, ptrs, sizes, work_tile,
    SPLIT_OFFSET: gl.constexpr, SPLIT_SIZE: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Stores dk or dv of a work tile, staged in the buffer of k or v; then releases k and v.

    SPLIT_OFFSET, SPLIT_SIZE, ROW  where in the block of a split, and values of a row: see combine_splits.py
    """
    batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
    # wait until the other warpgroup no longer reads k and v
    named_barrier("sync", CONSUMERS_BARRIER)
    if ptrs.splits_ptr is None:  # noqa: SIM114 - the first condition is known at compile time
        store_by_tma(b_sum, b_tail, scale, desc, buffers, tails, sizes, batch_head, kv_start)
    elif work_tile.i_block < 0:
        store_by_tma(b_sum, b_tail, scale, desc, buffers, tails, sizes, batch_head, kv_start)
    else:
        # the block has 128 keys; this work tile is one half of them
        first = SPLIT_OFFSET + kv_start % TILE * ROW
        p_split = ptrs.splits_ptr + (work_tile.i_block.to(gl.int64) * SPLIT_SIZE + first)
        store_split(p_split, b_sum, 0, ROW)
        if tails is not None:
            store_split(p_split + b_sum.shape[1], b_tail, 0, ROW)
    consumer_release(kv, 0)


@gluon.jit
def store_by_tma(b_sum, b_tail, scale, desc, buffers, tails, sizes, batch_head, kv_start):
    """Stores dk or dv of a whole work tile."""
    tile_at(buffers, 0).store((b_sum * scale).to(buffers.dtype))
    tail = None
    if tails is not None:
        tile_at(tails, 0).store((b_tail * scale).to(tails.dtype))
        tail = tails.index(0)
    fence_async_shared()
    store_rows(desc, buffers.index(0), tail, batch_head // sizes.n_heads, batch_head % sizes.n_heads, kv_start)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_tile_cols", "q_len", "kv_len", "n_padded", "n_split_lines", "num_splits",
        "n_interleaved",
    ]
)  # fmt: skip
def wide_dkdv_kernel(
    # TMA descriptors
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc,
    # backward_producer.Pointers; (batch, head) strides of the records, in elements
    ptrs, record_strides,
    # backward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, n_batch_heads, n_tile_cols, q_len, kv_len, n_padded, n_split_lines, num_splits, n_interleaved,
    scale_log2, scale,
    # softcap and strides of the bias, see score_mods.ScoreMods
    cap, bias_strides,
    # GROUP: query heads of a work tile; COLS, COLS_V: columns of q and k, of v and dO; STAGES: buffers of q and dO
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, COLS: gl.constexpr, COLS_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers, k_buffers = allocate_rows(q_desc, STAGES, COLS), allocate_rows(k_desc, 1, COLS)
    dout_buffers, v_buffers = allocate_rows(dout_desc, STAGES, COLS_V), allocate_rows(v_desc, 1, COLS_V)
    q_tail, k_tail, dout_tail, v_tail = None, None, None, None
    if has_tail(q_desc, COLS):
        q_tail, k_tail = allocate_tail(q_desc, STAGES), allocate_tail(k_desc, 1)
    if has_tail(v_desc, COLS_V):
        dout_tail, v_tail = allocate_tail(dout_desc, STAGES), allocate_tail(v_desc, 1)
    p_buffers = gl.allocate_shared_memory(gl.float32, [P_STAGES, KEYS * BLOCK_Q], line_layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    work_tile_ints = gl.allocate_shared_memory(gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], line_layout)
    # not by allocate_pipeline: named tuples that jitted functions return lose the names of their fields
    kv = Pipeline(
        buffers=KVBuffers(k=k_buffers, k_tail=k_tail, v=v_buffers, v_tail=v_tail),
        full=allocate_mbarriers(1, 1),
        empty=allocate_mbarriers(1, 2),
    )
    q = Pipeline(
        buffers=QBuffers(q=q_buffers, q_tail=q_tail, lse=lse_buffers),
        full=allocate_mbarriers(STAGES, 1),
        empty=allocate_mbarriers(STAGES, 2),
    )
    dout = Pipeline(
        buffers=DOutBuffers(dout=dout_buffers, dout_tail=dout_tail, delta=delta_buffers),
        full=allocate_mbarriers(STAGES, 1),
        empty=allocate_mbarriers(STAGES, 2),
    )
    work_tiles = allocate_pipeline(work_tile_ints, WORK_TILE_STAGES, CONSUMERS=2)
    p = allocate_pipeline(p_buffers, P_STAGES, CONSUMERS=1)
    pipelines = Pipelines(work_tiles=work_tiles, kv=kv, q=q, dout=dout, p=p)
    fence_async_shared()
    descs = Descriptors(
        q=q_desc, k=k_desc, v=v_desc, dout=dout_desc, lse=lse_desc, delta=delta_desc, dq_sum=None, dk=dk_desc,
        dv=dv_desc,
    )  # fmt: skip
    sizes = Sizes(
        n_heads=n_heads, heads_per_kv=1, n_batch_heads=n_batch_heads, n_tile_cols=n_tile_cols, q_len=q_len,
        kv_len=kv_len, n_padded=n_padded, scale=scale, n_split_lines=n_split_lines, num_splits=num_splits,
        n_interleaved=n_interleaved,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr, bias_ptr=ptrs.bias_ptr,
        bias_strides=bias_strides,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (compute_dv, (dv_desc, pipelines, ptrs, record_strides, sizes, mods, CAUSAL, GROUP, COLS, COLS_V)),
            (compute_dk, (dk_desc, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP, COLS, COLS_V)),
            (load, (descs, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP, BLOCK_Q)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
