"""Preprocess and postprocess of the Hopper backward that overlap with its tile columns.

Tile columns are computed head group by head group (a key head and its query heads). Meanwhile two warps of each program
take work items from a counter, in this order (n_preprocessed, n_ahead, n_postprocessed: see overlap_schedule.py):

    preprocess n_preprocessed .. n_ahead - 1, then
    postprocess 0, preprocess n_ahead, postprocess 1, preprocess n_ahead + 1, ..., postprocess n_postprocessed - 1

    preprocess   dq_sum = 0; with many tile columns also lse = LSE log2(e), delta = rowsum(dO * O) - dLSE
    postprocess  dQ = scale dq_sum

A preprocess work item is PREPROCESS_CHUNKS chunks of a head group's sum of dQ, a postprocess work item is one chunk.
The preprocess launch handles the first head groups, which are needed at once, and the postprocess launch the last ones,
which have no later tile column to overlap with.

Counters in global memory, at counters_ptr
    0                      work tiles taken
    1                      work items taken
    2 + g                  preprocess work items of head group g that are finished
    2 + n_batch_heads + g  work tiles of head group g whose sums of dQ are in global memory

    producer (load)         waits for counter 2 + g before it loads anything of group g, but after it has passed on the
                            work tile
    count_finished          increments 2 + n_batch_heads + g for the consumers, when both have begun the next work tile
    run_overlapped_passes   increments 2 + g; waits for 2 + n_batch_heads + g before it postprocesses group g

No deadlock, however few programs run at a time. Work tiles and work items are taken in order, by programs that are
already running, and each taker takes the next only after it has finished the last. Order everything by head group, and
within a group: preprocess, work tiles, postprocess. The first unfinished one can always proceed:
    - a preprocess waits for nothing; in the list of work items only postprocesses of earlier groups come before it
    - a work tile waits for the preprocess of its group
    - a postprocess waits for the work tiles of its group. These come before the work tiles of any later group, except
      that with long tile columns in front (n_ahead = n_batch_heads) work tiles of later groups may come before them;
      these wait for nothing then, since the preprocess launch handled every group.

The sum of dQ is stored in the order of `in_register_order`, so the consumers can add to it without shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .. import overlap_schedule
from ..triton.tile import LOG2_E
from .barriers import fence_proxy_async, increment_counter, wait_for_counter
from .registers import reinterpret

# Triton 3.8 renamed the copy
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# values of the sum of dQ per postprocess work item, one or two tiles of 64 queries: many enough that the counter is no
# bottleneck, few enough that every warp gets one in a head group of 16,384 x 128
CHUNK = gl.constexpr(8192)
# chunks per preprocess work item
PREPROCESS_CHUNKS = gl.constexpr(2)
# values that a warp zeroes or converts at a time, 16 x 32: 16 of its 32 registers per thread
STEP = gl.constexpr(512)
# bytes in flight per warp, four times what its registers could hold
FETCH_BYTES = gl.constexpr(8192)
# values in flight, in units of STEP
FETCH_STEPS = gl.constexpr(FETCH_BYTES.value // STEP.value // 4)
# counters: work items taken, and the first one of the head groups
ITEM_COUNTER = gl.constexpr(1)
GROUP_COUNTERS = gl.constexpr(overlap_schedule.N_QUEUE_COUNTERS)
# nanoseconds between polls for the last tile columns of a head group
POSTPROCESS_NAP = gl.constexpr(500)


# ---- state ----


class Overlap(NamedTuple):
    """State of the overlapped passes.

    counters_ptr     int32 counters, see above
    dq_sum_ptr       (n_batch_heads, n_chunks, CHUNK) float32 sum of dQ
    dq_ptr           (batch, heads, q_len, 8 * n_eighths) result
    n_batch_heads    head groups of all batch elements
    n_group_tiles    work tiles per head group
    n_preprocessed, n_ahead, n_postprocessed  overlap_schedule.OverlapSchedule
    n_chunks         chunks per head group
    n_padded         q_len rounded up to whole tiles
    n_eighths        eighths of a row of dQ
    """

    counters_ptr: Any
    dq_sum_ptr: Any
    dq_ptr: Any
    n_batch_heads: Any
    n_group_tiles: Any
    n_preprocessed: Any
    n_ahead: Any
    n_postprocessed: Any
    n_chunks: Any
    n_padded: Any
    q_len: Any
    n_eighths: Any
    scale: Any


class LseDelta(NamedTuple):
    """Inputs and result of the overlapped preprocess of LSE and delta. All pointers are None if it does not overlap.

    out_ptr, lse_ptr, dlse_ptr  contiguous; dlse_ptr may be None
    lse_delta_ptr  (2, n_rows) float32: LSE in base 2, then delta
    dout_eighths   (batch, head, row) strides of dO in units of 8 elements
    n_heads        query heads
    n_rows         batch * query heads * n_padded
    n_v_eighths    eighths of a row of out
    """

    out_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any
    lse_delta_ptr: Any
    dout_eighths: Any
    n_heads: Any
    n_rows: Any
    n_v_eighths: Any


@gluon.jit
def wait_for_preprocess(overlap, head_group):
    """Waits until TMA may load LSE and delta of a head group, and dQ may be added to its sum."""
    if head_group >= overlap.n_preprocessed:
        n_items = gl.cdiv(overlap.n_chunks, PREPROCESS_CHUNKS)
        wait_for_counter(overlap.counters_ptr + GROUP_COUNTERS + head_group, n_items, 0)
        fence_proxy_async()


@gluon.jit
def count_work_tile(overlap, head_group):
    """Counts a work tile of a head group, whose sums of dQ are in global memory."""
    increment_counter(overlap.counters_ptr + GROUP_COUNTERS + overlap.n_batch_heads + head_group)


# ---- cp.async ----


@gluon.jit
def cp_async(tile, pointers, mask=None):
    """Copies global to shared memory, bypassing L1, 16 bytes per thread at a time; zeros where masked."""
    load_rows(tile, pointers, mask=mask, cache_modifier=".cg")


@gluon.jit
def cp_async_wait():
    """Waits for all copies of this warp."""
    async_copy.commit_group()
    async_copy.wait_group(0)


# ---- preprocess ----


@gluon.jit
def zero_chunk(p_sum):
    """Zeroes one chunk of the sum of dQ."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    b_zero = gl.zeros([STEP], gl.float32, layout)
    for first in range(0, CHUNK, STEP):
        gl.store(p_sum + (first + o_value), b_zero)


