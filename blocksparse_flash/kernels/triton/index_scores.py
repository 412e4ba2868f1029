"""The highest score of a query with the keys of each block: of an indexer that selects blocks by their best token.

    scores[t, j] = max over keys i of block j of q[t] . k[i]        for blocks that begin at t or before

A program computes 64 queries x 128 keys, or the keys of a longer block. PyTorch would write the score of every key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tile import product

BLOCK_T, BLOCK_N = 64, 128


# fmt: off
@triton.jit(do_not_specialize=["first", "n_queries", "n_keys", "n_blocks"])
def index_scores_kernel(
    # inputs: (batch, heads, n_queries, HEAD_DIM), (batch, n_keys, HEAD_DIM) with a last stride of 1
    q_ptr, k_ptr,
    # output: float32 (batch, heads, n_queries, n_blocks), contiguous; not all blocks after the query are written
    scores_ptr,
    q_strides, k_strides, n_heads, first, n_queries, n_keys, n_blocks,
    SIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # blocks of a program, and its steps of BLOCK_N keys
    BLOCKS: tl.constexpr = max(1, BLOCK_N // SIDE)
    STEPS: tl.constexpr = max(1, SIDE // BLOCK_N)
    # one axis: the others have at most 65,535 programs
    n_tile_cols, n_tile_rows = tl.cdiv(n_blocks, BLOCKS), tl.cdiv(n_queries, BLOCK_T)
    first_block = tl.program_id(0) % n_tile_cols * BLOCKS
    query_start = tl.program_id(0) // n_tile_cols % n_tile_rows * BLOCK_T
    batch_head = (tl.program_id(0) // (n_tile_cols * n_tile_rows)).to(tl.int64)
    if first_block * SIDE <= first + query_start + BLOCK_T - 1:
        o_query, o_dim = query_start + tl.arange(0, BLOCK_T), tl.arange(0, DIM)
        m_query, m_dim = o_query < n_queries, (o_dim < HEAD_DIM)[None, :]
        p_q = q_ptr + batch_head // n_heads * q_strides[0] + batch_head % n_heads * q_strides[1] + o_dim[None, :]
        b_q = tl.load(p_q + o_query.to(tl.int64)[:, None] * q_strides[2], mask=m_query[:, None] & m_dim, other=0.0)
        p_k = k_ptr + batch_head // n_heads * k_strides[0] + o_dim[None, :]
        b_best = tl.full([BLOCK_T, BLOCKS], float("-inf"), tl.float32)
        for step in range(STEPS):
            o_key = first_block * SIDE + step * BLOCK_N + tl.arange(0, BLOCK_N)
            m_key = o_key < n_keys
            b_k = tl.load(p_k + o_key.to(tl.int64)[:, None] * k_strides[1], mask=m_key[:, None] & m_dim, other=0.0)
            b_score = tl.where(m_key[None, :], product(b_q, tl.trans(b_k), "ieee"), float("-inf"))
            b_best = tl.maximum(b_best, tl.max(b_score.reshape(BLOCK_T, BLOCKS, BLOCK_N // BLOCKS), 2))
        o_block = first_block + tl.arange(0, BLOCKS)
        p_scores = scores_ptr + (batch_head * n_queries + o_query[:, None]) * n_blocks + o_block[None, :]
        tl.store(p_scores, b_best, mask=m_query[:, None] & (o_block < n_blocks)[None, :])
# fmt: on


def index_scores(q: torch.Tensor, k: torch.Tensor, first: int, n_blocks: int, block_size: int) -> torch.Tensor:
    """float32 (batch, heads, queries, n_blocks); blocks that begin after the query hold any values.

    q           (batch, heads, queries, head_dim), whose first query is token `first`
    k           (batch, 1, keys, head_dim)
    block_size  keys of a block: a power of two up to 128, or a multiple of 128
    """
    q, k = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k))
    batch, heads, n_queries, head_dim = q.shape
    scores = torch.empty(batch, heads, n_queries, n_blocks, dtype=torch.float32, device=q.device)
    if scores.numel():
        n_tile_cols = triton.cdiv(n_blocks, max(1, BLOCK_N // block_size))
        index_scores_kernel[(n_tile_cols * triton.cdiv(n_queries, BLOCK_T) * batch * heads,)](
            q_ptr=q,
            k_ptr=k,
            scores_ptr=scores,
            q_strides=q.stride()[:3],
            k_strides=(k.stride(0), k.stride(2)),
            n_heads=heads,
            first=first,
            n_queries=n_queries,
            n_keys=k.shape[2],
            n_blocks=n_blocks,
            SIDE=block_size,
            HEAD_DIM=head_dim,
            DIM=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            num_warps=4,
        )
    return scores
