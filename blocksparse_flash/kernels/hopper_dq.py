"""When is the float32 sum of dq cleared, and converted? By warps of the Hopper backward that do nothing else, while others compute.

Columns are launched head by head, and so sections of the sum, those of the query heads of a key head, are added to one after the
other. Two warps of each program take items from a queue, each a chunk of a section to be cleared, or to be scaled and converted:
    clear n_cleared .. n_ahead - 1, then convert 0, clear n_ahead, convert 1, clear n_ahead + 1, ...
The first n_cleared sections are cleared by the launch before, since they are added to at once. The last ones are converted by a launch
behind, since no column is left beside which it could be done. Counted in global memory, at counts_ptr:
    0 columns taken, 1 items taken, 2 + s chunks of section s cleared, 2 + n_axes + s columns of section s computed
The warp that moves data waits for the zeros of a section before keys and values of its columns come, without which nothing is
added. A warp of its own counts a column when its last sum is in memory, so that who computes waits for no fence.

Nothing waits in a circle: no matter how few programs run at a time, columns and items are taken in order by those that run, and
each takes the next when it is done with the one before. To clear waits for nothing. A column waits for its section to be cleared,
for which the items are ahead of that which converts the section. That waits for the columns of its section alone, which are ahead
of those of any later one. So the first item or column in the order clear, columns, convert of the sections can always be done.

Knows: counters, where sections stand. Does not know: what is computed, which tiles a column has, launches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..served_dq import FRONT as COUNTED
from .hopper import count_in, wait_for_count

# values of an item: enough that a queue is no bottleneck, so few that each warp has one in a section of 16,384 x 128
CHUNK = gl.constexpr(8192)
# values that a warp clears or converts at a time: 16 registers a thread, of which there are 24
STEP = gl.constexpr(512)
# of what is counted, what comes in front of the sections
FRONT = gl.constexpr(COUNTED)


@gluon.jit
def chunks_of(n_eighths):
    """Chunks of a section of 8 * n_eighths values."""
    return gl.cdiv(n_eighths, CHUNK // 8)


@gluon.jit
def wait_for_zeros(service, i_section):
    """Until a section may be added to."""
    counts_ptr, _, _, _, _, n_cleared, _, _, n_eighths, _ = service
    if i_section >= n_cleared:
        wait_for_count(counts_ptr + FRONT + i_section, chunks_of(n_eighths), 0)


@gluon.jit
def count_column(service, i_section):
    """Of a section a column more is done, whose sums are in memory."""
    counts_ptr, _, _, n_axes, _, _, _, _, _, _ = service
    count_in(counts_ptr + FRONT + n_axes + i_section)


@gluon.jit
def clear(p_sum, n_values):
    """Zeros to a chunk."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    b_zero = gl.zeros([STEP], gl.float32, layout)
    for first in range(0, n_values, STEP):
        gl.store(p_sum + (first + o_value), b_zero, mask=first + o_value < n_values)


@gluon.jit
def convert(p_sum, p_dq, n_values, scale):
    """dq of a chunk. From L2: what is in L1 may be from before."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_value = gl.arange(0, STEP, layout=layout)
    if n_values == CHUNK:
        # without a mask there are registers for twice as many loads at a time
        for i_step in range(CHUNK // STEP):
            b_dq = gl.load(p_sum + (i_step * STEP + o_value), cache_modifier=".cg") * scale
            gl.store(p_dq + (i_step * STEP + o_value), b_dq.to(p_dq.dtype.element_ty))
    else:
        for first in range(0, n_values, STEP):
            m_value = first + o_value < n_values
            b_dq = gl.load(p_sum + (first + o_value), mask=m_value, other=0.0, cache_modifier=".cg") * scale
            gl.store(p_dq + (first + o_value), b_dq.to(p_dq.dtype.element_ty), mask=m_value)


@gluon.jit
def serve(service):
    """A warp that clears and converts."""
    counts_ptr, sum_ptr, dq_ptr, n_axes, n_lines, n_cleared, n_ahead, n_converted, n_eighths, scale = service
    n_chunks = chunks_of(n_eighths)
    n_items = (n_ahead - n_cleared + 2 * n_converted) * n_chunks
    i_item = gl.atomic_add(counts_ptr + 1, 1, sem="relaxed")
    while i_item < n_items:
        i_first = i_item % n_chunks * (CHUNK // 8)
        # a multiple of 8, as the compiler sees
        n_values = gl.minimum(n_eighths - i_first, CHUNK // 8) * 8
        # sections in the order above
        i_turn = i_item // n_chunks - (n_ahead - n_cleared)
        i_section = gl.where(i_turn < 0, n_ahead + i_turn, i_turn // 2 + i_turn % 2 * n_ahead)
        at = (i_section.to(gl.int64) * n_eighths + i_first) * 8
        if (i_turn >= 0) & (i_turn % 2 == 0):
            wait_for_count(counts_ptr + FRONT + n_axes + i_section, n_lines, 500)
            convert(sum_ptr + at, dq_ptr + at, n_values, scale)
        elif i_section < n_axes:
            clear(sum_ptr + at, n_values)
            count_in(counts_ptr + FRONT + i_section)
        i_item = gl.atomic_add(counts_ptr + 1, 1, sem="relaxed")
