"""Tables of the bytes that attention moves, from io.jsonl, next to the theoretical bound and to what our tiles load."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from scipy import stats

from blocksparse_flash.explanation import memory
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.kernels.schedule import padded_dim
from blocksparse_flash.plan_format import TILE

from ..run.calibrate import KERNELS
from ..run.io import config_of
from . import lines as measurements
from .lines import select
from .markdown import joined, listing

# bytes of a bfloat16 and of a float32
SIZE, FLOAT = 2, 4
CALL = ["device", "backend", "n", "batch", "heads", "head_dim", "direction"]


def theorem(lines: pd.DataFrame) -> pd.Series:
    """N d + s N^2 d^2 / M numbers a head, in bytes, the constant being 1 (FlashAttention, Proposition 4).

    M  numbers that the shared memory of a program can hold
    """
    n, dim, numbers = lines["n"], lines["head_dim"], lines["shared_memory"] / SIZE
    return lines["batch"] * lines["heads"] * SIZE * (n * dim + lines["density"] * n**2 * dim**2 / numbers)


def of_tiles(line: Any) -> int:
    """Bytes that the programs load and store if nothing stays in L2.

    The program of a tile row holds q (in the backward also dout) and loads k and v of each tile; that of a tile column
    holds k and v and loads q, dout, lse and delta. Every split loads its own tiles. `hopper` also adds dq of each tile
    in float32.
    """
    axes, rows = line["batch"] * line["heads"], line["n"] * line["head_dim"] * SIZE
    n_lines = line["n"] // TILE
    tile = TILE * line["head_dim"] * SIZE
    tiles = round(line["density"] * n_lines**2)
    is_forward = line["direction"] == "fwd"
    total = 0
    for kernel in KERNELS[line["backend"], padded_dim(line["backend"], line["head_dim"]), line["direction"]]:
        total += kernel.split * tiles * 2 * tile
        if is_forward:
            # q, out, lse
            total += 2 * rows + FLOAT * line["n"]
        elif kernel.side == "cols":
            # k, v, dk, dv; lse and delta
            total += 4 * rows + kernel.split * tiles * 2 * FLOAT * TILE
            total += tiles * 2 * tile if line["backend"] == "hopper" else 0
        else:
            # q, dout, dq; lse and delta
            total += 3 * rows + 2 * FLOAT * line["n"]
    shape = line["batch"], line["heads"], line["n"], line["head_dim"]
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    moved = memory.backward(Call(x, x, x, None, False, False, 0.0, False, x.dtype, line["backend"]))
    return axes * total + (0 if is_forward else moved.extra_bytes)


def counted(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of each call by density, as the backend chooses its tiles, with columns of bytes.

    on_chip  requested by the SMs, which the theorem counts; all L2 bytes where they were not counted separately
    bound, tiles  see theorem and of_tiles
    memory   read from and written to device memory
    """
    lines = select(lines, bench="io")
    lines = lines.assign(
        on_chip=lines["sm_bytes"].astype(float).fillna(lines["l2_bytes"]),
        bound=theorem(lines),
        tiles=[of_tiles(line) for line in lines.to_dict("records")],
        memory=lines["dram_read_bytes"] + lines["dram_write_bytes"],
    )
    order = lines.groupby(CALL, sort=False).ngroup()
    return lines.assign(order=order).sort_values(["order", "density"], kind="stable")


def straight_line(densities: pd.Series, moved: pd.Series) -> tuple[float, float, float]:
    """(at zero, slope, R^2) of bytes over density, by least squares; needs two densities or more."""
    found = stats.linregress(densities, moved)
    return float(found.intercept), float(found.slope), float(found.rvalue**2)


def _range(values: pd.Series, form: str) -> str:
    return f"{values.min():{form}} to {values.max():{form}}"


