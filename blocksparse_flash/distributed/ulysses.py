"""How do ranks attend when each takes whole heads? Tokens go to heads, attention is that of one process, heads go back.

DeepSpeed-Ulysses (Jacobs et al., 2023, section 3.1). For grouped heads of any ratio and shards of any sizes, as long as the
ranks divide the key heads. Where each rank holds one stretch of the sequence, and a long one, heads go in messages that nobody
copies, see whole_heads.py. Otherwise: one message for q, k and v together, one for the output, in differentiable steps.
Knows tensors, a ContextPlan and attention. Must not know layouts' insides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import functional
from ..layout import BlockLayout
from . import times, whole_heads
from .messages import redistribute

if TYPE_CHECKING:
    from .context_plan import ContextPlan


def _to_heads(tensors: list[Tensor], plan: ContextPlan) -> list[Tensor]:
    """(batch, heads, local tokens, dim) of all heads to (batch, heads / n_ranks, all tokens, dim) of this rank's."""
    n_ranks = plan.n_ranks
    # [n_ranks, local tokens, batch, heads of a rank * dim]
    parts = [t.unflatten(1, (n_ranks, t.shape[1] // n_ranks)).permute(1, 3, 0, 2, 4).flatten(3) for t in tensors]
    message = torch.cat(parts, dim=3).flatten(0, 1)
    found = redistribute(message, [plan.local_length] * n_ranks, plan.sizes, plan.group_name)
    if plan.restore is not None:
        found = found.index_select(0, plan.restore)
    split = found.split([part.shape[3] for part in parts], dim=2)
    return [
        part.unflatten(2, (-1, t.shape[3])).permute(1, 2, 0, 3).contiguous()
        for part, t in zip(split, tensors, strict=True)
    ]


def _to_tokens(x: Tensor, plan: ContextPlan) -> Tensor:
    """The inverse of `_to_heads`."""
    # [all tokens, batch, heads of a rank, dim]
    message = x.permute(2, 0, 1, 3)
    message = message.contiguous() if plan.rearrange is None else message.index_select(0, plan.rearrange)
    found = redistribute(message, plan.sizes, [plan.local_length] * plan.n_ranks, plan.group_name)
    # [batch, n_ranks, heads of a rank, local tokens, dim]
    return found.unflatten(0, (plan.n_ranks, plan.local_length)).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


def is_direct(plan: ContextPlan, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether messages are sent from where q, k and v lie, and may be cut by heads: a stretch for each sequence and head.

    head_dim, dtype  of the keys that are sent
    """
    return plan.rearrange is None and times.goes_by_itself(plan.length // plan.n_ranks, head_dim, dtype.itemsize)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, layout: BlockLayout, scale: float, n_chunks: int, backend: str,
    *, wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and lse of this rank's tokens, None where it is not wanted. Every rank of the plan must call it alike."""
    deterministic = True if plan.is_deterministic else None
    if is_direct(plan, k.shape[3], k.dtype) and layout.shape[0] in (1, q.shape[0]):
        if backend == "hopper":
            backend = functional._promising(backend, deterministic)
        walk = list(layout.plan(q.device))
        call = whole_heads.Call(walk, plan.sizes, scale, n_chunks, plan.group_name, backend)
        out, lse = whole_heads.attention(q, k, v, call)
    else:
        q, k, v = _to_heads([q, k, v], plan)
        out, lse = functional.attention_with_lse(
            q, k, v, layout, scale=scale, deterministic=deterministic, backend=backend
        )
        out = _to_tokens(out, plan)
    return out, _to_tokens(lse[..., None], plan)[..., 0] if wants_lse else None
