"""Pass-KV: the keys and values that other ranks need travel to their queries, as one opaque operator.

    forward     sends k and v of tokens that others need and receives those this rank needs. Each row is then computed
                whole, tile by tile as in one process, so that out and dq equal those of one process (up to rounding for
                rows that a kernel splits)
    backward    returns dk and dv of received tokens to their owners, which add them in rank order and in float32

With scheme="all_gather" every rank sends all its keys once, by that collective; the rest is the same. Rows that need no
received keys are computed while messages travel, if there are many. Heads are split into chunks with a message each, so
that one chunk travels while another is computed. The waits are inside the operator, where neither autograd nor a
compiler can move them. Rows that reach most keys may use pass_q.py instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..runtime import tracing
from . import communication, gather_scatter, pass_q
from .exchange_plan import ExchangePlan, unflatten
from .local_attention import accumulator_dtype, attend, attend_backward, call_spec

# arguments of both operators
_ARGUMENTS = (
    "Tensor[] tensors, SymInt[] counts, float scale, SymInt n_chunks, bool keeps, bool gathers, str group, "
    "str backend, bool deterministic"
)


class Chunk(NamedTuple):
    """Heads of one message, None for all: query heads, key heads, and their kernel plan."""

    q: slice | None
    kv: slice | None
    plan: list[Tensor]


def head_chunks(n_chunks: int, heads: tuple[int, int], plan: list[Tensor]) -> list[Chunk]:
    """Splits (query heads, key heads) and their kernel plan into chunks."""
    if n_chunks == 1:
        return [Chunk(None, None, plan)]
    found = []
    for i in range(n_chunks):
        of_q, of_kv = (slice(i * n // n_chunks, (i + 1) * n // n_chunks) for n in heads)
        # row and column records; the lists they index are shared by all heads
        some = [items[:, of_q] if items.shape[1] > 1 else items for items in (plan[0], plan[3])]
        found.append(Chunk(of_q, of_kv, [some[0], *plan[1:3], some[1], *plan[4:]]))
    return found


class PassKVContext(NamedTuple):
    """Everything in a call that does not depend on its tensors; cached per layer, scale, number of chunks and backend.

    keys, queries  exchange of keys; of pass-Q queries, or None
    local_plan  kernel plan of rows that need no received keys, or empty
    first    slot of the first own token if own gradients are summed in place; otherwise None
    keeps    True: own and received keys and values are kept for the backward; False: received again
    gathers  for an all-gather (tokens of each rank, slots of all tokens in rank order); otherwise None
    tensors, counts, options  arguments of the operators besides the scale: flattened plans; n_chunks, keeps, gathers,
                              group name, backend, deterministic
    """

    keys: ExchangePlan
    queries: ExchangePlan | None
    local_plan: list[Tensor]
    chunks: list[Chunk]
    first: int | None
    keeps: bool
    gathers: tuple[list[int], Tensor] | None
    ranks: pass_q.RankContext
    tensors: list[Tensor]
    counts: list[int]
    options: tuple[Any, ...]


def pass_kv_context(
    tensors: list[Tensor], counts: list[int], heads: tuple[int, int], scale: float, *options: Any
) -> PassKVContext:
    """From the arguments of the operators; heads is (query heads, key heads)."""
    n_chunks, keeps, gathers, group, backend, deterministic = options
    process_group = communication.process_group_of(group)
    (keys, *queries), local_plan = unflatten(tensors, counts, dist.get_world_size(process_group))
    ranks = pass_q.RankContext(call_spec(scale, backend, deterministic), process_group, dist.get_rank(process_group))
    chunks = head_chunks(n_chunks, heads, keys.plan)
    first = None if counts[-1] < 0 else counts[-1]
    whole = _gathered(keys, ranks.rank) if gathers else None
    return PassKVContext(
        keys, queries[0] if queries else None, local_plan, chunks, first, keeps, whole, ranks, tensors, counts, options
    )


def _gathered(keys: ExchangePlan, rank: int) -> tuple[list[int], Tensor]:
    """PassKVContext.gathers for an exchange in which every rank receives all tokens of the others."""
    sizes = [*keys.receive]
    before = sum(sizes[:rank])
    sizes[rank] = keys.own_slots.shape[0]
    return sizes, torch.cat([keys.slots[:before], keys.own_slots, keys.slots[before:]])


def select_heads(x: Tensor, heads: slice | None) -> Tensor:
    """Some heads of a tensor; None means all."""
    return x if heads is None else x[:, heads]


def chunk_heads(x: Tensor, n_chunks: int) -> Sequence[Tensor]:
    """Splits a tensor along its heads into equal chunks."""
    return (x,) if n_chunks == 1 else x.chunk(n_chunks, dim=1)


def cat_heads(parts: list[Tensor]) -> Tensor:
    """The inverse of `chunk_heads`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def send_kv(
    k: Tensor,
    v: Tensor,
    keys: ExchangePlan,
    chunks: list[Chunk],
    ranks: pass_q.RankContext,
    sizes: list[int] | None = None,
) -> list[communication.Pending]:
    """Starts one message per chunk, (tokens, batch, heads of a chunk, features of k and v).

    sizes  tokens of each rank for an all-gather; None sends only what others need
    """
    pending: list[communication.Pending] = []
    for of_chunk in zip(chunk_heads(k, len(chunks)), chunk_heads(v, len(chunks)), strict=True):
        if sizes is not None:
            pending.append(
                communication.all_gather(gather_scatter.pack(of_chunk, keys.own, ranks.backend), sizes, ranks.group)
            )
            continue
        message = gather_scatter.pack(of_chunk, keys.sent, ranks.backend)
        pending.append(communication.all_to_all(message, keys.send, keys.receive, ranks.group))
    return pending


