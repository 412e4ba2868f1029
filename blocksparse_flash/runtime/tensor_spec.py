"""Tensor metadata used as launch-cache keys, and whether TMA can load a tensor.

A launch is prepared once for all tensors with equal metadata. A TensorSpec holds everything a prepared launch depends
on, except addresses: Triton compiles for the dtype and for 16-byte alignment, and TMA descriptors hold shape and
strides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import tracing

# bytes: the alignment that TMA requires of addresses and strides, and on which Triton specializes pointers
ALIGNMENT = 16


class TensorSpec(NamedTuple):
    """Metadata of one tensor. Hashable."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool


def spec_of(tensor: torch.Tensor | None) -> TensorSpec | None:
    """The spec of a tensor, or None for None."""
    if tensor is None:
        return None
    return TensorSpec(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT == 0)


def is_token_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether (batch, heads, length, head_dim) is the transpose of (batch, length, heads, head_dim) in memory.

    Then the heads of a token lie together, as a projection leaves them. Expanded heads have a stride of 0 and do not.
    """
    return shape[1] > 1 and shape[2] > 1 and 0 < strides[1] < strides[2]


def new_in_order_of(tensor: torch.Tensor, head_dim: int, length: int | None = None) -> torch.Tensor:
    """Uninitialized (batch, heads, length, head_dim) in the memory order of a tensor, without gaps.

    length  that of the tensor by default
    """
    batch, heads, own_length, _ = tensor.shape
    length = own_length if length is None else length
    if is_token_major(tensor.shape, tensor.stride()):
        return tensor.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return tensor.new_empty(batch, heads, length, head_dim)


def in_order_of(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in the memory order of another one, without gaps: copied if they do not lie so already."""
    if is_token_major(like.shape, like.stride()):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous()


def tma_can_load(itemsize: int, shape: Sequence[int], strides: Sequence[int], is_aligned: bool) -> bool:
    """Whether TMA can load a (batch, heads, length, head_dim) tensor whose last stride is 1.

    The address must be 16-byte aligned, and strides must be positive multiples of 16 bytes, except in dimensions of
    size 1. Only 16-bit elements: TMA could load others, but no kernel uses them.
    """
    return (
        itemsize == 2
        and is_aligned
        and 0 not in shape
        and all(
            n == 1 or (s > 0 and s * itemsize % ALIGNMENT == 0) for n, s in zip(shape[:3], strides[:3], strict=True)
        )
    )


# a cached answer takes a third of the time
_tma_can_load = functools.lru_cache(maxsize=4096)(tma_can_load)


def is_tma_loadable(tensor: torch.Tensor) -> bool:
    """Whether TMA can load this tensor.

    A tensor that torch.compile traces has no address. It counts as aligned. When the operator runs, a tensor that is
    not is copied, or the call goes to `triton`: see hopper.tma.to_tma_loadable and dispatch.resolve.
    """
    if tensor.stride(-1) != 1:
        return False
    if torch.compiler.is_compiling() or not tracing.has_values(tensor):
        return tma_can_load(tensor.element_size(), tensor.shape, tensor.stride(), True)
    is_aligned = tensor.data_ptr() % ALIGNMENT == 0
    return _tma_can_load(tensor.element_size(), tensor.shape, tensor.stride(), is_aligned)


@dataclass(frozen=True, eq=False)
class TensorSpecs:
    """Specs of several tensors, in order. Compared and hashed by identity, hence a cheap cache key: see `specs_of`."""

    tensors: tuple[TensorSpec, ...]

    @functools.cached_property
    def is_tma_loadable(self) -> bool:
        """Whether TMA can load every one of these (batch, heads, length, head_dim) tensors."""
        return all(
            spec.strides[-1] == 1 and tma_can_load(spec.dtype.itemsize, spec.shape, spec.strides, spec.is_aligned)
            for spec in self.tensors
        )


@functools.lru_cache(maxsize=4096)
def _interned(fields: tuple[Any, ...]) -> TensorSpecs:
    return TensorSpecs(tuple(TensorSpec(*fields[i : i + 4]) for i in range(0, len(fields), 4)))


def specs_of(*tensors: torch.Tensor) -> TensorSpecs:
    """The specs of some tensors; the same object for equal specs.

    A spec evicted from the cache is replaced by a new object; launches cached under the old one are prepared again.
    """
    # one flat tuple, and no call per tensor: this runs in every attention call
    fields: list[Any] = []
    for tensor in tensors:
        fields += tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT == 0
    return _interned(tuple(fields))
