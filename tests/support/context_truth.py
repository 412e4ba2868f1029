"""Layouts, inputs and expected results of context_cases.py, and this rank's share of a call.

Expected results are those of the reference in float64 on the whole sequence and, for bitwise comparison, those of the
same backend. They are computed before the ranks are forked, which then share them.
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
from blocksparse_flash.plan_format import TILE
from tests.support import closeness
from tests.support.forced_tiles import forced_tile

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


# layouts of single cases
NARROW = {
    "narrow": lambda n: masks.local(n, window=10),
    # the first queries attend to every tile, the others to themselves
    "wide": lambda n: BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos < 5) | (q_pos == kv_pos), n, n, block_size=16
    ),
    # the first tile of queries attends to all keys but its own, the other queries to themselves
    "elsewhere": lambda n: BlockLayout.from_predicate(
        lambda q_pos, kv_pos: torch.where(q_pos < 128, kv_pos >= 128, q_pos == kv_pos), n, n, block_size=16
    ),
}


class Whole(NamedTuple):
    """A call on the whole sequence: inputs, gradients of its results, and the results of one process.

    truth  out, lse, dq, dk, dv in float64
    same   the same, computed in the dtype of the inputs
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    truth: tuple[Tensor, ...]
    same: tuple[Tensor, ...]


def results_of_one_process(
    layout: BlockLayout, inputs: list[Tensor], douts: list[Tensor], backend: str
) -> tuple[Tensor, ...]:
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
    return Whole(
        *inputs, *douts, *(results_of_one_process(layout, inputs, douts, backend) for backend in ("reference", "eager"))
    )


def layout_by_head(n_heads: int) -> BlockLayout:
    """Two batches; the window grows with the head, and the second batch is causal."""
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
    return Whole(
        *inputs, *douts, *(results_of_one_process(layout, inputs, douts, backend) for backend in ("reference", "eager"))
    )


@cache
def in_half(name: str, heads: tuple[int, int]) -> Whole:
    """Inputs in bfloat16; `truth` in float64 from these inputs, `same` by the reference in bfloat16."""
    inputs, douts = (
        [tensor.to(torch.bfloat16) for tensor in tensors]
        for tensors in (whole(name, LENGTH, heads)[:3], whole(name, LENGTH, heads)[3:4])
    )
    dlse = whole(name, LENGTH, heads).dlse.float()
    layout = layout_of(name, LENGTH)
    wide = results_of_one_process(layout, [t.double() for t in inputs], [douts[0].double(), dlse.double()], "reference")
    same = results_of_one_process(layout, inputs, [douts[0], dlse], "reference")
    return Whole(*inputs, *douts, dlse, wide, same)


@cache
def interpreted(name: str, length: int) -> Whole:
    """Float32, with `same` by the Triton kernels; for short sequences, since their interpreter is slow."""
    wide = whole(name, length, (2, 1))
    inputs, douts = [t.float() for t in wide[:3]], [t.float() for t in wide[3:5]]
    # several GPUs have no tiles of 64 x 64, which would sum in another order
    with forced_tile(TILE):
        same = results_of_one_process(layout_of(name, length), inputs, douts, "triton")
    return Whole(*inputs, *douts, wide.truth, same)


class Traffic:
    """Counts the calls and bytes that this rank sends to others; the message of an all-gather counts once."""

    def __init__(self) -> None:
        self.n_bytes, self.n_calls, self._all_to_all, self._isend = 0, 0, dist.all_to_all_single, dist.isend
        self._all_gather = communication._all_gather

    def __enter__(self) -> Traffic:
        dist.all_to_all_single, dist.isend = self._counted_all_to_all, self._counted_isend
        communication._all_gather = self._counted_all_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.isend = self._all_to_all, self._isend
        communication._all_gather = self._all_gather

    def _counted_all_gather(self, into, message, group=None, async_op=False):
        self.n_bytes += message.numel() * message.element_size()
        self.n_calls += 1
        return self._all_gather(into, message, group=group, async_op=async_op)

    def _counted_isend(self, tensor, **options):
        self.n_bytes += tensor.numel() * tensor.element_size()
        self.n_calls += 1
        return self._isend(tensor, **options)

    def _counted_all_to_all(self, into, message, receive, send, group=None, async_op=False):
        assert sum(send) == len(message) and sum(receive) == len(into)
        row = message[0].numel() if len(message) else 0
        self.n_bytes += (sum(send) - send[dist.get_rank(group)]) * row * message.element_size()
        self.n_calls += 1
        return self._all_to_all(into, message, receive, send, group=group, async_op=async_op)


def sharded(plan: bd.ContextPlan, case: Whole, **options) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of this rank's tokens."""
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
    dout, dlse = (plan.shard(tensor, dim=2) for tensor in (case.dout, case.dlse))
    out, lse = bd.attention_with_lse(*leaves, plan, **options)
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse.masked_fill(lse == -torch.inf, 0)])
    return out.detach(), lse.detach(), *grads


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_equal_to_one_process(
    plan: bd.ContextPlan, case: Whole, *, has_exact_rows: bool, repeats: bool = True
) -> None:
    """Raises unless all results are accurate and bitwise equal in two runs.

    has_exact_rows  out, lse and dq must be bitwise those of one process
    repeats         whether there is a second run
    """
    found = sharded(plan, case)
    for name, actual, *expected in zip(NAMES, found, case.truth, case.same, strict=True):
        truth, same = (plan.shard(tensor, dim=2) for tensor in expected)
        if name in ("out", "lse", "dq") and has_exact_rows:
            assert torch.equal(actual, same), f"{name} differs bitwise from one process: {(actual - same).abs().max()}"
        if actual.numel():
            closeness.assert_as_accurate(actual, [truth, same], truth, name=name)
    again = sharded(plan, case) if repeats else found
    for name, first, second in zip(NAMES, found, again, strict=True):
        assert torch.equal(first, second), f"{name} differs between two runs"


def uneven(n_ranks: int, n_tiles: int) -> list[int]:
    """Owner of each tile: rank 0 holds none, rank r takes r tiles in turn, from the last tile on."""
    turns = [rank for rank in range(1, n_ranks) for _ in range(rank)]
    return [turns[tile % len(turns)] for tile in reversed(range(n_tiles))]


def orders(n_ranks: int, n_tiles: int) -> dict[str, str | list[int]]:
    return {name: name for name in ("contiguous", "zigzag", "balanced", "tuned")} | {"uneven": uneven(n_ranks, n_tiles)}
