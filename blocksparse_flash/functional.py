"""attention, attention_with_lse and explain: the public calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import dispatch, explanation, gathering, ops, packed, reference, validation
from .blocks import checks
from .dispatch import CallSpec
from .explanation import Explanation
from .explanation.call import Call
from .layout import BlockLayout
from .plan import block_bias as biases
from .plan.layout_plans import Reordered
from .plan.reordering import TokenOrder
from .plan_format import TILE, Plan, SelectedPlan
from .runtime import tracing
from .runtime.tensor_spec import TensorSpecs, specs_of
from .validation import ScoreOptions

# ---- one call ----


class _Call(NamedTuple):
    """A checked call. specs: of q, k and v; None for a call that torch traces, transforms or profiles."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout | None
    kv_lengths: Tensor | None
    seed: int | Tensor | None
    spec: CallSpec
    scores: ScoreOptions | None
    specs: TensorSpecs | None


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
    """Check the arguments, choose a backend, and run it."""
    is_direct = tracing.can_launch_directly(q, k, v, kv_lengths, seed)
    if not is_direct and packed.is_jagged(q, k, v):
        packing = _packed(q, k, v, layout, causal, kv_lengths, scores or ScoreOptions())
        # the layout has the causal pairs only
        out, lse = _attend(
            *packing.tensors, packing.layout, False, scale, None, dropout_p, seed, deterministic, backend, scores
        )
        return packing.unpacked(out), packing.unpacked(lse)
    is_plain = is_direct and tracing.is_without_autocast(q)
    specs = specs_of(q, k, v) if is_direct else None
    autocast = None if is_plain else validation.autocast_dtype(q)
    dtype, scale = validation.check(
        q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, autocast, specs
    )
    softcap = 0.0
    if scores is not None:
        scores = validation.check_scores(scores, q, k, layout)
        softcap = scores.softcap or 0.0
    chosen = dispatch.decide(backend, q, k, v, dtype, specs, _missing_option(scores, layout, dropout_p))
    spec = CallSpec(scale, causal, dropout_p, softcap, chosen, dispatch.is_deterministic(deterministic))
    call = _Call(q, k, v, layout, kv_lengths, seed, spec, scores, specs)
    if autocast is None:
        return _run(call)
    # the kernels and the reference choose the type of each product themselves
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (tensor.to(validation.under_autocast(tensor.dtype, autocast)) for tensor in (q, k, v))
        return _run(call._replace(q=q, k=k, v=v, specs=specs and specs_of(q, k, v)))


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    causal: bool,
    kv_lengths: Tensor | None,
    scores: ScoreOptions,
) -> packed.Jagged:
    """Jagged tensors as one packed sequence, after checks of the options that they limit."""
    refused = {"layout": layout, "kv_lengths": kv_lengths}
    refused |= {"block_bias": scores.block_bias, "pair_bias": scores.pair_bias}
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None with nested tensors, whose sequences attend to themselves, got "
                f"{type(value).__name__}: for masks within sequences, pack them and use masks.documents(q.offsets(), "
                "window=...)"
            )
    packing = packed.Jagged.of(q, k, v, causal=checks.boolean(causal, "causal"))
    if scores.alibi_slopes is not None and not packing.is_square:
        raise ValueError(
            "alibi_slopes must be None for nested tensors with other sequences of queries than of keys: distances "
            "would be those of the packed tokens. k with the offsets of q, and as many values, has the same sequences"
        )
    return packing


