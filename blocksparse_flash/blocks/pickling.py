"""Pickles of layouts: checksums of their state, and layouts sent to another process as NumPy arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .stored_blocks import StoredBlocks


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
        # torch.load(..., map_location="meta") reads no values
        is_read = not (isinstance(state[name], torch.Tensor) and state[name].is_meta)
        if is_read and expected[name] != found:
            raise ValueError(
                f"{name} is not the one that was saved: the file, or what was read of it, has been changed"
            )


def sent(layout: StoredBlocks) -> str | tuple[Any, ...]:
    """Sends a layout to another process as NumPy arrays: each tensor would hold a file descriptor there."""
    if not layout._tensors.indptr.is_cpu:
        return layout.__reduce__()
    arrays = {name: tensor.numpy() for name, tensor in layout._tensors._asdict().items()}
    return received, (type(layout), layout._state(arrays))


def received(cls: Any, state: Mapping[str, Any]) -> Any:
    """A layout sent by another process, checked."""
    tensors = {name: torch.from_numpy(value.copy()) for name, value in state.items() if isinstance(value, np.ndarray)}
    return cls.from_state_dict({**state, **tensors})
