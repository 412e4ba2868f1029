"""Tiles of 64 x 64 in the Hopper kernels for fine layouts: list entries, TMA loads, zeroed tails."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ... import plan_format
from .barriers import thread_barrier
from .bitmask import INDEX_BITS
from .tma import tma_load

# tokens per side of a tile
SIDE = gl.constexpr(plan_format.FINE_TILE)


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
