"""Cached crops of a layout for one forward, compared pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, attention, layout_crops

CPU = torch.device("cpu")
LENGTH = 150


def attends(q: int, kv: int) -> bool:
    return (q * kv) % 7 < 3


DENSE = torch.tensor([[attends(q, kv) for kv in range(LENGTH)] for q in range(LENGTH)])
LAYOUT = BlockLayout.from_dense(DENSE, block_size=(16, 32))


@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (9, 0), (130, None), (9, 20)], ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "none"])
def test_bounds_are_applied(layout: BlockLayout | None, bounds: tuple[int | None, int | None]) -> None:
    left, right = bounds
    expected = torch.tensor(
        [
            [
                (layout is None or attends(q, kv))
                and (left is None or kv - q >= -left)
                and (right is None or kv - q <= right)
                for kv in range(LENGTH)
            ]
            for q in range(LENGTH)
        ]
    )
    assert torch.equal(
        layout_crops.built(layout_crops.FullLayout(layout, LENGTH, left, right)).to_dense()[0, 0], expected
    )


def test_bounds_without_a_layout_store_only_their_blocks() -> None:
    found = layout_crops.built(layout_crops.FullLayout(None, 1_000_000, 100, 0))
    assert found.nnz == 2 * found.n_rows - 1


def test_specifications_are_built() -> None:
    text = "butterfly - local(window=20)"
    assert layout_crops.built(layout_crops.FullLayout(text, 500)) == masks.build(text, 500)
    with pytest.raises(ValueError, match="butterfly"):
        layout_crops.built(layout_crops.FullLayout("buterfly", 500))


@pytest.mark.parametrize("crop", [(0, 150, 0, 150), (149, 1, 0, 150), (60, 20, 33, 47), (0, 40, 0, 40)], ids=str)
def test_crops_of_equal_layouts_are_made_once(crop: tuple[int, int, int, int]) -> None:
    q_start, q_len, kv_start, kv_len = crop
    full = layout_crops.FullLayout(LAYOUT, LENGTH)
    found = layout_crops.cropped(full, layout_crops.Crop(*crop, CPU))
    expected = DENSE[q_start : q_start + q_len, kv_start : kv_start + kv_len]
    assert torch.equal(found.to_dense()[0, 0], expected)
    # an equal layout that is another object
    again = layout_crops.FullLayout(BlockLayout.from_dense(DENSE, block_size=(16, 32)), LENGTH)
    assert layout_crops.cropped(again, layout_crops.Crop(*crop, CPU)) is found


@pytest.mark.parametrize("bounds", [(None, None), (9, 0)], ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, masks.local(LENGTH, window=40, block_size=48)], ids=["ragged", "48"])
def test_rows_are_read_on_the_device(layout: BlockLayout, bounds: tuple[int | None, int | None]) -> None:
    full = layout_crops.FullLayout(layout, LENGTH, *bounds)
    rows, expected = layout_crops.rows(full, CPU), layout_crops.built(full).to_dense()[0, 0]
    positions = torch.tensor([0, 149, 17, 40, 40])
    assert torch.equal(rows.attended(positions), expected[positions])
    assert expected.sum(1).max() <= rows.most <= LENGTH


def test_crops_are_planned_before_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = layout_crops.cropped(layout_crops.FullLayout(LAYOUT, LENGTH), layout_crops.Crop(0, 77, 0, 77, CPU))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found.plan("cpu")


def test_sizes_that_a_graph_leaves_open_become_constants() -> None:
    """Regression: torch.compile leaves sizes open once it has seen two, and then could not make a crop."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        crop = layout_crops.Crop(0, x.shape[2], 0, x.shape[2], x.device)
        return attention(x, x, x, layout_crops.cropped(layout_crops.FullLayout(LAYOUT, LENGTH, None, 0), crop))

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for length in (77, 40):
        x = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(compiled(x), attend(x))


@pytest.mark.parametrize("crop", [(0, 150, 0, 150), (90, 5, 0, 95), (149, 1, 100, 50), (118, 10, 80, 48)], ids=str)
@pytest.mark.parametrize("padding", [(0, 0), (0, 30), (110, 150), (40, 60), (0, 150)], ids=str)
def test_padding_takes_no_position(crop: tuple[int, int, int, int], padding: tuple[int, int]) -> None:
    q_start, q_len, kv_start, kv_len = crop
    is_token = torch.ones(kv_start + kv_len, dtype=torch.bool)
    is_token[slice(*padding)] = False
    position = [int(is_token[:slot].sum()) for slot in range(len(is_token))]

    def expected(q: int, kv: int) -> Any:
        return is_token[q] and is_token[kv] and attends(position[q], position[kv])

    rows = [[bool(expected(q_start + q, kv_start + kv)) for kv in range(kv_len)] for q in range(q_len)]
    found = layout_crops.in_slots(LAYOUT, is_token, layout_crops.Crop(*crop, CPU))
    assert torch.equal(found.to_dense()[0, 0], torch.tensor(rows))
