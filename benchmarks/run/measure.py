"""Timing and memory of calls, and result files with one JSON line a measurement."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# runs of a call that estimate its time
TRIAL = 5
# of a GPU at 2 GHz; at a lower clock it sleeps longer
CYCLES_PER_MS = 2_000_000
# errors with which a peer may refuse a call; ours may not
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)
# keys of a result line, in order
KEYS = [
    "bench", "provider", "backend", "pattern", "density", "n", "batch", "heads", "head_dim", "dtype", "direction",
    "ms", "ms_p20", "ms_p80", "tflops", "peak_bytes", "setup_ms", "device", "torch", "triton", "commit",
]  # fmt: skip
# of lines with the energy of a call
KEYS_WITH_ENERGY = [*KEYS, "joules"]
# keys that are printed: names, sizes with their key, and figures with theirs
NAMES = ("bench", "task", "what", "provider", "backend", "model", "pattern", "direction", "clock", "status")
SIZES = ("n", "q_len", "batch", "heads", "kv_heads", "head_dim")
FIGURES = (
    "ms", "ms_p20", "ms_p80", "tflops", "gb_per_s", "gb_s", "copy_share", "tokens_per_s", "speedup", "bound_ms",
    "joules", "overlap", "density", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "peak_bytes", "accuracy",
)  # fmt: skip


def percentiles(times: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile of these milliseconds, by the keys of a line."""
    return dict(zip(("ms", "ms_p20", "ms_p80"), np.quantile(times, [0.5, 0.2, 0.8]).tolist(), strict=True))


def runs_on_gpu(call: Callable[[], Any], *, warmup_ms: float, measure_ms: float) -> list[float]:
    """Milliseconds of a call's runs on the GPU, the L2 cache emptied before each.

    As triton.testing.do_bench, whose times include the wait of the GPU where the host takes longer to launch a call
    than the GPU to run it. Here the GPU sleeps first, until the host is ahead.
    """
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()

    def run(times: int) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
        for start, end in events:
            driver.active.clear_cache(cache)
            start.record()
            call()
            end.record()
        return events

    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tried = run(TRIAL)
    of_host = 1000 * (time.perf_counter() - begin) / TRIAL
    torch.cuda.synchronize()
    # from one end to the next: with the emptying of the cache and, if the host is slow, the wait for it
    of_both = tried[0][1].elapsed_time(tried[-1][1]) / (TRIAL - 1)
    n_runs = max(1, int(measure_ms / of_both))
    for _ in range(max(1, int(warmup_ms / of_both))):
        call()
    # a host that is twice as fast as the GPU stays ahead by itself
    if 2 * of_host > of_both:
        torch.cuda._sleep(int(CYCLES_PER_MS * n_runs * of_host))
    events = run(n_runs)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def milliseconds(call: Callable[[], Any], *, warmup_ms: int = 25, measure_ms: int = 120) -> dict[str, float]:
    """Median, 20th and 80th percentile of `runs_on_gpu`."""
    return percentiles(runs_on_gpu(call, warmup_ms=warmup_ms, measure_ms=measure_ms))


def orders(n_calls: int, n_rounds: int) -> list[list[int]]:
    """The order in which calls take turns in each round: drawn, but the same for every run.

    In rotation, each call would always follow the same one. A GPU at its power limit runs a call faster after one that
    needs less power: FlashAttention-4 after attention by PyTorch's "math", 1.15 times as fast as after this library.
    """
    draw = random.Random(0)
    return [draw.sample(range(n_calls), n_calls) for _ in range(n_rounds)]


def milliseconds_in_turns(calls: Sequence[Callable[[], Any]], *, n_rounds: int = 5) -> list[dict[str, float]]:
    """`milliseconds` of each call. They take turns, see `orders`: a clock that changes changes all."""
    times: list[list[float]] = [[] for _ in calls]
    for order in orders(len(calls), n_rounds):
        for which in order:
            # long enough for the clock to settle at the power of this call
            times[which] += runs_on_gpu(calls[which], warmup_ms=50, measure_ms=40)
    return [percentiles(each) for each in times]


