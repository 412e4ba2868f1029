"""Attention of one rank over the keys it holds, which may be none, in chunks of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..dispatch import CallSpec
from ..kernels.inputs import BackwardInputs
from ..plan_format import COL_LISTS, ROW_LISTS
from .communication import process_group_of


class RankContext(NamedTuple):
    """Spec, process group and rank of the calls of a layer."""

    spec: CallSpec
    group: Any
    rank: int

    @property
    def backend(self) -> str:
        """The backend of the kernels that compute and of those that move rows."""
        return self.spec.backend


def rank_context(scale: float, group: str, backend: str, deterministic: bool) -> RankContext:
    """The context of calls over kernel plans, which contain the causal mask."""
    spec = CallSpec(scale, causal=False, dropout_p=0.0, softcap=0.0, backend=backend, deterministic=deterministic)
    process_group = process_group_of(group)
    return RankContext(spec, process_group, dist.get_rank(process_group))


def accumulator_dtype(q: Tensor) -> torch.dtype:
    """The dtype of lse and of sums over ranks."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], spec: CallSpec) -> tuple[Tensor, Tensor]:
    """out and lse over the tiles of a kernel plan, contiguous: messages and operators of any rank expect them so."""
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=accumulator_dtype(q))
    # already inside an operator, so the inner functions are called directly
    out, lse = ops.launch_forward(q, k, v, plan, None, None, spec)
    return out.contiguous(), lse


def attend_backward(inputs: BackwardInputs, plan: list[Tensor], spec: CallSpec) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend`, contiguous."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dq, dk, dv = ops.launch_backward(inputs, plan, None, None, spec)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# ---- chunks of heads ----


def chunk_plans(plan: list[Tensor], n_chunks: int) -> list[list[Tensor]]:
    """The kernel plan of each chunk of heads."""
    if n_chunks == 1:
        return [plan]
    # row and column records; the lists they index are shared by all heads
    records = plan[ROW_LISTS], plan[COL_LISTS]
    rows, cols = (x.chunk(n_chunks, dim=1) if x.shape[1] > 1 else (x,) * n_chunks for x in records)
    of_rows, of_cols = plan[ROW_LISTS + 1 : COL_LISTS], plan[COL_LISTS + 1 :]
    return [[row, *of_rows, col, *of_cols] for row, col in zip(rows, cols, strict=True)]


def chunk_heads(x: Tensor, n_chunks: int) -> Sequence[Tensor]:
    """Splits a tensor along its heads into equal chunks."""
    return (x,) if n_chunks == 1 else x.chunk(n_chunks, dim=1)


def cat_heads(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `chunk_heads`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