def _for_backward(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that autograd can save."""
    return tensor.clone() if tracing.is_left_from_inference_mode(tensor) else tensor


def _drawn_seed(q: Tensor) -> Tensor:
    """A random dropout seed, int64 (1,): from the CPU's generator, or from that of q's device within CUDA graphs.

    A CUDA graph would replay a seed of the host unchanged, but draws one of the device anew in each replay.
    torch.compile may make graphs of what it compiles.
    """
    is_in_graph = torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing())
    device = q.device if is_in_graph else "cpu"
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def _run(call: _Call) -> tuple[Tensor, Tensor]:
    """Turn the seed into a tensor, choose the order of the tokens, and call the operator or the reference."""
    q, k, v, layout, kv_lengths, seed, spec, scores, specs = call
    is_reference = spec.backend == "reference"
    if specs is None and not is_reference:
        tracing.refuse_transforms(spec.backend, q, k, v, kv_lengths, seed, *(scores or ()))
    if scores is not None:
        scores = _for_kernels(scores, q)
    if q.numel() == 0 or k.numel() == 0:
        # no pairs: outputs and gradients of the right shapes, which no mask changes
        return reference.attention(q, k, v, scale=spec.scale, **_for_reference(scores, layout))
    if spec.dropout_p == 0:
        seed = None
    elif isinstance(seed, Tensor):
        seed = _for_backward(seed.reshape(1))
    elif seed is None:
        seed = _drawn_seed(q)
    else:
        seed = torch.tensor([seed], dtype=torch.int64, device="cpu")
    if seed is not None and specs is None:
        (seed,) = tracing.as_graph_constants([seed], q)
    if kv_lengths is not None:
        kv_lengths = _for_backward(kv_lengths.contiguous())
    if is_reference:
        with tracing.mode_of(q):
            mask, options = None if layout is None else _dense(layout, q), _for_reference(scores, layout)
            options |= {"dropout_p": spec.dropout_p, "seed": None if seed is None else seed.to(q.device)}
            options |= {"causal": spec.causal, "scale": spec.scale, "kv_lengths": kv_lengths}
            return reference.attention(q, k, v, mask, **options)
    call = _Call(q, k, v, layout, kv_lengths, seed, spec, scores, specs)
    if layout is None:
        return _run_planned(call, [])
    prepared = _prepared(call, layout)
    if prepared.reordered is None:
        return _run_planned(call, prepared.plan)
    return _run_reordered(call, prepared.reordered)


class _Prepared(NamedTuple):
    """What a layout gives to a call.

    reordered  the order of tokens in which it has fewer tiles; None if the tokens keep theirs
    plan       the tensors of its plan; empty for a reordered call, which takes that of reordered.layout
    """

    reordered: Reordered | None
    plan: list[Tensor]


def _prepared(call: _Call, layout: BlockLayout) -> _Prepared:
    """What the layout gives to the call. Cached if the call has no score mods and torch does not trace it."""
    if call.specs is None or call.scores is not None:
        return _prepare(call, layout)
    cache: dict[Any, _Prepared] = layout._cache["calls"]
    # all that `_prepare` reads of such a call; its specs would be compared by identity, and pile up if they are evicted
    q, spec, kv_heads, v_dim = call.q, call.spec, call.k.shape[1], call.v.shape[3]
    key = q.device, q.shape, kv_heads, v_dim, spec.backend, spec.causal, call.kv_lengths is None, call.seed is None
    prepared = cache.get(key)
    if prepared is None:
        prepared = cache[key] = _prepare(call, layout)
    return prepared


def _prepare(call: _Call, layout: BlockLayout) -> _Prepared:
    """`_prepared`, without the cache."""
    q, spec, scores = call.q, call.spec, call.scores
    if dispatch.can_reorder(
        spec.backend,
        has_dropout=call.seed is not None,
        has_kv_lengths=call.kv_lengths is not None,
        has_positions=scores is not None and scores.has_positions,
    ):
        reordered = layout._reordered(_plan_device(q), spec.causal, call.k.shape[1])
        if reordered is not None:
            return _Prepared(reordered, [])
    return _Prepared(None, _plan_tensors(call, layout))


def _run_reordered(call: _Call, reordered: Reordered) -> tuple[Tensor, Tensor]:
    """Gather the tokens in the order in which the layout has fewer tiles, and put the results back."""
    q, k, v, specs = call.q, call.k, call.v, call.specs
    is_direct = specs is not None
    orders = (None if by is None else TokenOrder(*_constants(by, q, specs)) for by in (reordered.q, reordered.kv))
    by_q, by_kv = orders
    if by_q is not None:
        q = gathering.gathered(q, by_q, is_direct=is_direct)
    if by_kv is not None:
        k, v = (gathering.gathered(tensor, by_kv, is_direct=is_direct) for tensor in (k, v))
    # the layout has only the pairs that causal=True keeps
    spec, specs = call.spec._replace(causal=False), specs and specs_of(q, k, v)
    layout = reordered.layout
    call = call._replace(q=q, k=k, v=v, layout=layout, spec=spec, specs=specs)
    out, lse = _run_planned(call, _plan_tensors(call, layout))
    if by_q is None:
        return out, lse
    back = TokenOrder(by_q.inverse, by_q.order)
    out, lse = (gathering.gathered(result, back, is_direct=is_direct) for result in (out, lse.unsqueeze(3)))
    return out, lse.squeeze(3)


def _plan_tensors(call: _Call, layout: BlockLayout) -> list[Tensor]:
    """The tensors of the plan that the layout has for the call."""
    q, v, spec, scores = call.q, call.v, call.spec, call.scores
    device = _plan_device(q)
    tile = TILE
    slopes, bias = (None, None) if scores is None else (scores.alibi_slopes, scores.block_bias)
    if dispatch.has_fine_tiles(spec.backend, q.shape[3], v.shape[3], has_block_bias=bias is not None):
        shares = layout._tile_shares(device, spec.causal)
        is_trained = dispatch.has_gradient(slopes)
        tile = dispatch.fastest_tile(spec.backend, shares, q.shape[3], v.shape[3], has_slopes_gradient=is_trained)
    has_options = call.kv_lengths is not None or call.seed is not None or scores is not None
    found: Plan | SelectedPlan
    if dispatch.takes_selected_plans(spec.backend, q.shape[3], v.shape[3], has_options=has_options) and (
        layout._has_selected_plan(device, q.shape[:2])
    ):
        found = layout._selected_plan(spec.causal)
    else:
        found = layout.plan(device, causal=spec.causal, tile=tile)
    return _constants(found, q, call.specs)


def _run_planned(call: _Call, plan: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Call the operator. plan: the tensors of the layout's plan, [] without a layout."""
    q, k, v, layout, kv_lengths, seed, spec, scores, specs = call
    assert not isinstance(seed, int)
    if scores is None:
        return ops.attention(q, k, v, plan, kv_lengths, seed, spec, specs)
    bias_index: list[Tensor] = []
    if scores.block_bias is not None and layout is not None:
        bias_index = _constants(layout.bias_index(_plan_device(q), causal=spec.causal), q, specs)
    mods = scores.sinks, scores.alibi_slopes, scores.block_bias, scores.pair_bias
    return ops.attention(q, k, v, plan, kv_lengths, seed, spec, mods=mods, bias_index=bias_index)


def attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    causal: bool,
    scale: float,
    deterministic: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor] | None:
    """out and lse where the rows of the layout are the query heads of each token, that share a KV head.

    q, k, v  checked, of one dtype, as `attention`
    layout   kv_heads heads of (q_len * heads / kv_heads) x kv_len, from a selection by token
    returns  None if the chosen kernels have no plan by key block: the caller then groups heads into rows
    """
    specs = specs_of(q, k, v) if tracing.can_launch_directly(q, k, v) else None
    chosen = dispatch.decide(backend, q, k, v, q.dtype, specs, "")
    has_plan = dispatch.takes_selected_plans(chosen, q.shape[3], v.shape[3], has_options=False)
    if not has_plan or not layout._has_selected_plan(_plan_device(q), (q.shape[0], k.shape[1])):
        return None
    spec = CallSpec(scale, causal, 0.0, 0.0, chosen, dispatch.is_deterministic(deterministic))
    plan = _constants(layout._selected_plan(causal), q, specs)
    return ops.attention(q, k, v, plan, None, None, spec, specs)


