"""What does one rank send and receive, as tensors that an operator takes?

Knows index lists of tokens, the tensors of a kernel's plan, and counts. Must not know what is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Side(NamedTuple):
    """One rank's part of an exchange, and what the kernels walk over its own and received tokens together.

    own, own_slots, sent, slots  as in traffic.Lists
    sent_places   where sent tokens are among `own`; empty if they need not be there
    plan          the tensors of a plan.Plan
    send, receive  tokens to and from each rank
    """

    own: Tensor
    own_slots: Tensor
    sent: Tensor
    slots: Tensor
    sent_places: Tensor
    plan: list[Tensor]
    send: list[int]
    receive: list[int]

    def flat(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and numbers alone: what an operator takes."""
        lists = [self.own, self.own_slots, self.sent, self.slots, self.sent_places]
        return lists + self.plan, self.send + self.receive


def sides(tensors: list[Tensor], counts: list[int], n_ranks: int) -> list[Side]:
    """Sides from their flat forms, one after another."""
    n_sides = len(counts) // (2 * n_ranks)
    width = len(tensors) // max(n_sides, 1)
    found = []
    for i_side in range(n_sides):
        own, own_slots, sent, slots, places, *plan = tensors[i_side * width : (i_side + 1) * width]
        send, receive = (counts[(2 * i_side + i) * n_ranks : (2 * i_side + i + 1) * n_ranks] for i in (0, 1))
        found.append(Side(own, own_slots, sent, slots, places, plan, send, receive))
    return found
