"""How long will a call take on this GPU? A model of a few coefficients, fitted to measurements (`python -m benchmarks.run.calibrate`).

A direction (forward or backward) takes

    launch + passes / bandwidth + max(beside / bandwidth, the sum over its kernels of max(makespan, alone * longest program))

`beside` are bytes that move while tiles are walked, `passes` those of the launches before and after: memory.py says which. A
program that walks `tiles` tiles, `partial` of them masked, holds a multiprocessor for (program + tiles + masking * partial)
times the kernel's seconds a tile. The makespan is that of list scheduling on as many servers as there are multiprocessors;
programs that share one share its rate, which a last program alone does not reach: `alone`.

Knows: lines of tiles, calibration.json. Does not know: tensors, how anything was measured.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import dispatch
from .dispatch import Sides

CALIBRATION = Path(__file__).with_name("calibration.json")
MICRO = 1e-6
# of a batch; with fewer the host decides, whose time is not that of the model and differs from host to host
FEWEST_TOKENS = 4096


class Device(NamedTuple):
    """What a prediction must know of a GPU; bandwidth in GB/s, clock in MHz, 0 where it does not tell."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    bandwidth: float


class Kernel(NamedTuple):
    """A launch that walks tiles.

    side     "rows" or "cols"
    split    programs that share a line
    tile_us  microseconds for which a tile holds a multiprocessor
    """

    side: str
    split: int
    tile_us: float


class Rates(NamedTuple):
    """The coefficients of one direction; program and masking in tiles of the kernel that they are part of.

    program    what beginning and ending a program costs
    masking    what a partial tile costs beyond a full one
    alone      how many times longer a program takes than its tiles hold the multiprocessor, with nothing beside it
    launch_us  microseconds before and between the launches
    """

    kernels: tuple[Kernel, ...]
    program: float
    masking: float
    alone: float
    launch_us: float


class Calibration(NamedTuple):
    """Rates as they were fitted.

    head_dim   columns that a program holds, padded
    direction  "fwd" or "bwd"
    n_lines, benches, commits  the measurements behind it: how many result lines, of which benchmarks, at which commits
    median_error, worst_error  |predicted / measured - 1| over those lines
    unseen_error               the worst over lines that a fit had not seen, in five parts
    """

    device: Device
    backend: str
    head_dim: int
    direction: str
    rates: Rates
    n_lines: int
    benches: tuple[str, ...]
    commits: tuple[str, ...]
    median_error: float
    worst_error: float
    unseen_error: float


@dataclass(frozen=True)
class Prediction:
    """Milliseconds on this GPU; the dense ones are of the same call without its layout.

    basis     the measurements behind it, and how far off it was on them
    caveats   in what this call differs from all that was measured; empty: calibrated
    """

    forward_ms: float
    backward_ms: float
    dense_forward_ms: float
    dense_backward_ms: float
    basis: str
    caveats: tuple[str, ...]


def padded_dim(backend: str, head_dim: int) -> int:
    """Columns that a program of a backend holds for a head dimension: what kernels/launch.py and kernels/hopper.py say."""
    if backend == "hopper":
        return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return max(16, 1 << (head_dim - 1).bit_length())


# ---- the model ----


def kernel_us(kernel: Kernel, rates: Rates, sides: Sides, multiprocessors: int) -> float:
    """Microseconds of one launch that walks tiles."""
    lines = getattr(sides, kernel.side)
    work = rates.program + (lines.tiles + rates.masking * lines.partial) / kernel.split
    if not len(work):
        return 0.0
    work = work.repeat(kernel.split)
    return kernel.tile_us * max(dispatch.makespan(work, multiprocessors), rates.alone * float(work.max()))


def direction_ms(rates: Rates, sides: Sides, device: Device, *, beside: int, passes: int) -> float:
    """Milliseconds of one direction; `beside` bytes at least while the tiles are walked, `passes` by the launches around."""
    # GB/s are bytes a nanosecond
    us_of_byte = 1e-3 / device.bandwidth
    kernels = sum(kernel_us(kernel, rates, sides, device.multiprocessors) for kernel in rates.kernels)
    return 1e-3 * (rates.launch_us + passes * us_of_byte + max(beside * us_of_byte, kernels))


