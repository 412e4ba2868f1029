"""Preprocess and postprocess of the Hopper backward that overlap with its tile columns.

Columns are launched head by head, and so sections, those of the query heads of a key head, are read and the float32
sums of their dq
added to one after the other. Two warps of each program take items from a queue, each some chunks of a section: to
prepare it, which
means to clear its sums and, where a section has many columns, to tell lse and delta of its queries, or to scale and
convert its sums,
which makes dq:
    prepare n_cleared .. n_ahead - 1, then convert 0, prepare n_ahead, convert 1, prepare n_ahead + 1, ...
The first n_cleared sections are prepared by the launch before, since they are wanted at once. The last ones are
converted by a launch
behind, since no column is left beside which it could be done. Where long columns of all sections come first, all are
prepared before.
Counted in global memory, at counts_ptr:
    0 columns taken, 1 items taken, 2 + s pieces of section s prepared, 2 + n_batch_heads + s columns of section s computed
The warp that moves data waits for a section to be prepared before anything but the number of its columns comes. A
warp of its own
counts a column when its last sum is in memory, so that who computes waits for no fence.

Nothing waits in a circle: no matter how few programs run at a time, columns and items are taken in order by those
that run, and
each takes the next when it is done with the one before. To prepare waits for nothing. A column waits for its section
to be prepared,
for which the items are ahead of that which converts the section. That waits for the columns of its section alone,
which are ahead
of those of any later one, or wait for nothing, all being prepared before. So the first item or column in the order
prepare, columns,
convert of the sections can always be done.

Sums stand in the order in which threads hold them (hopper.in_register_order), so that they are added without a copy in shared
memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ..service import FRONT as COUNTED
from ..triton.tile import LOG2_E
from .barriers import fence_proxy_async, increment_counter, wait_for_counter
from .registers import reinterpret

# Triton 3.8 renamed the copy
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# values that are converted for an item, those of one or two tiles of 64 queries: enough that a queue is no bottleneck,
# so few that
# each warp has one in a section of 16,384 x 128
CHUNK = gl.constexpr(8192)
# chunks that are prepared for an item
PIECE = gl.constexpr(2)
# values that a warp clears or converts at a time, 16 x 32: 16 registers a thread, of which there are 32
STEP = gl.constexpr(512)
# bytes that are under way to a warp, whose registers would hold a quarter of them
FETCHED = gl.constexpr(8192)
# of what is counted, what comes in front of the sections
FRONT = gl.constexpr(COUNTED)


@gluon.jit
def wait_for_section(service, i_section):
    """Until TMA may read the statistics of a section, and its sums may be added to."""
    counts_ptr, _, _, _, _, n_cleared, _, _, n_chunks, _, _, _, _ = service
    if i_section >= n_cleared:
        wait_for_counter(counts_ptr + FRONT + i_section, gl.cdiv(n_chunks, PIECE), 0)
        fence_proxy_async()


@gluon.jit
def count_column(service, i_section):
    """Of a section a column more is done, whose sums are in memory."""
    counts_ptr, _, _, n_batch_heads, _, _, _, _, _, _, _, _, _ = service
    increment_counter(counts_ptr + FRONT + n_batch_heads + i_section)


# ---- cp.async ----


@gluon.jit
def cp_async(tile, pointers, mask=None):
    """Copies from global to shared memory past L1, 16 bytes a thread at a time; zeros where masked."""
    load_rows(tile, pointers, mask=mask, cache_modifier=".cg")


@gluon.jit
def cp_async_wait():
    """Waits for all copies of this warp."""
    async_copy.commit_group()
    async_copy.wait_group(0)


# ---- to prepare ----


@gluon.jit
def clear(p_sum):
    """Zeros to a chunk."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    b_zero = gl.zeros([STEP], gl.float32, layout)
    for first in range(0, CHUNK, STEP):
        gl.store(p_sum + (first + o_value), b_zero)


