"""Selection of pages on the device: summaries of the keys of pages, their scores, and the pages that score best."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import validation
from ..blocks.checks import boolean, check_tensor, integer
from ..runtime import tracing
from .checks import MAX_KEYS, check_table


def page_means(k_pages: Tensor) -> Tensor:
    """The mean key of each page: (n_pages, kv_heads, page_size, head_dim) to (n_pages, kv_heads, head_dim).

    k_pages  any pages of a cache, such as those that a step has filled: `means[ids] = page_means(k_pages[ids])`
    raises   TypeError, ValueError

    Unused slots of a page count too, so the mean of a page is valid once it is full. `select_pages` needs no others.

    Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189, section 2.
    """
    _check_pages(k_pages)
    return k_pages.mean(2)


def page_bounds(k_pages: Tensor) -> Tensor:
    """The largest and smallest values of the keys of each page: (n_pages, kv_heads, 2 * head_dim), maxima first.

    k_pages  any pages of a cache (n_pages, kv_heads, page_size, head_dim), as in `page_means`
    raises   TypeError, ValueError

    `score_pages` bounds the score of every key of a page by them.

    Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv:2406.10774, section 3.
    """
    _check_pages(k_pages)
    return torch.cat([k_pages.amax(2), k_pages.amin(2)], dim=-1)


@torch.no_grad()
def score_pages(q: Tensor, summaries: Tensor, page_table: Tensor, *, by_group: bool = True) -> Tensor:
    """The score of each page of each sequence: the product of queries and mean keys, or its upper bound over the keys.

    q            (batch, heads, q_len, head_dim); the scores of several tokens are added
    summaries    of q's dtype, for each page of the cache: `page_means` (n_pages, kv_heads, head_dim), or `page_bounds`
                 (n_pages, kv_heads, 2 * head_dim)
    page_table   int32 (batch, max_pages), as in `paged_attention`
    by_group     True: the heads that share keys get one score, the sum of theirs. False: a score for each head
    returns      float32 (float64 for float64), (batch, kv_heads | heads, max_pages); without meaning for pages beyond a
                 sequence
    raises       TypeError, ValueError

    >>> k_pages, table = torch.randn(8, 2, 16, 32), torch.tensor([[3, 0, 6], [5, 3, 0]], dtype=torch.int32)
    >>> score_pages(torch.randn(2, 4, 1, 32), page_bounds(k_pages), table).shape
    torch.Size([2, 2, 3])
    """
    _check_scored(q, summaries)
    check_table(page_table, q, q.shape[0], 1)
    boolean(by_group, "by_group")
    n_pages, kv_heads, size = summaries.shape
    q = q if q.dtype == torch.float64 else q.float()
    if size != q.shape[3]:
        # the bound is the sum over features of max(q max, q min)
        q = torch.cat([q.clamp(min=0), q.clamp(max=0)], dim=-1)
    # the sum of scores is the score of the sum
    q = q.sum(2).unflatten(1, (kv_heads, -1))
    if by_group:
        q = q.sum(2, keepdim=True)
    if 0 in (*q.shape, n_pages, page_table.shape[1]):
        scores = q.new_zeros(*q.shape[:3], page_table.shape[1])
    elif _runs_kernel(q, summaries, page_table):
        from ..kernels.triton.page_scores import page_scores

        with tracing.on_device(q.device):
            scores = page_scores(q.contiguous(), summaries, page_table)
    else:
        # (batch, kv_heads, max_pages, size)
        listed = summaries[page_table.clamp(0, n_pages - 1)].transpose(1, 2)
        with tracing.without_autocast(q.device):
            scores = q @ listed.to(q.dtype).mT
    return scores.flatten(1, 2)


def _runs_kernel(q: Tensor, *others: Tensor) -> bool:
    """Whether a kernel computes the scores of these tensors."""
    return (
        q.is_cuda
        and q.dtype == torch.float32
        and tracing.runs_triton(q.device.index)
        and tracing.can_launch_directly(q, *others)
    )


@torch.no_grad()
def select_pages(
    scores: Tensor, kv_lengths: Tensor, *, k: int, page_size: int, always: tuple[int, int] = (0, 1)
) -> Tensor:
    """The k pages of each sequence with the highest scores, for `selected` of `paged_attention`.

    scores      (batch, n, max_pages), n = heads, kv_heads or 1: `score_pages`, or any others
    kv_lengths  int32 or int64 (batch,): keys of each sequence, as in `paged_attention`
    k           pages of each list, including `always`; fewer if the sequence has fewer, or if their score is -inf. NaN
                counts as the lowest finite score
    page_size   keys of a page
    always      pages that are always selected: the first ones of a sequence, and its last ones, at least 1
    returns     int32 (batch, n, k, or max_pages if that is less), -1 for unused entries
    raises      TypeError, ValueError

    With always=(0, 1), scores by mean keys and the same `by_group`, this is the selection of
    `nn.mixture_of_block_attention` for the last token, whose own page is the last. Several tokens share a selection:
    `always` should cover the pages of all of them.
    Nothing synchronizes.

    >>> select_pages(torch.tensor([[[1.0, 3.0, 2.0, 9.0]]]), torch.tensor([40]), k=2, page_size=16)
    tensor([[[2, 1]]], dtype=torch.int32)
    """
    check_tensor("scores", scores)
    tracing.check_dense("scores", scores, scores)
    if scores.dim() != 3 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be floating point, (batch, heads, max_pages), got {scores.dtype} of shape "
            f"{tuple(scores.shape)}"
        )
    first, last = _checked_always(always)
    if integer(k, "k") < first + last:
        raise ValueError(f"k must be at least the number of pages in always={always}, got {k}")
    if not 1 <= integer(page_size, "page_size") <= MAX_KEYS:
        raise ValueError(f"page_size must be 1 to {MAX_KEYS}, got {page_size}")
    batch, _, max_pages = scores.shape
    validation.check_kv_lengths(kv_lengths, batch, max_pages * page_size, scores, "max_pages * page_size")
    number = torch.arange(max_pages, device=scores.device)
    own = ((kv_lengths.clamp(max=max_pages * page_size) - 1) // page_size)[:, None, None]
    is_always = (number < first) | (number > own - last)
    # NaN and inf would outrank pages that are always selected
    bounds = torch.finfo(scores.dtype)
    scores = scores.masked_fill(scores.isnan(), bounds.min).clamp(max=bounds.max)
    scores = scores.masked_fill(is_always, torch.inf).masked_fill(number > own, -torch.inf)
    best = scores.topk(min(k, max_pages), dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1).int()


def _check_pages(k_pages: Tensor) -> None:
    check_tensor("k_pages", k_pages)
    tracing.check_dense("k_pages", k_pages, k_pages)
    if k_pages.dim() != 4 or k_pages.dtype not in validation.DTYPES or not k_pages.shape[2]:
        raise ValueError(
            "k_pages must be float16, bfloat16, float32 or float64, (n_pages, kv_heads, page_size, head_dim) with a "
            f"page_size of 1 or more, got {k_pages.dtype} of shape {tuple(k_pages.shape)}; for some pages, "
            "k_pages[ids] keeps the dimensions"
        )


def _checked_always(always: object) -> tuple[int, int]:
    if not isinstance(always, (tuple, list)) or len(always) != 2:
        raise TypeError(f"always must be two numbers of pages, (first, last), got {always!r}")
    first, last = (integer(number, "always") for number in always)
    if first < 0 or last < 1:
        raise ValueError(f"always must be 0 or more first and 1 or more last pages, got {always}")
    return first, last


def _check_scored(q: Tensor, summaries: Tensor) -> None:
    for name, tensor, axes in (("q", q, 4), ("summaries", summaries, 3)):
        check_tensor(name, tensor)
        tracing.check_dense(name, tensor, q)
        if q.dtype not in validation.DTYPES:
            raise ValueError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
        if tensor.dim() != axes or tensor.dtype != q.dtype or tensor.device != q.device or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must have {axes} dimensions, q's dtype {q.dtype} and device {q.device}, a last stride of 1, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} on {tensor.device}"
            )
    heads, head_dim, (kv_heads, size) = q.shape[1], q.shape[3], summaries.shape[1:]
    if size not in (head_dim, 2 * head_dim) or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"summaries must have shape (n_pages, kv_heads, head_dim = {head_dim}) or (n_pages, kv_heads, "
            f"2 * head_dim), kv_heads a divisor of {heads}, got {tuple(summaries.shape)}; page_means and page_bounds "
            "make them"
        )
