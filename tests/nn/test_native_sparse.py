"""Native sparse attention equals its definition in float64, forward and backward, token by token."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention, attention_with_lse
from blocksparse_flash.nn import NativeSparseAttention, native_sparse, native_sparse_attention
from blocksparse_flash.nn.document_blocks import DocumentBlocks
from blocksparse_flash.nn.positions import rotary_table, rotate

# length, kv_heads, group, then the sizes of the paper's names l', l, d, n, w
CASES = [
    (150, 1, 4, 32, 32, 16, 4, 20),
    (130, 2, 2, 16, 16, 8, 4, 50),
    (140, 1, 3, 64, 32, 16, 3, 128),
    (100, 2, 1, 16, 8, 8, 3, 1),
    (90, 1, 2, 32, 16, 4, 100, 30),
    (33, 1, 2, 16, 32, 16, 4, 8),
    (20, 1, 2, 16, 32, 16, 4, 8),
    # a compressed key for each block but the last
    (130, 1, 2, 16, 16, 16, 40, 20),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def sizes_of(case: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("block_size", "compressed_size", "stride", "k_blocks", "window_size"), case[3:], strict=True))


def attended(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    weights = (keys @ query / math.sqrt(len(query))).softmax(0)
    return weights @ values, weights


def expected(
    q: Tensor,
    compressed: tuple[Tensor, Tensor],
    selected: tuple[Tensor, Tensor],
    window: tuple[Tensor, Tensor],
    gates: Tensor,
    *,
    block_size: int,
    compressed_size: int,
    stride: int,
    k_blocks: int,
    window_size: int,
) -> Tensor:
    """Query by query: one initial and two local blocks are always selected."""
    batch, heads, length, _ = q.shape
    kv_heads = selected[0].shape[1]
    group = heads // kv_heads
    out = torch.zeros(batch, heads, length, selected[1].shape[3], dtype=q.dtype)
    for b in range(batch):
        for h in range(kv_heads):
            branches = (x[b, h] for pair in (compressed, selected, window) for x in pair)
            compressed_k, compressed_v, k, v, window_k, window_v = branches
            for t in range(length):
                spans = [range(first, first + compressed_size) for first in range(0, length, stride)]
                seen = [span for span in spans if span.stop <= t + 1]
                own = t // block_size
                importance = torch.zeros(own + 1, dtype=torch.float64)
                of_heads = range(h * group, (h + 1) * group)
                for head in of_heads:
                    coarse, weights = attended(q[b, head, t], compressed_k[: len(seen)], compressed_v[: len(seen)])
                    out[b, head, t] += gates[b, head, t, 0] * coarse
                    # a weight counts once for each piece of `stride` tokens that a compressed block shares with a block
                    for span, weight in zip(seen, weights.detach(), strict=True):
                        for piece in range(span.start, span.stop, stride):
                            importance[piece // block_size] += weight
                always = {0, own - 1, own} & set(range(own + 1))
                others = [j for j in importance.argsort(descending=True).tolist() if j not in always]
                chosen = sorted([*always, *others[: k_blocks - len(always)]])
                tokens = [i for j in chosen for i in range(j * block_size, min((j + 1) * block_size, t + 1))]
                recent = slice(max(0, t + 1 - window_size), t + 1)
                for head in of_heads:
                    fine, _ = attended(q[b, head, t], k[tokens], v[tokens])
                    near, _ = attended(q[b, head, t], window_k[recent], window_v[recent])
                    out[b, head, t] += gates[b, head, t, 1] * fine + gates[b, head, t, 2] * near
    return out


def inputs(case: tuple[int, ...]) -> list[Tensor]:
    length, kv_heads, group, _, size, stride, *_ = case
    n = max(0, (length - size) // stride + 1)
    pairs = [drawn(2, kv_heads, n if i < 2 else length, 12 if i % 2 else 16, seed=i) for i in range(6)]
    return [drawn(2, kv_heads * group, length, 16, seed=7), *pairs, drawn(2, kv_heads * group, length, 3, seed=8)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_definition(case: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With several chunks of queries."""
    monkeypatch.setattr(native_sparse, "MAX_SCORES_PER_CHUNK", 1)
    q, compressed_k, compressed_v, k, v, window_k, window_v, gates = leaves = inputs(case)
    arguments = q, (compressed_k, compressed_v), (k, v), (window_k, window_v), gates
    found = native_sparse_attention(*arguments, **sizes_of(case))
    truth = expected(*arguments, **sizes_of(case))
    torch.testing.assert_close(found, truth)
    dout = drawn(*found.shape, seed=9).detach()
    grads, true_grads = (torch.autograd.grad(out, leaves, dout) for out in (found, truth))
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_chunks_do_not_change_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    q, compressed_k, compressed_v, *_ = inputs((300, 2, 2, 16, 16, 8, 4, 50))
    lse = attention_with_lse(q, compressed_k, compressed_v, native_sparse.compressed_layout(300, 16, 8))[1]
    sizes = {"k_blocks": 6, "block_size": 16, "compressed_size": 16, "stride": 8}
    found = []
    for size in (1, 1 << 26):
        monkeypatch.setattr(native_sparse, "MAX_SCORES_PER_CHUNK", size)
        found.append(native_sparse.most_important_blocks(q, compressed_k, lse, **sizes).sort(3).values)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "group", "first"), [(16, 1, 50), (24, 3, 3)])
