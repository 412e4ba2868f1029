"""Markdown tables of speed and accuracy, from the lines of `speed` and `test`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..report import markdown
from .peers import MATERIALISED, OURS
from .published import ACCURACY, BATCH, DEVICE, HEAD_DIM, HEADS, LENGTHS, MEMORY_MB, RUNTIME_MS, SPEEDUP, STEPS

Line = dict[str, Any]
TASKS = tuple(STEPS)
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown.table(heading, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def latest(lines: Sequence[Line], *keys: str) -> dict[tuple[Any, ...], Line]:
    """The last line of each combination of values."""
    return {tuple(line[key] for key in keys): line for line in lines}


def _name(pattern: str, provider: str, backend: str | None) -> str:
    return f"{provider}{f' ({backend})' if backend else ''}, {pattern}"


def _number(number: float) -> str:
    """Three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def said(line: Line) -> str:
    """A line of `speed` as a row of text."""
    what = f"{line['task'] or 'attention'} {line['n']} {line['direction']}"
    figures = line["status"] if line["ms"] is None else f"{line['ms']:10.3f} ms"
    peak = "" if line["peak_bytes"] is None else f"  {line['peak_bytes'] / 2**20:9.0f} MiB"
    return f"{what:28} {_name(line['pattern'], line['provider'], line['backend']):44} {figures}{peak}"


def _size(line: Line) -> tuple[int, int, int]:
    return line["batch"], line["documents"], line["n"]


def are_published(lines: Sequence[Line]) -> bool:
    """Whether training steps have the published sizes."""
    return all(_size(line) == STEPS[line["task"]] for line in lines)


def speedups(lines: Sequence[Line]) -> dict[tuple[str, str, str | None], dict[str, float]]:
    """(pattern, provider, backend) -> task -> speed-up over dense attention with a score matrix, on one device."""
    newest = latest(lines, "pattern", "provider", "backend", "task")
    found: dict[tuple[str, str, str | None], dict[str, float]] = {}
    for (pattern, provider, backend, task), line in newest.items():
        base = newest.get(("dense", MATERIALISED, None, task))
        if base is not None and _size(base) == _size(line) and base["ms"] is not None and line["ms"] is not None:
            found.setdefault((pattern, provider, backend), {})[task] = base["ms"] / line["ms"]
    return found


def _cell(line: Line | None, faster: float | None) -> str:
    if line is None:
        return ""
    if line["ms"] is None:
        return line["status"]
    return _number(line["ms"]) + ("" if faster is None else f" ({faster:.2f}x)")


def steps_table(lines: Sequence[Line]) -> str:
    """Training steps of the tasks on one device, with the geometric mean of their speed-ups and the paper's."""
    faster, newest = speedups(lines), latest(lines, "pattern", "provider", "backend", "task")
    tasks = [task for task in TASKS if any(key[3] == task for key in newest)]
    sizes = {line["task"]: " x ".join(map(str, _size(line))) for line in lines}
    has_paper = are_published(lines)
    rows = []
    for pattern, provider, backend in dict.fromkeys(key[:3] for key in newest):
        gained = faster.get((pattern, provider, backend), {})
        cells = [_cell(newest.get((pattern, provider, backend, task)), gained.get(task)) for task in tasks]
        is_whole = set(gained) == set(TASKS)
        mean = f"**{statistics.geometric_mean(gained.values()):.2f}x**" if is_whole else ""
        paper = SPEEDUP["dense" if pattern == "dense" else "block-sparse"]
        published = f"{paper}x" if is_whole and has_paper and provider == OURS else ""
        rows.append([_name(pattern, provider, backend), *cells, mean, published])
    heading = ["ms a step", *(f"{task}, {sizes[task]}" for task in tasks), "geometric mean", f"paper ({DEVICE})"]
    return table(heading, rows)


def _runtime_row(name: str, of_length: dict[int, Line], lengths: Sequence[int], key: str, unit: float) -> list[str]:
    cells = []
    for length in lengths:
        line = of_length.get(length)
        value = None if line is None else line[key]
        cells.append("" if line is None else "-" if value is None else _number(value / unit))
    return [name, *cells]


