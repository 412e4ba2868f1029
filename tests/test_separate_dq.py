"""When does dq of hopper's backward have a launch of its own?"""

from __future__ import annotations

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.separate_dq import is_dq_separate, is_portable

CPU = torch.device("cpu")


def ask(layout: BlockLayout | None, batch: int, heads: int, dim: int = 64, *, deterministic: bool = False) -> bool:
    plan = [] if layout is None else list(layout.plan(CPU))
    return is_dq_separate(plan, (batch, heads, 16384, dim), dim, deterministic=deterministic)


def banded(n_tiles: int) -> BlockLayout:
    """So many tiles in every row."""
    row = torch.arange(128).repeat_interleave(n_tiles)
    col = (row + torch.arange(n_tiles).repeat(128)) % 128
    return BlockLayout.from_blocks(row.numpy(), col.numpy(), 16384, 16384, block_size=128)


@pytest.mark.parametrize(
    ("n_tiles", "batch", "dim", "expected"),
    [
        (2, 16, 64, True),
        (3, 16, 64, True),
        (2, 16, 40, True),
        (4, 16, 64, False),
        (2, 16, 128, False),
        (2, 1, 64, False),
    ],
)
def test_few_tiles_a_row_of_many_queries(n_tiles, batch, dim, expected):
    assert ask(banded(n_tiles), batch, 8, dim) == expected


def test_every_head_counts():
    layout = BlockLayout.stack_heads([banded(1), banded(3)])
    assert ask(layout, 64, 2)
    assert not ask(BlockLayout.stack_heads([banded(2), banded(6)]), 64, 2)


@pytest.mark.parametrize("layout", [None, masks.local(16384, window=2000)], ids=["dense", "local"])
def test_equal_bits_want_it_and_else_many_tiles_do_not(layout):
    assert ask(layout, 16, 8, deterministic=True)
    assert ask(layout, 16, 8, 128, deterministic=True)
    assert not ask(layout, 16, 8)


@pytest.mark.parametrize(
    ("n_tiles", "heads", "dim", "expected"),
    [
        (1, 16, 128, True),
        (1, 16, 96, True),
        (2, 16, 128, False),
        (1, 15, 128, False),
        (1, 16, 64, False),
    ],
)
def test_hardly_a_tile_a_row_is_left_to_the_portable_backward(n_tiles, heads, dim, expected):
    shape = (1, heads, 16384, dim)
    assert is_portable(list(banded(n_tiles).plan(CPU)), shape, dim) == expected
    assert not is_portable([], shape, dim)


def test_hoppers_backward_leaves_it(monkeypatch):
    """Whatever is asked for: the bits of the portable one repeat."""
    from blocksparse_flash.kernels import backward, hopper_backward

    monkeypatch.setattr(backward, "backward", lambda *given: ("portable", len(given)))
    q = torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device="meta")
    plan = list(banded(1).plan(CPU))
    for deterministic in (False, True):
        given = (q, None, q, q, q, q, q[..., 0], plan, None, None, 1.0, False, 0.0)
        assert hopper_backward.backward(*given, deterministic=deterministic) == ("portable", len(given))
