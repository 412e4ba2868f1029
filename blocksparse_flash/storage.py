"""How does a block list lie in the four tensors of a layout?

Knows indptr, indices, bitmask_ids and bitmasks (see BlockLayout), and copies between devices and the host.
Must not know what is done with block lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .blocks import BlockList, BlockRows, Frame, Size, distinct, ranges, words_per_query
from .packing import to_device


def to_tensors(rows: BlockRows, frame: Frame, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """indptr, indices, bitmask_ids, bitmasks of a canonical list."""
    arrays = (rows.indptr.reshape(frame.batch, frame.heads, -1), rows.cols, rows.ids, rows.bitmasks.view(np.int32))
    tensors = [torch.from_numpy(array) for array in arrays]
    return tuple(tensors if device == "cpu" else to_device(tensors, device))


def no_bitmasks(frame: Frame, device: torch.device) -> torch.Tensor:
    """The bitmasks of a layout whose blocks are all full."""
    return torch.empty(0, frame.block_size[0], words_per_query(frame.block_size[1]), dtype=torch.int32, device=device)


def _on_host(tensors: Sequence[torch.Tensor]) -> list[Any]:
    # a transform of torch.func would wrap what it sees, and nothing here is differentiated
    with torch._C._DisableFuncTorch():
        return [tensor.numpy(force=True) for tensor in tensors]


def to_block_rows(tensors: Sequence[torch.Tensor], frame: Frame) -> BlockRows:
    """The list that lies in a layout's tensors, copied to the host if they are elsewhere."""
    indptr, indices, ids, bitmasks = _on_host(tensors)
    # behind them are those that a selection has no use for
    nnz = indptr.item(-1)
    return BlockRows(indptr.reshape(frame.leads, -1), indices[:nnz], ids[:nnz], bitmasks.view(np.uint32))


def to_rows(tensors: Sequence[torch.Tensor], frame: Frame, rows: Size) -> tuple[BlockList, Frame]:
    """Rows rows[0] .. rows[1] - 1 of every lead as a block list, with the bitmasks they use, and its frame. O(their nnz)."""
    indptr, indices, ids, bitmasks = _on_host(tensors)
    first, stop = rows
    ends = indptr.reshape(frame.leads, frame.n_rows + 1)[:, first : stop + 1].astype(np.int64)
    counts = np.diff(ends, axis=1).reshape(-1)
    source = ranges(ends[:, :-1].reshape(-1), counts)
    keys = np.repeat(np.arange(len(counts)), counts) * frame.n_cols + indices[source]
    looks = ids[source]
    is_partial = looks >= 0
    used, looks[is_partial] = distinct(looks[is_partial].astype(np.int64), len(bitmasks))
    block_q = frame.block_size[0]
    q_len = min(stop * block_q, frame.q_len) - first * block_q
    return BlockList(keys, looks, bitmasks[used].view(np.uint32)), frame._replace(q_len=q_len)
