"""Native sparse attention: compressed, selected and window branches, mixed by gates."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from .. import validation
from ..blocks.checks import check_in_memory, check_tensor
from ..functional import attention, attention_with_lse
from ..layout import BlockLayout
from ..plan_format import TILE
from ..runtime import tracing
from ..selection import layout_of_ranges, selected_attention
from .arguments import (
    Heads,
    check_gates,
    check_input,
    positive_int,
    runs_kernels,
    takes_half_kernels,
)
from .block_choice import MAX_SCORES_PER_CHUNK, check_block_size, choose_best
from .document_blocks import DocumentBlocks, block_ranges, document_table, table_of
from .positions import rotary_table, rotate
from .projections import heads_of


class KeysAndValues(NamedTuple):
    """k (batch, kv_heads, length, head_dim) and v (batch, kv_heads, length, v_head_dim) of a branch."""

    k: Tensor
    v: Tensor


def n_compressed(length: int, size: int, stride: int) -> int:
    """Compressed blocks of a sequence: those that end within it."""
    return max(0, (length - size) // stride + 1)


@functools.lru_cache(maxsize=16)
@tracing.untraced
def compressed_layout(length: int, size: int, stride: int) -> BlockLayout:
    """Each query attends to the compressed blocks (`size` tokens, one every `stride`) that end at or before it."""

    def has_ended(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        return kv_pos * stride + size - 1 <= q_pos

    def distance(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        # equal values have equal bitmasks: first query - first token of the first key, in tokens. From
        # 127 * stride + size - 1 on all pairs attend, from size - 129 down none
        return (TILE * (row - stride * col)).clip(-TILE - 1, TILE * stride + size)

    n_cols = n_compressed(length, size, stride)
    return BlockLayout.from_predicate(has_ended, length, n_cols, block_size=TILE, dedup_key=distance)


def compressed_layout_in_documents(documents: DocumentBlocks, block_size: int, size: int, stride: int) -> BlockLayout:
    """Each query attends to the compressed blocks of its document that end at or before it; made on the device.

    block_size  block size of `documents`, a multiple of stride
    """
    # compressed block i begins at token i * stride; ended: compressed blocks that end at or before each query
    begins = documents.begins[:, 0, :, 0] * block_size
    length = begins.shape[1]
    first, ended = begins // stride, (torch.arange(length, device=begins.device) + 1 - size) // stride + 1
    return layout_of_ranges(first, torch.maximum(first, ended), n_compressed(length, size, stride))


@functools.lru_cache(maxsize=16)
@tracing.untraced
def window_layout(length: int, window: int) -> BlockLayout:
    """Each query attends to itself and the window - 1 tokens before it."""
    # imports the mask builders
    from ..masks import local

    return local(length, window=(window - 1, 0))


@torch.no_grad()
def most_important_blocks(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    k_blocks: int,
    block_size: int = 64,
    compressed_size: int = 32,
    stride: int = 16,
    always: tuple[int, int] = (1, 2),
    scale: float | None = None,
    q_start: int = 0,
    documents: DocumentBlocks | None = None,
) -> Tensor:
    """The blocks of tokens that matter most to each query, by its attention to compressed keys.

    q          (batch, heads, length, head_dim)
    k          (batch, kv_heads, n_compressed, head_dim): key i stands for the compressed_size tokens from i * stride on
    lse        (batch, heads, length), of attention to the compressed keys that end at or before the query
    k_blocks   blocks per query; fewer if there are fewer up to its own
    block_size  tokens of a block, a multiple of stride
    always      blocks that are always selected: the first ones, and the last ones up to the query's own
    q_start    position of the first query
    documents  documents of queries and keys; each query selects blocks of its own document
    returns    int64 (batch, kv_heads, length, k_blocks or fewer), -1 for unused entries

    The importance of a block is a sum of attention weights of compressed keys: each key counts once for every stride
    (group of `stride` tokens) that it shares with the block, in each head of the group. There is no gradient. Queries
    are processed in chunks, so that memory is O(chunk * n_compressed).
    """
    batch, heads, length, head_dim = q.shape
    kv_heads, n_keys = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    n_cols = -(-(q_start + length) // block_size)
    group = heads // max(1, kv_heads)
    queries, lse = (each.unflatten(1, (kv_heads, group)) for each in (q, lse))
    own, earliest = block_ranges(documents, length, block_size, q.device, q_start)
    uses_kernel = takes_half_kernels(q)
    n_scores = batch * (kv_heads if uses_kernel else heads) * n_keys
    chunk = max(block_size, MAX_SCORES_PER_CHUNK // max(1, n_scores) // block_size * block_size)
    strides = block_size // stride, compressed_size // stride
    chosen = own.new_empty(batch, kv_heads, length, min(k_blocks, n_cols))
    for first in range(0, length, chunk):
        rows = slice(first, min(first + chunk, length))
        stop, begin = q_start + rows.stop, q_start + first
        n_seen, n_seen_blocks = n_compressed(stop, compressed_size, stride), -(-stop // block_size)
        weights = _group_weights(
            queries[:, :, :, rows], k[:, :, :n_seen], lse[..., rows], begin, scale, compressed_size, stride, uses_kernel
        )
        ranges = own[..., rows, :], earliest[..., rows, :]
        choose_best(chosen, weights, *ranges, first, n_seen=n_seen_blocks, always=always, strides=strides)
    return chosen


def _group_weights(
    q: Tensor, k: Tensor, lse: Tensor, first: int, scale: float, size: int, stride: int, uses_kernel: bool
) -> Tensor:
    """Attention weights of compressed keys, summed over each group: (batch, kv_heads, queries, n_compressed).

    q  (batch, kv_heads, group, queries, head_dim), whose first query is token `first`
    """
    if uses_kernel:
        from ..kernels.triton.group_weights import group_weights

        with tracing.on_device(q.device):
            return group_weights(q, k, lse, first, scale, size, stride)
    scores = torch.einsum("bkgqd, bknd -> bkgqn", q, k)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    last = torch.arange(k.shape[2], device=k.device) * stride + (size - 1)
    position = torch.arange(first, first + q.shape[3], device=k.device)
    # at most 1, also where products of float16 are beyond its range
    weights = scores.mul_(scale).sub_(lse[..., None]).clamp_(max=0).exp_()
    return weights.masked_fill_(last > position[:, None], 0).sum(2)


@tracing.untraced
def native_sparse_attention(
    q: Tensor,
    compressed: tuple[Tensor, Tensor],
    selected: tuple[Tensor, Tensor],
    window: tuple[Tensor, Tensor],
    gates: Tensor,
    *,
    k_blocks: int = 16,
    block_size: int = 64,
    compressed_size: int = 32,
    stride: int = 16,
    window_size: int = 512,
    always: tuple[int, int] = (1, 2),
    scale: float | None = None,
) -> Tensor:
    """Causal attention of three branches, each with its own keys and values, mixed by gates.

    The compressed branch attends to compressed keys. Each stands for a block of tokens, and only queries at or after
    the block's last token attend to it. The selected branch attends to the tokens of the blocks with the largest
    weights in the compressed branch, summed over the heads that share keys. The window branch attends to the most
    recent tokens.

    q           (batch, heads, length, head_dim)
    compressed  k (batch, kv_heads, n, head_dim) and v (batch, kv_heads, n, v_head_dim), kv_heads a divisor of heads;
                n = (length - compressed_size) // stride + 1, at least 0. Key i stands for the compressed_size tokens
                from i * stride on
    selected, window  k (batch, kv_heads, length, head_dim) and v (batch, kv_heads, length, v_head_dim)
    gates       (batch, heads, length, 3): weights of the compressed, selected and window branches
    k_blocks    blocks selected for each query and KV head, including `always`; all if there are fewer. The
                choice among equal weights, as of blocks that no earlier compressed block covers, is arbitrary
    block_size  tokens of a selected block: 16, 32, 64 or a multiple of 128, and a multiple of stride
    compressed_size, stride  tokens of a compressed block, a multiple of stride; tokens from one start to the next
    window_size  tokens of the window, the query's own included
    always      blocks that are always selected: the first ones, and the last ones up to the query's own
    scale       of the scores; None is head_dim ** -0.5
    returns     (batch, heads, length, v_head_dim)
    raises      TypeError, ValueError; RuntimeError under transforms of torch.func, and in torch.export and torch.jit

    Selection, layouts and plans are made on the device of q, without synchronization, except in the first call with
    each length. The selection has no gradient. torch.compile calls this function outside of its graphs (a graph break).
    For packed documents, use the layer NativeSparseAttention, which compresses the blocks of each document separately.

    Yuan et al., "Native Sparse Attention" (NSA), arXiv:2502.11089, section 3: the defaults, and equations 5, 8 to 12.

    >>> q, k = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 128, 16)
    >>> gates = torch.rand(1, 4, 128, 3)
    >>> native_sparse_attention(q, (k[:, :, :7], k[:, :, :7]), (k, k), (k, k), gates, k_blocks=3, block_size=32).shape
    torch.Size([1, 4, 128, 16])
    """
    check_sizes(k_blocks, block_size, compressed_size, stride, window_size, always)
    check_tensor("q", q)
    named = {"compressed": compressed, "selected": selected, "window": window}
    branches = {name: _branch(name, pair, q) for name, pair in named.items()}
    scale = validation.check(
        q, *branches["selected"], None, False, scale, None, 0.0, None, None, validation.autocast_dtype(q)
    )[1]
    _check_lengths(branches, q, compressed_size, stride)
    _check_gates(gates, q)
    tracing.refuse_transforms(None, q, *compressed, *selected, *window, gates)
    tracing.refuse_export("native_sparse_attention")
    check_in_memory(q, "q")
    sizes: dict[str, Any] = {"k_blocks": k_blocks, "block_size": block_size, "compressed_size": compressed_size}
    sizes |= {"stride": stride, "always": always}
    compressed_out, selected_out = _compressed_and_selected(
        q, branches["compressed"], branches["selected"], sizes, scale
    )
    window_out = attention(q, *branches["window"], window_layout(q.shape[2], window_size), scale=scale)
    return _gated_sum(gates, compressed_out, selected_out, window_out)


def _compressed_and_selected(
    q: Tensor,
    compressed: KeysAndValues,
    selected: KeysAndValues,
    sizes: dict[str, Any],
    scale: float,
    documents: DocumentBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """The compressed and the selected branch. All tensors have the documents of `documents`.

    sizes  k_blocks, block_size, compressed_size, stride and always
    """
    block_size, compressed_size, stride = (sizes[name] for name in ("block_size", "compressed_size", "stride"))
    layout = None
    # keys that no query sees yet have no layout
    if compressed.k.shape[2] and documents is None:
        layout = compressed_layout(q.shape[2], compressed_size, stride)
    elif compressed.k.shape[2] and documents is not None:
        layout = compressed_layout_in_documents(documents, block_size, compressed_size, stride)
    compressed_out, lse = attention_with_lse(q, *compressed, layout, scale=scale)
    detached = q.detach(), compressed.k.detach().to(q.dtype), lse.detach()
    indices = most_important_blocks(*detached, **sizes, scale=scale, documents=documents)
    return compressed_out, selected_attention(q, *selected, indices, block_size=block_size, scale=scale)


def _gated_sum(gates: Tensor, compressed_out: Tensor, selected_out: Tensor, window_out: Tensor) -> Tensor:
    """The sum of the branches, weighted by gates (batch, heads, length, 3)."""
    if runs_kernels(selected_out):
        from ..kernels.triton.gated_sum import GatedSum

        with tracing.on_device(selected_out.device):
            out: Tensor = GatedSum.apply(gates, compressed_out, selected_out, window_out)
        return out
    gate = gates.to(selected_out.dtype)[..., None].unbind(3)
    return gate[0] * compressed_out + gate[1] * selected_out + gate[2] * window_out


def check_sizes(
    k_blocks: int, block_size: int, compressed_size: int, stride: int, window_size: int, always: tuple[int, int]
) -> None:
    """Refuse sizes that do not fit each other."""
    for name, number in (
        *(("k_blocks", k_blocks), ("block_size", block_size), ("compressed_size", compressed_size)),
        *(("stride", stride), ("window_size", window_size)),
    ):
        positive_int(name, number)
    wanted = "always must be two numbers of blocks, 0 or more first and 1 or more last ones"
    if not isinstance(always, (tuple, list)) or any(type(number) is not int for number in always):
        raise TypeError(f"{wanted}, got {always!r}")
    if len(always) != 2 or always[0] < 0 or always[1] < 1:
        raise ValueError(f"{wanted}, got {always!r}")
    check_block_size(block_size)
    for name, size in (("block_size", block_size), ("compressed_size", compressed_size)):
        if size % stride:
            raise ValueError(f"{name} must be a multiple of stride={stride}, got {size}")
    if sum(always) > k_blocks:
        raise ValueError(f"k_blocks must be at least the number of blocks in always={always}, got {k_blocks}")


def _branch(name: str, pair: tuple[Tensor, Tensor], q: Tensor) -> KeysAndValues:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair of keys and values, got {type(pair).__name__}")
    for letter, tensor in zip("kv", pair, strict=True):
        check_tensor(f"{name} {letter}", tensor)
        if tensor.dim() != 4 or tensor.device != q.device:
            raise ValueError(
                f"{name} {letter} must have shape (batch, kv_heads, length, head_dim) on q's device {q.device}, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    return KeysAndValues(*pair)


def _check_lengths(branches: dict[str, KeysAndValues], q: Tensor, compressed_size: int, stride: int) -> None:
    length = q.shape[2]
    k, v = branches["selected"]
    lengths = {"compressed": n_compressed(length, compressed_size, stride), "selected": length, "window": length}
    for name, pair in branches.items():
        for letter, tensor, like in zip("kv", pair, (k, v), strict=True):
            wanted = (*like.shape[:2], lengths[name], like.shape[3])
            if tensor.shape != wanted:
                raise ValueError(
                    f"{name} {letter} must have shape {wanted} for {length} queries, got {tuple(tensor.shape)}"
                )


def _check_gates(gates: Tensor, q: Tensor) -> None:
    check_gates("gates", gates, q)
    if gates.shape != (*q.shape[:3], 3):
        raise ValueError(
            f"gates must have shape (batch, heads, length, 3) = {(*q.shape[:3], 3)}, got {tuple(gates.shape)}"
        )


class BlockCompression(nn.Module):
    """Compresses each block of tokens to one: a two-layer MLP of the block plus learned positions within it.

    head_dim    features of a token and of the result
    size        tokens of a block
    stride      tokens from one block to the next
    hidden_dim  features between the layers, with GELU
    """

    def __init__(self, head_dim: int, *, size: int, stride: int, hidden_dim: int) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.positions = nn.Parameter(torch.empty(size, head_dim))
        self.layers = nn.Sequential(nn.Linear(size * head_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, head_dim))
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, heads, length, head_dim) to (batch, heads, n_compressed, head_dim)."""
        if x.shape[2] < self.size:
            # none, with gradients of zero
            blocks = x.new_empty(*x.shape[:2], 0, *self.positions.shape)
        else:
            # (batch, heads, n_compressed, size, head_dim)
            blocks = x.unfold(2, self.size, self.stride).mT
        return self.layers((blocks + self.positions).flatten(3))

    def extra_repr(self) -> str:
        return f"size={self.size}, stride={self.stride}"


