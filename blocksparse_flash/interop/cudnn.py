"""Index lists of cuDNN's block-sparse attention (cudnn.block_sparse_attention), which FastVideo's kernels take too.

Each block of queries lists its blocks of keys: q2k_block_index int32 (batch, heads, n_rows, width). The first
q2k_block_nums (batch, heads, n_rows) entries are used. Blocks are square and full.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..blocks import checks
from ..blocks.checks import check_tensor
from ..layout import BlockLayout
from ..runtime import tracing
from .block_arrays import axes_of_call
from .kv_lists import to_kv_lists


class CudnnLists(NamedTuple):
    """Arguments of cuDNN's and FastVideo's block-sparse attention.

    q2k_block_index  int32 (batch, heads, n_rows, width): blocks of keys, ascending; width fits the longest row
    q2k_block_nums   int32 (batch, heads, n_rows): how many of them count
    block_sizes      int32 (n_cols,): tokens of each block of keys, all equal but for a shorter last one
    """

    q2k_block_index: torch.Tensor
    q2k_block_nums: torch.Tensor
    block_sizes: torch.Tensor


def to_cudnn(layout: BlockLayout, *, batch: int | None = None, heads: int | None = None) -> CudnnLists:
    """The index lists of a layout, on its device.

    batch, heads  sizes of the call, which do not broadcast; None: those of the layout
    raises        ValueError if a block is partial or not square, or for a size that does not match the layout
    """
    partial, full = to_kv_lists(layout, ragged_is_full=True)
    side, other = layout.block_size
    if side != other:
        raise ValueError(f"layout must have square blocks, got {layout.block_size}: layout.with_block_size(64)")
    n_partial = int(partial.counts.sum())
    if n_partial:
        raise ValueError(
            f"layout must have full blocks only, got {n_partial} partial ones: cuDNN has no masks within blocks. "
            "attention() of this library is exact for them"
        )
    axes = axes_of_call(layout, batch, heads)
    index, counts = (x.expand(*axes, *x.shape[2:]).contiguous() for x in (full.cols, full.counts))
    sizes = torch.full((-(-layout.kv_len // side),), side, dtype=torch.int32, device=layout.device)
    if layout.kv_len % side:
        sizes[-1] = layout.kv_len % side
    return CudnnLists(index, counts, sizes)


def from_cudnn(
    q2k_block_index: torch.Tensor,
    q_len: int,
    kv_len: int,
    *,
    q2k_block_nums: torch.Tensor | None = None,
    block_size: int = 64,
) -> BlockLayout:
    """The layout of cuDNN's or FastVideo's index lists, on their device and without waiting for it.

    q2k_block_index  integers (batch, heads, n_rows, width): blocks of keys of each block of queries
    q_len, kv_len    tokens
    q2k_block_nums   integers (batch, heads, n_rows): how many entries count; None: all
    block_size       64 or 128 in cuDNN, 64 in FastVideo
    raises           as `BlockLayout.from_topk`; TypeError, ValueError for counts of another type or shape, and
                     on the CPU for counts that exceed the width
    """
    if q2k_block_nums is None:
        with checks.renamed("indices", "q2k_block_index"):
            return BlockLayout.from_topk(q2k_block_index, q_len, kv_len, block_size=block_size)
    for name, tensor in (("q2k_block_index", q2k_block_index), ("q2k_block_nums", q2k_block_nums)):
        check_tensor(name, tensor)
        checks.check_strided(tensor, name)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {tensor.dtype}")
        if tensor.dtype == torch.uint64:
            raise ValueError(
                f"{name} must be integers of at most 63 bits, got {tensor.dtype}; {name}.long() makes them"
            )
    if not q2k_block_index.dim():
        raise ValueError("q2k_block_index must have shape (batch, heads, rows, width), got ()")
    if q2k_block_nums.shape != q2k_block_index.shape[:-1]:
        raise ValueError(
            f"q2k_block_nums must have shape {tuple(q2k_block_index.shape[:-1])}, one count per row of "
            f"q2k_block_index, got {tuple(q2k_block_nums.shape)}"
        )
    # PyTorch compares no uint16 or uint32
    width, q2k_block_nums = q2k_block_index.shape[-1], q2k_block_nums.long()
    # as check_cols: on a GPU the check would wait for the device
    if q2k_block_nums.device.type == "cpu" and q2k_block_nums.numel() and tracing.has_values(q2k_block_nums):
        low, high = (int(bound) for bound in q2k_block_nums.aminmax())
        if low < 0 or high > width:
            raise ValueError(
                f"q2k_block_nums must be 0 .. {width}, the entries per row of q2k_block_index, got {low} .. {high}"
            )
    place = torch.arange(width, device=q2k_block_index.device)
    # from_topk ignores entries of -1, which an unsigned type does not have
    signed = q2k_block_index if q2k_block_index.dtype.is_signed else q2k_block_index.long()
    index = torch.where(place < q2k_block_nums[..., None], signed, -1)
    with checks.renamed("indices", "q2k_block_index"):
        return BlockLayout.from_topk(index, q_len, kv_len, block_size=block_size)
