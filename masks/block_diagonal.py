"""Block-diagonal and block-causal masks over chunks of equal size, which begin at key 0."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, check_rows, read_canvas
from .checks import read_switch
from .chunks import chunks_in, read_size
from .kinds import joint_ids
from .public import public


def _chunks(canvas: Canvas, *, size: int, sees_past: bool, sees_future: bool) -> BlockLayout:
    """The pairs within chunks; sees_past adds all earlier chunks, sees_future keeps later tokens of the same chunk."""
    shift = canvas.shift

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        q_chunk, kv_chunk = (q_pos + shift).div(size, rounding_mode="floor"), kv_pos // size
        is_kept = kv_chunk <= q_chunk if sees_past else kv_chunk == q_chunk
        return is_kept if sees_future else is_kept & (kv_pos <= q_pos + shift)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        chunks = chunks_in(canvas, size, row, col)
        future = np.zeros_like(row) if sees_future else np.minimum(canvas.distances(row, col)[0], 0)
        return joint_ids(chunks.queries, chunks.keys, chunks.chunk_distance, future)

    def keys_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first_query, last_query = canvas.row_span(rows)
        first_key = np.zeros_like(first_query) if sees_past else first_query // size * size
        return first_key, (last_query // size + 1) * size - 1 if sees_future else last_query

    check_rows(canvas, keys_of)
    first, stop = canvas.cols_between(*keys_of(np.arange(canvas.n_rows)))
    return canvas.from_predicate(attends, within=canvas.from_ranges(first, stop), dedup_key=dedup_key)


@public
def block_diagonal(length: Length, *, size: int, causal: bool = False, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the tokens of its own chunk: squares along the diagonal.

    Chunks begin at key 0, size, 2 * size, ...; query i is at key position i + kv_len - q_len, as with causal=True. The
    size need not be a multiple of the block size. For chunks of different sizes use `documents`.

    size=2 on 5 tokens, plain and causal:
        1 1 0 0 0     1 0 0 0 0
        1 1 0 0 0     1 1 0 0 0
        0 0 1 1 0     0 0 1 0 0
        0 0 1 1 0     0 0 1 1 0
        0 0 0 0 1     0 0 0 0 1

    length      tokens, or (q_len, kv_len)
    size        tokens in a chunk; the last chunk may be shorter
    causal      True also requires d >= 0, where d = q_pos + (kv_len - q_len) - kv_pos
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if size < 1; TypeError if it is not an int or causal is not a bool

    Qiu et al., "Blockwise Self-Attention for Long Document Understanding", arXiv:1911.02972, section 3
    (the identity permutation).

    >>> block_diagonal(1024, size=256).density
    0.25
    """
    canvas = read_canvas(length, block_size)
    size, causal = read_size("size", size, canvas), read_switch("causal", causal)
    return _chunks(canvas, size=size, sees_past=False, sees_future=not causal)


@public
def block_causal(length: Length, *, size: int, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to its own chunk, in both directions, and to every chunk before it.

    Keeps kv_pos // size <= (q_pos + kv_len - q_len) // size. With size=1 it equals `causal`; larger sizes suit
    frames of a video and blocks of tokens that are generated together.

    size=2 on 5 tokens:
        1 1 0 0 0
        1 1 0 0 0
        1 1 1 1 0
        1 1 1 1 0
        1 1 1 1 1

    length      tokens, or (q_len, kv_len), aligned bottom-right
    size        tokens in a chunk; chunks begin at key 0, size, 2 * size, ...
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if size < 1; TypeError if it is not an int

    Arriola et al., "Block Diffusion", arXiv:2503.09573 (a block attends to itself and to earlier blocks).

    >>> block_causal(1024, size=256).density
    0.625
    """
    canvas = read_canvas(length, block_size)
    return _chunks(canvas, size=read_size("size", size, canvas), sees_past=True, sees_future=True)
