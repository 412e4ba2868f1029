"""Hopper kernel for dK and dV beyond head_dim 128, in Gluon (sm90), warp-specialized.

Float32 sums of dk and dv for 128 keys do not fit into the registers of two warpgroups. Here a work tile has 64 keys,
and the warpgroups divide the products instead of the keys:

    producer warp          "p" warpgroup                       "ds" warpgroup
    TMA loads of q, dO ->  s^T = k q^T, p = exp2(s - lse)      dp^T = v dO^T
                           p to shared memory              ->  ds = p * (dp - delta)
                           dv += p^T dO                        dk += ds^T q

Both have two products per step and half of the sums. p is passed in float32, in the order in which threads hold it: the
layouts of s^T and dp^T are equal, so each thread reads what one thread of the other warpgroup has written.

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

from ..triton.tile import TILE, clamped_kv_len
from .backward_producer import (
    STAGES,
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
    Pipeline,
    allocate_mbarriers,
    allocate_pipeline,
    consumer_release,
    consumer_wait,
    named_barrier,
    producer_acquire,
    producer_commit,
)
from .bitmask import transposed_mask
from .registers import (
    accumulator,
    from_register_order,
    in_register_order,
    register_order_layout,
    store_split,
    zero_tail,
)
from .score_mods import ScoreMods, apply_score_mods, load_slope
from .tma import tma_store
from .work_tiles import WORK_TILE_STAGES

# keys of a work tile, and queries of a step
KEYS = gl.constexpr(64)
BLOCK_Q = gl.constexpr(64)
# buffers of p between the warpgroups
P_STAGES = gl.constexpr(2)
# registers per thread of the consumers, and of the producer warp
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(32)


class Pipelines(NamedTuple):
    """The pipelines of backward_producer.Pipelines, and that of p [P_STAGES, KEYS * BLOCK_Q] float32."""

    work_tiles: Pipeline
    kv: Pipeline
    q: Pipeline
    dout: Pipeline
    p: Pipeline


# ---- "p" warpgroup ----


@gluon.jit
def pair_mask(ptrs, sizes, kv_start, step, o_kv, o_q, CAUSAL: gl.constexpr):
    """Which pairs of a partial step attend: [keys, queries]. o_kv, o_q: offsets from its first key and query."""
    if ptrs.indices_ptr is not None:
        STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_Q
        i_bitmask = gl.load(ptrs.bitmask_ids_ptr + step // STEPS_PER_TILE)
        o_first = step % STEPS_PER_TILE * BLOCK_Q
        return transposed_mask(ptrs.bitmasks_ptr, i_bitmask, kv_start % TILE + o_kv, o_first + o_q, TILE)
    else:
        # first query of the step that attends to each key; without causal, only keys past the end have none
        o_first = o_kv * 0
        if CAUSAL:
            o_first = kv_start + o_kv - (step * BLOCK_Q + sizes.kv_len - sizes.q_len)
        o_first = gl.where(kv_start + o_kv < sizes.kv_len, o_first, BLOCK_Q)
        return gl.expand_dims(o_q, 0) >= gl.expand_dims(o_first, 1)


@gluon.jit
def add_dv(
    b_dv, pipelines, ptrs, sizes, mods, kv_start, kv_limit, i_head, step, i_step_total,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Computes p of one step, passes it to the other warpgroup, and returns dv plus p^T dO.

    step  of the tile lists, or of the head without a layout
    i_step_total  steps of this program so far: they choose the stage
    MASKED  applies bitmasks, or the diagonal and the end of the keys
    """
    q_buffers, dout_buffers = pipelines.q.buffers.q, pipelines.dout.buffers.dout
    dtype: gl.constexpr = q_buffers.dtype
    DIM: gl.constexpr = q_buffers.shape[4]
    DIM_V: gl.constexpr = dout_buffers.shape[4]
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    query_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    stage = i_step_total % STAGES
    k_tile = pipelines.kv.buffers.k.index(0).reshape([KEYS, DIM])
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    q_tile = q_buffers.index(stage).reshape([BLOCK_Q, DIM])
    b_zero = gl.zeros([KEYS, BLOCK_Q], gl.float32, score_layout)
    # [KEYS, BLOCK_Q]
    scores_token = warpgroup_mma(k_tile, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_lse = pipelines.q.buffers.lse.index(stage).load(query_layout)
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
        b_p = gl.where(pair_mask(ptrs, sizes, kv_start, step, o_kv, o_q, CAUSAL), b_p, 0.0)
    # of the softcap, ds has the derivative too
    b_passed = b_p
    if mods.cap is not None:
        b_passed = b_p * (1.0 - b_tanh * b_tanh)
    i_buffer = i_step_total % P_STAGES
    producer_acquire(pipelines.p, i_buffer, i_step_total // P_STAGES)
    pipelines.p.buffers.index(i_buffer).store(in_register_order(b_passed))
    producer_commit(pipelines.p, i_buffer)
    b_p16 = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, accumulator(DIM_V), 2))
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    # [KEYS, DIM_V]
    dv_token = warpgroup_mma(b_p16, dout_buffers.index(stage).reshape([BLOCK_Q, DIM_V]), b_dv, is_async=True)
    b_dv = warpgroup_mma_wait(0, deps=(dv_token,))
    consumer_release(pipelines.dout, stage)
    return b_dv


