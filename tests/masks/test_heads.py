"""masks/heads.py: each head of a layout is the mask of its setting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from masks.heads import by_head, read_heads


def test_each_head_has_its_own_mask():
    # no bitmask, its own bitmasks, bitmasks shared with another head, no block
    windows = [(None, None), (5, 0), 20, (5, 0), 300]
    build = lambda window: masks.local((100, 150), window=window, block_size=(16, 32))  # noqa: E731
    layout = by_head(build, windows)
    expected = torch.cat([build(window).to_dense() for window in windows], dim=1)
    assert layout == BlockLayout.from_dense(expected[0], block_size=(16, 32))


def test_a_head_may_be_empty():
    layout = by_head(lambda sinks: masks.sink_window(100, sinks=sinks, window=0, block_size=16), [0, 3, 0])
    assert layout.to_dense()[0].flatten(1).any(1).tolist() == [False, True, False]
    assert by_head(lambda window: masks.local(0, window=window), [1, 2]).shape == (1, 2, 0, 0)


def test_equal_settings_are_built_once():
    asked = []

    def build(window: int) -> BlockLayout:
        asked.append(window)
        return masks.local(100, window=window)

    assert by_head(build, [3, 5, 3, 3]).shape == (1, 4, 100, 100)
    assert asked == [3, 5]


def test_one_head_is_the_layout_itself():
    assert by_head(lambda window: masks.local(100, window=window), [7]) == masks.local(100, window=7)


def test_heads_are_a_number_or_none():
    assert read_heads(None) is None
    assert read_heads(8) == 8
    with pytest.raises(ValueError, match=r"heads: .* from 1 to 65536, got 0"):
        read_heads(0)


@pytest.mark.parametrize("seed", range(20))
def test_every_head_is_its_layout(seed):
    random = np.random.default_rng(seed)
    q_len, kv_len, block_size = (int(random.integers(0, 150)), int(random.integers(1, 150)), (16, 48)[seed % 2])
    # whole and empty blocks among partial ones
    cells = random.random((3, 20, 20)) < random.random()
    heads = torch.from_numpy(cells.repeat(8, 1).repeat(8, 2)[:, :q_len, :kv_len])
    heads[seed % 3] &= torch.from_numpy(random.random((q_len, kv_len)) < 0.9)
    stacked = by_head(lambda head: BlockLayout.from_dense(heads[head], block_size=block_size), range(3))
    # equal masks are equal layouts: also the numbering of bitmasks is canonical
    assert stacked == BlockLayout.from_dense(heads, block_size=block_size)
