"""Tables of small calls, from small.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from . import lines as measurements
from .lines import Line
from .markdown import table
from .summaries import SPEEDUP, Value, ranges, speedups

IDENTITY = (*measurements.IDENTITY, "clock")
CLOCKS = {"gpu": "GPU time", "wall": "wall clock of calls in a row"}
DIRECTIONS = {**measurements.DIRECTIONS, "step": "both"}
CASE = ("n", "head_dim", "pattern", "direction")


def values(lines: Sequence[Line]) -> list[Value]:
    """Speed-ups by each clock."""
    return [
        value
        for clock, name in CLOCKS.items()
        for value in speedups(measurements.select(lines, clock=clock), f"{SPEEDUP} of small calls, {name}")
    ]


def caption(lines: Sequence[Line]) -> str:
    lengths = sorted({line["n"] for line in lines})
    devices = " and ".join(sorted({line["device"] for line in lines}))
    return (
        f"Small calls, {lengths[0]} to {lengths[-1]:,} tokens, batch 1, hidden size "
        f"{lines[0]['heads'] * lines[0]['head_dim']}, {devices}, `python -m benchmarks.run.small`, "
        f"{measurements.versions(lines, 'torch', 'triton')}"
    )


def section(lines: Sequence[Line]) -> str:
    """The section of benchmarks/README.md; empty without lines."""
    if not lines:
        return ""
    head = f"{caption(lines)} ([all of them](benchmarks/results/small.md))."
    said = "Speed-up: time of the baseline divided by our time; `slower` counts the cases in which ours takes longer."
    return "\n\n".join([f"{head} {said}", ranges(values(lines), "measurement", "backend", "baseline")])


def everything(lines: Sequence[Line]) -> str:
    """The text of results/small.md."""
    providers = measurements.measured(lines)
    parts = [
        "# Small calls, all measurements",
        f"Written by `python -m benchmarks.report` from small.jsonl. {caption(lines)}.",
    ]
    for clock, name in CLOCKS.items():
        shown = measurements.select(lines, clock=clock)
        found = {(measurements.provider_of(line), *(line[key] for key in CASE)): line for line in shown}
        rows = [["tokens", "head_dim", "pattern", "direction", *map(measurements.label, providers)]]
        for n, head_dim, pattern, direction in dict.fromkeys(tuple(line[key] for key in CASE) for line in shown):
            cells = [_cell(found.get((provider, n, head_dim, pattern, direction))) for provider in providers]
            rows.append([f"{n:,}", str(head_dim), pattern, DIRECTIONS[direction], *cells])
        parts += [f"## Microseconds, {name}, p20 to p80", table(rows)]
    return "\n\n".join(parts) + "\n"


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    return f"{1000 * line['ms']:.1f} ({1000 * line['ms_p20']:.1f} to {1000 * line['ms_p80']:.1f})"
