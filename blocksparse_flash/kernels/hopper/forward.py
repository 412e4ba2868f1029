"""Hopper forward in Gluon (sm90): out = softmax(scale q k^T) v over the pairs of a layout, and lse.

Shapes: q, out (batch, heads, q_len, head_dim), k, v (batch, kv_heads, kv_len, head_dim), lse (batch, heads, q_len).
head_dim is padded to DIM, and that of v and out to DIM_V: 64, 128 or 256. Of 192 columns, the last 64 are a tensor of
their own, the tail (tma.py). The kernel is persistent: one program per SM.

    producer warp                     consumer warpgroups, 64 queries of a work tile each, out in registers
    tile scheduler: next work tile -> q k^T, online softmax, p v, for each step of BLOCK_KV keys; epilogue
    TMA loads of q, k and v        ->

forward_producer.py has the producer and its pipelines to the consumers. A work tile has two warpgroups (128 queries),
or three (192) before Triton 3.9, at head_dim 64, without layout, kv_lengths and splits, if there are enough work tiles.
Step i overlaps its softmax with p v of step i - 1:

    issue q k^T of step i | issue p v of step i - 1 | wait for q k^T | softmax of step i while p v runs | wait for p v

Warpgroups issue products in turn (ping-pong): one multiplies while the others compute exponentials.

Partial tiles come first and have a loop of their own, so that full tiles pay for no mask. Rows without keys get out 0
and lse -inf. Scores and the running maximum are in base 2, `lse` in memory is natural.

A tile row that would delay the others is split (schedule.py): each split is a work tile of its own, whose out and lse
go to a float32 workspace, and a second launch combines them (combine_splits.py). Without splits the kernel is compiled
without that code.
"""

from __future__ import annotations

import functools
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

from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of, new_in_order_of
from ...score_mods import Scores
from ..arguments import TILE as TILE_SIDE
from ..arguments import PlanSpecs, TileLists, plan_specs_of, strides_of_records, tile_lists
from ..schedule import Split, forward_columns, heads_in_turn, split_of
from ..triton.combine_splits import combine_rows
from ..triton.tile import LN_2, TILE, clamped_kv_len, head_base
from .barriers import (
    allocate_pipeline,
    consumer_release,
    consumer_wait,
    ping_pong_finish,
    ping_pong_next,
    ping_pong_start,
    ping_pong_wait,
)
from .forward_producer import (
    WORK_TILE_STRIDE,
    Pipelines,
    Pointers,
    Sizes,
    kv_start_of,
    load,
    q_buffer_and_phase,
    read_work_tile,
)
from .registers import (
    BEFORE_TRITON_3_9,
    WARPGROUP_ROWS,
    accumulator,
    add_product,
    pin,
    store_split,
    tile_of,
    wait_for_products,
    zero_keys_from,
)
from .score_mods import (
    PLAIN,
    ModSpecs,
    ScoreMods,
    apply_one_sided_mods,
    apply_score_mods,
    bias_table,
    finish_rows,
    load_slope,
    mod_specs_of,
)
from .softmax import empty_bitmask, load_bitmask, mask_scores, online_softmax, rescale, row_sum_layout
from .tma import DescriptorFactory, allocate_rows, allocate_tail, block_columns, has_tail, store_rows, to_tma_loadable
from .work_tiles import END, WORK_TILE_STAGES

# ---- configuration ----


class Config(NamedTuple):
    """One launch configuration, passed to the kernel as one compile-time argument.

    block_kv    keys per step
    stages      stages of the k and v pipelines
    q_stages    stages of the q pipeline, one per work tile
    warpgroups  consumer warpgroups. 3 need calls without a layout, whose tile rows have 128 queries, and without
                kv_lengths, since zero_keys_from is written for 2
    rescale_threshold   growth of the running maximum, in base 2, up to which out is not rescaled
    out_in_q            out is staged for TMA in the buffers of q
    early_bitmask       the bitmask of a step is loaded before the wait for its keys, not after q k^T
    pin                 keeps ptxas from moving the wait for p v in front of the softmax, see registers.pin
    consumer_registers, producer_registers  registers per thread
    """

    block_kv: int = 128
    stages: int = 2
    q_stages: int = 1
    warpgroups: int = 2
    rescale_threshold: float = 0.0
    out_in_q: bool = False
    early_bitmask: bool = True
    pin: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24


