"""Which pairs lie in a window with gaps?

Knows dilated sliding windows: every dilation-th token of a stretch around each query.
Must not know how bitmasks are packed or shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, read_canvas
from .checks import read_integer, read_integers, read_switch
from .heads import by_head


def _one_head(canvas: Canvas, *, window: int, dilation: int, causal: bool) -> BlockLayout:
    # no distance is as large as the lengths together
    unlimited = max(1, canvas.q_len + canvas.kv_len)
    dilation = min(dilation, unlimited)
    window = min(window, unlimited // dilation)
    high = window * dilation
    low = 0 if causal else -high
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        return (low <= distance) & (distance <= high) & (distance % dilation == 0)

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        # inside the window a block repeats every dilation; at its edges, the numbers from dilation on say where
        is_inside = (lowest >= low) & (highest <= high)
        return np.where(is_inside, lowest % dilation, dilation + lowest + unlimited + canvas.block_q + canvas.block_kv)

    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    if dilation < canvas.block_q + canvas.block_kv:
        # whole blocks hold some kept distance, wherever they lie: one stretch a row
        first_key, last_key = first_query - high, last_query - low
    else:
        # [rows, kept distances]
        distances = np.arange(low, high + 1, dilation)
        first_key, last_key = first_query - distances, last_query - distances
    rows, cols = blocks_between(canvas, first_key, last_key)
    within = BlockLayout.from_blocks(rows, cols, canvas.q_len, canvas.kv_len, block_size=canvas.block_size)
    return BlockLayout.from_predicate(
        attends, canvas.q_len, canvas.kv_len, block_size=canvas.block_size, within=within, dedup_key=looks
    )


def dilated_window(
    length: Length,
    *,
    window: int,
    dilation: int | Sequence[int] | np.ndarray | torch.Tensor,
    causal: bool = False,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to the `window` nearest of every dilation-th token on either side, and to itself.

    Keeps |d| <= window * dilation and d % dilation == 0, where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are
    aligned at their ends. A larger dilation sees farther with as many keys: with dilation 1 it is `local`. A dilation
    shorter than a block leaves no block of the window empty, so it saves no work; one a head widens what a layer sees.

    window=1, dilation=2 on 5 tokens, plain and causal:
        1 0 1 0 0     1 0 0 0 0
        0 1 0 1 0     0 1 0 0 0
        1 0 1 0 1     1 0 1 0 0
        0 1 0 1 0     0 1 0 1 0
        0 0 1 0 1     0 0 1 0 1

    length      tokens, or (q_len, kv_len)
    window      tokens attended to on each side, besides the token itself; they reach window * dilation tokens far
    dilation    tokens from one of them to the next, at least 1; or one for each head
    causal      True keeps d >= 0 only
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), or (1, len(dilation), q_len, kv_len), exact to the token
    raises      ValueError if window < 0, or a dilation < 1, or none is given; TypeError if one is no int

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
