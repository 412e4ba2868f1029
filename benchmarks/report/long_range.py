"""The table of Long Range Arena accuracies, from the tests in results/lra."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from .lines import frame
from .markdown import listing


def read(folder: Path) -> pd.DataFrame:
    """The latest test of each configuration, with its name as `configuration`; none without the folder."""
    found = []
    for path in sorted(folder.glob("*/*/test.jsonl")):
        latest = path.read_text(encoding="utf-8").splitlines()[-1]
        found.append({**json.loads(latest), "configuration": "/".join(path.parts[-3:-1])})
    return frame(found)


def section(lines: pd.DataFrame) -> str:
    """A row for each configuration; "" without lines."""
    if lines.empty:
        return ""
    # without its arguments the mask fits into the page; the configuration has them
    masks = lines["mask"].fillna("dense").str.replace(r"\([^|]*\)", "", regex=True).str.replace("|", "\\|")
    columns = {
        "configuration": "`{configuration}`", "task": "{task}", "mask": "{mask}", "test samples": "{n:,}",
        "accuracy": "{accuracy:.1%} ± {standard_error:.1%}", "shortcut": "{floor:.1%}",
        "balanced accuracy": "{balanced:.1%}", "chance": "{chance:.1%}",
    }  # fmt: skip
    return (
        f"Trained and tested on one {' and '.join(sorted(lines['device'].unique()))}, one seed, on data made by the "
        f"published rules:\n\n{listing(lines.assign(mask=masks), columns)}"
    )
