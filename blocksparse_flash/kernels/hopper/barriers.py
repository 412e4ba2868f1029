"""Barriers of the Hopper kernels: pipelines of mbarriers, named barriers, ping-pong order."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# ---- mbarriers ----


@gluon.jit
def allocate_mbarriers(LENGTH: gl.constexpr, COUNT: gl.constexpr):
    """LENGTH mbarriers; a phase completes after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LENGTH):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


class Pipeline(NamedTuple):
    """Buffers in shared memory between one producer and its consumers, each with two mbarriers.

    buffers  shared memory; its first dimension counts the buffers (or, in a queue of integers, the integers)
    full     completes when the producer, or TMA on its behalf, has filled a buffer
    empty    completes when every consumer has released a buffer

    In the functions below, phase is how often the buffer was used before; only its parity counts.

    full and empty are separate allocations: in a common one, Triton would synchronize the warpgroup before each wait.
    """

    buffers: Any
    full: Any
    empty: Any


@gluon.jit
def allocate_pipeline(buffers, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """The Pipeline of STAGES buffers; CONSUMERS arrivals release a buffer."""
    return Pipeline(buffers=buffers, full=allocate_mbarriers(STAGES, 1), empty=allocate_mbarriers(STAGES, CONSUMERS))


@gluon.jit
def producer_acquire(pipeline, i_buffer, phase):
    """Waits until every consumer has released the buffer; passes at once for its first use."""
    mbarrier.wait(pipeline.empty.index(i_buffer), (phase & 1) ^ 1)


@gluon.jit
def producer_commit(pipeline, i_buffer):
    """Signals that the buffer is filled; TMA does this by itself, after mbarrier.expect."""
    mbarrier.arrive(pipeline.full.index(i_buffer), count=1)


@gluon.jit
def consumer_wait(pipeline, i_buffer, phase):
    """Waits until the buffer is filled."""
    mbarrier.wait(pipeline.full.index(i_buffer), phase & 1)


@gluon.jit
def consumer_release(pipeline, i_buffer, pred=True):
    """Signals, if pred, that this consumer no longer reads the buffer."""
    mbarrier.arrive(pipeline.empty.index(i_buffer), count=1, pred=pred)


# ---- barriers of threads ----

# of all threads of the partition, or of the program without partitions; Triton 3.7 renamed it
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Numbers of named barriers, 9 to 15: Triton uses those below 9. Kernels that have no barrier in common share numbers.
# Forward: consumer warpgroup w, of up to three, waits for its turn at PING_PONG_BARRIER + w
PING_PONG_BARRIER = gl.constexpr(9)
# Backward: both consumer warpgroups meet at the first; warpgroup w waits at DQ_BARRIER + w until it may compute dq
CONSUMERS_BARRIER, DQ_BARRIER = gl.constexpr(9), gl.constexpr(10)
# selected_backward.py: all consumers meet here after they have stored ds
DS_BARRIER = gl.constexpr(9)
# forward and backward: of registers.zero_keys_from
ZERO_KEYS_BARRIER = gl.constexpr(12)


@gluon.constexpr_function
def _barrier_assembly(verb, barrier, warpgroups):
    # not `bar`, the aligned form, for which all threads of a warp must execute the same instruction
    return f"barrier.{verb} {barrier}, {128 * warpgroups}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(VERB: gl.constexpr, BARRIER: gl.constexpr, WARPGROUPS: gl.constexpr = 2):
    """`barrier.sync` or `barrier.arrive` of the threads of WARPGROUPS warpgroups. BARRIER: one of the numbers above."""
    # 128 values over 128 threads: every thread runs the instruction exactly once
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    text: gl.constexpr = _barrier_assembly(VERB, BARRIER, WARPGROUPS)
    gl.inline_asm_elementwise(text, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


# Ping-pong: consumer warpgroups issue their products in turn, so that one computes exponentials while another
# multiplies. Warpgroup w waits at PING_PONG_BARRIER + w, at which every other warpgroup arrives after it has issued.
# Turns continue across work tiles, since all consumers iterate over the same ones.


@gluon.jit
def ping_pong_start(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Before the first turn: lets the warpgroups with a lower index go first."""
    for other in gl.static_range(WARPGROUP):
        named_barrier("arrive", PING_PONG_BARRIER + other, WARPGROUPS)


@gluon.jit
def ping_pong_wait(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Waits until all other warpgroups have issued their products."""
    named_barrier("sync", PING_PONG_BARRIER + WARPGROUP, WARPGROUPS)


@gluon.jit
def ping_pong_next(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Lets the other warpgroups issue."""
    for other in gl.static_range(WARPGROUPS):
        if other != WARPGROUP:
            named_barrier("arrive", PING_PONG_BARRIER + other, WARPGROUPS)


@gluon.jit
def ping_pong_finish(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """After the last turn: matches the arrivals that no turn has waited for, so that none are left over."""
    # the last warpgroup has none left: its last turn came after those of the others
    if WARPGROUP < WARPGROUPS - 1:
        named_barrier("sync", PING_PONG_BARRIER + WARPGROUP, WARPGROUPS)
        for other in gl.static_range(WARPGROUP + 1, WARPGROUPS - 1):
            named_barrier("arrive", PING_PONG_BARRIER + other, WARPGROUPS)
