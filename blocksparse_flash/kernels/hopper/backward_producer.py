"""Producer warp of the Hopper backward: tile scheduler, and TMA loads of K, V, Q, dO, LSE and delta.

A work tile is one tile column, 128 keys of one KV head, for all query heads of its group, or one split of them, or a
tile column for one query head (schedule.sums_over_heads). Beyond head_dim 128, a work tile is half a tile column
(wide_dkdv.py).

    producer                                      consumers (two warpgroups)
    tile scheduler: read the work tile
    work_tiles: acquire, write, commit        ->  wait, read, release
    kv:         acquire, TMA load of K, V     ->  wait, use in every step, release
    q:          acquire, TMA load of Q, LSE   ->  wait, wgmma, release               (once per step of BLOCK_Q queries)
    dout:       acquire, TMA load of dO, delta -> wait, wgmma, release               (once per step)

While the consumers finish one work tile, the producer loads the next. It asks the tile scheduler for that one after the
last load of the current one (work_tiles.py).
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
    dense_q_steps,
    find_line_record,
    find_split,
    record_pointer,
    split_index,
    split_steps,
)
from .barriers import Pipeline, consumer_release, consumer_wait, producer_acquire
from .bitmask import INDEX_BITS
from .registers import load_int
from .tma import bytes_of_rows, load_rows, tma_load
from .work_tiles import WORK_TILE_STAGES, find_line, next_work_index, write_end, write_work_tile

# int32 values of a work tile in shared memory, and from one to the next
WORK_TILE_INTS = gl.constexpr(7)
WORK_TILE_STRIDE = gl.constexpr(8)


# ---- state ----


class Pointers(NamedTuple):
    """Global memory of the backward. None for what a call does not have.

    records_ptr, indices_ptr, bitmask_ids_ptr, bitmasks_ptr  tile columns of the plan; None without a layout
    kv_lengths_ptr    (batch,) keys of each batch element; None: kv_len
    tile_counter_ptr  counter of the tile scheduler; None: see next_work_index
    splits_ptr        float32 workspace of split tile columns; None: no tile column is split
    slopes_ptr, bias_ptr  see score_mods.ScoreMods
    bias_sums_ptr     (batch | 1, heads | 1, listed tiles + 1, TILE / BLOCK_Q, CONSUMER_WARPS) float32 sums of ds, for
                      the gradient of the bias; None: not wanted, or another launch computes them
    dq_sum_ptr        (batch * heads, n_padded, columns) float32 sum of dQ, in the order of `in_register_order`; None:
                      another launch computes dQ
    dk_sum_ptr, dv_sum_ptr  (batch * KV heads, n_tile_cols * 128, columns) float32 sums of dK and dV, in the same order;
                      None: a work tile has all query heads of its group, and stores dK and dV
    """

    records_ptr: Any
    indices_ptr: Any
    bitmask_ids_ptr: Any
    bitmasks_ptr: Any
    kv_lengths_ptr: Any
    tile_counter_ptr: Any
    splits_ptr: Any
    slopes_ptr: Any
    bias_ptr: Any
    bias_sums_ptr: Any
    dq_sum_ptr: Any
    dk_sum_ptr: Any
    dv_sum_ptr: Any


class Descriptors(NamedTuple):
    """TMA descriptors. dq_sum is None if the consumers add dQ from registers, or another kernel computes dQ."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    dq_sum: Any
    dk: Any
    dv: Any


class Sizes(NamedTuple):
    """Run-time sizes. The first n_split_lines tile columns of each KV head are computed by num_splits programs each.

    n_heads        KV heads, or query heads if dK and dV are summed over them (schedule.sums_over_heads)
    heads_per_kv   query heads that add to the same sums of dK and dV
    n_batch_heads  batch * n_heads
    n_padded       q_len rounded up to whole tiles
    n_interleaved  heads whose tile columns are interleaved, see schedule.interleaved_heads
    """

    n_heads: Any
    heads_per_kv: Any
    n_batch_heads: Any
    n_tile_cols: Any
    q_len: Any
    kv_len: Any
    n_padded: Any
    scale: Any
    n_split_lines: Any
    num_splits: Any
    n_interleaved: Any


