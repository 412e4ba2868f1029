"""How does a row that reaches everywhere attend? Its queries travel to the keys, and partial results come back.

What vLLM's decode context parallelism does for every row, and BigBird's global rows need: fetching their keys would bring all
of them to one rank. Each rank attends to its own keys with the queries that reach it; the owner merges by lse. The backward
sends q, dout, lse and delta of the merged row, from which every rank finds its share of dq, dk and dv.
Knows tensors and a Side of exchange.py; sums over ranks are in their order, in float32. Must not know layouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..merging import merge
from . import messages
from .local import attend, attend_backward, statistics
from .side import Side


class Walk(NamedTuple):
    """What the ranks have in common in a call."""

    scale: float
    backend: str
    group: Any
    rank: int


def _everywhere(mine: Tensor, queries: Side, received: Tensor, backend: str) -> Tensor:
    return messages.joined(mine, None, queries.own_slots, received, queries.slots, backend)


def send_queries(q: Tensor, queries: Side, walk: Walk) -> messages.Flight:
    """Queries on their way to the ranks whose keys they attend to."""
    message = messages.packed([q], queries.sent, walk.backend)
    return messages.sent(message, queries.send, queries.receive, walk.group)


def forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Side, flight: messages.Flight, walk: Walk
) -> tuple[Tensor, Tensor]:
    """out, lse of the shipped tokens of this rank, queries.own, in the type of lse."""
    (received,) = messages.unpacked(flight.arrived(), [q.shape[3]])
    q_all = _everywhere(q.index_select(2, queries.own), queries, received, walk.backend)
    out, lse = attend(q_all, k, v, queries.plan, walk.scale, walk.backend)
    parts = [out, messages.words(lse[..., None], q.dtype)]
    message = messages.packed(parts, queries.slots, walk.backend)
    back = messages.sent(message, queries.receive, queries.send, walk.group).arrived()
    outs, lses = messages.unpacked(back, [part.shape[3] for part in parts])
    lses = messages.words(lses, lse.dtype)[..., 0]

    total = torch.zeros_like(out[:, :, : len(queries.own)], dtype=lse.dtype)
    highest = torch.full_like(lse[:, :, : len(queries.own)], -torch.inf)
    by_rank = zip(
        queries.sent_places.split(queries.send),
        outs.split(queries.send, dim=2),
        lses.split(queries.send, dim=2),
        strict=True,
    )
    for rank, (places, part, part_lse) in enumerate(by_rank):
        if rank == walk.rank:
            mine = out.index_select(2, queries.own_slots).to(total.dtype), lse.index_select(2, queries.own_slots)
            total, highest = merge(total, highest, *mine)
            continue
        here = total.index_select(2, places), highest.index_select(2, places)
        merged, merged_lse = merge(*here, part.to(total.dtype), part_lse)
        total.index_copy_(2, places, merged)
        highest.index_copy_(2, places, merged_lse)
    return total, highest


class Backward:
    """Gradients of shipped rows: sent when made, awaited by `finish`."""

    def __init__(
        self, inputs: tuple[Tensor, Tensor], douts: tuple[Tensor, Tensor | None], lse: Tensor, queries: Side, walk: Walk
    ) -> None:
        """inputs (q, out), douts (dout, dlse or None), of all tokens of this rank."""
        q, out, dout, lse = (tensor.index_select(2, queries.own) for tensor in (*inputs, douts[0], lse))
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=3)
        if douts[1] is not None:
            delta -= douts[1].index_select(2, queries.own).masked_fill(lse == -torch.inf, 0)
        self.mine = [q, dout, messages.words(torch.stack([lse, delta], dim=3), q.dtype)]
        self.queries, self.walk = queries, walk
        message = messages.packed(self.mine, queries.sent_places, walk.backend)
        self.flight = messages.sent(message, queries.send, queries.receive, walk.group)

    def finish(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq of queries.own in the type of lse; dk and dv, which shipped rows give to the keys of this rank."""
        queries, walk, dtype = self.queries, self.walk, statistics(k)
        received = messages.unpacked(self.flight.arrived(), [part.shape[3] for part in self.mine])
        q, dout, known = (
            _everywhere(mine, queries, part, walk.backend) for mine, part in zip(self.mine, received, strict=True)
        )
        lse, delta = messages.words(known, dtype).unbind(dim=3)
        # with an output of 0 the kernels take delta from dlse
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        dq, dk, dv = attend_backward((dout, -delta), (q, k, v), (out, lse), queries.plan, walk.scale, walk.backend)
        message = messages.packed([dq], queries.slots, walk.backend)
        back = messages.sent(message, queries.receive, queries.send, walk.group)
        total = dq.new_zeros(*dq.shape[:2], len(queries.own), dq.shape[3], dtype=dtype)
        mine = torch.arange(len(queries.own), device=dq.device), dq.index_select(2, queries.own_slots)
        (parts,) = messages.unpacked(back.arrived(), [dq.shape[3]])
        others = queries.sent_places.split(queries.send), parts.split(queries.send, dim=2)
        messages.add_by_rank(total, mine, others, walk.rank)
        return total, dk, dv
