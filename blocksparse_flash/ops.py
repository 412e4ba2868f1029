"""The torch.library operators attention_forward and attention_backward: schemas, fakes and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .dispatch import CallSpec, resolve
from .kernels.inputs import BackwardInputs
from .plan_format import BY_KEY_BLOCK, TILE, tile_of
from .runtime import tracing
from .runtime.tensor_spec import TensorSpecs, new_in_order_of
from .score_mods import Scores

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? block_bias, Tensor? pair_bias"
# the last line holds the fields of CallSpec
_OPTIONS = (
    "Tensor[] plan, Tensor[] bias_index, Tensor? kv_lengths, Tensor? seed, "
    "float scale, bool causal, float dropout_p, float softcap, str backend, bool deterministic"
)
torch.library.define("blocksparse_flash::attention_forward", f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
# wanted: whether sinks, alibi_slopes, block_bias and pair_bias need gradients; the others are empty
torch.library.define(
    "blocksparse_flash::attention_backward",
    f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dalibi_slopes, Tensor dblock_bias, Tensor dpair_bias)",
)


# ---- launches ----


@functools.cache
def _kernels(backend: str, deterministic: bool, tile: int = TILE) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of a backend for plans with this tile size. Imports Triton when first needed."""
    if backend == "hopper" and tile == BY_KEY_BLOCK:
        from .kernels.hopper import selected_backward, selected_forward

        return selected_forward.forward, selected_backward.backward
    if backend == "hopper" and tile < TILE:
        from .kernels.hopper import fine_backward, fine_forward

        return fine_forward.forward, fine_backward.backward
    if backend == "triton":
        from .kernels.triton import backward, forward

        return forward.forward, backward.backward
    if backend == "hopper":
        from .kernels.hopper import backward as hopper_backward
        from .kernels.hopper import forward as hopper_forward

        if deterministic:
            return hopper_forward.forward, functools.partial(hopper_backward.backward, deterministic=True)
        return hopper_forward.forward, hopper_backward.backward
    assert backend == "eager", backend
    from .kernels.eager import attention

    return attention.forward, attention.backward


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    spec: CallSpec,
    scores: Scores | None = None,
    specs: TensorSpecs | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, by the kernels of spec.backend.

    specs  of q, k and v where they are known; `eager` has no use for them
    """
    tile = tile_of(plan)
    backend = resolve(q, k, v, tile) if spec.backend == "auto" else spec.backend
    forward = _kernels(backend, spec.deterministic, tile)[0]
    options: dict[str, Any] = {}
    if scores is not None:
        options["scores"] = scores
    if specs is not None and backend != "eager":
        options["specs"] = specs
    causal = spec.causal and not plan
    if tracing.is_on_current_device(q):
        return forward(q, k, v, plan, kv_lengths, seed, spec.scale, causal, spec.dropout_p, **options)
    with tracing.on_device(q.device):
        return forward(q, k, v, plan, kv_lengths, seed, spec.scale, causal, spec.dropout_p, **options)


def launch_backward(
    inputs: BackwardInputs,
    plan: list[Tensor],
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    spec: CallSpec,
    scores: Scores | None = None,
    wanted: list[bool] | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv and, with score mods, the `wanted` gradients of sinks, slopes and biases, the others empty."""
    dout, out, lse = inputs.dout, inputs.out, inputs.lse
    if out.stride(3) != 1 or not lse.is_contiguous():
        # not as the forward left them: the kernels need a last stride of 1 for out, and a contiguous lse
        inputs = inputs._replace(out=out.contiguous(), lse=lse.contiguous())
    tile = tile_of(plan)
    backend = resolve(inputs.q, inputs.k, inputs.v, tile) if spec.backend == "auto" else spec.backend
    backward = _kernels(backend, spec.deterministic, tile)[1]
    options = {} if scores is None else {"scores": scores, "wanted": wanted}
    causal = spec.causal and not plan
    arguments = (inputs, plan, kv_lengths, seed, spec.scale, causal, spec.dropout_p)
    if tracing.is_without_autocast(dout) and tracing.is_on_current_device(dout):
        return backward(*arguments, **options)
    with tracing.on_device(dout.device):
        if not torch.is_autocast_enabled(dout.device.type):
            return backward(*arguments, **options)
        # autograd called it inside a region of autocast, which must not choose the types of the products
        with torch.autocast(dout.device.type, enabled=False):
            return backward(*arguments, **options)


