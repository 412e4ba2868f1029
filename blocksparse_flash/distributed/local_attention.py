"""Attention of one rank over the keys it holds: the operators of one process, which may also get no tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..dispatch import CallSpec
from ..kernels.inputs import BackwardInputs


def accumulator_dtype(q: Tensor) -> torch.dtype:
    """The dtype of lse and of sums over ranks."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def call_spec(scale: float, backend: str, deterministic: bool) -> CallSpec:
    """The spec of a call over the tiles of a plan, which contains the causal mask."""
    return CallSpec(scale, causal=False, dropout_p=0.0, softcap=0.0, backend=backend, deterministic=deterministic)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], spec: CallSpec) -> tuple[Tensor, Tensor]:
    """out and lse over the tiles of a kernel plan."""
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=accumulator_dtype(q))
    # already inside an operator, so the inner functions are called directly
    return ops.launch_forward(q, k, v, plan, None, None, spec)


def attend_backward(
    douts: tuple[Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    outs: tuple[Tensor, Tensor],
    plan: list[Tensor],
    spec: CallSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend`: douts (dout, dlse or None), inputs (q, k, v), outs (out, lse)."""
    q, k, v = inputs
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # a chunk of heads is a strided view, and the backward needs contiguous tensors
    out, lse = (tensor.contiguous() for tensor in outs)
    dq, dk, dv = ops.launch_backward(BackwardInputs(*douts, *inputs, out, lse), plan, None, None, spec)
    return dq, dk, dv
