"""Training mask of block diffusion (BD3-LM): noised tokens followed by clean tokens, in diffusion blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, blocks_between, read_canvas
from .checks import read_integer
from .public import public


def _candidates(canvas: Canvas, length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a pair, unique and ascending."""
    first, last = canvas.row_span(np.arange(canvas.n_rows))
    # noised queries see their own diffusion blocks, and clean keys before the last of these
    last_noised = np.minimum(last, length - 1)
    is_noised, is_clean = first < length, last >= length
    own_begin, own_end = first // size * size, np.minimum((last_noised // size + 1) * size, length)
    before_end = length + np.where(is_noised, last_noised // size * size, 0)
    # clean queries see clean keys up to the end of their own diffusion block
    clean_end = length + np.where(is_clean, ((last - length) // size + 1) * size, 0)
    # [rows, 2]: keys begin .. end - 1 of the noised and of the clean half
    begin = np.stack([np.where(is_noised, own_begin, 0), np.full_like(first, length)], axis=1)
    end = np.stack([np.where(is_noised, own_end, 0), np.minimum(np.maximum(before_end, clean_end), 2 * length)], axis=1)
    return blocks_between(canvas, begin, end - 1)


class Sides(NamedTuple):
    """The diffusion blocks within each block row (or col), int64 (sides,) unless said otherwise.

    kinds      equal for sides of the same half that cut diffusion blocks at the same places
    first      diffusion block of the first token, counted within its half
    last       diffusion block of the last token, counted within its half
    is_clean   bool: the first token is clean
    is_border  bool: holds tokens of both halves; at most one side does, and its kind is unique
    """

    kinds: np.ndarray
    first: np.ndarray
    last: np.ndarray
    is_clean: np.ndarray
    is_border: np.ndarray


def _sides(n_sides: int, side: int, length: int, size: int) -> Sides:
    begin = np.arange(n_sides) * side
    end = np.minimum(begin + side, 2 * length) - 1
    is_clean, is_border = begin >= length, (begin < length) & (end >= length)
    first, offsets = np.divmod(begin - length * is_clean, size)
    _, kinds = np.unique((2 * is_border + is_clean) * size + offsets, return_inverse=True)
    return Sides(kinds, first, (end - length * (end >= length)) // size, is_clean, is_border)


@public
def block_diffusion(length: int, *, size: int, block_size: BlockSize = 128) -> BlockLayout:
    """Noised tokens attend to their own chunk and earlier clean chunks; clean tokens to clean chunks up to their own.

    The sequence is [x_t | x_0]: `length` noised tokens, then `length` clean tokens. Token i of either half is in
    chunk i // size, the diffusion block of the paper; the last chunk of a half may be shorter.

    length=4, size=2 (noised | clean, queries down, keys across):
        1 1 0 0 | 0 0 0 0
        1 1 0 0 | 0 0 0 0
        0 0 1 1 | 1 1 0 0
        0 0 1 1 | 1 1 0 0
        --------+--------
        0 0 0 0 | 1 1 0 0
        0 0 0 0 | 1 1 0 0
        0 0 0 0 | 1 1 1 1
        0 0 0 0 | 1 1 1 1

    length      tokens of the clean sequence; the layout has twice as many queries and keys
    size        tokens in a chunk, at least 1
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, 2 * length, 2 * length), shared by every head, exact to the token
    raises      ValueError if length < 0 or size < 1; TypeError if one is not an int

    Arriola et al., "Block Diffusion", arXiv:2503.09573, section 3.1 and appendix B.6 (M_BD, M_OBC, M_BC).

    >>> block_diffusion(512, size=128).density
    0.3125
    """
    length = read_integer("length", length, at_least=0, unit="tokens")
    # a block of the whole sequence is as large as one can be
    size = min(read_integer("size", size, at_least=1, unit="tokens"), max(1, length))
    canvas = read_canvas(2 * length, block_size)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        is_clean_query, is_clean_key = q_pos >= length, kv_pos >= length
        query_block = (q_pos - length * is_clean_query) // size
        key_block = (kv_pos - length * is_clean_key) // size
        # one comparison per half of the keys; the other half gets numbers that no diffusion block has
        of_noised = query_block.where(~is_clean_query, -1) == key_block.where(~is_clean_key, -2)
        of_clean = key_block.where(is_clean_key, length) < query_block + is_clean_query
        return of_noised | of_clean

    down, across = (
        _sides(n, side, length, size) for n, side in zip((canvas.n_rows, canvas.n_cols), canvas.block_size, strict=True)
    )
    n_col_kinds = int(across.kinds.max(initial=0)) + 1
    # a side meets at most one diffusion block per token, so farther apart a block is full or empty
    span = canvas.block_q + canvas.block_kv
    n_places = 2 * span + 1 + canvas.n_rows + canvas.n_cols

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        place = np.clip(down.first[row] - across.first[col], -span, span) + span
        is_border = down.is_border[row] | across.is_border[col]
        # blocks on the border of the halves have unique keys
        place = np.where(across.is_border[col], 2 * span + 1 + row, place)
        place = np.where(down.is_border[row], 2 * span + 1 + canvas.n_rows + col, place)
        # most stored blocks are full: clean keys that all queries see, or one noised diffusion block
        is_before = across.is_clean[col] & (across.last[col] < down.first[row] + down.is_clean[row])
        is_own = ~across.is_clean[col] & (across.first[col] == down.last[row]) & (across.last[col] == down.first[row])
        is_full = (is_before | is_own) & ~is_border
        return np.where(is_full, -1, (down.kinds[row] * n_col_kinds + across.kinds[col]) * n_places + place)

    rows, cols = _candidates(canvas, length, size)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)
