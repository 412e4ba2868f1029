"""Work items and steps of the Hopper kernels for blocks that small query blocks select (plan_format.SelectedPlan).

A work item is one key block, and some of the query blocks of one head that select it. A step has the 64 rows of 8, 4 or
2 query blocks, which TMA loads into their places in a buffer. Programs are persistent: the producer warp draws work
items from the tile scheduler, and passes them to the consumers through shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...plan_format import SelectedPlan
from .barriers import allocate_pipeline, consumer_release, consumer_wait, producer_acquire
from .bitmask import INDEX_BITS
from .fine_tiles import SIDE, SWIZZLE_COLS
from .registers import load_int
from .tma import tma_load, tma_store
from .work_tiles import WORK_TILE_STAGES, write_work_tile

# int32 values of a work item
ITEM_INTS = gl.constexpr(5)


class Pointers(NamedTuple):
    """Global memory.

    indptr_ptr, entries_ptr, work_item_offsets_ptr, work_items_ptr, ranges_ptr  the plan
    lse_ptr    forward: lse of each row of a partial result, in base 2; backward: lse of each query, see lse_strides
    delta_ptr  see hopper/backward.py; None in the forward
    partial_dkdv_ptr  dk, then dv, of each work item of a round; None in the forward
    counters_ptr  tile-scheduler counter of each round, zero at first
    """

    indptr_ptr: Any
    entries_ptr: Any
    work_item_offsets_ptr: Any
    work_items_ptr: Any
    ranges_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    partial_dkdv_ptr: Any
    counters_ptr: Any


class Sizes(NamedTuple):
    """Sizes of a call.

    n_heads         heads that select, per batch, see selected_shapes.RowLayout
    group           heads that select, per KV head
    n_query_blocks  query blocks per head
    n_tokens        tokens per head
    range_batch_stride  in tokens; 0 if all batches share the ranges
    lse_strides     of lse and delta of the backward, see selected_shapes.RowLayout
    i_round         number of the round
    first_query_block  its first query block
    first_list, end_list  its lists
    n_slots         entries of a round, at most; slot n_slots is past the end, and TMA drops stores to it. The backward
                    has KEY_SPLITS partial results per slot
    """

    n_heads: Any
    group: Any
    n_query_blocks: Any
    n_tokens: Any
    range_batch_stride: Any
    lse_strides: Any
    i_round: Any
    first_query_block: Any
    first_list: Any
    end_list: Any
    n_slots: Any


class WorkItem(NamedTuple):
    """One work item.

    batch_head   flat index over batch and heads that select; END: no more work items
    i_key_block  key block
    begin, end   entries
    i_work       work item of the round * KEY_SPLITS + which of the KEY_SPLITS programs that share its keys this is
    """

    batch_head: Any
    i_key_block: Any
    begin: Any
    end: Any
    i_work: Any


@gluon.jit
def allocate_keys(k_desc, v_desc, CONSUMERS: gl.constexpr):
    """Pipelines of work items and of their keys and values: (items, k, v)."""
    k_shape: gl.constexpr = k_desc.block_type.shape
    v_shape: gl.constexpr = v_desc.block_type.shape
    items = gl.allocate_shared_memory(
        gl.int32, [WORK_TILE_STAGES * ITEM_INTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, k_shape[2], k_shape[3]], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, v_shape[2], v_shape[3]], v_desc.layout)
    return (
        allocate_pipeline(items, WORK_TILE_STAGES, CONSUMERS),
        allocate_pipeline(k, 1, CONSUMERS),
        allocate_pipeline(v, 1, CONSUMERS),
    )


# ---- producer warp ----


@gluon.jit
def first_and_count(ptrs, sizes):
    """(first work item of the round, number of its work items)."""
    first_item = gl.load(ptrs.work_item_offsets_ptr + sizes.first_list)
    return first_item, gl.load(ptrs.work_item_offsets_ptr + sizes.end_list) - first_item


@gluon.jit
def write_item(ptrs, items, i_iter, first_item, i_work, KEY_SPLITS: gl.constexpr):
    """Reads a work item of the round, and writes it for the consumers as the i_iter-th one of the program.

    i_work  see WorkItem
    """
    p_item = ptrs.work_items_ptr + (first_item + i_work // KEY_SPLITS) * 4
    # in the order of the fields of WorkItem
    item = WorkItem(
        batch_head=gl.load(p_item),
        i_key_block=gl.load(p_item + 1),
        begin=gl.load(p_item + 2),
        end=gl.load(p_item + 3),
        i_work=i_work,
    )
    write_work_tile(items, i_iter, item, ITEM_INTS, ITEM_INTS)
    return item


@gluon.jit
def load_keys(desc, pipeline, i_iter, i_batch, i_kv_head, start):
    """Loads the keys or values of the i_iter-th work item of the program."""
    producer_acquire(pipeline, 0, i_iter)
    mbarrier.expect(pipeline.full.index(0), desc.block_type.nbytes)
    tma_load(desc, [i_batch, i_kv_head, start, 0], pipeline.full.index(0), pipeline.buffers.index(0))


@gluon.jit
def load_blocks(desc, pipeline, i_load, i_batch, i_head, blocks, ROWS_ARE_HEADS: gl.constexpr):
    """Loads the rows of the query blocks of a step into the next stage of a pipeline; zeros for none.

    desc  of (batch, heads, queries, columns); with ROWS_ARE_HEADS of (batch, queries, heads, columns)
    ROWS_ARE_HEADS  see selected_shapes.RowLayout
    """
    BLOCK_ROWS: gl.constexpr = SIDE // len(blocks)
    STAGES: gl.constexpr = pipeline.buffers.shape[0]
    COLUMNS: gl.constexpr = pipeline.buffers.shape[4]
    stage = i_load % STAGES
    producer_acquire(pipeline, stage, i_load // STAGES)
    full, buffer = pipeline.full.index(stage), pipeline.buffers.index(stage)
    mbarrier.expect(full, len(blocks) * (COLUMNS // SWIZZLE_COLS) * desc.block_type.nbytes)
    for i_block in gl.static_range(len(blocks)):
        for column in gl.static_range(0, COLUMNS, SWIZZLE_COLS):
            view = buffer.slice(i_block * BLOCK_ROWS, BLOCK_ROWS, 2).slice(column, SWIZZLE_COLS, 3)
            if ROWS_ARE_HEADS:
                tma_load(desc, [i_batch, blocks[i_block], i_head * BLOCK_ROWS, column], full, view)
            else:
                tma_load(desc, [i_batch, i_head, blocks[i_block] * BLOCK_ROWS, column], full, view)


# ---- consumer warpgroups ----


@gluon.jit
def read_item(items, i_iter):
    """The i_iter-th WorkItem of the program; after the last one, one whose batch_head is END."""
    stage = i_iter % WORK_TILE_STAGES
    first = stage * ITEM_INTS
    consumer_wait(items, stage, i_iter // WORK_TILE_STAGES)
    # in the order of the fields of WorkItem
    batch_head = load_int(items.buffers.index(first))
    i_key_block = load_int(items.buffers.index(first + 1))
    begin = load_int(items.buffers.index(first + 2))
    end = load_int(items.buffers.index(first + 3))
    i_work = load_int(items.buffers.index(first + 4))
    consumer_release(items, stage)
    return WorkItem(batch_head=batch_head, i_key_block=i_key_block, begin=begin, end=end, i_work=i_work)


@gluon.jit
def n_steps_of(item, BLOCKS_PER_STEP: gl.constexpr):
    """Number of steps of a work item. BLOCKS_PER_STEP: query blocks per step."""
    return (item.end - item.begin + (BLOCKS_PER_STEP - 1)) // BLOCKS_PER_STEP


@gluon.jit
def first_entry_of_round(ptrs, sizes):
    """Index into key_blocks of the round's first entry: the slot of an entry is its index minus this."""
    return gl.load(ptrs.indptr_ptr + (sizes.first_query_block + sizes.first_query_block // sizes.n_query_blocks))


@gluon.jit
def entries_of_step(ptrs, item, i_step, BLOCKS_PER_STEP: gl.constexpr):
    """(pointer to the first entry of a step, number of entries from there on).

    Its other entries are at constant offsets from the pointer. With an address register for each, which the next one
    overwrote, the ptxas of Triton 3.6 sometimes omitted the wait for the load (tests/support/scoreboards.py).
    """
    i_entry = item.begin + i_step * BLOCKS_PER_STEP
    return ptrs.entries_ptr + 2 * i_entry, item.end - i_entry


@gluon.jit
def load_query_blocks_of_step(ptrs, item, i_step, BLOCKS_PER_STEP: gl.constexpr):
    """The query blocks of a step; -1 for none."""
    p_entry, n_left = entries_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)
    blocks = ()
    for i_block in gl.static_range(BLOCKS_PER_STEP):
        # the list is padded
        block = gl.load(p_entry + (2 * i_block + 1)) & INDEX_BITS
        blocks = blocks + (gl.where(i_block < n_left, block, -1),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def is_masked(ptrs, item, i_step, BLOCKS_PER_STEP: gl.constexpr):
    """Whether a step has pairs that do not attend, or fewer query blocks than it could."""
    p_entry, n_left = entries_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)
    found = n_left < BLOCKS_PER_STEP
    for i_block in gl.static_range(BLOCKS_PER_STEP):
        found = found | (gl.load(p_entry + (2 * i_block + 1)) < 0)
    return found


@gluon.jit
def load_slots_of_step(ptrs, sizes, item, first_entry, i_step, BLOCKS_PER_STEP: gl.constexpr):
    """The slot of each query block of a step; n_slots for none."""
    p_entry, n_left = entries_of_step(ptrs, item, i_step, BLOCKS_PER_STEP)
    slots = ()
    for i_block in gl.static_range(BLOCKS_PER_STEP):
        slot = gl.load(p_entry + 2 * i_block) - first_entry
        slots = slots + (gl.where(i_block < n_left, slot, sizes.n_slots),)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def broadcast_to_rows(values, o_row):
    """The value of each row's query block; values: one for each query block of a step."""
    BLOCK_ROWS: gl.constexpr = SIDE // len(values)
    o_block = o_row // BLOCK_ROWS
    b_value = o_row * 0 + values[0]
    for i_block in gl.static_range(1, len(values)):
        b_value = gl.where(o_block == i_block, values[i_block], b_value)
    return b_value


@gluon.jit
def row_ranges(ptrs, sizes, item, i_step, o_row, BLOCKS_PER_STEP: gl.constexpr, ROWS_PER_TOKEN: gl.constexpr):
    """(first, one past the last) key that each row of a step attends to; an empty range without a query block."""
    BLOCK_ROWS: gl.constexpr = SIDE // BLOCKS_PER_STEP
    b_entry = item.begin + i_step * BLOCKS_PER_STEP + o_row // BLOCK_ROWS
    b_block = gl.load(ptrs.entries_ptr + (2 * b_entry + 1)) & INDEX_BITS
    o_token = gl.minimum((b_block * BLOCK_ROWS + o_row % BLOCK_ROWS) // ROWS_PER_TOKEN, sizes.n_tokens - 1)
    is_listed = b_entry < item.end
    p_range = ptrs.ranges_ptr + 2 * (item.batch_head // sizes.n_heads * sizes.range_batch_stride + o_token)
    return gl.load(p_range, mask=is_listed, other=0), gl.load(p_range + 1, mask=is_listed, other=0)


@gluon.jit
def store_blocks(desc, buffer, slots, first_column=0):
    """Stores the rows of a step as partial results, from a column on; those of slots past the end are dropped."""
    BLOCK_ROWS: gl.constexpr = SIDE // len(slots)
    COLUMNS: gl.constexpr = buffer.shape[3]
    for i_block in gl.static_range(len(slots)):
        for column in gl.static_range(0, COLUMNS, SWIZZLE_COLS):
            view = buffer.slice(i_block * BLOCK_ROWS, BLOCK_ROWS, 2).slice(column, SWIZZLE_COLS, 3)
            tma_store(desc, [0, 0, slots[i_block] * BLOCK_ROWS, first_column + column], view)


@gluon.jit
def slots_of_split(slots, i_split, KEY_SPLITS: gl.constexpr):
    """Places of the partial results of program i_split of KEY_SPLITS: each slot has KEY_SPLITS."""
    found = ()
    for i_block in gl.static_range(len(slots)):
        found = found + (slots[i_block] * KEY_SPLITS + i_split,)  # type: ignore[assignment]  # noqa: RUF005
    return found


# ---- launch ----


def pointers_of(
    plan: SelectedPlan,
    n_launches: int,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor | None = None,
    partial_dkdv: torch.Tensor | None = None,
) -> Pointers:
    """The Pointers of a plan and of the other memory, with new counters."""
    # cleared at each call: those kept for later calls would live on in the memory of a CUDA graph
    counters = torch.zeros(n_launches, dtype=torch.int32, device=lse.device)
    return Pointers(
        indptr_ptr=plan.indptr,
        entries_ptr=plan.entries,
        work_item_offsets_ptr=plan.work_item_offsets,
        work_items_ptr=plan.work_items,
        ranges_ptr=plan.ranges,
        lse_ptr=lse,
        delta_ptr=delta,
        partial_dkdv_ptr=partial_dkdv,
        counters_ptr=counters,
    )
