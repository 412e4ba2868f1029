"""How do tokens go to heads while heads are computed? One opaque operator: Ulysses, cut into messages of heads.

A head of one rank's tokens is one stretch of memory, and so it is among the tokens of all ranks, where each holds a stretch of
the sequence: messages are sent from where tensors lie to where the kernels read, and no copy is made on the way. Where stretches
are short, or the tokens of ranks lie in between each other, one message is packed for all heads, see packed_heads.py.
Knows tensors (batch, heads, tokens, dim), how many tokens each rank has, a process group by name. Must not know layouts or plans
of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..runtime import tracing
from . import messages, packed_heads
from .exchange import Chunk, Gradients, chunked, joined, of_heads, parted
from .local import attend, attend_backward, statistics

# of both operators
_ARGUMENTS = (
    "Tensor[] plan, Tensor[] orders, SymInt[] sizes, SymInt rank, float scale, bool packs, SymInt n_chunks, str group, "
    "str backend"
)
# messages that are sent before the one that is waited for
AHEAD = 2


class Call(NamedTuple):
    """What does not depend on tensors.

    plan    of the kernels, for the heads of this rank
    orders  restore and rearrange of packed_heads.py, or none
    sizes   tokens of each rank; `rank` is this one
    packs   whether one message is packed for all heads, n_chunks is 1; if not, there are no orders
    group   by name
    """

    plan: list[Tensor]
    orders: list[Tensor]
    sizes: list[int]
    rank: int
    scale: float
    packs: bool
    n_chunks: int
    group: str
    backend: str


def _room(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """For this rank's heads of all tokens, of a tensor of all heads."""
    return x.new_empty(x.shape[0], x.shape[1] // len(sizes), sum(sizes), x.shape[3])


def _of_ranks(local: Tensor, n_ranks: int) -> list[list[Tensor]]:
    """Of contiguous (batch, heads, local tokens, dim), for each sequence and head of a rank, that head of each rank."""
    n_heads, found = local.shape[1], local.flatten(0, 1).unbind()
    share = n_heads // n_ranks
    firsts = [batch * n_heads + head for batch in range(local.shape[0]) for head in range(share)]
    return [list(found[first : first + n_heads - share + 1 : share]) for first in firsts]


def _of_tokens(whole: Tensor, sizes: list[int]) -> list[list[Tensor]]:
    """Of contiguous (batch, heads of a rank, all tokens, dim), for each sequence and head, the tokens of each rank."""
    n_ranks, n_heads = len(sizes), whole.shape[0] * whole.shape[1]
    found = whole.flatten(0, 2).split_with_sizes(sizes * n_heads)
    return [list(found[i : i + n_ranks]) for i in range(0, n_heads * n_ranks, n_ranks)]


def _some(stretches: list[list[Tensor]], n_heads: int, heads: slice | None) -> list[list[Tensor]]:
    """Those of some heads, None: all, of each sequence."""
    if heads is None:
        return stretches
    firsts = range(0, len(stretches), n_heads)
    return [of_head for first in firsts for of_head in stretches[first + heads.start : first + heads.stop]]


def _sent(pairs: list[tuple[list[list[Tensor]], list[list[Tensor]]]], group: Any) -> messages.Stretches:
    """Lists of stretches on their way: (sent, received) of several tensors as one."""
    sent, received = ([part for pair in pairs for part in pair[i]] for i in (0, 1))
    return messages.Stretches(sent, received, group)


class Prepared(NamedTuple):
    """A call, and what follows from it: its chunks of this rank's heads, the process group. Made once for a layer and its options."""

    call: Call
    chunks: list[Chunk]
    group: Any


def prepare(call: Call, heads: tuple[int, int]) -> Prepared:
    """heads: of the queries and of the keys, of this rank."""
    return Prepared(call, chunked(call.n_chunks, heads, call.plan), messages.group_of(call.group))


def _packed_to_heads(tensors: list[Tensor], ready: Prepared) -> list[Tensor]:
    call = ready.call
    restore = call.orders[0] if call.orders else None
    return packed_heads.to_heads(tensors, call.sizes, restore, messages.sender(ready.group))


def _packed_to_tokens(tensors: list[Tensor], ready: Prepared) -> list[Tensor]:
    call = ready.call
    rearrange, n_local = call.orders[1] if call.orders else None, call.sizes[call.rank]
    return packed_heads.to_tokens(tensors, call.sizes, n_local, rearrange, messages.sender(ready.group))


# ---- what a rank does ----


# q, k and v of all tokens; out of each chunk; lse
Saved = tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, ready: Prepared) -> tuple[Tensor, Saved]:
    """out of this rank's tokens, and what the backward needs. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    """
    call, chunks, group = ready
    if call.packs:
        q_all, k_all, v_all = _packed_to_heads([q, k, v], ready)
        out_all, lse = attend(q_all, k_all, v_all, call.plan, call.scale, call.backend)
        (out,) = _packed_to_tokens([out_all], ready)
        return out, (q_all, k_all, v_all, [out_all.contiguous()], lse)
    local = q.contiguous(), k.contiguous(), v.contiguous()
    q_all, k_all, v_all = whole = [_room(x, call.sizes) for x in local]
    sizes, out = call.sizes, q.new_empty(*q.shape[:3], v.shape[3])
    mine, all_tokens = [_of_ranks(x, len(sizes)) for x in local], [_of_tokens(x, sizes) for x in whole]
    out_mine, n_heads = _of_ranks(out, len(sizes)), [x.shape[1] for x in whole]

    def send(chunk: Chunk) -> messages.Stretches:
        of_chunk = zip(mine, all_tokens, n_heads, (chunk.q, chunk.kv, chunk.kv), strict=True)
        return _sent([(_some(a, n, heads), _some(b, n, heads)) for a, b, n, heads in of_chunk], group)

    coming, going = [send(chunk) for chunk in chunks[:AHEAD]], []
    outs, lses = [], []
    of_chunks = zip(*(parted(x, len(chunks)) for x in whole), strict=True)
    for i, (chunk, (of_q, of_k, of_v)) in enumerate(zip(chunks, of_chunks, strict=True)):
        coming += [send(later) for later in chunks[i + AHEAD : i + AHEAD + 1]]
        coming[i].arrive()
        part, lse = attend(of_q, of_k, of_v, chunk.plan, call.scale, call.backend)
        part = part.contiguous()
        going.append(_sent([(_of_tokens(part, sizes), _some(out_mine, n_heads[0], chunk.q))], group))
        outs.append(part)
        lses.append(lse)
    for stretches in going:
        stretches.arrive()
    return out, (q_all, k_all, v_all, outs, joined(lses))