@functools.cache
def energy_counter() -> Callable[[], float] | None:
    """Reads the energy that the current GPU has used since its driver was loaded, in joules; None without NVML.

    Prints once why there is none, if NVML refuses.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # NVML does not number GPUs as CUDA_VISIBLE_DEVICES does
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        # not every GPU has this counter
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        print(f"no energy is measured: {error}", flush=True)
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def joules(call: Callable[[], Any], milliseconds_per_call: float, *, seconds: float = 0.5) -> float | None:
    """Energy of a call in a loop of calls, of the whole GPU; None without a counter.

    The counter changes every 20 to 100 ms, so the measurement begins and ends at such a change.
    """
    read = energy_counter()
    if read is None:
        return None
    batch = max(1, round(2 / milliseconds_per_call))
    before, first, n_calls = read(), None, 0
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < 10 * seconds:
        for _ in range(batch):
            call()
        synchronize()
        n_calls += batch
        now = read()
        if now == before:
            continue
        before = now
        if first is None:
            first, n_calls, begin = now, 0, time.perf_counter()
        elif elapsed >= seconds:
            return (now - first) / n_calls
    print("no energy is measured: the counter of NVML stands still", flush=True)
    return None


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak of the bytes requested during a call, over those before it, without the caching of the allocator."""
    # garbage of earlier calls, freed during this one, would lower the peak
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_call_milliseconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a call that may compile."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return 1000 * (time.perf_counter() - start)


def wall_milliseconds(call: Callable[[], Any], *, warmup: int = 1, runs: int = 7) -> dict[str, float]:
    """Median, 20th and 80th percentile of the wall-clock time of a call that works on the host too."""
    for _ in range(warmup):
        call()
    return percentiles([first_call_milliseconds(call) for _ in range(runs)])


def wall_milliseconds_in_turns(calls: Sequence[Callable[[], Any]], *, runs: int) -> list[dict[str, float]]:
    """`wall_milliseconds` of each call, warmed up before. They take turns, see `orders`."""
    times: list[list[float]] = [[] for _ in calls]
    for order in orders(len(calls), runs):
        for which in order:
            times[which].append(first_call_milliseconds(calls[which]))
    return [percentiles(each) for each in times]


def timed(step: Callable[[], Any], device: torch.device, n_steps: int) -> dict[str, Any]:
    """Median and percentiles of a step's wall-clock time, and its peak memory, weights included; None on a CPU."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times = wall_milliseconds(step, warmup=0, runs=n_steps)
    return {**times, "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None}


def directions(
    call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """The calls to time: "fwd" and, if the output has gradients, "bwd" alone and "step", which is both."""
    forward = functools.partial(call, *inputs)
    out = forward()
    if not out.requires_grad:
        return {"fwd": forward}
    return {
        "fwd": forward,
        "bwd": functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True),
        "step": lambda: torch.autograd.grad(forward(), inputs, dout),
    }


def release() -> None:
    """Frees unused GPU memory; modules and their hooks are reference cycles."""
    gc.collect()
    # does nothing without a GPU
    torch.cuda.empty_cache()


def guarded(label: str, is_ours: bool, work: Callable[[], None]) -> None:
    """Does the work; prints the reason if it runs out of memory or if a peer refuses it."""
    try:
        work()
    except torch.OutOfMemoryError:
        print(f"{label}: out of memory; not timed", flush=True)
    except REFUSALS as error:
        if is_ours:
            raise
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        print(f"{label}: refused, {type(error).__name__}: {reason}; not timed", flush=True)
    # after the except blocks, which keep the frames of the failed call alive
    release()


def commit() -> str:
    """The commit that is checked out, with a + if tracked files have changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device | None = None) -> dict[str, str | None]:
    """GPU, versions and commit of a measurement. device: None is the current GPU; triton is None on a CPU."""
    device = torch.device("cuda") if device is None else device
    version = None
    if device.type == "cuda":
        import triton

        version = triton.__version__
    return {"device": device_name(device), "torch": torch.__version__, "triton": version, "commit": commit()}


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")


