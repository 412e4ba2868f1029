"""Block selection on a GPU in two launches, in place of some 25 PyTorch operations.

    mark   one bit per block, and the count of each row: from indices, from indptr and indices, or the k highest scores
    list   indptr and indices of the set bits, ascending within a row

One program marks one row. A program that lists LINES rows sums the counts of all rows before them: results are
deterministic. For very many rows, PyTorch computes the prefix sums.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, allocator, cache_key_of, contiguous

# elements of the [ENTRIES, WORDS] block of a step
ELEMENTS = 4096
# rows of a program, and cols of a step, in list_rows_kernel
LINES, MINORS = 8, 128
# counts of a step
CHUNK = 1024
# rows up to which programs sum the counts: that takes time quadratic in the rows
MAX_SUMMED = 1 << 14
# (dtype, is aligned), see runtime.launch.cache_key_of
CacheKey = tuple[torch.dtype, bool] | None


@triton.jit
def bitwise_or(left, right):
    """Bitwise or."""
    return left | right


@triton.jit
def words_of(b_col, m_col, o_word):
    """int32 words with the bits of cols set; repeated cols set the same bit."""
    b_bit = tl.where(m_col, 1, 0) << (b_col % 32)
    # [ENTRIES, WORDS]
    return tl.reduce(tl.where((b_col // 32)[:, None] == o_word[None, :], b_bit[:, None], 0), 0, bitwise_or)


@triton.jit
def sums_before(counts_ptr, n_lines, line, CHUNK: tl.constexpr):
    """(sum of all counts, sum of the counts before `line`), int32."""
    b_all, b_before = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for first in range(0, n_lines, CHUNK):
        o_line = first + tl.arange(0, CHUNK)
        b_count = tl.load(counts_ptr + o_line, mask=o_line < n_lines, other=0)
        b_all += b_count
        b_before += tl.where(o_line < line, b_count, 0)
    return tl.sum(b_all, 0), tl.sum(b_before, 0)


@triton.jit
def fill_tail(ptr, begin, length, value, i_program, n_programs, CHUNK: tl.constexpr):
    """ptr[begin:length] = value, divided among the programs."""
    for first in range(i_program * CHUNK, length, n_programs * CHUNK):
        o_entry = first + tl.arange(0, CHUNK)
        tl.store(ptr + o_entry, tl.zeros([CHUNK], tl.int32) + value, mask=(o_entry >= begin) & (o_entry < length))


# fmt: off
@triton.jit(do_not_specialize=["n_cols", "n_words", "k"])
def mark_indices_kernel(
    # inputs: integers (lines, k); 0 .. n_cols - 1 are cols, others are ignored
    indices_ptr,
    # outputs: int32 (lines, n_words), (lines,)
    bits_ptr, counts_ptr,
    n_cols, n_words, k,
    WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):
    i_line = tl.program_id(0).to(tl.int64)
    o_word = tl.arange(0, WORDS)
    b_words = tl.zeros([WORDS], tl.int32)
    for first in range(0, k, ENTRIES):
        o_entry = first + tl.arange(0, ENTRIES)
        b_col = tl.load(indices_ptr + i_line * k + o_entry, mask=o_entry < k, other=0).to(tl.int64)
        m_col = (o_entry < k) & (b_col >= 0) & (b_col < n_cols)
        b_words |= words_of(tl.where(m_col, b_col, 0).to(tl.int32), m_col, o_word)
    tl.store(bits_ptr + i_line * n_words + o_word, b_words, mask=o_word < n_words)
    b_count = tl.sum((b_words[:, None] >> tl.arange(0, 32)[None, :]) & 1, 1)
    tl.store(counts_ptr + i_line, tl.sum(b_count, 0))


@triton.jit(do_not_specialize=["n_rows", "n_words"])
def mark_rows_kernel(
    # input: indptr, int32 (lines // n_rows, n_rows + 1), followed by indices (nnz,)
    indptr_and_indices_ptr,
    # output: int32 (lines, n_words)
    bits_ptr,
    n_rows, n_words,
    WORDS: tl.constexpr, ENTRIES: tl.constexpr,
):
    i_line = tl.program_id(0)
    p_begin = indptr_and_indices_ptr + i_line + i_line // n_rows
    begin, end = tl.load(p_begin), tl.load(p_begin + 1)
    indices_ptr = indptr_and_indices_ptr + tl.num_programs(0) + tl.num_programs(0) // n_rows
    o_word = tl.arange(0, WORDS)
    b_words = tl.zeros([WORDS], tl.int32)
    for first in range(begin, end, ENTRIES):
        o_entry = first + tl.arange(0, ENTRIES)
        m_col = o_entry < end
        b_words |= words_of(tl.load(indices_ptr + o_entry, mask=m_col, other=0), m_col, o_word)
    tl.store(bits_ptr + i_line.to(tl.int64) * n_words + o_word, b_words, mask=o_word < n_words)


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_words", "k", "ahead", "block_q", "block_kv", "kv_len"])
def mark_scores_kernel(
    # inputs: floats (lines, n_cols)
    scores_ptr,
    # outputs: int32 (lines, n_words), (lines,)
    bits_ptr, counts_ptr,
    n_rows, n_cols, n_words, k, ahead, block_q, block_kv, kv_len,
    CAUSAL: tl.constexpr, WORDS: tl.constexpr,
):
    i_line = tl.program_id(0).to(tl.int64)
    # [WORDS, 32]
    o_col = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m_col = o_col < n_cols
    b_score = tl.load(scores_ptr + i_line * n_cols + o_col, mask=m_col, other=float("-inf")).to(tl.float32)
    # NaN is not equal to itself
    m_col = m_col & (b_score == b_score) & (b_score != float("-inf"))
    if CAUSAL:
        i_row = (i_line % n_rows).to(tl.int32)
        last_kv = tl.minimum(ahead + (i_row + 1) * block_q, kv_len) - 1
        m_col = m_col & (o_col * block_kv <= last_kv)
    # positive integers in the order of the floats; 0: never selected
    b_key = b_score.to(tl.int32, bitcast=True)
    b_key = (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    b_key = tl.where(m_col, b_key, 0)
    # radix select: the largest threshold with at least k keys >= it, bit by bit; 0 if fewer than k can be selected.
    # It begins as a scalar int64 zero that is a tensor, since the loop carries it
    threshold = tl.sum(tl.zeros([32], tl.int64), 0)
    bit = threshold + 2147483648
    for _ in range(32):
        n_high = tl.sum(tl.sum((b_key >= (threshold | bit)).to(tl.int32), 1), 0)
        threshold = tl.where(n_high >= k, threshold | bit, threshold)
        bit = bit >> 1
    b_above = (b_key > threshold).to(tl.int32)
    # ties go to the first
    b_equal = ((b_key == threshold) & m_col).to(tl.int32)
    b_of_words = tl.sum(b_equal, 1)
    b_place = (tl.cumsum(b_of_words, 0) - b_of_words)[:, None] + tl.cumsum(b_equal, 1)
    n_above = tl.sum(tl.sum(b_above, 1), 0)
    b_taken = b_above | (b_equal & (b_place <= k - n_above).to(tl.int32))
    b_words = tl.sum(b_taken << tl.arange(0, 32)[None, :], 1)
    o_word = tl.arange(0, WORDS)
    tl.store(bits_ptr + i_line * n_words + o_word, b_words, mask=o_word < n_words)
    tl.store(counts_ptr + i_line, tl.sum(tl.sum(b_taken, 1), 0))


@triton.jit(do_not_specialize=["n_lines", "n_rows", "n_cols", "n_words", "capacity"])
def list_rows_kernel(
    # inputs: int32 (lines, n_words), and (lines,): counts, or their cumulative sums if IS_SUMMED
    bits_ptr, counts_ptr,
    # outputs: int32 (lines // n_rows, n_rows + 1), (capacity,), (capacity,)
    indptr_ptr, indices_ptr, ids_ptr,
    n_lines, n_rows, n_cols, n_words, capacity,
    IS_SUMMED: tl.constexpr, LINES: tl.constexpr, MINORS: tl.constexpr, CHUNK: tl.constexpr,
):
    i_program, n_programs = tl.program_id(0), tl.num_programs(0)
    o_line = i_program * LINES + tl.arange(0, LINES)
    m_line = o_line < n_lines
    if IS_SUMMED:
        nnz = tl.load(counts_ptr + n_lines - 1)
        b_end = tl.load(counts_ptr + o_line, mask=m_line, other=0)
        b_begin = tl.load(counts_ptr + o_line - 1, mask=m_line & (o_line > 0), other=0)
    else:
        nnz, before = sums_before(counts_ptr, n_lines, i_program * LINES, CHUNK)
        b_count = tl.load(counts_ptr + o_line, mask=m_line, other=0)
        b_end = before + tl.cumsum(b_count, 0)
        b_begin = b_end - b_count
    o_batch_head = o_line // n_rows
    p_end = indptr_ptr + o_line + o_batch_head + 1
    tl.store(p_end, b_end, mask=m_line)
    tl.store(p_end - 1, b_begin, mask=m_line & (o_line % n_rows == 0))
    p_words = bits_ptr + o_line.to(tl.int64)[:, None] * n_words
    for first in range(0, n_cols, MINORS):
        o_col = (first + tl.arange(0, MINORS))[None, :]
        b_word = tl.load(p_words + o_col // 32, mask=m_line[:, None] & (o_col < n_cols), other=0)
        b_bit = (b_word >> (o_col % 32)) & 1
        b_place = b_begin[:, None] + tl.cumsum(b_bit, 1) - 1
        tl.store(indices_ptr + b_place, o_col + tl.zeros([LINES, MINORS], tl.int32), mask=b_bit == 1)
        b_begin += tl.sum(b_bit, 1)
    fill_tail(indices_ptr, nnz, capacity, 0, i_program, n_programs, CHUNK)
    # every block is full
    fill_tail(ids_ptr, 0, capacity, -1, i_program, n_programs, CHUNK)
# fmt: on


class BlockGrid(NamedTuple):
    """A block grid: n_rows x n_cols blocks in each of (batch | 1) * (heads | 1) heads. Lengths are in tokens."""

    n_batch_heads: int
    n_rows: int
    n_cols: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]

    @property
    def n_lines(self) -> int:
        """Rows of all heads."""
        return self.n_batch_heads * self.n_rows

    @property
    def n_words(self) -> int:
        """int32 words of the bits of a row."""
        return -(-self.n_cols // 32)


@functools.lru_cache(maxsize=256)
def _mark_indices(key: CacheKey, device: torch.device, grid: BlockGrid, k: int) -> Launch:  # noqa: ARG001  cache keys
    words = triton.next_power_of_2(grid.n_words)
    entries = min(triton.next_power_of_2(max(16, k)), max(16, ELEMENTS // words))
    rest = {"n_cols": grid.n_cols, "n_words": grid.n_words, "k": k, "WORDS": words, "ENTRIES": entries}
    return Launch(mark_indices_kernel, (grid.n_lines,), {**rest, "num_warps": 4 if words * entries > 512 else 1})


@functools.lru_cache(maxsize=256)
def _mark_rows(grid: BlockGrid, device: torch.device) -> Launch:  # noqa: ARG001
    words = triton.next_power_of_2(grid.n_words)
    entries = max(16, min(128, ELEMENTS // words))
    rest = {"n_rows": grid.n_rows, "n_words": grid.n_words, "WORDS": words, "ENTRIES": entries}
    return Launch(mark_rows_kernel, (grid.n_lines,), {**rest, "num_warps": 4 if words * entries > 512 else 1})


@functools.lru_cache(maxsize=256)
def _mark_scores(key: CacheKey, device: torch.device, grid: BlockGrid, k: int, causal: bool) -> Launch:  # noqa: ARG001
    words = triton.next_power_of_2(grid.n_words)
    block_q, block_kv = grid.block_size
    sizes = {"n_rows": grid.n_rows, "n_cols": grid.n_cols, "n_words": grid.n_words, "k": k}
    tokens = {"ahead": grid.kv_len - grid.q_len, "block_q": block_q, "block_kv": block_kv, "kv_len": grid.kv_len}
    # one warp reduces without shared memory
    meta = {"CAUSAL": causal, "WORDS": words, "num_warps": 1 if words <= 16 else 4 if words <= 64 else 8}
    return Launch(mark_scores_kernel, (grid.n_lines,), sizes | tokens | meta)


@functools.lru_cache(maxsize=256)
def _list_rows(grid: BlockGrid, capacity: int, device: torch.device) -> Launch:  # noqa: ARG001
    sizes = {"n_lines": grid.n_lines, "n_rows": grid.n_rows, "n_cols": grid.n_cols, "n_words": grid.n_words}
    is_summed = grid.n_lines > MAX_SUMMED
    meta = {"IS_SUMMED": is_summed, "LINES": LINES, "MINORS": MINORS, "CHUNK": CHUNK, "num_warps": 4}
    return Launch(list_rows_kernel, (-(-grid.n_lines // LINES),), {**sizes, "capacity": capacity, **meta})


def _marked(grid: BlockGrid, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized bits, int32 (n_batch_heads, n_rows, n_words), and counts, int32 (n_batch_heads * n_rows,)."""
    empty = allocator(like)
    bits = empty(*contiguous(torch.int32, grid.n_batch_heads, grid.n_rows, grid.n_words))
    return bits, empty(*contiguous(torch.int32, grid.n_lines))


