"""What may a caller ask of attention over a sequence that several ranks share?

Knows the order of a call: arguments are checked against the contract of attention and against the plan, before anything is
sent. Must not know what is sent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch, validation
from ..runtime import tracing
from ..runtime.tensor_spec import specs_of
from . import dtensors, exchange, times, ulysses
from .agreement import agreed
from .context_plan import ContextPlan
from .local import with_determinism


def _check(q: Tensor, k: Tensor, plan: ContextPlan, layer: int, backend: str) -> None:
    """Refuse what the plan was not made for."""
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, as distributed.plan makes it, got {type(plan).__name__}")
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(plan.layers):
        raise ValueError(f"layer must be 0 .. {len(plan.layers) - 1}, one of the plan's layouts, got {layer!r}")
    if backend == "reference":
        raise ValueError('backend="reference" computes all pairs of one process; use "auto", "triton" or "eager"')
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[2] != plan.local_length:
            raise ValueError(
                f"{name} must have the {plan.local_length} tokens of rank {plan.rank}, got {tensor.shape[2]}; "
                "plan.shard(x, dim) takes them from the whole sequence"
            )
    if (q.shape[1], k.shape[1]) != plan.heads:
        raise ValueError(
            f"q and k must have the plan's heads {plan.heads}, got ({q.shape[1]}, {k.shape[1]}); "
            "plan(..., heads=(query heads, key heads)) takes others"
        )
    if q.device != plan.device:
        raise ValueError(f"q must be on the plan's device {plan.device}, got {q.device}: use .to(plan.device)")


def n_chunks(chunks: int | None, plan: ContextPlan, layer: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> int:
    """How many messages: those asked for, or as many as take least time on the busiest rank, so that all ranks agree.

    dtype  of what is sent: that of k and v, or what autocast makes of them
    """
    (q_heads, kv_heads), found = plan.heads, plan.layers[layer]
    of_whom, seconds = "", times.exchange
    if found.scheme == "ulysses":
        if not ulysses.is_direct(plan, k.shape[3], dtype):
            # one message, or none that could be cut
            q_heads, kv_heads, of_whom = 1, 1, " that are sent together"
        else:
            q_heads, kv_heads, of_whom = q_heads // plan.n_ranks, kv_heads // plan.n_ranks, " of a rank"
        seconds = times.whole_heads
    if chunks is None and found.scheme == "all_gather":
        # as it was timed
        return 1
    if chunks is None:
        call = times.Call(k.shape[0], q_heads, q_heads // kv_heads, (k.shape[3] + v.shape[3]) / 2, dtype.itemsize)
        if torch.compiler.is_compiling():
            return times.best_chunks(found.work, call, kv_heads, seconds)
        if call not in found.memo:
            found.memo[call] = times.best_chunks(found.work, call, kv_heads, seconds)
        return found.memo[call]
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        raise TypeError(f"chunks must be an int or None, got {chunks!r}")
    if chunks < 1 or kv_heads % chunks:
        raise ValueError(f"chunks must divide the {kv_heads} key heads{of_whom}, got {chunks}; None chooses")
    return chunks


# q, k, v, plan, layer, scale, chunks, backend: the arguments of `attention`, in its order
_Asked = tuple[Tensor, Tensor, Tensor, ContextPlan, int, float | None, int | None, str]


class _Call(NamedTuple):
    scale: float
    n_chunks: int
    backend: str
    autocast: torch.dtype | None


def _checked(asked: _Asked) -> _Call:
    """What the call comes to, if its arguments fit the contract of attention and the plan."""
    q, k, v, plan, layer, scale, chunks, backend = asked
    autocast = validation.autocast_dtype(q)
    dtype, factor = validation.check(q, k, v, None, False, scale, None, 0.0, None, None, autocast)
    _check(q, k, plan, layer, backend)
    unfit_for_hopper = dispatch.unfit_for_hopper((q, k, v), dtype) if q.is_cuda else None
    # by the size of the whole: all ranks run the kernels that one process would
    n_elements = q.shape[0] * plan.length * q.shape[3] * sum(plan.heads)
    if backend == "auto" and unfit_for_hopper is None and not dispatch.is_worth_hopper(plan.length, n_elements):
        unfit_for_hopper = dispatch.SMALL
    chosen = dispatch.choose(backend, q.device, dtype, unfit_for_hopper)
    return _Call(factor, n_chunks(chunks, plan, layer, k, v, dtype), chosen, autocast)


def _checked_again(asked: _Asked) -> _Call:
    """`_checked`, found again with the plan for equal tensor specs. What is refused is not kept."""
    q, k, v, plan, layer, scale, chunks, backend = asked
    # True equals 1, and so does 1.0: of other types is looked at anew
    is_usual = (
        type(plan) is ContextPlan
        and type(layer) is int
        and (scale is None or type(scale) is float)
        and (chunks is None or type(chunks) is int)
        and type(backend) is str
        and tracing.can_launch_directly(q, k, v)
    )
    if not is_usual or (not tracing.is_without_autocast(q) and validation.autocast_dtype(q) is not None):
        return _checked(asked)
    # a device is not seen with the rest
    key = specs_of(q, k, v), q.device, k.device, v.device, layer, scale, chunks, backend
    found = plan.calls.get(key)
    if found is None:
        found = plan.calls[key] = _checked(asked)
    return found


def _agreed(asked: _Asked) -> _Call:
    """`_checked` on all ranks alike: none goes on unless all can, with calls that belong together."""
    q, k, v, plan, layer, *_ = asked
    if torch.compiler.is_compiling():
        raise ValueError(
            "plan(..., check_calls=True) compares the calls of all ranks on the host, which torch.compile cannot trace: "
            "compile with check_calls=False"
        )

    def make() -> tuple[_Call, dict[str, str]]:
        call = _checked(asked)
        facts = {
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
) -> tuple[Tensor, Tensor | None]:
    """lse may be there if it is not wanted."""
    found = plan.layers[layer]
    if found.layout is not None:
        facts = plan, found.layout, call.scale, call.n_chunks, call.backend, found.memo
        return ulysses.attend(q, k, v, *facts, wants_lse=wants_lse)
    backend = call.backend
    if backend == "hopper":
        backend = with_determinism(backend, dispatch.is_deterministic(plan.is_deterministic or None))
    options = call.n_chunks, plan.keeps_received, found.scheme == "all_gather", plan.group_name, backend
    return exchange.attention(q, k, v, found.tensors, found.counts, call.scale, options, found.memo)


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
) -> tuple[Tensor, Tensor | None]:
    if dtensors.are_dtensors(q, k, v):
        whole, (q, k, v) = q, (dtensors.to_local(name, x, plan) for name, x in (("q", q), ("k", k), ("v", v)))
        out, lse = _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=wants_lse)
        return dtensors.like(out, whole), None if lse is None else dtensors.like(lse, whole)
    checks_calls = isinstance(plan, ContextPlan) and plan.checks_calls
    call = (_agreed if checks_calls else _checked_again)((q, k, v, plan, layer, scale, chunks, backend))
    if call.autocast is None:
        return _run(q, k, v, plan, layer, call, wants_lse=wants_lse)
    # the operators choose the type of each product themselves
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
    """`attention`, and the log-sum-exp of each row's scaled scores, as blocksparse_flash.attention_with_lse gives it.

    q, k, v, plan, layer, scale, chunks, backend  as `attention`. Every rank must call this one, or every rank that one
    """
    out, lse = _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=True)
    assert lse is not None
    return out, lse


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
    """blocksparse_flash.attention over a sequence shared by several ranks: this rank's rows of it. Differentiable.

    q, k, v  (batch, heads, plan.local_length, dim): the tokens of this rank, in the order of plan.positions. Or DTensors,
             Shard(2) over the plan's group, for a contiguous plan with equally many tokens on each rank; then so is out
    plan     what `plan` made; its layout, order and scheme
    layer    which of the plan's layouts
    scale    factor on the scores; None is head_dim ** -0.5
    chunks   messages into which the key heads are divided, so that one travels while another is computed; None: up to 4,
             as many as should take least time, under "all_gather" 1. Under "ulysses" the key heads of a rank are, where each
             rank holds one stretch of the sequence
    backend  "auto", "hopper", "triton" or "eager", as in blocksparse_flash.attention
    returns  (batch, heads, plan.local_length, v_head_dim)
    raises   TypeError, ValueError on this rank if its arguments do not fit, before anything is sent; the others then
             wait for it, until the timeout of the group ends their call with an error. With plan(..., check_calls=True)
             all raise at once, naming the ranks that differ

    Every rank of the group must call it, and its backward, equally often and in the same order, with the same batch,
    dtype, head dimensions and requires_grad. The gradients are those of the sum of the losses of all ranks.
    """
    return _attend(q, k, v, plan, layer, scale, chunks, backend, wants_lse=False)[0]
