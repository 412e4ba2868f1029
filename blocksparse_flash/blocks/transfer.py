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

# int32 words: every tensor is aligned to 128 bytes, for kernels and TMA
ALIGNMENT = 32
# int32 words (64 MB) up to which host memory is pinned for a copy: PyTorch caches pinned memory
MAX_PINNED = 1 << 24


class Place(NamedTuple):
    """Position of a tensor in a packed one: first word, number of words, shape."""

    begin: int
    size: int
    shape: Sequence[int]


def resolved(device: torch.device | str | int) -> torch.device:
    """The device with its index, as tensors report it."""
    if isinstance(device, torch.device) and device.index is not None:
        return device
    if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
        raise TypeError(f'device must be a torch.device, a str or an int, such as "cuda", got {device!r}')
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be one of PyTorch's, got {device!r}: {error}") from error
    if device.type == "cpu" or device.index is not None:
        return device
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.empty(0, device=device).device


def to_device(tensors: Sequence[Tensor], device: torch.device | str, *, non_blocking: bool = False) -> list[Tensor]:
    """The same int32 tensors on a device; one copy moves them all from the host to a GPU.

    non_blocking  as in `sent`
    """
    device = torch.device(device)
    is_on_host = all(tensor.is_cpu for tensor in tensors)
    if is_on_host and device.type == "cpu":
        return list(tensors)
    if device.type != "cuda" or not is_on_host:
        return [tensor.to(device, non_blocking=non_blocking) for tensor in tensors]
    return sent(*pack(tensors, is_pinned=may_pin(device)), device, non_blocking=non_blocking)


def may_pin(device: torch.device) -> bool:
    """Whether a copy to a device may use pinned memory: to a GPU, unless a CUDA graph captures it.

    Each replay would read the pinned memory again, which holds other data by then. CUDA refuses to capture a copy from
    unpinned memory.
    """
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def sent(packed: Tensor, places: Sequence[Place], device: torch.device, *, non_blocking: bool = False) -> list[Tensor]:
    """The tensors of a packed host tensor, on a device; one copy moves them to a GPU.

    non_blocking  False: the host waits for the copy, as in `torch.Tensor.to`. True: it does not; streams other than the
                  current one must wait before they use the tensors
    """
    if device.type != "cuda":
        return to_device(unpack(packed, places), device, non_blocking=non_blocking)
    return unpack(packed.to(device, non_blocking=non_blocking and packed.is_pinned()), places)


def sent_flat(arrays: Sequence[Array], device: torch.device) -> Tensor:
    """int32 arrays concatenated into a flat tensor on a device; the host does not wait for a copy to a GPU."""
    size = sum([array.size for array in arrays])
    is_pinned = size <= MAX_PINNED and may_pin(device)
    packed = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
    np.concatenate([array.reshape(-1) for array in arrays], out=packed.numpy())
    return packed.to(device, non_blocking=is_pinned)


def zeros(shapes: Sequence[Sequence[int]], *, is_pinned: bool = False) -> tuple[Tensor, list[Place]]:
    """(flat int32 host tensor of zeros with room for tensors of these shapes, their places).

    is_pinned  in pinned memory, up to MAX_PINNED words; PyTorch's allocator reuses it once its copies are done
    """
    places, end = [], 0
    for shape in shapes:
        begin, size = -(-end // ALIGNMENT) * ALIGNMENT, math.prod(shape)
        places.append(Place(begin, size, shape))
        end = begin + size
    return torch.zeros(end, dtype=torch.int32, device="cpu", pin_memory=is_pinned and end <= MAX_PINNED), places


def views(packed: Tensor, places: Sequence[Place]) -> list[Array]:
    """Writable NumPy views of the tensors in a packed host tensor."""
    values = packed.numpy()
    flat = [(values[begin : begin + size], shape) for begin, size, shape in places]
    return [value if len(shape) == 1 else value.reshape(shape) for value, shape in flat]


def pack(tensors: Sequence[Tensor], *, is_pinned: bool = False) -> tuple[Tensor, list[Place]]:
    """(int32 host tensors packed into a flat one, their places); is_pinned as in `zeros`."""
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
    packed, places = zeros([tensor.shape for tensor in tensors], is_pinned=is_pinned)
    for tensor, view in zip(tensors, views(packed, places), strict=True):
        view[...] = tensor.detach().numpy()
    return packed, places


def unpack(packed: Tensor, places: Sequence[Place]) -> list[Tensor]:
    """The tensors in a packed one, sharing its memory.

    Each has its own storage: pickle would store the whole base of a view, and torch.compile might guard its offset.
    """
    storage, found = packed.untyped_storage(), []
    for begin, size, shape in places:
        # an empty slice of a storage is not a storage of its own
        tensor = packed.new(storage[4 * begin : 4 * (begin + size)]) if size else packed.new_empty(shape)
        # resized in place, since a view would have a base
        found.append(tensor if len(shape) == 1 else tensor.resize_(shape))
    return found
