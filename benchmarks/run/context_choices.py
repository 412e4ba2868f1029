"""Scheme choices of scheme="auto" against measurements: `python -m benchmarks.run.context_choices`.

A cell is a pattern, a length, and numbers of key heads and GPUs from results/context_parallel.jsonl, with a measured
step time for each scheme: "all_gather" with PyTorch's collectives, "exchange" and "ulysses" at the commit of the
line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from blocksparse_flash.distributed import cost_model
from blocksparse_flash.distributed.cost_model import Costs
from blocksparse_flash.distributed.ownership import Pairs

from ..report import context_parallel
from ..report import lines as measurements
from ..report.markdown import table
from .patterns import Pattern, patterns

RESULTS = Path(__file__).parents[1] / "results" / "context_parallel.jsonl"
ELEMENT_BYTES = 2
SCHEMES = ("exchange", "ulysses", "all_gather")


class Cell(NamedTuple):
    """One measured cell.

    ms       measured milliseconds of a step by scheme
    costs    predictions of the cost model
    chosen, best  the scheme that the cost model chooses, and the fastest one
    loss     measured time of the chosen scheme over that of the best one
    speedup  measured, of the chosen scheme
    is_as_measured  whether the chosen scheme would receive as many bytes as in its measurement
    """

    ranks: int
    length: int
    kv_heads: int
    pattern: str
    ms: dict[str, float]
    costs: Costs
    chosen: str
    best: str
    loss: float
    speedup: float
    is_as_measured: bool


def cell_of(pattern: Pattern, lines: pd.DataFrame) -> Cell:
    """The cell of a pattern's measurements, compared with the choice for a contiguous order."""
    ranks, length, heads, kv_heads, head_dim = (
        int(lines[key].iloc[0]) for key in ("ranks", "n", "heads", "kv_heads", "head_dim")
    )
    pairs, n_tiles = Pairs(*np.nonzero(pattern.blocks)), len(pattern.blocks)
    owner = np.arange(n_tiles) * ranks // n_tiles
    costs = cost_model.costs_of(pairs, owner, length, (heads, kv_heads), ranks, requested="auto", without_pass_q=False)
    by_scheme = lines.set_index("provider")
    chosen, best = costs.scheme, str(by_scheme["ms"].idxmin())
    received = {"exchange": costs.exchange, "ulysses": costs.ulysses, "all_gather": costs.all_gather}[chosen]
    n_bytes = None if received is None else int(received.max()) * head_dim * ELEMENT_BYTES
    ms, line = by_scheme["ms"].to_dict(), by_scheme.loc[chosen]
    is_as_measured = n_bytes == line["received_bytes"]
    loss, speedup = ms[chosen] / ms[best], line["speedup"]
    return Cell(ranks, length, kv_heads, pattern.name, ms, costs, chosen, best, loss, speedup, is_as_measured)


def cells(path: Path = RESULTS) -> list[Cell]:
    """Every cell with measurements of all schemes."""
    found = []
    for setting in context_parallel.settings(measurements.read(path), direction="step"):
        known = {pattern.name: pattern for pattern in patterns(int(setting["n"].iloc[0]))}
        for name, lines in setting[setting["provider"].isin(SCHEMES)].groupby("pattern"):
            if len(lines) == len(SCHEMES):
                found.append(cell_of(known[name], lines))
    return sorted(found, key=lambda cell: cell[:4])


def report(found: Sequence[Cell]) -> str:
    """A table with a row per cell, and the share of fastest choices."""
    header = [
        "GPUs", "tokens", "key heads", "pattern", *SCHEMES, "chosen", "predicted, ms", "best", "loss", "speed-up",
        "predicted",
    ]  # fmt: skip
    rows = []
    for cell in found:
        seconds, speedup = cell.costs.seconds[cell.chosen], cell.costs.speedup
        assert seconds is not None and speedup is not None
        rows.append(
            [
                str(cell.ranks), f"{cell.length:,}", str(cell.kv_heads), cell.pattern,
                *(f"{cell.ms[scheme]:.2f}" for scheme in SCHEMES), cell.chosen, f"{1e3 * seconds:.2f}",
                cell.best, f"{cell.loss - 1:.1%}", f"{cell.speedup:.2f}", f"{speedup:.2f}",
            ]
        )  # fmt: skip
    losses = [cell.loss for cell in found]
    right = sum(cell.chosen == cell.best for cell in found)
    return (
        f"{table(header, rows)}\n\nThe fastest scheme is chosen in {right} of {len(found)} cells; the loss is "
        f"{statistics.mean(losses) - 1:.1%} in the mean and {max(losses) - 1:.1%} at most."
    )


if __name__ == "__main__":
    print(report(cells()))
