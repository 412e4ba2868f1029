"""Tables and plots of measurements on several GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import context_parallel as context_report
from benchmarks.report import lines as measurements
from benchmarks.report import plots
from benchmarks.report.lines import frame
from benchmarks.run import context_parallel


def line(**given: Any) -> dict[str, Any]:
    """A result line; what is not given is the same in all."""
    said = {
        "bench": "context_parallel", "scaling": "strong", "provider": "exchange", "pattern": "local", "density": 0.01,
        "n": 65536, "ranks": 2, "heads": 16, "kv_heads": 4, "head_dim": 128, "dtype": "bf16", "order": "contiguous",
        "chunks": None, "priority": "high", "direction": "step", "ms": 5.0, "one_ms": 9.0, "speedup": 1.8,
        "efficiency": 0.9, "bound_ms": 4.5, "bound_by": "compute", "messages_ms": None, "attention_ms": None,
        "overlap": None, "received_bytes": 2**20, "bound_bytes": 2**20, "all_gather_bytes": 2**26, "link_gb_s": 300.0,
        "device": "GPU",
        "torch": "2.11", "triton": "3.6", "commit": "abc",
    }  # fmt: skip
    assert list(said) == context_parallel.KEYS
    return {**said, **given}


LINK = {
    "bench": "link", "what": "all_to_all", "ranks": 2, "bytes": 2**28, "ms": 1.0, "gb_s": 268.0, "device": "GPU",
    "torch": "2.11", "triton": "3.6", "commit": "abc",
}  # fmt: skip
LINES = [
    LINK,
    line(),
    line(provider="ulysses", ms=6.0, speedup=1.5, bound_ms=5.0, bound_by="link"),
    line(pattern="butterfly", one_ms=20.0, ms=16.0, speedup=1.25, bound_ms=10.0),
    line(direction="fwd", messages_ms=0.5, attention_ms=1.5, overlap=0.7),
    line(kv_heads=16),
]


def test_of_equal_measurements_the_latest_counts(tmp_path: Path) -> None:
    path = tmp_path / "context_parallel.jsonl"
    assert list(LINK) == context_parallel.LINK_KEYS
    path.write_text("".join(json.dumps(one) + "\n" for one in [*LINES, line(ms=4.0)]))
    found = measurements.read(path)
    assert len(found) == len(LINES) and found["ms"][1] == 4.0


def test_a_bound_is_a_speed_up() -> None:
    (found,) = context_report.settings(frame([line()]))
    assert found["bound"].tolist() == [2.0]


def test_the_section_has_a_table_for_each_setting() -> None:
    said = context_report.section(frame(LINES))
    assert "all_to_all of 256 MiB per rank, 268 GB/s" in said
    assert "| local | 9.00 | 1.80 (2.00, compute) | 1.50 (1.80, link) |" in said
    assert "| butterfly | 20.00 | 1.25 (2.00, compute) | - |" in said
    assert "and 4 KV heads" in said and "and 16 KV heads" in said and "all-gather" not in said
    assert context_report.section(frame([])) == "" and context_report.section(frame([LINK])) == ""


def test_the_readme_has_a_column_for_each_setting_of_the_most_gpus() -> None:
    four = [line(ranks=4, speedup=3.5), line(ranks=4, provider="all_gather", n=2**20)]
    said = context_report.summary(frame([*LINES, *four]))
    assert "4 GPU, head_dim 128" in said and "65,536 tokens, 16 query and 4 KV heads | 1,048,576 tokens" in said
    assert "| local | 3.50 / - | - / 1.80 |" in said and "butterfly" not in said
    assert "| local | 1.80 / 1.50 | 1.80 / - |" in context_report.summary(frame(LINES))
    assert context_report.summary(frame([])) == "" and context_report.summary(frame([LINK])) == ""


def test_everything_has_a_row_for_each_line() -> None:
    said = context_report.everything(frame(LINES))
    assert said.count("| exchange |") == 4 and "| 0.500 | 1.500 |" in said


def test_it_is_drawn(tmp_path: Path) -> None:
    figure = plots.context(frame(LINES[1:]))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["2 GPUs, 64K tokens, 16/4 heads", "2 GPUs, 64K tokens, 16/16 heads"]
    figure.savefig(tmp_path / "context.png")
