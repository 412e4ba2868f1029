"""What do the Hopper kernels share? Named barriers, the copy engine by any of its names, bitmasks, descriptors.

Knows: Gluon (ships inside Triton, experimental: its names move from release to release, which is absorbed here), tensor
descriptors, launch configurations. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..copy_engine import can_read
from . import launch
from .tile import TILE

# Triton 3.8 renamed the copies
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# rows of a tile that one warpgroup computes
HALF = gl.constexpr(64)
# clears the sign with which a plan marks a partial tile
INDEX_BITS = gl.constexpr(0xFFFFFF)
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


@gluon.constexpr_function
def accumulator(columns):
    """How the sums of a product [64, columns] lie in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _barrier_assembly(verb, barrier):
    return f"bar.{verb} {barrier}, 256; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(VERB: gl.constexpr, BARRIER: gl.constexpr):
    """`bar.sync` or `bar.arrive` of the 256 threads of two warpgroups; Triton itself takes the numbers below 9."""
    # 128 values over 128 threads: every thread runs the instruction exactly once
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(_barrier_assembly(VERB, BARRIER), "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pin(b_sum):
    """The same values, all of which are >= 0; the wait for a wgmma that follows in the source stays behind them.

    ptxas moves such a wait up, in front of the exponentials that should overlap the wgmma; not across this store, which
    never runs. Under Triton 3.6 it also makes ptxas spill the address of shared memory. (A predicated nanosleep, fence or
    reduction holds the wait without that, but becomes a branch, which costs more.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000;"
        " @p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [b_sum], dtype=b_sum.dtype, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_int(smem):
    """The int32 which a shared buffer of one value holds."""
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def store_int(smem, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    smem.store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def bit_columns(words_ptr, i_bitmask, i_first, o_row, o_col, COLS: gl.constexpr):
    """Which pairs of a part of a tile attend: bool over rows x columns (1-D offsets, each of a slice of one layout).

    i_first   word of each row in which the COLS columns begin
    """
    p_words = words_ptr + i_bitmask.to(gl.int64) * (TILE * TILE // 32) + o_row * (TILE // 32) + i_first
    o_lane = gl.expand_dims(o_col % LANE_BITS, 0)
    o_word = gl.expand_dims(o_col // 32, 0)
    b_bits = gl.expand_dims(gl.load(p_words), 1) >> o_lane
    for i_word in gl.static_range(1, COLS // 32):
        b_bits = gl.where(o_word == i_word, gl.expand_dims(gl.load(p_words + i_word), 1) >> o_lane, b_bits)
    return ((b_bits >> gl.expand_dims(o_col % 32 // LANE_BITS * LANE_BITS, 0)) & 1) != 0


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
def clear_tail(tile, kv_start, limit, WHO: gl.constexpr):
    """Zeros in the keys or values from `limit` on, which may hold NaN, before either warpgroup multiplies by them."""
    ROWS: gl.constexpr = tile.shape[0] // 2
    if kv_start + 2 * ROWS > limit:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        half = tile.slice(WHO * ROWS, ROWS, 0)
        o_kv = kv_start + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        b_tile = half.load(layout)
        half.store(gl.where(gl.expand_dims(o_kv < limit, 1), b_tile, 0.0).to(tile.dtype))
        fence_async_shared()
        named_barrier("sync", 11)


# ---- tensors ----


def padded_dim(head_dim: int) -> int:
    """Columns of a tile: what lies past head_dim reads as zero."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def writable(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """New memory for (batch, heads, length, head_dim), its rows padded so that the copy engine can write them."""
    *front, head_dim = shape
    if head_dim % 8 == 0:
        # a slice takes the host as long as the memory
        return tensor.new_empty(*shape, dtype=dtype)
    return tensor.new_empty(*front, -(-head_dim // 8) * 8, dtype=dtype)[..., :head_dim]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where the copy engine can read it, else a copy of which it can."""
    return tensor if can_read(tensor) else writable(tensor, tensor.shape).copy_(tensor)


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a block lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


class Describer(launch.Describer):
    """The same for Gluon, where a descriptor says how its block lies in shared memory."""

    def __init__(self, seen: launch.Seen, block: tuple[int, ...]) -> None:
        super().__init__(seen, block)
        self._layout = shared_layout(block, seen.dtype)

    def make(self, tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, *self._arguments, self._layout)
