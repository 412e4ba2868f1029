"""The table of Long Range Arena accuracies, from the tests in results/lra."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .lines import Line
from .markdown import table


def read(folder: Path) -> list[Line]:
    """The latest test of each configuration, with its name as `configuration`; none without the folder."""
    found = []
    for path in sorted(folder.glob("*/*/test.jsonl")):
        latest = path.read_text(encoding="utf-8").splitlines()[-1]
        found.append({**json.loads(latest), "configuration": "/".join(path.parts[-3:-1])})
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def section(lines: Sequence[Line]) -> str:
    """A row for each configuration; "" without lines."""
    if not lines:
        return ""
    rows = [["configuration", "task", "mask", "test samples", "accuracy", "shortcut", "balanced accuracy", "chance"]]
    for line in lines:
        # without its arguments the mask fits into the page; the configuration has them
        mask = " \\| ".join(each.partition("(")[0] for each in (line["mask"] or "dense").split(" | "))
        rows.append(
            [
                f"`{line['configuration']}`", line["task"], mask, f"{line['n']:,}",
                f"{_percent(line['accuracy'])} ± {_percent(line['standard_error'])}",
                *(_percent(line[key]) for key in ("floor", "balanced", "chance")),
            ]
        )  # fmt: skip
    devices = " and ".join(sorted({line["device"] for line in lines}))
    return f"Trained and tested on one {devices}, one seed, on data made by the published rules:\n\n{table(rows)}"