@gluon.jit
def write_lse_delta(inputs, buffer, i_chunk, n_padded, q_len, DIM: gl.constexpr, DIM_V: gl.constexpr):
    """LSE and delta of the queries whose dQ is chunk i_chunk, as preprocess_kernel writes them. inputs: LseDelta."""
    ROWS: gl.constexpr = CHUNK // DIM
    # a piece is 256 values, 16 bytes per thread; half of the pieces in flight are of dO
    PIECE_ROWS: gl.constexpr = 256 // DIM_V
    PIECES: gl.constexpr = FETCH_BYTES // 2 // 512
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [PIECE_ROWS, 32 // PIECE_ROWS], [1, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    pieces = reinterpret(buffer, [2 * PIECES, PIECE_ROWS, DIM_V], plain, inputs.out_ptr.dtype.element_ty)
    i_row = i_chunk.to(gl.int64) * ROWS
    batch_head, q_start = (i_row // n_padded).to(gl.int32), (i_row % n_padded).to(gl.int32)
    i_query = batch_head.to(gl.int64) * q_len + q_start
    n_rows = q_len - q_start
    o_q = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    b_lse = gl.load(inputs.lse_ptr + i_query + o_q, mask=o_q < n_rows, other=float("-inf"))
    gl.store(inputs.lse_delta_ptr + i_row + o_q, gl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E))
    o_dim = gl.expand_dims(gl.arange(0, DIM_V, layout=gl.SliceLayout(0, layout)), 0)
    p_out = inputs.out_ptr + i_query * (8 * inputs.n_v_eighths)
    head_eighths = (
        batch_head // inputs.n_heads * inputs.dout_eighths[0] + batch_head % inputs.n_heads * inputs.dout_eighths[1]
    )
    p_dout = inputs.dout_ptr + (head_eighths + q_start.to(gl.int64) * inputs.dout_eighths[2]) * 8
    for first in range(0, ROWS, PIECES * PIECE_ROWS):
        for i_piece in gl.static_range(PIECES):
            o_row = first + i_piece * PIECE_ROWS + gl.expand_dims(gl.arange(0, PIECE_ROWS, layout=row_layout), 1)
            m_piece = (o_row < n_rows) & (o_dim < 8 * inputs.n_v_eighths)
            cp_async(pieces.index(i_piece), p_out + (o_row * (8 * inputs.n_v_eighths) + o_dim), m_piece)
            cp_async(pieces.index(PIECES + i_piece), p_dout + (o_row * (8 * inputs.dout_eighths[2]) + o_dim), m_piece)
        cp_async_wait()
        for i_piece in gl.static_range(PIECES):
            b_out = pieces.index(i_piece).load(layout).to(gl.float32)
            b_delta = gl.sum(b_out * pieces.index(PIECES + i_piece).load(layout).to(gl.float32), 1)
            o_row = first + i_piece * PIECE_ROWS + gl.arange(0, PIECE_ROWS, layout=row_layout)
            if inputs.dlse_ptr is not None:
                b_delta -= gl.load(inputs.dlse_ptr + i_query + o_row, mask=o_row < n_rows, other=0.0)
            gl.store(inputs.lse_delta_ptr + inputs.n_rows + i_row + o_row, gl.where(o_row < n_rows, b_delta, 0.0))


# ---- postprocess ----


@gluon.constexpr_function
def dq_store_layout(warps):
    """Layout of [16 * warps, 32] values in which each thread stores 8 neighbours of a row, from two of its 16 rows."""
    of_warps = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    of_lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], of_lanes, of_warps, [], [16 * warps, 32])


