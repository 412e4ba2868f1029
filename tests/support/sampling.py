"""Samples of sweeps: `make test` runs a sample of each test marked `sweep`, `make test-thorough` the rest.

    @pytest.mark.sweep                                         every value of every parameter occurs in the sample
    @pytest.mark.sweep(by=lambda index: {CALLS[index].dtype})  every value occurs that the function returns for a case

The rest gets the marker `thorough`. Plain pytest runs both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable

import pytest


def sample(values: list[set[Hashable]]) -> list[int]:
    """Indices of a few of these sets that together have every value: each time the first with the most new ones."""
    chosen: list[int] = []
    missing = set[Hashable]().union(*values)
    while missing:
        best = max(range(len(values)), key=lambda i: len(values[i] & missing))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen)


def values_of(item: pytest.Function) -> set[Hashable]:
    """What the case of a sweep adds to a sample."""
    marker = item.get_closest_marker("sweep")
    by: Callable[..., Iterable[Hashable]] | None = marker.kwargs.get("by") if marker is not None else None
    if by is not None:
        return set(by(**item.callspec.params))
    # lists are equal if they look alike
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Adds the marker `thorough` to all cases of sweeps that are not in the sample."""
    sweeps: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sweeps.values():
        in_sample = set(sample([values_of(item) for item in cases]))
        for i, item in enumerate(cases):
            if i not in in_sample:
                item.add_marker(pytest.mark.thorough)


def not_in_part(items: list[pytest.Item], part: str) -> set[str]:
    """Names of the tests marked thorough or compilers that are not in part K of N, given as "K/N"."""
    numbers = part.split("/")
    if len(numbers) != 2 or not all(map(str.isdecimal, numbers)) or int(numbers[0]) >= int(numbers[1]):
        raise pytest.UsageError(
            f"--part must be K/N with K from 0 to N - 1, such as 0/2 and 1/2 for halves, got {part!r}"
        )
    k, n = map(int, numbers)
    rest = [item for item in items if item.get_closest_marker("thorough") or item.get_closest_marker("compilers")]
    # by name, so that a test stays in its part when others are added
    return {item.nodeid for item in rest if zlib.crc32(item.nodeid.encode()) % n != k}
