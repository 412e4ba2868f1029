"""attention and attention_with_lse over a shared sequence. Arguments are checked before anything is sent."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, validation
from . import all_to_all, dtensors, pass_kv, time_model, ulysses
from .agreement import agreed, refuse_compiled_calls
from .communication import redistribute, refuse_transforms
from .context_plan import ContextPlan, check_layer, check_plan


def _check(q: Tensor, k: Tensor, plan: ContextPlan, layer: int, backend: str) -> None:
    """Raises if the arguments do not fit the plan."""
    check_layer(plan, layer)
    if backend == "reference":
        raise ValueError('backend="reference" runs in a single process only; use "auto", "triton" or "eager"')
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[2] != plan.local_length:
            raise ValueError(
                f"{name} must have the {plan.local_length} tokens of rank {plan.rank}, got {tensor.shape[2]}; "
                "plan.shard(x, dim) takes them from the whole sequence"
            )
    if (q.shape[1], k.shape[1]) != plan.heads:
        raise ValueError(
            f"q and k must have the plan's heads {plan.heads}, got ({q.shape[1]}, {k.shape[1]}); "
            "plan(..., heads=(query heads, KV heads)) takes others"
        )
    if plan.layers[layer].batch not in (1, q.shape[0]):
        raise ValueError(
            f"layout of layer {layer} must have batch 1 or q's {q.shape[0]}, got {plan.layers[layer].batch}; build it "
            "for that batch"
        )
    if q.device != plan.device:
        raise ValueError(f"q must be on the plan's device {plan.device}, got {q.device}: use .to(plan.device)")


def _is_direct(plan: ContextPlan, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether Ulysses sends heads directly, without packing: each rank holds one long contiguous range.

    head_dim, dtype  of the keys
    """
    n_tokens = plan.length // plan.n_ranks
    return plan.rearrange is None and time_model.sends_heads_directly(n_tokens, head_dim, dtype.itemsize)


def n_chunks(chunks: int | None, plan: ContextPlan, layer: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> int:
    """Number of messages: `chunks`, or the fastest for the busiest rank, so that all ranks agree.

    dtype  of the keys and values that are sent, after autocast
    """
    (q_heads, kv_heads), found = plan.heads, plan.layers[layer]
    whose, seconds = "", time_model.pass_kv
    if found.scheme == "ulysses":
        seconds = time_model.direct_ulysses
        if _is_direct(plan, k.shape[3], dtype):
            q_heads, kv_heads, whose = q_heads // plan.n_ranks, kv_heads // plan.n_ranks, " of a rank"
        else:
            q_heads, kv_heads, whose = 1, 1, " that are sent together"
    if chunks is None:
        # only one message was timed
        if found.scheme == "all_gather":
            return 1
        call = time_model.Call(k.shape[0], q_heads, q_heads // kv_heads, (k.shape[3] + v.shape[3]) / 2, dtype.itemsize)
        return time_model.best_chunks(found.costs.work, call, kv_heads, seconds)
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"chunks must be an int or None, got {chunks!r}")
    if chunks < 1 or kv_heads % chunks:
        raise ValueError(f"chunks must divide the {kv_heads} KV heads{whose}, got {chunks}; None chooses")
    return chunks


class _Call(NamedTuple):
    scale: float
    n_chunks: int
    backend: str
    autocast: torch.dtype | None


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    layer: int,
    scale: float | None,
    chunks: int | None,
    backend: str,
) -> _Call:
    """The checked call: raises if the arguments do not fit attention or the plan."""
    refuse_transforms(*(x for x in (q, k, v) if isinstance(x, Tensor)))
    autocast = validation.autocast_dtype(q)
    dtype, factor = validation.check(q, k, v, None, False, scale, None, 0.0, None, None, autocast)
    _check(q, k, plan, layer, backend)
    why_not_hopper = dispatch.why_not_hopper((q, k, v), dtype) if q.is_cuda else None
    # by the size of the whole sequence, so that all ranks run the kernels of one process
    n_elements = q.shape[0] * plan.length * q.shape[3] * sum(plan.heads)
    if backend == "auto" and why_not_hopper is None and not dispatch.is_worth_hopper(plan.length, n_elements):
        why_not_hopper = dispatch.SMALL
    chosen = dispatch.choose(backend, q.device, dtype, why_not_hopper)
    return _Call(factor, n_chunks(chunks, plan, layer, k, v, dtype), chosen, autocast)


