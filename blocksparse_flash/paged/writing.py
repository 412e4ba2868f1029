"""append_to_pages: stores the keys and values of new tokens in their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_lists, check_new_tokens, check_tensors


@torch.no_grad()
def append_to_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lengths: Tensor
) -> None:
    """Stores keys and values of the last tokens of each sequence in the pages that its page table names for them.

    k, v         (batch, kv_heads, tokens, head_dim | v_head_dim), of the dtype of the cache
    k_pages, v_pages, page_table  the cache, which is written, and its page table, as in `paged_attention`
    kv_lengths   int32 or int64 (batch,): keys of each sequence, including those of the new tokens. Of a sequence with
                 fewer than `tokens`, such as an unused row of a batch with length 0, only the last kv_lengths[i] are
                 stored
    raises       TypeError, ValueError

    Pages that are written must not be shared with another sequence. Nothing synchronizes: a CUDA graph may hold the
    call, and `paged_attention` after it.

    >>> k_pages, v_pages = torch.zeros(2, 8, 2, 16, 32)
    >>> table = torch.tensor([[3, 0, 6], [5, 3, 0]], dtype=torch.int32)
    >>> append_to_pages(*torch.ones(2, 2, 2, 1, 32), k_pages, v_pages, table, torch.tensor([18, 1]))
    >>> k_pages[0, :, 1].sum().item(), k_pages[5, :, 0].sum().item()
    (64.0, 64.0)
    """
    check_new_tokens(k, v)
    check_tensors(k, k_pages, v_pages, "k")
    batch, kv_heads, tokens, _ = k.shape
    n_pages, cache_heads, page, v_dim = v_pages.shape
    if kv_heads != cache_heads or v.shape != (batch, kv_heads, tokens, v_dim) or v.dtype != k.dtype:
        raise ValueError(
            f"k and v must have shape (batch, kv_heads = {cache_heads}, tokens, head_dim) and the cache's dtype "
            f"{k_pages.dtype}, got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_writable(name, cache)
    check_lists(page_table, kv_lengths, None, k, n_pages, kv_heads, page, window=1)
    max_pages = page_table.shape[1]
    if 0 in (batch, tokens, n_pages, max_pages):
        return
    pos = kv_lengths.long().clamp(0, max_pages * page)[:, None] - tokens + torch.arange(tokens, device=k.device)
    ids = page_table.long().gather(1, pos.clamp(min=0) // page).clamp(0, n_pages - 1)
    # tokens that are not stored are written to the slot of one that is, with its values: no write is skipped, which
    # would need their number on the host. If none is stored, that slot keeps its values
    is_stored = (pos >= 0).flatten()
    source = torch.where(is_stored, torch.arange(batch * tokens, device=k.device), is_stored.int().argmax())
    ids, slots = ids.flatten()[source], (pos.flatten()[source]) % page
    for new, cache in ((k, k_pages), (v, v_pages)):
        rows = new.transpose(1, 2).flatten(0, 1)[source]
        # indices side by side: torch.vmap mixes up the axes of separate ones
        keys = cache.transpose(1, 2)
        keys[ids, slots] = torch.where(is_stored.any(), rows, keys[ids, slots])


def _check_writable(name: str, cache: Tensor) -> None:
    """ValueError for a cache that PyTorch cannot write, before the other one is written."""
    if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        raise ValueError(
            f"{name} is written, so each element needs memory of its own, got strides {cache.stride()} of an expanded "
            f"tensor: {name}.clone() has it"
        )
    # torch.compile cannot ask
    if not torch.compiler.is_compiling() and cache.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, so it can be written only there: call append_to_pages under "
            "torch.inference_mode(), or make the cache outside it"
        )
