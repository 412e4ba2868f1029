"""What may a caller ask of attention, and which backend answers?

Knows the order of a call: the contract checks every argument, a backend is chosen, a layout becomes a plan, and the call goes
to the operators (or to the reference). Must not know how a kernel works, or that patterns exist.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import explanation, ops, reference, validation
from .explanation import Explanation
from .explanation.call import Call
from .layout import BlockLayout
from .plan import block_bias as biases
from .runtime import tracing
from .runtime.tensor_spec import TensorSpecs, is_tma_loadable, specs_of
from .validation import ScoreOptions

BACKENDS = ("auto", "hopper", "triton", "eager", "reference")
# Gluon, in which the Hopper kernels are written, changes from release to release: those that were tested
TRITONS_WITH_HOPPER = ("3.6", "3.7", "3.8", "3.9")
NO_DROPOUT = "it has no dropout"
SMALL = "a call this small, or of few queries, ends sooner without it"
# q is a fake tensor
NO_GPU = "this machine has no CUDA device"
NO_SCORES = "it has no sinks, softcap, alibi_slopes or block_bias"


# ---- which backend? ----


@functools.cache
def _why_not_on_gpu(index: int | None) -> str | None:
    """Why Triton's kernels cannot run on a CUDA device, or None. Neither the device nor the installation changes."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"it needs compute capability 8.0 or later, this GPU has {major}.{minor}"


@functools.cache
def _why_not_on_hopper(index: int | None) -> str | None:
    """Why the Hopper kernels cannot run on a CUDA device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if not torch.cuda.is_available():
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"it needs compute capability 9.0, this GPU has {major}.{minor}"
    if triton.knobs.runtime.interpret:
        return "Triton's interpreter, which TRITON_INTERPRET=1 asks for, does not know Gluon"
    if ".".join(triton.__version__.split(".")[:2]) not in TRITONS_WITH_HOPPER:
        return f"it was tested with Triton {', '.join(TRITONS_WITH_HOPPER)}, this is {triton.__version__}"
    return None


def _unfit_for_hopper(
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    dropout_p: float,
    scores: ScoreOptions | None = None,
) -> str | None:
    """What about a call on a GPU the Hopper kernels have no code for, or None."""
    return _unfit_on_gpu(q, k, v, dtype, dropout_p, scores, None) if device.type == "cuda" else None


def _unfit_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    dropout_p: float,
    scores: ScoreOptions | None,
    specs: TensorSpecs | None,
) -> str | None:
    """The same of tensors on a GPU. torch.compile traces this."""
    if dropout_p > 0:
        return NO_DROPOUT
    if scores is not None:
        return NO_SCORES
    if specs is not None and specs.is_tma_loadable:
        return None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        # of rows that are no multiple of 16 bytes the kernels make a copy, autocast of another type: those fit
        if tensor.shape[3] % 8 == 0 and tensor.dtype == dtype and tensor.numel() > 0 and not is_tma_loadable(tensor):
            return f"it needs strides and an address of {name} that are multiples of 16 bytes; {name}.contiguous() or .clone() has them"
    return None


def _why_not(backend: str, device: torch.device, dtype: torch.dtype, unfit_for_hopper: str | None = None) -> str | None:
    """The reason why a backend cannot run such tensors, or None."""
    if backend == "hopper":
        if device.type != "cuda":
            return f"it needs a CUDA device, got {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, got {dtype}"
        return _why_not_on_hopper(device.index) or unfit_for_hopper
    if backend != "triton":
        return None
    if dtype is torch.float64:
        return "it needs float16, bfloat16 or float32, got torch.float64"
    if device.type == "cuda":
        return _why_not_on_gpu(device.index)
    if device.type != "cpu":
        return f"it needs a CUDA device, got {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if not triton.knobs.runtime.interpret:
        return (
            f"it needs a CUDA device (or TRITON_INTERPRET=1, set before import, to interpret it slowly), got {device}"
        )
    return None


# what "auto" may take on a GPU, best first
AUTO_ON_GPU = ("hopper", "triton")


def _choose(backend: str, device: torch.device, dtype: torch.dtype, unfit_for_hopper: str | None = None) -> str:
    if backend == "auto":
        if device.type != "cuda":
            return "eager"
        able = (name for name in AUTO_ON_GPU if _why_not(name, device, dtype, unfit_for_hopper) is None)
        return next(able, "eager")
    if not isinstance(backend, str):
        raise TypeError(f'backend must be a str, one of {BACKENDS}, got {backend!r}; "auto" chooses')
    if backend not in BACKENDS:
        instead = _choose("auto", device, dtype, unfit_for_hopper)
        raise ValueError(f'backend must be one of {BACKENDS}, got "{backend}"; "auto" would use "{instead}"')
    why_not = _why_not(backend, device, dtype, unfit_for_hopper)
    if why_not is not None:
        instead = _choose("auto", device, dtype, unfit_for_hopper)
        raise ValueError(f'backend="{backend}" cannot run this call: {why_not}. backend="auto" would use "{instead}"')
    return backend


def _for_operator(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    unfit_for_hopper: str | None,
    deterministic: bool | None,
    is_on_gpu: bool = False,
) -> str:
    """The name that the operators know a backend by.

    Where "auto" is `hopper` that is "auto": the operator, which sees addresses and sizes where torch.compile does not, leaves
    what is too small or lies badly to `triton`.
    """
    choose = _choose_again if is_on_gpu and isinstance(backend, str) else _choose
    chosen = choose(backend, device, dtype, unfit_for_hopper)
    return _promising(backend, deterministic) if chosen == "hopper" else chosen


def _promising(hopper: str, deterministic: bool | None) -> str:
    """The operators' name of `hopper`, or of the "auto" that may be it, with or without equal bits of dq."""
    return f"{hopper}, deterministic" if _is_deterministic(deterministic) else hopper


