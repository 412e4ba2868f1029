"""The contract of attention: errors, guarantees, and the choice of a backend.

test_zoo.py tests accuracy over many layouts and sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import scipy.sparse
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import masks
from blocksparse_flash import BlockLayout, dispatch, functional, interop, ops, reference, validation
from blocksparse_flash.functional import attention, attention_with_lse, explain
from blocksparse_flash.plan_format import tile_of
from blocksparse_flash.runtime.tensor_spec import specs_of

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM, V_DIM = 2, 4, 2, 32, 48, 16, 8
BACKENDS = ["eager", "reference"]


def window(q_len: int = Q_LEN, kv_len: int = KV_LEN, heads: int | None = None, batch: int | None = None) -> BlockLayout:
    """Distance at most 20; every fourth query has no keys."""

    def attends(*positions: torch.Tensor) -> torch.Tensor:
        *_, q_pos, kv_pos = positions
        return ((q_pos - kv_pos).abs() <= 20) & (q_pos % 4 != 0)

    return BlockLayout.from_predicate(attends, q_len, kv_len, block_size=16, heads=heads, batch=batch)


def good_call(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (BATCH, HEADS, Q_LEN, HEAD_DIM),
        "k": (BATCH, KV_HEADS, KV_LEN, HEAD_DIM),
        "v": (BATCH, KV_HEADS, KV_LEN, V_DIM),
    }
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


# ---- errors ----


def meta(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name].to("meta")}


def resized(**shapes: tuple[int, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: torch.zeros(shape) for name, shape in shapes.items()}


def cast(**dtypes: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name].to(dtype) for name, dtype in dtypes.items()}


def changed(**arguments: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: arguments


def last_stride_2(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name].repeat_interleave(2, dim=-1)[..., ::2]}


# name: (change of a good call, exception, parts of its message: argument, expectation, actual value, fix)
WRONG_CALLS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], tuple[str, ...]]] = {
    # types
    "q is a list": (changed(q=[1.0]), TypeError, ("q must be a torch.Tensor", "got list", "torch.as_tensor(q)")),
    "k is an array": (lambda c: {"k": c["k"].numpy()}, TypeError, ("k must be", "got ndarray", "torch.as_tensor(k)")),
    "v is None": (changed(v=None), TypeError, ("v must be a torch.Tensor", "got NoneType")),
    "q is int64": (cast(q=torch.int64), ValueError, ("q must be float16, bfloat16", "got torch.int64", "q.to(")),
    "q is complex": (cast(q=torch.complex64), ValueError, ("q must be float16", "got torch.complex64")),
    "all are bool": (
        cast(q=torch.bool, k=torch.bool, v=torch.bool),
        ValueError,
        ("q must be float16", "got torch.bool"),
    ),
    "k has another dtype": (
        cast(k=torch.float16),
        ValueError,
        ("k must have q's dtype torch.float32", "got torch.float16", "k.to(q.dtype)"),
    ),
    "v has another dtype": (
        cast(v=torch.float64),
        ValueError,
        ("v must have q's dtype torch.float32", "got torch.float64", "v.to(q.dtype)"),
    ),
    "q has another dtype than both": (
        cast(q=torch.bfloat16),
        ValueError,
        ("k must have q's dtype torch.bfloat16", "got torch.float32"),
    ),
    "k is on another device": (
        meta("k"),
        ValueError,
        ("k must be on q's device cpu", "got meta", "k.to(q.device)"),
    ),
    "v is on another device": (
        meta("v"),
        ValueError,
        ("v must be on q's device cpu", "got meta", "v.to(q.device)"),
    ),
    "q is on another device": (meta("q"), ValueError, ("k must be on q's device meta", "got cpu", "k.to(q.device)")),
    "q is sparse": (
        lambda c: {"q": c["q"].to_sparse()},
        ValueError,
        ("q must be a dense, strided tensor", "torch.sparse_coo", "q.to_dense()"),
    ),
    "v is nested": (
        lambda c: {"v": torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)], layout=torch.jagged)},
        ValueError,
        ("v must be a dense, strided tensor", "nested", "kv_lengths"),
    ),
    "q has no shape yet": (
        changed(q=torch.nn.UninitializedParameter()),
        ValueError,
        ("q must be a dense", "a parameter without a shape"),
    ),
    **{
        f"{name} is {kind}": (
            changed(**{name: change(value)}),
            ValueError,
            (f"{name} must be a dense, strided tensor", f"got a {kind} tensor", f"{hint.format(name)} makes one"),
        )
        for name, value in (
            ("kv_lengths", torch.tensor([3, 4])),
            ("seed", torch.tensor([3])),
            ("sinks", torch.zeros(HEADS)),
            ("alibi_slopes", torch.zeros(HEADS)),
            ("block_bias", torch.zeros(6)),
            ("pair_bias", torch.zeros(1, 1, 32, 48)),
        )
        for kind, change, hint in (
            ("torch.sparse_coo", torch.Tensor.to_sparse, "{}.to_dense()"),
            (
                "nested",
                lambda value: torch.nested.nested_tensor([value, value], layout=torch.jagged),
                "torch.nested.to_padded_tensor({}, 0.0)",
            ),
        )
    },
    # shapes
    "q has 3 dimensions": (
        resized(q=(4, 32, 16)),
        ValueError,
        ("q must have the 4 dimensions (batch, heads, length, head_dim)", "got shape (4, 32, 16)", "q[None]"),
    ),
    "k has 2 dimensions": (resized(k=(48, 16)), ValueError, ("k must have the 4 dimensions", "(48, 16)", "k[None]")),
    "v has 5 dimensions": (
        resized(v=(1, 2, 2, 48, 16)),
        ValueError,
        ("v must have the 4 dimensions", "(1, 2, 2, 48, 16)"),
    ),
    "k has another batch than v": (
        resized(k=(3, 2, 48, 16)),
        ValueError,
        ("k and v must agree in batch", "(3, 2, 48, 16)", "(2, 2, 48, 8)", "expand"),
    ),
    "v has more heads than k": (
        resized(v=(2, 4, 48, 8)),
        ValueError,
        ("k and v must agree in batch, heads and length", "(2, 2, 48, 16)", "(2, 4, 48, 8)"),
    ),
    "v is longer than k": (
        resized(v=(2, 2, 49, 8)),
        ValueError,
        ("k and v must agree in batch, heads and length", "(2, 2, 48, 16)", "(2, 2, 49, 8)"),
    ),
    "k and v have another batch": (
        resized(k=(3, 2, 48, 16), v=(3, 2, 48, 8)),
        ValueError,
        ("k and v must have q's batch 2", "got 3", "expand"),
    ),
    "k and v would broadcast over batch": (
        resized(k=(1, 2, 48, 16), v=(1, 2, 48, 8)),
        ValueError,
        ("k and v must have q's batch 2", "got 1", "expand(2"),
    ),
    "heads are no multiple": (
        resized(k=(2, 3, 48, 16), v=(2, 3, 48, 8)),
        ValueError,
        ("q's heads must be a multiple of k's heads", "4 and 3", "repeat"),
    ),
    "more kv heads than heads": (
        resized(k=(2, 8, 48, 16), v=(2, 8, 48, 8)),
        ValueError,
        ("q's heads must be a multiple of k's heads", "4 and 8"),
    ),
    "no kv heads": (
        resized(k=(2, 0, 48, 16), v=(2, 0, 48, 8)),
        ValueError,
        ("q's heads must be a multiple of k's heads", "4 and 0"),
    ),
    "heads and length of k and v are swapped": (
        resized(q=(2, 1, 8, 16), k=(2, 96, 8, 16), v=(2, 96, 8, 16)),
        ValueError,
        ("1 and 96", "looks like (batch, length, heads, head_dim): use transpose(1, 2)", "lengths 1 and 96"),
    ),
    "heads and length are swapped with a layout": (
        lambda c: {**resized(q=(2, 32, 4, 16), k=(2, 32, 4, 16), v=(2, 32, 4, 16))(c), "layout": window(kv_len=32)},
        ValueError,
        (
            "layout describes 32 queries x 32 keys, but q has 4",
            "q of 32 heads looks like (batch, length, heads, head_dim): use transpose(1, 2)",
        ),
    ),
    "heads and length are swapped with slopes": (
        lambda c: {
            **resized(q=(2, 32, 4, 16), k=(2, 32, 4, 16), v=(2, 32, 4, 16))(c),
            "layout": None,
            "alibi_slopes": torch.ones(4),
        },
        ValueError,
        ("alibi_slopes must have shape (32,)", "q looks like (batch, length, heads, head_dim): use transpose(1, 2)"),
    ),
    "k has another head_dim": (
        resized(k=(2, 2, 48, 32)),
        ValueError,
        ("k must have q's head_dim 16", "got 32", "pad"),
    ),
    "head_dim is 0": (
        resized(q=(2, 4, 32, 0), k=(2, 2, 48, 0)),
        ValueError,
        ("q must have a head_dim of 1 to 256", "got 0", "order"),
    ),
    "head_dim is 257": (
        resized(q=(2, 4, 32, 257), k=(2, 2, 48, 257)),
        ValueError,
        ("q must have a head_dim of 1 to 256", "got 257", "more heads"),
    ),
    "v's head_dim is 512": (
        resized(v=(2, 2, 48, 512)),
        ValueError,
        ("v must have a head_dim of 1 to 256", "got 512", "more heads"),
    ),
    "q's last stride is 2": (
        last_stride_2("q"),
        ValueError,
        ("q must have a last stride of 1", "got strides (4096, 1024, 32, 2)", "q.contiguous()"),
    ),
    "k is transposed": (
        lambda c: {"k": c["k"].mT.contiguous().mT},
        ValueError,
        ("k must have a last stride of 1", "got strides (1536, 768, 1, 48)", "k.contiguous()"),
    ),
    "v's last stride is 2": (last_stride_2("v"), ValueError, ("v must have a last stride of 1", "v.contiguous()")),
    # layout
    "layout is a bool mask": (
        changed(layout=torch.ones(32, 48, dtype=torch.bool)),
        TypeError,
        ("layout must be a BlockLayout or None", "got Tensor", "BlockLayout.from_dense(mask"),
    ),
    "layout is a specification": (
        changed(layout="causal | local(3)"),
        TypeError,
        ("layout must be a BlockLayout or None", "got str", "masks.build('causal | local(3)', (32, 48)) makes one"),
    ),
    "layout is a predicate": (
        changed(layout=lambda q_pos, kv_pos: q_pos >= kv_pos),
        TypeError,
        ("layout must be a BlockLayout or None", "got function", "BlockLayout.from_predicate(fn, 32, 48) makes one"),
    ),
    "layout is a SciPy matrix": (
        changed(layout=scipy.sparse.eye_array(32, 48)),
        TypeError,
        ("layout must be a BlockLayout or None", "interop.from_scipy_csr(matrix) makes one"),
    ),
    "layout is a BlockMask": (
        lambda c: {"layout": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 32, 48, device="cpu")},
        TypeError,
        ("layout must be a BlockLayout or None", "got BlockMask", "interop.from_flex_attention(block_mask)"),
    ),
    "layout has other queries": (
        lambda c: {"layout": window(q_len=64)},
        ValueError,
        ("layout describes 64 queries x 48 keys", "q has 32 and k has 48", "build it for (32, 48)"),
    ),
    "layout has other keys": (
        lambda c: {"layout": window(kv_len=47)},
        ValueError,
        ("layout describes 32 queries x 47 keys", "q has 32 and k has 48", "build it for (32, 48)"),
    ),
    "layout has as many heads as k": (
        lambda c: {"layout": window(heads=KV_HEADS)},
        ValueError,
        ("layout must have 1 head or q's 4", "got 2", "query heads"),
    ),
    "layout has another batch": (
        lambda c: {"layout": window(batch=3)},
        ValueError,
        ("layout must have batch 1 or q's 2", "got 3", "build it for that batch"),
    ),
    # options
    "causal is 1": (changed(causal=1), TypeError, ("causal must be True or False", "got 1 (int)", "bool(causal)")),
    "causal is None": (changed(causal=None), TypeError, ("causal must be True or False", "got None (NoneType)")),
    "causal is a str": (changed(causal="bottom_right"), TypeError, ("causal must be True", "got 'bottom_right' (str)")),
    "scale is a bool": (
        changed(scale=True),
        TypeError,
        ("scale must be a float or an int", "got True (bool)", "float("),
    ),
    "scale is a tensor": (
        changed(scale=torch.tensor(0.1)),
        TypeError,
        ("scale must be a float or an int", "(Tensor)", "float(scale)"),
    ),
    "scale is a str": (changed(scale="0.1"), TypeError, ("scale must be a float or an int", "got '0.1' (str)")),
    "scale is nan": (changed(scale=math.nan), ValueError, ("scale must be finite", "got nan", "scale=None")),
    "scale is infinite": (changed(scale=-math.inf), ValueError, ("scale must be finite", "got -inf", "scale=None")),
    "scale is inf in float32": (
        changed(scale=-1e39),
        ValueError,
        ("scale must be finite as a float32, 3.4e+38 at most", "got -1e+39", "scale=None"),
    ),
    "scale is a huge int": (changed(scale=10**400), ValueError, ("scale must be a finite float", "got 1000")),
    "dropout_p is 1": (changed(dropout_p=1.0), ValueError, ("dropout_p must be at least 0 and less than 1", "got 1.0")),
    "dropout_p is 1, an int": (changed(dropout_p=1), ValueError, ("dropout_p must be at least 0", "got 1;", "0.0")),
    "dropout_p is negative": (
        changed(dropout_p=-0.1),
        ValueError,
        ("dropout_p must be at least 0", "got -0.1", "0.0 turns it off"),
    ),
    "dropout_p is nan": (changed(dropout_p=math.nan), ValueError, ("dropout_p must be at least 0", "got nan")),
    "dropout_p is None": (changed(dropout_p=None), TypeError, ("dropout_p must be a float", "got None (NoneType)")),
    "dropout_p is a bool": (changed(dropout_p=False), TypeError, ("dropout_p must be a float", "got False (bool)")),
    "seed is a float": (
        changed(dropout_p=0.5, seed=1.0),
        TypeError,
        ("seed must be an int, an int64 tensor of one element or None", "got 1.0 (float)", "int(seed)"),
    ),
    "seed is a bool": (changed(seed=True), TypeError, ("seed must be an int", "got True (bool)", "int(seed)")),
    "seed is a generator": (changed(seed=torch.Generator()), TypeError, ("seed must be an int", "(Generator)")),
    "seed is an int32 tensor": (
        changed(seed=torch.zeros(1, dtype=torch.int32)),
        ValueError,
        ("seed must be an int64 tensor of one element", "got torch.int32 of shape (1,)", "torch.randint"),
    ),
    "seed has two elements": (
        changed(seed=torch.zeros(2, dtype=torch.int64)),
        ValueError,
        ("seed must be an int64 tensor of one element", "got torch.int64 of shape (2,)"),
    ),
    "seed is on another device": (
        changed(seed=torch.zeros(1, dtype=torch.int64, device="meta")),
        ValueError,
        ("seed must be on q's device cpu or the CPU", "got meta", "seed.to(q.device)"),
    ),
    "seed is too large": (changed(seed=2**63), ValueError, ("seed must fit a signed 64-bit integer", f"got {2**63}")),
    "seed is too small": (changed(seed=-(2**63) - 1), ValueError, ("seed must fit", f"got {-(2**63) - 1}", "% 2**63")),
    "kv_lengths is a list": (
        changed(kv_lengths=[3, 4]),
        TypeError,
        ("kv_lengths must be an int32 or int64 tensor", "got list", "torch.as_tensor"),
    ),
    "kv_lengths is an int": (changed(kv_lengths=3), TypeError, ("kv_lengths must be an int32 or int64", "got int")),
    "kv_lengths is float": (
        changed(kv_lengths=torch.tensor([3.0, 4.0])),
        ValueError,
        ("kv_lengths must be int32 or int64", "got torch.float32", "kv_lengths.to(torch.int32)"),
    ),
    "kv_lengths is a padding mask": (
        changed(kv_lengths=torch.ones(2, 48, dtype=torch.bool)),
        ValueError,
        ("kv_lengths must be int32 or int64", "got torch.bool"),
    ),
    "kv_lengths has two dimensions": (
        changed(kv_lengths=torch.tensor([[3], [4]])),
        ValueError,
        ("kv_lengths must have shape (2,)", "got (2, 1)", "not a mask"),
    ),
    "kv_lengths has no dimension": (
        changed(kv_lengths=torch.tensor(3)),
        ValueError,
        ("kv_lengths must have shape (2,)", "got ()"),
    ),
    "kv_lengths has another batch": (
        changed(kv_lengths=torch.tensor([3, 4, 5])),
        ValueError,
        ("kv_lengths must have shape (2,)", "got (3,)", "one length for each batch"),
    ),
    "kv_lengths is on another device": (
        changed(kv_lengths=torch.zeros(2, dtype=torch.int64, device="meta")),
        ValueError,
        ("kv_lengths must be on q's device cpu", "got meta", "kv_lengths.to(q.device)"),
    ),
    "a kv_length is negative": (
        changed(kv_lengths=torch.tensor([3, -1])),
        ValueError,
        ("kv_lengths must be 0 to 48", "got -1", "kv_lengths.clamp(0, 48)"),
    ),
    "a kv_length is beyond k": (
        changed(kv_lengths=torch.tensor([49, 3], dtype=torch.int32)),
        ValueError,
        ("kv_lengths must be 0 to 48", "got 49", "kv_lengths.clamp(0, 48)"),
    ),
    "deterministic is 1": (
        changed(deterministic=1),
        TypeError,
        ("deterministic must be True, False or None", "got 1 (int)", "torch.are_deterministic_algorithms_enabled()"),
    ),
    "deterministic is a str": (changed(deterministic="warn"), TypeError, ("deterministic must be", "got 'warn' (str)")),
    # backend
    "backend is unknown": (
        changed(backend="flash"),
        ValueError,
        (
            "backend must be one of ('auto', 'hopper', 'triton', 'eager', 'reference')",
            'got "flash"',
            '"auto" would use "eager"',
        ),
    ),
    "backend is None": (changed(backend=None), TypeError, ("backend must be a str", "got None", '"auto" chooses')),
    "backend is a list": (changed(backend=["eager"]), TypeError, ("backend must be a str", "got ['eager']")),
    "hopper on the CPU": (
        changed(backend="hopper"),
        ValueError,
        (
            'backend="hopper" cannot run this call',
            "it needs a CUDA device, got cpu",
            'backend="auto" would use "eager"',
        ),
    ),
    "triton with float64": (
        lambda c: {**cast(q=torch.float64, k=torch.float64, v=torch.float64)(c), "backend": "triton"},
        ValueError,
        ('backend="triton" cannot run this call', "got torch.float64", 'backend="auto" would use "eager"'),
    ),
}


@pytest.fixture
def nothing_is_computed(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("computed before the checks passed")

    monkeypatch.setattr(ops, "attention", refuse)
    monkeypatch.setattr(reference, "attention", refuse)
    monkeypatch.setattr(BlockLayout, "plan", refuse)
    monkeypatch.setattr(BlockLayout, "to_dense", refuse)


@pytest.mark.parametrize("function", [attention, attention_with_lse, explain])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_errors_name_the_argument_and_the_fix(name, function, nothing_is_computed):
    change, exception, parts = WRONG_CALLS[name]
    call = {**good_call(), "layout": window()}
    generator_state = torch.random.get_rng_state()
    with pytest.raises(exception) as error:
        function(**{**call, **change(call)})
    for part in parts:
        assert part in str(error.value)
    assert torch.equal(torch.random.get_rng_state(), generator_state)


def test_the_good_call_is_valid():
    attention(**good_call(), layout=window())


def test_no_swap_is_suspected_for_plausible_shapes():
    with pytest.raises(ValueError, match=r"got 6 and 4; repeat k and v"):
        attention(**resized(q=(2, 6, 512, 16), k=(2, 4, 512, 16), v=(2, 4, 512, 16))({}))


# keyword of another library: what to use instead
OTHER_KEYWORDS = {
    "attn_mask": r"layout=BlockLayout\.from_dense\(mask\).*kv_lengths=.*pair_bias=",
    "attention_mask": "kv_lengths=",
    "is_causal": "causal=True aligns the diagonal bottom-right",
    "window_size": r"masks\.local\(length, window=\(left, right\)\).*FlashAttention's -1",
    "block_mask": r"interop\.from_flex_attention\(block_mask\)",
    "mask_mod": r"from_predicate\(mask_mod, q_len, kv_len, heads=1\)",
    "score_mod": "softcap=, alibi_slopes=, block_bias=, pair_bias= and sinks=",
    "enable_gqa": "leave it out: k and v may have fewer heads",
    "dropout": "dropout_p= is the probability of dropping",
    "softmax_scale": "scale= is the factor",
    "kv_length": "did you mean kv_lengths",
    "zzz": "there are layout, causal, scale, kv_lengths, dropout_p",
}


@pytest.mark.parametrize("function", [attention, attention_with_lse, explain])
@pytest.mark.parametrize("name", OTHER_KEYWORDS)
def test_keywords_of_other_libraries_are_translated(name, function, nothing_is_computed):
    start = rf"^{function.__name__}\(\) got an unexpected keyword argument '{name}'; .*"
    with pytest.raises(TypeError, match=start + OTHER_KEYWORDS[name]):
        function(**good_call(), **{name: None})


def test_suggestions_know_every_option():
    named = {name for name, kind in inspect.signature(attention).parameters.items() if kind.kind is kind.KEYWORD_ONLY}
    assert {*functional._OPTIONS} == {*named, "layout"}
    for function in (attention_with_lse, explain):
        assert inspect.signature(function).parameters.keys() == inspect.signature(attention).parameters.keys()
    assert not named & validation._KEYWORDS.keys()


def test_the_advice_of_errors_works():
    """The calls that errors advise give the intended layout."""
    attends = lambda b, h, q_pos, kv_pos: q_pos >= kv_pos  # noqa: E731
    block_mask = create_block_mask(attends, None, None, 256, 256, device="cpu")
    causal = BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos >= kv_pos, 256, 256)
    assert interop.from_flex_attention(block_mask) == causal
    assert BlockLayout.from_predicate(attends, 256, 256, heads=1) == causal
    assert masks.build("causal", 256) == causal
    assert masks.local(256, window=(None, 0)) == causal
    matrix = scipy.sparse.csr_array(causal.to_dense()[0, 0].numpy())
    assert interop.from_scipy_csr(matrix) == BlockLayout.from_dense(causal.to_dense()) == causal


def test_options_are_keyword_only():
    call = good_call()
    with pytest.raises(TypeError, match="positional"):
        attention(call["q"], call["k"], call["v"], None, True)


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r'"triton" cannot run .*TRITON_INTERPRET=1.*got cpu.*would use "eager"'):
        attention(**good_call(), backend="triton")


# ---- guarantees ----


def with_gradients(call: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv for fixed random gradients of out and lse."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in ("q", "k", "v")}
    out, lse = attention_with_lse(**{**call, **leaves}, **options)
    generator = torch.Generator().manual_seed(99)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (out, lse)]
    torch.autograd.backward([out, lse], grads)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_have_the_documented_shapes_and_dtypes(dtype, backend):
    call = good_call(dtype)
    out, lse = attention_with_lse(**call, layout=window(), backend=backend)
    assert out.shape == (BATCH, HEADS, Q_LEN, V_DIM) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (BATCH, HEADS, Q_LEN)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(attention(**call, layout=window(), backend=backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 0.5, 1, 0, 0.0, -0.3])
def test_scale_multiplies_the_scores(scale, backend):
    """Scaling scores equals scaling queries; their gradient is scaled too."""
    call = good_call(torch.float64)
    result = with_gradients(call, scale=scale, backend=backend)
    factor = HEAD_DIM**-0.5 if scale is None else scale
    expected = with_gradients({**call, "q": call["q"] * factor}, scale=1.0, backend="reference")
    expected["dq"] *= factor
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name])


def test_scale_0_is_not_none():
    call = good_call()
    assert not torch.equal(attention(**call, scale=0.0), attention(**call))
    torch.testing.assert_close(attention(**call, scale=HEAD_DIM**-0.5), attention(**call), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "layout", [None, window(), window(heads=HEADS), window(batch=BATCH)], ids=["none", "1", "h", "b"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts_and_causal_equal_a_dense_mask(layout, causal, backend):
    call = good_call(torch.float64)
    mask = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool) if layout is None else layout.to_dense()
    mask = mask & torch.ones(Q_LEN, KV_LEN).tril(KV_LEN - Q_LEN).bool() if causal else mask
    out, lse = attention_with_lse(**call, layout=layout, causal=causal, backend=backend)
    expected_out, expected_lse = reference.attention(**call, mask=mask)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_rows_give_zero_output_and_zero_gradients(backend):
    result = with_gradients(good_call(), layout=window(), backend=backend)
    assert (result["out"][:, :, ::4] == 0).all() and (result["dq"][:, :, ::4] == 0).all()
    assert (result["lse"][:, :, ::4] == -math.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert result[name].isfinite().all() and result[name].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_layout_gives_zeros(backend):
    layout = BlockLayout.from_blocks([], [], Q_LEN, KV_LEN, block_size=16)
    result = with_gradients(good_call(), layout=layout, backend=backend)
    assert (result.pop("lse") == -math.inf).all()
    assert all((value == 0).all() for value in result.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", [None, window()], ids=["none", "window"])
@pytest.mark.parametrize("causal", [False, True])
def test_kv_lengths_hide_keys_even_if_nan(layout, causal, dtype, backend):
    lengths = torch.tensor([17, 0], dtype=dtype)
    call = good_call()
    clean = with_gradients(call, layout=layout, causal=causal, kv_lengths=lengths, backend="reference")
    for batch, length in enumerate(lengths.tolist()):
        call["k"][batch, :, length:] = math.nan
        call["v"][batch, :, length:] = math.inf
    result = with_gradients(call, layout=layout, causal=causal, kv_lengths=lengths, backend=backend)
    for name, value in result.items():
        torch.testing.assert_close(value, clean[name])
    assert (result["out"][1] == 0).all() and (result["dk"][0, :, 17:] == 0).all()


def test_kv_lengths_may_be_a_view():
    call = good_call()
    lengths = torch.tensor([9, 5, 40, 5])[::2]
    assert torch.equal(attention(**call, kv_lengths=lengths), attention(**call, kv_lengths=lengths.clone()))
    expanded = torch.tensor([9]).expand(2)
    assert torch.equal(attention(**call, kv_lengths=expanded), attention(**call, kv_lengths=torch.tensor([9, 9])))


ZERO_SIZES = {
    "batch": ((0, 4, 32, 16), (0, 2, 48, 16)),
    "heads": ((2, 0, 32, 16), (2, 0, 48, 16)),
    "query heads": ((2, 0, 32, 16), (2, 2, 48, 16)),
    "q_len": ((2, 4, 0, 16), (2, 2, 48, 16)),
    "kv_len": ((2, 4, 32, 16), (2, 2, 0, 16)),
    "both lengths": ((2, 4, 0, 16), (2, 2, 0, 16)),
}


@pytest.mark.parametrize("backend", ["auto", "triton", *BACKENDS])
@pytest.mark.parametrize("name", ZERO_SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_inputs_give_zeros(name, causal, backend, device):
    q_shape, k_shape = ZERO_SIZES[name]
    # without keys the queries do not matter, not even NaN
    call = {"q": torch.full(q_shape, math.nan), "k": torch.randn(k_shape), "v": torch.randn(*k_shape[:3], 8)}
    call = {tensor: value.to(device) for tensor, value in call.items()}
    lengths = torch.zeros(q_shape[0], dtype=torch.int64, device=device)
    result = with_gradients(call, causal=causal, backend=backend, kv_lengths=lengths, dropout_p=0.5)
    assert result["out"].shape == (*q_shape[:3], 8) and (result["out"] == 0).all()
    assert result["lse"].shape == q_shape[:3] and (result["lse"] == -math.inf).all()
    for tensor in ("q", "k", "v"):
        grad = result[f"d{tensor}"]
        assert grad.shape == call[tensor].shape and (grad == 0).all()


def test_a_layout_without_keys_gives_zeros():
    layout = BlockLayout.from_blocks([], [], Q_LEN, 0, block_size=16)
    q, empty = torch.randn(2, 4, Q_LEN, 16), torch.randn(2, 2, 0, 16)
    out, lse = attention_with_lse(q, empty, empty, layout)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_strides_but_the_last_are_free(backend):
    """(batch, length, heads, dim) seen as (batch, heads, length, dim); one head expanded; a slice of wider rows."""
    call = good_call()
    expected = attention(**call, backend=backend)
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    call["k"] = torch.cat([call["k"], call["k"]], dim=-1)[..., :HEAD_DIM]
    assert torch.equal(attention(**call, backend=backend), expected)
    one = call["v"][:, :1].expand(-1, KV_HEADS, -1, -1)
    assert torch.equal(
        attention(call["q"], call["k"], one, backend=backend),
        attention(call["q"], call["k"], one.contiguous(), backend=backend),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_last_dimension_of_1_may_have_any_stride(backend):
    call = {name: torch.randn(*value.shape[:3], 2)[..., ::2] for name, value in good_call().items()}
    assert call["q"].stride(3) == 2
    contiguous = {name: value.contiguous() for name, value in call.items()}
    assert torch.equal(attention(**call, backend=backend), attention(**contiguous, backend=backend))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_lazily_negated_inputs_are_negated(backend, name, device):
    """Kernels read memory, in which a lazy negation is not applied yet."""
    draw = torch.Generator().manual_seed(0)
    call = {each: torch.randn(1, 1, 32, 1, generator=draw).to(device) for each in "qkv"}
    expected = attention(**{**call, name: -call[name]}, backend=backend)
    lazy = torch.complex(torch.zeros_like(call[name]), call[name]).conj().imag
    assert lazy.is_neg()
    torch.testing.assert_close(attention(**{**call, name: lazy}, backend=backend), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize("which", [0, 1], ids=["dout", "dlse"])
def test_lazily_negated_gradients_are_negated(backend, which, device):
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 1, 32, 16, generator=draw).to(device).requires_grad_() for _ in "qkv"]
    douts = [torch.randn(1, 1, 32, 16, generator=draw).to(device), torch.randn(1, 1, 32, generator=draw).to(device)]
    found = []
    for negated in (torch._neg_view(douts[which]), -douts[which]):
        douts[which] = negated
        found.append(torch.autograd.grad(attention_with_lse(*leaves, backend=backend), leaves, douts))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_gradcheck(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 18, 3), (1, 1, 17, 3), (1, 1, 17, 2))
    )
    layout = BlockLayout.from_predicate(lambda i, j: (i + j) % 3 != 0, 18, 17, block_size=16)

    def call(q, k, v):
        return attention_with_lse(q, k, v, layout, causal=True, dropout_p=0.2, seed=4, scale=-0.5, backend=backend)

    assert call(q, k, v)[1].isfinite().sum() < 2 * 18
    assert torch.autograd.gradcheck(
        lambda q, k, v: tuple(t.masked_fill(t.isinf(), 0) for t in call(q, k, v)), (q, k, v), fast_mode=True
    )


SIDES = st.sampled_from([16, 32, 48, 64, 128, 176, 256])
# up to two and a half tiles
LENGTHS = st.integers(0, 320)


@hypothesis.given(
    q_len=LENGTHS,
    kv_len=LENGTHS,
    block_size=st.tuples(SIDES, SIDES),
    batch=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 3]),
    group=st.integers(1, 2),
    head_dim=st.integers(1, 20),
    v_dim=st.integers(1, 20),
    shares=st.tuples(st.booleans(), st.booleans()),
    density=st.sampled_from([0.0, 0.003, 0.3, 1.0]),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
    lengths=st.none() | st.lists(LENGTHS, min_size=2, max_size=2),
    seed=st.integers(0, 2**63 - 1),
)
def test_eager_equals_the_reference(
    q_len,
    kv_len,
    block_size,
    batch,
    kv_heads,
    group,
    head_dim,
    v_dim,
    shares,
    density,
    causal,
    dropout_p,
    lengths,
    seed,
):
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    call: dict[str, Any] = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in (
            ("q", (batch, heads, q_len, head_dim)),
            ("k", (batch, kv_heads, kv_len, head_dim)),
            ("v", (batch, kv_heads, kv_len, v_dim)),
        )
    }
    mask_shape = (1 if shares[0] else batch, 1 if shares[1] else heads, q_len, kv_len)
    mask = torch.rand(mask_shape, generator=generator) < density
    call |= {"layout": BlockLayout.from_dense(mask, block_size=block_size), "causal": causal}
    call |= {"dropout_p": dropout_p, "seed": seed}
    if lengths is not None:
        call["kv_lengths"] = torch.tensor(lengths[:batch]).clamp(max=kv_len)
    actual, expected = (with_gradients(call, backend=backend) for backend in BACKENDS)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_input_alone_may_require_a_gradient(wanted, backend):
    call = good_call()
    expected = with_gradients(call, layout=window(), backend=backend)
    call[wanted].requires_grad_()
    outputs = attention_with_lse(**call, layout=window(), backend=backend)
    generator = torch.Generator().manual_seed(99)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    # in the reference, autograd knows that lse does not depend on v
    needed = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    torch.autograd.backward(*zip(*needed, strict=True))
    assert torch.equal(call[wanted].grad, expected[f"d{wanted}"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_alone_has_a_gradient(backend):
    call = {name: value.requires_grad_() for name, value in good_call(torch.float64).items()}
    attention_with_lse(**call, backend=backend)[1].sum().backward()
    k = call["k"].detach().repeat_interleave(2, dim=1)
    weights = torch.softmax(call["q"].detach() @ k.mT * HEAD_DIM**-0.5, dim=-1)
    torch.testing.assert_close(call["q"].grad, weights @ k * HEAD_DIM**-0.5)
    assert call["v"].grad is None or (call["v"].grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_runs_are_bitwise_equal(backend):
    runs = [
        with_gradients(good_call(), layout=window(), dropout_p=0.1, seed=1, deterministic=True, backend=backend)
        for _ in range(2)
    ]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name])


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_deterministic_may_be_none_or_a_bool(deterministic):
    attention(**good_call(), deterministic=deterministic)


# ---- dropout ----


@pytest.mark.parametrize("layout", [None, window()], ids=["none", "window"])
def test_dropout_drops_the_same_pairs_on_every_backend(layout):
    call = {**good_call(torch.float64), "layout": layout}
    results = [with_gradients(call, dropout_p=0.4, seed=7, backend=backend) for backend in BACKENDS]
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name])


def test_dropout_does_not_depend_on_the_layout():
    """No layout and full layouts of any block size drop the same pairs."""
    call = good_call(torch.float64)
    outs = [
        attention(**call, layout=layout, dropout_p=0.4, seed=7)
        for layout in (
            None,
            *(BlockLayout.from_dense(torch.ones(Q_LEN, KV_LEN).bool(), block_size=size) for size in (16, 32, 256)),
        )
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_dropout_leaves_lse_alone():
    call = good_call()
    assert torch.equal(
        attention_with_lse(**call, dropout_p=0.4, seed=7)[1], attention_with_lse(**call, dropout_p=0.0)[1]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_may_be_tensors_and_any_64_bit_integer(backend):
    call = {**good_call(), "dropout_p": 0.4, "backend": backend}
    seeded = attention(**call, seed=7)
    for seed in (torch.tensor(7), torch.tensor([7]), torch.tensor([[7]])):
        assert torch.equal(attention(**call, seed=seed), seeded)
    for seed in (8, -7, 7 + 2**32, 2**63 - 1, -(2**63)):
        assert not torch.equal(attention(**call, seed=seed), seeded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_seed_the_cpu_generator_decides(backend):
    call = {**good_call(), "dropout_p": 0.4, "backend": backend}
    torch.manual_seed(3)
    first, second = attention(**call), attention(**call)
    torch.manual_seed(3)
    assert torch.equal(attention(**call), first)
    assert torch.equal(attention(**call), second)
    assert not torch.equal(first, second)


def test_a_seed_is_drawn_on_the_device_for_cuda_graphs(monkeypatch):
    mode = FakeTensorMode()
    with mode:
        q = torch.empty(1, 2, 32, 16, device="cuda")
    for is_compiling, is_capturing, device in ((False, False, "cpu"), (True, False, "cuda"), (False, True, "cuda")):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda answer=is_compiling: answer)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_capturing: answer)
        with mode:
            assert functional._drawn_seed(q).device.type == device


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"dropout_p": 0.5, "seed": 3}], ids=str)
def test_the_generator_is_left_alone_when_not_needed(options):
    state = torch.random.get_rng_state()
    attention(**good_call(), **options)
    explain(**good_call(), dropout_p=0.5)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropout(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for is_checkpointed in (False, True):
        call = {name: value.requires_grad_() for name, value in good_call().items()}
        torch.manual_seed(5)

        def attend(q, k, v):
            return attention(q, k, v, layout=window(), dropout_p=0.3)

        inputs = call.values()
        out = checkpoint(attend, *inputs, use_reentrant=use_reentrant) if is_checkpointed else attend(*inputs)
        out.square().sum().backward()
        grads.append([value.grad for value in call.values()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


# ---- autocast ----


# the backward of the reference is autograd's, which autocast of the caller may round
@pytest.mark.parametrize(("backend", "is_backward_inside"), [("eager", False), ("eager", True), ("reference", False)])
def test_autocast_casts_inputs_and_results(backend, is_backward_inside):
    """Under autocast(bfloat16), float32 and float16 become bfloat16; each gradient has the dtype of its input."""
    call = good_call()
    call["k"] = call["k"].half()
    expected = with_gradients({name: value.bfloat16() for name, value in call.items()}, backend=backend)
    leaves = {name: value.requires_grad_() for name, value in call.items()}
    grads = [torch.randn(expected[name].shape, generator=torch.Generator().manual_seed(1)) for name in ("out", "lse")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention_with_lse(**leaves, backend=backend)
        assert out.dtype == torch.bfloat16 and torch.equal(out, expected["out"])
        assert lse.dtype == torch.float32 and torch.equal(lse, expected["lse"])
        grads[0] = grads[0].bfloat16()
        if is_backward_inside:
            torch.autograd.backward([out, lse], grads)
    if not is_backward_inside:
        torch.autograd.backward([out, lse], grads)
    plain = {name: value.detach().bfloat16().requires_grad_() for name, value in leaves.items()}
    torch.autograd.backward(attention_with_lse(**plain, backend=backend), grads)
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert torch.equal(leaf.grad, plain[name].grad.to(leaf.dtype))


def test_autocast_leaves_float64_alone():
    call = good_call(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(**call)
    assert torch.equal(out, attention(**call))


def test_autocast_of_another_device_changes_nothing():
    call = good_call()
    expected = attention(**call)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(attention(**call), expected)


@pytest.mark.parametrize("change", [cast(v=torch.float64), cast(q=torch.int64)])
def test_autocast_does_not_allow_other_dtypes(change):
    call = good_call()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"dtype|must be float16"):
        attention(**{**call, **change(call)})


# ---- compile ----


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"layout": window().to("cpu")},
        {"scale": -0.25, "deterministic": True},
        {"dropout_p": 0.3, "seed": 5},
        {"dropout_p": 0.3, "seed": torch.tensor([5])},
        {"kv_lengths": torch.tensor([5, 48])},
        {"backend": "reference"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_compiles_without_a_graph_break(options):
    call = good_call()
    options = {"backend": "eager", **options}
    function = compiled(lambda q, k, v: attention_with_lse(q, k, v, **options))
    out, lse = function(**call)
    expected_out, expected_lse = attention_with_lse(**call, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_compiled_gradients_equal_eager_ones():
    layout = window().to("cpu")
    layout.plan("cpu", causal=True)
    results = []
    for function in (attention, compiled(attention)):
        leaves = {name: value.requires_grad_() for name, value in good_call().items()}
        function(**leaves, layout=layout, causal=True).square().sum().backward()
        results.append([leaf.grad for leaf in leaves.values()])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_compiles_under_autocast():
    call = good_call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(attention)(**call)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, attention(**call))


def test_compiles_with_symbolic_head_dim_and_scale():
    """torch.compile makes them symbols when they change."""
    function = compiled(lambda q, k, v, scale: attention(q, k, v, scale=scale))
    for head_dim in (16, 24, 40, 8):
        q, k, v = torch.randn(3, 1, 2, 32, head_dim)
        torch.testing.assert_close(function(q, k, v, None), attention(q, k, v))
        torch.testing.assert_close(function(q, k, v, 1 / head_dim), attention(q, k, v, scale=1 / head_dim))


def test_compiled_dropout_draws_a_new_seed_every_call():
    function = compiled(lambda q, k, v: attention(q, k, v, dropout_p=0.5))
    call = good_call()
    assert not torch.equal(function(**call), function(**call))


@pytest.mark.parametrize("causal", [False, True])
def test_compiling_an_unplanned_layout_says_how_to_plan_it(causal):
    layout = window(q_len=Q_LEN)
    call = r"layout\.to\(q\.device, causal=True\)" if causal else r"layout\.to\(q\.device\)"
    with pytest.raises(Exception, match=call):
        compiled(lambda q, k, v: attention(q, k, v, layout, causal=causal))(**good_call())


def test_compiled_calls_raise_the_same_errors():
    with pytest.raises(Exception, match=r"k must have q's head_dim 16, got 32"):
        compiled(attention)(**{**good_call(), **resized(k=(2, 2, 48, 32))({})})


# ---- the choice of a backend, and explain ----


def test_auto_on_the_cpu_is_eager():
    explanation = explain(**good_call())
    assert explanation.backend == "eager"
    assert torch.equal(attention(**good_call()), attention(**good_call(), backend="eager"))


@pytest.fixture
def on_gpu(monkeypatch):
    """A context that pretends that GPU 0 has some compute capability and Triton some version."""
    triton = pytest.importorskip("triton", reason="needs Triton")

    @contextlib.contextmanager
    def pretend(capability, version="3.7.1", interpret=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
        dispatch._why_not_on_gpu.cache_clear()
        yield
        dispatch._why_not_on_gpu.cache_clear()

    yield pretend
    dispatch._why_not_on_gpu.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, "hopper"),
        ((9, 0), torch.float32, "triton"),
        ((10, 0), torch.bfloat16, "triton"),
        ((8, 0), torch.float16, "triton"),
        ((12, 1), torch.float32, "triton"),
        ((9, 0), torch.float64, "eager"),
        ((7, 5), torch.float16, "eager"),
    ],
)
def test_auto_on_a_gpu_depends_on_capability_and_dtype(on_gpu, capability, dtype, expected):
    with on_gpu(capability):
        device = torch.device("cuda", 0)
        assert dispatch.choose("auto", device, dtype) == expected
        if expected == "eager":
            with pytest.raises(ValueError, match=r'"triton" cannot run this call: it needs .*would use "eager"'):
                dispatch.choose("triton", device, dtype)
        else:
            assert dispatch.choose("triton", device, dtype) == "triton"
            assert dispatch.choose("eager", device, dtype) == "eager"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (10, 0)}, "it needs compute capability 9.0, this GPU has 10.0"),
        ({"version": "3.10.0"}, "it supports Triton 3.6, 3.7, 3.8, 3.9, this is 3.10.0"),
        ({"interpret": True}, "interpreter"),
        ({"has_dropout": True}, "it has no dropout"),
        (
            {"bias_blocks": (128, 64)},
            "its block_bias needs blocks whose sides are multiples of 128 tokens, got 128 x 64",
        ),
        ({"bias_blocks": (16, 16), "has_pair_bias": True}, "it has no pair_bias"),
        ({"has_pair_bias": True}, "it has no pair_bias"),
        ({"dtype": torch.float32}, "it needs float16 or bfloat16, got torch.float32"),
        ({"start": 1}, "strides and an address of k that are multiples of 16 bytes"),
        ({"stride": 65}, "strides and an address of k that are multiples of 16 bytes"),
    ],
    ids=str,
)
def test_hopper_refuses_unsupported_calls_with_a_reason(on_gpu, change, words):
    """With tensors on the CPU, since only the choice is tested."""
    dtype = change.get("dtype", torch.bfloat16)
    q = torch.zeros(1, 1, 8, 64, dtype=dtype)
    k = torch.zeros(600, dtype=dtype)[change.get("start", 0) :].as_strided(q.shape, (1, 1, change.get("stride", 64), 1))
    with on_gpu(change.get("capability", (9, 0)), change.get("version", "3.7.1"), change.get("interpret", False)):
        device = torch.device("cuda", 0)
        options = {name: change[name] for name in ("has_dropout", "bias_blocks", "has_pair_bias") if name in change}
        unfit = dispatch.why_not_hopper((q, k, q), dtype, dispatch.missing_option(**options))
        with pytest.raises(ValueError, match=f'"hopper" cannot run this call: .*{words}.*would use "triton"'):
            dispatch.choose("hopper", device, dtype, unfit)
        assert dispatch.choose("auto", device, dtype, unfit) == "triton"


@pytest.mark.parametrize(
    ("shape", "strides"),
    # (batch, length, heads, 72) in memory, and a batch of 1 with any stride; rows of 6 bytes; the largest head_dim
    [((1, 2, 8, 64), (3, 72, 144, 1)), ((1, 2, 8, 3), (48, 24, 3, 1)), ((1, 1, 8, 256), (2048, 2048, 256, 1))],
    ids=str,
)
def test_hopper_accepts_all_strides_that_tma_can_load(on_gpu, shape, strides):
    k = torch.zeros(5000, dtype=torch.bfloat16).as_strided(shape, strides, 8)
    with on_gpu((9, 0)):
        device = torch.device("cuda", 0)
        unfit = dispatch.why_not_hopper((k, k, k), torch.bfloat16)
        assert unfit is None
        assert dispatch.choose("hopper", device, torch.bfloat16, unfit) == "hopper"


def test_reasons_on_a_hopper_gpu(on_gpu):
    device, half = torch.device("cuda", 0), torch.bfloat16
    with on_gpu((9, 0)):
        assert dispatch._why("triton", device) == "q is on cuda:0, which runs the Triton kernels"
        assert "compute capability 9.0" in dispatch._why("hopper", device)
        assert "slower than the kernels for this GPU" in dispatch._why_not("triton", device, half, False, None)
        assert "was asked for by name" in dispatch._why_not("hopper", device, half, True, None)
    with on_gpu((9, 0), version="3.10.0"):
        assert "this is 3.10.0" in dispatch._why_not("hopper", device, half, False, None)
        assert dispatch.choose("auto", device, half) == "triton"


class OnGpu(torch.Tensor):
    """A CPU tensor that reports GPU 0 as its device."""

    is_cuda = True
    device = torch.device("cuda", 0)  # type: ignore[assignment]


def decide(backend, q, k, *, dtype=torch.bfloat16, is_traced=False, **options):
    specs = None if is_traced else specs_of(q, k, k)
    dispatch._choose_by_specs.cache_clear()
    q, k = q.as_subclass(OnGpu), k.as_subclass(OnGpu)
    return dispatch.decide(backend, q, k, k, dtype, specs, dispatch.missing_option(**options))


@pytest.fixture
def large():
    return torch.zeros(131072 * 65, dtype=torch.bfloat16).as_strided((1, 1, 131072, 64), (0, 0, 64, 1))


def test_traced_calls_leave_auto_to_the_operator(on_gpu, large):
    with on_gpu((9, 0)):
        assert decide("auto", large, large, is_traced=True) == "auto"
        assert decide("hopper", large, large, is_traced=True) == "hopper"
        assert decide("auto", large, large, is_traced=True, has_dropout=True) == "triton"
        assert decide("auto", large, large, is_traced=True, dtype=torch.float32) == "triton"
        assert decide("auto", large, large) == decide("hopper", large, large) == "hopper"
        assert decide("auto", large, large, bias_blocks=(64, 128)) == "triton"
        assert decide("auto", large, large, bias_blocks=(128, 256)) == "hopper"
        assert decide("auto", large, large, has_pair_bias=True) == "triton"
        assert decide("auto", large, large, has_pair_bias=True, is_traced=True) == "triton"
    with on_gpu((8, 0)):
        assert decide("auto", large, large, is_traced=True) == decide("auto", large, large) == "triton"


@pytest.mark.parametrize(
    ("length", "stride", "expected"),
    # 2 * 131072 rows of 64 are just enough; one row less; rows that are not aligned to 16 bytes
    [(131072, 64, "hopper"), (131071, 64, "triton"), (131072, 65, "triton")],
)
def test_auto_chooses_hopper_where_it_pays(on_gpu, large, length, stride, expected):
    q = large.as_strided((1, 1, length, 64), (0, 0, stride, 1))
    assert dispatch.resolve(q, q, q, 128) == expected
    # only this backend has gathered tiles
    assert dispatch.resolve(q, q, q, 16) == "hopper"
    with on_gpu((9, 0)):
        assert decide("auto", q, q) == expected


@pytest.mark.parametrize(("q_len", "expected"), [(64, "triton"), (65, "hopper")])
def test_few_queries_run_on_triton_for_any_number_of_keys(on_gpu, q_len, expected):
    k = torch.zeros(1, 1, 262144, 64, dtype=torch.bfloat16)
    assert dispatch.resolve(k[:, :, :q_len], k, k, 64) == expected
    with on_gpu((9, 0)):
        assert decide("auto", k[:, :, :q_len], k) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_reaches_the_backward_of_hopper(deterministic):
    pytest.importorskip("triton", reason="needs Triton")
    backward = ops._kernels("hopper", deterministic)[1]
    assert isinstance(backward, functools.partial) == deterministic
    for name in ("triton", "eager"):
        assert ops._kernels(name, deterministic) == ops._kernels(name, False)


def test_only_additions_to_dq_are_not_bitwise_reproducible():
    assert "except for dq" in dispatch.explained_determinism(False, varying="dq")
    for deterministic in (True, False, None):
        found = dispatch.explained_determinism(deterministic, varying="")
        assert found.startswith("bitwise identical in every run, forward and backward")


def test_slopes_have_a_gradient_if_autograd_sees_them():
    slopes = torch.ones(2, requires_grad=True)
    assert dispatch.has_slopes_gradient(slopes)
    assert not dispatch.has_slopes_gradient(slopes.detach()) and not dispatch.has_slopes_gradient(None)
    with torch.no_grad():
        assert not dispatch.has_slopes_gradient(slopes)


@pytest.mark.parametrize(("backend", "block_size", "expected"), [
    ("hopper", 64, 64), ("auto", 64, 64), ("hopper", 128, 128), ("triton", 64, 64), ("eager", 64, 128),
])  # fmt: skip
def test_fine_layouts_get_a_plan_of_fine_tiles(monkeypatch, backend, block_size, expected):
    """Which kernels run follows from the plan; "auto" is a traced call on a Hopper GPU."""
    plans = []
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: backend)
    monkeypatch.setattr(ops, "attention", lambda q, k, v, plan, *_, **__: plans.append(plan) or (q, q))
    q = torch.zeros(1, 16, 1024, 64)
    layout = BlockLayout.from_blocks(list(range(8)), list(range(8)), 1024, 1024, block_size=block_size)
    attention(q, q, q, layout)
    (plan,) = plans
    assert tile_of(plan) == expected


def test_a_bias_of_blocks_has_tiles_of_128(monkeypatch):
    """Its tables are made for them."""
    plans = []
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: "triton")
    monkeypatch.setattr(ops, "attention", lambda q, k, v, plan, *_, **__: plans.append(plan) or (q, q))
    q, layout = torch.zeros(1, 1, 1024, 64), BlockLayout.from_blocks([0], [0], 1024, 1024, block_size=64)
    attention(q, q, q, layout, softcap=3.0)
    attention(q, q, q, layout, block_bias=torch.zeros(1, 1, 1))
    assert [tile_of(plan) for plan in plans] == [64, 128]


def test_fine_tiles_of_hopper_have_kernels_of_their_own():
    pytest.importorskip("triton", reason="needs Triton")
    forward, backward = ops._kernels("hopper", False, 64)
    assert (forward.__module__.split(".")[-1], backward.__module__.split(".")[-1]) == ("fine_forward", "fine_backward")
    assert ops._kernels("triton", False, 64) == ops._kernels("triton", False, 128)


def test_without_triton_auto_is_eager_and_says_why(monkeypatch):
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._why_not_on_gpu.cache_clear()
    try:
        assert dispatch.choose("auto", torch.device("cuda", 0), torch.float16) == "eager"
        with pytest.raises(ValueError, match="Triton is not installed"):
            attention(**good_call(), backend="triton")
    finally:
        dispatch._why_not_on_gpu.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "eager", "triton", "reference"])
def test_explain_prints_a_report(backend, device):
    explanation = explain(**good_call(device=device), layout=window(), backend=backend, deterministic=True)
    report = str(explanation)
    assert report.splitlines()[0].startswith(f'backend      "{explanation.backend}": {explanation.reason}')
    for name in ("hopper", "triton", "eager", "reference"):
        assert (f'not       "{name}": ' in report) == (name != explanation.backend)
    assert all(why for _, why in explanation.others)
    assert "deterministic=True" in report
    side = 64 if backend == "triton" else 128
    assert (f"{side} queries x {side} keys" in report) == (backend != "reference")


def test_explain_gives_the_reason_against_triton(monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "needs a CUDA device" in dict(explain(**good_call()).others)["triton"]
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in dict(explain(**good_call()).others)["triton"]
    assert "float64" in dict(explain(**good_call(torch.float64)).others)["triton"]


def test_an_explanation_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        explain(**good_call()).backend = "triton"


@pytest.mark.parametrize(("q_len", "kv_len"), [*itertools.product([1, 127, 128, 129, 300], [1, 128, 200, 513])])
def test_explain_counts_the_tiles_of_dense_causal(q_len, kv_len):
    """Compared with the tiles of the dense mask that have a pair."""
    mask = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
    tiles = BlockLayout.from_dense(mask, block_size=128)
    q, k = torch.empty(1, 1, q_len, 16), torch.empty(1, 1, kv_len, 16)
    explanation = explain(q, k, k, causal=True)
    assert explanation.tile_density == pytest.approx(tiles.density)
    assert explanation.flops == 2 * tiles.nnz * 128 * 128 * 32
    assert explanation.density == 1.0 and explanation.metadata_bytes == 0


def test_explain_counts_the_tiles_of_a_layout():
    layout = BlockLayout.from_blocks([0, 1, 7], [0, 0, 3], 512, 256, block_size=64)
    q, k = torch.empty(2, 4, 512, 16), torch.empty(2, 4, 256, 16)
    explanation = explain(q, k, k, layout)
    # 3 of 32 blocks, in 2 of 8 tiles
    assert (explanation.density, explanation.tile_density) == (3 / 32, 2 / 8)
    assert explanation.flops == 2 * 2 * 4 * (2 * 128 * 128) * 32
    assert explanation.metadata_bytes == sum(tensor.nbytes for tensor in layout.plan("cpu"))
    # bottom-right causal: key <= query - 256 drops the first two blocks
    assert explain(q, k, k, layout, causal=True).tile_density == 1 / 8
    assert explain(q, k, k, layout, backend="reference").tile is None


@pytest.mark.parametrize("shape", [(0, 4, 32, 16), (2, 4, 0, 16)])
def test_explain_of_empty_tensors_counts_no_flops(shape):
    q = torch.empty(shape)
    assert explain(q, q, q).flops == 0


# ---- other ----


def test_parameters_and_meta_tensors_are_accepted():
    q = torch.nn.Parameter(torch.randn(1, 2, 32, 16))
    attention(q, q, q).sum().backward()
    assert q.grad is not None
    shape_only = torch.empty(1, 2, 32, 16, device="meta", dtype=torch.bfloat16)
    out, lse = attention_with_lse(shape_only, shape_only, shape_only, causal=True)
    assert out.device.type == "meta" and out.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_a_gpu_call_with_a_host_layout_is_planned_once(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    layout, call = window(), good_call(device=device)
    out = attention(**call, layout=layout)
    assert layout.plan(device) is layout.plan(device)
    expected = attention(**{name: value.cpu() for name, value in call.items()}, layout=layout)
    torch.testing.assert_close(out.cpu(), expected)
