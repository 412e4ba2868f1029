"""Host time of warm calls, with the GPU idle before each: `python -m benchmarks.run.overhead`.

Tiny calls on backend "triton" and, on a GPU of compute capability 9.0, larger ones on "hopper". "Its launch alone"
launches the call's kernel again on the same tensors, with prepared arguments; the rest of a call is our overhead.

Then the parts of a training step, over steps in a row: autograd runs the backward on a thread of its own, and each
thread waits for the other.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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

# steps until the host waits for the GPU
IN_A_ROW = 40


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


def parts_of_step(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor, *, steps: int = 400
) -> dict[str, float]:
    """Median microseconds of the parts of a forward and backward, over steps in a row that do not wait for the GPU."""
    from blocksparse_flash import ops

    launch_backward, at = ops.launch_backward, list[float]()

    def noted(*arguments: Any) -> Any:
        at.append(time.perf_counter())
        grads = launch_backward(*arguments)
        at.append(time.perf_counter())
        return grads

    found = []
    with mock.patch.object(ops, "launch_backward", noted):
        for _ in range(20 + steps):
            at = [time.perf_counter()]
            out = function(*inputs)
            at.append(time.perf_counter())
            grads = torch.autograd.grad(out, inputs, dout)
            at.append(time.perf_counter())
            del out, grads
            at.append(time.perf_counter())
            found.append([1e6 * (end - begin) for begin, end in itertools.pairwise(at)])
            if len(found) % IN_A_ROW == 0:
                measure.synchronize()
    names = "forward", "until the backward begins", "backward", "until autograd returns", "until all is freed"
    return {name: statistics.median(times) for name, times in zip(names, zip(*found[20:], strict=True), strict=True)}


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


def show_step(name: str, shape: tuple[int, ...], **options: Any) -> None:
    *inputs, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    function = functools.partial(attention, **options)
    for part, took in parts_of_step(function, [x.requires_grad_() for x in inputs], dout).items():
        show(f"{name}, step, {part}", took)


def show(name: str, took: float) -> None:
    print(f"{name:58} {took:6.1f} microseconds a call", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    measure.require_gpu()
    for name, call in calls((1, 2, 256, 64), 64).items():
        show(f"triton, {name}", microseconds(call))
    show_step("triton, dense", (1, 2, 256, 64))
    show_step("triton, layout", (1, 2, 256, 64), layout=masks.local(256, window=64).to("cuda"))
    if torch.cuda.get_device_capability() != (9, 0):
        print('backend "hopper" needs compute capability 9.0; not timed')
        return
    larger = calls((1, 16, 2048, 128), 256, backend="hopper")
    took = {name: microseconds(call) for name, call in larger.items()}
    for name, each in took.items():
        show(f"hopper, {name}", each)
    show_step("hopper, dense", (1, 16, 2048, 128), backend="hopper")
    window = masks.local(2048, window=256).to("cuda")
    show_step("hopper, layout", (1, 16, 2048, 128), backend="hopper", layout=window)
    for name in ("dense", "layout"):
        # the first call of the same kind binds the arguments
        (launch,) = launches_of(larger[name])
        alone = microseconds(launch)
        show(f"hopper, {name}, its launch alone", alone)
        show(f"hopper, {name}, beyond its launch", took[name] - alone)


if __name__ == "__main__":
    main()
