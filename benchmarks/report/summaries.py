"""Summaries of result lines as tables: speed-ups over baselines, break-even densities, costs of options."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..run.sweeps import SAME_MASK, TIMED
from .lines import DIRECTIONS, SETTING, break_even, panels, providers, select
from .markdown import table

SPEEDUP = "speed-up"
BREAK_EVEN = "break-even density: sparse is faster than dense below it"
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


def ranges(values: Sequence[Value], *by: str) -> str:
    """A row per group of values: cases, min, geometric mean, max and, for speed-ups, cases slower; "" without values.

    by  the fields of Value that make a group
    """
    if not values:
        return ""
    has_slower = any(value.measurement.startswith(SPEEDUP) for value in values)
    rows = []
    for names, group in pd.DataFrame(values).groupby([*by], sort=False):
        found = group["value"]
        cells = [f"{each:.2f}" for each in (found.min(), statistics.geometric_mean(found), found.max())]
        is_speedup = group["measurement"].iloc[0].startswith(SPEEDUP)
        slower = [str((found < 1).sum()) if is_speedup else "-"] if has_slower else []
        rows.append([*names, str(len(found)), *cells, *slower])
    return table([*by, "cases", "min", "mean", "max", *(["slower"] if has_slower else [])], rows)


def _value(measurement: str, line: Any, baseline: str, value: float) -> Value:
    """A value of a line, which is a row of a DataFrame."""
    direction = DIRECTIONS.get(line.direction, line.direction)
    return Value(measurement, line.by, baseline, direction, str(line.head_dim), value)


def speedups(lines: pd.DataFrame, measurement: str = SPEEDUP) -> list[Value]:
    """Time of each peer over ours, for every forward, backward or step that both measured."""
    shown = lines[lines["direction"].isin([*DIRECTIONS, "step"])]
    keys = ["pattern", "n", "head_dim", "direction", "clock"]
    both = shown[shown["is_ours"]].merge(shown[~shown["is_ours"]], on=keys, suffixes=("", "_peer"))
    both = both.sort_values(["by", "by_peer"], kind="stable")
    return [_value(measurement, line, line.by_peer, line.ms_peer / line.ms) for line in both.itertuples()]


def growth(lines: pd.DataFrame) -> list[Value]:
    """Time at the greatest length over time at the smallest, with a fixed number of keys per query."""
    found = []
    local = select(lines, pattern="local", is_ours=True)
    for _, _, panel in panels(local[local["n"] >= LINEAR_FROM]):
        for _, curve in panel.groupby("by", observed=True):
            first, last = curve.loc[curve["n"].idxmin()], curve.loc[curve["n"].idxmax()]
            if first.n < last.n:
                name = f"time at {last.n:,} tokens / time at {first.n:,} tokens, at a fixed number of keys per query"
                found.append(_value(name, last, f"{first.n:,} tokens", last.ms / first.ms))
    return found


def dense_times(panel: pd.DataFrame) -> pd.DataFrame:
    """The dense lines of one panel, fastest first."""
    return select(panel, pattern="dense").sort_values("ms", kind="stable")


def sparse_curves(panel: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The sparse lines of one panel by provider, by ascending density."""
    sparse = panel[panel["pattern"] != "dense"].sort_values("density", kind="stable")
    return dict(iter(sparse.groupby("by", observed=True)))


def break_evens(lines: pd.DataFrame) -> list[Value]:
    """The density up to which ours beats the fastest dense call, or the highest measured if it always does."""
    found = []
    for _, _, panel in panels(lines):
        dense = dense_times(panel)
        for curve in sparse_curves(select(panel, is_ours=True)).values() if len(dense) else ():
            level = break_even(curve["density"], curve["ms"], dense["ms"].iloc[0])
            density = curve["density"].iloc[-1] if level is None else level
            baseline = f"dense {dense['by'].iloc[0]}"
            found.append(_value(BREAK_EVEN, curve.iloc[-1], baseline, density))
    return found


