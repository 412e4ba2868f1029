"""Ulysses: all-to-all from tokens to heads, attention of one process over all tokens, all-to-all back.

DeepSpeed-Ulysses (Jacobs et al., 2023, section 3.1), for any ratio of grouped heads and any shard sizes, as long as the
number of ranks divides the key heads. Two ways to send:

    direct  each rank holds one long stretch of the sequence. Heads travel in chunks, straight from the tensors to where
            the kernels read them, without copies, while other chunks are computed
    packed  otherwise. One message carries q, k and v, and one carries out: see all_to_all.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, ops, validation
from ..dispatch import CallSpec
from ..layout import BlockLayout
from ..runtime import tracing
from . import all_to_all, communication, time_model
from .local_attention import accumulator_dtype, attend, attend_backward, call_spec
from .pass_kv import Chunk, Gradients, cat_heads, chunk_heads, head_chunks, select_heads

if TYPE_CHECKING:
    from .context_plan import ContextPlan

# arguments of both operators
_ARGUMENTS = (
    "Tensor[] plan, Tensor[] orders, SymInt[] sizes, SymInt rank, float scale, bool packs, SymInt n_chunks, str group, "
    "str backend, bool deterministic"
)
# chunks in flight ahead of the one being computed
PREFETCH = 2


class Call(NamedTuple):
    """The arguments of a call besides q, k and v.

    plan    kernel plan of this rank's heads
    orders  restore and rearrange of all_to_all.py, or empty
    sizes   tokens of each rank
    packs   True: one packed message and n_chunks 1; False: direct messages, orders is empty
    group   name of the process group
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
    deterministic: bool

    @property
    def spec(self) -> CallSpec:
        """The spec of the attention of this rank's heads."""
        return call_spec(self.scale, self.backend, self.deterministic)


