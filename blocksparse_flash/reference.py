"""The definition of attention in plain PyTorch, which every backend is tested against.

Runs on any device in O(q_len * kv_len) memory, and autograd differentiates it.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from . import philox
from .runtime import tracing
from .score_mods import LOWEST_BIAS


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T restricted to the attending pairs) v, and the log-sum-exp of those scores.

    q          (batch, heads, q_len, head_dim)
    k          (batch, kv_heads, kv_len, head_dim); query head h reads KV head h // (heads // kv_heads)
    v          (batch, kv_heads, kv_len, v_head_dim)
    mask       bool, broadcasts to (batch, heads, q_len, kv_len); True attends, None is every pair
    causal     keeps kv_pos <= q_pos + (kv_len - q_len), also where mask attends
    scale      factor on the scores; None is head_dim ** -0.5
    kv_lengths (batch,): keys at and beyond kv_lengths[b] do not exist. They may hold NaN, as may keys that no query
               attends to
    dropout_p  probability of dropping an attention weight; the kept ones are divided by 1 - dropout_p, lse is
               unaffected
    seed       int64, one element, on q's device; needed if dropout_p > 0
    softcap    c > 0: scores s become c tanh(s / c)
    alibi_slopes  (heads,): then s -= slope * |q_pos + kv_len - q_len - kv_pos|
    bias       broadcasts to (batch, heads, q_len, kv_len): then s += bias, as block_bias does
    pair_bias  the same, after that; below score_mods.LOWEST_BIAS it counts as -inf
    sinks      (heads,): one more logit in each row, of a key without a value; lse includes it
    returns    out (batch, heads, q_len, v_head_dim) in q's dtype, and lse (batch, heads, q_len), natural logarithm,
               float32 (float64 for float64)

    A row without keys, or whose scores are all -inf, gives out 0, lse -inf (its sink, where there are sinks) and
    gradients 0. 16-bit types compute scores and softmax in float32 and round the weights before the product with v, as
    the kernels do.
    """
    # a caller's autocast would round the float32 scores of half types
    with tracing.without_autocast(q.device):
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
        scale = head_dim**-0.5 if scale is None else scale
        group = heads // kv_heads if kv_heads else 1
        k = repeat(k, "batch kv_heads n d -> batch (kv_heads group) n d", group=group)
        v = repeat(v, "batch kv_heads n d -> batch (kv_heads group) n d", group=group)

        attends = _attending_pairs(q, kv_len, mask, causal, kv_lengths)
        # keys and values that no query attends to may be NaN
        is_unread = ~attends.any(dim=-2).unsqueeze(-1)
        k, v = k.masked_fill(is_unread, 0), v.masked_fill(is_unread, 0)
        score_dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(score_dtype) @ k.to(score_dtype).transpose(-1, -2) * scale
        scores = _modified(scores, softcap, alibi_slopes, bias, pair_bias).masked_fill(~attends, -torch.inf)

        highest = scores.new_full((batch, heads, q_len, 1), -torch.inf)
        if kv_len:
            highest = scores.detach().amax(dim=-1, keepdim=True)
        if sinks is not None:
            sinks = rearrange(sinks.to(score_dtype), "heads -> heads 1 1")
            highest = torch.maximum(highest, sinks.detach())
        # without keys, or with scores of -inf only: a finite pivot and a total of 1 avoid -inf - (-inf) and 0 / 0, also
        # in the backward
        is_empty = highest == -torch.inf
        pivot = highest.masked_fill(is_empty, 0)
        weights = torch.exp(scores - pivot)
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks - pivot)
        total = total.masked_fill(is_empty, 1)
        lse = (pivot + torch.log(total)).masked_fill(is_empty, -torch.inf).squeeze(-1)

        weights = weights / total
        if dropout_p > 0:
            weights = weights * _keep(seed, weights.shape, dropout_p) / philox.kept_share(dropout_p)
        return weights.to(v.dtype) @ v, lse


def _modified(
    scores: Tensor, softcap: float | None, alibi_slopes: Tensor | None, bias: Tensor | None, pair_bias: Tensor | None
) -> Tensor:
    """Scaled scores (batch, heads, q_len, kv_len) after the score mods."""
    q_len, kv_len = scores.shape[2:]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        q_pos, kv_pos = (torch.arange(length, device=scores.device) for length in (q_len, kv_len))
        distance = (q_pos[:, None] + (kv_len - q_len) - kv_pos).abs().to(scores.dtype)
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if pair_bias is not None:
        pair_bias = pair_bias.to(scores.dtype)
        scores = scores + pair_bias.masked_fill(pair_bias < LOWEST_BIAS, -torch.inf)
    return scores


def _attending_pairs(q: Tensor, kv_len: int, mask: Tensor | None, causal: bool, kv_lengths: Tensor | None) -> Tensor:
    """bool, broadcasts to (batch, heads, q_len, kv_len)."""
    q_len = q.shape[-2]
    q_pos, kv_pos = torch.arange(q_len, device=q.device)[:, None], torch.arange(kv_len, device=q.device)
    attends = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=q.device)
    if mask is not None:
        attends = attends & mask
    if causal:
        attends = attends & (kv_pos <= q_pos + (kv_len - q_len))
    if kv_lengths is not None:
        attends = attends & rearrange(kv_pos < kv_lengths[:, None], "b n -> b 1 1 n")
    return attends


def _keep(seed: Tensor | None, shape: torch.Size, dropout_p: float) -> Tensor:
    assert seed is not None, "dropout_p > 0 needs a seed"
    batch, heads, q_len, kv_len = (torch.arange(size, device=seed.device) for size in shape)
    return philox.keep_mask(seed, batch[:, None, None, None], heads[:, None, None], q_len[:, None], kv_len, dropout_p)
