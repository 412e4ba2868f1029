"""The contract of attention: results, shapes and strides, gradients, determinism and autocast.

test_zoo.py tests accuracy over many layouts and sizes.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout, reference
from blocksparse_flash.functional import attention, attention_with_lse
from tests.support.small_call import (
    BACKENDS,
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    KV_LEN,
    Q_LEN,
    V_DIM,
    cast,
    good_call,
    window,
    with_gradients,
)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_seeds_from_inference_mode_can_be_saved_for_the_backward(backend: str) -> None:
    with torch.inference_mode():
        lengths, seed = torch.tensor([9, 4]), torch.tensor(3)
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]

    def grads(lengths: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = attention(*leaves, kv_lengths=lengths, dropout_p=0.2, seed=seed, backend=backend)
        return torch.autograd.grad(out.sum(), leaves)

    torch.testing.assert_close(grads(lengths, seed), grads(torch.tensor([9, 4]), torch.tensor(3)))
