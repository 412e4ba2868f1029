"""Sliding windows and causal masks: pairs whose distance lies between two bounds."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import MAX_TOKENS, BlockSize, Canvas, Length, check_rows, read_canvas
from .checks import read_integer, type_name
from .public import public

Window = int | tuple[int | None, int | None]


def _read_side(value: object) -> int:
    # no distance is larger, and sums with positions must fit into 64 bits
    return min(read_integer("window", value, at_least=0, unit="tokens"), MAX_TOKENS)


def read_window(window: Window) -> tuple[int | None, int | None]:
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(f"window: expected an int or (left, right), got {len(window)} entries: {window!r}")
        left, right = (None if side is None else _read_side(side) for side in window)
        return left, right
    if window is None:
        raise TypeError(f"window: expected an int or (left, right), got {type_name(window)}; (None, None) is unlimited")
    side = _read_side(window)
    return side, side


def _band(canvas: Canvas, *, left: int | None, right: int | None, within: BlockLayout | None = None) -> BlockLayout:
    """The pairs at distance -right to left, limited to `within` if it is given."""
    # larger than any distance
    unlimited = canvas.q_len + canvas.kv_len
    high = unlimited if left is None else min(left, unlimited)
    low = -unlimited if right is None else -min(right, unlimited)
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        return (low <= distance) & (distance <= high)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        # reach beyond the edges: 0 inside the band, else monotonic in the distance, so equal keys mean equal pairs
        return np.minimum(lowest - low, 0) + np.maximum(highest - high, 0)

    if within is None:

        def keys_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            first_query, last_query = canvas.row_span(rows)
            return first_query - high, last_query - low

        check_rows(canvas, keys_of)
        first, stop = canvas.cols_between(*keys_of(np.arange(canvas.n_rows)))
        within = canvas.from_ranges(first, stop)
    return canvas.from_predicate(attends, within=within, dedup_key=dedup_key)


@public
def local(length: Length, *, window: Window, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the tokens at distance at most `window` on either side, itself included.

    window=(left, right) keeps the `left` tokens before it, itself and the `right` tokens after it. Queries and keys are
    aligned bottom-right, as with causal=True: query i is at key position i + kv_len - q_len. A query whose window
    holds no key attends to nothing.

    window=1 and window=(2, 0) on 5 tokens:
        1 1 0 0 0     1 0 0 0 0
        1 1 1 0 0     1 1 0 0 0
        0 1 1 1 0     1 1 1 0 0
        0 0 1 1 1     0 1 1 1 0
        0 0 0 1 1     0 0 1 1 1

    length      tokens, or (q_len, kv_len)
    window      tokens on each side; 0 is the diagonal. Or (left, right), where None means unlimited
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if a side is negative; TypeError if it is not an int

    Beltagy et al., "Longformer", arXiv:2004.05150, section 3.1 (sliding window; their w is 2 * window + 1).

    >>> local(256, window=64, block_size=64).density
    0.625
    """
    canvas = read_canvas(length, block_size)
    left, right = read_window(window)
    return _band(canvas, left=left, right=right)


@public
def causal(length: Length, *, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to itself and to every token before it.

    Keeps kv_pos <= q_pos + (kv_len - q_len): the last query sees every key. With more queries than keys, the first
    q_len - kv_len queries see none. `attention(q, k, v, causal=True)` is the same mask; use this layout to combine it
    with others.

    2 queries and 5 keys; 5 queries and 2 keys:
        1 1 1 1 0     0 0
        1 1 1 1 1     0 0
                      0 0
                      1 0
                      1 1

    length      tokens, or (q_len, kv_len)
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if a length is negative or block_size is out of range

    Child et al., "Sparse Transformers", arXiv:1904.10509, section 4.2 (full self-attention).

    >>> causal(256, block_size=64).density
    0.625
    """
    return _band(read_canvas(length, block_size), left=None, right=0)


def past_of(layout: BlockLayout) -> BlockLayout:
    """The pairs of a layout that are not in the future: layout & causal, in O(layout.nnz).

    >>> past_of(local(1024, window=64)) == local(1024, window=(64, 0))
    True
    """
    return _band(Canvas(layout.q_len, layout.kv_len, *layout.block_size), left=None, right=0, within=layout)
