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

from blocksparse_flash.distributed import cost_model
from blocksparse_flash.distributed.cost_model import Costs
from blocksparse_flash.distributed.ownership import Pairs

from ..report import context_parallel
from ..report import lines as measurements
from ..report.lines import Line
from ..report.markdown import table
from .patterns import Pattern, patterns

RESULTS = Path(__file__).parents[1] / "results" / "context_parallel.jsonl"
ELEMENT_BYTES = 2
SCHEMES = ("exchange", "ulysses", "all_gather")


class Cell(NamedTuple):
    """One measured cell.

    costs  predictions of the cost model, and its chosen scheme
    lines  measured steps by scheme
    """

    ranks: int
    length: int
    kv_heads: int
    pattern: str
    costs: Costs
    lines: dict[str, Line]

    @property
    def chosen(self) -> str:
        return self.costs.scheme

    @property
    def best(self) -> str:
        """The scheme that was fastest when it was measured."""
        return min(self.lines, key=lambda scheme: self.lines[scheme]["ms"])

    @property
    def loss(self) -> float:
        """Measured time of the chosen scheme over that of the best one."""
        return self.lines[self.chosen]["ms"] / self.lines[self.best]["ms"]

    @property
    def speedup(self) -> float:
        """Measured, of the chosen scheme."""
        return self.lines[self.chosen]["speedup"]

    @property
    def is_as_measured(self) -> bool:
        """Whether the chosen scheme would receive as many bytes as in its measurement, with or without pass-Q."""
        received = {
            "exchange": self.costs.exchange, "ulysses": self.costs.ulysses, "all_gather": self.costs.all_gather,
        }[self.chosen]  # fmt: skip
        line = self.lines[self.chosen]
        return received is not None and int(received.max()) * line["head_dim"] * ELEMENT_BYTES == line["received_bytes"]


def costs_of(pattern: Pattern, heads: tuple[int, int], n_ranks: int) -> Costs:
    """The costs that scheme="auto" compares, for a contiguous order."""
    n_tiles = len(pattern.blocks)
    owner = np.arange(n_tiles) * n_ranks // n_tiles
    pairs = Pairs(*np.nonzero(pattern.blocks))
    return cost_model.costs_of(pairs, owner, pattern.length, heads, n_ranks, requested="auto", without_pass_q=False)


def cells(path: Path = RESULTS) -> list[Cell]:
    """Every cell with measurements of all schemes."""
    found = []
    for setting in context_parallel.settings(measurements.read(path), direction="step"):
        n_ranks, length, q_heads, kv_heads = (int(setting[key].iloc[0]) for key in ("ranks", "n", "heads", "kv_heads"))
        known = {pattern.name: pattern for pattern in patterns(length)}
        for name, measured in setting.groupby("pattern"):
            lines = {line["provider"]: line for line in measured.to_dict("records") if line["provider"] in SCHEMES}
            if len(lines) == len(SCHEMES):
                costs = costs_of(known[name], (q_heads, kv_heads), n_ranks)
                found.append(Cell(n_ranks, length, kv_heads, name, costs, lines))
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
                *(f"{cell.lines[scheme]['ms']:.2f}" for scheme in SCHEMES), cell.chosen, f"{1e3 * seconds:.2f}",
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
