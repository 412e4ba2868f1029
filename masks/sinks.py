"""Attention sinks with a causal window, and the A-shape and Tri-shape of MInference."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, check_rows, read_canvas
from .checks import read_integer
from .public import public


def _sinks(canvas: Canvas, *, sinks: int, window: int, last: int) -> BlockLayout:
    """d >= 0 and (kv_pos < sinks or d < window or q_pos >= q_len - last)."""
    sinks = read_integer("sinks", sinks, at_least=0, unit="tokens")
    window = read_integer("window", window, at_least=0, unit="tokens")
    last = read_integer("last", last, at_least=0, unit="tokens")
    # larger than any distance or length
    sinks, window, last = (min(number, canvas.q_len + canvas.kv_len) for number in (sinks, window, last))
    shift, first_last = canvas.shift, canvas.q_len - last

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        return (distance >= 0) & ((kv_pos < sinks) | (distance < window) | (q_pos >= first_last))

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, highest = canvas.distances(row, col)
        n_sinks = np.clip(sinks - col * canvas.block_kv, 0, canvas.block_kv)
        n_last = np.clip((row + 1) * canvas.block_q - first_last, 0, canvas.block_q)
        # reach beyond the window, clipped: blocks entirely inside or outside do not depend on the distance
        beyond = np.clip(highest - window + 1, 0, canvas.block_q + canvas.block_kv - 1)
        is_kept = (n_sinks == canvas.block_kv) | (n_last == canvas.block_q) | (beyond == 0)
        number = (np.minimum(lowest, 0) * (canvas.block_q + canvas.block_kv) - beyond) * (canvas.block_kv + 1) - n_sinks
        number = number * (canvas.block_q + 1) - n_last
        # kept whole, except for the future
        return np.where(is_kept, 1 - np.minimum(lowest, 0), number)

    def keys_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[rows, 2]: the range of the sinks (of all keys, for the last queries), and the range of the window."""
        first_query, last_query = canvas.row_span(rows)
        is_last = (rows + 1) * canvas.block_q > first_last
        first_key = np.stack([np.zeros_like(first_query), first_query - window + 1], axis=1)
        last_sink = np.where(is_last, last_query, np.minimum(last_query, sinks - 1))
        return first_key, np.stack([last_sink, last_query if window else first_query - 1], axis=1)

    check_rows(canvas, keys_of)
    within_rows, within_cols = blocks_between(canvas, *keys_of(np.arange(canvas.n_rows)))
    return canvas.from_predicate(attends, within=canvas.from_blocks(within_rows, within_cols), dedup_key=dedup_key)


@public
def sink_window(length: Length, *, sinks: int, window: int, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the first tokens and to the most recent tokens, never to the future.

    Keeps d >= 0 and (kv_pos < sinks or d < window), where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are
    aligned bottom-right. `window` includes the token itself, like the size of a KV cache: it equals
    local(window=(window - 1, 0)).

    sinks=1, window=2 on 5 tokens:
        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        1 0 1 1 0
        1 0 0 1 1

    length      tokens, or (q_len, kv_len)
    sinks       tokens at the start of the keys that every later token attends to
    window      recent tokens, the token itself included; 0 keeps the sinks only
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if sinks or window is negative; TypeError if one is not an int

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453, section 3.2.

    >>> sink_window(1024, sinks=4, window=256).density
    0.40625
    """
    return _sinks(read_canvas(length, block_size), sinks=sinks, window=window, last=0)


@public
def a_shape(length: Length, *, sinks: int = 128, window: int = 3968, block_size: BlockSize = 128) -> BlockLayout:
    """`sink_window` with the sizes of the A-shaped heads of MInference: 4,096 keys per query.

    sinks=1, window=2 on 5 tokens:
        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        1 0 1 1 0
        1 0 0 1 1

    length      tokens, or (q_len, kv_len), aligned bottom-right
    sinks       tokens at the start of the keys
    window      recent tokens, the token itself included
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      as `sink_window` does

    Jiang et al., "MInference 1.0", arXiv:2407.02490, section 3 (A-shape).

    >>> a_shape(8192) == sink_window(8192, sinks=128, window=3968)
    True
    """
    return sink_window(length, sinks=sinks, window=window, block_size=block_size)


@public
def tri_shape(
    length: Length, *, sinks: int = 128, window: int = 3968, last: int = 100, block_size: BlockSize = 128
) -> BlockLayout:
    """`a_shape`, except that the last queries attend to every token up to themselves.

    Keeps d >= 0 and (kv_pos < sinks or d < window or q_pos >= q_len - last). The last queries of a prompt decide the
    answer, so they stay dense.

    sinks=1, window=1, last=2 on 5 tokens:
        1 0 0 0 0
        1 1 0 0 0
        1 0 1 0 0
        1 1 1 1 0
        1 1 1 1 1

    length      tokens, or (q_len, kv_len), aligned bottom-right
    sinks       tokens at the start of the keys
    window      recent tokens, the token itself included
    last        queries at the end that attend to everything before them
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if a number is negative; TypeError if one is not an int

    Li et al., "SCBench", arXiv:2412.10319 (Tri-shape).

    >>> tri_shape(8192, window=1024).nnz - a_shape(8192, window=1024).nnz
    54
    """
    return _sinks(read_canvas(length, block_size), sinks=sinks, window=window, last=last)
