"""How do ranks attend to keys of one another? One opaque operator: exchange of needed keys, attention, exchange of gradients.

Knows tensors, index lists, plans of kernels as lists of tensors, a process group by name. Must not know layouts or owners.

    forward     send k and v of the tokens that others need, receive those that this rank needs; its rows are then
                computed whole, tile by tile as one process would, so that out and dq equal those of one process
    backward    dk and dv of received tokens go back where they came from, and are added in the order of ranks, in float32

Rows that need nothing from others, where they are many, are computed in place while messages travel. Heads go in chunks, each
a message of its own: while one is computed the next ones travel. The waiting is inside of the operator, where neither autograd
nor a compiler can move it. Rows that reach everywhere are shipped (see shipping.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import messages, rows, shipping
from .local import attend, attend_backward, statistics
from .side import Side, sides

# of both operators
_ARGUMENTS = "Tensor[] tensors, SymInt[] counts, float scale, SymInt n_chunks, bool keeps, str group, str backend"


class Chunk(NamedTuple):
    """Which heads a message carries: queries, keys, and the plan of those heads."""

    q: slice
    kv: slice
    plan: list[Tensor]


def chunked(n_chunks: int, q: Tensor, k: Tensor, plan: list[Tensor]) -> list[Chunk]:
    found = []
    for i in range(n_chunks):
        of_q, of_kv = (slice(i * t.shape[1] // n_chunks, (i + 1) * t.shape[1] // n_chunks) for t in (q, k))
        # records of rows and of columns; they name places in the lists, which all heads share
        heads = [items[:, of_q] if items.shape[1] > 1 else items for items in (plan[0], plan[3])]
        found.append(Chunk(of_q, of_kv, [heads[0], *plan[1:3], heads[1], *plan[4:]]))
    return found


def send_keys(
    k: Tensor, v: Tensor, keys: Side, chunks: list[Chunk], walk: shipping.Walk
) -> tuple[Tensor, list[messages.Flight]]:
    """Keys and values on their way: (chunks, tokens, batch, heads of a chunk, features of k and v), and their flights."""
    n_heads = k.shape[1] // len(chunks)
    into = k.new_empty(len(chunks), sum(keys.receive), k.shape[0], n_heads, k.shape[3] + v.shape[3])
    flights: list[messages.Flight] = []
    for chunk, part in zip(chunks, into, strict=True):
        message = messages.packed([k[:, chunk.kv], v[:, chunk.kv]], keys.sent, walk.backend)
        flights.append(messages.Flight(message, part, keys.send, keys.receive, walk.group))
    return into, flights


def extended(
    k: Tensor, v: Tensor, keys: Side, received: Tensor, backend: str, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Own and received keys and values of a chunk, slot by slot; new tensors without `into`."""
    if into is None:
        n_slots = len(keys.own_slots) + len(keys.slots)
        k_all, v_all = (x.new_empty(*x.shape[:2], n_slots, x.shape[3]) for x in (k, v))
    else:
        k_all, v_all = into
    parts = messages.unpacked(received, [k.shape[3], v.shape[3]])
    messages.join_both((k_all, v_all), (k, v), keys.own, keys.own_slots, parts, keys.slots, backend)
    return k_all, v_all


