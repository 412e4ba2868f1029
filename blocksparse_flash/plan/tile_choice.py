"""Choice of the tiles of a layout: of 128 x 128, of 64 x 64, or the gathered ones of 64 x 16 and 16 x 64.

Tiles of all sizes are counted without making a plan, in a fraction of the time that a plan takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..blocks.block_list import Array, BlockRows, Frame, Size, by_keys, edge_kinds
from ..plan_format import FINE_TILE, GATHERED_TILE, TILE
from .gathered_builder import GATHERED_STEP

# time per pair in tiles of 64 x 64 over that in tiles of 128 x 128, forward and backward together, by padded head
# dimension: 16,384 tokens, see the TUNING.md of each
SLOWDOWN = {"hopper": {64: 1.08, 128: 1.2}, "triton": {64: 1.02, 128: 1.04}}
# the same for gathered tiles, which only `hopper` has
GATHERED_SLOWDOWN = {64: 1.45, 128: 1.6}
# a bitmask is read 16 keys at a time
_KEYS_PER_READ = 16


class Shares(NamedTuple):
    """Pairs in a layout's smaller tiles / pairs in its tiles of 128 x 128; 1.0 if it has no pairs.

    Only tiles with an attending pair count; those on a ragged edge count whole.

    fine      in tiles of 64 x 64: 1/4 to 1
    gathered  in gathered tiles: the mean of 64 x 16 and 16 x 64, each at most fine / GATHERED_STEP, which stands for
              steps of four neighbors; from 1/16. As `fine` for full blocks of whole tiles of 64 x 64, which gain
              nothing from gathered tiles
    """

    fine: float
    gathered: float

    def fastest(self, dim: int, kernels: str) -> int:
        """`Plan.tile` of the fastest plan for these kernels; arguments as of `times`."""
        fine, gathered = self.times(dim, kernels)
        if gathered < min(fine, 1.0):
            return GATHERED_TILE
        return FINE_TILE if fine <= 1 else TILE

    def time(self, dim: int, kernels: str) -> float:
        """The time of the fastest tiles, over that of 128 x 128; arguments as of `times`."""
        return min(1.0, *self.times(dim, kernels))

    def times(self, dim: int, kernels: str) -> tuple[float, float]:
        """(time in tiles of 64 x 64, time in gathered tiles), each over the time in tiles of 128 x 128.

        dim      the larger head dimension, padded to 64 or 128
        kernels  "hopper" or "triton"
        """
        gathered = self.gathered * GATHERED_SLOWDOWN[dim] if kernels == "hopper" else 1.0
        return self.fine * SLOWDOWN[kernels][dim], gathered

    @property
    def tiles(self) -> list[int]:
        """`Plan.tile` of every plan that a call may choose, over all backends and head dimensions."""
        return sorted({self.fastest(dim, kernels) for kernels in SLOWDOWN for dim in SLOWDOWN[kernels]})


WHOLE = Shares(1.0, 1.0)
# assumed for small blocks selected on a device, since counting them would wait for the device
SELECTED = Shares(0.5, 1.0)


def shares_of(rows: BlockRows, frame: Frame) -> Shares:
    """The shares of a layout; WHOLE at once for full blocks whose sides are multiples of 128."""
    if not len(rows.cols) or (not len(rows.bitmasks) and _tiled_by(frame, (TILE, TILE))):
        return WHOLE
    keys = by_keys(rows, frame).keys
    # a full block has the cells that exist, of its edge kind
    ids = np.where(rows.ids < 0, len(rows.bitmasks) + edge_kinds(keys, frame), rows.ids)

    def pairs(cells: Array, unit: Size, *sides: Size) -> list[int]:
        return [_n_tiles(cells, unit, ids, keys, frame, side) * side[0] * side[1] for side in sides]

    unit = _unit(frame, FINE_TILE)
    fine, coarse = pairs(_all_cells(rows.bitmasks, frame, unit), unit, (FINE_TILE, FINE_TILE), (TILE, TILE))
    if not len(rows.bitmasks) and _tiled_by(frame, (FINE_TILE, FINE_TILE)):
        return Shares(fine / coarse, fine / coarse)
    unit = _unit(frame, GATHERED_TILE)
    gathered = pairs(
        _all_cells(rows.bitmasks, frame, unit), unit, (FINE_TILE, GATHERED_TILE), (GATHERED_TILE, FINE_TILE)
    )
    times = (min(of_side, fine / GATHERED_STEP) for of_side in gathered)
    return Shares(fine / coarse, sum(times) / (2 * coarse))


def _tiled_by(frame: Frame, side: Size) -> bool:
    """Whether blocks consist of whole tiles."""
    return frame.block_size[0] % side[0] == 0 and frame.block_size[1] % side[1] == 0


def _unit(frame: Frame, side: int) -> Size:
    """(queries, keys) of a cell, which lies in one tile of side x side and in one block."""
    return math.gcd(frame.block_size[0], side), math.gcd(frame.block_size[1], side)


def _all_cells(bitmasks: Array, frame: Frame, unit: Size) -> Array:
    """`_cells` of the bitmasks, then of full blocks of each edge kind."""
    return np.concatenate([_cells(bitmasks, frame, unit), _existing_cells(frame, unit)])


def _cells(bitmasks: Array, frame: Frame, unit: Size) -> Array:
    """Whether any pair of each cell attends: bool (bitmasks, cells down, cells across)."""
    (block_q, block_kv), (unit_q, unit_kv) = frame.block_size, unit
    lines = bitmasks.reshape(len(bitmasks), block_q // unit_q, unit_q, bitmasks.shape[2])
    pieces = np.bitwise_or.reduce(lines, axis=2).view(np.uint16)[:, :, : block_kv // _KEYS_PER_READ]
    found: Array = pieces.reshape(*pieces.shape[:2], block_kv // unit_kv, unit_kv // _KEYS_PER_READ).any(axis=3)
    return found


def _existing_cells(frame: Frame, units: Size) -> Array:
    """`_cells` of full blocks, by edge kind: see block_list.in_bounds_bitmasks."""
    exists = [
        np.arange(0, side, unit) < (length % side or side)
        for length, side, unit in zip(frame[2:4], frame.block_size, units, strict=True)
    ]
    every = [np.ones_like(part) for part in exists]
    kinds = (every, (every[0], exists[1]), (exists[0], every[1]), exists)
    return np.stack([np.outer(down, across) for down, across in kinds])


def _n_tiles(cells: Array, units: Size, ids: Array, keys: Array, frame: Frame, side: Size) -> int:
    """Number of tiles of `side` tokens in which attending cells of the blocks lie.

    units  (queries, keys) of a cell
    ids   index into cells, of each block
    keys  of the blocks
    """
    if _tiled_by(frame, side):
        # no two blocks share a tile
        n, down, across = cells.shape
        per_q, per_kv = side[0] // units[0], side[1] // units[1]
        held = cells.reshape(n, down // per_q, per_q, across // per_kv, per_kv).any(axis=(2, 4)).sum(axis=(1, 2))
        return int(np.bincount(ids, minlength=n) @ held)
    tiled = frame._replace(block_size=side)
    batch_heads, *lines = frame.positions(keys)
    block, *places = cells[ids].nonzero()
    row, col = (
        (line[block] * of_block + place * unit) // of_tile
        for line, of_block, place, unit, of_tile in zip(lines, frame.block_size, places, units, side, strict=True)
    )
    found = np.sort((batch_heads[block] * tiled.n_rows + row) * tiled.n_cols + col)
    return int(np.count_nonzero(found[1:] != found[:-1])) + 1
