"""Hopper backward in steps of 64 x 64, in Gluon (sm90): dQ, dK and dV, for layouts of small blocks.

    p = exp(scale q k^T - lse)      delta = rowsum(dO * O) - dLSE
    dp = dO v^T                     ds = p * (dp - delta)
    dv = p^T dO                     dk = scale ds^T q               dq = scale ds k

Shapes as in backward.py. Two kernels after the preprocess launch, which computes LSE (in base 2) and delta:

    dk, dv   a program per tile column, 64 keys of a KV head: k, v stay, q, dO of each listed tile are loaded
    dq       a program per tile row, 64 queries of a head: q, dO stay, k, v of each listed tile are loaded

Each computes scores and dp for itself: seven products per tile, where a single kernel needs five. In return every sum
stays in registers and is bitwise reproducible; dQ needs no float32 sum in memory, whose clearing, atomic additions
and conversion take longer than two products.

As in fine_forward.py, a program has one warpgroup, and several programs share an SM. Long tile rows and tile columns
are split: each program writes float32 sums to a workspace, which another launch adds in order (combine_splits.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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

from ...plan_format import COL_LISTS, ROW_LISTS, loads_per_step
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, num_sms
from ...runtime.tensor_spec import TensorSpecs, in_order_of
from ...score_mods import Scores
from ..arguments import PlanSpecs, plan_specs_of, strides_of_records, tile_lists
from ..inputs import BackwardInputs
from ..schedule import PROGRAMS_PER_SM, Split, padded_dim, split_of
from ..triton import backward as triton_backward
from ..triton.backward_preprocess import preprocess_launch
from ..triton.combine_splits import sum_splits
from ..triton.tile import NUMBER, clamped_kv_len, find_line_record
from .barriers import allocate_mbarriers, thread_barrier
from .bitmask import mask_columns, transposed_mask
from .fine_tiles import (
    SIDE,
    Lines,
    block_of_step,
    find_work_tile,
    load_step,
    load_step_words,
    positions,
    starts_of,
    tiles_of,
    zero_rows_from,
)
from .registers import accumulator, store_split
from .score_mods import PLAIN, ModSpecs, ScoreMods, apply_score_mods, load_slope, mod_specs_of, round_p_ds_with_mods
from .tma import DescriptorFactory, tma_load, tma_padded_memory, tma_store, to_tma_loadable

# steps whose loads are in flight or in use
STAGES = gl.constexpr(2)
# registers per thread of the kernels for (dk and dv, dq), by padded head dimension: they bound the programs per SM
REGISTERS = {128: (255, 168), 64: (168, 128)}
GATHERED_REGISTERS = {128: (255, 255), 64: (168, 128)}
MODIFIED_REGISTERS = {128: (255, 255), 64: (168, 168)}


def registers(dim: int, *, is_gathered: bool, modifies_scores: bool) -> tuple[int, int]:
    """The launch table. dim: the larger padded head dimension; modifies_scores: see ModSpecs.modifies_scores."""
    return (MODIFIED_REGISTERS if modifies_scores else GATHERED_REGISTERS if is_gathered else REGISTERS)[dim]


class Pointers(NamedTuple):
    """Global memory.

    records_ptr, indices_ptr, bitmask_ids_ptr, bitmasks_ptr  the plan by tile column (dk, dv) or by tile row (dq)
    kv_lengths_ptr  number of keys of each batch element; None: kv_len
    slopes_ptr      see score_mods.ScoreMods
    lse_ptr, delta_ptr  (batch * heads, n_padded) float32, lse in base 2
    splits_ptr      float32 workspace of split tile rows or columns; None: none is split
    """

    records_ptr: Any
    indices_ptr: Any
    bitmask_ids_ptr: Any
    bitmasks_ptr: Any
    kv_lengths_ptr: Any
    slopes_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    splits_ptr: Any


# ---- dk and dv ----


class ColBuffers(NamedTuple):
    """Shared memory: k, v of the tile column; q, dout, lse, delta of STAGES steps, and the mbarriers of their loads.

    lse, delta and their mbarriers are None if a step is four loads of 16 queries (gathered plans): TMA cannot place
    pieces of 64 bytes side by side, since its addresses in shared memory are multiples of 128 bytes.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    q_full: Any
    dout_full: Any
    lse: Any
    delta: Any
    lse_full: Any
    delta_full: Any


