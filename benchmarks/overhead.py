"""What does a call cost on the host? `python -m benchmarks.overhead` times tiny calls, where the GPU is never behind."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import masks
from blocksparse_flash import attention


def microseconds(call: Callable[[], Any], *, runs: int = 300) -> float:
    """Median processor time until the call returns, the GPU idle before each."""
    for _ in range(20):
        call()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    layout = masks.local(256, window=64).to("cuda")
    wanting = q.clone().requires_grad_()
    dout = torch.ones_like(q)
    outs = {
        "dense": attention(wanting, q, q),
        "layout": attention(wanting, q, q, layout),
        "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention(wanting, q, q),
    }

    def backward(name: str) -> Any:
        return torch.autograd.grad(outs[name], wanting, dout, retain_graph=True)

    calls: dict[str, Callable[[], Any]] = {
        "dense": lambda: attention(q, q, q),
        "causal": lambda: attention(q, q, q, causal=True),
        "layout": lambda: attention(q, q, q, layout),
        "layout, wanting gradients": lambda: attention(wanting, q, q, layout),
        "scaled_dot_product_attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        **{f"backward of {name}": functools.partial(backward, name) for name in outs},
    }
    for name, call in calls.items():
        print(f"{name:41} {microseconds(call):6.1f} microseconds a call")


if __name__ == "__main__":
    main()
