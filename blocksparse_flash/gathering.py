"""The torch.library operator gather_tokens and its gradient: copies tokens into the order of a reordered layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ops import is_differentiated, refuse_forward_mode, refuse_mapped
from .plan.reordering import TokenOrder
from .runtime import tracing
from .runtime.tensor_spec import new_in_order_of

torch.library.define("blocksparse_flash::gather_tokens", "(Tensor tokens, Tensor order, Tensor inverse) -> Tensor")


def _launch(tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ARG001  of the gradient
    from .kernels.triton import gather_tokens

    if tracing.is_on_current_device(tokens):
        return gather_tokens.gather_tokens(tokens, order)
    with tracing.on_device(tokens.device):
        return gather_tokens.gather_tokens(tokens, order)


torch.library.impl("blocksparse_flash::gather_tokens", "default", _launch)


@torch.library.register_fake("blocksparse_flash::gather_tokens")
def _fake(tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ARG001
    return new_in_order_of(tokens, tokens.shape[3], order.shape[2])


class _Gather(torch.autograd.Function):
    """The gradient of a gather is the gather by the inverse order: no atomics, equal bits in every run."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, is_direct: bool) -> Tensor:
        ctx.is_direct = is_direct
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(order, inverse)
        with torch._C._AutoDispatchBelowAutograd():
            return _launch(tokens, order, inverse) if is_direct else _gather_tokens(tokens, order, inverse)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        refuse_forward_mode()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        refuse_mapped(grad)
        order, inverse = ctx.saved_tensors
        is_direct = ctx.is_direct and not torch.is_grad_enabled() and tracing.can_launch_directly(grad, grad, grad)
        gathered = _launch(grad, inverse, order) if is_direct else _gather_tokens(grad, inverse, order)
        return gathered, None, None, None


@torch.library.impl("blocksparse_flash::gather_tokens", "Autograd")
def _with_autograd(tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    if is_differentiated(tokens):
        return _Gather.apply(tokens, order, inverse, False)
    with torch._C._AutoDispatchBelowAutograd():
        return _gather_tokens(tokens, order, inverse)


_gather_tokens = torch.ops.blocksparse_flash.gather_tokens.default


def gathered(tokens: Tensor, by: TokenOrder, *, is_direct: bool) -> Tensor:
    """The tokens in another order, differentiable, in the memory order of `tokens`.

    tokens     (batch, heads, length, features)
    is_direct  whether a launch may skip the dispatcher, see `tracing.can_launch_directly`
    """
    if not is_direct:
        return _gather_tokens(tokens, *by)
    if is_differentiated(tokens):
        return _Gather.apply(tokens, *by, True)
    return _launch(tokens, *by)