@gluon.jit
def load_queries(descs, buffers, i_batch, i_head, o_head, starts, stage, is_wanted):
    """Starts the loads of a step into a stage.

    descs   of q, dO, lse and delta
    o_head  offset of the head in lse and delta
    """
    q_desc, dout_desc, lse_desc, delta_desc = descs
    load_step(q_desc, buffers.q.index(stage), buffers.q_full.index(stage), i_batch, i_head, starts, is_wanted)
    load_step(
        dout_desc, buffers.dout.index(stage), buffers.dout_full.index(stage), i_batch, i_head, starts, is_wanted,
        IS_FREE=True,
    )  # fmt: skip
    if lse_desc is not None:
        # 2^31 queries do not fit into the memory of a GPU
        o_query = (o_head + starts[0]).to(gl.int32)
        load_values(lse_desc, buffers.lse.index(stage), buffers.lse_full.index(stage), o_query, is_wanted)
        load_values(delta_desc, buffers.delta.index(stage), buffers.delta_full.index(stage), o_query, is_wanted)


@gluon.jit
def load_values(desc, buffer, full, o_query, is_wanted):
    """Starts the load of lse or delta of 64 queries into a buffer that no warp reads any more."""
    mbarrier.expect(full, desc.block_type.nbytes, pred=is_wanted)
    tma_load(desc, [o_query], full, buffer, pred=is_wanted)


@gluon.jit
def wait_for_values(buffers, full, stage, phase, layout: gl.constexpr):
    """lse or delta of the queries of a step."""
    mbarrier.wait(full.index(stage), phase)
    return buffers.index(stage).load(layout)


