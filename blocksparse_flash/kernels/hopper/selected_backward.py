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

from ...plan_format import SelectedPlan
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import LOG2_E
from ..inputs import BackwardInputs
from ..schedule import padded_dim
from ..selected_shapes import SelectedShapes, rows_of, shapes_of
from ..triton.backward_preprocess import preprocess_launch
from ..triton.merge_selected import sum_keys, sum_rows
from .barriers import Pipeline, allocate_pipeline, consumer_release, consumer_wait, named_barrier, thread_barrier
from .bitmask import INDEX_BITS
from .fine_tiles import SIDE, SWIZZLE_COLS
from .registers import accumulator, opaque, round_p_ds, store_split, tile_of
from .selected_tiles import (
    ITEM_INTS,
    Sizes,
    allocate_keys,
    blocks_of,
    first_slot_of,
    is_masked,
    item_range,
    load_blocks,
    load_keys,
    next_item,
    pointers_of,
    read_item,
    row_ranges,
    slots_of,
    slots_of_part,
    steps_of,
    store_blocks,
    write_item,
)
from .tma import DescriptorFactory, shared_layout, to_tma_loadable
from .work_tiles import END, write_end

# number of the named barrier at which the consumers have stored ds; Triton uses the numbers below 9
DS_BARRIER = gl.constexpr(9)


class Config(NamedTuple):
    """One launch configuration.

    warpgroups  consumers: each has 64 keys of a work item, and its part of the columns of dq
    stages      buffers of q and of dO
    max_registers  per thread, on average over all warps; None: as many as there are
    consumer_registers  per thread of the second consumer; None without one
    producer_registers  per thread
    programs    that share an SM
    """

    warpgroups: int
    stages: int
    max_registers: int | None
    consumer_registers: int | None
    producer_registers: int
    programs: int


# for key blocks of 128 keys at head_dim 128; and for others, where a program has 64 keys
WIDE = Config(2, 3, None, 240, 24, 1)
NARROW = Config(1, 2, 128, None, 24, 2)


def config(keys: int, dim: int) -> Config:
    """The launch table. keys: of a key block; dim: padded head_dim."""
    return WIDE if keys == 128 and dim == 128 else NARROW


class Pipelines(NamedTuple):
    """Shared memory: work items, k, v, q and dO. The dq of a step is staged in the buffer of its q."""

    items: Pipeline
    k: Pipeline
    v: Pipeline
    q: Pipeline
    dout: Pipeline


class Buffers(NamedTuple):
    """Shared memory of the consumers.

    ds          [WARPGROUPS, keys, 64]; two consumers use the buffers in turn, for this step and the one before
    lse, delta  [WARPGROUPS * 2, 64] of the rows of this step and of the next, one copy for each warpgroup
    """

    ds: Any
    lse: Any
    delta: Any


