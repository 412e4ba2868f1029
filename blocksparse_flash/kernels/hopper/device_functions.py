"""Device functions of the Hopper kernels: named barriers, TMA, bitmasks, and TMA descriptor factories."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime import launch
from ...runtime.tensor_spec import TensorSpec, TensorSpecs, specs_of
from ..triton.tile import TILE

# Triton 3.8 renamed the copies
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# whether kernels are free of spills that pin, have three warpgroups, words early where heads are wider than 64, or
# loops of their own for
# whole quarters
FITS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

# rows of a tile that one warpgroup computes
HALF = gl.constexpr(64)
# clears the sign with which a plan marks a partial tile
INDEX_BITS = gl.constexpr(0xFFFFFF)
# where an entry of its list says which quarters of a partial tile attend
QUARTERS_BIT = gl.constexpr(25)
# bits a column is shifted by before the rest, so that one shift serves every eighth column
LANE_BITS = gl.constexpr(8)
GLUON_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@builtin
def add_async(descriptor, coordinates, source, _semantic=None):
    """Add shared memory to global memory; Triton 3.6 and 3.7 have the operation but no name for it."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add(descriptor, coordinates, source, _semantic=_semantic)
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    return _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@builtin
def seen_as(tile, shape, layout, dtype, _semantic=None):
    """The same shared memory in another shape, layout and type; Triton 3.9 made the method public."""
    reinterpret = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def accumulator(columns):
    """How the sums of a product [64, columns] lie in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


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
    """Until the others have issued their products. Turns go round over the end of a row too, as all walk one list."""
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
def new_barriers(LENGTH: gl.constexpr, COUNT: gl.constexpr):
    """LENGTH mbarriers, whose phases end with COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [LENGTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LENGTH):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def copy_async(tile, pointers, mask=None):
    """A warp sends for what is at pointers, past L1, 16 bytes a thread at a time; 0 where it is masked."""
    load_rows(tile, pointers, mask=mask, cache_modifier=".cg")


@gluon.jit
def copy_wait():
    """Until all has come."""
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def fence_engine():
    """Between what a warp has seen that others wrote, and what it lets TMA read."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_writes(PENDING: gl.constexpr):
    """Until what a warpgroup has sent by TMA is in memory, but the last PENDING stores or additions.

    tma.store_wait waits until it has been read from shared memory.
    """
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    text: gl.constexpr = _writes_assembly(PENDING)
    gl.inline_asm_elementwise(text, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _writes_assembly(pending):
    return f"cp.async.bulk.wait_group {pending}; mov.b32 $0, $1;"


@gluon.jit
def wait_for_count(p_count, n, NAP: gl.constexpr):
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
def count_in(p_count):
    """A warp counts in global memory, behind what it has written, or has waited for at a barrier."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    # TMA reads what was written: a fence between what it does and what others do; released, without emptying L1
    gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.proxy.async; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
        " @p red.release.gpu.global.add.s32 [$2], 1; mov.b32 $0, $1; }",
        "=r,r,l", [lane, p_count + lane * 0], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
def load_words(p_words, WORDS: gl.constexpr):
    """WORDS int32 (2 or 4) from each pointer on, which is aligned to them, in one load; none is written while the
    kernel runs."""
    if WORDS == 4:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [p_words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [p_words],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )


