"""Pass-Q: the queries of rows that reach most keys travel to the keys, and partial results come back.

Fetching the keys of such rows, for instance the global rows of BigBird, would bring all keys to one rank. Each rank
attends to its own keys with the queries it receives, and the owner merges by lse, as in vLLM's decode context
parallelism. The backward sends q, dout, out and lse of the merged rows, from which every rank computes its share of dq,
dk and dv.

Each direction is an object with three steps, so that other work overlaps with the messages: the constructor sends,
`attend` waits, computes and sends back, `finish` waits for the answers. Sums over ranks are in rank order and in
float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import CallSpec
from . import communication, gather_scatter
from .exchange_plan import ExchangePlan
from .local_attention import attend, attend_backward


class RankContext(NamedTuple):
    """Spec, process group and rank of every call of a layer."""

    spec: CallSpec
    group: Any
    rank: int

    @property
    def backend(self) -> str:
        """The backend of the kernels that compute and of those that move rows."""
        return self.spec.backend


class _QueryExchange:
    """Sends tensors of own query rows to the ranks whose keys they need, and collects those of other ranks."""

    def __init__(self, mine: list[Tensor], queries: ExchangePlan, ranks: RankContext) -> None:
        message = gather_scatter.pack(mine, queries.sent, ranks.backend)
        self.pending = communication.all_to_all(message, queries.send, queries.receive, ranks.group)
        self.slots, self.backend = queries.slots, ranks.backend
        n_slots = queries.own_slots.shape[0] + queries.slots.shape[0]
        self.tensors = [x.new_empty(*x.shape[:2], n_slots, x.shape[3]) for x in mine]
        # overlaps with the message
        gather_scatter.move(mine, self.tensors, ranks.backend, taken=queries.own, put=queries.own_slots)

    def wait(self) -> list[Tensor]:
        gather_scatter.unpack(self.pending.wait(), self.tensors, self.slots, self.backend)
        return self.tensors


class Forward:
    """Attention of pass-Q rows. q holds all tokens of this rank."""

    def __init__(self, q: Tensor, queries: ExchangePlan, ranks: RankContext) -> None:
        self.queries, self.ranks = queries, ranks
        self.exchange = _QueryExchange([q], queries, ranks)

    def attend(self, k: Tensor, v: Tensor) -> None:
        """Attention of own and received queries to the keys of this rank."""
        queries, ranks = self.queries, self.ranks
        (q,) = self.exchange.wait()
        self.mine = out, lse = attend(q, k, v, queries.plan, ranks.spec)
        message = gather_scatter.pack([out, lse[..., None].view(out.dtype)], queries.slots, ranks.backend)
        self.pending = communication.all_to_all(message, queries.receive, queries.send, ranks.group)

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Writes the pass-Q rows of this rank, queries.touched, into out and lse of all its tokens."""
        queries, ranks = self.queries, self.ranks
        others = self.pending.wait()
        gather_scatter.merge(out, lse, self.mine, others, queries.table, queries.touched, ranks.rank, ranks.backend)


class Backward:
    """Gradients of pass-Q rows: inputs (q, out, lse), douts (dout, dlse or None) hold all tokens of this rank."""

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        douts: tuple[Tensor, Tensor | None],
        queries: ExchangePlan,
        ranks: RankContext,
    ) -> None:
        self.queries, self.ranks = queries, ranks
        q, out, lse = inputs
        of_rows = lse[..., None] if douts[1] is None else torch.stack([lse, douts[1]], dim=3)
        self.exchange = _QueryExchange([q, douts[0], out, of_rows.view(q.dtype)], queries, ranks)
        self.dtype = lse.dtype

    def attend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's keys, from own and received queries."""
        queries, ranks = self.queries, self.ranks
        q, dout, out, bits = self.exchange.wait()
        lse, *dlse = bits.view(self.dtype).unbind(dim=3)
        douts = dout, dlse[0] if dlse else None
        self.dq, dk, dv = attend_backward(douts, (q, k, v), (out, lse), queries.plan, ranks.spec)
        message = gather_scatter.pack([self.dq], queries.slots, ranks.backend)
        self.pending = communication.all_to_all(message, queries.receive, queries.send, ranks.group)
        return dk, dv

    def finish(self, dq: Tensor) -> None:
        """Writes the pass-Q rows of this rank, queries.touched, into dq of all its tokens."""
        queries, ranks = self.queries, self.ranks
        others = self.pending.wait()
        gather_scatter.add([dq], [self.dq], others, [], queries.table, queries.touched, ranks.rank, ranks.backend)