@gluon.jit
def compute_dv(
    dv_desc, pipelines, ptrs, record_strides, sizes, mods, CAUSAL: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Entry point of the "p" warpgroup."""
    DIM: gl.constexpr = pipelines.kv.buffers.k.shape[4]
    DIM_V: gl.constexpr = pipelines.kv.buffers.v.shape[4]
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head >= 0:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        b_dv = gl.zeros([KEYS, DIM_V], gl.float32, accumulator(DIM_V))
        consumer_wait(pipelines.kv, 0, i_tile)
        zero_kv_tails(pipelines.kv, ptrs, kv_start, kv_limit, 0)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, KEYS
            )
            i_head = batch_head % sizes.n_heads * GROUP + i_group_head
            # masked steps, then full ones: two loops, so that full steps pay for no mask
            for FULL in gl.static_range(2):
                for i in range(steps.n_masked if FULL else 0, steps.n_steps if FULL else steps.n_masked):
                    b_dv = add_dv(
                        b_dv, pipelines, ptrs, sizes, mods, kv_start, kv_limit, i_head, steps.first + i, n_done + i,
                        MASKED=not FULL, CAUSAL=CAUSAL,
                    )  # fmt: skip
            n_done += steps.n_steps
        # offset of dv in the block of a split
        store_sum(
            b_dv, 1.0, dv_desc, pipelines.kv, pipelines.kv.buffers.v, ptrs, sizes, work_tile, TILE * DIM,
            TILE * (DIM + DIM_V),
        )  # fmt: skip
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


# ---- "ds" warpgroup ----


@gluon.jit
def add_dk(b_dk, pipelines, i_step_total):
    """dk plus ds^T q of one step. i_step_total: steps of this program so far, which choose the stage."""
    q_buffers, dout_buffers = pipelines.q.buffers.q, pipelines.dout.buffers.dout
    dtype: gl.constexpr = q_buffers.dtype
    DIM: gl.constexpr = q_buffers.shape[4]
    DIM_V: gl.constexpr = dout_buffers.shape[4]
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    stage = i_step_total % STAGES
    v_tile = pipelines.kv.buffers.v.index(0).reshape([KEYS, DIM_V])
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    dout_tile = dout_buffers.index(stage).reshape([BLOCK_Q, DIM_V])
    b_zero = gl.zeros([KEYS, BLOCK_Q], gl.float32, score_layout)
    # [KEYS, BLOCK_Q]
    dp_token = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_delta = pipelines.dout.buffers.delta.index(stage).load(gl.SliceLayout(0, score_layout))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    consumer_release(pipelines.dout, stage)
    i_buffer = i_step_total % P_STAGES
    consumer_wait(pipelines.p, i_buffer, i_step_total // P_STAGES)
    b_p = from_register_order(pipelines.p.buffers.index(i_buffer).load(register_order_layout(BLOCK_Q)), BLOCK_Q)
    consumer_release(pipelines.p, i_buffer)
    b_ds = (b_p * (b_dp - gl.expand_dims(b_delta, 0))).to(dtype)
    b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, accumulator(DIM), 2))
    # the "p" warpgroup has waited for q before it passed p, this one has not
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    # [KEYS, DIM]
    dk_token = warpgroup_mma(b_ds, q_buffers.index(stage).reshape([BLOCK_Q, DIM]), b_dk, is_async=True)
    b_dk = warpgroup_mma_wait(0, deps=(dk_token,))
    consumer_release(pipelines.q, stage)
    return b_dk


@gluon.jit
def compute_dk(
    dk_desc, pipelines, ptrs, record_strides, sizes, CAUSAL: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Entry point of the "ds" warpgroup."""
    DIM: gl.constexpr = pipelines.kv.buffers.k.shape[4]
    DIM_V: gl.constexpr = pipelines.kv.buffers.v.shape[4]
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head >= 0:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        b_dk = gl.zeros([KEYS, DIM], gl.float32, accumulator(DIM))
        consumer_wait(pipelines.kv, 0, i_tile)
        zero_kv_tails(pipelines.kv, ptrs, kv_start, kv_limit, 1)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, KEYS
            )
            for i in range(steps.n_steps):
                b_dk = add_dk(b_dk, pipelines, n_done + i)
            n_done += steps.n_steps
        store_sum(
            b_dk, sizes.scale, dk_desc, pipelines.kv, pipelines.kv.buffers.k, ptrs, sizes, work_tile, 0,
            TILE * (DIM + DIM_V),
        )  # fmt: skip
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


