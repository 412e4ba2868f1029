"""append_to_pages: stores the keys and values of new tokens in their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import validation
from ..runtime import tracing
from .checks import check_lists, check_new_tokens, check_tensors


def append_to_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lengths: Tensor
) -> None:
    """Stores keys and values of the last tokens of each sequence in the pages that its page table names for them.

    k, v         (batch, kv_heads, tokens, head_dim | v_head_dim), of the dtype of the cache
    k_pages, v_pages, page_table  the cache, which is written, and its page table, as in `paged_attention`
    kv_lengths   int32 or int64 (batch,): keys of each sequence, including those of the new tokens. Of a sequence with
                 fewer than `tokens`, such as an unused row of a batch with length 0, only the last kv_lengths[i] are
                 stored
    raises       TypeError, ValueError, also if gradients are enabled and k or v needs one, which a cache does not hold

    Pages that are written must not be shared with another sequence; on the CPU, where two tokens would be written to
    one place is refused. Nothing synchronizes: a CUDA graph may hold the call, and `paged_attention` after it.

    >>> k_pages, v_pages = torch.zeros(2, 8, 2, 16, 32)
    >>> table = torch.tensor([[3, 0, 6], [5, 3, 0]], dtype=torch.int32)
    >>> append_to_pages(*torch.ones(2, 2, 2, 1, 32), k_pages, v_pages, table, torch.tensor([18, 1]))
    >>> k_pages[0, :, 1].sum().item(), k_pages[5, :, 0].sum().item()
    (64.0, 64.0)
    """
    check_new_tokens(k, v)
    check_tensors(k, k_pages, v_pages, "k")
    validation.check_no_gradient("k", k)
    validation.check_no_gradient("v", v)
    batch, kv_heads, tokens, _ = k.shape
    n_pages, cache_heads, page, v_dim = v_pages.shape
    if kv_heads != cache_heads or v.shape != (batch, kv_heads, tokens, v_dim) or v.dtype != k.dtype:
        raise ValueError(
            f"k and v must have shape (batch, kv_heads = {cache_heads}, tokens, head_dim) and the cache's dtype "
            f"{k_pages.dtype}, got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    # one cache may hold values that are features of the keys, as in multi-head latent attention
    if _begin_together(k_pages, v_pages) and not _begin_together(k, v):
        raise ValueError(
            "v_pages must have memory of its own unless v is a view of the first features of k, got that of k_pages: "
            "the values would replace the keys"
        )
    for name, cache in (("k_pages", k_pages), ("v_pages", v_pages)):
        _check_writable(name, cache)
    for name, tensor in (("page_table", page_table), ("kv_lengths", kv_lengths)):
        if isinstance(tensor, Tensor):
            validation.check_device(name, tensor, k, "k")
    check_lists(page_table, kv_lengths, None, k, n_pages, kv_heads, page, window=1)
    if 0 not in (batch, tokens, n_pages, page_table.shape[1]):
        _write(k, v, k_pages, v_pages, page_table, kv_lengths)


@torch.no_grad()
def _write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lengths: Tensor) -> None:
    (batch, _, tokens, _), (n_pages, _, page, _), max_pages = k.shape, k_pages.shape, page_table.shape[1]
    pos = kv_lengths.long().clamp(0, max_pages * page)[:, None] - tokens + torch.arange(tokens, device=k.device)
    ids = page_table.long().gather(1, pos.clamp(min=0) // page).clamp(0, n_pages - 1)
    # tokens that are not stored are written to the slot of one that is, with its values: no write is skipped, which
    # would need their number on the host. If none is stored, that slot keeps its values
    is_stored = (pos >= 0).flatten()
    source = torch.where(is_stored, torch.arange(batch * tokens, device=k.device), is_stored.int().argmax())
    ids, slots = ids.flatten()[source], (pos.flatten()[source]) % page
    if k.device.type == "cpu" and tracing.has_values(page_table) and tracing.has_values(kv_lengths):
        _check_places(ids * page + slots, source, page, tokens)
    for new, cache in ((k, k_pages), (v, v_pages)):
        rows = new.transpose(1, 2).flatten(0, 1)[source]
        # indices side by side: torch.vmap mixes up the axes of separate ones
        keys = cache.transpose(1, 2)
        keys[ids, slots] = torch.where(is_stored.any(), rows, keys[ids, slots])


def _begin_together(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same address, as far as they have one."""
    if one is other:
        return True
    has_memory = tracing.has_values(one) and tracing.has_values(other) and one.numel() > 0
    return has_memory and one.data_ptr() == other.data_ptr()


def _check_places(places: Tensor, source: Tensor, page: int, tokens: int) -> None:
    """ValueError if two tokens are written to one place of the cache.

    places, source  (batch * tokens,): where each token is written, and which token
    """
    written = source.unique()
    found, counts = places[written].unique(return_counts=True)
    if (counts > 1).any():
        place = int(found[counts.argmax()])
        first, second = (int(token) for token in written[places[written] == place][:2])
        raise ValueError(
            f"page_table must give each new token a place of its own, got place {place % page} of page {place // page} "
            f"for sequences {first // tokens} and {second // tokens}: a page that is written belongs to one sequence, "
            "once"
        )


def _check_writable(name: str, cache: Tensor) -> None:
    """ValueError for a cache that PyTorch cannot write, before the other one is written."""
    if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        raise ValueError(
            f"{name} is written, so each element needs memory of its own, got strides {cache.stride()} of an expanded "
            f"tensor: {name}.clone() has it"
        )
    if tracing.is_left_from_inference_mode(cache):
        raise ValueError(
            f"{name} was made in inference mode, so it can be written only there: call append_to_pages under "
            "torch.inference_mode(), or make the cache outside it"
        )
