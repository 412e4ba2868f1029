"""How does the Hopper backward run? dq, dk and dv from out, lse and their gradients; Gluon, sm90.

With p = exp(scale q k^T - lse), dp = dout v^T and delta = rowsum(dout * out) - dlse:
    ds = p * (dp - delta)      dv = p^T dout      dk = scale ds^T q      dq = scale ds k
Each score is computed once: five products a tile. One program owns 128 keys of a key head and walks the columns of the plan
(for each query head of the group). A warp moves k and v, then q, dout, lse and delta of each step, through a ring. Two
warpgroups compute, 64 keys each: scores and dp transposed, dk and dv in registers; ds goes through shared memory, since dq
sums over the keys of both. The copy engine adds dq to a float32 buffer in global memory, in no fixed order: the last bits
of dq change from run to run. A last launch scales and converts it.

A column that would be waited for is split (splitting.py), of each query head's steps as many to each program: dk and dv of a part
go to a workspace, in float32, and a launch adds them up in order (parts.py). Where nothing is split, the kernel is compiled without.

Where equal bits are asked for, the kernel leaves dq out and the portable one computes it: two products more. Beyond
head_dim 128, for which there are not enough registers, the portable backward runs.

Knows: a plan's tensors, descriptors, launch configurations. Does not know: layouts, autograd, how a backend is chosen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..seen import Kind, Seen, see
from ..splitting import Split, split_of
from . import backward as portable
from .hopper import (
    HALF,
    INDEX_BITS,
    Describer,
    accumulator,
    add_async,
    bit_rows,
    clear_tail,
    keep_part,
    key_limit,
    load_async,
    named_barrier,
    padded_dim,
    readable,
    store_async,
    store_spread,
    writable,
)
from .launch import LOG2_E, Launch, Options, Walk, multiprocessors, options_of, see_walk, walk, walk_strides
from .launch import TILE as TILE_SIDE
from .parts import sum_cols
from .tile import TILE, block_of, dense_queries, find_line, find_part, find_record, part_of, record_of

MAX_HEAD_DIM = 128
# which barrier: one for the keys and values, then four of each stage
KV_FULL = gl.constexpr(0)
Q_FULL, Q_EMPTY, DOUT_FULL, DOUT_EMPTY = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
# values of a program of scale_kernel
SCALE_BLOCK = 2048
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


@dataclass(frozen=True)
class Config:
    """One launch configuration: queries of a step, steps in flight, registers of a computing thread and of the mover.

    hold_kv  a warpgroup loads its keys and values into registers once, from where all its scores and dp take them
    """

    block_q: int = 64
    stages: int = 2
    hold_kv: bool = False
    registers: int = 240
    mover_registers: int = 24


@functools.cache
def config(dim: int, has_layout: bool, is_plain: bool, has_dq: bool) -> Config:
    """The launch table: dim is the larger padded head dimension, is_plain says: no lengths, no groups of heads, no parts; has_dq: of
    all three gradients, not of k and v alone.

    What binds (Nsight Compute, H200, 16,384 tokens, hidden size 2048, bf16, of the cycles): shared memory. 128 dense 77 %, tensor
    cores 72 %, 16 million bank conflicts; 128 local 63 and 57 %; 64 dense 67 and 48 %, 99 million conflicts. Before `store_spread`
    128 dense had 78 and 66 %, 151 million, 64 dense 65 and 45 %, 179 million: 128 dense 588 TFLOP/s for 563, random 501 for 434; 64
    dense 459 for 429, butterfly 349 for 336. Around the kernel, in a backward of 0.8 ms: lse, delta and the zeros of dq 67
    microseconds, its conversion 48, 268 and 201 MB.

    64 holds keys and values in registers, which unburdens shared memory: +1 to +8 % on the few layouts timed, 456 455 366 353 416
    369 for 450 422 358 349 397 366 (dense, causal, local, butterfly, random, bigbird; Triton 3.6). At 128 registers spill
    even so. Ahead of time only: with a layout they spill 8 to 32 bytes under Triton 3.7, 3.8 and 3.9, and under 3.6 where a call
    is not plain, 8 to 40; without one under 3.9, 56 to 64, where causal. Not without dq: the ptxas of Triton 3.6 then puts p and ds
    where keys and values are held, and from the second step on dk and dv are wrong (tests/compile_kernels.py looks for that). Tried:
    persistent programs that take columns from a queue, with warps that add and scale dq: 128 dense 531 for 558, butterfly 348 for 420;
    64 dense 434 for 401, butterfly 341 for 335.
    sums of dq of four heads at a time, which programs of later heads convert and clear before their first step, in place of a pass
    before and one after: 128 causal 545 for 600, butterfly 371 for 418 (more spills in the steps); 64 causal 442 for 434, butterfly
    332 for 347.
    """
    if dim == 128:
        return Config(stages=2)
    holds = is_plain and TRITON < (3, 7) if has_layout else TRITON < (3, 9)
    return Config(stages=3, hold_kv=holds and has_dq)


# ---- which steps? ----


@gluon.jit
def member_steps(
    ptrs, items_strides, sizes, place, i_member, CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """The steps of one query head of the group: the first, how many, how many of them in front want a mask."""
    items_ptr, _, _, _, kv_lengths_ptr, parts_ptr = ptrs
    _, q_len, kv_len, _, _, _, n_parts = sizes
    i_batch, i_kv_head, kv_start, limit, begin, n_tiles, n_partial, i_part, _ = place
    STEPS: gl.constexpr = TILE // BLOCK_Q
    if items_ptr is not None:
        if GROUP > 1:
            # heads of a group may have layouts, and so launch orders, of their own
            p_member = find_line(items_ptr, items_strides, i_batch, i_kv_head * GROUP + i_member, kv_start // TILE)
            begin, n_tiles, n_partial = gl.load(p_member + 1), gl.load(p_member + 2), gl.load(p_member + 3)
        first, n_steps, n_masked = begin * STEPS, n_tiles * STEPS, n_partial * STEPS
    else:
        # queries past q_len have lse +inf, so that only the diagonal and the last keys want a mask
        first, full, end = dense_queries(kv_start, q_len, kv_len, CAUSAL, BLOCK_Q, TILE)
        n_steps = gl.maximum(end - first, 0)
        n_masked = gl.minimum(full - first, n_steps)
        n_masked = gl.where(kv_start + TILE > limit, n_steps, n_masked)
    if kv_lengths_ptr is not None:
        n_steps = gl.where(kv_start < limit, n_steps, 0)
        n_masked = gl.minimum(n_masked, n_steps)
    if parts_ptr is not None:
        skipped, n_steps, n_masked = part_of(n_steps, n_masked, i_part, n_parts)
        first = first + skipped
    return first, n_steps, n_masked


@gluon.jit
def query_start(indices_ptr, step, BLOCK_Q: gl.constexpr):
    """The first query of a step."""
    if indices_ptr is not None:
        STEPS: gl.constexpr = TILE // BLOCK_Q
        return (gl.load(indices_ptr + step // STEPS) & INDEX_BITS) * TILE + step % STEPS * BLOCK_Q
    else:
        return step * BLOCK_Q


# ---- the warp that moves data ----


@gluon.jit
def move(
    descriptors, rings, barriers, ptrs, items_strides, sizes, place, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, _, _, _ = descriptors
    q_ring, dout_ring, k_tile, v_tile, _, _, lse_ring, delta_ring = rings
    _, indices_ptr, _, _, _, _ = ptrs
    n_heads, _, _, n_padded, _, _, _ = sizes
    i_batch, i_kv_head, kv_start, _, _, _, _, _, _ = place
    mbarrier.expect(barriers.index(KV_FULL), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_async(k_desc, [i_batch, i_kv_head, kv_start, 0], barriers.index(KV_FULL), k_tile)
    load_async(v_desc, [i_batch, i_kv_head, kv_start, 0], barriers.index(KV_FULL), v_tile)
    n_moved = 0
    for i_member in range(GROUP):
        first, n_steps, _n_masked = member_steps(ptrs, items_strides, sizes, place, i_member, CAUSAL, GROUP, BLOCK_Q)
        i_head = i_kv_head * GROUP + i_member
        line = (i_batch * n_heads * GROUP + i_head) * n_padded
        q_start = query_start(indices_ptr, first, BLOCK_Q)
        for i_step in range(n_steps):
            # the next index is loaded a step ahead
            q_next = query_start(indices_ptr, first + i_step + 1, BLOCK_Q)
            stage = n_moved % STAGES
            phase = (n_moved // STAGES) & 1
            mbarrier.wait(barriers.index(Q_EMPTY + 4 * stage), phase ^ 1)
            mbarrier.expect(barriers.index(Q_FULL + 4 * stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            load_async(q_desc, [i_batch, i_head, q_start, 0], barriers.index(Q_FULL + 4 * stage), q_ring.index(stage))
            load_async(lse_desc, [line + q_start], barriers.index(Q_FULL + 4 * stage), lse_ring.index(stage))
            mbarrier.wait(barriers.index(DOUT_EMPTY + 4 * stage), phase ^ 1)
            mbarrier.expect(
                barriers.index(DOUT_FULL + 4 * stage), dout_desc.block_type.nbytes + delta_desc.block_type.nbytes
            )
            load_async(
                dout_desc, [i_batch, i_head, q_start, 0], barriers.index(DOUT_FULL + 4 * stage), dout_ring.index(stage)
            )
            load_async(delta_desc, [line + q_start], barriers.index(DOUT_FULL + 4 * stage), delta_ring.index(stage))
            n_moved += 1
            q_start = q_next


# ---- the warpgroups that compute ----


@gluon.jit
def attending(ptrs, sizes, place, step, o_kv, o_q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Which pairs of a partial step attend, [keys, queries]; o_kv and o_q count from the tile's first key and the step's first query."""
    _, indices_ptr, ids_ptr, words_ptr, _, _ = ptrs
    _, q_len, kv_len, _, _, _, _ = sizes
    _, _, kv_start, limit, _, _, _, _, _ = place
    STEPS: gl.constexpr = TILE // BLOCK_Q
    if indices_ptr is not None:
        i_bitmask = gl.load(ids_ptr + step // STEPS)
        return bit_rows(words_ptr, i_bitmask, o_kv, step % STEPS * BLOCK_Q + o_q)
    else:
        m_pairs = gl.expand_dims(kv_start + o_kv < limit, 1)
        if CAUSAL:
            o_last = step * BLOCK_Q + o_q + (kv_len - q_len)
            m_pairs = m_pairs & (gl.expand_dims(kv_start + o_kv, 1) <= gl.expand_dims(o_last, 0))
        return m_pairs


@gluon.jit
def descend(
    b_dk, b_dv, k_half, v_half, descriptors, rings, barriers, ptrs, sizes, place, i_head, step, n_now, is_masked,
    WHO: gl.constexpr, CAUSAL: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One step: dk and dv of this warpgroup's keys and its share of the step's dq.

    k_half, v_half  the warpgroup's keys and values, in shared memory or in registers
    """
    _, _, _, _, _, _, dq_desc, _, _ = descriptors
    q_ring, dout_ring, k_tile, _, ds_ring, dq_ring, lse_ring, delta_ring = rings
    _, indices_ptr, _, _, kv_lengths_ptr, _ = ptrs
    i_batch, _, kv_start, limit, _, _, _, _, _ = place
    dtype: gl.constexpr = q_ring.dtype
    # dq [BLOCK_Q, DIM] is split by rows if there are enough, else by columns
    BY_ROWS: gl.constexpr = BLOCK_Q == 2 * HALF
    DQ_ROWS: gl.constexpr = HALF
    DQ_DIM: gl.constexpr = DIM if BY_ROWS else DIM // 2
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    dk_layout: gl.constexpr = accumulator(DIM)
    dv_layout: gl.constexpr = accumulator(DIM_V)
    dq_layout: gl.constexpr = accumulator(DQ_DIM)
    stage = n_now % STAGES
    phase = (n_now // STAGES) & 1
    q_tile = q_ring.index(stage).reshape([BLOCK_Q, DIM])
    dout_tile = dout_ring.index(stage).reshape([BLOCK_Q, DIM_V])
    k_all = k_tile.reshape([TILE, DIM])
    b_zero = gl.zeros([HALF, BLOCK_Q], gl.float32, score_layout)
    mbarrier.wait(barriers.index(Q_FULL + 4 * stage), phase)
    # [HALF, BLOCK_Q]
    scores_token = warpgroup_mma(k_half, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_lse = lse_ring.index(stage).load(gl.SliceLayout(0, score_layout))
    mbarrier.wait(barriers.index(DOUT_FULL + 4 * stage), phase)
    # [HALF, BLOCK_Q]
    dp_token = warpgroup_mma(v_half, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    b_p = gl.exp2(b_scores * sizes[4] - gl.expand_dims(b_lse, 0))
    b_delta = delta_ring.index(stage).load(gl.SliceLayout(0, score_layout))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    o_kv = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, score_layout))
    if kv_lengths_ptr is not None:
        b_p = gl.where(gl.expand_dims(kv_start + o_kv < limit, 1), b_p, 0.0)
    # a branch: no product may be under way, or ptxas serialises them all
    if is_masked:
        o_q = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, score_layout))
        b_p = gl.where(attending(ptrs, sizes, place, step, o_kv, o_q, CAUSAL, BLOCK_Q), b_p, 0.0)
    b_p16 = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, dv_layout, 2))
    b_ds = (b_p * (b_dp - gl.expand_dims(b_delta, 0))).to(dtype)
    # [HALF, DIM_V]
    dv_token = warpgroup_mma(b_p16, dout_tile, b_dv, is_async=True)
    if dq_desc is not None:
        # two buffers: nobody still reads this one, as both warpgroups have met in the step between
        ds_tile = ds_ring.index(n_now % 2)
        ds_tile.slice(WHO * HALF, HALF, 0).store(b_ds)
        fence_async_shared()
        named_barrier("sync", 9)
        if BY_ROWS:
            ds_part = ds_tile.permute((1, 0)).slice(WHO * DQ_ROWS, DQ_ROWS, 0)
            k_part = k_all
        else:
            ds_part = ds_tile.permute((1, 0))
            k_part = k_all.slice(WHO * DQ_DIM, DQ_DIM, 1)
        b_none = gl.zeros([DQ_ROWS, DQ_DIM], gl.float32, dq_layout)
        # [DQ_ROWS, DQ_DIM]
        dq_token = warpgroup_mma(ds_part, k_part, b_none, use_acc=False, is_async=True)
        b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
        mbarrier.arrive(barriers.index(DOUT_EMPTY + 4 * stage), count=1)
    # [HALF, DIM]
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    if dq_desc is not None:
        q_start = query_start(indices_ptr, step, BLOCK_Q)
        b_dq = warpgroup_mma_wait(1, deps=(dq_token,))
        # the step before has left the buffer
        tma.store_wait(0)
        dq_tile = dq_ring.index(WHO)
        store_spread(dq_tile.reshape([DQ_ROWS, DQ_DIM]), b_dq)
        fence_async_shared()
        if BY_ROWS:
            add_async(dq_desc, [i_batch, i_head, q_start + WHO * DQ_ROWS, 0], dq_tile)
        else:
            add_async(dq_desc, [i_batch, i_head, q_start, WHO * DQ_DIM], dq_tile)
    else:
        b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
        mbarrier.arrive(barriers.index(DOUT_EMPTY + 4 * stage), count=1)
    b_dk = warpgroup_mma_wait(0, deps=(dk_token,))
    mbarrier.arrive(barriers.index(Q_EMPTY + 4 * stage), count=1)
    return b_dk, b_dv


@gluon.jit
def compute(
    descriptors, rings, barriers, ptrs, items_strides, sizes, place, WHO: gl.constexpr, CAUSAL: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    HOLD_KV: gl.constexpr,
):  # fmt: skip
    _, _, k_tile, v_tile, _, _, _, _ = rings
    _, _, _, _, kv_lengths_ptr, parts_ptr = ptrs
    _, i_kv_head, kv_start, limit, _, _, _, _, i_block = place
    dk_layout: gl.constexpr = accumulator(DIM)
    dv_layout: gl.constexpr = accumulator(DIM_V)
    b_dk = gl.zeros([HALF, DIM], gl.float32, dk_layout)
    b_dv = gl.zeros([HALF, DIM_V], gl.float32, dv_layout)
    mbarrier.wait(barriers.index(KV_FULL), 0)
    if kv_lengths_ptr is not None:
        clear_tail(k_tile.reshape([TILE, DIM]), kv_start, limit, WHO)
        clear_tail(v_tile.reshape([TILE, DIM_V]), kv_start, limit, WHO)
    k_half = k_tile.reshape([TILE, DIM]).slice(WHO * HALF, HALF, 0)
    v_half = v_tile.reshape([TILE, DIM_V]).slice(WHO * HALF, HALF, 0)
    if HOLD_KV:
        score_layout: gl.constexpr = accumulator(BLOCK_Q)
        k_half = k_half.load(gl.DotOperandLayout(0, score_layout, 2))
        v_half = v_half.load(gl.DotOperandLayout(0, score_layout, 2))
    n_done = 0
    for i_member in range(GROUP):
        first, n_steps, n_masked = member_steps(ptrs, items_strides, sizes, place, i_member, CAUSAL, GROUP, BLOCK_Q)
        i_head = i_kv_head * GROUP + i_member
        for i_step in range(n_steps):
            b_dk, b_dv = descend(
                b_dk, b_dv, k_half, v_half, descriptors, rings, barriers, ptrs, sizes, place, i_head, first + i_step,
                n_done + i_step, i_step < n_masked, WHO, CAUSAL, DIM, DIM_V, BLOCK_Q, STAGES,
            )  # fmt: skip
        n_done += n_steps
    # one is known when compiling, the other is not
    if parts_ptr is None:  # noqa: SIM114
        hand_in(b_dk, b_dv, descriptors, rings, sizes, place, WHO)
    elif i_block < 0:
        hand_in(b_dk, b_dv, descriptors, rings, sizes, place, WHO)
    else:
        p_part = parts_ptr + i_block.to(gl.int64) * (TILE * (DIM + DIM_V))
        keep_part(p_part, b_dk, WHO)
        keep_part(p_part + TILE * DIM, b_dv, WHO)
        # the last sum of dq
        tma.store_wait(0)


@gluon.jit
def hand_in(b_dk, b_dv, descriptors, rings, sizes, place, WHO: gl.constexpr):
    """Writes dk and dv of a whole column."""
    _, _, _, _, _, _, _, dk_desc, dv_desc = descriptors
    _, _, k_tile, v_tile, _, _, _, _ = rings
    _, _, _, _, _, scale, _ = sizes
    i_batch, i_kv_head, kv_start, _, _, _, _, _, _ = place
    dtype: gl.constexpr = k_tile.dtype
    DIM: gl.constexpr = b_dk.shape[1]
    DIM_V: gl.constexpr = b_dv.shape[1]
    # nobody still reads the keys and values: their place takes the gradients
    named_barrier("sync", 9)
    k_tile.reshape([TILE, DIM]).slice(WHO * HALF, HALF, 0).store((b_dk * scale).to(dtype))
    v_tile.reshape([TILE, DIM_V]).slice(WHO * HALF, HALF, 0).store(b_dv.to(dtype))
    fence_async_shared()
    named_barrier("sync", 9)
    if WHO == 0:
        store_async(dk_desc, [i_batch, i_kv_head, kv_start, 0], k_tile)
    else:
        store_async(dv_desc, [i_batch, i_kv_head, kv_start, 0], v_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_axes", "n_lines", "q_len", "kv_len", "n_padded", "n_split", "n_parts"])
def hopper_backward_kernel(
    # inputs
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr,
    # outputs: dq in float32, to be added to, or None; dk and dv; what parts of columns write, None: there are none
    dq_desc, dk_desc, dv_desc, parts_ptr,
    # strides in elements: (batch, head)
    items_strides,
    # sizes: n_heads key heads, n_axes = batch * n_heads, n_lines = tile columns; the first n_split lines of each head have
    # n_parts programs each
    n_heads, n_axes, n_lines, q_len, kv_len, n_padded, n_split, n_parts, scale_log2, scale,
    # compile time
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HOLD_KV: gl.constexpr, REGISTERS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_Q], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM], q_desc.layout)
    dout_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM_V], dout_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, TILE, DIM], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, TILE, DIM_V], v_desc.layout)
    if dq_desc is not None:
        ds_ring = gl.allocate_shared_memory(dtype, [2, TILE, BLOCK_Q], ds_layout)
        dq_ring = gl.allocate_shared_memory(gl.float32, [2, 1, 1, HALF, dq_desc.block_type.shape[3]], dq_desc.layout)
    else:
        # never used
        ds_ring = q_ring
        dq_ring = q_ring
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [Q_FULL + 4 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(KV_FULL), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(Q_FULL + 4 * i), count=1)
        mbarrier.init(barriers.index(Q_EMPTY + 4 * i), count=2)
        mbarrier.init(barriers.index(DOUT_FULL + 4 * i), count=1)
        mbarrier.init(barriers.index(DOUT_EMPTY + 4 * i), count=2)
    fence_async_shared()
    # which column of which head
    pid = gl.program_id(0)
    begin, n_tiles, n_partial = 0, 0, 0
    i_part, i_block = -1, -1
    p_record = items_ptr
    if parts_ptr is not None:
        i_axis, i_launch, i_part = find_part(items_ptr, pid, n_lines, n_axes, n_split, n_parts)
        i_block = block_of(i_axis, i_launch, i_part, n_axes, n_split)
        if items_ptr is not None:
            p_record = record_of(items_ptr, items_strides, i_axis, n_heads, i_launch, GROUP)
    elif items_ptr is not None:
        i_axis, p_record, _ = find_record(items_ptr, items_strides, pid, n_lines, n_heads, n_axes, 1, GROUP)
    else:
        i_axis, i_launch = pid // n_lines, pid % n_lines
    if items_ptr is not None:
        kv_start = gl.load(p_record) * TILE
        begin, n_tiles, n_partial = gl.load(p_record + 1), gl.load(p_record + 2), gl.load(p_record + 3)
    else:
        kv_start = i_launch * TILE
    i_batch = i_axis // n_heads
    limit = key_limit(kv_lengths_ptr, i_batch, kv_len)
    place = (i_batch, i_axis % n_heads, kv_start, limit, begin, n_tiles, n_partial, i_part, i_block)
    descriptors = (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc)
    rings = (q_ring, dout_ring, k_tile, v_tile, ds_ring, dq_ring, lse_ring, delta_ring)
    ptrs = (items_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, parts_ptr)
    sizes = (n_heads, q_len, kv_len, n_padded, scale_log2, scale, n_parts)
    gl.warp_specialize(
        [
            (compute, (descriptors, rings, barriers, ptrs, items_strides, sizes, place, 0, CAUSAL, GROUP, DIM, DIM_V,
                       BLOCK_Q, STAGES, HOLD_KV)),
            (compute, (descriptors, rings, barriers, ptrs, items_strides, sizes, place, 1, CAUSAL, GROUP, DIM, DIM_V,
                       BLOCK_Q, STAGES, HOLD_KV)),
            (move, (descriptors, rings, barriers, ptrs, items_strides, sizes, place, CAUSAL, GROUP, BLOCK_Q, STAGES)),
        ],
        [4, 1],
        [REGISTERS, MOVER_REGISTERS],
    )  # fmt: skip


@triton.jit
def scale_kernel(sum_ptr, dq_ptr, scale, n_values, BLOCK: tl.constexpr):
    """dq from its float32 sum."""
    o_value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_value = o_value < n_values
    b_dq = tl.load(sum_ptr + o_value, mask=m_value) * scale
    tl.store(dq_ptr + o_value, b_dq.to(dq_ptr.dtype.element_ty), mask=m_value)


# ---- the launches ----


class Prepared(NamedTuple):
    """The launches, None for what is not asked for, and how many float32 the parts of split columns are."""

    statistics: Launch
    keys: Launch
    sums: Launch | None
    n_floats: int
    scale: Launch | None


@functools.lru_cache(maxsize=1024)
def prepare(
    kind: Kind,
    line: Seen,
    gradients: tuple[Seen | None, Seen, Seen],
    walked: Walk,
    split: Split,
    options: Options,
) -> Prepared:
    """How a call on such tensors is launched.

    kind       of q, k, v and dout
    gradients  the float32 sum of dq, dk and dv
    """
    q, k, v, dout = kind.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim(head_dim), padded_dim(v_dim)
    is_plain = options.others[-1] is None and heads == kv_heads and split.parts == 1
    chosen = config(max(dim, dim_v), walked[0] is not None, is_plain, gradients[0] is not None)
    rows, half, scale = chosen.block_q, HALF.value, options.scale
    n_padded = -(-q_len // TILE_SIDE) * TILE_SIDE
    n_lines = -(-kv_len // TILE_SIDE)
    rest = {
        "items_strides": walk_strides(walked[0]),
        "n_heads": kv_heads,
        "n_axes": batch * kv_heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        "n_split": split.n_lines,
        "n_parts": split.parts,
        # there is no maximum to be found: the scale may be negative or 0
        "scale_log2": scale * LOG2_E,
        "scale": scale,
        "CAUSAL": options.causal,
        "GROUP": heads // kv_heads,
        "STAGES": chosen.stages,
        "HOLD_KV": chosen.hold_kv,
        "REGISTERS": chosen.registers,
        "MOVER_REGISTERS": chosen.mover_registers,
        "num_warps": 4,
    }
    describers = {
        "q_desc": Describer(q, (1, 1, rows, dim)),
        "k_desc": Describer(k, (1, 1, TILE_SIDE, dim)),
        "v_desc": Describer(v, (1, 1, TILE_SIDE, dim_v)),
        "dout_desc": Describer(dout, (1, 1, rows, dim_v)),
        "lse_desc": Describer(line, (rows,)),
        "delta_desc": Describer(line, (rows,)),
        "dk_desc": Describer(gradients[1], (1, 1, TILE_SIDE, dim)),
        "dv_desc": Describer(gradients[2], (1, 1, TILE_SIDE, dim_v)),
    }
    scaled = None
    cleared = 0
    if gradients[0] is not None:
        # rows are padded in both
        cleared = -(-head_dim // 8) * 8
        n_values = batch * heads * q_len * cleared
        scaling = {"scale": scale, "n_values": n_values, "BLOCK": SCALE_BLOCK, "num_warps": 4}
        scaled = Launch(scale_kernel, (triton.cdiv(n_values, SCALE_BLOCK),), scaling)
        describers["dq_desc"] = Describer(gradients[0], (1, 1, half, dim if rows == 2 * half else dim // 2))
    return Prepared(
        portable.prepare_statistics(dout, n_padded, cleared),
        Launch(hopper_backward_kernel, (split.n_programs(n_lines, batch * kv_heads),), rest, describers),
        sum_cols(split, walked[0], gradients[1], gradients[2], rest, (dim, dim_v)),
        split.floats(dim + dim_v, batch * kv_heads),
        scaled,
    )


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
    *,
    deterministic: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, contiguous and in q's type. out and lse are the forward's."""
    assert seed is None and dropout_p == 0.0, "the choice of the backend refuses dropout"
    widest = max(q.shape[3], v.shape[3])
    if widest > MAX_HEAD_DIM:
        return portable.backward(dout, dlse, q, k, v, out, lse, plan, kv_lengths, seed, scale, causal, dropout_p)
    dk, dv = writable(k, k.shape), writable(v, v.shape)
    # what autograd hands on may have strides of 0
    (q, k, v, dout), kind = readable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    axes, n_padded = q.shape[0] * q.shape[1], -(-q.shape[2] // TILE_SIDE) * TILE_SIDE
    lines = q.new_empty(2, axes * n_padded, dtype=torch.float32)
    lse_line, delta_line = lines.unbind()
    # cleared by the launch of the statistics
    dq_sum = None if deterministic else writable(q, q.shape, torch.float32)
    pairs = torch.empty(axes * n_padded, 2, dtype=torch.float32, device=q.device) if deterministic else None
    options = options_of(q, scale, causal, dropout_p, out, lse, dlse, kv_lengths)
    split = split_of(plan, 3, q.shape, k.shape, causal, multiprocessors(options.device))
    by_cols = walk(plan, 3)
    ready = prepare(kind, see(lse_line), (see(dq_sum), see(dk), see(dv)), see_walk(by_cols), split, options)
    parts = None if ready.sums is None else lines.new_empty(ready.n_floats)
    ready.statistics(out, dout, lse, dlse, pairs, lines, dq_sum)
    ready.keys(q, k, v, dout, lse_line, delta_line, *by_cols, kv_lengths, dq_sum, dk, dv, parts)
    if ready.sums is not None:
        ready.sums(parts, by_cols[0], dk, dv)
    if ready.scale is not None:
        dq = writable(q, q.shape)
        ready.scale(dq_sum, dq)
    else:
        dq = q.new_empty(*q.shape)
        by_rows = walk(plan, 0)
        other = portable.prepare(kind, see_walk(by_rows), see_walk(by_cols), options)
        assert other.queries is not None
        # neither slopes nor tables, and no sums for them
        other.queries(q, k, v, dout, pairs, *by_rows, kv_lengths, seed, None, None, dq, None, None)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
