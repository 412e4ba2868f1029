"""The table of decoding steps, from decode.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from . import lines as measurements
from .lines import Line, label, provider_of, select
from .markdown import table

IDENTITY = (*measurements.IDENTITY, "kv_heads")
# the clock that is shown: the replay of a CUDA graph, without host time
SHOWN = "graph"


def section(lines: Sequence[Line]) -> str:
    """A row for each length, batch and number of queries, a column for each provider and mask; "" without lines."""
    shown = select(lines, direction=SHOWN)
    if not shown:
        return ""
    columns = [
        (provider, pattern)
        for pattern in dict.fromkeys(line["pattern"] for line in shown)
        for provider in measurements.measured(select(shown, pattern=pattern))
    ]
    rows = [["keys", "batch", "queries", *(f"{label(provider)}, {pattern}" for provider, pattern in columns)]]
    times = {(*_case(line), provider_of(line), line["pattern"]): line["ms"] for line in shown}
    for case in sorted({_case(line) for line in shown}):
        found = [times.get((*case, *column)) for column in columns]
        rows.append([*(f"{each:,}" for each in case), *("-" if ms is None else f"{1000 * ms:,.0f}" for ms in found)])
    densities = [line["density"] for line in select(shown, pattern="sparse")]
    sparse = (
        f" The sparse layout stores {min(densities):.1%} to {max(densities):.1%} of the blocks." if densities else ""
    )
    first = shown[0]
    caption = (
        f"Microseconds of one call on one {first['device']}, {first['dtype']}, {first['heads']} query heads and "
        f"{first['kv_heads']} key heads of dimension {first['head_dim']}, in a CUDA graph "
        f"(`python -m benchmarks.run.decode`, "
        f"{measurements.versions(shown, 'torch', 'triton')}).{sparse} `-`: not measured."
    )
    return f"{caption}\n\n{table(rows)}"


def _case(line: Line) -> tuple[int, int, int]:
    return line["n"], line["batch"], line["q_len"]
