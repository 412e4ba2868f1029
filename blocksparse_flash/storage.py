"""How does a block list lie in the four tensors of a layout?

Knows indptr, indices, bitmask_ids and bitmasks (see BlockLayout), and copies between devices and the host.
Must not know what is done with block lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .blocks import BlockList, Frame, Size, distinct, divided, ranges, words_per_query
from .packing import to_device


def to_tensors(found: BlockList, frame: Frame, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """indptr, indices, bitmask_ids, bitmasks of a canonical block list."""
    # keys are ascending, so the offset of a row is where its first key would stand
    ends = np.searchsorted(found.keys, np.arange(1, frame.leads * frame.n_rows + 1) * frame.n_cols)
    indptr = np.zeros((frame.leads, frame.n_rows + 1), np.int32)
    indptr[:, 1:] = ends.reshape(frame.leads, frame.n_rows)
    indptr[1:, 0] = indptr[:-1, -1]
    arrays = (
        indptr.reshape(frame.batch, frame.heads, frame.n_rows + 1),
        divided(found.keys, frame.n_cols)[1].astype(np.int32),
        found.ids.astype(np.int32),
        found.bitmasks.view(np.int32),
    )
    return tuple(to_device([torch.from_numpy(np.ascontiguousarray(array)) for array in arrays], device))


def no_bitmasks(frame: Frame, device: torch.device) -> torch.Tensor:
    """The bitmasks of a layout whose blocks are all full."""
    return torch.empty(0, frame.block_size[0], words_per_query(frame.block_size[1]), dtype=torch.int32, device=device)


def _on_host(tensors: Sequence[torch.Tensor]) -> list[Any]:
    # a transform of torch.func would wrap what it sees, and nothing here is differentiated
    with torch._C._DisableFuncTorch():
        return [tensor.detach().cpu().numpy() for tensor in tensors]


def to_block_list(tensors: Sequence[torch.Tensor], frame: Frame) -> BlockList:
    """The block list of a layout's tensors, copied to the host if they are elsewhere."""
    indptr, indices, ids, bitmasks = _on_host(tensors)
    flat = indptr.reshape(-1, frame.n_rows + 1).astype(np.int64)
    nnz = int(flat[-1, -1])
    rows = np.repeat(np.arange(frame.leads * frame.n_rows), (flat[:, 1:] - flat[:, :-1]).reshape(-1))
    return BlockList(rows * frame.n_cols + indices[:nnz], ids[:nnz], bitmasks.view(np.uint32))


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
