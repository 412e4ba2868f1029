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


def extended(k: Tensor, v: Tensor, keys: Side, received: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Own and received keys and values of a chunk, slot by slot."""
    parts = messages.unpacked(received, [k.shape[3], v.shape[3]])
    k, v = (
        messages.joined(mine, keys.own, keys.own_slots, part, keys.slots, backend)
        for mine, part in zip((k, v), parts, strict=True)
    )
    return k, v


@torch.library.custom_op("blocksparse_flash::exchange_forward", mutates_args=())
def exchange_forward(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's rows. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    tensors, counts  the flat forms of one Side, of keys, or of two, of keys and of shipped queries; then the plan of rows that
              need nothing from others, if they are computed apart
    n_chunks  divides the heads of k
    keeps     whether received keys and values are returned, for the backward, which otherwise receives them again
    returns   out (batch, heads, n, v_dim), lse (batch, heads, n), what was received
    """
    process_group = messages.group_of(group)
    n_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    (keys, *queries), near = sides(tensors, counts, n_ranks)
    walk = shipping.Walk(scale, backend, process_group, rank)
    shipped = [(side, shipping.send_queries(q, side, walk)) for side in queries]
    chunks = chunked(n_chunks, q, k, keys.plan)
    received, flights = send_keys(k, v, keys, chunks, walk)
    if near:
        out, lse = attend(q, k, v, near, scale, backend)
    else:
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=statistics(q))
    for chunk, flight in zip(chunks, flights, strict=True):
        k_all, v_all = extended(k[:, chunk.kv], v[:, chunk.kv], keys, flight.arrived(), backend)
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
    return out, lse, received if keeps else k.new_empty(0)


@exchange_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int,
    keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_ranks = dist.get_world_size(messages.group_of(group))
    n_received = sum(counts[n_ranks : 2 * n_ranks])
    shape = n_chunks, n_received, k.shape[0], k.shape[1] // n_chunks, k.shape[3] + v.shape[3]
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=statistics(q)),
        k.new_empty(shape if keeps else (0,)),
    )


def _of_rows(x: Tensor, by_row: Tensor, tokens: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """These tokens of a tensor with features, and of one without."""
    return rows.picked(x, tokens, backend), rows.picked(by_row[..., None], tokens, backend)[..., 0]


@torch.library.custom_op("blocksparse_flash::exchange_backward", mutates_args=())
def exchange_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, received: Tensor,
    tensors: list[Tensor], counts: list[int], scale: float, n_chunks: int, keeps: bool, group: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `exchange_forward`'s q, k, v. Every rank of the group must call it."""
    process_group = messages.group_of(group)
    n_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    (keys, *queries), near = sides(tensors, counts, n_ranks)
    walk = shipping.Walk(scale, backend, process_group, rank)
    shipped = [shipping.Backward((q, out), (dout, dlse), lse, side, walk) for side in queries]
    chunks = chunked(n_chunks, q, k, keys.plan)
    flights: list[messages.Flight] = []
    if not keeps:
        received, flights = send_keys(k, v, keys, chunks, walk)
    given = []
    for i, chunk in enumerate(chunks):
        arrived = received[i] if keeps else flights[i].arrived()
        k_all, v_all = extended(k[:, chunk.kv], v[:, chunk.kv], keys, arrived, backend)
        douts, outs, mine = (dout[:, chunk.q], dlse[:, chunk.q]), (out[:, chunk.q], lse[:, chunk.q]), q[:, chunk.q]
        if near:
            douts, outs = (_of_rows(*pair, keys.rows, backend) for pair in (douts, outs))
            mine = rows.picked(mine, keys.rows, backend)
        dq_rows, *dkv = attend_backward(douts, (mine, k_all, v_all), outs, chunk.plan, scale, backend)
        back = messages.packed(dkv, keys.slots, backend)
        given.append((dq_rows, dkv, messages.sent(back, keys.receive, keys.send, process_group)))
    # while gradients travel
    if near:
        dq, dk, dv = attend_backward((dout, dlse), (q, k, v), (out, lse), near, scale, backend)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
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


@exchange_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, tensors, *ctx.options = inputs
    out, lse, received = output
    ctx.mark_non_differentiable(received)
    ctx.save_for_backward(q, k, v, out, lse, received, *tensors)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, received, *tensors = ctx.saved_tensors
    grads = exchange_backward(dout, dlse, q, k, v, out, lse, received, tensors, *ctx.options)
    return *grads, [None] * len(tensors), *(None,) * 6


exchange_forward.register_autograd(_gradients, setup_context=_save)
