"""Bytes moved by attention over density: `python -m benchmarks.run.io` on a CUDA GPU, with Nsight Compute.

Block-sparse FlashAttention moves Theta(N d + s N^2 d^2 / M) numbers between the large memory and a small one of M
numbers, at a share s of stored blocks (FlashAttention, https://arxiv.org/abs/2205.14135, Proposition 4). Here these
are the bytes between L2 and the SMs, with M the shared memory of a program. Device memory is counted as well; it moves
much less, since L2 holds 50 MB and more. Each kernel is profiled separately, with empty caches.

The command runs itself under `ncu`, which needs permission to read the GPU's counters, and appends a JSON line for each
density, head_dim, number of heads and direction to benchmarks/results/io.jsonl.

`--tiles 16 32 64 128` instead counts the Triton forward with 16, 32, 64 and 128 queries per program. With fewer, a
program needs less shared memory, but keys and values are loaded more often. `--standard` counts attention with the
score matrix in memory, which reads and writes every pair. If keys and values are larger than L2, repeated loads show in
the traffic of device memory: `--tiles 16 32 64 128 --length 262144 --heads 1 --head-dims 128 --densities 0.015625
0.0625`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from blocksparse_flash import attention
from blocksparse_flash.kernels.triton import forward
from blocksparse_flash.runtime.launch import Config

from ..lra.peers import materialized
from . import measure, patterns
from .patterns import BLOCK

# metrics of ncu -> key of a line
COUNTERS = {
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
    "lts__t_bytes.sum": "l2_bytes",
    "lts__t_sectors_srcnode_gpc.sum": "sm_bytes",
}
# requested by the SMs, without the traffic between the two parts of a Hopper's L2; not counted on every GPU
OPTIONAL = "lts__t_sectors_srcnode_gpc.sum"
# units of ncu in bytes
UNITS = {"byte": 1, "sector": 32}
# PyTorch's sleep kernel, which marks the start of a call
MARKER = "spin_kernel"
DIRECTIONS = ("fwd", "bwd")
DENSITIES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
KEYS = [
    *("bench", "provider", "backend", "pattern", "density", "n", "batch", "heads", "head_dim", "dtype", "direction"),
    *("dram_read_bytes", "dram_write_bytes", "l2_bytes", "sm_bytes", "n_kernels", "shared_memory", "tile"),
    *("device", "torch", "triton", "commit"),
]


class Case(NamedTuple):
    """What is profiled. tile: queries per program of the Triton forward; None: as the backend chooses."""

    heads: int
    head_dim: int
    density: float
    tile: int | None = None
    is_standard: bool = False

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[:1] if self.tile else DIRECTIONS


def cases(options: argparse.Namespace) -> list[Case]:
    """In the order in which they are profiled."""
    sizes = [*itertools.product(options.heads, options.head_dims)]
    if not options.tiles and not options.standard:
        return [Case(heads, dim, density) for heads, dim in sizes for density in options.densities]
    standard = [Case(heads, dim, 1.0, is_standard=True) for heads, dim in sizes] if options.standard else []
    of_tiles = itertools.product(sizes, options.densities, options.tiles)
    return [*standard, *(Case(heads, dim, density, tile) for (heads, dim), density, tile in of_tiles)]


def config_of(tile: int) -> Config:
    """Config of the Triton forward: `tile` queries, and two stages of min(tile, 64) keys and values."""
    return Config(tile, min(tile, 64), 4, 2)


def set_tile(tile: int | None) -> None:
    """Makes the Triton forward use config_of(tile) in this process; None changes nothing."""
    if tile is not None:
        # not restored: a profiled process runs nothing else
        forward.config = lambda *_, **__: config_of(tile)
        forward.forward_launch.cache_clear()


def kernels(text: str) -> pd.DataFrame:
    """A row for each profiled kernel, in launch order: its name and bytes by the keys of a line."""
    rows = [line for line in text.splitlines() if line.startswith('"')]
    if not rows:
        errors = "; ".join(line for line in text.splitlines() if line.startswith("==ERROR=="))
        raise ValueError(f"ncu gave no counters: {errors or 'no kernel was profiled'}")
    table = pd.read_csv(StringIO("\n".join(rows)), dtype={"Metric Value": str}, keep_default_na=False)
    table = table[table["Metric Name"].isin(COUNTERS)]
    numbers = pd.to_numeric(table["Metric Value"].str.replace(",", ""), errors="coerce")
    table["bytes"] = numbers * table["Metric Unit"].map(UNITS)
    unreadable = table[table["bytes"].isna()]
    if len(unreadable):
        what = "{Metric Value} {Metric Unit} as {Metric Name} of {Kernel Name}".format_map(unreadable.iloc[0])
        raise ValueError(f"ncu gave {what}; expected bytes or sectors")
    found = table.pivot(index=["ID", "Kernel Name"], columns="Metric Name", values="bytes").sort_index()
    return found.reindex(columns=[*COUNTERS]).rename(columns=COUNTERS).reset_index("Kernel Name")


def calls(text: str) -> list[dict[str, Any]]:
    """The summed bytes of each call and its number of kernels; a marker starts a call. None where not counted."""
    found = kernels(text)
    is_marker = found.pop("Kernel Name").str.contains(MARKER)
    if not is_marker.iloc[0]:
        raise ValueError("a kernel was profiled before any call began")
    grouped = found[~is_marker].groupby(is_marker.cumsum()[~is_marker])
    sums = grouped.agg(lambda counted: counted.sum(skipna=False))
    return [
        {**{key: None if pd.isna(value) else int(value) for key, value in sums.items()}, "n_kernels": count}
        for sums, count in zip(sums.to_dict("records"), grouped.size(), strict=True)
    ]


def profiled(options: argparse.Namespace) -> None:
    """Runs every case in each of its directions, after a marker each; only these calls are profiled."""
    for case in cases(options):
        size = options.batch, case.heads, options.length, case.head_dim
        *tensors, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        set_tile(case.tile)
        if case.is_standard:
            call = functools.partial(materialized, mask=None)
        else:
            layout = patterns.random(options.length, density=case.density).layout()
            call = functools.partial(attention, layout=layout, backend=options.backend)
        by_direction = measure.directions(call, [tensor.requires_grad_() for tensor in tensors], dout)
        # compiled, and the plan copied, before anything is profiled
        by_direction["step"]()
        for direction in case.directions:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            by_direction[direction]()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def counted_by(ncu: str) -> list[str]:
    """The metrics of COUNTERS that this GPU has."""
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    words = set(listed.stdout.split())
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
    found, expected = calls(text), [(case, direction) for case in cases(options) for direction in case.directions]
    if len(found) != len(expected):
        raise ValueError(f"ncu profiled {len(found)} calls, expected {len(expected)}")
    for (case, direction), call in zip(expected, found, strict=True):
        yield {
            "bench": "io_tiles" if case.tile or case.is_standard else "io",
            "provider": "standard" if case.is_standard else "blocksparse_flash",
            "backend": "torch" if case.is_standard else options.backend,
            "pattern": "dense" if case.is_standard else f"random, {case.density:g}",
            "density": patterns.random(options.length, density=case.density).density, "n": options.length,
            "batch": options.batch, "heads": case.heads, "head_dim": case.head_dim, "dtype": "bf16",
            "direction": direction, **call, "tile": case.tile, **where,
        }  # fmt: skip


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__, "io.jsonl")
    parser.add_argument("--backend", choices=("triton", "hopper"), default="triton")
    tokens = f"tokens, a multiple of {BLOCK}"
    parser.add_argument("--length", type=measure.multiple_of(BLOCK), default=1 << 14, help=tokens)
    parser.add_argument("--batch", type=measure.multiple_of(1), default=1)
    parser.add_argument("--heads", type=measure.multiple_of(1), nargs="+", default=[1, 16])
    parser.add_argument("--head-dims", type=measure.multiple_of(1), nargs="+", default=[64, 128])
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--tiles", type=int, nargs="+", default=[], choices=(16, 32, 64, 128), help="queries per tile")
    parser.add_argument("--standard", action="store_true", help="counts attention with all scores in memory")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's command, where it is not on the PATH")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not all(0 < density <= 1 for density in options.densities):
        parser.error(f"--densities must be above 0 and at most 1, got {options.densities}")
    if options.tiles and options.backend != "triton":
        parser.error(f"--tiles needs --backend triton, got {options.backend}")
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
    measure.appended(options.out, found, KEYS)


if __name__ == "__main__":
    main()