def _with_sides(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of --sweep block-size with their shape and side, which are parts of the pattern, largest blocks first."""
    shape_and_side = lines["pattern"].str.extract(r"(.*), (\d+)$")
    shown = lines.assign(shape=shape_and_side[0], side=shape_and_side[1].astype(int))
    return shown.sort_values(["shape", "side"], ascending=[True, False], kind="stable")


def small_blocks(lines: pd.DataFrame) -> list[Value]:
    """Time in blocks smaller than a tile over time in blocks of 128, at the same density."""
    shown = _with_sides(lines[lines["is_ours"] & lines["direction"].isin(DIRECTIONS)])
    both = shown[shown["side"] < TILE].merge(
        select(shown, side=TILE), on=["shape", "by", "head_dim", "direction"], suffixes=("", "_tile")
    )
    return [
        _value(f"time in blocks of {line.side}, {line.shape}", line, f"blocks of {TILE}", line.ms / line.ms_tile)
        for line in both.itertuples()
    ]


def small_block_speedups(lines: pd.DataFrame) -> list[Value]:
    """Time of each peer over ours in blocks smaller than a tile."""
    shown = _with_sides(lines)
    return [
        value
        for (shape, side), found in shown[shown["side"] < TILE].groupby(["shape", "side"], sort=False)
        for value in speedups(found, f"{SPEEDUP} in blocks of {side}, {shape}")
    ]


def deterministic(lines: pd.DataFrame) -> list[Value]:
    """Time of a backward with deterministic=True over its time without."""
    shown = select(lines, direction="bwd").sort_values("head_dim", ascending=False, kind="stable")
    is_equal = shown["backend"].str.endswith(DETERMINISTIC)
    equal = shown[is_equal].assign(backend=shown["backend"].str.removesuffix(DETERMINISTIC))
    keys = ["provider", "backend", "head_dim", "pattern"]
    both = shown[~is_equal].merge(equal, on=keys, suffixes=("", "_equal"))
    name = "backward time, deterministic=True"
    return [_value(name, line, "deterministic=False", line.ms_equal / line.ms) for line in both.itertuples()]


def change_costs(lines: pd.DataFrame) -> list[str]:
    """Milliseconds that a changed mask adds to each step, `< noise` within the spread of the steps, `-` if unknown.

    lines  of one setting and direction
    """
    same = select(lines, pattern=SAME_MASK)
    both = lines.merge(same, on=["by", "head_dim"], how="left", suffixes=("", "_same"))
    costs = (both["ms"] - both["ms_same"]).mask(both["pattern"] == SAME_MASK)
    noises = np.maximum(both["ms_p80"] - both["ms_p20"], both["ms_p80_same"] - both["ms_p20_same"])
    texts = (f"{cost:.2f}" if cost > noise else f"< {noise:.2f}" for cost, noise in zip(costs, noises, strict=True))
    return ["-" if is_unknown else text for is_unknown, text in zip(costs.isna(), texts, strict=True)]


def changes(lines: pd.DataFrame) -> str:
    """Milliseconds added by a new mask: rows for our first backend and peers, a column per length and clock."""
    columns = {
        f"{group['n'].iloc[0]:,} tokens, {TIMED[direction]}": group.assign(cost=change_costs(group))
        for (*_, direction), group in lines.groupby([*SETTING, "direction"])
    }
    ours = providers(select(lines, is_ours=True))
    rows = []
    for by in [*ours[:1], *providers(lines[~lines["is_ours"]])]:
        for way in select(lines, by=by)["pattern"].unique():
            cells = [" / ".join(select(found, by=by, pattern=way)["cost"]) or "-" for found in columns.values()]
            if way != SAME_MASK:
                rows.append([by, way, *cells])
    return table(["library", "change", *columns], rows) if rows else ""
