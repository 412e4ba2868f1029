"""Attention to blocks that a small indexer selects for each query and KV head, and the indexer's loss."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import validation
from ..blocks.checks import boolean, check_in_memory, check_tensor
from ..runtime import tracing
from ..selection import selected_attention, selected_attention_with_lse
from .arguments import positive_int, takes_half_kernels
from .block_choice import MAX_SCORES_PER_CHUNK, check_block_size, choose_best
from .document_blocks import DocumentBlocks, block_ranges, document_table
from .layers import SelfAttention
from .positions import rotary_table, rotate


@torch.no_grad()
def best_indexed_blocks(
    index_q: Tensor, index_k: Tensor, *, k_blocks: int, block_size: int, documents: DocumentBlocks | None = None
) -> Tensor:
    """The block of each query, and the earlier blocks whose best tokens have the highest index scores.

    index_q  (batch, index_heads, length, index_dim)
    index_k  (batch, 1, length, index_dim)
    documents  documents of the tokens; each query selects blocks of its own document
    returns  int64 (batch, index_heads, length, k_blocks, or all if there are fewer), -1 for unused entries
    """
    batch, heads, length, _ = index_q.shape
    n_cols = -(-length // block_size)
    own, earliest = block_ranges(documents, length, block_size, index_q.device)
    chosen = own.new_empty(batch, heads, length, min(k_blocks, n_cols))
    uses_kernel = takes_half_kernels(index_q)
    chunk = max(1, MAX_SCORES_PER_CHUNK // max(1, batch * heads * (n_cols if uses_kernel else length)))
    for first in range(0, length, chunk):
        rows = slice(first, min(first + chunk, length))
        n_seen = -(-rows.stop // block_size)
        scores = _best_tokens(index_q[:, :, rows], index_k, first, n_seen, block_size, uses_kernel=uses_kernel)
        choose_best(chosen, scores, own[..., rows, :], earliest[..., rows, :], first, n_seen=n_seen)
    return chosen


def _best_tokens(
    index_q: Tensor, index_k: Tensor, first: int, n_blocks: int, block_size: int, *, uses_kernel: bool
) -> Tensor:
    """The highest score of each query, from token `first` on, in each block of keys: (batch, heads, queries, n_blocks).

    Only scores of blocks that end at or before the query are meaningful: a query always selects its own block, and
    cannot select later ones.
    """
    if uses_kernel:
        from ..kernels.triton.index_scores import index_scores

        with tracing.on_device(index_q.device):
            return index_scores(index_q, index_k, first, n_blocks, block_size)
    # scores of whole blocks only: a partial last block is its queries' own
    n_whole = min(n_blocks, (first + index_q.shape[2]) // block_size)
    scores = index_q @ index_k[:, :, : n_whole * block_size].mT
    return pad(scores.unflatten(3, (n_whole, block_size)).amax(4), (0, n_blocks - n_whole))


@tracing.untraced
def shared_index_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    *,
    k_blocks: int = 16,
    block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    with_loss: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention to blocks that an indexer selects, and the indexer's loss.

    The index score of a query and a token is index_q . index_k / sqrt(index_dim). A query selects its own block and the
    earlier blocks that hold the highest index scores; query heads that share keys share the selection.

    q           (batch, heads, length, head_dim)
    k, v        (batch, kv_heads, length, head_dim | v_head_dim), kv_heads a divisor of heads
    index_q     (batch, kv_heads | 1, length, index_dim): an index head for each KV head, or one for all; index_dim 1 to
                256
    index_k     (batch, 1, length, index_dim), shared by the index heads
    k_blocks    blocks for each query, its own included; fewer if there are fewer before it
    block_size  tokens of a block: 16, 32, 64 or a multiple of 128; the last block may be shorter
    cu_seqlens  integers (documents + 1,) or (batch, documents + 1) on q's device: where packed documents begin and end.
                Each document has its own blocks, the first at its first token, and gives the same result as alone. The
                loss is averaged over the tokens of all documents. Tokens after the last document give 0. Default: one
                document
    scale       of the attention scores; None is head_dim ** -0.5
    with_loss   False skips the loss, which takes about as long as the attention
    returns     out (batch, heads, length, v_head_dim); and the loss, a scalar in float32 (float64 for float64), or None
    raises      TypeError, ValueError; RuntimeError under transforms of torch.func, and in torch.export and torch.jit

    P and Q are distributions over the selected tokens up to a query: P is the mean of the attention weights of the
    heads that share the selection, and Q is the softmax of the index scores. The loss is their cross-entropy, averaged
    over queries and index heads. It equals KL(P | Q) plus the entropy of P, and has the gradients of KL(P | Q): only
    for index_q and index_k, since P is detached and the selection has no gradient. Neither P nor Q is stored, since the
    loss is computed by attention to the selected blocks. Memory is O(length * k_blocks), and on a GPU a bit for each
    pair and index head.

    torch.compile calls this function outside of its graphs (a graph break).

    Lai et al., "MiniMax Sparse Attention" (MSA), arXiv:2606.13392, which selects in this way and trains the indexer by
    a divergence from the attention weights.

    >>> q, k, index = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16), torch.randn(1, 1, 256, 8)
    >>> out, loss = shared_index_attention(q, k, k, index, index, k_blocks=3, block_size=32)
    >>> out.shape, loss.shape
    (torch.Size([1, 4, 256, 16]), torch.Size([]))
    """
    check_tensor("q", q)
    # all that `selected_attention` would refuse below, before anything is computed
    validation.check(q, k, v, None, False, scale, None, 0.0, None, None, validation.autocast_dtype(q))
    positive_int("k_blocks", k_blocks)
    check_block_size(block_size)
    boolean(with_loss, "with_loss")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q must have as many tokens as k, since it is causal, got {q.shape[2]} and {k.shape[2]}")
    _check_index(index_q, index_k, q, k)
    tracing.refuse_transforms(None, q, k, v, index_q, index_k, cu_seqlens)
    tracing.refuse_export("shared_index_attention")
    check_in_memory(q, "q")
    documents = None
    if cu_seqlens is not None:
        documents = DocumentBlocks.of(cu_seqlens, q, k, block_size)
        q, k, v, index_q, index_k = (documents.apart(tensor) for tensor in (q, k, v, index_q, index_k))
    sizes = {"k_blocks": k_blocks, "block_size": block_size}
    indices = best_indexed_blocks(index_q.detach(), index_k.detach(), **sizes, documents=documents)
    out = selected_attention(q, k, v, indices, block_size=block_size, scale=scale)
    out = out if documents is None else documents.together(out)
    if not with_loss:
        return out, None
    heads, kv_heads, index_heads = q.shape[1], k.shape[1], index_q.shape[1]
    index_scale = index_q.shape[3] ** -0.5
    # log of the denominator of Q
    _, lse = selected_attention_with_lse(
        index_q, index_k, index_k.detach(), indices, block_size=block_size, scale=index_scale
    )
    # sum_j P_j index_k_j: attention to the tokens' index keys
    index_k_per_head = index_k.expand(-1, kv_heads, -1, -1).contiguous()
    expected_index_k = selected_attention(
        q.detach(), k.detach(), index_k_per_head.to(k.dtype), indices, block_size=block_size, scale=scale
    )
    expected_index_k = expected_index_k.unflatten(1, (index_heads, heads // max(1, index_heads))).to(lse.dtype).mean(2)
    # -sum_j P_j log Q_j = lse - index_q . (sum_j P_j index_k_j) / sqrt(index_dim)
    cross_entropy = lse - index_scale * (index_q.to(lse.dtype) * expected_index_k).sum(3)
    # max: the loss of no queries is 0, not NaN
    if documents is None:
        return out, cross_entropy.sum() / max(1, cross_entropy.numel())
    is_token = (documents.own >= 0)[..., 0].expand_as(cross_entropy)
    return out, cross_entropy.masked_fill(~is_token, 0).sum() / is_token.sum().clamp(min=1)


def _check_index(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor) -> None:
    check_tensor("index_q", index_q)
    check_tensor("index_k", index_k)
    (batch, _, length, _), kv_heads = q.shape, k.shape[1]
    if index_q.dim() != 4 or index_q.shape[1] not in (1, kv_heads) or index_q.shape[::2] != (batch, length):
        raise ValueError(
            f"index_q must have shape (batch = {batch}, kv_heads = {kv_heads} or 1, length = {length}, index_dim), got "
            f"{tuple(index_q.shape)}"
        )
    shape = batch, 1, length, index_q.shape[3]
    if index_k.shape != shape:
        raise ValueError(f"index_k must have shape (batch, 1, length, index_dim) = {shape}, got {tuple(index_k.shape)}")
    autocast = validation.autocast_dtype(q)
    for name, tensor in (("index_q", index_q), ("index_k", index_k)):
        validation.check_device(name, tensor, q)
        dtypes = [
            x.dtype if autocast is None else validation.under_autocast(x.dtype, autocast) for x in (tensor, index_q)
        ]
        if dtypes[0] not in validation.DTYPES or dtypes[0] != dtypes[1]:
            raise ValueError(f"{name} must be floating point, of index_q's dtype, got {tensor.dtype}")
        if not 1 <= tensor.shape[3] <= validation.MAX_HEAD_DIM:
            raise ValueError(f"{name} must have an index_dim of 1 to {validation.MAX_HEAD_DIM}, got {tensor.shape[3]}")
        if tensor.stride(3) != 1 and tensor.shape[3] != 1 and tensor.numel():
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}; use .contiguous()")


class SharedIndexAttention(nn.Module):
    """Causal self-attention to blocks that an indexer selects: `shared_index_attention` between projections.

    embed_dim  features per token, a multiple of num_heads unless head_dim is given
    num_heads  query heads
    k_blocks, block_size  as `shared_index_attention`
    index_dim  features per head of the indexer, at most 256; None means head_dim
    kv_heads, rope, head_dim  as SelfAttention; the indexer has kv_heads query heads and one key head, with the same
               rotary positions
    raises     TypeError, ValueError

    `projections` is a SelfAttention, so the weights of a dense layer can be loaded there; `index`, a linear map without
    bias, makes the queries and keys of the indexer. Its input is detached: the loss trains only the indexer, and only
    the loss trains it. Add the losses of all layers to the loss of the model.

    Lai et al., "MiniMax Sparse Attention" (MSA), arXiv:2606.13392.

    >>> out, loss = SharedIndexAttention(64, 4, kv_heads=1, k_blocks=3, block_size=32)(torch.randn(1, 200, 64))
    >>> out.shape, loss.requires_grad
    (torch.Size([1, 200, 64]), True)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        k_blocks: int = 16,
        block_size: int = 128,
        index_dim: int | None = None,
        kv_heads: int | None = None,
        rope: float | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.k_blocks = positive_int("k_blocks", k_blocks)
        check_block_size(block_size)
        self.block_size = block_size
        self.projections = SelfAttention(
            embed_dim, num_heads, kv_heads=kv_heads, causal=True, rope=rope, head_dim=head_dim
        )
        self.index_dim = self.projections.head_dim if index_dim is None else positive_int("index_dim", index_dim)
        if self.index_dim > validation.MAX_HEAD_DIM:
            raise ValueError(f"index_dim must be at most {validation.MAX_HEAD_DIM}, got {self.index_dim}")
        if rope is not None and self.index_dim % 2:
            raise ValueError(f"rope rotates pairs of features, so index_dim must be even, got {self.index_dim}")
        self.index = nn.Linear(embed_dim, (self.projections.kv_heads + 1) * self.index_dim, bias=False)

    def forward(
        self, x: Tensor, with_loss: bool | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x (batch, length, embed_dim) to the same shape, and the loss of the indexer.

        with_loss   whether the loss is computed, else it is None; default: only in training mode
        cu_seqlens  as `shared_index_attention`; positions restart in each document
        """
        q, k, v = self.projections.project(x, cu_seqlens=cu_seqlens)
        index = rearrange(self.index(x.detach()), "batch length (heads d) -> batch heads length d", d=self.index_dim)
        if self.projections.rope is not None:
            if cu_seqlens is None:
                positions = torch.arange(x.shape[1], device=x.device)
                table = rotary_table(positions, self.projections.rope, self.index_dim)
            else:
                table = document_table(cu_seqlens, x, self.projections.rope, self.index_dim)
            index = rotate(index, table)
        with_loss = self.training if with_loss is None else boolean(with_loss, "with_loss")
        options: dict[str, Any] = {"k_blocks": self.k_blocks, "block_size": self.block_size, "with_loss": with_loss}
        out, loss = shared_index_attention(q, k, v, index[:, :-1], index[:, -1:], cu_seqlens=cu_seqlens, **options)
        return self.projections.unite(out), loss

    def extra_repr(self) -> str:
        return f"k_blocks={self.k_blocks}, block_size={self.block_size}, index_dim={self.index_dim}"