# under torch.compile the answer is computed once and becomes a constant of the graph. This is what
# torch.compiler.assume_constant_result does, but that imports the whole compiler and triton with it: 3 s at each import
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]
# of a GPU, which does not change, nor does the installation; what is refused is not kept
_choose_again = functools.lru_cache(maxsize=4096)(_choose)


# ---- what would happen? ----


def _why(backend: str, device: torch.device, is_asked_for: bool) -> str:
    if is_asked_for:
        return "asked for by name"
    if backend == "hopper":
        return f"q is on {device}, which runs the kernels for compute capability 9.0"
    if backend == "triton":
        return f"q is on {device}, which runs the Triton kernels"
    return f"the backend for every device and type, in memory proportional to the stored blocks; q is on {device}"


def _why_other(
    backend: str, device: torch.device, dtype: torch.dtype, is_asked_for: bool, unfit_for_hopper: str | None
) -> str:
    """Why a backend is not the chosen one."""
    why_not = _why_not(backend, device, dtype, unfit_for_hopper)
    if why_not is not None:
        return why_not
    if is_asked_for:
        return "could run, but another was asked for by name"
    if backend == "triton" and device.type == "cuda":
        return "could run, but slower than the kernels for this GPU"
    if backend == "triton":
        return "on the CPU it runs in Triton's interpreter, which is for tests: only by name"
    if backend == "eager":
        return "could run, but slower than the kernels"
    return "computes all q_len * kv_len pairs, it is the meaning and not the means: only by name"


def _is_deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _promise(deterministic: bool | None, backend: str) -> str:
    if deterministic is None:
        asked = f"None: as torch.are_deterministic_algorithms_enabled(), {torch.are_deterministic_algorithms_enabled()}"
    else:
        asked = str(deterministic)
    if backend == "hopper" and not _is_deterministic(deterministic):
        return f"every run gives equal bits but those of dq, which may be summed in any order (deterministic={asked})"
    return f"every run gives equal bits, forward and backward (deterministic={asked})"


# ---- the call ----


