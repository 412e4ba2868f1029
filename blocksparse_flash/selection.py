"""selected_attention: attention to the key blocks that each query token, or block of tokens, selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import dispatch, ops, reference, validation
from .blocks import checks
from .blocks.block_list import Frame
from .functional import attention_of_heads, attention_with_lse
from .layout import BlockLayout
from .packed import checked_boundaries
from .plan import block_selection
from .plan_format import TILE
from .runtime import tracing

# allowed values of query_block_size
QUERY_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def is_key_block_size(size: int) -> bool:
    """Whether blocks of this many keys can be selected."""
    return size in (16, 32, 64) or (size > 0 and size % TILE == 0)


@tracing.untraced
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block_size: int = 1,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of each query token to the blocks of keys that it selects, differentiable.

    q            (batch, heads, q_len, head_dim)
    k, v         (batch, kv_heads, kv_len, head_dim | v_head_dim), kv_heads a divisor of heads
    indices      integers (batch | 1, heads | kv_heads | 1, ceil(q_len / query_block_size), n_selected): the blocks of
                 each query, in any order. With kv_heads selections, query heads that share a KV head share one; a size
                 of 1 is shared by all. -1 marks an unused entry; repeated blocks are ignored. Other numbers are refused
                 on the CPU and ignored on a GPU
    block_size   keys per block: 16, 32, 64 or a multiple of 128; block i begins at key i * block_size
    query_block_size  consecutive tokens that select together: 1, 2, 4, ..., 128
    causal       True drops the keys with kv_pos > q_pos + (kv_len - q_len), also within a selected block
    cu_seqlens   integers (documents + 1,) or (batch, documents + 1) on q's device: where packed documents begin and
                 end, in queries and keys alike, as in `masks.documents`. A query attends only to the selected keys of
                 its own document. Block i still begins at key i * block_size of the packed sequence, and may have keys
                 of several documents. Tokens after the last document attend to nothing. Default: one document
    scale, deterministic, backend  as `attention`
    returns      (batch, heads, q_len, v_head_dim); 0 for a query that selects no key
    raises       TypeError, ValueError; RuntimeError in a graph of torch.export or torch.jit, and under torch.func
                 transforms, which only backend="reference" supports

    Yuan et al., "Native Sparse Attention" (NSA), arXiv:2502.11089, section 3.3 (the selected branch).

    The layout and its plan are made on the device of q, without synchronization, also within a CUDA graph. The
    selection has no gradient. torch.compile calls this function outside of its graphs (a graph break); graphs of
    make_fx have the selection as an input.

    Query heads that share a selection are packed, and groups are padded to a power of two. Boundaries on a GPU are not
    copied to the host: invalid ones trigger a device-side assert.

    In tiles: the 64 rows of a tile (128 for head dimensions above 128, and for large blocks) hold all heads of 64 /
    group tokens, and the kernel loads each block that any of these tokens selects. Time grows with the number of
    blocks that the tokens of a tile select, counted once each. A call is therefore fast if groups are large, or if
    neighboring tokens select the same blocks, as query_block_size makes them. Extra memory: a copy of q, 16 bytes
    for each tile that could be listed, and on a GPU the bitmasks of tiles. If only 1 or 2 rows (query_block_size x
    padded group) share a selection, bitmasks take one bit per pair and query head. For 4 rows they take up to 200
    MB, and less for more rows, if block_size is at least 64 and head_dim at most 128; otherwise up to one bit per
    pair and query head. With packed documents, each tile row that has tokens of several documents takes one more
    bit for each of its queries and each key; there are at most as many such rows as documents. More than 8 GB of
    bitmasks raise a ValueError.

    By key block, which is faster for many calls on backend "hopper": the kernels multiply each key block by the rows
    that select it, and merge the partial results. Time grows with the number of selected blocks, whatever neighbors
    select, and results are bitwise identical in every run, gradients included. A call does so if

    - 8, 16 or 32 rows (query_block_size x padded group) share a selection,
    - block_size is 64 or a multiple of 128, and both head dimensions are at most 128,
    - each batch and KV head has a selection of its own, or each batch and query head,
    - a query selects at most a quarter of the keys: kv_len >= 4 * n_selected * block_size, and
    - the call is large: indices.numel() * rows * max(1, block_size // 128) is at least 2^22.

    Extra memory: about 50 bytes for each entry of `indices` (and each 128 keys of its block) while the plan is made; at
    most 1 GB of partial results; in the backward up to 0.3 GB, and two float32 copies of k and v (of each query head,
    if heads do not share a selection). q is copied, unless 8, 16 or 32 query heads share a selection and
    query_block_size is 1, or none do.

    There are no kv_lengths, no dropout and no score mods.

    >>> q, k = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
    >>> indices = torch.randint(4, (1, 2, 64, 2))  # 2 blocks of 16 keys, for each token and KV head
    >>> selected_attention(q, k, k, indices, block_size=16).shape
    torch.Size([1, 4, 64, 16])
    """
    out, _ = selected_attention_with_lse(
        q,
        k,
        v,
        indices,
        block_size=block_size,
        query_block_size=query_block_size,
        causal=causal,
        cu_seqlens=cu_seqlens,
        scale=scale,
        deterministic=deterministic,
        backend=backend,
    )
    return out