def section(lines: pd.DataFrame) -> str:
    """Bytes moved over density, with the bound, and by tile; "" without measurements."""
    by_tile, rows = tiles(select(lines, bench="io_tiles")), []
    lines = select(lines, bench="io")
    for _, call in counted(lines).groupby(CALL, sort=False) if len(lines) else ():
        if len(call) < 2:
            continue
        at_zero, slope, fit = straight_line(call["density"], call["on_chip"])
        first, last = call.iloc[0], call.iloc[-1]
        rows.append(
            {
                "backend": first["backend"], "direction": first["direction"], "heads": first["heads"],
                "head_dim": first["head_dim"],
                "L2 to SMs": f"{at_zero / 1e6:,.0f} + {slope / 1e6:,.0f} s MB, R^2 {fit:.4f}",
                "L2 to SMs / bound": _range(call["on_chip"] / call["bound"], ".2f"),
                "L2 to SMs / tile loads": _range(call["on_chip"] / call["tiles"], ".2f"),
                "device memory": f"{first['memory'] / 1e6:,.0f} to {last['memory'] / 1e6:,.0f} MB",
            }
        )  # fmt: skip
    if not rows:
        return by_tile
    shown = pd.DataFrame(rows)
    call = next(call for _, call in lines.groupby(CALL, sort=False) if len(call) > 1)
    return joined(
        f"Bytes moved at {call['n'].iloc[0]:,} tokens, as the density s grows from {_range(call['density'], '.2g')} "
        f"(`python -m benchmarks.run.io`, {call['device'].iloc[0]}, "
        f"{measurements.versions(lines, 'torch', 'triton')}). [All measurements](benchmarks/results/io.md).",
        "- `L2 to SMs` is the traffic between L2 and the SMs, as a linear fit in s.\n"
        "- `bound` is N d + s N^2 d^2 / M elements, for N tokens and head dimension d "
        "([FlashAttention](https://arxiv.org/abs/2205.14135), Proposition 4, with constant factor 1). M is the number "
        "of elements that fit into the shared memory of a thread block.\n"
        "- `tile loads` are the bytes loaded and stored if each thread block reads each of its tiles from L2 once.\n"
        "- The ratios are the smallest and the largest over s. `device memory` has the bytes read and written at the "
        "smallest and at the largest s.",
        listing(shown, {name: f"{{{name}}}" for name in shown}),
        "![Bytes moved against density](benchmarks/results/io.png)",
        by_tile,
    )


def tiles(lines: pd.DataFrame) -> str:
    """Bytes moved by the forward, by queries per tile, and by standard attention; "" without measurements."""
    rows = []
    for line in lines.to_dict("records"):
        size = None if pd.isna(line["tile"]) else config_of(int(line["tile"]))
        # the queries, and the stages of keys and values
        tokens = 0 if size is None else size.block_q + 2 * size.num_stages * size.block_kv
        on_chip, requested = tokens * line["head_dim"] * SIZE, line["sm_bytes"]
        rows.append(
            {
                "tokens": f"{line['n']:,}", "heads": line["heads"], "head_dim": line["head_dim"],
                "direction": line["direction"], "attention": line["provider"], "density": f"{line['density']:.4g}",
                "queries of a tile": size.block_q if size else "-",
                "on-chip KB": f"{on_chip / 1e3:.0f}" if size else "-",
                "device memory MB": f"{(line['dram_read_bytes'] + line['dram_write_bytes']) / 1e6:,.0f}",
                "L2 to SMs MB": "-" if pd.isna(requested) else f"{requested / 1e6:,.0f}",
            }
        )  # fmt: skip
    if not rows:
        return ""
    return joined(
        "Bytes moved by tile (`python -m benchmarks.run.io --tiles 16 32 64 128 --standard`, "
        f"{' and '.join(sorted(lines['device'].unique()))}, {measurements.versions(lines, 'torch', 'triton')}). "
        "`on-chip KB` is the size of the queries of a program and of its two stages of keys and values. `standard` is "
        "attention with the score matrix in memory, which computes every pair.",
        listing(pd.DataFrame(rows), {name: f"{{{name}}}" for name in rows[0]}),
    )


def everything(lines: pd.DataFrame) -> str:
    """The text of results/io.md: every measurement of benchmarks.run.io."""
    columns = {
        "bound MB": "bound", "tile loads MB": "tiles", "L2 to SMs MB": "sm_bytes", "all of L2 MB": "l2_bytes",
        "device memory, read MB": "dram_read_bytes", "written MB": "dram_write_bytes",
    }  # fmt: skip
    shown = counted(lines)
    for name in columns.values():
        shown[name] = ["-" if pd.isna(value) else f"{value / 1e6:,.1f}" for value in shown[name]]
    return (
        joined(
            "# Bytes moved, all measurements",
            "Written by `python -m benchmarks.report` from io.jsonl. The bound is that of FlashAttention's Proposition "
            "4 with constant factor 1. `tile loads` assumes that each thread block reads each of its tiles from L2 "
            "once. On a GPU with a two-part L2, `all of L2` includes the traffic between the parts. `-`: not counted.",
            listing(
                shown,
                {
                    **{name: f"{{{name}}}" for name in ("backend", "direction", "heads", "head_dim")},
                    "density": "{density:.4g}",
                    **{header: f"{{{name}}}" for header, name in columns.items()},
                    "kernels per call": "{n_kernels}",
                },
            ),
        )
        + "\n"
    )
