"""How does a GPU make the plan of full blocks that the host lists? From their indices, which are few words, by three launches.

What plan.build_plan makes on the host is three times as long as the indices, and the host has to make it. What stands in lengths, by which launches decide, the host still counts.

Knows lists of blocks and the records of a plan. Must not know BlockLayout, patterns or backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..blocks.block_list import BlockRows, Frame
from ..blocks.transfer import sent_flat
from ..kernels.plan_format import TILE, Plan, list_lengths, with_dynamic_lengths
from ..runtime import tracing
from .block_selection import FREE_WORDS, MOST_LINES, MOST_OF_ALL_AXES, WORDS_OF_ENTRY
from .host_builder import counted, long_lines

# blocks from which on that pays. H200, what a new mask adds to a step of `hopper` that is waited for, milliseconds, three times in turns:
# 2,048 blocks 0.80 0.54 0.71 from the host, 0.42 0.37 0.44 so. Of such a plan the GPU itself takes 19 to 26 microseconds
WORTH_SENDING = 1 << 11


def suits(frame: Frame, nnz: int, n_bitmasks: int, device: torch.device) -> bool:
    """Whether the kernels make the plan of so many blocks: they know full ones of one tile each, on a grid that bits can hold."""
    if device.type != "cuda" or n_bitmasks or nnz < WORTH_SENDING or frame.block_size != (TILE, TILE):
        return False
    n_rows, n_cols, leads = frame.n_rows, frame.n_cols, frame.leads
    n_lines = max(n_rows, n_cols)
    return (
        n_lines <= MOST_LINES
        and leads * n_lines <= MOST_OF_ALL_AXES
        and -(-n_cols // 32) <= FREE_WORDS + WORDS_OF_ENTRY * (nnz // (leads * n_rows))
        and not tracing.has_observers()
        and tracing.runs_triton(device.index)
    )


@functools.lru_cache(maxsize=256)
def _maker(frame: Frame) -> Callable[..., list[torch.Tensor]]:
    """What makes the tensors of plans of such layouts; to import it again would take microseconds."""
    from ..kernels.triton import block_selection, plan_builder

    rows = block_selection.Rows(frame.leads, frame.n_rows, frame.n_cols, *frame[2:])
    grid = plan_builder.Grid(rows, causal=False)
    return functools.partial(plan_builder.of_blocks, grid=grid, leads=(frame.batch, frame.heads))


def build_plan(tiles: BlockRows, frame: Frame, device: torch.device, *, non_blocking: bool) -> Plan:
    """The plan of full blocks of 128 x 128; it names bitmasks otherwise than plan.build_plan, and holds some that no tile has.

    non_blocking  True: the host does not wait until it is made, and another stream than the current one must
    """
    nnz = len(tiles.cols)
    _, ((_, n_split_rows), (_, n_split_cols)) = long_lines(counted(tiles, frame)[0], nnz, frame)
    n_indices, n_row_ids = list_lengths(nnz, n_split_rows, of_rows=True)
    _, n_col_ids = list_lengths(nnz, n_split_cols, of_rows=False)
    with tracing.on_device(device):
        listed = sent_flat((tiles.indptr, tiles.cols), device)
        plan = with_dynamic_lengths(Plan._make(_maker(frame)(listed, lengths=(n_indices, n_row_ids, n_col_ids))))
        if not non_blocking and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return plan
