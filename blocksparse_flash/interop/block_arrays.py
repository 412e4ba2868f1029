"""Conversion between layouts, tensors and NumPy arrays on the host."""

from __future__ import annotations

import numpy as np
import torch

from ..blocks import checks, key_runs
from ..blocks.block_list import Array, BlockList, Frame
from ..blocks.key_runs import Runs
from ..layout import BlockLayout


def host(values: object, name: str) -> Array:
    """A tensor or array on the host; bfloat16 and 8-bit floats, which NumPy lacks, become float32."""
    if isinstance(values, np.ndarray):
        checks.check_not_masked(values, name, f"{name}.filled(0) has a value in every place")
        return values
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(values).__name__}")
    checks.check_in_memory(values, name)
    if values.is_floating_point() and values.dtype not in (torch.float16, torch.float32, torch.float64):
        values = values.float()
    return checks.values_of(values, name)


def check_layout(layout: object) -> None:
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout must be a BlockLayout, got {type(layout).__name__}")


def blocks_of(layout: BlockLayout) -> tuple[BlockList, Frame]:
    """(the block list of a layout on the host, its frame)."""
    check_layout(layout)
    return layout._block_list(), layout._frame


def runs_of(layout: BlockLayout) -> Runs:
    """The runs of keys of a layout."""
    return key_runs.runs_of(*blocks_of(layout))


def layout_of_runs(runs: Runs, frame: Frame) -> BlockLayout:
    """The layout of runs of keys, on the host."""
    return BlockLayout._from_block_list(key_runs.blocks_of_runs(runs, frame), frame)


def one_head(layout: BlockLayout, batch: int, head: int) -> BlockLayout:
    """One batch and head of a layout, as a layout of shape (1, 1, q_len, kv_len)."""
    check_layout(layout)
    hint = f"; the layout has shape {layout.shape}"
    batch = checks.position(batch, layout.shape[0], "batch", hint)
    return layout.batch(batch).head(checks.position(head, layout.shape[1], "head", hint))


def axes_of_call(layout: BlockLayout, batch: int | None, heads: int | None) -> tuple[int, int]:
    """(batch, heads) of a call that does not broadcast; None: those of the layout."""
    found = []
    for size, given, name in zip(layout.shape[:2], (batch, heads), ("batch", "heads"), strict=True):
        wanted = size if given is None else checks.axis(given, name)
        if size not in (1, wanted):
            raise ValueError(f"{name} must be that of the layout, {size}, or None, got {given}")
        found.append(wanted)
    return found[0], found[1]


def check_zeros_and_ones(values: Array, name: str) -> None:
    """Refuse values other than 0 and 1, such as weights or labels."""
    strange = (values != 0) & (values != 1)
    if strange.any():
        where = tuple(int(i) for i in np.argwhere(strange)[0])
        raise ValueError(
            f"{name} must hold 0 (masked) and 1 (attends) only, got {values[where]} at {where}: "
            "if it is a weight or a label, compare it first, as in values > 0"
        )
