"""Split-KV forward over a paged KV cache (decoding); sm80 and later.

Like split_kv.py, but key j of a sequence is row j % PAGE of the page that entry j // PAGE of its list names. The
list is the page table, or the pages that were selected: look_up_kernel finds those in the table, and the kernel then
takes the number of each page in its sequence from a second list. Entries are loaded a step ahead of the keys.

No key beyond the length of a sequence, or before the windows of all its queries, is read, nor is its entry in the page
table. The grid depends only on shapes and the GPU. Programs find their work on the GPU from the lengths of all
sequences: a longer one has more splits, so that many programs share one long sequence among short ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, num_sms
from ...runtime.tensor_spec import TensorSpecs, specs_of
from ...score_mods import Scores
from ..arguments import (
    Options,
    Strides,
    columns_of_values,
    constants,
    options_of,
    scale_log2,
    score_specs_of,
    sign,
    softcap_arguments,
)
from ..inputs import Pages
from . import split_kv
from .score_mods import capped_scores
from .split_kv import combine_row, load_packed_queries, store_rows
from .tile import add_product, head_base, product, softmax_step, split_range, with_sign, with_sink

# entries per program of look_up_kernel
ENTRIES = 64


# fmt: off
@triton.jit(do_not_specialize=["n_lists", "max_pages", "n_entries", "n_chunks"])
def look_up_kernel(
    # inputs: integers (batch, n_lists, n_entries), int32 (batch, max_pages)
    selected_ptr, table_ptr,
    # outputs: int32 (batch, n_lists, n_entries), contiguous
    ids_ptr, numbers_ptr,
    # strides in elements: (batch, list, entry), and of the table (batch,)
    strides, table_stride, n_lists, max_pages, n_entries, n_chunks,
    ENTRIES: tl.constexpr,
):
    """ids[i] = table[selected[i]] and numbers[i] = selected[i].

    Repeated entries and those out of range get the number max_pages, which lies beyond the length of every sequence.
    """
    i_list = (tl.program_id(0) // n_chunks).to(tl.int64)
    i_batch = i_list // n_lists
    first = tl.program_id(0) % n_chunks * ENTRIES
    p_selected = head_base(selected_ptr, strides, i_batch, i_list % n_lists)
    o_entry = first + tl.arange(0, ENTRIES)
    b_number = tl.load(p_selected + o_entry.to(tl.int64) * strides[2], mask=o_entry < n_entries, other=-1)
    m_used = (b_number >= 0) & (b_number < max_pages)
    for begin in tl.range(0, first + 1, ENTRIES):
        o_before = begin + tl.arange(0, ENTRIES)
        b_before = tl.load(p_selected + o_before.to(tl.int64) * strides[2], mask=o_before < n_entries, other=-1)
        m_same = (b_before[None, :] == b_number[:, None]) & (o_before[None, :] < o_entry[:, None])
        m_used = m_used & (tl.max(m_same.to(tl.int32), 1) == 0)
    b_id = tl.load(table_ptr + i_batch * table_stride + b_number, mask=m_used, other=0)
    tl.store(ids_ptr + i_list * n_entries + o_entry, b_id, mask=o_entry < n_entries)
    b_number = tl.where(m_used, b_number, max_pages).to(tl.int32)
    tl.store(numbers_ptr + i_list * n_entries + o_entry, b_number, mask=o_entry < n_entries)


@triton.jit
def load_entries(list_ptr, o_key, last, PAGE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Entries of a list of pages for BLOCK_KV keys from o_key on: one for each key, or a scalar if all are in one page.

    Entries beyond `last` are not read; that one stands for them.
    """
    if PAGE < BLOCK_KV:
        o_key = o_key + tl.arange(0, BLOCK_KV)
    return tl.load(list_ptr + tl.minimum(o_key // PAGE, last))


@triton.jit
def load_keys(
    ptr, strides, b_id, i_head, o_in_page, m_kv, IN_ONE_PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """[BLOCK_KV, DIM]: rows o_in_page of pages b_id; zero where m_kv is False and from column HEAD_DIM on.

    Offsets within a page are 32-bit: 64-bit ones, kept over the loop, would need the registers that a third program per
    SM has now.
    """
    o_dim = tl.arange(0, DIM)
    p_page = head_base(ptr, strides, b_id, i_head)
    if IN_ONE_PAGE:
        p_rows = p_page + (o_in_page[:, None] * strides[2] + o_dim[None, :])
    else:
        p_rows = p_page[:, None] + (o_in_page[:, None] * strides[2] + o_dim[None, :])
    m_rows = m_kv[:, None]
    if HEAD_DIM != DIM:
        m_rows = m_rows & (o_dim < HEAD_DIM)[None, :]
    return tl.load(p_rows, mask=m_rows, other=0.0)


@triton.jit
def steps_of(length, q_len, kv_len, n_listed, window, BLOCK_KV: tl.constexpr):
    """(keys, first key that a query sees, first step, end) of sequences; n_listed: keys of a selection, or None."""
    # lengths on the GPU are not validated on the host
    limit = tl.minimum(tl.maximum(length, 0), kv_len).to(tl.int32)
    begin = limit * 0
    if window is not None:
        begin = tl.maximum(limit - q_len - window + 1, 0)
    if n_listed is not None:
        first = limit * 0
        end = tl.where(limit > 0, tl.cdiv(n_listed, BLOCK_KV), 0)
    else:
        first = begin // BLOCK_KV
        end = tl.cdiv(limit, BLOCK_KV)
    return limit, begin, first, end


@triton.jit
def splits_of(
    kv_lengths_ptr, n_batch, q_len, kv_len, n_listed, window, n_shared,
    BATCH: tl.constexpr, BLOCK_KV: tl.constexpr, MIN_STEPS: tl.constexpr,
):
    """(sequences, splits of each), [BATCH]: n_shared splits divided in proportion to steps, and at least one each."""
    o_batch = tl.arange(0, BATCH)
    m_batch = o_batch < n_batch
    b_length = tl.load(kv_lengths_ptr + o_batch, mask=m_batch, other=0)
    _, _, first, end = steps_of(b_length, q_len, kv_len, n_listed, window, BLOCK_KV)
    b_steps = (end - first).to(tl.int64)
    b_splits = b_steps * n_shared // tl.maximum(tl.sum(b_steps, 0), 1)
    b_splits = tl.maximum(tl.minimum(b_splits, tl.cdiv(b_steps, MIN_STEPS)), 1)
    return o_batch, tl.where(m_batch, b_splits, 0).to(tl.int32)


@triton.jit(do_not_specialize=[
    "n_batch", "n_heads", "n_blocks", "n_shared", "q_len", "n_pages", "n_entries", "kv_len", "window"
])
def paged_kernel(
    # inputs: ids of the pages of each list; their numbers in the sequence, None: in order; sinks only if not split
    q_ptr, k_ptr, v_ptr, ids_ptr, numbers_ptr, kv_lengths_ptr, sinks_ptr,
    # outputs as in split_kv_kernel; with IS_SPLIT (splits of all sequences, heads * q_len, V_DIM or 2)
    out_ptr, lse_ptr,
    # arguments.Strides; k and v: (page, head, row), records: (batch, list) of the lists of pages
    strides,
    # sizes: n_blocks programs share the rows of a split, n_shared as in splits_of, kv_len: most keys of a sequence
    n_batch, n_heads, n_blocks, n_shared, q_len, n_pages, n_entries, kv_len, scale_log2, cap, window,
    # compile time: PACKED query heads share their keys, SHARED query heads a list; PAGE keys per page
    PACKED: tl.constexpr, SHARED: tl.constexpr, IS_SPLIT: tl.constexpr, PAGE: tl.constexpr, BATCH: tl.constexpr,
    MIN_STEPS: tl.constexpr, C: tl.constexpr,
):
    DIM: tl.constexpr = C.DIM
    DIM_V: tl.constexpr = C.DIM_V
    BLOCK_Q: tl.constexpr = C.BLOCK_Q
    BLOCK_KV: tl.constexpr = C.BLOCK_KV
    PRECISION: tl.constexpr = C.PRECISION
    SELECTS: tl.constexpr = numbers_ptr is not None
    # consecutive programs share keys, or read other heads of the same keys
    i_block = tl.program_id(0) % n_blocks
    n_packs = n_heads // PACKED
    i_head = tl.program_id(0) // n_blocks % n_packs * PACKED
    # counts the splits of all sequences
    i_slot = tl.program_id(0) // n_blocks // n_packs
    i_batch = i_slot
    i_split, num_splits = 0, 1
    n_listed = None
    if SELECTS:
        n_listed = n_entries * PAGE
    if IS_SPLIT:
        o_batch, b_splits = splits_of(
            kv_lengths_ptr, n_batch, q_len, kv_len, n_listed, window, n_shared, BATCH, BLOCK_KV, MIN_STEPS
        )
        i_batch = tl.sum((tl.cumsum(b_splits, 0) <= i_slot).to(tl.int32), 0)
        if i_batch >= n_batch:
            return
        i_split = i_slot - tl.sum(tl.where(o_batch < i_batch, b_splits, 0), 0)
        num_splits = tl.sum(tl.where(o_batch == i_batch, b_splits, 0), 0)
    length = tl.load(kv_lengths_ptr + i_batch)
    limit, begin, first, end = steps_of(length, q_len, kv_len, n_listed, window, BLOCK_KV)
    first, end = split_range(first, end, i_split, num_splits)
    ahead = limit - q_len

    o_row, o_q, b_q = load_packed_queries(q_ptr, strides.q, i_batch, i_head, i_block, q_len, PACKED, C)
    b_out = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    b_lost = tl.zeros([BLOCK_Q, DIM_V], tl.float32)
    # finite, since -inf - (-inf) = nan, and below every score
    b_max = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None:
        b_max, b_sum = with_sink(b_max, b_sum, sinks_ptr, i_head + tl.minimum(o_row // q_len, PACKED - 1))
    factor = scale_log2 if cap is None else 1.0

    # steps of BLOCK_KV keys
    last = n_entries - 1 if SELECTS else tl.maximum(limit - 1, 0) // PAGE
    p_ids = head_base(ids_ptr, strides.records, i_batch, i_head // SHARED)
    b_next_id = load_entries(p_ids, first * BLOCK_KV, last, PAGE, BLOCK_KV)
    if SELECTS:
        p_numbers = head_base(numbers_ptr, strides.records, i_batch, i_head // SHARED)
        b_next_number = load_entries(p_numbers, first * BLOCK_KV, last, PAGE, BLOCK_KV)
    for i_step in tl.range(first, end):
        start = i_step * BLOCK_KV
        o_in_page = tl.arange(0, BLOCK_KV) % PAGE + (start % PAGE if PAGE >= BLOCK_KV else 0)
        o_kv = start + tl.arange(0, BLOCK_KV)
        # an id out of range must not become an address
        b_id = tl.minimum(tl.maximum(b_next_id, 0), n_pages - 1)
        b_next_id = load_entries(p_ids, start + BLOCK_KV, last, PAGE, BLOCK_KV)
        if SELECTS:
            m_list = o_kv < n_entries * PAGE
            o_kv = b_next_number * PAGE + o_in_page
            if PAGE < BLOCK_KV:
                # the last step may be longer than the list
                o_kv = tl.where(m_list, o_kv, kv_len)
            b_next_number = load_entries(p_numbers, start + BLOCK_KV, last, PAGE, BLOCK_KV)
        m_kv = (o_kv < limit) & (o_kv >= begin)
        # [BLOCK_KV, DIM]
        b_k = load_keys(k_ptr, strides.k, b_id, i_head // C.GROUP, o_in_page, m_kv, PAGE >= BLOCK_KV, C.HEAD_DIM, DIM)
        # [BLOCK_Q, BLOCK_KV]
        b_scores = with_sign(product(b_q, tl.trans(b_k), PRECISION), C.SIGN)
        if cap is not None:
            b_scores, _ = capped_scores(b_scores, scale_log2, cap)
        m_pairs = m_kv[None, :]
        if C.CAUSAL:
            m_pairs = m_pairs & (o_kv[None, :] <= o_q[:, None] + ahead)
        if window is not None:
            m_pairs = m_pairs & (o_kv[None, :] > o_q[:, None] + (ahead - window))
        b_scores = tl.where(m_pairs, b_scores, float("-inf"))
        b_p, b_max, b_sum, b_out, b_lost = softmax_step(b_scores, factor, b_max, b_sum, b_out, b_lost)
        # [BLOCK_KV, DIM_V]
        b_v = load_keys(v_ptr, strides.v, b_id, i_head // C.GROUP, o_in_page, m_kv, PAGE >= BLOCK_KV, C.V_DIM, DIM_V)
        b_out, b_lost = add_product(b_p.to(b_v.dtype), b_v, b_out, b_lost, PRECISION)

    # heads of a program are adjacent, hence its rows too
    row = (i_slot.to(tl.int64) * n_heads + i_head) * q_len
    store_rows(
        out_ptr, lse_ptr, row, i_block * BLOCK_Q, PACKED * q_len, b_out, b_max, b_sum, IS_SPLIT, C.V_DIM, BLOCK_Q, DIM_V
    )


@triton.jit(do_not_specialize=["n_batch", "n_heads", "n_shared", "q_len", "n_entries", "kv_len", "window"])
def combine_paged_kernel(
    # inputs: as paged_kernel wrote them; numbers_ptr is only compared with None
    splits_ptr, max_sum_ptr, numbers_ptr, kv_lengths_ptr, sinks_ptr,
    # outputs, contiguous
    out_ptr, lse_ptr,
    # sizes as in paged_kernel
    n_batch, n_heads, n_shared, q_len, n_entries, kv_len, window,
    PAGE: tl.constexpr, BATCH: tl.constexpr, BLOCK_KV: tl.constexpr, MIN_STEPS: tl.constexpr, V_DIM: tl.constexpr,
    DIM_V: tl.constexpr, SPLITS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    n_rows = n_heads * q_len
    i_batch = tl.program_id(0) // n_rows
    n_listed = None
    if numbers_ptr is not None:
        n_listed = n_entries * PAGE
    o_batch, b_splits = splits_of(
        kv_lengths_ptr, n_batch, q_len, kv_len, n_listed, window, n_shared, BATCH, BLOCK_KV, MIN_STEPS
    )
    begin = tl.sum(tl.where(o_batch < i_batch, b_splits, 0), 0)
    n_splits = tl.sum(tl.where(o_batch == i_batch, b_splits, 0), 0)
    combine_row(
        splits_ptr, max_sum_ptr, sinks_ptr, out_ptr, lse_ptr, i_row, i_row // q_len % n_heads,
        begin.to(tl.int64) * n_rows + i_row % n_rows, n_rows, n_splits, V_DIM, DIM_V, SPLITS,
    )
# fmt: on


class Lists(NamedTuple):
    """Sizes of the lists of pages.

    n_lists    1, or one for each KV head or query head
    n_entries  pages of a list
    strides    (batch, list)
    max_pages  of the page table
    """

    n_lists: int
    n_entries: int
    strides: tuple[int, int]
    max_pages: int


class PagedLaunches(NamedTuple):
    """The launches of a call; combine is None and n_splits 0 without splits.

    n_splits  most splits of all sequences together
    """

    attend: Launch
    combine: Launch | None
    n_splits: int


def shared_splits(n_batch: int, n_programs: int, n_sms: int) -> int:
    """Splits that the sequences of a batch share; n_programs compute one."""
    return min(split_kv.PROGRAMS_PER_SM * n_sms // n_programs, split_kv.MAX_SPLITS * n_batch)


@functools.lru_cache(maxsize=1024)
def paged_launches(specs: TensorSpecs, lists: Lists, window: int | None, options: Options) -> PagedLaunches:
    """Prepares the launches of calls with these specs of q, k and v, lists of pages, and options."""
    q, k, v = specs.tensors
    (batch, heads, q_len, head_dim), (n_pages, kv_heads, page, v_dim) = q.shape, v.shape
    group = heads // kv_heads
    packed = group if lists.n_lists in (1, kv_heads) else 1
    fixed = constants(head_dim, v_dim, group, False, options)
    size = q.dtype.itemsize
    dim_v = columns_of_values(fixed.DIM, fixed.DIM_V, size, options.major)
    # pointers and masks take registers, as score mods do; on sm80 blocks of 128 rows would spill
    chosen = split_kv.config(
        min(packed * q_len, 64 if options.major == 8 else 128),
        max(fixed.DIM, dim_v),
        size,
        shared_memory=options.shared_memory,
        major=options.major,
        modifies_scores=True,
    )
    n_blocks = -(-packed * q_len // chosen.block_q)
    n_programs = heads // packed * n_blocks
    n_shared = shared_splits(batch, n_programs, num_sms(options.device))
    most_keys = lists.n_entries * page
    if window is not None:
        most_keys = min(most_keys, window + q_len)
    # to repay writing and reading 4 bytes per value, as in split_kv_launches
    least_keys = options.tile * max(1, chosen.block_q // 64)
    n_splits = n_shared + batch if n_shared > 1 and most_keys > least_keys else 0
    sizes = {
        "n_batch": batch,
        "n_heads": heads,
        "n_shared": n_shared,
        "q_len": q_len,
        "n_entries": lists.n_entries,
        "kv_len": lists.max_pages * page,
        "window": window,
        "PAGE": page,
        "BATCH": triton.next_power_of_2(batch),
        "MIN_STEPS": least_keys // chosen.block_kv,
    }
    rest = {
        "strides": Strides(q.strides[:3], k.strides[:3], v.strides[:3], records=lists.strides),
        "n_blocks": n_blocks,
        "n_pages": n_pages,
        "scale_log2": scale_log2(options.scale),
        **softcap_arguments(options, abs(options.scale)),
        "PACKED": packed,
        "SHARED": heads // lists.n_lists,
        "IS_SPLIT": n_splits > 0,
        "C": fixed._replace(DIM_V=dim_v, SIGN=sign(options.scale)).with_blocks(chosen),
        **chosen.launch_options,
    }
    attend = Launch(paged_kernel, ((n_splits or batch) * n_programs,), {**sizes, **rest})
    if not n_splits:
        return PagedLaunches(attend, None, 0)
    widths = {"BLOCK_KV": chosen.block_kv, "V_DIM": v_dim, "DIM_V": dim_v, "SPLITS": max(2, min(32, 4096 // dim_v))}
    combine = Launch(combine_paged_kernel, (batch * heads * q_len,), {**sizes, **widths, "num_warps": 4})
    return PagedLaunches(attend, combine, n_splits)


@functools.lru_cache(maxsize=1024)
def look_up_launch(selected: TensorSpecs, table: TensorSpecs) -> Launch:
    """Prepares the launch that looks up selected pages in a page table."""
    (of_selected,), (of_table,) = selected.tensors, table.tensors
    batch, n_lists, n_entries = of_selected.shape
    n_chunks = -(-n_entries // ENTRIES)
    rest = {
        "strides": of_selected.strides,
        "table_stride": of_table.strides[0],
        "n_lists": n_lists,
        "max_pages": of_table.shape[1],
        "n_entries": n_entries,
        "n_chunks": n_chunks,
        "ENTRIES": ENTRIES,
        "num_warps": 4,
    }
    return Launch(look_up_kernel, (batch * n_lists * n_chunks,), rest)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    scale: float,
    causal: bool,
    scores: Scores | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's type and lse (batch, heads, q_len) float32, both contiguous.

    k, v  (n_pages, kv_heads, page_size, head_dim | v_head_dim); no dimension of any tensor is 0
    """
    batch, heads, q_len, _ = q.shape
    out = q.new_empty(batch, heads, q_len, v.shape[3])
    lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    table, selected = pages.table, pages.selected
    ids, numbers = table, None
    lists = Lists(1, table.shape[1], (table.stride(0), 0), table.shape[1])
    if selected is not None:
        _, n_lists, n_entries = selected.shape
        ids, numbers = (
            torch.empty_like(selected, dtype=torch.int32, memory_format=torch.contiguous_format) for _ in range(2)
        )
        look_up_launch(specs_of(selected), specs_of(table))(selected, table, ids, numbers)
        strides = (n_lists * n_entries, n_entries if n_lists > 1 else 0)
        lists = lists._replace(n_lists=n_lists, n_entries=n_entries, strides=strides)
    options = options_of(q, [], scale, causal, 0.0, ids, numbers, pages.kv_lengths)
    sinks = None
    if scores is not None:
        sinks = scores.sinks
        options = options._replace(scores=score_specs_of(scores))
    launches = paged_launches(specs_of(q, k, v), lists, pages.window, options)
    inputs = q, k, v, ids, numbers, pages.kv_lengths
    if launches.combine is None:
        launches.attend(*inputs, sinks, out, lse)
        return out, lse
    splits = out.new_empty(launches.n_splits, heads * q_len, v.shape[3], dtype=torch.float32)
    max_sum = lse.new_empty(launches.n_splits, heads * q_len, 2)
    # a sink counts once per row, not once per split
    launches.attend(*inputs, None, splits, max_sum)
    launches.combine(splits, max_sum, numbers, pages.kv_lengths, sinks, out, lse)
    return out, lse
