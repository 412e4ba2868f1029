"""Result lines: reads them, keeps the latest of each measurement, names and groups them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

# the keys that identify a measurement; of repeated measurements the latest counts
IDENTITY = (
    "bench", "provider", "backend", "pattern", "n", "batch", "heads", "head_dim", "dtype", "direction", "device",
    "block_size", "q_len",
)  # fmt: skip

# the baseline `pattern` of --sweep change
SAME_MASK = "same mask"
# directions of --sweep change
TIMED = {"step": "a synchronized step", "steps": "one of many steps in a row"}

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

# (provider, backend) -> name in tables, in the order of columns; ours first
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


def read(path: Path, identity: Sequence[str] = IDENTITY) -> list[Line]:
    """The lines of a file in the order of their first measurement; of repeated measurements the latest.

    identity  the keys that identify a measurement; a matrix product is also identified by its commit, since every run
              measures its own
    """
    found: dict[tuple[Any, ...], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        run = line["commit"] if line["bench"] == "matmul" else None
        key = (run, *(line.get(key) for key in identity))
        found[key] = line
    return [*found.values()]


def select(lines: Iterable[Line], by: tuple[str, str] | None = None, **values: Any) -> list[Line]:
    """The lines of one provider, (provider, backend) or None for all, whose keys have these values."""
    return [
        line
        for line in lines
        if (by is None or provider_of(line) == by) and all(line.get(key) == value for key, value in values.items())
    ]


def of_bench(lines: Iterable[Line], bench: str) -> list[Line]:
    return select(lines, bench=bench)


def provider_of(line: Line) -> tuple[str, str]:
    return line["provider"], line["backend"]


def label(provider: tuple[str, str]) -> str:
    return LABELS.get(provider, ", ".join(provider))


def is_ours(provider: tuple[str, str]) -> bool:
    return provider[0] == "blocksparse_flash"


def measured(lines: Iterable[Line]) -> list[tuple[str, str]]:
    """The providers of lines, in the order of columns."""
    found = dict.fromkeys(map(provider_of, lines))
    return [provider for provider in LABELS if provider in found] + [one for one in found if one not in LABELS]


def ours(lines: Iterable[Line]) -> list[tuple[str, str]]:
    """Our backends among the providers of lines."""
    return [*filter(is_ours, measured(lines))]


def settings(lines: Iterable[Line]) -> dict[Setting, list[Line]]:
    """Lines by setting, the setting with the most lines first."""
    found: dict[Setting, list[Line]] = {}
    for line in lines:
        setting = Setting(line["device"], line["dtype"], line["n"], line["batch"], line["heads"] * line["head_dim"])
        found.setdefault(setting, []).append(line)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def by_device(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines by device, the device with the most lines first."""
    lines = [*lines]
    found = {device: select(lines, device=device) for device in dict.fromkeys(line["device"] for line in lines)}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def versions(lines: Iterable[Line], *keys: str) -> str:
    """`torch 2.11.0+cu130, triton 3.6.0`: every version that measured any of the lines."""
    lines = [*lines]
    return ", ".join(f"{key} {' and '.join(sorted({line[key] for line in lines}))}" for key in keys)


def matmul_rate(lines: Iterable[Line], shown: Iterable[Line]) -> float | None:
    """TFLOP/s of a large matrix product in the run that measured `shown`; None if unknown or if several runs did."""
    runs = {(line["device"], line["commit"]) for line in shown}
    found = [line["tflops"] for line in of_bench(lines, "matmul") if {(line["device"], line["commit"])} == runs]
    return found[0] if found else None


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
