"""What do the sweeps say? Sentences about ours: over length, over the side of a block, of equal bits.

Knows result lines, and the names of patterns in them. Must not know how anything is measured or drawn, nor tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import crossings
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


def _longer(lines: Sequence[Line]) -> Iterator[tuple[str, Line, Line]]:
    """(what they are, the shortest, the longest) of ours at a fixed number of keys for each query; none without two lengths."""
    for name, found in _groups([line for line in lines if line["pattern"] == "local" and line["n"] >= LINEAR_FROM]):
        first, last = (pick(found, key=lambda line: line["n"]) for pick in (min, max))
        if first["n"] < last["n"]:
            yield name, first, last


def growth(lines: Sequence[Line]) -> str:
    """How time grows with length at a fixed number of keys for each query: points, empty without two lengths."""
    return "\n".join(
        f"- {name}: {last['n'] // first['n']} times the tokens, {first['n']:,} to {last['n']:,}, take "
        f"{last['ms'] / first['ms']:.1f} times as long."
        for name, first, last in _longer(lines)
    )


def growth_of_all(lines: Sequence[Line]) -> str:
    """`growth` in a point over all of ours; empty without two lengths."""
    ratios: dict[tuple[int, int], list[float]] = {}
    for _, first, last in _longer(lines):
        ratios.setdefault((first["n"], last["n"]), []).append(last["ms"] / first["ms"])
    each = [
        f"{last // first} times the tokens, {first:,} to {last:,}, take {min(found):.0f} to {max(found):.0f} times as long"
        for (first, last), found in ratios.items()
    ]
    return f"- Length: at a fixed number of keys for each query {'; '.join(each)}." if each else ""


def break_evens(lines: Sequence[Line]) -> list[str]:
    """`blocksparse_flash, triton, forward, head_dim 128: as fast as dense cuDNN at density 0.85`, one each panel."""
    said = []
    for one in crossings.find(lines):
        never = f"faster at every density measured, up to {one.measured:.2f}"
        ends = never if one.density is None else f"level at density {one.density:.2f}"
        name, beside = measurements.label(one.provider), measurements.label(one.beside)
        said.append(f"{name}, {DIRECTIONS[one.direction]}, head_dim {one.head_dim}, beside dense {beside}: {ends}")
    return said


def break_even(lines: Sequence[Line]) -> str:
    """`break_evens` in a point over both directions and all head_dims; empty without any."""
    ends: dict[str, list[float]] = {}
    for one in crossings.find(lines):
        ends.setdefault(one.provider[1], []).append(one.measured if one.density is None else one.density)
    each = [f"`{backend}` up to {min(found):.0%} to {max(found):.0%}" for backend, found in ends.items()]
    return f"- Density: faster than the fastest dense attention are {', '.join(each)} of all blocks." if each else ""


def changes(lines: Sequence[Line]) -> list[str]:
    """What a new mask each step adds to a step, a point for each length: of the first backend of ours, and of peers."""
    points = []
    for setting, found in sorted(measurements.settings(lines).items()):
        providers = measurements.measured(found)
        ours, others = ([one for one in providers if measurements.is_ours(one) == mine] for mine in (True, False))
        for direction, named in measurements.TIMED.items():
            shown, said = measurements.of_direction(found, direction), []
            costs, noise = measurements.change_costs(shown), measurements.change_noise(shown)
            for provider in [*ours[:1], *others]:
                each = [
                    f"{_seen(cost, noise[case])} ({case[1]})" for case, cost in costs.items() if case[0] == provider
                ]
                if each:
                    said.append(f"with {measurements.label(provider)}, {', '.join(each)}")
            if said:
                points.append(
                    f"- A mask that changes at each step, {setting.n:,} tokens, adds to {named}: {'; '.join(said)}."
                )
    return points


def _seen(cost: float, noise: float) -> str:
    """Milliseconds, as far as they can be told from those by which steps vary."""
    return f"{cost:.2f} ms" if cost > noise else f"less than the {noise:.2f} ms by which steps vary"


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
        points.append(f"- Finer blocks, {pattern}, our backends: times the time in blocks of {TILE}, {each}.")
    return "\n".join(points)


def _sized(line: Line) -> tuple[str, int]:
    """`random, 64` is random in blocks of 64."""
    pattern, _, side = line["pattern"].rpartition(", ")
    return pattern, int(side)


def equal_bits_of_all(lines: Sequence[Line]) -> str:
    """`equal_bits` in a point; empty without both ways."""
    each = []
    for (provider, backend, head_dim), ratios in _cost_of_equal_bits(lines).items():
        said = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
        each.append(f"{said} times the time of {measurements.label((provider, backend))}, head_dim {head_dim}")
    return f"- Equal bits in every run: a backward takes {', '.join(each)}." if each else ""


def _cost_of_equal_bits(lines: Sequence[Line]) -> dict[tuple[str, str, int], dict[str, float]]:
    """(provider, backend, head_dim) -> pattern -> how many times as long; those of which both ways were measured."""
    backward = [line for line in lines if line["direction"] == "bwd"]
    times = {(*measurements.who(line), line["head_dim"], line["pattern"]): line["ms"] for line in backward}
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for head_dim in sorted({line["head_dim"] for line in lines}, reverse=True):
        for (provider, backend, dim, pattern), ms in times.items():
            equal = times.get((provider, backend + EQUAL_BITS, head_dim, pattern))
            if dim == head_dim and equal is not None:
                found.setdefault((provider, backend, head_dim), {})[pattern] = equal / ms
    return found


def equal_bits(lines: Sequence[Line]) -> str:
    """How many times as long the backward takes that gives equal bits in every run: points, empty without both."""
    return "\n".join(
        f"- {measurements.label((provider, backend))}, backward, head_dim {head_dim}, `deterministic=True`: "
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f} times as long, over "
        f"{', '.join(f'{pattern} {ratio:.2f}' for pattern, ratio in ratios.items())}."
        for (provider, backend, head_dim), ratios in _cost_of_equal_bits(lines).items()
    )
