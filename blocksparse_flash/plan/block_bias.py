"""Which stored block has a pair, as a kernel walks the tiles of a plan, and as a dense mask holds it?

A bias has one number a stored block, in the order of a layout's `indices`. A tile of a plan is cut into pieces so small that
each lies in one block: of gcd(128, side) tokens on each side, whatever the side of a block is.

Knows the tensors of a layout and of its plan, and computes on their device without waiting for it. Must not know BlockLayout,
kernels, or what a bias is added to.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.block_list import Size
from ..kernels.plan_format import PARTIAL, RECORD, TILE, Plan, mark_dynamic
from ..runtime import tracing

# above every key of a block or a tile
_LAST = 2**62


class BiasIndex(NamedTuple):
    """Where tiles find the numbers of blocks, and blocks the pieces of tiles; a tile has (128 / piece_q, 128 / piece_kv) pieces.

    rows    int32 (entries of row_indices, pieces, pieces): which stored block each piece of each listed tile lies in; the
            number of stored blocks where there is none
    cols    the same of col_indices; queries first here too
    places  int64 (stored blocks, pieces of a block): the pieces of a block, as places in `rows`, flat; rows.numel() where a
            plan has dropped the tile
    """

    rows: Tensor
    cols: Tensor
    places: Tensor


def piece_of(block_size: Size) -> Size:
    """Tokens of a piece, queries and keys: powers of two from 16 to 128."""
    return math.gcd(block_size[0], TILE), math.gcd(block_size[1], TILE)


def build(
    indptr: Tensor, indices: Tensor, plan: Plan, *, q_len: int, kv_len: int, block_size: Size, device: torch.device
) -> BiasIndex:
    """The index of a layout's blocks for a plan of it (which may lack tiles). O((tiles + blocks) pieces log nnz)."""
    pieces = piece_of(block_size)
    grid = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    tile_grid = -(-q_len // TILE), -(-kv_len // TILE)
    block = _blocks(indptr.to(device), indices.to(device), grid[0])
    block_keys = torch.cat([_keys(*block, grid), block[0].new_full((1,), _LAST)])

    def of_tiles(tile: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Which block each piece of each tile lies in."""
        axis, q_pos, kv_pos = _tokens(*tile, (TILE, TILE), pieces)
        wanted = _keys(axis, q_pos // block_size[0], kv_pos // block_size[1], grid)
        exists = (q_pos < q_len) & (kv_pos < kv_len)
        found = torch.searchsorted(block_keys, wanted.contiguous())
        return torch.where(exists & (block_keys[found] == wanted), found, len(indices)).to(torch.int32)

    row_tile = _listed(plan.row_records, plan.row_indices)
    axis, col, row = _listed(plan.col_records, plan.col_indices)
    rows = of_tiles(row_tile)

    tile_keys, order = _keys(*row_tile, tile_grid).sort()
    tile_keys = torch.cat([tile_keys, tile_keys.new_full((1,), _LAST)])
    block_axis, q_pos, kv_pos = _tokens(*block, block_size, pieces)
    wanted = _keys(block_axis, q_pos // TILE, kv_pos // TILE, tile_grid)
    # what is not used, and its padding, stand past the last axis
    exists = (q_pos < q_len) & (kv_pos < kv_len) & (block_axis < indptr.shape[0] * indptr.shape[1])
    found = torch.searchsorted(tile_keys, wanted.contiguous())
    exists &= tile_keys[found] == wanted
    inside = q_pos % TILE // pieces[0] * rows.shape[2] + kv_pos % TILE // pieces[1]
    entry = order[found.clamp(max=len(order) - 1)]
    places = torch.where(exists, entry * rows[0].numel() + inside, rows.numel()).flatten(1)
    index = BiasIndex(rows, of_tiles((axis, row, col)), places)
    mark_dynamic(index)
    return index


def _keys(axis: Tensor, row: Tensor, col: Tensor, grid: Size) -> Tensor:
    return (axis * grid[0] + row) * grid[1] + col


def _blocks(indptr: Tensor, indices: Tensor, n_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(axis, row, col) of each stored block, axis = batch * heads + head; of unused entries the axis is past the last."""
    ends = indptr[..., 1:].flatten().to(torch.int64)
    line = torch.searchsorted(ends, torch.arange(len(indices), device=indices.device), right=True)
    return line // max(1, n_rows), line % max(1, n_rows), indices.to(torch.int64)


def _listed(items: Tensor, listed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(axis, major, minor) of each tile that one direction of a plan lists; of padding the axis is past the last."""
    n_major = items.shape[2]
    records = items.reshape(-1, n_major, RECORD).to(torch.int64)
    # records stand in launch order, the tiles in that of the lines
    work = torch.zeros_like(records[..., 0]).scatter_(1, records[..., 0], records[..., 2])
    ends = work.flatten().cumsum(0)
    line = torch.searchsorted(ends, torch.arange(len(listed), device=listed.device), right=True)
    return line // max(1, n_major), line % max(1, n_major), listed.to(torch.int64) & (PARTIAL - 1)


def _tokens(axis: Tensor, row: Tensor, col: Tensor, sides: Size, pieces: Size) -> tuple[Tensor, Tensor, Tensor]:
    """(axis, first query, first key) of each piece of each rectangle: (n, 1, 1), (n, down, 1), (n, 1, across)."""
    down = torch.arange(0, sides[0], pieces[0], device=row.device)
    across = torch.arange(0, sides[1], pieces[1], device=row.device)
    q_pos = (row * sides[0])[:, None, None] + down[:, None]
    kv_pos = (col * sides[1])[:, None, None] + across
    return axis[:, None, None], q_pos, kv_pos


def dense(bias: Tensor, indptr: Tensor, indices: Tensor, *, q_len: int, kv_len: int, block_size: Size) -> Tensor:
    """The bias of every pair, 0 where no block is stored; differentiable, in O(q_len * kv_len).

    bias     (batch | 1, heads | 1, stored blocks); 1 and 1 where the layout itself has batches or heads
    returns  (batch | 1, heads | 1, q_len, kv_len)
    """
    axes, n_rows, n_cols = indptr.shape[:2], indptr.shape[2] - 1, -(-kv_len // block_size[1])
    with tracing.outside_transforms(indptr):
        nnz = int(indptr[-1, -1, -1])
        key = _keys(*_blocks(indptr, indices[:nnz], n_rows), (n_rows, n_cols))
    (key,) = tracing.as_graph_constants([key], bias)
    grid = bias.new_zeros(*bias.shape[:2], axes[0] * axes[1] * n_rows * n_cols)
    grid = grid.index_copy(2, key.to(bias.device), bias[..., :nnz])
    shape = bias.shape[:2] if axes[0] * axes[1] == 1 else axes
    grid = grid.reshape(*shape, n_rows, n_cols)
    pairs = grid.repeat_interleave(block_size[0], dim=2).repeat_interleave(block_size[1], dim=3)
    return pairs[:, :, :q_len, :kv_len]
