"""Runs a call of launch_tables.py, on a GPU if present, and compares out, lse and gradients with float64."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterable, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse_flash import attention_with_lse, dispatch
from tests.support import plain
from tests.support.closeness import as_rows, assert_as_accurate, assert_in_input_order, buried_inputs
from tests.support.forced_tiles import forced_tile
from tests.support.launch_tables import Call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# more than 32 bits
SEED = 2**40 + 7
# ROUNDINGS_AT_ONCE: as many as fit into GPU memory together
MANY_ROUNDINGS, ROUNDINGS_AT_ONCE, MANY_ROWS = 64, 8, 256


@functools.lru_cache(maxsize=1)
def _inputs(call: Call) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Tensor]]:
    """q, k, v, dout, dlse; kv_lengths; score mods. Keys and values beyond a length are NaN."""
    batch, heads, q_len, kv_len = call.shape
    device, variant = DEVICE, call.variant
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(call).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tensors = {
        name: normal(batch, n, length, dim).to(call.dtype)
        for name, n, length, dim in (
            ("q", heads, q_len, call.head_dim),
            ("k", call.kv_heads, kv_len, call.head_dim),
            ("v", call.kv_heads, kv_len, call.v_dim),
        )
    }
    tensors["dout"] = normal(batch, heads, q_len, call.v_dim).to(call.dtype)
    tensors["dlse"] = normal(batch, heads, q_len)
    lengths = None
    if variant.has_lengths:
        drawn = torch.randint(0, kv_len + 1, (batch,), generator=generator, device=device, dtype=torch.int32)
        lengths = torch.cat([drawn.new_tensor([max(0, kv_len - 3)]), drawn[1:]])
        beyond = torch.arange(kv_len, device=device) >= lengths[:, None]
        for name in ("k", "v"):
            tensors[name].masked_fill_(beyond[:, None, :, None], torch.nan)
    options = {}
    if variant.has_sinks:
        options["sinks"] = normal(heads)
    if variant.has_slopes:
        options["alibi_slopes"] = 0.03 * torch.rand(heads, generator=generator, device=device)
    layout = call.layout()
    if variant.has_bias and layout is not None:
        # one bias per head if the heads share a layout
        options["block_bias"] = normal(*([heads] if layout.shape[1] == 1 else []), layout.capacity)
    if variant.has_pairs:
        options["pair_bias"] = normal(1, heads, q_len, kv_len)
    return tensors, lengths, options


def run(call: Call) -> list[Tensor]:
    """out, lse, dq, dk, dv, and the gradients of the score mods."""
    tensors, lengths, options = _inputs(call)
    tensors = buried_inputs(tensors)
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v")]
    score_mods = {name: tensor.detach().clone() for name, tensor in options.items()}
    trained = [score_mods[name].requires_grad_() for name in trained_mods(call, score_mods)]
    layout, variant = call.layout(), call.variant
    # by the variant, not by the layout, whose tokens keep their order
    with (
        forced_tile(variant.tile),
        mock.patch.object(dispatch, "can_reorder", lambda *_, **__: False),
    ):
        out, lse = attention_with_lse(
            *leaves,
            layout,
            causal=call.causal,
            scale=call.scale,
            kv_lengths=lengths,
            dropout_p=variant.dropout_p,
            seed=SEED if variant.dropout_p else None,
            # never None: poisoned memory turns determinism on, with which `hopper` runs another backward
            deterministic=variant.deterministic,
            backend=call.backend,
            softcap=variant.softcap,
            **score_mods,
        )
    douts = (tensors["dout"], tensors["dlse"].to(lse.dtype))
    grads = torch.autograd.grad((out, lse), [*leaves, *trained], douts)
    assert_in_input_order(leaves, out, grads[:3])
    return [out.detach(), lse.detach(), *grads]


def trained_mods(call: Call, mods: Iterable[str]) -> list[str]:
    """The names of the score mods with gradients; `hopper` leaves those of slopes to the kernels of `triton`."""
    return [name for name in mods if name != "alibi_slopes" or call.backend != "hopper"]


@functools.lru_cache(maxsize=32)
def _blocks(call: Call) -> plain.BlockOfPairs | None:
    layout = call.layout()
    return plain.block_of_pairs(layout) if layout is not None and call.variant.has_bias else None


def expected(
    call: Call, roundings: Sequence[int] | None = None, more_rows: int = 0
) -> list[tuple[list[Tensor], Tensor]]:
    """For each result of `run`: valid values in the dtype of the call, and the value in float64.

    roundings  as in plain.results
    more_rows  queries added in front, so that products have more rows; their gradients are 0 and their results dropped
    """
    tensors, lengths, options = _inputs(call)
    layout, variant, blocks = call.layout(), call.variant, _blocks(call)
    mask = None if layout is None else layout.to_dense().to(DEVICE)
    if more_rows:
        for name in ("q", "dout"):
            tensors = tensors | {name: F.pad(tensors[name], (0, 0, more_rows, 0))}
        tensors = tensors | {"dlse": F.pad(tensors["dlse"], (more_rows, 0))}
        mask = None if mask is None else F.pad(mask, (0, 0, more_rows, 0))
        if variant.has_pairs:
            options = options | {"pair_bias": F.pad(options["pair_bias"], (0, 0, more_rows, 0))}
        blocks = None if blocks is None else blocks._replace(more_rows=more_rows)

    wide = torch.promote_types(call.dtype, torch.float32)
    rounded = [tensor.to(call.dtype) for tensor in tensors.values()]
    named = {
        "causal": call.causal,
        "scale": call.scale,
        "kv_lengths": lengths,
        "dropout_p": variant.dropout_p,
        "seed": torch.tensor([SEED], device=DEVICE),
        "score_mods": {name: tensor.to(wide) for name, tensor in options.items()},
        "blocks": blocks,
        "softcap": variant.softcap,
    }
    plains = plain.results(*rounded, mask, **named, roundings=roundings)
    truths = plain.truths(*tensors.values(), mask, **named)
    # out, lse, dq and the gradient of pair_bias, which is the last, have a row for each query
    has_rows = [i < 3 or (variant.has_pairs and i == len(truths) - 1) for i in range(len(truths))]
    return [
        ([each[:, :, more_rows:] for each in same], truth[:, :, more_rows:]) if of_queries else (same, truth)
        for same, truth, of_queries in zip(plains, truths, has_rows, strict=True)
    ]


def assert_is_accurate(call: Call, actual: list[Tensor]) -> None:
    """Raises unless every result is within the tolerance of closeness.py."""
    try:
        _assert_within(call, actual, expected(call))
        return
    except AssertionError:
        # further valid computations only for the few results that need them, since they take time
        pass
    # cuBLAS sums products of few rows in a tree, with a smaller error than a sum in order
    has_few_rows = call.shape[2] < MANY_ROWS and not call.variant.dropout_p
    many = expected(call, more_rows=MANY_ROWS) if has_few_rows else None

    def allowed(roundings: Sequence[int]) -> list[tuple[list[Tensor], Tensor]]:
        few = expected(call, roundings)
        if many is None:
            return few
        return [([*same, *more], truth) for (same, truth), (more, _) in zip(few, many, strict=True)]

    if call.dtype == torch.float32:
        _assert_within(call, actual, allowed(range(2)))
        return
    # where one key has nearly all of a row's weight, dq and dk are rounding errors of out, and among millions of rows
    # some have a rare rounding
    for first in range(ROUNDINGS_AT_ONCE, MANY_ROUNDINGS, ROUNDINGS_AT_ONCE):
        with contextlib.suppress(AssertionError):
            _assert_within(call, actual, allowed(range(first, first + ROUNDINGS_AT_ONCE)))
            return
    _assert_within(call, actual, allowed(range(ROUNDINGS_AT_ONCE)))


def _assert_within(call: Call, actual: list[Tensor], allowed: list[tuple[list[Tensor], Tensor]]) -> None:
    results, mods = ("out", "lse", "dq", "dk", "dv"), _inputs(call)[2]
    of_names = dict(zip((*results, *(f"d{name}" for name in mods)), allowed, strict=True))
    names = (*results, *(f"d{name}" for name in trained_mods(call, mods)))
    for name, result in zip(names, actual, strict=True):
        same, truth = of_names[name]
        if result.dim() >= 3 and name != "dblock_bias":
            assert_as_accurate(result, same, truth, name=name)
        else:
            assert_as_accurate(as_rows(result), [as_rows(each) for each in same], as_rows(truth), name=name)
