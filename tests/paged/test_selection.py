"""Pages are selected by the definitions of MoBA and Quest, and as the layers of `nn` select blocks in training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import paged_attention, selected_attention
from blocksparse_flash.nn import mixture_of_block_attention
from blocksparse_flash.nn.mixture_of_blocks import best_blocks
from blocksparse_flash.nn.native_sparse import most_important_blocks, n_compressed
from blocksparse_flash.nn.video_sparse import block_means
from blocksparse_flash.paged import page_bounds, page_means, score_pages, select_pages, selection


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def paged(k: Tensor, page: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys (batch, kv_heads, length, dim) in pages in random order, NaN in all other slots, and their page table."""
    batch, kv_heads, length, dim = k.shape
    n_used = -(-length // page)
    order = torch.randperm(batch * n_used + 3, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * n_used].reshape(batch, n_used)
    pages = torch.full((len(order), kv_heads, page, dim), torch.nan, dtype=k.dtype)
    for i in range(batch):
        for pos in range(length):
            pages[table[i, pos // page], :, pos % page] = k[i, :, pos]
    return pages, torch.cat([table, torch.full((batch, 2), 10**6)], dim=1).int()


def as_sets(indices: Tensor) -> list[set[int]]:
    return [set(line) - {-1} for line in indices.flatten(0, -2).tolist()]


LENGTHS = [(150, 32), (96, 16), (129, 128), (31, 32), (64, 16), (520, 512)]


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("length", "page"), LENGTHS)
def test_mean_keys_select_the_blocks_of_mixture_of_block_attention(length: int, page: int, by_group: bool) -> None:
    """The last token of a training step and a decoding step with pages as large as blocks: same blocks, same output."""
    q, k, v = drawn(2, 4, length, 16), drawn(2, 2, length, 16, seed=1), drawn(2, 2, length, 12, seed=2)
    (k_pages, table), (v_pages, _) = paged(k, page), paged(v, page)
    lengths = torch.full((2,), length)
    scores = score_pages(q[:, :, -1:], page_means(k_pages), table, by_group=by_group)
    selected = select_pages(scores, lengths, k=3, page_size=page)
    means, queries = block_means(k, page), q[:, :, -1:]
    means, queries = (means, queries.unflatten(1, (2, 2))) if by_group else (means.repeat_interleave(2, 1), queries)
    blocks = best_blocks(queries, means, k_blocks=3, block_size=page, q_start=length - 1)
    assert as_sets(selected) == as_sets(blocks)
    out = paged_attention(q[:, :, -1:], k_pages, v_pages, table, lengths, selected=selected)
    trained = mixture_of_block_attention(q, k, v, k_blocks=3, block_size=page, by_group=by_group)
    torch.testing.assert_close(out, trained[:, :, -1:])


@pytest.mark.parametrize(("length", "page"), [(200, 16), (150, 32), (300, 64)])
def test_pages_are_attended_to_as_the_selected_branch_of_native_sparse_attention(length: int, page: int) -> None:
    """Its block numbers of the last token are those of pages."""
    q, k, v = drawn(2, 4, length, 16), drawn(2, 2, length, 16, seed=1), drawn(2, 2, length, 16, seed=2)
    compressed = drawn(2, 2, n_compressed(length, 32, 16), 16, seed=3)
    scores = torch.einsum("bkgqd, bknd -> bkgqn", q.unflatten(1, (2, 2)), compressed) / 4
    has_ended = torch.arange(compressed.shape[2]) * 16 + 31 <= torch.arange(length)[:, None]
    lse = scores.masked_fill(~has_ended, -torch.inf).logsumexp(-1).flatten(1, 2)
    blocks = most_important_blocks(q, compressed, lse, k_blocks=4, block_size=page)
    (k_pages, table), (v_pages, _) = paged(k, page), paged(v, page)
    out = paged_attention(
        q[:, :, -1:], k_pages, v_pages, table, torch.full((2,), length), selected=blocks[:, :, -1].contiguous()
    )
    trained = selected_attention(q, k, v, blocks, block_size=page)
    torch.testing.assert_close(out, trained[:, :, -1:])


@pytest.mark.parametrize("by_group", [False, True])
def test_bounds_are_those_of_quest(by_group: bool) -> None:
    """Feature by feature, head by head; no key of a page scores higher."""
    q, k = drawn(2, 4, 1, 8), drawn(2, 2, 64, 8, seed=1)
    k_pages, table = paged(k, 16)
    scores = score_pages(q, page_bounds(k_pages), table, by_group=False)
    pages = k.unflatten(2, (4, 16)).repeat_interleave(2, 1)
    bounds = torch.maximum(q * pages.amax(3), q * pages.amin(3)).sum(-1)
    torch.testing.assert_close(scores[..., :4], bounds)
    assert (scores[..., :4] >= (q[:, :, None] * pages).sum(-1).amax(-1)).all()
    if by_group:
        grouped = score_pages(q, page_bounds(k_pages), table)
        torch.testing.assert_close(grouped[..., :4], bounds.unflatten(1, (2, 2)).sum(2))


def test_autocast_does_not_round_scores() -> None:
    q, k = drawn(1, 4, 1, 8).float(), drawn(1, 2, 48, 8, seed=1).float()
    k_pages, table = paged(k, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score_pages(q, page_means(k_pages), table[:, :3])
    torch.testing.assert_close(found, score_pages(q, page_means(k_pages), table[:, :3]), rtol=0, atol=0)


def test_scores_of_several_tokens_are_added() -> None:
    q, k = drawn(1, 4, 3, 8), drawn(1, 2, 48, 8, seed=1)
    k_pages, table = paged(k, 16)
    for summaries in (page_means(k_pages), page_bounds(k_pages)):
        each = [score_pages(q[:, :, i : i + 1], summaries, table[:, :3]) for i in range(3)]
        torch.testing.assert_close(score_pages(q, summaries, table[:, :3]), sum(each))


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(
    ("max_pages", "head_dim", "bounds", "dtype"),
    [(3, 8, False, torch.float32), (300, 24, True, torch.bfloat16), (70, 256, True, torch.float16)],
)
def test_the_kernel_scores_pages_as_pytorch_does(
    max_pages: int, head_dim: int, bounds: bool, dtype: torch.dtype, by_group: bool, monkeypatch: Any, device: Any
) -> None:
    """Over several programs, with a padded size, entries out of range and summaries with other heads between them."""
    pytest.importorskip("triton", reason="needs Triton")
    q, summaries = drawn(2, 6, 2, head_dim).to(dtype), drawn(9, 4, head_dim * (1 + bounds), seed=1).to(dtype)
    table = torch.randint(-3, 14, (2, max_pages), generator=torch.Generator().manual_seed(0)).int()
    tensors = q.to(device), summaries.to(device)[:, 1:3], table.to(device)
    monkeypatch.setattr(selection, "_runs_kernel", lambda *_: False)
    truth = score_pages(*tensors, by_group=by_group)
    monkeypatch.setattr(selection, "_runs_kernel", lambda *_: True)
    found = score_pages(*tensors, by_group=by_group)
    assert found.dtype == truth.dtype == torch.float32 and found.shape == truth.shape
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("always", [(0, 1), (1, 2), (2, 1)])
def test_first_and_last_pages_are_always_selected_and_later_ones_never(always: tuple[int, int]) -> None:
    """Sequences of 0 and 1 key, of whole pages, and with a partial one; scores beyond them are NaN."""
    page, k, lengths = 16, 4, torch.tensor([0, 1, 16, 17, 64, 100, 160])
    scores = drawn(len(lengths), 2, 10)
    for i, length in enumerate(lengths.tolist()):
        scores[i, :, -(-length // page) :] = torch.nan
    selected = select_pages(scores, lengths, k=k, page_size=page, always=always)
    assert selected.dtype == torch.int32 and selected.shape == (len(lengths), 2, k)
    for i, length in enumerate(lengths.tolist()):
        n_pages = -(-length // page)
        for head in range(2):
            found = [int(number) for number in selected[i, head] if number >= 0]
            kept = {number for number in range(n_pages) if number < always[0] or number >= n_pages - always[1]}
            rest = sorted(set(range(n_pages)) - kept, key=scores[i, head].neg().tolist().__getitem__)
            assert sorted(found) == sorted([*kept, *rest[: k - len(kept)]])


def test_more_pages_than_there_are_select_all() -> None:
    selected = select_pages(drawn(1, 1, 3), torch.tensor([20]), k=9, page_size=16)
    assert selected.shape == (1, 1, 3) and as_sets(selected) == [{0, 1}]


GOOD: dict[str, Any] = {
    "scores": torch.zeros(2, 1, 4), "kv_lengths": torch.tensor([3, 64]), "k": 2, "page_size": 16, "always": (0, 1),
}  # fmt: skip
WRONG = {
    "scores": (ValueError, "scores must be floating point", {"scores": torch.zeros(2, 4)}),
    "type": (TypeError, "scores must be a torch.Tensor", {"scores": [1.0]}),
    "lengths": (ValueError, "kv_lengths must be 0 to 64", {"kv_lengths": torch.tensor([3, 65])}),
    "k": (ValueError, "k must be at least the number of pages in always=.1, 2., got 2", {"always": (1, 2)}),
    "last": (ValueError, "always must be 0 or more first and 1 or more last", {"always": (1, 0)}),
    "pair": (TypeError, "always must be two numbers", {"always": 1}),
    "page": (ValueError, "page_size must be 1 to 2147418112, got 0", {"page_size": 0}),
    "large page": (ValueError, "page_size must be 1 to 2147418112, got 9223372036854775808", {"page_size": 2**63}),
    "nested": (
        ValueError,
        "scores must be a dense, strided tensor, got a nested",
        {"scores": torch.nested.nested_tensor(list(torch.zeros(2, 1, 4)), layout=torch.jagged)},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_selections_are_refused(case: str) -> None:
    error, message, changes = WRONG[case]
    with pytest.raises(error, match=message):
        select_pages(**GOOD | changes)


@pytest.mark.parametrize("summarize", [page_means, page_bounds])
def test_wrong_pages_are_refused(summarize: Callable[[Tensor], Tensor]) -> None:
    """Regression: of one page without its dimension, the features were summarized instead of the keys."""
    pages = torch.zeros(5, 2, 16, 8)
    for wrong in (pages[0], pages.int(), pages[:, :, :0], pages.to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match=r"k_pages must be float16, .*k_pages\[ids\] keeps the dimensions"):
            summarize(wrong)
    with pytest.raises(TypeError, match=r"k_pages must be a torch\.Tensor, got list"):
        summarize([pages])
    with pytest.raises(ValueError, match="k_pages must be a dense, strided tensor, got a nested"):
        summarize(torch.nested.nested_tensor(list(pages), layout=torch.jagged))


def test_wrong_summaries_are_refused() -> None:
    q, table = torch.zeros(2, 4, 1, 8), torch.zeros(2, 3).int()
    for summaries, message in (
        (torch.zeros(5, 2, 9), "summaries must have shape"),
        (torch.zeros(5, 3, 8), "summaries must have shape"),
        (torch.zeros(5, 2, 8).double(), "summaries must have 3 dimensions, q's dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            score_pages(q, summaries, table)
    with pytest.raises(ValueError, match="page_table must be int32"):
        score_pages(q, torch.zeros(5, 2, 8), table.long())
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(ValueError, match="q must be float16, bfloat16, float32 or float64, got torch"):
            score_pages(q.to(dtype), torch.zeros(5, 2, 8, dtype=dtype), table)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_score_outranks_pages_that_are_always_selected(value: float) -> None:
    scores = torch.full((1, 1, 16), value)
    scores[..., 4] = 1.0
    scores[..., 15] = -3.0
    assert select_pages(scores, torch.tensor([256]), k=1, page_size=16).tolist() == [[[15]]]
    _, second = select_pages(scores, torch.tensor([256]), k=2, page_size=16)[0, 0].tolist()
    # NaN counts as the smallest score
    assert (second == 4) == math.isnan(value)
