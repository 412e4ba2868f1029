"""Tables of speed-ups and their bounds on several GPUs, from context_parallel.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from . import lines as measurements
from .lines import select
from .markdown import joined, listing, table

LABELS = {
    "exchange": "exchange",
    "ulysses": "Ulysses",
    "gathered": "all-gather (ours)",
    "all_gather": "all-gather",
    "flex": "FlexAttention, all-gather",
}
# number of ranks whose lines an earlier version measured
OUTDATED = 2
# explanation of bounds
LIMITS = 'what limits it: the computation of the busiest GPU ("compute") or the connection between the GPUs ("link").'
# columns that are equal in all measurements of one table
SETTING = ["device", "ranks", "n", "heads", "kv_heads", "head_dim", "order"]


def settings(lines: pd.DataFrame, **values: Any) -> list[pd.DataFrame]:
    """The measurements of each setting, with the speed-up at the bound as `bound`."""
    found = select(lines, bench="context_parallel", **values)
    if found.empty:
        return []
    # lines about the link have no sizes, which makes floats of all
    found = found.astype(dict.fromkeys(["ranks", "n", "heads", "kv_heads", "head_dim"], int))
    found["bound"] = found["speedup"] * found["ms"] / found["bound_ms"]
    return [group for _, group in found.groupby(SETTING, sort=False)]


def caption(lines: pd.DataFrame) -> str:
    text = (
        "{ranks} {device}, {n:,} tokens in all, {heads} query heads and {kv_heads} KV heads of dimension {head_dim}, "
        '{dtype}, order "{order}", {versions}'
    )
    return text.format_map({**lines.iloc[0], "versions": measurements.versions(lines, "torch", "triton")})


def link(lines: pd.DataFrame) -> str:
    """The measured rates of the link."""
    rates = [
        f"{line.ranks:.0f} {line.device}: {line.what} of {line.bytes / 2**20:.0f} MiB per rank, {line.gb_s:.0f} GB/s"
        for line in select(lines, bench="link").itertuples()
    ]
    return f"Measured rates of the link: {'; '.join(rates)}." if rates else ""


def _providers(lines: pd.DataFrame) -> list[str]:
    return [name for name in LABELS if (lines["provider"] == name).any()]


def _cells(lines: pd.DataFrame, providers: list[str], cell: Callable[[Any], str]) -> list[str]:
    found = {line.provider: cell(line) for line in lines.itertuples()}
    return [found.get(name, "-") for name in providers]


def speedups(lines: pd.DataFrame) -> str:
    """A row for each pattern: one process, then each provider's speed-up and bound."""
    providers = _providers(lines)
    rows = [
        [
            pattern,
            f"{found['one_ms'].iloc[0]:.2f}",
            *_cells(found, providers, lambda line: f"{line.speedup:.2f} ({line.bound:.2f}, {line.bound_by})"),
        ]
        for pattern, found in lines.groupby("pattern", sort=False)
    ]
    return table(["pattern", "one GPU, ms", *(LABELS[name] for name in providers)], rows)


def summary(lines: pd.DataFrame) -> str:
    """The table for the most GPUs: a column per length and number of KV heads; "" without measurements."""
    shown = settings(lines, direction="step")
    if not shown:
        return ""
    ranks = max(found["ranks"].iloc[0] for found in shown)
    shown = [found for found in shown if found["ranks"].iloc[0] == ranks]
    every = pd.concat(shown)
    providers = _providers(every)
    rows = [
        [
            pattern,
            *(
                " / ".join(_cells(select(found, pattern=pattern), providers, lambda line: f"{line.speedup:.2f}"))
                for found in shown
            ),
        ]
        for pattern in every["pattern"].unique()
    ]
    columns = ["{n:,} tokens, {heads} query and {kv_heads} KV heads".format_map(found.iloc[0]) for found in shown]
    where = "{device}, head_dim {head_dim}, {dtype}".format_map(every.iloc[0])
    return joined(
        f"Speed-up over one GPU, forward and backward together: {' / '.join(LABELS[name] for name in providers)}. "
        f"{ranks} {where}, {measurements.versions(every, 'torch', 'triton')}; "
        "[upper bounds, and two GPUs](benchmarks/README.md#one-sequence-on-several-gpus).",
        table(["pattern", *columns], rows),
        "![Speed-up over one GPU](benchmarks/results/context_parallel.png)",
    )


def section(lines: pd.DataFrame) -> str:
    """The tables of benchmarks/README.md, forward and backward together; "" if nothing was measured."""
    shown = settings(lines, direction="step")
    if not shown:
        return ""
    return joined(
        "Speed-up over one GPU, forward and backward together. The brackets give the upper bound of the speed-up, and "
        f"{LIMITS} `-`: cannot run, or was not measured. All measurements are in "
        "[results/context_parallel.md](benchmarks/results/context_parallel.md).",
        link(lines),
        *(text for found in shown for text in (f"{caption(found)}:", speedups(found))),
    )


def everything(lines: pd.DataFrame) -> str:
    """The text of results/context_parallel.md."""
    columns = {
        "pattern": "{pattern}", "density": "{density:.3g}", "scheme": "{label}", "direction": "{direction}",
        "ms": "{ms:.3f}", "one GPU, ms": "{one_ms:.3f}", "speed-up": "{speedup:.2f}", "efficiency": "{efficiency:.0%}",
        "bound": "{bound:.2f}, {bound_by}", "most received by a rank, MiB": "{mib:.4g}",
        "communication alone, ms": "{messages}", "attention alone, ms": "{attention}",
    }  # fmt: skip
    has_outdated = (lines["ranks"] == OUTDATED).any()
    parts = [
        "# One sequence on several GPUs, all measurements",
        (
            "Written by `python -m benchmarks.report` from the lines of `python -m benchmarks.run.context_parallel`. "
            "The direction `step` is forward and backward together. Efficiency is the speed-up divided by the number "
            f"of GPUs. The bound is the upper bound of the speed-up, and {LIMITS} The last two columns are the two "
            "parts of a forward of `exchange`, each timed without the other. `-`: not measured."
        ),
        "The tables for two GPUs are outdated: they were measured with an earlier version." if has_outdated else "",
        link(lines),
    ]
    for found in settings(lines):
        title = "## {ranks} ranks, {n:,} tokens, {heads} query and {kv_heads} KV heads".format_map(found.iloc[0])
        shown = found.assign(label=found["provider"].map(LABELS), mib=found["received_bytes"] / 2**20)
        for name in ("messages", "attention"):
            shown[name] = ["-" if pd.isna(ms) else f"{ms:.3f}" for ms in shown[f"{name}_ms"]]
        parts += [title, f"{caption(found)}.", listing(shown, columns)]
    return joined(*parts) + "\n"
