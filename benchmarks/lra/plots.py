"""Plots of accuracies, learning curves and times, from result lines and Lightning's CSV logs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .data import Rules
from .published import BATCH, DEVICE, HEAD_DIM, HEADS, LENGTHS, MEMORY_MB, RUNTIME_MS
from .tasks import LRA

Line = dict[str, Any]


class Curve(NamedTuple):
    """A run, its task and data, whether they are Long Range Arena's, and its validation accuracy by step."""

    run: str
    what: str
    is_lra: bool
    accuracy: dict[int, float]


def curve_of(folder: Path, run: str) -> Curve | None:
    """The curve from a run's logs, where later logs replace earlier ones; None without a validation."""
    accuracy: dict[int, float] = {}
    what, is_lra = "unknown task", False
    for path in sorted(folder.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with path.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row.get("validation_accuracy")]
        accuracy.update({int(row["step"]): float(row["validation_accuracy"]) for row in rows})
        config = path.parent / "config.yaml"
        if rows and config.exists():
            data = yaml.safe_load(config.read_text())["data"]
            source, given = data.get("source", "generated"), data.get("rules") or {}
            rules = Rules(**{name: given[name] for name in ("contour_length", "settings", "changes") if name in given})
            what = f"{data['task']}, {source} data"
            is_lra = data["task"] in LRA and source != "stand-in" and rules.are_published
    return Curve(run, what, is_lra, dict(sorted(accuracy.items()))) if accuracy else None


def _floor(axes: Axes, floor: float) -> None:
    axes.axhline(floor, color="#6b705c", linestyle="--", linewidth=1, label=f"floor {floor:.1%}")


def learning_curves(curves: Sequence[Curve], tests: Sequence[Line]) -> Figure:
    """A panel per task and kind of data, with the floor of the last test of its runs."""
    panels = list(dict.fromkeys((curve.what, curve.is_lra) for curve in curves))
    figure = Figure(figsize=(6, 3.6 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        shown = [curve for curve in curves if (curve.what, curve.is_lra) == panel]
        for curve in shown:
            axes.plot([*curve.accuracy], [*curve.accuracy.values()], marker=".", label=curve.run)
        floors = [line["floor"] for line in tests if line["run"] in {curve.run for curve in shown}]
        if floors:
            _floor(axes, floors[-1])
        what, is_lra = panel
        axes.set_title(what if is_lra else f"{what}: NOT Long Range Arena")
        axes.set_xlabel("steps")
        axes.set_ylabel("validation accuracy")
        axes.legend(fontsize=8)
    return figure


def accuracies(tests: Sequence[Line]) -> Figure:
    """Accuracy, floor and balanced accuracy of each test."""
    figure = Figure(figsize=(8, 1 + 0.5 * len(tests)), layout="constrained")
    axes = figure.add_subplot()
    for place, line in enumerate(tests):
        bars = {"floor": "#b9c9cf", "accuracy": "#1f6f8b", "balanced": "#c1121f"}
        for offset, (key, colour) in enumerate(bars.items()):
            error = line["standard_error"] if key == "accuracy" else None
            label = key if place == 0 else None
            axes.barh(place + 0.25 * (offset - 1), line[key], 0.22, xerr=error, color=colour, label=label)
    names = [f"{line['run']}: {line['task']}{'' if line['is_lra'] else ', NOT Long Range Arena'}" for line in tests]
    axes.set_yticks(range(len(tests)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(fontsize=8)
    return figure


def _against_length(axes: Axes, lines: Sequence[Line], key: str, unit: float, published: dict[str, Any]) -> None:
    is_published = (lines[0]["batch"], lines[0]["heads"], lines[0]["head_dim"]) == (BATCH, HEADS, HEAD_DIM)
    for name in ("PyTorch", "FlashAttention", "Block-sparse FlashAttention") if is_published else ():
        known = published[name]
        axes.plot(LENGTHS[: len(known)], known, ":", linewidth=1, label=f"{name}, {DEVICE} (paper)")
    names = ("provider", "backend", "pattern")
    for each in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        mine = [line for line in lines if tuple(line[name] for name in names) == each and line[key] is not None]
        shown = dict(sorted((line["n"], line[key] / unit) for line in mine))
        axes.plot([*shown], [*shown.values()], marker=".", label=", ".join(filter(None, each)))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")


def lengths(lines: Sequence[Line]) -> Figure:
    """Time and memory of forward and backward over length, on one device at one size; both axes logarithmic."""
    both = [line for line in lines if line["direction"] == "fwd+bwd"]
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    size = f"batch {lines[0]['batch']}, {lines[0]['heads']} heads, head_dim {lines[0]['head_dim']}"
    figure.suptitle(f"forward and backward on {lines[0]['device']}, {size}")
    _against_length(time, both, "ms", 1.0, RUNTIME_MS["fwd+bwd"])
    time.set_ylabel("ms")
    _against_length(memory, both, "peak_bytes", 2.0**20, MEMORY_MB)
    memory.set_ylabel("MiB")
    # both panels share colours and labels
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    return figure