@tracing.untraced
def selected_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    query_block_size: int = 1,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`selected_attention`, and the log-sum-exp of each query's scores, which is differentiable too.

    q, k, v, indices, block_size, query_block_size, causal, cu_seqlens  as `selected_attention`
    scale, deterministic, backend  as `attention`
    returns  out (batch, heads, q_len, v_head_dim) and lse (batch, heads, q_len), natural logarithm; -inf for a query
             that selects no key
    raises   as `selected_attention`
    """
    # all that `attention` would refuse below, before anything is computed
    dtype, checked_scale = validation.check(
        q, k, v, None, causal, scale, None, 0.0, None, deterministic, validation.autocast_dtype(q)
    )
    _check_sides(block_size, query_block_size)
    checks.check_tensor("indices", indices, "; torch.tensor(indices) makes one")
    # under a FakeTensorMode, real indices become constants of the graph
    (indices,) = tracing.as_graph_constants([indices], q)
    _check_indices(indices, q, k, query_block_size)
    bounds = None if cu_seqlens is None else checked_boundaries(cu_seqlens, q, k)
    if backend != "auto":
        # refuses those that do not exist, or cannot run the call
        dispatch.decide(backend, q, k, v, dtype, None, "")
    if backend != "reference":
        tracing.refuse_transforms(backend, q, k, v, indices, bounds)
    tracing.refuse_export("selected_attention")
    # symbolic sizes become constants: plans have fixed sizes
    heads, q_len, kv_heads, kv_len = map(int, (*q.shape[1:3], *k.shape[1:3]))
    # a block longer than the keys is cut to them, in whole tiles
    block_size = min(block_size, max(TILE, -(-kv_len // TILE) * TILE))
    # fake tensors may be used outside of their mode
    with tracing.mode_of(q):
        if 0 in q.shape[:2]:
            # a layout has at least one batch and one head: without queries, one that selects nothing
            indices = indices.new_zeros(1, 1, indices.shape[2], 0)
        # query heads that select together
        group = heads // max(1, kv_heads) if indices.shape[1] in (1, kv_heads) else 1
        rows_per_token = 1 << (group - 1).bit_length()
        if bounds is not None and len(bounds) > indices.shape[0]:
            indices = indices.expand(len(bounds), -1, -1, -1)
        frame = Frame(1, 1, q_len * rows_per_token, kv_len, (rows_per_token * query_block_size, block_size))
        frame = block_selection.frame_of(indices, "indices", frame, kind="integers")
        block_selection.check_cols(indices, frame)
        if backend == "reference" or not q.numel() or not k.numel():
            mask = _mask(indices, bounds, q_len, kv_len, block_size, query_block_size)
            mask = mask.repeat_interleave(heads // mask.shape[1], 1)
            with tracing.without_autocast(q.device):
                q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
                return reference.attention(q, k, v, mask, causal=causal, scale=checked_scale)
        layout = _layout(indices, bounds, frame, rows_per_token)
        # the kernels read the heads of a token in place, if there is a plan by key block
        if group == rows_per_token and query_block_size == 1:
            with tracing.without_autocast(q.device):
                q_cast, k_cast, v_cast = (tensor.to(dtype) for tensor in (q, k, v))
                found = attention_of_heads(
                    q_cast,
                    k_cast,
                    v_cast,
                    layout,
                    causal=causal,
                    scale=checked_scale,
                    deterministic=deterministic,
                    backend=backend,
                )
            if found is not None:
                return found
        is_direct = tracing.can_launch_directly(q, k, v)
        grouped_q = _group_heads(q, group, rows_per_token, is_direct=is_direct)
        out, lse = attention_with_lse(
            grouped_q, k, v, layout, causal=causal, scale=scale, deterministic=deterministic, backend=backend
        )
        out = _ungroup_heads(out, group, rows_per_token, is_direct=is_direct)
        return out, _ungroup_heads_plain(lse[..., None], group, rows_per_token)[..., 0]


def _layout(indices: Tensor, bounds: Tensor | None, frame: Frame, rows_per_token: int) -> BlockLayout:
    """The layout of the rows of all tokens. bounds: of documents, see `checked_boundaries`."""
    with tracing.outside_transforms(indices):
        selection = block_selection.by_indices(indices, frame)._replace(
            rows_per_token=rows_per_token, may_have_selected_plan=True
        )
        if bounds is not None:
            documents = block_selection.document_of_tokens(bounds, frame.q_len // rows_per_token)
            selection = selection._replace(documents=documents, n_documents=bounds.shape[1] - 1)
        return BlockLayout._from_selection(selection, frame)


def layout_of_ranges(first: Tensor, stop: Tensor, kv_len: int) -> BlockLayout:
    """The layout in which each query attends to keys first .. stop - 1, made on the device without synchronization.

    first, stop  integers (batch, q_len) that never decrease, between 0 and kv_len
    """
    batch, q_len = first.shape
    frame = Frame(batch, 1, q_len, kv_len, (TILE, TILE))
    cols = torch.arange(frame.n_cols, device=first.device).expand(batch, 1, frame.n_rows, -1)
    # reuses documents: one per query, whose keys are first .. stop - 1, so that tiles get bitmasks of their own
    numbers = torch.arange(1, q_len + 1, device=first.device).expand_as(first)
    with tracing.outside_transforms(first):
        ranges = torch.stack([numbers, first, stop], 1).to(torch.int32)
        selection = block_selection.by_indices(cols, frame)._replace(documents=ranges, n_documents=q_len)
        return BlockLayout._from_selection(selection, frame)


class _GroupHeads(torch.autograd.Function):
    """`_group_heads_plain`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: int, rows_per_token: int) -> Tensor:
        ctx.sizes = group, rows_per_token
        # as int64: 8-byte loads are three times as fast
        return _group_heads_plain(tensor.view(torch.int64), group, rows_per_token).view(tensor.dtype)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        ops.refuse_forward_mode()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ops.refuse_mapped(grad)
        is_direct = tracing.can_launch_directly(grad, grad, grad)
        return _ungroup_heads(grad, *ctx.sizes, is_direct=is_direct), None, None


