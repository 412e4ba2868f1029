"""Layouts, inputs and expected results of context_cases.py, and this rank's share of a call.

The truth is the reference in float64 on the whole sequence, and the same backend for equal bits. It is computed before
the ranks are forked, so that they share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention_with_lse
from blocksparse_flash import distributed as bd
from blocksparse_flash.distributed import communication
from tests.support import closeness

# seven tiles of 128, the last one ragged; no number of ranks divides them
LENGTH = 820
HEAD_DIM, V_HEAD_DIM = 8, 12

LAYOUTS: dict[str, Callable[[int], BlockLayout]] = {
    "local": lambda n: masks.local(n, window=100),
    "butterfly": lambda n: masks.butterfly(n, block_size=64),
    "random": lambda n: masks.random(n, blocks_per_row=2, seed=3),
    "bigbird": lambda n: masks.bigbird(n, seed=4, window_blocks=1, random_blocks=1, global_blocks=1),
    "global": lambda n: masks.global_tokens(n, tokens=5) | masks.local(n, window=0),
    "causal": masks.causal,
    "documents": lambda n: masks.documents([0, 300, 310, 700, n], causal=True, block_size=32),
}


# of interpreted() alone
NARROW = {
    "narrow": lambda n: masks.local(n, window=10),
    # the first queries reach every tile, the others their own
    "wide": lambda n: BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos < 5) | (q_pos == kv_pos), n, n, block_size=16
    ),
    # the first tile of queries reaches all keys but its own, the others their own alone
    "elsewhere": lambda n: BlockLayout.from_predicate(
        lambda q_pos, kv_pos: torch.where(q_pos < 128, kv_pos >= 128, q_pos == kv_pos), n, n, block_size=16
    ),
}


class Whole(NamedTuple):
    """A call on the whole sequence: inputs, gradients of its results, and what one process makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    # out, lse, dq, dk, dv
    truth: tuple[Tensor, ...]
    same: tuple[Tensor, ...]


