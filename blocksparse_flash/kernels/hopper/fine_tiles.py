"""Steps of 64 x 64 pairs in the Hopper kernels for fine layouts: work tiles, lists, TMA loads, masks, zeroed tails."""

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
from .bitmask import INDEX_BITS, load_mask_words
from .tma import tma_load

# queries and keys of a step
SIDE = gl.constexpr(plan_format.FINE_TILE)
# tokens of a tile in a gathered plan
GATHERED_TILE = gl.constexpr(plan_format.GATHERED_TILE)
# columns (128 bytes) that a swizzled buffer stores together for all rows: TMA loads a gathered tile in such parts
SWIZZLE_COLS = gl.constexpr(64)
# tiles of a step of a gathered plan
TILES_PER_STEP = gl.constexpr(plan_format.TILES_PER_STEP)


def block_of_step(columns: int, loads: int) -> tuple[int, ...]:
    """Block shape of the TMA loads of a step. loads: see plan_format.loads_per_step."""
    return (1, 1, GATHERED_TILE.value, SWIZZLE_COLS.value) if loads > 1 else (1, 1, SIDE.value, columns)


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

    n_lines, n_heads, n_batch_heads  tile rows (or tile columns) per head; heads; batch * heads
    n_split_lines, num_splits        the first n_split_lines of each head are computed by num_splits programs each
    """

    n_lines: Any
    n_heads: Any
    n_batch_heads: Any
    n_split_lines: Any
    num_splits: Any


@gluon.jit
def find_work_tile(ptrs, record_strides, lines, GROUP: gl.constexpr):
    """The WorkTile of this program; long rows or columns come first. GROUP: query heads per head of the launch.

    ptrs    Pointers of the kernel
    """
    i_split, i_block = -1, -1
    if ptrs.splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(
            ptrs.records_ptr, gl.program_id(0), lines.n_lines, lines.n_batch_heads, lines.n_split_lines,
            lines.num_splits,
        )  # fmt: skip
        p_record = record_pointer(ptrs.records_ptr, record_strides, batch_head, lines.n_heads, i_launch, GROUP=GROUP)
        i_block = split_index(batch_head, i_launch, i_split, lines.n_batch_heads, lines.n_split_lines)
    else:
        batch_head, p_record, _ = find_work_record(
            ptrs.records_ptr, record_strides, gl.program_id(0), n_lines=lines.n_lines, n_heads=lines.n_heads,
            n_batch_heads=lines.n_batch_heads, SPLIT=1, GROUP=GROUP,
        )  # fmt: skip
    return WorkTile(batch_head=batch_head, p_record=p_record, i_split=i_split, i_block=i_block)


@gluon.jit
def tiles_of(ptrs, lines, p_record, i_split):
    """(first entry, steps, partial steps) of a tile row or tile column, or of a split of it."""
    begin, n_steps = gl.load(p_record + BEGIN), gl.load(p_record + N_TILES)
    n_partial = gl.load(p_record + N_PARTIAL)
    if ptrs.splits_ptr is not None:
        first, n_steps, n_partial = split_steps(n_steps, n_partial, i_split, lines.num_splits)
        begin = begin + first
    return begin, n_steps, n_partial


@gluon.jit
def starts_of(indices_ptr, i_step, LOADS: gl.constexpr):
    """First token of each tile of a step, as a tuple: of one tile of 64 tokens, or of LOADS tiles of 16."""
    if LOADS == 1:
        return ((gl.load(indices_ptr + i_step) & INDEX_BITS) * SIDE,)
    else:
        p_step = indices_ptr + i_step * LOADS
        return (
            gl.load(p_step) * GATHERED_TILE,
            gl.load(p_step + 1) * GATHERED_TILE,
            gl.load(p_step + 2) * GATHERED_TILE,
            gl.load(p_step + 3) * GATHERED_TILE,
        )


@gluon.jit
def positions(starts, o_token):
    """Positions in the sequence of the tokens o_token (0 .. 63) of a step."""
    if len(starts) == 1:
        return starts[0] + o_token
    else:
        o_tile = o_token // GATHERED_TILE
        o_start = gl.where(o_tile == 0, starts[0], gl.where(o_tile == 1, starts[1], starts[2]))
        return gl.where(o_tile == 3, starts[3], o_start) + o_token % GATHERED_TILE


@gluon.jit
def load_step(desc, buffer, full, i_batch, i_head, starts, is_wanted, IS_FREE: gl.constexpr = False):
    """Waits until no warp reads the buffer, then starts the TMA loads of 64 tokens into it.

    full       barrier that completes when all tokens are loaded
    buffer     [1, 1, 64, columns]
    starts     from starts_of; a negative start, of an empty tile, loads zeros
    is_wanted  False: nothing is loaded
    IS_FREE    no warp reads the buffer any more: needs no wait
    """
    if not IS_FREE:
        # each warp waits for its own wgmma: another warp may still read the buffer
        thread_barrier()
    if len(starts) == 1:
        mbarrier.expect(full, desc.block_type.nbytes, pred=is_wanted)
        tma_load(desc, [i_batch, i_head, starts[0], 0], full, buffer, pred=is_wanted)
    else:
        COLUMNS: gl.constexpr = buffer.shape[3]
        mbarrier.expect(full, len(starts) * (COLUMNS // SWIZZLE_COLS) * desc.block_type.nbytes, pred=is_wanted)
        for i_load in gl.static_range(len(starts)):
            for column in gl.static_range(0, COLUMNS, SWIZZLE_COLS):
                part = buffer.slice(i_load * GATHERED_TILE, GATHERED_TILE, 2).slice(column, SWIZZLE_COLS, 3)
                tma_load(desc, [i_batch, i_head, starts[i_load], column], full, part, pred=is_wanted)


@gluon.jit
def load_step_words(bitmask_ids_ptr, bitmasks_ptr, i_step, o_row, GATHERED: gl.constexpr):
    """The two words of rows o_row of a step's bitmask. With GATHERED, rows are queries, or keys in a tile column."""
    if GATHERED:
        p_ids = bitmask_ids_ptr + i_step * TILES_PER_STEP
        return load_half_words(p_ids, bitmasks_ptr, o_row), load_half_words(p_ids + 2, bitmasks_ptr, o_row)
    else:
        return load_mask_words(bitmasks_ptr, gl.load(bitmask_ids_ptr + i_step), 0, o_row, SIDE, SIDE)


@gluon.jit
def load_half_words(p_ids, bitmasks_ptr, o_row):
    """A word of a gathered step's bitmask: 16 bits of each of two tiles.

    Each bitmask word stores its 16 bits in both halves.
    """
    b_low = gl.load(bitmasks_ptr + gl.load(p_ids).to(gl.int64) * SIDE + o_row)
    b_high = gl.load(bitmasks_ptr + gl.load(p_ids + 1).to(gl.int64) * SIDE + o_row)
    return b_low & 0xFFFF | b_high & -0x10000


@gluon.jit
def zero_rows_from(tile, starts, limit):
    """Zeroes the rows of tokens from `limit` on, which may hold NaN, in a step's keys or values in shared memory."""
    last = starts[0]
    for i_load in gl.static_range(1, len(starts)):
        last = gl.maximum(last, starts[i_load])
    if last + SIDE // len(starts) > limit:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        o_row = positions(starts, gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout)))
        b_tile = tile.load(layout)
        tile.store(gl.where(gl.expand_dims(o_row < limit, 1), b_tile, 0.0).to(tile.dtype))
        fence_async_shared()
        thread_barrier()
