"""Hopper backward (sm90) in Gluon, warp-specialized: dQ, dK and dV from out, LSE and their gradients.

    p = exp(scale q k^T - lse)      delta = rowsum(dO * O) - dLSE
    dp = dO v^T                     ds = p * (dp - delta)
    dv = p^T dO                     dk = scale ds^T q               dq = scale ds k

q, dO (batch, heads, q_len, head_dim | v_head_dim), k, v (batch, kv_heads, kv_len, ...). Each score is computed once, in
five products per tile.

One program per SM takes tile columns from a counter (128 keys of a KV head) and iterates over their steps: BLOCK_Q
queries each, of every query head of the group. A producer warp loads K and V, then Q, LSE, dO and delta of each step
(backward_producer.py). Two consumer warpgroups have 64 keys each:

    wgmma  s^T = k q^T, dp^T = v dO^T           scores are transposed: [keys, queries]
           p, ds in registers; ds also to shared memory, since dq sums over the keys of both warpgroups
    wgmma  dv += p^T dO, dk += ds^T q           in registers until the tile column ends
    wgmma  dq = ds k                            added to a float32 sum in global memory

TMA (head_dim 128) or atomics from registers (64) add to the sum of dQ, in no fixed order, so the last bits of dQ vary
from run to run. The preprocess launch zeroes it and computes LSE and delta; the postprocess launch scales and converts
it (backward_postprocess.py).

Long tile columns are split (schedule.py): each program computes an equal share of the steps of every query head and
writes float32 dK and dV to a workspace, which another launch sums in order (triton/combine_splits.py).

In causal calls with grouped heads and no layout, a work tile is a tile column for one query head, which adds its dK and
dV to float32 sums with atomics (schedule.sums_over_heads). The last bits of dK and dV then vary too.

For deterministic calls and for few tiles per row (schedule.is_dq_separate) this kernel leaves dQ out, and the Triton
kernel computes it, with two more products per tile. Beyond head_dim 128 registers do not suffice: wide_backward.py has
the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...runtime.launch import Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import TILE as TILE_SIDE
from ..arguments import Options, PlanSpecs, options_of, plan_specs_of, score_specs_of, strides_of_records, tile_lists
from ..inputs import BackwardInputs
from ..schedule import WHOLE, Split, heads_in_turn, is_dq_separate, padded_dim, split_of, sums_over_heads
from ..triton import backward as portable
from ..triton.backward_preprocess import preprocess_launch
from ..triton.combine_splits import sum_splits
from ..triton.tile import TILE, clamped_kv_len
from . import wide_backward
from .backward_postprocess import postprocess_launch
from .backward_producer import (
    STAGES,
    WORK_TILE_STRIDE,
    Descriptors,
    DOutBuffers,
    KVBuffers,
    Pipelines,
    Pointers,
    QBuffers,
    Sizes,
    load,
    q_start_of,
    read_work_tile,
    steps_of_head,
)
from .barriers import Pipeline, allocate_mbarriers, allocate_pipeline, consumer_release, consumer_wait, named_barrier
from .bitmask import transposed_mask
from .registers import (
    WARPGROUP_ROWS,
    accumulator,
    atomic_add_sum,
    in_register_order,
    opaque,
    reinterpret,
    store_split,
    zero_tail,
)
from .score_mods import PLAIN, ModSpecs, ScoreMods, apply_score_mods, load_slope, mod_specs_of, round_p_ds_with_mods
from .tma import DescriptorFactory, tma_padded_memory, tma_reduce_add, tma_store, to_tma_loadable
from .work_tiles import WORK_TILE_STAGES

MAX_HEAD_DIM = 128
# values of a row of the descriptor with which TMA adds to the sum of dQ
DQ_SUM_COLS = gl.constexpr(32)
# registers per thread of the consumers, and of the producer and the other single warps
REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(32)


@dataclass(frozen=True)
class Config:
    """One launch configuration.

    block_q    queries per step
    kv_stages  buffers of K and V; with 2, the next tile column loads during this one
    dq_from_registers  the consumers add dQ with atomics, not through shared memory and TMA
    """

    block_q: int = 64
    kv_stages: int = 1
    dq_from_registers: bool = False


# by padded head dimension
CONFIGS = {
    # a second K/V stage or 128 queries do not fit into shared memory (H200: dense 661 TFLOP/s)
    128: Config(block_q=64, kv_stages=1),
    # H200, dense and butterfly: 556 and 426 TFLOP/s; 64 queries and 3 stages of them: 513 and 400
    64: Config(block_q=128, kv_stages=2, dq_from_registers=True),
}


# with a softcap, whose tanh stays in registers until ds is computed, which would otherwise spill 2,800 bytes
CAPPED = {128: CONFIGS[128], 64: Config(block_q=64, kv_stages=2, dq_from_registers=True)}


def config(dim: int, has_softcap: bool) -> Config:
    """The launch configuration; dim is the larger padded head dimension. TUNING.md has the candidates that lost."""
    return (CAPPED if has_softcap else CONFIGS)[dim]


# ---- consumer warpgroups ----


class Staging(NamedTuple):
    """Shared memory of the consumers alone.

    ds      [2, 128, BLOCK_Q], both warpgroups' keys; by parity of the step
    dq      [2, ...] float32, one buffer per warpgroup, from which TMA adds to the sum of dQ
    dk, dv  the descriptors' blocks, from which TMA stores them; they may share memory with ds and dq
    """

    ds: Any
    dq: Any
    dk: Any
    dv: Any


@gluon.jit
def pair_mask(ptrs, sizes, kv_start, kv_limit, step, o_kv, o_q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Which pairs of a partial step attend: [keys, queries].

    o_kv, o_q  offsets from the first key of the tile and the first query of the step
    """
    STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_Q
    if ptrs.indices_ptr is not None:
        i_bitmask = gl.load(ptrs.bitmask_ids_ptr + step // STEPS_PER_TILE)
        return transposed_mask(ptrs.bitmasks_ptr, i_bitmask, o_kv, step % STEPS_PER_TILE * BLOCK_Q + o_q, TILE)
    else:
        # first query of the step that attends to each key
        o_first = o_kv * 0
        if CAUSAL:
            o_first = kv_start + o_kv - (step * BLOCK_Q + sizes.kv_len - sizes.q_len)
        o_first = gl.where(kv_start + o_kv < kv_limit, o_first, BLOCK_Q)
        return gl.expand_dims(o_q, 0) >= gl.expand_dims(o_first, 1)


@gluon.jit
def backward_step(
    b_dk, b_dv, kv_stage, descs, pipelines, staging, ptrs, sizes, mods, work_tile, kv_limit, i_head, step, i_step_total,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One step: adds to dk and dv of this warpgroup's keys, and this warpgroup's part of the step's dq to the dQ sum.

    kv_stage  buffer of K and V
    i_head    query head
    step      step of the tile lists, or of the head without a layout
    i_step_total  steps of this program so far: they choose the stage
    MASKED    applies bitmasks, or the diagonal and the end of the keys
    """
    q_buffers, dout_buffers = pipelines.q.buffers.q, pipelines.dout.buffers.dout
    k_buffers, v_buffers = pipelines.kv.buffers.k, pipelines.kv.buffers.v
    dtype: gl.constexpr = q_buffers.dtype
    BLOCK_Q: gl.constexpr = q_buffers.shape[3]
    DIM: gl.constexpr = q_buffers.shape[4]
    DIM_V: gl.constexpr = dout_buffers.shape[4]
    # dq [BLOCK_Q, DIM] is divided between the warpgroups by rows if there are 128, else by columns
    BY_ROWS: gl.constexpr = BLOCK_Q == 2 * WARPGROUP_ROWS
    DQ_DIM: gl.constexpr = DIM if BY_ROWS else DIM // 2
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    dk_layout: gl.constexpr = accumulator(DIM)
    dv_layout: gl.constexpr = accumulator(DIM_V)
    dq_layout: gl.constexpr = accumulator(DQ_DIM)
    query_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    stage = i_step_total % STAGES
    q_tile = q_buffers.index(stage).reshape([BLOCK_Q, DIM])
    dout_tile = dout_buffers.index(stage).reshape([BLOCK_Q, DIM_V])
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_Q], gl.float32, score_layout)
    # otherwise values derived from it stay in registers across steps and spill; and with two stages the ptxas of Triton
    # 3.6 loses it and reads keys from invalid addresses
    kv_stage = opaque(kv_stage)
    k_all = k_buffers.index(kv_stage).reshape([TILE, DIM])
    k_half = k_all.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    v_half = v_buffers.index(kv_stage).reshape([TILE, DIM_V]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    consumer_wait(pipelines.q, stage, i_step_total // STAGES)
    # [WARPGROUP_ROWS, BLOCK_Q]
    scores_token = warpgroup_mma(k_half, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    consumer_wait(pipelines.dout, stage, i_step_total // STAGES)
    # [WARPGROUP_ROWS, BLOCK_Q]
    dp_token = warpgroup_mma(v_half, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    # loaded late to save registers during the products
    b_lse = pipelines.q.buffers.lse.index(stage).load(query_layout)
    o_kv = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
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
    b_delta = pipelines.dout.buffers.delta.index(stage).load(query_layout)
    b_p16, b_ds = round_p_ds_with_mods(b_p, b_dp, b_delta, b_tanh, mods, dtype)
    b_p16 = gl.convert_layout(b_p16, gl.DotOperandLayout(0, dv_layout, 2))
    # [WARPGROUP_ROWS, DIM_V]
    dv_token = warpgroup_mma(b_p16, dout_tile, b_dv, is_async=True)
    if ptrs.dq_sum_ptr is not None:
        # two buffers: both warpgroups have met in the step between, so nobody still reads this one
        ds_tile = staging.ds.index(i_step_total % 2)
        ds_tile.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(b_ds)
        fence_async_shared()
        named_barrier("sync", 9)
        if BY_ROWS:
            ds_part = ds_tile.permute((1, 0)).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
            k_part = k_all
        else:
            ds_part = ds_tile.permute((1, 0))
            k_part = k_all.slice(WARPGROUP * DQ_DIM, DQ_DIM, 1)
        b_none = gl.zeros([WARPGROUP_ROWS, DQ_DIM], gl.float32, dq_layout)
        # [WARPGROUP_ROWS, DQ_DIM]
        dq_token = warpgroup_mma(ds_part, k_part, b_none, use_acc=False, is_async=True)
        b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
        consumer_release(pipelines.dout, stage)
    # [WARPGROUP_ROWS, DIM]
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    if ptrs.dq_sum_ptr is not None:
        q_start = q_start_of(ptrs.indices_ptr, step, BLOCK_Q)
        b_dq = warpgroup_mma_wait(1, deps=(dq_token,))
        n_heads = sizes.n_heads
        i_row = (work_tile.batch_head // n_heads * n_heads * GROUP + i_head).to(gl.int64) * sizes.n_padded + q_start
        # this warpgroup's share: rows, or columns of all rows
        first = i_row * DIM + WARPGROUP * WARPGROUP_ROWS * DQ_DIM
        if descs.dq_sum is None:
            atomic_add_sum(ptrs.dq_sum_ptr + first, in_register_order(b_dq))
        else:
            # TMA has read the previous step's dq from the buffer
            tma.store_wait(0)
            dq_tile = staging.dq.index(WARPGROUP)
            dq_tile.store(in_register_order(b_dq).reshape(dq_tile.shape))
            fence_async_shared()
            tma_reduce_add(descs.dq_sum, [(first // DQ_SUM_COLS).to(gl.int32), 0], dq_tile)
    else:
        b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
        consumer_release(pipelines.dout, stage)
    b_dk = warpgroup_mma_wait(0, deps=(dk_token,))
    consumer_release(pipelines.q, stage)
    return b_dk, b_dv


@gluon.jit
def mma(
    descs, pipelines, staging, ptrs, record_strides, sizes, mods,
    WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Entry point of a consumer warpgroup, which computes keys 64 * WARPGROUP to 64 * WARPGROUP + 63 of each tile."""
    k_buffers, v_buffers = pipelines.kv.buffers.k, pipelines.kv.buffers.v
    BLOCK_Q: gl.constexpr = pipelines.q.buffers.q.shape[3]
    DIM: gl.constexpr = k_buffers.shape[4]
    DIM_V: gl.constexpr = v_buffers.shape[4]
    KV_STAGES: gl.constexpr = k_buffers.shape[0]
    i_tile = 0
    n_done = 0
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.batch_head >= 0:
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        b_dk = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, accumulator(DIM))
        b_dv = gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, accumulator(DIM_V))
        # TMA has read dk and dv of the previous work tile from the buffers that the steps write
        tma.store_wait(0)
        named_barrier("sync", 9)
        kv_stage = i_tile % KV_STAGES
        consumer_wait(pipelines.kv, kv_stage, i_tile // KV_STAGES)
        if ptrs.kv_lengths_ptr is not None:
            zero_tail(k_buffers.index(kv_stage).reshape([TILE, DIM]), kv_start, kv_limit, WARPGROUP)
            zero_tail(v_buffers.index(kv_stage).reshape([TILE, DIM_V]), kv_start, kv_limit, WARPGROUP)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, TILE
            )
            i_head = batch_head % sizes.n_heads * GROUP + i_group_head
            # masked steps, then full ones: two loops, so that full steps pay for no mask
            for FULL in gl.static_range(2):
                for i in range(steps.n_masked if FULL else 0, steps.n_steps if FULL else steps.n_masked):
                    b_dk, b_dv = backward_step(
                        b_dk, b_dv, kv_stage, descs, pipelines, staging, ptrs, sizes, mods, work_tile, kv_limit,
                        i_head, steps.first + i, n_done + i, WARPGROUP, MASKED=not FULL, CAUSAL=CAUSAL, GROUP=GROUP,
                    )  # fmt: skip
            n_done += steps.n_steps
        consumer_release(pipelines.kv, kv_stage)
        if descs.dq_sum is not None:
            # TMA has read the last dq, whose buffer may be that of dv
            tma.store_wait(0)
        # the first two conditions are known at compile time, the third is not
        if ptrs.dk_sum_ptr is not None:
            add_to_sums(b_dk, b_dv, ptrs, sizes, work_tile, WARPGROUP)
        elif ptrs.splits_ptr is None:  # noqa: SIM114
            epilogue(b_dk, b_dv, descs, staging, sizes, work_tile, WARPGROUP)
        elif work_tile.i_block < 0:
            epilogue(b_dk, b_dv, descs, staging, sizes, work_tile, WARPGROUP)
        else:
            p_split = ptrs.splits_ptr + work_tile.i_block.to(gl.int64) * (TILE * (DIM + DIM_V))
            store_split(p_split, b_dk, WARPGROUP)
            store_split(p_split + TILE * DIM, b_dv, WARPGROUP)
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    tma.store_wait(0)


