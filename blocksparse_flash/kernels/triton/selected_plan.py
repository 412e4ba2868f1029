"""The kernels that make a SelectedPlan: plan/selected_builder.py has PyTorch operations that define what they compute.

ranges   of each token -> marks of each entry -> (one stable sort by list) -> entries
bounds of each list in the sorted entries, and its number of work items -> (cumulative sum) -> items
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...plan_format import ITEM_ROWS, SelectedPlan, axes_of_round
from ...runtime.launch import Launch
from .tile import PARTIAL as PARTIAL_MARK

# values per program
BLOCK, LISTS = 1024, 128
# entries per program of mark_entries_kernel
MARKED = 2048


class Lines(NamedTuple):
    """The lines and lists of a plan: see SelectedPlan.

    axes, heads      batch * heads, and heads
    n_rows, n_cols   query blocks and key blocks of a head
    query_rows, rows_per_token, keys  of a query block, of a token, of a key block
    parts            key blocks per selected block
    n_tokens, kv_len  tokens and keys of a head
    of_line          entries that a line may have
    round_lines      lines of a round
    causal           see selected_builder.build
    document_batches  batches of document ranges; 0: none
    """

    axes: int
    heads: int
    n_rows: int
    n_cols: int
    query_rows: int
    rows_per_token: int
    keys: int
    parts: int
    n_tokens: int
    kv_len: int
    of_line: int
    round_lines: int
    causal: bool
    document_batches: int

    @property
    def n_lines(self) -> int:
        """Query blocks of all heads."""
        return self.axes * self.n_rows

    @property
    def capacity(self) -> int:
        """Entries that all lines may have."""
        return self.n_lines * self.of_line

    @property
    def round_axes(self) -> int:
        """Number of heads that may have lines in a round."""
        return axes_of_round(self.axes, self.n_rows, self.round_lines)

    @property
    def n_lists(self) -> int:
        """Lists of all rounds."""
        return -(-self.n_lines // self.round_lines) * self.round_axes * self.n_cols

    @property
    def list_blocks(self) -> int:
        """Query blocks of a work item, at most."""
        return ITEM_ROWS // self.query_rows

    @property
    def n_items(self) -> int:
        """Work items that the plan may have."""
        return min(self.n_lists, self.capacity) + self.capacity // self.list_blocks


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
        "n_lines", "heads", "n_rows", "n_cols", "n_tokens", "range_batches", "round_lines", "round_axes", "n_lists",
    ]
)
def mark_entries_kernel(
    indptr_ptr, indices_ptr, ranges_ptr,
    # outputs of each entry: its list, n_lists if it is not used; key block, -1; query block, less PARTIAL if partial
    lists_ptr, cols_ptr, blocks_ptr,
    n_lines, heads, n_rows, n_cols, n_tokens, range_batches, round_lines, round_axes, n_lists,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, ENTRIES: tl.constexpr,
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    m_line = line < n_lines
    axis, row = line // n_rows, line % n_rows
    begin = tl.load(indptr_ptr + line + axis, mask=m_line, other=0)
    end = tl.load(indptr_ptr + line + axis + 1, mask=m_line, other=0)
    first_token = row * TOKENS
    last_token = tl.minimum(first_token + (TOKENS - 1), n_tokens - 1)
    p_range = ranges_ptr + axis // heads * range_batches * 2
    first_begin = tl.load(p_range + first_token * 2, mask=m_line, other=0)[:, None]
    first_stop = tl.load(p_range + first_token * 2 + 1, mask=m_line, other=0)[:, None]
    last_begin = tl.load(p_range + last_token * 2, mask=m_line, other=0)[:, None]
    last_stop = tl.load(p_range + last_token * 2 + 1, mask=m_line, other=0)[:, None]
    i_round = line // round_lines
    first_list = (i_round * round_axes + (axis - i_round * round_lines // n_rows)) * n_cols
    # [LINES, ENTRIES]
    o_entry = begin[:, None] + tl.arange(0, ENTRIES)[None, :]
    m_entry = o_entry < end[:, None]
    b_index = tl.load(indices_ptr + o_entry, mask=m_entry, other=0)
    for part in tl.static_range(PARTS):
        b_col = b_index * PARTS + part
        b_start = b_col * KEYS
        is_used = (b_col < n_cols) & (last_stop > b_start) & (first_begin < b_start + KEYS)
        # false if no token of the line has keys
        is_used = is_used & (last_stop > first_begin)
        is_full = (last_begin <= b_start) & (first_stop >= b_start + KEYS)
        o_out = o_entry * PARTS + part
        tl.store(lists_ptr + o_out, tl.where(is_used, first_list[:, None] + b_col, n_lists), mask=m_entry)
        tl.store(cols_ptr + o_out, tl.where(is_used, b_col, -1), mask=m_entry)
        tl.store(blocks_ptr + o_out, row[:, None] - tl.where(is_full, 0, PARTIAL_MARK), mask=m_entry)


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
    lists_ptr, bounds_ptr, counts_ptr, capacity, n_lists, MOST: tl.constexpr, STEPS: tl.constexpr, LISTS: tl.constexpr
):
    """First entry of each list, and of the end; number of work items of each list."""
    i_list = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    begin = lower_bound(lists_ptr, i_list, capacity, STEPS)
    end = lower_bound(lists_ptr, i_list + 1, capacity, STEPS)
    tl.store(bounds_ptr + i_list, begin, mask=i_list <= n_lists)
    tl.store(counts_ptr + i_list, (end - begin + (MOST - 1)) // MOST, mask=i_list < n_lists)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "round_lines", "round_axes", "n_lists"])
def write_items_kernel(
    list_items_ptr, bounds_ptr, items_ptr, n_rows, n_cols, round_lines, round_axes, n_lists,
    MOST: tl.constexpr, LISTS: tl.constexpr,
):
    """The work items of LISTS lists."""
    i_list = tl.program_id(0) * LISTS + tl.arange(0, LISTS)
    m_list = i_list < n_lists
    first = tl.load(list_items_ptr + i_list, mask=m_list, other=0)
    n_items = tl.load(list_items_ptr + i_list + 1, mask=m_list, other=0) - first
    begin = tl.load(bounds_ptr + i_list, mask=m_list, other=0)
    end = tl.load(bounds_ptr + i_list + 1, mask=m_list, other=0)
    of_round = round_axes * n_cols
    i_round, i_within = i_list // of_round, i_list % of_round
    b_head, b_col = i_round * round_lines // n_rows + i_within // n_cols, i_within % n_cols
    for i in tl.range(0, tl.max(n_items, 0)):
        m_item = m_list & (i < n_items)
        p_item = items_ptr + (first + i) * 4
        b_begin = begin + i * MOST
        tl.store(p_item, b_head, mask=m_item)
        tl.store(p_item + 1, b_col, mask=m_item)
        tl.store(p_item + 2, b_begin, mask=m_item)
        tl.store(p_item + 3, tl.minimum(b_begin + MOST, end), mask=m_item)
# fmt: on


class PlanLaunches(NamedTuple):
    """The launches, in order; a sort follows `mark_entries`, and a cumulative sum `count_items`."""

    make_ranges: Launch
    mark_entries: Launch
    list_entries: Launch
    count_items: Launch
    write_items: Launch


@functools.lru_cache(maxsize=1024)
def plan_launches(lines: Lines) -> PlanLaunches:
    """The launches for all plans of these sizes."""
    n_lists, capacity = lines.n_lists, lines.capacity
    batches = max(1, lines.document_batches)
    range_batches = lines.n_tokens if batches > 1 else 0
    entries = triton.next_power_of_2(lines.of_line // lines.parts)
    per_program = max(1, MARKED // entries)
    sizes = {"n_rows": lines.n_rows, "n_cols": lines.n_cols, "round_lines": lines.round_lines}
    sizes |= {"round_axes": lines.round_axes, "n_lists": n_lists}
    most, steps = lines.list_blocks, max(1, (capacity - 1).bit_length())
    return PlanLaunches(
        make_ranges=Launch(
            ranges_kernel,
            (triton.cdiv(lines.n_tokens, BLOCK), batches),
            {"n_tokens": lines.n_tokens, "kv_len": lines.kv_len, "CAUSAL": lines.causal, "BLOCK": BLOCK},
        ),
        mark_entries=Launch(
            mark_entries_kernel,
            (triton.cdiv(lines.n_lines, per_program),),
            {
                "n_lines": lines.n_lines,
                "heads": lines.heads,
                "n_tokens": lines.n_tokens,
                "range_batches": range_batches,
                **sizes,
                "TOKENS": lines.query_rows // lines.rows_per_token,
                "KEYS": lines.keys,
                "PARTS": lines.parts,
                "LINES": per_program,
                "ENTRIES": entries,
            },
        ),
        list_entries=Launch(
            list_entries_kernel, (triton.cdiv(capacity, BLOCK),), {"capacity": capacity, "BLOCK": BLOCK}
        ),
        count_items=Launch(
            count_items_kernel,
            (triton.cdiv(n_lists + 1, LISTS),),
            {"capacity": capacity, "n_lists": n_lists, "MOST": most, "STEPS": steps, "LISTS": LISTS},
        ),
        write_items=Launch(write_items_kernel, (triton.cdiv(n_lists, LISTS),), {**sizes, "MOST": most, "LISTS": LISTS}),
    )


def build(
    indptr: torch.Tensor, indices: torch.Tensor, documents: torch.Tensor | None, lines: Lines, padding: int
) -> SelectedPlan:
    """The plan of a selection on the device of its tensors.

    indptr, indices, documents  see block_selection.Selection
    padding  entries and items past the end
    """
    launches, capacity, n_lists = plan_launches(lines), lines.capacity, lines.n_lists
    ranges = indptr.new_empty(max(1, lines.document_batches), lines.n_tokens, 2)
    # entries that the selection does not use come last
    lists, cols = indptr.new_full((capacity,), n_lists), indptr.new_full((capacity,), -1)
    blocks, entries = indptr.new_empty(capacity), indptr.new_empty(capacity + padding, 2)
    bounds, counts = indptr.new_empty(n_lists + 1), indptr.new_empty(n_lists)
    list_items, items = indptr.new_zeros(n_lists + 1), indptr.new_empty(lines.n_items + padding, 4)
    launches.make_ranges(documents, ranges)
    launches.mark_entries(indptr, indices, ranges, lists, cols, blocks)
    lists, order = lists.sort(stable=True)
    launches.list_entries(order, blocks, entries)
    launches.count_items(lists, bounds, counts)
    torch.cumsum(counts, 0, out=list_items[1:])
    launches.write_items(list_items, bounds, items)
    sizes = indptr.new_empty(0, lines.query_rows, lines.rows_per_token, lines.keys, lines.round_lines)
    offsets = indptr if lines.parts == 1 else indptr * lines.parts
    return SelectedPlan(offsets.view(lines.axes, -1), cols, entries, list_items, items, ranges, sizes)
