"""How does torch see the kernels? Two operators with fakes and autograd: attention_forward and attention_backward.

Knows: tensors, a plan as a list of tensors, which module implements a backend. Does not know: BlockLayout, validation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from . import copy_engine

# elements of q and k from which on "auto" takes `hopper`
WORTH_HOPPER = 1 << 20
_NOTHING = nullcontext()
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {saved}Tensor[] plan, Tensor? kv_lengths, Tensor? seed, "
    "float scale, bool causal, float dropout_p, str backend"
)
torch.library.define(
    "blocksparse_flash::attention_forward", f"({_ARGUMENTS.format(saved='')}) -> (Tensor out, Tensor lse)"
)
torch.library.define(
    "blocksparse_flash::attention_backward",
    f"(Tensor dout, Tensor? dlse, {_ARGUMENTS.format(saved='Tensor out, Tensor lse, ')})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one where it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def is_worth_hopper(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a call is large enough for "auto" to take `hopper`, whose launch costs the host more than that of `triton`."""
    return q.numel() + k.numel() >= WORTH_HOPPER


def _kernels(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of a backend; Triton is imported when first used.

    "auto" is `hopper` where that runs the call as it is, and pays; else `triton`.
    """
    name, _, deterministic = backend.partition(", ")
    if name == "auto":
        takes = is_worth_hopper(q, k) and all(
            tensor.shape[3] % 8 or copy_engine.can_read(tensor) for tensor in (q, k, v)
        )
        name = "hopper" if takes else "triton"
    if name == "triton":
        from .kernels import backward, forward

        return forward.forward, backward.backward
    if name == "hopper":
        from .kernels import hopper_backward, hopper_forward

        if deterministic:
            return hopper_forward.forward, functools.partial(hopper_backward.backward, deterministic=True)
        return hopper_forward.forward, hopper_backward.backward
    assert name == "eager", backend
    from .kernels import eager

    return eager.forward, eager.backward


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, backend = arguments
    with _on(q.device):
        return _kernels(backend, q, k, v)[0](q, k, v, *rest)


def _backward(dout: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, q, k, v, *_, backend = arguments
    rest = arguments[:-1]
    backward = _kernels(backend, q, k, v)[1]
    with _on(dout.device):
        if not torch.is_autocast_enabled(dout.device.type):
            return backward(dout, *rest)
        # called by autograd inside a region of autocast, which must not choose the types of the products
        with torch.autocast(dout.device.type, enabled=False):
            return backward(dout, *rest)


# not as decorators, which would take the functions away
torch.library.impl("blocksparse_flash::attention_forward", "default", _forward)
torch.library.impl("blocksparse_flash::attention_backward", "default", _backward)


@torch.library.register_fake("blocksparse_flash::attention_forward")
def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, q_len, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, heads, q_len, v.shape[3]), q.new_empty(batch, heads, q_len, dtype=statistics)


@torch.library.register_fake("blocksparse_flash::attention_backward")
def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _attention_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # anything else would be a silent wrong gradient
        raise RuntimeError(
            "attention_backward cannot be differentiated: the gradients of attention have none of their own; "
            'backend="reference" has second derivatives'
        )


@torch.library.impl("blocksparse_flash::attention_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Gradients.apply(*arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> Any:
        plan, kv_lengths, seed, *ctx.options = arguments
        if _is_plain(q, k, v):
            out, lse = _forward(q, k, v, *arguments)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = _attention_forward(q, k, v, *arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kv_lengths, seed, *plan)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, out, lse, kv_lengths, seed, *plan = ctx.saved_tensors
        if dout is None:
            # only lse was used
            dout = torch.zeros_like(out)
        called: Any = _attention_backward
        # a graph of the backward itself needs the dispatcher, which refuses
        if type(dout) in _PLAIN and _is_plain(q, k, v) and not torch.is_grad_enabled():
            called = _backward
        grads = called(dout, dlse, q, k, v, out, lse, plan, kv_lengths, seed, *ctx.options)
        return *grads, *(None,) * 7


# an autograd kernel of our own: torch.library.register_autograd costs 76 microseconds a call, this 21 (torch 2.13)
@torch.library.impl("blocksparse_flash::attention_forward", "Autograd")
def _forward_with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_differentiated(q, k, v):
        return _Attention.apply(q, k, v, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention_forward(q, k, v, *arguments)


_attention_forward = torch.ops.blocksparse_flash.attention_forward.default
_attention_backward = torch.ops.blocksparse_flash.attention_backward.default


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    # inside forward-mode differentiation any tensor may carry a tangent: the autograd function refuses those
    return (
        (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    ) or forward_ad._current_level >= 0


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether nothing watches the operators: no compiler, tracer, mode, transform, profiler or subclass."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.jit._trace.is_tracing()
        and not torch._C._autograd._profiler_enabled()
    )


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator; called directly where nothing watches, which saves its dispatch, 14 microseconds."""
    if not _is_plain(q, k, v):
        return _attention_forward(q, k, v, *arguments)
    if _is_differentiated(q, k, v):
        return _Attention.apply(q, k, v, *arguments)
    return _forward(q, k, v, *arguments)
