"""Consumer warpgroups of the Hopper forward: q k^T, online softmax, p v, and the epilogue that stores out and lse.

Each has 64 queries of a work tile. forward.py has an overview, and shows how steps overlap; forward_producer.py has the
producer and the pipelines, softmax.py the masks and the online softmax.

A work tile takes its first step, which may be partial or full, then the other partial steps, the other full ones, p v
of the last step, and the epilogue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ..triton.tile import LN_2, TILE, clamped_kv_len, head_base
from .barriers import consumer_release, consumer_wait, ping_pong_finish, ping_pong_next, ping_pong_start, ping_pong_wait
from .forward_producer import kv_start_of, q_buffer_and_phase, read_work_tile
from .registers import (
    WARPGROUP_ROWS,
    accumulator,
    add_product,
    pin,
    store_split,
    tile_at,
    wait_for_products,
    zero_keys_from,
)
from .score_mods import apply_one_sided_mods, apply_score_mods, finish_rows, load_slope
from .softmax import empty_bitmask, load_bitmask, mask_scores, online_softmax, rescale, row_sum_layout
from .tma import store_rows
from .work_tiles import END

# ---- state ----


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


# ---- one step ----


@gluon.jit
def wait_for_v(v, i_load, STAGES: gl.constexpr):
    """The values of the i_load-th step of this program, [BLOCK_KV, DIM_V] in shared memory, without the tail."""
    stage = i_load % STAGES
    consumer_wait(v, stage, i_load // STAGES)
    return tile_at(v.buffers, stage)


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
            zero_keys_from(tile_at(v_tails, i_load % STAGES), kv_start, kv_limit, WARPGROUP)


@gluon.jit
def step(
    state, q_tile, q_tail, pipelines, ptrs, sizes, mods, slope, p_bias, work_tile, i_step, n_done, kv_limit,
    KIND: gl.constexpr, WARPGROUP: gl.constexpr, SIGN: gl.constexpr, ONE_SIDED: gl.constexpr, CAUSAL: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of step i_step and, during the softmax, p v of the step before. Returns the new RowState.

    q_tile  this warpgroup's queries, [64, DIM] in shared memory
    q_tail  the last third of 96 or 192 columns, else None
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
    k_tile = tile_at(k.buffers, stage).permute((1, 0))
    # [WARPGROUP_ROWS, BLOCK_KV]
    scores_token = warpgroup_mma(q_tile, k_tile, b_zero, use_acc=False, is_async=True)
    if q_tail is not None:
        k_tail = tile_at(pipelines.k_tails, stage).permute((1, 0))
        scores_token = warpgroup_mma(q_tail, k_tail, scores_token, is_async=True)
    if not FIRST:
        v_tile = wait_for_v(v, i_load - 1, STAGES)
        # [WARPGROUP_ROWS, DIM_V]
        out_token = warpgroup_mma(state.p, v_tile, b_out, is_async=True)
        if v_tails is not None:
            out_tail_token = add_product(state.p, tile_at(v_tails, v_stage), b_out_tail)
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
        out_tail_token = add_product(state.p, tile_at(v_tails, (n_done - 1) % STAGES), state.out_tail)
    b_out, b_out_tail = wait_for_products(0, out_token, out_tail_token)
    consumer_release(v, (n_done - 1) % STAGES)
    return b_out, b_out_tail


# ---- epilogue ----


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
        # wait until TMA has read the previous tile row from the buffer
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


# ---- work tiles ----


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
        q_tile = tile_at(q.buffers, i_buffer)
        q_tail = None if pipelines.q_tails is None else tile_at(pipelines.q_tails, i_buffer)
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
