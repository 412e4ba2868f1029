"""How do operator arguments become kernel arguments? Tensor references, scale, lengths, dropout; and what the GPU is.

Knows: torch tensors, Triton's descriptors. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634


class Config(NamedTuple):
    """One launch configuration: the part of a tile that a program holds, and Triton's launch options."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def blocks(self) -> dict[str, int]:
        """The compile-time and launch arguments by name."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@functools.cache
def device_limits(index: int | None) -> tuple[int, int]:
    """(major compute capability, bytes of shared memory a program may take); (0, unlimited) for the interpreter."""
    if index is None:
        return 0, 2**31
    properties = torch.cuda.get_device_properties(index)
    # missing in PyTorch's stubs
    return properties.major, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def padded_dim(head_dim: int) -> int:
    """Columns a program holds for `head_dim`: the next power of two, at least 16 (tensor cores want 16)."""
    return max(16, triton.next_power_of_2(head_dim))


def can_describe(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine (TMA, sm90 and later) can read all of these (batch, heads, length, head_dim) tensors.

    It wants 16-bit floats here, an aligned base, and strides that are positive multiples of 16 bytes.
    """
    return all(
        t.element_size() == 2
        and t.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))
        and t.numel() > 0
        for t in tensors
    )


def describe(tensor: torch.Tensor, rows: int, dim: int) -> TensorDescriptor:
    """A descriptor which loads [rows, dim] of one head; past the end of a length or head_dim it reads zero."""
    batch, heads, length, head_dim = tensor.shape
    strides = list(tensor.stride())
    # the stride of an axis of size 1 is arbitrary, the descriptor wants a valid one
    for axis, size in enumerate((batch, heads, length)):
        if size == 1:
            strides[axis] = 8 * -(-head_dim // 8)
    return TensorDescriptor(tensor, [batch, heads, length, head_dim], strides, [1, 1, rows, dim])


def references(tensors: dict[str, tuple[torch.Tensor, int, int]], *, tma: bool) -> dict[str, Any]:
    """`name_ref` (pointer or descriptor) and `name_strides` of each name: (tensor, rows, dim)."""
    arguments: dict[str, Any] = {}
    for name, (tensor, rows, dim) in tensors.items():
        arguments[f"{name}_ref"] = describe(tensor, rows, dim) if tma else tensor
        arguments[f"{name}_strides"] = tensor.stride()[:3]
    return arguments


def walk(items: torch.Tensor | None, indices: torch.Tensor | None, ids: torch.Tensor | None) -> dict[str, Any]:
    """One direction of a plan; an axis that all heads or batches share has stride 0. None: dense."""
    if items is None:
        return {"items_ptr": None, "indices_ptr": None, "ids_ptr": None, "items_strides": (0, 0)}
    batch, heads = items.shape[:2]
    strides = (items.stride(0) if batch > 1 else 0, items.stride(1) if heads > 1 else 0)
    return {"items_ptr": items, "indices_ptr": indices, "ids_ptr": ids, "items_strides": strides}


def score_scale(scale: float) -> dict[str, Any]:
    """The scale as a positive base-2 factor and a sign, so that the maximum of raw scores can be scaled afterwards.

    Scale 0 multiplies the queries by 0 and the scores by 1.
    """
    return {"scale_log2": abs(scale) * LOG2_E if scale != 0 else 1.0, "SIGN": (scale > 0) - (scale < 0)}


def dropout(dropout_p: float, seed: torch.Tensor | None, device: torch.device) -> dict[str, Any]:
    """Seed on the device (a fill when it is on the host, never a wait), threshold and factor of the kept."""
    if dropout_p == 0.0:
        return {"seed_ptr": None, "threshold": 0, "keep_scale": 1.0}
    assert seed is not None
    if seed.device != device:
        seed = torch.full((1,), int(seed.item()), dtype=torch.int64, device=device)
    threshold = min(round(dropout_p * 2**32), 2**32 - 1) - 2**31
    return {"seed_ptr": seed, "threshold": threshold, "keep_scale": 1.0 / (1.0 - dropout_p)}


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are IEEE unless torch's matmul precision allows TF32."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee"
