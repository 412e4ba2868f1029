"""Summaries of result lines as tables: speed-ups over baselines, break-even densities, costs of options."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .lines import (
    DIRECTIONS,
    SAME_MASK,
    TIMED,
    Line,
    break_even,
    is_ours,
    label,
    measured,
    ours,
    provider_of,
    select,
)
from .lines import settings as by_setting
from .markdown import table

SPEEDUP = "speed-up"
# suffix of the backend that ran with deterministic=True in --sweep deterministic
DETERMINISTIC = ", deterministic"
# tokens; shorter calls are dominated by launches
LINEAR_FROM = 16384
# tokens per side of the tiles that our kernels compute
TILE = 128


class Value(NamedTuple):
    """A ratio of two measurements, or a density. `baseline` is what it is compared with."""

    measurement: str
    backend: str
    baseline: str
    direction: str
    head_dim: str
    value: float


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(values)


def ranges(values: Iterable[Value], *by: str) -> str:
    """A row per group of values: cases, min, geometric mean, max and, for speed-ups, cases slower; "" without values.

    by  the fields of Value that make a group
    """
    groups: dict[tuple[str, ...], list[Value]] = {}
    for value in values:
        groups.setdefault(tuple(getattr(value, name) for name in by), []).append(value)
    if not groups:
        return ""
    has_slower = any(value.measurement.startswith(SPEEDUP) for group in groups.values() for value in group)
    rows = [[*by, "cases", "min", "mean", "max", *(["slower"] if has_slower else [])]]
    for names, group in groups.items():
        found = [value.value for value in group]
        cells = [f"{each:.2f}" for each in (min(found), mean(found), max(found))]
        is_speedup = group[0].measurement.startswith(SPEEDUP)
        slower = [str(sum(each < 1 for each in found)) if is_speedup else "-"] if has_slower else []
        rows.append([*names, str(len(found)), *cells, *slower])
    return table(rows)


def _value(measurement: str, line: Line, baseline: str, value: float) -> Value:
    direction = str(DIRECTIONS.get(line["direction"], line["direction"]))
    return Value(measurement, label(provider_of(line)), baseline, direction, str(line["head_dim"]), value)


def speedups(lines: Sequence[Line], measurement: str = SPEEDUP) -> list[Value]:
    """Time of each peer over ours, for every forward, backward or step that both measured."""
    keys = ("pattern", "n", "head_dim", "direction", "clock")
    shown = [line for line in lines if line["direction"] in (*DIRECTIONS, "step")]
    times = {(provider_of(line), *(line.get(key) for key in keys)): line["ms"] for line in shown}
    return [
        _value(measurement, line, label(peer), times[case] / line["ms"])
        for backend in ours(shown)
        for peer in measured(shown)
        for line in select(shown, backend)
        if not is_ours(peer) and (case := (peer, *(line.get(key) for key in keys))) in times
    ]


def _panels(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each head_dim, the largest first, and direction."""
    for head_dim in sorted({line["head_dim"] for line in lines}, reverse=True):
        for direction in DIRECTIONS:
            yield select(lines, head_dim=head_dim, direction=direction)


def growth(lines: Sequence[Line]) -> list[Value]:
    """Time at the greatest length over time at the smallest, with a fixed number of keys per query."""
    found = []
    for panel in _panels([line for line in select(lines, pattern="local") if line["n"] >= LINEAR_FROM]):
        for backend in ours(panel):
            first, last = (pick(select(panel, backend), key=lambda line: line["n"]) for pick in (min, max))
            if first["n"] < last["n"]:
                times = last["n"] // first["n"]
                name = f"time at {last['n']:,} tokens, {times} times as many, fixed keys per query"
                found.append(_value(name, last, f"{first['n']:,} tokens", last["ms"] / first["ms"]))
    return found


def dense_times(panel: Sequence[Line]) -> list[Line]:
    """The dense lines of one panel, fastest first."""
    return sorted(select(panel, pattern="dense"), key=lambda line: line["ms"])