def _checked_on_all_ranks(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, layer: int, *options: Any, wants_lse: bool
) -> _Call:
    """`_checked` on all ranks: all raise if one raises or if their calls differ."""
    refuse_compiled_calls()

    def make() -> tuple[_Call, dict[str, str]]:
        call = _checked(q, k, v, plan, layer, *options)
        facts = {
            "function": "attention_with_lse" if wants_lse else "attention",
            "plan": plan.digest,
            "batch": str(q.shape[0]),
            "head dimensions": f"{q.shape[3]} and {v.shape[3]}",
            "dtype": str(q.dtype if call.autocast is None else call.autocast),
            "requires_grad of q, k, v": str([tensor.requires_grad for tensor in (q, k, v)]),
            "layer": str(layer),
            "scale": str(call.scale),
            "chunks": str(call.n_chunks),
        }
        return call, facts

    return agreed(make, plan.group, "attention")


def _run(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, layer: int, call: _Call, *, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is of this rank's tokens if wants_lse."""
    found = plan.layers[layer]
    common = plan.group_name, call.backend, dispatch.is_deterministic(plan.is_deterministic or None)
    options: tuple[Any, ...] = plan.keeps_received, found.scheme == "all_gather", *common
    run = pass_kv.attention
    if found.scheme == "ulysses":
        options = not _is_direct(plan, k.shape[3], k.dtype), *common
        run = ulysses.attention
    out, lse = run(q, k, v, found.tensors, found.counts, (call.scale, call.n_chunks, *options), found.cache)
    if wants_lse and found.scheme == "ulysses":
        send = partial(redistribute, group=plan.group_name)
        (lse,) = all_to_all.to_tokens([lse[..., None]], plan.sizes, plan.local_length, plan.rearrange, send)
        lse = lse[..., 0]
    return out, lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    layer: int,
    scale: float | None,
    chunks: int | None,
    backend: str,
    *,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    check_plan(plan)
    if dtensors.are_dtensors(q, k, v):
        whole = q
        q, k, v = (dtensors.to_local(name, x, plan, whole) for name, x in (("q", q), ("k", k), ("v", v)))
        out, lse = _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=wants_lse)
        return dtensors.like(out, whole), dtensors.like(lse, whole) if wants_lse else lse
    if plan.checks_calls:
        call = _checked_on_all_ranks(q, k, v, plan, layer, scale, chunks, backend, wants_lse=wants_lse)
    else:
        call = _checked(q, k, v, plan, layer, scale, chunks, backend)
    if call.autocast is None:
        return _run(q, k, v, plan, layer, call, wants_lse=wants_lse)
    # the operators choose the dtype of each product themselves
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (tensor.to(validation.under_autocast(tensor.dtype, call.autocast)) for tensor in (q, k, v))
        return _run(q, k, v, plan, layer, call, wants_lse=wants_lse)


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    *,
    layer: int = 0,
    scale: float | None = None,
    chunks: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each row's scaled scores, as blocksparse_flash.attention_with_lse returns it.

    q, k, v, plan, layer, scale, chunks, backend  as `attention`. All ranks must call the same one of the two functions
    """
    return _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=True)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    *,
    layer: int = 0,
    scale: float | None = None,
    chunks: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """blocksparse_flash.attention over a sequence shared by several ranks, for the tokens of this rank. Differentiable.

    q, k, v  (batch, heads, plan.local_length, dim): the tokens of this rank, in the order of plan.positions. Or
             DTensors of equal placements, Shard(2) over the plan's group, for a contiguous plan with equal numbers of
             tokens; out is then a DTensor too
    plan     ContextPlan, whose process group was not destroyed
    layer    index of the plan's layout
    scale    factor on the scores; None is head_dim ** -0.5
    chunks   number of messages, a divisor of the KV heads: one travels while another is computed. Under "ulysses" a
             divisor of a rank's KV heads if tokens are in "contiguous" order and the messages are large; else 1. None
             chooses up to 4, and 1 under "all_gather"
    backend  "auto", "hopper", "triton" or "eager", as in blocksparse_flash.attention
    returns  (batch, heads, plan.local_length, v_head_dim)
    raises   TypeError, ValueError on this rank if its arguments do not fit, and RuntimeError under torch.func and
             forward-mode differentiation, before anything is sent; the other ranks then fail after the group's timeout.
             With plan(..., check_calls=True) all ranks raise at once

    Every rank of the group must call it and its backward equally often and in the same order, with the same batch,
    dtype, head dimensions and requires_grad. The gradients are those of the sum of the losses of all ranks.
    """
    return _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=False)[0]
