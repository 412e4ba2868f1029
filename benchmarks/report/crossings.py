"""At which density does sparse take as long as dense? Of the lines of --sweep density.

Knows result lines. Must not know how anything is measured, drawn or told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import lines as measurements
from .lines import Line

DIRECTIONS = ("fwd", "bwd")


def dense_times(lines: Sequence[Line]) -> list[Line]:
    """The dense lines among those of one panel, fastest first."""
    return sorted((line for line in lines if line["pattern"] == "dense"), key=lambda line: line["ms"])


def level_with_dense(lines: Sequence[Line], provider: tuple[str, str]) -> float | None:
    """The density at which a provider's sparse call takes as long as the fastest dense one, of one panel's lines."""
    mine = [line for line in lines if measurements.who(line) == provider and line["pattern"] != "dense"]
    mine = sorted(mine, key=lambda line: line["density"])
    dense = dense_times(lines)
    if not mine or not dense:
        return None
    return measurements.break_even([line["density"] for line in mine], [line["ms"] for line in mine], dense[0]["ms"])


class Crossing(NamedTuple):
    """Where a provider's sparse calls take as long as the fastest dense ones, of one panel.

    density   None: they were faster at every density, of which `measured` is the highest
    """

    provider: tuple[str, str]
    head_dim: int
    direction: str
    beside: tuple[str, str]
    density: float | None
    measured: float


def find(lines: Sequence[Line]) -> list[Crossing]:
    """One for each of ours in each panel."""
    found = []
    for head_dim in sorted({line["head_dim"] for line in lines}, reverse=True):
        for direction in DIRECTIONS:
            panel = [line for line in lines if line["head_dim"] == head_dim and line["direction"] == direction]
            for provider in filter(measurements.is_ours, measurements.measured(panel)):
                mine = [line for line in panel if measurements.who(line) == provider and line["pattern"] != "dense"]
                if mine and dense_times(panel):
                    beside, measured = measurements.who(dense_times(panel)[0]), max(line["density"] for line in mine)
                    where = level_with_dense(panel, provider)
                    found.append(Crossing(provider, head_dim, direction, beside, where, measured))
    return found
