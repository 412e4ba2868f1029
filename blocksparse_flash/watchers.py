"""Can a kernel be launched directly? Whether anything watches what PyTorch does, and what the GPU is.

Knows PyTorch's compiler, tracers, modes and transforms. Must not know what is launched.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch

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


@functools.cache
def runs_triton(index: int | None) -> bool:
    """Whether a GPU runs Triton's kernels; neither the device nor the installation changes."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(index) < (8, 0):
        return False
    import triton

    return not triton.knobs.runtime.interpret


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one where it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