def _plan_device(q: Tensor) -> torch.device:
    """The device for q's plan: q's own, except for a fake CUDA tensor on a machine without a GPU."""
    device = q.device
    if device.type == "cuda" and not torch.compiler.is_compiling() and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


def _constants(tensors: Iterable[Tensor], q: Tensor, specs: TensorSpecs | None) -> list[Tensor]:
    """Tensors of a layout in a form that operators accept together with q (fake, or constants of a graph)."""
    if specs is not None or torch.compiler.is_compiling():
        return list(tensors)
    return [tensor.to(q.device) for tensor in tracing.as_graph_constants(tensors, q)]


def _dense(layout: BlockLayout, q: Tensor) -> Tensor:
    """The layout's mask, for the reference."""
    with tracing.outside_transforms(layout._anchor):
        mask = layout.to_dense()
    return tracing.as_graph_constants([mask], q)[0].to(q.device)


# ---- score mods ----


def _score_options(
    sinks: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    block_bias: Tensor | None,
    pair_bias: Tensor | None,
) -> ScoreOptions | None:
    """None if nothing changes the scores."""
    if sinks is None and softcap is None and alibi_slopes is None and block_bias is None and pair_bias is None:
        return None
    return ScoreOptions(sinks, softcap, alibi_slopes, block_bias, pair_bias)


