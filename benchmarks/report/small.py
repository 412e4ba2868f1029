"""Tables of small calls, from small.jsonl."""

from __future__ import annotations

import pandas as pd

from . import lines as measurements
from .lines import select
from .markdown import joined, table
from .summaries import SPEEDUP, Value, ranges, speedups

CLOCKS = {"gpu": "GPU time", "wall": "wall clock of calls in a row"}
DIRECTIONS = {**measurements.DIRECTIONS, "step": "both"}


def values(lines: pd.DataFrame) -> list[Value]:
    """Speed-ups by each clock."""
    return [
        value
        for clock, name in CLOCKS.items()
        for value in speedups(select(lines, clock=clock), f"{SPEEDUP} of small calls, {name}")
    ]


def caption(lines: pd.DataFrame) -> str:
    return (
        f"Small calls, {lines['n'].min()} to {lines['n'].max():,} tokens, batch 1, hidden size "
        f"{lines['hidden'].iloc[0]}, {' and '.join(sorted(lines['device'].unique()))}, "
        f"`python -m benchmarks.run.small`, {measurements.versions(lines, 'torch', 'triton')}"
    )


def section(lines: pd.DataFrame) -> str:
    """The section of benchmarks/README.md; "" without lines."""
    if lines.empty:
        return ""
    return joined(
        f"{caption(lines)} ([all of them](benchmarks/results/small.md)). Speed-up: time of the baseline divided by our "
        "time; `slower` counts the cases in which ours takes longer.",
        ranges(values(lines), "measurement", "backend", "baseline"),
    )


def everything(lines: pd.DataFrame) -> str:
    """The text of results/small.md."""
    columns = measurements.providers(lines)
    parts = [
        "# Small calls, all measurements",
        f"Written by `python -m benchmarks.report` from small.jsonl. {caption(lines)}.",
    ]
    for clock, name in CLOCKS.items():
        rows = []
        cases = select(lines, clock=clock).groupby(["n", "head_dim", "pattern", "direction"], sort=False)
        for (n, head_dim, pattern, direction), found in cases:
            cells = {
                line.by: f"{1000 * line.ms:.1f} ({1000 * line.ms_p20:.1f} to {1000 * line.ms_p80:.1f})"
                for line in found.itertuples()
            }
            texts = [cells.get(by, "-") for by in columns]
            rows.append([f"{n:,}", str(head_dim), pattern, DIRECTIONS[direction], *texts])
        header = ["tokens", "head_dim", "pattern", "direction", *columns]
        parts += [f"## Microseconds, {name}, p20 to p80", table(header, rows)]
    return "\n\n".join(parts) + "\n"
