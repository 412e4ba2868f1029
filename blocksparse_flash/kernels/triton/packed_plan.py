"""Plan construction on a GPU for packed documents, from their boundaries there, in three launches.

Each query attends to one range of keys, and both ends of the ranges never decrease from query to query. The tiles of a
tile row therefore fall into a few runs of neighbors whose pairs are the same (none, all, or those of one bitmask).

    runs     the runs of every tile row, and their bitmasks; one more program of each sequence checks its boundaries
    list     the tiles of each tile row and tile column, partial ones first
    records  records in launch order

A list has a fixed place with room for `capacity` tiles, so that nothing waits for the counts of other lists.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ... import plan_format
from ...runtime.launch import Launch, Memory, allocator, cache_key_of, contiguous
from .block_selection import CHUNK, sums_before
from .plan_builder import HEADS, first_bits, launch_positions, max_long_lines, write_records
from .tile import PARTIAL, RECORD

# tile rows or tile columns of a program of records_kernel, and those with which a step compares them
LINES, OTHERS = 16, 256
# tiles of a step of list_packed_kernel
MINORS = 64
# greater than the number of any tile
NO_TILE = tl.constexpr(2**31 - 1)
# kinds of runs
NONE, SOME, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Packing(NamedTuple):
    """What determines the launches of a plan, and its sizes.

    batch         sequences, each with boundaries of its own
    n_documents   boundaries of each side of a sequence, less one
    left, right   tokens before and after the own position that a query attends to; less than 2^30
    has_window    whether left and right limit anything
    has_prefix    whether all queries of a document attend to some keys at its beginning
    max_seqlen    tokens of the longest document of each side, at most
    causal        whether pairs with kv_pos > q_pos + kv_len - q_len are left out, whatever the document
    tile          tokens per side of a tile
    n_runs        runs of a tile row, at most
    capacity      (tiles of a tile row, tiles of a tile column), at most
    reach         (before, after): only tile rows c - before to c + after have a tile in tile column c
    is_sorted     whether the longest lists come first in the launch order, else all in the order of tokens
    """

    batch: int
    q_len: int
    kv_len: int
    n_documents: int
    left: int
    right: int
    has_window: bool
    has_prefix: bool
    max_seqlen: tuple[int, int]
    causal: bool
    tile: int
    n_runs: int
    capacity: tuple[int, int]
    reach: tuple[int, int]
    is_sorted: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Tile rows and tile columns."""
        return -(-self.q_len // self.tile), -(-self.kv_len // self.tile)

    def lengths(self) -> list[tuple[int, int]]:
        """(length of indices, length of bitmask_ids) of tile rows and of tile columns."""
        sizes = [self.batch * n_lines * room for n_lines, room in zip(self.grid, self.capacity, strict=True)]
        return [plan_format.list_lengths(size, 0, of_rows=i == 0) for i, size in enumerate(sizes)]

    def sizes(self) -> dict[str, Any]:
        """The size arguments of the kernels that read documents."""
        return {
            "n_documents": self.n_documents,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "q_tiles": self.grid[0],
            "left": self.left,
            "right": self.right,
            "longest_q": self.max_seqlen[0],
            "longest_kv": self.max_seqlen[1],
            "n_runs": self.n_runs,
            "HAS_WINDOW": self.has_window,
            "HAS_PREFIX": self.has_prefix,
            "CAUSAL": self.causal,
            "TILE": self.tile,
            "STEPS": self.n_documents.bit_length(),
            "CHUNK": CHUNK,
        }


LIST_SIZES = ["batch", "q_tiles", "kv_tiles", "n_runs", "row_tiles", "col_tiles", "n_before", "n_after"]
LIST_SIZES += ["n_row_indices", "n_row_ids", "n_col_indices", "n_col_ids"]
SIZES = ["n_documents", "q_len", "kv_len", "q_tiles", "left", "right", "longest_q", "longest_kv", "n_runs"]


# fmt: off
@triton.jit
def load_boundary(cu_ptr, o_document, m_document, length):
    """A boundary, between 0 and the length even if the caller's is not; the length where masked out."""
    b_boundary = tl.load(cu_ptr + o_document, mask=m_document, other=length)
    return tl.minimum(tl.maximum(b_boundary, 0), length).to(tl.int32)


@triton.jit
def key_ranges(
    cu_q_ptr, cu_kv_ptr, prefix_ptr, o_q, n_documents, q_len, kv_len, left, right,
    HAS_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr, CAUSAL: tl.constexpr, STEPS: tl.constexpr,
):
    """(first, stop) of the keys of each query; equal for a query without keys, such as those after the documents."""
    # the last document that begins at the query or before it; n_documents after the last one
    b_document = o_q * 0
    for step in tl.static_range(STEPS):
        b_next = b_document + (1 << (STEPS - 1 - step))
        m_next = b_next <= n_documents
        b_begin = load_boundary(cu_q_ptr, b_next, m_next, q_len)
        b_document = tl.where(m_next & (b_begin <= o_q), b_next, b_document)
    m_document = b_document < n_documents
    b_first = load_boundary(cu_kv_ptr, b_document, b_document <= n_documents, kv_len)
    b_end = tl.maximum(load_boundary(cu_kv_ptr, b_document + 1, m_document, kv_len), b_first)
    b_stop, b_begin = tl.where(m_document, b_end, b_first), b_first
    if HAS_WINDOW:
        # the key at the query's position, if the ends of the document are aligned
        b_q_end = load_boundary(cu_q_ptr, b_document + 1, m_document, q_len)
        b_position = b_end - (b_q_end - o_q)
        b_stop = tl.maximum(tl.minimum(b_stop, b_position + right + 1), b_first)
        b_first = tl.minimum(tl.maximum(b_first, b_position - left), b_stop)
    if HAS_PREFIX:
        b_prefix = load_boundary(prefix_ptr, b_document, m_document, kv_len)
        b_stop = tl.where(m_document, tl.maximum(b_stop, tl.minimum(b_begin + b_prefix, b_end)), b_stop)
    if CAUSAL:
        b_stop = tl.maximum(tl.minimum(b_stop, o_q + (kv_len - q_len + 1)), b_first)
    return b_first, b_stop


@triton.jit
def next_edge(b_first, b_stop, tile, TILE: tl.constexpr):
    """The first tile after `tile` whose pairs may differ from those of the tile before it; NO_TILE for none."""
    # a range that begins or ends inside a tile changes that tile and the next one
    b_edge = tl.where(b_first // TILE > tile, b_first // TILE, NO_TILE)
    b_edge = tl.minimum(b_edge, tl.where(b_stop // TILE > tile, b_stop // TILE, NO_TILE))
    b_edge = tl.minimum(b_edge, tl.where(tl.cdiv(b_first, TILE) > tile, tl.cdiv(b_first, TILE), NO_TILE))
    b_edge = tl.minimum(b_edge, tl.where(tl.cdiv(b_stop, TILE) > tile, tl.cdiv(b_stop, TILE), NO_TILE))
    return tl.min(b_edge, 0)


@triton.jit
def are_boundaries_valid(cu_ptr, n_documents, length, longest, CHUNK: tl.constexpr):
    """Whether boundaries start at 0, never decrease and end within the length, with no document above `longest`."""
    b_valid = tl.zeros([CHUNK], tl.int32) + (tl.load(cu_ptr) == 0).to(tl.int32)
    for first in range(0, n_documents, CHUNK):
        o_document = first + tl.arange(0, CHUNK)
        m_document = o_document < n_documents
        b_begin = tl.load(cu_ptr + o_document, mask=m_document, other=0)
        b_end = tl.load(cu_ptr + o_document + 1, mask=m_document, other=0)
        m_valid = (b_begin <= b_end) & (b_end - b_begin <= longest) & (b_end <= length)
        b_valid = tl.where(m_valid, b_valid, 0)
    return tl.min(b_valid, 0)


@triton.jit(do_not_specialize=SIZES)
def runs_kernel(
    # inputs: integers (batch, n_documents + 1); (batch, n_documents), read if HAS_PREFIX
    cu_q_ptr, cu_kv_ptr, prefix_ptr,
    # outputs: int32 (batch, q_tiles, n_runs + 1), where each run begins and the last one ends; (batch, q_tiles,
    # n_runs); tiles of all tile rows, partial tiles of all tile rows, the same of tile columns; bitmasks; bool (batch,)
    starts_ptr, kinds_ptr, counts_ptr, words_ptr, is_valid_ptr,
    n_documents, q_len, kv_len, q_tiles, left, right, longest_q, longest_kv, n_runs,
    HAS_WINDOW: tl.constexpr, HAS_PREFIX: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, CHUNK: tl.constexpr,
):
    # the first program of each sequence checks its boundaries: it starts first, since it takes the longest
    i_row, i_batch = tl.program_id(0) % (q_tiles + 1) - 1, tl.program_id(0) // (q_tiles + 1)
    n_rows = tl.num_programs(0) // (q_tiles + 1) * q_tiles
    cu_q_ptr += i_batch * (n_documents + 1)
    cu_kv_ptr += i_batch * (n_documents + 1)
    prefix_ptr += i_batch * n_documents
    if i_row < 0:
        is_valid = are_boundaries_valid(cu_q_ptr, n_documents, q_len, longest_q, CHUNK)
        is_valid &= are_boundaries_valid(cu_kv_ptr, n_documents, kv_len, longest_kv, CHUNK)
        tl.store(is_valid_ptr + i_batch, is_valid != 0)
    else:
        WORDS: tl.constexpr = TILE // 32
        o_row = tl.arange(0, TILE)
        m_row = i_row * TILE + o_row < q_len
        # queries past the end repeat the last one, and get no pairs below
        o_q = tl.minimum(i_row * TILE + o_row, q_len - 1)
        b_first, b_stop = key_ranges(
            cu_q_ptr, cu_kv_ptr, prefix_ptr, o_q, n_documents, q_len, kv_len, left, right,
            HAS_WINDOW, HAS_PREFIX, CAUSAL, STEPS,
        )
        o_word = tl.arange(0, WORDS)
        start = next_edge(b_first, b_stop, -1, TILE)
        row = i_batch * q_tiles + i_row
        p_starts = starts_ptr + row * (n_runs + 1)
        tl.store(p_starts, start)
        n_tiles, n_partial = i_row * 0, i_row * 0
        for run in range(n_runs):
            edge = next_edge(b_first, b_stop, start, TILE)
            stop = tl.where(edge == NO_TILE, start, edge)
            tl.store(p_starts + run + 1, stop)
            # keys of a word in the first tile of the run
            b_key = (start * TILE + o_word * 32)[None, :]
            b_words = first_bits(b_stop[:, None] - b_key) & ~first_bits(b_first[:, None] - b_key)
            b_words = tl.where(m_row[:, None], b_words, 0)
            n_some = tl.sum((b_words != 0).to(tl.int32))
            n_all = tl.sum((b_words == -1).to(tl.int32))
            kind = tl.where(n_all == TILE * WORDS, ALL, tl.where(n_some > 0, SOME, NONE))
            kind = tl.where(stop > start, kind, NONE)
            tl.store(kinds_ptr + row * n_runs + run, kind)
            p_words = words_ptr + (row * n_runs + run) * (TILE * WORDS) + o_row[:, None] * WORDS + o_word[None, :]
            tl.store(p_words, b_words, mask=(o_row >= 0)[:, None] & (kind == SOME))
            n_tiles += tl.where(kind != NONE, stop - start, 0)
            n_partial += tl.where(kind == SOME, stop - start, 0)
            start = stop
        tl.store(counts_ptr + row, n_tiles)
        tl.store(counts_ptr + n_rows + row, n_partial)


@triton.jit
def write_padding(indices_ptr, ids_ptr, line, n_lines, n_tiles, capacity, n_indices, n_ids, CHUNK: tl.constexpr):
    """Zeros after the tiles of a list, where kernels read one entry ahead, and after the last list."""
    place = line * capacity + n_tiles
    tl.store(indices_ptr + place, 0, mask=n_tiles < capacity)
    tl.store(ids_ptr + place, 0, mask=n_tiles < capacity)
    if line == n_lines - 1:
        # fewer than CHUNK entries follow the last list
        o_entry = n_lines * capacity + tl.arange(0, CHUNK)
        tl.store(indices_ptr + o_entry, o_entry * 0, mask=o_entry < n_indices)
        tl.store(ids_ptr + o_entry, o_entry * 0, mask=o_entry < n_ids)


@triton.jit
def list_row(
    starts_ptr, kinds_ptr, counts_ptr, indices_ptr, ids_ptr, row, n_rows, n_runs, capacity, n_indices, n_ids,
    MINORS: tl.constexpr,
):
    """The list of one of n_rows tile rows."""
    begin, n_tiles, n_partial = row * capacity, tl.load(counts_ptr + row), tl.load(counts_ptr + n_rows + row)
    next_partial, next_full = begin, begin + n_partial
    for run in range(n_runs):
        first, stop = tl.load(starts_ptr + row * (n_runs + 1) + run), tl.load(starts_ptr + row * (n_runs + 1) + run + 1)
        kind = tl.load(kinds_ptr + row * n_runs + run)
        stop = tl.where(kind == NONE, first, stop)
        place = tl.where(kind == SOME, next_partial, next_full)
        for tile in range(first, stop, MINORS):
            o_tile = tile + tl.arange(0, MINORS)
            o_place = place + o_tile - first
            # boundaries that the check refuses may have more tiles
            m_tile = (o_tile < stop) & (o_place < begin + capacity)
            tl.store(indices_ptr + o_place, o_tile - tl.where(kind == SOME, PARTIAL, 0), mask=m_tile)
            tl.store(ids_ptr + o_place, o_tile * 0 + tl.where(kind == SOME, row * n_runs + run, 0), mask=m_tile)
        next_partial += tl.where(kind == SOME, stop - first, 0)
        next_full += tl.where(kind == SOME, 0, stop - first)
    write_padding(indices_ptr, ids_ptr, row, n_rows, n_tiles, capacity, n_indices, n_ids, MINORS)


@triton.jit
def rows_up_to(starts_ptr, low, high, column, n_runs, run):
    """The first tile row from `low` to `high` whose boundary `run` of its runs is past `column`; else `high`.

    Boundaries never decrease from row to row.
    """
    while low < high:
        middle = (low + high) // 2
        is_past = tl.load(starts_ptr + middle * (n_runs + 1) + run) > column
        low = tl.where(is_past, low, middle + 1)
        high = tl.where(is_past, middle, high)
    return low


@triton.jit
def run_of(starts_ptr, kinds_ptr, o_row, m_row, column, n_runs):
    """(run, kind) of a tile column in tile rows whose runs contain it."""
    b_run = o_row * 0 - 1
    for run in range(n_runs + 1):
        b_start = tl.load(starts_ptr + o_row * (n_runs + 1) + run, mask=m_row, other=NO_TILE)
        b_run += (b_start <= column).to(tl.int32)
    # runs without tiles begin where they end
    m_run = m_row & (b_run >= 0) & (b_run < n_runs)
    return b_run, tl.load(kinds_ptr + o_row * n_runs + b_run, mask=m_run, other=NONE)


@triton.jit
def list_column(
    starts_ptr, kinds_ptr, counts_ptr, indices_ptr, ids_ptr, i_batch, column, batch, q_tiles, kv_tiles, n_runs,
    n_before, n_after, capacity, n_indices, n_ids, MINORS: tl.constexpr,
):
    """The list of a tile column of a sequence, which only tile rows column - n_before to column + n_after contain."""
    first_row, line = i_batch * q_tiles, i_batch * kv_tiles + column
    starts_ptr += first_row * (n_runs + 1)
    kinds_ptr += first_row * n_runs
    begin = line * capacity
    low, high = tl.maximum(column - n_before, 0), tl.minimum(column + n_after + 1, q_tiles)
    first = rows_up_to(starts_ptr, low, high, column, n_runs, n_runs)
    stop = rows_up_to(starts_ptr, low, high, column, n_runs, 0)
    n_tiles, n_partial = column * 0, column * 0
    for row in range(first, stop, MINORS):
        o_row = row + tl.arange(0, MINORS)
        _, b_kind = run_of(starts_ptr, kinds_ptr, o_row, o_row < stop, column, n_runs)
        n_tiles += tl.sum((b_kind != NONE).to(tl.int32))
        n_partial += tl.sum((b_kind == SOME).to(tl.int32))
    p_count = counts_ptr + 2 * batch * q_tiles + line
    tl.store(p_count, n_tiles)
    tl.store(p_count + batch * kv_tiles, n_partial)
    next_partial, next_full = begin, begin + n_partial
    for row in range(first, stop, MINORS):
        o_row = row + tl.arange(0, MINORS)
        b_run, b_kind = run_of(starts_ptr, kinds_ptr, o_row, o_row < stop, column, n_runs)
        b_partial, b_full = (b_kind == SOME).to(tl.int32), (b_kind == ALL).to(tl.int32)
        b_place = tl.where(
            b_partial == 1, next_partial + tl.cumsum(b_partial, 0), next_full + tl.cumsum(b_full, 0)
        ) - 1
        m_tile = (b_kind != NONE) & (b_place < begin + capacity)
        tl.store(indices_ptr + b_place, o_row - PARTIAL * b_partial, mask=m_tile)
        tl.store(ids_ptr + b_place, ((first_row + o_row) * n_runs + b_run) * b_partial, mask=m_tile)
        next_partial += tl.sum(b_partial)
        next_full += tl.sum(b_full)
    write_padding(indices_ptr, ids_ptr, line, batch * kv_tiles, n_tiles, capacity, n_indices, n_ids, MINORS)


@triton.jit(do_not_specialize=LIST_SIZES)
def list_packed_kernel(
    # inputs: outputs of runs_kernel
    starts_ptr, kinds_ptr,
    # counts of tile rows, which are read, and of tile columns, which are written
    counts_ptr,
    # outputs: lists of a Plan
    row_indices_ptr, row_ids_ptr, col_indices_ptr, col_ids_ptr,
    # row_tiles, col_tiles: room of a list; n_before, n_after: see list_column; other n_*: entries of all lists
    batch, q_tiles, kv_tiles, n_runs, row_tiles, col_tiles, n_before, n_after,
    n_row_indices, n_row_ids, n_col_indices, n_col_ids,
    MINORS: tl.constexpr,
):
    i_line, n_rows = tl.program_id(0), batch * q_tiles
    if i_line < n_rows:
        list_row(
            starts_ptr, kinds_ptr, counts_ptr, row_indices_ptr, row_ids_ptr, i_line, n_rows, n_runs, row_tiles,
            n_row_indices, n_row_ids, MINORS,
        )
    else:
        i_batch, column = (i_line - n_rows) // kv_tiles, (i_line - n_rows) % kv_tiles
        list_column(
            starts_ptr, kinds_ptr, counts_ptr, col_indices_ptr, col_ids_ptr, i_batch, column, batch, q_tiles, kv_tiles,
            n_runs, n_before, n_after, col_tiles, n_col_indices, n_col_ids, MINORS,
        )


@triton.jit
def write_lines(
    counts_ptr, records_ptr, i_program, batch, n_lines, capacity,
    IS_SORTED: tl.constexpr, LINES: tl.constexpr, MINORS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):
    """The records of some tile rows or tile columns of a sequence, which has n_lines of them."""
    n_groups = tl.cdiv(n_lines, LINES)
    i_batch = i_program // n_groups
    o_line = i_program % n_groups * LINES + tl.arange(0, LINES)
    # no line of unsorted lists is long enough to be split
    n_long = n_lines * 0
    if IS_SORTED:
        n_tiles, _ = sums_before(counts_ptr, batch * n_lines, 0, CHUNK)
        # twice the mean
        limit = ((2 * n_tiles.to(tl.int64)) // (batch * n_lines)).to(tl.int32)
        n_long = max_long_lines(counts_ptr, batch, n_lines, limit, HEADS, MINORS)
    m_line, first_line = o_line < n_lines, i_batch * n_lines
    p_tiles = counts_ptr + first_line
    b_tiles = tl.load(p_tiles + o_line, mask=m_line, other=0)
    b_partial = tl.load(p_tiles + batch * n_lines + o_line, mask=m_line, other=0)
    b_position = launch_positions(p_tiles, o_line, b_tiles, n_lines, LINES, MINORS) if IS_SORTED else o_line
    write_records(
        records_ptr + first_line * RECORD, o_line, b_position, (first_line + o_line) * capacity, b_tiles, b_partial,
        n_long, n_lines,
    )


@triton.jit(do_not_specialize=["batch", "q_tiles", "kv_tiles", "row_tiles", "col_tiles"])
def records_kernel(
    # input: counts of tile rows by runs_kernel, and of tile columns by list_packed_kernel
    counts_ptr,
    # outputs: records of a Plan
    row_records_ptr, col_records_ptr,
    batch, q_tiles, kv_tiles, row_tiles, col_tiles,
    IS_SORTED: tl.constexpr, LINES: tl.constexpr, MINORS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):
    i_program = tl.program_id(0)
    n_of_rows = batch * tl.cdiv(q_tiles, LINES)
    if i_program < n_of_rows:
        write_lines(
            counts_ptr, row_records_ptr, i_program, batch, q_tiles, row_tiles, IS_SORTED, LINES, MINORS, HEADS, CHUNK
        )
    else:
        write_lines(
            counts_ptr + 2 * batch * q_tiles, col_records_ptr, i_program - n_of_rows, batch, kv_tiles, col_tiles,
            IS_SORTED, LINES, MINORS, HEADS, CHUNK,
        )
# fmt: on


class PackedLaunches(NamedTuple):
    """The three launches, and their memory."""

    runs: Launch
    lists: Launch
    records: Launch
    starts: Memory
    kinds: Memory
    counts: Memory
    words: Memory
    is_valid: Memory


@functools.lru_cache(maxsize=256)
def packed_launches(packing: Packing, inputs: tuple[Any, ...], device: torch.device) -> PackedLaunches:  # noqa: ARG001  part of the cache key
    """The launches, for boundaries and prefixes with these cache keys."""
    q_tiles, kv_tiles = packing.grid
    (n_row_indices, n_row_ids), (n_col_indices, n_col_ids) = packing.lengths()
    batch = packing.batch
    grid = {"batch": batch, "q_tiles": q_tiles, "kv_tiles": kv_tiles}
    rooms = {"row_tiles": packing.capacity[0], "col_tiles": packing.capacity[1]}
    reach = {"n_before": packing.reach[0], "n_after": packing.reach[1]}
    lengths = {"n_row_indices": n_row_indices, "n_row_ids": n_row_ids}
    lengths |= {"n_col_indices": n_col_indices, "n_col_ids": n_col_ids}
    lists = {**grid, "n_runs": packing.n_runs, **rooms, **reach, **lengths, "MINORS": MINORS}
    heads = min(HEADS, triton.next_power_of_2(batch))
    records = {**grid, **rooms, "IS_SORTED": packing.is_sorted}
    records |= {"LINES": LINES, "MINORS": OTHERS, "HEADS": heads, "CHUNK": CHUNK}
    n_programs = batch * (-(-q_tiles // LINES) - (-kv_tiles // LINES))
    return PackedLaunches(
        Launch(runs_kernel, (batch * (q_tiles + 1),), {**packing.sizes(), "num_warps": 4}),
        Launch(list_packed_kernel, (batch * (q_tiles + kv_tiles),), {**lists, "num_warps": 2}),
        Launch(records_kernel, (n_programs,), {**records, "num_warps": 8}),
        contiguous(torch.int32, batch * q_tiles, packing.n_runs + 1),
        contiguous(torch.int32, batch * q_tiles, packing.n_runs),
        contiguous(torch.int32, 2 * batch * (q_tiles + kv_tiles)),
        contiguous(torch.int32, batch * q_tiles * packing.n_runs, packing.tile, packing.tile // 32),
        contiguous(torch.bool, batch),
    )


def build(
    cu_q: torch.Tensor, cu_kv: torch.Tensor, prefix: torch.Tensor | None, packing: Packing
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """The tensors of a Plan, and bool (batch,), whether the boundaries are those of documents that fit.

    cu_q, cu_kv  integers (batch, n_documents + 1) on the device, contiguous
    prefix       integers (batch, n_documents), or None
    """
    new = allocator(cu_q)
    # without prefixes the kernel does not read them
    prefix = cu_q if prefix is None else prefix
    launches = packed_launches(packing, tuple(map(cache_key_of, (cu_q, cu_kv, prefix))), cu_q.device)
    starts, kinds, counts, words, is_valid = (new(*memory) for memory in launches[3:])
    sides = []
    for n_lines, (n_indices, n_ids) in zip(packing.grid, packing.lengths(), strict=True):
        shapes: tuple[tuple[int, ...], ...] = (packing.batch, 1, n_lines, RECORD.value), (n_indices,), (n_ids,)
        sides.append([new(*contiguous(torch.int32, *shape)) for shape in shapes])
    (row_records, *row_lists), (col_records, *col_lists) = sides
    launches.runs(cu_q, cu_kv, prefix, starts, kinds, counts, words, is_valid)
    launches.lists(starts, kinds, counts, *row_lists, *col_lists)
    launches.records(counts, row_records, col_records)
    return [row_records, *row_lists, col_records, *col_lists, words], is_valid
