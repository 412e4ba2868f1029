"""Semaphores of dQ: programs add to a sum in global memory in a fixed order, so that every run has the same bits.

Each part of the sum has a semaphore, which counts the complete additions. The program whose addition comes after n
others waits until it is n, adds with TMA, waits until TMA has written, and increments it. Programs that run take work
tiles in the order of the additions. So of all the work tiles that are not finished, the first one is computed and waits
for no other, and there is no deadlock, even if only some of the programs run at a time.

Reads and increments are relaxed, since fences would stall each step. The PTX memory model does not order them with the
additions of TMA (the async proxy). An H200 does: TMA adds in L2, a program issues it after it has read the semaphore,
and increments the semaphore after the completion of its writes. Were the order violated, the sum would still have all
additions, but other bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def read_semaphore(p_semaphore):
    """The counter at this address. TMA has written the additions that it counts."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [p_semaphore], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_semaphore(p_semaphore, count, n_before):
    """Waits until n_before additions are complete. count: what read_semaphore returned some time before."""
    while count < n_before:
        count = read_semaphore(p_semaphore)


@gluon.jit
def release_semaphore(p_semaphore):
    """Waits until TMA has written the additions of this partition, of 4 warps, and counts one more as complete."""
    # one thread has issued them, of the first warp
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    text: gl.constexpr = (
        "{ .reg .pred p; cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
        " @p red.relaxed.gpu.global.add.s32 [$2], 1; mov.b32 $0, $1; }"
    )
    gl.inline_asm_elementwise(text, "=r,r,l", [thread, p_semaphore + 0 * thread], dtype=gl.int32, is_pure=False, pack=1)