# ---- producer warp ----


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, PARTS: gl.constexpr, BLOCKS: gl.constexpr,
    OF_HEADS: gl.constexpr,
):  # fmt: skip
    """Entry point of the producer warp. PARTS: programs of a work item."""
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    first_item, n_items = item_range(ptrs, sizes)
    # parts of a work item are neighbors: they load the same queries
    i_part = gl.program_id(0)
    # work items and steps so far: they choose the stages
    i_tile = 0
    n_loaded = 0
    while i_part < n_items * PARTS:
        item = write_item(ptrs, pipelines.items, i_tile, first_item, i_part, PARTS)
        i_batch, i_head = item.axis // sizes.n_heads, item.axis % sizes.n_heads
        kv_start = (item.i_col * PARTS + i_part % PARTS) * KEYS
        i_part = next_item(ptrs, sizes)
        load_keys(k_desc, pipelines.k, i_tile, i_batch, i_head // sizes.group, kv_start)
        load_keys(v_desc, pipelines.v, i_tile, i_batch, i_head // sizes.group, kv_start)
        for i_step in range(steps_of(item, BLOCKS)):
            blocks = blocks_of(ptrs, item, i_step, BLOCKS)
            load_blocks(q_desc, pipelines.q, n_loaded, i_batch, i_head, blocks, OF_HEADS)
            load_blocks(dout_desc, pipelines.dout, n_loaded, i_batch, i_head, blocks, OF_HEADS)
            n_loaded += 1
        i_tile += 1
    write_end(pipelines.items, i_tile, ITEM_INTS)


# ---- consumer warpgroups ----


@gluon.jit
def load_lse_delta(ptrs, sizes, item, i_step, BLOCKS: gl.constexpr):
    """lse and delta of the rows of a step, one of each per thread; 0 for rows of no query block."""
    ROWS: gl.constexpr = SIDE // BLOCKS
    o_row = gl.arange(0, SIDE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    b_entry = item.begin + i_step * BLOCKS + o_row // ROWS
    # the list is padded
    b_block = gl.load(ptrs.entries_ptr + (2 * b_entry + 1)) & INDEX_BITS
    batch_stride, head_stride, block_stride, row_stride = sizes.lse_strides
    o_head = (item.axis // sizes.n_heads).to(gl.int64) * batch_stride
    o_head += (item.axis % sizes.n_heads).to(gl.int64) * head_stride
    # 32 bits are enough within a head that selects
    o_line = o_head + (b_block * block_stride + o_row % ROWS * row_stride)
    is_listed = b_entry < item.end
    b_lse = gl.load(ptrs.lse_ptr + o_line, mask=is_listed, other=0.0)
    return b_lse, gl.load(ptrs.delta_ptr + o_line, mask=is_listed, other=0.0)


@gluon.jit
def add_step(
    b_dk, b_dv, dq_desc, k_part, v_part, k_columns, pipelines, buffers, ptrs, sizes, item, first_slot, i_step, n_done,
    i_part, o_key, scale_log2, scale,
    WARPGROUP: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """dk and dv plus the contribution of a step; stores its dq.

    k_part, v_part  [64, columns]: the keys of this warpgroup
    k_columns       [keys, columns of dq]: all keys of the program, and this warpgroup's columns of dq
    n_done          steps of earlier work items
    o_key           positions of the keys of this warpgroup
    """
    q, dout = pipelines.q, pipelines.dout
    STAGES: gl.constexpr = q.buffers.shape[0]
    WARPGROUPS: gl.constexpr = k_columns.shape[0] // SIDE
    DQ_COLUMNS: gl.constexpr = k_columns.shape[1]
    dtype: gl.constexpr = q.buffers.dtype
    score_layout: gl.constexpr = accumulator(SIDE)
    dk_layout: gl.constexpr = accumulator(k_part.shape[1])
    dv_layout: gl.constexpr = accumulator(v_part.shape[1])
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    i_load = n_done + i_step
    # opaque: otherwise addresses of all buffers stay in registers
    stage = opaque(i_load % STAGES)
    q_tile, dout_tile = tile_of(q.buffers, stage), tile_of(dout.buffers, stage)
    # early: they arrive during the products
    b_next_lse, b_next_delta = load_lse_delta(ptrs, sizes, item, i_step + 1, BLOCKS)
    has_mask = is_masked(ptrs, item, i_step, BLOCKS)
    b_zero = gl.zeros([SIDE, SIDE], gl.float32, score_layout)
    # scores are transposed: [keys, rows]
    consumer_wait(q, stage, i_load // STAGES)
    scores_token = warpgroup_mma(k_part, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    consumer_wait(dout, stage, i_load // STAGES)
    dp_token = warpgroup_mma(v_part, dout_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    # dq of the step before is stored
    tma.store_wait(0)
    consumer_release(q, (i_load + STAGES - 1) % STAGES, pred=i_load > 0)
    b_scores = warpgroup_mma_wait(1, deps=(scores_token,))
    i_line = WARPGROUP * 2 + i_step % 2
    b_lse = buffers.lse.index(i_line).load(row_layout)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_lse, 0))
    if has_mask:
        # all rows of no query block
        o_row = gl.arange(0, SIDE, layout=row_layout)
        b_first, b_stop = row_ranges(ptrs, sizes, item, i_step, o_row, BLOCKS, ROWS_PER_TOKEN)
        b_begins = gl.expand_dims(o_key, 1) >= gl.expand_dims(b_first, 0)
        b_p = gl.where(b_begins & (gl.expand_dims(o_key, 1) < gl.expand_dims(b_stop, 0)), b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, deps=(dp_token,))
    b_delta = buffers.delta.index(i_line).load(row_layout)
    b_p16, b_ds = round_p_ds(b_p, b_dp, b_delta, dtype)
    dv_token = warpgroup_mma(
        gl.convert_layout(b_p16, gl.DotOperandLayout(0, dv_layout, 2)), dout_tile, b_dv, is_async=True
    )
    # two buffers: another warpgroup may still multiply the ds of the step before. With one warpgroup, its warps have
    # waited for that product before they staged dq
    ds = buffers.ds.index(i_load % WARPGROUPS)
    ds.slice(WARPGROUP * SIDE, SIDE, 0).store(b_ds)
    i_next_line = WARPGROUP * 2 + (i_step + 1) % 2
    buffers.lse.index(i_next_line).store(b_next_lse)
    buffers.delta.index(i_next_line).store(b_next_delta)
    dk_token = warpgroup_mma(gl.convert_layout(b_ds, gl.DotOperandLayout(0, dk_layout, 2)), q_tile, b_dk, is_async=True)
    fence_async_shared()
    b_dv, b_dk = warpgroup_mma_wait(0, deps=(dv_token, dk_token))
    # every warp of all warpgroups has stored ds, and has read q
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
    tile_of(q.buffers, stage).slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 1).store((b_dq * scale).to(dtype))
    fence_async_shared()
    thread_barrier()
    slots = slots_of_part(slots_of(ptrs, sizes, item, first_slot, i_step, BLOCKS), i_part, PARTS)
    dq_tile = q.buffers.index(stage).slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 3)
    store_blocks(dq_desc, dq_tile, slots, WARPGROUP * DQ_COLUMNS)
    return b_dk, b_dv


@gluon.jit
def mma(
    dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS_PER_TOKEN: gl.constexpr,
):  # fmt: skip
    """Entry point of consumer warpgroup WARPGROUP."""
    k, v = pipelines.k, pipelines.v
    KEYS: gl.constexpr = k.buffers.shape[3]
    DIM: gl.constexpr = k.buffers.shape[4]
    DIM_V: gl.constexpr = v.buffers.shape[4]
    DQ_COLUMNS: gl.constexpr = DIM // WARPGROUPS
    first_slot = first_slot_of(ptrs, sizes)
    # work items and steps so far
    i_tile = 0
    n_done = 0
    item = read_item(pipelines.items, i_tile)
    while item.axis > END:
        i_part = item.i_part % PARTS
        n_steps = steps_of(item, BLOCKS)
        kv_start = (item.i_col * PARTS + i_part) * KEYS + WARPGROUP * SIDE
        o_key = kv_start + gl.arange(0, SIDE, layout=gl.SliceLayout(1, accumulator(SIDE)))
        b_dk = gl.zeros([SIDE, DIM], gl.float32, accumulator(DIM))
        b_dv = gl.zeros([SIDE, DIM_V], gl.float32, accumulator(DIM_V))
        b_lse, b_delta = load_lse_delta(ptrs, sizes, item, 0, BLOCKS)
        # every warp has read those of the work item before
        thread_barrier()
        buffers.lse.index(WARPGROUP * 2).store(b_lse)
        buffers.delta.index(WARPGROUP * 2).store(b_delta)
        # every warp has stored them
        thread_barrier()
        # opaque: constant addresses of both buffers would stay in registers, and more would be spilled
        kv_stage = opaque(0)
        consumer_wait(k, kv_stage, i_tile)
        consumer_wait(v, kv_stage, i_tile)
        k_tile, v_tile = tile_of(k.buffers, kv_stage), tile_of(v.buffers, kv_stage)
        k_part, v_part = k_tile.slice(WARPGROUP * SIDE, SIDE, 0), v_tile.slice(WARPGROUP * SIDE, SIDE, 0)
        k_columns = k_tile.slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 1)
        for i_step in range(n_steps):
            b_dk, b_dv = add_step(
                b_dk, b_dv, dq_desc, k_part, v_part, k_columns, pipelines, buffers, ptrs, sizes, item, first_slot,
                i_step, n_done, i_part, o_key, scale_log2, scale, WARPGROUP, PARTS, BLOCKS, ROWS_PER_TOKEN,
            )  # fmt: skip
        n_done += n_steps
        consumer_release(k, kv_stage)
        consumer_release(v, kv_stage)
        # dk of the key block, then dv
        o_first = i_part * KEYS + WARPGROUP * SIDE
        p_sums = ptrs.sums_ptr + (item.i_part // PARTS).to(gl.int64) * (KEYS * PARTS * (DIM + DIM_V))
        store_split(p_sums + o_first * DIM, b_dk, 0)
        store_split(p_sums + (KEYS * PARTS * DIM + o_first * DIM_V), b_dv, 0)
        i_tile += 1
        item = read_item(pipelines.items, i_tile)
    tma.store_wait(0)


# ---- kernel ----


@gluon.jit(
    do_not_specialize=[
        "i_round", "first_line", "first_list", "end_list", "n_heads", "group", "n_rows", "n_tokens",
        "range_batches", "n_slots",
    ]
)  # fmt: skip
def selected_backward_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, dout_desc, dq_desc, ptrs,
    # the launch, see Sizes
    i_round, first_line, first_list, end_list,
    # see Sizes
    n_heads, group, n_rows, n_tokens, range_batches, lse_strides, n_slots, scale_log2, scale,
    # compile time; PARTS: programs of a work item; OF_HEADS: see load_blocks; DS_LAYOUT of ds in shared memory
    PARTS: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr, OF_HEADS: gl.constexpr, DS_LAYOUT: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = SIDE // q_desc.block_type.shape[2]
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    STAGES: gl.constexpr = CONFIG.stages
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM], q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, SIDE, DIM_V], dout_desc.layout)
    items, k, v = allocate_keys(k_desc, v_desc, CONSUMERS=WARPGROUPS)
    pipelines = Pipelines(
        items=items, k=k, v=v, q=allocate_pipeline(q_buffers, STAGES, CONSUMERS=WARPGROUPS),
        dout=allocate_pipeline(dout_buffers, STAGES, CONSUMERS=WARPGROUPS),
    )  # fmt: skip
    buffers = Buffers(
        ds=gl.allocate_shared_memory(dtype, [WARPGROUPS, KEYS, SIDE], DS_LAYOUT),
        lse=gl.allocate_shared_memory(gl.float32, [WARPGROUPS * 2, SIDE], line_layout),
        delta=gl.allocate_shared_memory(gl.float32, [WARPGROUPS * 2, SIDE], line_layout),
    )
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, group=group, n_rows=n_rows, n_tokens=n_tokens, range_batches=range_batches,
        lse_strides=lse_strides, i_round=i_round, first_line=first_line, first_list=first_list, end_list=end_list,
        n_slots=n_slots,
    )  # fmt: skip
    REGISTERS: gl.constexpr = CONFIG.consumer_registers
    PRODUCER_REGISTERS: gl.constexpr = CONFIG.producer_registers
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (
                    mma,
                    (dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 0, 1, PARTS, BLOCKS, ROWS_PER_TOKEN),
                ),
                (load, (q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, PARTS, BLOCKS, OF_HEADS)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    mma,
                    (dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 0, 2, PARTS, BLOCKS, ROWS_PER_TOKEN),
                ),
                (
                    mma,
                    (dq_desc, pipelines, buffers, ptrs, sizes, scale_log2, scale, 1, 2, PARTS, BLOCKS, ROWS_PER_TOKEN),
                ),
                (load, (q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, sizes, PARTS, BLOCKS, OF_HEADS)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )


# ---- launches ----


class BackwardLaunches(NamedTuple):
    """The launches of a backward and its memory.

    outputs    dq, dk and dv
    lse_delta  lse and delta of each query, (2, batch * heads * n_padded)
    partial, sums  the workspace of a round
    totals     float32 sums of dk and dv over rounds; None if there is one round
    """

    preprocess: Launch
    kernel: Launch
    sum_rows: Launch
    sum_keys: Launch
    outputs: tuple[Memory, Memory, Memory]
    lse_delta: Memory
    partial: Memory
    sums: Memory
    totals: tuple[Memory, Memory] | None


@functools.lru_cache(maxsize=1024)
def backward_launches(
    specs: TensorSpecs,
    shapes: SelectedShapes,
    others: tuple[tuple[torch.dtype, bool] | None, ...],  # noqa: ARG001 - kernels are compiled for aligned pointers
    out_strides: tuple[int, ...],
    scale: float,
    index: int | None,
) -> BackwardLaunches:
    """The launches for all calls with these cache keys.

    specs   of q, k, v and dout
    shapes  of the plan
    others  of out, lse and dlse
    out_strides  (batch, head, row)
    index   of the device
    """
    q, k, v, dout = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, _, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    side, rows, is_single = SIDE.value, shapes.query_rows, len(shapes.rounds) == 1
    chosen = config(shapes.keys, dim)
    keys = chosen.warpgroups * side
    parts = shapes.keys // keys
    n_padded = -(-q_len // side) * side
    partial = contiguous(q.dtype, 1, 1, shapes.slots * parts * rows, dim)
    layout = rows_of(shapes, q.shape)
    group = layout.heads // kv_heads
    arguments = {
        **shapes.arguments(layout.heads),
        "group": group,
        "lse_strides": layout.strides((heads * n_padded, n_padded, 1)),
        "OF_HEADS": layout.is_of_heads,
        "scale_log2": scale * LOG2_E,
        "scale": scale,
        "PARTS": parts,
        "DS_LAYOUT": shared_layout((keys, side), q.dtype),
        "CONFIG": chosen,
        "num_warps": 4,
    }
    if chosen.max_registers is not None:
        arguments["maxnreg"] = chosen.max_registers
    descriptor_factories = {
        "q_desc": DescriptorFactory(layout.by_block(q), (1, 1, rows, SWIZZLE_COLS.value)),
        "k_desc": DescriptorFactory(k, (1, 1, keys, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, keys, dim_v)),
        "dout_desc": DescriptorFactory(layout.by_block(dout), (1, 1, rows, SWIZZLE_COLS.value)),
        "dq_desc": DescriptorFactory(partial.spec, (1, 1, rows, SWIZZLE_COLS.value)),
    }
    n_programs = min(shapes.items * parts, chosen.programs * num_sms(index))
    dq, dk, dv = (memory_in_order_of(spec, spec.shape[3]) for spec in (q, k, v))
    totals = None if is_single else (dk._replace(dtype=torch.float32), dv._replace(dtype=torch.float32))
    dk_sums, dv_sums = (memory.spec for memory in totals or (dk, dv))
    return BackwardLaunches(
        preprocess=preprocess_launch(dout, out_strides, n_padded),
        kernel=Launch(selected_backward_kernel, (n_programs,), arguments, descriptor_factories),
        sum_rows=sum_rows(shapes, parts, dq.spec, dim),
        sum_keys=sum_keys(shapes, group, dk_sums, dv_sums, (dim, dim_v), scale, adds=not is_single),
        outputs=(dq, dk, dv),
        lse_delta=contiguous(torch.float32, 2, batch * heads * n_padded),
        partial=partial,
        sums=contiguous(torch.float32, shapes.items * shapes.keys * (dim + dim_v)),
        totals=totals,
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
    assert seed is None and dropout_p == 0.0 and kv_lengths is None and scores is None, "such calls have other plans"
    assert not causal, "the plan contains it"
    dout, dlse, q, k, v, out, lse = inputs
    # gradients from autograd may have strides of 0
    (q, k, v, dout), specs = to_tma_loadable(q, k, v, dout)
    dlse = None if dlse is None else dlse.contiguous()
    lists, empty = SelectedPlan(*plan), allocator(q)
    shapes = shapes_of(plan, k.shape[2])
    others = tuple(cache_key_of(each) for each in (out, lse, dlse))
    ready = backward_launches(specs, shapes, others, out.stride()[:3], scale, q.device.index)
    dq, dk, dv = [empty(*memory) for memory in ready.outputs]
    lse_delta, partial, sums = empty(*ready.lse_delta), empty(*ready.partial), empty(*ready.sums)
    totals = (dk, dv) if ready.totals is None else tuple(empty(*memory).zero_() for memory in ready.totals)
    ready.preprocess(out, dout, lse, dlse, None, lse_delta, None, None)
    rounds = shapes.rounds
    pointers = pointers_of(lists, len(rounds), lse=lse_delta[0], delta=lse_delta[1], sums=sums)
    for of_round in rounds:
        ready.kernel(q, k, v, dout, partial, pointers, *of_round)
        ready.sum_rows(lists.indptr, lists.cols, partial, dq, of_round.first_line)
        ready.sum_keys(lists.list_items, sums, *totals, *of_round[1:])
    if ready.totals is not None:
        dk.copy_(totals[0])
        dv.copy_(totals[1])
    return dq, dk, dv
