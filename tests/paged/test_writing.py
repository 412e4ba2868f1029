"""Appended tokens are where attention looks for them, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import attention, paged_attention
from blocksparse_flash.paged import append_to_pages, page_bounds, score_pages, select_pages


@pytest.mark.parametrize("order", ["hnd", "nhd"])
def test_tokens_are_appended_at_the_end_of_each_sequence(order: str, device: torch.device) -> None:
    """Across pages, to sequences with fewer tokens than are new, and to none; every other slot keeps its value."""
    page, tokens, lengths = 16, 5, torch.tensor([0, 3, 17, 48, 5, 20])
    shape = (20, 2, page, 8) if order == "hnd" else (20, page, 2, 8)
    caches = [torch.randn(shape, device=device) for _ in "kv"]
    if order == "nhd":
        caches = [cache.transpose(1, 2) for cache in caches]
    wanted = [cache.clone() for cache in caches]
    table = torch.randperm(20)[:18].reshape(6, 3).int()
    k, v = torch.randn(2, 6, 2, tokens, 8, device=device)
    append_to_pages(k, v, *caches, table.to(device), lengths.to(device))
    for i, length in enumerate(lengths.tolist()):
        for token in range(tokens):
            pos = length - tokens + token
            if pos >= 0:
                wanted[0][table[i, pos // page], :, pos % page] = k[i, :, token]
                wanted[1][table[i, pos // page], :, pos % page] = v[i, :, token]
    assert all(map(torch.equal, caches, wanted))


def test_nothing_is_written_for_a_batch_of_empty_sequences() -> None:
    caches = torch.randn(2, 4, 2, 16, 8)
    before = caches.clone()
    table, lengths = torch.full((3, 2), 10**6).int(), torch.zeros(3, dtype=torch.int32)
    append_to_pages(*torch.ones(2, 3, 2, 4, 8), *caches, table, lengths)
    assert torch.equal(caches, before)


def test_decoding_in_pages_is_decoding() -> None:
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    k_pages, v_pages = torch.full((2, 7, 2, 16, 8), torch.nan)
    table, lengths = torch.tensor([[1, 4, 0], [6, 2, 3]]).int(), torch.zeros(2, dtype=torch.int32)
    outs, first = [], 0
    for n_new in (17, *[1] * 20, 3):
        new = slice(first, first + n_new)
        first += n_new
        lengths += n_new
        append_to_pages(k[:, :, new], v[:, :, new], k_pages, v_pages, table, lengths)
        outs.append(paged_attention(q[:, :, new], k_pages, v_pages, table, lengths))
    torch.testing.assert_close(torch.cat(outs, 2), attention(q, k, v, causal=True))


def test_a_compiled_step_has_one_graph() -> None:
    """Appending, selection and attention."""
    q, (k, v) = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 2, 1, 8)
    caches = torch.randn(2, 9, 2, 16, 8)
    table, lengths = torch.arange(8).reshape(2, 4).int(), torch.tensor([50, 20])

    def step(q: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor) -> Tensor:
        append_to_pages(k, v, k_pages, v_pages, table, lengths)
        scores = score_pages(q, page_bounds(k_pages), table)
        selected = select_pages(scores, lengths, k=3, page_size=16)
        return paged_attention(q, k_pages, v_pages, table, lengths, selected=selected)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, *caches.clone(), lengths), step(q, *caches.clone(), lengths))


@pytest.mark.parametrize("wrong", ["expanded", "made in inference mode"])
@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_a_cache_that_cannot_be_written_is_refused_before_the_other_is_written(name: str, wrong: str) -> None:
    new, table, lengths = torch.ones(2, 2, 1, 16), torch.arange(8).reshape(2, 4).int(), torch.tensor([18, 3])
    if wrong == "expanded":
        refused = torch.zeros(1, 2, 16, 16).expand(8, 2, 16, 16)
    else:
        with torch.inference_mode():
            refused = torch.zeros(8, 2, 16, 16)
    caches = {"k_pages": torch.zeros(8, 2, 16, 16), "v_pages": torch.zeros(8, 2, 16, 16)} | {name: refused}
    with pytest.raises(ValueError, match=f"{name} (is written|was made in inference mode)"):
        append_to_pages(new, new, *caches.values(), table, lengths)
    assert not any(cache.any() for cache in caches.values())
    if wrong != "expanded":
        with torch.inference_mode():
            append_to_pages(new, new, *caches.values(), table, lengths)
        assert all(cache.any() for cache in caches.values())


def test_errors_name_the_new_tokens_and_not_queries() -> None:
    k, cache, table, lengths = torch.zeros(1, 2, 1, 8), torch.zeros(4, 2, 16, 8), torch.zeros(1, 2).int(), torch.ones(1)
    for new, words in (
        (k[..., :4], "k_pages must have k's head_dim 4, got 8"),
        (k[:, :1], "k's heads must be a multiple of k_pages' heads, got 1 and 2"),
        (k.double(), r"k_pages must be of k's dtype torch.float64.*; k.to\(k_pages.dtype\)"),
    ):
        with pytest.raises(ValueError, match=words):
            append_to_pages(new, new, cache, cache.clone(), table, lengths.long())
    with pytest.raises(ValueError, match=r"dtype torch.float32, got .* torch.float32 and .* torch.float64"):
        append_to_pages(k, k.double(), cache, cache.clone(), table, lengths.long())


def test_wrong_tokens_are_refused() -> None:
    cache, table, lengths = torch.zeros(4, 2, 16, 8), torch.zeros(3, 2).int(), torch.tensor([1, 2, 3])
    for k, v in ((torch.zeros(3, 4, 1, 8),) * 2, (torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 2, 8))):
        with pytest.raises(ValueError, match=r"k and v must have shape \(batch, kv_heads = 2, tokens, head_dim\)"):
            append_to_pages(k, v, cache, cache, table, lengths)


def test_two_tokens_in_one_place_are_refused() -> None:
    k_pages, v_pages = torch.zeros(2, 4, 1, 16, 4)
    k = torch.arange(2.0)[:, None, None, None].expand(2, 1, 1, 4).contiguous()
    shared = torch.tensor([[3], [3]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"page_table must .* got place 0 of page 3 for sequences 0 and 1"):
        append_to_pages(k, k, k_pages, v_pages, shared, torch.tensor([1, 1]))
    twice, new = torch.tensor([[2, 2]], dtype=torch.int32), torch.ones(1, 1, 17, 4)
    with pytest.raises(ValueError, match=r"page_table must .* got place 0 of page 2 for sequences 0 and 0"):
        append_to_pages(new, new, k_pages, v_pages, twice, torch.tensor([17]))
    assert not k_pages.any() and not v_pages.any()
    # other places of one page, and a sequence that stores nothing
    append_to_pages(k + 1, k + 1, k_pages, v_pages, shared, torch.tensor([1, 2]))
    append_to_pages(k + 3, k + 3, k_pages, v_pages, shared, torch.tensor([0, 3]))
    assert k_pages[3, 0, :4, 0].tolist() == [1, 2, 4, 0]


def test_values_need_a_cache_of_their_own_unless_they_are_features_of_the_keys() -> None:
    cache, table, lengths = torch.zeros(4, 1, 16, 8), torch.tensor([[1]], dtype=torch.int32), torch.tensor([1])
    k = torch.arange(8.0)[None, None, None]
    for v_pages in (cache, cache[:]):
        with pytest.raises(ValueError, match="v_pages must have memory of its own"):
            append_to_pages(k, 2 * k, cache, v_pages, table, lengths)
    append_to_pages(k, k[..., :4], cache, cache[..., :4], table, lengths)
    assert torch.equal(cache[1, 0, 0], k[0, 0, 0])


@pytest.mark.parametrize("name", ["k", "v"])
def test_tokens_that_need_a_gradient_are_refused(name: str) -> None:
    k_pages, v_pages = torch.zeros(2, 4, 1, 16, 4)
    new = {"k": torch.ones(1, 1, 1, 4), "v": torch.ones(1, 1, 1, 4)}
    new[name].requires_grad_()
    where = k_pages, v_pages, torch.tensor([[0]], dtype=torch.int32), torch.tensor([1])
    with pytest.raises(ValueError, match=f"a cache holds no gradients, .* and {name} needs one"):
        append_to_pages(*new.values(), *where)
    with torch.no_grad():
        append_to_pages(*new.values(), *where)
    assert k_pages[0, 0, 0].tolist() == [1, 1, 1, 1]


def test_keys_without_features_are_named() -> None:
    k, cache, table = torch.zeros(1, 2, 1, 0), torch.zeros(4, 2, 16, 8), torch.zeros(1, 2).int()
    with pytest.raises(ValueError, match="k must have a head_dim of 1 to 256, got 0"):
        append_to_pages(k, k, cache, cache, table, torch.tensor([1]))


@pytest.mark.parametrize(
    ("k", "v", "words"),
    [
        (torch.ones(2, 3, 16), None, r"k must be a tensor \(batch, kv_heads, tokens, head_dim\)"),
        (None, [1], "v must be a torch.Tensor, got list"),
        (None, torch.ones(2, 2, 3, 16, device="meta"), "v must be on"),
        (None, torch.ones(2, 2, 3, 16, dtype=torch.int32), "v must be a tensor"),
    ],
)
def test_nothing_is_written_if_new_tokens_do_not_fit(k: Any, v: Any, words: str) -> None:
    k_pages, v_pages = torch.zeros(2, 8, 2, 16, 16)
    table, new = torch.arange(8, dtype=torch.int32).reshape(2, 4), torch.ones(2, 2, 3, 16)
    with pytest.raises((TypeError, ValueError), match=words):
        append_to_pages(
            new if k is None else k, new if v is None else v, k_pages, v_pages, table, torch.tensor([18, 3])
        )
    assert not k_pages.any() and not v_pages.any()


@pytest.mark.parametrize("name", ["v", "k_pages", "v_pages", "page_table", "kv_lengths"])
def test_devices_are_compared_with_that_of_k(name: str) -> None:
    k_pages, v_pages = torch.zeros(2, 8, 2, 16, 16)
    new, table = torch.ones(2, 2, 3, 16), torch.arange(8, dtype=torch.int32).reshape(2, 4)
    given = {"k": new, "v": new, "k_pages": k_pages, "v_pages": v_pages, "page_table": table}
    given["kv_lengths"] = torch.tensor([18, 3])
    with pytest.raises(ValueError, match=rf"{name} must be on k's device cpu, got meta; {name}.to\(k.device\) moves"):
        append_to_pages(**{**given, name: given[name].to("meta")})


def test_mapped_calls_are_those_of_single_calls() -> None:
    """Regression: torch.vmap wrote other values without an error, and refused lengths and selections that differ."""
    table, lengths = torch.tensor([[3, 0, 6], [5, 4, 1]], dtype=torch.int32), torch.tensor([40, 17])
    new, q, caches = torch.randn(2, 2, 2, 1, 16), torch.randn(2, 2, 4, 1, 16), torch.zeros(2, 2, 8, 2, 16, 16)
    lists = torch.tensor([[40, 17], [3, 48]]), torch.tensor([[0, -1], [1, 2]])[:, None, None].expand(2, 2, 1, 2)
    singles = caches.clone()

    def append(new: Tensor, caches: Tensor) -> Tensor:
        append_to_pages(new, 2 * new, *caches, table, lengths)
        return caches

    def attend(q: Tensor, caches: Tensor, lengths: Tensor, selected: Tensor) -> Tensor:
        return paged_attention(q, *caches, table, lengths, selected=selected)

    for arguments in zip(new, singles, strict=True):
        append(*arguments)
    torch.vmap(append)(new, caches)
    assert torch.equal(caches, singles)
    each = [attend(*arguments) for arguments in zip(q, caches, *lists, strict=True)]
    assert torch.equal(torch.vmap(attend)(q, caches, *lists), torch.stack(each))
