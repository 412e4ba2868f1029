"""benchmarks.run.small and its report: calls take turns, one line per figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import lines as measurements
from benchmarks.report import tables
from benchmarks.report.lines import frame
from benchmarks.run import measure, peers, small
from benchmarks.run.attention import Run
from benchmarks.run.patterns import BLOCK, Pattern
from benchmarks.run.peers import Peer, Shape

LENGTH = 2 * BLOCK


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""
    monkeypatch.setattr(small, "on_gpu", lambda call, cache: call() is None or 2.0)
    monkeypatch.setattr(small, "in_a_row", lambda call: call() is None or 3.0)
    monkeypatch.setattr(small, "ROUNDS", {"gpu": 2, "wall": 1})
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def run_on_cpu(folder: Path) -> Run:
    return Run(1, 32, 16, folder / "small.jsonl", device="cpu")


# ---- measuring ----


def test_calls_take_turns_and_each_has_its_own_percentiles() -> None:
    made: list[str] = []
    times = {"a": iter([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]), "b": iter([10.0] * 6)}

    def clock(call: Any) -> float:
        return next(times[call()])

    calls = [lambda name=name: made.append(name) or name for name in "ab"]
    first, second = small.take_turns(calls, clock, 6)
    assert made == [*"ab"] * 6
    assert first == {"ms": 3.5, "ms_p20": 2.0, "ms_p80": 5.0} and set(second.values()) == {10.0}


@pytest.mark.thorough
@pytest.mark.usefixtures("untimed")
def test_a_line_is_written_for_each_direction_and_clock(tmp_path: Path) -> None:
    run = run_on_cpu(tmp_path)
    for pattern in small.cases(LENGTH):
        small.compare(pattern, [peers.ours("eager"), peers.sdpa("math", "sdpa", "MATH")], run)
    lines = written(run.out)
    assert all([*line] == small.KEYS for line in lines)
    # math has no block layouts
    expected = {name: 12 if name in ("dense", "causal") else 6 for name in small.NAMES}
    assert {name: sum(line["pattern"] == name for line in lines) for name in expected} == expected
    assert {(line["direction"], line["clock"], line["ms"]) for line in lines} == {
        (direction, clock, ms) for direction in ("fwd", "bwd", "step") for clock, ms in (("gpu", 2.0), ("wall", 3.0))
    }
    assert len(measurements.read(run.out)) == len(lines)


@pytest.mark.usefixtures("untimed")
def test_what_is_wrong_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(_pattern: Pattern, _shape: Shape) -> peers.Call:
        return lambda q, k, v: 1.1 * torch.nn.functional.scaled_dot_product_attention(q, k, v)

    run = run_on_cpu(tmp_path)
    small.compare(next(small.cases(LENGTH)), [Peer("off", "sdpa", lambda *_: None, prepare)], run)
    assert written(run.out) == [] and "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--lengths", "100"], ["--lengths", "0"], ["--head-dims", "96"]])
def test_what_cannot_run_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        small.parsed(arguments)
    assert refused.value.code == 2


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="CUDA GPU"):
        small.main([])


# ---- report ----


def line(**given: Any) -> dict[str, Any]:
    said = {
        "bench": "small", "provider": "blocksparse_flash", "backend": "triton", "pattern": "dense", "density": 1.0,
        "n": 512,
        "batch": 1, "heads": 16, "head_dim": 128, "dtype": "bf16", "direction": "fwd", "ms": 0.02, "ms_p20": 0.01,
        "ms_p80": 0.03, "device": "GPU", "torch": "2.11", "triton": "3.6", "commit": "abc", "clock": "gpu",
    }  # fmt: skip
    assert list(said) == small.KEYS
    return {**said, **given}


FLEX = {"provider": "flex", "ms": 0.04}
LINES = [line(), line(**FLEX), line(direction="bwd", ms=0.16), line(**FLEX, direction="bwd"), line(clock="wall")]


def test_slower_cases_are_counted_by_clock() -> None:
    name = "speed-up of small calls, GPU time | blocksparse_flash, triton | FlexAttention"
    assert f"| {name} | 2 | 0.25 | 0.71 | 2.00 | 1 |" in tables.small_calls(frame(LINES))
    assert f"| {name} | 1 | 2.00 | 2.00 | 2.00 | 0 |" in tables.small_calls(frame(LINES[:2]))
    # no peer was measured by the wall clock
    assert "wall clock" not in tables.small_calls(frame(LINES))


def test_the_table_has_every_measurement_and_a_dash_for_what_is_missing() -> None:
    text = tables.all_small_calls(frame(LINES))
    assert "| 512 | 128 | dense | forward | 20.0 (10.0 to 30.0) | 40.0 (10.0 to 30.0) |" in text
    assert tables.all_small_calls(frame([line(), line(**FLEX, clock="wall")])).count("| - |") == 2
    assert tables.small_calls(frame([])) == ""


def test_of_equal_measurements_the_latest_counts(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*LINES, line(ms=7.0)]))
    found = measurements.read(path)
    assert len(found) == len(LINES) and found["ms"][0] == 7.0