def test_the_kernel_computes_the_weights_of_a_group(
    head_dim: int, group: int, first: int, dtype: torch.dtype, device: torch.device
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    length, size, stride = 300, 16, 8
    n = native_sparse.n_compressed(length, size, stride)
    q, k = drawn(2, 2 * group, length, head_dim).to(dtype), drawn(2, 2, n, head_dim, seed=1).to(dtype)
    layout = native_sparse.compressed_layout(length, size, stride)
    lse = attention_with_lse(q.detach(), k.detach(), k.detach(), layout)[1]
    lse = lse.unflatten(1, (2, group))
    # not contiguous, and a chunk whose first queries see nothing
    rows = slice(first, 190)
    queries = q.detach().unflatten(1, (2, group))[:, :, :, rows]
    seen = k.detach()[:, :, : native_sparse.n_compressed(190, size, stride)]
    options = first, head_dim**-0.5, size, stride
    truth = native_sparse._group_weights(queries.double(), seen.double(), lse[..., rows].double(), *options, False)
    found = native_sparse._group_weights(queries.to(device), seen.to(device), lse[..., rows].to(device), *options, True)
    torch.testing.assert_close(found.cpu().double(), truth, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert not found[:, :, 0, native_sparse.n_compressed(first + 1, size, stride) :].any()


@pytest.mark.parametrize(("length", "size", "stride"), [(700, 32, 16), (5000, 32, 16), (300, 8, 8), (129, 64, 4)])
def test_a_query_sees_the_compressed_blocks_that_have_ended(length: int, size: int, stride: int) -> None:
    dense = native_sparse.compressed_layout(length, size, stride).to_dense()[0, 0]
    last = torch.arange(dense.shape[1]) * stride + size - 1
    assert torch.equal(dense, last <= torch.arange(length)[:, None]) and last[-1] + stride >= length > last[-1]


def layer_of(**changes: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    sizes = {"k_blocks": 4, "block_size": 16, "compressed_size": 16, "stride": 8, "window_size": 20}
    return NativeSparseAttention(48, 4, **{"kv_heads": 2, "rope": 100.0} | sizes | changes).double()


def test_a_layer_is_its_steps_spelled_out() -> None:
    layer, x = layer_of(), drawn(2, 110, 48)

    def by_head(projected: Tensor) -> Tensor:
        return projected.unflatten(2, (-1, 12)).transpose(1, 2)

    q, branches = by_head(layer.q(x)), [by_head(part) for part in layer.kv(x).chunk(6, 2)]

    def compressed(keys: Tensor, compression: native_sparse.BlockCompression) -> Tensor:
        blocks = [keys[:, :, first : first + 16] + compression.positions for first in range(0, 110 - 15, 8)]
        return torch.stack([compression.layers(block.flatten(2)) for block in blocks], 2)

    compressed_k, compressed_v, k, v, window_k, window_v = branches
    compressed_k, compressed_v = compressed(compressed_k, layer.compress_k), compressed(compressed_v, layer.compress_v)
    table = rotary_table(torch.arange(110), 100.0, 12)
    q, k, window_k = (rotate(each, table) for each in (q, k, window_k))
    compressed_k = rotate(compressed_k, rotary_table(torch.arange(0, 110 - 15, 8), 100.0, 12))
    gates = layer.gates(x).sigmoid().unflatten(2, (4, 3)).transpose(1, 2)
    sizes = {"k_blocks": 4, "block_size": 16, "compressed_size": 16, "stride": 8, "window_size": 20}
    truth = expected(q, (compressed_k, compressed_v), (k, v), (window_k, window_v), gates, **sizes)
    truth, found = layer.out(truth.transpose(1, 2).flatten(2)), layer(x)
    torch.testing.assert_close(found, truth)
    leaves, dout = [x, *layer.parameters()], drawn(*x.shape, seed=1).detach()
    grads, true_grads = (torch.autograd.grad(out, leaves, dout) for out in (found, truth))
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "changes", [{}, {"rope": None, "always": (0, 1), "k_blocks": 2}], ids=["rope", "no first block"]
)
@pytest.mark.parametrize(
    "boundaries", [[0, 20, 20, 85, 86, 150], [[0, 33, 64, 140], [0, 0, 150, 150]], [0, 150], [0]], ids=str
)
def test_packed_documents_equal_each_document_alone(
    boundaries: list[Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any length, also shorter than a compressed block, and with tokens after the last one. In chunks of queries."""
    monkeypatch.setattr(native_sparse, "MAX_SCORES_PER_CHUNK", 1)
    layer, x = layer_of(**changes), drawn(2, 150, 48)
    found = layer(x, cu_seqlens=torch.tensor(boundaries))
    alone = layer.out(torch.zeros_like(x))
    for b, row in enumerate(boundaries if isinstance(boundaries[0], list) else [boundaries] * 2):
        for first, stop in itertools.pairwise(row):
            alone[b, None, first:stop] = layer(x[b, None, first:stop])
    torch.testing.assert_close(found, alone)
    leaves, dout = [x, *layer.parameters()], drawn(*found.shape, seed=9).detach()
    grads, alone_grads = (
        torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True) for out in (found, alone)
    )
    for one, other in zip(grads, alone_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_many_short_documents_may_have_more_compressed_keys_than_tokens() -> None:
    layer, x = layer_of(block_size=32, compressed_size=2, stride=2), drawn(1, 12, 48)
    found = layer(x, cu_seqlens=torch.arange(0, 13, 4))
    torch.testing.assert_close(found, torch.cat([layer(part) for part in x.split(4, dim=1)], 1))


@pytest.mark.usefixtures("by_kernels")
def test_kernels_make_the_layout_of_compressed_keys_in_documents(device: torch.device) -> None:
    """With places without tokens at the ends of tiles, and documents without compressed keys."""
    pytest.importorskip("triton", reason="needs Triton")
    length, size, stride = 1000, 8, 4
    cu_seqlens = torch.tensor([[0, 20, 900, 905], [0, 700, 700, 960]], device=device)
    x = torch.randn(2, 1, length, 16, device=device)
    blocks = DocumentBlocks.of(cu_seqlens, x, x, 64)
    layout = native_sparse.compressed_layout_in_documents(blocks, 64, size, stride)
    q, k = (torch.randn(2, 1, tokens, 16, device=device) for tokens in layout.shape[2:])
    found = blocks.together(attention(q, k, k, layout, backend="triton"))
    tokens = torch.arange(length)
    documents = torch.searchsorted(cu_seqlens.cpu(), tokens.repeat(2, 1), right=True)
    sees = torch.zeros(2, 1, length, k.shape[2], dtype=torch.bool)
    for b, t in itertools.product(range(2), tokens.tolist()):
        first = int(cu_seqlens[b, documents[b, t] - 1])
        # compressed keys of its document that have ended
        n_keys, place = max(0, (t - first + 1 - size) // stride + 1), int(blocks.places[b, 0, first, 0]) // stride
        sees[b, 0, t, place : place + n_keys] = True
    truth = attention_with_lse(blocks.together(q), k, k, BlockLayout.from_dense(sees).to(device), backend="eager")[0]
    torch.testing.assert_close(found, truth)


def test_scores_beyond_the_range_of_float16_displace_no_block() -> None:
    """Regression: weights were infinite, and tied with those of blocks that are always selected."""
    x = torch.full((1, 1, 512, 64), 40.0).half()
    lse = torch.full((1, 1, 512), 64 * 40.0**2 / 8)
    blocks = native_sparse.most_important_blocks(x, x[:, :, :31], lse, k_blocks=3, block_size=32)
    own = (torch.arange(512) // 32)[:, None]
    for block in (own, (own - 1).clamp(min=0), torch.zeros_like(own)):
        assert (blocks == block).any(3).all()


def test_later_tokens_change_nothing() -> None:
    layer, x = layer_of(rope=None), drawn(1, 150, 48).detach()
    whole = layer(x)
    for length in (0, 1, 15, 16, 97):
        torch.testing.assert_close(layer(x[:, :length]), whole[:, :length])
    assert layer(x[:0]).shape == (0, 150, 48)


def test_every_parameter_has_a_gradient_of_a_short_input() -> None:
    layer = layer_of()
    layer(drawn(1, 5, 48)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_layers_are_saved_and_copied() -> None:
    layer, x, file = layer_of(), drawn(1, 40, 48).detach(), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(layer)):
        assert torch.equal(other(x), layer(x))
    assert "kv_heads=2, head_dim=12, rope=100.0, k_blocks=4, block_size=16" in repr(layer)


def call(**changes: Any) -> Tensor:
    q, k, few = torch.zeros(1, 4, 64, 8), torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 3, 8)
    pairs = {"compressed": (few, few), "selected": (k, k), "window": (k, k)}
    return native_sparse_attention(**{"q": q, **pairs, "gates": torch.zeros(1, 4, 64, 3), **changes})


X = torch.zeros(1, 2, 64, 8)
WRONG = {
    "sizes": (ValueError, "block_size must be a multiple of stride=12, got 64", lambda: call(stride=12)),
    "size": (ValueError, "compressed_size must be a multiple of stride=16, got 24", lambda: call(compressed_size=24)),
    "block": (ValueError, "block_size must be 16, 32, 64 or a multiple of 128 tokens", lambda: call(block_size=96)),
    "few": (
        ValueError,
        r"k_blocks must be at least the .* in always=\(1, 2\), got 2",
        lambda: call(k_blocks=2),
    ),
    "first": (ValueError, r"always must be two numbers of blocks.*got \(-1, 2\)", lambda: call(always=(-1, 2))),
    "number": (TypeError, r"always must be two numbers of blocks.*got 3", lambda: call(always=3)),
    "pair": (TypeError, "window must be a pair of keys and values, got Tensor", lambda: call(window=X)),
    "compressed": (
        ValueError,
        r"compressed k must have shape \(1, 2, 3, 8\) for 64 queries, got \(1, 2, 64, 8\)",
        lambda: call(compressed=(X, X)),
    ),
    "window": (ValueError, r"window v must have shape", lambda: call(window=(X, X[:, :, :9]))),
    "gates": (ValueError, r"gates must have shape \(batch, heads, length, 3\)", lambda: call(gates=X)),
    "device": (
        ValueError,
        "gates must be on q's device cpu, got meta",
        lambda: call(gates=torch.zeros(1, 4, 64, 3, device="meta")),
    ),
    "complex": (
        ValueError,
        "gates must be floating point, got torch.complex64",
        lambda: call(gates=torch.zeros(1, 4, 64, 3) * 1j),
    ),
    "heads": (ValueError, "heads", lambda: call(q=torch.zeros(1, 3, 64, 8))),
    "input": (ValueError, r"x must have shape \(batch, length, embed_dim=48\)", lambda: layer_of()(X)),
    "nested": (
        ValueError,
        r"x must be a dense tensor, got a nested one: x\.values\(\)\[None\] with cu_seqlens=x\.offsets\(\)",
        lambda: layer_of()(torch.nested.nested_tensor([torch.zeros(5, 48)], layout=torch.jagged)),
    ),
    "sparse": (
        ValueError,
        r"x must be a dense tensor, got a torch\.sparse_coo one; x\.to_dense\(\) makes one",
        lambda: layer_of()(torch.zeros(1, 5, 48).to_sparse()),
    ),
    "tokens": (
        ValueError,
        r"x must be floating point, the features of tokens, got torch\.int64; nn\.Embedding makes them",
        lambda: layer_of()(torch.zeros(1, 5, 48, dtype=torch.long)),
    ),
    "kv_heads": (ValueError, "num_heads must be a multiple of kv_heads, got 4 and 3", lambda: layer_of(kv_heads=3)),
    "rope": (ValueError, "head_dim must be even", lambda: layer_of(head_dim=7)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused(case: str) -> None:
    error, message, wrong = WRONG[case]
    with pytest.raises(error, match=message):
        wrong()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_graph_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"native_sparse_attention cannot be in a graph of torch\.export or torch\.jit"
    ):
        torch.jit.trace(NativeSparseAttention(16, 2), (torch.randn(1, 64, 16),))