class _UngroupHeads(torch.autograd.Function):
    """`_ungroup_heads_plain`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: int, rows_per_token: int) -> Tensor:
        ctx.sizes = group, rows_per_token
        # as int64, likewise
        return _ungroup_heads_plain(tensor.view(torch.int64), group, rows_per_token).view(tensor.dtype)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        ops.refuse_forward_mode()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ops.refuse_mapped(grad)
        is_direct = tracing.can_launch_directly(grad, grad, grad)
        return _group_heads(grad, *ctx.sizes, is_direct=is_direct), None, None


def _group_heads(q: Tensor, group: int, rows_per_token: int, *, is_direct: bool) -> Tensor:
    """`_group_heads_plain`, faster where possible. is_direct: torch neither traces nor transforms the call."""
    if rows_per_token > 1 and is_direct and _has_words(q):
        made: Tensor = _GroupHeads.apply(q, group, rows_per_token)
        return made
    return _group_heads_plain(q, group, rows_per_token)


def _ungroup_heads(rows: Tensor, group: int, rows_per_token: int, *, is_direct: bool) -> Tensor:
    """`_ungroup_heads_plain`, likewise."""
    if rows_per_token > 1 and is_direct and _has_words(rows):
        made: Tensor = _UngroupHeads.apply(rows, group, rows_per_token)
        return made
    return _ungroup_heads_plain(rows, group, rows_per_token)


def _has_words(tensor: Tensor) -> bool:
    """Whether torch can view a tensor with memory as int64, and a GPU can load it so."""
    per_word = 8 // tensor.element_size()
    numbers = tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor.stride(-1) == 1 and tensor.data_ptr() % 8 == 0 and all(number % per_word == 0 for number in numbers)


def _group_heads_plain(q: Tensor, group: int, rows_per_token: int) -> Tensor:
    """(batch, heads, q_len, d) to (batch, heads / group, q_len * rows_per_token, d), the heads of a token together."""
    if rows_per_token == 1:
        return q
    tokens = q.unflatten(1, (-1, group)).transpose(2, 3)
    return pad(tokens, (0, 0, 0, rows_per_token - group)).flatten(2, 3)


def _ungroup_heads_plain(rows: Tensor, group: int, rows_per_token: int) -> Tensor:
    """The inverse of `_group_heads_plain`."""
    if rows_per_token == 1:
        return rows
    return rows.unflatten(2, (-1, rows_per_token))[:, :, :, :group].transpose(2, 3).flatten(1, 2)


def _mask(
    indices: Tensor, bounds: Tensor | None, q_len: int, kv_len: int, block_size: int, query_block_size: int
) -> Tensor:
    """bool (batch | 1, heads, q_len, kv_len) of selected blocks, within documents."""
    n_cols = -(-kv_len // block_size)
    cols = block_selection.clamp_unknown_cols(indices, n_cols)
    blocks = torch.zeros(*cols.shape[:3], n_cols + 1, dtype=torch.bool, device=cols.device).scatter(3, cols, True)
    mask = blocks[..., :-1].repeat_interleave(query_block_size, 2).repeat_interleave(block_size, 3)
    mask = mask[:, :, :q_len, :kv_len]
    if bounds is None:
        return mask
    _, first, stop = block_selection.document_of_tokens(bounds, q_len)[:, :, None, :, None].unbind(1)
    kv_pos = torch.arange(kv_len, device=mask.device)
    return mask & (kv_pos >= first) & (kv_pos < stop)


def _check_sides(block_size: object, query_block_size: object) -> None:
    keys = checks.integer(block_size, "block_size")
    if not is_key_block_size(keys):
        raise ValueError(
            f"block_size must be 16, 32, 64 or a multiple of {TILE} keys, got {keys}; single keys cannot be selected"
        )
    if checks.integer(query_block_size, "query_block_size") not in QUERY_BLOCK_SIZES:
        raise ValueError(f"query_block_size must be a power of two from 1 to 128 tokens, got {query_block_size}")


def _check_indices(indices: Tensor, q: Tensor, k: Tensor, query_block_size: int) -> None:
    tracing.check_dense("indices", indices, q)
    (batch, heads, q_len, _), kv_heads = q.shape, k.shape[1]
    n_rows = -(-q_len // query_block_size)
    shape = tuple(indices.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, kv_heads, heads) or shape[2] != n_rows:
        raise ValueError(
            f"indices must have shape (batch = {batch} or 1, heads = {heads}, kv_heads = {kv_heads} or 1, {n_rows}, "
            f"n_selected) for {q_len} queries in blocks of query_block_size = {query_block_size}, got {shape}"
        )
    validation.check_device("indices", indices, q)
