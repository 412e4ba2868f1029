"""Strided attention of Sparse Transformers: a window of one stride, and every stride-th token."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, check_nnz, check_rows, read_canvas
from .checks import read_integer, read_switch
from .public import public


def _candidates(canvas: Canvas, *, stride: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that may hold a pair, without repeats; all blocks if the stride is short."""
    # a row meets its window, and a block for each multiple of the stride up to its last query: kv_len / 2 on average
    check_rows(canvas, lambda rows: (canvas.row_span(rows)[0] - stride + 1, canvas.row_span(rows)[1]))
    n_far = max(0, (canvas.kv_len - 2) // (2 * max(stride, canvas.block_q + canvas.block_kv)) - 1)
    check_nnz(min(canvas.q_len, canvas.kv_len) // canvas.block_q * n_far, least="at least ")
    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    if stride < canvas.block_q + canvas.block_kv:
        # every block holds a multiple of the stride, except perhaps ragged ones: one range per row
        first_key, last_key = np.zeros_like(first_query), last_query if causal else last_query + canvas.q_len
    else:
        # [rows, multiples]: the distances at which a row has keys, descending; distance 0 is the window
        multiples = last_query // stride + 1 - np.arange(canvas.kv_len // stride + 3)
        first_key, last_key = first_query - multiples * stride, last_query - multiples * stride
        first_key[multiples == 0] -= stride - 1
        last_key[multiples == 0] += 0 if causal else stride - 1
        if causal:
            last_key[multiples < 0] = first_key[multiples < 0] - 1
    return blocks_between(canvas, first_key, last_key)


@public
def strided(length: Length, *, stride: int, causal: bool = False, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the tokens nearer than `stride`, itself included, and to every stride-th token beyond.

    Keeps |d| < stride or d % stride == 0, where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are aligned
    bottom-right. With stride near the square root of the length, two layers reach every token. With stride at most the
    block size no block is empty; attention then groups tokens by their place in the stride, if that saves time.

    stride=2, causal, on 6 tokens:
        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        0 1 1 1 0 0
        1 0 1 1 1 0
        0 1 0 1 1 1

    length      tokens, or (q_len, kv_len)
    stride      distance between the far tokens attended to; 1 keeps every pair
    causal      True also requires d >= 0, as the paper does
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if stride < 1; TypeError if it is not an int or causal is not a bool

    Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.3 (strided attention, with both heads in one mask).

    >>> strided(4096, stride=512, causal=True).density
    0.228515625
    """
    canvas = read_canvas(length, block_size)
    # larger than any distance
    stride = min(read_integer("stride", stride, at_least=1, unit="tokens"), max(1, canvas.q_len + canvas.kv_len))
    causal = read_switch("causal", causal)
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        is_kept = (distance.abs() < stride) | (distance % stride == 0)
        return is_kept & (distance >= 0) if causal else is_kept

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        meets_window = (lowest < stride) & (highest > -stride)
        is_inside = (lowest >= 0 if causal else lowest > -stride) & (highest < stride)
        # away from the window blocks repeat with period `stride`; blocks at the window have larger keys
        near = 2 * stride + canvas.block_q + canvas.block_kv + lowest
        return np.where(is_inside, -1, np.where(meets_window, near, lowest % stride))

    rows, cols = _candidates(canvas, stride=stride, causal=causal)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)
