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

import torch
from torch import Tensor

from ..kernels.inputs import BackwardInputs
from . import gather_scatter
from .communication import AllToAll
from .exchange_plan import ExchangePlan
from .local_attention import RankContext, attend, attend_backward


class _PassQ:
    """Sends tensors of own query rows to the ranks whose keys they need, and collects those of other ranks."""

    def __init__(self, mine: list[Tensor], queries: ExchangePlan, context: RankContext) -> None:
        self.queries, self.context = queries, context
        message = gather_scatter.pack(mine, queries.sent, context.backend)
        self.pending = AllToAll(message, queries.send, queries.receive, context.group)
        # overlaps with the message
        self.tensors = gather_scatter.own_in_slots(mine, queries, context.backend)

    def _received(self) -> list[Tensor]:
        """The tensors of own and received rows."""
        gather_scatter.unpack(self.pending.wait(), self.tensors, self.queries.slots, self.context.backend)
        return self.tensors

    def _send_back(self, results: list[Tensor]) -> None:
        message = gather_scatter.pack(results, self.queries.slots, self.context.backend)
        self.pending = AllToAll(message, self.queries.receive, self.queries.send, self.context.group)


class Forward(_PassQ):
    """Attention of pass-Q rows. q holds all tokens of this rank."""

    def __init__(self, q: Tensor, queries: ExchangePlan, context: RankContext) -> None:
        super().__init__([q], queries, context)

    def attend(self, k: Tensor, v: Tensor) -> None:
        """Attention of own and received queries to the keys of this rank."""
        (q,) = self._received()
        self.mine = out, lse = attend(q, k, v, self.queries.plan, self.context.spec)
        self._send_back([out, lse[..., None].view(out.dtype)])

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Writes the pass-Q rows of this rank, queries.touched, into out and lse of all its tokens."""
        table, touched, others = self.queries.table, self.queries.touched, self.pending.wait()
        gather_scatter.merge(out, lse, self.mine, others, table, touched, self.context.rank, self.context.backend)


class Backward(_PassQ):
    """Gradients of pass-Q rows. The inputs hold all tokens of this rank."""

    def __init__(self, inputs: BackwardInputs, queries: ExchangePlan, context: RankContext) -> None:
        lse, dlse = inputs.lse, inputs.dlse
        of_rows = lse[..., None] if dlse is None else torch.stack([lse, dlse], dim=3)
        super().__init__([inputs.q, inputs.dout, inputs.out, of_rows.view(inputs.q.dtype)], queries, context)
        self.inputs = inputs

    def attend(self) -> tuple[Tensor, Tensor]:
        """dk and dv of this rank's keys, from own and received queries."""
        q, dout, out, bits = self._received()
        lse, *dlse = bits.view(self.inputs.lse.dtype).unbind(dim=3)
        inputs = BackwardInputs(dout, dlse[0] if dlse else None, q, self.inputs.k, self.inputs.v, out, lse)
        self.dq, dk, dv = attend_backward(inputs, self.queries.plan, self.context.spec)
        self._send_back([self.dq])
        return dk, dv

    def finish(self, dq: Tensor) -> None:
        """Writes the pass-Q rows of this rank, queries.touched, into dq of all its tokens."""
        table, touched, others = self.queries.table, self.queries.touched, self.pending.wait()
        gather_scatter.add([dq], [self.dq], others, [], table, touched, self.context.rank, self.context.backend)