@gluon.jit
def tell(written, place, i_chunk, n_padded, q_len, DIM: gl.constexpr, DIM_V: gl.constexpr):
    """What preprocess_kernel writes for every query, as lines, of those whose dq a chunk is."""
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lines_ptr, dout_eighths, n_heads, n_lines, n_v_eighths = written
    ROWS: gl.constexpr = CHUNK // DIM
    # 256 values, 16 bytes a thread; half of the pieces are of dout
    AT_ONCE: gl.constexpr = 256 // DIM_V
    PIECES: gl.constexpr = FETCHED // 2 // 512
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [AT_ONCE, 32 // AT_ONCE], [1, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    tiles = reinterpret(place, [2 * PIECES, AT_ONCE, DIM_V], plain, out_ptr.dtype.element_ty)
    line = i_chunk.to(gl.int64) * ROWS
    batch_head, q_start = (line // n_padded).to(gl.int32), (line % n_padded).to(gl.int32)
    i_query = batch_head.to(gl.int64) * q_len + q_start
    n_rows = q_len - q_start
    o_q = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    b_lse = gl.load(lse_ptr + i_query + o_q, mask=o_q < n_rows, other=float("-inf"))
    gl.store(lines_ptr + line + o_q, gl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E))
    o_dim = gl.expand_dims(gl.arange(0, DIM_V, layout=gl.SliceLayout(0, layout)), 0)
    p_out = out_ptr + i_query * (8 * n_v_eighths)
    i_dout = batch_head // n_heads * dout_eighths[0] + batch_head % n_heads * dout_eighths[1]
    p_dout = dout_ptr + (i_dout + q_start.to(gl.int64) * dout_eighths[2]) * 8
    for first in range(0, ROWS, PIECES * AT_ONCE):
        for i_piece in gl.static_range(PIECES):
            o_row = first + i_piece * AT_ONCE + gl.expand_dims(gl.arange(0, AT_ONCE, layout=row_layout), 1)
            m_piece = (o_row < n_rows) & (o_dim < 8 * n_v_eighths)
            cp_async(tiles.index(i_piece), p_out + (o_row * (8 * n_v_eighths) + o_dim), m_piece)
            cp_async(tiles.index(PIECES + i_piece), p_dout + (o_row * (8 * dout_eighths[2]) + o_dim), m_piece)
        cp_async_wait()
        for i_piece in gl.static_range(PIECES):
            b_out = tiles.index(i_piece).load(layout).to(gl.float32)
            b_delta = gl.sum(b_out * tiles.index(PIECES + i_piece).load(layout).to(gl.float32), 1)
            o_row = first + i_piece * AT_ONCE + gl.arange(0, AT_ONCE, layout=row_layout)
            if dlse_ptr is not None:
                b_delta -= gl.load(dlse_ptr + i_query + o_row, mask=o_row < n_rows, other=0.0)
            gl.store(lines_ptr + n_lines + line + o_row, gl.where(o_row < n_rows, b_delta, 0.0))


# ---- to convert ----


@gluon.constexpr_function
def eights(warps):
    """How [16 * warps, 32] values lie in registers, eight of a row to each thread of a warp, two rows of its 16."""
    of_warps = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    of_lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], of_lanes, of_warps, [], [16 * warps, 32])


