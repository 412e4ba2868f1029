"""What do the measurements of small calls say? Sentences and a table from small.jsonl.

Knows the keys of its lines, and Markdown. Must not know how anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import lines as measurements
from .lines import Line
from .markdown import table

# what makes two lines measurements of the same thing: of those, the later one counts
IDENTITY = (*measurements.IDENTITY, "clock")
CLOCKS = {"gpu": "the GPU alone", "wall": "the wall clock over calls in a row"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "step": "both"}
CASE = ("n", "head_dim", "pattern", "direction", "clock")


def _times(lines: Sequence[Line], provider: tuple[str, str]) -> dict[tuple[object, ...], float]:
    return {tuple(line[key] for key in CASE): line["ms"] for line in lines if measurements.who(line) == provider}


def _shares(lines: Sequence[Line], ours: tuple[str, str], peer: tuple[str, str]) -> dict[tuple[object, ...], float]:
    """Our time over the peer's, of each case that both have."""
    mine, theirs = _times(lines, ours), _times(lines, peer)
    return {case: mine[case] / theirs[case] for case in mine if case in theirs}


def compared(lines: Sequence[Line], clock: str) -> list[str]:
    """A point for each of our backends and each peer: how much of the peer's time ours takes, and where it takes longer."""
    points, shown = [], [line for line in lines if line["clock"] == clock]
    providers = measurements.measured(shown)
    for ours in filter(measurements.is_ours, providers):
        for peer in providers:
            shares = _shares(shown, ours, peer)
            if measurements.is_ours(peer) or not shares:
                continue
            mean = math.exp(sum(map(math.log, shares.values())) / len(shares))
            longer = [case for case, share in shares.items() if share > 1]
            points.append(
                f"- {CLOCKS[clock]}: {measurements.label(ours)}, takes {min(shares.values()):.2f} to {max(shares.values()):.2f} of the "
                f"time of {measurements.label(peer)}, {mean:.2f} in the geometric mean of {len(shares)} measurements; longer in "
                f"{len(longer)}{_named(longer)}."
            )
    return points


def _named(cases: Sequence[tuple[object, ...]]) -> str:
    """`: head_dim 128, 512 tokens (forward 4, backward 4)`."""
    counts: dict[tuple[object, ...], dict[str, int]] = {}
    for n, head_dim, _, direction, _ in cases:
        of_size = counts.setdefault((head_dim, n), {})
        said = DIRECTIONS[str(direction)]
        of_size[said] = of_size.get(said, 0) + 1
    each = [
        f"head_dim {head_dim}, {n} tokens ({', '.join(f'{said} {count}' for said, count in found.items())})"
        for (head_dim, n), found in counts.items()
    ]
    return f": {'; '.join(each)}" if each else ""


def summary(lines: Sequence[Line]) -> str:
    """What of FlexAttention's time `triton`, which "auto" takes there, needs by either clock: a point, empty without lines."""
    said = []
    for clock, name in CLOCKS.items():
        shown = [line for line in lines if line["clock"] == clock]
        shares = _shares(shown, ("blocksparse_flash", "triton"), ("flex", "triton"))
        if shares:
            longer = sum(share > 1 for share in shares.values())
            said.append(
                f"{min(shares.values()):.2f} to {max(shares.values()):.2f} of FlexAttention's time by {name}, longer in {longer} of "
                f"{len(shares)} cases"
            )
    if not said:
        return ""
    lengths = sorted({line["n"] for line in lines})
    return f"- Small calls, {lengths[0]} to {lengths[-1]:,} tokens, which keep the host longer than the GPU: {'; '.join(said)}."


def caption(lines: Sequence[Line]) -> str:
    lengths = sorted({line["n"] for line in lines})
    devices = " and ".join(sorted({line["device"] for line in lines}))
    return (
        f"Small calls, {lengths[0]} to {lengths[-1]:,} tokens, batch 1, hidden size {lines[0]['heads'] * lines[0]['head_dim']}, {devices}, "
        f"`python -m benchmarks.run.small`, {measurements.versions(lines, 'torch', 'triton')}"
    )


def section(lines: Sequence[Line]) -> str:
    """The README's: what was compared, and the sentences; empty without lines."""
    if not lines:
        return ""
    points = [point for clock in CLOCKS for point in compared(lines, clock)]
    return f"{caption(lines)} ([all of them](benchmarks/results/small.md)):\n\n" + "\n".join(points)


def everything(lines: Sequence[Line]) -> str:
    """The text of results/small.md."""
    providers = measurements.measured(lines)
    found = {(measurements.who(line), *(line[key] for key in CASE)): line for line in lines}
    parts = [
        "# Small calls, all measurements",
        f"Written by `python -m benchmarks.report` from small.jsonl. {caption(lines)}.",
    ]
    for clock, said in CLOCKS.items():
        rows = [["tokens", "head_dim", "pattern", "direction", *map(measurements.label, providers)]]
        for case in dict.fromkeys(tuple(line[key] for key in CASE) for line in lines if line["clock"] == clock):
            cells = [_cell(found.get((provider, *case))) for provider in providers]
            rows.append([f"{case[0]:,}", str(case[1]), case[2], DIRECTIONS[case[3]], *cells])
        parts += [f"## Microseconds of {said}, p20 to p80", table(rows)]
    return "\n\n".join(parts) + "\n"


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    return f"{1000 * line['ms']:.1f} ({1000 * line['ms_p20']:.1f} to {1000 * line['ms_p80']:.1f})"
