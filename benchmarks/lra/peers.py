"""Attention implementations that are compared: ours, PyTorch's with and without a score matrix, FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.interop import to_flex_attention

from ..run.peers import compiled_flex

# (q, k, v, dropout_p=0.0) -> out
Attend = Callable[..., Tensor]

OURS, MATERIALIZED, SDPA, FLEX = PROVIDERS = ("blocksparse_flash", "materialized", "sdpa", "flex")


def materialized(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, mask: Tensor | None) -> Tensor:
    """Attention with the score matrix in memory. mask bool, True attends; None is dense."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return F.dropout(scores.softmax(dim=-1), dropout_p).to(v.dtype) @ v


def dropped_scores(seed: Tensor, dropout_p: float) -> Callable[..., Tensor]:
    """A score_mod that drops scores, by a hash of seed (int32, a scalar) and indices.

    FlexAttention cannot change probabilities after the softmax, so this dropout comes before it, and the remaining
    probabilities sum to 1.
    """

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        word = seed ^ (q * 73856093) ^ (kv * 19349663) ^ ((batch * 31 + head) * 83492791)
        for _ in range(2):
            word = (word ^ ((word >> 16) & 0xFFFF)) * 0x45D9F3B
        return torch.where(((word >> 8) & 0xFFFF) < int(dropout_p * 2**16), -torch.inf, score)

    return score_mod


def _flex(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, mask: Any) -> Tensor:
    if not dropout_p:
        return compiled_flex()(q, k, v, block_mask=mask)
    seed = torch.randint(2**31 - 1, (), dtype=torch.int32, device=q.device)
    return compiled_flex()(q, k, v, score_mod=dropped_scores(seed, dropout_p), block_mask=mask)


def _block_mask(layout: BlockLayout) -> Any:
    from torch.nn.attention.flex_attention import noop_mask

    mask = to_flex_attention(layout)
    if not len(layout.bitmasks):
        # all blocks are full: no mask function needed
        mask.mask_mod = noop_mask
    return mask


def supported(providers: Iterable[str], layout: BlockLayout | None, device: torch.device) -> Iterator[str]:
    """The providers that support a layout on a device; prints why the others do not."""
    for provider in providers:
        if provider == FLEX and device.type != "cuda":
            print(f"{provider}: FlexAttention has a backward pass on CUDA devices only", flush=True)
        elif provider == FLEX and layout is not None and any(side % 128 for side in layout.block_size):
            print(f"{provider}: FlexAttention takes blocks of 128 tokens, not of {layout.block_size}", flush=True)
        else:
            yield provider


def attend_with(provider: str, layout: BlockLayout | None, device: torch.device, *, backend: str = "auto") -> Attend:
    """A provider's attention with a layout, None for dense, with its masks prepared on the device.

    backend  of ours
    raises   ValueError for an unknown provider
    """
    if provider not in PROVIDERS:
        raise ValueError(f"providers must be of {', '.join(PROVIDERS)}, got {provider!r}")
    layout = None if layout is None else layout.to(device)
    if provider == OURS:
        return functools.partial(attention, layout=layout, backend=backend)
    if provider == FLEX:
        # PyTorch falls back to eager, with all scores in memory, after a few compiled shapes
        torch.compiler.reset()
        return functools.partial(_flex, mask=None if layout is None else _block_mask(layout))
    mask = None if layout is None else layout.to_dense()
    if provider == SDPA:
        return functools.partial(F.scaled_dot_product_attention, attn_mask=mask)
    return functools.partial(materialized, mask=mask)
