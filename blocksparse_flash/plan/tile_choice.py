"""Whether tiles of 64 x 64 pay for a layout: the kernels exist for these and for tiles of 128 x 128.

Tiles of both sizes are counted without making a plan, in a fraction of its time.
"""

from __future__ import annotations

import math

import numpy as np

from ..blocks.block_list import Array, BlockRows, Frame, by_keys, edge_kinds
from ..plan_format import FINE_TILE, TILE

# time per pair in tiles of 64 x 64 over that in tiles of 128 x 128, forward and backward together, by padded head
# dimension: 16,384 tokens, full blocks of 128, see the TUNING.md of each
SLOWDOWN = {"hopper": {64: 1.08, 128: 1.15}, "triton": {64: 1.02, 128: 1.04}}
# largest share of a layout for which 64 x 64 tiles can pay
MAX_SHARE = 1 / min(min(by_dim.values()) for by_dim in SLOWDOWN.values())
# the share taken for small blocks that are selected on the device, which is not waited for
SELECTED_SHARE = 0.5
# bitmasks are read in pieces of 16 keys
_PIECE = 16


def pays(share: float, dim: int, kernels: str) -> bool:
    """Whether 64 x 64 tiles are faster for a layout with this `fine_share`.

    dim      the larger head dimension, padded to 64 or 128
    kernels  "hopper" or "triton"
    """
    return share * SLOWDOWN[kernels][dim] <= 1


def fine_share(rows: BlockRows, frame: Frame) -> float:
    """Pairs in a layout's tiles of 64 x 64 tokens / pairs in its tiles of 128 x 128: from 0.25 to 1.

    Only tiles with an attending pair count; those on a ragged edge count whole. 1.0 if there are none, and at once for
    full blocks whose sides are multiples of 128.
    """
    if not len(rows.cols) or (not len(rows.bitmasks) and _tiled_by(frame, TILE)):
        return 1.0
    keys = by_keys(rows, frame).keys
    # a full block has the cells that exist, of its edge kind
    ids = np.where(rows.ids < 0, len(rows.bitmasks) + edge_kinds(keys, frame), rows.ids)
    cells = np.concatenate([_cells(rows.bitmasks, frame), _existing_cells(frame)])
    fine, coarse = (_n_tiles(cells, ids, keys, frame, side) for side in (FINE_TILE, TILE))
    return fine * FINE_TILE**2 / (coarse * TILE**2)


def _tiled_by(frame: Frame, side: int) -> bool:
    """Whether blocks consist of whole tiles."""
    return all(of_block % side == 0 for of_block in frame.block_size)


def _unit(frame: Frame) -> tuple[int, int]:
    """(queries, keys) of a cell, which lies in one tile of 64 x 64 and in one block."""
    return math.gcd(frame.block_size[0], FINE_TILE), math.gcd(frame.block_size[1], FINE_TILE)


def _cells(bitmasks: Array, frame: Frame) -> Array:
    """Whether any pair of each cell attends: bool (bitmasks, cells down, cells across)."""
    (block_q, block_kv), (unit_q, unit_kv) = frame.block_size, _unit(frame)
    lines = bitmasks.reshape(len(bitmasks), block_q // unit_q, unit_q, bitmasks.shape[2])
    pieces = np.bitwise_or.reduce(lines, axis=2).view(np.uint16)[:, :, : block_kv // _PIECE]
    found: Array = pieces.reshape(*pieces.shape[:2], block_kv // unit_kv, unit_kv // _PIECE).any(axis=3)
    return found


def _existing_cells(frame: Frame) -> Array:
    """`_cells` of full blocks, by edge kind: see block_list.existing."""
    exists = [
        np.arange(0, side, unit) < (length % side or side)
        for length, side, unit in zip(frame[2:4], frame.block_size, _unit(frame), strict=True)
    ]
    every = [np.ones_like(part) for part in exists]
    kinds = (every, (every[0], exists[1]), (exists[0], every[1]), exists)
    return np.stack([np.outer(down, across) for down, across in kinds])


def _n_tiles(cells: Array, ids: Array, keys: Array, frame: Frame, side: int) -> int:
    """Tiles of side x side tokens that a block's cells lie in, each counted once.

    ids   index into cells, of each block
    keys  of the blocks
    """
    if _tiled_by(frame, side):
        # no two blocks share a tile
        n, down, across = cells.shape
        per = side // FINE_TILE
        held = cells.reshape(n, down // per, per, across // per, per).any(axis=(2, 4)).sum(axis=(1, 2))
        return int(np.bincount(ids, minlength=n) @ held)
    tiled, units = frame._replace(block_size=(side, side)), _unit(frame)
    leads, *lines = frame.positions(keys)
    block, *places = cells[ids].nonzero()
    row, col = (
        (line[block] * of_block + place * unit) // side
        for line, of_block, place, unit in zip(lines, frame.block_size, places, units, strict=True)
    )
    found = np.sort((leads[block] * tiled.n_rows + row) * tiled.n_cols + col)
    return int(np.count_nonzero(found[1:] != found[:-1])) + 1
