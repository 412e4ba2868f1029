"""Times of attention alone over length, at the sizes of FlashAttention's runtime benchmark.
Batch 16, 8 heads, head_dim 64, 128 to 65,536 tokens, dense, and block-sparse with min(length / 8, 256) keys per query,
as for the sparse methods there. Blocks are half as wide: a query attends to its own block and to one half the sequence
away (the longest stride of a butterfly). With blocks of 16 tokens there is only its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, explain

from ..run import measure
from ..run.correctness import relative_error
from .lines import untimed
from .peers import OURS, PROVIDERS, Attend, attend_with, materialised, why_not
from .published import BATCH, HEAD_DIM, HEADS

# the error of a bfloat16 probability matrix is 0.015 (2048 tokens), ours 0.003
TOLERANCE = 0.04
# queries per span on which outputs and gradients are compared
SPAN = 16
# two products forward, five backward
FACTORS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


class Shape(NamedTuple):
    """Shape of q, k and v."""

    length: int
    batch: int = BATCH
    heads: int = HEADS
    head_dim: int = HEAD_DIM


def keys_per_query(length: int) -> int:
    return min(length // 8, 256)


def sparse_layout(length: int) -> BlockLayout:
    """keys_per_query(length) keys for every query. length: a power of two, at least 128."""
    if length < 128 or length & (length - 1):
        raise ValueError(f"lengths must be powers of two, at least 128, got {length}")
    keys = keys_per_query(length)
    side = max(16, keys // 2)
    rows = np.arange(length // side)
    cols = rows if keys == side else np.concatenate([rows, rows ^ (len(rows) // 2)])
    return BlockLayout.from_blocks(np.resize(rows, len(cols)), cols, length, length, block_size=side)


def error(attend: Attend, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | None) -> float:
    """The largest relative error of output, dq, dk and dv against float32; NaN if there is one.

    Only some queries have an incoming gradient, so memory stays O(length).
    """
    length = q.shape[2]
    starts = sorted({0, length // 3 // SPAN * SPAN, length - SPAN})
    rows = torch.cat([torch.arange(start, start + SPAN) for start in starts]).to(q.device)
    mask = None
    if layout is not None:
        mask = torch.cat([layout.crop(start, start + SPAN).to_dense() for start in starts], dim=2).to(q.device)
    dout = torch.zeros_like(q).index_copy(2, rows, torch.randn_like(q[:, :, rows]))
    out = attend(q, k, v, 0.0)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    exact_q, exact_k, exact_v = (each.detach().float().requires_grad_() for each in (q[:, :, rows], k, v))
    expected = materialised(exact_q, exact_k, exact_v, 0.0, mask=mask)
    gradients = torch.autograd.grad(expected, (exact_q, exact_k, exact_v), dout[:, :, rows].float())
    pairs = zip((out[:, :, rows], dq[:, :, rows], dk, dv), (expected, *gradients), strict=True)
    return torch.stack([relative_error(one, other) for one, other in pairs]).max().item()


def _calls(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of each direction, lazily, so that only one result is alive at a time."""
    dout = torch.randn_like(q)

    def both() -> Any:
        return torch.autograd.grad(attend(q, k, v, 0.0), (q, k, v), dout)

    yield "fwd+bwd", both
    yield "fwd", functools.partial(attend, q, k, v, 0.0)
    result = attend(q, k, v, 0.0)
    yield "bwd", functools.partial(torch.autograd.grad, result, (q, k, v), dout, retain_graph=True)


def _timed(call: Callable[[], Any], device: torch.device, n_calls: int) -> dict[str, Any]:
    """Times of warm calls; peak_bytes includes q, k and v, as in the published table."""
    if device.type != "cuda":
        return {"status": "ok", **measure.timed(call, device, n_calls)}
    once = measure.timed(call, device, 1)
    return {"status": "ok", **measure.milliseconds(call), "peak_bytes": once["peak_bytes"]}


def measured(
    shape: Shape, provider: str, layout: BlockLayout | None, backend: str, device: torch.device, n_calls: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(direction, line) of a provider; directions that ran out of memory come last."""
    left, status = list(FACTORS), "out of memory"
    try:
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.batch, shape.heads, shape.length, shape.head_dim)
        q, k, v = (
            torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        attend = attend_with(provider, layout, device, backend=backend)
        setup_ms = measure.timed(lambda: attend(q, k, v, 0.0), device, 1)["ms"]
        wrong = error(attend, q, k, v, layout)
        is_right = wrong < TOLERANCE
        status = status if is_right else f"wrong, relative error {wrong:.3g}"
        measure.release(device)
        for direction, call in _calls(attend, q, k, v) if is_right else ():
            figures = _timed(call, device, n_calls)
            left.remove(direction)
            yield direction, {**figures, "setup_ms": setup_ms}
    except torch.OutOfMemoryError:
        # reported below, after its tensors are freed
        pass
    yield from ((direction, untimed(status)) for direction in left)


def backends(provider: str, device: torch.device) -> list[str]:
    """Our backends: the choice of "auto" for short calls and, on Hopper, `hopper`."""
    if provider != OURS:
        return ["auto"]
    q = torch.zeros(1, 1, 128, HEAD_DIM, dtype=torch.bfloat16, device=device)
    chosen = explain(q, q, q).backend
    if device.type != "cuda":
        return [chosen]
    try:
        return list(dict.fromkeys([chosen, explain(q, q, q, backend="hopper").backend]))
    except ValueError as refusal:
        print(refusal, flush=True)
        return [chosen]


def run(
    shape: Shape, device: torch.device, *, providers: Sequence[str] = PROVIDERS, n_calls: int = 20
) -> Iterator[dict[str, Any]]:
    """A line for each provider, backend, pattern and direction."""
    where = measure.environment(device)
    for pattern, layout in (("dense", None), ("butterfly", sparse_layout(shape.length))):
        density = 1.0 if layout is None else layout.density
        flops = 4 * shape.batch * shape.heads * shape.length**2 * density * shape.head_dim
        for provider in providers:
            reason = why_not(provider, layout, device)
            if reason is not None:
                print(f"{provider}: {reason}", flush=True)
                continue
            for backend in backends(provider, device):
                for direction, found in measured(shape, provider, layout, backend, device, n_calls):
                    ms = found["ms"]
                    yield {
                        "bench": "lra_runtime", "task": None, "provider": provider,
                        "backend": backend if provider == OURS else None, "pattern": pattern, "density": density,
                        "n": shape.length, "documents": 1, "batch": shape.batch, "heads": shape.heads,
                        "head_dim": shape.head_dim, "dtype": "bf16", "dropout_p": 0.0, "direction": direction, **found,
                        "tflops": None if ms is None else FACTORS[direction] * flops / ms * 1e-9,
                        **where,
                    }  # fmt: skip
                measure.release(device)
