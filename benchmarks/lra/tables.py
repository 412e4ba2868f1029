"""Markdown tables of speed and accuracy, from the lines of `speed` and `test`."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..report.markdown import table
from .peers import FLEX, MATERIALIZED, OURS
from .published import ACCURACY, BATCH, BEST, DEVICE, HEAD_DIM, HEADS, LENGTHS, MEMORY_MB, RUNTIME_MS, SPEEDUP, STEPS

Line = dict[str, Any]
TASKS = tuple(STEPS)
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
# of training steps, as in STEPS; of attention alone
SIZE, ALONE = ["batch", "documents", "n"], ["device", "batch", "heads", "head_dim"]
PAPER = "Dao et al., NeurIPS 2022, arXiv:2205.14135"
# share by which the keys of compared masks may differ
KEYS_DIFFER = 0.01
# explanations of the tables
STEP_SIZES = (
    "After the name of a task: samples x documents per sample x tokens per document. "
    f"`{MATERIALIZED}` keeps the score matrix in memory."
)
UNFINISHED = "Runs without a test. Those that are still training count as interrupted."
EMPTY = "In this table and those below, an empty cell was not measured. `-`: out of memory or not supported."


def _name(line: Line) -> str:
    backend = f" ({line['backend']})" if isinstance(line["backend"], str) else ""
    dropout = ""
    if line["bench"] == "lra_speed" and not line["dropout_p"]:
        dropout = ", without attention dropout"
    elif line["bench"] == "lra_speed" and line["provider"] == FLEX:
        dropout = ", dropout before the softmax"
    return f"{line['provider']}{backend}, {line['pattern']}{dropout}"


def _number(number: float) -> str:
    """Three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def frame(lines: Iterable[Line]) -> pd.DataFrame:
    """Lines of `speed` as rows, with the name of what was measured."""
    return pd.DataFrame([{**line, "name": _name(line)} for line in lines])


def are_published(steps: pd.DataFrame) -> bool:
    """Whether training steps have the published sizes."""
    return all((line.batch, line.documents, line.n) == STEPS[line.task] for line in steps.itertuples())


def speedups(steps: pd.DataFrame) -> pd.DataFrame:
    """The last line of each name and task on one device; `gain` is over `materialized`, dense, with dropout."""
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
        is_ours = found["provider"].iloc[0] == OURS and found["dropout_p"].iloc[0] > 0
        published = f"{paper}x" if is_whole and has_paper and is_ours else ""
        rows.append([name, *(cells.get(task, "") for task in tasks), mean, published])
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
    for (device, direction), steps in every[every["bench"] == "lra_speed"].groupby(["device", "direction"], sort=False):
        how = "" if direction == "step" else ", as CUDA graphs"
        what = "" if are_published(steps) else ", NOT the sizes of Long Range Arena"
        sections += [f"## Training steps on {device}{how}{what}", STEP_SIZES, steps_table(steps)]
    for _, alone in every[every["bench"] == "lra_runtime"].groupby(ALONE, sort=False):
        where = "alone on {device}, batch {batch}, {heads} heads, head_dim {head_dim}".format_map(alone.iloc[0])
        for direction, words in DIRECTIONS.items():
            key = [EMPTY] if direction == "fwd" else []
            sections += [f"## Attention {where}: {words}", *key, runtime_table(alone, direction)]
        if alone["peak_bytes"].notna().any():
            memory = runtime_table(alone, "fwd+bwd", memory=True)
            sections += [f"## Memory of attention {where}: forward and backward", memory]
    return sections


def _best(task: str) -> str:
    """The best published accuracies of a task."""
    found = [(known["accuracy"][task], name) for name, known in BEST.items() if task in known["accuracy"]]
    return "; ".join(f"{name} {accuracy}" for accuracy, name in sorted(found, reverse=True))


def _with_before(line: Line, key: str, form: str) -> str:
    """A number of the training and, if it had earlier stages, the sum with theirs."""
    before = line[f"{key}_before"]
    return form.format(line[key]) + (f" (with earlier stages {form.format(line[key] + before)})" if before else "")


def mask_name(line: Line) -> str:
    return "; ".join([line["mask"]] if isinstance(line["mask"], str) else line["mask"] or ["dense"])


def _accuracy_row(line: Line) -> list[str]:
    shortcut, one_deep, pairs = line["floor"], line["one_deep"], line["pair_accuracy"]
    floor, chance = f"{shortcut:.1%}, {line['floor_name']}", f"{line['chance']:.0%}"
    if one_deep is not None:
        shortcut = max(shortcut, one_deep)
        floor += f"; {one_deep:.1%}, one operator deep"
        chance += f"; one operator deep {line['one_deep_balanced']:.1%}"
    above = line["accuracy"] - shortcut
    repeated = f", **tested {line['tests']} times**" if line["tests"] > 1 else ""
    return [
        line["task"], line["run"], str(line["seed"]), mask_name(line), f"{line['keys']:,.0f}",
        f"{line['steps']:,} x {line['batch_size']}", _with_before(line, "samples", "{:,}"),
        _with_before(line, "device_hours", "{:.2f}"), f"{line['accuracy']:.1%} ± {line['standard_error']:.1%}", floor,
        f"{100 * above:.1f}" if above > 2 * line["standard_error"] else "**no**",
        f"{line['balanced']:.1%} ({chance})", "" if pairs is None else f"{pairs:.1%}", _best(line["task"]),
        f"{line['n']:,}, seed {line['test_seed']}{repeated}", line["data"],
    ]  # fmt: skip