def _missing_option(scores: ScoreOptions | None, layout: BlockLayout | None, dropout_p: float) -> str:
    """Which option of a checked call `hopper` does not have; empty if it has all."""
    if scores is None:
        return dispatch.missing_option(has_dropout=dropout_p > 0)
    bias_blocks = None if scores.block_bias is None or layout is None else layout.block_size
    has_pair_bias = scores.pair_bias is not None
    return dispatch.missing_option(has_dropout=dropout_p > 0, bias_blocks=bias_blocks, has_pair_bias=has_pair_bias)


def _for_kernels(scores: ScoreOptions, q: Tensor) -> ScoreOptions:
    """The options in the dtype of the scores (pair_bias in its own), block_bias as (batch | 1, heads | 1, blocks)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sinks, softcap, alibi_slopes, bias, pair_bias = scores
    if bias is not None:
        bias = bias.to(dtype)
        bias = bias.reshape((1,) * (3 - bias.dim()) + bias.shape)
    sinks, alibi_slopes = (
        None if tensor is None else tensor.to(dtype).contiguous() for tensor in (sinks, alibi_slopes)
    )
    return ScoreOptions(sinks, softcap, alibi_slopes, bias, pair_bias)


def _for_reference(scores: ScoreOptions | None, layout: BlockLayout | None) -> dict[str, Any]:
    """The keyword arguments of reference.attention for these options."""
    if scores is None:
        return {}
    sinks, softcap, alibi_slopes, bias, pair_bias = scores
    if bias is not None and layout is not None:
        bias = biases.dense(bias, *layout._tensors[:2], **layout._frame.sizes)
    return {"sinks": sinks, "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias, "pair_bias": pair_bias}


# ---- the public names ----

# the keywords of all three; `**unknown` is for those of other libraries, which the error translates
_OPTIONS = (
    *("layout", "causal", "scale", "kv_lengths", "dropout_p", "seed", "deterministic", "backend"),
    *("sinks", "softcap", "alibi_slopes", "block_bias", "pair_bias"),
)


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
    pair_bias: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """softmax(scale * q k^T restricted to the layout) v: dense and block-sparse attention, differentiable.

    q          (batch, heads, q_len, head_dim); head_dim 1 to 256. The last stride of q, k and v must be 1
    k          (batch, kv_heads, kv_len, head_dim), heads % kv_heads == 0; query head h reads KV head
               h // (heads // kv_heads)
    v          (batch, kv_heads, kv_len, v_head_dim); v_head_dim 1 to 256, may differ from head_dim;
               all three float16, bfloat16 or float32 (float64 for backends reference and eager), on one device
    layout     BlockLayout of q_len x kv_len, with 1 or `heads` heads and 1 or `batch` batches; None: every query
               attends to every key
    causal     True also drops the keys with kv_pos > q_pos + (kv_len - q_len), aligned bottom-right:

                   q_len 2, kv_len 5     1 1 1 1 0        q_len 5, kv_len 2     0 0
                                         1 1 1 1 1                              0 0
                                                                                0 0
                                                                                1 0
                                                                                1 1

    scale      factor on the scores. It may be 0 or negative, and must be finite as a float32 (as a float64 for float64
               tensors); None is head_dim ** -0.5
    kv_lengths int32 or int64 (batch,), on q's device: keys and values from kv_lengths[b] on are not read, and may hold
               NaN. `causal` stays aligned to kv_len. Lengths out of range raise an error on the CPU, and are clamped on
               a GPU and under torch.compile
    dropout_p  probability of dropping an attention weight, 0 <= dropout_p < 1, rounded to a multiple of 1/2048
               (from 1/2048 to 2047/2048 unless it is 0); kept weights are divided by 1 minus the rounded one
    seed       dropout seed: an int, or an int64 tensor of one element; None draws one from PyTorch's CPU generator,
               under torch.compile and in CUDA graphs from that of q's device. Each replay of a graph draws again, but
               repeats a seed given as an int or on the CPU. The same seed drops the same pairs for every layout,
               backend and device
    deterministic  True makes results bitwise identical in every run, forward and backward; None follows
               torch.are_deterministic_algorithms_enabled(). With False, which is faster, the last bits of some
               gradients on backend "hopper" can differ between runs: `explain` names them, docs/semantics.md says why
    backend    "auto", "hopper", "triton", "eager" or "reference". A backend given by name runs the call or raises an
               error; see `explain`. At debug level, logging.getLogger("blocksparse_flash") writes which backend runs
               each new kind of call, and why
    returns    (batch, heads, q_len, v_head_dim) in q's dtype, or autocast's; 0 for a query without keys. It lies in
               memory as q does, and the gradients as q, k and v, except with backend "reference" or no keys. So if
               q is the transpose of (batch, length, heads, head_dim), `out.transpose(1, 2).flatten(2)` copies nothing

    Score mods change the scores s = scale q k^T, in the order below. Their tensors are on q's device and of any
    floating dtype, unless stated. They are computed in float32 and are differentiable. Backend "hopper" has neither
    dropout nor pair_bias, has block_bias only for blocks whose sides are multiples of 128, and its gradient of
    alibi_slopes comes from the kernels of "triton"; apart from that, they can be combined with each other and with
    everything above.

    softcap    c from 1e-30 to 1e30: s = c * tanh(s / c), of magnitude below c (Gemma 2, section 2); None for no cap
    alibi_slopes  (heads,): s -= slope * |q_pos + (kv_len - q_len) - kv_pos|, distances aligned as with `causal` (Press
               et al. 2022, section 3, with their 2^(-8 i / heads) or others)
    block_bias  s += one number for each stored block, in the order of layout.indices: (layout.capacity,). If the layout
               has one batch and one head, also (heads, capacity) or (batch, heads, capacity), where a size of 1 is
               shared by all. Needs a layout
    pair_bias  s += one number for each pair: (batch or 1, heads or 1, q_len, kv_len), where a size of 1 is shared by
               all. Any strides, also of expanded tensors; float32, float16 or bfloat16 (or float64 with float64 q),
               added in float32. -inf removes a pair, as in a float attn_mask of PyTorch; so does a value below -2e38,
               such as torch.finfo(torch.float32).min; a NaN score stays NaN. The layout, causal and kv_lengths decide
               which pairs exist: values for others may be anything, and their gradients are 0. The gradient is summed
               over the batches and heads that share a value
    sinks      (heads,): adds the logit of a key without a value to each query, after scale and all other mods. Weights
               are exp(s) / (exp(sink) + sum of exp(s)) (Xiao et al. 2024, section 3.3; gpt-oss). The output of a query
               without keys stays 0

    raises     TypeError, ValueError for arguments that do not fit, before anything is computed. RuntimeError, except
               with backend "reference", for torch.func.vmap, forward-mode differentiation, second derivatives and
               batched gradients

    q, k and v may also be jagged tensors (torch.nested, layout=torch.jagged) of (batch, heads, tokens of each sequence,
    head_dim), without a layout. Each sequence attends to itself, with causal=True aligned at its end, and out and lse
    are jagged. They are computed as one packed sequence, without padding and without waiting for the GPU.

    If the attended keys are scattered, as the columns of a vertical-slash mask are, `hopper` and `triton` may copy q, k
    and v into an order in which such keys share tiles; see `explain`. This changes results by rounding alone.

    Non-finite numbers are neither detected nor hidden. On every backend:

    scores     -inf (as from a bias of -inf) means that the pair does not attend. A query whose scores are all -inf has
               no keys: out 0, lse -inf, gradients 0. If an attending pair has the score NaN or +inf (as from a bias of
               NaN or +inf), out and lse of its query are NaN; other queries are not affected. A sink of +inf or NaN,
               and an infinite slope at distance 0, have the same effect. A sink of -inf has no effect
    unread     keys and values beyond kv_lengths are not read. A tile of 128 keys (0 to 127, 128 to 255, ...) is not
               read either if no query of the heads that share it attends to any of its keys. Unread keys and values may
               hold anything, and their gradients are 0
    k          NaN and inf in any other key reach out and lse of the queries that attend to it, and of no others
    v          NaN and inf also reach queries that do not attend to the value, since kernels multiply whole tiles and
               0 * NaN = NaN. With a layout, `hopper`, `triton` and `eager` confine them to the queries of the 128 x 128
               tiles in which some pair attends (tiles of the reordered tokens, if `explain` says so). `reference`, and
               any backend without a layout, may spread them over all queries of the heads that share the value
    gradients  a NaN or inf in q, k, v or dout may reach the gradients of all queries and keys of the tiles in which
               some pair attends. It reaches no other batch entry, and no head that does not share its keys. The
               gradient of the lse of a query without keys reaches its sink alone, and is ignored without `sinks`

    The backward recomputes weights as exp(s - lse) from a float32 lse, as every flash attention does. Each of up to
    four roundings of lse changes a weight by a relative error of up to |lse| * 2**-24. Up to |lse| = 4096 their sum is
    at most 2**-10, no more than a rounding of 16-bit gradients; float32 gradients are off by up to 0.1% there, and
    gradients of any type by up to about a quarter at 1e6. `reference` is not affected.

    Dao et al., "FlashAttention", arXiv:2205.14135, sections 3.1 and 3.3 (block-sparse); Dao, "FlashAttention-2",
    arXiv:2307.08691, section 3.1.

    >>> q = k = v = torch.randn(1, 2, 512, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 512, 64])
    """
    if unknown:
        validation.refuse_keywords("attention", unknown, _OPTIONS)
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias, pair_bias)
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
    pair_bias: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    """`attention`, and the log-sum-exp of each query's scores, which is differentiable too.

    q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend  as `attention`
    sinks, softcap, alibi_slopes, block_bias, pair_bias  as `attention`
    returns  out (batch, heads, q_len, v_head_dim), and lse (batch, heads, q_len), natural logarithm, float32 (float64
             for float64), before dropout; -inf for a query without keys. With sinks lse is
             log(exp(sink) + sum of exp(s)), and the sink itself for a query without keys

    >>> q = k = v = torch.zeros(1, 1, 4, 16)
    >>> attention_with_lse(q, k, v, causal=True)[1].exp()
    tensor([[[1., 2., 3., 4.]]])
    """
    if unknown:
        validation.refuse_keywords("attention_with_lse", unknown, _OPTIONS)
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias, pair_bias)
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
    pair_bias: Tensor | None = None,
    **unknown: NoReturn,
) -> Explanation:
    """What `attention` would do with these arguments: backend, tiles, bytes, balance, predicted time, and advice.

    q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, backend  as `attention`
    sinks, softcap, alibi_slopes, block_bias, pair_bias  as `attention`
    returns  Explanation, which prints as a report
    raises   what `attention` would raise

    Runs no attention and draws no seed. Computes the layout's plan, and copies the plan and three tokens of k and v to
    the host.

    >>> q = k = v = torch.zeros(1, 1, 256, 64, dtype=torch.float64)
    >>> explain(q, k, v, causal=True).tile_density
    0.75
    """
    if unknown:
        validation.refuse_keywords("explain", unknown, _OPTIONS)
    scores = _score_options(sinks, softcap, alibi_slopes, block_bias, pair_bias)
    if packed.is_jagged(q, k, v):
        packing = _packed(q, k, v, layout, causal, kv_lengths, scores or ScoreOptions())
        q, k, v = packing.tensors
        layout, causal = packing.layout, False
    autocast = validation.autocast_dtype(q)
    dtype, _ = validation.check(q, k, v, layout, causal, scale, kv_lengths, dropout_p, seed, deterministic, autocast)
    if scores is not None:
        scores = validation.check_scores(scores, q, k, layout)
    choice = dispatch.explained_choice(backend, (q, k, v), dtype, _missing_option(scores, layout, dropout_p))
    has_lengths, is_deterministic = kv_lengths is not None, dispatch.is_deterministic(deterministic)
    call = Call(
        q, k, v, layout, causal, has_lengths, dropout_p, is_deterministic, dtype, backend=choice.backend, scores=scores
    )
    # reads the plan, which fake tensors do not have
    with tracing.outside_transforms():
        determinism = dispatch.explained_determinism(deterministic, varying=explanation.memory.varying_gradients(call))
        return explanation.explained(call, reason=choice.reason, others=choice.others, determinism=determinism)
