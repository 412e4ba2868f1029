"""How do the many small tensors of a layout come to a device? Side by side, by one copy, which costs what one of them would.

Knows int32 tensors and their storages. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# int32 words: every tensor begins at a multiple of 128 bytes, as kernels and copy engines like it
ALIGNMENT = 32


class Place(NamedTuple):
    """Where a tensor lies in a packed one: its first word, and its shape."""

    begin: int
    shape: torch.Size


def to_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The same int32 tensors on a device; those of the host go to a GPU by one copy, which waits for it as `to` does."""
    device = torch.device(device)
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    packed, places = pack(tensors)
    return unpack(packed.to(device), places)


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Place]]:
    """int32 tensors of the host, one after another in a flat one, and where each lies."""
    places, end = [], 0
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
        places.append(Place(-(-end // ALIGNMENT) * ALIGNMENT, tensor.shape))
        end = places[-1].begin + tensor.numel()
    packed = np.empty(end, np.int32)
    for tensor, place in zip(tensors, places, strict=True):
        packed[place.begin : place.begin + tensor.numel()] = tensor.detach().numpy().reshape(-1)
    return torch.from_numpy(packed), places


def unpack(packed: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors that lie in a packed one, whose memory they keep.

    Each has a storage of its own: of a view, pickle would store all that is packed, and torch.compile might guard the offset.
    """
    storage, size = packed.untyped_storage(), packed.element_size()
    # an empty slice of a storage is none of its own
    return [
        packed.new_empty(shape)
        if not shape.numel()
        else packed.new_empty(0).set_(storage[size * begin : size * (begin + shape.numel())]).view(shape)
        for begin, shape in places
    ]
