"""Producer warp of the Hopper forward and of the kernel for dQ: tile scheduler, TMA loads of Q, K, V and, for dQ, dO.

A program has one producer warp and two or three consumer warpgroups (forward.py). A work tile is one tile row of one
head, or one split of it. For each work tile:

    producer                                consumers
    tile scheduler: read the work tile
    work_tiles  acquire, write, commit  ->  wait, read, release
    q           acquire, TMA load       ->  wait, wgmma in every step, release
    k, v        acquire, TMA load       ->  wait, wgmma, release                  once per step of BLOCK_KV keys

While the consumers finish one work tile, the producer loads the next. It asks the tile scheduler for that one two steps
before the last load of the current one (work_tiles.py).

Buffers in shared memory
    work_tiles  int32, two work tiles
    q           [q_stages * warpgroups, 1, 1, 64, DIM], one per consumer warpgroup and stage
    k, v        [stages, 1, 1, BLOCK_KV, DIM] and [stages, 1, 1, BLOCK_KV, DIM_V]
    dout        as q, with DIM_V columns; in the kernel for dQ (backward_dq.py)
    q_tails, k_tails, v_tails, dout_tails  the last third of 96 or 192 columns
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton.tile import (
    BEGIN,
    N_PARTIAL,
    N_TILES,
    NUMBER,
    TILE,
    clamped_kv_len,
    dense_kv_steps,
    find_split,
    record_pointer,
    split_index,
    split_steps,
)
from .barriers import Pipeline, consumer_release, consumer_wait, producer_acquire
from .bitmask import INDEX_BITS
from .registers import WARPGROUP_ROWS, load_int
from .tma import bytes_of_rows, load_rows
from .work_tiles import WORK_TILE_STAGES, find_line, next_work_index, write_end, write_work_tile

# The producer asks for the next work tile when this many steps of the current one are left to load. At its start, the
# program with the longest work tile would also be assigned one of the longest of the rest, and the latency of the
# atomic would delay the loads of the current tile. After the last load, it would delay those of the next tile
STEPS_LEFT = gl.constexpr(2)
# int32 values of a work tile in shared memory, and from one to the next
WORK_TILE_INTS = gl.constexpr(5)
WORK_TILE_STRIDE = gl.constexpr(6)

# ---- state ----


class Pointers(NamedTuple):
    """Global memory of the forward. Unused pointers are None, and cost nothing at run time.

    records_ptr, indices_ptr, bitmask_ids_ptr, bitmasks_ptr  the plan by tile row; all None without a layout
    kv_lengths_ptr    number of keys of each batch element; None: kv_len
    sinks_ptr, slopes_ptr, bias_ptr  see score_mods.ScoreMods
    lse_ptr           output (batch, heads, q_len)
    tile_counter_ptr  counter of the tile scheduler; None: see next_work_index
    splits_ptr        float32 workspace of split tile rows; None: no tile row is split
    """

    records_ptr: Any
    indices_ptr: Any
    bitmask_ids_ptr: Any
    bitmasks_ptr: Any
    kv_lengths_ptr: Any
    sinks_ptr: Any
    slopes_ptr: Any
    bias_ptr: Any
    lse_ptr: Any
    tile_counter_ptr: Any
    splits_ptr: Any


class Sizes(NamedTuple):
    """Run-time sizes. n_batch_heads = batch * n_heads; group: query heads per KV head.

    The first n_split_lines tile rows of each head, in launch order, are computed by num_splits programs each.
    n_interleaved: heads whose tile rows are interleaved, see schedule.interleaved_heads.
    """

    n_heads: Any
    n_batch_heads: Any
    n_lines: Any
    q_len: Any
    kv_len: Any
    n_split_lines: Any
    num_splits: Any
    n_interleaved: Any
    group: Any


class Pipelines(NamedTuple):
    """The pipelines between the producer and the consumers.

    dout    in the kernel for dQ (backward_dq.py), else None
    q_tails, k_tails, v_tails, dout_tails  buffers of the last third of 96 or 192 columns; None without
    """

    work_tiles: Pipeline
    q: Pipeline
    q_tails: Any
    k: Pipeline
    k_tails: Any
    v: Pipeline
    v_tails: Any
    dout: Any
    dout_tails: Any


class WorkTile(NamedTuple):
    """One tile row, or one split of it.

    target     batch_head for a whole tile row, n_batch_heads + workspace block for a split; END: no more work tiles
    q_start    first query
    begin      first entry of the tile list; without a layout, the first partial block of BLOCK_KV keys, see kv_start_of
    n_steps    steps of BLOCK_KV keys
    n_partial  steps that need a mask; they come first
    """

    target: Any
    q_start: Any
    begin: Any
    n_steps: Any
    n_partial: Any


@gluon.jit
def q_buffer_and_phase(i_tile, WARPGROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Buffer with this warpgroup's queries of the i_tile-th work tile, and the phase of its barriers."""
    return i_tile % CONFIG.q_stages * CONFIG.warpgroups + WARPGROUP, (i_tile // CONFIG.q_stages) & 1


# ---- tile scheduler ----


@gluon.jit
def find_work_tile(ptrs, record_strides, sizes, i_work, CAUSAL: gl.constexpr, CONFIG: gl.constexpr):
    """(batch_head, WorkTile) of work tile i_work. Long tile rows come first."""
    BLOCK_Q: gl.constexpr = CONFIG.warpgroups * WARPGROUP_ROWS
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_KV
    if ptrs.splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(
            ptrs.records_ptr, i_work, sizes.n_lines, sizes.n_batch_heads, sizes.n_split_lines, sizes.num_splits
        )
    else:
        batch_head, i_launch = find_line(
            ptrs.records_ptr, i_work, sizes.n_lines, sizes.n_batch_heads, sizes.n_interleaved
        )
    if ptrs.records_ptr is not None:
        p_record = record_pointer(ptrs.records_ptr, record_strides, batch_head, sizes.n_heads, i_launch, GROUP=1)
        q_start, begin = gl.load(p_record + NUMBER) * TILE, gl.load(p_record + BEGIN)
        n_tiles, n_partial = gl.load(p_record + N_TILES), gl.load(p_record + N_PARTIAL)
        if ptrs.splits_ptr is not None:
            first, n_tiles, n_partial = split_steps(n_tiles, n_partial, i_split, sizes.num_splits)
            begin = begin + first
        n_steps, n_partial = n_tiles * STEPS_PER_TILE, n_partial * STEPS_PER_TILE
    else:
        # last tile row first: under a causal mask it is the longest
        q_start = (sizes.n_lines - 1 - i_launch) * BLOCK_Q
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, batch_head // sizes.n_heads, sizes.kv_len)
        # in the order of the keys, blocks 0 .. begin - 1 are full, begin .. n_steps - 1 partial
        begin, n_steps = dense_kv_steps(
            q_start, sizes.q_len, sizes.kv_len, kv_limit, CAUSAL=CAUSAL, BLOCK_Q=BLOCK_Q, BLOCK_KV=BLOCK_KV
        )
        n_partial = n_steps - begin
        if ptrs.splits_ptr is not None:
            # n_full: full steps of this split, which come first in the order of the keys
            first, n_steps, n_full = split_steps(n_steps, begin, i_split, sizes.num_splits)
            begin, n_partial = first + n_full, n_steps - n_full
    if ptrs.splits_ptr is not None:
        i_block = split_index(batch_head, i_launch, i_split, sizes.n_batch_heads, sizes.n_split_lines)
        target = gl.where(i_split < 0, batch_head, sizes.n_batch_heads + i_block)
    else:
        target = batch_head
    return batch_head, WorkTile(target=target, q_start=q_start, begin=begin, n_steps=n_steps, n_partial=n_partial)


@gluon.jit
def read_work_tile(work_tiles, i_tile):
    """Consumer side: the i_tile-th WorkTile of this program; after the last one, a WorkTile whose target is END."""
    stage = i_tile % WORK_TILE_STAGES
    first = stage * WORK_TILE_STRIDE
    consumer_wait(work_tiles, stage, i_tile // WORK_TILE_STAGES)
    target = load_int(work_tiles.buffers.index(first))
    q_start = load_int(work_tiles.buffers.index(first + 1))
    begin = load_int(work_tiles.buffers.index(first + 2))
    n_steps = load_int(work_tiles.buffers.index(first + 3))
    n_partial = load_int(work_tiles.buffers.index(first + 4))
    consumer_release(work_tiles, stage)
    return WorkTile(target=target, q_start=q_start, begin=begin, n_steps=n_steps, n_partial=n_partial)


# ---- keys of a step ----


@gluon.jit
def kv_start_of(indices_ptr, work_tile, i_step, BLOCK_KV: gl.constexpr):
    """First key of a step. Partial steps come first, with or without a layout."""
    if indices_ptr is not None:
        STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_KV
        # parentheses, here and in load_bitmask: without them a pointer to the list's second entry is kept, and spilled
        i_col = gl.load(indices_ptr + (work_tile.begin + i_step // STEPS_PER_TILE)) & INDEX_BITS
        return i_col * TILE + i_step % STEPS_PER_TILE * BLOCK_KV
    else:
        # partial steps are begin, begin + 1, ..; the full ones end at begin - 1
        is_partial = i_step < work_tile.n_partial
        i_block = work_tile.begin + i_step
        return gl.where(is_partial, i_block, i_block - work_tile.n_steps) * BLOCK_KV


# ---- TMA loads ----


@gluon.jit
def load_q(q_desc, q, tails, i_tile, i_batch, i_head, q_start, CONFIG: gl.constexpr):
    """Loads the 64 queries of each consumer warpgroup, or their dO."""
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    for warpgroup in gl.static_range(WARPGROUPS):
        i_buffer, phase = q_buffer_and_phase(i_tile, warpgroup, CONFIG)
        producer_acquire(q, i_buffer, phase)
        q_full = q.full.index(i_buffer)
        tail = None if tails is None else tails.index(i_buffer)
        mbarrier.expect(q_full, bytes_of_rows(q_desc.block_type.nbytes, tails is not None))
        start = q_start + warpgroup * WARPGROUP_ROWS
        load_rows(q_desc, q_full, q.buffers.index(i_buffer), tail, i_batch, i_head, start)


@gluon.jit
def load_kv(desc, kv, tails, i_load, i_batch, i_head, kv_start):
    """Loads the keys or the values of one step. tails: see Pipelines."""
    STAGES: gl.constexpr = kv.buffers.shape[0]
    stage = i_load % STAGES
    producer_acquire(kv, stage, i_load // STAGES)
    full, buffer = kv.full.index(stage), kv.buffers.index(stage)
    tail = None if tails is None else tails.index(stage)
    mbarrier.expect(full, bytes_of_rows(desc.block_type.nbytes, tails is not None))
    load_rows(desc, full, buffer, tail, i_batch, i_head, kv_start)


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, pipelines, ptrs, record_strides, sizes,
    CAUSAL: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Entry point of the producer warp. dout_desc: None in the forward."""
    BLOCK_KV: gl.constexpr = CONFIG.block_kv
    n_work = sizes.n_lines * sizes.n_batch_heads
    if ptrs.splits_ptr is not None:
        n_work = n_work + sizes.n_split_lines * (sizes.num_splits - 1) * sizes.n_batch_heads
    i_work = gl.program_id(0)
    # work tiles and steps so far: they choose the stages
    i_tile = 0
    n_loaded = 0
    while i_work < n_work:
        batch_head, work_tile = find_work_tile(ptrs, record_strides, sizes, i_work, CAUSAL=CAUSAL, CONFIG=CONFIG)
        write_work_tile(pipelines.work_tiles, i_tile, work_tile, WORK_TILE_INTS, WORK_TILE_STRIDE)
        i_batch = batch_head // sizes.n_heads
        i_head = batch_head % sizes.n_heads
        q_start = work_tile.q_start
        load_q(q_desc, pipelines.q, pipelines.q_tails, i_tile, i_batch, i_head, q_start, CONFIG)
        if dout_desc is not None:
            load_q(dout_desc, pipelines.dout, pipelines.dout_tails, i_tile, i_batch, i_head, q_start, CONFIG)
        i_kv_head = i_head // sizes.group
        kv_start = kv_start_of(ptrs.indices_ptr, work_tile, 0, BLOCK_KV)
        for i_step in range(work_tile.n_steps):
            if work_tile.n_steps - i_step == gl.minimum(work_tile.n_steps, STEPS_LEFT):
                i_work = next_work_index(ptrs.tile_counter_ptr, i_tile)
            # one step ahead; the lists are padded, so that one entry past the end can be read
            next_kv_start = kv_start_of(ptrs.indices_ptr, work_tile, i_step + 1, BLOCK_KV)
            load_kv(k_desc, pipelines.k, pipelines.k_tails, n_loaded, i_batch, i_kv_head, kv_start)
            load_kv(v_desc, pipelines.v, pipelines.v_tails, n_loaded, i_batch, i_kv_head, kv_start)
            n_loaded += 1
            kv_start = next_kv_start
        if work_tile.n_steps == 0:
            i_work = next_work_index(ptrs.tile_counter_ptr, i_tile)
        i_tile += 1
    write_end(pipelines.work_tiles, i_tile, WORK_TILE_STRIDE)