def called(layout: BlockLayout, inputs: list[Tensor], douts: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out, lse = attention_with_lse(*leaves, layout, backend=backend)
    grads = torch.autograd.grad([out, lse], leaves, [douts[0], douts[1].masked_fill(lse == -torch.inf, 0)])
    return out.detach(), lse.detach(), *grads


@cache
def layout_of(name: str, length: int) -> BlockLayout:
    return (LAYOUTS | NARROW)[name](length)


@cache
def whole(name: str, length: int, heads: tuple[int, int], batch: int = 1) -> Whole:
    generator = torch.Generator().manual_seed(len(name) + length)

    def draw(n_heads: int, *dim: int) -> Tensor:
        return torch.randn(batch, n_heads, length, *dim, generator=generator, dtype=torch.float64)

    inputs = [draw(heads[0], HEAD_DIM), draw(heads[1], HEAD_DIM), draw(heads[1], V_HEAD_DIM)]
    douts = [draw(heads[0], V_HEAD_DIM), draw(heads[0])]
    layout = layout_of(name, length)
    return Whole(*inputs, *douts, *(called(layout, inputs, douts, backend) for backend in ("reference", "eager")))


def layout_by_head(n_heads: int) -> BlockLayout:
    """Two batches; head h sees further than head h - 1, the second batch only what comes before."""
    return BlockLayout.from_predicate(
        lambda batch, head, q_pos, kv_pos: ((q_pos - kv_pos).abs() <= 60 * head) & ((batch == 0) | (kv_pos <= q_pos)),
        LENGTH,
        LENGTH,
        block_size=64,
        heads=n_heads,
        batch=2,
    )


@cache
def by_head(n_ranks: int) -> Whole:
    case = whole("local", LENGTH, (2 * n_ranks, n_ranks), batch=2)
    inputs, douts = list(case[:3]), list(case[3:5])
    layout = layout_by_head(2 * n_ranks)
    return Whole(*inputs, *douts, *(called(layout, inputs, douts, backend) for backend in ("reference", "eager")))


@cache
def in_half(name: str, heads: tuple[int, int]) -> Whole:
    """Inputs in bfloat16; the truth in float64 from the rounded inputs, and the reference's own in bfloat16."""
    inputs, douts = (
        [tensor.to(torch.bfloat16) for tensor in tensors]
        for tensors in (whole(name, LENGTH, heads)[:3], whole(name, LENGTH, heads)[3:4])
    )
    dlse = whole(name, LENGTH, heads).dlse.float()
    layout = layout_of(name, LENGTH)
    wide = called(layout, [t.double() for t in inputs], [douts[0].double(), dlse.double()], "reference")
    same = called(layout, inputs, [douts[0], dlse], "reference")
    return Whole(*inputs, *douts, dlse, wide, same)


@cache
def interpreted(name: str, length: int) -> Whole:
    """Small, in float32: the interpreter is slow."""
    wide = whole(name, length, (2, 1))
    inputs, douts = [t.float() for t in wide[:3]], [t.float() for t in wide[3:5]]
    return Whole(*inputs, *douts, wide.truth, called(layout_of(name, length), inputs, douts, "triton"))


class Traffic:
    """Counts calls and bytes that this rank sends to others; the message of an all-gather counts once."""

    def __init__(self) -> None:
        self.n_bytes, self.n_calls, self._inner, self._isend = 0, 0, dist.all_to_all_single, dist.isend
        self._gathers = communication._all_gather

    def __enter__(self) -> Traffic:
        dist.all_to_all_single, dist.isend = self._counting, self._counting_one
        communication._all_gather = self._counting_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.isend = self._inner, self._isend
        communication._all_gather = self._gathers

    def _counting_gather(self, into, message, group=None, async_op=False):
        self.n_bytes += message.numel() * message.element_size()
        self.n_calls += 1
        return self._gathers(into, message, group=group, async_op=async_op)

    def _counting_one(self, tensor, **options):
        self.n_bytes += tensor.numel() * tensor.element_size()
        self.n_calls += 1
        return self._isend(tensor, **options)

    def _counting(self, into, message, receive, send, group=None, async_op=False):
        assert sum(send) == len(message) and sum(receive) == len(into)
        row = message[0].numel() if len(message) else 0
        self.n_bytes += (sum(send) - send[dist.get_rank(group)]) * row * message.element_size()
        self.n_calls += 1
        return self._inner(into, message, receive, send, group=group, async_op=async_op)


def sharded(plan: bd.ContextPlan, case: Whole, **options) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of this rank's tokens."""
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
    dout, dlse = (plan.shard(tensor, dim=2) for tensor in (case.dout, case.dlse))
    out, lse = bd.attention_with_lse(*leaves, plan, **options)
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse.masked_fill(lse == -torch.inf, 0)])
    return out.detach(), lse.detach(), *grads


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_equal_to_one_process(
    plan: bd.ContextPlan, case: Whole, *, rows_are_whole: bool, repeats: bool = True
) -> None:
    found = sharded(plan, case)
    for name, actual, *expected in zip(NAMES, found, case.truth, case.same, strict=True):
        truth, same = (plan.shard(tensor, dim=2) for tensor in expected)
        if name in ("out", "lse", "dq") and rows_are_whole:
            assert torch.equal(actual, same), (
                f"{name} is not bitwise that of one process: {(actual - same).abs().max()}"
            )
        if actual.numel():
            closeness.assert_as_accurate(actual, [truth, same], truth, name=name)
    again = sharded(plan, case) if repeats else found
    for name, first, second in zip(NAMES, found, again, strict=True):
        assert torch.equal(first, second), f"{name} differs between two runs"


def uneven(n_ranks: int, n_tiles: int) -> list[int]:
    """Rank 0 holds nothing, the others shares of 1, 2, ... in turn, the last tile first."""
    turns = [rank for rank in range(1, n_ranks) for _ in range(rank)]
    return [turns[tile % len(turns)] for tile in reversed(range(n_tiles))]


def orders(n_ranks: int, n_tiles: int) -> dict[str, str | list[int]]:
    return {name: name for name in ("contiguous", "zigzag", "balanced", "tuned")} | {"uneven": uneven(n_ranks, n_tiles)}
