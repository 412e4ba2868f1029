"""Assertions that a layout is valid, and that it is the canonical layout of a dense mask."""

from __future__ import annotations

import numpy as np
import torch

from blocksparse_flash import BlockLayout

TENSORS = ("indptr", "indices", "bitmask_ids", "bitmasks")


def assert_valid(layout: BlockLayout) -> None:
    """The constructor accepts the tensors unchanged: the layout is canonical."""
    again = BlockLayout.from_state_dict(layout.state_dict())
    for name in TENSORS:
        assert getattr(layout, name).dtype == torch.int32
        torch.testing.assert_close(getattr(layout, name), getattr(again, name), rtol=0, atol=0)


def assert_means(layout: BlockLayout, mask: np.ndarray) -> None:
    """The layout is the canonical layout of a mask (batch, heads, q_len, kv_len)."""
    assert layout.shape == mask.shape
    np.testing.assert_array_equal(layout.to_dense().numpy(), mask)
    assert_valid(layout)
