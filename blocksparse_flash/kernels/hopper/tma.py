"""TMA of the Hopper kernels: operations under one name for all Triton versions, descriptors of tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...runtime import launch
from ...runtime.tensor_spec import TensorSpec, TensorSpecs, specs_of

# Triton 3.8 renamed the copies
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
GLUON_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Adds shared memory to global memory; Triton 3.6 and 3.7 have the operation but no name for it."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add(descriptor, coordinates, source, _semantic=_semantic)
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    return _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


# The sides of Triton's tensors are powers of two. Rows of 96 or 192 columns are therefore two tensors: 64 or 128
# columns, and the last 32 or 64, the tail. A TMA block is a third of a row, so that one descriptor has both. Without a
# tail, its buffer is None and its accumulator 0, since Triton 3.6 cannot return None inside a tuple.


@gluon.constexpr_function
def bytes_of_rows(block_bytes, has_tail):
    """Bytes of rows with all their columns; a block has all of them, or a third."""
    return 3 * block_bytes if has_tail else block_bytes


@gluon.jit
def load_rows(desc, full, buffer, tail, i_batch, i_head, start):
    """Loads a block of rows with all its columns. tail: buffer of the last third, or None."""
    gl.static_assert(buffer.layout == desc.layout, "a block of TMA and the buffer must be swizzled alike")
    COLS: gl.constexpr = buffer.shape[3]
    LOAD_COLS: gl.constexpr = desc.block_type.shape[3]
    for column in gl.static_range(0, COLS, LOAD_COLS):
        tma_load(desc, [i_batch, i_head, start, column], full, buffer.slice(column, LOAD_COLS, 3))
    if tail is not None:
        tma_load(desc, [i_batch, i_head, start, COLS], full, tail)


@gluon.jit
def store_rows(desc, buffer, tail, i_batch, i_head, start):
    """Stores a block of rows with all its columns. tail: buffer of the last third, or None."""
    gl.static_assert(buffer.layout == desc.layout, "a block of TMA and the buffer must be swizzled alike")
    COLS: gl.constexpr = buffer.shape[3]
    STORE_COLS: gl.constexpr = desc.block_type.shape[3]
    for column in gl.static_range(0, COLS, STORE_COLS):
        tma_store(desc, [i_batch, i_head, start, column], buffer.slice(column, STORE_COLS, 3))
    if tail is not None:
        tma_store(desc, [i_batch, i_head, start, COLS], tail)


@gluon.constexpr_function
def has_tail(desc, columns):
    """Whether rows with this number of columns have a tail: a block of the descriptor has all columns, or a third."""
    return columns > desc.block_type.shape[3]


@gluon.jit
def allocate_rows(desc, STAGES: gl.constexpr, COLS: gl.constexpr):
    """Buffers of a descriptor's rows, without the tail."""
    WIDTH: gl.constexpr = COLS // 3 * 2 if has_tail(desc, COLS) else COLS
    return gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, desc.block_type.shape[2], WIDTH], desc.layout)


@gluon.jit
def allocate_tail(desc, STAGES: gl.constexpr):
    """Buffers of the tail of a descriptor's rows."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    return gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, ROWS, desc.block_type.shape[3]], desc.layout)


def block_columns(columns: int) -> int:
    """Columns of a TMA block: all, or a third of 96 or 192."""
    return columns // 3 if columns % 3 == 0 else columns


def tma_padded_memory(like: TensorSpec) -> launch.Memory:
    """Memory for a tensor of the dtype, shape and memory order of another, its rows padded so that TMA can write them.

    Its shape includes the padding: callers take its first head_dim columns.
    """
    return launch.memory_in_order_of(like, -(-like.shape[-1] // 8) * 8)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that TMA can load."""
    made = launch.allocator(tensor)(*tma_padded_memory(specs_of(tensor).tensors[0]))
    return made[..., : tensor.shape[-1]].copy_(tensor)


def to_tma_loadable(*tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], TensorSpecs]:
    """(tensors, specs): the tensors as they are, or copied if TMA cannot load them, and their specs."""
    # all specs at once: one cache lookup on the host
    specs = specs_of(*tensors)
    if specs.is_tma_loadable:
        return tensors, specs
    tensors = tuple(tensor if specs_of(tensor).is_tma_loadable else _copy(tensor) for tensor in tensors)
    return tensors, specs_of(*tensors)


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Layout of a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


class DescriptorFactory(launch.DescriptorFactory):
    """Makes Gluon's TMA descriptors, which include the layout of their block in shared memory."""

    def __init__(self, spec: TensorSpec, block: tuple[int, ...]) -> None:
        super().__init__(spec, block)
        self._layout = shared_layout(block, spec.dtype)

    def make(self, tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, *self._arguments, self._layout)
