"""Does head h of a stack hold what was stacked at place h?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocksparse_flash import BlockLayout
from masks.heads import stack_heads


@pytest.mark.parametrize("seed", range(20))
def test_every_head_is_its_layout(seed):
    random = np.random.default_rng(seed)
    q_len, kv_len, block_size = (int(random.integers(0, 150)), int(random.integers(1, 150)), (16, 48)[seed % 2])
    # whole and empty blocks among partial ones
    cells = random.random((3, 20, 20)) < random.random()
    masks = torch.from_numpy(cells.repeat(8, 1).repeat(8, 2)[:, :q_len, :kv_len])
    masks[seed % 3] &= torch.from_numpy(random.random((q_len, kv_len)) < 0.9)
    stacked = stack_heads([BlockLayout.from_dense(mask, block_size=block_size) for mask in masks])
    # equal masks are equal layouts: also the numbering of bitmasks is canonical
    assert stacked == BlockLayout.from_dense(masks, block_size=block_size)
