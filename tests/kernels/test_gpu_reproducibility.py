"""Bitwise reproducibility on a GPU: equal calls give equal bits, over thousands of launches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import attention, attention_with_lse
from tests.support.gpu import on_every_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_every_backend
@pytest.mark.parametrize("head_dim", [64, 128])
def test_three_runs_are_bitwise_equal(head_dim: int, backend: str) -> None:
    length = 2000
    layout = masks.bigbird(length, seed=1) | masks.local(length, window=77)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    dout = torch.randn_like(q)
    dropout: dict[str, Any] = {"dropout_p": 0.1, "seed": 3} if backend == "triton" else {}

    def run() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention_with_lse(*inputs, layout, deterministic=True, backend=backend, **dropout)
        return [out, lse, *torch.autograd.grad((out * dout).sum() + lse.sum(), inputs)]

    first = run()
    for _ in range(2):
        for again, before in zip(run(), first, strict=True):
            assert torch.equal(again, before)


@on_every_backend
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_the_gradient_of_a_block_bias_is_bitwise_equal_in_every_run(head_dim: int, backend: str) -> None:
    """Also where that of q is not: deterministic=True is not needed."""
    length = 2000
    layout = masks.random((length, length), density=0.7, block_size=128, seed=1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    bias = torch.randn(4, layout.capacity, device="cuda", requires_grad=True)
    q.requires_grad_()
    gradients = []
    for _ in range(3):
        out = attention(q, k, v, layout, block_bias=bias, backend=backend)
        gradients += torch.autograd.grad(out.square().sum(), bias)
    assert gradients[0].any()
    assert torch.equal(gradients[1], gradients[0])
    assert torch.equal(gradients[2], gradients[0])


# ten parts, so that test processes compile in parallel
@pytest.mark.parametrize("part", range(10))
@on_every_backend
def test_ten_thousand_launches_with_random_layouts_are_bitwise_reproducible(backend: str, part: int) -> None:
    """50 layouts per part, 20 runs each: none hangs, all are bitwise equal; dq only if summed in a fixed order."""
    numbers = random.Random(part)
    differing = torch.zeros(5, dtype=torch.int64, device="cuda")
    for seed in range(50 * part, 50 * (part + 1)):
        q_len, kv_len = (numbers.randint(1, 1500) for _ in range(2))
        heads, group, head_dim = (
            numbers.choice([1, 2, 6]),
            numbers.choice([1, 2]),
            numbers.choice([64, 96, 128, 192, 256]),
        )
        block_size, deterministic = numbers.choice([16, 64, 128]), seed % 3 == 0
        layout = masks.random((q_len, kv_len), density=numbers.random(), block_size=block_size, seed=seed).to("cuda")
        is_dq_ordered = deterministic or backend != "hopper" or head_dim > 128
        is_ordered = torch.tensor([True, True, is_dq_ordered, True, True], device="cuda")
        q, k, v, dout = (
            torch.randn(2, n_heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n_heads, length in ((heads * group, q_len), (heads, kv_len), (heads, kv_len), (heads * group, q_len))
        )
        first: list[Tensor] = []
        for _ in range(20):
            # freed memory is reused: no kernel may rely on zeros
            torch.full((1 << 20,), torch.nan, device="cuda")
            out, lse = attention_with_lse(
                q, k, v, layout, causal=seed % 2 == 0, backend=backend, deterministic=deterministic
            )
            found = [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]
            first = first or found
            differing += is_ordered * torch.stack([(a != b).sum() for a, b in zip(found, first, strict=True)])
    assert differing.tolist() == [0] * 5


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (32, 64)])
@pytest.mark.parametrize("causal", [False, True])
@on_every_backend
def test_deterministic_gradients_beyond_the_l2_cache_are_bitwise_reproducible(
    backend: str, causal: bool, heads: int, head_dim: int
) -> None:
    """Additions to a sum in device memory can overtake each other where those to a sum in L2 do not (TUNING.md)."""
    q, k, v, dout = (
        torch.randn(4, heads, 4096, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)
    )
    out = attention(q, k, v, causal=causal, backend=backend, deterministic=True)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(100):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        differing += torch.stack([(a != b).sum() for a, b in zip(found, first, strict=True)])
    assert differing.tolist() == [0] * 3
