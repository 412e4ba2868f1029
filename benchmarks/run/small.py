"""Speed of small calls: `python -m benchmarks.run.small` on a CUDA GPU, one JSON line per figure.

At 512 to 2,048 tokens a call takes more host time than GPU time, hence two clocks. "gpu" is GPU time: the GPU sleeps
until the host has launched the whole call, with a cold L2 cache. "wall" is the wall clock over calls in a row, as in
an eager model. All calls of a case take turns, so that host noise affects all alike.

Lines: clock is "gpu" or "wall"; direction is "fwd", "bwd" (backward alone) or "step" (both). Outputs and gradients are
compared with float32 before timing. `python -m benchmarks.report` makes a table of them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import measure, patterns
from .attention import Run, chosen, facts, for_each, inputs
from .correctness import is_right
from .patterns import BLOCK, Pattern
from .peers import Peer

LENGTHS = (512, 1024, 2048)
NAMES = ("dense", "causal", "local", "butterfly")
KEYS = [*(key for key in measure.KEYS if key not in ("tflops", "peak_bytes", "setup_ms")), "clock"]
# repetitions of each call, and calls in a row per wall-clock measurement
ROUNDS = {"gpu": 60, "wall": 12}
IN_A_ROW = 40
# cycles that the GPU sleeps, almost a millisecond: longer than any host takes to launch a call
ASLEEP = 1_500_000


def cases(length: int) -> Iterator[Pattern]:
    return (pattern for pattern in patterns.patterns(length) if pattern.name in NAMES)


def on_gpu(call: Callable[[], Any], cache: torch.Tensor, asleep: int = ASLEEP) -> float:
    """Milliseconds of GPU time.

    cache   larger than L2, which writing it empties
    asleep  cycles that the GPU sleeps before: longer than the host takes to launch the call
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cache.zero_()
    torch.cuda._sleep(asleep)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def in_a_row(call: Callable[[], Any]) -> float:
    """Wall-clock milliseconds per call, over several calls in a row."""

    def several() -> None:
        for _ in range(IN_A_ROW):
            call()

    return measure.first_call_milliseconds(several) / IN_A_ROW


def take_turns(
    calls: Sequence[Callable[[], Any]], clock: Callable[[Callable[[], Any]], float], rounds: int
) -> list[dict[str, float]]:
    """Median, 20th and 80th percentile of each call's milliseconds."""
    took = [[clock(call) for call in calls] for _ in range(rounds)]
    return [measure.percentiles(times) for times in zip(*took, strict=True)]


def compare(pattern: Pattern, among: Iterable[Peer], run: Run) -> None:
    """Times all peers that support the pattern, in turns: a line per direction and clock."""
    found: list[tuple[Peer, str, Callable[[], Any]]] = []

    def add(peer: Peer, label: str) -> None:
        tensors, dout = inputs(run, pattern.length, tokens_first=peer.tokens_first)
        call = peer.prepare(pattern, run.shape)
        if is_right(call, tensors, pattern.attends, label):
            calls = measure.directions(call, tensors, dout)
            found.extend((peer, direction, timed) for direction, timed in calls.items())

    for_each(among, pattern.name, pattern, run, add)
    if not found:
        return
    # larger than any L2 cache
    cache = torch.empty(1 << 28, dtype=torch.uint8, device=run.device)
    clocks: dict[str, Callable[[Callable[[], Any]], float]] = {
        "gpu": functools.partial(on_gpu, cache=cache),
        "wall": in_a_row,
    }
    calls = [call for *_, call in found]
    for call in calls * 3:
        call()
    for clock, read in clocks.items():
        for (peer, direction, _), times in zip(found, take_turns(calls, read, ROUNDS[clock]), strict=True):
            line = {**facts("small", pattern.name, pattern, peer, run), "direction": direction, "clock": clock, **times}
            measure.append(run.out, line, KEYS)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__, "small.jsonl")
    tokens = f"tokens, multiples of {BLOCK}"
    parser.add_argument("--lengths", type=measure.multiple_of(BLOCK), nargs="+", default=[*LENGTHS], help=tokens)
    return measure.parsed_with_sizes(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    measure.require_gpu()
    among = chosen(options.providers, torch.cuda.get_device_capability())
    for length in options.lengths:
        for head_dim in options.head_dims:
            # kernels compiled for other shapes count toward PyTorch's limit
            torch.compiler.reset()
            for pattern in cases(length):
                compare(pattern, among, Run(1, options.hidden, head_dim, options.out))


if __name__ == "__main__":
    main()
