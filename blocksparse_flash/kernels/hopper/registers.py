"""Values in the registers of a warpgroup: layouts, compiler barriers, and exchange with shared and global memory."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .barriers import named_barrier

# Triton 3.9 allocates more registers: kernels that spill there are left out
BEFORE_TRITON_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

# rows of a tile that one warpgroup computes: M of a wgmma
WARPGROUP_ROWS = gl.constexpr(64)


@gluon.constexpr_function
def accumulator(columns):
    """How the sums of a product [64, columns] lie in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@builtin
def reinterpret(tile, shape, layout, dtype, _semantic=None):
    """The same shared memory in another shape, layout and type; Triton 3.9 made the method public."""
    reinterpret = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def pin(b_sum):
    """The same values, all of which are >= 0; the wait for a wgmma that follows in the source stays behind them.

    ptxas moves such a wait up, in front of the exponentials that should overlap the wgmma; not across this store, which
    never runs. Under Triton 3.6 it also makes ptxas spill the address of shared memory. (A predicated nanosleep,
    fence or
    reduction holds the wait without that, but becomes a branch, which costs more.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000;"
        " @p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [b_sum], dtype=b_sum.dtype, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_int(smem):
    """The int32 which a shared buffer of one value holds.

    compute-sanitizer's racecheck takes these, and words of Triton's own by which it starts partitions, for races, in
    all kernels of
    hopper, and nothing else. Those who share one meet before one of them arrives, which orders what all of them did;
    of a kernel that
    hands a number from a warp to a warpgroup, and does no more, it says the same, but not where each thread arrives.
    """
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def store_int(smem, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    smem.store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def in_register_order(b_sum):
    """An accumulator [64, columns], columns a multiple of 32, as the values of its 16 x 32 parts, four of a thread
    after the other."""
    COLS: gl.constexpr = b_sum.shape[1]
    # warp, half of its 16 rows, row, 32 columns, 8 columns, a thread's pair
    b_sum = b_sum.reshape([4, 2, 8, COLS // 32, 4, 4, 2])
    return b_sum.permute((3, 0, 4, 2, 5, 1, 6)).reshape([WARPGROUP_ROWS * COLS])


@gluon.jit
def atomic_add_sum(ptr, b_sum):
    """Add values to as many in memory, of which each thread has four in a row."""
    o_value = gl.arange(0, b_sum.shape[0], layout=b_sum.type.layout)
    gl.atomic_add(ptr + o_value, b_sum, sem="relaxed")


@gluon.jit
def store_split(ptr, b_sum, WARPGROUP: gl.constexpr):
    """Store a warpgroup's half of [TILE, columns] float32 numbers, where lines of parts.py stand."""
    layout: gl.constexpr = accumulator(b_sum.shape[1])
    o_row = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    o_col = gl.arange(0, b_sum.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(ptr + (gl.expand_dims(o_row * b_sum.shape[1], 1) + gl.expand_dims(o_col, 0)), b_sum)


@gluon.jit
def clamped_kv_len(kv_lengths_ptr, i_batch, kv_len):
    """How many keys exist. A length on the GPU is never read on the host: out of range is clamped here."""
    if kv_lengths_ptr is None:
        return kv_len
    else:
        return gl.minimum(gl.maximum(gl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(gl.int32)


@gluon.jit
def zero_tail(tile, kv_start, limit, WARPGROUP: gl.constexpr):
    """Zeros in the keys or values from `limit` on, which may hold NaN, before either warpgroup multiplies by them."""
    ROWS: gl.constexpr = tile.shape[0] // 2
    if kv_start + 2 * ROWS > limit:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        half = tile.slice(WARPGROUP * ROWS, ROWS, 0)
        o_kv = kv_start + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        b_tile = half.load(layout)
        half.store(gl.where(gl.expand_dims(o_kv < limit, 1), b_tile, 0.0).to(tile.dtype))
        fence_async_shared()
        named_barrier("sync", 12)
