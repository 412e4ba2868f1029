"""How do ranks attend when each takes whole heads? Tokens go to heads, attention is that of one process, heads go back.

DeepSpeed-Ulysses (Jacobs et al., 2023, section 3.1). For grouped heads of any ratio and shards of any sizes, as long as the
ranks divide the key heads. Where each rank holds one stretch of the sequence, and a long one, heads go in messages that nobody
copies; otherwise in one message for q, k and v together and one for the output. See whole_heads.py.
Knows tensors, a ContextPlan and attention. Must not know layouts' insides.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch, validation
from ..layout import BlockLayout
from . import packed_heads, times, whole_heads
from .local import with_determinism
from .messages import redistribute

if TYPE_CHECKING:
    from .context_plan import ContextPlan


def is_direct(plan: ContextPlan, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether messages are sent from where q, k and v lie, and may be cut by heads: a stretch for each sequence and head.

    head_dim, dtype  of the keys that are sent
    """
    return plan.rearrange is None and times.goes_by_itself(plan.length // plan.n_ranks, head_dim, dtype.itemsize)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, layout: BlockLayout, scale: float, n_chunks: int, backend: str,
    memo: dict[Any, Any], *, wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and lse of this rank's tokens, None where it is not wanted. Every rank of the plan must call it alike.

    memo  of the layer, see context_plan.LayerPlan
    """
    if layout.shape[0] != 1:
        validation.check_layout(layout, q.shape[0], q.shape[1] // plan.n_ranks, plan.length, plan.length)
    if backend == "hopper":
        backend = with_determinism(backend, dispatch.is_deterministic(plan.is_deterministic or None))
    packs = not is_direct(plan, k.shape[3], k.dtype)

    def call() -> whole_heads.Call:
        orders = [] if plan.restore is None or plan.rearrange is None else [plan.restore, plan.rearrange]
        walk = list(layout.plan(q.device))
        return whole_heads.Call(walk, orders, plan.sizes, plan.rank, scale, packs, n_chunks, plan.group_name, backend)

    out, lse = whole_heads.attention(q, k, v, call, (scale, packs, n_chunks, backend), memo)
    if not wants_lse:
        return out, None
    send = partial(redistribute, group=plan.group_name)
    (lse,) = packed_heads.to_tokens([lse[..., None]], plan.sizes, plan.local_length, plan.rearrange, send)
    return out, lse[..., 0]
