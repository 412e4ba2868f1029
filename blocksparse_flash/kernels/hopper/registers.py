"""Values in the registers of a warpgroup: layouts, optimization barriers, exchange with shared and global memory."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .barriers import ZERO_KEYS_BARRIER, named_barrier

# Triton 3.9 allocates more registers; configurations that spill there are used before 3.9 only
BEFORE_TRITON_3_9 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

# rows of a tile (queries or keys) per warpgroup: M of a wgmma
WARPGROUP_ROWS = gl.constexpr(64)
# rows of a tile per warp, and warps of both consumer warpgroups of a backward
WARP_ROWS = gl.constexpr(16)
CONSUMER_WARPS = gl.constexpr(8)


@gluon.constexpr_function
def accumulator(columns):
    """Layout of a wgmma accumulator [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def value_per_warp():
    """Layout of a vector [4] of which each warp of a warpgroup has one value, in all of its threads."""
    return gl.DistributedLinearLayout([], [[0]] * 5, [[1], [2]], [], [4])


@gluon.jit
def tile_at(buffers, i_buffer):
    """A buffer [1, 1, rows, columns] as [rows, columns]."""
    return buffers.index(i_buffer).reshape([buffers.shape[3], buffers.shape[4]])


@gluon.jit
def product(a, b):
    """Starts a @ b of two tiles in shared memory, a with 64 rows, for one warpgroup: its token, [64, columns of b]."""
    COLS: gl.constexpr = b.shape[1]
    b_zero = gl.zeros([WARPGROUP_ROWS, COLS], gl.float32, accumulator(COLS))
    return warpgroup_mma(a, b, b_zero, use_acc=False, is_async=True)


@gluon.jit
def add_product(b_left, right, b_sum):
    """Starts b_sum + left @ right, left being in registers; returns its token."""
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(right.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(b_left, layout), right, b_sum, is_async=True)


@gluon.jit
def wait_for_products(N_PENDING: gl.constexpr, token, tail_token):
    """Waits until only the last N_PENDING products are in flight. Returns both results; without a tail_token, 0."""
    if tail_token is None:
        return warpgroup_mma_wait(N_PENDING, deps=(token,)), 0
    else:
        return warpgroup_mma_wait(N_PENDING, deps=(token, tail_token))


@builtin
def reinterpret(tile, shape, layout, dtype, _semantic=None):
    """The same shared memory with another shape, layout and dtype; Triton 3.9 made the method public."""
    reinterpret = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def pin(b_sum):
    """Returns b_sum, which must not be negative. Keeps ptxas from moving a later wait for wgmma above its computation.

    ptxas would move such a wait in front of the exponentials that should overlap the wgmma, but does not move it across
    this store, which never runs since b_sum is not negative. Under Triton 3.6 it also makes ptxas spill the address of
    shared memory. (A predicated nanosleep, fence or reduction holds the wait without that, but becomes a branch, which
    costs more.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000;"
        " @p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [b_sum], dtype=b_sum.dtype, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque(i):
    """Returns its argument; blocks constant propagation and loop-invariant code motion."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_int(smem):
    """The int32 in a shared buffer of one value.

    The racecheck tool of compute-sanitizer reports these loads, and Triton's own words that start partitions, as races,
    and nothing else in the Hopper kernels. These are false positives: the threads that share a value synchronize at a
    barrier before one of them arrives at the mbarrier, which orders all their accesses. The tool does not see that: it
    also reports a kernel that only passes one number from a warp to a warpgroup, unless every thread arrives.
    """
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def store_int(smem, value):
    """Stores an int32 in a shared buffer of one value."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    smem.store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.constexpr_function
def _round_assembly(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return (
        "{ .reg .f32 a, b; sub.f32 a, $4, $6; mul.f32 a, a, $2; sub.f32 b, $5, $7; mul.f32 b, b, $3;"
        f" cvt.rn.{kind}.f32 $0, $3, $2; cvt.rn.{kind}.f32 $1, b, a; }}"
    )


@gluon.jit
def round_p_ds(b_p, b_dp, b_delta, dtype: gl.constexpr):
    """p and ds = p * (dp - delta), rounded to 16 bits.

    In assembly, pair by pair: rounding all of p first needs more registers than there are.
    """
    b_p, b_delta = gl.broadcast(b_p, gl.expand_dims(b_delta, 0))
    text: gl.constexpr = _round_assembly(dtype)
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            text, "=r,=r,f,f,f,f,f,f", [b_p, b_dp, b_delta], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            text, "=r,=r,f,f,f,f,f,f", [b_p, b_dp, b_delta], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )


@gluon.jit
def in_register_order(b_sum):
    """An accumulator [64, columns] as a vector in which each thread has four consecutive values.

    The order, outermost first: 32 columns, warp (16 rows), 8 of the columns, row % 8, pair of columns, row // 8 % 2,
    column % 2. columns is a multiple of 32.
    """
    COLS: gl.constexpr = b_sum.shape[1]
    # warp, half of its 16 rows, row, 32 columns, 8 columns, thread, pair
    b_sum = b_sum.reshape([4, 2, 8, COLS // 32, 4, 4, 2])
    return b_sum.permute((3, 0, 4, 2, 5, 1, 6)).reshape([WARPGROUP_ROWS * COLS])


@gluon.constexpr_function
def register_order_layout(columns):
    """Layout of the result of `in_register_order` for an accumulator [64, columns]."""
    registers = [[1], [2], [128], [256]] + [[2048 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes, warps = [[4], [8], [16], [32], [64]], [[512], [1024]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64 * columns])


@gluon.jit
def from_register_order(b_vector, COLS: gl.constexpr):
    """The accumulator [64, COLS] of a vector in the order of `in_register_order`."""
    b_sum = b_vector.reshape([COLS // 32, 4, 4, 8, 4, 2, 2]).permute((1, 5, 3, 0, 2, 4, 6))
    return gl.convert_layout(b_sum.reshape([WARPGROUP_ROWS, COLS]), accumulator(COLS), assert_trivial=True)


@gluon.jit
def atomic_add_sum(ptr, b_sum):
    """Adds a vector to memory; each thread has four consecutive values of it."""
    o_value = gl.arange(0, b_sum.shape[0], layout=b_sum.type.layout)
    gl.atomic_add(ptr + o_value, b_sum, sem="relaxed")


@gluon.jit
def store_split(ptr, b_sum, WARPGROUP: gl.constexpr, ROW: gl.constexpr = None):
    """Stores a warpgroup's 64 rows of a split's float32 block: half of it with tiles of 128, all of it with 64.

    combine_splits.py describes the workspace. ROW: values from one row to the next, if there are more than those of
    b_sum.
    """
    layout: gl.constexpr = accumulator(b_sum.shape[1])
    STRIDE: gl.constexpr = b_sum.shape[1] if ROW is None else ROW
    o_row = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    o_col = gl.arange(0, b_sum.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(ptr + (gl.expand_dims(o_row * STRIDE, 1) + gl.expand_dims(o_col, 0)), b_sum)


@gluon.jit
def store_warp_sums(ptr, b_tile, STRIDE: gl.constexpr):
    """Stores the sum of each warp's 16 rows of a tile [64, columns], which needs no exchange between warps.

    ptr  of the first warp; STRIDE: from one warp to the next
    """
    b_sums = gl.sum(gl.sum(b_tile, 1).reshape([4, WARP_ROWS]), 1)
    b_sums = gl.convert_layout(b_sums, value_per_warp(), assert_trivial=True)
    gl.store(ptr + gl.arange(0, 4, layout=value_per_warp()) * STRIDE, b_sums)


@gluon.jit
def zero_keys_from(tile, kv_start, limit, WARPGROUP: gl.constexpr):
    """Zeroes keys or values from `limit` on, which may hold NaN. Synchronizes both consumer warpgroups.

    tile      shared memory [keys, dim]; each warpgroup clears its half
    kv_start  first key of the tile
    """
    ROWS: gl.constexpr = tile.shape[0] // 2
    if kv_start + 2 * ROWS > limit:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        half = tile.slice(WARPGROUP * ROWS, ROWS, 0)
        o_kv = kv_start + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        b_tile = half.load(layout)
        half.store(gl.where(gl.expand_dims(o_kv < limit, 1), b_tile, 0.0).to(tile.dtype))
        fence_async_shared()
        named_barrier("sync", ZERO_KEYS_BARRIER)