def level_with_dense(panel: Sequence[Line], provider: tuple[str, str]) -> float | None:
    """The density at which a provider's sparse call takes as long as the fastest dense one of the panel."""
    mine = [line for line in select(panel, provider) if line["pattern"] != "dense"]
    mine.sort(key=lambda line: line["density"])
    dense = dense_times(panel)
    if not mine or not dense:
        return None
    return break_even([line["density"] for line in mine], [line["ms"] for line in mine], dense[0]["ms"])


def break_evens(lines: Sequence[Line]) -> list[Value]:
    """The density up to which ours beats the fastest dense call, or the highest measured if it always does."""
    found = []
    for panel in _panels(lines):
        for backend in ours(panel):
            mine = [line for line in select(panel, backend) if line["pattern"] != "dense"]
            if mine and dense_times(panel):
                density, densest = level_with_dense(panel, backend), max(mine, key=lambda line: line["density"])
                baseline = f"dense {label(provider_of(dense_times(panel)[0]))}"
                density = densest["density"] if density is None else density
                found.append(_value("density up to which sparse is faster", densest, baseline, density))
    return found


def small_blocks(lines: Sequence[Line]) -> list[Value]:
    """Time in blocks smaller than a tile over time in blocks of 128, at the same density."""
    keys = ("head_dim", "direction", "pattern")
    times = {(provider_of(line), *(line[key] for key in keys)): line["ms"] for line in lines}
    found = []
    for line in sorted(lines, key=lambda line: -int(line["pattern"].rpartition(", ")[2])):
        pattern, _, side = line["pattern"].rpartition(", ")
        case = (provider_of(line), line["head_dim"], line["direction"], f"{pattern}, {TILE}")
        if is_ours(case[0]) and int(side) < TILE and line["direction"] in DIRECTIONS and case in times:
            name = f"time in blocks of {side}, {pattern}"
            found.append(_value(name, line, f"blocks of {TILE}", line["ms"] / times[case]))
    return sorted(found, key=lambda value: value.measurement.rpartition(", ")[2])


def deterministic(lines: Sequence[Line]) -> list[Value]:
    """Time of a backward with deterministic=True over its time without."""
    found = []
    for line in sorted(select(lines, direction="bwd"), key=lambda line: -line["head_dim"]):
        by = (line["provider"], line["backend"] + DETERMINISTIC)
        for equal in select(lines, by, direction="bwd", head_dim=line["head_dim"], pattern=line["pattern"]):
            found.append(
                _value("backward time, deterministic=True", line, "deterministic=False", equal["ms"] / line["ms"])
            )
    return found


def change_cost(lines: Sequence[Line], line: Line) -> str:
    """Milliseconds that a changed mask adds to a step, `< noise` within the percentiles of the steps, `-` if unknown.

    lines  of one setting and direction
    """
    same = select(lines, provider_of(line), pattern=SAME_MASK, head_dim=line["head_dim"])
    if line["pattern"] == SAME_MASK or not same:
        return "-"
    noise = max(each["ms_p80"] - each["ms_p20"] for each in (line, same[0]))
    cost = line["ms"] - same[0]["ms"]
    return f"{cost:.2f}" if cost > noise else f"< {noise:.2f}"


def changes(lines: Sequence[Line]) -> str:
    """Milliseconds added by a new mask: rows for our first backend and peers, a column per length and clock."""
    columns = {
        f"{setting.n:,} tokens, {name}": select(found, direction=direction)
        for setting, found in sorted(by_setting(lines).items())
        for direction, name in TIMED.items()
        if select(found, direction=direction)
    }
    shown = [provider for provider in measured(lines) if not is_ours(provider) or provider == ours(lines)[0]]
    rows = [["library", "change", *columns]]
    for provider in shown:
        for way in dict.fromkeys(line["pattern"] for line in select(lines, provider)):
            cells = []
            for found in columns.values():
                costs = [change_cost(found, line) for line in select(found, provider, pattern=way)]
                cells.append(" / ".join(costs) or "-")
            if way != SAME_MASK:
                rows.append([label(provider), way, *cells])
    return table(rows) if len(rows) > 1 else ""
