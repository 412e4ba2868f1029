"""Hopper kernel for dQ beyond head_dim 128, in Gluon (sm90), warp-specialized.

    producer warp              two consumer warpgroups, 64 queries of a tile row each, dq in registers
    TMA loads of q, dO; k, v -> s = q k^T, p = exp2(s - lse), dp = dO v^T, ds = p * (dp - delta), dq += ds k

The producer and its work tiles are those of the forward (forward_producer.py), with dO beside q. Of the values there is
one buffer: they are read once in a step, keys twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.tile import TILE, clamped_kv_len
from .barriers import allocate_pipeline, consumer_release, consumer_wait
from .forward_producer import (
    WORK_TILE_STRIDE,
    Pipelines,
    Sizes,
    kv_start_of,
    load,
    q_buffer_and_phase,
    read_work_tile,
)
from .registers import WARPGROUP_ROWS, accumulator, opaque, store_split, zero_tail
from .score_mods import ScoreMods, apply_score_mods, load_slope
from .softmax import mask_scores
from .tma import tma_store
from .work_tiles import END, WORK_TILE_STAGES


class Config(NamedTuple):
    """What forward_producer.py needs to know of a launch, passed to the kernel as one compile-time argument.

    block_kv    keys per step
    stages      buffers of k; of v there is one
    q_stages    buffers of q and dO for each warpgroup
    warpgroups  consumer warpgroups
    """

    block_kv: int = 64
    stages: int = 2
    q_stages: int = 1
    warpgroups: int = 2


# registers per thread of the consumers, and of the producer warp
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


class Pointers(NamedTuple):
    """Global memory. None for what a call does not have.

    records_ptr, indices_ptr, bitmask_ids_ptr, bitmasks_ptr  the plan by tile row; None without a layout
    kv_lengths_ptr    number of keys of each batch element; None: kv_len
    slopes_ptr        see score_mods.ScoreMods
    lse_ptr, delta_ptr  (batch * heads, n_padded) float32, lse in base 2
    tile_counter_ptr  counter of the tile scheduler; None: one program per work tile
    splits_ptr        float32 workspace of split tile rows; None: no tile row is split
    """

    records_ptr: Any
    indices_ptr: Any
    bitmask_ids_ptr: Any
    bitmasks_ptr: Any
    kv_lengths_ptr: Any
    slopes_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    tile_counter_ptr: Any
    splits_ptr: Any


# ---- consumer warpgroups ----


@gluon.jit
def add_dq(
    b_dq, b_lse, b_delta, i_buffer, pipelines, ptrs, sizes, mods, slope, work_tile, i_step, i_load, kv_limit,
    MASKED: gl.constexpr, WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """dq plus ds k of one step.

    b_lse, b_delta    of this warpgroup's queries, [64]
    i_buffer  of q and dO
    slope   see score_mods.load_slope
    i_load  steps of this program so far: they choose the stage
    """
    k, v = pipelines.k, pipelines.v
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    STAGES: gl.constexpr = CONFIG.stages
    dtype: gl.constexpr = k.buffers.dtype
    DIM: gl.constexpr = k.buffers.shape[4]
    DIM_V: gl.constexpr = v.buffers.shape[4]
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    stage = i_load % STAGES
    k_tile = k.buffers.index(stage).reshape([BLOCK_KV, DIM])
    # otherwise values derived from the addresses stay in registers across steps and spill
    i_buffer = opaque(i_buffer)
    q_tile = pipelines.q.buffers.index(i_buffer).reshape([WARPGROUP_ROWS, DIM])
    dout_tile = pipelines.dout.buffers.index(i_buffer).reshape([WARPGROUP_ROWS, DIM_V])
    v_tile = v.buffers.index(opaque(0)).reshape([BLOCK_KV, DIM_V])
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
    consumer_wait(k, stage, i_load // STAGES)
    if ptrs.kv_lengths_ptr is not None:
        consumer_wait(v, 0, i_load)
        kv_start = kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV)
        zero_tail(k_tile, kv_start, kv_limit, WARPGROUP)
        zero_tail(v_tile, kv_start, kv_limit, WARPGROUP)
    # [WARPGROUP_ROWS, BLOCK_KV]
    scores_token = warpgroup_mma(q_tile, k_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    if ptrs.kv_lengths_ptr is None:
        consumer_wait(v, 0, i_load)
    # [WARPGROUP_ROWS, BLOCK_KV]
    dp_token = warpgroup_mma(dout_tile, v_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    o_q = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
    o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, score_layout))
    if mods.slopes_ptr is not None:
        q_start = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS + (sizes.kv_len - sizes.q_len)
        o_q = q_start - kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV) + o_q
    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_q, o_kv)
    b_scores = mask_scores(
        b_scores, None, ptrs, sizes, work_tile, i_step, kv_limit,
        WARPGROUP=WARPGROUP, MASKED=MASKED, CAUSAL=CAUSAL, BLOCK_KV=BLOCK_KV,
    )  # fmt: skip
    b_p = gl.exp2(b_scores - gl.expand_dims(b_lse, 1))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    consumer_release(v, 0)
    b_ds = b_p * (b_dp - gl.expand_dims(b_delta, 1))
    if mods.cap is not None:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    b_ds = gl.convert_layout(b_ds.to(dtype), gl.DotOperandLayout(0, accumulator(DIM), 2))
    # [WARPGROUP_ROWS, DIM]
    dq_token = warpgroup_mma(b_ds, k_tile, b_dq, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=(dq_token,))
    consumer_release(k, stage)
    return b_dq


@gluon.jit
def compute_dq(
    dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale,
    WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Entry point of consumer warpgroup WARPGROUP."""
    q, dout = pipelines.q, pipelines.dout
    DIM: gl.constexpr = q.buffers.shape[4]
    query_layout: gl.constexpr = gl.SliceLayout(1, accumulator(CONFIG.block_kv))
    # work tiles and steps so far
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.target > END:
        batch_head = work_tile.target
        if ptrs.splits_ptr is not None:
            # the batch_head of a split is its workspace block modulo n_batch_heads, see split_index
            batch_head = batch_head % sizes.n_batch_heads
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        slope = load_slope(mods, batch_head % sizes.n_heads)
        first = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS
        o_line = batch_head.to(gl.int64) * n_padded + first + gl.arange(0, WARPGROUP_ROWS, layout=query_layout)
        b_lse, b_delta = gl.load(ptrs.lse_ptr + o_line), gl.load(ptrs.delta_ptr + o_line)
        b_dq = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, accumulator(DIM))
        i_buffer, phase = q_buffer_and_phase(i_tile, WARPGROUP, CONFIG)
        consumer_wait(q, i_buffer, phase)
        consumer_wait(dout, i_buffer, phase)
        # partial steps, then full ones: two loops, so that full steps pay for no mask
        n_steps, n_partial = work_tile.n_steps, work_tile.n_partial
        for FULL in gl.static_range(2):
            for i_step in range(n_partial if FULL else 0, n_steps if FULL else n_partial):
                b_dq = add_dq(
                    b_dq, b_lse, b_delta, i_buffer, pipelines, ptrs, sizes, mods, slope, work_tile, i_step,
                    n_done + i_step, kv_limit, MASKED=not FULL, WARPGROUP=WARPGROUP, CAUSAL=CAUSAL, CONFIG=CONFIG,
                )  # fmt: skip
        n_done += n_steps
        consumer_release(dout, i_buffer)
        if ptrs.splits_ptr is None:  # noqa: SIM114 - the first condition is known at compile time
            store_dq(b_dq * scale, dq_desc, q.buffers.index(i_buffer), sizes, batch_head, first)
        elif work_tile.target < sizes.n_batch_heads:
            store_dq(b_dq * scale, dq_desc, q.buffers.index(i_buffer), sizes, batch_head, first)
        else:
            i_block = work_tile.target - sizes.n_batch_heads
            store_split(ptrs.splits_ptr + i_block.to(gl.int64) * (TILE * DIM), b_dq, WARPGROUP)
        consumer_release(q, i_buffer)
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)


