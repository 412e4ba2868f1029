"""Mixture of block attention: each query attends to its own block and to those whose mean keys score highest."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor, nn

from .. import validation
from ..blocks.checks import boolean, check_in_memory, check_tensor
from ..runtime import tracing
from ..selection import selected_attention
from .arguments import positive_int
from .block_choice import MAX_SCORES_PER_CHUNK, check_block_size, choose_best
from .document_blocks import DocumentBlocks, block_ranges
from .layers import SelfAttention
from .positions import RotaryTable
from .video_sparse import block_means


@torch.no_grad()
def best_blocks(
    q: Tensor,
    means: Tensor,
    *,
    k_blocks: int,
    block_size: int,
    q_start: int = 0,
    documents: DocumentBlocks | None = None,
) -> Tensor:
    """The block of each query, and the earlier blocks whose means have the highest dot products with the query.

    q        (batch, heads, length, head_dim), or (batch, heads, group, length, head_dim), whose scores are summed over
             the group
    means    (batch, heads, n_blocks, head_dim)
    q_start  position of the first query
    documents  documents of the queries and means; each query selects blocks of its own document
    returns  int64 (batch, heads, length, k_blocks, or all if there are fewer), -1 for unused entries
    """
    length, n_cols = q.shape[-2], means.shape[2]
    if q.dim() == 5:
        # the sum of scores is the score of the sum
        q = q.sum(2)
    own, earliest = block_ranges(documents, length, block_size, q.device, q_start)
    chosen = own.new_empty(*q.shape[:2], length, min(k_blocks, n_cols))
    chunk = max(1, MAX_SCORES_PER_CHUNK // max(1, q.shape[0] * q.shape[1] * n_cols))
    for first in range(0, length, chunk):
        rows = slice(first, min(first + chunk, length))
        scores = q[:, :, rows] @ means.mT
        choose_best(chosen, scores, own[..., rows, :], earliest[..., rows, :], first, n_seen=n_cols)
    return chosen


@tracing.untraced
def mixture_of_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_blocks: int,
    block_size: int = 512,
    by_group: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Causal attention of each query to its own block of tokens and to the earlier blocks with the highest scores.

    The score of a block is the dot product of the query and the mean of the block's keys.

    q           (batch, heads, q_len, head_dim), the last tokens of k: with a KV cache fewer than kv_len
    k, v        (batch, kv_heads, kv_len, head_dim | v_head_dim), kv_heads a divisor of heads
    k_blocks    blocks for each query and head, its own included; fewer if there are fewer before it
    block_size  tokens of a block: 16, 32, 64 or a multiple of 128; the last block may be shorter
    by_group    True: the query heads that share keys select together, by the sum of their scores, which is faster
    cu_seqlens  integers (documents + 1,) or (batch, documents + 1) on q's device: where packed documents begin and end.
                Needs q_len = kv_len. Each document has its own blocks, the first at its first token, and gives the same
                result as alone. Tokens after the last document give 0. Default: one document
    scale       of the attention scores; None is head_dim ** -0.5
    deterministic  as `attention`
    returns     (batch, heads, q_len, v_head_dim)
    raises      TypeError, ValueError; RuntimeError under transforms of torch.func, and in torch.export and torch.jit

    Selection, layout and plan are made on the device of q, without synchronization. The selection has no gradient.
    Without by_group, or with at most 2 query heads per KV head, a call on a GPU takes one bit of memory per pair and
    head. Without by_group, it takes the time of all blocks that 64 neighboring tokens select; see `selected_attention`.
    Packed documents are copied apart, with up to block_size - 1 empty places for each. torch.compile calls this
    function outside of its graphs (a graph break).

    Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189, section 2.

    >>> q, k = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    >>> mixture_of_block_attention(q, k, k, k_blocks=3, block_size=32).shape
    torch.Size([1, 4, 256, 16])
    """
    check_tensor("q", q)
    # all that `selected_attention` would refuse below, before anything is computed
    validation.check(q, k, v, None, False, scale, None, 0.0, None, deterministic, validation.autocast_dtype(q))
    positive_int("k_blocks", k_blocks)
    check_block_size(block_size)
    boolean(by_group, "by_group")
    tracing.refuse_transforms(None, q, k, v, cu_seqlens)
    tracing.refuse_export("mixture_of_block_attention")
    check_in_memory(q, "q")
    q_start = k.shape[2] - q.shape[2]
    if q_start < 0:
        raise ValueError(f"q must be the last tokens of k, got {q.shape[2]} tokens, and {k.shape[2]} of k")
    documents = None
    if cu_seqlens is not None:
        documents = DocumentBlocks.of(cu_seqlens, q, k, block_size)
        q, k, v = (documents.apart(tensor) for tensor in (q, k, v))
    if not q.shape[1]:
        # no heads select
        indices = torch.zeros(q.shape[0], 1, q.shape[2], 0, dtype=torch.int64, device=q.device)
    else:
        group = q.shape[1] // k.shape[1]
        queries, means = q.detach(), block_means(k.detach(), block_size)
        if by_group:
            queries = queries.unflatten(1, (-1, group))
        else:
            means = repeat(means, "b h n d -> b (h group) n d", group=group)
        sizes = {"k_blocks": k_blocks, "block_size": block_size, "q_start": q_start}
        indices = best_blocks(queries, means.to(q.dtype), **sizes, documents=documents)
    out = selected_attention(q, k, v, indices, block_size=block_size, scale=scale, deterministic=deterministic)
    return out if documents is None else documents.together(out)


class MixtureOfBlockAttention(nn.Module):
    """Causal self-attention to selected blocks: `mixture_of_block_attention` between projections without bias.

    embed_dim  features per token, a multiple of num_heads unless head_dim is given
    num_heads  query heads
    k_blocks, block_size, by_group  as `mixture_of_block_attention`
    kv_heads, rope, head_dim  as SelfAttention
    raises     TypeError, ValueError

    There are no parameters but those of `projections`, a SelfAttention, so the weights of a dense layer can be loaded
    there, and a layer can be dense for a part of the training.

    Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189, section 2.

    >>> MixtureOfBlockAttention(64, 4, k_blocks=3, block_size=32)(torch.zeros(1, 200, 64)).shape
    torch.Size([1, 200, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        k_blocks: int,
        block_size: int = 512,
        by_group: bool = False,
        kv_heads: int | None = None,
        rope: float | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.k_blocks = positive_int("k_blocks", k_blocks)
        check_block_size(block_size)
        self.block_size, self.by_group = block_size, boolean(by_group, "by_group")
        self.projections = SelfAttention(
            embed_dim, num_heads, kv_heads=kv_heads, causal=True, rope=rope, head_dim=head_dim
        )

    def forward(
        self, x: Tensor, positions: Tensor | RotaryTable | None = None, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        positions   as SelfAttention; by default they restart in each document
        cu_seqlens  as `mixture_of_block_attention`
        """
        q, k, v = self.projections.project(x, positions, cu_seqlens=cu_seqlens)
        out = mixture_of_block_attention(
            q, k, v, k_blocks=self.k_blocks, block_size=self.block_size, by_group=self.by_group, cu_seqlens=cu_seqlens
        )
        return self.projections.unite(out)

    def extra_repr(self) -> str:
        return f"k_blocks={self.k_blocks}, block_size={self.block_size}, by_group={self.by_group}"