class NativeSparseAttention(nn.Module):
    """Causal self-attention of three branches: `native_sparse_attention` between projections without bias.

    embed_dim   features per token, a multiple of num_heads unless head_dim is given
    num_heads   query heads
    kv_heads    key and value heads of each branch, a divisor of num_heads; query heads that share keys also share the
                selection. None means num_heads, but the selected branch is fast only if 5 to 32 query heads share one
    k_blocks, block_size, compressed_size, stride, window_size, always  as `native_sparse_attention`
    rope        base of rotary positions, such as 10000.0; None adds no positions. Compressed keys are rotated after the
                compression, to the position of the first token of their block
    head_dim    features per head; None means embed_dim // num_heads
    raises      TypeError, ValueError

    Each branch has its own keys and values. `compress_k` and `compress_v`, shared by all heads, map a block of tokens
    to one compressed key and value: see BlockCompression, with 2 * head_dim hidden features. The gates are the sigmoid
    of a linear function of the input, one for each head and branch. Linear layers are initialized as nn.Linear is, the
    positions within a block from N(0, 0.02^2).

    A sequence may have any length. Tokens after a token never change its output, unless they are NaN or infinite
    (docs/semantics.md), so padding at the end needs no mask.

    Yuan et al., "Native Sparse Attention" (NSA), arXiv:2502.11089, section 3.

    >>> NativeSparseAttention(64, 4, kv_heads=1, rope=10000.0)(torch.zeros(1, 200, 64)).shape
    torch.Size([1, 200, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        k_blocks: int = 16,
        block_size: int = 64,
        compressed_size: int = 32,
        stride: int = 16,
        window_size: int = 512,
        always: tuple[int, int] = (1, 2),
        rope: float | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        check_sizes(k_blocks, block_size, compressed_size, stride, window_size, always)
        self.sizes: dict[str, Any] = {
            "k_blocks": k_blocks,
            "block_size": block_size,
            "compressed_size": compressed_size,
            "stride": stride,
            "window_size": window_size,
            "always": always,
        }
        self.heads = Heads.of(embed_dim, num_heads, kv_heads, head_dim, rope)
        features = self.heads.head_dim
        sizes = {"size": compressed_size, "stride": stride, "hidden_dim": 2 * features}
        self.q = nn.Linear(embed_dim, num_heads * features, bias=False)
        # keys and values of the compressed, selected and window branches
        self.kv = nn.Linear(embed_dim, 6 * self.heads.kv_heads * features, bias=False)
        self.compress_k, self.compress_v = (BlockCompression(features, **sizes) for _ in range(2))
        self.gates = nn.Linear(embed_dim, 3 * num_heads)
        self.out = nn.Linear(num_heads * features, embed_dim, bias=False)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        cu_seqlens  integers (documents + 1,) or (batch, documents + 1) on the device of x: where packed documents begin
                    and end. Each document has its own blocks and positions, and gives the same result as alone.
                    Tokens after the last document attend to nothing. Default: one document
        """
        check_input(x, self.heads.embed_dim)
        d, rope, block_size = self.heads.head_dim, self.heads.rope, self.sizes["block_size"]
        q = rearrange(self.q(x), "batch length (heads d) -> batch heads length d", d=d)
        compressed_k, compressed_v, k, v, window_k, window_v = heads_of(self.kv(x), (self.heads.kv_heads,) * 6, d)
        documents = None
        if cu_seqlens is not None:
            documents = DocumentBlocks.of(cu_seqlens, q, k, block_size)
            compressed_k, compressed_v = documents.apart(compressed_k), documents.apart(compressed_v)
        compressed_k, compressed_v = self.compress_k(compressed_k), self.compress_v(compressed_v)
        if rope is not None:
            # compressed keys are at the positions of the first tokens of their blocks
            starts = torch.arange(compressed_k.shape[2], device=x.device) * self.sizes["stride"]
            if documents is None:
                tables = [rotary_table(at, rope, d) for at in (torch.arange(x.shape[1], device=x.device), starts)]
            else:
                begins = documents.begins[:, 0, starts, 0] * block_size
                tables = [document_table(cu_seqlens, x, rope, d), table_of(starts - begins, rope, d)]
            q, k, window_k = (rotate(tensor, tables[0]) for tensor in (q, k, window_k))
            compressed_k = rotate(compressed_k, tables[1])
        gates = rearrange(self.gates(x).sigmoid(), "batch length (heads branch) -> batch heads length branch", branch=3)
        compressed, window = KeysAndValues(compressed_k, compressed_v), KeysAndValues(window_k, window_v)
        if documents is None or cu_seqlens is None:
            out = native_sparse_attention(q, compressed, (k, v), window, gates, **self.sizes)
        else:
            out = self._in_documents(q, compressed, KeysAndValues(k, v), window, gates, documents, cu_seqlens)
        return self.out(rearrange(out, "batch heads length d -> batch length (heads d)"))

    def _in_documents(
        self,
        q: Tensor,
        compressed: KeysAndValues,
        selected: KeysAndValues,
        window: KeysAndValues,
        gates: Tensor,
        documents: DocumentBlocks,
        cu_seqlens: Tensor,
    ) -> Tensor:
        """`native_sparse_attention` in packed documents, whose keys and values are compressed separately."""
        # imports the mask builders
        from ..masks import documents as documents_layout

        sizes, scale = dict(self.sizes), self.heads.head_dim**-0.5
        left = sizes.pop("window_size") - 1
        apart = KeysAndValues(*(documents.apart(tensor) for tensor in selected))
        branches = _compressed_and_selected(documents.apart(q), compressed, apart, sizes, scale, documents)
        compressed_out, selected_out = (documents.together(branch) for branch in branches)
        # tokens after the last document
        compressed_out = compressed_out.masked_fill(documents.together(documents.own) < 0, 0)
        layout = documents_layout(cu_seqlens, causal=True, window=(left, 0), length=q.shape[2])
        window_out = attention(q, *window, layout, scale=scale)
        return _gated_sum(gates, compressed_out, selected_out, window_out)

    def extra_repr(self) -> str:
        return f"{self.heads}, {', '.join(f'{name}={size}' for name, size in self.sizes.items())}"
