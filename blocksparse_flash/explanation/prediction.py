"""Predicted time of a call: a small model, fitted to measurements by `python -m benchmarks.run.calibrate`.

A direction (forward or backward) takes

    launch + extra_bytes / bandwidth
    + max(main_bytes / bandwidth, sum over kernels of max(makespan, alone * longest program))

`main_bytes` are moved by the kernels that iterate over tiles, `extra_bytes` by the launches before and after: see
memory.py. A program of `tiles` tiles, `partial` of them masked, occupies an SM for (program + tiles + masking *
partial) times the kernel's seconds per tile. The makespan is that of list scheduling with one server per SM. Programs
on the same SM share its rate; a last program without neighbors does not reach that rate, hence `alone`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels.schedule import padded_dim
from . import scheduling
from .scheduling import Array, Sides

CALIBRATION = Path(__file__).with_name("calibration.json")
# tokens in a batch; with fewer, host time dominates, which the model does not cover
MIN_TOKENS = 4096


class Device(NamedTuple):
    """A GPU: SMs, clock in MHz and bandwidth in GB/s, 0 where unknown."""

    name: str
    capability: tuple[int, int]
    n_sms: int
    clock: float
    bandwidth: float


class Kernel(NamedTuple):
    """A launch that iterates over tiles.

    side     "rows" or "cols"
    split    programs per line
    tile_us  microseconds for which a tile occupies an SM
    """

    side: str
    split: int
    tile_us: float


class Rates(NamedTuple):
    """The coefficients of one direction; program and masking in units of one tile.

    program    cost of starting and ending a program
    masking    extra cost of a partial tile
    alone      how many times longer a program takes when it has an SM for itself
    launch_us  microseconds before and between the launches
    """

    kernels: tuple[Kernel, ...]
    program: float
    masking: float
    alone: float
    launch_us: float


class Calibration(NamedTuple):
    """Fitted rates.

    backend    the kernels, see `Call.kernels`
    head_dim   padded head dimension
    direction  "fwd" or "bwd"
    n_lines, benches, commits  number of result lines in the fit, their benchmarks and commits
    median_error, worst_error  |predicted / measured - 1| over those lines
    cross_validation_error     worst error over held-out lines, in five-fold cross-validation
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
    cross_validation_error: float


@dataclass(frozen=True)
class Prediction:
    """Milliseconds on this GPU; dense_*: of the same call without its layout.

    basis     the measurements behind the model, and its error on them
    caveats   how this call differs from all measurements; empty: calibrated
    """

    forward_ms: float
    backward_ms: float
    dense_forward_ms: float
    dense_backward_ms: float
    basis: str
    caveats: tuple[str, ...]


# ---- the model ----


def _work(kernel: Kernel, rates: Rates, sides: Sides) -> Array:
    """The work of each program of a launch, in tiles."""
    lines = getattr(sides, kernel.side)
    work = rates.program + (lines.tiles + rates.masking * lines.partial) / kernel.split
    return work.repeat(kernel.split)


def kernel_us(kernel: Kernel, rates: Rates, sides: Sides, n_sms: int) -> float:
    """Microseconds of one launch."""
    work = _work(kernel, rates, sides)
    if not len(work):
        return 0.0
    return kernel.tile_us * max(scheduling.makespan(work, n_sms), rates.alone * float(work.max()))


def direction_ms(rates: Rates, sides: Sides, device: Device, *, main_bytes: int, extra_bytes: int) -> float:
    """Milliseconds of one direction; main_bytes, extra_bytes as in the model above."""
    # GB/s is bytes per nanosecond
    us_per_byte = 1e-3 / device.bandwidth
    kernels = sum(kernel_us(kernel, rates, sides, device.n_sms) for kernel in rates.kernels)
    return 1e-3 * (rates.launch_us + extra_bytes * us_per_byte + max(main_bytes * us_per_byte, kernels))


def loss(rates: Rates, sides: Sides, n_sms: int) -> float:
    """How many times longer the kernels take than with work spread evenly; at least 1.0."""
    took = sum(kernel_us(kernel, rates, sides, n_sms) for kernel in rates.kernels)
    even = sum(kernel.tile_us * float(_work(kernel, rates, sides).sum()) / n_sms for kernel in rates.kernels)
    return max(1.0, took / even) if even else 1.0


# ---- the table ----


def to_json(calibrations: list[Calibration]) -> str:
    """The text of calibration.json."""

    def named(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {name: named(field) for name, field in value._asdict().items()}
        return [named(field) for field in value] if isinstance(value, tuple) else value

    return json.dumps([named(one) for one in calibrations], indent=1) + "\n"


def from_json(text: str) -> list[Calibration]:
    """The calibrations in the text of calibration.json."""

    def read(entry: dict[str, Any]) -> Calibration:
        device, rates = entry["device"], entry["rates"]
        kernels = tuple(Kernel(**kernel) for kernel in rates["kernels"])
        entry["device"] = Device(**device | {"capability": tuple(device["capability"])})
        entry["rates"] = Rates(**rates | {"kernels": kernels})
        return Calibration(**entry | {name: tuple(entry[name]) for name in ("benches", "commits")})

    return [read(entry) for entry in json.loads(text)]


@functools.cache
def calibrations() -> tuple[Calibration, ...]:
    """All calibrations."""
    return tuple(from_json(CALIBRATION.read_text(encoding="utf-8")))


def find(
    table: tuple[Calibration, ...], device: Device, backend: str, head_dim: int, direction: str
) -> Calibration | None:
    """The calibration of this GPU, else of one of the same compute capability, for this or the next larger head_dim.

    None if there is neither: rates of other architectures or larger head dimensions are not guessed.
    """
    fitting = [
        one
        for one in table
        if (one.backend, one.direction) == (backend, direction)
        and one.device.capability == device.capability
        and one.head_dim >= head_dim
    ]
    return min(fitting, key=lambda one: (not is_same(one.device, device), one.head_dim), default=None)


def is_same(one: Device, other: Device) -> bool:
    return (one.name, one.n_sms) == (other.name, other.n_sms)


def on_device(found: Calibration, device: Device) -> tuple[Rates, Device]:
    """Rates and properties of this GPU: as measured, or the rates scaled by its clock if another GPU was measured."""
    if is_same(found.device, device):
        return found.rates, found.device
    slower = found.device.clock / device.clock
    kernels = tuple(kernel._replace(tile_us=kernel.tile_us * slower) for kernel in found.rates.kernels)
    return found.rates._replace(kernels=kernels), device


def basis(used: tuple[Calibration, ...]) -> str:
    """`48 measurements on NVIDIA H200, median error 5%, largest 14%`."""
    names = " and ".join(dict.fromkeys(one.device.name for one in used))
    median, worst = (max(getattr(one, name) for one in used) for name in ("median_error", "worst_error"))
    return f"{sum(one.n_lines for one in used)} measurements on {names}, median error {median:.0%}, largest {worst:.0%}"


def caveats(used: Calibration, device: Device, head_dim: int) -> tuple[str, ...]:
    """What the model was not fitted to: this GPU, this head dimension as padded."""
    said, head_dim = [], padded_dim(used.backend, head_dim)
    if not is_same(used.device, device):
        said.append(
            f"the model was not fitted to this {device.name}: scaled from {used.device.name} by {device.n_sms} "
            f"SMs at {device.clock:.0f} MHz and {device.bandwidth:.0f} GB/s"
        )
    if used.head_dim != head_dim:
        said.append(f"a head dimension of {head_dim} was not measured: taken as {used.head_dim}")
    return tuple(said)
