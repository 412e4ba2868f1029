"""Checks of the arguments of `attention`. Every error says what to do instead.

Runs in every call, so each check is a plain comparison and a message is only formatted when it fails.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .blocks import checks
from .layout import BlockLayout
from .runtime import tracing
from .runtime.tensor_spec import TensorSpecs

Shape = Sequence[int]
# dtype, batch, heads, q_len, kv_len, head_dim
Agreed = tuple[torch.dtype, int, int, int, int, int]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# scores are float32
MAX_SCALE = torch.finfo(torch.float32).max
# leaves room for products with scale and log2(e), and for 1 / softcap
MIN_SOFTCAP, MAX_SOFTCAP = 1e-30, 1e30


def under_autocast(dtype: torch.dtype, autocast: torch.dtype) -> torch.dtype:
    """The dtype after autocast, which converts floating types except float64."""
    return autocast if dtype.is_floating_point and dtype is not torch.float64 else dtype


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype to which autocast converts on q's device, None where it is off."""
    # `check` refuses anything else
    if not isinstance(q, Tensor):
        return None
    kind = q.device.type
    is_on = tracing.has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def check_device(name: str, tensor: Tensor, q: Tensor, q_name: str = "q") -> None:
    if tensor.device != q.device:
        raise ValueError(
            f"{name} must be on {q_name}'s device {q.device}, got {tensor.device}; {name}.to({q_name}.device) moves it"
        )


def _dtype_hint(name: str, dtype: torch.dtype, wanted: str) -> str:
    """The hint for a tensor of an unsupported dtype."""
    if dtype.is_complex:
        return f"{name}.real makes one, without the imaginary part"
    if dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4):
        return f"{name}.dequantize() makes one"
    return f"{name}.to({wanted}) makes one"


def _check_types(dtypes: Sequence[torch.dtype], autocast: torch.dtype | None) -> torch.dtype:
    """The dtype in which the call computes; q, k and v must agree in it."""
    q_dtype, k_dtype, v_dtype = (under_autocast(d, autocast) for d in dtypes) if autocast is not None else dtypes
    if q_dtype not in DTYPES:
        raise ValueError(
            f"q must be float16, bfloat16, float32 or float64, got {q_dtype}; "
            f"{_dtype_hint('q', q_dtype, 'torch.bfloat16')}"
        )
    if not (q_dtype == k_dtype == v_dtype):
        name, other = ("k", k_dtype) if k_dtype != q_dtype else ("v", v_dtype)
        raise ValueError(f"{name} must have q's dtype {q_dtype}, got {other}; {_dtype_hint(name, other, 'q.dtype')}")
    return q_dtype


_ORDER = "check that the order is (batch, heads, length, head_dim)"
_TRANSPOSE = "use transpose(1, 2) of q, k and v"


def _transpose_hint(q_shape: Shape, k_shape: Shape) -> str | None:
    """The hint if the heads do not fit but would with axes 1 and 2 swapped, as in other libraries; or None."""
    (_, heads, q_len, _), (_, kv_heads, kv_len, _) = q_shape, k_shape
    # a sequence is longer than there are heads
    if kv_len and q_len % kv_len == 0 and kv_heads > kv_len:
        return (
            f"k of {kv_heads} heads and length {kv_len} looks like (batch, length, heads, head_dim): "
            f"{_TRANSPOSE}, which makes {q_len} and {kv_len} heads, and lengths {heads} and {kv_heads}"
        )
    return None


def _check_shapes(q_shape: Shape, k_shape: Shape, v_shape: Shape) -> tuple[int, int, int, int, int]:
    """batch, heads, q_len, kv_len, head_dim."""
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4):
        for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
            if len(shape) != 4:
                raise ValueError(
                    f"{name} must have the 4 dimensions (batch, heads, length, head_dim), got shape {tuple(shape)}; "
                    f"{name}[None] adds one in front, "
                    f"{name}.unflatten(-1, (heads, head_dim)).transpose(1, 2) splits heads"
                )
    batch, heads, q_len, head_dim = q_shape
    k_batch, kv_heads, kv_len, k_dim = k_shape
    v_batch, v_heads, v_len, v_dim = v_shape
    if k_batch != v_batch or kv_heads != v_heads or kv_len != v_len:
        raise ValueError(
            f"k and v must agree in batch, heads and length, got k {tuple(k_shape)} and v {tuple(v_shape)}; "
            "only their last dimension may differ, expand the smaller one"
        )
    if k_batch != batch:
        raise ValueError(
            f"k and v must have q's batch {batch}, got {k_batch}; "
            f"they do not broadcast, k.expand({batch}, -1, -1, -1) does"
        )
    if heads % kv_heads if kv_heads else heads:
        hint = _transpose_hint(q_shape, k_shape) or f"repeat k and v, or {_ORDER}"
        raise ValueError(f"q's heads must be a multiple of k's heads, got {heads} and {kv_heads}; {hint}")
    if head_dim != k_dim:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {k_dim}; pad the smaller one with zeros")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_dim <= MAX_HEAD_DIM):
        name, dim = ("v", v_dim) if 1 <= head_dim <= MAX_HEAD_DIM else ("q", head_dim)
        raise ValueError(
            f"{name} must have a head_dim of 1 to {MAX_HEAD_DIM}, got {dim}; split it over more heads, or {_ORDER}"
        )
    return batch, heads, q_len, kv_len, head_dim