def _autocast(q: Tensor) -> torch.dtype | None:
    """The type to which autocast converts q's device, None where it is off."""
    if not isinstance(q, Tensor):
        # refused by the contract
        return None
    device_type = q.device.type
    # a type of device without autocast, such as meta, may not even be asked
    if (device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)) and torch.is_autocast_enabled(
        device_type
    ):
        return torch.get_autocast_dtype(device_type)
    return None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    causal: bool,
    scale: float | None,
    kv_lengths: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    deterministic: bool | None,
    backend: str,
    scores: ScoreOptions | None,
) -> tuple[Tensor, Tensor]:
    # asked once, for all that follows
    specs = specs_of(q, k, v) if tracing.can_launch_directly(q, k, v, kv_lengths, seed) else None
    autocast = None if specs is not None and tracing.is_without_autocast(q) else _autocast(q)
    dtype, scale = validation.check(
        q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, autocast, specs
    )
    if scores is not None:
        scores = validation.check_scores(scores, q, layout)
    if backend == "hopper":
        unfit_for_hopper = _unfit_on_gpu(q, k, v, dtype, dropout_p, scores, specs) if q.is_cuda else None
    else:
        unfit_for_hopper = NO_DROPOUT if dropout_p > 0 else NO_SCORES if scores is not None else None
    backend = _for_operator(backend, q.device, dtype, unfit_for_hopper, deterministic, q.is_cuda and specs is not None)
    if autocast is None:
        return _run(q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, backend, scores, specs)
    # operators and reference choose the type of each product themselves
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (tensor.to(validation.under_autocast(tensor.dtype, autocast)) for tensor in (q, k, v))
        return _run(
            q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, backend, scores, specs and specs_of(q, k, v)
        )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    backend: str,
    scores: ScoreOptions | None,
    specs: TensorSpecs | None,
) -> tuple[Tensor, Tensor]:
    """Layout to plan, seed to tensor, and on to the operator."""
    if specs is None and backend != "reference" and tracing.is_transformed(q, k, v, kv_lengths, seed, *(scores or ())):
        raise RuntimeError(
            f'backend "{backend}" cannot be transformed by torch.func.vmap, grad, vjp, jvp and what is made of them: '
            'torch.autograd.grad differentiates it, batch and heads may be as many as are mapped, and backend="reference" '
            "goes through all of them"
        )
    if scores is not None:
        scores = _for_kernels(scores, q)
    if q.numel() == 0 or k.numel() == 0:
        # no pairs, no work: outputs and gradients of the right shapes, none of which depends on a mask
        return reference.attention(q, k, v, scale=scale, **_for_reference(scores, layout))
    if dropout_p == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    elif isinstance(seed, Tensor):
        seed = seed.reshape(1)
    else:
        seed = torch.tensor([seed], dtype=torch.int64, device="cpu")
    if seed is not None and specs is None:
        (seed,) = tracing.as_graph_constants([seed], q)
    if kv_lengths is not None:
        kv_lengths = kv_lengths.contiguous()

    if backend == "reference":
        with tracing.mode_of(q):
            return _by_reference(q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, scores)
    plan: list[Tensor] = []
    bias_index: list[Tensor] = []
    if scores is not None and scores.block_bias is not None and layout is not None:
        bias_index = _constants(layout.bias_index(_where(q), causal=causal), q, specs)
    if layout is not None:
        plan, causal = _constants(layout.plan(_where(q), causal=causal), q, specs), False
    if scores is None:
        options = (plan, kv_lengths, seed, scale, causal, dropout_p, backend)
        if specs is None:
            return ops.attention_forward(q, k, v, *options)
        return ops.attention_directly(specs, q, k, v, *options)
    sinks, softcap, alibi_slopes, block_bias = scores
    given = (q, k, v, sinks, alibi_slopes, block_bias, plan, bias_index, kv_lengths, seed, scale, causal, dropout_p)
    return ops.scored_attention_forward(*given, 0.0 if softcap is None else softcap, backend)


def _by_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    causal: bool,
    scale: float,
    kv_lengths: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    scores: ScoreOptions | None,
) -> tuple[Tensor, Tensor]:
    mask = None if layout is None else _dense(layout, q)
    if seed is not None:
        seed = seed.to(q.device)
    return reference.attention(
        q,
        k,
        v,
        mask,
        causal=causal,
        scale=scale,
        kv_lengths=kv_lengths,
        dropout_p=dropout_p,
        seed=seed,
        **_for_reference(scores, layout),
    )


def _where(q: Tensor) -> torch.device:
    """Where the plan for q is made: on its device, unless q is a fake tensor on a GPU that is not there."""
    device = q.device
    if device.type == "cuda" and not torch.compiler.is_compiling() and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


def _constants(tensors: Iterable[Tensor], q: Tensor, specs: TensorSpecs | None) -> list[Tensor]:
    """Tensors of a layout as an operator takes them beside q."""
    if specs is not None or torch.compiler.is_compiling():
        return list(tensors)
    return [tensor.to(q.device) for tensor in tracing.as_graph_constants(tensors, q)]


def _dense(layout: BlockLayout, q: Tensor) -> Tensor:
    """The layout's mask, for the reference."""
    with tracing.outside_transforms(layout._tensors.indptr):
        mask = layout.to_dense()
    return tracing.as_graph_constants([mask], q)[0].to(q.device)


