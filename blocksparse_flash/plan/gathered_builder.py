"""Builds gathered plans on the host (NumPy): each step has four tiles of 64 x 16, from anywhere in the sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..blocks.block_list import FULL, Array, BlockList, Frame, edge_kinds, in_bounds_bitmasks, regroup
from ..blocks.set_operations import transpose
from ..blocks.transfer import may_pin, sent, views, zeros
from ..plan_format import FINE_TILE, GATHERED_TILE, RECORD, TILES_PER_STEP, Plan, list_lengths, with_dynamic_lengths
from .host_builder import long_of, order_of, records_of

# time of a step that loads four tiles, over that of one that loads their 64 tokens at once
GATHERED_STEP = 1.25


class Direction(NamedTuple):
    """The lists of one direction, over the tile rows of all batch_heads.

    steps      number of steps of each tile row
    n_partial  number of those with a partial or an empty tile
    indices    (all steps, 4 or 1), as in Plan
    ids        (all steps, 4): 0 for an empty tile, else 1 + index of its bitmask
    bitmasks   uint32 (distinct, 64): bits 0-15 for each token of a tile row
    """

    steps: Array
    n_partial: Array
    indices: Array
    ids: Array
    bitmasks: Array


def build_gathered_plan(blocks: BlockList, frame: Frame, device: torch.device, *, non_blocking: bool = False) -> Plan:
    """The gathered plan of a canonical block list of any block size. O(tiles).

    non_blocking  as in transfer.sent
    """
    sides = _direction(blocks, frame), _direction(transpose(blocks, frame), frame.transposed)
    long = [long_of(side.steps.reshape(frame.batch_heads, -1), max(1, len(side.indices))) for side in sides]
    shapes: list[tuple[int, ...]] = []
    for i, (side, lines) in enumerate(zip(sides, long, strict=True)):
        n_indices, n_ids = list_lengths(len(side.indices), lines.n_split, of_rows=i == 0)
        n_lines = len(side.steps) // frame.batch_heads
        shapes += (
            (frame.batch, frame.heads, n_lines, RECORD),
            (n_indices, side.indices.shape[1]),
            (n_ids, TILES_PER_STEP),
        )
    # bitmask 0 is empty
    shapes.append((1 + sum(len(side.bitmasks) for side in sides), FINE_TILE))
    packed, places = zeros(shapes, is_pinned=may_pin(device))
    *lists, words = views(packed, places)
    first = 0
    for side, indices, ids in zip(sides, lists[1::3], lists[2::3], strict=True):
        n_steps, n_bitmasks = len(side.indices), len(side.bitmasks)
        indices[:n_steps], ids[:n_steps] = side.indices, side.ids + first * (side.ids > 0)
        words[1 + first : 1 + first + n_bitmasks] = (side.bitmasks * np.uint32(0x10001)).view(np.int32)
        first += n_bitmasks
    steps, n_partial = (np.concatenate(parts) for parts in list(zip(*sides, strict=True))[:2])
    of_tiles = frame._replace(block_size=(FINE_TILE, FINE_TILE))
    records = records_of(steps, n_partial, int(steps.max(initial=0)), [lines.n_long for lines in long], of_tiles)
    for written, of_side in zip(lists[::3], np.split(records, [len(sides[0].steps)]), strict=True):
        written[...] = of_side.reshape(written.shape)
    return with_dynamic_lengths(Plan(*sent(packed, places, device, non_blocking=non_blocking)))


def _direction(blocks: BlockList, frame: Frame) -> Direction:
    """The lists of tile rows; for those of tile columns, pass the transposed block list."""
    tiles = frame._replace(block_size=(FINE_TILE, GATHERED_TILE))
    keys, ids, bitmasks = regroup(blocks, frame, tiles.block_size)
    line, minor = np.divmod(keys, max(tiles.n_cols, 1))
    # full tiles have bitmasks too, by their edge kind, since they may share a step with partial ones
    kinds = edge_kinds(keys, tiles)
    is_partial = (ids != FULL) | (kinds > 0)
    ids = 1 + np.where(ids == FULL, len(bitmasks) + kinds, ids)
    words = np.concatenate([bitmasks, in_bounds_bitmasks(tiles)])[:, :, 0]
    n_lines = tiles.batch_heads * tiles.n_rows
    steps = -(-np.bincount(line, minlength=n_lines) // TILES_PER_STEP)
    # first tiles of the steps of neighbors, which are aligned like tiles of 64 x 64
    begins = np.ones(len(keys), np.bool_)
    begins[1:] = (line[1:] != line[:-1]) | (minor[1:] // TILES_PER_STEP != minor[:-1] // TILES_PER_STEP)
    if begins.sum() <= GATHERED_STEP * steps.sum():
        return _of_neighbors(line, minor, is_partial, ids, begins.nonzero()[0], n_lines, words)
    return _gathered(line, minor, is_partial, ids, steps, words)


def _gathered(line: Array, minor: Array, is_partial: Array, ids: Array, steps: Array, words: Array) -> Direction:
    """Steps of any four tiles of a tile row, partial tiles first; empty tiles fill up its first step.

    line, minor, is_partial, ids  of each tile: tile row, index of 16 tokens, 1 + index of its bitmask
    """
    n_tiles = np.bincount(line, minlength=len(steps))
    n_empty = TILES_PER_STEP * steps - n_tiles
    first = TILES_PER_STEP * (np.cumsum(steps) - steps) + n_empty
    order = order_of(2 * line + ~is_partial, 2 * len(steps))
    place = (first - (np.cumsum(n_tiles) - n_tiles))[line] + np.arange(len(line))
    indices, of_step = np.full(TILES_PER_STEP * steps.sum(), -1), np.zeros(TILES_PER_STEP * steps.sum(), np.int64)
    indices[place], of_step[place] = minor[order], ids[order]
    n_partial = -(-(n_empty + np.bincount(line[is_partial], minlength=len(steps))) // TILES_PER_STEP)
    return Direction(steps, n_partial, indices.reshape(-1, TILES_PER_STEP), of_step.reshape(-1, TILES_PER_STEP), words)


def _of_neighbors(
    line: Array, minor: Array, is_partial: Array, ids: Array, begins: Array, n_lines: int, words: Array
) -> Direction:
    """Steps of four neighboring tiles; steps with a partial or an empty tile come first.

    line, minor, is_partial, ids  as in _gathered
    begins  the first tile of each step
    """
    of_step, n_steps = np.zeros((len(begins), TILES_PER_STEP), np.int64), np.zeros(len(line), np.int64)
    n_steps[begins] = 1
    which = np.cumsum(n_steps) - 1
    of_step[which, minor % TILES_PER_STEP] = ids
    n_full = np.bincount(which[~is_partial], minlength=len(begins))
    line, minor, is_partial = line[begins], minor[begins] // TILES_PER_STEP, n_full < TILES_PER_STEP
    order = order_of(2 * line + ~is_partial, 2 * n_lines)
    steps, n_partial = (np.bincount(lines, minlength=n_lines) for lines in (line, line[is_partial]))
    return Direction(steps, n_partial, minor[order][:, None], of_step[order], words)
