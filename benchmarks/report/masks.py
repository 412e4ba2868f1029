"""The table of the times to build a mask, from masks.jsonl."""

from __future__ import annotations

import pandas as pd

from . import lines as measurements
from .attention import short_ms
from .lines import select
from .markdown import joined, table

COLUMNS = {
    "blocksparse_flash": "blocksparse_flash",
    "flex, compiled": "`create_block_mask`, compiled (first call)",
    "flex": "`create_block_mask`",
    "dense": "dense boolean mask, then blocks",
}


def _cell(lines: pd.DataFrame, provider: str) -> str:
    """Time, and in brackets peak memory or the time of the first call."""
    found, first = (select(lines, provider=name) for name in (provider, f"{provider}, first call"))
    if found.empty:
        return "-"
    inside = first["ms"].iloc[0] if len(first) else found["peak_bytes"].iloc[0] / 1e6
    return f"{short_ms(found['ms'].iloc[0])} ({inside:,.0f})"


def _name(pattern: str) -> str:
    """`documents, 10000, causal` -> `documents`, 10,000, causal; | would end a cell."""
    name, *rest = pattern.split(", ")
    rest = [f"{int(word):,}" if word.isdecimal() else word for word in rest]
    return ", ".join(["`" + name.replace("|", "\\|") + "`", *rest])


def section(lines: pd.DataFrame) -> str:
    """Masks at the greatest length that peers can build, and at the greatest of all."""
    lengths = lines.loc[~lines["is_ours"], "n"].max(), lines["n"].max()
    shown = lines[lines["n"].isin(lengths)]
    rows = [
        [_name(pattern), f"{n:,}", *(_cell(found, provider) for provider in COLUMNS)]
        for n in lengths
        for pattern, found in select(shown, n=n).groupby("pattern", sort=False)
    ]
    return joined(
        f"Building a mask, milliseconds of one CPU core (`python -m benchmarks.run.masks`, "
        f"{' and '.join(sorted(shown['device'].unique()))}, {measurements.versions(shown, 'torch')}, blocks of 128):",
        table(["mask", "tokens", *COLUMNS.values()], rows),
        "In brackets: peak memory in MB, or for the compiled function the milliseconds of the first call, which "
        "compiles. `-`: not measured, since time and memory grow with the square of the length.",
        "![Time to build a mask against its length](benchmarks/results/masks.png)",
    )
