"""How do tokens move, add up and merge within a rank? By a kernel where the attention is one, else by PyTorch.

Knows tensors (batch, heads, tokens, features), index lists, the name of a backend; that a message has tokens first: (tokens,
batch, heads, features), the features of several tensors side by side. Must not know where it goes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import merging
from .local_attention import accumulator_dtype

# tensors of a launch
TOGETHER = 4


@functools.cache
def _kernels() -> Any:
    """The module of the kernels; Triton is imported when first used."""
    from ..kernels.triton import gather_scatter

    return gather_scatter


def parts(message: Tensor, features: Sequence[int]) -> list[Tensor]:
    """The tensors (batch, heads, tokens, features) of a message, as views."""
    return [part.permute(1, 2, 0, 3) for part in message.split(list(features), dim=3)]


def _move(source: Tensor, target: Tensor, taken: Tensor | None, put: Tensor | None) -> None:
    found = (source if taken is None else source.index_select(2, taken)).to(target.dtype)
    if put is None:
        target.copy_(found)
    else:
        target.index_copy_(2, put, found)


def move(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    backend: str,
    *,
    taken: Tensor | None = None,
    put: Tensor | None = None,
) -> None:
    """target[:, :, put] = source[:, :, taken] of each pair, in target's type; None is all tokens, in order."""
    if backend == "eager":
        for source, target in zip(sources, targets, strict=True):
            _move(source, target, taken, put)
        return
    kernels = _kernels()
    for i in range(0, len(sources), TOGETHER):
        kernels.move(sources[i : i + TOGETHER], targets[i : i + TOGETHER], taken, put)


def picked(sources: Sequence[Tensor], taken: Tensor, backend: str) -> list[Tensor]:
    """source[:, :, taken] of each, contiguous."""
    targets = [x.new_empty(*x.shape[:2], taken.shape[0], x.shape[3]) for x in sources]
    move(sources, targets, backend, taken=taken)
    return targets


def pack(sources: Sequence[Tensor], tokens: Tensor, backend: str) -> Tensor:
    """The message that holds these tokens of up to TOGETHER tensors of one type, side by side."""
    first = sources[0]
    features = [x.shape[3] for x in sources]
    message = first.new_empty(tokens.shape[0], first.shape[0], first.shape[1], sum(features))
    if backend == "eager":
        move(sources, parts(message, features), backend, taken=tokens)
        return message
    _kernels().pack(sources, message, tokens)
    return message


def unpack(message: Tensor, targets: Sequence[Tensor], tokens: Tensor, backend: str) -> None:
    """target[:, :, tokens] = what the message holds of each."""
    if backend == "eager":
        move(parts(message, [x.shape[3] for x in targets]), targets, backend, put=tokens)
        return
    _kernels().unpack(message, targets, tokens)


def add(
    totals: Sequence[Tensor],
    mine: Sequence[Tensor],
    others: Tensor,
    bases: Sequence[Sequence[Tensor]],
    table: Tensor,
    tokens: Tensor | None,
    rank: int,
    backend: str,
) -> None:
    """total[:, :, tokens] = what each rank gave, in the order of ranks, summed in float32 (float64 for float64).

    totals   one or two tensors
    mine     what this rank gave to each; others is the message of what all others gave. table[r] names rank r's; -1: nothing
    bases    at most two lists, of one tensor for each total, which this rank adds too; they may be the totals themselves
    table    int32 (ranks, tokens)
    tokens   int64; None is all, in order
    """
    if backend != "eager":
        _kernels().add(totals, mine, others, bases, table, tokens, rank)
        return
    received = parts(others, [x.shape[3] for x in totals])
    for total, own, part, *of_total in zip(totals, mine, received, *bases, strict=True):
        found = total.new_zeros(*total.shape[:2], table.shape[1], total.shape[3], dtype=accumulator_dtype(total))
        for i_rank in range(len(table)):
            if i_rank == rank:
                for base in of_total:
                    found += base if tokens is None else base.index_select(2, tokens)
            given = own if i_rank == rank else part
            if given.shape[2]:
                found += _named(given, table[i_rank], 0)
        _move(found, total, None, tokens)


def merge(
    out: Tensor,
    lse: Tensor,
    mine: tuple[Tensor, Tensor],
    others: Tensor,
    table: Tensor,
    tokens: Tensor,
    rank: int,
    backend: str,
) -> None:
    """out[:, :, tokens] and lse[:, :, tokens] = attention over the keys of all ranks, from what each rank's keys gave.

    mine     out and lse of this rank's keys; others is the message of those of the others, lse as bits of its type
    table, tokens  as in `add`
    """
    if backend != "eager":
        _kernels().merge(out, lse, mine, others, table, tokens, rank)
        return
    width = out.shape[3]
    part, bits = parts(others, [width, others.shape[3] - width])
    # a view must begin at a multiple of the wider type: no view of a message would do
    part_lse = bits.clone(memory_format=torch.contiguous_format).view(lse.dtype)
    total = out.new_zeros(*out.shape[:2], len(tokens), width, dtype=lse.dtype)
    highest = lse.new_full((*lse.shape[:2], len(tokens)), -torch.inf)
    for i_rank, places in enumerate(table):
        given, given_lse = (mine[0], mine[1][..., None]) if i_rank == rank else (part, part_lse)
        if given.shape[2]:
            found = _named(given, places, 0).to(lse.dtype), _named(given_lse, places, -torch.inf)[..., 0]
            total, highest = merging.merge(total, highest, *found)
    out.index_copy_(2, tokens, total.to(out.dtype))
    lse.index_copy_(2, tokens, highest)


def _named(part: Tensor, places: Tensor, otherwise: float) -> Tensor:
    """part[:, :, places], `otherwise` where the place is -1."""
    found = part.index_select(2, places.long().clamp(min=0))
    return torch.where((places >= 0)[:, None], found, otherwise)