def runtime_table(lines: Sequence[Line], direction: str, *, memory: bool = False) -> str:
    """Milliseconds of a direction, or MiB, at each length; lines of one device, batch, heads and head_dim.

    The paper's rows follow ours if the size is the published one.
    """
    lengths = sorted({line["n"] for line in lines})
    newest = latest([line for line in lines if line["direction"] == direction], "pattern", "provider", "backend", "n")
    key, unit = ("peak_bytes", 2.0**20) if memory else ("ms", 1.0)
    rows = []
    for names in dict.fromkeys(each[:3] for each in newest):
        of_length = {each[3]: line for each, line in newest.items() if each[:3] == names}
        rows.append(_runtime_row(_name(*names), of_length, lengths, key, unit))
    is_published = (lines[0]["batch"], lines[0]["heads"], lines[0]["head_dim"]) == (BATCH, HEADS, HEAD_DIM)
    paper = MEMORY_MB if memory else RUNTIME_MS[direction]
    for name, published in paper.items() if is_published else ():
        known = dict(zip(LENGTHS, published, strict=False))
        # a dash: out of memory or not supported at a published length
        cells = [_number(known[n]) if n in known else "-" if n in LENGTHS else "" for n in lengths]
        rows.append([f"{name}, {DEVICE} (paper)", *cells])
    return table(["MiB" if memory else "ms", *(f"{length:,}" for length in lengths)], rows)


def sizes(lines: Sequence[Line]) -> dict[tuple[Any, ...], list[Line]]:
    """(device, batch, heads, head_dim) -> lines of attention alone."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["bench"] == "lra_runtime":
            found.setdefault(tuple(line[key] for key in ("device", "batch", "heads", "head_dim")), []).append(line)
    return found


def speed_sections(lines: Sequence[Line]) -> list[str]:
    """Headings and tables of all lines of `speed`, by device."""
    sections = []
    for device in dict.fromkeys(line["device"] for line in lines):
        here = [line for line in lines if line["device"] == device]
        steps = [line for line in here if line["bench"] == "lra_speed"]
        if steps:
            what = "" if are_published(steps) else ", NOT the sizes of Long Range Arena"
            sections += [f"## Training steps on {device}{what}", steps_table(steps)]
    for (device, *size), alone in sizes(lines).items():
        what = f"alone on {device}, batch {size[0]}, {size[1]} heads, head_dim {size[2]}"
        for direction, words in DIRECTIONS.items():
            sections += [f"## Attention {what}: {words}", runtime_table(alone, direction)]
        if any(line["peak_bytes"] is not None for line in alone):
            memory = runtime_table(alone, "fwd+bwd", memory=True)
            sections += [f"## Memory of attention {what}: forward and backward", memory]
    return sections


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _accuracy_row(line: Line) -> list[str]:
    is_above = line["accuracy"] - line["floor"] > 2 * line["standard_error"]
    return [
        line["task"], line["run"], line["mask"] or "dense", f"{line['steps']:,} x {line['batch_size']}",
        f"{line['accuracy']:.1%} +- {line['standard_error']:.1%}", f"{line['floor']:.1%}, {line['floor_name']}",
        "yes" if is_above else "**no**", f"{line['balanced']:.1%} ({line['chance']:.0%})",
        _percent(line["pair_accuracy"]), f"{line['n']:,}", line["data"],
    ]  # fmt: skip


def accuracy_sections(lines: Sequence[Line]) -> list[str]:
    """Separate tables for released files, generated data, and tests that are not Long Range Arena's."""
    kinds = {
        "Accuracy on the released files of Long Range Arena": (True, True),
        "Accuracy on data made by the rules of Long Range Arena": (True, False),
        "NOT Long Range Arena: stand-ins, parts, short or easy versions": (False, False),
    }
    heading = [
        *("task", "run", "mask", "steps x batch", "accuracy", "floor", "above the floor", "balanced (chance)"),
        *("pairs", "samples", "data"),
    ]
    sections = []
    for title, kind in kinds.items():
        of_kind = [line for line in lines if (line["is_lra"], line["is_lra"] and line["source"] == "official") == kind]
        rows = [_accuracy_row(line) for line in of_kind]
        if rows:
            sections += [f"## {title}", table(heading, rows)]
    if any(line["is_lra"] for line in lines):
        tasks = [*TASKS, "pathx", "path256"]
        rows = [
            [name, *(f"{known[task]}" if task in known else "-" for task in tasks)] for name, known in ACCURACY.items()
        ]
        sections += ["## Published by the FlashAttention paper, per cent", table(["", *tasks], rows)]
    return sections
