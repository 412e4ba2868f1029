"""Vertical-slash masks of MInference: chosen key columns and chosen diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize, Canvas, Length, blocks_between, distinct_blocks, read_canvas, spread
from .checks import read_integers
from .heads import by_head
from .kinds import kinds_of_rows, kinds_of_sides
from .public import public

Numbers = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor


def _is_nested(values: object) -> bool:
    if isinstance(values, np.ndarray | torch.Tensor):
        return values.ndim == 2
    return isinstance(values, Sequence) and any(
        isinstance(part, Sequence | np.ndarray | torch.Tensor) for part in values
    )


def _read_marks(name: str, values: Numbers, kv_len: int) -> list[np.ndarray]:
    """bool (kv_len,) for each head, or a single one for all: True at the given numbers."""
    nested: list[Any] = list(values) if _is_nested(values) else [values]
    if not nested:
        raise ValueError(f"{name}: expected at least one head, got none")
    every = []
    for head, part in enumerate(nested):
        place = f"{name}[{head}]" if _is_nested(values) else name
        numbers = read_integers(place, part)
        is_outside = (numbers < 0) | (numbers >= kv_len)
        if is_outside.any():
            raise ValueError(
                f"{place}: expected numbers from 0 to {kv_len - 1}, one less than the keys, got "
                f"{numbers[is_outside][0]} at index {np.flatnonzero(is_outside)[0]}"
            )
        marks = np.zeros(kv_len, dtype=bool)
        marks[numbers] = True
        every.append(marks)
    return every


def _candidates(canvas: Canvas, is_vertical: np.ndarray, is_slash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that hold a pair, unique and ascending."""
    first_query, last_query = canvas.row_span(np.arange(canvas.n_rows))
    # the rows that see the first vertical of a col meet the col
    verticals = np.flatnonzero(is_vertical)
    marked_cols, first_vertical = np.unique(verticals // canvas.block_kv, return_index=True)
    n_seen = np.searchsorted(verticals[first_vertical], last_query, side="right")
    rows, places = spread(np.zeros_like(n_seen), n_seen)
    cols = marked_cols[places]
    # consecutive slashes form a band: distances begins .. ends
    edges = np.flatnonzero(np.diff(is_slash, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2] - 1
    # [rows, bands]
    band_rows, band_cols = blocks_between(canvas, first_query[:, None] - ends, last_query[:, None] - begins)
    return distinct_blocks(canvas, np.append(rows, band_rows), np.append(cols, band_cols))


def _one_head(canvas: Canvas, is_vertical: np.ndarray, is_slash: np.ndarray) -> BlockLayout:
    shift, span = canvas.shift, canvas.block_q + canvas.block_kv
    vertical_keys, slash_distances = torch.from_numpy(is_vertical), torch.from_numpy(is_slash)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        distance = q_pos + shift - kv_pos
        return (vertical_keys[kv_pos] | slash_distances[distance.clamp(min=0)]) & (distance >= 0)

    col_kinds = kinds_of_sides(is_vertical, canvas.block_kv)
    # padded by the most that a block reaches beyond the valid distances
    padded = np.zeros(is_slash.size + 2 * span, dtype=bool)
    padded[span : span + is_slash.size] = is_slash
    windows = np.lib.stride_tricks.sliding_window_view(padded, span - 1)
    n_slashes_before = np.append(0, np.cumsum(padded))

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        lowest, _ = canvas.distances(row, col)
        # the lowest distance of a block determines its slashes
        lows, which = np.unique(lowest, return_inverse=True)
        begin = lows + span
        kinds = np.zeros(lows.size, dtype=np.int64)
        is_marked = n_slashes_before[begin + span - 1] > n_slashes_before[begin]
        kinds[is_marked] = kinds_of_rows(np.packbits(windows[begin[is_marked]], axis=1)) + 1
        n_kinds = int(kinds.max(initial=0)) + 1
        # blocks that reach beyond the diagonal also depend on the distance
        return (col_kinds[col] * n_kinds + kinds[which]) * span - np.minimum(lowest, 0)

    rows, cols = _candidates(canvas, is_vertical, is_slash)
    return canvas.from_predicate(attends, within=canvas.from_blocks(rows, cols), dedup_key=dedup_key)


@public
def vertical_slash(length: Length, *, verticals: Numbers, slashes: Numbers, block_size: BlockSize = 128) -> BlockLayout:
    """Each token attends to the chosen keys before it, and to the tokens at the chosen distances back.

    Keeps d >= 0 and (kv_pos in verticals or d in slashes), where d = q_pos + (kv_len - q_len) - kv_pos: the sequences
    are aligned bottom-right. The diagonal is not added. slashes=range(100) is a window of 100 tokens,
    verticals=range(4) are four attention sinks.

    verticals=[1], slashes=[0, 3] on 5 tokens:
        1 0 0 0 0
        0 1 0 0 0
        0 1 1 0 0
        1 1 0 1 0
        0 1 0 0 1

    length      tokens, or (q_len, kv_len)
    verticals   positions among the keys, 0 to kv_len - 1, in any order (sequence, array or tensor of ints); a nested
                sequence has one list per head
    slashes     distances, 0 (the diagonal) to kv_len - 1; a nested sequence has one list per head
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, heads | 1, q_len, kv_len), exact to the token; one head, shared by all, unless
                an argument is nested
    raises      ValueError if a number is out of range or the numbers of heads differ; TypeError unless all are ints

    Jiang et al., "MInference 1.0", arXiv:2407.02490, section 3.2 (vertical-slash). MInference always includes the
    first 30 keys and the 100 nearest distances.

    >>> vertical_slash(1024, verticals=[0, 500], slashes=range(100)).density
    0.375
    """
    canvas = read_canvas(length, block_size)
    every_vertical = _read_marks("verticals", verticals, canvas.kv_len)
    every_slash = _read_marks("slashes", slashes, canvas.kv_len)
    heads = max(len(every_vertical), len(every_slash))
    if not {len(every_vertical), len(every_slash)} <= {1, heads}:
        raise ValueError(
            f"verticals, slashes: expected equally many heads, or one list for all, "
            f"got {len(every_vertical)} and {len(every_slash)}"
        )
    # a single list is shared by every head
    return by_head(
        lambda head: _one_head(
            canvas, every_vertical[head % len(every_vertical)], every_slash[head % len(every_slash)]
        ),
        range(heads),
    )
