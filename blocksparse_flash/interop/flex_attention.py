"""FlexAttention's BlockMask. torch.nn.attention.flex_attention is imported on the first call that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..blocks import checks
from ..layout import BlockLayout
from .block_arrays import check_layout
from .kv_lists import KvList, from_kv_lists, mask_mod_of, to_kv_lists

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def from_flex_attention(block_mask: BlockMask, *, batch: int | None = None, heads: int | None = None) -> BlockLayout:
    """The layout of a FlexAttention BlockMask, exact, on the host.

    The layout holds every pair of the full_kv_* blocks, and the pairs of the kv_* blocks for which mask_mod is true, as
    FlexAttention's compiled kernels compute it. mask_mod is evaluated for the kv_* blocks only, on the mask's device.

    block_mask    lists with 1 to 3 leading axes; BLOCK_SIZE multiples of 16 (sides above 256 are split)
    batch, heads  sizes for which mask_mod is evaluated; required if it depends on batch or head although the lists are
                  shared (size 1). None: those of the lists
    returns       BlockLayout of shape (batch | 1, heads | 1, *seq_lengths)
    raises        ValueError if BLOCK_SIZE is not a multiple of 16, if a block is repeated, or for a sliced BlockMask,
                  which has lost its mask_mod

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> causal = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    >>> from_flex_attention(causal).density
    0.75
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a flex_attention BlockMask, got {type(block_mask).__name__}")
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError(
            "block_mask has been sliced and lost its mask_mod: convert the whole mask and slice the layout, or set "
            "block_mask.mask_mod to one that knows the slice and block_mask.seq_lengths to its (q_len, kv_len)"
        )
    q_len, kv_len = (checks.length(int(length), "seq_lengths") for length in block_mask.seq_lengths)
    return from_kv_lists(
        KvList(block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        ("kv_num_blocks, kv_indices", "full_kv_num_blocks, full_kv_indices"),
        block_mask.mask_mod,
        q_len=q_len,
        kv_len=kv_len,
        block_size=block_mask.BLOCK_SIZE,
        axes=(batch, heads),
    )


def to_flex_attention(layout: BlockLayout) -> BlockMask:
    """The FlexAttention BlockMask of a layout, exact, on the layout's device.

    Full blocks go to full_kv_*, partial and ragged blocks to kv_*, as in create_block_mask. mask_mod reads the bitmasks
    of the layout and is valid for every pair, since FlexAttention without torch.compile evaluates it for all of them.
    The format takes O(n_rows * n_cols) memory, a layout O(nnz). Move the layout to the device of q before, not the
    BlockMask after: BlockMask.to does not move the tensors that mask_mod reads.

    layout   any layout with queries and keys; batch and head axes of size 1 stay shared
    returns  BlockMask with BLOCK_SIZE = layout.block_size; FlexAttention's kernels may require multiples of their tile,
             usually 128
    raises   ValueError if there are no queries or no keys
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_layout(layout)
    if not layout.q_len or not layout.kv_len:
        raise ValueError(f"layout must have queries and keys for FlexAttention, got {layout.q_len} x {layout.kv_len}")
    partial, full = to_kv_lists(layout, ragged_is_full=False, width=layout.n_cols)
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=layout.block_size,
        mask_mod=mask_mod_of(layout),
        seq_lengths=(layout.q_len, layout.kv_len),
    )
