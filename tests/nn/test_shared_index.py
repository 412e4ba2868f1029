"""Attention with a shared index, and the loss of the index, equal their definitions in float64, with all gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash.nn import SelfAttention, SharedIndexAttention, shared_index, shared_index_attention
from blocksparse_flash.nn.positions import rotary_table, rotate


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def expected(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, *, k_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, cross-entropy, Kullback-Leibler divergence), query by query."""
    batch, heads, length, dim = q.shape
    kv_heads, index_heads, index_dim = k.shape[1], *index_q.shape[1::2]
    out, entropies, divergences = torch.zeros(batch, heads, length, v.shape[3], dtype=q.dtype), [], []
    for b in range(batch):
        for index_head in range(index_heads):
            of_index = range(index_head * heads // index_heads, (index_head + 1) * heads // index_heads)
            for t in range(length):
                own = t // block_size
                scores = index_k[b, 0, : t + 1] @ index_q[b, index_head, t] / math.sqrt(index_dim)
                best = [float(scores[j * block_size : (j + 1) * block_size].detach().max()) for j in range(own)]
                chosen = [*sorted(range(own), key=best.__getitem__)[::-1][: k_blocks - 1], own]
                tokens = [i for j in chosen for i in range(j * block_size, min((j + 1) * block_size, t + 1))]
                p = torch.zeros(len(tokens), dtype=q.dtype)
                for h in of_index:
                    kv = h * kv_heads // heads
                    weights = (k[b, kv, tokens] @ q[b, h, t] / math.sqrt(dim)).softmax(0)
                    out[b, h, t] = weights @ v[b, kv, tokens]
                    p = p + weights.detach() / len(of_index)
                log_q = scores[tokens].log_softmax(0)
                entropies.append(-(p * log_q).sum())
                divergences.append((p * (p.log() - log_q)).sum())
    return out, torch.stack(entropies).mean(), torch.stack(divergences).mean()


@pytest.mark.parametrize(
    ("length", "block", "k_blocks", "kv_heads", "index_heads"),
    [(150, 32, 2, 2, 2), (100, 16, 3, 2, 1), (90, 16, 100, 1, 1), (70, 32, 1, 4, 4), (20, 64, 3, 1, 1)],
)
def test_it_is_the_definition(
    length: int, block: int, k_blocks: int, kv_heads: int, index_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks of queries. The gradients of the loss are those of the divergence."""
    monkeypatch.setattr(shared_index, "MAX_SCORES_PER_CHUNK", 10_000)
    leaves = [drawn(2, 4, length, 16), drawn(2, kv_heads, length, 16, seed=1), drawn(2, kv_heads, length, 12, seed=2)]
    leaves += [drawn(2, index_heads, length, 8, seed=3), drawn(2, 1, length, 8, seed=4)]
    found, loss = shared_index_attention(*leaves, k_blocks=k_blocks, block_size=block)
    truth, cross_entropy, divergence = expected(*leaves, k_blocks=k_blocks, block_size=block)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(loss, cross_entropy)
    dout = drawn(*found.shape, seed=9).detach()
    grads = torch.autograd.grad((found * dout).sum() + 3 * loss, leaves)
    true_grads = torch.autograd.grad((truth * dout).sum() + 3 * divergence, leaves)
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_is_its_steps_spelled_out() -> None:
    torch.manual_seed(0)
    layer = SharedIndexAttention(48, 4, k_blocks=2, block_size=16, index_dim=6, kv_heads=2, rope=100.0).double()
    x = drawn(2, 70, 48)
    found, loss = layer(x)
    q, k, v = layer.projections.project(x)
    index = layer.index(x.detach()).unflatten(2, (3, 6)).transpose(1, 2)
    index = rotate(index, rotary_table(torch.arange(70), 100.0, 6))
    truth, true_loss, _ = expected(q, k, v, index[:, :2], index[:, 2:], k_blocks=2, block_size=16)
    truth = layer.projections.unite(truth)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(loss, true_loss)
    leaves, dout = [x, *layer.parameters()], drawn(*x.shape, seed=1).detach()
    grads = torch.autograd.grad((found * dout).sum() + loss, leaves)
    true_grads = torch.autograd.grad((truth * dout).sum() + true_loss, leaves)
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)
    assert "k_blocks=2, block_size=16, index_dim=6" in repr(layer)
    assert layer.eval()(x)[1] is None and layer(x, with_loss=True)[1] is not None


@pytest.mark.parametrize("index_heads", [1, 2])
@pytest.mark.parametrize(
    "boundaries", [[0, 20, 20, 85, 86, 150], [[0, 33, 64, 140], [0, 0, 150, 150]], [0, 150], [0]], ids=str
)
def test_packed_documents_equal_each_document_alone(
    boundaries: list[Any], index_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the loss, averaged over the tokens of all documents, and all gradients. With several chunks of queries."""
    monkeypatch.setattr(shared_index, "MAX_SCORES_PER_CHUNK", 10_000)
    leaves = [drawn(2, 4, 150, 16), drawn(2, 2, 150, 16, seed=1), drawn(2, 2, 150, 12, seed=2)]
    leaves += [drawn(2, index_heads, 150, 8, seed=3), drawn(2, 1, 150, 8, seed=4)]
    sizes: dict[str, Any] = {"k_blocks": 2, "block_size": 16}
    found, loss = shared_index_attention(*leaves, **sizes, cu_seqlens=torch.tensor(boundaries))
    alone, losses, n_tokens = torch.zeros_like(found), [torch.zeros((), dtype=found.dtype)], 0
    for b, row in enumerate(boundaries if isinstance(boundaries[0], list) else [boundaries] * 2):
        for first, stop in itertools.pairwise(row):
            part = [leaf[b, None, :, first:stop] for leaf in leaves]
            alone[b, None, :, first:stop], one_loss = shared_index_attention(*part, **sizes)
            losses.append(one_loss * (stop - first))
            n_tokens += stop - first
    torch.testing.assert_close(found, alone)
    mean_loss = torch.stack(losses).sum() / max(1, n_tokens)
    torch.testing.assert_close(loss, mean_loss)
    if n_tokens:
        dout = drawn(*found.shape, seed=9).detach()
        grads, alone_grads = (
            torch.autograd.grad((out * dout).sum() + 3 * cost, leaves)
            for out, cost in ((found, loss), (alone, mean_loss))
        )
        for one, other in zip(grads, alone_grads, strict=True):
            torch.testing.assert_close(one, other)


def test_positions_of_a_layer_restart_in_packed_documents() -> None:
    torch.manual_seed(0)
    layer = SharedIndexAttention(48, 4, k_blocks=2, block_size=16, index_dim=6, kv_heads=2, rope=100.0).double()
    x, boundaries = drawn(2, 70, 48), [[0, 20, 66], [0, 0, 70]]
    out, loss = layer(x, cu_seqlens=torch.tensor(boundaries))
    losses = []
    for found, one, row in zip(out, x, boundaries, strict=True):
        for first, stop in itertools.pairwise(row):
            alone, one_loss = layer(one[None, first:stop])
            torch.testing.assert_close(found[first:stop], alone[0])
            losses.append(one_loss * (stop - first))
    torch.testing.assert_close(loss, torch.stack(losses).sum() / (66 + 70))


def test_the_loss_trains_the_index_alone() -> None:
    torch.manual_seed(0)
    layer, x = SharedIndexAttention(48, 4, k_blocks=2, block_size=16, kv_heads=2).double(), drawn(1, 100, 48)
    out, loss = layer(x)
    assert loss is not None
    assert torch.autograd.grad(loss, layer.index.weight, retain_graph=True)[0].any()
    assert torch.autograd.grad(loss, x, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(out.sum(), layer.index.weight, allow_unused=True)[0] is None


def test_the_loss_decreases() -> None:
    torch.manual_seed(0)
    layer, x = SharedIndexAttention(32, 4, k_blocks=3, block_size=16, kv_heads=1), torch.randn(2, 128, 32)
    optimizer = torch.optim.Adam(layer.index.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = layer(x)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_scores_beyond_the_range_of_float16_displace_no_own_block() -> None:
    """Regression: they are infinite, and tied with the score of the own block."""
    index = torch.full((1, 1, 256, 64), 40.0).half()
    blocks = shared_index.best_indexed_blocks(index, index, k_blocks=2, block_size=32)
    assert (blocks == (torch.arange(256) // 32)[:, None]).any(3).all()


def test_with_all_blocks_it_is_the_dense_layer() -> None:
    torch.manual_seed(0)
    dense = SelfAttention(48, 2, causal=True, rope=100.0).double()
    layer = SharedIndexAttention(48, 2, k_blocks=8, block_size=16, rope=100.0).double()
    layer.projections.load_state_dict(dense.state_dict())
    x = drawn(1, 120, 48)
    torch.testing.assert_close(layer(x)[0], dense(x))
    for nothing in (x[:, :0], x[:0]):
        out, loss = layer(nothing)
        assert out.shape == nothing.shape and loss is not None and loss == 0


X = torch.zeros(1, 2, 64, 8)
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "few": (ValueError, "k_blocks must be 1 or more, got 0", {"k_blocks": 0}),
    "block": (ValueError, "block_size must be 16, 32, 64 or a multiple of 128 tokens, got 8", {"block_size": 8}),
    "huge block": (ValueError, "block_size must be at most 67108864 tokens, got 118059", {"block_size": 1 << 70}),
    "loss": (TypeError, "with_loss must be True or False, got 1", {"with_loss": 1}),
    "length": (ValueError, "q must have as many tokens as k, since it is causal, got 60 and 64", {"q": X[:, :, :60]}),
    "index_q": (ValueError, r"index_q must have shape \(batch = 1, kv_heads = 2 or 1, ", {"index_q": X[:, :, :9]}),
    "index_k": (ValueError, r"index_k must have shape .* = \(1, 1, 64, 8\), got \(1, 2, 64, 8\)", {"index_k": X}),
    "type": (TypeError, "index_q must be a torch.Tensor", {"index_q": [1]}),
    "integers": (ValueError, "index_q must be floating point, .* got torch.int64", {"index_q": X.long()}),
    "dtype": (ValueError, "index_k must be floating point, of index_q's .*float64", {"index_k": X[:, :1].double()}),
    "device": (ValueError, "index_k must be on q's device cpu, got meta", {"index_k": X[:, :1].to("meta")}),
    "none": (
        ValueError,
        "index_q must have an index_dim of 1 to 256, got 0",
        {"index_q": X[..., :0], "index_k": X[:, :1, :, :0]},
    ),
    "stride": (ValueError, "index_q must have a last stride of 1", {"index_q": torch.zeros(1, 2, 8, 64).mT}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    error, message, changes = WRONG[case]
    with pytest.raises(error, match=message):
        shared_index_attention(**{"q": X, "k": X, "v": X, "index_q": X, "index_k": X[:, :1], **changes})


def test_a_large_index_is_refused() -> None:
    with pytest.raises(ValueError, match="index_dim must be at most 256, got 300"):
        SharedIndexAttention(48, 2, index_dim=300)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim", "first"),
    [(16, 2, 24, 37), (64, 1, 16, 0), (64, 2, 16, 300), (128, 1, 16, 70), (384, 2, 8, 300)],
)
def test_the_kernel_finds_the_best_token_of_each_block(
    block_size: int, heads: int, head_dim: int, first: int, dtype: torch.dtype, device: torch.device
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    torch.manual_seed(0)
    length = 430
    # not contiguous, and a chunk of queries
    index_q = torch.randn(2, length, heads, head_dim).to(dtype).transpose(1, 2)[:, :, first : first + 90]
    index_k = torch.randn(2, length, 1, head_dim + 8).to(dtype)[..., :head_dim].transpose(1, 2)
    n_blocks = -(-(first + 90) // block_size)
    arguments = index_q.to(device), index_k.to(device), first, n_blocks, block_size
    found = shared_index._best_tokens(*arguments, uses_kernel=True).cpu()
    scores = index_q.double() @ index_k.double().mT
    assert found.shape == (2, heads, 90, n_blocks) and found.dtype == torch.float32
    for row, position in enumerate(range(first, first + 90)):
        # blocks before the query's own
        for block in range(position // block_size):
            keys = slice(block * block_size, (block + 1) * block_size)
            truth = scores[:, :, row, keys].amax(2)
            torch.testing.assert_close(found[:, :, row, block].double(), truth, rtol=1e-5, atol=1e-5)


def test_an_exported_graph_cannot_hold_it() -> None:
    layer = SharedIndexAttention(16, 2, k_blocks=1, block_size=16)
    with pytest.raises(
        RuntimeError, match=r"shared_index_attention cannot be in a graph of torch\.export or torch\.jit"
    ):
        torch.export.export(layer, (torch.randn(1, 64, 16),))


def test_no_heads_have_no_result() -> None:
    out, loss = shared_index_attention(X[:, :0], X[:, :0], X[:, :0], X[:, :0], X[:, :1], k_blocks=2, block_size=16)
    assert out.shape == (1, 0, 64, 8) and loss is not None and loss == 0