def _check_strides(name: str, shape: Shape, strides: Shape) -> None:
    # strides of a tensor without elements do not matter
    if strides[3] != 1 and shape[3] != 1 and 0 not in shape:
        raise ValueError(
            f"{name} must have a last stride of 1, got strides {tuple(strides)}; {name}.contiguous() has one"
        )


def _agree(
    dtypes: Sequence[torch.dtype], shapes: Sequence[Shape], strides: Sequence[Shape], autocast: torch.dtype | None
) -> Agreed:
    """The dtype and sizes that q, k and v have in common; ValueError if they do not fit together."""
    dtype, sizes = _check_types(dtypes, autocast), _check_shapes(*shapes)
    for name, shape, of_tensor in zip(("q", "k", "v"), shapes, strides, strict=True):
        _check_strides(name, shape, of_tensor)
    return dtype, *sizes


@functools.lru_cache(maxsize=4096)
def _agree_by_specs(specs: TensorSpecs, autocast: torch.dtype | None) -> Agreed:
    """`_agree`, cached for equal specs. Errors are not cached."""
    dtypes, shapes, strides, _ = zip(*specs.tensors, strict=True)
    return _agree(dtypes, shapes, strides, autocast)


def _layout_hint(value: Any, q_len: int, kv_len: int) -> str:
    """How to make a layout from a value that is not one."""
    lengths = str(q_len) if q_len == kv_len else f"({q_len}, {kv_len})"
    if isinstance(value, str):
        return f"blocksparse_flash.masks.build({value!r}, {lengths}) makes one from a specification"
    if type(value).__name__ == "BlockMask":
        return "blocksparse_flash.interop.from_flex_attention(block_mask) makes one from FlexAttention's"
    if callable(value):
        return (
            f"BlockLayout.from_predicate(fn, {q_len}, {kv_len}) makes one from fn(q_pos, kv_pos), and a function that "
            f"returns a layout must be called: layout=fn({lengths})"
        )
    if hasattr(value, "tocsr"):
        return "blocksparse_flash.interop.from_scipy_csr(matrix) makes one from a SciPy matrix over tokens"
    return "BlockLayout.from_dense(mask) makes one from a bool mask"


def check_layout(layout: BlockLayout, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    if not isinstance(layout, BlockLayout):
        hint = _layout_hint(layout, q_len, kv_len)
        raise TypeError(f"layout must be a BlockLayout or None, got {type(layout).__name__}; {hint}")
    layout_batch, layout_heads, layout_q_len, layout_kv_len = layout.shape
    if layout_q_len != q_len or layout_kv_len != kv_len:
        hint = f"build it for ({q_len}, {kv_len})"
        if heads == layout_q_len:
            hint = f"q of {heads} heads looks like (batch, length, heads, head_dim): {_TRANSPOSE}, or {hint}"
        raise ValueError(
            f"layout describes {layout_q_len} queries x {layout_kv_len} keys, "
            f"but q has {q_len} and k has {kv_len}; {hint}"
        )
    if layout_heads != 1 and layout_heads != heads:
        raise ValueError(
            f"layout must have 1 head or q's {heads}, got {layout_heads}; with grouped heads it counts query heads"
        )
    if layout_batch != 1 and layout_batch != batch:
        raise ValueError(f"layout must have batch 1 or q's {batch}, got {layout_batch}; build it for that batch")


def _number(name: str, value: Any) -> float:
    if isinstance(value, float):
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"{name} must be a float or an int, got {checks.shown(value)} ({type(value).__name__}); "
            f"float({name}) makes one"
        )
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a finite float, got {value}; it is too large for a float") from None