def appendable(text: str) -> Path:
    """The type of an option: a file to which lines can be appended."""
    try:
        check_can_append(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text}: {error.strerror}") from None
    return Path(text)


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with the description of a module and the flag --out."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    # argparse applies the type to a default that is text
    made.add_argument("--out", type=appendable, default=f"benchmarks/results/{out}", help="appended to")
    return made


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --resume, see `is_measured`."""
    parser.add_argument(
        "--resume", action="store_true", help="skip cases that --out has of this device, commit, torch and triton"
    )


def is_measured(path: Path, facts: dict[str, Any]) -> bool:
    """Whether a file has a line with these facts, of this device, commit, torch and triton; prints what is skipped."""
    if not path.exists():
        return False
    wanted = {**facts, **environment()}
    try:
        lines = read(path)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    found = any(all(line.get(key) == value for key, value in wanted.items()) for line in lines)
    if found:
        print(f"{', '.join(f'{key} {value}' for key, value in facts.items())}: measured before; skipped", flush=True)
    return found


def multiple_of(number: int) -> Callable[[str], int]:
    """The type of an option: a positive multiple of a number."""

    def read(text: str) -> int:
        value = int(text)
        if value < 1 or value % number:
            raise argparse.ArgumentTypeError(f"must be a positive multiple of {number}, got {text}")
        return value

    return read


def parsed_with_sizes(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The options of a parser, of a hidden size, and of the providers to compare."""
    parser.add_argument("--hidden", type=multiple_of(1), default=2048, help="heads * head_dim")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64], help="divisors of --hidden")
    parser.add_argument("--providers", nargs="+", help="names; default: all that are installed")
    options = parser.parse_args(arguments)
    for head_dim in options.head_dims:
        if head_dim < 1 or options.hidden % head_dim:
            parser.error(f"--head-dims must divide --hidden {options.hidden}, got {head_dim}")
    return options


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are not empty, oldest first; ValueError for one that is not a JSON object."""
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            problem = None if isinstance(line, dict) else "it has no names"
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            raise ValueError(
                f"{path}, line {number} is not JSON of a result: {problem}. A kill or a full disk may have cut it off: "
                "remove this line"
            )
        found.append(line)
    return found


def described(line: dict[str, Any]) -> str:
    """What was measured, and the figures, as a row of text."""
    names = [str(line[key]) for key in NAMES if line.get(key) is not None]
    sizes = [f"{key} {line[key]}" for key in SIZES if line.get(key) is not None]
    figures = [f"{key} {line[key]:.4g}" for key in FIGURES if line.get(key) is not None]
    return f"{', '.join(names):54} {', '.join(sizes):40} {', '.join(figures)}"


def append(path: Path, line: dict[str, Any], keys: Sequence[str] = KEYS) -> None:
    """Appends one JSON object with exactly these keys, in their order, as a line, and prints it as a row of text."""
    assert set(line) == set(keys), set(line) ^ set(keys)
    # first, so that it is not lost if it cannot be written
    print(described(line), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # a line that was cut off must not take this one with it
    end = path.read_bytes()[-1:] if path.is_file() else b""
    text = json.dumps({key: line[key] for key in keys}) + "\n"
    with path.open("a") as file:
        file.write(text if end in (b"", b"\n") else f"\n{text}")


def check_can_append(path: Path) -> None:
    """OSError before anything is measured, if lines could not be appended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink(missing_ok=True)


def appended(path: Path, lines: Iterable[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The lines, each appended as soon as it is measured."""
    found = []
    for line in lines:
        append(path, line, keys)
        found.append(line)
    return found
