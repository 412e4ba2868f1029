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
        or torch.jit._trace.is_tracing()
    )


@contextmanager
def aside(tensor: torch.Tensor) -> Iterator[None]:
    """For what is made of a tensor, which is no input of any function, and cached: neither for inference only, nor wrapped by a
    transform of torch.func, unless that tensor is."""
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


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one where it is not: Triton launches on the current one."""
    # of a tensor that is there: CUDA has been initialised, which torch.cuda.current_device would ask first
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)
