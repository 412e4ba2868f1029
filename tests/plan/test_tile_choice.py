"""The tiles of 64 x 64 tokens that a layout would have, compared with a loop over the dense mask; when they pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout, dispatch
from blocksparse_flash.plan import tile_choice
from blocksparse_flash.plan.tile_choice import NOT_FINE, FineWork
from blocksparse_flash.plan_format import FINE_TILE, TILE
from tests.support import cases
from tests.support.dense_masks import Problem, problems

CPU = torch.device("cpu")


def tiles(masks: np.ndarray, side: int) -> np.ndarray:
    """Which tiles of side x side tokens have an attending pair: bool (heads of all batches, tile rows, tile cols)."""
    masks = masks.reshape(masks.shape[0] * masks.shape[1], *masks.shape[2:])
    starts = [range(0, length, side) for length in masks.shape[1:]]
    return np.array(
        [[[mask[q : q + side, kv : kv + side].any() for kv in starts[1]] for q in starts[0]] for mask in masks]
    )


def assert_counts(layout: BlockLayout) -> None:
    masks = layout.to_dense().numpy()
    fine, coarse = tiles(masks, FINE_TILE), tiles(masks, TILE)
    found = layout._fine_work(CPU, False)
    is_full = not len(layout.bitmasks) and all(side % TILE == 0 for side in layout.block_size)
    if is_full or not fine.any():
        assert found == NOT_FINE
        return
    assert found.share == pytest.approx(fine.sum() / (4 * coarse.sum()))
    assert found.n_tiles == fine.sum() / len(fine) and found.n_rows == fine.shape[1]
    assert (found.longest_row, found.longest_col) == (fine.sum(axis=2).max(), fine.sum(axis=1).max())


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_the_tiles_of_the_zoo_are_those_of_the_mask(case: cases.Case) -> None:
    assert_counts(case.build())


@given(problems())
def test_the_tiles_are_those_of_the_mask_in_blocks_of_any_size(problem: Problem) -> None:
    assert_counts(BlockLayout.from_dense(problem.mask, block_size=problem.block_size))


def test_the_counts_are_cached_and_move_along(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=64)
    found = layout._fine_work(CPU, False)
    assert found.share == 0.25
    monkeypatch.setattr(tile_choice, "fine_work", None)
    assert layout._fine_work(CPU, False) is found and layout.to("meta")._fine_work(CPU, False) is found


def test_a_traced_call_uses_a_plan_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 3], [1, 2], 256, 256, block_size=64)
    traced = layout.to("meta")
    layout.plan("cpu", tile=FINE_TILE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layout._fine_work(CPU, False).share == 0.25
    assert traced._fine_work(CPU, False) == layout._fine_work(CPU, True) == NOT_FINE


def test_selected_blocks_are_taken_for_scattered_if_small() -> None:
    indices = torch.tensor([[[[0, -1], [1, 0]]]])
    small = BlockLayout.from_topk(indices, 128, 128, block_size=64)._fine_work(CPU, False)
    assert tile_choice.pays(small, 1, 1, 128)
    large = BlockLayout.from_topk(indices, 256, 256, block_size=128)._fine_work(CPU, False)
    assert not tile_choice.pays(large, 1, 1, 64)


# 256 tile rows of 26 tiles, as of 10 % of the blocks of 16,384 tokens
SCATTERED = FineWork(share=0.3, n_tiles=256 * 26, n_rows=256, longest_row=26, longest_col=40)


@pytest.mark.parametrize(
    ("work", "n_batch_heads", "group", "expected"),
    [
        (SCATTERED, 16, 1, True),
        (SCATTERED._replace(share=0.9), 16, 1, False),
        (NOT_FINE, 16, 1, False),
        # a row of global tokens takes longer than all other tiles of one head, but not of 64
        (SCATTERED._replace(longest_row=256), 1, 1, False),
        (SCATTERED._replace(longest_row=256), 64, 1, True),
        # the program of a tile column iterates over all heads that share the keys
        (SCATTERED, 2, 1, True),
        (SCATTERED, 2, 4, False),
    ],
)
def test_fine_tiles_pay_if_they_save_work_and_no_line_is_too_long(
    work: FineWork, n_batch_heads: int, group: int, expected: bool
) -> None:
    assert tile_choice.pays(work, n_batch_heads, group, 128) == expected
    # heads of 64 lose less by small tiles
    assert tile_choice.pays(work, n_batch_heads, group, 64) == (expected or work.share == 0.9)


@pytest.mark.parametrize(
    ("backend", "dims", "expected"),
    [
        ("hopper", (128, 128), FINE_TILE),
        # a traced call
        ("auto", (64, 64), FINE_TILE),
        ("hopper", (128, 136), TILE),
        ("hopper", (192, 64), TILE),
        ("triton", (128, 128), TILE),
        ("eager", (128, 128), TILE),
    ],
)
def test_only_hopper_up_to_head_dim_128_has_fine_tiles(backend: str, dims: tuple[int, int], expected: int) -> None:
    shape = (1, 16, 16384, dims[0])
    assert dispatch.tile_of(backend, SCATTERED, shape, shape, dims[1]) == expected
