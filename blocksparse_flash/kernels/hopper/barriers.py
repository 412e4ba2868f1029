"""Barriers of the Hopper kernels: mbarriers, named barriers, ping-pong turns, counters in global memory, proxy fence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def allocate_mbarriers(LENGTH: gl.constexpr, COUNT: gl.constexpr):
    """LENGTH mbarriers, whose phases end with COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LENGTH):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.constexpr_function
def _barrier_assembly(verb, barrier, warpgroups):
    # not `bar`, the aligned form, which promises that all who wait do so at one and the same instruction
    return f"barrier.{verb} {barrier}, {128 * warpgroups}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(VERB: gl.constexpr, BARRIER: gl.constexpr, WARPGROUPS: gl.constexpr = 2):
    """`bar.sync` or `bar.arrive` of the threads of so many warpgroups; Triton itself takes the numbers below 9."""
    # 128 values over 128 threads: every thread runs the instruction exactly once
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    text: gl.constexpr = _barrier_assembly(VERB, BARRIER, WARPGROUPS)
    gl.inline_asm_elementwise(text, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ping_pong_wait(WARPGROUP: gl.constexpr, PING_PONG: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Until the others have issued their products. Turns go round over the end of a row too, as all iterate over one list."""
    if PING_PONG:
        named_barrier("sync", 9 + WARPGROUP, WARPGROUPS)


@gluon.jit
def ping_pong_next(WARPGROUP: gl.constexpr, PING_PONG: gl.constexpr, WARPGROUPS: gl.constexpr):
    if PING_PONG:
        for other in gl.static_range(WARPGROUPS):
            if other != WARPGROUP:
                named_barrier("arrive", 9 + other, WARPGROUPS)


@gluon.jit
def ping_pong_start(WARPGROUP: gl.constexpr, PING_PONG: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Those before this warpgroup go first."""
    if PING_PONG:
        for other in gl.static_range(WARPGROUP):
            named_barrier("arrive", 9 + other, WARPGROUPS)


@gluon.jit
def ping_pong_finish(WARPGROUP: gl.constexpr, PING_PONG: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Takes the turn that was given last, which those before give too: else arrivals are left over."""
    # static: the last one has nothing to take
    if PING_PONG and WARPGROUP < WARPGROUPS - 1:
        named_barrier("sync", 9 + WARPGROUP, WARPGROUPS)
        for other in gl.static_range(WARPGROUP + 1, WARPGROUPS - 1):
            named_barrier("arrive", 9 + other, WARPGROUPS)


@gluon.jit
def fence_proxy_async():
    """Between what a warp has seen that others wrote, and what it lets TMA read."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_counter(p_count, n, NAP: gl.constexpr):
    """A warp, until a number in global memory has come to n: what was written before it was counted may be read and
    added to.

    NAP  nanoseconds, about, from one look to the next; 0 where the first one should do
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    text: gl.constexpr = _count_assembly(NAP)
    given = [lane, p_count + lane * 0, n + lane * 0]
    gl.inline_asm_elementwise(text, "=r,r,l,r", given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _count_assembly(nap):
    # an ordered look empties L1, in which the indices of the steps are: of many looks the last one alone. A fence
    # would also wait
    # for writes
    look = "ld.{}.gpu.global.s32 a, [$2];"
    first, sleep, last = ("relaxed", f"nanosleep.u32 {nap};", look.format("acquire")) if nap else ("acquire", "", "")
    return (
        f"{{ .reg .pred p; .reg .b32 a; again: {look.format(first)} setp.ge.s32 p, a, $3; @p bra done;"
        f" {sleep} bra again; done: {last} bar.warp.sync 0xffffffff; mov.b32 $0, $1; }}"
    )


@gluon.jit
def increment_counter(p_count):
    """A warp counts in global memory, behind what it has written, or has waited for at a barrier."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    # TMA reads what was written: a fence between what it does and what others do; released, without emptying L1
    gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.proxy.async; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
        " @p red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, $1; }",
        "=r,r,l", [lane, p_count + lane * 0], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
