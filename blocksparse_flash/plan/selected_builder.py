"""Builds a SelectedPlan on the device: the blocks that small query blocks select, sorted by key block.

For a query block of a few rows, tiles waste most of their pairs: a tile of 64 rows has several query blocks, which
select different key blocks. Sorted by key block, only selected pairs are computed (see hopper/selected_forward.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks.block_list import Size
from ..plan_format import ITEM_ROWS, PARTIAL, TILE, SelectedPlan, axes_of_round, mark_dynamic
from ..runtime import tracing
from .block_selection import Selection, is_on_gpu

# rows of query blocks and keys of key blocks that the kernels take
QUERY_ROWS, SMALLEST_KEY_BLOCK = (8, 16, 32), 64
# rows of partial results in a round: at head_dim 128 they take 1 GB
ROUND_ROWS = 1 << 22
# a SelectedPlan is for selections of at most a quarter of the keys, with this many rows of partial results; fewer are
# faster in tiles (hopper/TUNING.md)
MIN_KEYS_RATIO, MIN_PARTIAL_ROWS = 4, 1 << 22
# offsets into the list of entries are 32-bit
MAX_ENTRIES = 1 << 30
# kernels read entries and items past the end of a list
PADDING = 32


def suits(block_size: Size, n_rows: int, k: int) -> bool:
    """Whether blocks can have a SelectedPlan. n_rows: query blocks per head; k: key blocks that each may select."""
    query_rows, keys = block_size
    has_sides = query_rows in QUERY_ROWS and (keys == SMALLEST_KEY_BLOCK or keys % TILE == 0)
    return has_sides and k > 0 and n_rows < PARTIAL


def pays(block_size: Size, n_lines: int, kv_len: int, k: int) -> bool:
    """Whether a SelectedPlan is faster than tiles. n_lines: query blocks of all heads; k: as in `suits`."""
    query_rows, keys = block_size
    capacity = n_lines * k * max(1, keys // TILE)
    has_room = capacity < MAX_ENTRIES
    return has_room and kv_len >= MIN_KEYS_RATIO * k * keys and capacity * query_rows >= MIN_PARTIAL_ROWS


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
    """The plan of a selection that `suits`, without waiting for its device.

    causal  also drops the pairs with kv_pos > q_pos + (kv_len - q_len), of tokens
    """
    make = _build_by_kernels if is_on_gpu(selection.indptr) else build_by_operations
    plan = make(selection, q_len=q_len, kv_len=kv_len, block_size=block_size, causal=causal)
    mark_dynamic(plan[1:5])
    return plan


def _build_by_kernels(selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool) -> SelectedPlan:
    from ..kernels.triton import selected_plan

    (batch, heads, n_ends), documents = selection.indptr.shape, selection.documents
    (query_rows, keys), n_rows, rows_per_token = block_size, n_ends - 1, selection.rows_per_token
    parts = max(1, keys // TILE)
    of_line = len(selection.indices) // (batch * heads * n_rows) * parts
    lines = selected_plan.Lines(
        axes=batch * heads,
        heads=heads,
        n_rows=n_rows,
        n_cols=-(-kv_len // (keys // parts)),
        query_rows=query_rows,
        rows_per_token=rows_per_token,
        keys=keys // parts,
        parts=parts,
        n_tokens=q_len // rows_per_token,
        kv_len=kv_len,
        of_line=of_line,
        round_lines=lines_of_round(batch * heads * n_rows, of_line, query_rows),
        causal=causal,
        document_batches=0 if documents is None else len(documents),
    )
    if documents is not None:
        documents = documents.contiguous()
    with tracing.on_device(selection.indptr.device):
        return selected_plan.build(selection.indptr, selection.indices, documents, lines, PADDING)


def lines_of_round(n_lines: int, of_line: int, query_rows: int) -> int:
    """Query blocks in a round. of_line: key blocks that each may select."""
    return min(n_lines, max(1, ROUND_ROWS // (of_line * query_rows)))


def build_by_operations(
    selection: Selection, *, q_len: int, kv_len: int, block_size: Size, causal: bool
) -> SelectedPlan:
    """`build` by PyTorch operations, which define what the kernels compute."""
    indptr, indices, rows_per_token = selection.indptr, selection.indices, selection.rows_per_token
    device, (batch, heads, n_ends) = indptr.device, indptr.shape
    (query_rows, keys), n_rows, axes = block_size, n_ends - 1, batch * heads
    parts = max(1, keys // TILE)
    keys //= parts
    n_lines, n_cols, n_tokens = axes * n_rows, -(-kv_len // keys), q_len // rows_per_token
    capacity = len(indices) * parts
    of_line = capacity // n_lines
    round_lines = lines_of_round(n_lines, of_line, query_rows)
    n_rounds = -(-n_lines // round_lines)
    round_axes = axes_of_round(axes, n_rows, round_lines)

    # the line of each entry, n_lines if it is unused
    ends = indptr[..., 1:].flatten().contiguous()
    line = torch.searchsorted(ends, torch.arange(len(indices), dtype=torch.int32, device=device), right=True)
    line, col = line.to(torch.int32), indices
    if parts > 1:
        part = torch.arange(parts, dtype=torch.int32, device=device)
        line, col = line.repeat_interleave(parts), (col[:, None] * parts + part).flatten()
    axis, row = line // n_rows, line % n_rows

    # which pairs attend: ranges never decrease from token to token
    ranges = token_ranges(selection, n_tokens, kv_len, causal=causal)
    tokens = query_rows // rows_per_token
    first_token = row * tokens
    last_token = (first_token + (tokens - 1)).clamp_(max=n_tokens - 1)
    if len(ranges) > 1:
        of_batch = (axis // heads).clamp_(max=batch - 1) * n_tokens
        first_token, last_token = first_token + of_batch, last_token + of_batch
    (first_begin, first_stop), (last_begin, last_stop) = (
        ranges.flatten(0, 1).index_select(0, token).unbind(1) for token in (first_token, last_token)
    )
    begin = col * keys
    stop = begin + keys
    # false if no token of the line has keys
    has_keys = last_stop > first_begin
    is_used = (line < n_lines) & (col < n_cols) & (last_stop > begin) & (first_begin < stop) & has_keys
    is_full = (last_begin <= begin) & (first_stop >= stop)

    # one stable sort lists the entries
    i_round = line // round_lines
    first_axis = i_round * round_lines // n_rows
    of_round = round_axes * n_cols
    n_lists = n_rounds * of_round
    i_list = (i_round * round_axes + (axis - first_axis)) * n_cols + col
    i_list, order = i_list.masked_fill_(~is_used, n_lists).sort(stable=True)
    bounds = torch.searchsorted(i_list, torch.arange(n_lists + 1, dtype=torch.int32, device=device), out_int32=True)
    entries = torch.zeros(capacity + PADDING, 2, dtype=torch.int32, device=device)
    entries[:capacity, 0] = order
    entries[:capacity, 1] = (row - PARTIAL * (~is_full).to(torch.int32)).index_select(0, order)

    # lists are cut into items of a bounded length
    most = ITEM_ROWS // query_rows
    list_items = torch.zeros(n_lists + 1, dtype=torch.int32, device=device)
    torch.cumsum((bounds[1:] - bounds[:-1] + (most - 1)) // most, 0, out=list_items[1:])
    i_item = torch.arange(min(n_lists, capacity) + capacity // most + PADDING, dtype=torch.int32, device=device)
    i_list = torch.searchsorted(list_items[1:], i_item, right=True, out_int32=True).clamp_(max=n_lists - 1)
    begin = bounds[i_list] + (i_item - list_items[i_list]) * most
    end = torch.minimum(begin + most, bounds[i_list + 1])
    i_round, within = i_list // of_round, i_list % of_round
    head = i_round * round_lines // n_rows + within // n_cols
    items = torch.stack([head, within % n_cols, begin, end], 1)

    # only the shape of `sizes` is read
    sizes = indptr.new_empty(0, query_rows, rows_per_token, keys, round_lines)
    cols = col.masked_fill(~is_used, -1)
    return SelectedPlan((indptr * parts).view(axes, n_ends), cols, entries, list_items, items, ranges, sizes)
