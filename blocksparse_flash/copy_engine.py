"""Can the copy engine of sm90 and later (TMA) read a tensor where it lies?

Knows strides and addresses. Does not know what the tensor means, nor which kernel reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from . import watchers


def takes(itemsize: int, shape: Sequence[int], strides: Sequence[int], is_aligned: bool) -> bool:
    """Whether it can read such a (batch, heads, length, head_dim) tensor, whose last stride is 1.

    It wants 16-bit floats, an address and strides that are multiples of 16 bytes, the strides above 0; that of an axis of
    size 1 does not matter.
    """
    return (
        itemsize == 2
        and is_aligned
        and 0 not in shape
        and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(shape[:3], strides[:3], strict=True))
    )


# the answer of a kind of tensor, given again in a third of the time
_takes = functools.lru_cache(maxsize=4096)(takes)


def can_read(tensor: torch.Tensor) -> bool:
    """The same of a tensor. While torch.compile traces there is no address to see, nor an offset: it counts as aligned, and
    the kernels copy what turns out not to be."""
    if tensor.stride(-1) != 1:
        return False
    if torch.compiler.is_compiling() or not watchers.has_numbers(tensor):
        return takes(tensor.element_size(), tensor.shape, tensor.stride(), True)
    return _takes(tensor.element_size(), tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)
