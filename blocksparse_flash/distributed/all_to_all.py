"""Packed all-to-all between tokens and heads: one message for several tensors. Used by ulysses.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from einops import rearrange
from torch import Tensor

# (message (tokens, ...), tokens to each rank, tokens from each rank) -> received message
Send = Callable[[Tensor, list[int], list[int]], Tensor]


def _message(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts (tokens, batch, heads, dim) to (tokens, batch, all features)."""
    if len(parts) == 1:
        return parts[0].flatten(-2)
    features = [part.shape[-2] * part.shape[-1] for part in parts]
    message = parts[0].new_empty(*parts[0].shape[:-2], sum(features))
    # torch.cat would first copy parts of different memory formats
    for place, part in zip(message.split(features, dim=-1), parts, strict=True):
        place.view(part.shape).copy_(part)
    return message


def to_heads(tensors: Sequence[Tensor], sizes: list[int], restore: Tensor | None, send: Send) -> list[Tensor]:
    """(batch, heads, local tokens, dim) to (batch, heads / n_ranks, all tokens, dim), the heads of this rank.

    sizes    tokens of each rank
    restore  position of each token of the sequence in the concatenated shards; None if they are in order
    returns  contiguous tensors
    """
    n_ranks, n_local = len(sizes), tensors[0].shape[2]
    by_rank = "batch (ranks heads) tokens dim -> ranks tokens batch heads dim"
    message = _message([rearrange(x, by_rank, ranks=n_ranks) for x in tensors]).flatten(0, 1)
    found = send(message, [n_local] * n_ranks, sizes)
    if restore is not None:
        found = found.index_select(0, restore)
    split = found.split([x.shape[1] // n_ranks * x.shape[3] for x in tensors], dim=2)
    return [
        rearrange(part, "tokens batch (heads dim) -> batch heads tokens dim", dim=x.shape[3]).contiguous()
        for part, x in zip(split, tensors, strict=True)
    ]


def to_tokens(
    tensors: Sequence[Tensor], sizes: list[int], n_local: int, reorder: Tensor | None, send: Send
) -> list[Tensor]:
    """The inverse of `to_heads`.

    n_local  tokens of this rank
    reorder  tokens of the sequence in rank order; None if they are in order
    """
    n_ranks = len(sizes)
    message = _message([rearrange(x, "batch heads tokens dim -> tokens batch heads dim") for x in tensors])
    if reorder is not None:
        message = message.index_select(0, reorder)
    found = send(message, sizes, [n_local] * n_ranks)
    split = found.split([x.shape[1] * x.shape[3] for x in tensors], dim=2)
    to_batch = "(ranks tokens) batch (heads dim) -> batch (ranks heads) tokens dim"
    return [
        rearrange(part, to_batch, ranks=n_ranks, dim=x.shape[3]).contiguous()
        for part, x in zip(split, tensors, strict=True)
    ]
