"""Builds plans of full 128 x 128 blocks on a GPU, from their indices, with three launches.

A plan is three times as large as the indices that are sent. The host only counts what the tensor lengths encode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..blocks.block_list import BlockRows, Frame
from ..blocks.transfer import sent_flat
from ..plan_format import TILE, Plan, list_lengths, with_dynamic_lengths
from ..runtime import tracing
from .block_selection import BASE_BIT_WORDS, BIT_WORDS_PER_ENTRY, MAX_GRID_SIDE, MAX_TOTAL_GRID_SIDE
from .host_builder import count_long, count_tiles, is_lower_triangular

# blocks from which building on the GPU pays: a new mask of 2,048 blocks adds 0.42 ms to a step instead of 0.71 (H200)
WORTH_SENDING = 1 << 11


def suits(frame: Frame, nnz: int, n_bitmasks: int, device: torch.device) -> bool:
    """Whether the kernels can build the plan and are faster: at least WORTH_SENDING full blocks of 128 x 128."""
    if device.type != "cuda" or n_bitmasks or nnz < WORTH_SENDING or frame.block_size != (TILE, TILE):
        return False
    n_rows, n_cols, batch_heads = frame.n_rows, frame.n_cols, frame.batch_heads
    n_lines = max(n_rows, n_cols)
    return (
        n_lines <= MAX_GRID_SIDE
        and batch_heads * n_lines <= MAX_TOTAL_GRID_SIDE
        and -(-n_cols // 32) <= BASE_BIT_WORDS + BIT_WORDS_PER_ENTRY * (nnz // (batch_heads * n_rows))
        and not tracing.has_observers()
        and tracing.runs_triton(device.index)
    )


@functools.lru_cache(maxsize=256)
def _builder(frame: Frame) -> Callable[[torch.Tensor, tuple[int, int, int]], list[torch.Tensor]]:
    """(indptr and indices, lengths of the lists) -> the plan's tensors; cached, since imports take microseconds."""
    from ..kernels.triton import block_selection, plan_builder

    blocks = block_selection.BlockGrid(frame.batch_heads, frame.n_rows, frame.n_cols, *frame[2:])
    grid, batch_heads = plan_builder.Grid(blocks, causal=False), (frame.batch, frame.heads)
    return lambda listed, n: plan_builder.build_from_bits(
        block_selection.bits_of_block_list(listed, blocks), grid, batch_heads, n
    )


def build_plan_on_device(tiles: BlockRows, frame: Frame, device: torch.device, *, non_blocking: bool) -> Plan:
    """The plan of full 128 x 128 blocks; bitmasks are numbered differently than by the host, and some are unused.

    non_blocking  True: the host does not wait for the GPU; streams other than the current one must wait for it
    """
    nnz = len(tiles.cols)
    _, (rows, cols) = count_long(count_tiles(tiles, frame)[0], nnz, frame)
    is_lower = is_lower_triangular(tiles, frame)
    n_indices, n_row_ids = list_lengths(nnz, rows.n_split, of_rows=True, is_lower=is_lower)
    _, n_col_ids = list_lengths(nnz, cols.n_split, of_rows=False, is_lower=is_lower)
    with tracing.on_device(device):
        listed = sent_flat((tiles.indptr, tiles.cols), device)
        plan = with_dynamic_lengths(Plan._make(_builder(frame)(listed, (n_indices, n_row_ids, n_col_ids))))
        if not non_blocking and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return plan
