"""Prefix language model: causal, except that every token sees the whole prefix."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Length, check_rows, read_canvas
from .checks import read_integer
from .public import public


@public
def prefix_lm(length: Length, *, prefix: int, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the whole prefix, and to itself and every token before it.

    Keeps kv_pos < prefix or d >= 0, where d = q_pos + (kv_len - q_len) - kv_pos: the sequences are aligned
    bottom-right. Tokens of the prefix see each other in both directions; the others are causal.

    prefix=3 on 5 tokens:
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1

    length      tokens, or (q_len, kv_len)
    prefix      key tokens in the prefix, 0 (causal) to kv_len (dense)
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if prefix is out of range; TypeError if it is not an int

    Raffel et al., "Exploring the Limits of Transfer Learning" (T5), arXiv:1910.10683, section 3.2.1 (prefix LM).

    >>> prefix_lm(1024, prefix=512).density
    0.65625
    """
    canvas = read_canvas(length, block_size)
    prefix = read_integer("prefix", prefix, at_least=0, at_most=canvas.kv_len, unit="tokens")
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (kv_pos < prefix) | (kv_pos <= q_pos + shift)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, _ = canvas.distances(row, col)
        # keys of the block in the prefix; a block is full if all are, or if none is in the future
        in_prefix = np.clip(prefix - col * canvas.block_kv, 0, canvas.block_kv)
        is_full = (in_prefix == canvas.block_kv) | (lowest >= 0)
        return np.where(is_full, 1, lowest * canvas.block_kv - in_prefix)

    def keys_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, last_query = canvas.row_span(rows)
        return np.zeros_like(last_query), np.maximum(last_query, prefix - 1)

    check_rows(canvas, keys_of)
    first, stop = canvas.cols_between(*keys_of(np.arange(canvas.n_rows)))
    return canvas.from_predicate(attends, within=canvas.from_ranges(first, stop), dedup_key=dedup_key)
