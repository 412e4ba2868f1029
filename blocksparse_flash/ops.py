"""How does torch see the kernels? Two operators with fakes and autograd: attention_forward and attention_backward.

Knows: tensors, a plan as a list of tensors, which module implements a backend. Does not know: BlockLayout, validation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

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


def _kernels(backend: str) -> tuple[ModuleType, ModuleType]:
    """The modules with `forward` and `backward` of a backend; Triton is imported when first used."""
    if backend == "triton":
        from .kernels import backward, forward

        return forward, backward
    assert backend == "eager", backend
    from .kernels import eager

    return eager, eager


@torch.library.impl("blocksparse_flash::attention_forward", "default")
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, backend = arguments
    return _kernels(backend)[0].forward(q, k, v, *rest)


@torch.library.impl("blocksparse_flash::attention_backward", "default")
def _backward(dout: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *rest, backend = arguments
    backward = _kernels(backend)[1].backward
    if not torch.is_autocast_enabled(dout.device.type):
        return backward(dout, *rest)
    # called by autograd inside a region of autocast, which must not choose the types of the products
    with torch.autocast(dout.device.type, enabled=False):
        return backward(dout, *rest)


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
            return torch.ops.blocksparse_flash.attention_backward.default(*arguments)

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
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = attention_forward(q, k, v, *arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kv_lengths, seed, *plan)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, out, lse, kv_lengths, seed, *plan = ctx.saved_tensors
        if dout is None:
            # only lse was used
            dout = torch.zeros_like(out)
        grads = torch.ops.blocksparse_flash.attention_backward.default(
            dout, dlse, q, k, v, out, lse, plan, kv_lengths, seed, *ctx.options
        )
        return *grads, *(None,) * 7


# an autograd kernel of our own: torch.library.register_autograd costs 76 microseconds a call, this 21 (torch 2.13)
@torch.library.impl("blocksparse_flash::attention_forward", "Autograd")
def _forward_with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_forward(q, k, v, *arguments)


attention_forward = torch.ops.blocksparse_flash.attention_forward.default
