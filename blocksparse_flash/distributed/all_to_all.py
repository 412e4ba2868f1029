"""How do tokens go to heads in one message? Packed, sent, unpacked: Ulysses where a head of a rank's tokens is a short stretch.

Knows tensors (batch, heads, tokens, dim), how many tokens each rank has, and in which order; is told how to send. Must not know
attention, layouts or plans of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

# a message (tokens, ...), how many of them go to each rank and how many come from it; to the message that came
Send = Callable[[Tensor, list[int], list[int]], Tensor]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """(..., features of all parts), of parts (..., heads, dim)."""
    if len(parts) == 1:
        return parts[0].flatten(-2)
    features = [part.shape[-2] * part.shape[-1] for part in parts]
    message = parts[0].new_empty(*parts[0].shape[:-2], sum(features))
    # not torch.cat, for which parts that lie across each other would be copied before
    for place, part in zip(message.split(features, dim=-1), parts, strict=True):
        place.view(part.shape).copy_(part)
    return message


def to_heads(tensors: Sequence[Tensor], sizes: list[int], restore: Tensor | None, send: Send) -> list[Tensor]:
    """(batch, heads, local tokens, dim) of all heads to (batch, heads / n_ranks, all tokens, dim) of this rank's.

    sizes    tokens of each rank
    restore  where each token of the sequence is when those of the ranks lie one after another; None: where it was
    returns  contiguous tensors
    """
    n_ranks, n_local = len(sizes), tensors[0].shape[2]
    shapes = [(x.shape[1] // n_ranks, x.shape[3]) for x in tensors]
    # [n_ranks, local tokens, batch, heads of a rank, dim]
    parts = [
        x.view(len(x), n_ranks, heads, n_local, dim).permute(1, 3, 0, 2, 4)
        for x, (heads, dim) in zip(tensors, shapes, strict=True)
    ]
    found = send(_side_by_side(parts).flatten(0, 1), [n_local] * n_ranks, sizes)
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
    rearrange  the tokens of the sequence, rank after rank; None: as they are
    """
    n_ranks = len(sizes)
    shapes = [(x.shape[1], x.shape[3]) for x in tensors]
    # [all tokens, batch, heads of a rank, dim]
    message = _side_by_side([x.permute(2, 0, 1, 3) for x in tensors])
    if rearrange is not None:
        message = message.index_select(0, rearrange)
    found = send(message, sizes, [n_local] * n_ranks)
    split = found.split([heads * dim for heads, dim in shapes], dim=2)
    # [batch, n_ranks, heads of a rank, local tokens, dim]
    return [
        part.view(n_ranks, n_local, part.shape[1], *shape).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()
        for part, shape in zip(split, shapes, strict=True)
    ]
