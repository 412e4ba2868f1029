"""Hierarchical attention: dyadic cells of the keys, each seen whole from nearby and through a summary from afar."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, read_canvas
from .checks import read_integer, read_switch
from .chunks import chunks_in, read_size
from .kinds import joint_ids
from .public import public


class Level(NamedTuple):
    """Cells of `cell` tokens; the last `unit` keys of every `period` keys of a sibling cell are kept."""

    cell: int
    period: int
    unit: int


def _candidates(canvas: Canvas, levels: list[Level], *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that may hold a pair."""
    first_query, last_query = (position[:, None] for position in canvas.row_span(np.arange(canvas.n_rows)))
    # own cells and their siblings are whole: one range from the first query's to the last query's
    pair = 2 * levels[0].cell
    begins, lasts = [first_query // pair * pair], [(last_query // pair + 1) * pair - 1]
    for cell, period, unit in levels[1:]:
        # [rows, cells of a row]: the maximum number for any row, repeating its last cell
        met = np.minimum(first_query // cell + np.arange(canvas.block_q // cell + 2), last_query // cell)
        # [rows, cells, summaries of the sibling cell]
        summaries = ((met ^ 1) * cell)[:, :, None] + np.arange(period - unit, cell, period)
        # not reshape(n_rows, -1), which refuses a layout without rows
        begins.append(summaries.reshape(canvas.n_rows, summaries.shape[1] * summaries.shape[2]))
        lasts.append(begins[-1] + unit - 1)
    first_key, last_key = np.concatenate(begins, axis=1), np.concatenate(lasts, axis=1)
    return blocks_between(canvas, first_key, np.minimum(last_key, last_query) if causal else last_key)


def _dedup_parts(canvas: Canvas, level: Level, row: np.ndarray, col: np.ndarray) -> list[np.ndarray]:
    """Numbers that are equal for blocks with equal pairs at a level above 0."""
    cell, period, unit = level
    pairs = chunks_in(canvas, 2 * cell, row, col)

    def halves(first: np.ndarray, side: int) -> np.ndarray:
        # 0 or 1: the sibling that holds the block; 2 and up: offset in the pair of a block that meets both
        return np.where(first // cell == (first + side - 1) // cell, first // cell % 2, 2 + first % (2 * cell))

    queries = halves(row * canvas.block_q + canvas.shift, canvas.block_q)
    first_key = col * canvas.block_kv
    keys, place = halves(first_key, canvas.block_kv), first_key % period
    # number of keys before the summary and before its end, for blocks with at most one summary
    ahead, until = (np.clip(end - place, 0, canvas.block_kv) for end in (period - unit, period))
    summary = np.where(place + canvas.block_kv <= period, -1 - ahead * (canvas.block_kv + 1) - until, place)
    has_none = pairs.is_apart | ((queries < 2) & (queries == keys))
    return [np.where(has_none, -1, part) for part in (queries, keys, pairs.chunk_distance, summary)]


def _read_levels(canvas: Canvas, size: int, levels: int | None) -> int:
    # cells of the last level hold at least half of all keys
    all_levels = max(1, (-(-canvas.kv_len // size) - 1).bit_length())
    return all_levels if levels is None else read_integer("levels", levels, at_least=1, at_most=all_levels)


@public
def hierarchical(
    length: Length,
    *,
    size: int,
    levels: int | None = None,
    unit: int | None = None,
    causal: bool = False,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to all nearby tokens, and to `size` tokens of each segment farther away; segments double in
    length.

    Level 0 cuts the keys into cells of `size` tokens; the siblings 2 n and 2 n + 1 form a cell of the next level. A
    token attends to its own cell of level 0 and to the sibling of that cell. At every level above, it attends to `size`
    summary keys of the sibling of its cell: at level k to keys with kv_pos % (unit * 2**k) >= unit * 2**k - unit. The
    keys per query grow with the logarithm of the length, and every token is reached through a summary.

    H-Transformer-1D attends to means of 2**k tokens instead. With unit=1 a summary key is the last token of each mean;
    with the default, unit=size, summary keys are the last level-0 cell of the sibling, which leaves most far blocks
    empty. Query i is at key position i + kv_len - q_len.

    size=1 on 8 tokens, all three levels; size=2, unit=1:
        1 1 0 1 0 0 0 1     1 1 1 1 0 1 0 1
        1 1 0 1 0 0 0 1     1 1 1 1 0 1 0 1
        0 1 1 1 0 0 0 1     1 1 1 1 0 1 0 1
        0 1 1 1 0 0 0 1     1 1 1 1 0 1 0 1
        0 0 0 1 1 1 0 1     0 1 0 1 1 1 1 1
        0 0 0 1 1 1 0 1     0 1 0 1 1 1 1 1
        0 0 0 1 0 1 1 1     0 1 0 1 1 1 1 1
        0 0 0 1 0 1 1 1     0 1 0 1 1 1 1 1

    length      tokens, or (q_len, kv_len)
    size        tokens in a cell of level 0
    levels      number of levels, 1 (own cell and sibling) to ceil(log2(cells)); None means all
    unit        consecutive tokens of a summary, a divisor of size; None means size
    causal      True also requires d >= 0, where d = q_pos + (kv_len - q_len) - kv_pos
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, q_len, kv_len), shared by every head, exact to the token
    raises      ValueError if a number is out of range or unit does not divide size; TypeError if one is not an int

    Zhu and Soricut, "H-Transformer-1D", arXiv:2107.11906 (hierarchical attention in one dimension).

    >>> hierarchical(65536, size=128).nnz
    5120
    """
    canvas, causal = read_canvas(length, block_size), read_switch("causal", causal)
    size = read_integer("size", size, at_least=1, unit="tokens")
    unit = size if unit is None else read_integer("unit", unit, at_least=1, at_most=size, unit="tokens")
    if size % unit:
        raise ValueError(f"unit: expected a divisor of size, {size} tokens, got {unit}")
    n_levels = _read_levels(canvas, size, levels)
    kept = [Level(size << level, unit << level, unit) for level in range(n_levels)]
    shift, pair = canvas.shift, read_size("size", 2 * size, canvas)
    # with a single level, a cell may exceed the sequence; cap it
    kept[0] = Level(min(size, canvas.q_len + canvas.kv_len + 1), *kept[0][1:])

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        q_pos = q_pos + shift
        is_kept = q_pos.div(pair, rounding_mode="floor") == kv_pos // pair
        for cell, period, unit in kept[1:]:
            is_sibling = q_pos.div(cell, rounding_mode="floor") ^ 1 == kv_pos // cell
            is_kept = is_kept | (is_sibling & (kv_pos % period >= period - unit))
        return is_kept & (kv_pos <= q_pos) if causal else is_kept

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        nearest = chunks_in(canvas, pair, row, col)
        parts = [nearest.queries, nearest.keys, nearest.chunk_distance]
        for level in kept[1:]:
            parts += _dedup_parts(canvas, level, row, col)
        if causal:
            parts.append(np.minimum(canvas.distances(row, col)[0], 0))
        return joint_ids(*parts)

    rows, cols = _candidates(canvas, kept, causal=causal)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)
