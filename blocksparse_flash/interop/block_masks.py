"""Masks over whole blocks: MIT Block-Sparse-Attention, DeepSpeed and xFormers.

All three are arrays with queries down and keys across, nonzero where a block attends:
    MIT Block-Sparse-Attention  base_blockmask bool (batch, sparse heads, n_rows, n_cols), blocks of 128, and a type per
                                head
    DeepSpeed                   SparsityConfig.make_layout: int64 (heads, n, n), on the CPU
    xFormers                    layout of BlockSparseAttention: int64 (heads, n, n), with causal as a flag
None has partial blocks; a causal flag masks within blocks on the diagonal.
xFormers' patterns, bool (N, N), are read by `BlockLayout.from_dense`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..blocks import checks, set_operations
from ..blocks.block_list import FULL, Array, Frame, Size
from ..layout import BlockLayout
from .block_arrays import axes_of_call, blocks_of, check_layout, check_zeros_and_ones, host

# the only block size of Block-Sparse-Attention
_MIT_BLOCK = 128
_DENSE, _STREAMING, _SPARSE = 0, -1, 1


def _block_mask_of(layout: BlockLayout, block_size: Size, peer: str, *, causal: bool) -> Array:
    """bool (batch | 1, heads | 1, n_rows, n_cols): the stored blocks of this size; refuses partial blocks.

    peer    name of the library, for the message
    causal  True: the library masks above the diagonal, so stored blocks must be full below it
    """
    check_layout(layout)
    found, frame = blocks_of(layout.with_block_size(block_size))
    mask = np.zeros((frame.batch, frame.heads, frame.n_rows, frame.n_cols), np.bool_)
    mask.reshape(-1)[found.keys] = True
    wrong = found.keys[found.ids != FULL]
    if causal:
        expected, _ = blocks_of(BlockLayout.from_block_mask(mask, **frame.sizes)._causal())
        wrong = set_operations.combine(expected, found, "^", frame).keys
    if len(wrong):
        batch_head, row, col = frame.positions(wrong[0])
        batch, head = divmod(int(batch_head), frame.heads)
        raise ValueError(
            f"layout cannot be given to {peer}, which takes whole {block_size[0]} x {block_size[1]} blocks"
            f"{' cut by the causal diagonal alone' if causal else ''}: block (row {row}, col {col}) of batch {batch}, "
            f"head {head} attends in part. Build the layout from whole blocks of that size, or use attention() of this "
            "library, which is exact"
        )
    return mask


# -------------------------------------------------------------------------------------------- Block-Sparse-Attention


class BlockSparseAttentionMask(NamedTuple):
    """Arguments of block_sparse_attn_func: base_blockmask bool (batch, heads, n_rows, n_cols), head_mask_type int32."""

    base_blockmask: torch.Tensor
    head_mask_type: torch.Tensor


def to_block_sparse_attention(
    layout: BlockLayout, *, batch: int | None = None, heads: int | None = None, causal: bool = False
) -> BlockSparseAttentionMask:
    """The masks of MIT's Block-Sparse-Attention, with every head of type 1 (block-sparse), on the layout's device.

    batch    batch size of the call, which does not broadcast; None: that of the layout
    heads    heads of the call, which do not broadcast; None: those of the layout
    causal   is_causal of the call; True: the layout must be whole blocks cut by the diagonal
    returns  BlockSparseAttentionMask(base_blockmask, head_mask_type)
    raises   ValueError naming the first partial block of 128 x 128 tokens, or a size that does not match the layout
    """
    causal = checks.boolean(causal, "causal")
    mask = _block_mask_of(layout, (_MIT_BLOCK, _MIT_BLOCK), "Block-Sparse-Attention", causal=causal)
    shape = axes_of_call(layout, batch, heads)
    base = np.array(np.broadcast_to(mask, (*shape, *mask.shape[2:])), order="C")
    types = torch.full((shape[1],), _SPARSE, dtype=torch.int32, device=layout.device)
    return BlockSparseAttentionMask(torch.from_numpy(base).to(layout.device), types)


def from_block_sparse_attention(
    base_blockmask: torch.Tensor | None,
    head_mask_type: torch.Tensor | list[int],
    q_len: int,
    kv_len: int,
    *,
    streaming_info: torch.Tensor | list[int] | None = None,
    causal: bool = False,
    exact_streaming: bool = False,
) -> BlockLayout:
    """The layout of one call of MIT's Block-Sparse-Attention, exact, on the host, in blocks of 128.

    A head of type 0 is dense. A head of type 1 uses the next mask of base_blockmask: the second such head uses
    base_blockmask[:, 1]. A head of type -1 attends to `sink` blocks at the start and to `local` blocks up to the
    diagonal of the row if causal, or to the last `local` blocks of all keys if not. With exact_streaming, sink and
    local count tokens: query i attends to key j if j < sink or i + kv_len - q_len - j < local.

    base_blockmask   bool (batch, heads of type 1, ceil(q_len / 128), ceil(kv_len / 128)); None if no head is of type 1
    head_mask_type   int (heads,): 0, 1 or -1
    q_len, kv_len    tokens of every sequence; convert sequences of different lengths (cu_seqlens) one at a time
    streaming_info   int (2 * heads,): sink, local of each head; required if a head is of type -1
    causal           is_causal of the call, aligned bottom-right
    exact_streaming  True counts sink and local in tokens; requires causal=True
    returns          BlockLayout of shape (batch, heads, q_len, kv_len)
    raises           ValueError for wrong types, shapes or missing masks
    """
    frame = checks.frame(q_len, kv_len, _MIT_BLOCK)
    causal, exact_streaming = checks.boolean(causal, "causal"), checks.boolean(exact_streaming, "exact_streaming")
    types = checks.integers(head_mask_type, "head_mask_type")
    strange = ~np.isin(types, (_DENSE, _STREAMING, _SPARSE))
    if strange.any() or not len(types):
        raise ValueError(
            "head_mask_type must be 0 (dense), 1 (block-sparse) or -1 (streaming) for each head, "
            f"got {types.tolist()}: block-sparse heads take the masks of base_blockmask in turn"
        )
    if exact_streaming and not causal:
        raise ValueError("exact_streaming must come with causal=True, as Block-Sparse-Attention demands")
    sparse = _read_base(base_blockmask, int((types == _SPARSE).sum()), frame)
    info = _read_streaming(streaming_info, types)

    mask = np.zeros((sparse.shape[0], len(types), frame.n_rows, frame.n_cols), np.bool_)
    mask[:, types == _DENSE] = True
    mask[:, types == _SPARSE] = sparse
    for head in np.flatnonzero(types == _STREAMING):
        # a superset in blocks, from which tokens are cut below; `local` tokens reach into up to two more blocks
        sink, local = (-(-info[head] // _MIT_BLOCK) + [0, 2]) if exact_streaming else info[head]
        mask[:, head] = _streaming(int(sink), int(local), frame, causal)
    layout = BlockLayout.from_block_mask(mask, q_len, kv_len, block_size=_MIT_BLOCK)
    if causal:
        layout = layout._causal()
    if not (exact_streaming and (types == _STREAMING).any()):
        return layout
    sinks, locals_ = (torch.from_numpy(np.where(types == _STREAMING, info[:, i], kv_len + q_len)) for i in range(2))

    def attends(_batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (kv_pos < sinks[head]) | (q_pos + kv_len - q_len - kv_pos < locals_[head])

    batch, heads = layout.shape[:2]
    return BlockLayout.from_predicate(attends, **frame.sizes, within=layout, batch=batch, heads=heads)


def _read_base(base: torch.Tensor | None, n_sparse: int, frame: Frame) -> Array:
    """bool (batch, block-sparse heads, n_rows, n_cols)."""
    shape = n_sparse, frame.n_rows, frame.n_cols
    if base is None:
        if n_sparse:
            raise ValueError(f"base_blockmask must be given: {n_sparse} heads are of type 1")
        return np.zeros((1, *shape), np.bool_)
    array = host(base, "base_blockmask")
    if array.ndim != 4 or array.shape[1:] != shape or not len(array):
        raise ValueError(
            f"base_blockmask must have shape (batch, {n_sparse} heads of type 1, {frame.n_rows}, {frame.n_cols}), "
            f"got {array.shape}"
        )
    check_zeros_and_ones(array, "base_blockmask")
    return array != 0


def _read_streaming(info: torch.Tensor | list[int] | None, types: Array) -> Array:
    """int64 (heads, 2): sink and local of each head."""
    if info is None:
        if (types == _STREAMING).any():
            raise ValueError("streaming_info must be given: sink and local of each head, since some heads have type -1")
        return np.zeros((len(types), 2), np.int64)
    pairs = checks.integers(info, "streaming_info")
    if len(pairs) != 2 * len(types) or (pairs < 0).any():
        raise ValueError(
            f"streaming_info must hold sink and local, not negative, for each of {len(types)} heads, "
            f"got {pairs.tolist()}"
        )
    return pairs.reshape(-1, 2)


def _streaming(sink: int, local: int, frame: Frame, causal: bool) -> Array:
    """bool (n_rows, n_cols): the blocks of a streaming head, by the rule of Block-Sparse-Attention."""
    row, col = np.arange(frame.n_rows)[:, None], np.arange(frame.n_cols)
    ends = np.full_like(row, frame.n_cols)
    if causal:
        # key blocks before the first query, and query rows before the first key
        ahead = frame.kv_len - frame.q_len
        ends = -(-max(ahead, 0) // _MIT_BLOCK) + 1 + row - max(-ahead, 0) // _MIT_BLOCK
    return (col < sink) | ((col >= ends - local) & (col < ends))


# ------------------------------------------------------------------------------------------- DeepSpeed and xFormers


def from_deepspeed(sparsity_layout: torch.Tensor, *, block: int) -> BlockLayout:
    """The layout of DeepSpeed's SparsityConfig.make_layout(seq_len), exact.

    With attention="unidirectional", DeepSpeed drops the blocks above the diagonal but keeps blocks on the diagonal
    whole unless it also gets an attn_mask. `layout & masks.causal(...)` is exact to the token.

    sparsity_layout  (heads, n, n) of 0 and 1
    block            tokens per side of a block, config.block
    returns          BlockLayout of shape (1, heads, n * block, n * block), full blocks only
    raises           ValueError for a wrong shape or values other than 0 and 1
    """
    return _from_square(sparsity_layout, block, "block")


def to_deepspeed(layout: BlockLayout, *, block: int | None = None) -> torch.Tensor:
    """DeepSpeed's layout tensor of a layout, on the CPU, where DeepSpeed expects it.

    block    tokens per side of a block; None: the block size of the layout, which must be square
    returns  int64 (heads | 1, n, n)
    raises   ValueError if a block is partial, or if the layout is rectangular, ragged or has a batch axis
    """
    return _to_square(layout, block, "block", "DeepSpeed", causal=False)


def from_xformers(sparsity_layout: torch.Tensor, *, block_size: int, causal: bool = False) -> BlockLayout:
    """The layout of xFormers' BlockSparseAttention(layout, block_size, causal=causal).

    sparsity_layout  (heads, n, n) of 0 and 1, as returned by pattern_to_layout
    block_size       tokens per side of a block
    causal           True also masks pairs above the diagonal within blocks
    returns          BlockLayout of shape (1, heads, n * block_size, n * block_size)
    raises           ValueError for a wrong shape or values other than 0 and 1
    """
    layout = _from_square(sparsity_layout, block_size, "block_size")
    return layout._causal() if checks.boolean(causal, "causal") else layout


def to_xformers(layout: BlockLayout, *, block_size: int | None = None, causal: bool = False) -> torch.Tensor:
    """xFormers' layout tensor of a layout, on its device.

    block_size  tokens per side of a block; None: the block size of the layout, which must be square
    causal      causal of BlockSparseAttention; True: the layout must be whole blocks cut by the diagonal
    returns     int64 (heads | 1, n, n)
    raises      ValueError as to_deepspeed
    """
    causal = checks.boolean(causal, "causal")
    return _to_square(layout, block_size, "block_size", "xFormers", causal=causal).to(layout.device)


def _from_square(tensor: object, block: int, name: str) -> BlockLayout:
    side = checks.integer(block, name)
    if side < 16 or side % 16:
        raise ValueError(f"{name} must be a multiple of 16, got {side}")
    array = host(tensor, "sparsity_layout")
    if array.ndim != 3 or array.shape[1] != array.shape[2] or not len(array):
        raise ValueError(f"sparsity_layout must have shape (heads, n, n), got {array.shape}")
    check_zeros_and_ones(array, "sparsity_layout")
    length = array.shape[1] * side
    if length >= 2**31:
        raise ValueError(f"{name} must give fewer than 2**31 tokens, got {array.shape[1]} blocks of {side}")
    return BlockLayout.from_block_mask(array != 0, length, length, block_size=side)


def _to_square(layout: BlockLayout, block: int | None, name: str, peer: str, *, causal: bool) -> torch.Tensor:
    check_layout(layout)
    with checks.renamed("block_size", name):
        sides = layout.block_size if block is None else checks.sides(checks.integer(block, name))
    batch, _, q_len, kv_len = layout.shape
    if batch != 1 or q_len != kv_len or sides[0] != sides[1] or q_len % sides[0]:
        raise ValueError(
            f"layout cannot be given to {peer}, which takes one mask for the batch, as many keys as queries and whole "
            f"square blocks: got batch {batch}, {q_len} x {kv_len} tokens in blocks of {sides}"
        )
    return torch.from_numpy(_block_mask_of(layout, sides, peer, causal=causal)[0].astype(np.int64))
