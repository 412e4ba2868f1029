"""Hopper backward for blocks that small query blocks select, in Gluon (sm90): dQ, dK and dV.

Shapes and formulas as in fine_backward.py. A program has a key block, or 64 keys of one, and multiplies them by the
query blocks that select it, 64 rows per step:

    s = k q^T | dp = v dO^T | p, ds | dv += p dO | dk += ds q | dq = ds^T k, stored

With two consumer warpgroups, each has half of the keys, and half of the columns of dq, for which they exchange ds.
These dq are partial results, one for each query block and the keys of a program, in q's dtype.
triton/merge_selected.py sums those of each query block, and dk and dv over the work items of each key block, both in a
fixed order: all gradients are bitwise reproducible. Rounds as in selected_forward.py.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...plan_format import SelectedPlan, SelectedSizes
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import LOG2_E, Scores
from ..inputs import BackwardInputs
from ..schedule import padded_dim
from ..selected_shapes import arguments_of, row_layout_of, sizes_of
from ..triton.backward_preprocess import preprocess_launch
from ..triton.merge_selected import reduce_dkdv, reduce_dq
from .barriers import (
    DS_BARRIER,
    Pipeline,
    allocate_pipeline,
    consumer_release,
    consumer_wait,
    named_barrier,
    thread_barrier,
)
from .bitmask import INDEX_BITS
from .fine_tiles import SIDE, SWIZZLE_COLS
from .registers import accumulator, opaque, round_p_ds, store_split, tile_at
from .selected_tiles import (
    ITEM_INTS,
    Sizes,
    allocate_keys,
    first_and_count,
    first_entry_of_round,
    is_masked,
    load_blocks,
    load_keys,
    load_query_blocks_of_step,
    load_slots_of_step,
    n_steps_of,
    pointers_of,
    read_item,
    row_ranges,
    slots_of_split,
    store_blocks,
    write_item,
)
from .tma import DescriptorFactory, shared_layout, to_tma_loadable
from .work_tiles import END, next_work_index, write_end

# SIDE: rows of q in a step, and keys of a consumer warpgroup
WARPGROUP_KEYS: gl.constexpr = SIDE


class Config(NamedTuple):
    """One launch configuration.

    warpgroups  consumers: each has WARPGROUP_KEYS keys of a work item, and its share of the columns of dq
    stages      buffers of q and of dO
    max_registers  per thread, on average over all warps; None: as many as there are
    consumer_registers  per thread of the second consumer; None without one
    producer_registers  per thread
    programs_per_sm  that share an SM
    """

    warpgroups: int
    stages: int
    max_registers: int | None
    consumer_registers: int | None
    producer_registers: int
    programs_per_sm: int


# a program has a whole key block of 128 keys: two consumers, one program per SM
KEYS_128 = Config(
    warpgroups=2,
    stages=3,
    max_registers=None,
    consumer_registers=240,
    producer_registers=24,
    programs_per_sm=1,
)
# a program has 64 keys: one consumer, two programs per SM
KEYS_64 = Config(
    warpgroups=1,
    stages=2,
    max_registers=128,
    consumer_registers=None,
    producer_registers=24,
    programs_per_sm=2,
)


def config(keys: int, dim: int) -> Config:
    """The launch table. keys: of a key block; dim: padded head_dim."""
    return KEYS_128 if keys == 128 and dim == 128 else KEYS_64


class Pipelines(NamedTuple):
    """Shared memory: work items, k, v, q and dO. The dq of a step is staged in the buffer of its q."""

    items: Pipeline
    k: Pipeline
    v: Pipeline
    q: Pipeline
    dout: Pipeline


class Buffers(NamedTuple):
    """Shared memory of the consumers.

    ds          [stages, keys, 64], written by all warpgroups. With two warpgroups two stages: one may still multiply
                the ds of the step before. With one, one stage: its warps have waited for that product before they
                staged dq
    lse, delta  [WARPGROUPS * 2, 64] of the rows of this step and of the next, one copy for each warpgroup
    """

    ds: Any
    lse: Any
    delta: Any


# ---- producer warp ----


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, KEY_SPLITS: gl.constexpr, BLOCKS_PER_STEP: gl.constexpr,
    ROWS_ARE_HEADS: gl.constexpr,
):  # fmt: skip
    """Producer: takes and loads work items and their steps. KEY_SPLITS: programs that share a work item."""
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    first_item, n_items = first_and_count(ptrs, sizes)
    # programs that share a work item are neighbors: they load the same queries
    i_work = gl.program_id(0)
    # iterations and steps so far: they choose pipeline stages
    i_iter = 0
    n_steps_loaded = 0
    while i_work < n_items * KEY_SPLITS:
        item = write_item(ptrs, pipelines.items, i_iter, first_item, i_work, KEY_SPLITS)
        i_batch, i_head = item.batch_head // sizes.n_heads, item.batch_head % sizes.n_heads
        kv_start = (item.i_key_block * KEY_SPLITS + i_work % KEY_SPLITS) * KEYS
        load_keys(k_desc, pipelines.k, i_iter, i_batch, i_head // sizes.group, kv_start)
        load_keys(v_desc, pipelines.v, i_iter, i_batch, i_head // sizes.group, kv_start)
        for i_step in range(n_steps_of(item, BLOCKS_PER_STEP)):
            blocks = load_query_blocks_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)
            load_blocks(q_desc, pipelines.q, n_steps_loaded, i_batch, i_head, blocks, ROWS_ARE_HEADS)
            load_blocks(dout_desc, pipelines.dout, n_steps_loaded, i_batch, i_head, blocks, ROWS_ARE_HEADS)
            n_steps_loaded += 1
        i_work = next_work_index(ptrs.counters_ptr + sizes.i_round, i_iter)
        i_iter += 1
    write_end(pipelines.items, i_iter, ITEM_INTS)


# ---- consumer warpgroups ----


@gluon.jit
def load_lse_delta(ptrs, sizes, item, i_step, BLOCKS_PER_STEP: gl.constexpr):
    """lse and delta of the rows of a step, one of each per thread; 0 for rows of no query block."""
    BLOCK_ROWS: gl.constexpr = SIDE // BLOCKS_PER_STEP
    o_row = gl.arange(0, SIDE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    b_entry = item.begin + i_step * BLOCKS_PER_STEP + o_row // BLOCK_ROWS
    # the list is padded
    b_block = gl.load(ptrs.entries_ptr + (2 * b_entry + 1)) & INDEX_BITS
    batch_stride, head_stride, block_stride, row_stride = sizes.lse_strides
    o_head = (item.batch_head // sizes.n_heads).to(gl.int64) * batch_stride
    o_head += (item.batch_head % sizes.n_heads).to(gl.int64) * head_stride
    # 32 bits are enough within a head that selects
    o_lse = o_head + (b_block * block_stride + o_row % BLOCK_ROWS * row_stride)
    is_listed = b_entry < item.end
    b_lse = gl.load(ptrs.lse_ptr + o_lse, mask=is_listed, other=0.0)
    return b_lse, gl.load(ptrs.delta_ptr + o_lse, mask=is_listed, other=0.0)


@gluon.jit
def add_step(
    b_dk, b_dv, dq_desc, k_warpgroup, v_warpgroup, k_columns, pipelines, buffers, ptrs, sizes, item, first_entry,
    i_step, n_steps_done, i_split, o_key, scale_log2, scale,
    WARPGROUP: gl.constexpr, KEY_SPLITS: gl.constexpr, BLOCKS_PER_STEP: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """dk and dv plus the contribution of a step; stores its dq.

    k_warpgroup, v_warpgroup  [64, columns]: the keys of this warpgroup
    k_columns     [keys, columns of dq]: all keys of the program, and this warpgroup's columns of dq
    n_steps_done  steps of earlier work items
    i_split       which of the KEY_SPLITS programs that share the work item this is
    o_key         positions of the keys of this warpgroup
    """
    q, dout = pipelines.q, pipelines.dout
    STAGES: gl.constexpr = q.buffers.shape[0]
    WARPGROUPS: gl.constexpr = k_columns.shape[0] // WARPGROUP_KEYS
    DQ_COLUMNS: gl.constexpr = k_columns.shape[1]
    dtype: gl.constexpr = q.buffers.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    dk_layout: gl.constexpr = accumulator(k_warpgroup.shape[1])
    dv_layout: gl.constexpr = accumulator(v_warpgroup.shape[1])
    query_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    i_load = n_steps_done + i_step
    # opaque: otherwise addresses of all buffers stay in registers
    stage = opaque(i_load % STAGES)
    q_tile, dout_tile = tile_at(q.buffers, stage), tile_at(dout.buffers, stage)
    # prefetch lse and delta of the next step; the loads overlap the products
    b_next_lse, b_next_delta = load_lse_delta(ptrs, sizes, item, i_step + 1, BLOCKS_PER_STEP)
    has_mask = is_masked(ptrs, item, i_step, BLOCKS_PER_STEP)
    b_zero = gl.zeros([WARPGROUP_KEYS, SIDE], gl.float32, score_layout)
    # scores are transposed: [keys, rows]
    consumer_wait(q, stage, i_load // STAGES)
    scores_token = warpgroup_mma(k_warpgroup, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    consumer_wait(dout, stage, i_load // STAGES)
    dp_token = warpgroup_mma(v_warpgroup, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    # wait until TMA has read dq of the step before from q's buffer, so that the producer may overwrite it
    tma.store_wait(0)
    consumer_release(q, (i_load + STAGES - 1) % STAGES, pred=i_load > 0)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    lse_stage = WARPGROUP * 2 + i_step % 2
    b_lse = buffers.lse.index(lse_stage).load(query_layout)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_lse, 0))
    if has_mask:
        # also masks rows without a query block, whose range is empty
        o_row = gl.arange(0, SIDE, layout=query_layout)
        b_first, b_stop = row_ranges(ptrs, sizes, item, i_step, o_row, BLOCKS_PER_STEP, ROWS_PER_TOKEN)
        b_begins = gl.expand_dims(o_key, 1) >= gl.expand_dims(b_first, 0)
        b_p = gl.where(b_begins & (gl.expand_dims(o_key, 1) < gl.expand_dims(b_stop, 0)), b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_delta = buffers.delta.index(lse_stage).load(query_layout)
    b_p16, b_ds = round_p_ds(b_p, b_dp, b_delta, dtype)
    dv_token = warpgroup_mma(
        gl.convert_layout(b_p16, gl.DotOperandLayout(0, dv_layout, 2)), dout_tile, b_dv, is_async=True
    )
    DS_STAGES: gl.constexpr = buffers.ds.shape[0]
    ds = buffers.ds.index(i_load % DS_STAGES)
    ds.slice(WARPGROUP * WARPGROUP_KEYS, WARPGROUP_KEYS, 0).store(b_ds)
    next_lse_stage = WARPGROUP * 2 + (i_step + 1) % 2
    buffers.lse.index(next_lse_stage).store(b_next_lse)
    buffers.delta.index(next_lse_stage).store(b_next_delta)
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    fence_async_shared()
    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))
    # wait until all warpgroups have written ds (before dq reads it) and have read q (before dq overwrites it)
    if WARPGROUPS == 1:
        thread_barrier()
    else:
        named_barrier("sync", DS_BARRIER, WARPGROUPS)
    # arrives after every warp has read dO
    consumer_release(dout, stage)
    b_zero_dq = gl.zeros([SIDE, DQ_COLUMNS], gl.float32, accumulator(DQ_COLUMNS))
    dq_token = warpgroup_mma(ds.permute((1, 0)), k_columns, b_zero_dq, use_acc=False, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=(dq_token,))
    # opaque again, and slots after the store: otherwise the ptxas of Triton 3.6 or 3.7 overwrites values that it stores
    # here before they are read (tests/support/scoreboards.py)
    stage = opaque(stage)
    tile_at(q.buffers, stage).slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 1).store((b_dq * scale).to(dtype))
    fence_async_shared()
    thread_barrier()
    slots = slots_of_split(
        load_slots_of_step(ptrs, sizes, item, first_entry, i_step, BLOCKS_PER_STEP), i_split, KEY_SPLITS
    )
    dq_tile = q.buffers.index(stage).slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 3)
    store_blocks(dq_desc, dq_tile, slots, WARPGROUP * DQ_COLUMNS)
    return b_dk, b_dv


@gluon.jit
def mma(
    dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, KEY_SPLITS: gl.constexpr, BLOCKS_PER_STEP: gl.constexpr,
    ROWS_PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """Consumer: computes the steps of work items for the keys of warpgroup WARPGROUP."""
    k, v = pipelines.k, pipelines.v
    KEYS: gl.constexpr = k.buffers.shape[3]
    DIM: gl.constexpr = k.buffers.shape[4]
    DIM_V: gl.constexpr = v.buffers.shape[4]
    DQ_COLUMNS: gl.constexpr = DIM // WARPGROUPS
    first_entry = first_entry_of_round(ptrs, sizes)
    # iterations and steps so far: they choose pipeline stages
    i_iter = 0
    n_steps_done = 0
    item = read_item(pipelines.items, i_iter)
    while item.batch_head > END:
        i_split = item.i_work % KEY_SPLITS
        n_steps = n_steps_of(item, BLOCKS_PER_STEP)
        kv_start = (item.i_key_block * KEY_SPLITS + i_split) * KEYS + WARPGROUP * WARPGROUP_KEYS
        o_key = kv_start + gl.arange(0, WARPGROUP_KEYS, layout=gl.SliceLayout(1, accumulator(SIDE)))
        b_dk = gl.zeros([WARPGROUP_KEYS, DIM], gl.float32, accumulator(DIM))
        b_dv = gl.zeros([WARPGROUP_KEYS, DIM_V], gl.float32, accumulator(DIM_V))
        b_lse, b_delta = load_lse_delta(ptrs, sizes, item, 0, BLOCKS_PER_STEP)
        # wait until every warp has read those of the work item before
        thread_barrier()
        buffers.lse.index(WARPGROUP * 2).store(b_lse)
        buffers.delta.index(WARPGROUP * 2).store(b_delta)
        # wait until every warp has stored them
        thread_barrier()
        # opaque: constant addresses of both buffers would stay in registers, and more would be spilled
        kv_stage = opaque(0)
        consumer_wait(k, kv_stage, i_iter)
        consumer_wait(v, kv_stage, i_iter)
        k_tile, v_tile = tile_at(k.buffers, kv_stage), tile_at(v.buffers, kv_stage)
        k_warpgroup = k_tile.slice(WARPGROUP * WARPGROUP_KEYS, WARPGROUP_KEYS, 0)
        v_warpgroup = v_tile.slice(WARPGROUP * WARPGROUP_KEYS, WARPGROUP_KEYS, 0)
        k_columns = k_tile.slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 1)
        for i_step in range(n_steps):
            b_dk, b_dv = add_step(
                b_dk, b_dv, dq_desc, k_warpgroup, v_warpgroup, k_columns, pipelines, buffers, ptrs, sizes, item,
                first_entry, i_step, n_steps_done, i_split, o_key, scale_log2, scale,
                WARPGROUP, KEY_SPLITS, BLOCKS_PER_STEP, ROWS_PER_TOKEN,
            )  # fmt: skip
        n_steps_done += n_steps
        consumer_release(k, kv_stage)
        consumer_release(v, kv_stage)
        # dk of the key block, then dv
        o_first = i_split * KEYS + WARPGROUP * WARPGROUP_KEYS
        o_item = (item.i_work // KEY_SPLITS).to(gl.int64) * (KEYS * KEY_SPLITS * (DIM + DIM_V))
        p_partial = ptrs.partial_dkdv_ptr + o_item
        store_split(p_partial + o_first * DIM, b_dk, 0)
        store_split(p_partial + (KEYS * KEY_SPLITS * DIM + o_first * DIM_V), b_dv, 0)
        i_iter += 1
        item = read_item(pipelines.items, i_iter)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "i_round", "first_query_block", "first_list", "end_list", "n_heads", "group", "n_query_blocks", "n_tokens",
        "range_batch_stride", "n_slots",
    ]
)  # fmt: skip
def selected_backward_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, dout_desc, dq_desc, ptrs,
    # the launch, see Sizes
    i_round, first_query_block, first_list, end_list,
    # see Sizes
    n_heads, group, n_query_blocks, n_tokens, range_batch_stride, lse_strides, n_slots, scale_log2, scale,
    # compile time; KEY_SPLITS: programs that share a work item; ROWS_ARE_HEADS: see RowLayout; DS_LAYOUT of ds in
    # shared memory
    KEY_SPLITS: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr, ROWS_ARE_HEADS: gl.constexpr, DS_LAYOUT: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCKS_PER_STEP: gl.constexpr = SIDE // q_desc.block_type.shape[2]
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    STAGES: gl.constexpr = CONFIG.stages
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    lse_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM], q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM_V], dout_desc.layout)
    items, k, v = allocate_keys(k_desc, v_desc, CONSUMERS=WARPGROUPS)
    pipelines = Pipelines(
        items=items, k=k, v=v, q=allocate_pipeline(q_buffers, STAGES, CONSUMERS=WARPGROUPS),
        dout=allocate_pipeline(dout_buffers, STAGES, CONSUMERS=WARPGROUPS),
    )  # fmt: skip
    buffers = Buffers(
        # WARPGROUPS stages
        ds=gl.allocate_shared_memory(dtype, [WARPGROUPS, KEYS, SIDE], DS_LAYOUT),
        lse=gl.allocate_shared_memory(gl.float32, [WARPGROUPS * 2, SIDE], lse_layout),
        delta=gl.allocate_shared_memory(gl.float32, [WARPGROUPS * 2, SIDE], lse_layout),
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, group=group, n_query_blocks=n_query_blocks, n_tokens=n_tokens,
        range_batch_stride=range_batch_stride, lse_strides=lse_strides, i_round=i_round,
        first_query_block=first_query_block, first_list=first_list, end_list=end_list, n_slots=n_slots,
    )  # fmt: skip
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER_REGISTERS: gl.constexpr = CONFIG.producer_registers
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (mma, (
                    dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 0, 1, KEY_SPLITS, BLOCKS_PER_STEP,
                    ROWS_PER_TOKEN,
                )),
                (load, (
                    q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, KEY_SPLITS, BLOCKS_PER_STEP,
                    ROWS_ARE_HEADS,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (mma, (
                    dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 0, 2, KEY_SPLITS, BLOCKS_PER_STEP,
                    ROWS_PER_TOKEN,
                )),
                (mma, (
                    dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 1, 2, KEY_SPLITS, BLOCKS_PER_STEP,
                    ROWS_PER_TOKEN,
                )),
                (load, (
                    q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, KEY_SPLITS, BLOCKS_PER_STEP,
                    ROWS_ARE_HEADS,
                )),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# ---- launches ----


class BackwardLaunches(NamedTuple):
    """The launches of a backward and its memory.

    outputs    dq, dk and dv
    lse_delta  lse and delta of each query, (2, batch * heads * n_padded)
    partial    dq of each slot of a round, in q's dtype
    partial_dkdv  float32 dk, then dv, of each work item of a round
    dkdv_totals   float32 sums over rounds, None with one round
    """

    preprocess: Launch
    kernel: Launch
    reduce_dq: Launch
    reduce_dkdv: Launch
    outputs: tuple[Memory, Memory, Memory]
    lse_delta: Memory
    partial: Memory
    partial_dkdv: Memory
    dkdv_totals: tuple[Memory, Memory] | None


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    sizes: SelectedSizes,
    others: tuple[tuple[torch.dtype, bool] | None, ...],  # noqa: ARG001 - kernels are compiled for aligned pointers
    out_strides: tuple[int, ...],
    scale: float,
    index: int | None,
) -> BackwardLaunches:
    """The launches for all calls with these cache keys.

    specs   of q, k, v and dout
    sizes  of the plan
    others  of out, lse and dlse
    out_strides  (batch, head, row)
    index   of the device
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, _, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    side, rows, is_single = SIDE.value, sizes.query_rows, len(sizes.rounds) == 1
    chosen = config(sizes.keys, dim)
    keys = chosen.warpgroups * WARPGROUP_KEYS.value
    key_splits = sizes.keys // keys
    n_padded = -(-q_len // side) * side
    partial = contiguous(q.dtype, 1, 1, sizes.max_slots * key_splits * rows, dim)
    row_layout = row_layout_of(sizes, q.shape)
    group = row_layout.heads // kv_heads
    arguments = {
        **arguments_of(sizes, row_layout.heads),
        "group": group,
        "lse_strides": row_layout.strides((heads * n_padded, n_padded, 1)),
        "ROWS_ARE_HEADS": row_layout.rows_are_heads,
        "scale_log2": scale * LOG2_E,
        "scale": scale,
        "KEY_SPLITS": key_splits,
        "DS_LAYOUT": shared_layout((keys, side), q.dtype),
        "CONFIG": chosen,
        "num_warps": 4,
    }
    if chosen.max_registers is not None:
        arguments["maxnreg"] = chosen.max_registers
    descriptor_factories = {
        "q_desc": DescriptorFactory(row_layout.by_block(q), (1, 1, rows, SWIZZLE_COLS.value)),
        "k_desc": DescriptorFactory(k, (1, 1, keys, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, keys, dim_v)),
        "dout_desc": DescriptorFactory(row_layout.by_block(dout), (1, 1, rows, SWIZZLE_COLS.value)),
        "dq_desc": DescriptorFactory(partial.spec, (1, 1, rows, SWIZZLE_COLS.value)),
    }
    n_programs = min(sizes.max_work_items * key_splits, chosen.programs_per_sm * num_sms(index))
    dq, dk, dv = (memory_in_order_of(spec, spec.shape[3]) for spec in (q, k, v))
    totals = None if is_single else (dk._replace(dtype=torch.float32), dv._replace(dtype=torch.float32))
    dk_sums, dv_sums = (memory.spec for memory in totals or (dk, dv))
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, out_strides, n_padded),
        kernel=Launch(selected_backward_kernel, (n_programs,), arguments, descriptor_factories),
        reduce_dq=reduce_dq(sizes, key_splits, dq.spec, dim),
        reduce_dkdv=reduce_dkdv(sizes, group, dk_sums, dv_sums, (dim, dim_v), scale, adds=not is_single),
        outputs=(dq, dk, dv),
        lse_delta=contiguous(torch.float32, 2, batch * heads * n_padded),
        partial=partial,
        partial_dkdv=contiguous(torch.float32, sizes.max_work_items * sizes.keys * (dim + dim_v)),
        dkdv_totals=totals,
    )


