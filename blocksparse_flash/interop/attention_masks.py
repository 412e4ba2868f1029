"""Dense attention masks of Hugging Face transformers: 4-D masks, bool or additive, and 2-D padding masks.

These formats are dense and take O(q_len * kv_len) time and memory.
"""

from __future__ import annotations

import torch

from ..blocks import checks
from ..blocks.block_list import Size
from ..layout import BlockLayout
from .block_arrays import check_layout, check_zeros_and_ones, host


def from_huggingface(attention_mask: torch.Tensor, *, block_size: int | Size = 128) -> BlockLayout:
    """The layout of a 4-D attention mask of transformers, exact, on the host.

    Outputs differ for queries without keys only: they are 0 here, while transformers' eager attention with an additive
    mask of finfo.min averages all values, masked ones included.

    attention_mask  (batch, 1 | heads, q_len, kv_len): bool, True attends; or floating and added to the scores, 0 for
                    pairs that attend and -inf or finfo(dtype).min for the others
    block_size      tokens per side of a block, or (block_q, block_kv)
    returns         BlockLayout of shape (batch, 1 | heads, q_len, kv_len)
    raises          ValueError for a wrong shape or dtype, or naming the first value that is a bias instead of a mask;
                    TypeError if it is not a tensor
    """
    name = "attention_mask"
    checks.check_tensor(name, attention_mask)
    checks.check_in_memory(attention_mask, name)
    if attention_mask.ndim == 2:
        raise ValueError(
            f"{name} has two axes, as a padding mask (batch, kv_len) has: give attention() the "
            "kv_lengths=kv_lengths_from_huggingface(mask), or expand it to (batch, 1, q_len, kv_len)"
        )
    if attention_mask.ndim != 4:
        raise ValueError(f"{name} must have shape (batch, 1 | heads, q_len, kv_len), got {tuple(attention_mask.shape)}")
    if attention_mask.dtype == torch.bool:
        return BlockLayout.from_dense(attention_mask, block_size=block_size)
    if not attention_mask.is_floating_point():
        raise ValueError(f"{name} must be bool, or floating and added to the scores, got {attention_mask.dtype}")
    attends = attention_mask == 0
    masked = (attention_mask == -torch.inf) | (attention_mask == torch.finfo(attention_mask.dtype).min)
    strange = ~(attends | masked)
    if strange.any():
        where = tuple(strange.nonzero()[0].tolist())
        raise ValueError(
            f"{name} must hold 0 (attends) and -inf or {torch.finfo(attention_mask.dtype).min} (masked) only, got "
            f"{attention_mask[where].item()} at {where}: that is a bias, not a mask"
        )
    return BlockLayout.from_dense(attends, block_size=block_size)


def to_huggingface(layout: BlockLayout, *, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """The 4-D attention mask of a layout, on its device.

    dtype    torch.bool: True attends; a floating type of 16 bits or more: 0 for pairs that attend and finfo(dtype).min
             for the others, to be added to the scores. See from_huggingface for queries without keys
    returns  (batch | 1, heads | 1, q_len, kv_len)
    raises   ValueError for another dtype
    """
    check_layout(layout)
    if dtype not in (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.bool or a floating type of 16 bits or more, got {dtype}")
    mask = layout.to_dense()
    if dtype == torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def kv_lengths_from_huggingface(attention_mask: torch.Tensor) -> torch.Tensor:
    """kv_lengths for `attention(..., kv_lengths=)` from a padding mask of transformers.

    attention_mask  (batch, kv_len), bool or integers: 1 for a token and 0 for padding, on the right
    returns         int32 (batch,), on the device of the mask
    raises          ValueError for a wrong shape or dtype, or naming the first sequence padded on the left or inside
    """
    name = "attention_mask"
    checks.check_tensor(name, attention_mask)
    checks.check_in_memory(attention_mask, name)
    if attention_mask.ndim != 2 or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            f"{name} must be bool or integers (batch, kv_len), got {attention_mask.dtype} {tuple(attention_mask.shape)}"
        )
    checks.length(attention_mask.shape[1], "kv_len")
    check_zeros_and_ones(host(attention_mask, name), name)
    is_token = attention_mask == 1
    lengths = is_token.sum(dim=1, dtype=torch.int32)
    misplaced = (is_token[:, 1:] & ~is_token[:, :-1]).any(dim=1)
    if misplaced.any():
        raise ValueError(
            f"{name} must be padded on the right, but sequence {int(misplaced.nonzero()[0])} has padding before a "
            "token: set tokenizer.padding_side = 'right', or describe the mask as a layout with a batch axis"
        )
    return lengths
