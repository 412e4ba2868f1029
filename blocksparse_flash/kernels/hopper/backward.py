"""Hopper backward in Gluon (sm90): dq, dk and dv from out, lse and their gradients.

With p = exp(scale q k^T - lse), dp = dout v^T and delta = rowsum(dout * out) - dlse:
    ds = p * (dp - delta)      dv = p^T dout      dk = scale ds^T q      dq = scale ds k
Each score is computed once: five products a tile. One program a SM takes columns of the plan from a queue, 128 keys
of a key head each, and walks them (for each query head of the group). A warp moves k and v, then q, dout, lse and
delta of each
step, through rings (hopper_cols.py). Two warpgroups compute, 64 keys each: scores and dp transposed, dk and dv in
registers; ds
goes through shared memory, since dq sums over the keys of both. dq is added to a float32 buffer in global memory, at
head_dim 64 by
those that compute, else by TMA, in no fixed order: the last bits of dq change from run to run. The launch before clears
this sum and tells lse and delta, and a last one scales and converts it, but for what warps beside do while columns
are computed
(service.py says how much, hopper_service.py how).

A column that would be waited for is split (splitting.py), of each query head's steps as many to each program: dk and
dv of a part
go to a workspace, in float32, and a launch adds them up in order (parts.py). Where nothing is split, the kernel is
compiled without.

Where equal bits are asked for, and where few tiles make up each dq (separate_dq.py), the kernel leaves dq out and
the portable one
computes it: two products more. Beyond head_dim 128, for which there are not enough registers, the portable backward
runs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...plan_format import has_subtiles_of
from ...runtime.launch import Launch, Memory, allocator, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ..arguments import LOG2_E, Options, PlanSpecs, options_of, plan_specs_of, strides_of_records, tile_lists
from ..arguments import TILE as TILE_SIDE
from ..inputs import BackwardInputs
from ..schedule import Split, padded_dim, split_of
from ..separate_dq import is_dq_separate
from ..service import Service, are_statistics_overlapped, n_counts, service_of
from ..triton import backward as portable
from ..triton.backward_preprocess import prepare_statistics
from ..triton.combine_splits import sum_cols
from ..triton.tile import TILE
from .backward_producer import (
    COL_DONE,
    COL_FIELDS,
    DOUT_EMPTY,
    DOUT_FULL,
    KV_EMPTY,
    KV_FULL,
    Q_EMPTY,
    Q_FULL,
    is_left_out,
    member_steps,
    move,
    query_start,
    read_col_work_tile,
    report,
)
from .barriers import allocate_mbarriers, named_barrier
from .bitmask import SUBTILES_BIT, mask_subtiles, transposed_mask
from .registers import (
    BEFORE_TRITON_3_9,
    WARPGROUP_ROWS,
    accumulator,
    atomic_add_sum,
    clamped_kv_len,
    in_register_order,
    reinterpret,
    store_split,
    zero_tail,
)
from .service import CHUNK, FETCHED, STEP, scale_kernel, serve
from .tma import DescriptorFactory, tma_loadable, tma_reduce_add, tma_storable, tma_store, tma_store_wait_writes

MAX_HEAD_DIM = 128
# of the sum of dq, numbers of a line, by which TMA adds
LINE = gl.constexpr(32)


@dataclass(frozen=True)
class Config:
    """One launch configuration: queries of a step, steps in flight, registers of a computing thread and of the mover.

    is_direct  whether those that compute add to the sum of dq, without TMA
    sets  of keys and values in shared memory: with two, those of the next column come during this one
    """

    block_q: int = 64
    stages: int = 2
    sets: int = 1
    registers: int = 240
    mover_registers: int = 32
    is_direct: bool = False


@functools.cache
def config(dim: int) -> Config:
    """The launch table: dim is the larger padded head dimension.

    H200, 16,384 tokens, opaque size 2048, bf16, Triton 3.6, TFLOP/s of the kernels of a backward (dense, butterfly,
    local, random,
    bigbird), a few calls each, so that power does not yet limit the clock:
        128  64 queries a step                                   661 495
        128  the same, lse and delta loaded before the products  645
        128  the same, what follows from the set kept in registers, which spill  637 482 494 556 494
        64   128 queries, 2 sets                                 556 426 440 487 445
        64   128 queries                                         554 424 435 485 442
        64   64 queries, 3 stages, keys and values in registers  513 400 413 451 412
        64   the same, 2 sets                                    484 402 415 452 417
    A program for each column and one loop for partial and full steps had 453 at 128 butterfly and, at 64, 467 356
    371 423 382. At 128
    neither a second set nor more queries a step fit in shared memory.

    What binds (Nsight Compute, single launches at 1.7 to 1.8 GHz, of the cycles): shared memory (wavefronts of L1's
    data pipe), tensor
    cores, what comes into L2: 128 dense 74, 67, 59 %, butterfly 70, 57, 61; 64 dense 66, 58, 52, butterfly 63, 49,
    56. DRAM 35 and 29 %
    at butterfly, else 3 and less; an instruction is issued in 22 to 25 % of them. Over and over, as
    benchmarks.run.attention calls it, power
    limits the clock (of 700 W 698 to 748 are drawn, and the limit was in force in each of some 20 looks a case),
    TFLOP/s of single
    calls and over and over: 128 dense 608, 578, butterfly 528, 473, random 574, 530; 64 dense 545, 517.

    Sums in the order in which threads hold them (hopper.in_register_order), added from registers ("direct") or by TMA, and
    lse and
    delta written beside the columns; microseconds of a whole backward, single launches, L2 emptied:
                                                     local butterfly random bigbird
        128  before, rows of the sum in their order    720    664     1257    830
        128  TMA                               715    659     1249    820
        128  TMA, statistics beside            711    651     1236
        128  direct, statistics beside                 783    742     1254
        64   before                                    809    754     1426    957
        64   direct                                    803    747     1417    894
        64   direct, statistics beside                 791    735     1401    884
    (bigbird of 128 has nothing done beside it, of 64 the conversion alone.) Additions from registers take a sixth of
    its traffic, by
    count, from shared memory, but slow what warps beside do more than those of TMA; with nothing done beside, the whole
    takes 688 for 705 at 128 butterfly. And what is done beside slows columns by most of what it saves: of the 44
    microseconds that lse
    and delta take before, 9 are gained.

    Tried, microseconds of local and butterfly, single launches, and of the table in the same run:
        places given back by hardware barriers, without meetings of a warpgroup around mbarriers   128 714 655, 714
        654; 64 799 743, 799 743
        "arrivals": given back by an arrival of each thread (cp.async.mbarrier.arrive) instead     128 727 668, 727
        669; 64 801 742, 800 741
        arrivals, values given back in the last step's middle, keys behind its dq                  128 746 689, 727
        669; 64 814 757, 800 741
        arrivals, sums added from registers, 16 KB under way to each warp that serves, not 8       128 739 676, 727 669
        arrivals, sums added from registers, two sets of keys beside one of values                 128 784 738, 727 669
        the same, 16 KB under way                                                                  128 747 690, 727 669

    Steps of 64 queries left out that attend to nothing of a tile: blocks of 64 at random, 10 % of them, 128 1820
    microseconds for 3070;
    local, 80 % of them stored, 842 for 842. At 64 steps have 128 queries, and 3670 it is.

    Bitmasks by the instructions of the forward, in place of what LLVM makes of them (128 614 instructions a step for
    652, 64 740 for
    908), and their number before the products: butterfly in blocks of 16, 80 % stored, 128 351 TFLOP/s for 345, 64
    281 for 272, but full
    tiles of 64, local and butterfly, 476, 466 for 481, 471, where one warpgroup loads one spilled value more a step.

    Sums that leave L2 for nothing, discarded when they are converted (discard.global.L2): at 64 DRAM writes 340 MB
    for 445 at local, at 128
    420 for 446; dq stored with .cs and out and dout read as what is wanted once: nothing. Either way the time is the
    same to 1 %, over
    and over too.

    Tried before: sums of dq of four heads at a time, which programs of later heads convert and clear before their
    first step, in
    place of a pass before and one after: 128 causal 545 for 600, butterfly 371 for 418; 64 causal 442 for 434,
    butterfly 332 for 347.
    Warps of their own that add and scale dq: 128 dense 531 for 558, butterfly 348 for 420; 64 dense 434 for 401,
    butterfly 341 for 335.
    """
    return Config() if dim == 128 else Config(block_q=128, sets=2, is_direct=True)


# ---- the warpgroups that compute ----


@gluon.jit
def attending(ptrs, sizes, kv_start, limit, step, o_kv, o_q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Which pairs of a partial step attend, [keys, queries]; o_kv and o_q count from the tile's first key and the
    step's first query."""
    _, indices_ptr, ids_ptr, words_ptr, _, _, _, _ = ptrs
    _, _, _, q_len, kv_len, _, _, _, _, _ = sizes
    STEPS: gl.constexpr = TILE // BLOCK_Q
    if indices_ptr is not None:
        i_bitmask = gl.load(ids_ptr + step // STEPS)
        return transposed_mask(words_ptr, i_bitmask, o_kv, step % STEPS * BLOCK_Q + o_q)
    else:
        # the first query of the step that each key may be attended by
        o_first = o_kv * 0
        if CAUSAL:
            o_first = kv_start + o_kv - (step * BLOCK_Q + kv_len - q_len)
        o_first = gl.where(kv_start + o_kv < limit, o_first, BLOCK_Q)
        return gl.expand_dims(o_q, 0) >= gl.expand_dims(o_first, 1)


@gluon.constexpr_function
def _rounding(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return (
        "{ .reg .f32 a, b; sub.f32 a, $4, $6; mul.f32 a, a, $2; sub.f32 b, $5, $7; mul.f32 b, b, $3;"
        f" cvt.rn.{kind}.f32 $0, $3, $2; cvt.rn.{kind}.f32 $1, b, a; }}"
    )


@gluon.jit
def round_both(b_p, b_dp, b_delta, dtype: gl.constexpr):
    """p and ds = p * (dp - delta) in half precision, pair by pair: all of p first would take registers of which none
    are left."""
    b_p, b_delta = gl.broadcast(b_p, gl.expand_dims(b_delta, 0))
    text: gl.constexpr = _rounding(dtype)
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            text, "=r,=r,f,f,f,f,f,f", [b_p, b_dp, b_delta], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            text, "=r,=r,f,f,f,f,f,f", [b_p, b_dp, b_delta], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )


@gluon.jit
def opaque(i):
    """The same number, of which the compiler knows nothing."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def backward_step(
    b_dk, b_dv, i_set, descriptors, rings, barriers, ptrs, sizes, col, limit, i_head, step, n_now,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr, IS_SUBTILED: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One step: dk and dv of this warpgroup's keys and its share of the step's dq. i_set: where the keys and values
    are."""
    _, _, _, _, _, _, dq_desc, _, _ = descriptors
    q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring, _, _, lse_ring, delta_ring, _ = rings
    _, indices_ptr, _, _, kv_lengths_ptr, _, _, sum_ptr = ptrs
    n_heads, _, _, _, _, n_padded, scale_log2, _, _, _ = sizes
    batch_head, kv_start, _, _, _, _, _, _ = col
    dtype: gl.constexpr = q_ring.dtype
    DIM: gl.constexpr = q_ring.shape[4]
    DIM_V: gl.constexpr = dout_ring.shape[4]
    # dq [BLOCK_Q, DIM] is split by rows if there are enough, else by columns
    BY_ROWS: gl.constexpr = BLOCK_Q == 2 * WARPGROUP_ROWS
    DQ_DIM: gl.constexpr = DIM if BY_ROWS else DIM // 2
    score_layout: gl.constexpr = accumulator(BLOCK_Q)
    dk_layout: gl.constexpr = accumulator(DIM)
    dv_layout: gl.constexpr = accumulator(DIM_V)
    dq_layout: gl.constexpr = accumulator(DQ_DIM)
    line_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    stage = n_now % STAGES
    phase = (n_now // STAGES) & 1
    q_tile = q_ring.index(stage).reshape([BLOCK_Q, DIM])
    dout_tile = dout_ring.index(stage).reshape([BLOCK_Q, DIM_V])
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_Q], gl.float32, score_layout)
    # what follows from it would be kept in registers from step to step, and spilled; and of two sets the ptxas of
    # Triton 3.6
    # loses it, and reads keys from addresses that do not exist
    i_set = opaque(i_set)
    k_all = k_ring.index(i_set).reshape([TILE, DIM])
    k_half = k_all.slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    v_half = v_ring.index(i_set).reshape([TILE, DIM_V]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
    if IS_SUBTILED:
        STEPS: gl.constexpr = TILE // BLOCK_Q
        # 64 queries a bit: it comes while this warpgroup waits for them
        quarters = gl.load(indices_ptr + step // STEPS) >> (SUBTILES_BIT + WARPGROUP + step % STEPS * 2)
    mbarrier.wait(barriers[Q_FULL].index(stage), phase)
    # [WARPGROUP_ROWS, BLOCK_Q]
    scores_token = warpgroup_mma(k_half, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    mbarrier.wait(barriers[DOUT_FULL].index(stage), phase)
    # [WARPGROUP_ROWS, BLOCK_Q]
    dp_token = warpgroup_mma(v_half, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    # not before the products, while which they would take registers
    b_lse = lse_ring.index(stage).load(line_layout)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_lse, 0))
    o_kv = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
    if kv_lengths_ptr is not None:
        b_p = gl.where(gl.expand_dims(kv_start + o_kv < limit, 1), b_p, 0.0)
    if MASKED:
        o_q = gl.arange(0, BLOCK_Q, layout=line_layout)
        b_p = gl.where(attending(ptrs, sizes, kv_start, limit, step, o_kv, o_q, CAUSAL, BLOCK_Q), b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_delta = delta_ring.index(stage).load(line_layout)
    b_p16, b_ds = round_both(b_p, b_dp, b_delta, dtype)
    if IS_SUBTILED:
        # rounded they take half of the registers
        b_p16, b_ds = mask_subtiles(b_p16, quarters, 2, 0), mask_subtiles(b_ds, quarters, 2, 0)
    b_p16 = gl.convert_layout(b_p16, gl.DotOperandLayout(0, dv_layout, 2))
    # [WARPGROUP_ROWS, DIM_V]
    dv_token = warpgroup_mma(b_p16, dout_tile, b_dv, is_async=True)
    if sum_ptr is not None:
        # two buffers: nobody still reads this one, as both warpgroups have met in the step between
        ds_tile = ds_ring.index(n_now % 2)
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
        mbarrier.arrive(barriers[DOUT_EMPTY].index(stage), count=1)
    # [WARPGROUP_ROWS, DIM]
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    if sum_ptr is not None:
        q_start = query_start(indices_ptr, step, BLOCK_Q)
        b_dq = warpgroup_mma_wait(1, deps=(dq_token,))
        i_line = (batch_head // n_heads * n_heads * GROUP + i_head).to(gl.int64) * n_padded + q_start
        # of WARPGROUP: rows, or columns of all rows
        first = i_line * DIM + WARPGROUP * WARPGROUP_ROWS * DQ_DIM
        if dq_desc is None:
            atomic_add_sum(sum_ptr + first, in_register_order(b_dq))
        else:
            # the step before has left the buffer
            tma.store_wait(0)
            dq_tile = dq_ring.index(WARPGROUP)
            dq_tile.store(in_register_order(b_dq).reshape(dq_tile.shape))
            fence_async_shared()
            tma_reduce_add(dq_desc, [(first // LINE).to(gl.int32), 0], dq_tile)
    else:
        b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
        mbarrier.arrive(barriers[DOUT_EMPTY].index(stage), count=1)
    b_dk = warpgroup_mma_wait(0, deps=(dk_token,))
    mbarrier.arrive(barriers[Q_EMPTY].index(stage), count=1)
    return b_dk, b_dv


@gluon.jit
def compute(
    descriptors, rings, barriers, ptrs, record_strides, sizes, WARPGROUP: gl.constexpr, CAUSAL: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, OVERLAPPED: gl.constexpr, HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    _, _, _, _, _, _, dq_desc, _, _ = descriptors
    q_ring, dout_ring, k_ring, v_ring, _, _, _, _, _, _, col_ring = rings
    _, indices_ptr, _, _, kv_lengths_ptr, splits_ptr, _, _ = ptrs
    n_heads, _, _, _, kv_len, _, _, _, _, _ = sizes
    DIM: gl.constexpr = q_ring.shape[4]
    DIM_V: gl.constexpr = dout_ring.shape[4]
    SETS: gl.constexpr = k_ring.shape[0]
    i_col = 0
    n_done = 0
    col = read_col_work_tile(col_ring, barriers, i_col, HAS_SUBTILES)
    while col[0] >= 0:
        batch_head, kv_start, i_block = col[0], col[1], col[6]
        limit = clamped_kv_len(kv_lengths_ptr, batch_head // n_heads, kv_len)
        b_dk = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, accumulator(DIM))
        b_dv = gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, accumulator(DIM_V))
        # dk and dv of the column before have left their places, which the steps write to
        tma.store_wait(0)
        if OVERLAPPED and dq_desc is not None:
            # its sums of dq are in memory, all but what was sent last: dk or dv
            tma_store_wait_writes(1)
        named_barrier("sync", 9)
        if OVERLAPPED and WARPGROUP == 0:
            # before data are waited for, whose section may be waiting for the column before
            mbarrier.arrive(barriers[COL_DONE].index(i_col % 2), count=1)
        i_set = i_col % SETS
        mbarrier.wait(barriers[KV_FULL].index(i_set), (i_col // SETS) & 1)
        if kv_lengths_ptr is not None:
            zero_tail(k_ring.index(i_set).reshape([TILE, DIM]), kv_start, limit, WARPGROUP)
            zero_tail(v_ring.index(i_set).reshape([TILE, DIM_V]), kv_start, limit, WARPGROUP)
        for i_member in range(GROUP):
            first, n_steps, n_masked, n_bitmask = member_steps(
                ptrs, record_strides, sizes, col, limit, i_member, CAUSAL, GROUP, BLOCK_Q, HAS_SUBTILES
            )
            i_head = batch_head % n_heads * GROUP + i_member
            for i_step in range(n_bitmask):
                b_dk, b_dv = backward_step(
                    b_dk, b_dv, i_set, descriptors, rings, barriers, ptrs, sizes, col, limit, i_head,
                    first + i_step, n_done + i_step, WARPGROUP, True, False, CAUSAL, GROUP, BLOCK_Q, STAGES,
                )  # fmt: skip
            if HAS_SUBTILES:
                for i_step in range(n_bitmask, n_masked):
                    n_left_out = is_left_out(indices_ptr, first + i_step, BLOCK_Q, HAS_SUBTILES)
                    if n_left_out == 0:
                        b_dk, b_dv = backward_step(
                            b_dk, b_dv, i_set, descriptors, rings, barriers, ptrs, sizes, col, limit, i_head,
                            first + i_step, n_done + i_step, WARPGROUP, False, True, CAUSAL, GROUP, BLOCK_Q, STAGES,
                        )  # fmt: skip
                    n_done -= n_left_out
            for i_step in range(n_masked, n_steps):
                b_dk, b_dv = backward_step(
                    b_dk, b_dv, i_set, descriptors, rings, barriers, ptrs, sizes, col, limit, i_head,
                    first + i_step, n_done + i_step, WARPGROUP, False, False, CAUSAL, GROUP, BLOCK_Q, STAGES,
                )  # fmt: skip
            n_done += n_steps
        # nothing reads the keys and values any more
        mbarrier.arrive(barriers[KV_EMPTY].index(i_set), count=1)
        if dq_desc is not None:
            # the last sum of dq has left, where dv will be
            tma.store_wait(0)
        # one is known when compiling, the other is not
        if splits_ptr is None:  # noqa: SIM114
            epilogue(b_dk, b_dv, descriptors, rings, sizes, col, WARPGROUP)
        elif i_block < 0:
            epilogue(b_dk, b_dv, descriptors, rings, sizes, col, WARPGROUP)
        else:
            p_part = splits_ptr + i_block.to(gl.int64) * (TILE * (DIM + DIM_V))
            store_split(p_part, b_dk, WARPGROUP)
            store_split(p_part + TILE * DIM, b_dv, WARPGROUP)
        i_col += 1
        col = read_col_work_tile(col_ring, barriers, i_col, HAS_SUBTILES)
    tma.store_wait(0)
    if OVERLAPPED:
        if dq_desc is not None:
            tma_store_wait_writes(1)
        # of the last column, of which a part met nobody
        named_barrier("sync", 9)
        if WARPGROUP == 0:
            mbarrier.arrive(barriers[COL_DONE].index(i_col % 2), count=1)


@gluon.jit
def epilogue(b_dk, b_dv, descriptors, rings, sizes, col, WARPGROUP: gl.constexpr):
    """Writes dk and dv of a whole column."""
    _, _, _, _, _, _, _, dk_desc, dv_desc = descriptors
    _, _, _, _, _, _, dk_tile, dv_tile, _, _, _ = rings
    n_heads, _, _, _, _, _, _, scale, _, _ = sizes
    batch_head, kv_start, _, _, _, _, _, _ = col
    DIM: gl.constexpr = b_dk.shape[1]
    DIM_V: gl.constexpr = b_dv.shape[1]
    # the other warpgroup still reads ds, and its sum of dq may be on its way
    named_barrier("sync", 9)
    dk_tile.reshape([TILE, DIM]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(
        (b_dk * scale).to(dk_tile.dtype)
    )
    dv_tile.reshape([TILE, DIM_V]).slice(WARPGROUP * WARPGROUP_ROWS, WARPGROUP_ROWS, 0).store(b_dv.to(dv_tile.dtype))
    fence_async_shared()
    named_barrier("sync", 9)
    if WARPGROUP == 0:
        tma_store(dk_desc, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], dk_tile)
    else:
        tma_store(dv_desc, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], dv_tile)


@gluon.constexpr_function
def bits_of(dtype):
    return dtype.primitive_bitwidth


@gluon.constexpr_function
def bytes_of(shape, dtype):
    return math.prod(shape) * bits_of(dtype) // 8


@gluon.constexpr_function
def blocks_of(n_bytes, desc):
    """The shape of so many bytes, as blocks of a descriptor."""
    shape = desc.block_type.shape
    return [n_bytes // bytes_of(shape, desc.dtype), *shape]


@gluon.jit
def place_of(ring, desc, N_TAKEN: gl.constexpr):
    """Where a gradient waits to be written: in a ring that only the steps need, behind so many bytes, if it is large
    enough."""
    blocks: gl.constexpr = blocks_of(bytes_of(ring.shape, ring.dtype), desc)
    i_block: gl.constexpr = -(-N_TAKEN // bytes_of(desc.block_type.shape, desc.dtype))
    if blocks[0] > i_block:
        return reinterpret(ring, blocks, desc.layout, desc.dtype).index(i_block)
    else:
        return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit(
    do_not_specialize=[
        "n_heads",
        "n_batch_heads",
        "n_lines",
        "q_len",
        "kv_len",
        "n_padded",
        "n_split_lines",
        "num_splits",
        "n_cleared",
        "n_ahead",
        "n_converted",
        "n_eighths",
        "n_v_eighths",
    ]
)
def hopper_backward_kernel(
    # inputs; a queue, None: there is a program for each column
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr,
    tile_counter_ptr,
    # outputs: the sum of dq, in float32, in lines of LINE numbers, by TMA, or None: by those that compute; dk and dv;
    # what
    # parts of columns write, None: there are none; the sum again, None: dq is left out; dq, None: other launches clear
    # the sum and
    # convert it; else the queue is all that is counted
    dq_desc, dk_desc, dv_desc, splits_ptr, sum_ptr, dq_ptr,
    # of which lse and delta, a line each, are written while columns are computed; None: by the launch before
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lines_ptr,
    # strides in elements: (batch, head); in eights: (batch, head, row)
    record_strides, dout_eighths,
    # sizes: n_heads key heads, n_batch_heads = batch * n_heads, n_lines = tile columns; the first n_split_lines lines of each head
    # have
    # num_splits programs each
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded, n_split_lines, num_splits, scale_log2, scale,
    # as in Service; eighths of a row of dq, and of out
    n_cleared, n_ahead, n_converted, n_eighths, n_v_eighths,
    # compile time; HAS_SUBTILES: tiles made of whole quarters are listed
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, SETS: gl.constexpr,
    REGISTERS: gl.constexpr, MOVER_REGISTERS: gl.constexpr, HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = q_desc.block_type.shape[2]
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_Q], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM], q_desc.layout)
    dout_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, DIM_V], dout_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [SETS, 1, 1, TILE, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [SETS, 1, 1, TILE, DIM_V], v_desc.layout)
    if sum_ptr is not None:
        ds_ring = gl.allocate_shared_memory(dtype, [2, TILE, BLOCK_Q], ds_layout)
        dk_tile = place_of(ds_ring, dk_desc, 0)
        if dq_desc is not None:
            dq_ring = gl.allocate_shared_memory(gl.float32, [2, dq_desc.block_type.shape[0], LINE], dq_desc.layout)
            dv_tile = place_of(dq_ring, dv_desc, 0)
        else:
            dq_ring = q_ring
            dv_tile = place_of(ds_ring, dv_desc, bytes_of(dk_desc.block_type.shape, dtype))
    else:
        # never used
        ds_ring = q_ring
        dq_ring = q_ring
        dk_tile = gl.allocate_shared_memory(dtype, dk_desc.block_type.shape, dk_desc.layout)
        dv_tile = gl.allocate_shared_memory(dtype, dv_desc.block_type.shape, dv_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    col_ring = gl.allocate_shared_memory(gl.int32, [2 * COL_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    OVERLAPPED: gl.constexpr = dq_ptr is not None
    barriers = (
        allocate_mbarriers(2, 1), allocate_mbarriers(2, 3 if OVERLAPPED else 2), allocate_mbarriers(SETS, 1), allocate_mbarriers(SETS, 2),
        allocate_mbarriers(STAGES, 1), allocate_mbarriers(STAGES, 2), allocate_mbarriers(STAGES, 1), allocate_mbarriers(STAGES, 2),
        allocate_mbarriers(2, 1) if OVERLAPPED else None,
    )  # fmt: skip
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc)
    rings = (
        q_ring, dout_ring, k_ring, v_ring, ds_ring, dq_ring, dk_tile, dv_tile, lse_ring, delta_ring, col_ring
    )  # fmt: skip
    ptrs = (records_ptr, indices_ptr, ids_ptr, words_ptr, kv_lengths_ptr, splits_ptr, tile_counter_ptr, sum_ptr)
    sizes = (n_heads, n_batch_heads, n_lines, q_len, kv_len, n_padded, scale_log2, scale, n_split_lines, num_splits)
    if OVERLAPPED:
        n_chunks = GROUP * n_padded * DIM // CHUNK
        n_work = n_lines if splits_ptr is None else n_lines + n_split_lines * (num_splits - 1)
        fetch_ring = gl.allocate_shared_memory(gl.float32, [2, FETCHED // 4], gl.SwizzledSharedLayout(4, 1, 1, [0]))
        written = (
            out_ptr, dout_ptr, lse_ptr, dlse_ptr, lines_ptr, dout_eighths, n_heads * GROUP, n_batch_heads * GROUP * n_padded, n_v_eighths
        )  # fmt: skip
        service = (
            tile_counter_ptr, sum_ptr, dq_ptr, n_batch_heads, n_work, n_cleared, n_ahead, n_converted, n_chunks, n_padded, q_len, n_eighths, scale
        )  # fmt: skip
        gl.warp_specialize(
            [
                (compute, (descriptors, rings, barriers, ptrs, record_strides, sizes, 0, CAUSAL, GROUP, BLOCK_Q, STAGES, True, HAS_SUBTILES)),
                (compute, (descriptors, rings, barriers, ptrs, record_strides, sizes, 1, CAUSAL, GROUP, BLOCK_Q, STAGES, True, HAS_SUBTILES)),
                (move, (descriptors, rings, barriers, ptrs, record_strides, sizes, service, CAUSAL, GROUP, BLOCK_Q, STAGES, HAS_SUBTILES)),
                (report, (col_ring, barriers, service)),
                (serve, (service, written, fetch_ring, 0, DIM, DIM_V)),
                (serve, (service, written, fetch_ring, 1, DIM, DIM_V)),
            ],
            [4, 1, 1, 1, 1],
            [REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (descriptors, rings, barriers, ptrs, record_strides, sizes, 0, CAUSAL, GROUP, BLOCK_Q, STAGES, False, HAS_SUBTILES)),
                (compute, (descriptors, rings, barriers, ptrs, record_strides, sizes, 1, CAUSAL, GROUP, BLOCK_Q, STAGES, False, HAS_SUBTILES)),
                (move, (descriptors, rings, barriers, ptrs, record_strides, sizes, None, CAUSAL, GROUP, BLOCK_Q, STAGES, HAS_SUBTILES)),
            ],
            [4, 1],
            [REGISTERS, MOVER_REGISTERS],
        )  # fmt: skip


# ---- the launches ----


class Prepared(NamedTuple):
    """The launches, None for what is not asked for, and the memory of what they write.

    outputs     dq, dk and dv, their rows padded where TMA writes them, and lse and delta as lines
    workspaces  None for what is not asked for: the float32 sum of dq, lse and delta as pairs, what programs count
                with, what
                parts of columns write
    preprocess_is_overlapped     whether lse and delta are written while columns are computed, but for what is wanted
                                 at once
    is_sent     whether TMA adds to the sum of dq
    """

    statistics: Launch
    keys: Launch
    sums: Launch | None
    scale: Launch | None
    outputs: tuple[Memory, ...]
    workspaces: tuple[Memory | None, ...]
    preprocess_is_overlapped: bool
    is_sent: bool


@functools.lru_cache(maxsize=1024)
def prepare(
    specs: TensorSpecs,
    lists: PlanSpecs,
    split: Split,
    service: Service | None,
    is_separate: bool,
    has_subtiles: bool,
    options: Options,
) -> Prepared:
    """How a call on such tensors is launched.

    kind         of q, k, v and dout
    options      out is the first of the others
    service      of the sum of dq
    is_separate  whether dq is left to a launch of its own, of the portable backward
    has_subtiles whether tiles made of whole quarters are listed
    """
    q, k, v, dout = specs.tensors
    out_written = options.others[0]
    assert out_written is not None
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    chosen = config(max(dim, dim_v))
    rows, scale = chosen.block_q, options.scale
    n_padded = -(-q_len // TILE_SIDE) * TILE_SIDE
    n_lines, n_batch_heads = -(-kv_len // TILE_SIDE), batch * kv_heads
    rest = {
        "record_strides": strides_of_records(lists[0]),
        "n_heads": kv_heads,
        "n_batch_heads": n_batch_heads,
        "n_lines": n_lines,
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        "n_split_lines": split.n_lines,
        "num_splits": split.parts,
        # there is no maximum to be found: the scale may be negative or 0
        "scale_log2": scale * LOG2_E,
        "scale": scale,
        "n_cleared": 0,
        "n_ahead": 0,
        "n_converted": 0,
        "n_eighths": 0,
        "n_v_eighths": v_dim // 8,
        "dout_eighths": tuple(stride // 8 for stride in dout.strides[:3]),
        "CAUSAL": options.causal,
        "GROUP": heads // kv_heads,
        "STAGES": chosen.stages,
        "SETS": chosen.sets,
        "REGISTERS": chosen.registers,
        "MOVER_REGISTERS": chosen.mover_registers,
        "HAS_SUBTILES": has_subtiles and BEFORE_TRITON_3_9,
        "num_warps": 4,
    }
    # the memory is of whole rows, its first columns are what is seen
    dq, dk, dv = (tma_storable(each.dtype, each.shape) for each in (q, k, v))
    dk_seen, dv_seen = dk.spec._replace(shape=k.shape), dv.spec._replace(shape=v.shape)
    line = contiguous(torch.float32, batch * heads * n_padded).spec
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, rows, dim)),
        "k_desc": DescriptorFactory(k, (1, 1, TILE_SIDE, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, TILE_SIDE, dim_v)),
        "dout_desc": DescriptorFactory(dout, (1, 1, rows, dim_v)),
        "lse_desc": DescriptorFactory(line, (rows,)),
        "delta_desc": DescriptorFactory(line, (rows,)),
        "dk_desc": DescriptorFactory(dk_seen, (1, 1, TILE_SIDE, dim)),
        "dv_desc": DescriptorFactory(dv_seen, (1, 1, TILE_SIDE, dim_v)),
    }
    n_sms, n_cols = num_sms(options.device), split.n_programs(n_lines, n_batch_heads)
    scaled = dq_sum = pairs = None
    if is_separate:
        dq, pairs = contiguous(q.dtype, *q.shape), contiguous(torch.float32, batch * heads * n_padded, 2)
    else:
        # whole tiles, so that nothing is asked before it is added to
        dq_sum = contiguous(torch.float32, batch * heads, n_padded, dim)
        rest["n_eighths"] = dq.shape[3] // 8
        if not chosen.is_direct:
            n_values, of_step = batch * heads * n_padded * dim, 64 * (64 if rows == 128 else dim // 2)
            seen = contiguous(torch.float32, n_values // LINE.value, LINE.value).spec
            descriptor_factories["dq_desc"] = DescriptorFactory(seen, (of_step // LINE.value, LINE.value))
        n_steps = heads // kv_heads * n_padded * dim // STEP.value
        first = 0 if service is None else service.n_converted * n_steps
        shape = {"n_padded": n_padded, "q_len": q_len, "n_eighths": dq.shape[3] // 8, "DIM": dim}
        scaled = Launch(
            scale_kernel,
            ((n_batch_heads * n_steps - first) // 4,),
            {"scale": scale, "first": first, **shape, "num_warps": 4},
        )
    overlapped = {} if service is None else service._asdict()
    counts = int(n_cols > n_sms) if service is None else n_counts(n_batch_heads)
    n_cleared = batch * heads if service is None else service.n_cleared * (heads // kv_heads)
    preprocess_is_overlapped = (
        are_statistics_overlapped(service, n_batch_heads, n_lines, v_dim)
        and out_written[1]
        # the launch before, which tells the rest, clears no more counts than it has queries
        and counts <= n_cleared * n_padded
    )
    queue = contiguous(torch.int32, counts) if counts else None
    parts = contiguous(torch.float32, split.floats(dim + dim_v, n_batch_heads)) if split.parts > 1 else None
    return Prepared(
        prepare_statistics(
            dout,
            n_padded,
            (0 if is_separate else dim, n_cleared),
            counts,
            n_cleared if preprocess_is_overlapped else batch * heads,
        ),
        Launch(hopper_backward_kernel, (min(n_cols, n_sms),), {**rest, **overlapped}, descriptor_factories),
        sum_cols(split, lists[0], dk_seen, dv_seen, rest, (dim, dim_v)),
        scaled,
        (dq, dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        (dq_sum, pairs, queue, parts),
        preprocess_is_overlapped,
        "dq_desc" in descriptor_factories,
    )


def backward(
    inputs: BackwardInputs,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    *,
    deterministic: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, contiguous and in q's type."""
    dout, dlse, q, k, v, out, lse = inputs
    assert seed is None and dropout_p == 0.0, "the choice of the backend refuses dropout"
    dim, dim_v = q.shape[3], v.shape[3]
    widest = max(dim, dim_v)
    if widest > MAX_HEAD_DIM:
        return portable.backward(inputs, plan, kv_lengths, seed, scale, causal, dropout_p)
    # what autograd hands on may have strides of 0
    (q, k, v, dout), specs = tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    options = options_of(q, scale, causal, dropout_p, out, lse, dlse, kv_lengths)
    by_cols, empty, n_sms = tile_lists(plan, 3), allocator(q), num_sms(options.device)
    q_shape, k_shape = specs.tensors[0].shape, specs.tensors[1].shape
    split = split_of(plan, 3, q_shape, k_shape, causal, n_sms)
    is_separate = is_dq_separate(plan, q_shape, widest, deterministic=deterministic)
    service = None if is_separate else service_of(plan, q_shape, k_shape, split, n_sms)
    has_subtiles = bool(plan) and has_subtiles_of(plan[4].shape[0], plan[5].shape[0])
    ready = prepare(specs, plan_specs_of(by_cols), split, service, is_separate, has_subtiles, options)
    dq, dk, dv, lines = [empty(*memory) for memory in ready.outputs]
    dq_sum, pairs, queue, parts = [memory and empty(*memory) for memory in ready.workspaces]
    lse_line, delta_line = lines.unbind()
    # which also clears the sum of dq and the counts
    ready.statistics(out, dout, lse, dlse, pairs, lines, dq_sum, queue)
    sent = dq_sum if ready.is_sent else None
    overlapped = None if service is None else dq
    written = (out, dout, lse, dlse, lines) if ready.preprocess_is_overlapped else (None,) * 5
    ready.keys(
        q,
        k,
        v,
        dout,
        lse_line,
        delta_line,
        *by_cols,
        kv_lengths,
        queue,
        sent,
        dk,
        dv,
        parts,
        dq_sum,
        overlapped,
        *written,
    )
    if ready.sums is not None:
        ready.sums(parts, by_cols[0], dk, dv)
    if ready.scale is not None:
        ready.scale(dq_sum, dq)
    else:
        by_rows = tile_lists(plan, 0)
        other = portable.prepare(specs, plan_specs_of(by_rows), plan_specs_of(by_cols), options)
        assert other.queries is not None
        # neither slopes nor tables, and no sums for them
        other.queries(q, k, v, dout, pairs, *by_rows, kv_lengths, seed, None, None, dq, None, None)
    if dim % 8 or dim_v % 8:
        return dq[..., :dim].contiguous(), dk[..., :dim].contiguous(), dv[..., :dim_v].contiguous()
    return dq, dk, dv
