"""The torch.library operators and autograd that pass-KV and Ulysses share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..runtime import tracing

# q, k and v, or their gradients
QKV = tuple[Tensor, Tensor, Tensor]


class Scheme(ABC):
    """State prepared once and shared by all calls with equal plan and options.

    NAME     of the operators, <name>_forward and <name>_backward
    OPTIONS  their schema after `Tensor[] tensors, SymInt[] counts`
    tensors, counts  what a rank exchanges, from LayerPlan
    """

    NAME: str
    OPTIONS: str

    def __init__(self, tensors: list[Tensor], counts: list[int], *options: Any) -> None:
        self.arguments = tensors, counts, *options

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse, and the tensors to keep for the backward. Every rank of the group must call it."""

    @staticmethod
    @abstractmethod
    def saved(inputs: QKV, out: Tensor, lse: Tensor, kept: list[Tensor]) -> list[Tensor]:
        """What the backward takes, from the inputs and results of `forward`."""

    @abstractmethod
    def backward(self, dout: Tensor, dlse: Tensor | None, saved: list[Tensor]) -> QKV:
        """dq, dk and dv; dlse None is 0. Every rank of the group must call it."""

    @staticmethod
    @abstractmethod
    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Empty results of `forward`."""

    @staticmethod
    @abstractmethod
    def fake_backward(dout: Tensor, dlse: Tensor | None, saved: list[Tensor], *arguments: Any) -> QKV:
        """Empty results of `backward`."""


class Operators:
    """The operators of a scheme. Calling it bypasses the dispatcher if nothing traces the call."""

    def __init__(self, scheme: type[Scheme]) -> None:
        self.scheme = scheme
        arguments = f"Tensor[] tensors, SymInt[] counts, {scheme.OPTIONS}"
        forward, backward = (f"blocksparse_flash::{scheme.NAME}_{direction}" for direction in ("forward", "backward"))
        inputs, grads = "Tensor q, Tensor k, Tensor v", "Tensor dq, Tensor dk, Tensor dv"
        torch.library.define(forward, f"({inputs}, {arguments}) -> (Tensor out, Tensor lse, Tensor[] kept)")
        torch.library.define(backward, f"(Tensor dout, Tensor? dlse, Tensor[] saved, {arguments}) -> ({grads})")
        torch.library.impl(forward, "default", self._forward)
        torch.library.impl(backward, "default", self._backward)
        torch.library.register_fake(forward, scheme.fake_forward)
        torch.library.register_fake(backward, scheme.fake_backward)
        torch.library.register_autograd(forward, self._differentiate, setup_context=self._save)
        torch.library.register_autograd(backward, _refuse_second_derivative)
        self.forward = getattr(torch.ops.blocksparse_flash, f"{scheme.NAME}_forward").default
        self.backward = getattr(torch.ops.blocksparse_flash, f"{scheme.NAME}_backward").default

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        return self.scheme(*arguments).forward(q, k, v)

    def _backward(self, dout: Tensor, dlse: Tensor | None, saved: list[Tensor], *arguments: Any) -> QKV:
        dq, dk, dv = self.scheme(*arguments).backward(dout, dlse, saved)
        # contiguous, as the fake operator says
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, *ctx.arguments = inputs
        out, lse, kept = output
        # zero gradients of what is kept would be as large as all keys and values
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*self.scheme.saved((q, k, v), out, lse, kept))
        ctx.out_shape = out.shape

    def _differentiate(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        saved, (tensors, *others) = list(ctx.saved_tensors), ctx.arguments
        # only lse was used
        dout = saved[0].new_zeros(ctx.out_shape) if dout is None else dout
        grads = self.backward(dout, dlse, saved, *ctx.arguments)
        return *grads, [None] * len(tensors), *[None] * len(others)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], options: tuple[Any, ...],
        cache: dict[Any, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out and lse. cache: keeps the schemes of direct calls, by their options."""
        if not tracing.can_launch_directly(q, k, v):
            return self.forward(q, k, v, tensors, counts, *options)[:2]
        if options not in cache:
            cache[options] = self.scheme(tensors, counts, *options)
        if ops.is_differentiated(q, k, v):
            return _Direct.apply(q, k, v, cache[options], self)
        return cache[options].forward(q, k, v)[:2]


class _Direct(torch.autograd.Function):
    """A call that bypasses the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scheme: Scheme, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        ctx.scheme, ctx.operators = scheme, operators
        ctx.set_materialize_grads(False)
        out, lse, kept = scheme.forward(q, k, v)
        ctx.save_for_backward(*scheme.saved((q, k, v), out, lse, kept))
        ctx.out_shape = out.shape
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        saved = list(ctx.saved_tensors)
        # only lse was used
        dout = saved[0].new_zeros(ctx.out_shape) if dout is None else dout
        # create_graph=True goes through the dispatcher, which raises
        if tracing.can_launch_directly(saved[0], saved[1], dout) and not torch.is_grad_enabled():
            grads = ctx.scheme.backward(dout, dlse, saved)
        else:
            grads = ctx.operators.backward(dout, dlse, saved, *ctx.scheme.arguments)
        return *grads, None, None


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:  # noqa: ARG001
    raise RuntimeError("second derivatives of distributed attention are not supported")
