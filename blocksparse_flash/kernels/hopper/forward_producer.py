"""Producer warp of the Hopper forward: tile scheduler over tile rows, and TMA loads.

A warp takes tile rows from a queue until none is left, tells the computing warpgroups, and loads q, then k and v of
each step
of the row, into rings, running ahead over the end of a row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton.tile import TILE, dense_kv_steps, find_split, find_work_record, record_pointer, split_index, split_steps
from .bitmask import INDEX_BITS, SUBTILES_BIT
from .registers import WARPGROUP_ROWS, clamped_kv_len, load_int, store_int
from .tma import tma_load

# int32 values which the warp that moves data hands on: axis (batch * heads + head; of a part n_batch_heads and its block in
# the
# workspace), first query, first entry of the tile list (without a layout the first partial step), steps, partial ones
# among them,
# those of these, in front, that are not made of whole quarters; how many tiles of which one half of the keys attends
# come in pairs, a
# step each, the last of the partial ones
ROW_FIELDS = gl.constexpr(7)


@gluon.constexpr_function
def row_ints(quarters):
    """How far apart two rows stand where they are handed on; without quarters their last two fields are not."""
    return 7 if quarters else 6


# which barriers: two for the rows handed on, one for each place of queries, one for each stage of k and v. Every kind
# is
# an allocation of its own, or Triton would let the threads of a warpgroup meet before each wait
ROW_FULL, ROW_EMPTY, Q_FULL, Q_EMPTY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
K_FULL, K_EMPTY, V_FULL, V_EMPTY = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)


# ---- which row? ----


@gluon.jit
def find_row(
    ptrs,
    record_strides,
    pid,
    sizes,
    CAUSAL: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    HAS_SUBTILES: gl.constexpr,
):
    """The row of work `pid`, or its part: the axis, and ROW_FIELDS."""
    records_ptr, _, _, _, kv_lengths_ptr, _, _, splits_ptr = ptrs
    n_heads, n_batch_heads, n_lines, q_len, kv_len, _, n_split_lines, num_splits = sizes
    STEPS: gl.constexpr = TILE // BLOCK_KV
    n_half = 0
    if splits_ptr is not None:
        batch_head, i_launch, i_split = find_split(records_ptr, pid, n_lines, n_batch_heads, n_split_lines, num_splits)
        p_record = records_ptr
        if records_ptr is not None:
            p_record = record_pointer(records_ptr, record_strides, batch_head, n_heads, i_launch, 1)
    elif records_ptr is not None:
        batch_head, p_record, _ = find_work_record(
            records_ptr, record_strides, pid, n_lines, n_heads, n_batch_heads, 1, 1
        )
    else:
        batch_head, i_launch = pid // n_lines, pid % n_lines
    if records_ptr is not None:
        q_start, begin = gl.load(p_record) * TILE, gl.load(p_record + 1)
        n_tiles, n_partial = gl.load(p_record + 2), gl.load(p_record + 3)
        n_bitmask = n_partial - gl.load(p_record + 5) if HAS_SUBTILES else n_partial
        if splits_ptr is not None:
            _first, _n_tiles, n_bitmask = split_steps(n_tiles, n_bitmask, i_split, num_splits)
            first, n_tiles, n_partial = split_steps(n_tiles, n_partial, i_split, num_splits)
            begin = begin + first
        # parts of a row are counted in tiles, and where keys end is looked for in tiles
        if HAS_SUBTILES and BLOCK_KV == TILE:  # noqa: SIM102
            if splits_ptr is None and kv_lengths_ptr is None:
                n_half = gl.load(p_record + 6)
                n_tiles, n_partial = n_tiles - n_half // 2, n_partial - n_half // 2
        n_steps, n_partial, n_bitmask = n_tiles * STEPS, n_partial * STEPS, n_bitmask * STEPS
    else:
        # without a layout the last rows are the longest, if any
        q_start = (n_lines - 1 - i_launch) * (WARPGROUPS * WARPGROUP_ROWS)
        limit = clamped_kv_len(kv_lengths_ptr, batch_head // n_heads, kv_len)
        begin, n_steps = dense_kv_steps(q_start, q_len, kv_len, limit, CAUSAL, WARPGROUPS * WARPGROUP_ROWS, BLOCK_KV)
        n_partial = n_steps - begin
        if splits_ptr is not None:
            # of the keys in order, the full steps in front
            first, n_steps, n_full = split_steps(n_steps, begin, i_split, num_splits)
            begin, n_partial = first + n_full, n_steps - n_full
        n_bitmask = n_partial
    if splits_ptr is not None:
        handed = gl.where(
            i_split < 0,
            batch_head,
            n_batch_heads + split_index(batch_head, i_launch, i_split, n_batch_heads, n_split_lines),
        )
    else:
        handed = batch_head
    return batch_head, handed, q_start, begin, n_steps, n_partial, n_bitmask, n_half


@gluon.jit
def key_start(indices_ptr, row, i_step, BLOCK_KV: gl.constexpr):
    """The first key of a step of a row. Without a layout the partial steps, from `begin` on, come first too."""
    _, _, begin, n_steps, n_partial, _, _ = row
    if indices_ptr is not None:
        STEPS: gl.constexpr = TILE // BLOCK_KV
        # added first, here and in mask_words: else a pointer to the entry behind the list's first is kept, and spilled
        return (gl.load(indices_ptr + (begin + i_step // STEPS)) & INDEX_BITS) * TILE + i_step % STEPS * BLOCK_KV
    else:
        # the full steps end where the partial ones begin
        return gl.where(i_step < n_partial, begin + i_step, begin + i_step - n_steps) * BLOCK_KV


@gluon.jit
def entries_of(row, i_step):
    """Which entry of the list says of which tile a step of 128 keys is; whether it is a pair of halves, and whether
    the next entry has
    the second one."""
    _, _, begin, _, n_partial, _, n_half = row
    i_pair = i_step - (n_partial - (n_half + 1) // 2)
    is_pair = (i_pair >= 0) & (i_step < n_partial)
    n_before = gl.where(is_pair, i_pair, gl.where(i_pair >= 0, n_half // 2, 0))
    return begin + i_step + n_before, is_pair, is_pair & (2 * i_pair + 1 < n_half)


@gluon.jit
def half_starts(indices_ptr, row, i_step):
    """The first keys of both halves of a step of 128."""
    i_entry, is_pair, has_second = entries_of(row, i_step)
    entry = gl.load(indices_ptr + i_entry)
    other = gl.load(indices_ptr + i_entry + has_second.to(gl.int32))
    # of its quarters those of the first half of the keys
    o_first = gl.where(is_pair & (((entry >> SUBTILES_BIT) & 5) == 0), WARPGROUP_ROWS, 0)
    o_last = gl.where(is_pair & (((other >> SUBTILES_BIT) & 5) != 0), 0, WARPGROUP_ROWS)
    return (entry & INDEX_BITS) * TILE + o_first, (other & INDEX_BITS) * TILE + o_last


@gluon.jit
def query_place(i_row, WARPGROUP: gl.constexpr, q_ring, WARPGROUPS: gl.constexpr):
    """Where the queries of a row that warpgroup WARPGROUP computes lie in the ring, and in which phase of its
    barriers."""
    SETS: gl.constexpr = q_ring.shape[0] // WARPGROUPS
    return i_row % SETS * WARPGROUPS + WARPGROUP, (i_row // SETS) & 1


# ---- the warp that moves data ----


@gluon.jit
def starts_of(indices_ptr, row, i_step, BLOCK_KV: gl.constexpr, PAIRS: gl.constexpr):
    """The first key of a step; with PAIRS of each of its halves."""
    if PAIRS:
        return half_starts(indices_ptr, row, i_step)
    else:
        return (key_start(indices_ptr, row, i_step, BLOCK_KV),)


@gluon.jit
def move_keys(desc, i_batch, i_head, starts, full, tile):
    """The keys or values of a step: at once, or each half of it from where that begins, by smaller blocks."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLS: gl.constexpr = desc.block_type.shape[3]
    if ROWS == tile.shape[2]:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, [i_batch, i_head, starts[0], 0], full, tile)
    else:
        # 64 rows and columns, which lie together
        mbarrier.expect(full, tile.shape[3] // COLS * 2 * desc.block_type.nbytes)
        for i_half in gl.static_range(2):
            for i_cols in gl.static_range(tile.shape[3] // COLS):
                place = tile.slice(i_half * ROWS, ROWS, 2).slice(i_cols * COLS, COLS, 3)
                tma_load(desc, [i_batch, i_head, starts[i_half], i_cols * COLS], full, place)


@gluon.jit
def move(
    descriptors, rings, barriers, ptrs, record_strides, sizes, group, CAUSAL: gl.constexpr, BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, HAS_SUBTILES: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, _ = descriptors
    q_ring, k_ring, v_ring, _, row_ring = rings
    _, indices_ptr, _, _, _, _, tile_counter_ptr, splits_ptr = ptrs
    n_heads, n_batch_heads, n_lines, _, _, _, n_split_lines, num_splits = sizes
    PAIRS: gl.constexpr = HAS_SUBTILES and BLOCK_KV == TILE
    n_work = n_lines * n_batch_heads
    if splits_ptr is not None:
        n_work = n_work + n_split_lines * (num_splits - 1) * n_batch_heads
    pid = gl.program_id(0)
    i_row = 0
    n_moved = 0
    while pid < n_work:
        batch_head, handed, q_start, begin, n_steps, n_partial, n_bitmask, n_half = find_row(
            ptrs, record_strides, pid, sizes, CAUSAL, BLOCK_KV, WARPGROUPS, HAS_SUBTILES
        )
        row = (handed, q_start, begin, n_steps, n_partial, n_bitmask, n_half)
        # early: it takes as long as a load. Without a queue there is a program for each row
        pid = n_work if tile_counter_ptr is None else gl.atomic_add(tile_counter_ptr, 1) + gl.num_programs(0)
        slot = i_row % 2
        mbarrier.wait(barriers[ROW_EMPTY].index(slot), ((i_row // 2) & 1) ^ 1)
        for i in gl.static_range(ROW_FIELDS if HAS_SUBTILES else ROW_FIELDS - 2):
            store_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + i), row[i])
        mbarrier.arrive(barriers[ROW_FULL].index(slot), count=1)
        i_batch = batch_head // n_heads
        i_head = batch_head % n_heads
        for who in gl.static_range(WARPGROUPS):
            i_query, phase = query_place(i_row, who, q_ring, WARPGROUPS)
            q_full = barriers[Q_FULL].index(i_query)
            mbarrier.wait(barriers[Q_EMPTY].index(i_query), phase ^ 1)
            mbarrier.expect(q_full, q_desc.block_type.nbytes)
            tma_load(q_desc, [i_batch, i_head, q_start + who * WARPGROUP_ROWS, 0], q_full, q_ring.index(i_query))
        i_kv_head = i_head // group
        starts = starts_of(indices_ptr, row, 0, BLOCK_KV, PAIRS)
        for i_step in range(n_steps):
            # the next index is loaded a step ahead
            next_starts = starts_of(indices_ptr, row, i_step + 1, BLOCK_KV, PAIRS)
            stage = n_moved % STAGES
            phase = (n_moved // STAGES) & 1
            k_full, v_full = barriers[K_FULL].index(stage), barriers[V_FULL].index(stage)
            mbarrier.wait(barriers[K_EMPTY].index(stage), phase ^ 1)
            move_keys(k_desc, i_batch, i_kv_head, starts, k_full, k_ring.index(stage))
            mbarrier.wait(barriers[V_EMPTY].index(stage), phase ^ 1)
            move_keys(v_desc, i_batch, i_kv_head, starts, v_full, v_ring.index(stage))
            n_moved += 1
            starts = next_starts
        i_row += 1
    slot = i_row % 2
    mbarrier.wait(barriers[ROW_EMPTY].index(slot), ((i_row // 2) & 1) ^ 1)
    # no row: the end
    store_int(row_ring.index(slot * row_ints(HAS_SUBTILES)), -1)
    mbarrier.arrive(barriers[ROW_FULL].index(slot), count=1)


@gluon.jit
def read_row_work_tile(row_ring, barriers, i_row, HAS_SUBTILES: gl.constexpr):
    """The next row that the moving warp hands on: ROW_FIELDS; the axis is -1 at the end."""
    slot = i_row % 2
    mbarrier.wait(barriers[ROW_FULL].index(slot), (i_row // 2) & 1)
    batch_head = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES)))
    q_start = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 1))
    begin = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 2))
    n_steps = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 3))
    n_partial = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 4))
    n_bitmask = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 5)) if HAS_SUBTILES else n_partial
    n_half = load_int(row_ring.index(slot * row_ints(HAS_SUBTILES) + 6)) if HAS_SUBTILES else 0
    mbarrier.arrive(barriers[ROW_EMPTY].index(slot), count=1)
    return batch_head, q_start, begin, n_steps, n_partial, n_bitmask, n_half
