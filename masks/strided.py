"""Which pairs lie a multiple of the stride apart?

Knows the strided attention of Sparse Transformers: a window of one stride, and every stride-th token.
Must not know how bitmasks are packed or shared.
"""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, read_canvas
from .checks import read_integer, read_switch


def _candidates(canvas: Canvas, *, stride: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that meet the pattern, each once; when the stride is short, of all blocks."""
    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    if stride < canvas.block_q + canvas.block_kv:
        # so many distances in a row hold a multiple of the stride, but perhaps in a ragged block: one stretch a row
        first_key, last_key = np.zeros_like(first_query), last_query if causal else last_query + canvas.q_len
    else:
        # [rows, multiples]: the keys one multiple of the stride from a row, ascending; multiple 0 is the window
        most, least = canvas.kv_len // stride, 0 if causal else -(canvas.q_len // stride)
        multiples = np.arange(most, least - 1, -1)
        first_key, last_key = first_query - multiples * stride, last_query - multiples * stride
        first_key[:, most] -= stride - 1
        last_key[:, most] += 0 if causal else stride - 1
    return blocks_between(canvas, first_key, last_key)


def strided(length: Length, *, stride: int, causal: bool = False, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the tokens nearer than `stride`, itself included, and to every stride-th token from it.

    Keeps |d| < stride or d % stride == 0, where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are aligned at
    their ends. With stride near the square root of the length, two layers reach every token. With stride at most the
    side of a block no block is empty; such a pattern gains nothing from skipping.

    stride=2, causal, on 6 tokens:
        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        0 1 1 1 0 0
        1 0 1 1 1 0
        0 1 0 1 1 1

    length      tokens, or (q_len, kv_len)
    stride      tokens between the far tokens attended to; 1 attends to everything
    causal      True keeps d >= 0 only, as the paper does
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if stride < 1, TypeError if it is no int or causal is no bool

    Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.3 (strided attention, both heads in one mask).

    >>> strided(4096, stride=512, causal=True).density
    0.228515625
    """
    canvas = read_canvas(length, block_size)
    # no distance is as large as the lengths together
    stride = min(read_integer("stride", stride, at_least=1, unit="tokens"), max(1, canvas.q_len + canvas.kv_len))
    causal = read_switch("causal", causal)
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        is_kept = (distance.abs() < stride) | (distance % stride == 0)
        return is_kept & (distance >= 0) if causal else is_kept

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        meets_window = (lowest < stride) & (highest > -stride)
        is_inside = (lowest >= 0 if causal else lowest > -stride) & (highest < stride)
        # far from the window a block repeats every stride; in it, the numbers from stride on say where
        near = 2 * stride + canvas.block_q + canvas.block_kv + lowest
        return np.where(is_inside, -1, np.where(meets_window, near, lowest % stride))

    rows, cols = _candidates(canvas, stride=stride, causal=causal)
    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )
