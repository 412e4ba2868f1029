"""How do tokens travel between ranks? Messages of tokens packed, sent, and put where they belong.

Knows tensors (batch, heads, length, dim), index lists of tokens, how many tokens go to each rank, a process group by name.
Must not know layouts, plans of kernels or attention.

A message is contiguous and has tokens first: (tokens, batch, heads, features), one stretch a rank, in the order of ranks.
What autograd sees is one operator, `redistribute`; the others are for the bodies of operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import rows


class Flight:
    """A message under way. The tensors live until it has arrived."""

    def __init__(self, message: Tensor, into: Tensor, send: list[int], receive: list[int], group: Any) -> None:
        self.message, self.into = message, into
        self.work = dist.all_to_all_single(into, message, receive, send, group=group, async_op=True)

    def arrived(self) -> Tensor:
        """The received message; on a GPU the current stream waits, not the host."""
        self.work.wait()
        return self.into


def group_of(name: str) -> Any:
    """The process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def sent(message: Tensor, send: list[int], receive: list[int], group: Any) -> Flight:
    """Set a message on its way: send[r] tokens to each rank r, receive[r] tokens from it."""
    return Flight(message, message.new_empty(sum(receive), *message.shape[1:]), send, receive, group)


def packed(tensors: list[Tensor], tokens: Tensor, backend: str) -> Tensor:
    """The message that holds these tokens of tensors of one dtype, side by side."""
    features = [tensor.shape[3] for tensor in tensors]
    message = tensors[0].new_empty(len(tokens), *tensors[0].shape[:2], sum(features))
    parts = unpacked(message, features)
    if len(tensors) == 2:
        rows.copy_both(tensors, parts, backend, taken=tokens)
        return message
    for tensor, part in zip(tensors, parts, strict=True):
        rows.copy(tensor, part, backend, taken=tokens)
    return message


def unpacked(message: Tensor, features: list[int]) -> list[Tensor]:
    """The tensors (batch, heads, tokens, features) of a message, as views."""
    return [part.permute(1, 2, 0, 3) for part in message.split(features, dim=3)]


def joined(
    mine: Tensor, own: Tensor | None, own_slots: Tensor, received: Tensor, slots: Tensor, backend: str
) -> Tensor:
    """(batch, heads, slots, features), contiguous: `own` tokens of mine (None: all) at own_slots, received ones at slots."""
    whole = mine.new_empty(*mine.shape[:2], len(own_slots) + len(slots), mine.shape[3])
    rows.copy(mine, whole, backend, taken=own, put=own_slots)
    return rows.copy(received, whole, backend, put=slots)


def join_both(
    into: Sequence[Tensor],
    mine: Sequence[Tensor],
    own: Tensor | None,
    own_slots: Tensor,
    received: Sequence[Tensor],
    slots: Tensor,
    backend: str,
) -> None:
    """`joined` of keys and values, into two tensors."""
    rows.copy_both(mine, into, backend, taken=own, put=own_slots)
    rows.copy_both(received, into, backend, put=slots)


def add_at(total: Tensor, tokens: Tensor, part: Tensor) -> None:
    """total[:, :, tokens] += part, for tokens that are all different: no atomics, hence equal bits in every run."""
    total.index_copy_(2, tokens, total.index_select(2, tokens) + part)


def add_by_rank(
    total: Tensor, mine: tuple[Tensor, Tensor], others: tuple[Sequence[Tensor], Sequence[Tensor]], rank: int
) -> None:
    """Add what each rank gave, (tokens, values), to total in the order of ranks, this rank's own at its place."""
    for i, (tokens, values) in enumerate(zip(*others, strict=True)):
        add_at(total, *(mine if i == rank else (tokens, values)))


def words(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of float32 (or float64) values as numbers of another type, so that they can travel with it."""
    # a view must begin at a multiple of the wider type: no view of a message would do
    return values.clone(memory_format=torch.contiguous_format).view(dtype)


# ---- what autograd sees ----


@torch.library.custom_op("blocksparse_flash::redistribute", mutates_args=())
def redistribute(message: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """The message (tokens, ...) which the ranks send each other; its gradient goes the same way back."""
    return sent(message.contiguous(), send, receive, group_of(group)).arrived()


@redistribute.register_fake
def _(message: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return message.new_empty(sum(receive), *message.shape[1:])


def _save_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.group = inputs


def _send_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return redistribute(grad, ctx.receive, ctx.send, ctx.group), None, None, None


redistribute.register_autograd(_send_back, setup_context=_save_counts)
