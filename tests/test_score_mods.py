"""sinks, softcap, alibi_slopes, block_bias and pair_bias against a double loop over their published definitions.

test_zoo.py tests accuracy over many layouts and types.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, attention_with_lse, explain, functional, merge
from blocksparse_flash.dispatch import CallSpec
from tests.support.closeness import assert_as_accurate

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 2, 1, 40, 52, 8
BACKENDS = ["eager", "reference"]


def layout_of(
    q_len: int = Q_LEN, kv_len: int = KV_LEN, block_size: int | tuple[int, int] = 16, heads: int | None = None
) -> BlockLayout:
    """Some pairs, none in every fifth row, and blocks that are not stored."""

    def attends(*positions: Tensor) -> Tensor:
        *_, q_pos, kv_pos = positions
        head = positions[1] if heads else 0
        return ((q_pos * 7 + kv_pos * 3 + head) % 4 != 0) & (q_pos % 5 != 0) & ((q_pos // 16 + kv_pos // 16) % 3 != 1)

    return BlockLayout.from_predicate(attends, q_len, kv_len, block_size=block_size, heads=heads)


def call_of(
    layout: BlockLayout | None = None, *, dtype: torch.dtype = torch.float64, bias: str = "heads"
) -> dict[str, Any]:
    """q, k, v and all score mods, with fixed random values."""
    q_len, kv_len = (Q_LEN, KV_LEN) if layout is None else (layout.q_len, layout.kv_len)
    draw = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {
        name: torch.randn(BATCH, heads, length, HEAD_DIM, generator=draw, dtype=torch.float64).to(dtype)
        for name, heads, length in (("q", HEADS, q_len), ("k", KV_HEADS, kv_len), ("v", KV_HEADS, kv_len))
    }
    call |= {"softcap": 1.7, "sinks": torch.randn(HEADS, generator=draw, dtype=torch.float64)}
    call |= {"alibi_slopes": torch.tensor([0.01, 0.5], dtype=torch.float64)}
    pairs = torch.randn(1, HEADS, q_len, kv_len, generator=draw, dtype=torch.float64)
    call |= {"pair_bias": pairs.to(torch.promote_types(dtype, torch.float32))}
    if layout is not None:
        shapes = {
            "blocks": (layout.capacity,),
            "heads": (HEADS, layout.capacity),
            "all": (BATCH, HEADS, layout.capacity),
        }
        call |= {
            "layout": layout,
            "block_bias": torch.randn(shapes[bias], generator=draw, dtype=torch.float64),
        }
    return call


def double_loop(call: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
    """The definitions, one pair at a time, in Python's floats."""
    q, k, v, layout = (call.get(name) for name in ("q", "k", "v", "layout"))
    assert q is not None and k is not None and v is not None
    batch, heads, q_len, _ = q.shape
    kv_len, group = k.shape[2], heads // k.shape[1]
    mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool) if layout is None else layout.to_dense()
    mask = mask.expand(batch, heads, -1, -1)
    out, lse = torch.zeros(batch, heads, q_len, v.shape[3], dtype=torch.float64), torch.zeros(batch, heads, q_len)
    lse = lse.double()
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        logits = {}
        for j in range(kv_len):
            if not mask[b, h, i, j]:
                continue
            score = scale * float(q[b, h, i] @ k[b, h // group, j])
            if "softcap" in call:
                score = call["softcap"] * math.tanh(score / call["softcap"])
            if "alibi_slopes" in call:
                score -= float(call["alibi_slopes"][h]) * abs(i + (kv_len - q_len) - j)
            if "block_bias" in call:
                score += bias_of_pair(call["block_bias"], layout, b, h, i, j)
            if "pair_bias" in call:
                score += float(call["pair_bias"].expand(batch, heads, -1, -1)[b, h, i, j])
            logits[j] = score
        total = math.fsum(math.exp(score) for score in logits.values())
        if "sinks" in call:
            total += math.exp(float(call["sinks"][h]))
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, score in logits.items():
            out[b, h, i] += math.exp(score) / total * v[b, h // group, j]
    return out, lse


def bias_of_pair(bias: Tensor, layout: Any, b: int, h: int, i: int, j: int) -> float:
    """Bias of the stored block that holds a pair, found in the CSR tensors."""
    pointers = layout.indptr[b % layout.shape[0], h % layout.shape[1]]
    begin, end = pointers[i // layout.block_size[0]], pointers[i // layout.block_size[0] + 1]
    (entry,) = [e for e in range(begin, end) if layout.indices[e] == j // layout.block_size[1]]
    bias = bias.reshape((1,) * (3 - bias.dim()) + tuple(bias.shape))
    return float(bias[b % bias.shape[0], h % bias.shape[1], entry])


OPTIONS = ["sinks", "softcap", "alibi_slopes", "block_bias", "pair_bias"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kept", [*([name] for name in OPTIONS), OPTIONS], ids="-".join)
def test_each_option_equals_its_definition(kept: list[str], backend: str) -> None:
    call = call_of(layout_of())
    call = {name: value for name, value in call.items() if name not in OPTIONS or name in kept}
    actual = attention_with_lse(**call, scale=0.4, backend=backend)
    torch.testing.assert_close(actual, double_loop(call, 0.4))


@pytest.mark.sweep
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", ["blocks", "heads", "all"])
@pytest.mark.parametrize("block_size", [16, 32, (16, 48)], ids=str)
def test_a_block_bias_is_added_to_its_block(block_size: Any, bias: str, backend: str) -> None:
    call = call_of(layout_of(block_size=block_size), bias=bias)
    torch.testing.assert_close(attention_with_lse(**call, scale=0.4, backend=backend), double_loop(call, 0.4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layout_with_heads_has_one_bias_per_block(backend: str) -> None:
    call = call_of(layout_of(heads=HEADS), bias="blocks")
    torch.testing.assert_close(attention_with_lse(**call, scale=0.4, backend=backend), double_loop(call, 0.4))


def test_a_sink_equals_a_result_by_hand() -> None:
    """Scores log 1 and log 3, a sink of log 4: weights 1/8 and 3/8, lse log 8."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 3.0]).log().reshape(1, 1, 2, 1)
    v = torch.tensor([8.0, 16.0]).reshape(1, 1, 2, 1)
    for backend in BACKENDS:
        out, lse = attention_with_lse(q, k, v, scale=1.0, sinks=torch.tensor([4.0]).log(), backend=backend)
        torch.testing.assert_close((out.item(), lse.item()), (7.0, math.log(8)))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_lse_of_empty_rows_is_their_sink(backend: str, device: torch.device) -> None:
    layout = layout_of()
    call = call_of(layout, dtype=torch.float32)
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    out, lse = attention_with_lse(**call, backend=backend)
    is_empty = ~layout.to_dense().any(-1)[0, 0]
    assert is_empty.any() and not out[:, :, is_empty].any()
    expected = call["sinks"].float()[:, None].expand_as(lse[:, :, is_empty])
    torch.testing.assert_close(lse[:, :, is_empty], expected)


@pytest.mark.parametrize("backend", ["eager", "triton", "reference"])
def test_a_sink_of_minus_infinity_has_no_effect(backend: str, device: torch.device) -> None:
    call = call_of(layout_of(), dtype=torch.float32)
    call = {name: call[name].to(device) if name != "layout" else call[name] for name in ("q", "k", "v", "layout")}
    sinks = torch.full((HEADS,), -torch.inf, device=device, requires_grad=True)
    actual = attention_with_lse(**call, sinks=sinks, backend=backend)
    torch.testing.assert_close(actual, attention_with_lse(**call, backend=backend))
    actual[0].sum().backward()
    assert sinks.grad is not None and not sinks.grad.any()


TYPES = [
    *((name, dtype) for name in ("eager", "reference") for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    ("triton", torch.float32),
]


@pytest.mark.sweep
@pytest.mark.parametrize("sinks", [None, -math.inf])
@pytest.mark.parametrize(("backend", "dtype"), TYPES, ids=str)
def test_a_bias_of_minus_infinity_removes_its_block(
    backend: str, dtype: torch.dtype, sinks: float | None, device: torch.device
) -> None:
    """Full and partial blocks of 128: all blocks of one row and one of another row are removed."""
    pairs = (torch.arange(160)[:, None] + torch.arange(140)) % 5 != 0
    pairs[:, :128] = True
    layout = BlockLayout.from_dense(pairs, block_size=128)
    fewer = BlockLayout.from_dense(
        pairs & (torch.arange(160)[:, None] >= 128) & (torch.arange(140) < 128), block_size=128
    )
    assert layout.capacity == 4 and fewer.capacity == 1
    call = call_of(layout, dtype=dtype)
    call = {name: call[name][:1].to(device) for name in "qkv"} | {"layout": layout, "softcap": 1.7}
    call |= {"alibi_slopes": torch.tensor([0.01, 0.5], device=device)}
    if sinks is not None:
        call["sinks"] = torch.full((HEADS,), sinks, device=device)
    bias = torch.tensor([-math.inf, -math.inf, 0.3, -math.inf], device=device)
    found = with_gradients({**call, "block_bias": bias}, backend=backend)
    expected = with_gradients({**call, "layout": fewer, "block_bias": bias[2:3]}, backend=backend)
    found["dblock_bias"], removed = found["dblock_bias"][2:3], found["dblock_bias"][[0, 1, 3]]
    assert not removed.any()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=lambda message, name=name: f"{name}: {message}")
    empty = slice(0, 128)
    assert not found["out"][:, :, empty].any() and not found["dq"][:, :, empty].any()
    assert (found["lse"][:, :, empty] == (-math.inf if sinks is None else sinks)).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton", "reference"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_or_nan_scores_reach_only_their_rows(backend: str, value: float, device: torch.device) -> None:
    layout = layout_of(200, 150, 64)
    call = {
        name: tensor[:1].to(device)
        for name, tensor in call_of(layout, dtype=torch.float32).items()
        if name in ("q", "k", "v")
    }
    bias = torch.zeros(HEADS, layout.capacity, device=device)
    bias[1, 0] = value
    first = layout.to_dense()[0, 0, :64, :64].any(-1).to(device)
    assert layout.indices[0] == 0 and first.any() and not first.all()
    found, clean = (
        attention_with_lse(**call, layout=layout, block_bias=each, backend=backend)
        for each in (bias, torch.zeros_like(bias))
    )
    for result, expected in zip(found, clean, strict=True):
        assert result[0, 1, :64][first].isnan().all()
        torch.testing.assert_close(result[0, 1, :64][~first], expected[0, 1, :64][~first], rtol=0, atol=0)
        torch.testing.assert_close(result[0, 1, 64:], expected[0, 1, 64:], rtol=0, atol=0)
        torch.testing.assert_close(result[0, 0], expected[0, 0], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton", "reference"])
def test_an_infinite_slope_is_nan_where_a_query_attends_to_its_own_position(backend: str, device: torch.device) -> None:
    """inf * 0 is NaN. Other queries have only scores of -inf, like empty rows."""
    q, k, v = (call_of()[name][:1, :, :40].float().to(device) for name in ("q", "k", "v"))
    layout = BlockLayout.from_predicate(lambda i, j: (i - j).abs() == i % 2, 40, 40, block_size=16)
    slopes = torch.tensor([0.5, math.inf], device=device)
    out, lse = attention_with_lse(q, k, v, layout, alibi_slopes=slopes, backend=backend)
    assert out[0, 0].isfinite().all() and lse[0, 0].isfinite().all()
    assert out[0, 1, ::2].isnan().all() and lse[0, 1, ::2].isnan().all()
    assert not out[0, 1, 1::2].any() and (lse[0, 1, 1::2] == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_gradcheck(backend: str) -> None:
    layout = BlockLayout.from_predicate(lambda i, j: (i + j) % 3 != 0, 34, 33, block_size=16)
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 34, 3), (1, 1, 33, 3), (1, 1, 33, 2), (2,), (2,), (2, layout.capacity), (1, 1, 34, 33))
    leaves = [torch.rand(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, slopes, bias, pairs = leaves
        options: dict[str, Any] = {"sinks": sinks, "alibi_slopes": slopes, "block_bias": bias, "pair_bias": pairs}
        options["softcap"] = 0.9
        return attention_with_lse(
            q, k, v, layout, causal=True, dropout_p=0.2, seed=4, scale=-1.5, backend=backend, **options
        )

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def with_gradients(call: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """out, lse, and the gradients of every tensor of the call."""
    leaves = {name: value.detach().requires_grad_() for name, value in call.items() if isinstance(value, Tensor)}
    out, lse = attention_with_lse(**{**call, **leaves}, **options)
    draw = torch.Generator().manual_seed(9)
    grads = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for t in (out, lse)]
    found = torch.autograd.grad((out, lse), list(leaves.values()), grads)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


# pairs that do not attend overflow before they are masked, which only NumPy reports
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton", "reference"])
def test_gradients_are_accurate_up_to_scores_of_4096(backend: str, device: torch.device) -> None:
    """In rows of three equal scores only the rounding of lse matters, which the reference does not exponentiate."""
    layout = BlockLayout.from_predicate(lambda i, j: (i - j).abs() <= 1, 64, 64, block_size=64)
    draw = torch.Generator().manual_seed(0)
    k, v, dout = (torch.randn(1, 2, 64, 16, generator=draw).half().to(device) for _ in range(3))

    def results(name: str, dtype: torch.dtype, score: float) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (torch.zeros_like(k), k, v)]
        bias = torch.full((1,), score, device=device, dtype=torch.promote_types(dtype, torch.float32))
        out, lse = attention_with_lse(*leaves, layout, block_bias=bias, backend=name)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    for score in (-4096.0, 4096.0, -1e6, 1e6):
        actual, plains = results(backend, torch.float16, score), results("reference", torch.float16, score)
        truth = results("reference", torch.float64, score)
        for name, *compared in zip(("out", "lse", "dq", "dk", "dv"), actual, plains, truth, strict=True):
            is_far = abs(score) > 4096 and name in ("dq", "dv") and backend != "reference"
            with pytest.raises(AssertionError, match="too far") if is_far else contextlib.nullcontext():
                assert_as_accurate(*compared, name=name)
            # four roundings of lse: in the forward, to and from base 2, and in the backward
            if is_far and name == "dv":
                assert (actual[-1] - truth[-1]).abs().max() <= 4 * abs(score) * 2.0**-24 * truth[-1].abs().max()


SIDES = st.sampled_from([16, 32, 48, 80, 128, 176, 256])


@hypothesis.given(
    q_len=st.integers(0, 300),
    kv_len=st.integers(0, 300),
    block_size=st.tuples(SIDES, SIDES),
    axes=st.tuples(st.booleans(), st.booleans()),
    bias=st.sampled_from(["", "blocks", "heads", "all"]),
    chosen=st.tuples(*[st.booleans()] * 3),
    density=st.sampled_from([0.0, 0.003, 0.3, 1.0]),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.4]),
    lengths=st.none() | st.lists(st.integers(0, 300), min_size=2, max_size=2),
    seed=st.integers(0, 2**62),
)
def test_eager_equals_the_reference(
    q_len: int,
    kv_len: int,
    block_size: tuple[int, int],
    axes: tuple[bool, bool],
    bias: str,
    chosen: tuple[bool, bool, bool],
    density: float,
    causal: bool,
    dropout_p: float,
    lengths: list[int] | None,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = (BATCH if axes[0] else 1, HEADS if axes[1] else 1, q_len, kv_len)
    layout = BlockLayout.from_dense(torch.rand(shape, generator=draw) < density, block_size=block_size)
    call = call_of(layout, bias=bias if bias and not any(axes) else "blocks")
    dropped = [
        name for name, is_chosen in zip(("sinks", "softcap", "alibi_slopes"), chosen, strict=True) if not is_chosen
    ]
    for name in [*dropped, *(["block_bias"] if not bias else [])]:
        del call[name]
    if lengths is not None:
        call["kv_lengths"] = torch.tensor(lengths).clamp(max=kv_len)
    options: dict[str, Any] = {"causal": causal, "dropout_p": dropout_p, "seed": seed}
    floats = {name: value for name, value in call.items() if name != "kv_lengths"}
    options |= {"kv_lengths": call["kv_lengths"]} if lengths is not None else {}
    actual, expected = (with_gradients(floats, backend=backend, **options) for backend in BACKENDS)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=lambda message, name=name: f"{name}: {message}")


# of scores before the cap, in Triton's interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_scale_far_above_the_softcap_saturates(backend: str, device: torch.device) -> None:
    """Regression: their ratio was infinite in float32, and NaN times scores of 0, in padding too."""
    draw = torch.Generator().manual_seed(5)
    call = {name: torch.randn(1, 1, 4, 8, generator=draw).to(device) for name in "qkv"}
    call["q"][:, :, 2] = 0
    actual, expected = (with_gradients(call, backend=name, scale=1e9, softcap=1e-30) for name in (backend, "reference"))
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=1e-4, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_negative_slopes_do_not_overflow_in_padded_queries(backend: str, causal: bool, device: torch.device) -> None:
    """130 queries are padded to 256; the last padded one would have scores of 265."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"q": (1, 1, 130, 8), "k": (1, 1, 140, 8), "v": (1, 1, 140, 8)}
    call = {name: torch.randn(shape, generator=draw).to(device) for name, shape in shapes.items()}
    call["alibi_slopes"] = torch.tensor([-1.0], device=device)
    actual, expected = (with_gradients(call, backend=name, causal=causal) for name in (backend, "reference"))
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-3, atol=1e-3, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_two_runs_are_bitwise_equal(backend: str, device: torch.device) -> None:
    call = call_of(layout_of(150, 40, 48), dtype=torch.float32)
    call |= {name: call[name][:1] for name in "qkv"}
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    first, second = (with_gradients(call, backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_selections_on_the_device_have_biases() -> None:
    selected = BlockLayout.from_topk(torch.tensor([[[[1, -1], [0, 1], [2, 2]]]]), 80, 90, block_size=32)
    known = BlockLayout.from_blocks([0, 1, 1, 2], [1, 0, 1, 2], 80, 90, block_size=32)
    assert selected.capacity == 6 and selected.nnz == 4
    bias = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = {name: value for name, value in call_of(known).items() if name in ("q", "k", "v")}
    for causal in (False, True):
        expected = with_gradients({**call, "layout": known, "block_bias": bias[:4]}, causal=causal)
        for backend in BACKENDS:
            actual = with_gradients({**call, "layout": selected, "block_bias": bias}, causal=causal, backend=backend)
            assert not actual["dblock_bias"][4:].any()
            actual["dblock_bias"] = actual["dblock_bias"][:4]
            torch.testing.assert_close(actual, expected)


def test_options_have_any_floating_dtype_under_autocast() -> None:
    call = call_of(layout_of(), dtype=torch.float32)
    halves = {name: call[name].bfloat16().requires_grad_() for name in ("sinks", "alibi_slopes", "block_bias")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(**{**call, **halves})
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.bfloat16 for tensor in halves.values())
    plain = {name: value.bfloat16() for name, value in call.items() if name in ("q", "k", "v")}
    torch.testing.assert_close(out, attention(**{**call, **halves, **plain}), rtol=0, atol=0)


def test_a_sink_of_one_part_is_a_sink_of_the_merged_result() -> None:
    call = {name: value for name, value in call_of().items() if name in ("q", "k", "v", "sinks")}
    halves = [{name: call[name][:, :, part] for name in "kv"} for part in (slice(0, 20), slice(20, None))]
    first = attention_with_lse(call["q"], **halves[0], sinks=call["sinks"])
    torch.testing.assert_close(merge(*first, *attention_with_lse(call["q"], **halves[1])), attention_with_lse(**call))


# ---- pair_bias ----

EVERYWHERE = pytest.mark.parametrize("backend", ["eager", "triton", "reference"])


def pair_call(device: torch.device, *, layout: BlockLayout | None = None) -> dict[str, Any]:
    """q, k, v of float32 over 40 x 52 tokens, and a pair_bias of (1, HEADS)."""
    call = call_of(layout, dtype=torch.float32)
    names = ["q", "k", "v", "pair_bias", *(["layout"] if layout is not None else [])]
    return {name: call[name].to(device) for name in names}


@EVERYWHERE
@pytest.mark.parametrize("axes", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)], ids=str)
def test_a_pair_bias_of_any_strides_and_type_has_a_gradient(
    axes: tuple[int, int], backend: str, device: torch.device
) -> None:
    """Against the reference with contiguous float32: keys first in memory, 16 bits, one value expanded to all keys."""
    call = pair_call(device, layout=layout_of())
    wide = torch.randn(*axes, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(3)).to(device)
    for bias in (wide.mT.contiguous().mT, wide.bfloat16(), wide[..., :1].expand(-1, -1, -1, KV_LEN)):
        found = with_gradients({**call, "pair_bias": bias}, backend=backend)
        expected = with_gradients({**call, "pair_bias": bias.float().contiguous()}, backend="reference")
        assert found["dpair_bias"].dtype == bias.dtype and found["dpair_bias"].shape == bias.shape
        expected["dpair_bias"] = expected["dpair_bias"].to(bias.dtype)
        # the interpreter truncates bfloat16
        for name, value in found.items():
            tolerance = 2**-6 if value.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


# only NumPy reports that finfo.min overflows in base 2
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
@EVERYWHERE
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min])
def test_a_pair_bias_of_minus_infinity_removes_its_pair(
    value: float, is_dense: bool, backend: str, device: torch.device
) -> None:
    """Two thirds of the pairs, and every pair of two queries, which then have no keys."""
    layout = None if is_dense else layout_of()
    removed = (torch.arange(Q_LEN)[:, None] + torch.arange(KV_LEN)) % 3 > 0
    removed[3] = removed[32] = True
    kept = BlockLayout.from_dense(~removed, block_size=16)
    call = pair_call(device, layout=layout)
    bias = call.pop("pair_bias")
    masked = bias.masked_fill(removed.to(device), value)
    found = with_gradients({**call, "pair_bias": masked}, backend=backend)
    fewer = {**call, "layout": kept if layout is None else layout & kept}
    expected = with_gradients({**fewer, "pair_bias": bias}, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name in ("out", "dq", "dpair_bias"):
        assert not found[name][:, :, 3].any() and not found[name][:, :, 32].any()
    assert (found["lse"][:, :, 3] == -math.inf).all()
    assert not found["dpair_bias"][:, :, removed].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@EVERYWHERE
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_nan_in_a_pair_bias_reaches_its_query_alone(value: float, backend: str, device: torch.device) -> None:
    """And nothing at pairs that do not attend, where the gradient is 0."""
    layout = layout_of()
    call = pair_call(device, layout=layout)
    attends = layout.to_dense()[0, 0].to(device)
    assert attends[1, 0] and not attends.all()
    clean = with_gradients(call, backend=backend)
    unused = with_gradients({**call, "pair_bias": call["pair_bias"].masked_fill(~attends, value)}, backend=backend)
    torch.testing.assert_close(unused, clean, rtol=0, atol=0)
    assert not unused["dpair_bias"][:, :, ~attends].any()
    one = call["pair_bias"].clone()
    one[0, 1, 1, 0] = value
    found = attention_with_lse(**{**call, "pair_bias": one}, backend=backend)
    for name, result in zip(("out", "lse"), found, strict=True):
        assert result[:, 1, 1].isnan().all()
        result[:, 1, 1] = clean[name][:, 1, 1]
        torch.testing.assert_close(result, clean[name], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_bias_is_the_float_mask_of_scaled_dot_product_attention(backend: str) -> None:
    call = pair_call(torch.device("cpu"))
    call |= {"pair_bias": call["pair_bias"].masked_fill(call["pair_bias"] < -1, -math.inf)}
    leaves = [value.requires_grad_() for value in call.values()]
    q, k, v, bias = leaves
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    actual = attention(q, k, v, pair_bias=bias, backend=backend)
    torch.testing.assert_close(actual, expected)
    dout = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2))
    grads = [torch.autograd.grad(out, leaves, dout) for out in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_fixed_pair_bias_has_no_gradient_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = pytest.importorskip("blocksparse_flash.kernels.triton.backward", reason="needs Triton")
    monkeypatch.setattr(gradient, "pair_bias_launch", None)
    gradient.backward_launches.cache_clear()
    call = pair_call(device)
    call["q"].requires_grad_()
    attention(**call, backend="triton").sum().backward()
    assert call["q"].grad is not None


# ---- operators ----


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.thorough)])
def test_operators_pass_opcheck(backend: str, device: torch.device) -> None:
    layout = layout_of()
    call = call_of(layout, dtype=torch.float32)
    q, k, v = (call[name][:1].to(device).requires_grad_() for name in ("q", "k", "v"))
    sinks, slopes, bias, pairs = (
        call[name].float().to(device).detach().requires_grad_() for name in OPTIONS if name != "softcap"
    )
    lists = list(layout.plan(device)), list(layout.bias_index(device))
    rest: tuple[Any, ...] = (None, None, *CallSpec(0.25, False, 0.0, 1.5, backend, False))
    mods = sinks, slopes, bias[None].detach().requires_grad_(), pairs
    operators = torch.ops.blocksparse_flash
    results = torch.library.opcheck(operators.attention_forward.default, (q, k, v, *mods, *lists, *rest))
    assert set(results.values()) == {"SUCCESS"}
    q, k, v, *mods = (tensor.detach() for tensor in (q, k, v, *mods))
    out, lse = operators.attention_forward(q, k, v, *mods, *lists, *rest)
    for wanted in ([True] * 4, *([] if backend == "triton" else [[False, True, False, False]])):
        arguments = (torch.randn_like(out), None, q, k, v, *mods, out, lse, *lists, *rest, wanted)
        results = torch.library.opcheck(operators.attention_backward.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_into_one_graph_and_equals_the_uncompiled_call(causal: bool, device: torch.device) -> None:
    layout = layout_of().to(device)
    layout.plan(device, causal=causal)
    layout.bias_index(device, causal=causal)
    call = call_of(layout, dtype=torch.float32)
    names = [name for name, value in call.items() if isinstance(value, Tensor)]

    def attend(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        tensors: dict[str, Any] = dict(zip(names, leaves, strict=True))
        return attention_with_lse(**tensors, layout=layout, softcap=2.0, causal=causal)

    leaves = [call[name].to(device, torch.float32).requires_grad_() for name in names]
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out, lse = function(*leaves)
        results.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_biases_of_layouts_with_several_block_sizes_compile_into_one_graph() -> None:
    """Regression: Dynamo could not format a symbolic block size for the reason why `hopper` does not run a call."""
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = torch.randn(3, 1, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    for block_size in (32, 64, 128):
        layout = masks.local(256, window=16, block_size=block_size).to("cpu", causal=True)
        layout.bias_index("cpu", causal=True)
        bias = torch.randn(layout.nnz, generator=torch.Generator().manual_seed(block_size))
        out = compiled(q, k, v, layout, causal=True, block_bias=bias)
        torch.testing.assert_close(out, attention(q, k, v, layout, causal=True, block_bias=bias))


def test_a_missing_bias_index_is_refused_under_compile() -> None:
    layout = layout_of().to("cpu")
    call = call_of(layout)
    with pytest.raises(Exception, match=r"layout\.bias_index\(q\.device\)"):
        torch.compile(lambda: attention(**call), fullgraph=True, backend="aot_eager")()


def test_a_second_derivative_is_refused() -> None:
    call = call_of()
    sinks = call["sinks"].requires_grad_()
    (grad,) = torch.autograd.grad(attention(**{**call, "sinks": sinks}).sum(), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of attention are not supported"):
        grad.sum().backward()


# ---- errors ----

NNZ = layout_of().capacity
WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "sinks are a list": ({"sinks": [0.0]}, TypeError, ("sinks must be a float tensor (2,)", "got list", "as_tensor")),
    "sinks are int": (
        {"sinks": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        ("sinks must be floating", "torch.int32"),
    ),
    "sinks of kv heads": ({"sinks": torch.zeros(1)}, ValueError, ("sinks must have shape (2,)", "got (1,)", "expand")),
    "sinks on another device": (
        {"sinks": torch.zeros(2, device="meta")},
        ValueError,
        ("q's device cpu", "got meta", "sinks.to("),
    ),
    "slopes per batch": (
        {"alibi_slopes": torch.zeros(2, 4)},
        ValueError,
        ("alibi_slopes must have shape (2,)", "(2, 4)"),
    ),
    "slopes are a number": ({"alibi_slopes": 0.5}, TypeError, ("alibi_slopes must be a float tensor", "got float")),
    "softcap is 0": ({"softcap": 0}, ValueError, ("softcap must be above 0 and finite", "got 0.0", "softcap=None")),
    "softcap is negative": ({"softcap": -5.0}, ValueError, ("softcap must be above 0", "got -5.0")),
    "softcap is inf": ({"softcap": math.inf}, ValueError, ("softcap must be above 0 and finite", "got inf")),
    "softcap is nan": ({"softcap": math.nan}, ValueError, ("softcap must be above 0 and finite", "got nan")),
    "softcap is inf times log2(e)": ({"softcap": 3e38}, ValueError, ("softcap must be 1e-30 to 1e+30", "got 3e+38")),
    "softcap is 0 in float32": ({"softcap": 1e-46}, ValueError, ("softcap must be 1e-30 to 1e+30", "got 1e-46")),
    "softcap is a tensor": ({"softcap": torch.ones(1)}, TypeError, ("softcap must be a float", "(Tensor)")),
    "bias is a list": ({"block_bias": [0.0]}, TypeError, ("block_bias must be a float tensor", "got list")),
    "bias without a layout": (
        {"layout": None, "block_bias": torch.zeros(3)},
        ValueError,
        ("block_bias must come with a layout", "got layout None", "from_block_mask"),
    ),
    "bias is int": ({"block_bias": torch.zeros(NNZ, dtype=torch.int64)}, ValueError, ("block_bias must be floating",)),
    "bias of other blocks": (
        {"block_bias": torch.zeros(NNZ + 1)},
        ValueError,
        (f"block_bias must have shape ({NNZ},), (2, {NNZ}) or (2, 2, {NNZ})", f"got ({NNZ + 1},)", "layout.indices"),
    ),
    "bias of other heads": (
        {"block_bias": torch.zeros(3, NNZ)},
        ValueError,
        ("block_bias must have shape", f"(3, {NNZ})"),
    ),
    "bias of four axes": ({"block_bias": torch.zeros(1, 1, 1, NNZ)}, ValueError, ("block_bias must have shape",)),
    "bias per head of a layout with heads": (
        {"layout": layout_of(heads=HEADS), "block_bias": torch.zeros(2, layout_of(heads=HEADS).capacity)},
        ValueError,
        ("block_bias must have shape", "for a layout with heads or batches"),
    ),
    "pair_bias is a number": (
        {"pair_bias": 0.5},
        TypeError,
        ("pair_bias must be a float tensor", "(batch or 1, ", "got float"),
    ),
    "pair_bias is bool": (
        {"pair_bias": torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool)},
        ValueError,
        ("pair_bias must be floating point, got torch.bool",),
    ),
    "pair_bias is float64": (
        {"pair_bias": torch.zeros(1, 1, Q_LEN, KV_LEN, dtype=torch.float64)},
        ValueError,
        ("pair_bias must be float16, bfloat16, float32, got torch.float64", "pair_bias.float()"),
    ),
    "pair_bias of two axes": (
        {"pair_bias": torch.zeros(Q_LEN, KV_LEN)},
        ValueError,
        (
            "pair_bias must have the 4 dimensions (batch or 1, heads or 1, q_len, kv_len)",
            "(40, 52)",
            "pair_bias[None, None]",
        ),
    ),
    "pair_bias of another batch": (
        {"pair_bias": torch.zeros(3, 1, Q_LEN, KV_LEN)},
        ValueError,
        ("pair_bias must have 1 or 2 as its batch, got 3 in shape (3, 1, 40, 52)",),
    ),
    "pair_bias of kv heads": (
        {"pair_bias": torch.zeros(1, 4, Q_LEN, KV_LEN)},
        ValueError,
        ("pair_bias must have 1 or 2 as its heads, got 4",),
    ),
    "pair_bias of keys alone": (
        {"pair_bias": torch.zeros(2, 1, 1, KV_LEN)},
        ValueError,
        ("pair_bias must have 40 as its q_len, got 1", "pair_bias.expand(-1, -1, 40, 52)"),
    ),
    "pair_bias of other keys": (
        {"pair_bias": torch.zeros(1, 1, Q_LEN, KV_LEN + 1)},
        ValueError,
        ("pair_bias must have 52 as its kv_len, got 53",),
    ),
    "pair_bias on another device": (
        {"pair_bias": torch.zeros(1, 1, Q_LEN, KV_LEN, device="meta")},
        ValueError,
        ("q's device cpu", "got meta"),
    ),
    "bias on another device": (
        {"block_bias": torch.zeros(NNZ, device="meta")},
        ValueError,
        ("q's device cpu", "got meta"),
    ),
}


@pytest.mark.parametrize("function", [attention, attention_with_lse, explain])
@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_option_and_the_fix(name: str, function: Any) -> None:
    change, exception, parts = WRONG[name]
    call = call_of(layout_of(), dtype=torch.float32)
    call = {name: call[name] for name in ("q", "k", "v", "layout")}
    with pytest.raises(exception) as error:
        function(**{**call, **change})
    for part in parts:
        assert part in str(error.value)


def test_calls_without_score_mods_have_no_score_options() -> None:
    assert functional._score_options(None, None, None, None, None) is None