def kept(x: Tensor, n_slots: int, n_chunks: int, keeps: bool) -> Tensor:
    """Room for own and received keys or values, for the backward: (chunks, batch, heads of a chunk, slots, features)."""
    shape = (n_chunks, x.shape[0], x.shape[1] // n_chunks, n_slots, x.shape[3]) if keeps else (0,)
    return x.new_empty(shape)


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
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's rows. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    tensors, counts  the flat forms of one Side, of keys, or of two, of keys and of shipped queries; then the plan of rows that
              need nothing from others, if they are computed apart
    n_chunks  divides the heads of k
    keeps     whether own and received keys and values are returned, for the backward, which otherwise receives them again
    returns   out (batch, heads, n, v_dim), lse (batch, heads, n), keys and values as the kernels walk them
    """
    process_group = messages.group_of(group)
    n_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    (keys, *queries), near = sides(tensors, counts, n_ranks)
    walk = shipping.Walk(scale, backend, process_group, rank)
    shipped = [(side, shipping.send_queries(q, side, walk)) for side in queries]
    chunks = chunked(n_chunks, q, k, keys.plan)
    _, flights = send_keys(k, v, keys, chunks, walk)
    n_slots = len(keys.own_slots) + len(keys.slots)
    all_keys, all_values = (kept(x, n_slots, n_chunks, keeps) for x in (k, v))
    if near:
        out, lse = attend(q, k, v, near, scale, backend)
    else:
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=statistics(q))
    for i, (chunk, flight) in enumerate(zip(chunks, flights, strict=True)):
        into = (all_keys[i], all_values[i]) if keeps else None
        k_all, v_all = extended(k[:, chunk.kv], v[:, chunk.kv], keys, flight.arrived(), backend, into)
        mine = rows.picked(q[:, chunk.q], keys.rows, backend) if near else q[:, chunk.q]
        found = attend(mine, k_all, v_all, chunk.plan, scale, backend)
        if near:
            rows.copy(found[0], out[:, chunk.q], backend, put=keys.rows)
            rows.copy(found[1][..., None], lse[:, chunk.q, :, None], backend, put=keys.rows)
        elif n_chunks == 1:
            out, lse = found
        else:
            out[:, chunk.q], lse[:, chunk.q] = found
    for side, flight in shipped:
        more, more_lse = shipping.forward(q, k, v, side, flight, walk)
        out.index_copy_(2, side.own, more.to(out.dtype))
        lse.index_copy_(2, side.own, more_lse)
    return out, lse, all_keys, all_values


@torch.library.register_fake("blocksparse_flash::exchange_forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (keys, *_), _ = sides(tensors, counts, dist.get_world_size(messages.group_of(group)))
    n_slots = len(keys.own_slots) + len(keys.slots)
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=statistics(q)),
        kept(k, n_slots, n_chunks, keeps),
        kept(v, n_slots, n_chunks, keeps),
    )


Douts = tuple[Tensor, Tensor | None]


def _of_rows(
    douts: Douts, outs: tuple[Tensor, Tensor], tokens: Tensor, backend: str
) -> tuple[Douts, tuple[Tensor, Tensor]]:
    """These tokens of (dout, dlse) and (out, lse)."""
    dout, out = rows.picked_both((douts[0], outs[0]), tokens, backend)
    if douts[1] is None:
        return (dout, None), (out, rows.picked(outs[1][..., None], tokens, backend)[..., 0])
    dlse, lse = rows.picked_both((douts[1][..., None], outs[1][..., None]), tokens, backend)
    return (dout, dlse[..., 0]), (out, lse[..., 0])


def _of_heads(by_head: Tensor | None, heads: slice) -> Tensor | None:
    return None if by_head is None else by_head[:, heads]


@torch.library.impl("blocksparse_flash::exchange_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, all_keys: Tensor,
    all_values: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int, keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `_forward`'s q, k, v; dlse None is 0. Every rank of the group must call it."""
    process_group = messages.group_of(group)
    n_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    (keys, *queries), near = sides(tensors, counts, n_ranks)
    walk = shipping.Walk(scale, backend, process_group, rank)
    shipped = [shipping.Backward((q, out), (dout, dlse), lse, side, walk) for side in queries]
    chunks = chunked(n_chunks, q, k, keys.plan)
    flights: list[messages.Flight] = []
    if not keeps:
        _, flights = send_keys(k, v, keys, chunks, walk)
    given = []
    for i, chunk in enumerate(chunks):
        if keeps:
            k_all, v_all = all_keys[i], all_values[i]
        else:
            k_all, v_all = extended(k[:, chunk.kv], v[:, chunk.kv], keys, flights[i].arrived(), backend)
        mine, outs = q[:, chunk.q], (out[:, chunk.q], lse[:, chunk.q])
        douts: Douts = dout[:, chunk.q], _of_heads(dlse, chunk.q)
        if near:
            douts, outs = _of_rows(douts, outs, keys.rows, backend)
            mine = rows.picked(mine, keys.rows, backend)
        dq_rows, *dkv = attend_backward(douts, (mine, k_all, v_all), outs, chunk.plan, scale, backend)
        back = messages.packed(dkv, keys.slots, backend)
        given.append((dq_rows, dkv, messages.sent(back, keys.receive, keys.send, process_group)))
    # while gradients travel
    if near:
        dq, dk, dv = attend_backward((dout, dlse), (q, k, v), (out, lse), near, scale, backend)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q if n_chunks > 1 else q.new_empty(0), k, v))
    more = [(side, part.finish(k, v)) for side, part in zip(queries, shipped, strict=True)]
    touched = None if len(keys.touched) == k.shape[2] else keys.touched
    for chunk, (dq_rows, dkv, flight) in zip(chunks, given, strict=True):
        if near:
            rows.copy(dq_rows, dq[:, chunk.q], backend, put=keys.rows)
        elif n_chunks == 1:
            dq = dq_rows
        else:
            dq[:, chunk.q] = dq_rows
        returned = messages.unpacked(flight.arrived(), [k.shape[3], v.shape[3]])
        for j, (grad, mine, others) in enumerate(zip((dk, dv), dkv, returned, strict=True)):
            total = grad[:, chunk.kv]
            bases = ([total] if near else []) + [grads[1 + j][:, chunk.kv] for _, grads in more]
            rows.add(total, mine, others, bases, keys.table, touched, rank, backend)
    for side, (dq_rows, *_) in more:
        dq.index_copy_(2, side.own, dq_rows.to(dq.dtype))
    return dq, dk, dv


@torch.library.register_fake("blocksparse_flash::exchange_backward")
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- what autograd sees ----


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], *options: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, *more = exchange_forward(q, k, v, tensors, *options)
        ctx.options = options
        ctx.mark_non_differentiable(*more)
        # no zeros as large as all keys and values for what has no gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *more, *tensors)
        return out, lse, *more

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        q, k, v, out, lse, all_keys, all_values, *tensors = ctx.saved_tensors
        # only lse was used
        dout = torch.zeros_like(out) if dout is None else dout
        grads = exchange_backward(dout, dlse, q, k, v, out, lse, all_keys, all_values, tensors, *ctx.options)
        return *grads, None, *(None,) * len(ctx.options)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:  # noqa: ARG004
        with torch._C._AutoDispatchBelowAutograd():
            return exchange_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("the gradients of attention shared by ranks have no gradients of their own")


@torch.library.impl("blocksparse_flash::exchange_forward", "Autograd")
def _forward_with_autograd(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
    return _Exchange.apply(q, k, v, *arguments)


@torch.library.impl("blocksparse_flash::exchange_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> Any:
    return _Gradients.apply(*arguments)


exchange_forward = torch.ops.blocksparse_flash.exchange_forward.default
exchange_backward = torch.ops.blocksparse_flash.exchange_backward.default