# ---- operators ----


def _scores(mods: Any, bias_index: list[Tensor], spec: CallSpec) -> Scores | None:
    """mods: sinks, alibi_slopes, block_bias, pair_bias. None if nothing changes the scores."""
    sinks, slopes, block_bias, pair_bias = mods
    if spec.softcap == 0.0 and all(each is None for each in mods):
        return None
    return Scores(sinks, slopes, block_bias, bias_index, spec.softcap, pair_bias, spec.causal)


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *mods, plan, bias_index, kv_lengths, seed = arguments[:8]
    spec = CallSpec(*arguments[8:])
    return launch_forward(q, k, v, plan, kv_lengths, seed, spec, _scores(mods, bias_index, spec))


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    *mods, out, lse, plan, bias_index, kv_lengths, seed = arguments[:10]
    *options, wanted = arguments[10:]
    spec = CallSpec(*options)
    scores = _scores(mods, bias_index, spec)
    inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
    grads = launch_backward(inputs, plan, kv_lengths, seed, spec, scores, wanted)
    return (*grads, *(lse.new_empty(0) for _ in mods)) if scores is None else grads


# not as decorators, which would replace the functions
torch.library.impl("blocksparse_flash::attention_forward", "default", _forward)
torch.library.impl("blocksparse_flash::attention_backward", "default", _backward)


@torch.library.register_fake("blocksparse_flash::attention_forward")
def fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return new_in_order_of(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


@torch.library.register_fake("blocksparse_flash::attention_backward")
def fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    lse, wanted = arguments[8], arguments[-1]
    # sinks, alibi_slopes, block_bias, pair_bias
    of_mods = (
        tensor.new_empty(tensor.shape) if is_wanted else lse.new_empty(0)
        for tensor, is_wanted in zip(arguments[3:7], wanted, strict=True)
    )
    return *(new_in_order_of(tensor, tensor.shape[3]) for tensor in arguments[:3]), *of_mods


# ---- autograd ----


class _Gradients(torch.autograd.Function):
    """attention_backward, whose own gradients are refused."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _attention_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # anything else would be a silent wrong gradient
        raise RuntimeError(
            'second derivatives of attention are not supported by the kernels; backend="reference" supports them'
        )


torch.library.impl("blocksparse_flash::attention_backward", "Autograd", _Gradients.apply)


def refuse_mapped(*grads: Tensor | None) -> None:
    """RuntimeError for gradients that vmap maps over, which the kernels cannot see."""
    # is_grads_batched uses a vmap of its own, older than torch.func's
    functorch = torch._C._functorch
    for grad in grads:
        if grad is not None and (functorch.is_legacy_batchedtensor(grad) or functorch.is_batchedtensor(grad)):
            raise RuntimeError(
                "attention_backward takes one gradient at a time, but torch.vmap maps it over several, as "
                "is_grads_batched=True and vectorize=True do: take them in a loop without these, or use "
                'backend="reference", which supports vmap'
            )


class _Attention(torch.autograd.Function):
    """The gradients of the operator.

    rest  plan, bias_index, kv_lengths, seed, spec: as one argument, since autograd looks at each
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        bias: Tensor | None,
        pair_bias: Tensor | None,
        rest: tuple[Any, ...],
    ) -> Any:
        plan, bias_index, kv_lengths, seed, ctx.spec = rest
        ctx.n_plan = len(plan)
        mods = (sinks, slopes, bias, pair_bias)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _attention_forward(q, k, v, *mods, plan, bias_index, kv_lengths, seed, *ctx.spec)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *mods, out, lse, kv_lengths, seed, *plan, *bias_index)
        return out, lse

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_mapped(dout, dlse)
        # read once, as gradient checkpointing requires
        saved = ctx.saved_tensors
        (q, k, v, *mods, out, lse, kv_lengths, seed), lists = saved[:11], saved[11:]
        plan, bias_index = lists[: ctx.n_plan], lists[ctx.n_plan :]
        wanted = list(ctx.needs_input_grad[3:7])
        arguments = (q, k, v, *mods, out, lse, plan, bias_index, kv_lengths, seed, *ctx.spec, wanted)
        dq, dk, dv, *others = _attention_backward(_gradient_of(out, dout), dlse, *arguments)
        of_mods = (grad if is_wanted else None for grad, is_wanted in zip(others, wanted, strict=True))
        return dq, dk, dv, *of_mods, None


