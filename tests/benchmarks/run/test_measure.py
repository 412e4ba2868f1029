"""Times of runs on a GPU, with a host and a GPU that are simulated by their clocks, and lines of results."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.run import attention, decode, masks, measure, selection, shapes

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
    path.write_bytes(b'{"ms": 1.0}\n\n[1]')
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 3 is not JSON of a result: .*: remove this line"):
        measure.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 1 is not JSON of a result"):
        measure.read(path)
    path.write_text('{"ms": 1.0}\n')
    assert measure.read(path) == [{"ms": 1.0}]


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    """Regression: both were on one line, which could not be read."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"ms": 1.0}\n{"ms": 2.')
    measure.append(path, {"ms": 3.0}, ["ms"])
    measure.append(path, {"ms": 4.0}, ["ms"])
    assert path.read_text() == '{"ms": 1.0}\n{"ms": 2.\n{"ms": 3.0}\n{"ms": 4.0}\n'


def test_a_line_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        measure.append(tmp_path, {"ms": 3.25}, ["ms"])
    assert "ms 3.25" in capsys.readouterr().out


def test_lines_that_cannot_be_read_end_a_run_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.jsonl").write_text('{"ms": 2.')
    monkeypatch.setattr(measure, "environment", dict)
    with pytest.raises(SystemExit, match=r"lines\.jsonl, line 1 is not JSON"):
        measure.is_measured(tmp_path / "lines.jsonl", {"bench": "attention"})


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        (attention, ["--out", "FOLDER"], "argument --out: must be a file that can be written, got .*: Is a directory"),
        (attention, ["--out", "FILE/x"], "argument --out: must be a file that can be written, got .*: File exists"),
        (attention, ["--batch", "0"], "argument --batch: must be a positive multiple of 1, got 0"),
        (decode, ["--kv-lens", "5"], r"argument --kv-lens: invalid choice: 5 \(choose from '?16384"),
        (selection, ["--lengths", "5"], r"argument --lengths: invalid choice: 5 \(choose from '?8192"),
        (shapes, ["--cases", "causal", "typo"], "--cases must be parts of causal; .*, got typo"),
        (masks, ["--patterns", "typo"], "--patterns must be among butterfly; .*, got typo"),
        (masks, ["--peer-lengths", "100"], "argument --peer-lengths: must be a positive multiple of 128, got 100"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    benchmark: Any, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: what they name was measured before they failed, or nothing was, without a word."""
    (tmp_path / "file").write_text("mine")
    places = {"FOLDER": str(tmp_path), "FILE/x": str(tmp_path / "file" / "x")}
    options = [places.get(each, each) for each in options]
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(options if "--out" in options else ["--out", str(tmp_path / "new" / "lines.jsonl"), *options])
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
