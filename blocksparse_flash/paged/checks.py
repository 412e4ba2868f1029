"""Checks of the arguments of calls on pages."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import validation
from ..blocks.checks import check_tensor, integer
from ..runtime import tracing

MIN_PAGE_SIZE = 16
# positions of keys are int32
MAX_KEYS = 2**31 - 2**16


def check_tensors(q: Tensor, k_pages: Tensor, v_pages: Tensor, q_name: str = "q") -> None:
    """Accept q, or new keys, and a cache that fit each other."""
    named = {q_name: q, "k_pages": k_pages, "v_pages": v_pages}
    for name, tensor in named.items():
        _check_tensor(name, tensor, q, q_name)
        shape = tuple(tensor.shape)
        if len(shape) != 4:
            axes = "batch, heads, q_len, head_dim" if name == q_name else "n_pages, kv_heads, page_size, head_dim"
            raise ValueError(f"{name} must have shape ({axes}), got {shape}")
        if tensor.dtype not in validation.DTYPES or tensor.dtype != q.dtype:
            wanted = "float16, bfloat16, float32 or float64" if name == q_name else f"of {q_name}'s dtype {q.dtype}"
            remedy = f"{q_name}.to(k_pages.dtype) converts {q_name}"
            raise ValueError(f"{name} must be {wanted}, got {tensor.dtype}; {remedy}")
        if not 1 <= shape[3] <= validation.MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head_dim of 1 to {validation.MAX_HEAD_DIM}, got {shape[3]}")
        if tensor.stride(3) != 1 and shape[3] != 1 and tensor.numel():
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        if tensor.shape[2] * tensor.stride(2) >= 2**31:
            raise ValueError(
                f"{name} must have the keys of a page within 2**31 elements, got strides {tensor.stride()}; order a "
                "cache by pages before keys"
            )
    (n_pages, kv_heads, page, head_dim), heads = k_pages.shape, q.shape[1]
    swap = "a cache (n_pages, page_size, kv_heads, head_dim) is passed as k_pages.transpose(1, 2)"
    if v_pages.shape[:3] != (n_pages, kv_heads, page):
        raise ValueError(
            f"k_pages and v_pages must agree in all dimensions but the last, got {tuple(k_pages.shape)} and "
            f"{tuple(v_pages.shape)}"
        )
    if head_dim != q.shape[3]:
        raise ValueError(f"k_pages must have {q_name}'s head_dim {q.shape[3]}, got {head_dim}")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{q_name}'s heads must be a multiple of k_pages' heads, got {heads} and {kv_heads}; {swap}")
    if page < MIN_PAGE_SIZE or page & (page - 1):
        raise ValueError(
            f"k_pages must have a page_size that is a power of two, {MIN_PAGE_SIZE} or more, got {page}; {swap}"
        )


def check_new_tokens(k: Tensor, v: Tensor) -> None:
    """Accept keys and values that are to be appended, as far as the cache does not matter."""
    for name, tensor in (("k", k), ("v", v)):
        _check_tensor(name, tensor, k, "k")
        if tensor.ndim != 4 or tensor.dtype not in validation.DTYPES:
            raise ValueError(
                f"{name} must be a tensor (batch, kv_heads, tokens, head_dim) of the cache's dtype, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


def check_lists(
    page_table: Tensor,
    kv_lengths: Tensor,
    selected: Tensor | None,
    q: Tensor,
    n_pages: int,
    n_kv: int,
    page: int,
    window: int | None = None,
) -> None:
    """Accept the lists of pages of a batch, in a cache of n_pages pages with n_kv heads.

    window  keys that the last q_len tokens of a sequence use, each its own and those before it; None for all
    """
    batch, heads = q.shape[:2]
    check_table(page_table, q, batch, page)
    max_pages = page_table.shape[1]
    validation.check_kv_lengths(kv_lengths, batch, max_pages * page, q, "max_pages * page_size")
    is_on_cpu = q.device.type == "cpu"
    if is_on_cpu and tracing.has_values(page_table) and tracing.has_values(kv_lengths):
        positions = torch.arange(max_pages, device="cpu")
        is_used = positions < -(-kv_lengths[:, None] // page)
        if window is not None:
            is_used &= positions >= (kv_lengths - q.shape[2] - window + 1)[:, None] // page
        wrong = page_table[is_used & ((page_table < 0) | (page_table >= n_pages))]
        if wrong.numel():
            raise ValueError(
                f"page_table must have ids of 0 .. n_pages - 1 = {n_pages - 1} within the length of each sequence, got "
                f"{int(wrong[0])}"
            )
    if selected is None:
        return
    _check_tensor("selected", selected, q)
    if selected.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"selected must be int32 or int64, got {selected.dtype}; selected.to(torch.int32) makes it")
    shape = tuple(selected.shape)
    if len(shape) != 3 or shape[0] != batch or shape[1] not in (1, n_kv, heads) or not shape[1]:
        raise ValueError(
            f"selected must have shape (batch = {batch}, heads = {heads}, kv_heads = {n_kv} or 1, k), got {shape}"
        )
    has_values = is_on_cpu and tracing.has_values(selected)
    if has_values and selected.numel() and not -1 <= int(selected.min()) <= int(selected.max()) < max_pages:
        wrong = selected[(selected < -1) | (selected >= max_pages)]
        raise ValueError(
            f"selected must be -1 (none) or in 0 .. max_pages - 1 = {max_pages - 1}, got {int(wrong[0])}; these are "
            "positions in page_table, not ids of pages"
        )


def check_table(page_table: Tensor, q: Tensor, batch: int, page: int) -> None:
    """Accept a page table of `batch` sequences."""
    _check_tensor("page_table", page_table, q)
    shape = tuple(page_table.shape)
    if page_table.dtype != torch.int32:
        raise ValueError(f"page_table must be int32, got {page_table.dtype}; page_table.to(torch.int32) makes it")
    if len(shape) != 2 or shape[0] != batch:
        raise ValueError(f"page_table must have shape (batch = {batch}, max_pages), got {shape}")
    if page_table.stride(1) != 1 and shape[1] > 1 and shape[0]:
        raise ValueError(f"page_table must have a last stride of 1, got strides {page_table.stride()}; .contiguous()")
    if shape[1] * page > MAX_KEYS:
        raise ValueError(
            f"page_table must have at most {MAX_KEYS} / page_size = {MAX_KEYS // page} columns, got {shape[1]}"
        )


def check_window(window: int | None, causal: bool) -> None:
    """Accept a positive window of a causal call, or None."""
    if window is None:
        return
    if not causal:
        raise ValueError(f"window must be None with causal=False, got {window}; it ends at each query's own key")
    if integer(window, "window") < 1 or window > MAX_KEYS:
        raise ValueError(f"window must be 1 to {MAX_KEYS} keys, a query's own included, got {window}; None is all")


def _check_tensor(name: str, tensor: Tensor, q: Tensor, q_name: str = "q") -> None:
    check_tensor(name, tensor, f"; torch.as_tensor({name}) makes one")
    tracing.check_dense(name, tensor, q)
    validation.check_device(name, tensor, q, q_name)
