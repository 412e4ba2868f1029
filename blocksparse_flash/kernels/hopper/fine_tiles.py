"""Tiles of 64 x 64 in the Hopper kernels for fine layouts: work tiles, list entries, TMA loads, zeroed tails."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ... import plan_format
from ..triton.tile import (
    BEGIN,
    N_PARTIAL,
    N_TILES,
    find_split,
    find_work_record,
    record_pointer,
    split_index,
    split_steps,
)
from .barriers import thread_barrier
from .bitmask import INDEX_BITS
from .tma import tma_load

# tokens per side of a tile
SIDE = gl.constexpr(plan_format.FINE_TILE)


class WorkTile(NamedTuple):
    """The tile row or tile column of a program, or a split of one.

    batch_head  batch * heads + head
    p_record    its record
    i_split     which split; -1: all of it
    i_block     block of the split in the workspace; -1: all of it
    """

    batch_head: Any
    p_record: Any
    i_split: Any
    i_block: Any


class Lines(NamedTuple):
    """The tile rows or tile columns of a launch.

    n_lines, n_heads, n_batch_heads  per head; heads; batch * heads
    n_split_lines, num_splits        the first n_split_lines of each head are computed by num_splits programs each
    splits_ptr      float32 workspace of the splits; None: none is split
    """

    records_ptr: Any
    record_strides: Any
    n_lines: Any
    n_heads: Any
    n_batch_heads: Any
    n_split_lines: Any
    num_splits: Any
    splits_ptr: Any


@gluon.jit
def find_work_tile(lines, GROUP: gl.constexpr):
    """The WorkTile of this program; long lines come first. GROUP: query heads per head of the launch."""
    i_split, i_block = -1, -1
    if lines.splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(
            lines.records_ptr, gl.program_id(0), lines.n_lines, lines.n_batch_heads, lines.n_split_lines,
            lines.num_splits,
        )  # fmt: skip
        p_record = record_pointer(
            lines.records_ptr, lines.record_strides, batch_head, lines.n_heads, i_launch, GROUP=GROUP
        )
        i_block = split_index(batch_head, i_launch, i_split, lines.n_batch_heads, lines.n_split_lines)
    else:
        batch_head, p_record, _ = find_work_record(
            lines.records_ptr, lines.record_strides, gl.program_id(0), n_lines=lines.n_lines, n_heads=lines.n_heads,
            n_batch_heads=lines.n_batch_heads, SPLIT=1, GROUP=GROUP,
        )  # fmt: skip
    return WorkTile(batch_head=batch_head, p_record=p_record, i_split=i_split, i_block=i_block)


@gluon.jit
def tiles_of(lines, p_record, i_split):
    """(first entry, tiles, partial tiles) of a tile row or tile column, or of a split of it."""
    begin, n_tiles = gl.load(p_record + BEGIN), gl.load(p_record + N_TILES)
    n_partial = gl.load(p_record + N_PARTIAL)
    if lines.splits_ptr is not None:
        first, n_tiles, n_partial = split_steps(n_tiles, n_partial, i_split, lines.num_splits)
        begin = begin + first
    return begin, n_tiles, n_partial


@gluon.jit
def start_of(indices_ptr, i_entry):
    """First token of the tile that a list entry names."""
    return (gl.load(indices_ptr + i_entry) & INDEX_BITS) * SIDE


@gluon.jit
def load_tile(desc, buffer, full, i_batch, i_head, start, is_wanted):
    """Starts the TMA load of 64 tokens into a buffer that every warp may still read; `full` completes when it is there.

    is_wanted  False: nothing is loaded
    """
    # wgmma is waited for warp by warp: another warp may still read the buffer
    thread_barrier()
    mbarrier.expect(full, desc.block_type.nbytes, pred=is_wanted)
    tma_load(desc, [i_batch, i_head, start, 0], full, buffer, pred=is_wanted)


@gluon.jit
def zero_rows_from(tile, start, limit):
    """Zeroes the keys or values of a tile in shared memory from token `limit` on, which may hold NaN.

    start  first token of the tile
    """
    if start + SIDE > limit:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        o_row = start + gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))
        b_tile = tile.load(layout)
        tile.store(gl.where(gl.expand_dims(o_row < limit, 1), b_tile, 0.0).to(tile.dtype))
        fence_async_shared()
        thread_barrier()
