"""Conversion between block lists and the four tensors of a layout; state dicts and hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime import tracing
from . import checks
from .block_list import BlockList, BlockRows, Frame, Size, distinct, ranges
from .transfer import to_device

# keys of a state dict in addition to its tensors; SELECTED only for blocks selected on a device
NUMBERS, SELECTED = ("q_len", "kv_len", "block_size"), "selected"


class Tensors(NamedTuple):
    """The tensors of a layout, in the order of its fields; see BlockLayout."""

    indptr: torch.Tensor
    indices: torch.Tensor
    bitmask_ids: torch.Tensor
    bitmasks: torch.Tensor


def to_tensors(rows: BlockRows, frame: Frame, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """indptr, indices, bitmask_ids, bitmasks of a canonical list."""
    arrays = (rows.indptr.reshape(frame.batch, frame.heads, -1), rows.cols, rows.ids, rows.bitmasks.view(np.int32))
    tensors = [torch.from_numpy(array) for array in arrays]
    return tuple(tensors if device == "cpu" else to_device(tensors, device))


def _on_host(tensors: Sequence[torch.Tensor]) -> list[Any]:
    checks.check_in_memory(tensors[0], "layout")
    # torch.func would wrap the tensors; nothing here is differentiated
    with tracing.outside_transforms(tensors[0]), torch._C._DisableFuncTorch():
        return [tensor.numpy(force=True) for tensor in tensors]


def to_block_rows(tensors: Sequence[torch.Tensor], frame: Frame) -> BlockRows:
    """The block list of a layout's tensors in CSR form, on the host."""
    indptr, indices, ids, bitmasks = _on_host(tensors)
    # a selection has unused entries after nnz
    nnz = indptr.item(-1)
    return BlockRows(indptr.reshape(frame.batch_heads, -1), indices[:nnz], ids[:nnz], bitmasks.view(np.uint32))


def to_rows(tensors: Sequence[torch.Tensor], frame: Frame, rows: Size) -> tuple[BlockList, Frame]:
    """(block list of rows[0] .. rows[1] - 1 of every batch_head, its frame). O(nnz of these rows)."""
    indptr, indices, ids, bitmasks = _on_host(tensors)
    first, stop = rows
    ends = indptr.reshape(frame.batch_heads, frame.n_rows + 1)[:, first : stop + 1].astype(np.int64)
    counts = np.diff(ends, axis=1).reshape(-1)
    source = ranges(ends[:, :-1].reshape(-1), counts)
    keys = np.repeat(np.arange(len(counts)), counts) * frame.n_cols + indices[source]
    ids = ids[source]
    is_partial = ids >= 0
    used, ids[is_partial] = distinct(ids[is_partial].astype(np.int64), len(bitmasks))
    block_q = frame.block_size[0]
    q_len = min(stop * block_q, frame.q_len) - first * block_q
    return BlockList(keys, ids, bitmasks[used].view(np.uint32)), frame._replace(q_len=q_len)


def hash_of(found: BlockList, frame: Frame) -> int:
    """A hash of a canonical list and its sizes, the same in every process."""
    digest = hashlib.blake2b(repr(((*frame[:4],), frame.block_size)).encode(), digest_size=8)
    for array in found:
        digest.update(np.ascontiguousarray(array).data)
    # 60 bits, which hash() returns unchanged
    return int.from_bytes(digest.digest(), "little") >> 4


def read_state(state: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any], bool]:
    """(tensors, numbers, whether blocks were selected) of a state dict; refuses missing and unexpected keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() gave, got {type(state).__name__}")
    expected, given = {*checks.TENSORS, *NUMBERS}, set(state) - {SELECTED}
    if given != expected:
        raise ValueError(
            f"state must have the keys of state_dict(): missing {sorted(expected - given)}, "
            f"unexpected {sorted(given - expected, key=str)}"
        )
    numbers: dict[str, Any] = {name: state.get(name, False) for name in (*NUMBERS, SELECTED)}
    for name, value in numbers.items():
        if isinstance(value, torch.Tensor):
            checks.check_in_memory(value, name)
            numbers[name] = value.tolist()
    is_selected = numbers.pop(SELECTED)
    if not isinstance(is_selected, bool):
        raise TypeError(f"{SELECTED} must be True or False, got {is_selected!r}")
    return Tensors(*(state[name] for name in checks.TENSORS)), numbers, is_selected


def check_canonical(tensors: Tensors, own: Tensors) -> None:
    """Refuse tensors of a state dict that are not the layout's own."""
    for name, tensor, expected in zip(checks.TENSORS, tensors, own, strict=True):
        with tracing.outside_transforms():
            is_equal = torch.equal(tensor, expected)
        if not is_equal:
            raise ValueError(
                f"{name} must be that of a canonical layout, as state_dict() gives it, but this mask has another; "
                "BlockLayout(indptr, indices, bitmask_ids, bitmasks, ...) takes any, and makes it canonical"
            )
