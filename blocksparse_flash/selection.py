"""How does a selection of blocks made on a device become a layout and a plan, without the host knowing what was selected?

Everything has the size that the number of selected entries allows (its capacity), so nothing waits for the device and a CUDA
graph can capture it; what is unused stands behind what is used.

Knows index tensors, block sizes and the records of a plan. Must not know BlockLayout, patterns or backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import arguments
from .blocks import FULL, Frame, Size
from .plan import PARTIAL, RECORD, TILE, Plan, of_any_length

# sub-blocks of a tile up to which every bitmask that can occur is made in advance: 2^4 patterns
FEW = 4


def frame_of(values: Tensor, name: str, frame: Frame, *, kind: str) -> Frame:
    """The frame with the batch and heads of `values`, which must have a row for every block row.

    kind  "integers" (any number a row) or "floats" (one for every col)
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(values).__name__}")
    is_integer = not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool
    if not (is_integer if kind == "integers" else values.is_floating_point()):
        raise ValueError(f"{name} must be {kind}, got {values.dtype}")
    last, size = ("k", None) if kind == "integers" else (f"n_cols = {frame.n_cols}", frame.n_cols)
    if (
        values.ndim != 4
        or 0 in values.shape[:2]
        or values.shape[2] != frame.n_rows
        or size not in (None, values.shape[3])
    ):
        raise ValueError(
            f"{name} must have shape (batch or 1, heads or 1, n_rows = {frame.n_rows}, {last}), got {tuple(values.shape)}"
        )
    for side in frame.block_size:
        if TILE % side and side % TILE:
            raise ValueError(
                f"block_size must divide {TILE} or be a multiple of it for blocks selected on a device, got "
                f"{frame.block_size}: from_block_mask() takes any size, on the host"
            )
    arguments.check_nnz(values.numel())
    return frame._replace(batch=values.shape[0], heads=values.shape[1])


def check_cols(selected: Tensor, frame: Frame) -> None:
    """Refuse cols that do not exist, where looking costs nothing: on the CPU."""
    if selected.device.type != "cpu" or not selected.numel():
        return
    low, high = (int(bound) for bound in selected.aminmax())
    if low < -1 or high >= frame.n_cols:
        raise ValueError(
            f"indices must be -1 (none) or in 0 .. n_cols - 1 = {frame.n_cols - 1}, got {low if low < -1 else high}"
        )


def highest(scores: Tensor, frame: Frame, k: int, *, causal: bool) -> Tensor:
    """The cols with the k highest scores of each row, -1 where fewer than k can be selected."""
    if arguments.integer(k, "k") < 1:
        raise ValueError(f"k must be at least 1 col a row, got {k}")
    values, cols = scores.detach(), torch.arange(frame.n_cols, device=scores.device)
    allowed = ~(values.isnan() | values.isneginf())
    if causal:
        last_q = ((torch.arange(frame.n_rows, device=scores.device) + 1) * frame.block_size[0]).clamp(
            max=frame.q_len
        ) - 1
        allowed &= cols * frame.block_size[1] <= last_q[:, None] + (frame.kv_len - frame.q_len)
    values = values.masked_fill(~allowed, float("-inf"))
    found = values.topk(min(k, frame.n_cols), dim=3)
    return found.indices.masked_fill(found.values.isneginf(), -1)


