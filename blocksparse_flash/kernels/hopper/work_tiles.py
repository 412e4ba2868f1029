"""Work tiles in shared memory: the producer writes them, every consumer warpgroup reads them.

A work tile is a NamedTuple of N_INTS int32 values, which the `work_tiles` pipeline holds one after the other; i_work is
its index in launch order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.tile import N_LONG
from .barriers import producer_acquire, producer_commit
from .registers import store_int

# the consumers read one work tile while the producer writes the next
WORK_TILE_STAGES = gl.constexpr(2)
# first value of a work tile that ends the consumers' loop
END = gl.constexpr(-1)


@gluon.jit
def write_work_tile(work_tiles, i_tile, work_tile, N_INTS: gl.constexpr, STRIDE: gl.constexpr):
    """Writes the N_INTS fields of the i_tile-th work tile of this program. STRIDE: values from one to the next."""
    stage = i_tile % WORK_TILE_STAGES
    producer_acquire(work_tiles, stage, i_tile // WORK_TILE_STAGES)
    for i in gl.static_range(N_INTS):
        store_int(work_tiles.buffers.index(stage * STRIDE + i), work_tile[i])
    producer_commit(work_tiles, stage)


@gluon.jit
def write_end(work_tiles, i_tile, STRIDE: gl.constexpr):
    """Writes END in place of the i_tile-th work tile: there are no more."""
    stage = i_tile % WORK_TILE_STAGES
    producer_acquire(work_tiles, stage, i_tile // WORK_TILE_STAGES)
    store_int(work_tiles.buffers.index(stage * STRIDE), END)
    producer_commit(work_tiles, stage)


@gluon.jit
def next_work_index(tile_counter_ptr, i_tile):
    """Index of the work tile of this program after its i_tile-th: from the counter, or static if there is none.

    Static waves alternate in direction: programs with the longest tiles of one have the shortest of the next.
    """
    n_programs = gl.num_programs(0)
    if tile_counter_ptr is None:
        i_wave = i_tile + 1
        i_program = gl.program_id(0)
        return i_wave * n_programs + gl.where(i_wave % 2 == 0, i_program, n_programs - 1 - i_program)
    else:
        return gl.atomic_add(tile_counter_ptr, 1, sem="relaxed") + n_programs


@gluon.jit
def find_line(records_ptr, i_work, n_lines, n_batch_heads, n_interleaved):
    """(batch_head, line in launch order) of work tile i_work.

    The N_LONG longest lines of a plan come first, interleaved over all heads. For the others, see
    find_interleaved_line.
    """
    if records_ptr is None:
        return find_interleaved_line(i_work, n_lines, n_batch_heads, n_interleaved)
    else:
        n_long = gl.load(records_ptr + N_LONG)
        n_first = n_long * n_batch_heads
        batch_head, i_line = find_interleaved_line(i_work - n_first, n_lines - n_long, n_batch_heads, n_interleaved)
        is_long = i_work < n_first
        return (
            gl.where(is_long, i_work % n_batch_heads, batch_head),
            gl.where(is_long, i_work // n_batch_heads, n_long + i_line),
        )


@gluon.jit
def find_interleaved_line(i_work, n_lines, n_batch_heads, n_interleaved):
    """(batch_head, line) of work tile i_work if the lines of heads are interleaved: see schedule.interleaved_heads.

    The last group has n_interleaved to 2 * n_interleaved - 1 heads: a smaller one would leave SMs idle.
    """
    i_last = gl.maximum(n_batch_heads // n_interleaved, 1) - 1
    i_heads = gl.minimum(i_work // (n_interleaved * n_lines), i_last)
    first = i_heads * n_interleaved
    n_heads = gl.where(i_heads == i_last, n_batch_heads - first, n_interleaved)
    i_work = i_work - first * n_lines
    return first + i_work % n_heads, i_work // n_heads
