"""How does a row that reaches everywhere attend? Its queries travel to the keys, and partial results come back.

What vLLM's decode context parallelism does for every row, and BigBird's global rows need: fetching their keys would bring all
of them to one rank. Each rank attends to its own keys with the queries that reach it; the owner merges by lse. The backward
sends q, dout, out and lse of the merged row, from which every rank finds its share of dq, dk and dv.
Knows tensors and a Side of exchange.py; sums over ranks are in their order, in float32. Must not know layouts.

Either direction is an object with two steps, so that other work can be launched between them while messages travel: made, it
has sent; `attend` awaits that message, computes and sends what came out; `finish` awaits the answer of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import messages, rows
from .local import attend, attend_backward
from .side import Side


class Walk(NamedTuple):
    """What the ranks have in common in every call of a layer."""

    backend: str
    group: Any
    rank: int


class _Everywhere:
    """These tensors of own queries on their way to the ranks whose keys they attend to, and beside those that come here."""

    def __init__(self, mine: list[Tensor], queries: Side, walk: Walk) -> None:
        message = rows.pack(mine, queries.sent, walk.backend)
        self.flight = messages.sent(message, queries.send, queries.receive, walk.group)
        self.slots, self.backend = queries.slots, walk.backend
        n_slots = queries.own_slots.shape[0] + queries.slots.shape[0]
        self.tensors = [x.new_empty(*x.shape[:2], n_slots, x.shape[3]) for x in mine]
        # while the message travels
        rows.move(mine, self.tensors, walk.backend, taken=queries.own, put=queries.own_slots)

    def arrived(self) -> list[Tensor]:
        rows.unpack(self.flight.arrived(), self.tensors, self.slots, self.backend)
        return self.tensors


class Forward:
    """Attention of shipped rows."""

    def __init__(self, q: Tensor, queries: Side, walk: Walk) -> None:
        """q of all tokens of this rank."""
        self.queries, self.walk = queries, walk
        self.everywhere = _Everywhere([q], queries, walk)

    def attend(self, k: Tensor, v: Tensor, scale: float) -> None:
        """Of every query that came, to the keys of this rank."""
        queries, walk = self.queries, self.walk
        (q,) = self.everywhere.arrived()
        self.mine = out, lse = attend(q, k, v, queries.plan, scale, walk.backend)
        message = rows.pack([out, lse[..., None].view(out.dtype)], queries.slots, walk.backend)
        self.flight = messages.sent(message, queries.receive, queries.send, walk.group)

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Writes the shipped tokens of this rank, queries.touched, to out and lse of all its tokens."""
        queries, walk = self.queries, self.walk
        others = self.flight.arrived()
        rows.merge(out, lse, self.mine, others, queries.table, queries.touched, walk.rank, walk.backend)


class Backward:
    """Gradients of shipped rows."""

    def __init__(
        self, inputs: tuple[Tensor, Tensor, Tensor], douts: tuple[Tensor, Tensor | None], queries: Side, walk: Walk
    ) -> None:
        """inputs (q, out, lse), douts (dout, dlse or None), of all tokens of this rank."""
        self.queries, self.walk = queries, walk
        q, out, lse = inputs
        of_rows = lse[..., None] if douts[1] is None else torch.stack([lse, douts[1]], dim=3)
        self.everywhere = _Everywhere([q, douts[0], out, of_rows.view(q.dtype)], queries, walk)
        self.dtype = lse.dtype

    def attend(self, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """dk and dv, which the queries that came give to the keys of this rank."""
        queries, walk = self.queries, self.walk
        q, dout, out, bits = self.everywhere.arrived()
        lse, *dlse = bits.view(self.dtype).unbind(dim=3)
        douts = dout, dlse[0] if dlse else None
        self.dq, dk, dv = attend_backward(douts, (q, k, v), (out, lse), queries.plan, scale, walk.backend)
        message = rows.pack([self.dq], queries.slots, walk.backend)
        self.flight = messages.sent(message, queries.receive, queries.send, walk.group)
        return dk, dv

    def finish(self, dq: Tensor) -> None:
        """Writes the shipped tokens of this rank, queries.touched, to dq of all its tokens."""
        queries, walk = self.queries, self.walk
        others = self.flight.arrived()
        rows.add([dq], [self.dq], others, [], queries.table, queries.touched, walk.rank, walk.backend)
