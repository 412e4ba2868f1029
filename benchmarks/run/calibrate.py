"""Fits the coefficients of explain's time predictions: `python -m benchmarks.run.calibrate`.

Reads the result lines of benchmarks.run.attention and writes blocksparse_flash/explanation/calibration.json: for each
GPU, backend, head_dim and direction the rates of the model in blocksparse_flash/explanation/prediction.py, by least
squares on log(predicted / measured), so that short times count as much as long ones. A weak prior holds coefficients
that the lines do not determine. Prints every line with its prediction, and the errors on lines left out of the fit.
Needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import optimize

from blocksparse_flash import BlockLayout
from blocksparse_flash.explanation import cost, memory, prediction
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.explanation.memory import Moved
from blocksparse_flash.explanation.prediction import Calibration, Device, Kernel, Rates
from blocksparse_flash.explanation.scheduling import Sides
from blocksparse_flash.kernels.schedule import padded_dim

from ..report import lines as measurements
from ..report.lines import Line
from . import measure, sweeps
from .patterns import Pattern

Array = NDArray[np.float64]

# GPUs of the fit: compute capability, SMs, highest clock in MHz, bandwidth of a copy in GB/s
DEVICES = {"NVIDIA H200": Device("NVIDIA H200", (9, 0), 132, 1980.0, 4300.0)}
# GPUs without a fit of their own; their lines test the scaling of rates to another GPU
SCALED = {"NVIDIA H100 80GB HBM3": Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980.0, 2933.0)}
LINES = Path(__file__).parents[1] / "results" / "attention.jsonl"
BENCHES = ("attention", "length", "density", "block-size", "fine")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# parts of the cross-validation
FOLDS = 5


class Prior(NamedTuple):
    """The value of a coefficient without measurements: residual = firmness * log(coefficient / value)."""

    value: float
    firmness: float


# the lines determine a tile's microseconds; measured ratios separate two kernels of one direction
PROGRAM, MASKING, LAUNCH = Prior(1.0, 0.02), Prior(0.3, 0.05), Prior(8.0, 0.05)
TILE, RATIO = 0.02, 0.3
# two programs of triton share an SM, two to five of those for tiles of 64; one of hopper occupies it
ALONE = {
    "triton": Prior(1.5, 0.05),
    "triton-64": Prior(2.0, 0.05),
    "hopper": Prior(1.0, 0.05),
    "hopper-64": Prior(2.0, 0.05),
}

# (backend, padded head_dim, direction) -> (side, splits, microseconds of a tile) of each kernel that iterates over
# tiles, as in the tables of the kernels on sm90
KERNELS = {
    ("triton", 128, "fwd"): (Kernel("rows", 1, 2.1),),
    ("triton", 64, "fwd"): (Kernel("rows", 1, 1.3),),
    ("triton", 128, "bwd"): (Kernel("cols", 2, 3.8), Kernel("rows", 2, 2.7)),
    ("triton", 64, "bwd"): (Kernel("cols", 2, 2.4), Kernel("rows", 1, 1.3)),
    ("triton-64", 128, "fwd"): (Kernel("rows", 1, 0.6),),
    ("triton-64", 64, "fwd"): (Kernel("rows", 1, 0.4),),
    ("triton-64", 128, "bwd"): (Kernel("cols", 1, 1.0), Kernel("rows", 1, 0.7)),
    ("triton-64", 64, "bwd"): (Kernel("cols", 1, 0.6), Kernel("rows", 1, 0.4)),
    ("hopper", 128, "fwd"): (Kernel("rows", 1, 1.7),),
    ("hopper", 64, "fwd"): (Kernel("rows", 1, 1.2),),
    ("hopper", 128, "bwd"): (Kernel("cols", 1, 5.0),),
    ("hopper", 64, "bwd"): (Kernel("cols", 1, 2.9),),
    ("hopper-64", 128, "fwd"): (Kernel("rows", 1, 0.5),),
    ("hopper-64", 64, "fwd"): (Kernel("rows", 1, 0.3),),
    ("hopper-64", 128, "bwd"): (Kernel("cols", 1, 0.9), Kernel("rows", 1, 0.7)),
    ("hopper-64", 64, "bwd"): (Kernel("cols", 1, 0.5), Kernel("rows", 1, 0.4)),
}


class Measured(NamedTuple):
    """A result line with the inputs of the model."""

    line: Line
    call: Call
    sides: Sides
    moved: Moved


@functools.cache
def asked(bench: str, name: str, length: int) -> tuple[Pattern, BlockLayout | None]:
    """The pattern that a line names, and its layout."""
    for case in sweeps.cases(None if bench == "attention" else bench, length):
        if (case.bench, case.name, case.pattern.length) == (bench, name, length):
            return case.pattern, case.pattern.layout()
    raise ValueError(f"benchmarks.run.attention has no pattern {name} of {length} tokens in {bench}")


def device_of(line: Line) -> Device:
    """The GPU of a line."""
    return (DEVICES | SCALED)[line["device"]]


def call_of(line: Line) -> Call:
    """The call that a line timed, with tensors on the meta device."""
    pattern, layout = asked(line["bench"], line["pattern"], line["n"])
    if abs(pattern.density - line["density"]) > 1e-6:
        raise ValueError(
            f"{line['bench']} {line['pattern']} of {line['n']} tokens has density {pattern.density:.6g}, but a line "
            f"says {line['density']:.6g}: the pattern was another one when it was measured; measure it again"
        )
    shape = line["batch"], line["heads"], line["n"], line["head_dim"]
    # shape and strides that TMA can load
    x = torch.empty(shape, dtype=DTYPES[line["dtype"]], device="meta")
    return Call(x, x, x, layout, pattern.causal, False, 0.0, False, x.dtype, line["backend"])


def measured(line: Line) -> Measured:
    """A line with the inputs of the model."""
    call = call_of(line)
    n_sms = device_of(line).n_sms
    forward, backward = cost.programs(call, n_sms)
    if line["direction"] == "fwd":
        return Measured(line, call, forward, memory.forward(call, n_sms))
    return Measured(line, call, backward, memory.backward(call, n_sms))


def usable(
    lines: pd.DataFrame, devices: Collection[str] = DEVICES.keys()
) -> dict[tuple[str, str, int, str], list[Line]]:
    """Our lines of these devices by (device, backend, head_dim, direction); prints devices that are unknown."""
    lines = lines[lines["is_ours"] & lines["bench"].isin(BENCHES) & lines["dtype"].isin(DTYPES)]
    lines = lines[lines["direction"].isin(["fwd", "bwd"]) & (lines["n"] * lines["batch"] >= prediction.MIN_TOKENS)]
    for device in sorted({*lines["device"]} - DEVICES.keys() - SCALED.keys()):
        print(f"{device} is not in DEVICES of benchmarks/run/calibrate.py: its lines are not used")
    lines = lines[lines["device"].isin(devices)]
    records = lines[measure.KEYS].to_dict("records")
    kernels = [cost.kernels_of(call_of(line))[line["direction"]] for line in records]
    head_dims = [padded_dim(*call) for call in zip(kernels, lines["head_dim"], strict=True)]
    found = {}
    for key, group in lines.groupby([lines["device"], kernels, head_dims, lines["direction"]], sort=False):
        if key[1:] in KERNELS:
            found[key] = group[measure.KEYS].to_dict("records")
        else:
            print(f"{key[1:]} is not in KERNELS of benchmarks/run/calibrate.py: its lines are not used")
    return found


def rates_of(coefficients: Array, kernels: tuple[Kernel, ...]) -> Rates:
    """Rates from logarithms of coefficients: tile_us of each kernel, then program, masking, alone, launch_us."""
    *tiles, program, masking, alone, launch = np.exp(coefficients)
    fitted = tuple(kernel._replace(tile_us=float(tile)) for kernel, tile in zip(kernels, tiles, strict=True))
    # a program alone is never faster than its share
    return Rates(fitted, float(program), float(masking), max(1.0, float(alone)), float(launch))


def predicted(one: Measured, rates: Rates) -> float:
    """Milliseconds."""
    moved, device = one.moved, device_of(one.line)
    return prediction.direction_ms(rates, one.sides, device, main_bytes=moved.main_bytes, extra_bytes=moved.extra_bytes)


def fit(lines: Sequence[Measured], kernels: tuple[Kernel, ...], backend: str, near: Rates | None = None) -> Rates:
    """The rates of one device, backend, head_dim and direction. near: start of the search; None is the prior."""
    priors = [*(Prior(kernel.tile_us, TILE) for kernel in kernels), PROGRAM, MASKING, ALONE[backend], LAUNCH]
    expected = np.log([prior.value for prior in priors])
    firmness = np.array([prior.firmness for prior in priors])
    start = expected
    if near is not None:
        start = np.log([*(kernel.tile_us for kernel in near.kernels), *near[1:]])

    def residuals(coefficients: Array) -> Array:
        rates = rates_of(coefficients, kernels)
        misses = [np.log(predicted(one, rates) / one.line["ms"]) for one in lines]
        away = coefficients - expected
        return np.concatenate([misses, firmness * away, RATIO * (away[1 : len(kernels)] - away[0])])

    # the makespan is piecewise constant: smaller differences see its steps instead of the slope, and do not converge
    options = {"diff_step": 1e-3, "loss": "soft_l1", "f_scale": 0.1, "ftol": 1e-4, "xtol": 1e-4}
    return rates_of(optimize.least_squares(residuals, start, **options).x, kernels)


def errors(lines: Sequence[Measured], rates: Rates) -> list[float]:
    """predicted / measured - 1 of each line."""
    return [predicted(one, rates) / one.line["ms"] - 1 for one in lines]


def cross_validation_error(lines: Sequence[Measured], kernels: tuple[Kernel, ...], backend: str, near: Rates) -> float:
    """The worst error of a cross-validation with FOLDS parts."""
    worst = 0.0
    for fold in range(min(FOLDS, len(lines))):
        seen = [one for index, one in enumerate(lines) if index % FOLDS != fold]
        unseen = [one for index, one in enumerate(lines) if index % FOLDS == fold]
        worst = max([worst, *map(abs, errors(unseen, fit(seen, kernels, backend, near)))])
    return worst


def calibrate(lines: pd.DataFrame) -> list[Calibration]:
    """A calibration for each device, backend, head_dim and direction of the lines; prints how well it fits."""
    made = []
    for (device, backend, head_dim, direction), group in usable(lines).items():
        kernels = KERNELS[backend, head_dim, direction]
        found = [measured(line) for line in group]
        rates = fit(found, kernels, backend)
        off = errors(found, rates)
        sizes = [abs(error) for error in off]
        one = Calibration(
            DEVICES[device], backend, head_dim, direction, rates, len(found),
            tuple(dict.fromkeys(line["bench"] for line in group)),
            tuple(dict.fromkeys(line["commit"] for line in group)),
            statistics.median(sizes), max(sizes), cross_validation_error(found, kernels, backend, rates),
        )  # fmt: skip
        made.append(one)
        print(f"\n{device}, {backend}, head_dim {head_dim}, {direction}: {rates}")
        for line, error in zip(group, off, strict=True):
            print(f"  {line['bench']:10} {line['pattern']:14} {line['n']:8} {line['ms']:10.3f} ms  {error:+7.1%}")
        print(
            f"  median {one.median_error:.1%}, worst {one.worst_error:.1%}, "
            f"worst in cross-validation {one.cross_validation_error:.1%}"
        )
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, default=LINES, help="default: those of benchmarks/results")
    parser.add_argument("--out", type=Path, default=prediction.CALIBRATION)
    options = parser.parse_args(arguments)
    if not options.lines.is_file():
        parser.error(f"--lines: there is no file {options.lines}")
    try:
        lines = measurements.read(options.lines)
    except ValueError as error:
        parser.error(f"--lines: {error}")
    made = calibrate(lines)
    if not made:
        raise SystemExit(f"no line of {options.lines} can be used")
    options.out.write_text(prediction.to_json(made), encoding="utf-8")
    print(f"\n{options.out}: {len(made)} calibrations")


if __name__ == "__main__":
    main()
