"""Wrong calls of attention: errors name the argument and the fix before anything is computed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.nn.attention.flex_attention import create_block_mask

import masks
from blocksparse_flash import BlockLayout, functional, interop, ops, reference, validation
from blocksparse_flash.functional import attention, attention_with_lse, explain
from tests.support.small_call import HEADS, KV_HEADS, cast, good_call, resized, window


def meta(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name].to("meta")}


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
    # comparing it to a str raises ValueError or compares each element
    "backend is an array": (changed(backend=np.ones(2)), TypeError, ("backend must be a str", "got array([1., 1.])")),
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
