"""Tables of decoding, small calls, mask construction and the accuracies of Long Range Arena."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd

from ..run import measure
from . import lines as measurements
from .attention import short_ms
from .lines import frame, providers, select
from .markdown import code, joined, listing, table
from .summaries import SPEEDUP, Value, ranges, speedups

# clocks and directions of small calls
CLOCKS = {"gpu": "GPU time", "wall": "wall clock of calls in a row"}
DIRECTIONS = {**measurements.DIRECTIONS, "step": "both"}
# providers of masks
MASK_COLUMNS = {
    "blocksparse_flash": "blocksparse_flash",
    "flex, compiled": "`create_block_mask`, compiled (first call)",
    "flex": "`create_block_mask`",
    "dense": "dense boolean mask, then blocks",
}

# task -> configurations of the sparse and of the dense model
PAIRS = {
    "ListOps": ("ours/listops", "ours/listops-dense"),
    "Pathfinder-32": ("ours/pathfinder32-sparse", "ours/pathfinder32"),
}


def decoding(lines: pd.DataFrame) -> str:
    """Decoding: rows by length, batch and number of queries, a column for each provider and mask; "" without lines.

    The clock that is shown is the replay of a CUDA graph, without host time. A paged KV cache has a table of its own.
    """
    timed = select(lines, direction="graph")
    if timed.empty:
        return ""
    has_pages = timed["pattern"].str.match("paged|selected")
    shown, pages = timed[~has_pages], timed[has_pages]
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
        "Microseconds per call on one {device}, {dtype}, {heads} query heads and {kv_heads} KV heads of "
        "dimension {head_dim}, in a CUDA graph (`python -m benchmarks.run.decode`, "
    ).format_map(shown.iloc[0])
    return joined(
        f"{caption}{measurements.versions(shown, 'torch', 'triton')}).{sparse if len(densities) else ''} `-`: not "
        "measured.",
        table(["keys", "batch", "queries", *(", ".join(column) for column in columns)], rows),
        _decoding_pages(pages),
    )


def _decoding_pages(lines: pd.DataFrame) -> str:
    """The same for a paged KV cache, with the share of the bandwidth of a copy; "" without lines."""
    if lines.empty:
        return ""
    patterns, rows = [*lines["pattern"].unique()], []
    for case, found in lines.groupby(["n", "batch", "q_len"]):
        cells = {line.pattern: f"{1000 * line.ms:,.0f} ({line.copy_share:.0%})" for line in found.itertuples()}
        rows.append([*(f"{each:,}" for each in case), *(cells.get(pattern, "-") for pattern in patterns)])
    kept = lines.loc[lines["pattern"].str.startswith("selected"), "density"]
    return joined(
        "The same for a paged KV cache, by `paged_attention`: `paged 16` has pages of 16 tokens, and in `selected 16` "
        f"all heads attend to {kept.max():.0%} of them, chosen at random. In brackets: achieved bandwidth on keys and "
        "values, as a share of that of a copy.",
        table(["keys", "batch", "queries", *patterns], rows),
    )


def small_values(lines: pd.DataFrame) -> list[Value]:
    """Speed-ups of small calls by each clock."""
    return [
        value
        for clock, name in CLOCKS.items()
        for value in speedups(select(lines, clock=clock), f"{SPEEDUP} of small calls, {name}")
    ]


def _small_caption(lines: pd.DataFrame) -> str:
    return (
        f"Small calls, {lines['n'].min()} to {lines['n'].max():,} tokens, batch 1, hidden size "
        f"{lines['hidden'].iloc[0]}, {' and '.join(sorted(lines['device'].unique()))}, "
        f"`python -m benchmarks.run.small`, {measurements.versions(lines, 'torch', 'triton')}"
    )


def small_calls(lines: pd.DataFrame) -> str:
    """Speed-ups of small calls; "" without lines."""
    if lines.empty:
        return ""
    of_clocks = [(name, select(lines, clock=clock)) for clock, name in CLOCKS.items()]
    by_clock = "; ".join(f"{name}: {measurements.by_commit(shown)}" for name, shown in of_clocks if speedups(shown))
    return joined(
        f"{_small_caption(lines)} ([all of them](benchmarks/results/small.md)). Speed-up: time of the baseline divided "
        "by our time; `slower` counts the cases in which ours takes longer. Timing was interleaved across the "
        f"libraries that the same commit measured. Number of figures by commit, {by_clock}.",
        ranges(small_values(lines), "measurement", "backend", "baseline"),
    )


def all_small_calls(lines: pd.DataFrame) -> str:
    """The text of results/small.md."""
    columns = providers(lines)
    parts = [
        "# Small calls, all measurements",
        f"Written by `python -m benchmarks.report` from small.jsonl. {_small_caption(lines)}.",
    ]
    for clock, name in CLOCKS.items():
        rows = []
        cases = select(lines, clock=clock).groupby(["n", "head_dim", "pattern", "direction"], sort=False)
        for (n, head_dim, pattern, direction), found in cases:
            cells = {
                line.by: f"{1000 * line.ms:.1f} ({1000 * line.ms_p20:.1f} to {1000 * line.ms_p80:.1f})"
                for line in found.itertuples()
            }
            texts = [cells.get(by, "-") for by in columns]
            rows.append([f"{n:,}", str(head_dim), pattern, DIRECTIONS[direction], *texts])
        header = ["tokens", "head_dim", "pattern", "direction", *columns]
        parts += [f"## Microseconds, {name}, p20 to p80", table(header, rows)]
    return "\n\n".join(parts) + "\n"


def _mask_cell(lines: pd.DataFrame, provider: str) -> str:
    """Time, and in brackets peak memory or the time of the first call."""
    found, first = (select(lines, provider=name) for name in (provider, f"{provider}, first call"))
    if found.empty:
        return "-"
    inside = first["ms"].iloc[0] if len(first) else found["peak_bytes"].iloc[0] / 1e6
    return f"{short_ms(found['ms'].iloc[0])} ({inside:,.0f})"


def _mask_name(pattern: str) -> str:
    """`documents, 10000, causal` -> `documents`, 10,000, causal."""
    name, *rest = pattern.split(", ")
    rest = [f"{int(word):,}" if word.isdecimal() else word for word in rest]
    return ", ".join([code(name), *rest])


def mask_building(lines: pd.DataFrame) -> str:
    """Building masks at the greatest length that peers can build, and at the greatest of all."""
    lengths = lines.loc[~lines["is_ours"], "n"].max(), lines["n"].max()
    shown = lines[lines["n"].isin(lengths)]
    rows = [
        [_mask_name(pattern), f"{n:,}", *(_mask_cell(found, provider) for provider in MASK_COLUMNS)]
        for n in lengths
        for pattern, found in select(shown, n=n).groupby("pattern", sort=False)
    ]
    return joined(
        "Time to build a mask, in milliseconds on one CPU core (`python -m benchmarks.run.masks`, "
        f"{' and '.join(sorted(shown['device'].unique()))}, {measurements.versions(shown, 'torch')}, blocks of 128):",
        table(["mask", "tokens", *MASK_COLUMNS.values()], rows),
        "In brackets: peak memory in MB, or for the compiled function the milliseconds of the first call, which "
        "compiles. `-`: not measured, since time and memory grow with the square of the length. The number after "
        "`documents` is the number of documents.",
        "![Time to build a mask against its length](benchmarks/results/masks.png)",
    )


def read_long_range(folder: Path) -> pd.DataFrame:
    """The latest test of each run on each test set; empty if no folder.

    Lines get the keys configuration, the name of the run, and tests, the number of its tests on this set.
    """
    found = []
    for path in sorted(folder.rglob("test.jsonl")):
        lines = measure.read(path)
        latest = {(line["n"], line["test_seed"]): line for line in lines}
        counts = Counter((line["n"], line["test_seed"]) for line in lines)
        name = path.parent.relative_to(folder).as_posix()
        found += [{**line, "configuration": name, "tests": counts[key]} for key, line in latest.items()]
    return frame(found)


def long_range(lines: pd.DataFrame) -> str:
    """Long Range Arena: a row for each configuration; "" without lines."""
    if lines.empty:
        return ""
    # without its arguments the mask fits into the page; the configuration has them
    masks = lines["mask"].map(lambda mask: "; ".join(mask) if isinstance(mask, list) else mask)
    masks = masks.fillna("dense").str.replace(r"\([^|;]*\)", "", regex=True)
    deep = [
        "-" if pd.isna(line.one_deep) else f"{line.one_deep:.1%} ({line.one_deep_balanced:.1%})"
        for line in lines.itertuples()
    ]
    repeated = ["" if count == 1 else f", **tested {count} times**" for count in lines["tests"]]
    columns = {
        "run": "`{configuration}`", "task": "{task}", "mask": "{mask}", "keys per query": "{keys:,.0f}",
        "training samples": "{all_samples:,}", "GPU hours": "{all_hours:.2f}", "test samples": "{n:,}{repeated}",
        "accuracy": "{accuracy:.1%} ± {standard_error:.1%}", "floor": "{floor:.1%}",
        "balanced accuracy": "{balanced:.1%}", "chance": "{chance:.1%}", "one operator deep (balanced)": "{deep}",
    }  # fmt: skip
    devices = ["a CPU" if device == "cpu" else f"one {device}" for device in sorted(lines["device"].unique())]
    return joined(
        f"On data made by the published rules, tested on {' and '.join(devices)}:",
        listing(
            lines.assign(
                mask=masks, deep=deep, repeated=repeated, all_samples=lines["samples"] + lines["samples_before"],
                all_hours=lines["device_hours"] + lines["device_hours_before"],
            ),
            columns,
        ),
        "Training samples and GPU hours include the earlier stages of a run. `One operator deep` is the accuracy of a "
        "program that evaluates the root operator of ListOps and guesses the value of each operator below it; its "
        "balanced accuracy is in parentheses.",
    )  # fmt: skip


def long_range_steps(lines: pd.DataFrame) -> str:
    """The latest run of training steps of Long Range Arena: a row for each task, mask and dropout; "" without lines."""
    steps = select(lines, bench="lra_speed")
    if steps.empty:
        return ""
    steps = select(steps, commit=steps["commit"].iloc[-1])
    names = [name for name in ("blocksparse_flash", "sdpa", "flex", "materialized") if name in set(steps["provider"])]
    directions = [each for each in ("step", "captured step") if each in set(steps["direction"])]
    rows = []
    for (task, mask, dropout), of_case in steps.groupby(["task", "pattern", "dropout_p"], sort=False):
        cells = []
        for direction in directions:
            found = select(of_case, direction=direction)
            times = dict(zip(found["provider"], found["ms"], strict=True))
            ours = times.get("blocksparse_flash")
            others = [time for name, time in times.items() if name != "blocksparse_flash"]
            cells += [f"{times[name]:.1f}" if name in times else "-" for name in names]
            cells.append(f"{min(others) / ours:.2f}" if ours and others else "-")
        rows.append([task, mask, f"{dropout:g}", *cells])
    first = steps.iloc[0]
    columns = [*names, "the best other / ours"]
    graphs = [f"{name}, graph" for name in columns] if len(directions) > 1 else []
    note = " Columns with `graph` are steps as CUDA graphs, without the time of the host." if graphs else ""
    return joined(
        f"Milliseconds of a training step, {first['device']}, commit {first['commit']}, "
        f"{measurements.versions(steps, 'torch', 'triton')}. `the best other / ours` is the time of the fastest of the "
        f"others divided by ours. Timing was interleaved across libraries.{note}",
        table(["task", "mask", "attention dropout", *columns, *graphs], rows),
    )


def sparse_against_dense(lines: pd.DataFrame) -> str:
    """Accuracies of sparse and dense models of Long Range Arena, in pairs; "" if no pair is complete."""
    rows = list[list[str]]()
    for task, (sparse_name, dense_name) in PAIRS.items() if len(lines) else ():
        by_samples = lines[lines["configuration"] == dense_name].set_index("n")
        for sparse in lines[lines["configuration"] == sparse_name].to_dict("records"):
            if sparse["n"] in by_samples.index:
                dense = by_samples.loc[sparse["n"]]
                cells = [f"{one['accuracy']:.1%} ± {one['standard_error']:.1%}" for one in (sparse, dense)]
                apart = [f"{100 * (sparse[key] - dense[key]):+.1f}" for key in ("accuracy", "balanced")]
                rows.append([task, f"{sparse['n']:,.0f}", *cells, *apart, f"{dense['floor']:.1%}"])
    points = ["sparse - dense, points", "sparse - dense, balanced, points"]
    return table(["task", "test samples", "sparse", "dense", *points, "floor"], rows) if rows else ""
