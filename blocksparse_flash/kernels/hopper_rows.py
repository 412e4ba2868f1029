"""Which rows does a program of the Hopper forward compute, and how does their data come to it? The queue and the moving warp.

A warp takes tile rows from a queue until none is left, tells the computing warpgroups, and loads q, then k and v of each step
of the row, into rings, running ahead over the end of a row.

Knows: a plan's records, rings, barriers. Does not know: what is computed of the data, launches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper import HALF, INDEX_BITS, key_limit, load_async, load_int, store_int
from .tile import TILE, block_of, dense_keys, find_part, find_record, part_of, record_of

# int32 values which the warp that moves data hands on: axis (batch * heads + head; of a part n_axes and its block in the
# workspace), first query, first entry of the tile list (without a layout the first partial step), steps, partial ones among them,
# those of these, in front, that are not made of whole quarters
ROW_FIELDS = gl.constexpr(6)
# which barriers: two for the rows handed on, one for each place of queries, one for each stage of k and v. Every kind is
# an allocation of its own, or Triton would let the threads of a warpgroup meet before each wait
ROW_FULL, ROW_EMPTY, Q_FULL, Q_EMPTY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
K_FULL, K_EMPTY, V_FULL, V_EMPTY = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)


# ---- which row? ----


@gluon.jit
def find_row(
    ptrs,
    items_strides,
    pid,
    sizes,
    CAUSAL: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    QUARTERS: gl.constexpr,
):
    """The row of work `pid`, or its part: ROW_FIELDS, in front of them the axis."""
    items_ptr, _, _, _, kv_lengths_ptr, _, _, parts_ptr = ptrs
    n_heads, n_axes, n_lines, q_len, kv_len, _, n_split, n_parts = sizes
    STEPS: gl.constexpr = TILE // BLOCK_KV
    if parts_ptr is not None:
        i_axis, i_launch, i_part = find_part(items_ptr, pid, n_lines, n_axes, n_split, n_parts)
        p_record = items_ptr
        if items_ptr is not None:
            p_record = record_of(items_ptr, items_strides, i_axis, n_heads, i_launch, 1)
    elif items_ptr is not None:
        i_axis, p_record, _ = find_record(items_ptr, items_strides, pid, n_lines, n_heads, n_axes, 1, 1)
    else:
        i_axis, i_launch = pid // n_lines, pid % n_lines
    if items_ptr is not None:
        q_start, begin = gl.load(p_record) * TILE, gl.load(p_record + 1)
        n_tiles, n_partial = gl.load(p_record + 2), gl.load(p_record + 3)
        n_mixed = n_partial - gl.load(p_record + 5) if QUARTERS else n_partial
        if parts_ptr is not None:
            _first, _n_tiles, n_mixed = part_of(n_tiles, n_mixed, i_part, n_parts)
            first, n_tiles, n_partial = part_of(n_tiles, n_partial, i_part, n_parts)
            begin = begin + first
        n_steps, n_partial, n_mixed = n_tiles * STEPS, n_partial * STEPS, n_mixed * STEPS
    else:
        # without a layout the last rows are the longest, if any
        q_start = (n_lines - 1 - i_launch) * (WARPGROUPS * HALF)
        limit = key_limit(kv_lengths_ptr, i_axis // n_heads, kv_len)
        begin, n_steps = dense_keys(q_start, q_len, kv_len, limit, CAUSAL, WARPGROUPS * HALF, BLOCK_KV)
        n_partial = n_steps - begin
        if parts_ptr is not None:
            # of the keys in order, the full steps in front
            first, n_steps, n_full = part_of(n_steps, begin, i_part, n_parts)
            begin, n_partial = first + n_full, n_steps - n_full
        n_mixed = n_partial
    if parts_ptr is not None:
        handed = gl.where(i_part < 0, i_axis, n_axes + block_of(i_axis, i_launch, i_part, n_axes, n_split))
    else:
        handed = i_axis
    return i_axis, handed, q_start, begin, n_steps, n_partial, n_mixed


@gluon.jit
def key_start(indices_ptr, row, i_step, BLOCK_KV: gl.constexpr):
    """The first key of a step of a row. Without a layout the partial steps, from `begin` on, come first too."""
    _, _, begin, n_steps, n_partial, _ = row
    if indices_ptr is not None:
        STEPS: gl.constexpr = TILE // BLOCK_KV
        # added first, here and in mask_words: else a pointer to the entry behind the list's first is kept, and spilled
        return (gl.load(indices_ptr + (begin + i_step // STEPS)) & INDEX_BITS) * TILE + i_step % STEPS * BLOCK_KV
    else:
        # the full steps end where the partial ones begin
        return gl.where(i_step < n_partial, begin + i_step, begin + i_step - n_steps) * BLOCK_KV


@gluon.jit
def query_place(i_row, WHO: gl.constexpr, q_ring, WARPGROUPS: gl.constexpr):
    """Where the queries of a row that warpgroup WHO computes lie in the ring, and in which phase of its barriers."""
    SETS: gl.constexpr = q_ring.shape[0] // WARPGROUPS
    return i_row % SETS * WARPGROUPS + WHO, (i_row // SETS) & 1


# ---- the warp that moves data ----


@gluon.jit
def move(
    descriptors, rings, barriers, ptrs, items_strides, sizes, group, CAUSAL: gl.constexpr, BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, QUARTERS: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, _ = descriptors
    q_ring, k_ring, v_ring, _, row_ring = rings
    _, indices_ptr, _, _, _, _, queue_ptr, parts_ptr = ptrs
    n_heads, n_axes, n_lines, _, _, _, n_split, n_parts = sizes
    n_work = n_lines * n_axes
    if parts_ptr is not None:
        n_work = n_work + n_split * (n_parts - 1) * n_axes
    pid = gl.program_id(0)
    i_row = 0
    n_moved = 0
    while pid < n_work:
        i_axis, handed, q_start, begin, n_steps, n_partial, n_mixed = find_row(
            ptrs, items_strides, pid, sizes, CAUSAL, BLOCK_KV, WARPGROUPS, QUARTERS
        )
        row = (handed, q_start, begin, n_steps, n_partial, n_mixed)
        # early: it takes as long as a load. Without a queue there is a program for each row
        pid = n_work if queue_ptr is None else gl.atomic_add(queue_ptr, 1) + gl.num_programs(0)
        slot = i_row % 2
        mbarrier.wait(barriers[ROW_EMPTY].index(slot), ((i_row // 2) & 1) ^ 1)
        for i in gl.static_range(ROW_FIELDS if QUARTERS else ROW_FIELDS - 1):
            store_int(row_ring.index(slot * ROW_FIELDS + i), row[i])
        mbarrier.arrive(barriers[ROW_FULL].index(slot), count=1)
        i_batch = i_axis // n_heads
        i_head = i_axis % n_heads
        for who in gl.static_range(WARPGROUPS):
            i_query, phase = query_place(i_row, who, q_ring, WARPGROUPS)
            q_full = barriers[Q_FULL].index(i_query)
            mbarrier.wait(barriers[Q_EMPTY].index(i_query), phase ^ 1)
            mbarrier.expect(q_full, q_desc.block_type.nbytes)
            load_async(q_desc, [i_batch, i_head, q_start + who * HALF, 0], q_full, q_ring.index(i_query))
        i_kv_head = i_head // group
        kv_start = key_start(indices_ptr, row, 0, BLOCK_KV)
        for i_step in range(n_steps):
            # the next index is loaded a step ahead
            kv_next = key_start(indices_ptr, row, i_step + 1, BLOCK_KV)
            stage = n_moved % STAGES
            phase = (n_moved // STAGES) & 1
            k_full, v_full = barriers[K_FULL].index(stage), barriers[V_FULL].index(stage)
            mbarrier.wait(barriers[K_EMPTY].index(stage), phase ^ 1)
            mbarrier.expect(k_full, k_desc.block_type.nbytes)
            load_async(k_desc, [i_batch, i_kv_head, kv_start, 0], k_full, k_ring.index(stage))
            mbarrier.wait(barriers[V_EMPTY].index(stage), phase ^ 1)
            mbarrier.expect(v_full, v_desc.block_type.nbytes)
            load_async(v_desc, [i_batch, i_kv_head, kv_start, 0], v_full, v_ring.index(stage))
            n_moved += 1
            kv_start = kv_next
        i_row += 1
    slot = i_row % 2
    mbarrier.wait(barriers[ROW_EMPTY].index(slot), ((i_row // 2) & 1) ^ 1)
    # no row: the end
    store_int(row_ring.index(slot * ROW_FIELDS), -1)
    mbarrier.arrive(barriers[ROW_FULL].index(slot), count=1)


@gluon.jit
def take_row(row_ring, barriers, i_row, QUARTERS: gl.constexpr):
    """The next row that the moving warp hands on: ROW_FIELDS; the axis is -1 at the end."""
    slot = i_row % 2
    mbarrier.wait(barriers[ROW_FULL].index(slot), (i_row // 2) & 1)
    i_axis = load_int(row_ring.index(slot * ROW_FIELDS))
    q_start = load_int(row_ring.index(slot * ROW_FIELDS + 1))
    begin = load_int(row_ring.index(slot * ROW_FIELDS + 2))
    n_steps = load_int(row_ring.index(slot * ROW_FIELDS + 3))
    n_partial = load_int(row_ring.index(slot * ROW_FIELDS + 4))
    n_mixed = load_int(row_ring.index(slot * ROW_FIELDS + 5)) if QUARTERS else n_partial
    mbarrier.arrive(barriers[ROW_EMPTY].index(slot), count=1)
    return i_axis, q_start, begin, n_steps, n_partial, n_mixed