# ---- both warpgroups ----


@gluon.jit
def zero_kv_tails(kv, ptrs, kv_start, kv_limit, WARPGROUP: gl.constexpr):
    """With kv_lengths, zeroes the keys and values from kv_limit on, half of them in each warpgroup."""
    if ptrs.kv_lengths_ptr is not None:
        zero_tail(kv.buffers.k.index(0).reshape([KEYS, kv.buffers.k.shape[4]]), kv_start, kv_limit, WARPGROUP)
        zero_tail(kv.buffers.v.index(0).reshape([KEYS, kv.buffers.v.shape[4]]), kv_start, kv_limit, WARPGROUP)


@gluon.jit
def store_sum(
    b_sum, scale, desc, kv, buffers, ptrs, sizes, work_tile, SPLIT_OFFSET: gl.constexpr, SPLIT_SIZE: gl.constexpr
):  # fmt: skip
    """Stores dk or dv of a work tile, from the buffer of k or v, and releases both.

    SPLIT_OFFSET, SPLIT_SIZE  where in the block of a split, see combine_splits.py
    """
    batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
    # the other warpgroup has read k and v too
    named_barrier("sync", 9)
    if ptrs.splits_ptr is None:  # noqa: SIM114 - the first condition is known at compile time
        store_by_tma(b_sum, scale, desc, buffers, sizes, batch_head, kv_start)
    elif work_tile.i_block < 0:
        store_by_tma(b_sum, scale, desc, buffers, sizes, batch_head, kv_start)
    else:
        # the block has 128 keys, of which this work tile is one half or the other
        first = SPLIT_OFFSET + kv_start % TILE * b_sum.shape[1]
        store_split(ptrs.splits_ptr + (work_tile.i_block.to(gl.int64) * SPLIT_SIZE + first), b_sum, 0)
    consumer_release(kv, 0)


@gluon.jit
def store_by_tma(b_sum, scale, desc, buffers, sizes, batch_head, kv_start):
    """Stores dk or dv of a whole work tile."""
    buffers.index(0).reshape([KEYS, b_sum.shape[1]]).store((b_sum * scale).to(buffers.dtype))
    fence_async_shared()
    tma_store(desc, [batch_head // sizes.n_heads, batch_head % sizes.n_heads, kv_start, 0], buffers.index(0))
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_tile_cols", "q_len", "kv_len", "n_padded", "n_split_lines", "num_splits",
        "n_in_turn",
    ]
)  # fmt: skip
def wide_dkdv_kernel(
    # TMA descriptors
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc,
    # backward_producer.Pointers; (batch, head) strides of the records, in elements
    ptrs, record_strides,
    # backward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, n_batch_heads, n_tile_cols, q_len, kv_len, n_padded, n_split_lines, num_splits, n_in_turn,
    scale_log2, scale,
    # softcap, see score_mods.ScoreMods
    cap,
    # GROUP: query heads of a work tile
    CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM], q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM_V], dout_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [1, 1, 1, KEYS, DIM_V], v_desc.layout)
    p_buffers = gl.allocate_shared_memory(gl.float32, [P_STAGES, KEYS * BLOCK_Q], line_layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    work_tile_ints = gl.allocate_shared_memory(gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], line_layout)
    # not by allocate_pipeline, which would return buffers without their names
    kv = Pipeline(
        buffers=KVBuffers(k=k_buffers, v=v_buffers), full=allocate_mbarriers(1, 1), empty=allocate_mbarriers(1, 2)
    )
    q = Pipeline(
        buffers=QBuffers(q=q_buffers, lse=lse_buffers),
        full=allocate_mbarriers(STAGES, 1),
        empty=allocate_mbarriers(STAGES, 2),
    )
    dout = Pipeline(
        buffers=DOutBuffers(dout=dout_buffers, delta=delta_buffers),
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
        n_in_turn=n_in_turn,
    )  # fmt: skip
    mods = ScoreMods(factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr)
    gl.warp_specialize(
        [
            (compute_dv, (dv_desc, pipelines, ptrs, record_strides, sizes, mods, CAUSAL, GROUP)),
            (compute_dk, (dk_desc, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP)),
            (load, (descs, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP, BLOCK_Q)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
