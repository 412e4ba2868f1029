"""Times of runs on a GPU, with a host and a GPU that are simulated by their clocks, and lines of results."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.run import measure

# milliseconds to empty the L2 cache
EMPTYING = 0.1


class Clocks:
    """A host, and a GPU that runs one after another what the host has launched; both in milliseconds.

    of_host  time of the host to launch a call
    of_gpu   of the GPU to run it
    """

    def __init__(self, of_host: float, of_gpu: float) -> None:
        self.of_host, self.of_gpu = of_host, of_gpu
        self.host = self.gpu = 0.0
        self.n_calls, self.slept = 0, 0.0

    def launch(self, of_gpu: float) -> None:
        self.gpu = max(self.gpu, self.host) + of_gpu

    def call(self) -> None:
        self.n_calls += 1
        self.host += self.of_host
        self.launch(self.of_gpu)

    def sleep(self, cycles: int) -> None:
        self.slept += cycles / measure.CYCLES_PER_MS
        self.launch(cycles / measure.CYCLES_PER_MS)

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)


class Event:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def record(self) -> None:
        self.clocks.launch(0.0)
        self.at = self.clocks.gpu

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def times_of(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    def clear_cache(_: Any) -> None:
        clocks.launch(EMPTYING)

    active = types.SimpleNamespace(get_empty_cache_for_benchmark=object, clear_cache=clear_cache)
    monkeypatch.setattr("triton.runtime.driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clocks))
    monkeypatch.setattr(torch.cuda, "_sleep", clocks.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", clocks.synchronize)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clocks.host / 1000)
    return measure.runs_on_gpu(clocks.call, warmup_ms=10, measure_ms=40)


@pytest.mark.parametrize("of_host", [0.01, 0.14, 0.3, 0.5, 1.0])
def test_a_slow_host_is_not_in_the_times(of_host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(of_host, of_gpu=0.2)
    times = times_of(clocks, monkeypatch)
    assert times == pytest.approx([0.2] * len(times)) and len(times) >= 30
    # in less than a second, also with such a host
    assert clocks.host < 200


def test_the_gpu_does_not_sleep_for_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(of_host=0.3, of_gpu=2.0)
    assert times_of(clocks, monkeypatch) == pytest.approx([2.0] * 19) and clocks.slept == 0.0
    # one, five that estimate the time, 4 that warm up, 19
    assert clocks.n_calls == 29


def test_a_call_that_takes_longer_than_all_runs_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(of_host=0.3, of_gpu=100.0)
    assert times_of(clocks, monkeypatch) == pytest.approx([100.0]) and clocks.n_calls == 8


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"ms": 1.0}\n{"ms": 2.')
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2 is not JSON"):
        measure.read(path)
    path.write_text('{"ms": 1.0}\n')
    assert measure.read(path) == [{"ms": 1.0}]
