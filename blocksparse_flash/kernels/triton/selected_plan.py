"""The kernels that make a SelectedPlan: plan/selected_builder.py has PyTorch operations that define what they compute.

1. ranges_kernel: keys of each token. 2. mark_entries_kernel: list, key block and query block of each entry.
3. a stable sort by list. 4. list_entries_kernel: `entries`. 5. count_items_kernel: bounds of each list, number of its
work items. 6. a cumulative sum. 7. write_items_kernel: `work_items`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...plan_format import SelectedPlan, SelectedSizes
from ...runtime.launch import Launch
from .tile import PARTIAL

# tokens or entries per program; lists per program
BLOCK, LISTS = 1024, 128
# of mark_entries_kernel
ENTRIES_PER_PROGRAM = 2048


class PlanGrid(NamedTuple):
    """The query blocks and key blocks of a plan.

    sizes      of the plan
    heads      heads that select, per batch
    subblocks  key blocks per selected block
    kv_len     keys of a head
    causal     see selected_builder.build
    document_batches  batches of document ranges; 0: none
    """

    sizes: SelectedSizes
    heads: int
    subblocks: int
    kv_len: int
    causal: bool
    document_batches: int


# fmt: off
@triton.jit(do_not_specialize=["n_tokens", "kv_len"])
def ranges_kernel(documents_ptr, ranges_ptr, n_tokens, kv_len, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """First key of each token, and one past the last."""
    i_batch = tl.program_id(1)
    o_token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_token = o_token < n_tokens
    b_first, b_stop = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], 0, tl.int32) + kv_len
    if CAUSAL:
        b_stop = tl.maximum(o_token + (kv_len - n_tokens + 1), 0)
    if documents_ptr is not None:
        p_first = documents_ptr + (i_batch * 3 + 1) * n_tokens + o_token
        b_first = tl.load(p_first, mask=m_token, other=0)
        b_stop = tl.minimum(b_stop, tl.load(p_first + n_tokens, mask=m_token, other=0))
    p_range = ranges_ptr + (i_batch * n_tokens + o_token) * 2
    tl.store(p_range, b_first, mask=m_token)
    tl.store(p_range + 1, b_stop, mask=m_token)


@triton.jit(
    do_not_specialize=[
        "total_query_blocks", "heads", "n_query_blocks", "n_key_blocks", "n_tokens", "range_batch_stride",
        "query_blocks_per_round", "heads_per_round", "n_lists",
    ]
)
def mark_entries_kernel(
    indptr_ptr, indices_ptr, ranges_ptr,
    # outputs for each entry: its list (n_lists if unused); its key block (-1 if unused); its query block, minus PARTIAL
    # if some pair does not attend
    lists_ptr, key_blocks_ptr, blocks_ptr,
    total_query_blocks, heads, n_query_blocks, n_key_blocks, n_tokens, range_batch_stride,
    query_blocks_per_round, heads_per_round, n_lists,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, SUBBLOCKS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr, ENTRIES: tl.constexpr,
):
    """Marks the entries of QUERY_BLOCKS query blocks."""
    query_block = tl.program_id(0) * QUERY_BLOCKS + tl.arange(0, QUERY_BLOCKS)
    m_query_block = query_block < total_query_blocks
    batch_head, block = query_block // n_query_blocks, query_block % n_query_blocks
    begin = tl.load(indptr_ptr + query_block + batch_head, mask=m_query_block, other=0)
    end = tl.load(indptr_ptr + query_block + batch_head + 1, mask=m_query_block, other=0)
    first_token = block * TOKENS
    last_token = tl.minimum(first_token + (TOKENS - 1), n_tokens - 1)
    p_range = ranges_ptr + batch_head // heads * range_batch_stride * 2
    first_token_start = tl.load(p_range + first_token * 2, mask=m_query_block, other=0)[:, None]
    first_token_stop = tl.load(p_range + first_token * 2 + 1, mask=m_query_block, other=0)[:, None]
    last_token_start = tl.load(p_range + last_token * 2, mask=m_query_block, other=0)[:, None]
    last_token_stop = tl.load(p_range + last_token * 2 + 1, mask=m_query_block, other=0)[:, None]
    i_round = query_block // query_blocks_per_round
    first_batch_head = i_round * query_blocks_per_round // n_query_blocks
    first_list = (i_round * heads_per_round + (batch_head - first_batch_head)) * n_key_blocks
    # ranges never decrease, so the keys of the block's tokens lie in [start of the first, stop of the last), and every
    # token attends to [start of the last, stop of the first): see selected_builder.build_by_operations
    # [QUERY_BLOCKS, ENTRIES]
    o_entry = begin[:, None] + tl.arange(0, ENTRIES)[None, :]
    m_entry = o_entry < end[:, None]
    b_index = tl.load(indices_ptr + o_entry, mask=m_entry, other=0)
    for i_sub in tl.static_range(SUBBLOCKS):
        b_key_block = b_index * SUBBLOCKS + i_sub
        key_start = b_key_block * KEYS
        key_stop = key_start + KEYS
        is_used = (b_key_block < n_key_blocks) & (last_token_stop > key_start) & (first_token_start < key_stop)
        # an empty range: no token of the query block has keys
        is_used = is_used & (last_token_stop > first_token_start)
        is_full = (last_token_start <= key_start) & (first_token_stop >= key_stop)
        o_out = o_entry * SUBBLOCKS + i_sub
        tl.store(lists_ptr + o_out, tl.where(is_used, first_list[:, None] + b_key_block, n_lists), mask=m_entry)
        tl.store(key_blocks_ptr + o_out, tl.where(is_used, b_key_block, -1), mask=m_entry)
        tl.store(blocks_ptr + o_out, block[:, None] - tl.where(is_full, 0, PARTIAL), mask=m_entry)


@triton.jit(do_not_specialize=["capacity"])
def list_entries_kernel(order_ptr, blocks_ptr, entries_ptr, capacity, BLOCK: tl.constexpr):
    """Position and query block of each entry, in sorted order."""
    o_entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_entry = o_entry < capacity
    b_order = tl.load(order_ptr + o_entry, mask=m_entry, other=0).to(tl.int32)
    tl.store(entries_ptr + o_entry * 2, b_order, mask=m_entry)
    tl.store(entries_ptr + o_entry * 2 + 1, tl.load(blocks_ptr + b_order, mask=m_entry, other=0), mask=m_entry)


@triton.jit
def lower_bound(values_ptr, b_wanted, n_values, STEPS: tl.constexpr):
    """Number of values below the wanted ones, of n_values <= 2^STEPS sorted values."""
    # torch.searchsorted, fused with the division below
    b_low, b_high = b_wanted * 0, b_wanted * 0 + n_values
    for _ in tl.static_range(STEPS + 1):
        b_middle = (b_low + b_high) // 2
        is_open = b_low < b_high
        is_below = is_open & (tl.load(values_ptr + b_middle, mask=is_open, other=0) < b_wanted)
        b_low = tl.where(is_below, b_middle + 1, b_low)
        b_high = tl.where(is_open & (is_below == 0), b_middle, b_high)
    return b_low


@triton.jit(do_not_specialize=["capacity", "n_lists"])
def count_items_kernel(
    lists_ptr, bounds_ptr, counts_ptr, capacity, n_lists,
    MAX_ITEM_BLOCKS: tl.constexpr, STEPS: tl.constexpr, LISTS: tl.constexpr,
):
    """First entry of each list, and of the end; number of work items of each list."""
    i_list = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    begin = lower_bound(lists_ptr, i_list, capacity, STEPS)
    end = lower_bound(lists_ptr, i_list + 1, capacity, STEPS)
    tl.store(bounds_ptr + i_list, begin, mask=i_list <= n_lists)
    tl.store(counts_ptr + i_list, (end - begin + (MAX_ITEM_BLOCKS - 1)) // MAX_ITEM_BLOCKS, mask=i_list < n_lists)


@triton.jit(
    do_not_specialize=["n_query_blocks", "n_key_blocks", "query_blocks_per_round", "heads_per_round", "n_lists"]
)
def write_items_kernel(
    work_item_offsets_ptr, bounds_ptr, work_items_ptr,
    n_query_blocks, n_key_blocks, query_blocks_per_round, heads_per_round, n_lists,
    MAX_ITEM_BLOCKS: tl.constexpr, LISTS: tl.constexpr,
):
    """The work items of LISTS lists."""
    i_list = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    m_list = i_list < n_lists
    first = tl.load(work_item_offsets_ptr + i_list, mask=m_list, other=0)
    n_items = tl.load(work_item_offsets_ptr + i_list + 1, mask=m_list, other=0) - first
    begin = tl.load(bounds_ptr + i_list, mask=m_list, other=0)
    end = tl.load(bounds_ptr + i_list + 1, mask=m_list, other=0)
    lists_per_round = heads_per_round * n_key_blocks
    i_round, i_within = i_list // lists_per_round, i_list % lists_per_round
    b_batch_head = i_round * query_blocks_per_round // n_query_blocks + i_within // n_key_blocks
    b_key_block = i_within % n_key_blocks
    for i in tl.range(0, tl.max(n_items, 0)):
        m_item = m_list & (i < n_items)
        p_item = work_items_ptr + (first + i) * 4
        b_begin = begin + i * MAX_ITEM_BLOCKS
        tl.store(p_item, b_batch_head, mask=m_item)
        tl.store(p_item + 1, b_key_block, mask=m_item)
        tl.store(p_item + 2, b_begin, mask=m_item)
        tl.store(p_item + 3, tl.minimum(b_begin + MAX_ITEM_BLOCKS, end), mask=m_item)
# fmt: on


class PlanLaunches(NamedTuple):
    """The launches, in order; a sort follows `mark_entries`, and a cumulative sum `count_items`."""

    make_ranges: Launch
    mark_entries: Launch
    list_entries: Launch
    count_items: Launch
    write_items: Launch


@functools.lru_cache(maxsize=1024)
def plan_launches(grid: PlanGrid) -> PlanLaunches:
    """The launches for all plans of these sizes."""
    sizes, n_lists, capacity = grid.sizes, grid.sizes.n_lists, grid.sizes.capacity
    range_batch_stride = sizes.n_tokens if sizes.has_batches else 0
    entries = triton.next_power_of_2(sizes.max_key_blocks // grid.subblocks)
    per_program = max(1, ENTRIES_PER_PROGRAM // entries)
    numbers = {
        "n_query_blocks": sizes.n_query_blocks,
        "n_key_blocks": sizes.n_key_blocks,
        "query_blocks_per_round": sizes.query_blocks_per_round,
    }
    numbers |= {"heads_per_round": sizes.heads_per_round, "n_lists": n_lists}
    max_item_blocks, steps = sizes.max_item_blocks, max(1, (capacity - 1).bit_length())
    return PlanLaunches(
        make_ranges=Launch(
            ranges_kernel,
            (triton.cdiv(sizes.n_tokens, BLOCK), max(1, grid.document_batches)),
            {"n_tokens": sizes.n_tokens, "kv_len": grid.kv_len, "CAUSAL": grid.causal, "BLOCK": BLOCK},
        ),
        mark_entries=Launch(
            mark_entries_kernel,
            (triton.cdiv(sizes.total_query_blocks, per_program),),
            {
                "total_query_blocks": sizes.total_query_blocks,
                "heads": grid.heads,
                "n_tokens": sizes.n_tokens,
                "range_batch_stride": range_batch_stride,
                **numbers,
                "TOKENS": sizes.query_rows // sizes.rows_per_token,
                "KEYS": sizes.keys,
                "SUBBLOCKS": grid.subblocks,
                "QUERY_BLOCKS": per_program,
                "ENTRIES": entries,
            },
        ),
        list_entries=Launch(
            list_entries_kernel, (triton.cdiv(capacity, BLOCK),), {"capacity": capacity, "BLOCK": BLOCK}
        ),
        count_items=Launch(
            count_items_kernel,
            (triton.cdiv(n_lists + 1, LISTS),),
            {
                "capacity": capacity,
                "n_lists": n_lists,
                "MAX_ITEM_BLOCKS": max_item_blocks,
                "STEPS": steps,
                "LISTS": LISTS,
            },
        ),
        write_items=Launch(
            write_items_kernel,
            (triton.cdiv(n_lists, LISTS),),
            {**numbers, "MAX_ITEM_BLOCKS": max_item_blocks, "LISTS": LISTS},
        ),
    )


def build(
    indptr: torch.Tensor, indices: torch.Tensor, documents: torch.Tensor | None, grid: PlanGrid, padding: int
) -> SelectedPlan:
    """The plan of a selection on the device of its tensors.

    indptr, indices, documents  see block_selection.Selection
    padding  entries and work items past the end
    """
    launches, sizes = plan_launches(grid), grid.sizes
    capacity, n_lists = sizes.capacity, sizes.n_lists
    ranges = indptr.new_empty(max(1, grid.document_batches), sizes.n_tokens, 2)
    # entries that the selection does not use come last
    lists, key_blocks = indptr.new_full((capacity,), n_lists), indptr.new_full((capacity,), -1)
    blocks, entries = indptr.new_empty(capacity), indptr.new_empty(capacity + padding, 2)
    bounds, counts = indptr.new_empty(n_lists + 1), indptr.new_empty(n_lists)
    work_item_offsets = indptr.new_zeros(n_lists + 1)
    work_items = indptr.new_empty(sizes.max_total_work_items + padding, 4)
    launches.make_ranges(documents, ranges)
    launches.mark_entries(indptr, indices, ranges, lists, key_blocks, blocks)
    lists, order = lists.sort(stable=True)
    launches.list_entries(order, blocks, entries)
    launches.count_items(lists, bounds, counts)
    torch.cumsum(counts, 0, out=work_item_offsets[1:])
    launches.write_items(work_item_offsets, bounds, work_items)
    indptr = indptr if grid.subblocks == 1 else indptr * grid.subblocks
    indptr = indptr.view(sizes.n_batch_heads, -1)
    shape = 0, sizes.query_rows, sizes.rows_per_token, sizes.keys, sizes.query_blocks_per_round
    return SelectedPlan(indptr, key_blocks, entries, work_item_offsets, work_items, ranges, indptr.new_empty(shape))