def own_kv_in_slots(k: Tensor, v: Tensor, keys: ExchangePlan, backend: str) -> list[Tensor]:
    """Own keys and values in their slots, with room for received ones."""
    whole = [empty_kv(x, keys) for x in (k, v)]
    gather_scatter.move([k, v], whole, backend, taken=keys.own, put=keys.own_slots)
    return whole


def empty_kv(x: Tensor, keys: ExchangePlan) -> Tensor:
    """Buffer for own and received keys or values: (batch, heads, slots, features)."""
    return x.new_empty(*x.shape[:2], keys.own_slots.shape[0] + keys.slots.shape[0], x.shape[3])


Results = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, context: PassKVContext) -> Results:
    """Attention of this rank's rows. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    returns   out (batch, heads, n, v_dim), lse (batch, heads, n), and own and received keys and values if they are kept
    """
    keys, local_plan, ranks, backend = context.keys, context.local_plan, context.ranks, context.ranks.backend
    sizes, slots = context.gathers or (None, keys.slots)
    queries = None if context.queries is None else pass_q.Forward(q, context.queries, ranks)
    pending = send_kv(k, v, keys, context.chunks, ranks, sizes)
    # overlaps with the messages: work that needs none of them comes first
    every = own_kv_in_slots(k, v, keys, backend) if context.keeps else None
    if local_plan:
        out, lse = attend(q, k, v, local_plan, ranks.spec)
    if queries is not None:
        queries.attend(k, v)
    found, n_chunks = [], len(context.chunks)
    of_q, of_k, of_v = [chunk_heads(x, n_chunks) for x in (q, *(every or (k, v)))]
    for i, (chunk, message) in enumerate(zip(context.chunks, pending, strict=True)):
        k_all, v_all = (of_k[i], of_v[i]) if every else own_kv_in_slots(of_k[i], of_v[i], keys, backend)
        gather_scatter.unpack(message.wait(), [k_all, v_all], slots, backend)
        mine = gather_scatter.picked([of_q[i]], keys.rows, backend)[0] if local_plan else of_q[i]
        out_rows, lse_rows = attend(mine, k_all, v_all, chunk.plan, ranks.spec)
        if local_plan:
            into = [select_heads(out, chunk.q), select_heads(lse, chunk.q)[..., None]]
            gather_scatter.move([out_rows, lse_rows[..., None]], into, backend, put=keys.rows)
        else:
            found.append((out_rows, lse_rows))
    if not local_plan:
        out, lse = (cat_heads(list(parts)) for parts in zip(*found, strict=True))
    if queries is not None:
        queries.finish(out, lse)
    return out, lse, *(every or (k.new_empty(0), v.new_empty(0)))


Douts = tuple[Tensor, Tensor | None]


def _of_rows(q: Tensor, outs: tuple[Tensor, Tensor], douts: Douts, keys: ExchangePlan, backend: str) -> tuple[Any, ...]:
    """The rows of q, (out, lse) and (dout, dlse) that need received keys."""
    of_rows = [x[..., None] for x in (outs[1], douts[1]) if x is not None]
    q, out, dout, *picked = gather_scatter.picked([q, outs[0], douts[0], *of_rows], keys.rows, backend)
    lse, dlse = (*(x[..., 0] for x in picked), None)[:2]
    return q, (out, lse), (dout, dlse)


