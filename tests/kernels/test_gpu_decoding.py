"""Decoding on a GPU: few queries over many keys, contiguous or in pages; also CUDA graphs and reproducibility of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import (
    BlockLayout,
    attention,
    attention_with_lse,
    paged,
    paged_attention,
    paged_attention_with_lse,
)
from tests.support.closeness import assert_as_accurate
from tests.support.gpu import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def decoding(
    q_len: int, kv_len: int, *, batch: int = 1, heads: int = 32, kv_heads: int = 8, head_dim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, q_len, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    return q, k, v


def sparse(q_len: int, kv_len: int) -> BlockLayout:
    """Partial blocks at the sinks, at both edges of the window and on the diagonal; random full blocks."""
    lengths = q_len, kv_len
    return (
        masks.sink_window(lengths, sinks=20, window=1000) | masks.random(lengths, density=0.1, seed=0)
    ) & masks.causal(lengths)


def assert_heads_are_accurate(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    sampled: list[tuple[int, int]],
) -> None:
    mask = None if layout is None else layout.to_dense()[0, 0].cuda()
    group = q.shape[1] // k.shape[1]
    for batch, head in sampled:
        found = {}
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            one_q = q[batch, head].to(dtype)
            one_k, one_v = (t[batch, head // group].to(dtype) for t in (k, v))
            scores = (one_q @ one_k.T) * q.shape[3] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            found[dtype] = scores.softmax(-1) @ one_v, scores.logsumexp(-1)
        half, single, truth = (found[dtype] for dtype in (torch.bfloat16, torch.float32, torch.float64))
        one = (slice(batch, batch + 1), slice(head, head + 1))
        assert_as_accurate(out[one], half[0][None, None], truth[0][None, None], name=f"out of head {head}")
        assert_as_accurate(lse[one], single[1][None, None], truth[1][None, None], name=f"lse of head {head}")


@pytest.mark.parametrize("q_len", [1, 3, 16, 64])
@pytest.mark.parametrize("case", ["sparse", "dense"])
def test_decoding_over_131072_keys_is_accurate(q_len: int, case: str) -> None:
    q, k, v = decoding(q_len, 1 << 17, batch=2)
    layout = sparse(q_len, 1 << 17) if case == "sparse" else None
    out, lse = attention_with_lse(q, k, v, layout, backend="triton")
    assert_heads_are_accurate(out, lse, q, k, v, layout, [(0, 0), (0, 13), (1, 31)])


def test_decoding_with_offsets_past_2_to_the_31_is_accurate() -> None:
    """17 KV heads of 1,048,576 x 128: 2.3e9 elements; the last head lies past 2^31."""
    q, k, v = decoding(1, 1 << 20, heads=34, kv_heads=17)
    assert k[0, :16].numel() >= 2**31
    layout = sparse(1, 1 << 20)
    out, lse = attention_with_lse(q, k, v, layout, backend="triton")
    assert_heads_are_accurate(out, lse, q, k, v, layout, [(0, 0), (0, 33)])


@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_is_bitwise_reproducible(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in decoding(2, 20_000, batch=3, head_dim=head_dim))
    lengths = torch.tensor([20_000, 0, 777], device="cuda")
    layout = sparse(2, 20_000)
    first = attention_with_lse(q, k, v, layout, kv_lengths=lengths, deterministic=True, backend="triton")
    assert not first[0][1].any() and first[1][1].isneginf().all()
    for _ in range(20):
        again = attention_with_lse(q, k, v, layout, kv_lengths=lengths, deterministic=True, backend="triton")
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("case", ["sparse", "dense"])
def test_a_cuda_graph_replays_decoding(case: str) -> None:
    """The graph reads kv_lengths at every replay, as a cache with spare room needs; the call does not synchronize."""
    q, k, v = decoding(1, 30_000, batch=2)
    layout = sparse(1, 30_000).to("cuda") if case == "sparse" else None
    lengths = torch.tensor([30_000, 20], device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        return attention_with_lse(q, k, v, layout, kv_lengths=lengths, backend="triton")

    graph, captured = capture(step)
    for turn in (1, 2):
        for tensor in (q, k, v):
            tensor.normal_()
        lengths.copy_(torch.tensor([turn * 1000, 30_000 - turn]))
        graph.replay()
        assert all(map(torch.equal, captured, step()))


def test_gradients_of_a_single_query_are_accurate() -> None:
    q, k, v = (t.requires_grad_() for t in decoding(1, 5000, heads=4, kv_heads=2, head_dim=64))
    layout = sparse(1, 5000)
    dout = torch.randn_like(q)
    found = torch.autograd.grad(attention(q, k, v, layout, backend="triton"), (q, k, v), dout)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    for name, actual, plain, truth in zip(
        ("dq", "dk", "dv"),
        found,
        torch.autograd.grad(attention(q, k, v, layout, backend="reference"), (q, k, v), dout),
        torch.autograd.grad(attention(*wide, layout, backend="reference"), wide, dout.double()),
        strict=True,
    ):
        assert_as_accurate(actual, plain, truth, name=name)


# ---- keys in pages ----


def in_pages(cache: Tensor, table: Tensor, n_pages: int, page: int, order: str) -> Tensor:
    """A contiguous cache (batch, kv_heads, length, dim) in the pages of a table, NaN in all others."""
    _, kv_heads, length, dim = cache.shape
    shape = (n_pages, kv_heads, page, dim) if order == "hnd" else (n_pages, page, kv_heads, dim)
    pages = torch.full(shape, torch.nan, device="cuda", dtype=cache.dtype)
    pages = pages if order == "hnd" else pages.transpose(1, 2)
    pages[table.long()] = cache.unflatten(2, (length // page, page)).transpose(1, 2)
    return pages


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 3, 16, 64])
def test_decoding_from_pages_is_accurate(q_len: int, page: int, order: str) -> None:
    """131,072 keys, and a sequence of fewer; both are accurate."""
    kv_len = 1 << 17
    q, k, v = decoding(q_len, kv_len, batch=2)
    n_pages = 2 * kv_len // page + 3
    table = torch.randperm(n_pages, device="cuda")[: 2 * kv_len // page].reshape(2, -1).int()
    pages = [in_pages(cache, table, n_pages, page, order) for cache in (k, v)]
    out, lse = paged_attention_with_lse(q, *pages, table, torch.tensor([kv_len, 50_000], device="cuda"))
    assert_heads_are_accurate(out, lse, q, k, v, masks.causal((q_len, kv_len)), [(0, 0), (0, 13)])
    shorter = [tensor[1:, :, :50_000] for tensor in (k, v)]
    assert_heads_are_accurate(out[1:], lse[1:], q[1:], *shorter, masks.causal((q_len, 50_000)), [(0, 13)])


def test_pages_with_offsets_past_2_to_the_31_are_accurate() -> None:
    """40,000 pages of 64 keys for 8 heads of 128: 2.6e9 elements; the sequence is in the last ones."""
    q, k, v = decoding(1, 4096)
    pages = torch.full((40_000, 8, 64, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert pages[:32_768].numel() >= 2**31
    table = torch.arange(39_999, 39_999 - 128, -1, device="cuda").int()[None]
    for cache, ids in ((k, table[:, :64]), (v, table[:, 64:])):
        pages[ids.long()] = cache.unflatten(2, (64, 64)).transpose(1, 2)
    lengths = torch.tensor([4096], device="cuda")
    # one tensor holds both, 64 pages apart
    out, lse = paged_attention_with_lse(q, pages[64:], pages[:-64], table[:, :64] - 64, lengths)
    assert_heads_are_accurate(out, lse, q, k, v, None, [(0, 0), (0, 31)])


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("select", ["all", "means", "bounds"])
def test_a_cuda_graph_captures_decoding_from_pages(select: str, page: int) -> None:
    """Appending, selection and attention follow new tokens, tables and lengths, without synchronization."""
    batch, max_pages, n_pages = 4, 40, 200
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, 1, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    k_pages, v_pages = (torch.randn(n_pages, 8, page, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = torch.zeros(batch, max_pages, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        paged.append_to_pages(k, v, k_pages, v_pages, table, lengths)
        selected = None
        if select != "all":
            summaries = (paged.page_means if select == "means" else paged.page_bounds)(k_pages)
            scores = paged.score_pages(q, summaries, table)
            selected = paged.select_pages(scores, lengths, k=7, page_size=page, always=(1, 2))
        return paged_attention_with_lse(q, k_pages, v_pages, table, lengths, selected=selected)

    graph, captured = capture(step)
    for turn in range(3):
        for tensor in (q, k, v):
            tensor.normal_()
        table.copy_(torch.randperm(n_pages)[: batch * max_pages].reshape(batch, max_pages))
        lengths.copy_(torch.tensor([max_pages * page - turn, 1 + turn, 0, 17 * page + turn]))
        graph.replay()
        assert all(map(torch.equal, captured, step()))
        assert not captured[0][2].any() and captured[1][2].isneginf().all() and captured[0][3].any()


def test_wrong_numbers_of_pages_on_the_gpu_read_nothing_outside() -> None:
    """Lengths are clamped, selected pages that do not exist ignored, ids of pages clamped."""
    q, k, v = decoding(2, 512, batch=3)
    table = torch.randperm(96, device="cuda").reshape(3, 32).int()
    pages = [in_pages(cache, table, 96, 16, "hnd") for cache in (k, v)]
    wild, clamped = (torch.tensor(values, device="cuda") for values in ([-5, 10**6, 70], [0, 512, 70]))
    first = paged_attention_with_lse(q, *pages, table, wild)
    assert all(map(torch.equal, first, paged_attention_with_lse(q, *pages, table, clamped)))
    selected = torch.randint(0, 32, (3, 8, 6), device="cuda")
    padded = torch.cat(
        [selected, selected[..., :2], selected.new_tensor([-1, 32, 2**40, -(2**40)]).expand(3, 8, -1)], -1
    )
    found = (paged_attention_with_lse(q, *pages, table, clamped, selected=each) for each in (selected, padded))
    torch.testing.assert_close(*found)
    # without NaN the results of wrong ids are numbers
    for cache in pages:
        cache.nan_to_num_(0.0)
    wrong = torch.full_like(table, 2**31 - 1)
    wrong[1] = -(2**31)
    assert paged_attention(q, *pages, wrong, clamped).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decoding_from_pages_is_bitwise_reproducible(head_dim: int) -> None:
    q, k, v = decoding(2, 20_480, batch=3, head_dim=head_dim)
    table = torch.randperm(3 * 1280, device="cuda").reshape(3, 1280).int()
    pages = [in_pages(cache, table, 3 * 1280, 16, "nhd") for cache in (k, v)]
    lengths = torch.tensor([20_480, 0, 777], device="cuda")
    selected = torch.randint(-1, 1280, (3, 8, 200), device="cuda")
    first = paged_attention_with_lse(q, *pages, table, lengths, selected=selected)
    for _ in range(20):
        again = paged_attention_with_lse(q, *pages, table, lengths, selected=selected)
        assert all(map(torch.equal, first, again))
