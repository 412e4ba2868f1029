"""Scheme choices of scheme="auto" against measurements: `python -m benchmarks.run.context_choices`.

A cell is a pattern, a length, and numbers of KV heads and GPUs from results/context_parallel.jsonl, with a measured
step time for each scheme: "all_gather" with PyTorch's collectives, "exchange" and "ulysses" at the commit of the
line.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from blocksparse_flash.distributed import cost_model
from blocksparse_flash.distributed.ownership import Pairs

from ..report import context_parallel
from ..report import lines as measurements
from ..report.markdown import listing
from .patterns import Pattern, patterns

RESULTS = Path(__file__).parents[1] / "results" / "context_parallel.jsonl"
ELEMENT_BYTES = 2
SCHEMES = ("exchange", "ulysses", "all_gather")


def cell_of(pattern: Pattern, lines: pd.DataFrame) -> dict[str, Any]:
    """The cell of a pattern's measurements, compared with the choice for a contiguous order, see cells."""
    names = ("ranks", "n", "kv_heads", "heads", "head_dim")
    ranks, length, kv_heads, heads, head_dim = (int(lines[name].iloc[0]) for name in names)
    pairs, n_tiles = Pairs(*np.nonzero(pattern.blocks)), len(pattern.blocks)
    owner = np.arange(n_tiles) * ranks // n_tiles
    costs = cost_model.costs_of(pairs, owner, length, (heads, kv_heads), ranks, requested="auto", without_pass_q=False)
    by_scheme = lines.set_index("provider")
    chosen, best, ms = costs.scheme, str(by_scheme["ms"].idxmin()), by_scheme["ms"].to_dict()
    n_bytes = int(costs.received[chosen].max()) * head_dim * ELEMENT_BYTES
    return {
        "ranks": ranks, "length": length, "kv_heads": kv_heads, "pattern": pattern.name, **ms, "costs": costs,
        "chosen": chosen, "best": best, "loss": ms[chosen] / ms[best], "speedup": by_scheme.loc[chosen, "speedup"],
        "is_as_measured": n_bytes == by_scheme.loc[chosen, "received_bytes"],
    }  # fmt: skip


def cells(path: Path = RESULTS) -> pd.DataFrame:
    """A row for each cell with measurements of all schemes: ranks, length, kv_heads, pattern, and

    SCHEMES       measured milliseconds of a step
    costs         predictions of the cost model
    chosen, best  the scheme that the cost model chooses, and the fastest one
    loss          measured time of the chosen scheme over that of the best one
    speedup       measured, of the chosen scheme
    is_as_measured  whether the chosen scheme would receive as many bytes as in its measurement
    """
    found = []
    for setting in context_parallel.settings(measurements.read(path), direction="step"):
        known = {pattern.name: pattern for pattern in patterns(int(setting["n"].iloc[0]))}
        for name, lines in setting[setting["provider"].isin(SCHEMES)].groupby("pattern"):
            if len(lines) == len(SCHEMES):
                found.append(cell_of(known[name], lines))
    return pd.DataFrame(found).sort_values(["ranks", "length", "kv_heads", "pattern"])


def report(found: pd.DataFrame) -> str:
    """A table with a row per cell, and the share of fastest choices."""
    columns = {
        "GPUs": "{ranks}", "tokens": "{length:,}", "KV heads": "{kv_heads}", "pattern": "{pattern}",
        **{scheme: f"{{{scheme}:.2f}}" for scheme in SCHEMES}, "chosen": "{chosen}",
        "predicted, ms": "{predicted_ms:.2f}", "best": "{best}", "loss": "{extra:.1%}", "speed-up": "{speedup:.2f}",
        "predicted": "{costs.speedup:.2f}",
    }  # fmt: skip
    seconds = [costs.seconds[costs.scheme] for costs in found["costs"]]
    shown = found.assign(predicted_ms=1e3 * np.array(seconds), extra=found["loss"] - 1)
    right, losses = (found["chosen"] == found["best"]).sum(), shown["extra"]
    return (
        f"{listing(shown, columns)}\n\nThe fastest scheme is chosen in {right} of {len(found)} cells; the loss is "
        f"{losses.mean():.1%} in the mean and {losses.max():.1%} at most."
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(report(cells()))
