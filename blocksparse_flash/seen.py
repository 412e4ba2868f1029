"""What is seen of tensors, besides their numbers and where they lie? Types, shapes, strides, alignment: once a call, as one object.

Knows tensors, and what the copy engine reads. Does not know what they mean, nor who asks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import copy_engine


class Seen(NamedTuple):
    """What a launch must know of a tensor besides its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool


def see(tensor: torch.Tensor | None) -> Seen | None:
    """The facts about a tensor, which Triton compiles for: hashable. None for none."""
    if tensor is None:
        return None
    return Seen(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0)


@dataclass(frozen=True, eq=False)
class Kind:
    """What was seen of some tensors, in their order. Told apart by identity, which is hashed in no time: see `kind_of`."""

    tensors: tuple[Seen, ...]

    @functools.cached_property
    def is_readable(self) -> bool:
        """Whether the copy engine can read all of these (batch, heads, length, head_dim) tensors."""
        return all(
            each.strides[-1] == 1 and copy_engine.takes(each.dtype.itemsize, each.shape, each.strides, each.is_aligned)
            for each in self.tensors
        )


@functools.lru_cache(maxsize=4096)
def _kind(facts: tuple[Any, ...]) -> Kind:
    return Kind(tuple(Seen(*facts[i : i + 4]) for i in range(0, len(facts), 4)))


def kind_of(*tensors: torch.Tensor) -> Kind:
    """The kind of some tensors, the same object for all of whom the same is seen.

    For a kind that was forgotten another one is made: what was prepared for the first one is then prepared again.
    """
    facts: list[Any] = []
    for tensor in tensors:
        facts += tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0
    return _kind(tuple(facts))
