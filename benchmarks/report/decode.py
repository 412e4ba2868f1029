"""The table of decoding steps, from decode.jsonl."""

from __future__ import annotations

import pandas as pd

from . import lines as measurements
from .lines import providers, select
from .markdown import joined, table


def section(lines: pd.DataFrame) -> str:
    """A row for each length, batch and number of queries, a column for each provider and mask; "" without lines.

    The clock that is shown is the replay of a CUDA graph, without host time.
    """
    shown = select(lines, direction="graph")
    if shown.empty:
        return ""
    columns = [
        (by, pattern) for pattern in shown["pattern"].unique() for by in providers(select(shown, pattern=pattern))
    ]
    rows = []
    for case, found in shown.groupby(["n", "batch", "q_len"]):
        times = {(line.by, line.pattern): f"{1000 * line.ms:,.0f}" for line in found.itertuples()}
        rows.append([*(f"{each:,}" for each in case), *(times.get(column, "-") for column in columns)])
    densities = select(shown, pattern="sparse")["density"]
    sparse = f" The sparse layout stores {densities.min():.1%} to {densities.max():.1%} of the blocks."
    caption = (
        "Microseconds of one call on one {device}, {dtype}, {heads} query heads and {kv_heads} key heads of "
        "dimension {head_dim}, in a CUDA graph (`python -m benchmarks.run.decode`, "
    ).format_map(shown.iloc[0])
    return joined(
        f"{caption}{measurements.versions(shown, 'torch', 'triton')}).{sparse if len(densities) else ''} `-`: not "
        "measured.",
        table(["keys", "batch", "queries", *(", ".join(column) for column in columns)], rows),
    )
