"""Which pairs does the fixed attention of Sparse Transformers keep?

Knows chunks of one stride, and the tokens at their ends that summarise them for everyone.
Must not know how bitmasks are packed or shared. Strided attention, the other pattern of the paper, is `strided`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, distinct_blocks, read_canvas, spread
from .checks import read_integer, read_switch
from .chunks import chunks_in
from .heads import by_head, read_heads
from .kinds import joint_numbers


class Fixed(NamedTuple):
    """One head's pattern: chunks of `stride` tokens, of which the tokens begin .. stop - 1 are seen by all."""

    stride: int
    begin: int
    stop: int


def _candidates(canvas: Canvas, fixed: Fixed, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that meet the chunks of their queries or hold a summary."""
    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    last_key = last_query if causal else (last_query // fixed.stride + 1) * fixed.stride - 1
    near = blocks_between(canvas, first_query // fixed.stride * fixed.stride, last_key)
    # the cols of the summaries, each for all rows that may see it
    begins = np.arange(fixed.begin, canvas.kv_len, fixed.stride)
    first, stop = canvas.cols_between(begins, begins + (fixed.stop - fixed.begin - 1))
    first[1:] = np.maximum(first[1:], stop[:-1])
    _, cols = spread(first, stop)
    if causal:
        counts = np.searchsorted(cols * canvas.block_kv, last_query[:, 0], side="right")
    else:
        counts = np.full(canvas.n_rows, cols.size)
    rows, places = spread(np.zeros_like(counts), counts)
    return distinct_blocks(canvas, np.append(near[0], rows), np.append(near[1], cols[places]))


def _one_head(canvas: Canvas, fixed: Fixed, *, causal: bool) -> BlockLayout:
    stride, shift, block_kv = fixed.stride, canvas.shift, canvas.block_kv

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        q_pos, place = q_pos + shift, kv_pos % stride
        is_kept = (q_pos.div(stride, rounding_mode="floor") == kv_pos // stride) | (
            (fixed.begin <= place) & (place < fixed.stop)
        )
        return is_kept & (kv_pos <= q_pos) if causal else is_kept

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        chunks = chunks_in(canvas, stride, row, col)
        # the summary among the keys of a block that lies in one chunk; inside the queries' own it makes no difference
        place = col * block_kv % stride
        summary = np.clip(fixed.begin - place, 0, block_kv) * (block_kv + 1) + np.clip(fixed.stop - place, 0, block_kv)
        summary = np.where(chunks.is_inside | (chunks.keys >= 0), -1, summary)
        future = np.minimum(canvas.distances(row, col)[0], 0) if causal else np.zeros_like(row)
        # without a query and a key in one chunk it does not matter where the queries' chunks begin
        return joint_numbers(np.where(chunks.is_apart, -1, chunks.queries), chunks.keys, chunks.apart, summary, future)

    rows, cols = _candidates(canvas, fixed, causal=causal)
    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )


def fixed(
    length: Length,
    *,
    stride: int,
    summary: int = 1,
    causal: bool = False,
    heads: int | None = None,
    verticals: int = 1,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to its own chunk of `stride` tokens, and to the last `summary` tokens of every chunk.

    Keeps kv_pos // stride == q // stride or kv_pos % stride >= stride - summary, where q = q_pos + kv_len - q_len: the
    sequences are aligned at their ends. The paper's two heads, the chunk and the summaries, are one mask here. Its
    other pattern is `strided`, with causal=True: |d| < stride or d % stride == 0, in one mask too.

    With heads, head h takes the summaries one place further from the end of their chunks than head h - 1 does, and
    begins again after `verticals` of them: kv_pos % stride from stride - (v + 1) * summary to stride - v * summary - 1,
    v = h % verticals. So the heads together see more of every chunk.

    stride=3, summary=1, causal, on 6 tokens, heads=2 and verticals=2:
        1 0 0 0 0 0     1 0 0 0 0 0
        1 1 0 0 0 0     1 1 0 0 0 0
        1 1 1 0 0 0     1 1 1 0 0 0
        0 0 1 1 0 0     0 1 0 1 0 0
        0 0 1 1 1 0     0 1 0 1 1 0
        0 0 1 1 1 1     0 1 0 1 1 1

    length      tokens, or (q_len, kv_len)
    stride      tokens in a chunk; the paper takes 128 for 1,024 to 12,288 tokens
    summary     tokens of every chunk that everyone attends to, the paper's c: 1 to stride
    causal      True keeps d >= 0 only, d = q_pos + (kv_len - q_len) - kv_pos, as the paper does
    heads       how many heads the layout has; None is one mask shared by every head
    verticals   how many different summaries the heads take in turn; verticals * summary is at most stride
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads or 1, q_len, kv_len), exact to the token
    raises      ValueError if a number is out of range, or verticals is given without heads to share them out

    Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.3 (fixed attention, subblocks of the heads).

    >>> fixed(4096, stride=512, summary=64, causal=True).density
    0.1875
    """
    canvas = read_canvas(length, block_size)
    stride = read_integer("stride", stride, at_least=1, unit="tokens")
    summary = read_integer("summary", summary, at_least=1, at_most=stride, unit="tokens")
    verticals = read_integer("verticals", verticals, at_least=1, at_most=stride // summary)
    causal, heads = read_switch("causal", causal), read_heads(heads)
    if heads is None and verticals > 1:
        raise ValueError(f"verticals: expected 1 for a mask that every head shares, got {verticals}. Give heads too")
    # a chunk as long as everything holds everything, and no place beyond it exists
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    summaries = [(stride - (vertical + 1) * summary, stride - vertical * summary) for vertical in range(verticals)]
    settings = [
        Fixed(*(min(number, unlimited) for number in (stride, *summaries[head % verticals])))
        for head in range(heads or 1)
    ]
    return by_head(lambda setting: _one_head(canvas, setting, causal=causal), settings)