@gluon.jit
def add_dkdv(
    b_dk, b_dv, buffers, ptrs, mods, slope, o_head, starts, i_entry, kv_start, kv_ahead, kv_limit, stage, phase,
    MASKED: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """dk and dv plus the contribution of one step of 64 queries.

    slope    see score_mods.load_slope
    o_head   offset of the head in lse and delta
    kv_ahead  kv_len - q_len
    starts   first queries of the tiles of the step, see starts_of
    i_entry  the step in the tile lists
    MASKED   whether a tile is partial
    """
    DIM: gl.constexpr = buffers.q.shape[4]
    DIM_V: gl.constexpr = buffers.dout.shape[4]
    dtype: gl.constexpr = buffers.q.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    dk_layout: gl.constexpr = accumulator(DIM)
    dv_layout: gl.constexpr = accumulator(DIM_V)
    o_kv = gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
    o_q = gl.arange(0, SIDE, layout=gl.SliceLayout(0, score_layout))
    q_tile = buffers.q.index(stage).reshape([SIDE, DIM])
    dout_tile = buffers.dout.index(stage).reshape([SIDE, DIM_V])
    b_zero = gl.zeros([SIDE, SIDE], gl.float32, score_layout)
    # scores are transposed: [keys, queries]
    mbarrier.wait(buffers.q_full.index(stage), phase)
    k_tile = buffers.k.reshape([SIDE, DIM])
    scores_token = warpgroup_mma(k_tile, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    mbarrier.wait(buffers.dout_full.index(stage), phase)
    v_tile = buffers.v.reshape([SIDE, DIM_V])
    dp_token = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    if buffers.lse is None:
        # empty tiles of a step have negative starts; read the last tile's LSE instead, which is never empty
        starts = (
            gl.where(starts[0] < 0, starts[3], starts[0]),
            gl.where(starts[1] < 0, starts[3], starts[1]),
            gl.where(starts[2] < 0, starts[3], starts[2]),
            starts[3],
        )
        o_query = o_head + positions(starts, o_q)
        b_lse, b_delta = gl.load(ptrs.lse_ptr + o_query), gl.load(ptrs.delta_ptr + o_query)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    o_query = positions(starts, o_q) + (kv_ahead - kv_start)
    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_kv, o_query)
    if buffers.lse is not None:
        b_lse = wait_for_values(buffers.lse, buffers.lse_full, stage, phase, gl.SliceLayout(0, score_layout))
    b_scores = b_scores - gl.expand_dims(b_lse, 0)
    if MASKED and GATHERED:
        words = load_step_words(ptrs.bitmask_ids_ptr, ptrs.bitmasks_ptr, i_entry, o_kv, GATHERED)
        b_scores = mask_columns(b_scores, words, o_q)
    b_p = gl.exp2(b_scores)
    if ptrs.kv_lengths_ptr is not None:
        b_p = gl.where(gl.expand_dims(kv_start + o_kv < kv_limit, 1), b_p, 0.0)
    if MASKED and not GATHERED:
        i_bitmask = gl.load(ptrs.bitmask_ids_ptr + i_entry)
        b_p = gl.where(transposed_mask(ptrs.bitmasks_ptr, i_bitmask, o_kv, o_q, SIDE), b_p, 0.0)
    if buffers.delta is not None:
        b_delta = wait_for_values(buffers.delta, buffers.delta_full, stage, phase, gl.SliceLayout(0, score_layout))
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_p16, b_ds = round_p_ds_with_mods(b_p, b_dp, b_delta, b_tanh, None, mods, dtype)
    dv_token = warpgroup_mma(
        gl.convert_layout(b_p16, gl.DotOperandLayout(0, dv_layout, 2)), dout_tile, b_dv, is_async=True
    )
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    b_dv = warpgroup_mma_wait(1, deps=(dv_token,))
    b_dk = warpgroup_mma_wait(0, deps=(dk_token,))
    return b_dk, b_dv


@gluon.jit(
    do_not_specialize=[
        "n_lines", "n_heads", "n_batch_heads", "n_split_lines", "num_splits", "q_len", "kv_len", "n_padded",
    ]
)  # fmt: skip
def fine_dkdv_kernel(
    # TMA descriptors, those of lse and delta None if a step is four loads; Pointers
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # sizes, see Lines; heads are those of the keys; n_padded: queries per head in lse and delta
    n_lines, n_heads, n_batch_heads, n_split_lines, num_splits, q_len, kv_len, n_padded, scale_log2, scale,
    # softcap, see score_mods.ScoreMods
    cap,
    # compile time; GROUP: query heads per KV head; GATHERED: whether the plan is
    GROUP: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    # loads per step
    LOADS: gl.constexpr = SIDE // q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_full, v_full = allocate_mbarriers(1, 1).index(0), allocate_mbarriers(1, 1).index(0)
    buffers = ColBuffers(
        k=gl.allocate_shared_memory(dtype, [1, 1, SIDE, DIM], k_desc.layout),
        v=gl.allocate_shared_memory(dtype, [1, 1, SIDE, DIM_V], v_desc.layout),
        q=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM], q_desc.layout),
        dout=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM_V], dout_desc.layout),
        q_full=allocate_mbarriers(STAGES, 1),
        dout_full=allocate_mbarriers(STAGES, 1),
        lse=None if lse_desc is None else gl.allocate_shared_memory(gl.float32, [STAGES, SIDE], lse_desc.layout),
        delta=None if lse_desc is None else gl.allocate_shared_memory(gl.float32, [STAGES, SIDE], lse_desc.layout),
        lse_full=None if lse_desc is None else allocate_mbarriers(STAGES, 1),
        delta_full=None if lse_desc is None else allocate_mbarriers(STAGES, 1),
    )
    fence_async_shared()
    lines = Lines(
        n_lines=n_lines, n_heads=n_heads, n_batch_heads=n_batch_heads, n_split_lines=n_split_lines,
        num_splits=num_splits,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr, bias_ptr=None, bias_strides=None
    )
    work_tile = find_work_tile(ptrs, record_strides, lines, GROUP=GROUP)
    batch_head, p_record = work_tile.batch_head, work_tile.p_record
    i_batch, i_kv_head = batch_head // n_heads, batch_head % n_heads
    i_col = gl.load(p_record + NUMBER)
    kv_start = i_col * SIDE
    kv_ahead = kv_len - q_len
    kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, i_batch, kv_len)
    load_step(k_desc, buffers.k, k_full, i_batch, i_kv_head, (kv_start,), True)
    load_step(v_desc, buffers.v, v_full, i_batch, i_kv_head, (kv_start,), True)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    if ptrs.kv_lengths_ptr is not None:
        zero_rows_from(buffers.k.reshape([SIDE, DIM]), (kv_start,), kv_limit)
        zero_rows_from(buffers.v.reshape([SIDE, DIM_V]), (kv_start,), kv_limit)
    b_dk = gl.zeros([SIDE, DIM], gl.float32, accumulator(DIM))
    b_dv = gl.zeros([SIDE, DIM_V], gl.float32, accumulator(DIM_V))
    descs = (q_desc, dout_desc, lse_desc, delta_desc)
    # steps so far, of all heads: they choose the stage
    n_done = 0
    for i_group_head in range(GROUP):
        i_head = i_kv_head * GROUP + i_group_head
        slope = load_slope(mods, i_head)
        if GROUP > 1:
            # the heads of a group may have layouts, and hence launch orders, of their own
            p_record = find_line_record(ptrs.records_ptr, record_strides, i_batch, i_head, i_col)
        begin, n_steps, n_partial = tiles_of(ptrs, lines, p_record, work_tile.i_split)
        if ptrs.kv_lengths_ptr is not None:
            n_steps = gl.where(kv_start < kv_limit, n_steps, 0)
            n_partial = gl.minimum(n_partial, n_steps)
        o_head = (i_batch * n_heads * GROUP + i_head).to(gl.int64) * n_padded
        for i in gl.static_range(STAGES):
            # a step past the end reads the first entry of the list instead, and loads nothing
            starts = starts_of(ptrs.indices_ptr, begin + i * (i < n_steps).to(gl.int32), LOADS)
            stage = (n_done + i) % STAGES
            load_queries(descs, buffers, i_batch, i_head, o_head, starts, stage, i < n_steps)
        # partial steps, then full ones: two loops, so that full steps pay for no mask
        for FULL in gl.static_range(2):
            for i in range(n_partial if FULL else 0, n_steps if FULL else n_partial):
                stage, phase = (n_done + i) % STAGES, (n_done + i) // STAGES & 1
                starts = starts_of(ptrs.indices_ptr, begin + i, LOADS)
                has_more = i + STAGES < n_steps
                next_starts = starts_of(ptrs.indices_ptr, begin + gl.where(has_more, i + STAGES, 0), LOADS)
                b_dk, b_dv = add_dkdv(
                    b_dk, b_dv, buffers, ptrs, mods, slope, o_head, starts, begin + i, kv_start, kv_ahead, kv_limit,
                    stage, phase, MASKED=not FULL, GATHERED=GATHERED,
                )  # fmt: skip
                load_queries(descs, buffers, i_batch, i_head, o_head, next_starts, stage, has_more)
        n_done += n_steps
    if work_tile.i_split < 0:
        # wait until every warp has read the keys and values
        thread_barrier()
        buffers.k.reshape([SIDE, DIM]).store((b_dk * scale).to(dtype))
        buffers.v.reshape([SIDE, DIM_V]).store(b_dv.to(dtype))
        fence_async_shared()
        tma_store(dk_desc, [i_batch, i_kv_head, kv_start, 0], buffers.k)
        tma_store(dv_desc, [i_batch, i_kv_head, kv_start, 0], buffers.v)
        tma.store_wait(0)
    elif ptrs.splits_ptr is not None:
        p_split = ptrs.splits_ptr + work_tile.i_block.to(gl.int64) * (SIDE * (DIM + DIM_V))
        store_split(p_split, b_dk, 0)
        store_split(p_split + SIDE * DIM, b_dv, 0)


