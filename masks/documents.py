"""Packed documents, laid end to end and given by cumulative lengths.

Bitmasks are written word by word instead of through a predicate: document boundaries differ in almost every block, so
that a predicate would be evaluated for every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, check_nnz, read_canvas, spread
from .checks import read_integers, read_switch
from .kinds import kinds_of_sides
from .public import public

# LOW_BITS[n] has its n lowest bits set
LOW_BITS = ((np.uint64(1) << np.arange(33, dtype=np.uint64)) - np.uint64(1)).astype(np.uint32)


class Packed(NamedTuple):
    """The nonempty documents, padded to whole blocks: the last one extends to the end of the last block.

    numbers  int64 (padded length,): the document of each token
    begins   int64 (documents,): its first token
    ends     int64 (documents,): the token after its last one
    """

    numbers: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def _read_bounds(cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    bounds = read_integers("cu_seqlens", cu_seqlens)
    if not bounds.size:
        raise ValueError("cu_seqlens: expected at least one entry, 0, got none")
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected 0 as the first entry, got {bounds[0]}. Lengths want a cumulative sum")
    drops = np.flatnonzero(np.diff(bounds) < 0)
    if drops.size:
        place = drops[0]
        raise ValueError(
            f"cu_seqlens: expected entries that never decrease, got {bounds[place]} at place {place} "
            f"and {bounds[place + 1]} after it. Lengths want a cumulative sum"
        )
    if bounds.size >= 16 and bounds[-1] < bounds.size // 2 and np.diff(bounds).max() == 1:
        raise ValueError(
            f"cu_seqlens: expected where documents begin and end, got {bounds.size} entries from 0 to {bounds[-1]}, "
            "which look like the document of each token. Write "
            "[*numpy.flatnonzero(numpy.diff(ids, prepend=-1)), len(ids)]"
        )
    return bounds


def _pack(canvas: Canvas, bounds: np.ndarray) -> Packed:
    padded_len = max(canvas.n_rows * canvas.block_q, canvas.n_cols * canvas.block_kv)
    begins = bounds[:-1][np.diff(bounds) > 0]
    is_begin = np.zeros(padded_len, dtype=bool)
    is_begin[begins[1:]] = True
    return Packed(numbers=np.cumsum(is_begin), begins=begins, ends=np.append(begins[1:], padded_len))


def _candidates(canvas: Canvas, packed: Packed, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a pair, ascending: from the first query's document to the last query's."""
    rows = np.arange(canvas.n_rows)
    first_query, last_query = canvas.row_span(rows)
    last_key = last_query if causal else packed.ends[packed.numbers[last_query]] - 1
    first, stop = canvas.cols_between(packed.begins[packed.numbers[first_query]], last_key)
    return spread(first, stop)


def _dedup_keys(canvas: Canvas, packed: Packed, rows: np.ndarray, cols: np.ndarray, *, causal: bool) -> np.ndarray:
    """int64 (blocks,), equal for blocks with equal bits: from document boundaries within a block and their distance."""
    numbers = packed.numbers
    is_begin = np.diff(numbers, prepend=numbers[:1]) > 0
    row_kinds = kinds_of_sides(is_begin[: canvas.n_rows * canvas.block_q], canvas.block_q)
    col_kinds = kinds_of_sides(is_begin[: canvas.n_cols * canvas.block_kv], canvas.block_kv)
    n_col_kinds = int(col_kinds.max(initial=0)) + 1
    # exceeds the number of documents in a block, and its reach beyond the diagonal
    span = canvas.block_q + canvas.block_kv
    apart = numbers[rows * canvas.block_q] - numbers[cols * canvas.block_kv]
    keys = (row_kinds[rows] * n_col_kinds + col_kinds[cols]) * (2 * span) + apart + span
    if causal:
        lowest, _ = canvas.distances(rows, cols)
        # blocks below the diagonal do not depend on the distance
        keys = keys * span - np.minimum(lowest, 0)
    return keys


def _bitmasks(canvas: Canvas, packed: Packed, rows: np.ndarray, cols: np.ndarray, *, causal: bool) -> np.ndarray:
    """int32 (blocks, block_q, words), from the first and last key of each query: its keys are one range."""
    # [block_kv + 1, words]: row n has the first n bits set
    keys = np.arange(canvas.block_kv + 1)[:, None] - np.arange(0, canvas.block_kv, 32)
    first_bits = LOW_BITS[np.clip(keys, 0, 32)]
    # [blocks, block_q]
    q_pos = rows[:, None] * canvas.block_q + np.arange(canvas.block_q)
    document = packed.numbers[q_pos]
    origin = cols[:, None] * canvas.block_kv
    stop = (q_pos + 1 if causal else packed.ends[document]) - origin
    words = first_bits.take(stop, axis=0, mode="clip")
    # keys before `stop`, without those before the document
    words ^= first_bits.take(packed.begins[document] - origin, axis=0, mode="clip") & words
    return words.view(np.int32)


@public
def documents(
    cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor, *, causal: bool = False, block_size: BlockSize = 128
) -> BlockLayout:
    """Each token attends to the tokens of its own document.

    Documents are packed end to end; document i holds the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1, as in varlen
    attention calls. An empty document has no effect.

    cu_seqlens=[0, 2, 5], plain and causal:
        1 1 0 0 0     1 0 0 0 0
        1 1 0 0 0     1 1 0 0 0
        0 0 1 1 1     0 0 1 0 0
        0 0 1 1 1     0 0 1 1 0
        0 0 1 1 1     0 0 1 1 1

    cu_seqlens  int (documents + 1,): starts at 0, never decreases, ends at the length
    causal      True also requires kv_pos <= q_pos
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, length, length), length = cu_seqlens[-1], shared by every head,
                exact to the token
    raises      ValueError if cu_seqlens is empty, does not start at 0 or decreases, or if it looks like the
                document of each token: steps of 0 and 1, mostly 0; TypeError unless all are ints

    Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027, section 3.2 (masking).

    >>> documents([0, 256, 512, 1024]).density
    0.375
    """
    bounds = _read_bounds(cu_seqlens)
    causal = read_switch("causal", causal)
    canvas = read_canvas(int(bounds[-1]), block_size)
    # lower bound: the full blocks of each document, half of them if causal
    within = [np.maximum(np.diff(bounds) // side - 1, 0) for side in canvas.block_size]
    check_nnz(int((within[0] * within[1]).sum()) // (2 if causal else 1), least="at least ")
    packed = _pack(canvas, bounds)
    rows, cols = _candidates(canvas, packed, causal=causal)
    _, representatives, ids = np.unique(
        _dedup_keys(canvas, packed, rows, cols, causal=causal), return_index=True, return_inverse=True
    )
    words = _bitmasks(canvas, packed, rows[representatives], cols[representatives], causal=causal)
    # [n_rows + 1]
    ends = np.searchsorted(rows, np.arange(canvas.n_rows + 1))
    indptr, indices, bitmask_ids = (array.astype(np.int32) for array in (ends[None, None], cols, ids.reshape(-1)))
    return BlockLayout(
        *(torch.from_numpy(array) for array in (indptr, indices, bitmask_ids, words)),
        q_len=canvas.q_len,
        kv_len=canvas.kv_len,
        block_size=canvas.block_size,
    )
