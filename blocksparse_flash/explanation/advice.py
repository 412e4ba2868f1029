"""Advice on how to make a call faster, as sentences with figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from ..dispatch import missing_option
from ..kernels.schedule import backward_columns, forward_columns, padded_dim
from ..plan_format import TILE
from ..runtime import tracing
from . import memory
from .call import Call
from .cost import Balance, Work
from .prediction import Device, Prediction

# tiles with a smaller share of attending pairs get advice
WELL_FILLED = 0.5
# without a predicted time, a layout with a larger share of tiles counts as dense
NEARLY_DENSE = 0.95
# advice on a long line starts at these multiples of the even spread and of the mean line
UNEVEN, LONG = 1.15, 2.0


def advice(
    call: Call, done: Work, spread: Balance, device: Device | None, predicted: Prediction | None
) -> tuple[str, ...]:
    """Advice for a call, largest losses first; none for an empty call or `reference`."""
    if call.is_empty or call.backend == "reference":
        return ()
    said = [*_of_layout(call, done, predicted), *_of_heads(call)]
    if call.has_kernels and device is not None:
        said += [*_of_types(call, device), *_of_score_mods(call, device), *_of_determinism(call)]
        said += [*_of_balance(call, spread, device)]
    return tuple(said)


# ---- the layout ----


def _of_layout(call: Call, done: Work, predicted: Prediction | None) -> Iterator[str]:
    layout = call.layout
    if layout is None:
        return
    fill = done.attending / done.computed if done.computed else 1.0
    if fill < WELL_FILLED:
        block_q, block_kv = layout.block_size
        tile, width = call.side, call.tile
        blocks = f" in blocks of {block_q} x {block_kv}" if min(block_q, block_kv) < tile else ""
        yield (
            f"{fill:.0%} of the pairs that are computed attend: tiles of {tile} x {width} are computed whole, and the "
            f"pairs are scattered over them{blocks}. Blocks of {tile} at multiples of {tile}, or an order of the "
            "tokens that groups what attends to each other (layout.permute), need fewer tiles"
        )
    if predicted is not None:
        sparse = predicted.forward_ms + predicted.backward_ms
        dense = predicted.dense_forward_ms + predicted.dense_backward_ms
        if dense <= sparse:
            yield (
                f"dense attention is no slower: {dense:.2g} ms for forward and backward, {sparse:.2g} ms with this "
                "layout. Leave the layout out if the model allows it"
            )
    else:
        share = done.computed / (int(call.dense_sides.rows.tiles.sum()) * TILE**2)
        if share > NEARLY_DENSE:
            yield (
                f"{share:.0%} of the tiles of dense attention are computed: this layout saves next to nothing. Leave "
                "it out if the model allows it"
            )
    if call.causal and layout.device.type == "cpu" and _is_causal(call):
        yield (
            "the layout never attends to the future, so causal=True changes nothing but makes a second plan if the "
            "layout is also used without it: leave it out"
        )


def _is_causal(call: Call) -> bool:
    assert call.layout is not None
    try:
        call.layout.assert_causal()
    except ValueError:
        return False
    return True


# ---- heads ----


def _of_heads(call: Call) -> Iterator[str]:
    repeats = _repeats(call.k)
    if repeats > 1 and _repeats(call.v) % repeats == 0:
        yield (
            f"each head of k and v is repeated {repeats} times: pass each once, (batch, {call.kv_heads // repeats}, "
            "kv_len, head_dim). Query heads share KV heads without a copy, and dk and dv are summed inside the kernel"
        )
    if call.has_kernels:
        dims = call.head_dim, call.v_dim
        forward = backward = tuple(padded_dim(call.backend, dim) for dim in dims)
        if call.backend == "hopper" and not call.is_fine:
            forward, backward = forward_columns(*dims), backward_columns(*dims)
        for name, dim, *columns in dict.fromkeys(zip(("head_dim", "v_head_dim"), dims, forward, backward, strict=True)):
            if max(columns) == dim:
                continue
            words, shares = map(str, columns), [f"{1 - dim / each:.0%}" for each in columns]
            if columns[0] == columns[1]:
                yield f"{name} {dim} is computed as {columns[0]}: {shares[0]} of each product with it is padding"
            else:
                yield (
                    f"{name} {dim} is computed as {' in the forward and '.join(words)} in the backward: "
                    f"{' and '.join(shares)} of each product with it are padding"
                )


def _repeats(tensor: Tensor) -> int:
    """How many adjacent heads are equal, judged by strides or by three tokens of the first batch; 1 if all differ."""
    heads, length = tensor.shape[1], tensor.shape[2]
    if heads == 1:
        return 1
    if tensor.stride(1) == 0:
        return heads
    if not tracing.has_values(tensor):
        return 1
    with torch.no_grad():
        # (heads, 3 * head_dim)
        sample = tensor.detach()[0, :, [0, length // 2, length - 1]].flatten(1).cpu()
    # a constant tensor says nothing
    if (sample == sample[:1, :1]).all():
        return 1
    groups = (group for group in range(heads, 1, -1) if heads % group == 0)
    # each row equals the first of its group; NaN does not
    return next((group for group in groups if (sample.unflatten(0, (-1, group)) == sample[::group, None]).all()), 1)


# ---- types and strides ----


def _of_types(call: Call, device: Device) -> Iterator[str]:
    if call.dtype == torch.float32:
        yield (
            "float32 products are computed exactly, without the tensor cores, unless "
            'torch.backends.cuda.matmul.fp32_precision is "tf32": bfloat16, or torch.autocast, is many times faster'
        )
    if not call.is_half or device.capability[0] < 9 or not call.unreadable:
        return
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    instead = "copies" if call.backend == "hopper" else "cannot use TMA for"
    narrow = [name for name in call.unreadable if tensors[name].shape[3] % 8]
    if narrow:
        yield (
            f"rows of {' and '.join(narrow)} are not a multiple of 16 bytes: the backend {instead} them. Use "
            "a head dimension that is a multiple of 8"
        )
    strided = [name for name in call.unreadable if name not in narrow]
    if strided:
        yield (
            f"strides or the address of {' and '.join(strided)} are not multiples of 16 bytes, or a stride is 0: the "
            f"backend {instead} them. .contiguous() or .clone() fixes this"
        )


# ---- score mods ----

# time with an option as a multiple of the time without, forward and backward, on `hopper`: H200, bfloat16, causal,
# 8,192 tokens, 16 heads of 128 (benchmarks/results/shapes.jsonl; slopes and block_bias: kernels/hopper/TUNING.md)
COSTS = {"softcap": (2.00, 1.21), "alibi_slopes": (1.13, 1.03), "block_bias": (1.05, 1.05)}
# of a block_bias that requires a gradient
OF_TRAINED_BIAS = (1.05, 1.11)
# of slopes if keys after a query are masked
OF_CAUSAL_SLOPES = (1.09, 1.03)
# the same for the backward of slopes by `triton`, which also has their gradient
OF_SLOPES_GRADIENT = 3.2
# time of the backward of `hopper` with deterministic=True, whose dq has a launch of its own, as a multiple of that
# without: 1.05 to 1.31 on an H200 (kernels/hopper/TUNING.md)
OF_SEPARATE_DQ = 1.2


def _of_score_mods(call: Call, device: Device) -> Iterator[str]:
    if call.backend == "triton" and device.capability == (9, 0) and call.is_half:
        if call.mods.pair_bias is not None:
            yield 'pair_bias runs on "triton", since "hopper" has none'
        if call.mods.block_bias is not None and call.layout is not None:
            missing = missing_option(bias_blocks=call.layout.block_size)
            if missing:
                yield f'block_bias runs on "triton". Why "hopper" cannot run it: {missing}'
    if call.backend != "hopper":
        return
    costs = dict(COSTS)
    if call.causal:
        costs["alibi_slopes"] = OF_CAUSAL_SLOPES
    if call.has_bias_gradient:
        costs["block_bias"] = OF_TRAINED_BIAS
    for name, (forward, backward) in costs.items():
        if getattr(call.mods, name) is not None:
            yield f"{name} takes {forward:.2f} times as long in the forward and {backward:.2f} in the backward"
    if call.has_slopes_gradient:
        yield (
            'alibi_slopes require a gradient, which only the backward of "triton" computes: it takes '
            f"{OF_SLOPES_GRADIENT} times as long. Slopes that are not trained need none: alibi_slopes.detach()"
        )


# ---- determinism ----


def _of_determinism(call: Call) -> Iterator[str]:
    free = dataclasses.replace(call, deterministic=False)
    if call.deterministic and memory.has_separate_dq(call) and not memory.has_separate_dq(free):
        yield f"deterministic=True takes about {OF_SEPARATE_DQ} times as long in the backward as deterministic=False"


# ---- balance ----


def _of_balance(call: Call, spread: Balance, device: Device) -> Iterator[str]:
    n_programs = call.batch * call.heads * -(-call.q_len // call.side)
    if n_programs < device.n_sms:
        yield (
            f"{n_programs} blocks of {call.side} queries leave some of {device.n_sms} SMs idle. More heads or batches "
            "in one call use them"
        )
        return
    for lost, longest, mean, name in (
        (spread.forward, spread.longest_row, spread.mean_row, "tile row"),
        (spread.backward, spread.longest_col, spread.mean_col, "tile column"),
    ):
        if lost is not None and lost > UNEVEN and longest > LONG * mean:
            yield (
                f"the longest {name} has {longest} tiles, the mean {mean:.4g}: the GPU waits for it, and takes "
                f"{lost:.2f} times as long as with even work. More heads or batches in one call hide it; fewer global "
                "tokens shorten it"
            )
