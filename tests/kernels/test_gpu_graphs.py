"""CUDA graphs follow new inputs, and calls never make the host wait for the GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, nn, selected_attention
from tests.support.closeness import assert_as_accurate
from tests.support.gpu import HAS_HOPPER, assert_a_graph_replays, capture, on_every_backend
from tests.support.no_waiting import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# leaves are created on another stream than the capture; nothing accumulates into them
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@on_every_backend
def test_a_cuda_graph_replays_forward_and_backward(backend: str) -> None:
    length = 1000
    layout = masks.longformer(length, window=100, global_tokens=3).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, seed = torch.randn_like(q), torch.tensor([7], device="cuda")

    dropout: dict[str, Any] = {"dropout_p": 0.2, "seed": seed} if backend == "triton" else {}

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, layout, backend=backend, deterministic=True, **dropout)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    for turn in (8, 9):
        with torch.no_grad():
            for tensor in (q, k, v, dout):
                tensor.normal_()
            seed.fill_(turn)
        graph.replay()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
# PyTorch captures an empty graph first
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["captured", "compiled"])
def test_replays_of_a_cuda_graph_drop_other_pairs(is_compiled: bool) -> None:
    """With v and dout of unit rows, out and dv show which pairs were kept; forward and backward must agree."""
    q, k = (torch.zeros(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    v = torch.eye(256, 64, device="cuda", dtype=torch.bfloat16).expand(1, 2, -1, -1).clone().requires_grad_()
    dout = torch.eye(256, 64, device="cuda", dtype=torch.bfloat16).expand(1, 2, -1, -1)

    call = torch.compile(attention, mode="reduce-overhead", fullgraph=True) if is_compiled else attention

    def step() -> tuple[Tensor, ...]:
        out = call(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, v, dout)

    found = []
    graph, captured = (None, ()) if is_compiled else capture(step)
    # compiled calls are captured in their second or third turn
    for _ in range(6):
        if graph is None:
            torch.compiler.cudagraph_mark_step_begin()
            captured = step()
        else:
            graph.replay()
        found.append([each.clone() for each in captured])
    for out, dv in found:
        # the pairs of the first 64 queries and keys, in both directions
        assert torch.equal(out[..., :64, :] > 0, (dv[..., :64, :] > 0).mT)
    outs = [out for out, _ in found]
    for turn, out in enumerate(outs):
        assert all(not torch.equal(out, other) for other in outs[:turn])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("axes", [(1, 1), (2, 4)], ids=["shared", "per head"])
@pytest.mark.parametrize("mode", ["dense", "layout"])
def test_a_cuda_graph_replays_a_pair_bias_and_its_gradient(mode: str, axes: tuple[int, int]) -> None:
    length = 1000
    layout = None if mode == "dense" else masks.longformer(length, window=100, global_tokens=3).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    bias, dout = torch.randn(*axes, length, length, device="cuda").requires_grad_(), torch.randn_like(q)

    call = functools.partial(attention, layout=layout, deterministic=True)
    assert_a_graph_replays(lambda q, k, v, bias: call(q, k, v, pair_bias=bias), (q, k, v, bias), dout)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("axes", [(), (4,), (2, 4)], ids=["shared", "per head", "per batch"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_cuda_graph_replays_a_block_bias_and_its_gradient(head_dim: int, axes: tuple[int, ...]) -> None:
    length = 2000
    layout = masks.longformer(length, window=100, global_tokens=3, block_size=128).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    bias, dout = torch.randn(*axes, layout.capacity, device="cuda").requires_grad_(), torch.randn_like(q)

    call = functools.partial(attention, layout=layout, deterministic=True, backend="hopper")
    assert_a_graph_replays(lambda q, k, v, bias: call(q, k, v, block_bias=bias), (q, k, v, bias), dout)


@pytest.mark.parametrize("case", ["dense", "layout", "lengths", "dropout"])
@on_every_backend
def test_a_call_never_waits_for_the_gpu(case: str, backend: str) -> None:
    length = 1000
    dropout_p = 0.5 * (case == "dropout")
    # `hopper` has no dropout
    backend = "auto" if dropout_p else backend
    layout = masks.local(length, window=100).to("cuda") if case != "dense" else None
    q, k, v = (torch.randn(2, 2, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    lengths = torch.tensor([1000, 5], device="cuda") if case == "lengths" else None
    dout = torch.randn_like(q)

    def step() -> None:
        out = attention(
            q, k, v, layout, kv_lengths=lengths, dropout_p=dropout_p, causal=case == "dense", backend=backend
        )
        torch.autograd.grad(out, (q, k, v), dout)

    step()
    with no_waiting():
        step()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("mean_length", [60, 1000])
def test_a_cuda_graph_captures_packed_documents_and_their_attention(mean_length: int) -> None:
    """A CUDA graph of layout, plan, forward and backward follows new boundaries, without synchronization."""
    length, n_documents = 3000, 3000 // mean_length
    torch.manual_seed(0)
    q, key, v = (torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, boundaries = torch.randn_like(q), torch.zeros(n_documents + 1, dtype=torch.int32, device="cuda")
    prefixes = torch.arange(n_documents, device="cuda") % 200

    def new_boundaries(end: int) -> None:
        inner = torch.randint(0, end, (n_documents - 1,)).sort().values
        boundaries.copy_(torch.cat([torch.tensor([0]), inner, torch.tensor([end])]))

    def step(causal: bool) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"causal": True, "prefix": prefixes} if causal else {"window": 700}
        layout = masks.documents(boundaries, length=length, **options)
        out = attention(q, key, v, layout, deterministic=True)
        return out, *torch.autograd.grad(out, (q, key, v), dout)

    for causal in (False, True):
        new_boundaries(length)
        graph, captured = capture(functools.partial(step, causal))
        for end in (length, length - 500):
            with torch.no_grad():
                for tensor in (q, key, v, dout):
                    tensor.normal_()
            new_boundaries(end)
            graph.replay()
            # tests/plan/test_packed_builder.py compares such plans with the host's
            for replayed, expected in zip(captured, step(causal), strict=True):
                assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_a_cuda_graph_captures_a_selection_and_its_attention() -> None:
    """A CUDA graph of selection, plan, forward and backward follows new scores, without synchronization."""
    length, block_size, k = 1100, 64, 4
    n_rows = -(-length // block_size)
    torch.manual_seed(0)
    q, key, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, scores = torch.randn_like(q), torch.randn(2, 4, n_rows, n_rows, device="cuda")

    def step(causal: bool) -> tuple[Tensor, ...]:
        layout = BlockLayout.from_scores(scores, length, length, k=k, causal=causal, block_size=block_size)
        out = attention(q, key, v, layout, causal=causal)
        return out, *torch.autograd.grad(out, (q, key, v), dout)

    for causal in (False, True):
        graph, captured = capture(functools.partial(step, causal))
        for _ in range(2):
            with torch.no_grad():
                for tensor in (q, key, v, dout, scores):
                    tensor.normal_()
            graph.replay()
            on_host = BlockLayout.from_scores(
                scores.cpu(), length, length, k=k, causal=causal, block_size=block_size
            ).to("cuda")
            out = attention(q, key, v, on_host, causal=causal)
            for replayed, expected in zip(captured, (out, *torch.autograd.grad(out, (q, key, v), dout)), strict=True):
                assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize(("group", "query_block_size"), [(1, 64), (4, 1), (16, 1)])
def test_a_cuda_graph_captures_a_selection_in_packed_documents(group: int, query_block_size: int) -> None:
    """A CUDA graph of selection, plan, forward and backward follows new boundaries, without synchronization."""
    length, block_size = 1100, 64
    n_rows, n_cols = -(-length // query_block_size), -(-length // block_size)
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (2 * group, 2, 2)
    ]
    dout, indices = torch.randn_like(leaves[0]), torch.zeros(2, 2, n_rows, 6, dtype=torch.int64, device="cuda")
    boundaries = torch.zeros(2, 9, dtype=torch.int32, device="cuda")

    def step(tensors: list[Tensor], causal: bool, backend: str = "auto") -> list[Tensor]:
        options: dict[str, Any] = {"block_size": block_size, "query_block_size": query_block_size, "backend": backend}
        out = selected_attention(*tensors, indices, causal=causal, cu_seqlens=boundaries, **options)
        return [out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))]

    def draw() -> None:
        indices.copy_(torch.randint(-1, n_cols, indices.shape))
        inner = torch.randint(0, length - 50, (2, 7)).sort(1).values
        boundaries.copy_(torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=length - 50))

    for causal in (False, True):
        draw()
        graph, captured = capture(lambda causal=causal: tuple(step(leaves, causal)))
        for _ in range(2):
            draw()
            graph.replay()
            exact = step([tensor.detach().double().requires_grad_() for tensor in leaves], causal, "reference")
            same = step(leaves, causal, "reference")
            for name, replayed, other, truth in zip(("out", "dq", "dk", "dv"), captured, same, exact, strict=True):
                assert_as_accurate(replayed, [other], truth, name=name)


@pytest.mark.parametrize(
    "make",
    [nn.MixtureOfBlockAttention, nn.NativeSparseAttention, nn.SharedIndexAttention],
    ids=lambda kind: kind.__name__,
)
def test_layers_that_select_blocks_never_wait_for_the_boundaries_of_packed_documents(make: Any) -> None:
    torch.manual_seed(0)
    sizes = {"block_size": 64, **({} if make is nn.NativeSparseAttention else {"k_blocks": 3})}
    layer = make(256, 4, kv_heads=1, rope=10000.0, **sizes).to("cuda", torch.bfloat16)
    x = torch.randn(1, 1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 300, 317, 900, 900], dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        found = layer(x, cu_seqlens=cu_seqlens)
        out, loss = found if isinstance(found, tuple) else (found, found.sum())
        torch.autograd.grad(out.sum() + loss, [x, *layer.parameters()])
        return out.detach()

    step()
    with no_waiting():
        together = step()
    for first, stop in ((0, 300), (300, 317), (317, 900)):
        alone = layer(x[:, first:stop])
        alone = alone[0] if isinstance(alone, tuple) else alone
        torch.testing.assert_close(together[:, first:stop], alone.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("heads_of_a_group", [1, 4, 16])
def test_a_cuda_graph_captures_selections_by_token(heads_of_a_group: int) -> None:
    """It follows new indices, without synchronization. Tiles of 64 x 64 give equal bits."""
    length, block_size, kv_heads = 1100, 64, 16 // heads_of_a_group
    torch.manual_seed(0)
    q = torch.randn(1, 16, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(1, kv_heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "kv")
    dout = torch.randn_like(q)
    indices = torch.randint(-1, 18, (1, kv_heads, length, 4), device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = selected_attention(q, k, v, indices, block_size=block_size)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    for _ in range(2):
        with torch.no_grad():
            indices.random_(-1, 18)
        graph.replay()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)
