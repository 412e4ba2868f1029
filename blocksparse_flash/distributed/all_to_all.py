"""Packed all-to-all between tokens and heads: one message for several tensors. Used by ulysses.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

# (message (tokens, ...), tokens to each rank, tokens from each rank) -> received message
Send = Callable[[Tensor, list[int], list[int]], Tensor]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts (..., heads, dim) to (..., all features)."""
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
    shapes = [(x.shape[1] // n_ranks, x.shape[3]) for x in tensors]
    # [n_ranks, local tokens, batch, heads of a rank, dim]
    parts = [
        x.view(len(x), n_ranks, heads, n_local, dim).permute(1, 3, 0, 2, 4)
        for x, (heads, dim) in zip(tensors, shapes, strict=True)
    ]
    found = send(_concatenated(parts).flatten(0, 1), [n_local] * n_ranks, sizes)
    if restore is not None:
        found = found.index_select(0, restore)
    split = found.split([heads * dim for heads, dim in shapes], dim=2)
    return [
        part.view(*part.shape[:2], *shape).permute(1, 2, 0, 3).contiguous()
        for part, shape in zip(split, shapes, strict=True)
    ]


def to_tokens(
    tensors: Sequence[Tensor], sizes: list[int], n_local: int, rearrange: Tensor | None, send: Send
) -> list[Tensor]:
    """The inverse of `to_heads`.

    n_local    tokens of this rank
    rearrange  tokens of the sequence in rank order; None if they are in order
    """
    n_ranks = len(sizes)
    shapes = [(x.shape[1], x.shape[3]) for x in tensors]
    # [all tokens, batch, heads of a rank, dim]
    message = _concatenated([x.permute(2, 0, 1, 3) for x in tensors])
    if rearrange is not None:
        message = message.index_select(0, rearrange)
    found = send(message, sizes, [n_local] * n_ranks)
    split = found.split([heads * dim for heads, dim in shapes], dim=2)
    # [batch, n_ranks, heads of a rank, local tokens, dim]
    return [
        part.view(n_ranks, n_local, part.shape[1], *shape).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()
        for part, shape in zip(split, shapes, strict=True)
    ]
