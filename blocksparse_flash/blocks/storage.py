"""Conversion between block lists and the four tensors of a layout; checksums of pickled layouts."""

from __future__ import annotations

import zlib
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


def _checksum(value: Any) -> int:
    """CRC-32 of a tensor's dtype, shape and values, on any device; of the repr of anything else."""
    if not isinstance(value, torch.Tensor):
        return zlib.crc32(repr(value).encode())
    kind = zlib.crc32(repr((value.dtype, tuple(value.shape), value.layout)).encode())
    if value.is_meta or value.layout is not torch.strided:
        return kind
    # torch.func would wrap the tensor
    with torch._C._DisableFuncTorch():
        # a copy, since a tensor of 0 or 1 elements may have any strides
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, kind)


def checksums(state: Mapping[str, Any]) -> dict[str, int]:
    """The checksum of each value of a layout's state."""
    return {name: _checksum(value) for name, value in state.items()}


def check_checksums(state: object, expected: object) -> None:
    """Refuse a state whose values do not have these checksums."""
    if not isinstance(state, Mapping) or not isinstance(expected, Mapping) or state.keys() != expected.keys():
        raise ValueError("state and its checksums must be two dicts with the same keys: the file has been changed")
    for name, found in checksums(state).items():
        if expected[name] != found:
            raise ValueError(
                f"{name} is not the one that was saved: the file, or what was read of it, has been changed"
            )
