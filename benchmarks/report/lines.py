"""Result lines as pandas DataFrames: reading, names of providers, selection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..run import measure

Line = dict[str, Any]

# keys that identify a measurement, where a line has them; of repeated measurements the latest counts
IDENTITY = (
    "bench", "provider", "backend", "pattern", "n", "batch", "heads", "kv_heads", "head_dim", "dtype", "direction",
    "device", "block_size", "q_len", "clock", "what", "scaling", "ranks", "order", "chunks", "priority", "tile",
    "model", "task", "dropout_p",
)  # fmt: skip
# columns that are equal in all measurements of one table
SETTING = ["device", "dtype", "n", "batch", "hidden"]
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
# commits whose lines of attention.jsonl were timed one library after another, or without the other libraries
ONE_BY_ONE = (
    "01b72ed", "05cb073", "0ba8546", "134f9b7", "1c123c6", "28926e2", "34aa14f", "42d3202", "6fff7f5", "9db8dab",
    "a140406", "abcee27", "c825dcc", "e895398", "f18b14e",
)  # fmt: skip

# (provider, backend) -> name in tables, in the order of columns; ours first
LABELS = {
    ("blocksparse_flash", "hopper"): "blocksparse_flash, hopper",
    ("blocksparse_flash", "triton"): "blocksparse_flash, triton",
    ("flex", "triton"): "FlexAttention",
    ("flash_attention_4", "cute"): "FlashAttention-4",
    ("flashinfer", "auto"): "FlashInfer",
    ("block_sparse_attention", "cuda"): "Block-Sparse-Attention",
    ("cudnn_block_sparse", "cute"): "cuDNN block-sparse",
    ("fastvideo", "triton"): "FastVideo, Triton",
    ("natten", "auto"): "NATTEN",
    ("xformers", "auto"): "xFormers",
    ("cudnn", "cudnn"): "cuDNN",
    ("flash_attention_2", "sdpa"): "FlashAttention-2",
    ("math", "sdpa"): "SDPA math",
}


def frame(lines: Iterable[Line]) -> pd.DataFrame:
    """A row for each line, and columns for `by` (the provider's name), `is_ours` and `hidden` (heads * head_dim)."""
    found = pd.DataFrame([*lines])
    found = found.reindex(columns=[*dict.fromkeys([*found, *IDENTITY, *measure.KEYS])])
    if found.empty:
        # pandas makes columns without values float64, which have no text methods
        found = found.astype(object)
    providers = zip(found["provider"], found["backend"], strict=True)
    names = [LABELS.get(each, ", ".join(map(str, each))) for each in providers]
    found["by"] = pd.Categorical(names, [*dict.fromkeys([*LABELS.values(), *names])], ordered=True)
    found["is_ours"] = found["provider"] == "blocksparse_flash"
    found["hidden"] = found["heads"] * found["head_dim"]
    return found


def read(path: Path) -> pd.DataFrame:
    """The lines of a file in the order of their first measurement; of repeated measurements the latest.

    Every run measures a matrix product of its own, so these are also identified by their commit.
    """
    found: dict[Any, Line] = {}
    for line in measure.read(path):
        run = line["commit"] if line["bench"] == "matmul" else None
        found[run, tuple(map(line.get, IDENTITY))] = line
    return frame(found.values())


def select(lines: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The lines whose columns have these values."""
    for name, value in values.items():
        lines = lines[lines[name] == value]
    return lines


def groups(lines: pd.DataFrame, keys: str | list[str]) -> list[pd.DataFrame]:
    """The lines by the values of these columns, the largest group first."""
    found = [group for _, group in lines.groupby(keys, sort=False)]
    return sorted(found, key=len, reverse=True)


def panels(lines: pd.DataFrame) -> Iterator[tuple[int, str, pd.DataFrame]]:
    """(head_dim, direction, lines) for each head_dim, the largest first, forward and backward."""
    for head_dim in sorted(lines["head_dim"].unique(), reverse=True):
        for direction in DIRECTIONS:
            yield head_dim, direction, select(lines, head_dim=head_dim, direction=direction)


def providers(lines: pd.DataFrame) -> list[str]:
    """The names of the providers of lines, in the order of columns."""
    return lines["by"].cat.remove_unused_categories().cat.categories.tolist()


def versions(lines: pd.DataFrame, *keys: str) -> str:
    """`torch 2.11.0+cu130, triton 3.6.0`: every version that measured any of the lines."""
    return ", ".join(f"{key} {' and '.join(sorted(lines[key].unique()))}" for key in keys)


def commits(lines: pd.DataFrame) -> str:
    """`commit 5fa1d2c`, or `commits 5fa1d2c, 91be004+`: those that measured any of the lines; `+`: with changes."""
    found = [*lines["commit"].unique()]
    return f"commit{'s' if len(found) > 1 else ''} {', '.join(found)}"


def by_commit(lines: pd.DataFrame) -> str:
    """`a1b2c3d: cuDNN (4); 91be004+: FlexAttention (12), cuDNN (8)`: the figures of each library at each commit."""
    found = []
    for commit, at_commit in lines.groupby("commit", sort=False):
        counts = at_commit["by"].value_counts(sort=False)
        # names of ours have a comma
        names = (f"{by.replace(',', '')} ({counts[by]})" for by in providers(at_commit))
        found.append(f"{commit}: {', '.join(names)}")
    return "; ".join(found)


def order_of_timing(lines: pd.DataFrame) -> str:
    """Sentences on whether timing was interleaved across libraries, and which commit measured what if several did."""
    alone = lines["commit"].isin(ONE_BY_ONE)
    if alone.all():
        return "The libraries were timed one after another."
    exceptions = []
    for by in providers(lines):
        of_library = alone[lines["by"] == by]
        if of_library.all():
            exceptions.append(by)
        elif of_library.any():
            exceptions.append(f"{of_library.sum()} of {len(of_library)} figures of {by}")
    excepted = f", except {' and '.join(exceptions)}" if exceptions else ""
    if lines["commit"].nunique() == 1:
        return f"Timing was interleaved across libraries{excepted}."
    return (
        f"Timing was interleaved across the libraries that the same commit measured{excepted}. Number of figures by "
        f"commit: {by_commit(lines)}."
    )


def matmul_rate(lines: pd.DataFrame, shown: pd.DataFrame) -> float | None:
    """TFLOP/s of a large matrix product in the run that measured `shown`; None if unknown or if several runs did."""
    runs = shown[["device", "commit"]].drop_duplicates().to_dict("records")
    if len(runs) != 1:
        return None
    found = select(lines, bench="matmul", **runs[0])["tflops"]
    return float(found.iloc[0]) if len(found) else None


def break_even(densities: Sequence[float], times: Sequence[float], dense: float) -> float | None:
    """The density from which on sparse takes as long as dense, linear between two measured; None if it never does.

    densities  ascending, with `times` at each; times and dense in one unit

    >>> break_even([0.25, 0.5, 1.0], [1.0, 2.0, 4.0], 3.0)
    0.75
    """
    slower = np.flatnonzero(np.asarray(times) >= dense)
    if not len(slower):
        return None
    between = slice(max(0, slower[0] - 1), slower[0] + 1)
    return float(np.interp(dense, times[between], densities[between]))
