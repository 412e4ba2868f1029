"""How do operator arguments become kernel arguments? Tensor references, scale, lengths, dropout; and what the GPU is.

Knows: torch tensors, Triton's descriptors. Does not know: what a kernel computes, layouts, autograd.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
# side of a plan's tile, in tokens
TILE = 128
# elements of q and k from which on descriptors pay
WORTH_DESCRIBING = 1 << 20


@dataclass(frozen=True)
class Config:
    """One launch configuration: the part of a tile that a program holds, and Triton's launch options."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """The compile-time and launch arguments by name; read only."""
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


def wants_descriptors(major: int, *tensors: torch.Tensor) -> bool:
    """Whether the copy engine (TMA, sm90 and later) should read all of these (batch, heads, length, head_dim) tensors.

    It can if they are 16-bit floats with an aligned base and strides that are positive multiples of 16 bytes. Making a
    descriptor takes 6 microseconds on the host, which small tensors do not repay.
    """
    if major < 9 or tensors[0].numel() + tensors[1].numel() < WORTH_DESCRIBING:
        return False
    return all(
        t.element_size() == 2
        and t.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))
        and t.numel() > 0
        for t in tensors
    )


def describe(tensor: torch.Tensor, rows: int, dim: int) -> TensorDescriptor:
    """A descriptor which loads [rows, dim] of one head; past the end of a length or head_dim it reads zero."""
    strides = list(tensor.stride())
    # the stride of an axis of size 1 is arbitrary, the descriptor wants a valid one
    for axis in range(3):
        if tensor.shape[axis] == 1:
            strides[axis] = 8 * -(-tensor.shape[3] // 8)
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, dim])


def allows_tf32(dtype: torch.dtype) -> bool:
    """float32 products are IEEE unless torch's matmul precision allows TF32 (its older switches set this one too)."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


@functools.lru_cache(maxsize=1024)
def constants(
    head_dim: int,
    v_dim: int,
    group: int,
    scale: float,
    causal: bool,
    dropout_p: float,
    tma: bool,
    tf32: bool,
) -> dict[str, Any]:
    """The arguments of every kernel that do not change from call to call; read only.

    The scale is a positive base-2 factor and a sign, so that the maximum of raw scores can be scaled afterwards; scale 0
    multiplies the queries by 0 and the scores by 1.
    """
    return {
        "scale_log2": abs(scale) * LOG2_E if scale != 0 else 1.0,
        "threshold": min(round(dropout_p * 2**32), 2**32 - 1) - 2**31,
        "keep_scale": 1.0 / (1.0 - dropout_p),
        "SIGN": (scale > 0) - (scale < 0),
        "GROUP": group,
        "CAUSAL": causal,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": "tf32" if tf32 else "ieee",
        "TMA": tma,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "DIM": padded_dim(head_dim),
        "DIM_V": padded_dim(v_dim),
    }


def walk(plan: list[torch.Tensor], first: int) -> dict[str, Any]:
    """One direction of a plan: its rows (first = 0) or its columns (3). An empty plan is dense."""
    if not plan:
        return {"items_ptr": None, "indices_ptr": None, "ids_ptr": None, "words_ptr": None, "items_strides": (0, 0)}
    items = plan[first]
    batch, heads, _, _ = items.shape
    stride_batch, stride_head, _, _ = items.stride()
    return {
        "items_ptr": items,
        "indices_ptr": plan[first + 1],
        "ids_ptr": plan[first + 2],
        "words_ptr": plan[6],
        # an axis that all heads or batches share
        "items_strides": (stride_batch if batch > 1 else 0, stride_head if heads > 1 else 0),
    }


def device_seed(seed: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The seed on the device: a fill when it is on the host, never a wait."""
    if seed is None or seed.device == device:
        return seed
    return torch.full((1,), int(seed.item()), dtype=torch.int64, device=device)
