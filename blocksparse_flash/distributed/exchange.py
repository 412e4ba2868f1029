"""How do ranks attend to keys of one another? One opaque operator: exchange of needed keys, attention, exchange of gradients.

Knows tensors, index lists, plans of kernels as lists of tensors, a process group by name. Must not know layouts or owners.

    forward     send k and v of the tokens that others need, receive those that this rank needs; its rows are then
                computed whole, tile by tile as one process would, so that out and dq equal those of one process; rows that
                a kernel splits among its programs, by how much there is to compute, to rounding
    backward    dk and dv of received tokens go back where they came from, and are added in the order of ranks, in float32

Where every rank is given all keys (scheme="all_gather"), each sends its own once, by the collective of that name; the rest is the
same. Rows that need nothing from others, where they are many, are computed in place while messages travel. Heads go in chunks, each
a message of its own: while one is computed the next ones travel. The waiting is inside of the operator, where neither autograd
nor a compiler can move it. Rows that reach everywhere are shipped (see shipping.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..runtime import tracing
from . import messages, rows, shipping
from .local import attend, attend_backward, statistics
from .side import Side, sides

# of both operators
_ARGUMENTS = (
    "Tensor[] tensors, SymInt[] counts, float scale, SymInt n_chunks, bool keeps, bool gathers, str group, str backend"
)


class Chunk(NamedTuple):
    """Which heads a message carries: queries, keys, both None for all; and the plan of those heads."""

    q: slice | None
    kv: slice | None
    plan: list[Tensor]


def chunked(n_chunks: int, heads: tuple[int, int], plan: list[Tensor]) -> list[Chunk]:
    """The chunks of so many query and key heads."""
    if n_chunks == 1:
        return [Chunk(None, None, plan)]
    found = []
    for i in range(n_chunks):
        of_q, of_kv = (slice(i * n // n_chunks, (i + 1) * n // n_chunks) for n in heads)
        # records of rows and of columns; they name places in the lists, which all heads share
        some = [items[:, of_q] if items.shape[1] > 1 else items for items in (plan[0], plan[3])]
        found.append(Chunk(of_q, of_kv, [some[0], *plan[1:3], some[1], *plan[4:]]))
    return found


class Prepared(NamedTuple):
    """All of a call that does not depend on its tensors: made once for a layer, a number of chunks and a backend.

    keys, queries, near  sides of keys, of shipped queries if there are any, and the plan of rows that need nothing from others
    first    where own tokens lie together among the slots, and sums of their gradients are in place; None: not so
    keeps    whether own and received keys and values are kept for the backward, which otherwise receives them again
    gathers  None where ranks send what others need; else (the tokens of each rank, where those of all ranks go, rank after rank)
    tensors, counts, options  what the operators take: flat sides; n_chunks, keeps, gathers, the group's name, backend
    """

    keys: Side
    queries: Side | None
    near: list[Tensor]
    chunks: list[Chunk]
    first: int | None
    keeps: bool
    gathers: tuple[list[int], Tensor] | None
    walk: shipping.Walk
    tensors: list[Tensor]
    counts: list[int]
    options: tuple[Any, ...]


def prepare(tensors: list[Tensor], counts: list[int], heads: tuple[int, int], *options: Any) -> Prepared:
    """From the arguments of the operators; heads are those of queries and of keys."""
    n_chunks, keeps, gathers, group, backend = options
    process_group = messages.group_of(group)
    (keys, *queries), near = sides(tensors, counts, dist.get_world_size(process_group))
    walk = shipping.Walk(backend, process_group, dist.get_rank(process_group))
    chunks = chunked(n_chunks, heads, keys.plan)
    first = None if counts[-1] < 0 else counts[-1]
    whole = _gathered(keys, walk.rank) if gathers else None
    return Prepared(
        keys, queries[0] if queries else None, near, chunks, first, keeps, whole, walk, tensors, counts, options
    )


def _gathered(keys: Side, rank: int) -> tuple[list[int], Tensor]:
    """As Prepared.gathers has it, of a side on which every rank receives all tokens of the others."""
    sizes = [*keys.receive]
    before = sum(sizes[:rank])
    sizes[rank] = keys.own_slots.shape[0]
    return sizes, torch.cat([keys.slots[:before], keys.own_slots, keys.slots[before:]])


def of_heads(x: Tensor, heads: slice | None) -> Tensor:
    """Some heads of a tensor; None is all."""
    return x if heads is None else x[:, heads]


def parted(x: Tensor, n_chunks: int) -> Sequence[Tensor]:
    """The heads of each chunk, all of them with one call."""
    return (x,) if n_chunks == 1 else x.chunk(n_chunks, dim=1)


def joined(parts: list[Tensor]) -> Tensor:
    """The heads of all chunks."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def send_keys(
    k: Tensor, v: Tensor, keys: Side, chunks: list[Chunk], walk: shipping.Walk, sizes: list[int] | None = None
) -> list[messages.Flight | messages.Gathering]:
    """Keys and values on their way: a message a chunk, (tokens, batch, heads of a chunk, features of k and v).

    sizes  of all ranks' tokens where every rank gets all of them; None: what others need
    """
    flights: list[messages.Flight | messages.Gathering] = []
    for of_chunk in zip(parted(k, len(chunks)), parted(v, len(chunks)), strict=True):
        if sizes is not None:
            flights.append(messages.gathered(rows.pack(of_chunk, keys.own, walk.backend), sizes, walk.group))
            continue
        message = rows.pack(of_chunk, keys.sent, walk.backend)
        flights.append(messages.sent(message, keys.send, keys.receive, walk.group))
    return flights


