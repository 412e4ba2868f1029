"""Ulysses: all-to-all from tokens to heads, attention of one process over all tokens, all-to-all back.

DeepSpeed-Ulysses (Jacobs et al., 2023, section 3.1), for any ratio of grouped heads and any shard sizes, as long as the
number of ranks divides the KV heads. Two ways to send:

    direct  each rank holds one long contiguous range. Heads travel in chunks, straight from the tensors to where
            the kernels read them, without copies, while other chunks are computed
    packed  otherwise. One message carries q, k and v, and one carries out: see all_to_all.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..kernels.inputs import BackwardInputs
from .all_to_all import to_heads, to_tokens
from .communication import GroupedAllToAll, exchanged
from .exchange_plan import N_PLAN
from .local_attention import (
    accumulator_dtype,
    attend,
    attend_backward,
    cat_heads,
    chunk_heads,
    chunk_plans,
    rank_context,
)
from .operators import QKV, Operators, Scheme

# chunks in flight ahead of the one being computed
PREFETCH = 2
# by head and batch, the part of each rank
Parts = list[list[Tensor]]


class Ulysses(Scheme):
    """The scheme behind "ulysses". lse and what is kept are of this rank's heads and all tokens.

    tensors  kernel plan of this rank's heads; then ContextPlan's restore and rearrange, unless tokens are in order
    counts   tokens of each rank
    packs    True: one packed message, and n_chunks is 1; False: direct messages, for tokens in order
    """

    NAME = "context_ulysses"
    OPTIONS = "float scale, SymInt n_chunks, bool packs, str group, str backend, bool deterministic"

    def __init__(self, tensors: list[Tensor], counts: list[int], *options: Any) -> None:
        super().__init__(tensors, counts, *options)
        scale, n_chunks, self.packs, group, backend, deterministic = options
        self.context, self.sizes = rank_context(scale, group, backend, deterministic), counts
        self.plans = chunk_plans(tensors[:N_PLAN], n_chunks)
        orders: Sequence[Tensor | None] = tensors[N_PLAN:] or (None, None)
        self.restore, self.rearrange = orders
        self.send = partial(exchanged, group=self.context.group)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        if self.packs:
            q_all, k_all, v_all = to_heads([q, k, v], self.sizes, self.restore, self.send)
            out_all, lse = attend(q_all, k_all, v_all, self.plans[0], self.context.spec)
            (out,) = to_tokens([out_all], self.sizes, q.shape[2], self.rearrange, self.send)
            return out, lse, [q_all, k_all, v_all, out_all.contiguous()]
        local = [x.contiguous() for x in (q, k, v)]
        whole = [_empty_for_all_tokens(x, self.sizes) for x in local]
        of_q, of_k, of_v = (chunk_heads(x, len(self.plans)) for x in whole)
        out, outs, lses = q.new_empty(*q.shape[:3], v.shape[3]), [], []

        def compute(i: int) -> list[Tensor]:
            part, lse = attend(of_q[i], of_k[i], of_v[i], self.plans[i], self.context.spec)
            outs.append(part.contiguous())
            lses.append(lse)
            return outs[-1:]

        self._pipeline(local, whole, compute, [out])
        return out, cat_heads(lses), [*whole, *outs]

    @staticmethod
    def saved(inputs: QKV, out: Tensor, lse: Tensor, kept: list[Tensor]) -> list[Tensor]:
        return [*kept, lse]

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: list[Tensor]) -> QKV:
        q_all, k_all, v_all, *outs, lse = saved
        if self.packs:
            (dout_all,) = to_heads([dout], self.sizes, self.restore, self.send)
            inputs = BackwardInputs(dout_all, dlse, q_all, k_all, v_all, outs[0], lse)
            found = attend_backward(inputs, self.plans[0], self.context.spec)
            dq, dk, dv = to_tokens(found, self.sizes, dout.shape[2], self.rearrange, self.send)
            return dq, dk, dv
        dout, n_chunks = dout.contiguous(), len(self.plans)
        dout_all = _empty_for_all_tokens(dout, self.sizes)
        of_dout, of_q, of_k, of_v, of_lse = (chunk_heads(x, n_chunks) for x in (dout_all, q_all, k_all, v_all, lse))
        of_dlse = (None,) * n_chunks if dlse is None else chunk_heads(dlse, n_chunks)

        def compute(i: int) -> list[Tensor]:
            inputs = BackwardInputs(of_dout[i], of_dlse[i], of_q[i], of_k[i], of_v[i], outs[i], of_lse[i])
            return [x.contiguous() for x in attend_backward(inputs, self.plans[i], self.context.spec)]

        dq, dk, dv = grads = _empty_for_own_tokens((q_all, k_all, v_all), len(self.sizes), dout.shape[2])
        self._pipeline([dout], [dout_all], compute, grads)
        return dq, dk, dv

    def _pipeline(
        self,
        local: list[Tensor],
        whole: list[Tensor],
        compute: Callable[[int], list[Tensor]],
        results: Sequence[Tensor],
    ) -> None:
        """Receives, computes and returns heads chunk by chunk, without packing.

        local, whole  contiguous tensors of all heads of own tokens, and buffers for own heads of all tokens
        compute       chunk -> its results, contiguous tensors of own heads of all tokens
        results       buffers for all heads of own tokens, one for each result
        """
        n_ranks, n_chunks, group = len(self.sizes), len(self.plans), self.context.group
        sent, received = [_by_head(x, n_ranks) for x in local], [_by_token(x, self.sizes) for x in whole]
        returned = [_by_head(x, n_ranks) for x in results]

        def receive(i: int) -> GroupedAllToAll:
            return GroupedAllToAll(_chunk(sent, i, n_chunks), _chunk(received, i, n_chunks), group)

        coming, going = [receive(i) for i in range(min(PREFETCH, n_chunks))], []
        for i in range(n_chunks):
            if i + PREFETCH < n_chunks:
                coming.append(receive(i + PREFETCH))
            coming[i].wait()
            parts = [_by_token(x, self.sizes) for x in compute(i)]
            going.append(GroupedAllToAll(_chunk(parts, 0, 1), _chunk(returned, i, n_chunks), group))
        for message in going:
            message.wait()

    @staticmethod
    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        _, sizes, _, n_chunks, *_ = arguments
        whole = [_empty_for_all_tokens(x, sizes) for x in (q, k, v)]
        batch, heads, length, _ = whole[0].shape
        lse = q.new_empty(batch, heads, length, dtype=accumulator_dtype(q))
        outs = [q.new_empty(batch, heads // n_chunks, length, v.shape[3]) for _ in range(n_chunks)]
        return q.new_empty(*q.shape[:3], v.shape[3]), lse, [*whole, *outs]

    @staticmethod
    def fake_backward(dout: Tensor, dlse: Tensor | None, saved: list[Tensor], *arguments: Any) -> QKV:
        _, sizes, *_ = arguments
        return _empty_for_own_tokens(saved[:3], len(sizes), dout.shape[2])


def _empty_for_all_tokens(x: Tensor, sizes: list[int]) -> Tensor:
    """Buffer for this rank's heads of all tokens, from a tensor with all heads."""
    return x.new_empty(x.shape[0], x.shape[1] // len(sizes), sum(sizes), x.shape[3])


def _empty_for_own_tokens(whole: Sequence[Tensor], n_ranks: int, n_local: int) -> QKV:
    """Buffers for all heads of this rank's tokens, from three tensors with its heads of all tokens."""
    q, k, v = (x.new_empty(x.shape[0], x.shape[1] * n_ranks, n_local, x.shape[3]) for x in whole)
    return q, k, v


def _by_head(local: Tensor, n_ranks: int) -> Parts:
    """Of contiguous (batch, heads, tokens, dim): for each head of a rank and batch entry, that head of each rank."""
    share, heads_of = local.shape[1] // n_ranks, [x.unbind() for x in local.unbind()]
    return [list(heads[i::share]) for i in range(share) for heads in heads_of]


def _by_token(whole: Tensor, sizes: list[int]) -> Parts:
    """Of contiguous (batch, heads, all tokens, dim): for each head and batch entry, the tokens of each rank."""
    batch, heads = whole.shape[:2]
    # one call makes all views
    parts, n_ranks = whole.flatten(0, 2).split_with_sizes(sizes * (batch * heads)), len(sizes)
    places = (n_ranks * (entry * heads + head) for head in range(heads) for entry in range(batch))
    return [list(parts[place : place + n_ranks]) for place in places]


def _chunk(tensors: list[Parts], i: int, n_chunks: int) -> Parts:
    """The parts of one chunk of the heads of each tensor."""
    return [part for x in tensors for part in x[i * len(x) // n_chunks : (i + 1) * len(x) // n_chunks]]


attention = Operators(Ulysses)