@functools.cache
def config(dims: tuple[int, int], has_layout: bool, has_lengths: bool, three_warpgroups: bool) -> Config:
    """The launch table; TUNING.md has the candidates that lost.

    dims  forward_columns
    three_warpgroups  whether tile rows of 192 queries, 64 of each warpgroup, are possible and pay

    Figures: TFLOP/s on an H200, bf16, 16,384 tokens. Options set to BEFORE_TRITON_3_9 are off from Triton 3.9 on, where
    they spill.
    """
    columns = max(dims)
    if columns == 256:
        # out takes 128 registers per thread, and shared memory has no room for it beside q
        return Config(block_kv=64, out_in_q=True, early_bitmask=BEFORE_TRITON_3_9)
    if columns == 64 and three_warpgroups and BEFORE_TRITON_3_9:
        # dense 545, 2 warpgroups 473
        return Config(stages=4, warpgroups=3, consumer_registers=160, producer_registers=32)
    if columns == 64:
        # butterfly 424, with 1 stage of q 400
        return Config(stages=4, q_stages=2, pin=BEFORE_TRITON_3_9)
    if columns == 96:
        # dense 553, padded to 128 columns 515; random 493 and 457. A rescale threshold and `pin` cost 1 to 3 % each
        return Config(q_stages=2, out_in_q=True)
    # with a layout butterfly 561, without the threshold 546; without a layout dense 662, with the threshold 600
    rescale_threshold = 8.0 if has_layout and not has_lengths else 0.0
    # with 192 columns, shared memory has no room for a second stage of q, nor for out beside q; with 192 of v too, it
    # has none for steps of 128 keys
    return Config(
        block_kv=64 if dims == (192, 192) else 128,
        stages=3 if dims == (192, 192) else 2,
        q_stages=1 if columns == 192 else 2,
        rescale_threshold=rescale_threshold,
        out_in_q=columns == 192,
        pin=BEFORE_TRITON_3_9,
        early_bitmask=BEFORE_TRITON_3_9,
    )


