"""How do the many small tensors of a layout come to a device? Side by side, by one copy, which costs what one of them would.

Knows int32 tensors and their storages. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# int32 words: every tensor begins at a multiple of 128 bytes, as kernels and copy engines like it
ALIGNMENT = 32
# int32 words, 64 MB, up to which memory of the host is pinned for a copy: PyTorch keeps what was pinned, for the next
MOST_PINNED = 1 << 24


class Place(NamedTuple):
    """Where a tensor lies in a packed one: its first word, and its shape."""

    begin: int
    shape: torch.Size


def to_device(tensors: Sequence[Tensor], device: torch.device | str, *, non_blocking: bool = False) -> list[Tensor]:
    """The same int32 tensors on a device; those of the host go to a GPU by one copy.

    non_blocking  False: the host waits for a copy to a GPU, as `torch.Tensor.to` does. True: it does not, and who uses the
                  tensors on another stream than the current one must make that wait
    """
    device = torch.device(device)
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device, non_blocking=non_blocking) for tensor in tensors]
    # a captured copy would read again, at each replay, memory that holds something else by then: unpinned, it is refused
    is_pinned = not torch.cuda.is_current_stream_capturing()
    packed, places = pack(tensors, is_pinned=is_pinned)
    return unpack(packed.to(device, non_blocking=non_blocking and packed.is_pinned()), places)


def pack(tensors: Sequence[Tensor], *, is_pinned: bool = False) -> tuple[Tensor, list[Place]]:
    """int32 tensors of the host, one after another in a flat one, and where each lies.

    is_pinned  in memory which a GPU reads itself, if it is not too large: PyTorch's allocator gives it out again when the
               copies that were made of it are done
    """
    places, end = [], 0
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
        places.append(Place(-(-end // ALIGNMENT) * ALIGNMENT, tensor.shape))
        end = places[-1].begin + tensor.numel()
    packed = torch.empty(end, dtype=torch.int32, pin_memory=is_pinned and end <= MOST_PINNED)
    values = packed.numpy()
    for tensor, place in zip(tensors, places, strict=True):
        values[place.begin : place.begin + tensor.numel()] = tensor.detach().numpy().reshape(-1)
    return packed, places


def unpack(packed: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors that lie in a packed one, whose memory they keep.

    Each has a storage of its own: of a view, pickle would store all that is packed, and torch.compile might guard the offset.
    """
    storage, size, found = packed.untyped_storage(), packed.element_size(), []
    for begin, shape in places:
        tensor = packed.new_empty(0 if shape.numel() else shape)
        # an empty slice of a storage is none of its own
        if shape.numel():
            part = storage[size * begin : size * (begin + shape.numel())]
            # without strides, which PyTorch's stubs ask for
            tensor.set_(part, 0, shape)  # type: ignore[call-overload]
        found.append(tensor)
    return found
