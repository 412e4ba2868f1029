"""benchmarks.run.video: the same pairs as in the definition, one line for each provider, wrong results never timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import masks
from benchmarks.run import measure
from benchmarks.run import video as benchmark
from benchmarks.run.video import CASES, Case, Provider

TIMES = dict.fromkeys(("ms", "ms_p20", "ms_p80"), 2.0)
SMALL = Case((4, 16, 16), (4, 8, 8), 2)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""
    monkeypatch.setattr(measure, "milliseconds_in_turns", lambda calls: [call() is None or TIMES for call in calls])
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call() is None or 7)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def ours() -> list[Provider]:
    return [provider for provider in benchmark.PROVIDERS if provider.name == "blocksparse_flash"]


def test_a_line_for_each_pattern(untimed: None, tmp_path: Path) -> None:
    out = tmp_path / "video.jsonl"
    # tokens that come in the order of tiles attend to other pairs, which only "in order" takes for right
    measure.appended(out, benchmark.lines(SMALL, "cpu", ours()), measure.KEYS)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["pattern"] for line in found] == [provider.pattern for provider in ours()]
    densities = {line["pattern"]: line["density"] for line in found}
    assert densities["dense"] == 1.0 and densities["sliding_tile"] == SMALL.layout().density == 0.25
    # 4 of 16 cubes, for each head
    assert densities["top_blocks"] == 0.25
    for line in found:
        assert line["tflops"] == pytest.approx(4 * line["density"] * 2 * 1024**2 * 128 / 2e-3 / 1e12)


def test_the_mask_of_the_model() -> None:
    """Reordered tokens attend as the definition in row-major order says."""
    rows = torch.tensor([0, 100, 1023])
    mask = benchmark.mask_of_model(SMALL.layout(), masks.tile_order(SMALL.grid, tile=benchmark.TILE))
    expected = masks.sliding_tile(SMALL.grid, kernel=SMALL.kernel, tile=benchmark.TILE).to_dense()[0, 0]
    assert mask is not None and torch.equal(mask(rows), expected[rows])


def test_a_wrong_result_is_not_timed(untimed: None, capsys: Any) -> None:
    def prepare(case: Case, device: str) -> benchmark.Prepared:
        right, layout_of, order = benchmark._sliding_tile(case, device)
        return lambda q, k, v: 0.9 * right(q, k, v), layout_of, order

    assert list(benchmark.lines(SMALL, "cpu", [Provider("blocksparse_flash", "wrong", prepare)])) == []
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_a_fifth_of_the_blocks_is_stored(name: str) -> None:
    assert 0.17 < Case(*CASES[name], 1).layout().density < 0.2


def test_results_are_lines_of_these_keys() -> None:
    path = Path(benchmark.__file__).parents[1] / "results" / "video.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    assert all([*json.loads(line)] == measure.KEYS for line in lines)
