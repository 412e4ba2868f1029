"""Builds a SelectedPlan on the device: the blocks that small query blocks select, sorted by key block.

For a query block of a few rows, tiles waste most of their pairs: a tile of 64 rows has several query blocks, which
select different key blocks. Sorted by key block, only selected pairs are computed (see hopper/selected_forward.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks.block_list import Size
from ..plan_format import PARTIAL, TILE, SelectedPlan, SelectedSizes, mark_dynamic
from ..runtime import tracing
from .block_selection import Selection, is_on_gpu

# rows of query blocks and keys of key blocks that the kernels take
QUERY_ROWS, MIN_KEY_BLOCK = (8, 16, 32), 64
# rows of partial results in a round: at head_dim 128 they take 1 GB
ROUND_ROWS = 1 << 22
# a SelectedPlan is for selections of at most a quarter of the keys, with this many rows of partial results; fewer are
# faster in tiles (hopper/TUNING.md)
MIN_KEYS_RATIO, MIN_PARTIAL_ROWS = 4, 1 << 22
# offsets into the list of entries are 32-bit
MAX_ENTRIES = 1 << 30
# entries and work items that kernels may read past the end: they prefetch the next step
PADDING = 32


def can_build(block_size: Size, n_query_blocks: int, n_selected: int) -> bool:
    """Whether blocks can have a SelectedPlan.

    n_query_blocks  query blocks per head
    n_selected      blocks that each may select
    """
    query_rows, keys = block_size
    has_sides = query_rows in QUERY_ROWS and (keys == MIN_KEY_BLOCK or keys % TILE == 0)
    return has_sides and n_selected > 0 and n_query_blocks < PARTIAL


def is_faster(block_size: Size, total_query_blocks: int, kv_len: int, n_selected: int) -> bool:
    """Whether a SelectedPlan is faster than tiles.

    total_query_blocks  query blocks of all heads
    n_selected          blocks that each may select
    """
    query_rows, keys = block_size
    capacity = total_query_blocks * n_selected * max(1, keys // TILE)
    has_room = capacity < MAX_ENTRIES
    return has_room and kv_len >= MIN_KEYS_RATIO * n_selected * keys and capacity * query_rows >= MIN_PARTIAL_ROWS


def token_ranges(selection: Selection, n_tokens: int, kv_len: int, *, causal: bool) -> Tensor:
    """int32 (batch | 1, n_tokens, 2): the keys that each token may attend to, first and one past the last."""
    device, documents = selection.indptr.device, selection.documents
    stop = torch.full((1, n_tokens), kv_len, dtype=torch.int32, device=device)
    if causal:
        stop = torch.arange(kv_len - n_tokens + 1, kv_len + 1, dtype=torch.int32, device=device).clamp_(min=0)[None]
    if documents is None:
        return torch.stack([torch.zeros_like(stop), stop], 2)
    return torch.stack([documents[:, 1], torch.minimum(documents[:, 2], stop)], 2)


def build(selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool) -> SelectedPlan:
    """The plan of a selection that `can_build` allows, without waiting for its device.

    q_len   rows: rows_per_token for each token
    causal  also drops the pairs with kv_pos > token + (kv_len - tokens), where tokens = q_len // rows_per_token
    """
    make = _build_by_kernels if is_on_gpu(selection.indptr) else build_by_operations
    plan = make(selection, q_len=q_len, kv_len=kv_len, block_size=block_size, causal=causal)
    mark_dynamic((plan.key_blocks, plan.entries, plan.work_item_offsets, plan.work_items))
    return plan


def sizes_of(selection: Selection, *, q_len: int, kv_len: int, block_size: Size) -> SelectedSizes:
    """The sizes of the plan of a selection."""
    batch, heads, n_ends = selection.indptr.shape
    query_rows, keys = block_size
    subblocks = subblocks_of(block_size)
    total_query_blocks = batch * heads * (n_ends - 1)
    max_key_blocks = len(selection.indices) // total_query_blocks * subblocks
    return SelectedSizes(
        n_batch_heads=batch * heads,
        n_query_blocks=n_ends - 1,
        n_key_blocks=-(-kv_len // (keys // subblocks)),
        query_rows=query_rows,
        rows_per_token=selection.rows_per_token,
        keys=keys // subblocks,
        query_blocks_per_round=min(total_query_blocks, max(1, ROUND_ROWS // (max_key_blocks * query_rows))),
        max_key_blocks=max_key_blocks,
        n_tokens=q_len // selection.rows_per_token,
        has_batches=selection.documents is not None and len(selection.documents) > 1,
    )


def subblocks_of(block_size: Size) -> int:
    """Key blocks of the plan per selected block."""
    return max(1, block_size[1] // TILE)


def _build_by_kernels(selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool) -> SelectedPlan:
    from ..kernels.triton import selected_plan

    documents = None if selection.documents is None else selection.documents.contiguous()
    grid = selected_plan.PlanGrid(
        sizes=sizes_of(selection, q_len=q_len, kv_len=kv_len, block_size=block_size),
        heads=selection.indptr.shape[1],
        subblocks=subblocks_of(block_size),
        kv_len=kv_len,
        causal=causal,
        document_batches=0 if documents is None else len(documents),
    )
    with tracing.on_device(selection.indptr.device):
        return selected_plan.build(selection.indptr, selection.indices, documents, grid, PADDING)


def build_by_operations(
    selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool
) -> SelectedPlan:
    """`build` by PyTorch operations, which define what the kernels compute."""
    indptr, indices = selection.indptr, selection.indices
    device, (batch, heads, n_ends) = indptr.device, indptr.shape
    sizes = sizes_of(selection, q_len=q_len, kv_len=kv_len, block_size=block_size)
    subblocks, keys, rows_per_token = subblocks_of(block_size), sizes.keys, sizes.rows_per_token
    n_query_blocks, n_key_blocks, n_tokens = sizes.n_query_blocks, sizes.n_key_blocks, sizes.n_tokens
    total_query_blocks, query_blocks_per_round = sizes.total_query_blocks, sizes.query_blocks_per_round
    n_lists, capacity, max_item_blocks = sizes.n_lists, sizes.capacity, sizes.max_item_blocks

    # the query block of each entry, total_query_blocks if it is unused
    ends = indptr[..., 1:].flatten().contiguous()
    query_block = torch.searchsorted(ends, torch.arange(len(indices), dtype=torch.int32, device=device), right=True)
    query_block, key_block = query_block.to(torch.int32), indices
    if subblocks > 1:
        i_sub = torch.arange(subblocks, dtype=torch.int32, device=device)
        query_block = query_block.repeat_interleave(subblocks)
        key_block = (key_block[:, None] * subblocks + i_sub).flatten()
    batch_head, block = query_block // n_query_blocks, query_block % n_query_blocks

    # Ranges never decrease, so the keys of the block's tokens lie in [start of the first, stop of the last), and every
    # token attends to [start of the last, stop of the first). Conservative: with several documents in a query block, an
    # entry may be listed although no pair attends
    ranges = token_ranges(selection, n_tokens, kv_len, causal=causal)
    tokens = sizes.query_rows // rows_per_token
    first_token = block * tokens
    last_token = (first_token + (tokens - 1)).clamp_(max=n_tokens - 1)
    if len(ranges) > 1:
        of_batch = (batch_head // heads).clamp_(max=batch - 1) * n_tokens
        first_token, last_token = first_token + of_batch, last_token + of_batch
    (first_token_start, first_token_stop), (last_token_start, last_token_stop) = (
        ranges.flatten(0, 1).index_select(0, token).unbind(1) for token in (first_token, last_token)
    )
    key_start = key_block * keys
    key_stop = key_start + keys
    # an empty range: no token of the query block has keys
    has_keys = last_token_stop > first_token_start
    is_used = (query_block < total_query_blocks) & (key_block < n_key_blocks)
    is_used = is_used & (last_token_stop > key_start) & (first_token_start < key_stop) & has_keys
    is_full = (last_token_start <= key_start) & (first_token_stop >= key_stop)

    # one stable sort lists the entries
    i_round = query_block // query_blocks_per_round
    first_batch_head = i_round * query_blocks_per_round // n_query_blocks
    list_of_entry = (i_round * sizes.heads_per_round + (batch_head - first_batch_head)) * n_key_blocks + key_block
    list_of_entry, order = list_of_entry.masked_fill_(~is_used, n_lists).sort(stable=True)
    i_list = torch.arange(n_lists + 1, dtype=torch.int32, device=device)
    bounds = torch.searchsorted(list_of_entry, i_list, out_int32=True)
    entries = torch.zeros(capacity + PADDING, 2, dtype=torch.int32, device=device)
    entries[:capacity, 0] = order
    entries[:capacity, 1] = (block - PARTIAL * (~is_full).to(torch.int32)).index_select(0, order)

    # lists are cut into work items of a bounded length
    work_item_offsets = torch.zeros(n_lists + 1, dtype=torch.int32, device=device)
    torch.cumsum((bounds[1:] - bounds[:-1] + (max_item_blocks - 1)) // max_item_blocks, 0, out=work_item_offsets[1:])
    i_item = torch.arange(sizes.max_total_work_items + PADDING, dtype=torch.int32, device=device)
    list_of_item = torch.searchsorted(work_item_offsets[1:], i_item, right=True, out_int32=True)
    list_of_item.clamp_(max=n_lists - 1)
    begin = bounds[list_of_item] + (i_item - work_item_offsets[list_of_item]) * max_item_blocks
    end = torch.minimum(begin + max_item_blocks, bounds[list_of_item + 1])
    round_of_item, within = list_of_item // sizes.lists_per_round, list_of_item % sizes.lists_per_round
    batch_head = round_of_item * query_blocks_per_round // n_query_blocks + within // n_key_blocks
    work_items = torch.stack([batch_head, within % n_key_blocks, begin, end], 1)

    # of `sizes` only the shape is read
    shape = 0, sizes.query_rows, rows_per_token, keys, query_blocks_per_round
    key_blocks = key_block.masked_fill(~is_used, -1)
    indptr = (indptr * subblocks).view(sizes.n_batch_heads, n_ends)
    return SelectedPlan(indptr, key_blocks, entries, work_item_offsets, work_items, ranges, indptr.new_empty(shape))
