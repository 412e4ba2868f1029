"""Host time of warm calls, with the GPU idle before each: `python -m benchmarks.run.overhead`.

Tiny calls on backend "triton" and, on a GPU of compute capability 9.0, larger ones on "hopper". "Its launch alone"
launches the call's kernel again on the same tensors, with prepared arguments; the rest of a call is our overhead.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.autograd import grad
from torch.nn.functional import scaled_dot_product_attention

import masks
from blocksparse_flash import attention

from . import measure

Calls = dict[str, Callable[[], Any]]


def microseconds(call: Callable[[], Any], *, runs: int = 300) -> float:
    """Median time until the call returns, with the GPU idle before each."""
    for _ in range(20):
        call()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def launches_of(call: Callable[[], Any]) -> list[Callable[[], None]]:
    """The launches of a call, which can be repeated on the same tensors."""
    from blocksparse_flash.runtime.launch import Launch

    made: list[Callable[[], None]] = []
    launch = Launch.__call__

    def noted(self: Launch, *tensors: Any) -> None:
        made.append(functools.partial(launch, self, *tensors))
        launch(self, *tensors)

    with mock.patch.object(Launch, "__call__", noted):
        call()
    return made


def tiny() -> Calls:
    """Calls on backend "triton"."""
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    layout = masks.local(256, window=64).to("cuda")
    wanting = q.clone().requires_grad_()
    dout = torch.ones_like(q)
    outs = {
        "dense": attention(wanting, q, q),
        "layout": attention(wanting, q, q, layout),
        "scaled_dot_product_attention": scaled_dot_product_attention(wanting, q, q),
    }

    def backward(name: str) -> Any:
        return grad(outs[name], wanting, dout, retain_graph=True)

    return {
        "dense": lambda: attention(q, q, q),
        "causal": lambda: attention(q, q, q, causal=True),
        "layout": lambda: attention(q, q, q, layout),
        "layout, wanting gradients": lambda: attention(wanting, q, q, layout),
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, q, q),
        **{f"backward of {name}": functools.partial(backward, name) for name in outs},
    }


def on_hopper() -> tuple[Calls, Calls]:
    """(forwards on backend "hopper", the same with backwards and SDPA)."""
    q, k, v = (torch.randn(1, 16, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    wanting = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
    layout = masks.local(2048, window=256).to("cuda")
    dout = torch.ones_like(q)
    forwards: Calls = {
        "hopper, dense": lambda: attention(q, k, v, backend="hopper"),
        "hopper, layout": lambda: attention(q, k, v, layout, backend="hopper"),
    }
    return forwards, {
        **forwards,
        "its size, scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
        "hopper, dense, and backward": lambda: grad(attention(*wanting, backend="hopper"), wanting, dout),
        "hopper, layout, and backward": lambda: grad(attention(*wanting, layout, backend="hopper"), wanting, dout),
        "its size, SDPA, and backward": lambda: grad(scaled_dot_product_attention(*wanting), wanting, dout),
    }


def show(name: str, took: float) -> None:
    print(f"{name:41} {took:6.1f} microseconds a call", flush=True)


def main() -> None:
    measure.require_gpu()
    for name, call in tiny().items():
        show(name, microseconds(call))
    if torch.cuda.get_device_capability() != (9, 0):
        print('backend "hopper" needs compute capability 9.0; not timed')
        return
    forwards, calls = on_hopper()
    took = {name: microseconds(call) for name, call in calls.items()}
    for name, each in took.items():
        show(name, each)
    for name, call in forwards.items():
        # the first call of the same kind binds the arguments
        (launch,) = launches_of(call)
        alone = microseconds(launch)
        show(f"{name}, its launch alone", alone)
        show(f"{name}, beyond its launch", took[name] - alone)


if __name__ == "__main__":
    main()
