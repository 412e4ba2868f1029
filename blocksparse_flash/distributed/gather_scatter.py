"""Gather, scatter, sum and merge tokens within a rank: a Triton kernel for the GPU backends, PyTorch for "eager".

A message has tokens first, (tokens, batch, heads, features), with the features of several tensors side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import merging
from .exchange_plan import ExchangePlan
from .local_attention import accumulator_dtype


@functools.cache
def _kernels() -> Any:
    """The kernels; Triton is imported on first use."""
    from ..kernels.triton import gather_scatter

    return gather_scatter


def parts(message: Tensor, features: Sequence[int]) -> list[Tensor]:
    """The tensors (batch, heads, tokens, features) of a message, as views."""
    return [part.permute(1, 2, 0, 3) for part in message.split(list(features), dim=3)]


def _move(source: Tensor, target: Tensor, source_index: Tensor | None, target_index: Tensor | None) -> None:
    found = (source if source_index is None else source.index_select(2, source_index)).to(target.dtype)
    if target_index is None:
        target.copy_(found)
    else:
        target.index_copy_(2, target_index, found)


def move(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    backend: str,
    *,
    source_index: Tensor | None = None,
    target_index: Tensor | None = None,
) -> None:
    """target[:, :, target_index] = source[:, :, source_index] for each pair, in target's dtype.

    An index of None means all tokens in order.
    """
    if backend == "eager":
        for source, target in zip(sources, targets, strict=True):
            _move(source, target, source_index, target_index)
        return
    _kernels().move(sources, targets, source_index, target_index)


def picked(sources: Sequence[Tensor], source_index: Tensor, backend: str) -> list[Tensor]:
    """source[:, :, source_index] of each, contiguous."""
    targets = [x.new_empty(*x.shape[:2], source_index.shape[0], x.shape[3]) for x in sources]
    move(sources, targets, backend, source_index=source_index)
    return targets


def own_in_slots(mine: Sequence[Tensor], plan: ExchangePlan, backend: str) -> list[Tensor]:
    """Own tokens of each tensor in their slots of a plan, with room for received ones."""
    every = [plan.empty(x) for x in mine]
    move(mine, every, backend, source_index=plan.own, target_index=plan.own_slots)
    return every


def pack(sources: Sequence[Tensor], tokens: Tensor, backend: str) -> Tensor:
    """The message with these tokens of tensors of one dtype."""
    first = sources[0]
    features = [x.shape[3] for x in sources]
    message = first.new_empty(tokens.shape[0], first.shape[0], first.shape[1], sum(features))
    if backend == "eager":
        move(sources, parts(message, features), backend, source_index=tokens)
        return message
    _kernels().pack(sources, message, tokens)
    return message


def unpack(message: Tensor, targets: Sequence[Tensor], tokens: Tensor, backend: str) -> None:
    """target[:, :, tokens] = its part of the message, for each target."""
    if backend == "eager":
        move(parts(message, [x.shape[3] for x in targets]), targets, backend, target_index=tokens)
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
    """total[:, :, tokens] = sum over ranks of their contributions, in rank order and in float32 (float64 for float64).

    totals   one or more tensors
    mine     contributions of this rank, one tensor per total
    others   message with the contributions of all other ranks
    bases    at most two lists of one tensor per total, which this rank adds too; may be the totals themselves
    table    int32 (ranks, tokens): index into each rank's contribution, or -1 for none
    tokens   int64; None means all in order
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
                found += _take(given, table[i_rank], 0)
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
    """Merges partial out and lse of all ranks by lse, into out[:, :, tokens] and lse[:, :, tokens].

    mine     out and lse over this rank's keys
    others   message with those of the other ranks; lse is stored as the bits of out's dtype
    table, tokens  as in `add`
    """
    if backend != "eager":
        _kernels().merge(out, lse, mine, others, table, tokens, rank)
        return
    width = out.shape[3]
    part, bits = parts(others, [width, others.shape[3] - width])
    # a view of a wider dtype must start at a multiple of its size, which a message does not guarantee
    part_lse = bits.clone(memory_format=torch.contiguous_format).view(lse.dtype)
    total = out.new_zeros(*out.shape[:2], len(tokens), width, dtype=lse.dtype)
    total_lse = lse.new_full((*lse.shape[:2], len(tokens)), -torch.inf)
    for i_rank, places in enumerate(table):
        given, given_lse = (mine[0], mine[1][..., None]) if i_rank == rank else (part, part_lse)
        if given.shape[2]:
            found = _take(given, places, 0).to(lse.dtype), _take(given_lse, places, -torch.inf)[..., 0]
            total, total_lse = merging.merge(total, total_lse, *found)
    out.index_copy_(2, tokens, total.to(out.dtype))
    lse.index_copy_(2, tokens, total_lse)


def _take(part: Tensor, places: Tensor, otherwise: float) -> Tensor:
    """part[:, :, places], with `otherwise` where places is -1."""
    found = part.index_select(2, places.long().clamp(min=0))
    return torch.where((places >= 0)[:, None], found, otherwise)
