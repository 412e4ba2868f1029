"""What do the sweeps say? Sentences about ours: over length, over the side of a block, of equal bits.

Knows result lines, and the names of patterns in them. Must not know how anything is measured or drawn, nor tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import lines as measurements
from .lines import Line

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
# with which --sweep deterministic ends the backend that computes equal bits
EQUAL_BITS = ", deterministic"
# tokens; below, launches and not blocks take the time
LINEAR_FROM = 16384
# tokens on each side of what our kernels compute at once
TILE = 128


def _groups(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """(what they are, lines) of ours, for each head_dim, backend and direction; none without lines."""
    for head_dim in sorted({line["head_dim"] for line in lines}, reverse=True):
        for provider in filter(measurements.is_ours, measurements.measured(lines)):
            for direction, said in DIRECTIONS.items():
                wanted = (provider, head_dim, direction)
                found = [
                    line for line in lines if (measurements.who(line), line["head_dim"], line["direction"]) == wanted
                ]
                if found:
                    yield f"{measurements.label(provider)}, {said}, head_dim {head_dim}", found


def growth(lines: Sequence[Line]) -> str:
    """How time grows with length at a fixed number of keys for each query: points, empty without two lengths."""
    points = []
    for name, found in _groups([line for line in lines if line["pattern"] == "local" and line["n"] >= LINEAR_FROM]):
        first, last = (pick(found, key=lambda line: line["n"]) for pick in (min, max))
        if first["n"] < last["n"]:
            points.append(
                f"- {name}: {last['n'] // first['n']} times the tokens, {first['n']:,} to {last['n']:,}, take "
                f"{last['ms'] / first['ms']:.1f} times as long."
            )
    return "\n".join(points)


def small_blocks(lines: Sequence[Line]) -> str:
    """What blocks smaller than a tile cost beside the same share of blocks of 128: a point for each pattern, over all of ours."""
    times = {
        (measurements.who(line), line["head_dim"], line["direction"], *_sized(line)): line["ms"]
        for line in lines
        if measurements.is_ours(measurements.who(line)) and line["direction"] in DIRECTIONS
    }
    ratios: dict[str, dict[int, list[float]]] = {}
    for (*call, pattern, side), ms in times.items():
        whole = times.get((*call, pattern, TILE))
        if side < TILE and whole is not None:
            ratios.setdefault(pattern, {}).setdefault(side, []).append(ms / whole)
    points = []
    for pattern, sides in ratios.items():
        each = ", ".join(
            f"{min(found):.2f} to {max(found):.2f} in blocks of {side}"
            for side, found in sorted(sides.items(), reverse=True)
        )
        points.append(f"- {pattern}, our backends, times the time in blocks of {TILE}: {each}.")
    return "\n".join(points)


def _sized(line: Line) -> tuple[str, int]:
    """`random, 64` is random in blocks of 64."""
    pattern, _, side = line["pattern"].rpartition(", ")
    return pattern, int(side)


def equal_bits(lines: Sequence[Line]) -> str:
    """How many times as long the backward takes that gives equal bits in every run: points, empty without both."""
    points = []
    backward = [line for line in lines if line["direction"] == "bwd"]
    times = {(*measurements.who(line), line["head_dim"], line["pattern"]): line["ms"] for line in backward}
    for head_dim in sorted({line["head_dim"] for line in lines}, reverse=True):
        for provider, backend in dict.fromkeys(map(measurements.who, backward)):
            ratios = {
                line["pattern"]: times[provider, backend + EQUAL_BITS, head_dim, line["pattern"]] / line["ms"]
                for line in backward
                if (measurements.who(line), line["head_dim"]) == ((provider, backend), head_dim)
                and (provider, backend + EQUAL_BITS, head_dim, line["pattern"]) in times
            }
            if ratios:
                points.append(
                    f"- {measurements.label((provider, backend))}, backward, head_dim {head_dim}, `deterministic=True`: "
                    f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times as long, over "
                    f"{', '.join(f'{pattern} {ratio:.2f}' for pattern, ratio in ratios.items())}."
                )
    return "\n".join(points)
