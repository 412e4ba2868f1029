"""How do tokens move and add up within a rank? By a kernel where the attention is one, else by PyTorch.

Knows tensors (batch, heads, tokens, features), index lists, the name of a backend. Must not know what a message is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .local import statistics


def copy(
    source: Tensor, target: Tensor, backend: str, *, taken: Tensor | None = None, put: Tensor | None = None
) -> Tensor:
    """target[:, :, put] = source[:, :, taken], in target's type; None is all tokens, in order. Returns target."""
    if backend != "eager":
        from ..kernels import rows

        rows.copy(source, target, taken, put)
        return target
    found = (source if taken is None else source.index_select(2, taken)).to(target.dtype)
    return target.copy_(found) if put is None else target.index_copy_(2, put, found)


def copy_both(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    backend: str,
    *,
    taken: Tensor | None = None,
    put: Tensor | None = None,
) -> None:
    """`copy` of two tensors of as many tokens and heads, such as keys and values, in one launch."""
    if backend != "eager" and all(target.numel() for target in targets):
        from ..kernels import rows

        rows.copy(sources[0], targets[0], taken, put, (sources[1], targets[1]))
        return
    for source, target in zip(sources, targets, strict=True):
        copy(source, target, backend, taken=taken, put=put)


def picked_both(sources: Sequence[Tensor], taken: Tensor, backend: str) -> list[Tensor]:
    """`picked` of two tensors of as many tokens and heads, in one launch."""
    targets = [x.new_empty(*x.shape[:2], len(taken), x.shape[3]) for x in sources]
    copy_both(sources, targets, backend, taken=taken)
    return targets


def picked(source: Tensor, taken: Tensor, backend: str) -> Tensor:
    """source[:, :, taken], contiguous."""
    return copy(source, source.new_empty(*source.shape[:2], len(taken), source.shape[3]), backend, taken=taken)


def add(
    total: Tensor,
    mine: Tensor,
    others: Tensor,
    bases: list[Tensor],
    table: Tensor,
    tokens: Tensor | None,
    rank: int,
    backend: str,
) -> None:
    """total[:, :, tokens] = what each rank gave, in the order of ranks, summed in float32 (float64 for float64).

    mine, others  what this rank and all others gave, of which table[r] names rank r's; -1 for nothing
    bases    at most two of total's shape, which this rank adds too; one of them may be total itself
    table    int32 (ranks, tokens)
    tokens   int64; None is all, in order
    """
    if backend != "eager":
        from ..kernels import rows

        rows.add(total, mine, others, bases, table, tokens, rank)
        return
    found = total.new_zeros(*total.shape[:2], table.shape[1], total.shape[3], dtype=statistics(total))
    for i_rank, places in enumerate(table.long()):
        if i_rank == rank:
            for base in bases:
                found += base if tokens is None else base.index_select(2, tokens)
        part = mine if i_rank == rank else others
        if part.shape[2]:
            part = part.index_select(2, places.clamp(min=0))
            found += torch.where((places >= 0)[:, None], part, part.new_zeros(()))
    copy(found, total, backend, put=tokens)
