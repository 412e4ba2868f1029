"""How does one rank attend to what it has? The operators of one process, and what they leave out: no tokens.

Knows tensors, a kernel's plan as a list of tensors. Must not know ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..dispatch import CallSpec


def statistics(q: Tensor) -> torch.dtype:
    """The type of lse, and of sums over ranks."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def with_determinism(backend: str, deterministic: bool) -> str:
    """The backend as one string for the operators of this package, whose schemas have one for both; see `_spec`."""
    return f"{backend}, deterministic" if deterministic else backend


def _spec(backend: str, scale: float) -> CallSpec:
    name, _, deterministic = backend.partition(", ")
    return CallSpec(scale, False, 0.0, 0.0, name, bool(deterministic))


def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], scale: float, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of the tiles of a plan."""
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=statistics(q))
    # within an operator already: nothing else is to see it
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
    # some of the heads of a forward's results, which a backward takes as they were
    out, lse = (tensor.contiguous() for tensor in outs)
    dq, dk, dv = ops.launch_backward(*douts, inputs, (out, lse), plan, None, None, _spec(backend, scale))
    return dq, dk, dv