def three_warpgroups_pay(q_len: int, n_batch_heads: int, n_programs: int) -> bool:
    """Whether tile rows of 192 queries finish no later than those of 128; few of them leave SMs idle.

    A tile row of 192 queries takes 1.30 (dense) to 1.42 (causal) times as long, by the table in TUNING.md.
    """
    of_three, of_two = (-(-(-(-q_len // side) * n_batch_heads) // n_programs) for side in (192, 128))
    return 4 * of_three <= 3 * of_two


# ---- consumer warpgroups ----


class RowState(NamedTuple):
    """State of the online softmax of a warpgroup's 64 queries.

    out  [64, DIM_V] unnormalized, without the p v of the last step; out_tail: its tail, or 0
    max  [64] running maximum in base 2
    sum  [64, 4] sum of p, one partial sum per thread of a row
    p    [64, BLOCK_KV] of the last step, as left operand of p v
    """

    out: Any
    out_tail: Any
    max: Any
    sum: Any
    p: Any


@gluon.jit
def initial_state(BLOCK_KV: gl.constexpr, DIM_V: gl.constexpr, TAIL_V: gl.constexpr, dtype: gl.constexpr):
    """The RowState before the first step."""
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    out_layout: gl.constexpr = accumulator(DIM_V)
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
    b_p = gl.convert_layout(b_zero.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
    # finite, since -inf - (-inf) = nan, and below every score
    b_max = gl.full([WARPGROUP_ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, score_layout))
    b_sum = gl.full([WARPGROUP_ROWS, 4], 0.0, gl.float32, row_sum_layout())
    b_out, b_out_tail = gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, out_layout), 0
    if TAIL_V > 0:
        b_out_tail = gl.zeros([WARPGROUP_ROWS, TAIL_V], gl.float32, accumulator(TAIL_V))
    return RowState(out=b_out, out_tail=b_out_tail, max=b_max, sum=b_sum, p=b_p)


@gluon.jit
def wait_for_v(v, i_load, STAGES: gl.constexpr):
    """The values of the i_load-th step of this program, [BLOCK_KV, DIM_V] in shared memory, without the tail."""
    stage = i_load % STAGES
    consumer_wait(v, stage, i_load // STAGES)
    return tile_of(v.buffers, stage)


@gluon.jit
def scale_rows(b_out, b_factor, CAN_SKIP: gl.constexpr):
    """b_out times a factor for each row. CAN_SKIP: see softmax.rescale."""
    layout: gl.constexpr = gl.SliceLayout(1, accumulator(b_out.shape[1]))
    b_factor = gl.expand_dims(gl.convert_layout(b_factor, layout), 1)
    if CAN_SKIP:
        return rescale(b_out, b_factor)
    else:
        return b_out * b_factor


@gluon.jit
def zero_values_from(
    v, v_tails, ptrs, work_tile, i_step, i_load, kv_limit, WARPGROUP: gl.constexpr, STAGES: gl.constexpr
):
    """With kv_lengths, zeroes the values of a step from kv_limit on.

    The warpgroups meet in it, so it must not run in a ping-pong turn that another one waits for.
    """
    if ptrs.kv_lengths_ptr is not None:
        v_tile = wait_for_v(v, i_load, STAGES)
        kv_start = kv_start_of(ptrs.indices_ptr, work_tile, i_step, v_tile.shape[0])
        zero_keys_from(v_tile, kv_start, kv_limit, WARPGROUP)
        if v_tails is not None:
            zero_keys_from(tile_of(v_tails, i_load % STAGES), kv_start, kv_limit, WARPGROUP)


@gluon.jit
def step(
    state, q_tile, q_tail, pipelines, ptrs, sizes, mods, slope, p_bias, work_tile, i_step, n_done, kv_limit,
    KIND: gl.constexpr, WARPGROUP: gl.constexpr, SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CAUSAL: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of step i_step and, during the softmax, p v of the step before. Returns the new RowState.

    q_tile  this warpgroup's queries, [64, DIM] in shared memory
    q_tail  the last 64 of 192 columns, else None
    slope   see score_mods.load_slope
    p_bias  bias of each listed tile of this head; None without a bias
    n_done  steps of earlier work tiles
    KIND    "first" step of the work tile, which may be partial or full; "partial" or "full" for later ones
    """
    STAGES: gl.constexpr = CONFIG.stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    k, v, v_tails = pipelines.k, pipelines.v, pipelines.v_tails
    dtype: gl.constexpr = k.buffers.dtype
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    FIRST: gl.constexpr = KIND == "first"
    MASKED: gl.constexpr = KIND == "partial"
    # products with v: one more for the tail
    PV_PRODUCTS: gl.constexpr = 1 if v_tails is None else 2
    score_layout: gl.constexpr = accumulator(BLOCK_KV)
    out_layout: gl.constexpr = accumulator(v.buffers.shape[4])
    b_out, b_out_tail, b_max, b_sum = state.out, state.out_tail, state.max, state.sum
    out_tail_token = None
    i_load = n_done + i_step
    stage = i_load % STAGES
    v_stage = (i_load - 1) % STAGES
    bitmask, bias = None, None
    # loaded early: they arrive during the waits for keys, for the turn and for the product
    if p_bias is not None:
        bias = gl.load(p_bias + (work_tile.begin + i_step // (TILE // BLOCK_KV)))
    if CONFIG.early_bitmask and MASKED and ptrs.indices_ptr is not None:
        bitmask = load_bitmask(ptrs, work_tile, i_step, WARPGROUP, BLOCK_KV)
    if CONFIG.early_bitmask and FIRST and ptrs.indices_ptr is not None:
        bitmask = empty_bitmask(BLOCK_KV)
        # not for a full tile, which would wait for two dependent loads: 1 to 2 % of its rate
        if work_tile.n_partial > 0:
            bitmask = load_bitmask(ptrs, work_tile, i_step, WARPGROUP, BLOCK_KV)
    consumer_wait(k, stage, i_load // STAGES)
    if not FIRST:
        zero_values_from(v, v_tails, ptrs, work_tile, i_step - 1, i_load - 1, kv_limit, WARPGROUP, STAGES)
    ping_pong_wait(WARPGROUP, WARPGROUPS)
    b_zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, score_layout)
    k_tile = tile_of(k.buffers, stage).permute((1, 0))
    # [WARPGROUP_ROWS, BLOCK_KV]
    scores_token = warpgroup_mma(q_tile, k_tile, b_zero, use_acc=False, is_async=True)
    if q_tail is not None:
        k_tail = tile_of(pipelines.k_tails, stage).permute((1, 0))
        scores_token = warpgroup_mma(q_tail, k_tail, scores_token, is_async=True)
    if not FIRST:
        v_tile = wait_for_v(v, i_load - 1, STAGES)
        # [WARPGROUP_ROWS, DIM_V]
        out_token = warpgroup_mma(state.p, v_tile, b_out, is_async=True)
        if v_tails is not None:
            out_tail_token = add_product(state.p, tile_of(v_tails, v_stage), b_out_tail)
    ping_pong_next(WARPGROUP, WARPGROUPS)
    b_scores = warpgroup_mma_wait(0 if FIRST else PV_PRODUCTS, deps=(scores_token,))
    consumer_release(k, stage)
    if SIGN != 1:
        b_scores = b_scores * SIGN
    factor, b_shift = mods.factor, None
    if mods.cap is not None or mods.slopes_ptr is not None:
        o_q = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
        o_kv = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, score_layout))
        if mods.slopes_ptr is not None:
            q_start = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS + (sizes.kv_len - sizes.q_len)
            o_q = q_start - kv_start_of(ptrs.indices_ptr, work_tile, i_step, BLOCK_KV) + o_q
        if ONE_SIDED and KIND == "full":
            LAST: gl.constexpr = BLOCK_KV - 1
            b_scores, b_shift = apply_one_sided_mods(b_scores, mods, slope, o_q - LAST, o_kv - LAST)
        else:
            b_scores, _ = apply_score_mods(b_scores, mods, slope, o_q, o_kv)
        factor = 1.0
    if bias is not None:
        b_shift = bias if b_shift is None else b_shift + bias
    if FIRST:
        # the only kind that is checked at run time
        if work_tile.n_partial > 0:
            b_scores = mask_scores(
                b_scores, bitmask, ptrs, sizes, work_tile, i_step, kv_limit,
                WARPGROUP=WARPGROUP, MASKED=True, CAUSAL=CAUSAL, BLOCK_KV=BLOCK_KV,
            )  # fmt: skip
        elif ptrs.kv_lengths_ptr is not None:
            b_scores = mask_scores(
                b_scores, None, ptrs, sizes, work_tile, i_step, kv_limit,
                WARPGROUP=WARPGROUP, MASKED=False, CAUSAL=CAUSAL, BLOCK_KV=BLOCK_KV,
            )  # fmt: skip
    else:
        b_scores = mask_scores(
            b_scores, bitmask, ptrs, sizes, work_tile, i_step, kv_limit,
            WARPGROUP=WARPGROUP, MASKED=MASKED, CAUSAL=CAUSAL, BLOCK_KV=BLOCK_KV,
        )  # fmt: skip
    b_p32, b_decay, b_max, b_sum = online_softmax(b_scores, b_max, b_sum, factor, b_shift, CONFIG.rescale_threshold)
    if not FIRST:
        # with kv_lengths it would spill more
        if CONFIG.pin and ptrs.kv_lengths_ptr is None:
            b_sum = pin(b_sum)
        b_out, b_out_tail = wait_for_products(0, out_token, out_tail_token)
        consumer_release(v, v_stage)
        CAN_SKIP: gl.constexpr = CONFIG.rescale_threshold > 0 and not MASKED
        b_out = scale_rows(b_out, b_decay, CAN_SKIP)
        if v_tails is not None:
            b_out_tail = scale_rows(b_out_tail, b_decay, CAN_SKIP)
    b_p = gl.convert_layout(b_p32.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
    return RowState(out=b_out, out_tail=b_out_tail, max=b_max, sum=b_sum, p=b_p)


@gluon.jit
def add_last_pv(state, v, v_tails, ptrs, work_tile, n_done, kv_limit, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """out + p v of the last step: [WARPGROUP_ROWS, DIM_V], and the tail. n_done counts this work tile's steps too."""
    zero_values_from(v, v_tails, ptrs, work_tile, work_tile.n_steps - 1, n_done - 1, kv_limit, WARPGROUP, STAGES)
    v_tile = wait_for_v(v, n_done - 1, STAGES)
    out_token, out_tail_token = warpgroup_mma(state.p, v_tile, state.out, is_async=True), None
    if v_tails is not None:
        out_tail_token = add_product(state.p, tile_of(v_tails, (n_done - 1) % STAGES), state.out_tail)
    b_out, b_out_tail = wait_for_products(0, out_token, out_tail_token)
    consumer_release(v, (n_done - 1) % STAGES)
    return b_out, b_out_tail


@gluon.jit
def epilogue(
    b_out, b_out_tail, b_lse, out_desc, out_tile, out_tail, ptrs, sizes, work_tile,
    WARPGROUP: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Stores out, through shared memory, and lse (in base 2) of a whole tile row. out_tail: None without a tail."""
    batch_head = work_tile.target
    o_q = (
        work_tile.q_start
        + WARPGROUP * WARPGROUP_ROWS
        + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(CONFIG.block_kv)))
    )
    # unsigned: otherwise the sign of q_len is kept from the start of the kernel, and spilled
    p_lse = ptrs.lse_ptr + batch_head.to(gl.uint32).to(gl.uint64) * gl.cast(sizes.q_len, gl.uint32) + o_q
    gl.store(p_lse, b_lse * LN_2, mask=o_q < sizes.q_len)
    if not CONFIG.out_in_q:
        # TMA has read the previous tile row from the buffer
        tma.store_wait(0)
    out_tile.reshape([WARPGROUP_ROWS, b_out.shape[1]]).store(b_out.to(out_tile.dtype))
    if out_tail is not None:
        out_tail.reshape([WARPGROUP_ROWS, b_out_tail.shape[1]]).store(b_out_tail.to(out_tile.dtype))
    fence_async_shared()
    q_start = work_tile.q_start + WARPGROUP * WARPGROUP_ROWS
    store_rows(out_desc, out_tile, out_tail, batch_head // sizes.n_heads, batch_head % sizes.n_heads, q_start)
    if CONFIG.out_in_q:
        tma.store_wait(0)


@gluon.jit
def epilogue_split(
    b_out, b_out_tail, b_lse, splits_ptr, i_block, WARPGROUP: gl.constexpr, BLOCK_KV: gl.constexpr, TAIL_V: gl.constexpr
):  # fmt: skip
    """Stores out and lse (in base 2) of a split to block i_block of the workspace."""
    DIM_V: gl.constexpr = b_out.shape[1]
    p_split = splits_ptr + i_block.to(gl.int64) * (TILE * (DIM_V + TAIL_V + 1))
    store_split(p_split, b_out, WARPGROUP, DIM_V + TAIL_V)
    if TAIL_V > 0:
        store_split(p_split + DIM_V, b_out_tail, WARPGROUP, DIM_V + TAIL_V)
    p_lse = p_split + TILE * (DIM_V + TAIL_V) + WARPGROUP * WARPGROUP_ROWS
    gl.store(p_lse + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, accumulator(BLOCK_KV))), b_lse)


@gluon.jit
def mma(
    out_desc, out_buffers, pipelines, ptrs, sizes, mods,
    WARPGROUP: gl.constexpr, SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Entry point of consumer warpgroup WARPGROUP.

    out_buffers  [WARPGROUPS, 1, 1, 64, DIM_V] in shared memory; with out_in_q those of q
    """
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    STAGES: gl.constexpr = CONFIG.stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    q, v, v_tails = pipelines.q, pipelines.v, pipelines.v_tails
    dtype: gl.constexpr = q.buffers.dtype
    DIM_V: gl.constexpr = v.buffers.shape[4]
    TAIL_V: gl.constexpr = 0 if v_tails is None else v_tails.shape[4]
    query_layout: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_KV))
    # work tiles and steps so far
    i_tile = 0
    n_done = 0
    ping_pong_start(WARPGROUP, WARPGROUPS)
    work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    while work_tile.target > END:
        n_steps, n_partial = work_tile.n_steps, work_tile.n_partial
        batch_head = work_tile.target
        if ptrs.splits_ptr is not None:
            # the batch_head of a split is its workspace block modulo n_batch_heads, see split_index
            batch_head = batch_head % sizes.n_batch_heads
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        slope, p_bias = load_slope(mods, batch_head % sizes.n_heads), None
        if mods.bias_ptr is not None:
            i_batch, i_head = batch_head // sizes.n_heads, batch_head % sizes.n_heads
            p_bias = head_base(mods.bias_ptr, mods.bias_strides, i_batch, i_head)
        state = initial_state(BLOCK_KV, DIM_V, TAIL_V, dtype)
        i_buffer, phase = q_buffer_and_phase(i_tile, WARPGROUP, CONFIG)
        consumer_wait(q, i_buffer, phase)
        # [WARPGROUP_ROWS, DIM]
        q_tile = tile_of(q.buffers, i_buffer)
        q_tail = None if pipelines.q_tails is None else tile_of(pipelines.q_tails, i_buffer)
        if n_steps > 0:
            state = step(
                state, q_tile, q_tail, pipelines, ptrs, sizes, mods, slope, p_bias, work_tile, 0, n_done, kv_limit,
                KIND="first", WARPGROUP=WARPGROUP, SIGN=SIGN, ONE_SIDED=ONE_SIDED, CAUSAL=CAUSAL, CONFIG=CONFIG,
            )  # fmt: skip
        for i_step in range(1, n_partial):
            state = step(
                state, q_tile, q_tail, pipelines, ptrs, sizes, mods, slope, p_bias, work_tile, i_step, n_done, kv_limit,
                KIND="partial", WARPGROUP=WARPGROUP, SIGN=SIGN, ONE_SIDED=ONE_SIDED, CAUSAL=CAUSAL, CONFIG=CONFIG,
            )  # fmt: skip
        for i_step in range(gl.maximum(n_partial, 1), n_steps):
            state = step(
                state, q_tile, q_tail, pipelines, ptrs, sizes, mods, slope, p_bias, work_tile, i_step, n_done, kv_limit,
                KIND="full", WARPGROUP=WARPGROUP, SIGN=SIGN, ONE_SIDED=ONE_SIDED, CAUSAL=CAUSAL, CONFIG=CONFIG,
            )  # fmt: skip
        n_done += n_steps
        if not CONFIG.out_in_q:
            consumer_release(q, i_buffer)
        b_out, b_out_tail = state.out, state.out_tail
        if n_steps > 0:
            b_out, b_out_tail = add_last_pv(
                state, v, v_tails, ptrs, work_tile, n_done, kv_limit, WARPGROUP=WARPGROUP, STAGES=STAGES
            )
        b_sum = gl.convert_layout(gl.sum(state.sum, 1), query_layout, assert_trivial=True)
        # only the first split of a row has the sink: see split_index
        has_sink = work_tile.target < sizes.n_batch_heads * (1 + sizes.n_split_lines)
        b_lse, b_factor = finish_rows(state.max, b_sum, mods, batch_head % sizes.n_heads, has_sink)
        b_out = scale_rows(b_out, b_factor, CAN_SKIP=False)
        if v_tails is not None:
            b_out_tail = scale_rows(b_out_tail, b_factor, CAN_SKIP=False)
        out_tile = out_buffers.index(i_buffer if CONFIG.out_in_q else WARPGROUP)
        out_tail = None if v_tails is None else pipelines.q_tails.index(i_buffer)
        # the first condition is known at compile time, the second is not
        if ptrs.splits_ptr is None:  # noqa: SIM114
            epilogue(b_out, b_out_tail, b_lse, out_desc, out_tile, out_tail, ptrs, sizes, work_tile, WARPGROUP, CONFIG)
        elif work_tile.target < sizes.n_batch_heads:
            epilogue(b_out, b_out_tail, b_lse, out_desc, out_tile, out_tail, ptrs, sizes, work_tile, WARPGROUP, CONFIG)
        else:
            i_block = work_tile.target - sizes.n_batch_heads
            epilogue_split(b_out, b_out_tail, b_lse, ptrs.splits_ptr, i_block, WARPGROUP, BLOCK_KV, TAIL_V)
        if CONFIG.out_in_q:
            consumer_release(q, i_buffer)
        i_tile += 1
        work_tile = read_work_tile(pipelines.work_tiles, i_tile)
    ping_pong_finish(WARPGROUP, WARPGROUPS)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "n_heads", "n_batch_heads", "n_lines", "q_len", "kv_len", "group", "n_split_lines", "num_splits",
        "n_in_turn",
    ]
)  # fmt: skip
def hopper_forward_kernel(
    # TMA descriptors; forward_producer.Pointers
    q_desc, k_desc, v_desc, out_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # forward_producer.Sizes, one by one, since Triton would specialize the integers of a tuple
    n_heads, n_batch_heads, n_lines, q_len, kv_len, n_split_lines, num_splits, n_in_turn, group, scale_log2,
    # softcap and strides of the bias, see score_mods.ScoreMods
    cap, bias_strides,
    # compile time; SIGN of the scale, ONE_SIDED see ModSpecs, columns of q and of v from forward_columns
    SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CAUSAL: gl.constexpr, CONFIG: gl.constexpr, COLS: gl.constexpr,
    COLS_V: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    Q_BUFFERS: gl.constexpr = CONFIG.q_stages * CONFIG.warpgroups
    q_buffers = allocate_rows(q_desc, Q_BUFFERS, COLS)
    k_buffers = allocate_rows(k_desc, STAGES, COLS)
    v_buffers = allocate_rows(v_desc, STAGES, COLS_V)
    q_tails = allocate_tail(q_desc, Q_BUFFERS) if has_tail(q_desc, COLS) else None
    k_tails = allocate_tail(k_desc, STAGES) if has_tail(k_desc, COLS) else None
    v_tails = allocate_tail(v_desc, STAGES) if has_tail(v_desc, COLS_V) else None
    if CONFIG.out_in_q:
        out_buffers = q_buffers
    else:
        out_shape: gl.constexpr = [WARPGROUPS, 1, 1, WARPGROUP_ROWS, COLS_V]
        out_buffers = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    work_tile_buffers = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pipelines = Pipelines(
        work_tiles=allocate_pipeline(work_tile_buffers, WORK_TILE_STAGES, CONSUMERS=WARPGROUPS),
        q=allocate_pipeline(q_buffers, Q_BUFFERS, CONSUMERS=1),
        q_tails=q_tails,
        k=allocate_pipeline(k_buffers, STAGES, CONSUMERS=WARPGROUPS),
        k_tails=k_tails,
        v=allocate_pipeline(v_buffers, STAGES, CONSUMERS=WARPGROUPS),
        v_tails=v_tails,
        dout=None,
        dout_tails=None,
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, n_batch_heads=n_batch_heads, n_lines=n_lines, q_len=q_len, kv_len=kv_len,
        n_split_lines=n_split_lines, num_splits=num_splits, n_in_turn=n_in_turn, group=group,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=ptrs.sinks_ptr, slopes_ptr=ptrs.slopes_ptr, bias_ptr=ptrs.bias_ptr,
        bias_strides=bias_strides,
    )  # fmt: skip
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER_REGISTERS: gl.constexpr = CONFIG.producer_registers
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 0, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 1, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (load, (q_desc, k_desc, v_desc, None, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 0, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 1, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (mma, (out_desc, out_buffers, pipelines, ptrs, sizes, mods, 2, SIGN, ONE_SIDED, CAUSAL, CONFIG)),
                (load, (q_desc, k_desc, v_desc, None, pipelines, ptrs, record_strides, sizes, CAUSAL, CONFIG)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


# ---- launch ----


class ForwardLaunches(NamedTuple):
    """The launches of a forward, and the memory that they need.

    out, lse          outputs; rows of out are padded so that TMA can write them
    kernel            the launch of hopper_forward_kernel
    combine           the launch that combines the splits; None: no tile row is split
    n_split_floats    float32 values of the workspace of the splits
    has_tile_counter  whether there are more work tiles than programs, which then take them from a counter
    """

    out: Memory
    lse: Memory
    kernel: Launch
    combine: Launch | None
    n_split_floats: int
    has_tile_counter: bool

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lists: TileLists,
        kv_lengths: torch.Tensor | None,
        scores: Scores | None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse. lists: the plan's tile rows; bias: of each of their tiles."""
        empty = allocator(q)
        out, lse = empty(*self.out), empty(*self.lse)
        # cleared at each call: one kept for later calls would live on in the memory of a CUDA graph
        tile_counter = torch.zeros(1, dtype=torch.int32, device=q.device) if self.has_tile_counter else None
        splits = None if self.combine is None else lse.new_empty(self.n_split_floats)
        sinks, slopes = (None, None) if scores is None else (scores.sinks, scores.alibi_slopes)
        pointers = Pointers(
            *lists, kv_lengths_ptr=kv_lengths, sinks_ptr=sinks, slopes_ptr=slopes, bias_ptr=bias, lse_ptr=lse,
            tile_counter_ptr=tile_counter, splits_ptr=splits,
        )  # fmt: skip
        self.kernel(q, k, v, out, pointers)
        if self.combine is not None:
            self.combine(splits, lists[0], out, lse)
        # without the padding of rows
        return out if out.shape[3] % 8 == 0 else in_order_of(out, out), lse


@functools.lru_cache(maxsize=1024)
def forward_launches(
    specs: TensorSpecs,
    lists: PlanSpecs,
    lengths: tuple[torch.dtype, bool] | None,
    split: Split,
    scale: float,
    causal: bool,
    index: int | None,
    mods: ModSpecs = PLAIN,
) -> ForwardLaunches:
    """The launches for all calls with these cache keys.

    specs    of q, k and v
    lists    cache key of the plan's tile rows
    lengths  cache key of kv_lengths
    index    of the device
    mods     score mods
    """
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    records_shape, _ = lists
    columns, columns_v = forward_columns(head_dim, v_dim)
    n_batch_heads, n_sms = batch * heads, num_sms(index)
    has_layout, has_lengths = records_shape is not None, lengths is not None
    # tile rows that are split have 128 queries
    has_whole_rows = not (has_layout or has_lengths or split.num_splits > 1)
    three_warpgroups = has_whole_rows and three_warpgroups_pay(q_len, n_batch_heads, n_sms)
    chosen = config((columns, columns_v), has_layout, has_lengths, three_warpgroups)
    assert three_warpgroups or chosen.warpgroups == 2, (
        "tile rows of a layout have 128 queries, and zero_keys_from has two warpgroups"
    )
    rows = WARPGROUP_ROWS.value
    n_tile_rows = -(-q_len // (rows * chosen.warpgroups))
    arguments = {
        "record_strides": strides_of_records(records_shape),
        "n_heads": heads,
        "n_batch_heads": n_batch_heads,
        "n_lines": n_tile_rows,
        "q_len": q_len,
        "kv_len": kv_len,
        "group": heads // kv_heads,
        "n_split_lines": split.n_split_lines,
        "num_splits": split.num_splits,
        "n_in_turn": heads_in_turn(n_tile_rows, n_batch_heads, n_sms, q_len, kv_len, is_uneven=causal),
        **mods.arguments(scale, is_forward=True),
        "bias_strides": mods.bias_strides(0),
        "CAUSAL": causal,
        "CONFIG": chosen,
        "COLS": columns,
        "COLS_V": columns_v,
        "num_warps": 4,
    }
    out = memory_in_order_of(q, v_dim, row=-(-v_dim // 8) * 8)
    descriptor_factories = {
        "q_desc": DescriptorFactory(q, (1, 1, rows, block_columns(columns))),
        "k_desc": DescriptorFactory(k, (1, 1, chosen.block_kv, block_columns(columns))),
        "v_desc": DescriptorFactory(v, (1, 1, chosen.block_kv, block_columns(columns_v))),
        "out_desc": DescriptorFactory(out.spec, (1, 1, rows, block_columns(columns_v))),
    }
    n_programs = min(split.n_programs(n_tile_rows, n_batch_heads), n_sms)
    # counted in tile rows of 128, as `explain` does: with those of 192 there may be a counter that is not needed
    n_work_tiles = split.n_programs(-(-q_len // TILE_SIDE), n_batch_heads)
    return ForwardLaunches(
        out=out,
        lse=contiguous(torch.float32, batch, heads, q_len),
        kernel=Launch(hopper_forward_kernel, (n_programs,), arguments, descriptor_factories),
        combine=combine_rows(split, records_shape, out.spec, arguments, columns_v),
        n_split_floats=split.floats(columns_v + 1, n_batch_heads),
        has_tile_counter=n_work_tiles > n_sms,
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: list[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, and lse (batch, heads, q_len) float32.

    plan   the tensors of a Plan; empty without a layout
    specs  of q, k and v, if the caller has them already
    """
    assert seed is None and dropout_p == 0.0, "dispatch refuses dropout on this backend"
    if q.numel() == 0:
        return new_in_order_of(q, v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    if specs is None or not specs.is_tma_loadable:
        (q, k, v), specs = to_tma_loadable(q, k, v)
    q_spec, k_spec, _ = specs.tensors
    lists, index = tile_lists(plan, 0), q.device.index
    split = split_of(plan, 0, q_spec.shape, k_spec.shape, causal, num_sms(index))
    bias = bias_table(scores, 0)
    lengths, mods = cache_key_of(kv_lengths), mod_specs_of(scores, bias)
    launches = forward_launches(specs, plan_specs_of(lists), lengths, split, scale, causal, index, mods)
    return launches.run(q, k, v, lists, kv_lengths, scores, bias)
