"""Attention weights of compressed keys, summed over the query heads of a group, from the lse of attention.

    weights[t, i] = sum over heads g of a group of exp(scale * q_g[t] . k[i] - lse_g[t])    if key i ends at t or before

A program computes a tile of 64 queries x 128 keys; the keys stay on chip while it iterates over the heads.
PyTorch would write the scores of every head, and read them again several times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tile import LOG2_E, product

BLOCK_T, BLOCK_N = 64, 128


# fmt: off
@triton.jit(do_not_specialize=["first", "n_queries", "n_keys", "size", "stride"])
def group_weights_kernel(
    # inputs: (batch, kv_heads, group, queries, HEAD_DIM), (batch, kv_heads, n_keys, HEAD_DIM) with a last stride of 1;
    # float32 (batch, kv_heads, group, queries)
    q_ptr, k_ptr, lse_ptr,
    # output: float32 (batch, kv_heads, n_queries, n_keys), contiguous
    weights_ptr,
    q_strides, k_strides, lse_strides,
    kv_heads, first, n_queries, n_keys, scale, size, stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # one axis: the others have at most 65,535 programs
    n_key_blocks, n_query_blocks = tl.cdiv(n_keys, BLOCK_N), tl.cdiv(n_queries, BLOCK_T)
    key_start = tl.program_id(0) % n_key_blocks * BLOCK_N
    query_start = tl.program_id(0) // n_key_blocks % n_query_blocks * BLOCK_T
    batch_head = (tl.program_id(0) // (n_key_blocks * n_query_blocks)).to(tl.int64)
    i_batch, i_head = batch_head // kv_heads, batch_head % kv_heads
    o_query, o_key = query_start + tl.arange(0, BLOCK_T), key_start + tl.arange(0, BLOCK_N)
    o_dim = tl.arange(0, DIM)
    m_query, m_key, m_dim = o_query < n_queries, o_key < n_keys, o_dim < HEAD_DIM
    # [BLOCK_T, BLOCK_N]
    m_seen = (o_key * stride + size - 1)[None, :] <= (first + o_query)[:, None]
    b_weights = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    if key_start * stride + size - 1 <= first + query_start + BLOCK_T - 1:
        p_k = k_ptr + i_batch * k_strides[0] + i_head * k_strides[1] + o_key.to(tl.int64)[:, None] * k_strides[2]
        b_k = tl.load(p_k + o_dim[None, :], mask=m_key[:, None] & m_dim[None, :], other=0.0)
        p_q = q_ptr + i_batch * q_strides[0] + i_head * q_strides[1] + o_query.to(tl.int64)[:, None] * q_strides[3]
        p_lse = lse_ptr + i_batch * lse_strides[0] + i_head * lse_strides[1] + o_query * lse_strides[3]
        for i_group in range(GROUP):
            b_q = tl.load(
                p_q + i_group * q_strides[2] + o_dim[None, :], mask=m_query[:, None] & m_dim[None, :], other=0.0
            )
            b_lse = tl.load(p_lse + i_group * lse_strides[2], mask=m_query, other=float("inf"))
            b_score = product(b_q, tl.trans(b_k), "ieee") * (scale * LOG2_E) - (b_lse * LOG2_E)[:, None]
            b_weights += tl.exp2(b_score)
    p_out = weights_ptr + (batch_head * n_queries + o_query[:, None]) * n_keys + o_key[None, :]
    tl.store(p_out, tl.where(m_seen, b_weights, 0.0), mask=m_query[:, None] & m_key[None, :])
# fmt: on


def group_weights(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, first: int, scale: float, size: int, stride: int
) -> torch.Tensor:
    """float32 (batch, kv_heads, queries, n_keys).

    q      (batch, kv_heads, group, queries, head_dim), whose first query is token `first`
    k      (batch, kv_heads, n_keys, head_dim); key i stands for `size` tokens from i * stride on
    lse    float32 (batch, kv_heads, group, queries)
    """
    q, k = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k))
    batch, kv_heads, group, n_queries, head_dim = q.shape
    n_keys, dim = k.shape[2], max(16, triton.next_power_of_2(head_dim))
    weights = torch.empty(batch, kv_heads, n_queries, n_keys, dtype=torch.float32, device=q.device)
    if weights.numel():
        n_programs = triton.cdiv(n_keys, BLOCK_N) * triton.cdiv(n_queries, BLOCK_T) * batch * kv_heads
        group_weights_kernel[(n_programs,)](
            q_ptr=q,
            k_ptr=k,
            lse_ptr=lse,
            weights_ptr=weights,
            q_strides=q.stride()[:4],
            k_strides=k.stride()[:3],
            lse_strides=lse.stride(),
            kv_heads=kv_heads,
            first=first,
            n_queries=n_queries,
            n_keys=n_keys,
            scale=scale,
            size=size,
            stride=stride,
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=dim,
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            # 4 warps spill: with Triton 3.6 on sm90, and on sm86
            num_warps=8,
        )
    return weights