# ---- dq ----


class RowBuffers(NamedTuple):
    """Shared memory: q, dout of the tile row; k, v of STAGES steps, and the mbarriers of their loads."""

    q: Any
    dout: Any
    k: Any
    v: Any
    k_full: Any
    v_full: Any


@gluon.jit
def add_dq(
    b_dq, b_lse, b_delta, k_desc, v_desc, buffers, ptrs, mods, slope, q_start, i_batch, i_kv_head, starts, next_starts,
    i_entry, i_step, n_steps, kv_limit, MASKED: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """dq plus the contribution of one step of 64 keys; starts the loads of the step that takes its buffers.

    Arguments as of fine_forward.step, but next_starts are those of the step STAGES later.
    """
    DIM: gl.constexpr = buffers.q.shape[3]
    DIM_V: gl.constexpr = buffers.dout.shape[3]
    dtype: gl.constexpr = buffers.q.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    dq_layout: gl.constexpr = accumulator(DIM)
    stage, phase = i_step % STAGES, i_step // STAGES & 1
    k_buffer, v_buffer = buffers.k.index(stage), buffers.v.index(stage)
    k_full, v_full = buffers.k_full.index(stage), buffers.v_full.index(stage)
    o_kv = gl.arange(0, SIDE, layout=gl.SliceLayout(0, score_layout))
    if MASKED:
        o_q = gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
        bitmask = load_step_words(ptrs.bitmask_ids_ptr, ptrs.bitmasks_ptr, i_entry, o_q, GATHERED)
    q_tile, k_tile = buffers.q.reshape([SIDE, DIM]), k_buffer.reshape([SIDE, DIM])
    dout_tile, v_tile = buffers.dout.reshape([SIDE, DIM_V]), v_buffer.reshape([SIDE, DIM_V])
    b_zero = gl.zeros([SIDE, SIDE], gl.float32, score_layout)
    mbarrier.wait(k_full, phase)
    mbarrier.wait(v_full, phase)
    if ptrs.kv_lengths_ptr is not None:
        zero_rows_from(k_tile, starts, kv_limit)
        zero_rows_from(v_tile, starts, kv_limit)
    scores_token = warpgroup_mma(q_tile, k_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    dp_token = warpgroup_mma(dout_tile, v_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    o_query = q_start - starts[0] + gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
    o_key = positions(starts, o_kv) - starts[0]
    b_scores, b_tanh = apply_score_mods(b_scores, mods, slope, o_query, o_key)
    b_scores = b_scores - gl.expand_dims(b_lse, 1)
    # after scaling, since the scale may be negative
    if MASKED:
        b_scores = mask_columns(b_scores, bitmask, o_kv)
    if ptrs.kv_lengths_ptr is not None:
        b_scores = gl.where(gl.expand_dims(positions(starts, o_kv) < kv_limit, 0), b_scores, float("-inf"))
    b_p = gl.exp2(b_scores)
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_ds = b_p * (b_dp - gl.expand_dims(b_delta, 1))
    if mods.cap is not None:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    b_ds = b_ds.to(dtype)
    dq_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dq_layout, 2)), k_tile, b_dq, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=(dq_token,))
    has_next = i_step + STAGES < n_steps
    load_step(k_desc, k_buffer, k_full, i_batch, i_kv_head, next_starts, has_next)
    load_step(v_desc, v_buffer, v_full, i_batch, i_kv_head, next_starts, has_next, IS_FREE=True)
    return b_dq


