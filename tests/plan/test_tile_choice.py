"""The share of pairs in tiles of 64 x 64 tokens, by a loop over the dense mask and by plans; when such tiles pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout, dispatch
from blocksparse_flash.plan import tile_choice
from blocksparse_flash.plan_format import FINE_TILE, N_TILES, TILE
from tests.support import cases
from tests.support.dense_masks import Problem, problems

CPU = torch.device("cpu")


def n_tiles(masks: np.ndarray, side: int) -> int:
    """Tiles of side x side tokens with an attending pair, of masks (batch, heads, q_len, kv_len)."""
    starts = [range(0, length, side) for length in masks.shape[2:]]
    return sum(
        int(masks[:, :, q : q + side, kv : kv + side].any(axis=(2, 3)).sum()) for q in starts[0] for kv in starts[1]
    )


def expected_share(layout: BlockLayout) -> float:
    masks = layout.to_dense().numpy()
    coarse = n_tiles(masks, TILE)
    is_full = not len(layout.bitmasks) and all(side % TILE == 0 for side in layout.block_size)
    return 1.0 if is_full or not coarse else n_tiles(masks, FINE_TILE) / (4 * coarse)


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_the_share_of_the_zoo_is_that_of_the_mask(case: cases.Case) -> None:
    layout = case.build()
    share = layout._fine_share(CPU, False)
    assert share == expected_share(layout) and 0.25 <= share <= 1
    if share < 1:
        plans = [layout.plan("cpu", tile=tile) for tile in (FINE_TILE, TILE)]
        fine, coarse = (int(plan.row_records[..., N_TILES].sum()) for plan in plans)
        assert share == fine / (4 * coarse)


@given(problems())
def test_the_share_is_that_of_the_mask_in_blocks_of_any_size(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    assert layout._fine_share(CPU, False) == expected_share(layout)


@pytest.mark.parametrize("block_size", [128, 256, (256, 128)])
def test_blocks_of_whole_tiles_are_counted_alone(block_size: int | tuple[int, int]) -> None:
    """Full and partial blocks, several times the same bitmask, ragged ends."""
    mask = np.zeros((2, 2, 700, 900), bool)
    mask[0, 0, :40, ::300], mask[:, 1, 300:512, 256:512], mask[1, :, 600:, 800:] = True, True, True
    mask[:, 0, 520] = True
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    share = layout._fine_share(CPU, False)
    assert share == expected_share(layout) and share < 1


def test_full_blocks_of_whole_tiles_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 1, 3], [0, 0, 2], 500, 500, block_size=128)
    monkeypatch.setattr(tile_choice, "by_keys", None)
    assert layout._fine_share(CPU, False) == 1.0
    # a partial block is
    partial = layout - BlockLayout.from_blocks([0], [0], 500, 500, block_size=(128, 64)).with_block_size(128)
    with pytest.raises(TypeError):
        partial._fine_share(CPU, False)


def test_the_share_is_cached_and_moves_along(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=64)
    assert layout._fine_share(CPU, False) == 0.25
    monkeypatch.setattr(tile_choice, "fine_share", None)
    assert layout._fine_share(CPU, False) == layout.to("meta")._fine_share(CPU, False) == 0.25


def test_a_traced_call_uses_a_plan_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=64)
    other = layout.to("meta")
    layout.plan("cpu", tile=FINE_TILE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layout._fine_share(CPU, False) == 0.25
    assert other._fine_share(CPU, False) == layout._fine_share(CPU, True) == 1.0


def test_selected_blocks_are_taken_for_scattered_if_small() -> None:
    indices = torch.tensor([[[[0, -1], [1, 0]]]])
    small = BlockLayout.from_topk(indices, 128, 128, block_size=64)._fine_share(CPU, False)
    large = BlockLayout.from_topk(indices, 256, 256, block_size=128)._fine_share(CPU, False)
    assert tile_choice.pays(small, 128, "triton") and not tile_choice.pays(large, 64, "triton")


@pytest.mark.parametrize(
    ("backend", "share", "dims", "expected"),
    [
        ("hopper", 0.3, (128, 128), FINE_TILE),
        # a traced call
        ("auto", 0.3, (64, 64), FINE_TILE),
        # heads of 64 lose less by small tiles
        ("hopper", 0.9, (64, 64), FINE_TILE),
        ("hopper", 0.9, (64, 72), TILE),
        ("hopper", 1.0, (64, 64), TILE),
        ("triton", 0.9, (64, 72), FINE_TILE),
        ("triton", 1.0, (64, 64), TILE),
    ],
)
def test_fine_tiles_are_chosen_where_they_save_work(
    backend: str, share: float, dims: tuple[int, int], expected: int
) -> None:
    assert dispatch.tile_of(backend, share, *dims) == expected


@pytest.mark.parametrize(
    ("backend", "dims", "has_block_bias", "expected"),
    [
        ("hopper", (128, 128), False, True),
        ("auto", (64, 64), False, True),
        ("triton", (128, 64), False, True),
        ("hopper", (128, 136), False, False),
        ("triton", (192, 64), False, False),
        ("triton", (64, 64), True, False),
        ("eager", (128, 128), False, False),
    ],
)
def test_kernels_without_fine_tiles_are_known(
    backend: str, dims: tuple[int, int], has_block_bias: bool, expected: bool
) -> None:
    assert dispatch.has_fine_tiles(backend, *dims, has_block_bias=has_block_bias) is expected