def sorted_rows(selected: Tensor, n_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and bitmask_ids (all full) of the cols that each row selects.

    selected  integers (batch, heads, n_rows, k); what is not in 0 .. n_cols - 1, and what was named before, is left out
    returns   int32 (batch, heads, n_rows + 1), (capacity,), (capacity,), capacity = number of entries of `selected`
    """
    batch, heads, n_rows, k = selected.shape
    cols = selected.to(torch.int64)
    cols = (
        torch.where((cols >= 0) & (cols < n_cols), cols, n_cols).reshape(batch * heads * n_rows, k).sort(dim=1).values
    )
    is_used = cols < n_cols
    is_used[:, 1:] &= cols[:, 1:] != cols[:, :-1]
    ends = is_used.sum(dim=1).cumsum(0)
    # where each entry goes, in order; unused ones to a place behind the last
    place = torch.where(is_used.flatten(), is_used.flatten().cumsum(0) - 1, cols.numel())
    indices = cols.new_zeros(cols.numel() + 1).scatter_(0, place, cols.flatten())[:-1]
    ends = ends.reshape(batch * heads, n_rows)
    starts = torch.nn.functional.pad(ends[:-1, -1:], (0, 0, 1, 0)) if n_rows else ends.new_zeros(batch * heads, 1)
    indptr = torch.cat([starts, ends], dim=1).reshape(batch, heads, n_rows + 1)
    return indptr.to(torch.int32), indices.to(torch.int32), torch.full_like(indices, FULL, dtype=torch.int32)


def build_plan(indptr: Tensor, indices: Tensor, *, q_len: int, kv_len: int, block_size: Size, causal: bool) -> Plan:
    """What plan.build_plan makes of the same full blocks, on the device of the tensors and without waiting for it.

    The lists have the length that capacity allows, and more bitmasks may be there than any tile has.
    causal  also drops the pairs with kv_pos > q_pos + (kv_len - q_len)
    """
    grid = -(-q_len // TILE), -(-kv_len // TILE)
    axes = indptr.shape[0] * indptr.shape[1]
    key, pattern, n_sub = _tiles(indptr, indices, grid, block_size)
    n_tiles = axes * grid[0] * grid[1]
    axis, rest = key // max(1, grid[0] * grid[1]), key % max(1, grid[0] * grid[1])
    row, col = rest // max(1, grid[1]), rest % max(1, grid[1])
    is_used = key < n_tiles

    edge = 2 * ((row == grid[0] - 1) & (q_len % TILE != 0)) + ((col == grid[1] - 1) & (kv_len % TILE != 0))
    diagonal = torch.zeros_like(row)
    if causal:
        # how far the first query of a tile stands behind its first key: from TILE - 1 on every pair attends
        behind = (row - col) * TILE + (kv_len - q_len)
        is_used = is_used & (behind > -TILE)
        # only two distances occur where the diagonal crosses: 1 and 2 stand for them
        diagonal = torch.where(behind >= TILE - 1, 0, torch.where(behind >= 0, 1, 2))
    is_full = (pattern == -1 if n_sub == 64 else pattern == (1 << n_sub) - 1) & (edge == 0) & (diagonal == 0)
    looks = _Looks(block_size, q_len, kv_len, key.device)
    if n_sub <= FEW:
        ids = (diagonal * 4 + edge) * 2**n_sub + pattern
        every = torch.arange((3 if causal else 1) * 4 * 2**n_sub, device=key.device)
        words = looks.words(every % 2**n_sub, every >> n_sub & 3, every >> (n_sub + 2))
    else:
        ids = torch.arange(len(key), device=key.device)
        words = looks.words(pattern, edge, diagonal)
    # the diagonal may leave nothing of a tile
    is_used = is_used & (words != 0).flatten(1).any(dim=1)[ids]

    sides: list[Tensor] = []
    for major, minor, n_major, residue in ((row, col, grid[0], 1), (col, row, grid[1], 3)):
        line = torch.where(is_used, axis * n_major + major, axes * n_major)
        records, listed, listed_ids = _walk(line, minor, ids, is_full, axes, n_major)
        shape = (*indptr.shape[:2], n_major, RECORD)
        sides += [records.reshape(shape), *(_padded(values, residue) for values in (listed, listed_ids))]
    return of_any_length(Plan(*(tensor.to(torch.int32) for tensor in (*sides, words))))


def _tiles(indptr: Tensor, indices: Tensor, grid: Size, block_size: Size) -> tuple[Tensor, Tensor, int]:
    """The tiles which blocks lie in: ascending keys (axis * rows + row) * cols + col, each once, and which of its n_sub
    sub-blocks it has, as bits. Behind them keys past the last tile."""
    axes, device = indptr.shape[0] * indptr.shape[1], indices.device
    n_rows = indptr.shape[2] - 1
    entry = torch.arange(len(indices), device=device)
    # (axis, row) of each entry; past the end for unused ones
    line = torch.searchsorted(indptr[..., 1:].flatten().to(torch.int64), entry, right=True)
    axis, row, col = line // max(1, n_rows), line % max(1, n_rows), indices.to(torch.int64)
    # tiles of a block along each axis, blocks of a tile along each axis
    tiles = [max(1, side // TILE) for side in block_size]
    parts = [max(1, TILE // side) for side in block_size]
    sub = row % parts[0] * parts[1] + col % parts[1]
    step = torch.arange(tiles[0] * tiles[1], device=device)
    tile_row = row[:, None] // parts[0] * tiles[0] + step // tiles[1]
    tile_col = col[:, None] // parts[1] * tiles[1] + step % tiles[1]
    n_tiles = axes * grid[0] * grid[1]
    exists = (axis[:, None] < axes) & (tile_row < grid[0]) & (tile_col < grid[1])
    key = torch.where(exists, (axis[:, None] * grid[0] + tile_row) * grid[1] + tile_col, n_tiles).flatten()
    bit = torch.where(exists, torch.ones_like(sub)[:, None] << sub[:, None], 0).flatten()

    key, order = key.sort()
    is_first = torch.ones_like(key, dtype=torch.bool)
    is_first[1:] = key[1:] != key[:-1]
    place = is_first.cumsum(0) - 1
    # at most as many tiles as there are entries, and as there are tiles; one more for the unused
    size = min(len(key), n_tiles + 1)
    found = torch.full((size,), n_tiles, device=device).scatter_(0, place, key)
    # blocks are distinct, so adding bits is joining them
    pattern = key.new_zeros(size).index_add_(0, place, bit[order])
    return found, pattern, parts[0] * parts[1]


class _Looks:
    """Bitmasks of tiles, from what they consist of."""

    def __init__(self, block_size: Size, q_len: int, kv_len: int, device: torch.device) -> None:
        self.parts = [max(1, TILE // side) for side in block_size]
        self.sides = [min(TILE, side) for side in block_size]
        self.lasts = [(length - 1) % TILE + 1 for length in (q_len, kv_len)]
        self.behind = (kv_len - q_len) % TILE
        self.device = device

    def words(self, pattern: Tensor, edge: Tensor, diagonal: Tensor) -> Tensor:
        """int32 (tiles, 128, 4). pattern: bits of sub-blocks; edge: 1 right, 2 bottom; diagonal: 0 none, 1, 2."""
        query = torch.arange(TILE, device=self.device)[:, None]
        start = torch.arange(0, TILE, 32, device=self.device)
        words = torch.zeros(1, 1, 1, dtype=torch.int64, device=self.device)
        for half in (0, 16):
            sub = query // self.sides[0] * self.parts[1] + (start + half) // self.sides[1]
            words = words | ((pattern[:, None, None] >> sub & 1) * (0xFFFF << half))
        edge, diagonal = edge[:, None, None], diagonal[:, None, None]
        words = words & torch.where((edge & 1) == 1, _first_bits(self.lasts[1] - start), 2**32 - 1)
        words = torch.where(((edge & 2) == 2) & (query >= self.lasts[0]), 0, words)
        # a query sees the keys up to this one, counted in the tile
        last_key = query + self.behind - TILE * (diagonal - 1)
        words = torch.where(diagonal > 0, words & _first_bits(last_key + 1 - start), words)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _first_bits(count: Tensor) -> Tensor:
    """A word whose lowest `count` bits are set, none below 0, all from 32 on."""
    return (torch.ones_like(count) << count.clamp(0, 32)) - 1


def _walk(
    line: Tensor, minor: Tensor, ids: Tensor, is_full: Tensor, axes: int, n_major: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Records (axes, n_major, 8), indices and bitmask ids of one direction, as plan.py describes them."""
    n_lines = axes * n_major
    order = ((line * 2 + is_full) * PARTIAL + minor).argsort()
    ones = torch.ones_like(line)
    work, n_partial = (
        line.new_zeros(n_lines + 1).index_add_(0, line, count)[:-1] for count in (ones, (~is_full).to(line.dtype))
    )
    records = line.new_zeros(n_lines, RECORD)
    records[:, 0] = torch.arange(n_lines, device=line.device) % max(1, n_major)
    records[:, 1] = work.cumsum(0) - work
    records[:, 2], records[:, 3] = work, n_partial
    records, work = records.reshape(axes, n_major, RECORD), work.reshape(axes, n_major)
    if n_lines:
        # twice the mean, without a division
        records[..., 7] = (work * n_lines > 2 * work.sum()).sum(dim=1).max()
    launch = (-work).argsort(dim=1, stable=True)
    records = records.gather(1, launch[..., None].expand_as(records))
    records[..., 4] = launch.argsort(dim=1)
    listed = torch.where(is_full, minor, minor - PARTIAL)[order]
    return records, listed, torch.where(is_full, 0, ids)[order]


def _padded(values: Tensor, residue: int) -> Tensor:
    """Zeros behind the values, at least one, as in plan.py."""
    length = len(values) + 1
    length += (residue - length) % 8 + 8 * (length < 2)
    return torch.nn.functional.pad(values, (0, length - len(values)))
