"""Timing and memory of calls, and result files with one JSON line a measurement."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# what a peer may say to what it cannot compute; ours has no excuse
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)
# of a result line, in this order
KEYS = [
    "bench",
    "provider",
    "backend",
    "pattern",
    "density",
    "n",
    "batch",
    "heads",
    "head_dim",
    "dtype",
    "direction",
    "ms",
    "ms_p20",
    "ms_p80",
    "tflops",
    "peak_bytes",
    "setup_ms",
    "device",
    "torch",
    "triton",
    "commit",
]


def milliseconds(call: Callable[[], Any], *, warmup_ms: int = 25, measure_ms: int = 120) -> dict[str, float]:
    """Median, 20th and 80th percentile of a call's time on the GPU, the L2 cache emptied before each run."""
    import triton

    median, low, high = triton.testing.do_bench(call, warmup=warmup_ms, rep=measure_ms, quantiles=[0.5, 0.2, 0.8])
    return {"ms": median, "ms_p20": low, "ms_p80": high}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes asked for at the highest point of a call, over those before it; what the allocator gives in addition depends on its past."""
    # garbage of earlier calls, freed during this one, would make it count as less
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def first_call_milliseconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of a call that may compile."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def wall_milliseconds(call: Callable[[], Any], *, warmup: int = 1, runs: int = 7) -> dict[str, float]:
    """Median, 20th and 80th percentile of the wall-clock time of a call that works on the host too."""
    for _ in range(warmup):
        call()
    times = sorted(first_call_milliseconds(call) for _ in range(runs))
    low, median, high = (times[round(share * (runs - 1))] for share in (0.2, 0.5, 0.8))
    return {"ms": median, "ms_p20": low, "ms_p80": high}


def timed(step: Callable[[], Any], device: torch.device, n_steps: int) -> dict[str, Any]:
    """Median and percentiles of a step's wall-clock time, and the most memory it holds, weights and all."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    took = []
    for _ in range(n_steps):
        start = time.perf_counter()
        step()
        wait()
        took.append(1000 * (time.perf_counter() - start))
    median, low, high = (
        torch.tensor(took, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8]).double()).tolist()
    )
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"ms": median, "ms_p20": low, "ms_p80": high, "peak_bytes": peak}


def release(device: torch.device) -> None:
    """Gives a GPU's memory back before the next candidate is made; modules and their hooks are cycles."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def guarded(said: str, is_ours: bool, work: Callable[[], None]) -> None:
    """Does the work; what does not fit, and what a peer refuses, is printed with its reason, and the next one goes on."""
    try:
        work()
    except torch.OutOfMemoryError:
        print(f"{said}: out of memory; not timed", flush=True)
    except REFUSALS as error:
        if is_ours:
            raise
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        print(f"{said}: refused, {type(error).__name__}: {reason}; not timed", flush=True)
    # what the failed call held is free again only after its frames are gone
    release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def commit() -> str:
    """The commit that is checked out, with a + if files were changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device | None = None) -> dict[str, str | None]:
    """Where a figure was measured: GPU, versions, commit. None is the current GPU; Triton is None where it ran nothing."""
    device = torch.device("cuda") if device is None else device
    version = None
    if device.type == "cuda":
        import triton

        version = triton.__version__
    return {"device": device_name(device), "torch": torch.__version__, "triton": version, "commit": commit()}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, line: dict[str, Any], keys: Sequence[str] = KEYS) -> None:
    """One JSON object with exactly these keys, in their order, appended as a line."""
    assert set(line) == set(keys), set(line) ^ set(keys)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({key: line[key] for key in keys}) + "\n")
