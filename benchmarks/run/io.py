"""Bytes moved by attention over density: `python -m benchmarks.run.io` on a CUDA GPU, with Nsight Compute.
Block-sparse FlashAttention moves Theta(N d + s N^2 d^2 / M) numbers between the large memory and a small one of M
numbers, at a share s of stored blocks (FlashAttention, https://arxiv.org/abs/2205.14135, Proposition 4). Here these
are the bytes between L2 and the SMs, with M the shared memory of a program. Device memory is counted as well; it moves
much less, since L2 holds 50 MB and more. Each kernel is profiled separately, with empty caches.

The command runs itself under `ncu`, which needs permission to read the GPU's counters, and appends a JSON line for each
density, head_dim, number of heads and direction to benchmarks/results/io.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blocksparse_flash import attention

from . import measure, patterns

# metrics of ncu -> key of a line, bytes per unit. Sectors have 32 bytes; those requested by the SMs exclude the traffic
# between the two parts of a Hopper's L2
COUNTERS = {
    "dram__bytes_read.sum": ("dram_read_bytes", 1),
    "dram__bytes_write.sum": ("dram_write_bytes", 1),
    "lts__t_bytes.sum": ("l2_bytes", 1),
    "lts__t_sectors_srcnode_gpc.sum": ("sm_bytes", 32),
}
# not available on every GPU
OPTIONAL = "lts__t_sectors_srcnode_gpc.sum"
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12, "sector": 1}
# PyTorch's sleep kernel, which marks the start of a call
MARKER = "spin_kernel"
DIRECTIONS = ("fwd", "bwd")
DENSITIES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
KEYS = [
    *("bench", "provider", "backend", "pattern", "density", "n", "batch", "heads", "head_dim", "dtype", "direction"),
    *("dram_read_bytes", "dram_write_bytes", "l2_bytes", "sm_bytes", "n_kernels", "shared_memory"),
    *("device", "torch", "triton", "commit"),
]


class Case(NamedTuple):
    """One mask at one size, profiled forward and backward."""

    heads: int
    head_dim: int
    density: float


def cases(options: argparse.Namespace) -> list[Case]:
    """In the order in which they are profiled."""
    return [
        Case(heads, head_dim, density)
        for heads in options.heads
        for head_dim in options.head_dims
        for density in options.densities
    ]


class Counted(NamedTuple):
    """A kernel that was profiled, and its counters by metric."""

    kernel: str
    counters: dict[str, float]


def table(text: str) -> Iterator[dict[str, str]]:
    """The rows of ncu's CSV output by column, without the text around them."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith('"ID",')]
    if not starts:
        said = "; ".join(line for line in lines if line.startswith("==ERROR==")) or "no kernel was profiled"
        raise ValueError(f"ncu gave no counters: {said}")
    yield from csv.DictReader(line for line in lines[starts[0] :] if line.startswith('"'))


def kernels(text: str) -> list[Counted]:
    """The profiled kernels in launch order; ncu writes a row per kernel and metric."""
    found: dict[int, Counted] = {}
    for row in table(text):
        name, unit, value = row["Metric Name"], row["Metric Unit"], row["Metric Value"].replace(",", "")
        if name not in COUNTERS:
            continue
        if unit not in UNITS:
            raise ValueError(f"ncu counts {name} in {unit}; expected one of {', '.join(UNITS)}")
        try:
            number = float(value) * UNITS[unit]
        except ValueError:
            raise ValueError(f"ncu has no value of {name} for {row['Kernel Name']}: {value!r}") from None
        found.setdefault(int(row["ID"]), Counted(row["Kernel Name"], {})).counters[name] = number
    return [found[index] for index in sorted(found)]


def calls(profiled: Sequence[Counted]) -> list[list[Counted]]:
    """The kernels of each call; a marker starts a call."""
    found: list[list[Counted]] = []
    for one in profiled:
        if MARKER in one.kernel:
            found.append([])
        elif not found:
            raise ValueError(f"{one.kernel} was profiled before any call began")
        else:
            found[-1].append(one)
    return found