def _totals(k: Tensor, v: Tensor, given: list[list[Tensor]], first: int | None) -> list[Tensor]:
    """Tensors in which dk and dv are summed: new, or own tokens in the output of the kernels."""
    if first is None:
        return [x.new_empty(x.shape) for x in (k, v)]
    return [cat_heads(list(of_chunks)).narrow(2, first, k.shape[2]) for of_chunks in zip(*given, strict=True)]


def backward(
    douts: Douts, inputs: tuple[Tensor, Tensor, Tensor], results: Results, context: PassKVContext
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the gradients of out and lse (None is 0). Every rank of the group must call it.

    dk and dv may be views of larger tensors.
    """
    keys, local_plan, ranks, backend = context.keys, context.local_plan, context.ranks, context.ranks.backend
    (q, k, v), (out, lse, *every) = inputs, results
    if douts[0].stride(3) != 1:
        # the gradient of a sum has stride 0
        douts = douts[0].contiguous(), douts[1]
    queries = None if context.queries is None else pass_q.Backward((q, out, lse), douts, context.queries, ranks)
    sizes, slots = context.gathers or (None, keys.slots)
    pending = [] if context.keeps else send_kv(k, v, keys, context.chunks, ranks, sizes)
    given, n_chunks = [], len(context.chunks)
    of_q, of_out, of_lse = chunk_heads(q, n_chunks), chunk_heads(out, n_chunks), chunk_heads(lse, n_chunks)
    of_dout, of_dlse = chunk_heads(douts[0], n_chunks), None if douts[1] is None else chunk_heads(douts[1], n_chunks)
    of_k, of_v = [chunk_heads(x, n_chunks) for x in (every if context.keeps else (k, v))]
    for i, chunk in enumerate(context.chunks):
        k_all, v_all = (of_k[i], of_v[i]) if context.keeps else own_kv_in_slots(of_k[i], of_v[i], keys, backend)
        if not context.keeps:
            gather_scatter.unpack(pending[i].wait(), [k_all, v_all], slots, backend)
        mine, outs = of_q[i], (of_out[i], of_lse[i])
        of_chunk: Douts = of_dout[i], None if of_dlse is None else of_dlse[i]
        if local_plan:
            mine, outs, of_chunk = _of_rows(mine, outs, of_chunk, keys, backend)
        dq_rows, *dkv = attend_backward(of_chunk, (mine, k_all, v_all), outs, chunk.plan, ranks.spec)
        back = gather_scatter.pack(dkv, keys.slots, backend)
        given.append((dq_rows, dkv, communication.all_to_all(back, keys.receive, keys.send, ranks.group)))
    # overlaps with the gradient messages
    if local_plan:
        dq, *totals = attend_backward(douts, inputs, (out, lse), local_plan, ranks.spec)
    else:
        dq, totals = (
            cat_heads([dq_rows for dq_rows, *_ in given]),
            _totals(k, v, [dkv for _, dkv, _ in given], context.first),
        )
    bases = [totals] if local_plan else []
    if queries is not None:
        bases.append(list(queries.attend(k, v)))
    touched = None if keys.touched.shape[0] == k.shape[2] else keys.touched
    of_totals, *of_bases = [[chunk_heads(x, n_chunks) for x in each] for each in (totals, *bases)]
    for i, (dq_rows, dkv, message) in enumerate(given):
        if local_plan:
            gather_scatter.move([dq_rows], [select_heads(dq, context.chunks[i].q)], backend, put=keys.rows)
        into, added = [x[i] for x in of_totals], [[x[i] for x in each] for each in of_bases]
        gather_scatter.add(into, dkv, message.wait(), added, keys.table, touched, ranks.rank, backend)
    if queries is not None:
        queries.finish(dq)
    return dq, totals[0], totals[1]


torch.library.define(
    "blocksparse_flash::pass_kv_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor all_keys, Tensor all_values)",
)
torch.library.define(
    "blocksparse_flash::pass_kv_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor all_keys, "
    f"Tensor all_values, {_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@torch.library.impl("blocksparse_flash::pass_kv_forward", "default")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, *options: Any
) -> Results:
    """`forward`; tensors and counts of a LayerPlan."""
    return forward(q, k, v, pass_kv_context(tensors, counts, (q.shape[1], k.shape[1]), scale, *options))


@torch.library.register_fake("blocksparse_flash::pass_kv_forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, gathers: bool, group: str, backend: str, deterministic: bool,
) -> Results:  # fmt: skip
    (keys, *_), _ = unflatten(tensors, counts, dist.get_world_size(communication.process_group_of(group)))
    every = (empty_kv(k, keys), empty_kv(v, keys)) if keeps else (k.new_empty(0), v.new_empty(0))
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q)), *every


@torch.library.impl("blocksparse_flash::pass_kv_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, all_keys: Tensor,
    all_values: Tensor, tensors: list[Tensor], counts: list[int], scale: float, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    context = pass_kv_context(tensors, counts, (q.shape[1], k.shape[1]), scale, *options)
    dq, dk, dv = backward((dout, dlse), (q, k, v), (out, lse, all_keys, all_values), context)
    # contiguous, as the fake kernel says
    return dq, dk.contiguous(), dv.contiguous()


@torch.library.register_fake("blocksparse_flash::pass_kv_backward")
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _PassKV(torch.autograd.Function):
    """`forward` and `backward`: called with a PassKVContext, or by the operators with None and the flat arguments."""

    @staticmethod
    def forward(
        ctx: Any, context: PassKVContext | None, q: Tensor, k: Tensor, v: Tensor, *flat: Any
    ) -> tuple[Tensor, ...]:
        ctx.context, ctx.flat = context, flat[1:]
        # saves zeros as large as all keys and values
        ctx.set_materialize_grads(False)
        if context is not None:
            out, lse, *every = forward(q, k, v, context)
            ctx.save_for_backward(q, k, v, out, lse, *every)
            return out, lse
        tensors, counts, *options = flat
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, *every = pass_kv_forward(q, k, v, tensors, counts, *options)
        ctx.mark_non_differentiable(*every)
        ctx.save_for_backward(q, k, v, out, lse, *every, *tensors)
        return out, lse, *every

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        context = ctx.context
        q, k, v, out, lse, all_keys, all_values, *tensors = ctx.saved_tensors
        # only lse was used
        dout = torch.zeros_like(out) if dout is None else dout
        results = out, lse, all_keys, all_values
        if context is None:
            counts, *options = ctx.flat
            grads = pass_kv_backward(dout, dlse, q, k, v, *results, tensors, counts, *options)
            return None, *grads, *(None,) * (1 + len(ctx.flat))
        # create_graph=True goes through the dispatcher, which raises
        if tracing.can_launch_directly(q, k, dout) and not torch.is_grad_enabled():
            grads = backward((dout, dlse), (q, k, v), results, context)
        else:
            flat = context.tensors, context.counts, context.ranks.spec.scale, *context.options
            grads = pass_kv_backward(dout, dlse, q, k, v, *results, *flat)
        return None, *grads


class Gradients(torch.autograd.Function):
    """Runs an operator of gradients; RuntimeError if it is differentiated."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Any:  # noqa: ARG004
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("the gradients of attention shared by ranks have no gradients of their own")


@torch.library.impl("blocksparse_flash::pass_kv_forward", "Autograd")
def _forward_with_autograd(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], *options: Any
) -> Any:
    return _PassKV.apply(None, q, k, v, tensors, counts, *options)


@torch.library.impl("blocksparse_flash::pass_kv_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> Any:
    return Gradients.apply(pass_kv_backward, *arguments)


pass_kv_forward = torch.ops.blocksparse_flash.pass_kv_forward.default
pass_kv_backward = torch.ops.blocksparse_flash.pass_kv_backward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    counts: list[int],
    scale: float,
    options: tuple[int, bool, bool, str, str, bool],
    cache: dict[Any, PassKVContext],
) -> tuple[Tensor, Tensor]:
    """out and lse. Bypasses the dispatcher if nothing traces the call; `cache` keeps what was prepared.

    options  n_chunks, keeps, gathers, group name, backend, deterministic
    """
    if not tracing.can_launch_directly(q, k, v):
        return pass_kv_forward(q, k, v, tensors, counts, scale, *options)[:2]
    key = scale, *options
    context = cache.get(key)
    if context is None:
        context = cache[key] = pass_kv_context(tensors, counts, (q.shape[1], k.shape[1]), scale, *options)
    if ops.is_differentiated(q, k, v):
        return _PassKV.apply(context, q, k, v)
    return forward(q, k, v, context)[:2]
