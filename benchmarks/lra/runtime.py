"""Times of attention alone over length, at the sizes of FlashAttention's runtime benchmark.

Batch 16, 8 heads, head_dim 64, 128 to 65,536 tokens, dense, and block-sparse with min(length / 8, 256) keys per query,
as for the sparse methods there. Blocks are half as wide: a query attends to its own block and to one half the sequence
away (the longest stride of a butterfly). With blocks of 16 tokens there is only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, explain

from ..run import measure
from ..run.correctness import mask_of, worst_errors
from .peers import OURS, PROVIDERS, Attend, attend_with, supported
from .published import BATCH, HEAD_DIM, HEADS
from .speed import untimed

# the error of a bfloat16 probability matrix is 0.015 (2048 tokens), ours 0.003
TOLERANCE = 0.04
# two products forward, five backward
FACTORS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


class Shape(NamedTuple):
    """Shape of q, k and v."""

    length: int
    batch: int = BATCH
    heads: int = HEADS
    head_dim: int = HEAD_DIM


def sparse_layout(length: int) -> BlockLayout:
    """min(length / 8, 256) keys for every query. length: a power of two, at least 128."""
    if length < 128 or length & (length - 1):
        raise ValueError(f"lengths must be powers of two, at least 128, got {length}")
    keys = min(length // 8, 256)
    side = max(16, keys // 2)
    rows = np.arange(length // side)
    cols = rows if keys == side else np.concatenate([rows, rows ^ (len(rows) // 2)])
    return BlockLayout.from_blocks(np.resize(rows, len(cols)), cols, length, length, block_size=side)


def _calls(attend: Attend, inputs: Sequence[Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of each direction, lazily, so that only one result is alive at a time."""
    dout = torch.randn_like(inputs[0])
    yield "fwd+bwd", lambda: torch.autograd.grad(attend(*inputs), inputs, dout)
    yield "fwd", lambda: attend(*inputs)
    result = attend(*inputs)
    yield "bwd", lambda: torch.autograd.grad(result, inputs, dout, retain_graph=True)


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
        size = (3, shape.batch, shape.heads, shape.length, shape.head_dim)
        drawn = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        inputs = [tensor.requires_grad_() for tensor in drawn.unbind()]
        attend = attend_with(provider, layout, device, backend=backend)
        setup_ms = measure.timed(lambda: attend(*inputs), device, 1)["ms"]
        error = np.max([*worst_errors(attend, inputs, mask_of(layout)).values()])
        status = status if error < TOLERANCE else f"wrong, relative error {error:.3g}"
        measure.release()
        for direction, call in _calls(attend, inputs) if error < TOLERANCE else ():
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
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return list(dict.fromkeys([explain(q, q, q).backend, *(["hopper"] if is_hopper else [])]))


def run(
    shape: Shape, device: torch.device, *, providers: Sequence[str] = PROVIDERS, n_calls: int = 20
) -> Iterator[dict[str, Any]]:
    """A line for each provider, backend, pattern and direction."""
    where = measure.environment(device)
    for pattern, layout in (("dense", None), ("butterfly", sparse_layout(shape.length))):
        density = 1.0 if layout is None else layout.density
        flops = 4 * shape.batch * shape.heads * shape.length**2 * density * shape.head_dim
        for provider in supported(providers, layout, device):
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
                measure.release()