def summed(call: Iterable[Counted]) -> dict[str, Any]:
    """Sums of the counters of a call by the keys of a line; None if not counted."""
    call = [*call]
    said: dict[str, Any] = {"n_kernels": len(call)}
    for metric, (key, size) in COUNTERS.items():
        counted = [one.counters[metric] for one in call if metric in one.counters]
        said[key] = round(size * sum(counted)) if len(counted) == len(call) else None
    return said


def profiled(options: argparse.Namespace) -> None:
    """Runs every case, forward and backward, each after a marker; only these are profiled."""
    for heads, head_dim, density in cases(options):
        layout = patterns.random(options.length, density=density).layout()
        size = options.batch, heads, options.length, head_dim
        q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        tensors = [tensor.requires_grad_() for tensor in (q, k, v)]
        forward = functools.partial(attention, q, k, v, layout, backend=options.backend)
        # compiled, and its plan copied, before anything is profiled
        out = forward()
        backward = functools.partial(torch.autograd.grad, out, tensors, dout, retain_graph=True)
        backward()
        for call in (forward, backward):
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def counted_by(ncu: str) -> list[str]:
    """The metrics of COUNTERS that this GPU has."""
    said = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    words = set(said.stdout.split())
    return [metric for metric in COUNTERS if metric != OPTIONAL or metric.removesuffix(".sum") in words]


def ncu_command(ncu: str, log: Path, metrics: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command of this module under ncu, with unlocked clocks, logging to `log`."""
    return [
        *(ncu, "--csv", "--log-file", str(log), "--print-units", "base", "--clock-control", "none"),
        *("--profile-from-start", "off", "--metrics", ",".join(metrics)),
        *(sys.executable, "-m", "benchmarks.run.io", "--profiled", *arguments),
    ]


def lines_of(text: str, options: argparse.Namespace, where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The result lines from ncu's output; `where` has the keys that all lines share."""
    found, expected = calls(kernels(text)), cases(options)
    if len(found) != len(DIRECTIONS) * len(expected):
        raise ValueError(f"ncu profiled {len(found)} calls, expected {len(DIRECTIONS) * len(expected)}")
    asked = ((case, direction) for case in expected for direction in DIRECTIONS)
    for (case, direction), call in zip(asked, found, strict=True):
        pattern = patterns.random(options.length, density=case.density)
        yield {
            "bench": "io", "provider": "blocksparse_flash", "backend": options.backend,
            "pattern": f"random, {case.density:g}", "density": pattern.density, "n": options.length,
            "batch": options.batch,
            "heads": case.heads, "head_dim": case.head_dim, "dtype": "bf16", "direction": direction, **summed(call),
            **where,
        }  # fmt: skip


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__, "io.jsonl")
    parser.add_argument("--backend", choices=("triton", "hopper"), default="triton")
    parser.add_argument("--length", type=int, default=1 << 14, help="tokens, a multiple of 128")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command, where it is not on the PATH")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.length < patterns.BLOCK or options.length % patterns.BLOCK:
        parser.error(f"--length must be a positive multiple of {patterns.BLOCK}, got {options.length}")
    if not all(0 < density <= 1 for density in options.densities):
        parser.error(f"--densities must be above 0 and at most 1, got {options.densities}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    options = parsed(arguments)
    if options.profiled:
        profiled(options)
        return
    ncu = shutil.which(options.ncu)
    if ncu is None:
        raise SystemExit(f"needs Nsight Compute, but there is no command {options.ncu}; --ncu says where it is")
    measure.require_gpu()
    # missing in PyTorch's stubs
    shared_memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        run = subprocess.run(
            ncu_command(ncu, log, counted_by(ncu), arguments), capture_output=True, text=True, check=False
        )
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        try:
            found = [*lines_of(text, options, {"shared_memory": shared_memory, **measure.environment()})]
        except ValueError as error:
            raise SystemExit(
                f"{error}\nncu ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            ) from None
    for line in found:
        measure.append(options.out, line, KEYS)
        print(
            f"{line['backend']:7} heads {line['heads']:2} head_dim {line['head_dim']:3} density {line['density']:6.4f} "
            f"{line['direction']}   device memory {(line['dram_read_bytes'] + line['dram_write_bytes']) / 1e6:9.1f} "
            f"MB   "
            f"L2 {line['l2_bytes'] / 1e6:9.1f} MB   {line['n_kernels']} kernels",
            flush=True,
        )


if __name__ == "__main__":
    main()
