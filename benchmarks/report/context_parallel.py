"""Tables of speed-ups and their bounds on several GPUs, from context_parallel.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import lines as measurements
from .lines import Line
from .markdown import table

# of lines with equal values of these keys, the last one counts
IDENTITY = (
    "bench", "what", "scaling", "provider", "pattern", "n", "ranks", "heads", "kv_heads", "head_dim", "dtype", "order",
    "chunks", "priority", "direction", "device",
)  # fmt: skip
LABELS = {
    "exchange": "exchange",
    "ulysses": "Ulysses",
    "gathered": "all-gather (ours)",
    "all_gather": "all-gather",
    "flex": "FlexAttention, all-gather",
}


class Setting(NamedTuple):
    """Values shared by all measurements of one table."""

    device: str
    scaling: str
    ranks: int
    n: int
    heads: int
    kv_heads: int
    head_dim: int
    order: str


def settings(lines: Sequence[Line]) -> dict[Setting, list[Line]]:
    found: dict[Setting, list[Line]] = {}
    for line in measurements.of_bench(lines, "context_parallel"):
        found.setdefault(Setting(*(line[key] for key in Setting._fields)), []).append(line)
    return found


def bound(line: Line) -> float:
    """The speed-up at the bound."""
    return line["speedup"] * line["ms"] / line["bound_ms"]


def caption(setting: Setting, lines: Sequence[Line]) -> str:
    shared = f"{setting.n:,} tokens {'in all' if setting.scaling == 'strong' else 'on all ranks together'}"
    return (
        f"{setting.ranks} {setting.device}, {shared}, {setting.heads} query heads and {setting.kv_heads} key heads of "
        f'dimension {setting.head_dim}, {lines[0]["dtype"]}, order "{setting.order}", '
        f"{measurements.versions(lines, 'torch', 'triton')}"
    )


def link(lines: Sequence[Line]) -> str:
    """The measured rates of the link."""
    said = [
        f"{line['ranks']} {line['device']}: {line['what']} of {line['bytes'] / 2**20:.0f} MiB per rank, "
        f"{line['gb_s']:.0f} GB/s"
        for line in measurements.of_bench(lines, "link")
    ]
    return "Measured rates of the link: " + "; ".join(said) + "." if said else ""


def speedups(lines: Sequence[Line], direction: str) -> str:
    """A row for each pattern: one process, then each provider's speed-up and bound."""
    lines = [line for line in lines if line["direction"] == direction]
    providers = [name for name in LABELS if any(line["provider"] == name for line in lines)]
    rows = [["pattern", "one GPU, ms", *(LABELS[name] for name in providers)]]
    for pattern in dict.fromkeys(line["pattern"] for line in lines):
        found = {line["provider"]: line for line in lines if line["pattern"] == pattern}
        cells = [
            f"{found[name]['speedup']:.2f} ({bound(found[name]):.2f}, {found[name]['bound_by']})"
            if name in found
            else "-"
            for name in providers
        ]
        rows.append([pattern, f"{next(iter(found.values()))['one_ms']:.2f}", *cells])
    return table(rows)


def summary(lines: Sequence[Line]) -> str:
    """The README's table for the most GPUs: a column per length and number of key heads; "" without measurements."""
    found = settings(lines)
    if not found:
        return ""
    ranks = max(setting.ranks for setting in found)
    shown = {setting: of_step(each) for setting, each in found.items() if setting.ranks == ranks}
    every = [line for each in shown.values() for line in each]
    providers = [name for name in LABELS if any(line["provider"] == name for line in every)]
    columns = [f"{one.n:,} tokens, {one.heads} query and {one.kv_heads} key heads" for one in shown]
    rows = [["pattern", *columns]]
    for pattern in dict.fromkeys(line["pattern"] for line in every):
        of_pattern = [
            {line["provider"]: line for line in each if line["pattern"] == pattern} for each in shown.values()
        ]
        rows.append([pattern, *(" / ".join(_speedup(each.get(name)) for name in providers) for each in of_pattern)])
    setting = next(iter(shown))
    return "\n\n".join(
        [
            (
                "Speed-up over one GPU, forward and backward together: "
                f"{' / '.join(LABELS[name] for name in providers)}. "
                f"{ranks} {setting.device}, head_dim {setting.head_dim}, {every[0]['dtype']}, "
                f"{measurements.versions(every, 'torch', 'triton')}; "
                "[upper bounds, and two GPUs](benchmarks/README.md#one-sequence-on-several-gpus)."
            ),
            table(rows),
            "![Speed-up over one GPU](benchmarks/results/context_parallel.png)",
        ]
    )


def of_step(lines: Sequence[Line]) -> list[Line]:
    """Forward and backward together."""
    return [line for line in lines if line["direction"] == "step"]


def _speedup(line: Line | None) -> str:
    return "-" if line is None else f"{line['speedup']:.2f}"


def section(lines: Sequence[Line]) -> str:
    """The tables of benchmarks/README.md, forward and backward together; "" if nothing was measured."""
    found = settings(lines)
    if not found:
        return ""
    parts = [
        (
            "Speed-up over one GPU, forward and backward together. In brackets: the upper bound, and what sets it, "
            "computing or the link between the GPUs. `-`: cannot run, or was not measured. All measurements are in "
            "[results/context_parallel.md](benchmarks/results/context_parallel.md)."
        ),
        link(lines),
    ]
    for setting, shown in found.items():
        parts += [f"{caption(setting, shown)}:", speedups(shown, "step")]
    return "\n\n".join(filter(None, parts))


# column -> text of a line
COLUMNS: dict[str, Callable[[Line], str]] = {
    "pattern": lambda line: line["pattern"],
    "density": lambda line: f"{line['density']:.3g}",
    "by": lambda line: LABELS[line["provider"]],
    "direction": lambda line: line["direction"],
    "ms": lambda line: f"{line['ms']:.3f}",
    "one GPU, ms": lambda line: f"{line['one_ms']:.3f}",
    "speed-up": lambda line: f"{line['speedup']:.2f}",
    "efficiency": lambda line: f"{line['efficiency']:.0%}",
    "bound": lambda line: f"{bound(line):.2f}, {line['bound_by']}",
    "receives, MiB": lambda line: f"{line['received_bytes'] / 2**20:.4g}",
    "messages alone, ms": lambda line: "-" if line["messages_ms"] is None else f"{line['messages_ms']:.3f}",
    "attention alone, ms": lambda line: "-" if line["attention_ms"] is None else f"{line['attention_ms']:.3f}",
}


def everything(lines: Sequence[Line]) -> str:
    """The text of results/context_parallel.md."""
    parts = [
        "# One sequence on several GPUs, all measurements",
        "Written by `python -m benchmarks.report` from the lines of `python -m benchmarks.run.context_parallel`.",
        link(lines),
    ]
    for setting, shown in settings(lines).items():
        rows = [[*COLUMNS], *([said(line) for said in COLUMNS.values()] for line in shown)]
        parts += [f"## {setting.ranks} ranks, {setting.n:,} tokens, {setting.heads} on {setting.kv_heads} heads"]
        parts += [f"{caption(setting, shown)}.", table(rows)]
    return "\n\n".join(filter(None, parts)) + "\n"
