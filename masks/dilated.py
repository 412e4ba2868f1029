"""Dilated sliding windows: every dilation-th token of a window around each query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, read_canvas
from .checks import read_integer, read_integers, read_switch
from .heads import by_head
from .public import public


def _one_head(canvas: Canvas, *, window: int, dilation: int, causal: bool) -> BlockLayout:
    # larger than any distance
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    dilation = min(dilation, unlimited)
    window = min(window, unlimited // dilation)
    high = window * dilation
    low = 0 if causal else -high
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        return (low <= distance) & (distance <= high) & (distance % dilation == 0)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        # inside the window blocks repeat with period `dilation`; blocks at an edge have keys above that
        is_inside = (lowest >= low) & (highest <= high)
        return np.where(is_inside, lowest % dilation, dilation + lowest + unlimited + canvas.block_q + canvas.block_kv)

    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    if dilation < canvas.block_q + canvas.block_kv:
        # every block of the window holds a kept distance: one range per row
        first_key, last_key = first_query - high, last_query - low
    else:
        # [rows, distances]: the kept distances at which a row has keys, descending
        largest = np.minimum(last_query // dilation, window)
        distances = (largest - np.arange(min(2 * window, canvas.kv_len // dilation + 1) + 1)) * dilation
        first_key, last_key = first_query - distances, last_query - distances
        last_key[distances < low] = first_key[distances < low] - 1
    rows, cols = blocks_between(canvas, first_key, last_key)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)


@public
def dilated_window(
    length: Length,
    *,
    window: int,
    dilation: int | Sequence[int] | np.ndarray | torch.Tensor,
    causal: bool = False,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to itself and to `window` tokens on either side, `dilation` tokens apart.

    Keeps |d| <= window * dilation and d % dilation == 0, where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are
    aligned bottom-right. dilation=1 is `local`; a larger one sees farther with the same number of keys. A dilation
    shorter than a block leaves no block of the window empty, but attention then groups the tokens that see each
    other, if that saves time. Different dilations per head widen what a layer sees.

    window=1, dilation=2 on 5 tokens, plain and causal:
        1 0 1 0 0     1 0 0 0 0
        0 1 0 1 0     0 1 0 0 0
        1 0 1 0 1     1 0 1 0 0
        0 1 0 1 0     0 1 0 1 0
        0 0 1 0 1     0 0 1 0 1

    length      tokens, or (q_len, kv_len)
    window      tokens attended to on each side, the token itself not counted; they span window * dilation tokens
    dilation    distance between them, at least 1; or a sequence with one for each head
    causal      True also requires d >= 0
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), or (1, len(dilation), q_len, kv_len), exact to the token
    raises      ValueError if window < 0, a dilation is < 1, or dilation is empty; TypeError if one is not an int

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1 (dilated sliding window; their w is 2 * window + 1).

    >>> dilated_window(4096, window=2, dilation=[1, 512]).nnz
    230
    """
    canvas = read_canvas(length, block_size)
    window = read_integer("window", window, at_least=0, unit="tokens")
    causal = read_switch("causal", causal)
    if isinstance(dilation, Sequence | np.ndarray | torch.Tensor):
        dilations = read_integers("dilation", dilation).tolist()
        if not dilations:
            raise ValueError("dilation: expected an int, or one for each head, got none")
    else:
        dilations = [dilation]
    dilations = [read_integer("dilation", number, at_least=1, unit="tokens") for number in dilations]
    return by_head(lambda number: _one_head(canvas, window=window, dilation=number, causal=causal), dilations)
