"""ExchangePlan: index lists and kernel plan of one rank's exchange, and their flat form for operators."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# tensors of a flattened ExchangePlan: seven lists, and the seven tensors of a kernel plan
WIDTH = 7 + 7


class ExchangePlan(NamedTuple):
    """What one rank sends and receives, and the kernel plan over its own and received tokens.

    own, own_slots, sent, slots  see routing.TokenIndices
    rows          this rank's tokens whose queries the kernel plan covers
    touched       this rank's tokens whose result is a sum or merge over ranks
    table         int32 (ranks, touched): index of each touched token in a rank's result, a slot for this rank and a
                  position in the message for another; -1 if the rank contributes nothing
    plan          the tensors of a plan.Plan
    send, receive  number of tokens to and from each rank
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
        """(tensors, counts), the form that operators take."""
        lists = [self.own, self.own_slots, self.sent, self.slots, self.rows, self.touched, self.table]
        return lists + self.plan, self.send + self.receive


def unflatten(tensors: list[Tensor], counts: list[int], n_ranks: int) -> tuple[list[ExchangePlan], list[Tensor]]:
    """The inverse of `flatten` for concatenated plans; tensors behind them, the plan of local rows, are returned as
    they are.

    counts may end with one more number, which is ignored.
    """
    n_sides = len(counts) // (2 * n_ranks)
    found = []
    for i_side in range(n_sides):
        own, own_slots, sent, slots, rows, touched, table, *plan = tensors[i_side * WIDTH : (i_side + 1) * WIDTH]
        send, receive = (counts[(2 * i_side + i) * n_ranks : (2 * i_side + i + 1) * n_ranks] for i in (0, 1))
        found.append(ExchangePlan(own, own_slots, sent, slots, rows, touched, table, plan, send, receive))
    return found, tensors[n_sides * WIDTH :]
