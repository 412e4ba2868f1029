"""The shares of pairs in smaller tiles, by a loop over the dense mask and by plans; when such tiles pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout, dispatch
from blocksparse_flash.plan import tile_choice
from blocksparse_flash.plan.tile_choice import Shares
from blocksparse_flash.plan_format import FINE_TILE, GATHERED_TILE, N_TILES, TILE
from tests.support import cases
from tests.support.dense_masks import Problem, problems

CPU = torch.device("cpu")


def pairs_in(masks: np.ndarray, side_q: int, side_kv: int) -> int:
    """Pairs in the tiles of side_q x side_kv tokens with an attending pair, of masks (batch, heads, q_len, kv_len)."""
    *batch_heads, q_len, kv_len = masks.shape
    padded = np.zeros((*batch_heads, -(-q_len // side_q), side_q, -(-kv_len // side_kv), side_kv), bool)
    flat = padded.reshape(*batch_heads, padded.shape[2] * side_q, padded.shape[4] * side_kv)
    flat[:, :, :q_len, :kv_len] = masks
    return int(padded.any(axis=(3, 5)).sum()) * side_q * side_kv


def expected_shares(layout: BlockLayout) -> Shares:
    masks = layout.to_dense().numpy()
    coarse, fine = pairs_in(masks, TILE, TILE), pairs_in(masks, FINE_TILE, FINE_TILE)
    is_full = not len(layout.bitmasks)
    if not coarse or (is_full and all(side % TILE == 0 for side in layout.block_size)):
        return tile_choice.WHOLE
    if is_full and all(side % FINE_TILE == 0 for side in layout.block_size):
        return Shares(fine / coarse, fine / coarse)
    gathered = [
        min(pairs_in(masks, *sides), fine / 1.25) for sides in ((FINE_TILE, GATHERED_TILE), (GATHERED_TILE, FINE_TILE))
    ]
    return Shares(fine / coarse, sum(gathered) / (2 * coarse))


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_the_share_of_the_zoo_is_that_of_the_mask(case: cases.Case) -> None:
    layout = case.build()
    shares = layout._tile_shares(CPU, False)
    assert shares == expected_shares(layout) and 0.25 <= shares.fine <= 1 and 1 / 64 <= shares.gathered <= 1
    if shares.fine < 1:
        plans = [layout.plan("cpu", tile=tile) for tile in (FINE_TILE, TILE)]
        fine, coarse = (int(plan.row_records[..., N_TILES].sum()) for plan in plans)
        assert shares.fine == fine / (4 * coarse)


@given(problems())
def test_the_share_is_that_of_the_mask_in_blocks_of_any_size(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    assert layout._tile_shares(CPU, False) == expected_shares(layout)


@pytest.mark.parametrize("block_size", [128, 256, (256, 128)])
def test_blocks_of_whole_tiles_are_counted_alone(block_size: int | tuple[int, int]) -> None:
    """Full and partial blocks, several times the same bitmask, ragged ends."""
    mask = np.zeros((2, 2, 700, 900), bool)
    mask[0, 0, :40, ::300], mask[:, 1, 300:512, 256:512], mask[1, :, 600:, 800:] = True, True, True
    mask[:, 0, 520] = True
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    shares = layout._tile_shares(CPU, False)
    assert shares == expected_shares(layout) and shares.gathered < shares.fine < 1


def test_full_blocks_of_whole_tiles_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 1, 3], [0, 0, 2], 500, 500, block_size=128)
    monkeypatch.setattr(tile_choice, "by_keys", None)
    assert layout._tile_shares(CPU, False) == tile_choice.WHOLE
    # a partial block is
    partial = layout - BlockLayout.from_blocks([0], [0], 500, 500, block_size=(128, 64)).with_block_size(128)
    with pytest.raises(TypeError):
        partial._tile_shares(CPU, False)


def test_the_shares_are_cached_and_moves_along(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=64)
    shares = layout._tile_shares(CPU, False)
    assert shares == (0.25, 0.25)
    monkeypatch.setattr(tile_choice, "shares_of", None)
    assert layout._tile_shares(CPU, False) == layout.to("meta")._tile_shares(CPU, False) == shares


def test_a_traced_call_uses_a_plan_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=16)
    other = layout.to("meta")
    layout.plan("cpu", tile=FINE_TILE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layout._tile_shares(CPU, False) == (0.25, 1.0)
    assert other._tile_shares(CPU, False) == layout._tile_shares(CPU, True) == tile_choice.WHOLE
    monkeypatch.undo()
    layout.plan("cpu", tile=GATHERED_TILE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layout._tile_shares(CPU, False) == (0.25, 0.125)


def test_selected_blocks_are_taken_for_scattered_if_small() -> None:
    indices = torch.tensor([[[[0, -1], [1, 0]]]])
    small = BlockLayout.from_topk(indices, 128, 128, block_size=64)._tile_shares(CPU, False)
    large = BlockLayout.from_topk(indices, 256, 256, block_size=128)._tile_shares(CPU, False)
    assert small.fastest(128, "triton") == FINE_TILE and large.fastest(64, "hopper") == TILE
    assert small.tiles == [FINE_TILE] and large.tiles == [TILE]


@pytest.mark.parametrize(
    ("backend", "shares", "dims", "expected"),
    [
        ("hopper", (0.3, 0.3), (128, 128), FINE_TILE),
        # a traced call
        ("auto", (0.3, 0.3), (64, 64), FINE_TILE),
        # heads of 64 lose less by small tiles
        ("hopper", (0.9, 0.9), (64, 64), FINE_TILE),
        ("hopper", (0.9, 0.9), (64, 72), TILE),
        ("hopper", (1.0, 1.0), (64, 64), TILE),
        ("triton", (0.9, 0.9), (64, 72), FINE_TILE),
        ("triton", (1.0, 1.0), (64, 64), TILE),
        ("hopper", (0.3, 0.1), (128, 128), GATHERED_TILE),
        ("hopper", (0.95, 0.65), (64, 64), GATHERED_TILE),
        ("hopper", (0.95, 0.65), (128, 64), TILE),
        ("auto", (0.3, 0.1), (128, 128), GATHERED_TILE),
        # only `hopper` has gathered tiles
        ("triton", (0.3, 0.1), (128, 128), FINE_TILE),
        ("triton", (1.0, 0.1), (128, 128), TILE),
    ],
)
def test_small_tiles_are_chosen_where_they_save_time(
    backend: str, shares: tuple[float, float], dims: tuple[int, int], expected: int
) -> None:
    assert dispatch.fastest_tile(backend, Shares(*shares), *dims) == expected


def test_plans_of_all_tiles_that_may_be_chosen_are_made_in_advance() -> None:
    assert Shares(0.3, 0.1).tiles == [GATHERED_TILE, FINE_TILE]
    assert Shares(0.95, 0.65).tiles == [GATHERED_TILE, FINE_TILE, TILE]
    assert tile_choice.WHOLE.tiles == [TILE]


def test_slopes_with_a_gradient_get_a_tile_that_triton_has() -> None:
    scattered = Shares(0.3, 0.05)
    assert dispatch.fastest_tile("hopper", scattered, 128, 128) == GATHERED_TILE
    assert dispatch.fastest_tile("hopper", scattered, 128, 128, has_slopes_gradient=True) == FINE_TILE


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