class WorkTile(NamedTuple):
    """One tile column (beyond head_dim 128 half of one), or one split of it.

    batch_head  batch * n_heads + head; END: no more work tiles
    kv_start    first key
    begin       first entry of the tile list of the first query head (this and the next two: 0 without a layout)
    n_tiles     tiles of the first query head
    n_partial   partial tiles among them, which come first
    i_split     which split; -1: the whole tile column
    i_block     block of the split in the workspace; -1: the whole tile column
    """

    batch_head: Any
    kv_start: Any
    begin: Any
    n_tiles: Any
    n_partial: Any
    i_split: Any
    i_block: Any


class Steps(NamedTuple):
    """Steps of BLOCK_Q queries of one query head: first .. first + n_steps - 1.

    n_masked  steps at the front that need a mask
    """

    first: Any
    n_steps: Any
    n_masked: Any


class QBuffers(NamedTuple):
    """q [STAGES, 1, 1, BLOCK_Q, DIM], its tail [STAGES, 1, 1, BLOCK_Q, 32 or 64] or None, and lse [STAGES, BLOCK_Q].

    The tail is the last third of 96 or 192 columns; DIM is without it.
    """

    q: Any
    q_tail: Any
    lse: Any


class DOutBuffers(NamedTuple):
    """dout [STAGES, 1, 1, BLOCK_Q, DIM_V], its tail, as that of q, or None, and delta [STAGES, BLOCK_Q]."""

    dout: Any
    dout_tail: Any
    delta: Any


class KVBuffers(NamedTuple):
    """k [KV_STAGES, 1, 1, KEYS, DIM], v [KV_STAGES, 1, 1, KEYS, DIM_V], and their tails or None."""

    k: Any
    k_tail: Any
    v: Any
    v_tail: Any


class Pipelines(NamedTuple):
    """The pipelines between producer and consumers. work_tiles: int32 [WORK_TILE_STAGES * WORK_TILE_STRIDE, 1]."""

    work_tiles: Pipeline
    kv: Pipeline
    q: Pipeline
    dout: Pipeline


# ---- steps of a work tile ----


