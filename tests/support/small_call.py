"""A small valid call of attention with a layout that has rows without keys, changes of the call, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.functional import attention_with_lse

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM, V_DIM = 2, 4, 2, 32, 48, 16, 8
BACKENDS = ["eager", "reference"]


def window(q_len: int = Q_LEN, kv_len: int = KV_LEN, heads: int | None = None, batch: int | None = None) -> BlockLayout:
    """Distance at most 20; every fourth query has no keys."""

    def attends(*positions: torch.Tensor) -> torch.Tensor:
        *_, q_pos, kv_pos = positions
        return ((q_pos - kv_pos).abs() <= 20) & (q_pos % 4 != 0)

    return BlockLayout.from_predicate(attends, q_len, kv_len, block_size=16, heads=heads, batch=batch)


def good_call(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (BATCH, HEADS, Q_LEN, HEAD_DIM),
        "k": (BATCH, KV_HEADS, KV_LEN, HEAD_DIM),
        "v": (BATCH, KV_HEADS, KV_LEN, V_DIM),
    }
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}


def resized(**shapes: tuple[int, ...]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: torch.zeros(shape) for name, shape in shapes.items()}


def cast(**dtypes: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name].to(dtype) for name, dtype in dtypes.items()}


def with_gradients(call: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv for fixed random gradients of out and lse."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in ("q", "k", "v")}
    out, lse = attention_with_lse(**{**call, **leaves}, **options)
    generator = torch.Generator().manual_seed(99)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in (out, lse)]
    torch.autograd.backward([out, lse], grads)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