@gluon.jit(
    do_not_specialize=[
        "n_lines", "n_heads", "n_batch_heads", "n_split_lines", "num_splits", "q_len", "kv_len", "n_padded", "group",
    ]
)  # fmt: skip
def fine_dq_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, dout_desc, dq_desc, ptrs,
    # strides in elements: (batch, head)
    record_strides,
    # sizes, see Lines; group: query heads per KV head, n_padded: queries per head in lse and delta
    n_lines, n_heads, n_batch_heads, n_split_lines, num_splits, q_len, kv_len, n_padded, group, scale_log2, scale,
    # softcap, see score_mods.ScoreMods
    cap,
    # compile time; whether the plan is gathered
    GATHERED: gl.constexpr,
):  # fmt: skip
    DIM: gl.constexpr = q_desc.block_type.shape[3]
    DIM_V: gl.constexpr = dout_desc.block_type.shape[3]
    # loads per step
    LOADS: gl.constexpr = SIDE // k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    query_layout: gl.constexpr = gl.SliceLayout(1, accumulator(SIDE))
    q_full, dout_full = allocate_mbarriers(1, 1).index(0), allocate_mbarriers(1, 1).index(0)
    buffers = RowBuffers(
        q=gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout),
        dout=gl.allocate_shared_memory(dtype, dout_desc.block_type.shape, dout_desc.layout),
        k=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM], k_desc.layout),
        v=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM_V], v_desc.layout),
        k_full=allocate_mbarriers(STAGES, 1),
        v_full=allocate_mbarriers(STAGES, 1),
    )
    fence_async_shared()
    lines = Lines(
        n_lines=n_lines, n_heads=n_heads, n_batch_heads=n_batch_heads, n_split_lines=n_split_lines,
        num_splits=num_splits,
    )  # fmt: skip
    mods = ScoreMods(
        factor=scale_log2, cap=cap, sinks_ptr=None, slopes_ptr=ptrs.slopes_ptr, bias_ptr=None, bias_strides=None
    )
    work_tile = find_work_tile(ptrs, record_strides, lines, GROUP=1)
    batch_head, p_record = work_tile.batch_head, work_tile.p_record
    i_batch, i_head = batch_head // n_heads, batch_head % n_heads
    i_kv_head = i_head // group
    slope = load_slope(mods, i_head)
    q_start = gl.load(p_record + NUMBER) * SIDE
    q_position = q_start + (kv_len - q_len)
    begin, n_steps, n_partial = tiles_of(ptrs, lines, p_record, work_tile.i_split)
    kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, i_batch, kv_len)
    has_steps = n_steps > 0
    load_step(q_desc, buffers.q, q_full, i_batch, i_head, (q_start,), has_steps)
    load_step(dout_desc, buffers.dout, dout_full, i_batch, i_head, (q_start,), has_steps)
    for i in gl.static_range(STAGES):
        starts = starts_of(ptrs.indices_ptr, begin + i * (i < n_steps).to(gl.int32), LOADS)
        load_step(k_desc, buffers.k.index(i), buffers.k_full.index(i), i_batch, i_kv_head, starts, i < n_steps)
        load_step(v_desc, buffers.v.index(i), buffers.v_full.index(i), i_batch, i_kv_head, starts, i < n_steps)
    o_query = batch_head.to(gl.int64) * n_padded + q_start + gl.arange(0, SIDE, layout=query_layout)
    b_lse, b_delta = gl.load(ptrs.lse_ptr + o_query), gl.load(ptrs.delta_ptr + o_query)
    b_dq = gl.zeros([SIDE, DIM], gl.float32, accumulator(DIM))
    mbarrier.wait(q_full, 0, pred=has_steps)
    mbarrier.wait(dout_full, 0, pred=has_steps)
    # partial steps, then full ones, as above
    for FULL in gl.static_range(2):
        for i_step in range(n_partial if FULL else 0, n_steps if FULL else n_partial):
            starts = starts_of(ptrs.indices_ptr, begin + i_step, LOADS)
            i_next = gl.where(i_step + STAGES < n_steps, i_step + STAGES, 0)
            next_starts = starts_of(ptrs.indices_ptr, begin + i_next, LOADS)
            b_dq = add_dq(
                b_dq, b_lse, b_delta, k_desc, v_desc, buffers, ptrs, mods, slope, q_position, i_batch, i_kv_head,
                starts, next_starts, begin + i_step, i_step, n_steps, kv_limit, MASKED=not FULL, GATHERED=GATHERED,
            )  # fmt: skip
    if work_tile.i_split < 0:
        # wait until every warp has read the queries
        thread_barrier()
        buffers.q.reshape([SIDE, DIM]).store((b_dq * scale).to(dtype))
        fence_async_shared()
        tma_store(dq_desc, [i_batch, i_head, q_start, 0], buffers.q)
        tma.store_wait(0)
    elif ptrs.splits_ptr is not None:
        store_split(ptrs.splits_ptr + work_tile.i_block.to(gl.int64) * (SIDE * DIM), b_dq, 0)