def beside(k: Tensor, v: Tensor, keys: Side, backend: str) -> list[Tensor]:
    """Own keys and values at their slots, beside room for received ones."""
    whole = [kept(x, keys) for x in (k, v)]
    rows.move([k, v], whole, backend, taken=keys.own, put=keys.own_slots)
    return whole


def kept(x: Tensor, keys: Side) -> Tensor:
    """Room for own and received keys or values: (batch, heads, slots, features)."""
    return x.new_empty(*x.shape[:2], keys.own_slots.shape[0] + keys.slots.shape[0], x.shape[3])


# ---- what a rank does ----


Results = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, ready: Prepared, scale: float) -> Results:
    """Attention of this rank's rows. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    returns   out (batch, heads, n, v_dim), lse (batch, heads, n), and keys and values as the kernels walk them, if kept
    """
    keys, near, walk, backend = ready.keys, ready.near, ready.walk, ready.walk.backend
    sizes, slots = ready.gathers or (None, keys.slots)
    shipped = None if ready.queries is None else shipping.Forward(q, ready.queries, walk)
    flights = send_keys(k, v, keys, ready.chunks, walk, sizes)
    # from here on messages travel: what needs none of them comes first
    every = beside(k, v, keys, backend) if ready.keeps else None
    if near:
        out, lse = attend(q, k, v, near, scale, backend)
    if shipped is not None:
        shipped.attend(k, v, scale)
    found, n_chunks = [], len(ready.chunks)
    of_q, of_k, of_v = [parted(x, n_chunks) for x in (q, *(every or (k, v)))]
    for i, (chunk, flight) in enumerate(zip(ready.chunks, flights, strict=True)):
        k_all, v_all = (of_k[i], of_v[i]) if every else beside(of_k[i], of_v[i], keys, backend)
        rows.unpack(flight.arrived(), [k_all, v_all], slots, backend)
        mine = rows.picked([of_q[i]], keys.rows, backend)[0] if near else of_q[i]
        out_rows, lse_rows = attend(mine, k_all, v_all, chunk.plan, scale, backend)
        if near:
            into = [of_heads(out, chunk.q), of_heads(lse, chunk.q)[..., None]]
            rows.move([out_rows, lse_rows[..., None]], into, backend, put=keys.rows)
        else:
            found.append((out_rows, lse_rows))
    if not near:
        out, lse = (joined(list(parts)) for parts in zip(*found, strict=True))
    if shipped is not None:
        shipped.finish(out, lse)
    return out, lse, *(every or (k.new_empty(0), v.new_empty(0)))


Douts = tuple[Tensor, Tensor | None]


def _of_rows(q: Tensor, outs: tuple[Tensor, Tensor], douts: Douts, keys: Side, backend: str) -> tuple[Any, ...]:
    """Those rows of q, (out, lse) and (dout, dlse) that need keys of others."""
    of_rows = [x[..., None] for x in (outs[1], douts[1]) if x is not None]
    q, out, dout, *picked = rows.picked([q, outs[0], douts[0], *of_rows], keys.rows, backend)
    lse, dlse = (*(x[..., 0] for x in picked), None)[:2]
    return q, (out, lse), (dout, dlse)


