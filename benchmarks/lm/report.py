"""Writes the report: a table of arms over their seeds, and validation loss against tokens, seconds and position."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..report.markdown import joined, listing, table
from .curves import parts_of, read_run
from .model import ARMS

# settings in which runs that are compared are equal
SAME = (
    "length", "keys", "embed_dim", "num_heads", "n_layers", "hidden_dim", "batch_size", "steps", "corpus_sha256",
    "device", "torch", "triton",
)  # fmt: skip
SETTING = (
    "{n_layers} layers of width {embed_dim}, {num_heads}/{kv_heads} query/KV heads; {steps:,} steps of "
    "{batch_size} x {length:,} bytes; `--keys` {keys:,}; corpus {corpus_sha256:.12}; {device}, torch {torch}, "
    "triton {triton}, {commits}."
)

# facts and points of each seed of an arm
Runs = list[tuple[dict[str, Any], pd.DataFrame]]


def read(folder: Path) -> dict[str, Runs]:
    """The runs under a folder by arm and implementation, ordered as ARMS and by seed; FileNotFoundError if none."""
    found: dict[str, Runs] = {}
    for path in sorted(folder.rglob("metrics.csv")):
        facts, points = read_run(path.parent)
        implementation = facts.get("attention", "ours")
        name = facts["arm"] if implementation == "ours" else f"{facts['arm']}, {implementation}"
        found.setdefault(name, []).append((facts, pd.DataFrame(points)))
    if not found:
        raise FileNotFoundError(f"no metrics.csv under {folder}: `train` and `figure` write it")
    names = sorted(found, key=lambda name: ARMS.index(found[name][0][0]["arm"]))
    return {name: sorted(found[name], key=lambda run: run[0]["seed"]) for name in names}


def _mean(values: Any, form: str) -> str:
    """The mean, and the range if there are several values."""
    values = [*values]
    several = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{several}"


def _parts(runs: Runs) -> list[str]:
    """Column names of the losses by position."""
    return [name for name in runs[0][1] if name.startswith("loss_part_")]


def _row(name: str, runs: Runs, dense: dict[int, float], seconds: float) -> dict[str, Any]:
    """A row of the table. dense: final loss of the dense arm by seed; seconds: time of the fastest arm."""
    lasts = [points.iloc[-1] for _, points in runs]
    losses = [last["validation_loss"] for last in lasts]
    by_seed = {facts["seed"]: loss for (facts, _), loss in zip(runs, losses, strict=True)}
    above = [loss - dense[seed] for seed, loss in by_seed.items() if seed in dense]
    at_time = [np.interp(seconds, points["seconds"], points["validation_loss"]) for _, points in runs]
    peak = max(last.get("peak_bytes", 0) for last in lasts)
    return {
        "arm": name, "seeds": len(runs), "weights": runs[0][0]["weights"], "tokens": lasts[0]["tokens"],
        "seconds": np.mean([last["seconds"] for last in lasts]), "memory": f"{peak / 1e9:.1f}" if peak else "-",
        "rate": np.mean([last["tokens"] / last["seconds"] for last in lasts]), "loss": _mean(losses, ".4f"),
        "bits": np.mean(losses) / math.log(2), "above": _mean(above, "+.4f") if above else "-",
        "at_time": _mean(at_time, ".4f"),
    }  # fmt: skip


def tables(found: dict[str, Runs]) -> str:
    """The settings of the runs, a table of the arms, and one of their losses by position."""
    everything = [facts for runs in found.values() for facts, _ in runs]
    differing = [key for key in SAME if len({facts.get(key) for facts in everything}) > 1]
    seeds = {name: [facts["seed"] for facts, _ in runs] for name, runs in found.items()}
    differing += ["seeds"] if len({*map(tuple, seeds.values())}) > 1 else []
    starts = [facts.get("start", {}) for facts in everything]
    differing += ["start"] if len({(start.get("arm"), start.get("tokens")) for start in starts}) > 1 else []
    steps = {points["step"].iloc[-1] == facts["steps"] for runs in found.values() for facts, points in runs}
    dense = {facts["seed"]: points["validation_loss"].iloc[-1] for facts, points in found.get("dense", [])}
    seconds = min(np.mean([points["seconds"].iloc[-1] for _, points in runs]) for runs in found.values())
    columns = {"arm": "{arm}", "seeds": "{seeds}", "weights": "{weights:,}", "tokens": "{tokens:,.0f}"}
    columns |= {"seconds": "{seconds:.1f}", "tokens/s": "{rate:,.0f}", "peak GB": "{memory}", "loss": "{loss}"}
    columns |= {"loss - dense": "{above}", "bits per byte": "{bits:.4f}", f"loss at {seconds:.1f} s": "{at_time}"}
    first = next(iter(found.values()))
    bounds = parts_of(first[0][0]["length"])
    heads = ["arm", *(f"{begin:,} to {end:,}" for begin, end in bounds)]
    late = "loss_late" in first[0][1]
    rows = [
        [name, *(_mean((points[part].iloc[-1] for _, points in runs), ".4f") for part in _parts(runs))]
        + ([_mean((points["loss_late"].iloc[-1] for _, points in runs), ".4f")] if late else [])
        for name, runs in found.items()
    ]
    commits = sorted({facts["commit"] for facts in everything})
    said = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return joined(
        SETTING.format_map({**everything[0], "commits": said}),
        _begin(starts),
        f"**Not comparable: these runs differ in {', '.join(differing)}.**" if differing else "",
        "" if steps == {True} else "**Not all of these runs have finished.**",
        "Losses are those of the last validation, in nats per byte; with several seeds, the mean and the range. "
        f"`loss at {seconds:.1f} s` is the loss at the (mean) time at which the fastest arm finished; the learning "
        "rate of the slower arms had not yet fallen to its final value.",
        listing(pd.DataFrame([_row(name, runs, dense, seconds) for name, runs in found.items()]), columns),
        _by_seed(found),
        "Losses by position in the window"
        + (". `late`: in all arms, the tokens in the second half of each context of dense-short:" if late else ":"),
        table([*heads, *(["late"] if late else [])], rows),
    )


def _begin(starts: list[dict[str, Any]]) -> str:
    """With whose weights the runs begin; "" for random ones. starts: from curves.facts_of_start, or {}."""
    begun = {start["seed"]: start for start in starts if start}
    if not begun:
        return ""
    first, losses = next(iter(begun.values())), [start["validation_loss"] for start in begun.values()]
    return (
        f"All arms of a seed begin with the weights of `{first['arm']}` after {first['tokens']:,.0f} tokens, trained "
        f"from random weights. Their loss was {_mean(losses, '.4f')} in contexts of the length of that arm. The tokens "
        "and seconds of this training are not counted below."
    )


def _by_seed(found: dict[str, Runs]) -> str:
    """The last loss of each run, a column for each seed; "" for a single seed."""
    losses = {
        name: {facts["seed"]: points["validation_loss"].iloc[-1] for facts, points in runs}
        for name, runs in found.items()
    }
    seeds = sorted({seed for each in losses.values() for seed in each})
    rows = [[name, *(f"{each[seed]:.4f}" if seed in each else "-" for seed in seeds)] for name, each in losses.items()]
    return joined("By seed:", table(["arm", *map(str, seeds)], rows)) if len(seeds) > 1 else ""


def curves(found: dict[str, Runs]) -> Figure:
    """Validation loss against tokens and seconds, and final loss by position: means, and the range of the seeds."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_tokens, by_seconds, by_position = figure.subplots(1, 3)
    for name, runs in found.items():
        # interrupted runs have fewer points
        count = min(len(points) for _, points in runs)
        losses = np.array([points["validation_loss"][:count] for _, points in runs])
        seconds = np.mean([points["seconds"][:count] for _, points in runs], axis=0)
        for axes, x in ((by_tokens, runs[0][1]["tokens"][:count] / 1e6), (by_seconds, seconds)):
            (line,) = axes.plot(x, losses.mean(axis=0), marker=".", label=name)
            axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), alpha=0.2, color=line.get_color())
        parts = np.array([points[_parts(runs)].iloc[-1] for _, points in runs])
        by_position.plot([end for _, end in parts_of(runs[0][0]["length"])], parts.mean(axis=0), marker="o")
    # the first steps would hide the differences
    shown = [points["validation_loss"][len(points) // 4 :] for runs in found.values() for _, points in runs]
    # a run that has diverged has NaN
    finite = np.concatenate(shown)[np.isfinite(np.concatenate(shown))]
    for axes, label in ((by_tokens, "million tokens"), (by_seconds, "seconds of training")):
        if len(finite):
            axes.set_ylim(finite.min() - 0.02, finite.max() + 0.05)
        axes.set_xlabel(label)
    by_position.set_xscale("log", base=2)
    by_position.set_xlabel("position in the window, up to")
    by_tokens.set_ylabel("validation loss, nats per byte")
    by_tokens.legend()
    return figure


def report(runs_folder: Path, out: Path) -> Path:
    """Writes report.md and curves.png about every run under a folder; returns the path of the page."""
    found = read(runs_folder)
    text = joined(
        "# Language models: dense and sparse attention on the same tokens",
        "Written by `python -m benchmarks.lm report`.",
        tables(found),
        "![Validation loss against tokens, seconds and position](curves.png)",
    )
    out.mkdir(parents=True, exist_ok=True)
    curves(found).savefig(out / "curves.png", dpi=120, metadata={"Software": None})
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    return out / "report.md"
