"""Calls of attention under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocksparse_flash.functional import attention, attention_with_lse
from tests.support.small_call import Q_LEN, good_call, resized, window


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


@pytest.mark.parametrize("name", ["scale", "causal", "dropout_p", "deterministic"])
def test_a_tensor_as_an_option_is_named_where_its_values_are_unknown(name):
    """Regression: Dynamo cannot print a tensor, and said so."""
    q = torch.randn(1, 2, 64, 16)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"TypeError.*{name} must be .*, got a tensor"):
        torch.compile(attention, fullgraph=True, backend="aot_eager")(q, q, q, **{name: torch.tensor(0.5)})


def test_compiled_calls_raise_the_same_errors():
    with pytest.raises(Exception, match=r"k must have q's head_dim 16, got 32"):
        compiled(attention)(**{**good_call(), **resized(k=(2, 2, 48, 32))({})})
