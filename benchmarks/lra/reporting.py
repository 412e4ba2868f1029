"""Writes the report: collects result lines and logs, saves tables and plots."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..run import measure
from . import plots, tables
from .scoring import TEST


def tests_of(runs: Path) -> list[dict[str, Any]]:
    """The last test of every run under a folder, with the run's name, sorted by name."""
    paths = sorted(runs.rglob(TEST))
    return [{**measure.read(path)[-1], "run": path.parent.relative_to(runs).as_posix()} for path in paths]


def curves_of(runs: Path) -> list[plots.Curve]:
    """The learning curves of the runs under a folder."""
    folders = sorted({path.parents[1] for path in runs.rglob("version_*/metrics.csv")})
    curves = [plots.curve_of(folder, folder.relative_to(runs).as_posix()) for folder in folders]
    return [curve for curve in curves if curve is not None]


def report(
    *,
    runs: Path = Path("out/lra/runs"),
    speed: Path = Path("benchmarks/results/lra_speed.jsonl"),
    out: Path = Path("benchmarks/lra/report"),
) -> None:
    """Tables and plots of accuracies, learning curves, times and memory.

    Args:
        runs: folder with a folder for each run
        speed: lines of `speed`
        out: folder of report.md and its pictures
    """
    tests, curves = tests_of(runs), curves_of(runs)
    lines = measure.read(speed) if speed.exists() else []
    if not (tests or curves or lines):
        raise ValueError(f"nothing to report: no {TEST} and no metrics.csv under {runs}, and no {speed}")
    figures: dict[str, Any] = {}
    if tests:
        figures["accuracy"] = plots.accuracies(tests)
    if curves:
        figures["learning-curves"] = plots.learning_curves(curves, tests)
    speeds = tables.frame(line for line in lines if line["bench"] == "lra_runtime")
    for size, alone in speeds.groupby(tables.ALONE, sort=False) if len(speeds) else ():
        name = re.sub("[^a-z0-9]+", "-", " ".join(map(str, size)).lower())
        figures[f"length-{name}"] = plots.lengths(alone)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.png" for name in figures]
    for path, figure in zip(written, figures.values(), strict=True):
        figure.savefig(path, dpi=120)
    sections = [
        "# Long Range Arena: results",
        "Written by `python -m benchmarks.lra report`. Floor: the accuracy of the task's shortcut on the same samples.",
        *tables.accuracy_sections(tests),
        *tables.speed_sections(lines),
        *(f"![{path.stem}]({path.name})" for path in written),
    ]
    page = out / "report.md"
    page.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(*written, page, sep="\n")
