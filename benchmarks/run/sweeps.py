"""Cases of each sweep: length, density, block size, fine blocks, regrouping, changing masks, determinism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import patterns
from .patterns import Pattern

# choices of --sweep
NAMES = ("length", "density", "block-size", "fine", "regroup", "change", "deterministic")
SHORTEST = 2048
# tokens; beyond it a dense backward takes seconds
DENSE_UP_TO = 131_072
DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
BLOCK_SIZES = (16, 32, 64, 128, 256)
# of --sweep fine: side of the blocks, density
SCATTERED = ((64, 0.1), (64, 0.25), (32, 0.05), (16, 0.05))
# sides of the finer blocks, and the share of them that is stored
FINER = (64, 16)
FILLED = (1.0, 0.8)
# of the block-size and change sweeps
FIXED_DENSITY = 1 / 8
# of --sweep change: the baseline `pattern`, and the directions
SAME_MASK = "same mask"
TIMED = {"step": "a synchronized step", "steps": "one of many steps in a row"}


class Case(NamedTuple):
    """One pattern to be measured; `name` is the pattern's in result lines."""

    bench: str
    name: str
    pattern: Pattern


def grid(length: int) -> Iterator[Case]:
    """Every pattern at one length."""
    random_density = 1 / 8 if length < 65536 else 0.05
    for pattern in [*patterns.patterns(length, random_density=random_density), patterns.neighborhood(length)]:
        yield Case("attention", pattern.name, pattern)


def over_length(longest: int) -> Iterator[Case]:
    """Lengths doubling from 2 K (or the longest, if shorter): 9 blocks of keys per query, and dense."""
    length = min(SHORTEST, longest)
    while length <= longest:
        yield Case("length", "local", patterns.local(length))
        if length <= DENSE_UP_TO:
            yield Case("length", "dense", patterns.dense(length))
        length *= 2


def over_density(length: int) -> Iterator[Case]:
    """Random blocks of every density, equally many per row, and dense."""
    yield Case("density", "dense", patterns.dense(length))
    stored = set()
    for density in DENSITIES:
        pattern = patterns.random(length, density=density)
        # a short sequence has no 1 %
        if pattern.nnz not in stored:
            stored.add(pattern.nnz)
            yield Case("density", f"random, {density:g}", pattern)


def over_block_size(length: int) -> Iterator[Case]:
    """Every block size at one density, as a window and scattered."""
    for block_size in BLOCK_SIZES:
        n_blocks = length // block_size
        each_side = round((FIXED_DENSITY * n_blocks - 1) / 2)
        window = patterns.local(length, each_side=max(0, each_side), block_size=block_size)
        yield Case("block-size", f"local, {block_size}", window)
        scattered = patterns.random(length, density=FIXED_DENSITY, block_size=block_size)
        yield Case("block-size", f"random, {block_size}", scattered)


def over_fine(length: int) -> Iterator[Case]:
    """Random blocks below 128, equally many per row, at two lengths."""
    for n in (length, length // 128 * 320):
        for block_size, density in SCATTERED:
            pattern = patterns.random(n, density=density, block_size=block_size)
            yield Case("fine", f"random, {block_size}, {density:.0%}", pattern)


def over_regrouping(length: int) -> Iterator[Case]:
    """Patterns of blocks of 128 in finer blocks: the same mask, and a share of each block of 128."""
    for pattern in (patterns.local(length), patterns.butterfly(length), patterns.random(length, density=FIXED_DENSITY)):
        yield Case("regroup", f"{pattern.name}, {pattern.block_size}", pattern)
        for block_size in FINER:
            for filled in FILLED:
                finer = patterns.in_finer_blocks(pattern, block_size, filled=filled)
                yield Case("regroup", f"{pattern.name}, {block_size}, {filled:.0%} stored", finer)


def changing(length: int, *, seed: int) -> Pattern:
    """The mask of step `seed`; all have the same density."""
    return patterns.random(length, density=FIXED_DENSITY, seed=seed)


def cases(sweep: str | None, length: int) -> Iterator[Case]:
    """The cases of a sweep; None is every pattern at one length. length: tokens, for "length" the longest."""
    if sweep == "change":
        return iter([Case("change", "random", changing(length, seed=0))])
    if sweep == "deterministic":
        return (Case("deterministic", pattern.name, pattern) for pattern in patterns.patterns(length))
    over = {
        "length": over_length, "density": over_density, "block-size": over_block_size, "fine": over_fine,
        "regroup": over_regrouping,
    }  # fmt: skip
    return grid(length) if sweep is None else over[sweep](length)
