"""Markdown tables of speed and accuracy, from the lines of `speed` and `test`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from typing import Any

import pandas as pd

from ..report.markdown import table
from . import sources
from .peers import MATERIALIZED, OURS, WITH_DROPOUT
from .published import ACCURACY, BATCH, DEVICE, HEAD_DIM, HEADS, LENGTHS, MEMORY_MB, RUNTIME_MS, SPEEDUP, STEPS

Line = dict[str, Any]
TASKS = tuple(STEPS)
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
# of training steps, as in STEPS; of attention alone
SIZE, ALONE = ["batch", "documents", "n"], ["device", "batch", "heads", "head_dim"]
# explanations of the tables
STEP_SIZES = (
    "After the name of a task: samples x documents per sample x tokens per document. "
    f"`{MATERIALIZED}` keeps the score matrix in memory."
)
EMPTY = "In this table and those below, an empty cell was not measured. `-`: out of memory or not supported."

# words of recorded lines that are written otherwise now
OLDER_WORDS = {
    "materialised": MATERIALIZED,
    "places of the markers, learnt from": "positions of the markers, learned from",
    "fresh data, generated (by the published rules), not the official release": (
        f"samples drawn during training; all data {sources.ORIGIN}"
    ),
}


def _renamed(text: str) -> str:
    """A name or description of a recorded line in the words of newer lines."""
    for older, words in OLDER_WORDS.items():
        text = text.replace(older, words)
    # 20000 samples
    return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", text)


def _name(line: Line) -> str:
    backend = f" ({line['backend']})" if isinstance(line["backend"], str) else ""
    return f"{line['provider']}{backend}, {line['pattern']}"


def _number(number: float) -> str:
    """Three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def frame(lines: Iterable[Line]) -> pd.DataFrame:
    """Lines of `speed` as rows, with the name of what was measured."""
    renamed = ({**line, "provider": _renamed(line["provider"])} for line in lines)
    return pd.DataFrame([{**line, "name": _name(line)} for line in renamed])


def are_published(steps: pd.DataFrame) -> bool:
    """Whether training steps have the published sizes."""
    return all((line.batch, line.documents, line.n) == STEPS[line.task] for line in steps.itertuples())


def speedups(steps: pd.DataFrame) -> pd.DataFrame:
    """The last line of each name and task on one device; `gain` is over dense attention with a score matrix."""
    latest = steps.astype({"ms": float}).drop_duplicates(["name", "task"], keep="last")
    base = latest[latest["name"] == f"{MATERIALIZED}, dense"]
    both = latest.merge(base[["task", "ms", *SIZE]], how="left", on=["task", *SIZE], suffixes=("", "_base"))
    return both.assign(gain=both["ms_base"] / both["ms"])


def is_paper_size(alone: pd.DataFrame) -> bool:
    """Whether lines of attention alone, of one size, have the paper's."""
    return (*alone[["batch", "heads", "head_dim"]].iloc[0],) == (BATCH, HEADS, HEAD_DIM)


def steps_table(steps: pd.DataFrame) -> str:
    """Training steps of the tasks on one device, with the geometric mean of their speed-ups and the paper's."""
    shown, has_paper = speedups(steps), are_published(steps)
    sizes = {line.task: f"{line.batch} x {line.documents} x {line.n}" for line in steps.itertuples()}
    tasks = [task for task in TASKS if task in sizes]
    rows = []
    for name in steps["name"].unique():
        found = shown[shown["name"] == name]
        cells = {}
        for line in found.itertuples():
            gain = "" if pd.isna(line.gain) else f" ({line.gain:.2f}x)"
            cells[line.task] = line.status if pd.isna(line.ms) else f"{_number(line.ms)}{gain}"
        gains = found["gain"].dropna()
        is_whole = len(gains) == len(TASKS)
        mean = f"**{statistics.geometric_mean(gains):.2f}x**" if is_whole else ""
        paper = SPEEDUP["dense" if found["pattern"].iloc[0] == "dense" else "block-sparse"]
        published = f"{paper}x" if is_whole and has_paper and found["provider"].iloc[0] == OURS else ""
        dropout = "" if found["provider"].iloc[0] in WITH_DROPOUT else ", without attention dropout"
        rows.append([f"{name}{dropout}", *(cells.get(task, "") for task in tasks), mean, published])
    header = [
        f"ms per step (speed-up over {MATERIALIZED}, dense)",
        *(f"{task}, {sizes[task]}" for task in tasks),
        "geometric mean",
        f"paper ({DEVICE})",
    ]
    return table(header, rows)