def _score_options(
    sinks: Tensor | None, softcap: float | None, alibi_slopes: Tensor | None, block_bias: Tensor | None
) -> ScoreOptions | None:
    """The options together; None where there is none, so that a plain call carries one argument more."""
    if sinks is None and softcap is None and alibi_slopes is None and block_bias is None:
        return None
    return ScoreOptions(sinks, softcap, alibi_slopes, block_bias)


def _for_kernels(scores: ScoreOptions, q: Tensor) -> ScoreOptions:
    """The options in the type of scores, a bias as (batch | 1, heads | 1, stored blocks)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sinks, softcap, alibi_slopes, bias = scores
    if bias is not None:
        bias = bias.to(dtype)
        bias = bias.reshape((1,) * (3 - bias.dim()) + bias.shape)
    sinks, alibi_slopes = (
        None if tensor is None else tensor.to(dtype).contiguous() for tensor in (sinks, alibi_slopes)
    )
    return ScoreOptions(sinks, softcap, alibi_slopes, bias)


def _for_reference(scores: ScoreOptions | None, layout: BlockLayout | None) -> dict[str, Any]:
    """What the reference takes for the options."""
    if scores is None:
        return {}
    sinks, softcap, alibi_slopes, bias = scores
    if bias is not None and layout is not None:
        bias = biases.dense(
            bias,
            layout._tensors.indptr,
            layout._tensors.indices,
            q_len=layout.q_len,
            kv_len=layout.kv_len,
            block_size=layout.block_size,
        )
    return {"sinks": sinks, "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias}


# ---- the public names ----


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T restricted to the layout) v: dense and block-sparse attention, differentiable.

    q          (batch, heads, q_len, head_dim), any strides whose last one is 1; head_dim 1 to 256
    k          (batch, kv_heads, kv_len, head_dim), heads % kv_heads == 0; query head h reads kv head h // (heads // kv_heads)
    v          (batch, kv_heads, kv_len, v_head_dim); v_head_dim 1 to 256, may differ from head_dim
               all three float16, bfloat16 or float32 (float64 for backends reference and eager), on one device
    layout     BlockLayout of q_len x kv_len, with 1 or `heads` heads and 1 or `batch` batches; None attends everywhere
    causal     True also drops the keys with kv_pos > q_pos + (kv_len - q_len), aligned bottom-right:

                   q_len 2, kv_len 5     1 1 1 1 0        q_len 5, kv_len 2     0 0, 0 0, 0 0, 1 0, 1 1
                                         1 1 1 1 1

    scale      factor on the scores, may be 0 or negative, finite as a float32 (finite, if the tensors are float64); None is
               head_dim ** -0.5
    kv_lengths int32 or int64 (batch,), on q's device: keys at and beyond kv_lengths[b] do not exist, and may hold NaN; the
               causal alignment stays that of kv_len. Out of range is refused on the CPU, clamped on a GPU and when compiled
    dropout_p  probability to drop an attention weight, 0 <= dropout_p < 1, in steps of 2**-16; the kept ones are divided by
               1 - dropout_p
    seed       of dropout: an int, or an int64 tensor of one element (for CUDA graphs); None draws one from PyTorch's CPU
               generator. The same seed drops the same pairs, whatever the layout, backend or device
    deterministic  True asks for equal bits in every run, forward and backward; None follows
               torch.are_deterministic_algorithms_enabled(). Without it backend "hopper" sums dq in any order, which is
               faster, and its last bits change from run to run; all else has equal bits anyway
    backend    "auto", "hopper", "triton", "eager" or "reference"; a named one is obeyed or refused, see `explain`
    returns    (batch, heads, q_len, v_head_dim) in q's dtype, or in autocast's; a row without keys is 0

    Options of the scores s = scale q k^T, applied in this order; float tensors on q's device, of any floating type,
    computed in float32 and differentiable. Any of them goes with all of the above but backend "hopper".

    softcap    c from 1e-30 to 1e30: s becomes c * tanh(s / c), of magnitude below c (Gemma 2, section 2); None caps nothing
    alibi_slopes  (heads,): then s -= slope * |q_pos + (kv_len - q_len) - kv_pos|, distances aligned as `causal` is (Press et
               al. 2022, section 3, with their 2^(-8 i / heads) or others)
    block_bias  then s += a number for each stored block, in the order of layout.indices: (layout.capacity,), or for a layout
               without batches and heads (heads, capacity) or (batch, heads, capacity), 1 shared by all. Needs a layout
    sinks      (heads,): one more logit a row, after scale and all else, of a key without a value: weights are exp(s) /
               (exp(sink) + sum of exp(s)) (Xiao et al. 2024, section 3.3; gpt-oss). A row without keys is 0 still

    raises     TypeError, ValueError for arguments that do not fit, before anything is computed

    Numbers that are not finite are neither looked for nor hidden. On every backend:

    scores     of -inf, such as those of a block_bias of -inf, are as if the pair did not attend, and a row of nothing else has no
               keys: 0, lse -inf, gradients 0. One of NaN or +inf of a pair that attends makes NaN of out and lse of its row, and of
               its row alone; so do a sink of +inf or NaN, and an infinite slope where the distance is 0. A sink of -inf is none
    keys       and values beyond kv_lengths are not read, nor those of a tile of 128 keys (0 to 127, 128 to 255, ...) which no
               query of the heads that share them attends to: they may hold anything, and their gradients are 0
    k          otherwise, whatever masks it: NaN and inf in a key reach out and lse of the rows that attend to it, no others
    v          reaches rows that do not attend to it as well: a kernel multiplies whole tiles, and 0 * NaN = NaN. With a layout
               `hopper`, `triton` and `eager` keep it to the rows of the 128 x 128 tiles in which some pair attends; `reference`,
               and any backend without a layout, may spread it over all rows of the heads that share the value
    gradients  dq, dk and dv are as v: a NaN in q, k, v or dout may reach those of all queries and keys which such tiles join, no
               other batch entry, and no head that does not share its keys. A gradient of the lse of a row without keys is ignored

    The backward recomputes weights as exp(s - lse) from a float32 lse, as every flash attention does, and each of the up to four
    roundings of lse changes them by up to |lse| * 2**-24 of themselves. Up to |lse| = 4096 that is less than a rounding of 16-bit
    gradients (2**-10); of float32 ones it is 0.1 % there, and at 1e6 up to 24 % of any type. `reference` does not do that.

    >>> q = k = v = torch.randn(1, 2, 512, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 512, 64])
    """
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias)
    return _attend(q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend, scores)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each row's scaled scores, which is differentiable too.

    q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend  as `attention`
    sinks, softcap, alibi_slopes, block_bias  as `attention`
    returns  out (batch, heads, q_len, v_head_dim), and lse (batch, heads, q_len), natural logarithm, float32 (float64 for
             float64), before dropout; -inf for a row without keys. With sinks it includes them: log(exp(sink) + sum of exp(s)), and a row
             without keys has its sink

    >>> q = k = v = torch.zeros(1, 1, 4, 16)
    >>> attention_with_lse(q, k, v, causal=True)[1].exp()
    tensor([[[1., 2., 3., 4.]]])
    """
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias)
    return _attend(q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend, scores)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    block_bias: Tensor | None = None,
) -> Explanation:
    """What `attention` would do with the same arguments: backend, tiles, bytes, balance, predicted time, and what to change.

    q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend  as `attention`
    sinks, softcap, alibi_slopes, block_bias  as `attention`
    returns  Explanation; print it. Nothing is computed but the layout's plan, which is read on the host, as are three tokens
             of k and v; no seed is drawn
    raises   what `attention` would raise

    >>> q = k = v = torch.zeros(1, 1, 256, 64, dtype=torch.float64)
    >>> explain(q, k, v, causal=True).tile_density
    0.75
    """
    dtype, _ = validation.check(
        q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, _autocast(q)
    )
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias)
    if scores is not None:
        validation.check_scores(scores, q, layout)
    unfit_for_hopper = _unfit_for_hopper(q.device, q, k, v, dtype, dropout_p, scores)
    is_asked_for = backend != "auto"
    if unfit_for_hopper is None and not is_asked_for and not ops.is_worth_hopper(q.shape[2], q.numel() + k.numel()):
        unfit_for_hopper = SMALL
    chosen = _choose(backend, q.device, dtype, unfit_for_hopper)
    others = (name for name in BACKENDS[1:] if name != chosen)
    promised = _is_deterministic(deterministic)
    call = Call(q, k, v, layout, causal, kv_lengths is not None, dropout_p, promised, dtype, chosen, scores is not None)
    # the plan is read, which fake tensors do not have
    with tracing.outside_transforms():
        return explanation.explained(
            call,
            reason=_why(chosen, q.device, is_asked_for),
            others=tuple((name, _why_other(name, q.device, dtype, is_asked_for, unfit_for_hopper)) for name in others),
            determinism=_promise(deterministic, chosen),
        )
