"""Transfer of many small int32 tensors to a device: packed into one, so that one copy moves all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.int32]

# int32 words: every tensor begins at a multiple of 128 bytes, as kernels and copy engines like it
ALIGNMENT = 32
# int32 words, 64 MB, up to which memory of the host is pinned for a copy: PyTorch keeps what was pinned, for the next
MOST_PINNED = 1 << 24


class Place(NamedTuple):
    """Where a tensor lies in a packed one: its first word, how many it has, and its shape."""

    begin: int
    size: int
    shape: Sequence[int]


def resolved(device: torch.device | str | int) -> torch.device:
    """The device with its index, as tensors report it."""
    if isinstance(device, torch.device) and device.index is not None:
        return device
    device = torch.device(device)
    if device.type == "cpu" or device.index is not None:
        return device
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.empty(0, device=device).device


def to_device(tensors: Sequence[Tensor], device: torch.device | str, *, non_blocking: bool = False) -> list[Tensor]:
    """The same int32 tensors on a device; those of the host go to a GPU by one copy.

    non_blocking  as of `sent`
    """
    device = torch.device(device)
    is_on_host = all(tensor.is_cpu for tensor in tensors)
    if is_on_host and device.type == "cpu":
        return list(tensors)
    if device.type != "cuda" or not is_on_host:
        return [tensor.to(device, non_blocking=non_blocking) for tensor in tensors]
    return sent(*pack(tensors, is_pinned=may_pin(device)), device, non_blocking=non_blocking)


def may_pin(device: torch.device) -> bool:
    """Whether what goes to a device may be packed in pinned memory: to a GPU, unless the copy is captured.

    A captured copy would read again, at each replay, memory that holds something else by then: unpinned, it is refused.
    """
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def sent(packed: Tensor, places: Sequence[Place], device: torch.device, *, non_blocking: bool = False) -> list[Tensor]:
    """What lies in a packed tensor of the host, as tensors on a device; to a GPU it goes by one copy.

    non_blocking  False: the host waits for a copy to a GPU, as `torch.Tensor.to` does. True: it does not, and who uses the
                  tensors on another stream than the current one must make that wait
    """
    if device.type != "cuda":
        return to_device(unpack(packed, places), device, non_blocking=non_blocking)
    return unpack(packed.to(device, non_blocking=non_blocking and packed.is_pinned()), places)


def sent_flat(arrays: Sequence[Array], device: torch.device) -> Tensor:
    """int32 arrays, one right behind the other, as a flat tensor on a device; the host does not wait for a copy to a GPU."""
    size = sum([array.size for array in arrays])
    is_pinned = size <= MOST_PINNED and may_pin(device)
    packed = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
    values, end = packed.numpy(), 0
    for array in arrays:
        begin, end = end, end + array.size
        values[begin:end] = array.reshape(-1)
    return packed.to(device, non_blocking=is_pinned)


def zeros(shapes: Sequence[Sequence[int]], *, is_pinned: bool = False) -> tuple[Tensor, list[Place]]:
    """A flat int32 tensor of the host, in which tensors of these shapes lie one after another, and where.

    is_pinned  in memory which a GPU reads itself, if it is not too large: PyTorch's allocator gives it out again when the
               copies that were made of it are done
    """
    places, end = [], 0
    for shape in shapes:
        begin, size = -(-end // ALIGNMENT) * ALIGNMENT, math.prod(shape)
        places.append(Place(begin, size, shape))
        end = begin + size
    return torch.zeros(end, dtype=torch.int32, device="cpu", pin_memory=is_pinned and end <= MOST_PINNED), places


def views(packed: Tensor, places: Sequence[Place]) -> list[Array]:
    """The memory of each tensor in a packed one of the host, to be written."""
    values = packed.numpy()
    flat = [(values[begin : begin + size], shape) for begin, size, shape in places]
    return [value if len(shape) == 1 else value.reshape(shape) for value, shape in flat]


def pack(tensors: Sequence[Tensor], *, is_pinned: bool = False) -> tuple[Tensor, list[Place]]:
    """int32 tensors of the host, one after another in a flat one, and where each lies; is_pinned as of `zeros`."""
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
    packed, places = zeros([tensor.shape for tensor in tensors], is_pinned=is_pinned)
    for tensor, view in zip(tensors, views(packed, places), strict=True):
        view[...] = tensor.detach().numpy()
    return packed, places


def unpack(packed: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors that lie in a packed one, whose memory they keep.

    Each has a storage of its own: of a view, pickle would store all that is packed, and torch.compile might guard the offset.
    """
    storage, found = packed.untyped_storage(), []
    for begin, size, shape in places:
        # an empty slice of a storage is none of its own
        tensor = packed.new(storage[4 * begin : 4 * (begin + size)]) if size else packed.new_empty(shape)
        # in place: a view would be one of another tensor
        found.append(tensor if len(shape) == 1 else tensor.resize_(shape))
    return found
