"""Fixed attention of Sparse Transformers: chunks, and summary tokens at their ends that every later token sees.

Strided attention, the other pattern of the paper, is in strided.py.
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
from .kinds import joint_ids
from .public import public


class Fixed(NamedTuple):
    """Pattern of one head: chunks of `stride` tokens, whose tokens begin .. stop - 1 all queries see."""

    stride: int
    begin: int
    stop: int


def _candidates(canvas: Canvas, fixed: Fixed, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that meet the chunks of their queries or hold a summary token."""
    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    last_key = last_query if causal else (last_query // fixed.stride + 1) * fixed.stride - 1
    near = blocks_between(canvas, first_query // fixed.stride * fixed.stride, last_key)
    # cols of the summaries, and the number of them that each row may see
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

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        chunks = chunks_in(canvas, stride, row, col)
        # place of the summary in a block within one chunk; irrelevant in the queries' own chunk
        place = col * block_kv % stride
        summary = np.clip(fixed.begin - place, 0, block_kv) * (block_kv + 1) + np.clip(fixed.stop - place, 0, block_kv)
        summary = np.where(chunks.is_inside | (chunks.keys >= 0), -1, summary)
        future = np.minimum(canvas.distances(row, col)[0], 0) if causal else np.zeros_like(row)
        # where the queries' chunks begin matters only if a query and a key share a chunk
        queries = np.where(chunks.is_apart, -1, chunks.queries)
        return joint_ids(queries, chunks.keys, chunks.chunk_distance, summary, future)

    rows, cols = _candidates(canvas, fixed, causal=causal)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)


@public
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
    sequences are aligned bottom-right. The paper's two heads, chunks and summaries, are one mask here. The other
    pattern of the paper is `strided` with causal=True.

    With heads, each head moves the summaries one place further from the end of the chunk, and starts over after
    `verticals` heads: head h uses kv_pos % stride from stride - (v + 1) * summary to stride - v * summary - 1, where
    v = h % verticals. Together the heads see more of every chunk.

    stride=3, summary=1, causal, on 6 tokens, heads=2 and verticals=2:
        1 0 0 0 0 0     1 0 0 0 0 0
        1 1 0 0 0 0     1 1 0 0 0 0
        1 1 1 0 0 0     1 1 1 0 0 0
        0 0 1 1 0 0     0 1 0 1 0 0
        0 0 1 1 1 0     0 1 0 1 1 0
        0 0 1 1 1 1     0 1 0 1 1 1

    length      tokens, or (q_len, kv_len)
    stride      tokens in a chunk; the paper uses 128 for 1,024 to 12,288 tokens
    summary     tokens at the end of every chunk that every query sees, c in the paper: 1 to stride
    causal      True also requires d >= 0, where d = q_pos + (kv_len - q_len) - kv_pos, as the paper does
    heads       number of heads of the layout; None means one mask shared by every head
    verticals   number of different summary places among the heads; verticals * summary is at most stride
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads or 1, q_len, kv_len), exact to the token
    raises      ValueError if a number is out of range, or verticals > 1 without heads

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
    # a chunk this long holds every token
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    ends = [stride - head % verticals * summary for head in range(heads or 1)]
    settings = [Fixed(*(min(number, unlimited) for number in (stride, end - summary, end))) for end in ends]
    return by_head(lambda setting: _one_head(canvas, setting, causal=causal), settings)