@gluon.jit
def store_dq(b_dq, dq_desc, buffer, sizes, batch_head, q_start):
    """Stores dq of a warpgroup's queries from their buffer."""
    buffer.reshape([WARPGROUP_ROWS, b_dq.shape[1]]).store(b_dq.to(buffer.dtype))
    fence_async_shared()
    tma_store(dq_desc, [batch_head // sizes.n_heads, batch_head % sizes.n_heads, q_start, 0], buffer)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "n_padded", "group", "n_split_lines", "num_splits",
        "n_in_turn",
    ]
)  # fmt: skip
def wide_dq_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, dout_desc, dq_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # forward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple; n_padded: queries per
    # head in lse and delta
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded, n_split_lines, num_splits, n_in_turn, group,
    scale_log2, scale,
    # softcap, see score_mods.ScoreMods
    cap,
    # compile time
    CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    STAGES: gl.constexpr = CONFIG.stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.warpgroups
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(dtype, [Q_BUFFERS, 1, 1, WARPGROUP_ROWS, DIM], q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [Q_BUFFERS, 1, 1, WARPGROUP_ROWS, DIM_V], dout_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_KV, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_KV, DIM_V], v_desc.layout)
    work_tile_buffers = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pipelines = Pipelines(
        work_tiles=allocate_pipeline(work_tile_buffers, WORK_TILE_STAGES, CONSUMERS=WARPGROUPS),
        q=allocate_pipeline(q_buffers, Q_BUFFERS, CONSUMERS=1),
        k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS),
        v=allocate_pipeline(v_buffers, 1, CONSUMERS=WARPGROUPS),
        dout=allocate_pipeline(dout_buffers, Q_BUFFERS, CONSUMERS=1),
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, n_batch_heads=n_batch_heads, n_lines=n_lines, q_len=q_len, kv_len=kv_len,
        n_split_lines=n_split_lines, num_splits=num_splits, n_in_turn=n_in_turn, group=group,
    )  # fmt: skip
    mods = ScoreMods(factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr)
    gl.warp_specialize(
        [
            (compute_dq, (dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale, 0, CAUSAL, CONFIG)),
            (compute_dq, (dq_desc, pipelines, ptrs, sizes, mods, n_padded, scale, 1, CAUSAL, CONFIG)),
            (load, (q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )
