"""Mixture of block attention equals its definition in float64, forward and backward, token by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash.nn import (
    MixtureOfBlockAttention,
    SelfAttention,
    mixture_of_block_attention,
    mixture_of_blocks,
    video_sparse_attention,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def expected(q: Tensor, k: Tensor, v: Tensor, *, k_blocks: int, block: int, by_group: bool) -> Tensor:
    """Query by query, head by head."""
    (batch, heads, length, dim), out = q.shape, []
    group = heads // k.shape[1]
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group], v[b, h // group]
            first_of_group = h // group * group
            judges = range(first_of_group, first_of_group + group) if by_group else [h]
            for t in range(length):
                own = t // block
                means = [keys[j * block : (j + 1) * block].mean(0) for j in range(own)]
                scores = {
                    j: sum(float(q[b, judge, t].detach() @ means[j].detach()) for judge in judges) for j in range(own)
                }
                chosen = [*sorted(scores, key=scores.__getitem__)[::-1][: k_blocks - 1], own]
                tokens = [i for j in chosen for i in range(j * block, min((j + 1) * block, t + 1))]
                out.append((keys[tokens] @ q[b, h, t] / math.sqrt(dim)).softmax(0) @ values[tokens])
    return torch.stack(out).unflatten(0, (batch, heads, length))


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(
    ("length", "block", "k_blocks", "kv_heads"),
    [(150, 32, 2, 4), (100, 16, 3, 2), (90, 16, 100, 1), (140, 128, 1, 4), (70, 32, 1, 2), (20, 64, 3, 1)],
)
def test_it_is_the_definition(
    length: int, block: int, k_blocks: int, kv_heads: int, by_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks of queries."""
    monkeypatch.setattr(mixture_of_blocks, "MAX_SCORES_PER_CHUNK", 1000)
    leaves = [drawn(2, 4, length, 16), drawn(2, kv_heads, length, 16, seed=1), drawn(2, kv_heads, length, 12, seed=2)]
    found = mixture_of_block_attention(*leaves, k_blocks=k_blocks, block_size=block, by_group=by_group)
    truth = expected(*leaves, k_blocks=k_blocks, block=block, by_group=by_group)
    torch.testing.assert_close(found, truth)
    dout = drawn(*found.shape, seed=9).detach()
    grads, true_grads = (torch.autograd.grad(out, leaves, dout) for out in (found, truth))
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_is_its_projections_and_the_function() -> None:
    torch.manual_seed(0)
    layer = MixtureOfBlockAttention(48, 4, k_blocks=2, block_size=16, kv_heads=2, rope=100.0).double()
    x = drawn(2, 70, 48)
    q, k, v = layer.projections.project(x)
    truth = layer.projections.unite(expected(q, k, v, k_blocks=2, block=16, by_group=False))
    found = layer(x)
    torch.testing.assert_close(found, truth)
    leaves, dout = [x, *layer.parameters()], drawn(*x.shape, seed=1).detach()
    grads, true_grads = (torch.autograd.grad(out, leaves, dout) for out in (found, truth))
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)
    assert "k_blocks=2, block_size=16, by_group=False" in repr(layer)


def test_with_all_blocks_it_is_the_dense_layer() -> None:
    torch.manual_seed(0)
    dense = SelfAttention(48, 2, causal=True, rope=100.0).double()
    layer = MixtureOfBlockAttention(48, 2, k_blocks=8, block_size=16, rope=100.0).double()
    layer.projections.load_state_dict(dense.state_dict())
    for x in (drawn(1, 120, 48), drawn(1, 0, 48), drawn(0, 20, 48)):
        torch.testing.assert_close(layer(x), dense(x))
    x = drawn(1, 120, 48)
    positions = torch.rand(120)
    torch.testing.assert_close(layer(x, positions), dense(x, positions=positions))


@pytest.mark.parametrize("by_group", [False, True])
def test_scores_beyond_the_range_of_float16_displace_no_own_block(by_group: bool) -> None:
    """Regression: they are infinite, and tied with the score of the own block. Here all weights are on it."""
    k = torch.full((1, 1, 256, 64), 40.0)
    v = (torch.arange(256) // 32 * 10.0)[:, None].expand(1, 1, -1, 4)
    k[..., 0] += v[..., 0]
    q, k, v = (x.half().contiguous() for x in (k.expand(-1, 2, -1, -1), k, v))
    out = mixture_of_block_attention(q, k, v, k_blocks=2, block_size=32, by_group=by_group)
    assert torch.equal(out, v.expand(-1, 2, -1, -1))


@pytest.mark.parametrize("by_group", [False, True])
def test_queries_are_the_last_tokens_of_keys(by_group: bool) -> None:
    q, k = drawn(2, 6, 100, 16), drawn(2, 2, 100, 16, seed=1)
    options: dict[str, Any] = {"k_blocks": 3, "block_size": 16, "by_group": by_group}
    whole = mixture_of_block_attention(q, k, k, **options)
    for n_queries in (1, 7, 40):
        found = mixture_of_block_attention(q[:, :, -n_queries:], k, k, **options)
        torch.testing.assert_close(found, whole[:, :, -n_queries:])


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(
    "boundaries", [[0, 20, 20, 85, 86, 150], [[0, 33, 64, 140], [0, 0, 150, 150]], [0, 150], [0]], ids=str
)
def test_packed_documents_equal_each_document_alone(boundaries: list[Any], by_group: bool) -> None:
    """Of any length, also without tokens, and with tokens after the last one."""
    leaves = [drawn(2, 4, 150, 16), drawn(2, 2, 150, 16, seed=1), drawn(2, 2, 150, 12, seed=2)]
    options: dict[str, Any] = {"k_blocks": 2, "block_size": 16, "by_group": by_group}
    found = mixture_of_block_attention(*leaves, **options, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))
    alone = torch.zeros_like(found)
    for b, row in enumerate(boundaries if isinstance(boundaries[0], list) else [boundaries] * 2):
        for first, stop in itertools.pairwise(row):
            part = [leaf[b, None, :, first:stop] for leaf in leaves]
            alone[b, None, :, first:stop] = mixture_of_block_attention(*part, **options)
    torch.testing.assert_close(found, alone)
    dout = drawn(*found.shape, seed=9).detach()
    grads = torch.autograd.grad(found, leaves, dout)
    alone_grads = torch.autograd.grad(alone, leaves, dout) if alone.requires_grad else map(torch.zeros_like, leaves)
    for one, other in zip(grads, alone_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_positions_of_a_layer_restart_in_packed_documents() -> None:
    torch.manual_seed(0)
    layer = MixtureOfBlockAttention(48, 4, k_blocks=2, block_size=16, kv_heads=2, rope=100.0).double()
    x, boundaries = drawn(2, 70, 48), [[0, 20, 66], [0, 0, 70]]
    together = layer(x, cu_seqlens=torch.tensor(boundaries))
    assert not torch.allclose(layer(x, torch.zeros(70), cu_seqlens=torch.tensor(boundaries)), together)
    for found, one, row in zip(together, x, boundaries, strict=True):
        alone = layer(one[None], cu_seqlens=torch.tensor(row))[0]
        torch.testing.assert_close(found, alone)
        positions = torch.cat([torch.arange(size) for size in torch.tensor([*row, 70]).diff().tolist()])
        # equal bits: scores depend on distances, so that other positions would give almost the same
        assert torch.equal(alone, layer(one[None], positions, cu_seqlens=torch.tensor(row))[0])
        for first, stop in itertools.pairwise(row):
            torch.testing.assert_close(found[first:stop], layer(one[None, first:stop])[0])


X = torch.zeros(1, 2, 64, 8)
Y = X[:, :, :60]
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "few": (ValueError, "k_blocks must be 1 or more, got 0", {"k_blocks": 0}),
    "block": (ValueError, "block_size must be 16, 32, 64 or a multiple of 128 tokens, got 8", {"block_size": 8}),
    "huge block": (ValueError, "block_size must be at most 67108864 tokens, got 118059", {"block_size": 1 << 70}),
    "group": (TypeError, "by_group must be True or False, got 1", {"by_group": 1}),
    "length": (ValueError, "q must be the last tokens of k, got 64 tokens, and 60 of k", {"k": Y, "v": Y}),
    "heads": (ValueError, "heads", {"q": X.repeat(1, 2, 1, 1)[:, :3]}),
    "type": (TypeError, "q must be a torch.Tensor", {"q": [1]}),
    "cache": (
        ValueError,
        "q must have as many tokens as k, got 60 and 64",
        {"q": Y, "cu_seqlens": torch.tensor([0, 60])},
    ),
    "boundaries": (ValueError, "cu_seqlens must start at 0", {"cu_seqlens": torch.tensor([0, 70])}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    error, message, changes = WRONG[case]
    with pytest.raises(error, match=message):
        mixture_of_block_attention(**{"q": X, "k": X, "v": X, "k_blocks": 2, **changes})


@pytest.mark.parametrize("call", [mixture_of_block_attention, video_sparse_attention])
@pytest.mark.parametrize(("given", "within"), [(torch.half, torch.bfloat16), (torch.bfloat16, torch.half)])
def test_autocast_converts_the_other_half_type(call: Any, given: torch.dtype, within: torch.dtype) -> None:
    q = X[:, :, :50].to(given)
    with torch.autocast("cpu", dtype=within):
        found = call(q, q, q, k_blocks=2, block_size=16)
    expected = call(*[q.to(within)] * 3, k_blocks=2, block_size=16)
    assert found.dtype == within
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_an_exported_graph_cannot_hold_it() -> None:
    layer = MixtureOfBlockAttention(16, 2, k_blocks=1, block_size=16)
    with pytest.raises(
        RuntimeError, match=r"mixture_of_block_attention cannot be in a graph of torch\.export or torch\.jit"
    ):
        torch.export.export(layer, (torch.randn(1, 64, 16),))


@pytest.mark.parametrize("by_group", [False, True])
def test_no_heads_have_no_result(by_group: bool) -> None:
    q = X[:, :0]
    assert mixture_of_block_attention(q, X, X, k_blocks=2, block_size=16, by_group=by_group).shape == q.shape