def loss(rates: Rates, sides: Sides, multiprocessors: int) -> float:
    """How many times longer the kernels take than with their work spread evenly; at least 1.0."""
    took = even = 0.0
    for kernel in rates.kernels:
        lines = getattr(sides, kernel.side)
        work = rates.program * kernel.split * len(lines.tiles) + float(
            (lines.tiles + rates.masking * lines.partial).sum()
        )
        even += kernel.tile_us * work / multiprocessors
        took += kernel_us(kernel, rates, sides, multiprocessors)
    return max(1.0, took / even) if even else 1.0


# ---- the table ----


def to_json(calibrations: list[Calibration]) -> str:
    """The text of calibration.json."""
    table = [
        {
            **one._asdict(),
            "device": one.device._asdict(),
            "rates": {**one.rates._asdict(), "kernels": [kernel._asdict() for kernel in one.rates.kernels]},
        }
        for one in calibrations
    ]
    return json.dumps(table, indent=1) + "\n"


def from_json(text: str) -> list[Calibration]:
    """The calibrations of such a text."""

    def read(entry: dict[str, Any]) -> Calibration:
        device, rates = entry["device"], entry["rates"]
        return Calibration(
            **{
                **entry,
                "device": Device(**{**device, "capability": tuple(device["capability"])}),
                "rates": Rates(**{**rates, "kernels": tuple(Kernel(**kernel) for kernel in rates["kernels"])}),
                "benches": tuple(entry["benches"]),
                "commits": tuple(entry["commits"]),
            }
        )

    return [read(entry) for entry in json.loads(text)]


@functools.cache
def calibrations() -> tuple[Calibration, ...]:
    """All that was fitted."""
    return tuple(from_json(CALIBRATION.read_text(encoding="utf-8")))


def find(
    table: tuple[Calibration, ...], device: Device, backend: str, head_dim: int, direction: str
) -> Calibration | None:
    """The calibration for a call: of this GPU, else of one of the same compute capability; of the next wider heads.

    None if there is neither: the rate of another architecture, or of wider programs than were measured, is not guessed.
    """
    fitting = [
        one
        for one in table
        if (one.backend, one.direction) == (backend, direction)
        and one.device.capability == device.capability
        and one.head_dim >= head_dim
    ]
    return min(fitting, key=lambda one: (not _is_same(one.device, device), one.head_dim), default=None)


def _is_same(one: Device, other: Device) -> bool:
    return (one.name, one.multiprocessors) == (other.name, other.multiprocessors)


def can_scale(found: Calibration, device: Device) -> bool:
    """Whether enough is known of this GPU, unless it is the one that was measured."""
    return _is_same(found.device, device) or (device.clock > 0 and device.bandwidth > 0)


def on_device(found: Calibration, device: Device) -> Rates:
    """The rates on this GPU: by its clock, if it is another one. The multiprocessors are the model's."""
    if _is_same(found.device, device):
        return found.rates
    slower = found.device.clock / device.clock
    kernels = tuple(kernel._replace(tile_us=kernel.tile_us * slower) for kernel in found.rates.kernels)
    return found.rates._replace(kernels=kernels)


def known(found: Calibration, device: Device) -> Device:
    """The GPU as it was measured, if this is the one."""
    return found.device if _is_same(found.device, device) else device


def basis(used: tuple[Calibration, ...]) -> str:
    """`48 measurements on NVIDIA H200, off by 5 % in the median and 14 % at most`."""
    names = " and ".join(dict.fromkeys(one.device.name for one in used))
    median, worst = (max(getattr(one, name) for one in used) for name in ("median_error", "worst_error"))
    return (
        f"{sum(one.n_lines for one in used)} measurements on {names}, from which it is off by {median:.0%} in the "
        f"median and {worst:.0%} at most"
    )


def caveats(used: Calibration, device: Device, head_dim: int) -> tuple[str, ...]:
    """To what of the GPU and of the padded head dimension nothing was fitted."""
    said = []
    if not _is_same(used.device, device):
        said.append(
            f"nothing was fitted to this {device.name}: scaled from {used.device.name} by {device.multiprocessors} "
            f"multiprocessors at {device.clock:.0f} MHz and {device.bandwidth:.0f} GB/s"
        )
    if used.head_dim != head_dim:
        said.append(f"a head dimension of {head_dim} was not measured: taken as {used.head_dim}")
    return tuple(said)
