"""Bytes that attention must move (the bound of block-sparse FlashAttention), and bytes that our tiles load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from blocksparse_flash.explanation import memory
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.kernels.schedule import padded_dim
from blocksparse_flash.plan_format import TILE

from ..report.lines import Line
from .calibrate import KERNELS

# bytes of a bfloat16 and of a float32
SIZE, FLOAT = 2, 4


def on_chip(line: Line) -> int:
    """Bytes requested by the SMs, which the theorem counts; all L2 bytes where they were not counted separately."""
    return line["l2_bytes"] if line["sm_bytes"] is None else line["sm_bytes"]


def theorem(line: Line) -> float:
    """N d + s N^2 d^2 / M numbers a head, in bytes, the constant being 1 (FlashAttention, Proposition 4).

    M  numbers that the shared memory of a program can hold
    """
    n, dim, numbers = line["n"], line["head_dim"], line["shared_memory"] / SIZE
    return line["batch"] * line["heads"] * SIZE * (n * dim + line["density"] * n**2 * dim**2 / numbers)


def of_tiles(line: Line) -> int:
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
    moved = memory.backward(_call(line))
    return axes * total + (0 if is_forward else moved.passes)


def _call(line: Line) -> Call:
    shape = line["batch"], line["heads"], line["n"], line["head_dim"]
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return Call(x, x, x, None, False, False, 0.0, False, x.dtype, line["backend"])


class Linear(NamedTuple):
    """bytes = at_zero + slope * density, by least squares; fit is R^2."""

    at_zero: float
    slope: float
    fit: float


def linear(lines: Sequence[Line], of: Callable[[Line], float]) -> Linear:
    """Linear fit of the bytes of a call over density; needs two densities or more."""
    density = np.array([line["density"] for line in lines])
    moved = np.array([of(line) for line in lines], dtype=float)
    slope, at_zero = np.polyfit(density, moved, 1)
    left, spread = ((moved - at_zero - slope * density) ** 2).sum(), ((moved - moved.mean()) ** 2).sum()
    return Linear(float(at_zero), float(slope), float(1 - left / spread) if spread else 1.0)
