"""Whether tiles of 64 x 64 pay for a layout: the Hopper kernels exist for these and for tiles of 128 x 128."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..blocks.block_list import BlockRows, Frame
from ..plan_format import FINE_TILE, TILE

# time per pair of the 64 x 64 kernels over that of the others, forward and backward together, by padded head dimension
# (H100, 16,384 tokens, random blocks of 128: 1.08 and 1.19, butterfly 1.09 and 1.12; kernels/hopper/TUNING.md)
SLOWDOWN = {64: 1.08, 128: 1.15}
# largest `share` for which 64 x 64 tiles can pay
MAX_SHARE = 1 / min(SLOWDOWN.values())
# SMs of an H100 or H200, and programs of the 64 x 64 kernels that share one
N_SMS, PROGRAMS_PER_SM = 132, 4


class FineWork(NamedTuple):
    """The 64 x 64 tiles of a layout.

    share        their pairs, as a share of those of the 128 x 128 tiles: 0.25 to 1
    n_tiles      per head, in the mean over heads
    n_rows       tile rows
    longest_row, longest_col  most tiles of a tile row and of a tile column
    """

    share: float
    n_tiles: float
    n_rows: int
    longest_row: int
    longest_col: int


NOT_FINE = FineWork(1.0, 0.0, 0, 0, 0)


def of_selection(frame: Frame) -> FineWork:
    """A guess for blocks selected on the device, which is not waited for: small blocks are scattered.

    frame  of the blocks
    """
    if min(frame.block_size) >= TILE:
        return NOT_FINE
    return FineWork(share=0.5, n_tiles=1.0, n_rows=-(-frame.q_len // FINE_TILE), longest_row=0, longest_col=0)


def fine_work(fine: BlockRows, fine_frame: Frame, n_coarse: int) -> FineWork:
    """The FineWork of a layout.

    fine, fine_frame  its 64 x 64 tiles
    n_coarse          number of its 128 x 128 tiles
    """
    n_tiles, leads = len(fine.cols), fine_frame.leads
    if not n_tiles:
        return NOT_FINE
    lengths = np.diff(fine.indptr, axis=-1)
    head = np.repeat(np.arange(leads), lengths.reshape(leads, -1).sum(axis=1))
    cols = np.bincount(head * fine_frame.n_cols + fine.cols, minlength=leads * fine_frame.n_cols)
    return FineWork(
        share=n_tiles * FINE_TILE**2 / (n_coarse * TILE**2),
        n_tiles=n_tiles / leads,
        n_rows=fine_frame.n_rows,
        longest_row=int(lengths.max()),
        longest_col=int(cols.max()),
    )


def pays(work: FineWork, n_batch_heads: int, group: int, dim: int) -> bool:
    """Whether 64 x 64 tiles are faster for batch * heads such heads, of which `group` share a key head.

    dim  the larger head dimension, padded

    Their kernels do not split long tile rows and columns, as those for 128 x 128 do. So the longest one, whose program
    shares its SM with others, must end before programs for evenly spread 128 x 128 tiles would.
    """
    slowdown = SLOWDOWN[dim]
    if work.share * slowdown > 1:
        return False
    longest = max(work.longest_row, group * work.longest_col)
    n_beside = min(PROGRAMS_PER_SM, max(1, work.n_rows * n_batch_heads // N_SMS))
    return longest * n_beside * slowdown * work.share * N_SMS <= work.n_tiles * n_batch_heads
