"""The blocks that score best for each query, of those that it may select, in one pass over its scores.

PyTorch would write masked copies of the scores, and read them several times to find the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# of a query, at most, and scores that make up one of a block: both are unrolled
MAX_CHOSEN, MAX_STRIDES = 256, 64
# columns that are sorted at a time, at least
SORTED = 512
# below the key of any block
UNUSED = tl.constexpr(-(2**63))
# order of blocks that are always selected: above that of any score
ALWAYS = tl.constexpr(2**31 - 1)
LOW_WORD = tl.constexpr(2**32 - 1)


# fmt: off
@triton.jit(do_not_specialize=["n_rows", "n_heads", "n_keys", "first_row", "n_rows_out", "range_batch_stride"])
def block_choice_kernel(
    # (batch, heads, n_rows, n_keys), contiguous; int64: own block and first selectable block of each row
    scores_ptr, own_ptr, earliest_ptr,
    # output: int64 (batch, heads, n_rows_out, N_CHOSEN), of which these rows begin at first_row
    cols_ptr,
    n_rows, n_heads, n_keys, first_row, n_rows_out, range_batch_stride,
    PER_BLOCK: tl.constexpr, PER_KEY: tl.constexpr, ALWAYS_FIRST: tl.constexpr, ALWAYS_LAST: tl.constexpr,
    N_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, COLS: tl.constexpr,
):
    """A program chooses for one row: it sorts int64 keys, which have the order of a score above the block's number."""
    row, batch_head = tl.program_id(0) % n_rows, (tl.program_id(0) // n_rows).to(tl.int64)
    o_range = batch_head // n_heads * range_batch_stride + row
    own, earliest = tl.load(own_ptr + o_range).to(tl.int32), tl.load(earliest_ptr + o_range).to(tl.int32)
    p_scores = scores_ptr + (batch_head * n_rows + row) * n_keys
    b_best = tl.full([CHOSEN], UNUSED, tl.int64)
    for start in tl.range(tl.maximum(earliest, 0) // COLS * COLS, own + 1, COLS):
        b_col = start + tl.arange(0, COLS)
        m_col = (b_col >= earliest) & (b_col <= own)
        b_score = tl.zeros([COLS], tl.float32)
        for i in tl.static_range(PER_BLOCK + PER_KEY - 1):
            b_key = b_col * PER_BLOCK + (i - PER_KEY + 1)
            # keys that begin in the previous document do not count
            m_key = m_col & (b_key >= earliest * PER_BLOCK) & (b_key < n_keys)
            # strides that a block shares with its i-th key
            n_common = min(PER_BLOCK, i + 1, PER_KEY, PER_BLOCK + PER_KEY - 1 - i)
            b_score += n_common * tl.load(p_scores + b_key, mask=m_key, other=0.0).to(tl.float32)
        b_bits = b_score.to(tl.int32, bitcast=True)
        # the bits of negative numbers are in reverse order
        b_order = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
        m_always = (b_col < earliest + ALWAYS_FIRST) | (b_col > own - ALWAYS_LAST)
        # a NaN may have the bits of ALWAYS
        b_order = tl.where(m_always, ALWAYS, tl.minimum(b_order, ALWAYS - 1))
        # of equal scores, the first block has the largest key
        b_keys = (b_order.to(tl.int64) << 32) | (LOW_WORD - b_col.to(tl.int64))
        b_found = tl.topk(tl.where(m_col, b_keys, UNUSED), CHOSEN)
        b_best = tl.topk(tl.join(b_best, b_found).reshape(2 * CHOSEN), CHOSEN)
    b_cols = tl.where(b_best == UNUSED, -1, LOW_WORD - (b_best & LOW_WORD))
    o_chosen = tl.arange(0, CHOSEN)
    p_cols = cols_ptr + (batch_head * n_rows_out + first_row + row) * N_CHOSEN
    tl.store(p_cols + o_chosen, b_cols, mask=o_chosen < N_CHOSEN)
# fmt: on


def can_choose(scores: torch.Tensor, n_chosen: int, strides: tuple[int, int]) -> bool:
    """Whether the kernel takes scores on a GPU."""
    return scores.dtype != torch.float64 and n_chosen <= MAX_CHOSEN and sum(strides) <= MAX_STRIDES


def choose_blocks(
    scores: torch.Tensor,
    own: torch.Tensor,
    earliest: torch.Tensor,
    cols: torch.Tensor,
    first_row: int,
    *,
    always: tuple[int, int],
    strides: tuple[int, int],
) -> None:
    """Writes the chosen blocks of rows into cols: see nn/block_choice.py.

    scores         floats (batch, heads, rows, n)
    own, earliest  int64 (rows, 1) or (batch | 1, 1, rows, 1)
    cols           int64 (batch, heads, all rows, blocks per row)
    first_row      row of cols that is the first of scores
    """
    scores, own, earliest = scores.contiguous(), own.contiguous(), earliest.contiguous()
    batch, heads, n_rows, n_keys = scores.shape
    n_chosen = cols.shape[3]
    n_programs = batch * heads * n_rows
    if not (n_programs and n_chosen):
        return
    # Triton's topk returns at least two
    chosen = max(2, triton.next_power_of_2(n_chosen))
    per_block, per_key = strides
    block_choice_kernel[(n_programs,)](
        scores_ptr=scores,
        own_ptr=own,
        earliest_ptr=earliest,
        cols_ptr=cols,
        n_rows=n_rows,
        n_heads=heads,
        n_keys=n_keys,
        first_row=first_row,
        n_rows_out=cols.shape[2],
        range_batch_stride=n_rows if own.dim() == 4 and len(own) > 1 else 0,
        PER_BLOCK=per_block,
        PER_KEY=per_key,
        ALWAYS_FIRST=always[0],
        ALWAYS_LAST=always[1],
        N_CHOSEN=n_chosen,
        CHOSEN=chosen,
        COLS=max(chosen, min(SORTED, triton.next_power_of_2(n_keys // per_block + 1))),
        # rows are short: warps would wait for each other
        num_warps=1,
    )
