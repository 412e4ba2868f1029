"""Producer warp of the Hopper backward: tile scheduler over tile columns, and TMA loads.

A warp takes tile columns from a queue until none is left, tells the computing warpgroups, and loads k and v, then q,
dout, lse
and delta of each step of the column, into rings, running ahead over the end of a column.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton.tile import (
    TILE,
    dense_q_steps,
    find_line_record,
    find_split,
    find_work_record,
    record_pointer,
    split_index,
    split_steps,
)
from .bitmask import INDEX_BITS, SUBTILES_BIT
from .registers import WARPGROUP_ROWS, clamped_kv_len, load_int, store_int
from .service import count_column, wait_for_section
from .tma import tma_load

# int32 values which the warp that moves data hands on: axis (batch * key heads + key head), first key, and of a layout
# the
# first entry of the tile list, tiles, partial ones among them; which part of a column it is, and its block in the
# workspace, or -1;
# of the partial tiles those, in front, that are not made of whole quarters
COL_FIELDS = gl.constexpr(8)
# which barriers: two for the columns handed on, one for each place of k and v, one for each stage of q and of dout.
# Every kind
# is an allocation of its own, or Triton would let the threads of a warpgroup meet before each wait
COL_FULL, COL_EMPTY, KV_FULL, KV_EMPTY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
Q_FULL, Q_EMPTY, DOUT_FULL, DOUT_EMPTY = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
# two for the columns whose sums of dq are in memory, where others wait for these
COL_DONE = gl.constexpr(8)


# ---- which steps? ----


@gluon.jit
def member_steps(
    ptrs,
    record_strides,
    sizes,
    col,
    limit,
    i_member,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HAS_SUBTILES: gl.constexpr,
):
    """The steps of one query head of the group: the first, how many, how many of them in front want a mask, and of
    these in front
    more than quarters."""
    records_ptr, _, _, _, kv_lengths_ptr, splits_ptr, _, _ = ptrs
    n_heads, _, _, q_len, kv_len, _, _, _, _, num_splits = sizes
    batch_head, kv_start, begin, n_tiles, n_partial, i_split, _, n_bitmask = col
    STEPS: gl.constexpr = TILE // BLOCK_Q
    if records_ptr is not None:
        if GROUP > 1:
            # heads of a group may have layouts, and so launch orders, of their own
            i_head = batch_head % n_heads * GROUP + i_member
            p_member = find_line_record(records_ptr, record_strides, batch_head // n_heads, i_head, kv_start // TILE)
            begin, n_tiles, n_partial = gl.load(p_member + 1), gl.load(p_member + 2), gl.load(p_member + 3)
            n_bitmask = n_partial - gl.load(p_member + 5) if HAS_SUBTILES else n_partial
        first, n_steps, n_masked, n_bitmask = begin * STEPS, n_tiles * STEPS, n_partial * STEPS, n_bitmask * STEPS
    else:
        # queries past q_len have lse +inf, so that only the diagonal and the last keys want a mask
        first, full, end = dense_q_steps(kv_start, q_len, kv_len, CAUSAL, BLOCK_Q, TILE)
        n_steps = gl.maximum(end - first, 0)
        n_masked = gl.minimum(full - first, n_steps)
        n_masked = gl.where(kv_start + TILE > limit, n_steps, n_masked)
        n_bitmask = n_masked
    if kv_lengths_ptr is not None:
        n_steps = gl.where(kv_start < limit, n_steps, 0)
        n_masked = gl.minimum(n_masked, n_steps)
        n_bitmask = gl.minimum(n_bitmask, n_steps)
    if splits_ptr is not None:
        _skipped, _n_steps, n_bitmask = split_steps(n_steps, n_bitmask, i_split, num_splits)
        skipped, n_steps, n_masked = split_steps(n_steps, n_masked, i_split, num_splits)
        first = first + skipped
    return first, n_steps, n_masked, n_bitmask


@gluon.jit
def query_start(indices_ptr, step, BLOCK_Q: gl.constexpr):
    """The first query of a step."""
    if indices_ptr is not None:
        STEPS: gl.constexpr = TILE // BLOCK_Q
        return (gl.load(indices_ptr + step // STEPS) & INDEX_BITS) * TILE + step % STEPS * BLOCK_Q
    else:
        return step * BLOCK_Q


@gluon.jit
def is_left_out(indices_ptr, step, BLOCK_Q: gl.constexpr, HAS_SUBTILES: gl.constexpr):
    """1 for a step of 64 queries none of which attends, in a tile made of whole quarters, else 0: who moves and who
    computes leave it out."""
    if HAS_SUBTILES and BLOCK_Q == WARPGROUP_ROWS:
        entry = gl.load(indices_ptr + step // (TILE // BLOCK_Q))
        bits = entry >> (SUBTILES_BIT + step % (TILE // BLOCK_Q) * 2)
        return ((entry < 0) & ((bits & 3) == 0)).to(gl.int32)
    else:
        return step * 0


# ---- which column? ----


@gluon.jit
def find_col(ptrs, record_strides, pid, sizes, is_by_head, GROUP: gl.constexpr, HAS_SUBTILES: gl.constexpr):
    """The column of work `pid`, or its part: COL_FIELDS. is_by_head: there are no parts, and no column comes before
    its head."""
    records_ptr, _, _, _, _, splits_ptr, _, _ = ptrs
    n_heads, n_batch_heads, n_lines, _, _, _, _, _, n_split_lines, num_splits = sizes
    begin, n_tiles, n_partial, n_bitmask = 0, 0, 0, 0
    i_split, i_block = -1, -1
    p_record = records_ptr
    if splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(records_ptr, pid, n_lines, n_batch_heads, n_split_lines, num_splits)
        i_block = split_index(batch_head, i_launch, i_split, n_batch_heads, n_split_lines)
        if records_ptr is not None:
            p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_launch, GROUP)
    else:
        batch_head, i_launch = pid // n_lines, pid % n_lines
        if records_ptr is not None:
            if is_by_head:
                p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_launch, GROUP)
            else:
                batch_head, p_record, _whole = find_work_record(
                    records_ptr, record_strides, pid, n_lines, n_heads, n_batch_heads, 1, GROUP
                )
    if records_ptr is not None:
        kv_start = gl.load(p_record) * TILE
        begin, n_tiles, n_partial = gl.load(p_record + 1), gl.load(p_record + 2), gl.load(p_record + 3)
        n_bitmask = n_partial - gl.load(p_record + 5) if HAS_SUBTILES else n_partial
    else:
        kv_start = i_launch * TILE
    return batch_head, kv_start, begin, n_tiles, n_partial, i_split, i_block, n_bitmask


# ---- the warp that moves data ----


@gluon.jit
def move_kv(descriptors, rings, barriers, batch_head, n_heads, kv_start, i_col):
    """The keys and values of a column."""
    _, k_desc, v_desc, _, _, _, _, _, _ = descriptors
    _, _, k_ring, v_ring, _, _, _, _, _, _, _ = rings
    SETS: gl.constexpr = k_ring.shape[0]
    i_set = i_col % SETS
    kv_full = barriers[KV_FULL].index(i_set)
    mbarrier.wait(barriers[KV_EMPTY].index(i_set), ((i_col // SETS) & 1) ^ 1)
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], kv_full, k_ring.index(i_set))
    tma_load(v_desc, [batch_head // n_heads, batch_head % n_heads, kv_start, 0], kv_full, v_ring.index(i_set))


@gluon.jit
def move_step(descriptors, rings, barriers, i_batch, i_head, q_start, line, n_moved, STAGES: gl.constexpr):
    """q, dout, lse and delta of a step; line: where those of the head begin."""
    q_desc, _, _, dout_desc, lse_desc, delta_desc, _, _, _ = descriptors
    q_ring, dout_ring, _, _, _, _, _, _, lse_ring, delta_ring, _ = rings
    stage = n_moved % STAGES
    phase = (n_moved // STAGES) & 1
    q_full, dout_full = barriers[Q_FULL].index(stage), barriers[DOUT_FULL].index(stage)
    mbarrier.wait(barriers[Q_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(q_full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    tma_load(q_desc, [i_batch, i_head, q_start, 0], q_full, q_ring.index(stage))
    tma_load(lse_desc, [line + q_start], q_full, lse_ring.index(stage))
    mbarrier.wait(barriers[DOUT_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(dout_full, dout_desc.block_type.nbytes + delta_desc.block_type.nbytes)
    tma_load(dout_desc, [i_batch, i_head, q_start, 0], dout_full, dout_ring.index(stage))
    tma_load(delta_desc, [line + q_start], dout_full, delta_ring.index(stage))


@gluon.jit
def move(
    descriptors, rings, barriers, ptrs, record_strides, sizes, service, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    _, _, k_ring, _, _, _, _, _, _, _, col_ring = rings
    _, indices_ptr, _, _, kv_lengths_ptr, splits_ptr, tile_counter_ptr, _ = ptrs
    n_heads, n_batch_heads, n_lines, _, kv_len, n_padded, _, _, n_split_lines, num_splits = sizes
    SETS: gl.constexpr = k_ring.shape[0]
    n_work = n_lines * n_batch_heads
    if splits_ptr is not None:
        n_work = n_work + n_split_lines * (num_splits - 1) * n_batch_heads
    if service is None:
        pid = gl.program_id(0)
        n_before_queue = gl.num_programs(0)
        is_by_head = False
    else:
        # from the queue as well, or columns would wait for one of a program which has not begun
        pid = gl.atomic_add(tile_counter_ptr, 1, sem="relaxed")
        n_before_queue = 0
        # otherwise sections are prepared beside the columns
        is_by_head = service[5] < n_batch_heads
    i_col = 0
    n_moved = 0
    while pid < n_work:
        col = find_col(ptrs, record_strides, pid, sizes, is_by_head, GROUP, HAS_SUBTILES)
        batch_head, kv_start = col[0], col[1]
        # early: it takes as long as a load. Without a queue there is a program for each column
        pid = n_work if tile_counter_ptr is None else gl.atomic_add(tile_counter_ptr, 1, sem="relaxed") + n_before_queue
        slot = i_col % 2
        mbarrier.wait(barriers[COL_EMPTY].index(slot), ((i_col // 2) & 1) ^ 1)
        for i in gl.static_range(COL_FIELDS if HAS_SUBTILES else COL_FIELDS - 1):
            store_int(col_ring.index(slot * COL_FIELDS + i), col[i])
        mbarrier.arrive(barriers[COL_FULL].index(slot), count=1)
        if service is not None:
            # not before: the section may be waiting for the column before, which is counted when this one has been
            # taken
            wait_for_section(service, batch_head)
        i_batch = batch_head // n_heads
        i_kv_head = batch_head % n_heads
        if SETS > 1:
            move_kv(descriptors, rings, barriers, batch_head, n_heads, kv_start, i_col)
        n_before = n_moved
        limit = clamped_kv_len(kv_lengths_ptr, i_batch, kv_len)
        for i_member in range(GROUP):
            first, n_steps, _n_masked, _n_mixed = member_steps(
                ptrs, record_strides, sizes, col, limit, i_member, CAUSAL, GROUP, BLOCK_Q, HAS_SUBTILES
            )
            i_head = i_kv_head * GROUP + i_member
            line = (i_batch * n_heads * GROUP + i_head) * n_padded
            q_start = query_start(indices_ptr, first, BLOCK_Q)
            for i_step in range(n_steps):
                # the next index is loaded a step ahead
                q_next = query_start(indices_ptr, first + i_step + 1, BLOCK_Q)
                if is_left_out(indices_ptr, first + i_step, BLOCK_Q, HAS_SUBTILES) == 0:
                    move_step(descriptors, rings, barriers, i_batch, i_head, q_start, line, n_moved, STAGES)
                    if SETS == 1:  # noqa: SIM102
                        if n_moved == n_before:
                            # behind the first step, whose place has long been free
                            move_kv(descriptors, rings, barriers, batch_head, n_heads, kv_start, i_col)
                    n_moved += 1
                q_start = q_next
        if SETS == 1:  # noqa: SIM102
            if n_moved == n_before:
                move_kv(descriptors, rings, barriers, batch_head, n_heads, kv_start, i_col)
        i_col += 1
    slot = i_col % 2
    mbarrier.wait(barriers[COL_EMPTY].index(slot), ((i_col // 2) & 1) ^ 1)
    # no column: the end
    store_int(col_ring.index(slot * COL_FIELDS), -1)
    mbarrier.arrive(barriers[COL_FULL].index(slot), count=1)


@gluon.jit
def read_col_work_tile(col_ring, barriers, i_col, HAS_SUBTILES: gl.constexpr):
    """The next column that the moving warp hands on: COL_FIELDS; the axis is -1 at the end."""
    slot = i_col % 2
    mbarrier.wait(barriers[COL_FULL].index(slot), (i_col // 2) & 1)
    batch_head = load_int(col_ring.index(slot * COL_FIELDS))
    kv_start = load_int(col_ring.index(slot * COL_FIELDS + 1))
    begin = load_int(col_ring.index(slot * COL_FIELDS + 2))
    n_tiles = load_int(col_ring.index(slot * COL_FIELDS + 3))
    n_partial = load_int(col_ring.index(slot * COL_FIELDS + 4))
    i_split = load_int(col_ring.index(slot * COL_FIELDS + 5))
    i_block = load_int(col_ring.index(slot * COL_FIELDS + 6))
    n_bitmask = load_int(col_ring.index(slot * COL_FIELDS + 7)) if HAS_SUBTILES else n_partial
    mbarrier.arrive(barriers[COL_EMPTY].index(slot), count=1)
    return batch_head, kv_start, begin, n_tiles, n_partial, i_split, i_block, n_bitmask


@gluon.jit
def report(col_ring, barriers, service):
    """The warp that counts columns, once their sums of dq are in memory."""
    i_col = 0
    batch_head = take_axis(col_ring, barriers, i_col)
    # they come to the first column, or to the end, as to any other
    mbarrier.wait(barriers[COL_DONE].index(0), 0)
    while batch_head >= 0:
        # both warpgroups have come to the column behind it, or to the end
        i_col += 1
        mbarrier.wait(barriers[COL_DONE].index(i_col % 2), (i_col // 2) & 1)
        count_column(service, batch_head)
        batch_head = take_axis(col_ring, barriers, i_col)


@gluon.jit
def take_axis(col_ring, barriers, i_col):
    """Of the next column that the moving warp hands on the axis alone; -1 at the end."""
    slot = i_col % 2
    mbarrier.wait(barriers[COL_FULL].index(slot), (i_col // 2) & 1)
    batch_head = load_int(col_ring.index(slot * COL_FIELDS))
    mbarrier.arrive(barriers[COL_EMPTY].index(slot), count=1)
    return batch_head