def _check_seed(seed: int | Tensor, q: Tensor) -> None:
    if isinstance(seed, Tensor):
        tracing.check_dense("seed", seed, q)
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be an int64 tensor of one element, got {seed.dtype} of shape {tuple(seed.shape)}; "
                "torch.randint(2**63 - 1, (1,)) draws one"
            )
        if seed.device != q.device and seed.device.type != "cpu":
            raise ValueError(
                f"seed must be on q's device {q.device} or the CPU, got {seed.device}; seed.to(q.device) moves it"
            )
        return
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(
            f"seed must be an int, an int64 tensor of one element or None, got {seed!r} ({type(seed).__name__}); "
            "int(seed) makes one, None draws one"
        )
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit a signed 64-bit integer, got {seed}; seed % 2**63 does")


def check_no_gradient(name: str, tensor: Tensor) -> None:
    """ValueError for a tensor that would have a gradient, where a cache takes it and is then changed in place."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            f"a cache holds no gradients, but gradients are enabled and {name} needs one: make the call under "
            "torch.no_grad() or torch.inference_mode(), or train without a cache"
        )


def check_kv_lengths(kv_lengths: Tensor, batch: int, kv_len: int, q: Tensor, limit: str = "the length of k") -> None:
    """Accept a length of 0 .. kv_len for each batch; limit: what kv_len is, for the message."""
    if not isinstance(kv_lengths, Tensor):
        raise TypeError(
            f"kv_lengths must be an int32 or int64 tensor, got {type(kv_lengths).__name__}; "
            "torch.as_tensor(kv_lengths, device=q.device) makes one"
        )
    tracing.check_dense("kv_lengths", kv_lengths, q)
    if kv_lengths.dtype != torch.int32 and kv_lengths.dtype != torch.int64:
        raise ValueError(
            f"kv_lengths must be int32 or int64, got {kv_lengths.dtype}; kv_lengths.to(torch.int32) makes it"
        )
    if kv_lengths.dim() != 1 or kv_lengths.shape[0] != batch:
        raise ValueError(
            f"kv_lengths must have shape ({batch},), one length for each batch, got {tuple(kv_lengths.shape)}; "
            "it is a number of leading keys, not a mask"
        )
    check_device("kv_lengths", kv_lengths, q)
    # reading them from a GPU would synchronize, and a compiler cannot read them
    if q.device.type == "cpu" and batch and tracing.has_values(kv_lengths):
        lengths = kv_lengths.tolist()
        if min(lengths) < 0 or max(lengths) > kv_len:
            wrong = next(n for n in lengths if not 0 <= n <= kv_len)
            raise ValueError(
                f"kv_lengths must be 0 to {kv_len}, {limit}, got {wrong}; kv_lengths.clamp(0, {kv_len}) is in range"
            )


# ---- keywords of other libraries ----

_LOCAL = "layout=blocksparse_flash.masks.local(length, window=(left, right)) is a window, in tokens on each side"
_PADDING = "kv_lengths=, the number of keys of each sequence, is the mask of padding at the end"
_ALIGNED = "causal=True aligns the diagonal bottom-right, at the last query and the last key"
_OF_PAIRS = "layout=BlockLayout.from_dense(mask), built once, is a bool mask of pairs, True attends"
# the keywords of scaled_dot_product_attention, FlexAttention, FlashAttention and transformers, and what replaces them
_KEYWORDS = {
    "attn_mask": f"{_OF_PAIRS}; {_PADDING}; numbers to add to scores are pair_bias=",
    "attention_mask": f"{_PADDING}; {_OF_PAIRS}",
    "mask": f"{_OF_PAIRS}; {_PADDING}",
    "key_padding_mask": _PADDING,
    "is_causal": _ALIGNED,
    "window": _LOCAL,
    "window_size": f"{_LOCAL}, and None for FlashAttention's -1",
    "sliding_window": _LOCAL,
    "block_mask": "layout=blocksparse_flash.interop.from_flex_attention(block_mask), built once, is the same mask",
    "mask_mod": (
        "layout=BlockLayout.from_predicate(mask_mod, q_len, kv_len, heads=1), built once, is the same mask; "
        "give more heads if it depends on the head"
    ),
    "score_mod": (
        "softcap=, alibi_slopes=, block_bias=, pair_bias= and sinks= change scores; other functions are not supported"
    ),
    "attn_bias": "pair_bias=, alibi_slopes= and block_bias= add to scores; a mask is BlockLayout.from_dense(mask)",
    "enable_gqa": "leave it out: k and v may have fewer heads than q, each of them shared by heads // kv_heads",
    "dropout": "dropout_p= is the probability of dropping",
    "attn_dropout": "dropout_p= is the probability of dropping",
    "softmax_scale": "scale= is the factor on scores",
    "scaling": "scale= is the factor on scores",
    "sm_scale": "scale= is the factor on scores",
    "logits_soft_cap": "softcap= caps scores",
    "s_aux": "sinks= are the logits of sinks",
    "return_lse": "attention_with_lse returns out and lse",
    "return_attn_probs": "weights are never stored; attention_with_lse returns out and lse",
    "kernel_options": "the tiles of kernels are chosen by the library; backend= names the kernels",
    "cu_seqlens_q": "layout=blocksparse_flash.masks.documents(cu_seqlens) is the mask of packed sequences",
    "cu_seqlens_k": "layout=blocksparse_flash.masks.documents(cu_seqlens) is the mask of packed sequences",
    "block_size": "the layout has the block size: BlockLayout.from_predicate(..., block_size=64)",
}


def refuse_keywords(function: str, names: Iterable[str], known: Iterable[str]) -> NoReturn:
    """TypeError for keywords of other libraries and misspelt ones, with what they are called here.

    known  the keywords of the function
    """
    name = next(iter(names))
    hint = _KEYWORDS.get(name)
    if hint is None:
        close = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")


class ScoreOptions(NamedTuple):
    """The score mods of a call, as the arguments of `attention`."""

    sinks: Tensor | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    block_bias: Tensor | None = None
    pair_bias: Tensor | None = None

    @property
    def has_positions(self) -> bool:
        """Whether scores depend on the positions of their tokens."""
        return any(each is not None for each in (self.alibi_slopes, self.block_bias, self.pair_bias))


def _check_float(name: str, value: Any, shape: object, q: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a float tensor {shape}, got {type(value).__name__}; "
            f"torch.as_tensor({name}, device=q.device) makes one"
        )
    tracing.check_dense(name, value, q)
    if not value.is_floating_point():
        hint = f"pass {name}.float()"
        if value.dtype == torch.bool:
            hint = (
                "for a mask pass a layout, such as BlockLayout.from_dense(mask), or torch.where(mask, 0.0, -torch.inf)"
            )
        raise ValueError(f"{name} must be floating point, got {value.dtype}; {hint}")
    check_device(name, value, q)


def _check_for_heads(name: str, value: Any, heads: int, q: Tensor) -> None:
    _check_float(name, value, (heads,), q)
    if value.shape != (heads,):
        hint = "expand it"
        if heads > q.shape[2] and value.shape == q.shape[2:3]:
            hint = f"q looks like (batch, length, heads, head_dim): {_TRANSPOSE}"
        raise ValueError(
            f"{name} must have shape ({heads},), one for each of q's heads, got {tuple(value.shape)}; {hint}"
        )


def _check_block_bias(bias: Any, layout: BlockLayout | None, batch: int, heads: int, q: Tensor) -> None:
    if layout is None:
        raise ValueError(
            "block_bias must come with a layout, whose stored blocks it is for, got layout None; a layout of every "
            "block is BlockLayout.from_block_mask(torch.ones(n_rows, n_cols, dtype=torch.bool), q_len, kv_len, "
            "block_size=128)"
        )
    _check_float("block_bias", bias, "of one number for each stored block", q)
    nnz, is_shared = layout.capacity, layout.shape[:2] == (1, 1)
    if bias.shape != (nnz,) and not (
        is_shared
        and 2 <= bias.dim() <= 3
        and bias.shape[-1] == nnz
        and all(size in (1, most) for size, most in zip(bias.shape[-2::-1], (heads, batch), strict=False))
    ):
        others = (
            f", ({heads}, {nnz}) or ({batch}, {heads}, {nnz})" if is_shared else " for a layout with heads or batches"
        )
        raise ValueError(
            f"block_bias must have shape ({nnz},){others}, one number for each stored block, "
            f"got {tuple(bias.shape)}; it is aligned with layout.indices"
        )


def checked_scale(scale: float | None, head_dim: int, dtype: torch.dtype) -> float:
    """The factor on scores; TypeError or ValueError if it is not a usable number."""
    scale = head_dim**-0.5 if scale is None else _number("scale", scale)
    # torch.compile cannot trace math.isfinite of a symbolic number; nan fails too
    if not -MAX_SCALE <= scale <= MAX_SCALE:
        if not -math.inf < scale < math.inf:
            raise ValueError(f"scale must be finite, got {scale}; scale=None is head_dim ** -0.5")
        if dtype != torch.float64:
            raise ValueError(
                f"scale must be finite as a float32, {MAX_SCALE:.3g} at most, got {scale}: "
                f"scores of {dtype} are float32; scale=None is head_dim ** -0.5"
            )
    return scale


def _check_pair_bias(bias: Any, q: Tensor, kv_len: int) -> None:
    axes = "(batch or 1, heads or 1, q_len, kv_len)"
    _check_float("pair_bias", bias, axes, q)
    dtypes = DTYPES if q.dtype == torch.float64 else DTYPES[:3]
    if bias.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"pair_bias must be {names}, got {bias.dtype}; pair_bias.float() makes one")
    if bias.dim() != 4:
        raise ValueError(
            f"pair_bias must have the 4 dimensions {axes}, got shape {tuple(bias.shape)}; "
            f"pair_bias[{', '.join(['None'] * max(1, 4 - bias.dim()))}] has more in front"
        )
    sizes = (*q.shape[:3], kv_len)
    for axis, size, found in zip(("batch", "heads", "q_len", "kv_len"), sizes, bias.shape, strict=True):
        is_shared = axis in ("batch", "heads")
        if found != size and not (is_shared and found == 1):
            hint = f"its dimensions are {axes}"
            if found == 1:
                hint = f"pair_bias.expand(-1, -1, {sizes[2]}, {kv_len}) has it, without a copy"
            raise ValueError(
                f"pair_bias must have {f'1 or {size}' if is_shared else size} as its {axis}, got {found} in shape "
                f"{tuple(bias.shape)}; {hint}"
            )


def checked_softcap(softcap: Any) -> float | None:
    """softcap as a float; TypeError or ValueError if it is not a usable number."""
    if softcap is None:
        return None
    cap = _number("softcap", softcap)
    if not 0 < cap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, got {cap}; softcap=None caps nothing")
    if not MIN_SOFTCAP <= cap <= MAX_SOFTCAP:
        raise ValueError(
            f"softcap must be {MIN_SOFTCAP:g} to {MAX_SOFTCAP:g}, got {cap}: scores are float32; "
            "softcap=None caps nothing"
        )
    return cap


def check_scores(options: ScoreOptions, q: Tensor, k: Tensor, layout: BlockLayout | None) -> ScoreOptions:
    """The options with softcap as a float; TypeError or ValueError if one does not fit. Runs after `check`."""
    sinks, softcap, alibi_slopes, block_bias, pair_bias = options
    batch, heads = q.shape[:2]
    if sinks is not None:
        _check_for_heads("sinks", sinks, heads, q)
    softcap = checked_softcap(softcap)
    if alibi_slopes is not None:
        _check_for_heads("alibi_slopes", alibi_slopes, heads, q)
    if block_bias is not None:
        _check_block_bias(block_bias, layout, batch, heads, q)
    if pair_bias is not None:
        _check_pair_bias(pair_bias, q, k.shape[2])
    return options._replace(softcap=softcap)


def check(
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
    autocast: torch.dtype | None,
    specs: TensorSpecs | None = None,
) -> tuple[torch.dtype, float]:
    """The dtype in which the call computes, and its scale; TypeError or ValueError if an argument does not fit.

    The arguments are those of `attention`, and
    autocast  the dtype to which autocast converts, None where it is off
    specs     of q, k and v, a cache key for their checks; None for a call that torch traces, transforms or profiles
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, value in (("q", q), ("k", k), ("v", v)):
            checks.check_tensor(name, value, f"; torch.as_tensor({name}) makes one")
    if not (q.device == k.device == v.device):
        check_device("k", k, q)
        check_device("v", v, q)
    if specs is not None:
        agreed = _agree_by_specs(specs, autocast)
    else:
        for name, value in (("q", q), ("k", k), ("v", v)):
            tracing.check_dense(name, value, q)
        shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
        agreed = _agree((q.dtype, k.dtype, v.dtype), shapes, strides, autocast)
    dtype, batch, heads, q_len, kv_len, head_dim = agreed
    if layout is not None:
        check_layout(layout, batch, heads, q_len, kv_len)
    checks.boolean(causal, "causal")
    scale = checked_scale(scale, head_dim, dtype)
    if not 0 <= _number("dropout_p", dropout_p) < 1:
        raise ValueError(
            f"dropout_p must be at least 0 and less than 1, got {dropout_p}; "
            "it is the probability of dropping, 0.0 turns it off"
        )
    if seed is not None:
        _check_seed(seed, q)
    if kv_lengths is not None:
        check_kv_lengths(kv_lengths, batch, kv_len, q)
    if deterministic is not None and deterministic is not True and deterministic is not False:
        raise TypeError(
            f"deterministic must be True, False or None, got {checks.shown(deterministic)} "
            f"({type(deterministic).__name__}); "
            "None follows torch.are_deterministic_algorithms_enabled()"
        )
    return dtype, scale
