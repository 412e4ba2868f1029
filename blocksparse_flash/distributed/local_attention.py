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


def with_determinism(backend: str, deterministic: bool) -> str:
    """The backend as one string for the operators of this package, whose schemas have one for both; see `_spec`."""
    return f"{backend}, deterministic" if deterministic else backend


def _spec(backend: str, scale: float) -> CallSpec:
    name, _, deterministic = backend.partition(", ")
    return CallSpec(scale, False, 0.0, 0.0, name, bool(deterministic))


def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse over the tiles of a kernel plan."""
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=accumulator_dtype(q))
    # already inside an operator, so the inner functions are called directly
    return ops.launch_forward(q, k, v, plan, None, None, _spec(backend, scale))


def attend_backward(
    douts: tuple[Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    outs: tuple[Tensor, Tensor],
    plan: list[Tensor],
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend`: douts (dout, dlse or None), inputs (q, k, v), outs (out, lse)."""
    q, k, v = inputs
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # a chunk of heads is a strided view, and the backward needs contiguous tensors
    out, lse = (tensor.contiguous() for tensor in outs)
    dq, dk, dv = ops.launch_backward(BackwardInputs(*douts, *inputs, out, lse), plan, None, None, _spec(backend, scale))
    return dq, dk, dv