def backward(
    inputs: BackwardInputs,
    plan: Sequence[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    wanted: Sequence[bool] = (),  # noqa: ARG001 - of score mods
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, in q's dtype and the memory orders of q, k and v. plan: the tensors of a SelectedPlan."""
    assert seed is None and dropout_p == 0.0 and kv_lengths is None and scores is None, (
        "SelectedPlans have none of these options"
    )
    assert not causal, "the ranges of the plan are causal already"
    dout, dlse, q, k, v, out, lse = inputs
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    selected, empty = SelectedPlan(*plan), allocator(q)
    sizes = sizes_of(plan, k.shape[2])
    others = tuple(cache_key_of(each) for each in (out, lse, dlse))
    ready = backward_launches(specs, sizes, others, out.stride()[:3], scale, q.device.index)
    dq, dk, dv = [empty(*memory) for memory in ready.outputs]
    memories = ready.lse_delta, ready.partial, ready.partial_dkdv
    lse_delta, partial, partial_dkdv = (empty(*memory) for memory in memories)
    dkdv_totals = [dk, dv]
    if ready.dkdv_totals is not None:
        dkdv_totals = [empty(*memory).zero_() for memory in ready.dkdv_totals]
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, None, None)
    rounds = sizes.rounds
    pointers = pointers_of(selected, len(rounds), lse=lse_delta[0], delta=lse_delta[1], partial_dkdv=partial_dkdv)
    for this_round in rounds:
        first_query_block, lists = this_round.first_query_block, (this_round.first_list, this_round.end_list)
        ready.kernel(q, k, v, dout, partial, pointers, this_round.i_round, first_query_block, *lists)
        ready.reduce_dq(selected.indptr, selected.key_blocks, partial, dq, first_query_block)
        ready.reduce_dkdv(selected.work_item_offsets, partial_dkdv, *dkdv_totals, first_query_block, *lists)
    if ready.dkdv_totals is not None:
        dk.copy_(dkdv_totals[0])
        dv.copy_(dkdv_totals[1])
    return dq, dk, dv
