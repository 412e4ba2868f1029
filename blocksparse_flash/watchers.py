"""Can a kernel be launched directly? Whether anything watches what PyTorch does, and what the GPU is.

Knows PyTorch's compiler, tracers, modes and transforms. Must not know what is launched.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOTHING = nullcontext()


def are_there() -> bool:
    """Whether a compiler, tracer, mode or transform wants to see every operator; profilers and subclasses aside."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def are_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing watches what is done with tensors: no compiler, tracer, mode, transform, profiler or subclass; and whether
    there are numbers, which lie in memory by strides."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return (
        not are_there()
        and type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and not q.is_meta
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
        # which may outlive its transform, and has no memory
        and not (wrapped(q) or wrapped(k) or wrapped(v))
        and not torch._C._autograd._profiler_enabled()
    )


def aside(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """For what is made of a tensor, which is no input of any function, and cached: neither for inference only, nor wrapped by a
    transform of torch.func, unless that tensor is."""
    if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _outside(tensor)
    return _NOTHING


@contextmanager
def _outside(tensor: torch.Tensor) -> Iterator[None]:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    with torch.inference_mode(False), _NOTHING if is_wrapped else torch._C._DisableFuncTorch():
        yield


def follow(*values: Any) -> bool:
    """Whether a transform of torch.func maps or differentiates one of the values, a tensor which then has no memory to read."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    if forward_ad._current_level >= 0:
        return True
    for value in values:
        tensor = value
        while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            if torch._C._functorch.is_batchedtensor(tensor) or tensor.requires_grad:
                return True
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


@functools.cache
def runs_triton(index: int | None) -> bool:
    """Whether a GPU runs Triton's kernels; neither the device nor the installation changes."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    import triton

    return not triton.knobs.runtime.interpret


def is_without_autocast(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU and autocast is off. False says nothing, and `torch.is_autocast_enabled`, which takes twice
    as long, must be asked."""
    # which does not know every type of device, but CUDA
    return tensor.is_cuda and not torch._C._is_any_autocast_enabled()


def is_current(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where launches go: on the current GPU, or on none. What `on` asks, for a third of the time."""
    # a tensor is there: CUDA has been initialised, which torch.cuda.current_device would ask first
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one where it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)
