"""Position of equal-size chunks relative to blocks.

Chunks begin at key 0, size, 2 * size, ...; queries are aligned with the last keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .canvas import Canvas
from .checks import read_integer


class Chunks(NamedTuple):
    """Chunks within each block. Blocks with equal numbers have their chunks at the same places.

    queries    int64 (blocks,): offset of the first query in its chunk, or -1 if all queries are in one chunk
    keys       int64 (blocks,): the same for the keys
    chunk_distance  int64 (blocks,): chunk of the first key minus chunk of the first query; one large number of the
               same sign if is_apart
    is_apart   bool (blocks,): no query shares a chunk with a key
    is_inside  bool (blocks,): all queries and all keys are in one chunk
    """

    queries: np.ndarray
    keys: np.ndarray
    chunk_distance: np.ndarray
    is_apart: np.ndarray
    is_inside: np.ndarray


def chunks_in(canvas: Canvas, size: int, row: np.ndarray, col: np.ndarray) -> Chunks:
    """The chunks of `size` tokens in the blocks (row, col), padding included."""
    first_query, first_key = row * canvas.block_q + canvas.shift, col * canvas.block_kv
    q_chunk, last_q_chunk = first_query // size, (first_query + canvas.block_q - 1) // size
    kv_chunk, last_kv_chunk = first_key // size, (first_key + canvas.block_kv - 1) // size
    has_one_q, has_one_kv = q_chunk == last_q_chunk, kv_chunk == last_kv_chunk
    distance, is_apart = kv_chunk - q_chunk, (kv_chunk > last_q_chunk) | (last_kv_chunk < q_chunk)
    # larger than the distance of any block that shares a chunk
    beyond = canvas.block_q + canvas.block_kv
    return Chunks(
        queries=np.where(has_one_q, -1, first_query % size),
        keys=np.where(has_one_kv, -1, first_key % size),
        chunk_distance=np.where(is_apart, np.sign(distance) * beyond, distance),
        is_apart=is_apart,
        is_inside=has_one_q & has_one_kv & (distance == 0),
    )


def read_size(name: str, size: object, canvas: Canvas) -> int:
    """`size` as an int of at least 1, capped at a size with which one chunk holds every token."""
    return min(read_integer(name, size, at_least=1, unit="tokens"), max(1, canvas.q_len + canvas.kv_len))
