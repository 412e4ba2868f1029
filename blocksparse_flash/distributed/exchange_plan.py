"""What does one rank send and receive, as tensors that an operator takes?

Knows index lists of tokens, the tensors of a kernel's plan, and counts. Must not know what is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# tensors of a flat ExchangePlan: seven lists, then the seven of a plan
WIDTH = 7 + 7


class ExchangePlan(NamedTuple):
    """One rank's part of an exchange, and what the kernels walk over its own and received tokens together.

    own, own_slots, sent, slots  as in routing.TokenIndices
    rows          whose queries the plan walks, of this rank's tokens
    touched       tokens of this rank that are sums or merges of what ranks give, all or those that any rank works on
    table         int32 (ranks, touched): which of a rank's results is that of the token. Of this rank's a slot, of another's
                  a place in its message; -1 is none
    plan          the tensors of a plan.Plan
    send, receive  tokens to and from each rank
    """

    own: Tensor
    own_slots: Tensor
    sent: Tensor
    slots: Tensor
    rows: Tensor
    touched: Tensor
    table: Tensor
    plan: list[Tensor]
    send: list[int]
    receive: list[int]

    def flatten(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and numbers alone: what an operator takes."""
        lists = [self.own, self.own_slots, self.sent, self.slots, self.rows, self.touched, self.table]
        return lists + self.plan, self.send + self.receive


def unflatten(tensors: list[Tensor], counts: list[int], n_ranks: int) -> tuple[list[ExchangePlan], list[Tensor]]:
    """Sides from their flat forms, one after another, and the plan behind them of rows that need no exchange, if any.

    Of the counts one more number may follow.
    """
    n_sides = len(counts) // (2 * n_ranks)
    found = []
    for i_side in range(n_sides):
        own, own_slots, sent, slots, rows, touched, table, *plan = tensors[i_side * WIDTH : (i_side + 1) * WIDTH]
        send, receive = (counts[(2 * i_side + i) * n_ranks : (2 * i_side + i + 1) * n_ranks] for i in (0, 1))
        found.append(ExchangePlan(own, own_slots, sent, slots, rows, touched, table, plan, send, receive))
    return found, tensors[n_sides * WIDTH :]
