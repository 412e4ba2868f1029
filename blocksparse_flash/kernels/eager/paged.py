"""Attention over a paged KV cache in plain PyTorch: copies the pages of each sequence, then computes every pair."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...score_mods import Scores
from ..inputs import Pages


def forward(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, scale: float, causal: bool, scores: Scores | None = None
) -> tuple[Tensor, Tensor]:
    """out (batch, heads, q_len, v_head_dim) in q's type, and lse (batch, heads, q_len).

    k, v  (n_pages, kv_heads, page_size, head_dim | v_head_dim)
    """
    (batch, heads, q_len, _), (n_pages, kv_heads, page, _) = q.shape, k.shape
    max_pages = pages.table.shape[1]
    lengths = pages.kv_lengths.long().clamp(0, max_pages * page)[:, None, None]
    if 0 in (n_pages, max_pages):
        # no sequence has keys
        n_lists = 1 if pages.selected is None else pages.selected.shape[1]
        numbers = torch.empty(batch, n_lists, 0, dtype=torch.long, device=q.device)
    elif pages.selected is None:
        n_used = max_pages
        if q.device.type == "cpu" and batch:
            n_used = -(-int(lengths.max()) // page)
        numbers = torch.arange(n_used, device=q.device).expand(batch, 1, n_used)
    else:
        numbers = _once(pages.selected, max_pages)
    n_lists = numbers.shape[1]
    # one list of pages for each head of the copied keys
    n_copied = max(n_lists, kv_heads)
    kv_head = torch.arange(n_copied, device=q.device) * kv_heads // max(1, n_copied)
    table = pages.table.long()[:, None].expand(batch, n_lists, max_pages)
    # (batch, n_copied, entries); pages beyond a length may have any id
    ids = table.gather(2, numbers.clamp(max=max_pages - 1)).clamp(0, n_pages - 1).expand(batch, n_copied, -1)
    k, v = (cache[ids, kv_head[:, None]].flatten(2, 3) for cache in (k, v))
    kv_pos = (numbers[..., None] * page + torch.arange(page, device=q.device)).flatten(2)[:, :, None]
    # (batch, n_lists, q_len, keys)
    q_pos = torch.arange(q_len, device=q.device)[:, None] + (lengths - q_len)[..., None]
    mask = (kv_pos < lengths[..., None]).expand(batch, n_lists, q_len, -1)
    if causal:
        mask = mask & (kv_pos <= q_pos)
    if pages.window is not None:
        mask = mask & (kv_pos > q_pos - pages.window)
    mask = mask.repeat_interleave(heads // n_lists, 1)
    sinks, softcap = (None, None) if scores is None else (scores.sinks, scores.softcap or None)
    return reference.attention(q, k, v, mask, scale=scale, sinks=sinks, softcap=softcap)


def _once(selected: Tensor, max_pages: int) -> Tensor:
    """The selected pages in ascending order; max_pages in place of repeated ones and of those out of range."""
    found = selected.long().masked_fill((selected < 0) | (selected >= max_pages), max_pages).sort().values
    is_repeated = found[..., 1:] == found[..., :-1]
    found[..., 1:].masked_fill_(is_repeated, max_pages)
    return found