class _DirectAttention(torch.autograd.Function):
    """The gradients of a direct launch, without score mods.

    rest  plan, kv_lengths, seed, spec, and the specs of q, k and v
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> Any:
        plan, kv_lengths, seed, ctx.spec, specs = rest
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = launch_forward(q, k, v, plan, kv_lengths, seed, ctx.spec, specs=specs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kv_lengths, seed, *plan)
        return out, lse

    jvp = staticmethod(_Attention.jvp)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_mapped(dout, dlse)
        # read once, as gradient checkpointing requires
        q, k, v, out, lse, kv_lengths, seed, *plan = ctx.saved_tensors
        dout = _gradient_of(out, dout)
        if (
            # the dispatcher must see the graph of a backward, and resolves gradients with a negative bit
            not torch.is_grad_enabled()
            and tracing.can_launch_directly(q, k, v, dout, dlse, kv_lengths, seed)
            and not (dout.is_neg() or (dlse is not None and dlse.is_neg()))
        ):
            inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
            return *launch_backward(inputs, plan, kv_lengths, seed, ctx.spec), None
        none, wanted = (None,) * 4, [False] * 4
        arguments = (q, k, v, *none, out, lse, plan, [], kv_lengths, seed, *ctx.spec, wanted)
        return *_attention_backward(dout, dlse, *arguments)[:3], None


# what Function.apply calls, without the Python around it, which is for torch.func: that takes 2 microseconds
_apply_directly = super(torch.autograd.Function, _DirectAttention).apply


def _gradient_of(out: Tensor, dout: Tensor | None) -> Tensor:
    """dout, or zeros if only lse was used."""
    return torch.zeros_like(out) if dout is None else dout


def refuse_forward_mode() -> NoReturn:
    """RuntimeError for tangents of torch.autograd.forward_ad."""
    raise RuntimeError(
        "forward-mode differentiation (torch.autograd.forward_ad) is not supported by the kernels; "
        'backend="reference" supports it'
    )


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd must see a call on these tensors."""
    # inside forward-mode differentiation any tensor may carry a tangent, which the autograd function refuses
    if forward_ad._current_level >= 0:
        return True
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


# an autograd kernel of our own: torch.library.register_autograd costs 76 microseconds a call, this 21 (torch 2.13)
@torch.library.impl("blocksparse_flash::attention_forward", "Autograd")
def _forward_with_autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    if is_differentiated(*arguments[:7]):
        return _Attention.apply(*arguments[:7], (*arguments[7:11], CallSpec(*arguments[11:])))
    with torch._C._AutoDispatchBelowAutograd():
        return _attention_forward(*arguments)


_attention_forward = torch.ops.blocksparse_flash.attention_forward.default
_attention_backward = torch.ops.blocksparse_flash.attention_backward.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    spec: CallSpec,
    specs: TensorSpecs | None = None,
    *,
    mods: tuple[Tensor | None, ...] = (None, None, None, None),
    bias_index: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable.

    mods   sinks, alibi_slopes, block_bias and pair_bias
    specs  of plain tensors without score mods: the call skips the dispatcher, which takes 14 microseconds
    """
    if specs is None:
        return _attention_forward(q, k, v, *mods, plan, bias_index or [], kv_lengths, seed, *spec)
    if is_differentiated(q, k, v):
        return _apply_directly(q, k, v, (plan, kv_lengths, seed, spec, specs))
    return launch_forward(q, k, v, plan, kv_lengths, seed, spec, specs=specs)
