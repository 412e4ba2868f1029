"""Scores of pages: products of a few query rows with the summary of each page that a page table names.

PyTorch would copy the summaries of all sequences, in the order of their pages, before it multiplies them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.tensor_spec import TensorSpecs, specs_of
from .tile import head_base

# elements of the summaries of a program
ELEMENTS = 8192


# fmt: off
@triton.jit(do_not_specialize=["kv_heads", "n_rows", "n_pages", "max_pages", "n_chunks"])
def page_scores_kernel(
    # inputs: (batch, kv_heads, n_rows, SIZE), contiguous; (n_pages, kv_heads, SIZE); int32 (batch, max_pages)
    q_ptr, summaries_ptr, table_ptr,
    # output: float32 (batch, kv_heads, n_rows, max_pages), contiguous
    scores_ptr,
    # strides in elements: (page, head), (batch,)
    strides, table_stride, kv_heads, n_rows, n_pages, max_pages, n_chunks,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PAGES: tl.constexpr,
):
    i_chunk = tl.program_id(0) % n_chunks
    batch_head = (tl.program_id(0) // n_chunks).to(tl.int64)
    o_page = i_chunk * PAGES + tl.arange(0, PAGES)
    o_size = tl.arange(0, PADDED)
    m_page, m_size = o_page < max_pages, o_size < SIZE
    b_id = tl.load(table_ptr + batch_head // kv_heads * table_stride + o_page, mask=m_page, other=0)
    # entries beyond a sequence may be anything
    b_id = tl.minimum(tl.maximum(b_id, 0), n_pages - 1)
    p_summary = head_base(summaries_ptr, strides, b_id, batch_head % kv_heads)
    # [PAGES, PADDED]
    b_summary = tl.load(p_summary[:, None] + o_size[None, :], mask=m_page[:, None] & m_size[None, :], other=0.0)
    for i_row in tl.range(0, n_rows):
        row = batch_head * n_rows + i_row
        b_q = tl.load(q_ptr + row * SIZE + o_size, mask=m_size, other=0.0).to(tl.float32)
        tl.store(scores_ptr + row * max_pages + o_page, tl.sum(b_summary * b_q[None, :], 1), mask=m_page)
# fmt: on


@functools.lru_cache(maxsize=1024)
def page_scores_launch(specs: TensorSpecs) -> Launch:
    """Prepares the launch for rows of queries, summaries and a page table with these specs."""
    q, summaries, table = specs.tensors
    (batch, kv_heads, n_rows, size), max_pages = q.shape, table.shape[1]
    padded = triton.next_power_of_2(size)
    n_chunks = -(-max_pages // (ELEMENTS // padded))
    rest = {
        "strides": summaries.strides[:2],
        "table_stride": table.strides[0],
        "kv_heads": kv_heads,
        "n_rows": n_rows,
        "n_pages": summaries.shape[0],
        "max_pages": max_pages,
        "n_chunks": n_chunks,
        "SIZE": size,
        "PADDED": padded,
        "PAGES": ELEMENTS // padded,
        "num_warps": 4,
    }
    return Launch(page_scores_kernel, (batch * kv_heads * n_chunks,), rest)


def page_scores(q: torch.Tensor, summaries: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """float32 (batch, kv_heads, n_rows, max_pages).

    q          float32 (batch, kv_heads, n_rows, size), contiguous
    summaries  (n_pages, kv_heads, size), with a last stride of 1
    table      int32 (batch, max_pages); no dimension of any tensor is 0
    """
    scores = q.new_empty(*q.shape[:3], table.shape[1])
    page_scores_launch(specs_of(q, summaries, table))(q, summaries, table, scores)
    return scores
