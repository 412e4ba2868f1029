"""Mapping between stored blocks and the cells of a plan's tiles, for `block_bias`; biases from and to dense form.

A bias has one number per stored block, in the order of the layout's `indices`. Tiles are cut into cells of
gcd(128, side) tokens per side, so that each cell lies in one block, whatever the block size. Everything is computed on
the device of the tensors, without waiting for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks.block_list import Size
from ..blocks.checks import check_strided, check_tensor
from ..plan_format import BEGIN, N_TILES, NUMBER, PARTIAL, RECORD, TILE, Plan, mark_dynamic
from ..runtime import tracing

# above every key of a block or a tile
_LAST = 2**62


class BiasIndex(NamedTuple):
    """Blocks of each tile's cells, and cells of each block. A tile has (128 / cell_q, 128 / cell_kv) cells.

    rows    int32 (entries of row_indices, cells, cells): the stored block of each cell of each listed tile; the
            number of stored blocks if there is none
    cols    the same for col_indices; queries first here too
    row_places  int64 (stored blocks, cells of a block): flat indices into `rows` of a block's cells; rows.numel() if
                the plan lacks the tile
    col_places  the same for `cols`
    """

    rows: Tensor
    cols: Tensor
    row_places: Tensor
    col_places: Tensor


def bias_cell_of(block_size: Size) -> Size:
    """(queries, keys) of a cell: powers of two from 16 to 128."""
    return math.gcd(block_size[0], TILE), math.gcd(block_size[1], TILE)


def build(
    indptr: Tensor, indices: Tensor, plan: Plan, *, q_len: int, kv_len: int, block_size: Size, device: torch.device
) -> BiasIndex:
    """The index of a layout's blocks for its plan, which may lack tiles. O((tiles + blocks) cells log nnz)."""
    cell = bias_cell_of(block_size)
    grid = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    tile_grid = -(-q_len // TILE), -(-kv_len // TILE)
    block = _blocks(indptr.to(device), indices.to(device), grid[0])
    block_keys = torch.cat([_keys(*block, grid), block[0].new_full((1,), _LAST)])

    block_head, block_q_pos, block_kv_pos = _tokens(*block, block_size, cell)
    wanted_tiles = _keys(block_head, block_q_pos // TILE, block_kv_pos // TILE, tile_grid).contiguous()
    # unused entries and padding have a batch_head past the last one
    is_used = block_head < indptr.shape[0] * indptr.shape[1]
    is_used = is_used & (block_q_pos < q_len) & (block_kv_pos < kv_len)
    cells = TILE // cell[0], TILE // cell[1]
    inside = block_q_pos % TILE // cell[0] * cells[1] + block_kv_pos % TILE // cell[1]

    def blocks_of(tile: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The block that each cell of each tile lies in."""
        batch_head, q_pos, kv_pos = _tokens(*tile, (TILE, TILE), cell)
        wanted = _keys(batch_head, q_pos // block_size[0], kv_pos // block_size[1], grid)
        exists = (q_pos < q_len) & (kv_pos < kv_len)
        found = torch.searchsorted(block_keys, wanted.contiguous())
        return torch.where(exists & (block_keys[found] == wanted), found, len(indices)).to(torch.int32)

    def places_in(tile: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Where each cell of each block lies in a list of tiles."""
        tile_keys, order = _keys(*tile, tile_grid).sort()
        tile_keys = torch.cat([tile_keys, tile_keys.new_full((1,), _LAST)])
        found = torch.searchsorted(tile_keys, wanted_tiles)
        exists = is_used & (tile_keys[found] == wanted_tiles)
        entry = order[found.clamp(max=len(order) - 1)]
        n_cells = cells[0] * cells[1]
        return torch.where(exists, entry * n_cells + inside, len(order) * n_cells).flatten(1)

    row_tile = _listed(plan.row_records, plan.row_indices)
    batch_head, col, row = _listed(plan.col_records, plan.col_indices)
    col_tile = batch_head, row, col
    index = BiasIndex(blocks_of(row_tile), blocks_of(col_tile), places_in(row_tile), places_in(col_tile))
    mark_dynamic(index)
    return index


def _keys(batch_head: Tensor, row: Tensor, col: Tensor, grid: Size) -> Tensor:
    return (batch_head * grid[0] + row) * grid[1] + col


def _blocks(indptr: Tensor, indices: Tensor, n_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(batch_head, row, col) of each stored block; batch_head is past the last one for unused entries."""
    ends = indptr[..., 1:].flatten().to(torch.int64)
    line = torch.searchsorted(ends, torch.arange(len(indices), device=indices.device), right=True)
    return line // max(1, n_rows), line % max(1, n_rows), indices.to(torch.int64)


def _listed(records: Tensor, listed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch_head, major, minor) of each list entry of one direction; batch_head is past the last one for padding."""
    n_major = records.shape[2]
    records = records.reshape(-1, n_major, RECORD).to(torch.int64)
    # records are in launch order, lists in the order of tile rows, perhaps with room after each
    begins, n_tiles = (
        torch.zeros_like(records[..., 0]).scatter_(1, records[..., NUMBER], records[..., word]).flatten()
        for word in (BEGIN, N_TILES)
    )
    entry = torch.arange(len(listed), device=listed.device)
    # the last list that begins at the entry or before it: those before it that begin there too are empty
    line = torch.searchsorted(begins, entry, right=True) - 1
    if not len(begins):
        return line, line, listed.to(torch.int64) & (PARTIAL - 1)
    line = line.where(entry < (begins + n_tiles)[line.clamp(min=0)], len(begins))
    return line // max(1, n_major), line % max(1, n_major), listed.to(torch.int64) & (PARTIAL - 1)


def _tokens(batch_head: Tensor, row: Tensor, col: Tensor, sides: Size, cell: Size) -> tuple[Tensor, Tensor, Tensor]:
    """(batch_head, first query, first key) of each cell of each rectangle: (n, 1, 1), (n, down, 1), (n, 1, across)."""
    down = torch.arange(0, sides[0], cell[0], device=row.device)
    across = torch.arange(0, sides[1], cell[1], device=row.device)
    q_pos = (row * sides[0])[:, None, None] + down[:, None]
    kv_pos = (col * sides[1])[:, None, None] + across
    return batch_head[:, None, None], q_pos, kv_pos


def check_scores(scores: Tensor, axes: Size, grid: Size) -> None:
    """Refuses `block_scores` of a layout with these (batch, heads) and (n_rows, n_cols)."""
    check_tensor("block_scores", scores)
    check_strided(scores, "block_scores")
    has_axes = axes != (1, 1)
    fits = scores.ndim == 4 and tuple(scores.shape[2:]) == grid and 0 not in scores.shape[:2]
    if not fits or (has_axes and any(a not in (1, b) for a, b in zip(scores.shape[:2], axes, strict=True))):
        batch, heads = (f"{axes[0]} or 1", f"{axes[1]} or 1") if has_axes else ("batch", "heads")
        raise ValueError(
            f"block_scores must have shape ({batch}, {heads}, n_rows = {grid[0]}, n_cols = {grid[1]}), got "
            f"{tuple(scores.shape)}: one score for each block of the grid, stored or not, as of means of q and of k; "
            "values of stored blocks alone are a block_bias already"
        )


def index_of_entries(indptr: Tensor, indices: Tensor, n_cols: int, batch_heads: Size) -> tuple[Tensor, Tensor]:
    """Where the entries of a layout's `indices` lie in scores (*batch_heads, n_rows, n_cols). Does not synchronize.

    batch_heads  axes of the scores, 1 where all batches or heads of the layout share them; (1, 1) for a layout with
                 (1, 1)
    returns  int64 (capacity,) flat index, 0 for unused entries; bool (capacity,), whether an entry is used
    """
    (batch, heads), n_rows = indptr.shape[:2], indptr.shape[2] - 1
    batch_head, row, col = _blocks(indptr, indices, n_rows)
    of_batch = batch_head // heads if batch_heads[0] > 1 else torch.zeros_like(batch_head)
    of_head = batch_head % heads if batch_heads[1] > 1 else torch.zeros_like(batch_head)
    is_used = batch_head < batch * heads
    index = ((of_batch * batch_heads[1] + of_head) * n_rows + row) * n_cols + col
    return index.where(is_used, torch.zeros_like(index)), is_used


def dense(bias: Tensor, indptr: Tensor, indices: Tensor, *, q_len: int, kv_len: int, block_size: Size) -> Tensor:
    """The bias of every pair, 0 where no block is stored. Differentiable; time and memory O(q_len * kv_len).

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