@gluon.jit
def steps_of_head(
    ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Steps of query head i_group_head of the group. kv_limit: keys of this batch element; KEYS: of a work tile."""
    batch_head, kv_start, begin = work_tile.batch_head, work_tile.kv_start, work_tile.begin
    n_tiles, n_partial = work_tile.n_tiles, work_tile.n_partial
    STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_Q
    if ptrs.records_ptr is not None:
        if GROUP > 1:
            # the heads of a group may have layouts, and hence launch orders, of their own
            i_head = batch_head % sizes.n_heads * GROUP + i_group_head
            p_record = find_line_record(
                ptrs.records_ptr, record_strides, batch_head // sizes.n_heads, i_head, kv_start // TILE
            )
            begin, n_tiles = gl.load(p_record + BEGIN), gl.load(p_record + N_TILES)
            n_partial = gl.load(p_record + N_PARTIAL)
        first, n_steps = begin * STEPS_PER_TILE, n_tiles * STEPS_PER_TILE
        n_masked = n_partial * STEPS_PER_TILE
    else:
        # queries past q_len have LSE +inf, so only the diagonal and the last keys need a mask
        first, full, end = dense_q_steps(kv_start, sizes.q_len, sizes.kv_len, CAUSAL, BLOCK_Q, KEYS)
        n_steps = gl.maximum(end - first, 0)
        n_masked = gl.minimum(full - first, n_steps)
        n_masked = gl.where(kv_start + KEYS > kv_limit, n_steps, n_masked)
    # the second half of the last tile column may lie past the keys
    if ptrs.kv_lengths_ptr is not None or KEYS < TILE:
        n_steps = gl.where(kv_start < kv_limit, n_steps, 0)
        n_masked = gl.minimum(n_masked, n_steps)
    if ptrs.splits_ptr is not None:
        skipped, n_steps, n_masked = split_steps(n_steps, n_masked, work_tile.i_split, sizes.num_splits)
        first = first + skipped
    return Steps(first=first, n_steps=n_steps, n_masked=n_masked)


@gluon.jit
def q_start_of(indices_ptr, step, BLOCK_Q: gl.constexpr):
    """First query of a step."""
    if indices_ptr is not None:
        STEPS_PER_TILE: gl.constexpr = TILE // BLOCK_Q
        i_row = gl.load(indices_ptr + step // STEPS_PER_TILE) & INDEX_BITS
        return i_row * TILE + step % STEPS_PER_TILE * BLOCK_Q
    else:
        return step * BLOCK_Q


# ---- tile scheduler ----


@gluon.jit
def find_work_tile(ptrs, record_strides, i_work, sizes, GROUP: gl.constexpr, KEYS: gl.constexpr):
    """The WorkTile of index i_work. Splits and long tile columns come first; the halves of one are adjacent."""
    begin, n_tiles, n_partial = 0, 0, 0
    i_half = i_work % (TILE // KEYS)
    i_work = i_work // (TILE // KEYS)
    i_split, i_block = -1, -1
    if ptrs.splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(
            ptrs.records_ptr, i_work, sizes.n_tile_cols, sizes.n_batch_heads, sizes.n_split_lines, sizes.num_splits
        )
        i_block = split_index(batch_head, i_launch, i_split, sizes.n_batch_heads, sizes.n_split_lines)
    else:
        batch_head, i_launch = find_line(
            ptrs.records_ptr, i_work, sizes.n_tile_cols, sizes.n_batch_heads, sizes.n_interleaved
        )
    if ptrs.records_ptr is not None:
        p_record = record_pointer(ptrs.records_ptr, record_strides, batch_head, sizes.n_heads, i_launch, GROUP)
        kv_start = gl.load(p_record + NUMBER) * TILE
        begin, n_tiles = gl.load(p_record + BEGIN), gl.load(p_record + N_TILES)
        n_partial = gl.load(p_record + N_PARTIAL)
    else:
        kv_start = i_launch * TILE
    return WorkTile(
        batch_head=batch_head,
        kv_start=kv_start + i_half * KEYS,
        begin=begin,
        n_tiles=n_tiles,
        n_partial=n_partial,
        i_split=i_split,
        i_block=i_block,
    )


@gluon.jit
def read_work_tile(work_tiles, i_tile):
    """Consumer side: the i_tile-th WorkTile of this program; its batch_head is END after the last one."""
    stage = i_tile % WORK_TILE_STAGES
    consumer_wait(work_tiles, stage, i_tile // WORK_TILE_STAGES)
    batch_head = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE))
    kv_start = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 1))
    begin = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 2))
    n_tiles = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 3))
    n_partial = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 4))
    i_split = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 5))
    i_block = load_int(work_tiles.buffers.index(stage * WORK_TILE_STRIDE + 6))
    consumer_release(work_tiles, stage)
    return WorkTile(
        batch_head=batch_head,
        kv_start=kv_start,
        begin=begin,
        n_tiles=n_tiles,
        n_partial=n_partial,
        i_split=i_split,
        i_block=i_block,
    )


# ---- TMA loads ----


@gluon.jit
def load_kv(descs, kv, ptrs, sizes, batch_head, kv_start, i_tile):
    """Loads the keys and values of a work tile."""
    i_batch, i_kv_head = batch_head // sizes.n_heads, batch_head % sizes.n_heads
    if ptrs.dk_sum_ptr is not None:
        i_kv_head = i_kv_head // sizes.heads_per_kv
    KV_STAGES: gl.constexpr = kv.buffers.k.shape[0]
    stage = i_tile % KV_STAGES
    kv_full, buffers = kv.full.index(stage), kv.buffers
    k_tail = None if buffers.k_tail is None else buffers.k_tail.index(stage)
    v_tail = None if buffers.v_tail is None else buffers.v_tail.index(stage)
    producer_acquire(kv, stage, i_tile // KV_STAGES)
    k_bytes: gl.constexpr = bytes_of_rows(descs.k.block_type.nbytes, k_tail is not None)
    v_bytes: gl.constexpr = bytes_of_rows(descs.v.block_type.nbytes, v_tail is not None)
    mbarrier.expect(kv_full, k_bytes + v_bytes)
    load_rows(descs.k, kv_full, buffers.k.index(stage), k_tail, i_batch, i_kv_head, kv_start)
    load_rows(descs.v, kv_full, buffers.v.index(stage), v_tail, i_batch, i_kv_head, kv_start)


@gluon.jit
def load_step(descs, q, dout, i_batch, i_head, q_start, head_start, n_loaded):
    """Loads Q, LSE, dO and delta of one step. head_start: where LSE and delta of the head begin."""
    STAGES: gl.constexpr = q.buffers.q.shape[0]
    stage = n_loaded % STAGES
    q_full, dout_full = q.full.index(stage), dout.full.index(stage)
    q_tail = None if q.buffers.q_tail is None else q.buffers.q_tail.index(stage)
    dout_tail = None if dout.buffers.dout_tail is None else dout.buffers.dout_tail.index(stage)
    producer_acquire(q, stage, n_loaded // STAGES)
    q_bytes: gl.constexpr = bytes_of_rows(descs.q.block_type.nbytes, q_tail is not None)
    mbarrier.expect(q_full, q_bytes + descs.lse.block_type.nbytes)
    load_rows(descs.q, q_full, q.buffers.q.index(stage), q_tail, i_batch, i_head, q_start)
    tma_load(descs.lse, [head_start + q_start], q_full, q.buffers.lse.index(stage))
    producer_acquire(dout, stage, n_loaded // STAGES)
    dout_bytes: gl.constexpr = bytes_of_rows(descs.dout.block_type.nbytes, dout_tail is not None)
    mbarrier.expect(dout_full, dout_bytes + descs.delta.block_type.nbytes)
    load_rows(descs.dout, dout_full, dout.buffers.dout.index(stage), dout_tail, i_batch, i_head, q_start)
    tma_load(descs.delta, [head_start + q_start], dout_full, dout.buffers.delta.index(stage))


@gluon.jit
def load(
    descs, pipelines, ptrs, record_strides, sizes,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Entry point of the producer warp.

    GROUP  query heads of a work tile: those of a KV head, or 1 with sums over heads
    """
    KV_STAGES: gl.constexpr = pipelines.kv.buffers.k.shape[0]
    KEYS: gl.constexpr = pipelines.kv.buffers.k.shape[3]
    n_heads = sizes.n_heads
    n_work = sizes.n_tile_cols * sizes.n_batch_heads
    if ptrs.splits_ptr is not None:
        n_work = n_work + sizes.n_split_lines * (sizes.num_splits - 1) * sizes.n_batch_heads
    n_work = n_work * (TILE // KEYS)
    i_work = gl.program_id(0)
    # work tiles and steps so far: they choose the stages
    i_tile = 0
    n_loaded = 0
    while i_work < n_work:
        work_tile = find_work_tile(ptrs, record_strides, i_work, sizes, GROUP, KEYS)
        batch_head, kv_start = work_tile.batch_head, work_tile.kv_start
        write_work_tile(pipelines.work_tiles, i_tile, work_tile, WORK_TILE_INTS, WORK_TILE_STRIDE)
        i_batch = batch_head // n_heads
        i_kv_head = batch_head % n_heads
        if KV_STAGES > 1:
            load_kv(descs, pipelines.kv, ptrs, sizes, batch_head, kv_start, i_tile)
        n_before = n_loaded
        kv_limit = clamped_kv_len(ptrs.kv_lengths_ptr, i_batch, sizes.kv_len)
        for i_group_head in range(GROUP):
            steps = steps_of_head(
                ptrs, record_strides, sizes, work_tile, kv_limit, i_group_head, CAUSAL, GROUP, BLOCK_Q, KEYS
            )
            i_head = i_kv_head * GROUP + i_group_head
            head_start = (i_batch * n_heads * GROUP + i_head) * sizes.n_padded
            q_start = q_start_of(ptrs.indices_ptr, steps.first, BLOCK_Q)
            for i in range(steps.n_steps):
                # prefetch the index of the next step; the lists are padded, so reading one entry past the end is safe
                next_q_start = q_start_of(ptrs.indices_ptr, steps.first + i + 1, BLOCK_Q)
                load_step(descs, pipelines.q, pipelines.dout, i_batch, i_head, q_start, head_start, n_loaded)
                if KV_STAGES == 1:  # noqa: SIM102
                    if n_loaded == n_before:
                        # after the first step, whose stage has been free for longer than the only K/V stage
                        load_kv(descs, pipelines.kv, ptrs, sizes, batch_head, kv_start, i_tile)
                n_loaded += 1
                q_start = next_q_start
        if KV_STAGES == 1:  # noqa: SIM102
            if n_loaded == n_before:
                load_kv(descs, pipelines.kv, ptrs, sizes, batch_head, kv_start, i_tile)
        # not at the start: the program with the longest tile column would also get one of the longest of those left
        i_work = next_work_index(ptrs.tile_counter_ptr, i_tile)
        i_tile += 1
    write_end(pipelines.work_tiles, i_tile, WORK_TILE_STRIDE)
