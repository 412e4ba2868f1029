"""Producer warp of the Hopper backward: tile scheduler over tile columns, and TMA loads.

A warp takes tile columns from a queue until none is left, tells the computing warpgroups, and loads k and v, then q,
dout, lse
and delta of each step of the column, into rings, running ahead over the end of a column.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton.tile import TILE, block_of, dense_queries, find_line, find_part, find_record, part_of, record_of
from .device_functions import HALF, INDEX_BITS, QUARTERS_BIT, key_limit, load_async, load_int, store_int
from .service import count_column, wait_for_section

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
    items_strides,
    sizes,
    col,
    limit,
    i_member,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    QUARTERS: gl.constexpr,
):
    """The steps of one query head of the group: the first, how many, how many of them in front want a mask, and of
    these in front
    more than quarters."""
    items_ptr, _, _, _, kv_lengths_ptr, parts_ptr, _, _ = ptrs
    n_heads, _, _, q_len, kv_len, _, _, _, _, n_parts = sizes
    i_axis, kv_start, begin, n_tiles, n_partial, i_part, _, n_mixed = col
    STEPS: gl.constexpr = TILE // BLOCK_Q
    if items_ptr is not None:
        if GROUP > 1:
            # heads of a group may have layouts, and so launch orders, of their own
            i_head = i_axis % n_heads * GROUP + i_member
            p_member = find_line(items_ptr, items_strides, i_axis // n_heads, i_head, kv_start // TILE)
            begin, n_tiles, n_partial = gl.load(p_member + 1), gl.load(p_member + 2), gl.load(p_member + 3)
            n_mixed = n_partial - gl.load(p_member + 5) if QUARTERS else n_partial
        first, n_steps, n_masked, n_mixed = begin * STEPS, n_tiles * STEPS, n_partial * STEPS, n_mixed * STEPS
    else:
        # queries past q_len have lse +inf, so that only the diagonal and the last keys want a mask
        first, full, end = dense_queries(kv_start, q_len, kv_len, CAUSAL, BLOCK_Q, TILE)
        n_steps = gl.maximum(end - first, 0)
        n_masked = gl.minimum(full - first, n_steps)
        n_masked = gl.where(kv_start + TILE > limit, n_steps, n_masked)
        n_mixed = n_masked
    if kv_lengths_ptr is not None:
        n_steps = gl.where(kv_start < limit, n_steps, 0)
        n_masked = gl.minimum(n_masked, n_steps)
        n_mixed = gl.minimum(n_mixed, n_steps)
    if parts_ptr is not None:
        _skipped, _n_steps, n_mixed = part_of(n_steps, n_mixed, i_part, n_parts)
        skipped, n_steps, n_masked = part_of(n_steps, n_masked, i_part, n_parts)
        first = first + skipped
    return first, n_steps, n_masked, n_mixed


@gluon.jit
def query_start(indices_ptr, step, BLOCK_Q: gl.constexpr):
    """The first query of a step."""
    if indices_ptr is not None:
        STEPS: gl.constexpr = TILE // BLOCK_Q
        return (gl.load(indices_ptr + step // STEPS) & INDEX_BITS) * TILE + step % STEPS * BLOCK_Q
    else:
        return step * BLOCK_Q


@gluon.jit
def is_left_out(indices_ptr, step, BLOCK_Q: gl.constexpr, QUARTERS: gl.constexpr):
    """1 for a step of 64 queries none of which attends, in a tile made of whole quarters, else 0: who moves and who
    computes leave it out."""
    if QUARTERS and BLOCK_Q == HALF:
        entry = gl.load(indices_ptr + step // (TILE // BLOCK_Q))
        bits = entry >> (QUARTERS_BIT + step % (TILE // BLOCK_Q) * 2)
        return ((entry < 0) & ((bits & 3) == 0)).to(gl.int32)
    else:
        return step * 0


# ---- which column? ----


@gluon.jit
def find_col(ptrs, items_strides, pid, sizes, is_by_head, GROUP: gl.constexpr, QUARTERS: gl.constexpr):
    """The column of work `pid`, or its part: COL_FIELDS. is_by_head: there are no parts, and no column comes before
    its head."""
    items_ptr, _, _, _, _, parts_ptr, _, _ = ptrs
    n_heads, n_axes, n_lines, _, _, _, _, _, n_split, n_parts = sizes
    begin, n_tiles, n_partial, n_mixed = 0, 0, 0, 0
    i_part, i_block = -1, -1
    p_record = items_ptr
    if parts_ptr is not None:
        i_axis, i_launch, i_part = find_part(items_ptr, pid, n_lines, n_axes, n_split, n_parts)
        i_block = block_of(i_axis, i_launch, i_part, n_axes, n_split)
        if items_ptr is not None:
            p_record = record_of(items_ptr, items_strides, i_axis, n_heads, i_launch, GROUP)
    else:
        i_axis, i_launch = pid // n_lines, pid % n_lines
        if items_ptr is not None:
            if is_by_head:
                p_record = record_of(items_ptr, items_strides, i_axis, n_heads, i_launch, GROUP)
            else:
                i_axis, p_record, _whole = find_record(
                    items_ptr, items_strides, pid, n_lines, n_heads, n_axes, 1, GROUP
                )
    if items_ptr is not None:
        kv_start = gl.load(p_record) * TILE
        begin, n_tiles, n_partial = gl.load(p_record + 1), gl.load(p_record + 2), gl.load(p_record + 3)
        n_mixed = n_partial - gl.load(p_record + 5) if QUARTERS else n_partial
    else:
        kv_start = i_launch * TILE
    return i_axis, kv_start, begin, n_tiles, n_partial, i_part, i_block, n_mixed


# ---- the warp that moves data ----


@gluon.jit
def move_kv(descriptors, rings, barriers, i_axis, n_heads, kv_start, i_col):
    """The keys and values of a column."""
    _, k_desc, v_desc, _, _, _, _, _, _ = descriptors
    _, _, k_ring, v_ring, _, _, _, _, _, _, _ = rings
    SETS: gl.constexpr = k_ring.shape[0]
    i_set = i_col % SETS
    kv_full = barriers[KV_FULL].index(i_set)
    mbarrier.wait(barriers[KV_EMPTY].index(i_set), ((i_col // SETS) & 1) ^ 1)
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    load_async(k_desc, [i_axis // n_heads, i_axis % n_heads, kv_start, 0], kv_full, k_ring.index(i_set))
    load_async(v_desc, [i_axis // n_heads, i_axis % n_heads, kv_start, 0], kv_full, v_ring.index(i_set))


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
    load_async(q_desc, [i_batch, i_head, q_start, 0], q_full, q_ring.index(stage))
    load_async(lse_desc, [line + q_start], q_full, lse_ring.index(stage))
    mbarrier.wait(barriers[DOUT_EMPTY].index(stage), phase ^ 1)
    mbarrier.expect(dout_full, dout_desc.block_type.nbytes + delta_desc.block_type.nbytes)
    load_async(dout_desc, [i_batch, i_head, q_start, 0], dout_full, dout_ring.index(stage))
    load_async(delta_desc, [line + q_start], dout_full, delta_ring.index(stage))


@gluon.jit
def move(
    descriptors, rings, barriers, ptrs, items_strides, sizes, service, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, QUARTERS: gl.constexpr,
):  # fmt: skip
    _, _, k_ring, _, _, _, _, _, _, _, col_ring = rings
    _, indices_ptr, _, _, kv_lengths_ptr, parts_ptr, queue_ptr, _ = ptrs
    n_heads, n_axes, n_lines, _, kv_len, n_padded, _, _, n_split, n_parts = sizes
    SETS: gl.constexpr = k_ring.shape[0]
    n_work = n_lines * n_axes
    if parts_ptr is not None:
        n_work = n_work + n_split * (n_parts - 1) * n_axes
    if service is None:
        pid = gl.program_id(0)
        n_before_queue = gl.num_programs(0)
        is_by_head = False
    else:
        # from the queue as well, or columns would wait for one of a program which has not begun
        pid = gl.atomic_add(queue_ptr, 1, sem="relaxed")
        n_before_queue = 0
        # otherwise sections are prepared beside the columns
        is_by_head = service[5] < n_axes
    i_col = 0
    n_moved = 0
    while pid < n_work:
        col = find_col(ptrs, items_strides, pid, sizes, is_by_head, GROUP, QUARTERS)
        i_axis, kv_start = col[0], col[1]
        # early: it takes as long as a load. Without a queue there is a program for each column
        pid = n_work if queue_ptr is None else gl.atomic_add(queue_ptr, 1, sem="relaxed") + n_before_queue
        slot = i_col % 2
        mbarrier.wait(barriers[COL_EMPTY].index(slot), ((i_col // 2) & 1) ^ 1)
        for i in gl.static_range(COL_FIELDS if QUARTERS else COL_FIELDS - 1):
            store_int(col_ring.index(slot * COL_FIELDS + i), col[i])
        mbarrier.arrive(barriers[COL_FULL].index(slot), count=1)
        if service is not None:
            # not before: the section may be waiting for the column before, which is counted when this one has been
            # taken
            wait_for_section(service, i_axis)
        i_batch = i_axis // n_heads
        i_kv_head = i_axis % n_heads
        if SETS > 1:
            move_kv(descriptors, rings, barriers, i_axis, n_heads, kv_start, i_col)
        n_before = n_moved
        limit = key_limit(kv_lengths_ptr, i_batch, kv_len)
        for i_member in range(GROUP):
            first, n_steps, _n_masked, _n_mixed = member_steps(
                ptrs, items_strides, sizes, col, limit, i_member, CAUSAL, GROUP, BLOCK_Q, QUARTERS
            )
            i_head = i_kv_head * GROUP + i_member
            line = (i_batch * n_heads * GROUP + i_head) * n_padded
            q_start = query_start(indices_ptr, first, BLOCK_Q)
            for i_step in range(n_steps):
                # the next index is loaded a step ahead
                q_next = query_start(indices_ptr, first + i_step + 1, BLOCK_Q)
                if is_left_out(indices_ptr, first + i_step, BLOCK_Q, QUARTERS) == 0:
                    move_step(descriptors, rings, barriers, i_batch, i_head, q_start, line, n_moved, STAGES)
                    if SETS == 1:  # noqa: SIM102
                        if n_moved == n_before:
                            # behind the first step, whose place has long been free
                            move_kv(descriptors, rings, barriers, i_axis, n_heads, kv_start, i_col)
                    n_moved += 1
                q_start = q_next
        if SETS == 1:  # noqa: SIM102
            if n_moved == n_before:
                move_kv(descriptors, rings, barriers, i_axis, n_heads, kv_start, i_col)
        i_col += 1
    slot = i_col % 2
    mbarrier.wait(barriers[COL_EMPTY].index(slot), ((i_col // 2) & 1) ^ 1)
    # no column: the end
    store_int(col_ring.index(slot * COL_FIELDS), -1)
    mbarrier.arrive(barriers[COL_FULL].index(slot), count=1)


@gluon.jit
def read_col_work_tile(col_ring, barriers, i_col, QUARTERS: gl.constexpr):
    """The next column that the moving warp hands on: COL_FIELDS; the axis is -1 at the end."""
    slot = i_col % 2
    mbarrier.wait(barriers[COL_FULL].index(slot), (i_col // 2) & 1)
    i_axis = load_int(col_ring.index(slot * COL_FIELDS))
    kv_start = load_int(col_ring.index(slot * COL_FIELDS + 1))
    begin = load_int(col_ring.index(slot * COL_FIELDS + 2))
    n_tiles = load_int(col_ring.index(slot * COL_FIELDS + 3))
    n_partial = load_int(col_ring.index(slot * COL_FIELDS + 4))
    i_part = load_int(col_ring.index(slot * COL_FIELDS + 5))
    i_block = load_int(col_ring.index(slot * COL_FIELDS + 6))
    n_mixed = load_int(col_ring.index(slot * COL_FIELDS + 7)) if QUARTERS else n_partial
    mbarrier.arrive(barriers[COL_EMPTY].index(slot), count=1)
    return i_axis, kv_start, begin, n_tiles, n_partial, i_part, i_block, n_mixed


@gluon.jit
def report(col_ring, barriers, service):
    """The warp that counts columns, once their sums of dq are in memory."""
    i_col = 0
    i_axis = take_axis(col_ring, barriers, i_col)
    # they come to the first column, or to the end, as to any other
    mbarrier.wait(barriers[COL_DONE].index(0), 0)
    while i_axis >= 0:
        # both warpgroups have come to the column behind it, or to the end
        i_col += 1
        mbarrier.wait(barriers[COL_DONE].index(i_col % 2), (i_col // 2) & 1)
        count_column(service, i_axis)
        i_axis = take_axis(col_ring, barriers, i_col)


@gluon.jit
def take_axis(col_ring, barriers, i_col):
    """Of the next column that the moving warp hands on the axis alone; -1 at the end."""
    slot = i_col % 2
    mbarrier.wait(barriers[COL_FULL].index(slot), (i_col // 2) & 1)
    i_axis = load_int(col_ring.index(slot * COL_FIELDS))
    mbarrier.arrive(barriers[COL_EMPTY].index(slot), count=1)
    return i_axis
