"""Result lines: reads them, keeps the latest of each measurement, names and groups them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

# what makes two lines measurements of the same thing: of those, the later one counts
IDENTITY = (
    "bench", "provider", "backend", "pattern", "n", "batch", "heads", "head_dim", "dtype", "direction", "device", "block_size",
    "q_len",
)  # fmt: skip

# of --sweep change, the `pattern` with which the others are compared
SAME_MASK = "same mask"
# its directions, in prose
TIMED = {"step": "a step that is waited for", "steps": "a step of many in a row"}

# (provider, backend) -> what a reader calls it, in the order of columns; ours first
LABELS = {
    ("blocksparse_flash", "hopper"): "blocksparse_flash, hopper",
    ("blocksparse_flash", "triton"): "blocksparse_flash, triton",
    ("flex", "triton"): "FlexAttention",
    ("flash_attention_4", "cute"): "FlashAttention-4",
    ("flashinfer", "auto"): "FlashInfer",
    ("block_sparse_attention", "cuda"): "Block-Sparse-Attention",
    ("natten", "auto"): "NATTEN",
    ("xformers", "auto"): "xFormers",
    ("cudnn", "cudnn"): "cuDNN",
    ("flash_attention_2", "sdpa"): "FlashAttention-2",
    ("math", "sdpa"): "SDPA math",
}


class Setting(NamedTuple):
    """What is equal in all measurements of one table; `hidden` is heads * head_dim."""

    device: str
    dtype: str
    n: int
    batch: int
    hidden: int


class Ratio(NamedTuple):
    """How many times faster one is than another: the least, the most, the geometric mean, over `n_cases` measurements."""

    least: float
    most: float
    mean: float
    n_cases: int


def read(path: Path, identity: Sequence[str] = IDENTITY) -> list[Line]:
    """The lines of a file, of equal measurements the latest, in the order in which they were first made.

    identity  the keys that make two lines measurements of the same thing

    A matrix product is measured in each run, to stand beside what that run measured: one of another commit is another measurement.
    """
    found: dict[tuple[Any, ...], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        run = line["commit"] if line["bench"] == "matmul" else None
        key = (run, *(line.get(key) for key in identity))
        found[key] = line
    return [*found.values()]


def of_bench(lines: Iterable[Line], bench: str) -> list[Line]:
    return [line for line in lines if line["bench"] == bench]


def of_direction(lines: Iterable[Line], direction: str) -> list[Line]:
    return [line for line in lines if line["direction"] == direction]


def who(line: Line) -> tuple[str, str]:
    return line["provider"], line["backend"]


def label(provider: tuple[str, str]) -> str:
    return LABELS.get(provider, ", ".join(provider))


def is_ours(provider: tuple[str, str]) -> bool:
    return provider[0] == "blocksparse_flash"


def measured(lines: Iterable[Line]) -> list[tuple[str, str]]:
    """The providers of lines, in the order of columns."""
    found = dict.fromkeys(map(who, lines))
    return [provider for provider in LABELS if provider in found] + [one for one in found if one not in LABELS]


def settings(lines: Iterable[Line]) -> dict[Setting, list[Line]]:
    """Lines by setting, the setting with the most lines first."""
    found: dict[Setting, list[Line]] = {}
    for line in lines:
        setting = Setting(line["device"], line["dtype"], line["n"], line["batch"], line["heads"] * line["head_dim"])
        found.setdefault(setting, []).append(line)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def by_device(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines by device, that with the most lines first."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["device"], []).append(line)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def versions(lines: Iterable[Line], *keys: str) -> str:
    """`torch 2.11.0+cu130, triton 3.6.0`: every version that measured any of the lines."""
    lines = [*lines]
    return ", ".join(f"{key} {' and '.join(sorted({line[key] for line in lines}))}" for key in keys)


def matmul_rate(lines: Iterable[Line], shown: Iterable[Line]) -> float | None:
    """TFLOP/s of a large matrix product in the run that measured `shown`; None if it was not measured, or these are of several runs."""
    runs = {(line["device"], line["commit"]) for line in shown}
    found = [line["tflops"] for line in of_bench(lines, "matmul") if {(line["device"], line["commit"])} == runs]
    return found[0] if found else None


def speedup(lines: Sequence[Line], ours: tuple[str, str], peer: tuple[str, str]) -> Ratio | None:
    """How many times faster ours is, over every measurement, forward and backward, that both have; None without any."""

    def times(provider: tuple[str, str]) -> dict[tuple[Any, ...], float]:
        return {
            (line["pattern"], line["head_dim"], line["direction"]): line["ms"]
            for line in lines
            if who(line) == provider and line["direction"] in ("fwd", "bwd")
        }

    mine, theirs = times(ours), times(peer)
    ratios = [theirs[case] / mine[case] for case in mine.keys() & theirs.keys()]
    if not ratios:
        return None
    mean = math.exp(sum(sorted(map(math.log, ratios))) / len(ratios))
    return Ratio(min(ratios), max(ratios), mean, len(ratios))


def change_costs(lines: Sequence[Line]) -> dict[tuple[tuple[str, str], str, int], float]:
    """(provider, pattern, head_dim) -> milliseconds that a changed mask adds to a step; lines of one setting and direction."""
    same = {(who(line), line["head_dim"]): line["ms"] for line in lines if line["pattern"] == SAME_MASK}
    return {
        (who(line), line["pattern"], line["head_dim"]): line["ms"] - same[who(line), line["head_dim"]]
        for line in lines
        if line["pattern"] != SAME_MASK and (who(line), line["head_dim"]) in same
    }


def change_noise(lines: Iterable[Line]) -> dict[tuple[tuple[str, str], str, int], float]:
    """(provider, pattern, head_dim) -> milliseconds by which steps vary, with that changed mask or with one for all, 20th to 80th
    percentile; lines of one setting and direction.
    """
    spread = {(who(line), line["pattern"], line["head_dim"]): line["ms_p80"] - line["ms_p20"] for line in lines}
    return {
        (provider, way, dim): max(own, spread.get((provider, SAME_MASK, dim), 0.0))
        for (provider, way, dim), own in spread.items()
    }


def break_even(densities: Sequence[float], times: Sequence[float], dense: float) -> float | None:
    """The density from which on sparse takes as long as dense, linear between two measured; None if it never does.

    densities  ascending, with `times` at each; times and dense in one unit

    >>> break_even([0.25, 0.5, 1.0], [1.0, 2.0, 4.0], 3.0)
    0.75
    """
    slower = [index for index, time in enumerate(times) if time >= dense]
    if not slower:
        return None
    index = slower[0]
    if index == 0:
        return densities[0]
    share = (dense - times[index - 1]) / (times[index] - times[index - 1])
    return densities[index - 1] + share * (densities[index] - densities[index - 1])