# ---- launches ----


class BackwardLaunches(NamedTuple):
    """The launches of a backward and its memory; None where no line is split.

    sum_cols, sum_rows  sum dk and dv of split tile columns, dq of split tile rows
    outputs     dq, dk and dv, with rows padded so that TMA can write them; LSE and delta, (2, batch * heads * n_padded)
    workspaces  of the splits of the tile columns and of the tile rows
    """

    preprocess: Launch
    dkdv: Launch
    dq: Launch
    sum_cols: Launch | None
    sum_rows: Launch | None
    outputs: tuple[Memory, ...]
    workspaces: tuple[Memory | None, Memory | None]


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    by_rows: PlanSpecs,
    by_cols: PlanSpecs,
    of_rows: Split,
    of_cols: Split,
    others: tuple[tuple[torch.dtype, bool] | None, ...],  # noqa: ARG001 - kernels are compiled for aligned pointers
    out_strides: tuple[int, ...],
    scale: float,
    loads: tuple[int, int],
    mods: ModSpecs = PLAIN,
) -> BackwardLaunches:
    """The launches for all calls with these cache keys.

    specs    of q, k, v and dout
    by_rows, by_cols  of the plan
    of_rows, of_cols  splits of its tile rows and tile columns
    others   of out, lse, dlse and kv_lengths
    out_strides  (batch, head, row)
    loads    of the plan, see plan_format.loads_per_step
    mods     score mods
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    side = SIDE.value
    n_padded, n_tile_cols = -(-q_len // side) * side, -(-kv_len // side)
    dq, dk, dv = (tma_padded_memory(each) for each in (q, k, v))
    block, block_v = (1, 1, side, dim), (1, 1, side, dim_v)
    # the memory has padded rows; the descriptors see the first head_dim columns
    dq_spec, dk_spec, dv_spec = (made.spec._replace(shape=each.shape) for made, each in ((dq, q), (dk, k), (dv, v)))
    flat = DescriptorFactory(contiguous(torch.float32, batch * heads * n_padded).spec, (side,))
    col_descriptors = {
        "q_desc": DescriptorFactory(q, block_of_step(dim, loads[1])),
        "k_desc": DescriptorFactory(k, block),
        "v_desc": DescriptorFactory(v, block_v),
        "dout_desc": DescriptorFactory(dout, block_of_step(dim_v, loads[1])),
        **({"lse_desc": flat, "delta_desc": flat} if loads[1] <= 1 else {}),
        "dk_desc": DescriptorFactory(dk_spec, block),
        "dv_desc": DescriptorFactory(dv_spec, block_v),
    }
    row_descriptors = {
        "q_desc": DescriptorFactory(q, block),
        "k_desc": DescriptorFactory(k, block_of_step(dim, loads[0])),
        "v_desc": DescriptorFactory(v, block_of_step(dim_v, loads[0])),
        "dout_desc": DescriptorFactory(dout, block_v),
        "dq_desc": DescriptorFactory(dq_spec, block),
    }
    sizes = {
        "q_len": q_len,
        "kv_len": kv_len,
        "n_padded": n_padded,
        **mods.arguments(scale, is_forward=False),
        "scale": scale,
        "GATHERED": loads[0] > 0,
        "num_warps": 4,
    }
    dkdv_registers, dq_registers = registers(
        max(dim, dim_v), is_gathered=loads[0] > 0, modifies_scores=mods.modifies_scores
    )
    dkdv_arguments = {
        **sizes,
        "record_strides": strides_of_records(by_cols[0]),
        "n_heads": kv_heads,
        "n_batch_heads": batch * kv_heads,
        "n_lines": n_tile_cols,
        "n_split_lines": of_cols.n_split_lines,
        "num_splits": of_cols.num_splits,
        "GROUP": heads // kv_heads,
        "maxnreg": dkdv_registers,
    }
    dq_arguments = {
        **sizes,
        "record_strides": strides_of_records(by_rows[0]),
        "n_heads": heads,
        "n_batch_heads": batch * heads,
        "n_lines": n_padded // side,
        "n_split_lines": of_rows.n_split_lines,
        "num_splits": of_rows.num_splits,
        "group": heads // kv_heads,
        "maxnreg": dq_registers,
    }
    col_programs = of_cols.n_programs(n_tile_cols, batch * kv_heads)
    row_programs = of_rows.n_programs(n_padded // side, batch * heads)
    col_floats, row_floats = of_cols.floats(dim + dim_v, batch * kv_heads), of_rows.floats(dim, batch * heads)
    # dq is summed as dk is, over query heads without groups
    row_sizes = {**dq_arguments, "kv_len": q_len, "GROUP": 1}
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, out_strides, n_padded),
        dkdv=Launch(fine_dkdv_kernel, (col_programs,), dkdv_arguments, col_descriptors),
        dq=Launch(fine_dq_kernel, (row_programs,), dq_arguments, row_descriptors),
        sum_cols=sum_splits(of_cols, by_cols[0], dk_spec, dv_spec, dkdv_arguments, (dim, dim_v)),
        sum_rows=sum_splits(of_rows, by_rows[0], dq_spec, None, row_sizes, (dim, 16)),
        outputs=(dq, dk, dv, contiguous(torch.float32, 2, batch * heads * n_padded)),
        workspaces=(
            contiguous(torch.float32, col_floats) if of_cols.num_splits > 1 else None,
            contiguous(torch.float32, row_floats) if of_rows.num_splits > 1 else None,
        ),
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
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, in q's dtype and the memory orders of q, k and v, and those of score mods: see backward.backward.

    plan  the tensors of a Plan of 64 x 64 tiles, or of a gathered one
    """
    if scores is not None and wanted[1]:
        assert not loads_per_step(plan)[0], "calls that want the gradient of the slopes have no gathered plan"
        return triton_backward.backward(inputs, plan, kv_lengths, seed, scale, causal, dropout_p, scores, wanted)
    assert seed is None and dropout_p == 0.0, "dispatch refuses dropout on this backend"
    assert not causal, "the plan contains the causal mask"
    dout, dlse, q, k, v, out, lse = inputs
    dim, dim_v = q.shape[3], v.shape[3]
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    by_rows, by_cols, empty = tile_lists(plan, ROW_LISTS), tile_lists(plan, COL_LISTS), allocator(q)
    others = tuple(cache_key_of(each) for each in (out, lse, dlse, kv_lengths))
    n_at_once = PROGRAMS_PER_SM * num_sms(q.device.index)
    of_rows, of_cols = (split_of(plan, first, q.shape, k.shape, False, n_at_once) for first in (ROW_LISTS, COL_LISTS))
    lists = plan_specs_of(by_rows), plan_specs_of(by_cols)
    slopes, mods = None if scores is None else scores.alibi_slopes, mod_specs_of(scores)
    ready = backward_launches(
        specs, *lists, of_rows, of_cols, others, out.stride()[:3], scale, loads_per_step(plan), mods
    )
    dq, dk, dv, lse_delta = [empty(*memory) for memory in ready.outputs]
    col_splits, row_splits = [memory and empty(*memory) for memory in ready.workspaces]
    flat_lse, flat_delta = lse_delta.unbind()
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, None, None)
    of_cols_ptrs, of_rows_ptrs = (
        Pointers(
            *lists, kv_lengths_ptr=kv_lengths, slopes_ptr=slopes, lse_ptr=flat_lse, delta_ptr=flat_delta,
            splits_ptr=splits,
        )
        for lists, splits in ((by_cols, col_splits), (by_rows, row_splits))
    )  # fmt: skip
    lines = (None, None) if loads_per_step(plan)[1] > 1 else (flat_lse, flat_delta)
    ready.dkdv(q, k, v, dout, *lines, dk, dv, of_cols_ptrs)
    if ready.sum_cols is not None:
        ready.sum_cols(col_splits, by_cols[0], dk, dv)
    ready.dq(q, k, v, dout, dq, of_rows_ptrs)
    if ready.sum_rows is not None:
        ready.sum_rows(row_splits, by_rows[0], dq, None)
    if dim % 8 or dim_v % 8:
        dq, dk, dv = (in_order_of(each, grad[..., : each.shape[3]]) for each, grad in ((q, dq), (k, dk), (v, dv)))
    if scores is None:
        return dq, dk, dv
    delta = flat_delta.view(*q.shape[:2], -1)[..., : q.shape[2]]
    return dq, dk, dv, *scores.gradients(wanted, lse, delta, None, None)