def _totals(k: Tensor, v: Tensor, given: list[list[Tensor]], first: int | None) -> list[Tensor]:
    """Where dk and dv are summed: new, or those of own tokens among what the kernels wrote."""
    if first is None:
        return [x.new_empty(x.shape) for x in (k, v)]
    return [joined(list(of_chunks)).narrow(2, first, k.shape[2]) for of_chunks in zip(*given, strict=True)]


def backward(
    douts: Douts, inputs: tuple[Tensor, Tensor, Tensor], results: Results, ready: Prepared, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `forward`'s inputs from the gradients of out and lse (None is 0). Every rank of the group must call it.

    dk and dv may be parts of larger tensors.
    """
    keys, near, walk, backend = ready.keys, ready.near, ready.walk, ready.walk.backend
    (q, k, v), (out, lse, *every) = inputs, results
    if douts[0].stride(3) != 1:
        # of a sum, which repeats one number
        douts = douts[0].contiguous(), douts[1]
    shipped = None if ready.queries is None else shipping.Backward((q, out, lse), douts, ready.queries, walk)
    sizes, slots = ready.gathers or (None, keys.slots)
    flights = [] if ready.keeps else send_keys(k, v, keys, ready.chunks, walk, sizes)
    given, n_chunks = [], len(ready.chunks)
    of_q, of_out, of_lse = parted(q, n_chunks), parted(out, n_chunks), parted(lse, n_chunks)
    of_dout, of_dlse = parted(douts[0], n_chunks), None if douts[1] is None else parted(douts[1], n_chunks)
    of_k, of_v = [parted(x, n_chunks) for x in (every if ready.keeps else (k, v))]
    for i, chunk in enumerate(ready.chunks):
        k_all, v_all = (of_k[i], of_v[i]) if ready.keeps else beside(of_k[i], of_v[i], keys, backend)
        if not ready.keeps:
            rows.unpack(flights[i].arrived(), [k_all, v_all], slots, backend)
        mine, outs = of_q[i], (of_out[i], of_lse[i])
        of_chunk: Douts = of_dout[i], None if of_dlse is None else of_dlse[i]
        if near:
            mine, outs, of_chunk = _of_rows(mine, outs, of_chunk, keys, backend)
        dq_rows, *dkv = attend_backward(of_chunk, (mine, k_all, v_all), outs, chunk.plan, scale, backend)
        back = rows.pack(dkv, keys.slots, backend)
        given.append((dq_rows, dkv, messages.sent(back, keys.receive, keys.send, walk.group)))
    # while gradients travel
    if near:
        dq, *totals = attend_backward(douts, inputs, (out, lse), near, scale, backend)
    else:
        dq, totals = (
            joined([dq_rows for dq_rows, *_ in given]),
            _totals(k, v, [dkv for _, dkv, _ in given], ready.first),
        )
    bases = [totals] if near else []
    if shipped is not None:
        bases.append(list(shipped.attend(k, v, scale)))
    touched = None if keys.touched.shape[0] == k.shape[2] else keys.touched
    of_totals, *of_bases = [[parted(x, n_chunks) for x in each] for each in (totals, *bases)]
    for i, (dq_rows, dkv, flight) in enumerate(given):
        if near:
            rows.move([dq_rows], [of_heads(dq, ready.chunks[i].q)], backend, put=keys.rows)
        into, added = [x[i] for x in of_totals], [[x[i] for x in each] for each in of_bases]
        rows.add(into, dkv, flight.arrived(), added, keys.table, touched, walk.rank, backend)
    if shipped is not None:
        shipped.finish(dq)
    return dq, totals[0], totals[1]


# ---- what a compiler sees ----


torch.library.define(
    "blocksparse_flash::exchange_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor all_keys, Tensor all_values)",
)
torch.library.define(
    "blocksparse_flash::exchange_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor all_keys, "
    f"Tensor all_values, {_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@torch.library.impl("blocksparse_flash::exchange_forward", "default")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, *options: Any
) -> Results:
    """`forward`; tensors and counts as a LayerPlan has them."""
    return forward(q, k, v, prepare(tensors, counts, (q.shape[1], k.shape[1]), *options), scale)


@torch.library.register_fake("blocksparse_flash::exchange_forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, gathers: bool, group: str, backend: str,
) -> Results:  # fmt: skip
    (keys, *_), _ = sides(tensors, counts, dist.get_world_size(messages.group_of(group)))
    every = (kept(k, keys), kept(v, keys)) if keeps else (k.new_empty(0), v.new_empty(0))
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=statistics(q)), *every


@torch.library.impl("blocksparse_flash::exchange_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, all_keys: Tensor,
    all_values: Tensor, tensors: list[Tensor], counts: list[int], scale: float, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ready = prepare(tensors, counts, (q.shape[1], k.shape[1]), *options)
    dq, dk, dv = backward((dout, dlse), (q, k, v), (out, lse, all_keys, all_values), ready, scale)
    # as a compiler was told
    return dq, dk.contiguous(), dv.contiguous()


@torch.library.register_fake("blocksparse_flash::exchange_backward")
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- what autograd sees ----


class _Exchange(torch.autograd.Function):
    """`forward` and `backward`: called directly with what is prepared, by the operators with its flat form (None, ...)."""

    @staticmethod
    def forward(
        ctx: Any, ready: Prepared | None, q: Tensor, k: Tensor, v: Tensor, scale: float, *flat: Any
    ) -> tuple[Tensor, ...]:
        ctx.ready, ctx.scale, ctx.flat = ready, scale, flat[1:]
        # no zeros as large as all keys and values for what has no gradient
        ctx.set_materialize_grads(False)
        if ready is not None:
            out, lse, *every = forward(q, k, v, ready, scale)
            ctx.save_for_backward(q, k, v, out, lse, *every)
            return out, lse
        tensors, counts, *options = flat
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, *every = exchange_forward(q, k, v, tensors, counts, scale, *options)
        ctx.mark_non_differentiable(*every)
        ctx.save_for_backward(q, k, v, out, lse, *every, *tensors)
        return out, lse, *every

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        ready, scale = ctx.ready, ctx.scale
        q, k, v, out, lse, all_keys, all_values, *tensors = ctx.saved_tensors
        # only lse was used
        dout = torch.zeros_like(out) if dout is None else dout
        results = out, lse, all_keys, all_values
        if ready is None:
            counts, *options = ctx.flat
            grads = exchange_backward(dout, dlse, q, k, v, *results, tensors, counts, scale, *options)
            return None, *grads, *(None,) * (2 + len(ctx.flat))
        # a graph of the backward itself needs the dispatcher, which refuses
        if tracing.can_launch_directly(q, k, dout) and not torch.is_grad_enabled():
            grads = backward((dout, dlse), (q, k, v), results, ready, scale)
        else:
            flat = ready.tensors, ready.counts, scale, *ready.options
            grads = exchange_backward(dout, dlse, q, k, v, *results, *flat)
        return None, *grads, None


class Gradients(torch.autograd.Function):
    """An operator of gradients, which refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Any:  # noqa: ARG004
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("the gradients of attention shared by ranks have no gradients of their own")


@torch.library.impl("blocksparse_flash::exchange_forward", "Autograd")
def _forward_with_autograd(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, *options: Any
) -> Any:
    return _Exchange.apply(None, q, k, v, scale, tensors, counts, *options)


@torch.library.impl("blocksparse_flash::exchange_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> Any:
    return Gradients.apply(exchange_backward, *arguments)


exchange_forward = torch.ops.blocksparse_flash.exchange_forward.default
exchange_backward = torch.ops.blocksparse_flash.exchange_backward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    counts: list[int],
    scale: float,
    options: tuple[int, bool, bool, str, str],
    memo: dict[Any, Prepared],
) -> tuple[Tensor, Tensor]:
    """out and lse, as the operator gives them; called directly where nothing watches, with what `memo` remembers.

    options  n_chunks, keeps, gathers, the group's name, backend
    """
    if not tracing.can_launch_directly(q, k, v):
        return exchange_forward(q, k, v, tensors, counts, scale, *options)[:2]
    ready = memo.get(options)
    if ready is None:
        ready = memo[options] = prepare(tensors, counts, (q.shape[1], k.shape[1]), *options)
    if ops.is_differentiated(q, k, v):
        return _Exchange.apply(ready, q, k, v, scale)
    return forward(q, k, v, ready, scale)[:2]
