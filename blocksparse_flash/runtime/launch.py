"""A kernel with everything that is known before its tensors: grid, constants, TMA descriptors, new memory, device limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launcher
from .tensor_spec import TensorSpec


@dataclass(frozen=True)
class Config:
    """One launch configuration: the part of a tile that a program holds, and Triton's launch options."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """The compile-time and launch arguments by name; read only."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@functools.cache
def device_limits(index: int | None) -> tuple[int, int]:
    """(major compute capability, bytes of shared memory a program may take); (0, unlimited) for the interpreter."""
    if index is None:
        return 0, 2**31
    properties = torch.cuda.get_device_properties(index)
    # missing in PyTorch's stubs
    return properties.major, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@functools.cache
def num_sms(index: int | None) -> int:
    """How many the GPU has; 1 for the interpreter."""
    return 1 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


class Memory(NamedTuple):
    """New memory to be had from an `allocator`: plain tuples, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """What will be seen of it: new memory is aligned."""
        return TensorSpec(self.dtype, self.shape, self.strides, True)


@functools.lru_cache(maxsize=4096)
def contiguous(dtype: torch.dtype, *shape: int, row: int | None = None) -> Memory:
    """Memory for a contiguous tensor, or for one whose last axis is a part of a row of so many elements."""
    lengths = [*shape[1:-1], shape[-1] if row is None else row]
    strides = [math.prod(lengths[i:]) for i in range(len(shape) - 1)]
    return Memory(shape, (*strides, 1), dtype)


def allocator(tensor: torch.Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """What makes new memory on a tensor's device, of a shape, strides and a dtype. A GPU must be the current one.

    On a GPU what TorchInductor's code calls: without the dispatcher, in less than half of the time. Nothing could see the
    difference but the option to fill new memory, which is looked for here.
    """
    if tensor.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    device = tensor.device
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def cache_key_of(other: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    """What tells tensors apart whose shapes follow: type and alignment."""
    return None if other is None else (other.dtype, other.data_ptr() % 16 == 0)


class DescriptorFactory:
    """Makes the descriptors of tensors of one kind, which move one kind of block.

    Past the end of any axis a descriptor reads zero and writes nothing.
    """

    def __init__(self, seen: TensorSpec, block: tuple[int, ...]) -> None:
        strides = list(seen.strides)
        # the stride of an axis of size 1 is arbitrary, the descriptor wants a valid one
        for axis in range(len(strides) - 1):
            if seen.shape[axis] == 1:
                strides[axis] = 8 * -(-seen.shape[-1] // 8)
        self._arguments = (list(seen.shape), strides, list(block))
        self._fields: tuple[Any, dict[str, Any]] | None = None

    def describe(self, tensor: torch.Tensor) -> Any:
        """The descriptor of a tensor."""
        if self._fields is None:
            made = self.make(tensor)
            # without the tensor, which would never be freed
            self._fields = type(made), {**made.__dict__, "base": None}
            return made
        # what the class checks was checked: 0.8 microseconds instead of 3.3
        kind, fields = self._fields
        made = object.__new__(kind)
        made.__dict__.update(fields, base=tensor)
        return made

    def make(self, tensor: torch.Tensor) -> Any:
        """The descriptor, checked."""
        return TensorDescriptor(tensor, *self._arguments)


class Launch:
    """One kernel, ready to launch on tensors of one kind.

    kernel    a jitted function whose parameters are the tensors, and integers that change from call to call, then the rest
    n_programs, rest   the grid, and everything but those, by name
    descriptor_factories         of the tensors that are handed on as descriptors, by name

    Called with tensors, None and those integers. From the second call on the compiled kernel is launched directly:
    Triton's own launch would look at each argument anew, some 20 microseconds.
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
        # the interpreter compiles nothing
        if compiled is not None:
            self._run = launcher.bind(compiled, self._grid, tensors, self._factories, self._values)


def axis_strides(shape: tuple[int, ...]) -> tuple[int, int]:
    """(batch, head) strides of a contiguous tensor; 0 along an axis of size 1, which all share."""
    batch, heads, *rest = shape
    size = math.prod(rest)
    return (heads * size if batch > 1 else 0, size if heads > 1 else 0)
