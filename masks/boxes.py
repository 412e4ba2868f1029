"""Layouts in which each token of a grid attends to a box: a product of one range per axis.

Shared by the families of grid.py, for row-major tokens or any order of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import Canvas, distinct_blocks, spread
from .kinds import joint_ids, kinds_of_rows

# block sides are multiples of 16, so an aligned group of 16 tokens lies in one row
GROUP = 16


class Axis(NamedTuple):
    """What a token sees along one axis: a token at x sees the coordinates low[x], low[x] + step, ..., high[x].

    low, high  int64 (side,), low[x] <= x <= high[x]
    """

    low: np.ndarray
    high: np.ndarray
    step: int = 1


class Tokens(NamedTuple):
    """The tokens by position, padded to whole blocks with copies of the last token.

    place, low, high  int16 or int32 (axes, padded length): coordinates, and the ends of the ranges seen from there
    """

    place: np.ndarray
    low: np.ndarray
    high: np.ndarray


def _volumes(grid: Sequence[int]) -> list[int]:
    """Strides of the row-major grid, in tokens."""
    return [int(np.prod(grid[axis + 1 :], dtype=np.int64)) for axis in range(len(grid))]


def _tokens(canvas: Canvas, grid: Sequence[int], axes: Sequence[Axis], order: np.ndarray | None) -> Tokens:
    # narrow integers are compared and sorted faster
    narrow = np.int16 if max(grid) < 2**15 else np.int32
    n_padded = max(canvas.n_rows * canvas.block_q, canvas.n_cols * canvas.block_kv)

    def laid_out(numbers_of_axes: list[np.ndarray]) -> np.ndarray:
        laid = np.empty((len(grid), n_padded), dtype=narrow)
        for axis, numbers in enumerate(numbers_of_axes):
            along = numbers.astype(narrow).reshape([-1 if other == axis else 1 for other in range(len(grid))])
            row_major = np.broadcast_to(along, grid).reshape(-1)
            laid[axis, : canvas.q_len] = row_major if order is None else row_major[order]
        laid[:, canvas.q_len :] = laid[:, canvas.q_len - 1, None]
        return laid

    return Tokens(
        place=laid_out([np.arange(side) for side in grid]),
        low=laid_out([axis.low for axis in axes]),
        high=laid_out([axis.high for axis in axes]),
    )


# ------------------------------------------------------------------------------ candidates, row-major


def _pieces(canvas: Canvas, grid: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Block rows cut into pieces that are ranges along one axis: for each axis, (rows, first token, last token).

    A piece is complete along all later axes and constant along all earlier ones. A row has at most two pieces per axis:
    one up to the next complete line, one after the last.
    """
    volumes = _volumes(grid)
    begin = np.arange(canvas.n_rows) * canvas.block_q
    end = np.minimum(begin + canvas.block_q, canvas.q_len)
    ends = []
    # outwards: to the end of the line in which the row begins
    for axis in range(len(grid) - 1, 0, -1):
        whole = begin + (end - begin) // volumes[axis] * volumes[axis]
        stop = np.minimum(-(-begin // volumes[axis - 1]) * volumes[axis - 1], whole)
        ends.append((axis, begin, stop))
        begin = stop
    # inwards: as many complete lines as fit
    for axis, volume in enumerate(volumes):
        stop = begin + (end - begin) // volume * volume
        ends.append((axis, begin, stop))
        begin = stop
    pieces = []
    for axis in range(len(grid)):
        first = np.concatenate([begin for found, begin, _ in ends if found == axis])
        last = np.concatenate([stop for found, _, stop in ends if found == axis]) - 1
        rows = np.tile(np.arange(canvas.n_rows), first.size // max(canvas.n_rows, 1))
        there = last >= first
        pieces.append((rows[there], first[there], last[there]))
    return pieces


def _runs(axis: Axis, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sources, first, last): ranges of coordinates, cut where low[x] - x or high[x] - x changes."""
    coordinates = np.arange(axis.low.size)
    is_cut = np.diff(axis.low - coordinates, prepend=0) != 0
    is_cut |= np.diff(axis.high - coordinates, prepend=0) != 0
    is_cut[0] = True
    begins = np.flatnonzero(is_cut)
    run = np.cumsum(is_cut) - 1
    sources, runs = spread(run[first], run[last] + 1)
    stops = np.append(begins[1:], coordinates.size)
    return sources, np.maximum(first[sources], begins[runs]), np.minimum(last[sources], stops[runs] - 1)


def _seen_ranges(
    grid: Sequence[int], axes: Sequence[Axis], level: int, pieces: tuple[np.ndarray, np.ndarray, np.ndarray], gap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, first, last) of the tokens that the pieces see, as ranges; gaps of less than `gap` tokens are filled."""
    volumes = _volumes(grid)
    rows, first, last = pieces
    corner, end = np.unravel_index(first, grid), np.unravel_index(last, grid)
    axis, volume = axes[level], volumes[level]
    if axis.step * volume <= gap:
        sources = np.arange(rows.size)
        # the hull of everything seen from these coordinates
        least = np.minimum.accumulate(axis.low[::-1])[::-1][corner[level]]
        greatest = np.maximum.accumulate(axis.high)[end[level]]
    else:
        sources, begin, stop = _runs(axis, corner[level], end[level])
        seen, least = _seen(axis, begin)
        sources, greatest = sources[seen], least + (stop - begin)[seen]
    begin, stop = least * volume, greatest * volume + (volume - 1)
    for outer in range(level - 1, -1, -1):
        axis, volume, coordinate = axes[outer], volumes[outer], corner[outer][sources]
        if axis.step * volume <= gap:
            begin, stop = begin + axis.low[coordinate] * volume, stop + axis.high[coordinate] * volume
        else:
            seen, line = _seen(axis, coordinate)
            sources, begin, stop = sources[seen], begin[seen] + line * volume, stop[seen] + line * volume
    return rows[sources], begin, stop


def _seen(axis: Axis, coordinate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sources, coordinates): every coordinate seen from each given one."""
    low = axis.low[coordinate]
    sources, steps = spread(np.zeros_like(low), (axis.high[coordinate] - low) // axis.step + 1)
    return sources, low[sources] + steps * axis.step


def _candidates(canvas: Canvas, grid: Sequence[int], axes: Sequence[Axis]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that may hold a pair of row-major tokens, with repeats."""
    found = [
        _seen_ranges(grid, axes, level, pieces, canvas.block_kv) for level, pieces in enumerate(_pieces(canvas, grid))
    ]
    rows, begin, stop = (np.concatenate(parts) for parts in zip(*found, strict=True))
    first, stop = canvas.cols_between(begin, stop)
    sources, cols = spread(first, stop)
    return rows[sources], cols


# ------------------------------------------------------------------------------ candidates, any order


def _cells(canvas: Canvas, grid: Sequence[int], order: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(cells, cols): for each axis the cell of each coordinate, and the block col that holds all tokens of a cell.

    An axis is cut wherever some token and its neighbor along it are in different cols, so tiles of whole blocks are
    cut only at their faces.
    """
    cols = np.empty_like(order)
    cols[order] = np.arange(order.size) // canvas.block_kv
    cols = cols.reshape(grid)
    cells = []
    for axis in range(len(grid)):
        others = tuple(other for other in range(len(grid)) if other != axis)
        is_cut = np.ones(grid[axis], dtype=bool)
        is_cut[1:] = (np.diff(cols, axis=axis) != 0).any(axis=others)
        cells.append(np.cumsum(is_cut) - 1)
        cols = cols.compress(is_cut, axis=axis)
    return cells, cols


def _groups(
    canvas: Canvas, axes: Sequence[Axis], tokens: Tokens
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rows, low, high, step) of the boxes that groups of queries see; rows (groups,), the others (axes, groups).

    A group is a block row, 16 queries or one query, whichever gives the smallest boxes: large groups pay off where the
    order keeps neighbors together.
    """
    n_queries, steps = canvas.n_rows * canvas.block_q, np.array([axis.step for axis in axes])[:, None]
    found = []
    for size in (canvas.block_q, GROUP, 1):
        place, low, high = (numbers[:, :n_queries].reshape(len(axes), n_queries // size, size) for numbers in tokens)
        # a group at a single coordinate keeps its step, any other fills its range
        step = np.where(place.min(axis=2) == place.max(axis=2), steps, 1)
        low, high = low.min(axis=2).astype(np.int64), high.max(axis=2).astype(np.int64)
        n_seen = ((high - low) // step + 1).prod(axis=0).sum()
        found.append((int(n_seen), np.arange(n_queries // size) * size // canvas.block_q, low, high, step))
    _, rows, low, high, step = min(found, key=lambda group: group[0])
    return rows, low, high, step


def _candidates_in_order(
    canvas: Canvas, grid: Sequence[int], axes: Sequence[Axis], tokens: Tokens, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the blocks that may hold a pair, with repeats."""
    rows, low, high, step = _groups(canvas, axes, tokens)
    cells, cols = _cells(canvas, grid, order)
    sources, places = np.arange(rows.size), np.zeros(rows.size, dtype=np.int64)
    for axis, cell in enumerate(cells):
        begin, end, pace = low[axis, sources], high[axis, sources], step[axis, sources]
        # every cell in the range, or the cells of every step-th coordinate
        counts = np.where(pace > 1, (end - begin) // pace, cell[end] - cell[begin]) + 1
        seen, number = spread(np.zeros_like(counts), counts)
        begin, pace = begin[seen], pace[seen]
        inner = np.where(pace > 1, cell[np.where(pace > 1, begin + number * pace, 0)], cell[begin] + number)
        sources, places = sources[seen], places[seen] * cols.shape[axis] + inner
    return rows[sources], cols.reshape(-1)[places]


# ----------------------------------------------------------------------------------------- the layout


def _along(layout: BlockLayout, canvas: Canvas, tokens: Tokens, step: int) -> BlockLayout:
    """The pairs of `layout` that attend along one axis; `tokens` holds the numbers of that axis."""
    place, low, high = tokens
    in_rows, in_cols = (canvas.n_rows, canvas.block_q), (canvas.n_cols, canvas.block_kv)
    # [rows, block_q] and [cols, block_kv]
    lows, highs = (ends[: canvas.n_rows * canvas.block_q].reshape(in_rows) for ends in (low, high))
    places = place[: canvas.n_cols * canvas.block_kv].reshape(in_cols)
    least, first = lows.min(axis=1, keepdims=True), places.min(axis=1, keepdims=True)
    # relative to the lowest coordinate that the row sees, and to the lowest of the col
    row_kinds = kinds_of_rows(np.concatenate([lows - least, highs - least], axis=1))
    col_kinds = kinds_of_rows(places - first)
    least, first, last = (ends.astype(np.int64).reshape(-1) for ends in (least, first, places.max(axis=1)))
    # what every query of a row sees
    begin, end = lows.max(axis=1), highs.min(axis=1)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        is_full = (begin[row] <= first[col]) & (last[col] <= end[row]) & (step == 1)
        parts = (row_kinds[row], col_kinds[col], first[col] - least[row])
        return joint_ids(is_full.astype(np.int64), *(np.where(is_full, 0, part) for part in parts))

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        # NumPy compares short integers several times faster than PyTorch
        key, lowest, highest = place[kv_pos.numpy()], low[q_pos.numpy()], high[q_pos.numpy()]
        is_kept = (lowest <= key) & (key <= highest)
        return torch.from_numpy(is_kept & ((key - lowest) % step == 0) if step > 1 else is_kept)

    return canvas.from_predicate(attends, within=layout, dedup_key=dedup_key)


def boxes(canvas: Canvas, grid: Sequence[int], axes: Sequence[Axis], order: np.ndarray | None) -> BlockLayout:
    """Each token attends to the product of the ranges that it sees along the axes.

    canvas   q_len and kv_len both equal the number of tokens of the grid, at least one
    axes     one Axis for each axis of the grid
    order    int64 (tokens,), a permutation: the token at each position; None is row-major
    """
    tokens = _tokens(canvas, grid, axes, order)
    if order is None:
        rows, cols = _candidates(canvas, grid, axes)
    else:
        rows, cols = _candidates_in_order(canvas, grid, axes, tokens, order)
    rows, cols = distinct_blocks(canvas, rows, cols)
    layout = canvas.from_blocks(rows, cols)
    # axis by axis: far more blocks are equal along one axis than along all
    for axis, seen in enumerate(axes):
        layout = _along(layout, canvas, Tokens(*(numbers[axis] for numbers in tokens)), seen.step)
    return layout