@gluon.jit
def add_to_sums(b_dk, b_dv, ptrs, sizes, work_tile, WARPGROUP: gl.constexpr):
    """Adds dk and dv of one query head to the sums over the heads of its group."""
    i_row = (work_tile.batch_head // sizes.heads_per_kv).to(gl.int64) * (sizes.n_tile_cols * TILE)
    i_row = i_row + work_tile.kv_start + WARPGROUP * WARPGROUP_ROWS
    atomic_add_sum(ptrs.dk_sum_ptr + i_row * b_dk.shape[1], in_register_order(b_dk))
    atomic_add_sum(ptrs.dv_sum_ptr + i_row * b_dv.shape[1], in_register_order(b_dv))


@gluon.jit
def epilogue(b_dk, b_dv, descs, staging, sizes, work_tile, WARPGROUP: gl.constexpr):
    """Stores dk and dv of a whole tile column with TMA."""
    n_heads, batch_head, kv_start = sizes.n_heads, work_tile.batch_head, work_tile.kv_start
    DIM: gl.constexpr = b_dk.shape[1]
    DIM_V: gl.constexpr = b_dv.shape[1]
    # the other warpgroup has read ds, and TMA its dq
    named_barrier("sync", 9)
    staging.dk.reshape([TILE, DIM]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(
        (b_dk * sizes.scale).to(staging.dk.dtype)
    )
    staging.dv.reshape([TILE, DIM_V]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(
        b_dv.to(staging.dv.dtype)
    )
    fence_async_shared()
    named_barrier("sync", 9)
    if WARPGROUP == 0:
        tma_store(descs.dk, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], staging.dk)
    else:
        tma_store(descs.dv, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], staging.dv)


# ---- shared memory ----


@gluon.constexpr_function
def bits_of(dtype):
    """Bits of an element."""
    return dtype.primitive_bitwidth


@gluon.constexpr_function
def bytes_of(shape, dtype):
    """Bytes of a tensor."""
    return math.prod(shape) * bits_of(dtype) // 8


@gluon.constexpr_function
def blocks_of(n_bytes, desc):
    """Shape of n_bytes as blocks of a descriptor."""
    shape = desc.block_type.shape
    return [n_bytes // bytes_of(shape, desc.dtype), *shape]


@gluon.jit
def staging_buffer(buffers, desc, N_TAKEN: gl.constexpr):
    """Buffer from which TMA stores dk or dv: in `buffers` after its first N_TAKEN bytes if it fits, else new memory.

    buffers  memory that only the steps of a work tile use
    """
    blocks: gl.constexpr = blocks_of(bytes_of(buffers.shape, buffers.dtype), desc)
    i_block: gl.constexpr = -(-N_TAKEN // bytes_of(desc.block_type.shape, desc.dtype))
    if blocks[0] > i_block:
        return reinterpret(buffers, blocks, desc.layout, desc.dtype).index(i_block)
    else:
        return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "heads_per_kv", "n_batch_heads", "n_tile_cols", "q_len", "kv_len", "n_padded", "n_split_lines",
        "num_splits", "n_in_turn",
    ]
)  # fmt: skip
def hopper_backward_kernel(
    # TMA descriptors; dq_sum_desc is None if the consumers add dQ from registers, or another launch computes it
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dq_sum_desc, dk_desc, dv_desc,
    # backward_producer.Pointers; (batch, head) strides of the records, in elements
    ptrs, record_strides,
    # backward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, heads_per_kv, n_batch_heads, n_tile_cols, q_len, kv_len, n_padded, n_split_lines, num_splits, n_in_turn,
    scale_log2, scale,
    # softcap, see score_mods.ScoreMods
    cap,
    # GROUP: query heads of a work tile
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, KV_STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_Q], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM], q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM_V], dout_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, TILE, DIM], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, TILE, DIM_V], v_desc.layout)
    if ptrs.dq_sum_ptr is not None:
        ds_buffers = gl.allocate_shared_memory(dtype, [2, TILE, BLOCK_Q], ds_layout)
        dk_buffer = staging_buffer(ds_buffers, dk_desc, 0)
        if dq_sum_desc is not None:
            dq_shape: gl.constexpr = [2, dq_sum_desc.block_type.shape[0], DQ_SUM_COLS]
            dq_buffers = gl.allocate_shared_memory(gl.float32, dq_shape, dq_sum_desc.layout)
            dv_buffer = staging_buffer(dq_buffers, dv_desc, 0)
        else:
            dq_buffers = q_buffers
            dv_buffer = staging_buffer(ds_buffers, dv_desc, bytes_of(dk_desc.block_type.shape, dtype))
    else:
        # placeholders, never used
        ds_buffers = q_buffers
        dq_buffers = q_buffers
        dk_buffer = gl.allocate_shared_memory(dtype, dk_desc.block_type.shape, dk_desc.layout)
        dv_buffer = gl.allocate_shared_memory(dtype, dv_desc.block_type.shape, dv_desc.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    work_tile_ints = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # not by allocate_pipeline, which would return buffers without their names
    kv = Pipeline(
        buffers=KVBuffers(k=k_buffers, v=v_buffers),
        full=allocate_mbarriers(KV_STAGES, 1),
        empty=allocate_mbarriers(KV_STAGES, 2),
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
    pipelines = Pipelines(work_tiles=work_tiles, kv=kv, q=q, dout=dout)
    fence_async_shared()
    staging = Staging(ds=ds_buffers, dq=dq_buffers, dk=dk_buffer, dv=dv_buffer)
    descs = Descriptors(
        q=q_desc, k=k_desc, v=v_desc, dout=dout_desc, lse=lse_desc, delta=delta_desc, dq_sum=dq_sum_desc, dk=dk_desc,
        dv=dv_desc,
    )  # fmt: skip
    sizes = Sizes(
        n_heads=n_heads, heads_per_kv=heads_per_kv, n_batch_heads=n_batch_heads, n_tile_cols=n_tile_cols, q_len=q_len,
        kv_len=kv_len, n_padded=n_padded, scale=scale, n_split_lines=n_split_lines, num_splits=num_splits,
        n_in_turn=n_in_turn,
    )  # fmt: skip
    mods = ScoreMods(factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr)
    gl.warp_specialize(
        [
            (mma, (descs, pipelines, staging, ptrs, record_strides, sizes, mods, 0, CAUSAL, GROUP)),
            (mma, (descs, pipelines, staging, ptrs, record_strides, sizes, mods, 1, CAUSAL, GROUP)),
            (load, (descs, pipelines, ptrs, record_strides, sizes, CAUSAL, GROUP, BLOCK_Q)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


# ---- launches ----


class BackwardLaunches(NamedTuple):
    """The launches and the memory of a call; None for what it does not need.

    cols         the main kernel
    sum_splits   sums dK and dV of split tile columns
    convert_dk, convert_dv  of sums over query heads
    outputs      dq, dk and dv, with rows padded where TMA writes them; LSE and delta, (2, batch * heads * n_padded)
    workspaces   float32 sum of dQ; LSE and delta as pairs, for the Triton kernel that computes dQ; tile counter;
                 splits; sums of dK and of dV over query heads
    adds_by_tma  whether TMA adds to the sum of dQ
    """

    preprocess: Launch
    cols: Launch
    sum_splits: Launch | None
    convert_dk: Launch | None
    convert_dv: Launch | None
    postprocess: Launch | None
    outputs: tuple[Memory, ...]
    workspaces: tuple[Memory | None, ...]
    adds_by_tma: bool


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    lists: PlanSpecs,
    split: Split,
    is_separate: bool,
    options: Options,
    mods: ModSpecs = PLAIN,
    *,
    by_head: bool = False,
) -> BackwardLaunches:
    """Prepares the launches of calls with these specs and options.

    specs        of q, k, v and dout
    lists        of the plan's tile columns
    split        of the tile columns
    is_separate  whether the Triton kernel computes dq
    mods         score mods
    by_head      see schedule.sums_over_heads
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    chosen = config(max(dim, dim_v), mods.softcap > 0)
    block_q, scale = chosen.block_q, options.scale
    group = heads // kv_heads
    n_work_heads = heads if by_head else kv_heads
    n_padded = -(-q_len // TILE_SIDE) * TILE_SIDE
    n_tile_cols, n_batch_heads = -(-kv_len // TILE_SIDE), batch * n_work_heads
    # the memory has padded rows; the descriptors and sums see the first head_dim columns
    dq, dk, dv = (tma_padded_memory(each.dtype, each.shape) for each in (q, k, v))
    dk_spec, dv_spec = dk.spec._replace(shape=k.shape), dv.spec._replace(shape=v.shape)
    line = contiguous(torch.float32, batch * heads * n_padded).spec
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, block_q, dim)),
        "k_desc": DescriptorFactory(k, (1, 1, TILE_SIDE, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, TILE_SIDE, dim_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, block_q, dim_v)),
        "lse_desc": DescriptorFactory(line, (block_q,)),
        "delta_desc": DescriptorFactory(line, (block_q,)),
        "dk_desc": DescriptorFactory(dk_spec, (1, 1, TILE_SIDE, dim)),
        "dv_desc": DescriptorFactory(dv_spec, (1, 1, TILE_SIDE, dim_v)),
    }
    n_sms, n_programs = num_sms(options.device), split.n_programs(n_tile_cols, n_batch_heads)
    postprocess = dq_sum = lse_delta_pairs = None
    if is_separate:
        dq, lse_delta_pairs = contiguous(q.dtype, *q.shape), contiguous(torch.float32, batch * heads * n_padded, 2)
    else:
        # whole tiles, so that additions need no mask
        dq_sum = contiguous(torch.float32, batch * heads, n_padded, dim)
        if not chosen.dq_from_registers:
            n_values, n_step_values = batch * heads * n_padded * dim, 64 * (64 if block_q == 128 else dim // 2)
            sum_spec = contiguous(torch.float32, n_values // DQ_SUM_COLS.value, DQ_SUM_COLS.value).spec
            block = (n_step_values // DQ_SUM_COLS.value, DQ_SUM_COLS.value)
            descriptor_factories["dq_sum_desc"] = DescriptorFactory(sum_spec, block)
        postprocess = postprocess_launch(dq_sum.spec, dq.spec, scale)
    arguments = {
        "record_strides": strides_of_records(lists[0]),
        "n_heads": n_work_heads,
        "heads_per_kv": group if by_head else 1,
        "n_batch_heads": n_batch_heads,
        "n_tile_cols": n_tile_cols,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "n_in_turn": heads_in_turn(n_tile_cols, n_batch_heads, n_sms, q_len, kv_len, causal=options.causal),
        **mods.arguments(scale, is_forward=False),
        "scale": scale,
        "CAUSAL": options.causal,
        "GROUP": 1 if by_head else group,
        "KV_STAGES": chosen.kv_stages,
        "num_warps": 4,
    }
    sums_dk = sums_dv = convert_dk = convert_dv = None
    if by_head:
        rows = batch * kv_heads, n_tile_cols * TILE_SIDE
        sums_dk, sums_dv = contiguous(torch.float32, *rows, dim), contiguous(torch.float32, *rows, dim_v)
        convert_dk = postprocess_launch(sums_dk.spec, dk.spec, scale)
        convert_dv = postprocess_launch(sums_dv.spec, dv.spec, 1.0)
    splits = contiguous(torch.float32, split.floats(dim + dim_v, n_batch_heads)) if split.num_splits > 1 else None
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, n_padded, cleared=0 if is_separate else dim),
        cols=Launch(hopper_backward_kernel, (min(n_programs, n_sms),), arguments, descriptor_factories),
        sum_splits=sum_splits(split, lists[0], dk_spec, dv_spec, arguments, (dim, dim_v)),
        convert_dk=convert_dk,
        convert_dv=convert_dv,
        postprocess=postprocess,
        outputs=(dq, dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        workspaces=(
            dq_sum,
            lse_delta_pairs,
            contiguous(torch.int32, 1) if n_programs > n_sms else None,
            splits,
            sums_dk,
            sums_dv,
        ),
        adds_by_tma="dq_sum_desc" in descriptor_factories,
    )


def backward(
    inputs: BackwardInputs,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    wanted: Sequence[bool] = (),
    *,
    deterministic: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, contiguous and in q's type. Without dropout, which the choice of the backend excludes.

    With score mods also the gradients of sinks, slopes and bias, empty where not `wanted` (a bool for each).
    """
    dout, dlse, q, k, v, out, lse = inputs
    assert seed is None and dropout_p == 0.0, "the choice of the backend refuses dropout"
    dim, dim_v = q.shape[3], v.shape[3]
    widest = max(dim, dim_v)
    # the gradient of the slopes, which are hardly ever trained, has no kernel here
    if scores is not None and wanted[1]:
        return portable.backward(inputs, plan, kv_lengths, seed, scale, causal, dropout_p, scores, wanted)
    if widest > MAX_HEAD_DIM:
        return wide_backward.backward(inputs, plan, kv_lengths, scale, causal, scores, wanted)
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    options = options_of(q, plan, scale, causal, dropout_p, out, lse, dlse, kv_lengths)
    by_cols, empty, n_sms = tile_lists(plan, 3), allocator(q), num_sms(options.device)
    q_shape, k_shape = specs.tensors[0].shape, specs.tensors[1].shape
    by_head = sums_over_heads(plan, q_shape, k_shape, causal, n_sms, deterministic=deterministic)
    split = WHOLE if by_head else split_of(plan, 3, q_shape, k_shape, causal, n_sms)
    is_separate = is_dq_separate(plan, q_shape, widest, deterministic=deterministic)
    slopes = None if scores is None else scores.alibi_slopes
    mods = mod_specs_of(scores)
    ready = backward_launches(specs, plan_specs_of(by_cols), split, is_separate, options, mods, by_head=by_head)
    dq, dk, dv, lse_delta = [empty(*memory) for memory in ready.outputs]
    dq_sum, lse_delta_pairs, tile_counter, splits, sums_dk, sums_dv = [
        memory and empty(*memory) for memory in ready.workspaces
    ]
    lse_line, delta_line = lse_delta.unbind()
    # also zeroes the sum of dq and the tile counter
    ready.preprocess(out, dout, lse, dlse, lse_delta_pairs, lse_delta, dq_sum, tile_counter)
    pointers = Pointers(
        *by_cols, kv_lengths_ptr=kv_lengths, tile_counter_ptr=tile_counter, splits_ptr=splits, slopes_ptr=slopes,
        dq_sum_ptr=dq_sum, dk_sum_ptr=sums_dk, dv_sum_ptr=sums_dv,
    )  # fmt: skip
    if sums_dk is not None and sums_dv is not None:
        sums_dk.zero_()
        sums_dv.zero_()
    sum_by_tma = dq_sum if ready.adds_by_tma else None
    ready.cols(q, k, v, dout, lse_line, delta_line, sum_by_tma, dk, dv, pointers)
    if ready.sum_splits is not None:
        ready.sum_splits(splits, by_cols[0], dk, dv)
    if ready.convert_dk is not None and ready.convert_dv is not None:
        ready.convert_dk(sums_dk, dk)
        ready.convert_dv(sums_dv, dv)
    if ready.postprocess is not None:
        ready.postprocess(dq_sum, dq)
    else:
        by_rows = tile_lists(plan, 0)
        if scores is not None:
            options = options._replace(scores=score_specs_of(scores, None, None, wanted=wanted))
        other = portable.backward_launches(specs, plan_specs_of(by_rows), plan_specs_of(by_cols), options)
        assert other.queries is not None
        # without biases, and sums for the gradients of bias and slopes
        other.queries(q, k, v, dout, lse_delta_pairs, *by_rows, kv_lengths, seed, slopes, None, None, dq, None, None)
    if dim % 8 or dim_v % 8:
        dq, dk, dv = dq[..., :dim].contiguous(), dk[..., :dim].contiguous(), dv[..., :dim_v].contiguous()
    if scores is None:
        return dq, dk, dv
    delta = delta_line.view(*q.shape[:2], -1)[..., : q.shape[2]]
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, None, None)