def runtime_table(lines: pd.DataFrame, direction: str, *, memory: bool = False) -> str:
    """Milliseconds of a direction, or MiB, at each length; lines of one device, batch, heads and head_dim.

    The paper's rows follow ours if the size is the published one. A dash: out of memory or not supported.
    """
    lengths = sorted(lines["n"].unique())
    shown = lines[lines["direction"] == direction]
    values = shown["peak_bytes"] / 2**20 if memory else shown["ms"]
    cells = ["-" if pd.isna(value) else _number(value) for value in values]
    latest = shown.assign(cell=cells).drop_duplicates(["name", "n"], keep="last")
    of_name = latest.pivot(index="name", columns="n", values="cell").reindex(shown["name"].unique(), columns=lengths)
    rows = [[name, *row] for name, row in zip(of_name.index, of_name.fillna("").to_numpy(), strict=True)]
    paper = MEMORY_MB if memory else RUNTIME_MS[direction]
    for name, published in paper.items() if is_paper_size(lines) else ():
        known = dict(zip(LENGTHS, published, strict=False))
        row = [_number(known[n]) if n in known else "-" if n in LENGTHS else "" for n in lengths]
        rows.append([f"{name}, {DEVICE} (paper)", *row])
    unit = "MiB" if memory else "ms"
    return table([f"{unit}, by number of tokens", *(f"{length:,}" for length in lengths)], rows)


def speed_sections(lines: Iterable[Line]) -> list[str]:
    """Headings and tables of all lines of `speed`, by device."""
    every = frame(lines)
    if every.empty:
        return []
    sections = []
    for device, steps in every[every["bench"] == "lra_speed"].groupby("device", sort=False):
        what = "" if are_published(steps) else ", NOT the sizes of Long Range Arena"
        sections += [f"## Training steps on {device}{what}", STEP_SIZES, steps_table(steps)]
    for _, alone in every[every["bench"] == "lra_runtime"].groupby(ALONE, sort=False):
        where = "alone on {device}, batch {batch}, {heads} heads, head_dim {head_dim}".format_map(alone.iloc[0])
        for direction, words in DIRECTIONS.items():
            key = [EMPTY] if direction == "fwd" else []
            sections += [f"## Attention {where}: {words}", *key, runtime_table(alone, direction)]
        if alone["peak_bytes"].notna().any():
            memory = runtime_table(alone, "fwd+bwd", memory=True)
            sections += [f"## Memory of attention {where}: forward and backward", memory]
    return sections


def _accuracy_row(line: Line) -> list[str]:
    is_above = line["accuracy"] - line["floor"] > 2 * line["standard_error"]
    pairs = line["pair_accuracy"]
    return [
        line["task"], line["run"], line["mask"] or "dense", f"{line['steps']:,} x {line['batch_size']}",
        f"{line['accuracy']:.1%} ± {line['standard_error']:.1%}",
        f"{line['floor']:.1%}, {_renamed(line['floor_name'])}",
        "yes" if is_above else "**no**", f"{line['balanced']:.1%} ({line['chance']:.0%})",
        "" if pairs is None else f"{pairs:.1%}", f"{line['n']:,}", _renamed(line["data"]),
    ]  # fmt: skip


def accuracy_sections(lines: Iterable[Line]) -> list[str]:
    """Separate tables for released files, generated data, and tests that are not Long Range Arena's."""
    titles = {
        (True, True): "Accuracy on the released files of Long Range Arena",
        (True, False): "Accuracy on data made by the rules of Long Range Arena",
        (False, False): "NOT Long Range Arena: stand-ins, parts, short or easy versions",
    }
    header = [
        *("task", "run", "mask", "steps x batch", "accuracy", "floor", "above the floor", "balanced (chance)"),
        *("pairs", "samples", "data"),
    ]
    rows: dict[tuple[bool, bool], list[list[str]]] = {kind: [] for kind in titles}
    for line in lines:
        rows[line["is_lra"], line["is_lra"] and line["source"] == "official"].append(_accuracy_row(line))
    sections = [text for kind in titles if rows[kind] for text in (f"## {titles[kind]}", table(header, rows[kind]))]
    if rows[True, True] or rows[True, False]:
        tasks = [*TASKS, "pathx", "path256"]
        published = [[name, *(str(known.get(task, "-")) for task in tasks)] for name, known in ACCURACY.items()]
        sections += ["## Accuracies reported in the FlashAttention paper, in percent", table(["", *tasks], published)]
    return sections
