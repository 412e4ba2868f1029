"""Host time of warm calls, with the GPU idle before each: `python -m benchmarks.run.overhead`.

Tiny calls on backend "triton" and, on a GPU of compute capability 9.0, larger ones on "hopper". "Its launch alone"
launches the call's kernel again on the same tensors, with prepared arguments; the rest of a call is our overhead.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

import masks
from blocksparse_flash import attention

from . import measure


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


def calls(shape: tuple[int, ...], window: int, **options: Any) -> dict[str, Callable[[], Any]]:
    """Forwards, backwards and both of dense and sparse attention and of SDPA, by name.

    shape   of q, k, v (batch, heads, length, head_dim)
    window  of the layout
    options  of attention
    """
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, dout = tensors[:3], tensors[3]
    layout = masks.local(shape[2], window=window).to("cuda")
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "dense": functools.partial(attention, **options),
        "layout": functools.partial(attention, layout=layout, **options),
        "scaled_dot_product_attention": scaled_dot_product_attention,
    }
    found = {}
    for name, function in functions.items():
        found[name] = measure.directions(function, inputs, dout)["fwd"]
        with_gradients = measure.directions(function, [x.clone().requires_grad_() for x in inputs], dout)
        for direction, words in (("fwd", "with gradients"), ("bwd", "backward"), ("step", "forward and backward")):
            found[f"{name}, {words}"] = with_gradients[direction]
    return found


def show(name: str, took: float) -> None:
    print(f"{name:58} {took:6.1f} microseconds a call", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    measure.require_gpu()
    for name, call in calls((1, 2, 256, 64), 64).items():
        show(f"triton, {name}", microseconds(call))
    if torch.cuda.get_device_capability() != (9, 0):
        print('backend "hopper" needs compute capability 9.0; not timed')
        return
    larger = calls((1, 16, 2048, 128), 256, backend="hopper")
    took = {name: microseconds(call) for name, call in larger.items()}
    for name, each in took.items():
        show(f"hopper, {name}", each)
    for name in ("dense", "layout"):
        # the first call of the same kind binds the arguments
        (launch,) = launches_of(larger[name])
        alone = microseconds(launch)
        show(f"hopper, {name}, its launch alone", alone)
        show(f"hopper, {name}, beyond its launch", took[name] - alone)


if __name__ == "__main__":
    main()