def _empty_for_all_tokens(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Buffer for this rank's heads of all tokens, from a tensor with all heads."""
    return x.new_empty(x.shape[0], x.shape[1] // len(sizes), sum(sizes), x.shape[3])


def _heads_by_rank(local: Tensor, n_ranks: int) -> list[list[Tensor]]:
    """For each sequence and head of a rank, that head of each rank, of contiguous (batch, heads, tokens, dim)."""
    n_heads, found = local.shape[1], local.flatten(0, 1).unbind()
    share = n_heads // n_ranks
    firsts = [batch * n_heads + head for batch in range(local.shape[0]) for head in range(share)]
    return [list(found[first : first + n_heads - share + 1 : share]) for first in firsts]


def _tokens_by_rank(whole: Tensor, sizes: list[int]) -> list[list[Tensor]]:
    """For each sequence and head, the tokens of each rank, of contiguous (batch, heads, all tokens, dim)."""
    n_ranks, n_heads = len(sizes), whole.shape[0] * whole.shape[1]
    found = whole.flatten(0, 2).split_with_sizes(sizes * n_heads)
    return [list(found[i : i + n_ranks]) for i in range(0, n_heads * n_ranks, n_ranks)]


def _of_heads(stretches: list[list[Tensor]], n_heads: int, heads: slice | None) -> list[list[Tensor]]:
    """The entries of some heads of each sequence; None means all."""
    if heads is None:
        return stretches
    firsts = range(0, len(stretches), n_heads)
    return [of_head for first in firsts for of_head in stretches[first + heads.start : first + heads.stop]]


def _send(pairs: list[tuple[list[list[Tensor]], list[list[Tensor]]]], group: Any) -> communication.GroupedAllToAll:
    """Starts one grouped all-to-all for (sent, received) of several tensors."""
    sent, received = ([part for pair in pairs for part in pair[i]] for i in (0, 1))
    return communication.GroupedAllToAll(sent, received, group)


class UlyssesContext(NamedTuple):
    """A call, its chunks of this rank's heads and its process group; cached per layer and options."""

    call: Call
    chunks: list[Chunk]
    group: Any


def ulysses_context(call: Call, heads: tuple[int, int]) -> UlyssesContext:
    """heads: (query heads, key heads) of this rank."""
    return UlyssesContext(
        call, head_chunks(call.n_chunks, heads, call.plan), communication.process_group_of(call.group)
    )


def _packed_to_heads(tensors: list[Tensor], context: UlyssesContext) -> list[Tensor]:
    call = context.call
    restore = call.orders[0] if call.orders else None
    return all_to_all.to_heads(tensors, call.sizes, restore, communication.sender(context.group))


def _packed_to_tokens(tensors: list[Tensor], context: UlyssesContext) -> list[Tensor]:
    call = context.call
    rearrange, n_local = call.orders[1] if call.orders else None, call.sizes[call.rank]
    return all_to_all.to_tokens(tensors, call.sizes, n_local, rearrange, communication.sender(context.group))


# q, k and v of all tokens; out of each chunk; lse
Saved = tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, context: UlyssesContext) -> tuple[Tensor, Saved]:
    """out of this rank's tokens, and tensors for the backward. Every rank of the group must call it.

    q, k, v   (batch, heads, n, dim) of the n tokens of this rank
    """
    call, chunks, group = context
    if call.packs:
        q_all, k_all, v_all = _packed_to_heads([q, k, v], context)
        out_all, lse = attend(q_all, k_all, v_all, call.plan, call.spec)
        (out,) = _packed_to_tokens([out_all], context)
        return out, (q_all, k_all, v_all, [out_all.contiguous()], lse)
    local = q.contiguous(), k.contiguous(), v.contiguous()
    q_all, k_all, v_all = whole = [_empty_for_all_tokens(x, call.sizes) for x in local]
    sizes, out = call.sizes, q.new_empty(*q.shape[:3], v.shape[3])
    mine, all_tokens = [_heads_by_rank(x, len(sizes)) for x in local], [_tokens_by_rank(x, sizes) for x in whole]
    out_mine, n_heads = _heads_by_rank(out, len(sizes)), [x.shape[1] for x in whole]

    def send(chunk: Chunk) -> communication.GroupedAllToAll:
        of_chunk = zip(mine, all_tokens, n_heads, (chunk.q, chunk.kv, chunk.kv), strict=True)
        return _send([(_of_heads(a, n, heads), _of_heads(b, n, heads)) for a, b, n, heads in of_chunk], group)

    coming, going = [send(chunk) for chunk in chunks[:PREFETCH]], []
    outs, lses = [], []
    of_chunks = zip(*(chunk_heads(x, len(chunks)) for x in whole), strict=True)
    for i, (chunk, (of_q, of_k, of_v)) in enumerate(zip(chunks, of_chunks, strict=True)):
        coming += [send(later) for later in chunks[i + PREFETCH : i + PREFETCH + 1]]
        coming[i].wait()
        part, lse = attend(of_q, of_k, of_v, chunk.plan, call.spec)
        part = part.contiguous()
        going.append(_send([(_tokens_by_rank(part, sizes), _of_heads(out_mine, n_heads[0], chunk.q))], group))
        outs.append(part)
        lses.append(lse)
    for stretches in going:
        stretches.wait()
    return out, (q_all, k_all, v_all, outs, cat_heads(lses))


def backward(dout: Tensor, dlse: Tensor | None, saved: Saved, context: UlyssesContext) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens. Every rank of the group must call it.

    dout  of this rank's tokens and all heads; dlse of all tokens and this rank's heads, None is 0
    """
    (call, chunks, group), (q_all, k_all, v_all, outs, lse) = context, saved
    if call.packs:
        (dout_all,) = _packed_to_heads([dout], context)
        inputs = q_all, k_all, v_all
        found = attend_backward((dout_all, dlse), inputs, (outs[0], lse), call.plan, call.spec)
        dq, dk, dv = _packed_to_tokens(list(found), context)
        return dq, dk, dv
    dout = dout.contiguous()
    sizes, n_ranks, n_local = call.sizes, len(call.sizes), dout.shape[2]
    dout_all = _empty_for_all_tokens(dout, call.sizes)
    grads = [x.new_empty(x.shape[0], x.shape[1] * n_ranks, n_local, x.shape[3]) for x in (q_all, k_all, v_all)]
    dout_mine, dout_tokens = _heads_by_rank(dout, n_ranks), _tokens_by_rank(dout_all, sizes)
    grads_mine, n_heads = [_heads_by_rank(x, n_ranks) for x in grads], [x.shape[1] for x in (q_all, k_all, v_all)]

    def send(chunk: Chunk) -> communication.GroupedAllToAll:
        return _send([(_of_heads(dout_mine, n_heads[0], chunk.q), _of_heads(dout_tokens, n_heads[0], chunk.q))], group)

    coming, going = [send(chunk) for chunk in chunks[:PREFETCH]], []
    of_chunks = zip(*(chunk_heads(x, len(chunks)) for x in (q_all, k_all, v_all, dout_all, lse)), strict=True)
    for i, (chunk, (of_q, of_k, of_v, of_dout, of_lse)) in enumerate(zip(chunks, of_chunks, strict=True)):
        coming += [send(later) for later in chunks[i + PREFETCH : i + PREFETCH + 1]]
        coming[i].wait()
        douts = of_dout, None if dlse is None else select_heads(dlse, chunk.q)
        found = attend_backward(douts, (of_q, of_k, of_v), (outs[i], of_lse), chunk.plan, call.spec)
        parts = [part.contiguous() for part in found]
        of_chunk = zip(parts, grads_mine, n_heads, (chunk.q, chunk.kv, chunk.kv), strict=True)
        going.append(_send([(_tokens_by_rank(a, sizes), _of_heads(b, n, heads)) for a, b, n, heads in of_chunk], group))
    for stretches in going:
        stretches.wait()
    dq, dk, dv = grads
    return dq, dk, dv


torch.library.define(
    "blocksparse_flash::ulysses_forward",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> "
    "(Tensor out, Tensor lse, Tensor all_q, Tensor all_k, Tensor all_v, Tensor all_out)",
)
torch.library.define(
    "blocksparse_flash::ulysses_backward",
    "(Tensor dout, Tensor? dlse, Tensor all_q, Tensor all_k, Tensor all_v, Tensor all_out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@torch.library.impl("blocksparse_flash::ulysses_forward", "default")
def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """All results but out hold this rank's heads and all tokens."""
    call = Call(*arguments)
    heads = q.shape[1] // len(call.sizes), k.shape[1] // len(call.sizes)
    out, (q_all, k_all, v_all, outs, lse) = forward(q, k, v, ulysses_context(call, heads))
    return out, lse, q_all, k_all, v_all, cat_heads(outs)


@torch.library.register_fake("blocksparse_flash::ulysses_forward")
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    q_all, k_all, v_all = (_empty_for_all_tokens(x, arguments[2]) for x in (q, k, v))
    out_all = q.new_empty(*q_all.shape[:3], v.shape[3])
    lse = q.new_empty(q_all.shape[:3], dtype=accumulator_dtype(q))
    return q.new_empty(*q.shape[:3], v.shape[3]), lse, q_all, k_all, v_all, out_all


@torch.library.impl("blocksparse_flash::ulysses_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, q_all: Tensor, k_all: Tensor, v_all: Tensor, out_all: Tensor, lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    context = ulysses_context(Call(*arguments), (q_all.shape[1], k_all.shape[1]))
    outs = [select_heads(out_all, chunk.q) for chunk in context.chunks]
    return backward(dout, dlse, (q_all, k_all, v_all, outs, lse), context)


@torch.library.register_fake("blocksparse_flash::ulysses_backward")
def _(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    # q, k, v, out and lse, the plan, orders, sizes
    *whole, n_ranks = *arguments[:3], len(arguments[7])
    return tuple(x.new_empty(x.shape[0], x.shape[1] * n_ranks, dout.shape[2], x.shape[3]) for x in whole)


class _Ulysses(torch.autograd.Function):
    """`forward` and `backward`; called with a UlyssesContext, or by operators with None and the fields of a Call."""

    @staticmethod
    def forward(
        ctx: Any, context: UlyssesContext | None, q: Tensor, k: Tensor, v: Tensor, *flat: Any
    ) -> tuple[Tensor, ...]:
        ctx.context, ctx.flat = context, flat[2:]
        ctx.set_materialize_grads(False)
        if context is not None:
            out, (q_all, k_all, v_all, outs, lse) = forward(q, k, v, context)
            ctx.save_for_backward(q_all, k_all, v_all, lse, *outs)
            return out, lse
        plan, orders = flat[:2]
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, *whole = ulysses_forward(q, k, v, *flat)
        ctx.n_plan = len(plan)
        ctx.mark_non_differentiable(*whole)
        ctx.save_for_backward(*whole[:3], lse, whole[3], *plan, *orders)
        return out, lse, *whole

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> Any:
        q_all, k_all, v_all, lse, *outs = ctx.saved_tensors
        context: UlyssesContext | None = ctx.context
        if context is None:
            outs, plan, orders = outs[:1], outs[1 : 1 + ctx.n_plan], outs[1 + ctx.n_plan :]
        call = Call(plan, orders, *ctx.flat) if context is None else context.call
        if dout is None:
            # only lse was used
            n_heads, n_local = q_all.shape[1] * len(call.sizes), call.sizes[call.rank]
            dout = outs[0].new_zeros(len(q_all), n_heads, n_local, v_all.shape[3])
        # create_graph=True goes through the dispatcher, which raises
        if context is not None and tracing.can_launch_directly(q_all, k_all, dout) and not torch.is_grad_enabled():
            grads = backward(dout, dlse, (q_all, k_all, v_all, outs, lse), context)
        else:
            grads = ulysses_backward(dout, dlse, q_all, k_all, v_all, cat_heads(outs), lse, *call)
        return None, *grads, *(None,) * (len(ctx.flat) + 2 if context is None else 0)


@torch.library.impl("blocksparse_flash::ulysses_forward", "Autograd")
def _forward_with_autograd(*arguments: Any) -> Any:
    return _Ulysses.apply(None, *arguments)


@torch.library.impl("blocksparse_flash::ulysses_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> Any:
    return Gradients.apply(ulysses_backward, *arguments)


ulysses_forward = torch.ops.blocksparse_flash.ulysses_forward.default
ulysses_backward = torch.ops.blocksparse_flash.ulysses_backward.default


def _run(
    q: Tensor, k: Tensor, v: Tensor, make: Callable[[], Call], options: tuple[Any, ...], cache: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    """out of this rank's tokens and all heads, lse of this rank's heads and all tokens, float32 (float64 for float64).

    make  builds the call of these options; its result is kept in `cache` if nothing traces the call
    """
    if not tracing.can_launch_directly(q, k, v):
        return ulysses_forward(q, k, v, *make())[:2]
    context = cache.get(options)
    if context is None:
        call = make()
        n_ranks = len(call.sizes)
        context = cache[options] = ulysses_context(call, (q.shape[1] // n_ranks, k.shape[1] // n_ranks))
    if ops.is_differentiated(q, k, v):
        return _Ulysses.apply(context, q, k, v)
    out, saved = forward(q, k, v, context)
    return out, saved[4]


def is_direct(plan: ContextPlan, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether heads are sent directly, without packing: each rank holds one long stretch of the sequence.

    head_dim, dtype  of the keys
    """
    return plan.rearrange is None and time_model.sends_heads_directly(
        plan.length // plan.n_ranks, head_dim, dtype.itemsize
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, layout: BlockLayout, scale: float, n_chunks: int, backend: str,
    cache: dict[Any, Any], *, wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out and lse (or None) of this rank's tokens. Every rank of the plan must call it with equal options.

    cache  LayerPlan.cache of the layer
    """
    if layout.shape[0] != 1:
        validation.check_layout(layout, q.shape[0], q.shape[1] // plan.n_ranks, plan.length, plan.length)
    deterministic = dispatch.is_deterministic(plan.is_deterministic or None)
    packs = not is_direct(plan, k.shape[3], k.dtype)

    def call() -> Call:
        orders = [] if plan.restore is None or plan.rearrange is None else [plan.restore, plan.rearrange]
        kernel_plan = list(layout.plan(q.device))
        options = scale, packs, n_chunks, plan.group_name, backend, deterministic
        return Call(kernel_plan, orders, plan.sizes, plan.rank, *options)

    out, lse = _run(q, k, v, call, (scale, packs, n_chunks, backend, deterministic), cache)
    if not wants_lse:
        return out, None
    send = partial(communication.redistribute, group=plan.group_name)
    (lse,) = all_to_all.to_tokens([lse[..., None]], plan.sizes, plan.local_length, plan.rearrange, send)
    return out, lse[..., 0]
