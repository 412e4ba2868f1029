"""benchmarks.run.masks: every family is timed against peers that build the same mask."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import masks
from benchmarks.run import masks as benchmark
from blocksparse_flash import BlockLayout


def test_every_family_is_timed() -> None:
    names = {case.pattern.partition(",")[0] for case in benchmark.families(65_536)}
    # orders are no masks
    assert names == {name for name in masks.__all__ if name != "build" and not name.endswith("_order")}


def test_cases_are_layouts_of_their_length() -> None:
    for case in [*benchmark.families(8192), *benchmark.comparable(1024)]:
        layout = case.build()
        assert isinstance(layout, BlockLayout) and layout.kv_len == case.n and 0 < layout.density < 1, case.pattern


@pytest.mark.thorough
def test_peers_build_the_same_blocks_and_lines_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux, as the memory of a process is read from /proc")
    # what a compiled call gives is checked where it is timed; compiling it takes seconds, and a C++ compiler
    monkeypatch.setattr(benchmark, "compiled_for", lambda case: (lambda: benchmark.flex_blocks(case), 1.0))
    monkeypatch.setattr(benchmark, "milliseconds", lambda call: dict.fromkeys(("ms", "ms_p20", "ms_p80"), 1.0))
    cases = list(benchmark.comparable(512))
    for case in cases:
        benchmark.run(case, tmp_path / "masks.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "masks.jsonl").read_text().splitlines()]
    providers = ["blocksparse_flash", "dense", "flex", "flex, compiled", "flex, compiled, first call"]
    assert [line["provider"] for line in lines] == providers * len(cases)
    assert all([*line] == benchmark.KEYS for line in lines)


def test_results_are_lines_of_these_keys() -> None:
    path = Path(benchmark.__file__).parents[1] / "results" / "masks.jsonl"
    assert all([*json.loads(line)] == benchmark.KEYS for line in path.read_text(encoding="utf-8").splitlines())
