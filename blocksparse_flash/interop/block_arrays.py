"""Stored blocks of a layout as NumPy arrays on the host, and layouts from such arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..blocks import block_list, checks
from ..blocks.block_list import FULL, Array, BlockList, Size
from ..layout import BlockLayout


class Stored(NamedTuple):
    """The stored blocks of a layout, ascending by (lead, row, col), on the host; lead = batch * heads + head."""

    leads: Array
    rows: Array
    cols: Array
    # FULL, or an index in bitmasks
    ids: Array
    # uint32 (distinct, block_q, words)
    bitmasks: Array

    @property
    def is_full(self) -> Array:
        return self.ids == FULL


def host(tensor: torch.Tensor) -> Array:
    """The values on the host; bfloat16 and 8-bit floats, which NumPy lacks, become float32."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.cpu().numpy()


def check_layout(layout: object) -> None:
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout must be a BlockLayout, got {type(layout).__name__}")


def stored(layout: BlockLayout) -> Stored:
    """The blocks of a layout."""
    check_layout(layout)
    indptr = host(layout.indptr).astype(np.int64)
    counts: Array = (indptr[..., 1:] - indptr[..., :-1]).reshape(-1)
    nnz = int(counts.sum())
    flat_rows = np.repeat(np.arange(len(counts)), counts)
    n_rows = max(layout.n_rows, 1)
    return Stored(
        flat_rows // n_rows,
        flat_rows % n_rows,
        host(layout.indices)[:nnz].astype(np.int64),
        host(layout.bitmask_ids)[:nnz].astype(np.int64),
        host(layout.bitmasks).view(np.uint32),
    )


def sizes(layout: BlockLayout) -> dict[str, Any]:
    """q_len, kv_len and block_size, as keyword arguments."""
    return {"q_len": layout.q_len, "kv_len": layout.kv_len, "block_size": layout.block_size}


def layout_of(
    keys: Array, ids: Array, bitmasks: Array, axes: Size, *, q_len: int, kv_len: int, block_size: Size
) -> BlockLayout:
    """The layout, on the host, of blocks with ascending keys (lead * n_rows + row) * n_cols + col.

    ids       FULL, or an index into bitmasks
    bitmasks  uint32 (n, block_q, words); may repeat, be empty or full, and have bits beyond the lengths
    """
    checks.check_nnz(len(keys))
    n_rows, n_cols = block_list.grid(q_len, kv_len, block_size)
    flat_rows, cols = np.divmod(keys, max(n_cols, 1))
    ends = np.searchsorted(flat_rows, np.arange(axes[0] * axes[1] * n_rows), side="right")
    indptr = np.zeros((axes[0] * axes[1], n_rows + 1), np.int32)
    indptr[:, 1:] = ends.reshape(len(indptr), n_rows)
    indptr[1:, 0] = indptr[:-1, -1]
    tensors = (
        indptr.reshape(*axes, n_rows + 1),
        cols.astype(np.int32),
        ids.astype(np.int32),
        np.ascontiguousarray(bitmasks).view(np.int32),
    )
    return BlockLayout(*map(torch.from_numpy, tensors), q_len=q_len, kv_len=kv_len, block_size=block_size)


def full_layout(keys: Array, axes: Size, *, q_len: int, kv_len: int, block_size: Size) -> BlockLayout:
    """The layout whose full blocks are the ascending keys."""
    ids = np.full(len(keys), FULL, np.int32)
    words = block_list.no_bitmasks(block_size)
    return layout_of(keys, ids, words, axes, q_len=q_len, kv_len=kv_len, block_size=block_size)


def regrouped(layout: BlockLayout, block_size: Size) -> BlockLayout:
    """The same mask in blocks of another size, on the host."""
    found = stored(layout)
    keys = (found.leads * layout.n_rows + found.rows) * layout.n_cols + found.cols
    lengths: dict[str, Any] = {"q_len": layout.q_len, "kv_len": layout.kv_len}
    coarse = block_list.regroup(
        *BlockList(keys, found.ids, found.bitmasks), **lengths, old=layout.block_size, new=block_size
    )
    return layout_of(*coarse, layout.shape[:2], **lengths, block_size=block_size)


def causal_part(layout: BlockLayout) -> BlockLayout:
    """The pairs of a layout with kv_pos <= q_pos + (kv_len - q_len)."""
    ahead = layout.kv_len - layout.q_len
    block_q, block_kv = layout.block_size
    return BlockLayout.from_predicate(
        lambda q_pos, kv_pos: kv_pos <= q_pos + ahead,
        **sizes(layout),
        within=layout,
        # distance of the first query and key of a block; clipped, since a block beyond that is empty or full
        dedup_key=lambda row, col: np.clip(row * block_q + ahead - col * block_kv, -block_q, block_kv),
    )


def one_head(layout: BlockLayout, batch: int, head: int) -> BlockLayout:
    """One batch and head of a layout, on the host, as a layout of shape (1, 1, q_len, kv_len)."""
    check_layout(layout)
    for value, size, name in ((batch, layout.shape[0], "batch"), (head, layout.shape[1], "head")):
        if not 0 <= checks.integer(value, name) < size:
            raise ValueError(f"{name} must be in 0 .. {size - 1}, the layout has shape {layout.shape}, got {value}")
    found = stored(layout)
    here = found.leads == batch * layout.shape[1] + head
    keys = found.rows[here] * layout.n_cols + found.cols[here]
    return layout_of(keys, found.ids[here], found.bitmasks, (1, 1), **sizes(layout))


def block_mask_of(layout: BlockLayout, block_size: Size, peer: str, *, causal: bool = False) -> Array:
    """bool (batch | 1, heads | 1, n_rows, n_cols): the stored blocks of this size; refuses partial blocks.

    peer    name of the library, for the message
    causal  True: the library masks above the diagonal, so stored blocks must be full below it
    """
    check_layout(layout)
    regular = regrouped(layout, block_size)
    found = stored(regular)
    batch, heads = layout.shape[:2]
    mask = np.zeros((batch, heads, regular.n_rows, regular.n_cols), np.bool_)
    mask[found.leads // heads, found.leads % heads, found.rows, found.cols] = True
    wrong = ~found.is_full
    if causal:
        meant = BlockLayout.from_block_mask(mask, **sizes(regular))
        other = stored((causal_part(meant) - regular) | (regular - causal_part(meant)))
        wrong, found = np.ones(len(other.ids), np.bool_), other
    if wrong.any():
        first = int(wrong.argmax())
        batch, head = divmod(int(found.leads[first]), heads)
        raise ValueError(
            f"layout cannot be given to {peer}, which takes whole {block_size[0]} x {block_size[1]} blocks"
            f"{' cut by the causal diagonal alone' if causal else ''}: block (row {found.rows[first]}, "
            f"col {found.cols[first]}) of batch {batch}, head {head} attends in part. Build the layout from whole "
            "blocks of that size, or use attention() of this library, which is exact"
        )
    return mask


def check_zeros_and_ones(values: Array, name: str) -> None:
    """Refuse values other than 0 and 1, such as weights or labels."""
    strange = (values != 0) & (values != 1)
    if strange.any():
        where = tuple(int(i) for i in np.argwhere(strange)[0])
        raise ValueError(
            f"{name} must hold 0 (masked) and 1 (attends) only, got {values[where]} at {where}: "
            "if it is a weight or a label, compare it first, as in values > 0"
        )