def of_indices(indices: torch.Tensor, grid: BlockGrid) -> tuple[torch.Tensor, ...]:
    """bits, indptr, indices and bitmask ids (all full) of the given cols of each row; invalid cols are ignored.

    indices  contiguous integers (n_batch_heads * n_rows * k entries)
    returns  int32 (n_batch_heads, n_rows, n_words), (n_batch_heads, n_rows + 1), (capacity,), (capacity,), where
             capacity = indices.numel()
    """
    bits, counts = _marked(grid, indices)
    k = indices.numel() // grid.n_lines
    _mark_indices(cache_key_of(indices), indices.device, grid, k)(indices, bits, counts)
    return bits, *_listed(bits, counts, grid, indices.numel())


def bits_of_block_list(listed: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """The bits (n_batch_heads, n_rows, n_words) of blocks given by indptr and indices, concatenated.

    listed  int32 (n_batch_heads * (n_rows + 1) + nnz,), 16-byte aligned
    """
    bits = allocator(listed)(*contiguous(torch.int32, grid.n_batch_heads, grid.n_rows, grid.n_words))
    _mark_rows(grid, listed.device)(listed, bits)
    return bits


def of_scores(scores: torch.Tensor, grid: BlockGrid, k: int, *, causal: bool) -> tuple[torch.Tensor, ...]:
    """Like `of_indices`, for the k highest scores of each row (the first of equal ones); capacity = rows * k.

    scores  contiguous floats of at most 32 bits, n_batch_heads * n_rows * n_cols; NaN and -inf are never selected
    causal  never selects a block without a pair kv_pos <= q_pos + (kv_len - q_len)
    """
    bits, counts = _marked(grid, scores)
    _mark_scores(cache_key_of(scores), scores.device, grid, k, causal)(scores, bits, counts)
    return bits, *_listed(bits, counts, grid, grid.n_lines * k)


def _listed(bits: torch.Tensor, counts: torch.Tensor, grid: BlockGrid, capacity: int) -> tuple[torch.Tensor, ...]:
    empty = allocator(bits)
    indptr = empty(*contiguous(torch.int32, grid.n_batch_heads, grid.n_rows + 1))
    indices, ids = (empty(*contiguous(torch.int32, capacity)) for _ in range(2))
    if grid.n_lines > MAX_SUMMED:
        counts = counts.cumsum(0, dtype=torch.int32)
    _list_rows(grid, capacity, bits.device)(bits, counts, indptr, indices, ids)
    return indptr, indices, ids
