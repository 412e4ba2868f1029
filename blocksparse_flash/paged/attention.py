"""paged_attention: attention of a few queries to keys and values in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import dispatch, ops, validation
from ..blocks.checks import boolean
from ..kernels.inputs import Pages
from ..runtime import tracing
from ..score_mods import Scores
from .checks import check_lists, check_tensors, check_window

NOT_HOPPER = "it has no paged KV cache"


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    selected: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the last tokens of each sequence to its keys and values in pages, without gradients.

    q            (batch, heads, q_len, head_dim): the last q_len tokens of each sequence
    k_pages, v_pages  (n_pages, kv_heads, page_size, head_dim | v_head_dim) of q's dtype, kv_heads a divisor of heads;
                 page_size is a power of two, at least 16. Strides may be any, the last one 1: a cache
                 (n_pages, page_size, kv_heads, head_dim) is passed as k_pages.transpose(1, 2)
    page_table   int32 (batch, max_pages): the ids of the pages of each sequence, in order. Sequences may share pages.
                 Entries beyond a sequence may be anything
    kv_lengths   int32 or int64 (batch,), 0 .. max_pages * page_size: keys of each sequence, including those of its
                 q_len tokens, which are already in the pages
    selected     integers (batch, heads | kv_heads | 1, k): the pages that each query head, each group of heads that
                 share keys, or all heads of a sequence attend to, by their position in the page table, in any order.
                 -1 marks an unused entry; a repeated page counts once. None is all pages. All q_len tokens of a
                 sequence share a selection
    causal       True drops the keys with kv_pos > q_pos + (kv_length - q_len): each token attends to itself and the
                 tokens before it. False: each token attends to all keys of its sequence
    window       with causal=True: each token attends to at most `window` keys, its own included
    scale        factor on the scores; None is head_dim ** -0.5
    sinks        (heads,): one more logit in each row, without a value
    softcap      c from 1e-30 to 1e30: scores s become c tanh(s / c)
    backend      "auto", "triton" or "eager"; "eager" copies the keys of all sequences, and "reference" is the same
    returns      (batch, heads, q_len, v_head_dim); 0 for a token that attends to no key, as in a sequence of length 0
    raises       TypeError, ValueError; also if gradients are enabled and an argument requires them

    Pages that no sequence uses, and the rest of a sequence's last page, may hold NaN. With a window, neither the keys
    before it nor their entries of the page table are used.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv:2309.06180,
    section 4.

    On a GPU the values of page_table, kv_lengths and selected are not checked, since nothing synchronizes: lengths are
    clamped, selected pages that do not exist are ignored, and ids of pages that do not exist are clamped to 0 ..
    n_pages - 1. A CUDA graph of a call follows changes of all its tensors.

    Query heads that share keys are packed into one tile, so that keys are read once for all of them, unless each head
    has a selection of its own. The keys of all sequences are divided among programs in proportion to their lengths.
    Results are bitwise identical in every run, but the last bits of a sequence may depend on the lengths of the others.

    >>> k_pages, v_pages = torch.randn(2, 8, 2, 16, 32)  # 8 pages of 16 keys
    >>> table = torch.tensor([[3, 0, 6], [5, 3, 0]], dtype=torch.int32)
    >>> paged_attention(torch.randn(2, 4, 1, 32), k_pages, v_pages, table, torch.tensor([40, 17])).shape
    torch.Size([2, 4, 1, 32])
    """
    options: dict[str, Any] = {"selected": selected, "causal": causal, "window": window, "scale": scale}
    options |= {"sinks": sinks, "softcap": softcap, "backend": backend}
    return paged_attention_with_lse(q, k_pages, v_pages, page_table, kv_lengths, **options)[0]


def paged_attention_with_lse(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    selected: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`paged_attention`, and the log-sum-exp of the scores of each query.

    q, k_pages, v_pages, page_table, kv_lengths, selected, causal, window, scale, sinks, softcap, backend  as
             `paged_attention`
    returns  out (batch, heads, q_len, v_head_dim) and lse (batch, heads, q_len), float32 (float64 for float64),
             natural logarithm; -inf, or the sink, for a query that attends to no key
    """
    check_tensors(q, k_pages, v_pages)
    check_window(window, boolean(causal, "causal"))
    n_pages, kv_heads, page, _ = k_pages.shape
    check_lists(page_table, kv_lengths, selected, q, n_pages, kv_heads, page, window)
    scale = validation.checked_scale(scale, q.shape[3], q.dtype)
    mods = validation.check_scores(validation.ScoreOptions(sinks, softcap), q, q, None)
    if forward_ad._current_level >= 0:
        raise ValueError(
            "paged_attention has no derivatives: call it outside of torch.autograd.forward_ad.dual_level(), or train "
            "with `attention`"
        )
    if ops.is_differentiated(q, k_pages, v_pages, sinks):
        raise ValueError(
            "paged_attention has no gradients, but gradients are enabled and q, k_pages, v_pages or sinks requires "
            "them: call it under torch.no_grad() or torch.inference_mode(), or train with `attention`"
        )
    chosen = dispatch.choose(backend, q.device, q.dtype, NOT_HOPPER)
    if 0 in (*q.shape, k_pages.shape[0], page_table.shape[1], *(() if selected is None else selected.shape)):
        # no keys, or no queries
        chosen = "eager"
    if sinks is not None:
        sinks = sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()
    tensors = (q, k_pages, v_pages, page_table, kv_lengths.contiguous(), selected, sinks)
    run = _run if tracing.can_launch_directly(*tensors) else _operator
    return run(*tensors, window, scale, causal, mods.softcap or 0.0, chosen)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_lengths: Tensor,
    selected: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    causal: bool,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    scores = Scores(sinks, None, None, [], softcap) if sinks is not None or softcap else None
    with tracing.on_device(q.device):
        return _kernel(backend)(q, k, v, Pages(table, kv_lengths, selected, window), scale, causal, scores)


def _kernel(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of a backend. Imports Triton when first needed."""
    if backend == "triton":
        from ..kernels.triton import paged

        return paged.forward
    from ..kernels.eager import paged as eager_paged

    return eager_paged.forward


torch.library.define(
    "blocksparse_flash::paged_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor table, Tensor kv_lengths, Tensor? selected, Tensor? sinks, int? window, "
    "float scale, bool causal, float softcap, str backend) -> (Tensor out, Tensor lse)",
)
torch.library.impl("blocksparse_flash::paged_attention", "default", _run)


torch.library.register_fake("blocksparse_flash::paged_attention", ops.fake_forward)
_operator = torch.ops.blocksparse_flash.paged_attention.default
