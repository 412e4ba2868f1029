"""Pass-KV: the keys and values that other ranks need travel to their queries, as one opaque operator.

    forward     sends k and v of tokens that others need and receives those this rank needs. Each row is then computed
                whole, tile by tile as in one process with tiles of 128 x 128, so that out and dq equal those of one
                process (up to rounding for rows that a kernel splits)
    backward    returns dk and dv of received tokens to their owners, which add them in rank order and in float32

This is scheme="exchange". With scheme="all_gather" every rank sends all its keys once, by that collective; the rest is
the same. Rows that need no received keys are computed while messages travel, if there are many. Heads are split into
chunks with a message each, so that one chunk travels while another is computed. The waits are inside the operator,
where neither autograd nor a compiler can move them. Rows that reach most keys may use pass_q.py instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.inputs import BackwardInputs
from . import gather_scatter, pass_q
from .communication import AllGather, AllToAll, process_group_of
from .exchange_plan import ExchangePlan, unflatten
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


class PassKV(Scheme):
    """The scheme behind "exchange" and "all_gather".

    tensors, counts  flattened ExchangePlans: of keys, and of pass-Q queries if there are any; the kernel plan of local
                     rows; the slot of the first own token if own gradients are summed in place, otherwise -1
    keeps    True: own and received keys and values are kept for the backward; False: received again
    gathers  True: every rank receives all keys, by an all-gather
    """

    NAME = "context_pass_kv"
    OPTIONS = "float scale, SymInt n_chunks, bool keeps, bool gathers, str group, str backend, bool deterministic"

    def __init__(self, tensors: list[Tensor], counts: list[int], *options: Any) -> None:
        super().__init__(tensors, counts, *options)
        scale, n_chunks, self.keeps, gathers, group, backend, deterministic = options
        self.context = rank_context(scale, group, backend, deterministic)
        (self.keys, *queries), self.local_plan = unflatten(tensors, counts, dist.get_world_size(self.context.group))
        self.queries = queries[0] if queries else None
        self.plans = chunk_plans(self.keys.plan, n_chunks)
        self.first_own_slot = counts[-1]
        # tokens of each rank for an all-gather; slots of the tokens of a message
        self.sizes: list[int] | None = None
        self.slots = self.keys.slots
        if gathers:
            self.sizes, self.slots = _gathered(self.keys, self.context.rank)

    def send_kv(self, k: Tensor, v: Tensor) -> Sequence[AllToAll | AllGather]:
        """Starts one message per chunk, (tokens, batch, heads of a chunk, features of k and v)."""
        keys, context, n_chunks = self.keys, self.context, len(self.plans)
        chunks = list(zip(chunk_heads(k, n_chunks), chunk_heads(v, n_chunks), strict=True))
        if self.sizes is not None:
            sizes = self.sizes
            own = (gather_scatter.pack(kv, keys.own, context.backend) for kv in chunks)
            return [AllGather(message, sizes, context.group) for message in own]
        messages = (gather_scatter.pack(kv, keys.sent, context.backend) for kv in chunks)
        return [AllToAll(message, keys.send, keys.receive, context.group) for message in messages]

    def own_kv_in_slots(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Own keys and values in their slots, with room for received ones."""
        return gather_scatter.own_in_slots([k, v], self.keys, self.context.backend)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        keys, spec, backend, n_chunks = self.keys, self.context.spec, self.context.backend, len(self.plans)
        queries = None if self.queries is None else pass_q.Forward(q, self.queries, self.context)
        pending = self.send_kv(k, v)
        # overlaps with the messages: work that needs none of them comes first
        kept = self.own_kv_in_slots(k, v) if self.keeps else []
        if self.local_plan:
            out, lse = attend(q, k, v, self.local_plan, spec)
        if queries is not None:
            queries.attend(k, v)
        outs, lses = [], []
        of_q, of_k, of_v = (chunk_heads(x, n_chunks) for x in (q, *(kept or (k, v))))
        for i, (plan, message) in enumerate(zip(self.plans, pending, strict=True)):
            k_all, v_all = (of_k[i], of_v[i]) if kept else self.own_kv_in_slots(of_k[i], of_v[i])
            gather_scatter.unpack(message.wait(), [k_all, v_all], self.slots, backend)
            rows = gather_scatter.picked([of_q[i]], keys.rows, backend)[0] if self.local_plan else of_q[i]
            out_rows, lse_rows = attend(rows, k_all, v_all, plan, spec)
            outs.append(out_rows)
            lses.append(lse_rows)
        if self.local_plan:
            for i, into in enumerate(
                zip(chunk_heads(out, n_chunks), chunk_heads(lse[..., None], n_chunks), strict=True)
            ):
                gather_scatter.move([outs[i], lses[i][..., None]], into, backend, target_index=keys.rows)
        else:
            out, lse = cat_heads(outs), cat_heads(lses)
        if queries is not None:
            queries.finish(out, lse)
        return out, lse, kept

    @staticmethod
    def saved(inputs: QKV, out: Tensor, lse: Tensor, kept: list[Tensor]) -> list[Tensor]:
        return [*inputs, out, lse, *kept]

    def backward(self, dout: Tensor, dlse: Tensor | None, saved: list[Tensor]) -> QKV:
        keys, context, backend, n_chunks = self.keys, self.context, self.context.backend, len(self.plans)
        q, k, v, out, lse, *kept = saved
        # the gradient of a sum has stride 0
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
        queries = None if self.queries is None else pass_q.Backward(inputs, self.queries, context)
        pending = [] if kept else self.send_kv(k, v)
        of_q, of_out, of_lse, of_dout = (chunk_heads(x, n_chunks) for x in (q, out, lse, dout))
        of_dlse = (None,) * n_chunks if dlse is None else chunk_heads(dlse, n_chunks)
        of_k, of_v = (chunk_heads(x, n_chunks) for x in kept or (k, v))
        dq_of_chunk, dkv_of_chunk, messages = [], [], []
        for i, plan in enumerate(self.plans):
            k_all, v_all = (of_k[i], of_v[i]) if kept else self.own_kv_in_slots(of_k[i], of_v[i])
            if not kept:
                gather_scatter.unpack(pending[i].wait(), [k_all, v_all], self.slots, backend)
            chunk = BackwardInputs(of_dout[i], of_dlse[i], of_q[i], k_all, v_all, of_out[i], of_lse[i])
            if self.local_plan:
                chunk = _picked_rows(chunk, keys.rows, backend)
            dq_rows, *dkv = attend_backward(chunk, plan, context.spec)
            back = gather_scatter.pack(dkv, keys.slots, backend)
            messages.append(AllToAll(back, keys.receive, keys.send, context.group))
            dq_of_chunk.append(dq_rows)
            dkv_of_chunk.append(dkv)
        # overlaps with the gradient messages; bases are added to what this rank and others give
        bases: list[list[Tensor]] = []
        if self.local_plan:
            dq, *totals = attend_backward(inputs, self.local_plan, context.spec)
            bases.append(totals)
        else:
            dq, totals = cat_heads(dq_of_chunk), [x.new_empty(x.shape) for x in (k, v)]
            if self.first_own_slot >= 0:
                of_slots = (cat_heads(parts) for parts in zip(*dkv_of_chunk, strict=True))
                totals = [x.narrow(2, self.first_own_slot, k.shape[2]) for x in of_slots]
        if queries is not None:
            bases.append(list(queries.attend()))
        touched = None if keys.touched.shape[0] == k.shape[2] else keys.touched
        of_dq = chunk_heads(dq, n_chunks)
        of_totals, *of_bases = ([chunk_heads(x, n_chunks) for x in each] for each in (totals, *bases))
        for i, message in enumerate(messages):
            if self.local_plan:
                gather_scatter.move([dq_of_chunk[i]], [of_dq[i]], backend, target_index=keys.rows)
            into, added = [x[i] for x in of_totals], [[x[i] for x in each] for each in of_bases]
            gather_scatter.add(into, dkv_of_chunk[i], message.wait(), added, keys.table, touched, context.rank, backend)
        if queries is not None:
            queries.finish(dq)
        return dq, totals[0], totals[1]

    @staticmethod
    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        tensors, counts, _, _, keeps, _, group, *_ = arguments
        (keys, *_), _ = unflatten(tensors, counts, dist.get_world_size(process_group_of(group)))
        kept = [keys.empty(x) for x in (k, v)] if keeps else []
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q)), kept

    @staticmethod
    def fake_backward(dout: Tensor, dlse: Tensor | None, saved: list[Tensor], *arguments: Any) -> QKV:
        q, k, v, *_ = saved
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _gathered(keys: ExchangePlan, rank: int) -> tuple[list[int], Tensor]:
    """Tokens of each rank, and slots of all tokens in rank order, if every rank receives all tokens of the others."""
    sizes = [*keys.receive]
    before = sum(sizes[:rank])
    sizes[rank] = keys.own_slots.shape[0]
    return sizes, torch.cat([keys.slots[:before], keys.own_slots, keys.slots[before:]])


def _picked_rows(inputs: BackwardInputs, rows: Tensor, backend: str) -> BackwardInputs:
    """The inputs for some rows of q."""
    of_rows = [x[..., None] for x in (inputs.lse, inputs.dlse) if x is not None]
    q, out, dout, *picked = gather_scatter.picked([inputs.q, inputs.out, inputs.dout, *of_rows], rows, backend)
    lse, *dlse = (x[..., 0] for x in picked)
    return BackwardInputs(dout, dlse[0] if dlse else None, q, inputs.k, inputs.v, out, lse)


attention = Operators(PassKV)