@gluon.jit
def bit_words(words_ptr, i_bitmask, i_first, o_row, COLS: gl.constexpr):
    """The words of rows of a bitmask that hold COLS columns, from word i_first of each row on."""
    p_words = words_ptr + i_bitmask.to(gl.int64) * (TILE * TILE // 32) + o_row * (TILE // 32) + i_first
    return load_words(p_words, COLS // 32)


@gluon.jit
def keep_bits(b_scores, b_bits, b_bit):
    """b_scores where a bit is set, -inf else: [rows, columns], the bits to be looked at [1, columns].

    In assembly: LLVM packs the tests of all pairs into words again, and unpacks those, some 200 instructions a step.
    """
    b_bits, b_bit = gl.broadcast(b_bits, b_bit)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [b_scores, b_bits, b_bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def keep_columns(b_scores, words, o_col):
    """The scores of the pairs that attend, -inf else; `words` of each row and 1-D column offsets, each of a slice of
    one layout."""
    o_lane = gl.expand_dims(o_col % LANE_BITS // 2 * 2, 0)
    o_word = gl.expand_dims(o_col // 32, 0)
    b_bits = gl.expand_dims(words[0], 1) >> o_lane
    for i_word in gl.static_range(1, o_col.shape[0] // 32):
        b_bits = gl.where(o_word == i_word, gl.expand_dims(words[i_word], 1) >> o_lane, b_bits)
    b_bit = gl.expand_dims(1 << (o_col % 32 // LANE_BITS * LANE_BITS + o_col % 2), 0)
    return keep_bits(b_scores, b_bits, b_bit)


@gluon.constexpr_function
def _halves_assembly(columns, bits, stride, fill):
    # registers of a thread: two rows, a quarter of the columns of each
    n, n_half = columns * bits // 64, bits
    lines = [f"mov.b32 ${i}, ${n + i};" for i in range(n)]
    for i_half in range(columns // 64):
        lines.append(f"and.b32 b, ${2 * n}, {1 << (i_half * stride)}; setp.ne.u32 p, b, 0; @p bra.uni KEPT{i_half};")
        lines += [f"mov.b32 ${i_half * n_half + i}, {fill};" for i in range(n_half)]
        lines.append(f"KEPT{i_half}:")
    return "{ .reg .pred p; .reg .b32 b; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _halves_constraints(columns, bits):
    n, kind = columns * bits // 64, "f" if bits == 32 else "r"
    return ",".join([f"=&{kind}"] * n + [kind] * n + ["r"] * (columns // 2))


@gluon.jit
def keep_halves(b_values, bits, STRIDE: gl.constexpr, FILL: gl.constexpr):
    """An accumulator [64, columns], or what is rounded from one; of 64 columns each whose bit is not set every
    register becomes FILL.

    bits  of the lowest the first 64 columns, of those STRIDE apart the next ones

    A branch for 64 columns, at which all threads of a warpgroup agree: to select each value would be 64 instructions
    a step.
    """
    COLS: gl.constexpr = b_values.shape[1]
    BITS: gl.constexpr = b_values.dtype.primitive_bitwidth
    text: gl.constexpr = _halves_assembly(COLS, BITS, STRIDE, FILL)
    constraints: gl.constexpr = _halves_constraints(COLS, BITS)
    b_bits = gl.full(b_values.shape, 0, gl.int32, b_values.type.layout) + bits
    return gl.inline_asm_elementwise(
        text, constraints, [b_values, b_bits], dtype=b_values.dtype, is_pure=True, pack=COLS // 2
    )


@gluon.jit
def bit_rows(words_ptr, i_bitmask, o_kv, o_q):
    """The same transposed: keys x queries."""
    o_kv = gl.expand_dims(o_kv, 1)
    p_words = words_ptr + i_bitmask.to(gl.int64) * (TILE * TILE // 32)
    return ((gl.load(p_words + (gl.expand_dims(o_q * (TILE // 32), 0) + o_kv // 32)) >> (o_kv % 32)) & 1) != 0


@gluon.jit
def key_limit(kv_lengths_ptr, i_batch, kv_len):
    """How many keys exist. A length on the GPU is never read on the host: out of range is clamped here."""
    if kv_lengths_ptr is None:
        return kv_len
    else:
        return gl.minimum(gl.maximum(gl.load(kv_lengths_ptr + i_batch), 0), kv_len).to(gl.int32)


@gluon.jit
def clear_tail(tile, kv_start, limit, WARPGROUP: gl.constexpr):
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


@gluon.jit
def in_order(b_sum):
    """An accumulator [64, columns], columns a multiple of 32, as the values of its 16 x 32 parts, four of a thread
    after the other."""
    COLS: gl.constexpr = b_sum.shape[1]
    # warp, half of its 16 rows, row, 32 columns, 8 columns, a thread's pair
    b_sum = b_sum.reshape([4, 2, 8, COLS // 32, 4, 4, 2])
    return b_sum.permute((3, 0, 4, 2, 5, 1, 6)).reshape([HALF * COLS])


@gluon.jit
def add_sum(ptr, b_sum):
    """Add values to as many in memory, of which each thread has four in a row."""
    o_value = gl.arange(0, b_sum.shape[0], layout=b_sum.type.layout)
    gl.atomic_add(ptr + o_value, b_sum, sem="relaxed")


@gluon.jit
def keep_part(ptr, b_sum, WARPGROUP: gl.constexpr):
    """Store a warpgroup's half of [TILE, columns] float32 numbers, where lines of parts.py stand."""
    layout: gl.constexpr = accumulator(b_sum.shape[1])
    o_row = WARPGROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    o_col = gl.arange(0, b_sum.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(ptr + (gl.expand_dims(o_row * b_sum.shape[1], 1) + gl.expand_dims(o_col, 0)), b_sum)


# ---- tensors ----


def writable(dtype: torch.dtype, shape: tuple[int, ...]) -> launch.Memory:
    """Memory for (batch, heads, length, head_dim), whose rows are padded so that TMA can write them.

    Padding included, also that of the last row: the first head_dim columns are what is asked for.
    """
    return launch.contiguous(dtype, *shape[:-1], -(-shape[-1] // 8) * 8)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy which TMA can read."""
    made = launch.allocator(tensor)(*writable(tensor.dtype, tensor.shape))
    return made[..., : tensor.shape[-1]].copy_(tensor)


def readable(*tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], TensorSpecs]:
    """(the tensors, each as it is where TMA can read it, else as a copy; their specs)."""
    # asked of all at once, which saves the host questions
    specs = specs_of(*tensors)
    if specs.is_tma_loadable:
        return tensors, specs
    tensors = tuple(tensor if specs_of(tensor).is_tma_loadable else _copy(tensor) for tensor in tensors)
    return tensors, specs_of(*tensors)


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a block lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


class DescriptorFactory(launch.DescriptorFactory):
    """The same for Gluon, where a descriptor says how its block lies in shared memory."""

    def __init__(self, seen: TensorSpec, block: tuple[int, ...]) -> None:
        super().__init__(seen, block)
        self._layout = shared_layout(block, seen.dtype)

    def make(self, tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, *self._arguments, self._layout)
