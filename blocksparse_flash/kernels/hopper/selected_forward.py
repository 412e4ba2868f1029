"""Hopper forward for blocks that small query blocks select, in Gluon (sm90).

Shapes as in forward.py; head_dim up to 128. A query block has 8, 16 or 32 rows: the query heads that share a selection,
of one token or more. A tile of 64 rows spans several query blocks, so it would load and multiply each key block that
any of them selects. Here a work item is one key block and query blocks that select it; a program iterates over them, 64
rows per step:

    producer warp                          consumer warpgroup
    work item, k, v -> shared memory       wait for k and v
    q of a step -> shared memory           wait for q | s = q k^T, release q | softmax | out = p v | store out and lse

The outputs of a step are partial results, one for each query block: normalized, rounded to q's dtype and written to a
workspace. triton/merge_selected.py combines those of each query block by their lse, as in split-KV. Query blocks are
processed in rounds, two launches each, whose partial results fit into the workspace. Results are bitwise reproducible.

What limits it on an H200 is in TUNING.md: 8 KB of L2 traffic for each MFLOP.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

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
from ...runtime.launch import Launch, Memory, allocator, contiguous, memory_in_order_of, num_sms
from ...runtime.tensor_spec import TensorSpecs
from ...score_mods import Scores
from ..arguments import scale_log2, sign
from ..schedule import padded_dim
from ..selected_shapes import arguments_of, row_layout_of, sizes_of
from ..triton.merge_selected import combine_out
from .barriers import Pipeline, allocate_pipeline, consumer_release, consumer_wait, thread_barrier
from .fine_tiles import SIDE, SWIZZLE_COLS
from .registers import accumulator, opaque, tile_at
from .selected_tiles import (
    ITEM_INTS,
    Sizes,
    allocate_keys,
    broadcast_to_rows,
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
    store_blocks,
    write_item,
)
from .tma import DescriptorFactory, to_tma_loadable
from .work_tiles import END, next_work_index, write_end

# buffers of q
STAGES = gl.constexpr(2)
# registers per thread: on average over all warps, and of the producer
REGISTERS, PRODUCER_REGISTERS = 128, gl.constexpr(24)
PROGRAMS_PER_SM = 2


class Pipelines(NamedTuple):
    """Shared memory: work items, k, v, and q of STAGES steps."""

    items: Pipeline
    k: Pipeline
    v: Pipeline
    q: Pipeline


# ---- one step ----


@gluon.jit
def softmax(b_scores, scale_log2):
    """(p, lse in base 2, 1 / sum) of the rows of scores [64, keys]; a row without keys has p 0 and lse -inf.

    scale_log2  |scale| * log2(e), see arguments.scale_log2
    """
    b_max = gl.max(b_scores, 1) * scale_log2
    b_max = gl.where(b_max == float("-inf"), 0.0, b_max)
    b_p = gl.exp2(b_scores * scale_log2 - gl.expand_dims(b_max, 1))
    b_sum = gl.sum(b_p, 1)
    return b_p, b_max + gl.log2(b_sum), 1.0 / gl.where(b_sum == 0.0, 1.0, b_sum)


@gluon.jit
def masked_scores(
    b_scores, ptrs, sizes, item, i_step, BLOCKS_PER_STEP: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr
):  # fmt: skip
    """Scores [64, keys], -inf where a pair does not attend."""
    KEYS: gl.constexpr = b_scores.shape[1]
    o_row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, accumulator(KEYS)))
    b_first, b_stop = row_ranges(ptrs, sizes, item, i_step, o_row, BLOCKS_PER_STEP, ROWS_PER_TOKEN)
    # few steps have a mask: positions kept from step to step would take registers
    kv_start = opaque(item.i_key_block * KEYS)
    o_key = gl.expand_dims(kv_start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, accumulator(KEYS))), 0)
    return gl.where(
        (o_key >= gl.expand_dims(b_first, 1)) & (o_key < gl.expand_dims(b_stop, 1)), b_scores, float("-inf")
    )


# ---- producer warp ----


@gluon.jit
def load(q_desc, k_desc, v_desc, pipelines, ptrs, sizes, BLOCKS_PER_STEP: gl.constexpr, ROWS_ARE_HEADS: gl.constexpr):
    """Producer: takes and loads work items and their steps."""
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    first_item, n_items = first_and_count(ptrs, sizes)
    i_item = gl.program_id(0)
    # iterations and steps so far: they choose pipeline stages
    i_iter = 0
    n_steps_loaded = 0
    while i_item < n_items:
        item = write_item(ptrs, pipelines.items, i_iter, first_item, i_item, KEY_SPLITS=1)
        i_batch, i_head = item.batch_head // sizes.n_heads, item.batch_head % sizes.n_heads
        load_keys(k_desc, pipelines.k, i_iter, i_batch, i_head // sizes.group, item.i_key_block * KEYS)
        load_keys(v_desc, pipelines.v, i_iter, i_batch, i_head // sizes.group, item.i_key_block * KEYS)
        for i_step in range(n_steps_of(item, BLOCKS_PER_STEP)):
            blocks = load_query_blocks_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)
            load_blocks(q_desc, pipelines.q, n_steps_loaded, i_batch, i_head, blocks, ROWS_ARE_HEADS)
            n_steps_loaded += 1
        i_item = next_work_index(ptrs.counters_ptr + sizes.i_round, i_iter)
        i_iter += 1
    write_end(pipelines.items, i_iter, ITEM_INTS)


# ---- consumer warpgroup ----


@gluon.jit
def mma(
    out_desc, out_buffer, pipelines, ptrs, sizes, scale_log2,
    BLOCKS_PER_STEP: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    """Consumer: computes the steps of work items. out_buffer: [1, 1, 64, DIM_V] in shared memory."""
    q = pipelines.q
    BLOCK_ROWS: gl.constexpr = SIDE // BLOCKS_PER_STEP
    KEYS: gl.constexpr = pipelines.k.buffers.shape[3]
    DIM_V: gl.constexpr = pipelines.v.buffers.shape[4]
    dtype: gl.constexpr = q.buffers.dtype
    score_layout: gl.constexpr = accumulator(KEYS)
    out_layout: gl.constexpr = accumulator(DIM_V)
    o_row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, score_layout))
    k_tile = tile_at(pipelines.k.buffers, 0).permute((1, 0))
    v_tile = tile_at(pipelines.v.buffers, 0)
    first_entry = first_entry_of_round(ptrs, sizes)
    # iterations and steps so far: they choose pipeline stages
    i_iter = 0
    n_steps_done = 0
    item = read_item(pipelines.items, i_iter)
    while item.batch_head > END:
        consumer_wait(pipelines.k, 0, i_iter)
        consumer_wait(pipelines.v, 0, i_iter)
        n_steps = n_steps_of(item, BLOCKS_PER_STEP)
        for i_step in range(n_steps):
            i_load = n_steps_done + i_step
            stage = i_load % STAGES
            # loaded early: they arrive during the wait for q and during the product
            slots = load_slots_of_step(ptrs, sizes, item, first_entry, i_step, BLOCKS_PER_STEP)
            has_mask = is_masked(ptrs, item, i_step, BLOCKS_PER_STEP)
            consumer_wait(q, stage, i_load // STAGES)
            b_zero = gl.zeros([SIDE, KEYS], gl.float32, score_layout)
            scores_token = warpgroup_mma(tile_at(q.buffers, stage), k_tile, b_zero, use_acc=False, is_async=True)
            b_scores = warpgroup_mma_wait(0, deps=(scores_token,))
            consumer_release(q, stage)
            if SIGN != 1:
                b_scores = b_scores * SIGN
            if has_mask:
                b_scores = masked_scores(b_scores, ptrs, sizes, item, i_step, BLOCKS_PER_STEP, ROWS_PER_TOKEN)
            b_p, b_lse, b_inverse_sum = softmax(b_scores, scale_log2)
            b_p = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, out_layout, 2))
            b_zero_out = gl.zeros([SIDE, DIM_V], gl.float32, out_layout)
            out_token = warpgroup_mma(b_p, v_tile, b_zero_out, use_acc=False, is_async=True)
            b_slot = broadcast_to_rows(slots, o_row)
            gl.store(ptrs.lse_ptr + (b_slot * BLOCK_ROWS + o_row % BLOCK_ROWS), b_lse, mask=b_slot < sizes.n_slots)
            # wait until the stores of the step before have read the buffer
            tma.store_wait(0)
            b_out = warpgroup_mma_wait(0, deps=(out_token,))
            b_out = b_out * gl.expand_dims(gl.convert_layout(b_inverse_sum, gl.SliceLayout(1, out_layout)), 1)
            thread_barrier()
            out_buffer.reshape([SIDE, DIM_V]).store(b_out.to(dtype))
            fence_async_shared()
            thread_barrier()
            store_blocks(out_desc, out_buffer, slots)
        n_steps_done += n_steps
        consumer_release(pipelines.k, 0)
        consumer_release(pipelines.v, 0)
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
def selected_forward_kernel(
    # TMA descriptors; Pointers
    q_desc, k_desc, v_desc, out_desc, ptrs,
    # the launch, see Sizes
    i_round, first_query_block, first_list, end_list,
    # see Sizes; scale_log2: |scale| * log2(e), see arguments.scale_log2
    n_heads, group, n_query_blocks, n_tokens, range_batch_stride, n_slots, scale_log2,
    # compile time; ROWS_ARE_HEADS: see RowLayout; SIGN of the scale, since softmax takes max(scores) * scale_log2
    ROWS_PER_TOKEN: gl.constexpr, ROWS_ARE_HEADS: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    BLOCKS_PER_STEP: gl.constexpr = SIDE // q_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, SIDE, DIM], q_desc.layout)
    out_buffer = gl.allocate_shared_memory(q_desc.dtype, [1, 1, SIDE, DIM_V], out_desc.layout)
    items, k, v = allocate_keys(k_desc, v_desc, CONSUMERS=1)
    pipelines = Pipelines(items=items, k=k, v=v, q=allocate_pipeline(q_buffers, STAGES, CONSUMERS=1))
    fence_async_shared()
    sizes = Sizes(
        n_heads=n_heads, group=group, n_query_blocks=n_query_blocks, n_tokens=n_tokens,
        range_batch_stride=range_batch_stride, lse_strides=None, i_round=i_round,
        first_query_block=first_query_block, first_list=first_list, end_list=end_list, n_slots=n_slots,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (mma, (out_desc, out_buffer, pipelines, ptrs, sizes, scale_log2, BLOCKS_PER_STEP, ROWS_PER_TOKEN, SIGN)),
            (load, (q_desc, k_desc, v_desc, pipelines, ptrs, sizes, BLOCKS_PER_STEP, ROWS_ARE_HEADS)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


# ---- launch ----


class ForwardLaunches(NamedTuple):
    """The launches of a forward and its memory.

    partial, partial_lse  the workspace
    """

    out: Memory
    lse: Memory
    partial: Memory
    partial_lse: Memory
    kernel: Launch
    merge: Launch


@functools.lru_cache(maxsize=1024)
def forward_launches(specs: TensorSpecs, sizes: SelectedSizes, scale: float, index: int | None) -> ForwardLaunches:
    """The launches for all calls with these cache keys.

    specs   of q, k and v
    sizes  of the plan
    index   of the device
    """
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (_, kv_heads, _, v_dim) = q.shape, v.shape
    dim, dim_v = padded_dim("hopper", head_dim), padded_dim("hopper", v_dim)
    n_partial_rows, rows = sizes.max_slots * sizes.query_rows, sizes.query_rows
    partial, out = contiguous(q.dtype, 1, 1, n_partial_rows, dim_v), memory_in_order_of(q, v_dim)
    row_layout = row_layout_of(sizes, q.shape)
    arguments = {
        **arguments_of(sizes, row_layout.heads),
        "group": row_layout.heads // kv_heads,
        "ROWS_ARE_HEADS": row_layout.rows_are_heads,
        "scale_log2": scale_log2(scale),
        "SIGN": sign(scale),
        "num_warps": 4,
        "maxnreg": REGISTERS,
    }
    n_programs = min(sizes.max_work_items, PROGRAMS_PER_SM * num_sms(index))
    descriptor_factories = {
        "q_desc": DescriptorFactory(row_layout.by_block(q), (1, 1, rows, SWIZZLE_COLS.value)),
        "k_desc": DescriptorFactory(k, (1, 1, sizes.keys, dim)),
        "v_desc": DescriptorFactory(v, (1, 1, sizes.keys, dim_v)),
        "out_desc": DescriptorFactory(partial.spec, (1, 1, rows, SWIZZLE_COLS.value)),
    }
    return ForwardLaunches(
        out=out,
        lse=contiguous(torch.float32, batch, heads, q_len),
        partial=partial,
        partial_lse=contiguous(torch.float32, n_partial_rows),
        kernel=Launch(selected_forward_kernel, (n_programs,), arguments, descriptor_factories),
        merge=combine_out(sizes, out.spec, dim_v),
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Sequence[torch.Tensor],
    kv_lengths: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's dtype and memory order, and lse (batch, heads, q_len) float32.

    plan   the tensors of a SelectedPlan
    specs  of q, k and v, if the caller has them already
    """
    assert seed is None and dropout_p == 0.0 and kv_lengths is None and scores is None, (
        "SelectedPlans have none of these options"
    )
    assert not causal, "the ranges of the plan are causal already"
    if specs is None or not specs.is_tma_loadable:
        (q, k, v), specs = to_tma_loadable(q, k, v)
    selected = SelectedPlan(*plan)
    sizes = sizes_of(plan, k.shape[2])
    launches, empty = forward_launches(specs, sizes, scale, q.device.index), allocator(q)
    memories = launches.out, launches.lse, launches.partial, launches.partial_lse
    out, lse, partial, partial_lse = (empty(*memory) for memory in memories)
    rounds = sizes.rounds
    pointers = pointers_of(selected, len(rounds), lse=partial_lse)
    for this_round in rounds:
        first_query_block, lists = this_round.first_query_block, (this_round.first_list, this_round.end_list)
        launches.kernel(q, k, v, partial, pointers, this_round.i_round, first_query_block, *lists)
        launches.merge(selected.indptr, selected.key_blocks, partial, partial_lse, out, lse, first_query_block)
    return out, lse
