"""How does torch see the kernels? Operators with fakes and autograd: attention_forward and attention_backward, and with the
options of the scores scored_attention_forward and scored_attention_backward, so that a call without them does not pay.

Knows: tensors, a plan as a list of tensors, which module implements a backend. Does not know: BlockLayout, validation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .runtime import tracing
from .runtime.tensor_spec import TensorSpecs, is_tma_loadable
from .score_mods import Scores

# elements of q and k from which on "auto" takes `hopper`. H200, 16 heads of 128, bf16, microseconds of a forward and of a backward,
# back to back and of the GPU alone, `hopper` and `triton`: 2^23 elements in a window 95 363, 30 84 and 67 201, 28 95; dense 77 297,
# 55 161 and 68 236, 67 226. 2^24: 116 328, 57 164 and 112 231, 57 184; dense 201 664, 215 626 and 264 860, 272 849
# `triton` with one launch for dk, dv and dq takes 5 % less of the GPU in a window of 2^23, and the host less
WORTH_HOPPER = 1 << 24
# up to as many queries never
FEW_QUERIES = 64
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {saved}Tensor[] plan, Tensor? kv_lengths, Tensor? seed, "
    "float scale, bool causal, float dropout_p, str backend"
)
torch.library.define(
    "blocksparse_flash::attention_forward", f"({_ARGUMENTS.format(saved='')}) -> (Tensor out, Tensor lse)"
)
torch.library.define(
    "blocksparse_flash::attention_backward",
    f"(Tensor dout, Tensor? dlse, {_ARGUMENTS.format(saved='Tensor out, Tensor lse, ')})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)

_SCORES = "Tensor? sinks, Tensor? alibi_slopes, Tensor? block_bias"
_SCORED_ARGUMENTS = (
    f"Tensor q, Tensor k, Tensor v, {_SCORES}, {{saved}}Tensor[] plan, Tensor[] bias_index, Tensor? kv_lengths, "
    "Tensor? seed, float scale, bool causal, float dropout_p, float softcap, str backend"
)
torch.library.define(
    "blocksparse_flash::scored_attention_forward", f"({_SCORED_ARGUMENTS.format(saved='')}) -> (Tensor out, Tensor lse)"
)
# wanted: whether the gradients of sinks, alibi_slopes and block_bias are, which are empty otherwise
torch.library.define(
    "blocksparse_flash::scored_attention_backward",
    f"(Tensor dout, Tensor? dlse, {_SCORED_ARGUMENTS.format(saved='Tensor out, Tensor lse, ')}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dalibi_slopes, Tensor dblock_bias)",
)


def is_worth_hopper(q_len: int, n_elements: int) -> bool:
    """Whether "auto" should take `hopper`: its launch costs the host more than that of `triton`, its tiles are 128 queries.

    `triton` splits the keys of few queries among programs. n_elements: of q and k.
    """
    return q_len > FEW_QUERIES and n_elements >= WORTH_HOPPER


def _kernels(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of a backend; Triton is imported when first used.

    "auto" is `hopper` where that runs the call as it is, and pays; else `triton`.
    """
    if backend.startswith("auto"):
        takes = is_worth_hopper(q.shape[2], q.numel() + k.numel()) and all(
            tensor.shape[3] % 8 or is_tma_loadable(tensor) for tensor in (q, k, v)
        )
        backend = backend.replace("auto", "hopper" if takes else "triton")
    return _kernels_of(backend)