@gluon.jit
def rows_of(dq_ptr, i_chunk, n_padded, q_len, n_eighths, DIM: gl.constexpr):
    """Where the rows of dq are that a chunk of the sum is of, and how many exist."""
    line = i_chunk * (CHUNK // DIM)
    i_head, q_start = line // n_padded, line % n_padded
    return dq_ptr + (i_head.to(gl.int64) * q_len + q_start) * (8 * n_eighths), q_len - q_start


@gluon.jit
def convert(b_sum, p_dq, n_rows, n_eighths, i_step, scale, DIM: gl.constexpr):
    """dq of step i_step of a chunk, and of as many steps as there are warps."""
    WARPS: gl.constexpr = gl.num_warps()
    PIECES: gl.constexpr = DIM // 32
    layout: gl.constexpr = eights(WARPS)
    # as in hopper.in_register_order
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


# ---- who does it ----


@gluon.jit
def serve(service, written, fetch_ring, WARPGROUP: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr):
    """A warp that prepares and converts."""
    counts_ptr, sum_ptr, dq_ptr, n_batch_heads, n_work, n_cleared, n_ahead, n_converted, n_chunks, _, _, _, _ = service
    _, _, _, _, _, _, _, _, _, n_padded, q_len, n_eighths, scale = service
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    place = fetch_ring.index(WARPGROUP)
    sums = reinterpret(place, [FETCHED // STEP // 4, STEP], gl.SwizzledSharedLayout(4, 1, 1, [0]), gl.float32)
    n_pieces = gl.cdiv(n_chunks, PIECE)
    n_before = (n_ahead - n_cleared) * n_pieces
    # in a round a section is converted, then another one prepared
    n_round = n_chunks + n_pieces
    n_items = n_before + n_converted * n_round
    i_item = gl.atomic_add(counts_ptr + 1, 1, sem="relaxed")
    while i_item < n_items:
        i_round, i_turn = (i_item - n_before) // n_round, (i_item - n_before) % n_round
        if (i_item >= n_before) & (i_turn < n_chunks):
            i_chunk = i_round * n_chunks + i_turn
            p_sum = sum_ptr + i_chunk.to(gl.int64) * CHUNK
            p_dq, n_rows = rows_of(dq_ptr, i_chunk, n_padded, q_len, n_eighths, DIM)
            wait_for_counter(counts_ptr + FRONT + n_batch_heads + i_round, n_work, 500)
            for first in range(0, CHUNK // STEP, FETCHED // STEP // 4):
                for i_step in gl.static_range(FETCHED // STEP // 4):
                    cp_async(sums.index(i_step), p_sum + ((first + i_step) * STEP + o_value))
                cp_async_wait()
                for i_step in gl.static_range(FETCHED // STEP // 4):
                    convert(sums.index(i_step).load(layout), p_dq, n_rows, n_eighths, first + i_step, scale, DIM)
        else:
            i_section = gl.where(i_item < n_before, n_cleared + i_item // n_pieces, n_ahead + i_round)
            first = gl.where(i_item < n_before, i_item % n_pieces, i_turn - n_chunks) * PIECE
            if i_section < n_batch_heads:
                for i_chunk in range(first, gl.minimum(first + PIECE, n_chunks)):
                    clear(sum_ptr + (i_section * n_chunks + i_chunk).to(gl.int64) * CHUNK)
                    if written[0] is not None:
                        tell(written, place, i_section * n_chunks + i_chunk, n_padded, q_len, DIM, DIM_V)
                increment_counter(counts_ptr + FRONT + i_section)
        i_item = gl.atomic_add(counts_ptr + 1, 1, sem="relaxed")


@gluon.jit(do_not_specialize=["first", "n_padded", "q_len", "n_eighths"])
def scale_kernel(sum_ptr, dq_ptr, scale, first, n_padded, q_len, n_eighths, DIM: gl.constexpr):
    """dq from its float32 sum, from step `first` on."""
    i_step = first + gl.program_id(0) * gl.num_warps()
    i_chunk = i_step // (CHUNK // STEP)
    p_dq, n_rows = rows_of(dq_ptr, i_chunk, n_padded, q_len, n_eighths, DIM)
    o_value = gl.arange(0, gl.num_warps() * STEP, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    b_sum = gl.load(sum_ptr + i_step.to(gl.int64) * STEP + o_value)
    convert(b_sum, p_dq, n_rows, n_eighths, i_step % (CHUNK // STEP), scale, DIM)
