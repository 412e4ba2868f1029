"""Block-sparse tensors of FlashAttention-4 (flash_attn.cute).

Fields are read by name, so flash_attn need not be installed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..blocks import checks
from ..layout import BlockLayout
from .block_arrays import check_layout
from .kv_lists import KvList, MaskMod, block_table, from_kv_lists, to_kv_lists


class BlockSparseTensors(NamedTuple):
    """The fields of flash_attn.cute.block_sparsity.BlockSparseTensorsTorch: BlockSparseTensorsTorch(*tensors).

    mask_block_cnt  int32 (batch | 1, heads | 1, n_rows): partial blocks of each row
    mask_block_idx  int32 (batch | 1, heads | 1, n_rows, width): their cols, ascending; width fits the longest row
    full_block_cnt, full_block_idx  the same for full blocks
    block_size      (block_q, block_kv)
    cu_total_m_blocks, cu_block_idx_offsets  for varlen batches; always None here
    dq_write_order, dq_write_order_full, spt  for deterministic gradients; always None, FlashAttention-4 computes them
    """

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: torch.Tensor | None = None
    dq_write_order_full: torch.Tensor | None = None
    spt: bool | None = None


class FlashAttention4Mask(NamedTuple):
    """Arguments of flash_attn.cute.flash_attn_func for one layout.

    block_sparse_tensors      for the forward
    block_sparse_tensors_bwd  for the backward, transposed; without it FlashAttention-4 silently computes dense
                              gradients
    aux_tensors               [table, bitmasks] for mask_mod; None if no block is partial, so that no mask_mod is needed
    """

    block_sparse_tensors: BlockSparseTensors
    block_sparse_tensors_bwd: BlockSparseTensors
    aux_tensors: list[torch.Tensor] | None


def to_flash_attention_4(layout: BlockLayout) -> FlashAttention4Mask:
    """FlashAttention-4's block-sparse tensors of a layout, on its device, O(nnz) but for aux_tensors.

    Partial blocks need a mask_mod, a CuTe function that the caller compiles. With table, bitmasks = aux_tensors, int32
    (batch | 1, heads | 1, n_rows, n_cols) and (2 + distinct, block_q, words), it computes

        i = table[b or 0, h or 0, q // block_q, kv // block_kv]          0 empty, 1 full
        attends = bitmasks[i, q % block_q, kv % block_kv // 32] >> (kv % block_kv % 32) & 1

    `interop.kv_lists.mask_mod_of` does the same in torch. FlashAttention-4 restricts block_size by GPU (sm90: block_kv
    is its tile_n; sm100: block_q is a multiple of 256) and raises its own errors.

    returns  FlashAttention4Mask; a ragged last block in which every existing pair attends counts as full
    """
    check_layout(layout)
    has_partial = bool((layout.bitmask_ids[: layout.nnz] >= 0).any())
    return FlashAttention4Mask(_tensors(layout), _tensors(layout.T), list(block_table(layout)) if has_partial else None)


def _tensors(layout: BlockLayout) -> BlockSparseTensors:
    partial, full = to_kv_lists(layout, ragged_is_full=True)
    return BlockSparseTensors(*partial, *full, block_size=layout.block_size)


def from_flash_attention_4(
    tensors: Any,
    q_len: int,
    kv_len: int,
    *,
    mask_mod: MaskMod | None = None,
    block_size: int | tuple[int, int] | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> BlockLayout:
    """The layout of FlashAttention-4's forward block-sparse tensors, exact, on the host.

    tensors        any object with the fields of BlockSparseTensors; those of the forward, not _bwd
    q_len, kv_len  tokens, which the tensors do not contain
    mask_mod       mask_mod(batch, head, q_pos, kv_pos) -> bool in torch, for single positions as in FlexAttention; the
                   same mask as the CuTe mask_mod. Required if there are partial blocks
    block_size     tokens per side of a block, or (block_q, block_kv), multiples of 16; required if tensors have none
    batch, heads   sizes for which mask_mod is evaluated; None: those of the lists
    returns        BlockLayout of shape (batch | 1, heads | 1, q_len, kv_len)
    raises         ValueError for varlen tensors, repeated blocks and wrong sizes; TypeError if fields are missing
    """
    for name in ("mask_block_cnt", "mask_block_idx"):
        if getattr(tensors, name, None) is None:
            raise TypeError(f"tensors must have mask_block_cnt and mask_block_idx, got {type(tensors).__name__}")
    if getattr(tensors, "cu_total_m_blocks", None) is not None:
        raise ValueError(
            "tensors are of variable length (cu_total_m_blocks): convert each sequence by itself, "
            "or describe the packed batch as one layout, with documents apart"
        )
    own_size = getattr(tensors, "block_size", None)
    own_size, block_size = (None if size is None else checks.sides(size, most=None) for size in (own_size, block_size))
    if own_size is not None and block_size is not None and own_size != block_size:
        raise ValueError(f"block_size must be that of the tensors, {own_size}, or None, got {block_size}")
    if own_size is None and block_size is None:
        raise ValueError("block_size must be given, because tensors.block_size is None")
    full = getattr(tensors, "full_block_cnt", None), getattr(tensors, "full_block_idx", None)
    if (full[0] is None) != (full[1] is None):
        raise ValueError("tensors must have both of full_block_cnt and full_block_idx, or neither")
    return from_kv_lists(
        KvList(tensors.mask_block_cnt, tensors.mask_block_idx),
        full,
        ("mask_block_cnt, mask_block_idx", "full_block_cnt, full_block_idx"),
        mask_mod,
        q_len=checks.length(q_len, "q_len"),
        kv_len=checks.length(kv_len, "kv_len"),
        block_size=own_size if block_size is None else block_size,
        axes=(batch, heads),
    )