@gluon.jit
def dq_rows_of_chunk(dq_ptr, i_chunk, n_padded, q_len, n_eighths, DIM: gl.constexpr):
    """(pointer to the first row of dQ of a chunk, how many rows are left in its head)."""
    i_row = i_chunk * (CHUNK // DIM)
    i_head, q_start = i_row // n_padded, i_row % n_padded
    return dq_ptr + (i_head.to(gl.int64) * q_len + q_start) * (8 * n_eighths), q_len - q_start


@gluon.jit
def store_dq(b_sum, p_dq, n_rows, n_eighths, i_step, scale, DIM: gl.constexpr):
    """Scales, converts and stores steps i_step .. i_step + warps - 1 of a chunk. b_sum: [warps * STEP] of its sum."""
    WARPS: gl.constexpr = gl.num_warps()
    PIECES: gl.constexpr = DIM // 32
    layout: gl.constexpr = dq_store_layout(WARPS)
    # inverse of in_register_order
    b_dq = (
        (b_sum * scale)
        .to(p_dq.dtype.element_ty)
        .reshape([WARPS, 4, 8, 4, 2, 2])
        .permute((0, 4, 2, 1, 3, 5))
        .reshape([WARPS * 16, 32])
    )
    b_dq = gl.convert_layout(b_dq, layout)
    o_row = i_step // (4 * PIECES) * 64 + i_step % 4 * 16 + gl.arange(0, WARPS * 16, layout=gl.SliceLayout(1, layout))
    o_dim = i_step // 4 % PIECES * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, layout))
    m_dq = gl.expand_dims(o_row < n_rows, 1) & gl.expand_dims(o_dim < 8 * n_eighths, 0)
    gl.store(p_dq + gl.expand_dims(o_row * (8 * n_eighths), 1) + gl.expand_dims(o_dim, 0), b_dq, mask=m_dq)


# ---- entry points ----


@gluon.jit
def run_overlapped_passes(
    overlap, lse_delta, fetch_buffers, WARP: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr
):
    """Entry point of a warp that pre- and postprocesses. fetch_buffers: FETCH_BYTES of shared memory for each WARP."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    buffer = fetch_buffers.index(WARP)
    sums = reinterpret(buffer, [FETCH_STEPS, STEP], gl.SwizzledSharedLayout(4, 1, 1, [0]), gl.float32)
    n_chunks = overlap.n_chunks
    n_pieces = gl.cdiv(n_chunks, PREPROCESS_CHUNKS)
    n_before = (overlap.n_ahead - overlap.n_preprocessed) * n_pieces
    # a round postprocesses one head group, then preprocesses another
    n_round = n_chunks + n_pieces
    n_items = n_before + overlap.n_postprocessed * n_round
    i_item = gl.atomic_add(overlap.counters_ptr + ITEM_COUNTER, 1, sem="relaxed")
    while i_item < n_items:
        i_round, i_turn = (i_item - n_before) // n_round, (i_item - n_before) % n_round
        if (i_item >= n_before) & (i_turn < n_chunks):
            i_chunk = i_round * n_chunks + i_turn
            p_sum = overlap.dq_sum_ptr + i_chunk.to(gl.int64) * CHUNK
            p_dq, n_rows = dq_rows_of_chunk(
                overlap.dq_ptr, i_chunk, overlap.n_padded, overlap.q_len, overlap.n_eighths, DIM
            )
            p_counter = overlap.counters_ptr + GROUP_COUNTERS + overlap.n_batch_heads + i_round
            wait_for_counter(p_counter, overlap.n_group_tiles, POSTPROCESS_NAP)
            for first in range(0, CHUNK // STEP, FETCH_STEPS):
                for i_step in gl.static_range(FETCH_STEPS):
                    cp_async(sums.index(i_step), p_sum + ((first + i_step) * STEP + o_value))
                cp_async_wait()
                for i_step in gl.static_range(FETCH_STEPS):
                    b_sum = sums.index(i_step).load(layout)
                    store_dq(b_sum, p_dq, n_rows, overlap.n_eighths, first + i_step, overlap.scale, DIM)
        else:
            head_group = gl.where(
                i_item < n_before, overlap.n_preprocessed + i_item // n_pieces, overlap.n_ahead + i_round
            )
            first = gl.where(i_item < n_before, i_item % n_pieces, i_turn - n_chunks) * PREPROCESS_CHUNKS
            if head_group < overlap.n_batch_heads:
                for i_chunk in range(first, gl.minimum(first + PREPROCESS_CHUNKS, n_chunks)):
                    zero_chunk(overlap.dq_sum_ptr + (head_group * n_chunks + i_chunk).to(gl.int64) * CHUNK)
                    if lse_delta.out_ptr is not None:
                        write_lse_delta(
                            lse_delta, buffer, head_group * n_chunks + i_chunk, overlap.n_padded, overlap.q_len,
                            DIM, DIM_V,
                        )  # fmt: skip
                increment_counter(overlap.counters_ptr + GROUP_COUNTERS + head_group)
        i_item = gl.atomic_add(overlap.counters_ptr + ITEM_COUNTER, 1, sem="relaxed")


@gluon.jit(do_not_specialize=["first", "n_padded", "q_len", "n_eighths"])
def postprocess_kernel(dq_sum_ptr, dq_ptr, scale, first, n_padded, q_len, n_eighths, DIM: gl.constexpr):
    """The postprocess launch: dQ from its float32 sum, from step `first` on."""
    i_step = first + gl.program_id(0) * gl.num_warps()
    i_chunk = i_step // (CHUNK // STEP)
    p_dq, n_rows = dq_rows_of_chunk(dq_ptr, i_chunk, n_padded, q_len, n_eighths, DIM)
    o_value = gl.arange(0, gl.num_warps() * STEP, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    b_sum = gl.load(dq_sum_ptr + i_step.to(gl.int64) * STEP + o_value)
    store_dq(b_sum, p_dq, n_rows, n_eighths, i_step % (CHUNK // STEP), scale, DIM)
