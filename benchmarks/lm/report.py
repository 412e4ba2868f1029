"""Writes the report: a table of runs, and validation loss against tokens, seconds and position."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..report.markdown import joined, listing
from .curves import PARTS

# settings in which runs that are compared are equal
SAME = ("length", "keys", "batch_size", "steps", "seed", "corpus_sha256", "device", "torch", "triton", "commit")
LOSSES = [f"loss_part_{number}" for number in range(1, len(PARTS) + 1)]
SETTING = (
    "{n_layers} layers of width {embed_dim}, {num_heads} query heads and {kv_heads} KV heads; {steps} steps of "
    "{batch_size} windows of {length:,} bytes; a budget of {keys:,} keys per query (`--keys`) in every run but dense; "
    "seed {seed}; corpus {corpus_sha256:.12}; {device}, torch {torch}, triton {triton}, commit {commit}."
)


def _read(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8")), pd.read_csv(folder / "metrics.csv")


def curves(runs: dict[str, pd.DataFrame], parts: list[str]) -> Figure:
    """Validation loss against tokens and seconds, and at the end by position."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_tokens, by_seconds, by_position = figure.subplots(1, 3)
    for name, points in runs.items():
        by_tokens.plot(points["tokens"] / 1e6, points["validation_loss"], marker=".", label=name)
        by_seconds.plot(points["seconds"], points["validation_loss"], marker=".")
        by_position.plot(parts, points[LOSSES].iloc[-1], marker="o")
    # the first steps would hide the differences
    shown = pd.concat([points["validation_loss"][len(points) // 4 :] for points in runs.values()])
    for axes, label in ((by_tokens, "million tokens"), (by_seconds, "seconds of training")):
        axes.set_ylim(shown.min() - 0.02, shown.max() + 0.05)
        axes.set_xlabel(label)
    by_position.set_xlabel("position in the window")
    by_position.tick_params(labelsize=7)
    by_tokens.set_ylabel("validation loss, nats per byte")
    by_tokens.legend()
    return figure


def report(runs_folder: Path, out: Path) -> Path:
    """Writes report.md and curves.png about every run under a folder; returns the path of the page."""
    folders = sorted(path.parent for path in runs_folder.rglob("metrics.csv"))
    if not folders:
        raise FileNotFoundError(f"no metrics.csv under {runs_folder}: `train` writes it")
    runs = {folder.relative_to(runs_folder).as_posix(): _read(folder) for folder in folders}
    first = next(iter(runs.values()))[0]
    differing = [key for key in SAME if len({facts[key] for facts, _ in runs.values()}) > 1]
    lines = pd.DataFrame([{"run": name, **facts, **points.iloc[-1]} for name, (facts, points) in runs.items()])
    lines["rate"], lines["bits"] = lines["tokens"] / lines["seconds"], lines["validation_loss"] / math.log(2)
    parts = [f"{begin * first['length']:,.0f} to {end * first['length']:,.0f}" for begin, end in PARTS]
    columns = {"run": "{run}", "weights": "{weights:,}", "tokens": "{tokens:,.0f}", "seconds": "{seconds:.1f}"}
    columns |= {"tokens/s": "{rate:,.0f}", "loss": "{validation_loss:.4f}", "bits per byte": "{bits:.4f}"}
    heads = [f"loss at positions {parts[0]}", *parts[1:]]
    columns |= {head: f"{{{loss}:.4f}}" for head, loss in zip(heads, LOSSES, strict=True)}
    text = joined(
        "# Language models: dense and selected attention on the same tokens",
        "Written by `python -m benchmarks.lm report`. Losses of the last validation, in nats per byte, overall and by "
        "position in the window.",
        SETTING.format_map(first),
        f"**Not comparable: these runs differ in {', '.join(differing)}.**" if differing else "",
        listing(lines, columns),
        "![Validation loss against tokens, seconds and position](curves.png)",
    )
    out.mkdir(parents=True, exist_ok=True)
    curves({name: points for name, (_, points) in runs.items()}, parts).savefig(out / "curves.png", dpi=120)
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    return out / "report.md"