def seeds_table(lines: Sequence[Line]) -> str:
    """Mean and sample standard deviation of runs that differ only in their seed; "" if there are none."""
    rows = []
    for (run, n, test_seed), group in itertools.groupby(sorted(lines, key=_without_seed), key=_without_seed):
        found = [*{line["run"]: line["accuracy"] for line in group}.values()]
        if len(found) > 1:
            spread = f"{statistics.mean(found):.1%} ± {statistics.stdev(found):.1%}"
            rows.append([run, f"{n:,}, seed {test_seed}", str(len(found)), spread])
    header = ["run", "test samples", "seeds", "accuracy, mean ± standard deviation over seeds"]
    return table(header, rows) if rows else ""


def _without_seed(line: Line) -> tuple[str, int, int]:
    return re.sub(r"/seed-\d+$", "", line["run"]), line["n"], line["test_seed"]


def ablation_section(lines: Sequence[Line]) -> list[str]:
    """Masks compared at equal keys: runs of `recipe ablation`; [] without them.

    Runs that began with another checkpoint, or whose keys per query differ by more than 1%, are not compared.
    """
    of_group = [line for line in lines if "ablation/" in line["run"]]
    if not of_group:
        return []
    start, keys = of_group[0]["start"], of_group[0]["keys"]
    same = [line for line in lines if line["start"] == start and line["task"] == of_group[0]["task"]]
    odd = [line for line in of_group if line not in same or abs(line["keys"] / keys - 1) > KEYS_DIFFER]
    compared = [line for line in same if abs(line["keys"] / keys - 1) <= KEYS_DIFFER]
    rows = [
        [line["run"], mask_name(line), f"{line['keys']:,.0f}", f"{line['accuracy']:.1%} ± {line['standard_error']:.1%}",
         f"{line['floor']:.1%}", f"{line['balanced']:.1%}", f"{line['steps']:,}", f"{line['samples']:,}"]
        for line in sorted(compared, key=lambda line: -line["accuracy"])
    ]  # fmt: skip
    header = ["run", "mask", "keys per query", "accuracy", "floor", "balanced", "steps", "samples"]
    left_out = ", ".join(f"{line['run']} ({line['keys']:,.0f} keys, checkpoint {line['start']})" for line in odd)
    return [
        f"## Masks at equal keys, all from the checkpoint {start}",
        table(header, rows),
        *([f"Not compared, since keys or checkpoint differ: {left_out}."] if odd else []),
    ]


class Unfinished(NamedTuple):
    """A run without a test that was interrupted, or that was trained but not tested.

    run         its name
    step        steps of its checkpoint or in its log, whichever are more
    steps       of the whole training; None if no configuration says it
    checkpoint  steps of the checkpoint; 0 without one
    command     continues it; empty if its configuration is not known
    """

    run: str
    step: int
    steps: int | None
    checkpoint: int
    command: str


def unfinished_table(runs: Sequence[Unfinished]) -> str:
    """How far runs without a result are, and the commands that continue them."""
    rows = []
    for run in runs:
        of_all = f"{run.step:,}" if run.steps is None else f"{run.step:,} of {run.steps:,}"
        state = f"interrupted after step {of_all}; " + (
            f"checkpoint of step {run.checkpoint:,}" if run.checkpoint else "no checkpoint: begins anew"
        )
        if run.steps is not None and run.checkpoint >= run.steps:
            state = f"trained ({of_all} steps), not tested"
        rows.append([run.run, state, f"`python -m benchmarks.lra {run.command}`" if run.command else ""])
    return table(["run", "state", "to continue"], rows)


def accuracy_sections(
    lines: Sequence[Line], unfinished: Sequence[Unfinished] = (), not_run: Sequence[str] = ()
) -> list[str]:
    """Separate tables for released files, generated data, and tests that are not Long Range Arena's.

    unfinished  runs without a result
    not_run     configurations without a run
    """
    titles = {
        (True, True): "Accuracy on the released files of Long Range Arena",
        (True, False): "Accuracy on data made by the rules of Long Range Arena",
        (False, False): "NOT Long Range Arena: stand-ins, parts, short or easy versions",
    }
    header = [
        *("task", "run", "seed", "mask", "keys per query", "steps x batch", "training samples", "device hours"),
        *("accuracy", "floor", "points above", "balanced (chance)", "pairs", "best published", "test samples", "data"),
    ]
    rows: dict[tuple[bool, bool], list[list[str]]] = {kind: [] for kind in titles}
    for line in lines:
        rows[line["is_lra"], line["is_lra"] and line["source"] == "official"].append(_accuracy_row(line))
    sections = [text for kind in titles if rows[kind] for text in (f"## {titles[kind]}", table(header, rows[kind]))]
    seeds = seeds_table(lines)
    sections += ["## Several seeds", seeds] if seeds else []
    sections += ablation_section(lines)
    if unfinished:
        sections += ["## Not finished", UNFINISHED, unfinished_table(unfinished)]
    if not_run:
        sections += ["## Not run", table(["configuration", "accuracy"], [[name, "not run"] for name in not_run])]
    if rows[True, True] or rows[True, False]:
        tasks = [*TASKS, "pathx", "path256"]
        papers = [(name, known, PAPER) for name, known in ACCURACY.items()]
        papers += [(name, known["accuracy"], known["paper"]) for name, known in BEST.items()]
        published = [[name, *(str(known.get(task, "-")) for task in tasks), paper] for name, known, paper in papers]
        sections += ["## Published accuracies, in percent", table(["", *tasks, "paper"], published)]
    return sections