def backward(dout: Tensor, dlse: Tensor | None, saved: Saved, ready: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens. Every rank of the group must call it.

    dout  of this rank's tokens and all heads; dlse of all tokens and this rank's heads, None is 0
    """
    (call, chunks, group), (q_all, k_all, v_all, outs, lse) = ready, saved
    if call.packs:
        (dout_all,) = _packed_to_heads([dout], ready)
        inputs = q_all, k_all, v_all
        found = attend_backward((dout_all, dlse), inputs, (outs[0], lse), call.plan, call.scale, call.backend)
        dq, dk, dv = _packed_to_tokens(list(found), ready)
        return dq, dk, dv
    dout = dout.contiguous()
    sizes, n_ranks, n_local = call.sizes, len(call.sizes), dout.shape[2]
    dout_all = _room(dout, call.sizes)
    grads = [x.new_empty(x.shape[0], x.shape[1] * n_ranks, n_local, x.shape[3]) for x in (q_all, k_all, v_all)]
    dout_mine, dout_tokens = _of_ranks(dout, n_ranks), _of_tokens(dout_all, sizes)
    grads_mine, n_heads = [_of_ranks(x, n_ranks) for x in grads], [x.shape[1] for x in (q_all, k_all, v_all)]

    def send(chunk: Chunk) -> messages.Stretches:
        return _sent([(_some(dout_mine, n_heads[0], chunk.q), _some(dout_tokens, n_heads[0], chunk.q))], group)

    coming, going = [send(chunk) for chunk in chunks[:AHEAD]], []
    of_chunks = zip(*(parted(x, len(chunks)) for x in (q_all, k_all, v_all, dout_all, lse)), strict=True)
    for i, (chunk, (of_q, of_k, of_v, of_dout, of_lse)) in enumerate(zip(chunks, of_chunks, strict=True)):
        coming += [send(later) for later in chunks[i + AHEAD : i + AHEAD + 1]]
        coming[i].arrive()
        douts = of_dout, None if dlse is None else of_heads(dlse, chunk.q)
        found = attend_backward(douts, (of_q, of_k, of_v), (outs[i], of_lse), chunk.plan, call.scale, call.backend)
        parts = [part.contiguous() for part in found]
        of_chunk = zip(parts, grads_mine, n_heads, (chunk.q, chunk.kv, chunk.kv), strict=True)
        going.append(_sent([(_of_tokens(a, sizes), _some(b, n, heads)) for a, b, n, heads in of_chunk], group))
    for stretches in going:
        stretches.arrive()
    dq, dk, dv = grads
    return dq, dk, dv


# ---- what a compiler sees ----


torch.library.define(
    "blocksparse_flash::whole_heads_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> "
    "(Tensor out, Tensor lse, Tensor all_q, Tensor all_k, Tensor all_v, Tensor all_out)",
)
torch.library.define(
    "blocksparse_flash::whole_heads_backward",
    "(Tensor dout, Tensor? dlse, Tensor all_q, Tensor all_k, Tensor all_v, Tensor all_out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@torch.library.impl("blocksparse_flash::whole_heads_forward", "default")
def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """lse and what follows it are those of this rank's heads and all tokens."""
    call = Call(*arguments)
    heads = q.shape[1] // len(call.sizes), k.shape[1] // len(call.sizes)
    out, (q_all, k_all, v_all, outs, lse) = forward(q, k, v, prepare(call, heads))
    return out, lse, q_all, k_all, v_all, joined(outs)


@torch.library.register_fake("blocksparse_flash::whole_heads_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    q_all, k_all, v_all = (_room(x, arguments[2]) for x in (q, k, v))
    out_all = q.new_empty(*q_all.shape[:3], v.shape[3])
    lse = q.new_empty(q_all.shape[:3], dtype=statistics(q))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, q_all, k_all, v_all, out_all


@torch.library.impl("blocksparse_flash::whole_heads_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, q_all: Tensor, k_all: Tensor, v_all: Tensor, out_all: Tensor, lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ready = prepare(Call(*arguments), (q_all.shape[1], k_all.shape[1]))
    outs = [of_heads(out_all, chunk.q) for chunk in ready.chunks]
    return backward(dout, dlse, (q_all, k_all, v_all, outs, lse), ready)


@torch.library.register_fake("blocksparse_flash::whole_heads_backward")
def _(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    # q, k, v, out and lse, the plan, orders, sizes
    *whole, n_ranks = *arguments[:3], len(arguments[7])
    return tuple(x.new_empty(x.shape[0], x.shape[1] * n_ranks, dout.shape[2], x.shape[3]) for x in whole)


# ---- what autograd sees ----


class _WholeHeads(torch.autograd.Function):
    """`forward` and `backward`: called directly with what is prepared, by the operators with the fields of a Call (None, ...)."""

    @staticmethod
    def forward(ctx: Any, ready: Prepared | None, q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        ctx.ready, ctx.flat = ready, flat[2:]
        ctx.set_materialize_grads(False)
        if ready is not None:
            out, (q_all, k_all, v_all, outs, lse) = forward(q, k, v, ready)
            ctx.save_for_backward(q_all, k_all, v_all, lse, *outs)
            return out, lse
        plan, orders = flat[:2]
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, *whole = whole_heads_forward(q, k, v, *flat)
        ctx.n_plan = len(plan)
        ctx.mark_non_differentiable(*whole)
        ctx.save_for_backward(*whole[:3], lse, whole[3], *plan, *orders)
        return out, lse, *whole

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        q_all, k_all, v_all, lse, *outs = ctx.saved_tensors
        ready: Prepared | None = ctx.ready
        if ready is None:
            outs, plan, orders = outs[:1], outs[1 : 1 + ctx.n_plan], outs[1 + ctx.n_plan :]
        call = Call(plan, orders, *ctx.flat) if ready is None else ready.call
        if dout is None:
            # only lse was used
            n_heads, n_local = q_all.shape[1] * len(call.sizes), call.sizes[call.rank]
            dout = outs[0].new_zeros(len(q_all), n_heads, n_local, v_all.shape[3])
        # a graph of the backward itself needs the dispatcher, which refuses
        if ready is not None and tracing.can_launch_directly(q_all, k_all, dout) and not torch.is_grad_enabled():
            grads = backward(dout, dlse, (q_all, k_all, v_all, outs, lse), ready)
        else:
            grads = whole_heads_backward(dout, dlse, q_all, k_all, v_all, joined(outs), lse, *call)
        return None, *grads, *(None,) * (len(ctx.flat) + 2 if ready is None else 0)


@torch.library.impl("blocksparse_flash::whole_heads_forward", "Autograd")
def _forward_with_autograd(*arguments: Any) -> Any:
    return _WholeHeads.apply(None, *arguments)


@torch.library.impl("blocksparse_flash::whole_heads_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> Any:
    return Gradients.apply(whole_heads_backward, *arguments)


whole_heads_forward = torch.ops.blocksparse_flash.whole_heads_forward.default
whole_heads_backward = torch.ops.blocksparse_flash.whole_heads_backward.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, make: Callable[[], Call], options: tuple[Any, ...], memo: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """out of this rank's tokens and all heads, lse of this rank's heads and all tokens, float32 (float64 for float64).

    make  the call, as it is with these options, which memo remembers where nothing watches
    """
    if not tracing.can_launch_directly(q, k, v):
        return whole_heads_forward(q, k, v, *make())[:2]
    ready = memo.get(options)
    if ready is None:
        call = make()
        n_ranks = len(call.sizes)
        ready = memo[options] = prepare(call, (q.shape[1] // n_ranks, k.shape[1] // n_ranks))
    if ops.is_differentiated(q, k, v):
        return _WholeHeads.apply(ready, q, k, v)
    out, saved = forward(q, k, v, ready)
    return out, saved[4]