@functools.cache
def _kernels_of(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    name, _, deterministic = backend.partition(", ")
    if name == "triton":
        from .kernels.triton import backward, forward

        return forward.forward, backward.backward
    if name == "hopper":
        from .kernels.hopper import backward as hopper_backward
        from .kernels.hopper import forward as hopper_forward

        if deterministic:
            return hopper_forward.forward, functools.partial(hopper_backward.backward, deterministic=True)
        return hopper_forward.forward, hopper_backward.backward
    assert name == "eager", name
    from .kernels.eager import attention

    return attention.forward, attention.backward


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any, specs: TensorSpecs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """kind  that of q, k and v, where it is known already and of use to the kernels."""
    *rest, backend = arguments
    forward = _kernels(backend, q, k, v)[0]
    known = {} if specs is None else {"specs": specs}
    if tracing.is_current(q):
        return forward(q, k, v, *rest, **known)
    with tracing.on_device(q.device):
        return forward(q, k, v, *rest, **known)


def _backward(dout: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, q, k, v, *_, backend = arguments
    rest = arguments[:-1]
    backward = _kernels(backend, q, k, v)[1]
    if tracing.is_without_autocast(dout) and tracing.is_current(dout):
        return backward(dout, *rest)
    with tracing.on_device(dout.device):
        if not torch.is_autocast_enabled(dout.device.type):
            return backward(dout, *rest)
        # called by autograd inside a region of autocast, which must not choose the types of the products
        with torch.autocast(dout.device.type, enabled=False):
            return backward(dout, *rest)


def _scored_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    plan: list[torch.Tensor],
    bias_index: list[torch.Tensor],
    *arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *rest, softcap, backend = arguments
    return _forward(q, k, v, plan, *rest, Scores(sinks, slopes, bias, bias_index, softcap), backend)


def _scored_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: list[torch.Tensor],
    bias_index: list[torch.Tensor],
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    *rest, softcap, backend, wanted = arguments
    scores = Scores(sinks, slopes, bias, bias_index, softcap)
    return _backward(dout, dlse, q, k, v, out, lse, plan, *rest, scores, wanted, backend)


# not as decorators, which would take the functions away
torch.library.impl("blocksparse_flash::attention_forward", "default", _forward)
torch.library.impl("blocksparse_flash::attention_backward", "default", _backward)
torch.library.impl("blocksparse_flash::scored_attention_forward", "default", _scored_forward)
torch.library.impl("blocksparse_flash::scored_attention_backward", "default", _scored_backward)


@torch.library.register_fake("blocksparse_flash::attention_forward")
@torch.library.register_fake("blocksparse_flash::scored_attention_forward")
def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, q_len, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, heads, q_len, v.shape[3]), q.new_empty(batch, heads, q_len, dtype=statistics)


@torch.library.register_fake("blocksparse_flash::attention_backward")
def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("blocksparse_flash::scored_attention_backward")
def _scored_backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    lse, wanted = arguments[4], arguments[-1]
    given = (
        tensor.new_empty(tensor.shape) if is_wanted else lse.new_empty(0)
        for tensor, is_wanted in zip(arguments[:3], wanted, strict=True)
    )
    return *_backward_fake(dout, dlse, q, k, v), *given


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # anything else would be a silent wrong gradient
        raise RuntimeError(
            "attention_backward cannot be differentiated: the gradients of attention have none of their own; "
            'backend="reference" has second derivatives'
        )


@torch.library.impl("blocksparse_flash::attention_backward", "Autograd")
def _backward_with_autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Gradients.apply(_attention_backward, *arguments)


@torch.library.impl("blocksparse_flash::scored_attention_backward", "Autograd")
def _scored_backward_with_autograd(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _Gradients.apply(_scored_attention_backward, *arguments)


def _refuse_mapped(*grads: torch.Tensor | None) -> None:
    """RuntimeError for gradients that vmap holds together: the kernels know their own batch only."""
    # is_grads_batched has a vmap of its own, older than torch.func's
    known = torch._C._functorch
    if any(g is not None and (known.is_legacy_batchedtensor(g) or known.is_batchedtensor(g)) for g in grads):
        raise RuntimeError(
            "attention_backward takes one gradient at a time, but torch.vmap maps it over several, as is_grads_batched=True "
            'and vectorize=True do: take them in a loop without these, or backend="reference" goes through vmap'
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, called: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: tuple[Any, ...]
    ) -> Any:
        # what has no gradient comes as one: autograd looks at each argument
        plan, kv_lengths, seed, *ctx.options = arguments
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = called(q, k, v, *arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kv_lengths, seed, *plan)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        _refuse_mapped(dout, dlse)
        q, k, v, out, lse, kv_lengths, seed, *plan = ctx.saved_tensors
        if dout is None:
            # only lse was used
            dout = torch.zeros_like(out)
        called: Any = _attention_backward
        # a graph of the backward itself needs the dispatcher, which refuses; so do gradients that are negated when they are read
        if (
            not torch.is_grad_enabled()
            and tracing.can_launch_directly(q, k, v, dout, dlse, kv_lengths, seed)
            and not (dout.is_neg() or (dlse is not None and dlse.is_neg()))
        ):
            called = _backward
        grads = called(dout, dlse, q, k, v, out, lse, plan, kv_lengths, seed, *ctx.options)
        return None, *grads, None


class _ScoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
        *arguments: Any,
    ) -> Any:
        plan, bias_index, kv_lengths, seed, *ctx.options = arguments
        ctx.sizes = len(plan), len(bias_index)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _scored_attention_forward(q, k, v, sinks, slopes, bias, *arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, slopes, bias, out, lse, kv_lengths, seed, *plan, *bias_index)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        _refuse_mapped(dout, dlse)
        q, k, v, sinks, slopes, bias, out, lse, kv_lengths, seed, *lists = ctx.saved_tensors
        plan, bias_index = lists[: ctx.sizes[0]], lists[ctx.sizes[0] :]
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = list(ctx.needs_input_grad[3:6])
        arguments = (q, k, v, sinks, slopes, bias, out, lse, plan, bias_index, kv_lengths, seed, *ctx.options, wanted)
        *grads, dsinks, dslopes, dbias = _scored_attention_backward(dout, dlse, *arguments)
        given = (grad if is_wanted else None for grad, is_wanted in zip((dsinks, dslopes, dbias), wanted, strict=True))
        return *grads, *given, *(None,) * (4 + len(ctx.options))


# an autograd kernel of our own: torch.library.register_autograd costs 76 microseconds a call, this 21 (torch 2.13)
@torch.library.impl("blocksparse_flash::attention_forward", "Autograd")
def _forward_with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if _is_differentiated(q, k, v):
        # plan, lengths and seed come first
        called: Any = _forward if tracing.can_launch_directly(q, k, v, *arguments[1:3]) else _attention_forward
        return _Attention.apply(called, q, k, v, arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention_forward(q, k, v, *arguments)


@torch.library.impl("blocksparse_flash::scored_attention_forward", "Autograd")
def _scored_forward_with_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    wants = any(tensor is not None and tensor.requires_grad for tensor in arguments[:3]) and torch.is_grad_enabled()
    if wants or _is_differentiated(q, k, v):
        return _ScoredAttention.apply(q, k, v, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _scored_attention_forward(q, k, v, *arguments)


attention_forward = _attention_forward = torch.ops.blocksparse_flash.attention_forward.default
_attention_backward = torch.ops.blocksparse_flash.attention_backward.default
# with the options of the scores: always through the dispatcher
scored_attention_forward = _scored_attention_forward = torch.ops.blocksparse_flash.scored_attention_forward.default
_scored_attention_backward = torch.ops.blocksparse_flash.scored_attention_backward.default


def _is_differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    # inside forward-mode differentiation any tensor may carry a tangent: the autograd function refuses those
    return (
        (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    ) or forward_ad._current_level >= 0


def attention_directly(
    specs: TensorSpecs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of tensors that are plain, see `watchers.are_plain`, and have these specs: without its dispatch, 14 microseconds."""
    # `eager` reads no memory by itself
    known = None if arguments[-1] == "eager" else specs
    if _is_differentiated(q, k, v):
        return _Attention.apply(functools.partial(_forward, specs=known), q, k, v, arguments)
    return _forward(q, k, v, *arguments, specs=known)
