"""Prepared kernel launches: grid, constants, TMA descriptors, output memory and device limits.

The functions `*_launches` and `*_launch` beside the kernels make them and cache them with functools.lru_cache. Their
keys are the specs of the tensors (tensor_spec.py), and PlanSpecs, Options and ScoreSpecs (kernels/arguments.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launcher
from .tensor_spec import TensorSpec, is_token_major


@dataclass(frozen=True)
class Config:
    """One launch configuration: block sizes, warps and pipeline stages."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        """Warps and pipeline stages by the names of Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def within(self, tile: int) -> Config:
        """The configuration with blocks of at most `tile` tokens, and 4 warps if they were larger."""
        if max(self.block_q, self.block_kv) <= tile:
            return self
        return Config(min(self.block_q, tile), min(self.block_kv, tile), 4, self.num_stages)


@functools.cache
def device_limits(index: int | None) -> tuple[int, int]:
    """(major compute capability, bytes of shared memory per program); (0, unlimited) for the interpreter."""
    if index is None:
        return 0, 2**31
    properties = torch.cuda.get_device_properties(index)
    # missing in PyTorch's stubs
    return properties.major, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@functools.cache
def num_sms(index: int | None) -> int:
    """Number of SMs of a GPU; 1 for the interpreter."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


class Memory(NamedTuple):
    """Shape, strides (in elements) and dtype of a tensor to allocate: the arguments of an `allocator`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """The spec of the tensor; new memory is aligned."""
        return TensorSpec(self.dtype, self.shape, self.strides, True)


@functools.lru_cache(maxsize=4096)
def contiguous(dtype: torch.dtype, *shape: int, row: int | None = None) -> Memory:
    """Memory for a contiguous tensor, or for one whose last dimension is padded to `row` elements."""
    lengths = [*shape[1:-1], shape[-1] if row is None else row]
    strides = [math.prod(lengths[i:]) for i in range(len(shape) - 1)]
    return Memory(shape, (*strides, 1), dtype)


def memory_in_order_of(like: TensorSpec, head_dim: int, row: int | None = None) -> Memory:
    """Memory for (batch, heads, length, head_dim) in the dtype and memory order of another tensor.

    row  elements from one row to the next, where rows are padded
    """
    batch, heads, length, _ = like.shape
    if not is_token_major(like.shape, like.strides):
        return contiguous(like.dtype, batch, heads, length, head_dim, row=row)
    _, strides, dtype = contiguous(like.dtype, batch, length, heads, head_dim, row=row)
    return Memory((batch, heads, length, head_dim), (strides[0], strides[2], strides[1], 1), dtype)


def allocator(tensor: torch.Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """A function (shape, strides, dtype) -> uninitialized tensor on a tensor's device, which must be the current one.

    On a GPU this is TorchInductor's allocator: it skips the dispatcher and takes less than half the time. It does not
    fill new memory under deterministic algorithms, where torch.empty_strided is used instead.
    """
    if tensor.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    device = tensor.device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def cache_key_of(other: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    """(dtype, is aligned): the cache key of a tensor whose shape follows from other tensors."""
    return None if other is None else (other.dtype, other.data_ptr() % 16 == 0)


class DescriptorFactory:
    """Makes TMA descriptors for tensors of one spec and one block shape.

    Out-of-bounds loads give zero, out-of-bounds stores are dropped.
    """

    def __init__(self, spec: TensorSpec, block: tuple[int, ...]) -> None:
        strides = list(spec.strides)
        # the stride of a dimension of size 1 is arbitrary, but TMA checks it
        for axis in range(len(strides) - 1):
            if spec.shape[axis] == 1:
                strides[axis] = 8 * -(-spec.shape[-1] // 8)
        self._arguments = (list(spec.shape), strides, list(block))
        self._fields: tuple[Any, dict[str, Any]] | None = None

    def describe(self, tensor: torch.Tensor) -> Any:
        """The descriptor of a tensor."""
        if self._fields is None:
            made = self.make(tensor)
            # base=None: a cached tensor would never be freed
            self._fields = type(made), {**made.__dict__, "base": None}
            return made
        # skips the checks of the class: 0.8 microseconds instead of 3.3
        kind, fields = self._fields
        made = object.__new__(kind)
        made.__dict__.update(fields, base=tensor)
        return made

    def make(self, tensor: torch.Tensor) -> Any:
        """A new descriptor, with Triton's checks."""
        return TensorDescriptor(tensor, *self._arguments)


class Launch:
    """A kernel prepared for tensors of given specs.

    kernel  jitted function; its first parameters are tensors, tuples of tensors, and the integers that change between
            calls
    grid    number of programs along up to three axes
    rest    all other arguments, by name
    descriptor_factories  for the tensor parameters that are passed as TMA descriptors, by name

    Call it with tensors, None and those integers. From the second call on the compiled kernel is launched directly,
    which saves the 20 microseconds in which Triton inspects every argument.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        rest: dict[str, Any],
        descriptor_factories: Mapping[str, DescriptorFactory] | None = None,
    ) -> None:
        self._kernel, self._rest = kernel, rest
        self._factories = tuple((descriptor_factories or {}).get(name) for name in kernel.arg_names if name not in rest)
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[[Sequence[Any]], None] | None = None
        self._values = tuple(rest[name] for name in kernel.arg_names if name in rest)

    def __call__(self, *tensors: Any) -> None:
        if self._run is not None:
            self._run(tensors)
            return
        compiled = self._kernel[self._grid](*launcher.described(tensors, self._factories), **self._rest)
        # None from the interpreter
        if compiled is not None:
            self._run = launcher.bind(compiled, self._grid, tensors, self._factories, self._values)


def axis_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """(batch, head) strides of a contiguous tensor; 0 along a dimension of size 1, which is broadcast."""
    batch, heads, *rest = shape
    size = math.prod(rest)
    return (heads * size if batch > 1 else 0, size if heads > 1 else 0)
