"""Plans built on a GPU equal those built on the host."""

from __future__ import annotations

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.block_list import Frame
from blocksparse_flash.plan import device_builder
from blocksparse_flash.plan_format import TILE
from blocksparse_flash.runtime import tracing

pytest.importorskip("triton", reason="needs Triton")


def drawn(batch: int, heads: int, q_len: int, kv_len: int, density: float, *, is_long: bool = False) -> BlockLayout:
    """Random full blocks, with empty rows; is_long: one row and one column of the last head are full."""
    shape = batch, heads, -(-q_len // TILE), -(-kv_len // TILE)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < density
    mask[:, :, 1] = False
    if is_long:
        mask[-1, -1, 0] = mask[-1, -1, :, 2] = True
    return BlockLayout.from_block_mask(mask, q_len, kv_len, block_size=TILE)


def entry_bitmasks(layout: BlockLayout, device: torch.device, side: str) -> torch.Tensor:
    """The bitmask of each list entry, int32 (tiles, 128, 4); all bits are set for a full tile."""
    plan = layout.plan(device)
    indices, ids = (getattr(plan, f"{side}_{name}")[: layout.nnz] for name in ("indices", "bitmask_ids"))
    return torch.where((indices < 0)[:, None, None], plan.bitmasks[ids.long()], -1).cpu()


@pytest.mark.parametrize(
    ("axes", "q_len", "kv_len", "is_long"),
    [((1, 1), 512, 512, False), ((2, 2), 300, 1100, False), ((1, 2), 3000, 2000, True)],
)
def test_the_plan_equals_that_of_the_host(
    axes: tuple[int, int], q_len: int, kv_len: int, is_long: bool, device: torch.device
) -> None:
    """All numbers are equal except those of bitmasks; so are the lengths, which encode the number of split rows."""
    layout = drawn(*axes, q_len, kv_len, 0.1 if is_long else 0.4, is_long=is_long)
    expected = layout.plan("cpu")
    frame = Frame(*layout.shape, layout.block_size)
    plan = device_builder.build_plan_on_device(layout._rows(), frame, device, non_blocking=False)
    if is_long:
        assert min(expected.n_split_rows, expected.n_split_cols) >= 1
    for name in ("row_records", "row_indices", "col_records", "col_indices"):
        assert torch.equal(getattr(plan, name).cpu(), getattr(expected, name)), name
    for name in ("row_bitmask_ids", "col_bitmask_ids"):
        assert len(getattr(plan, name)) == len(getattr(expected, name))
    other = BlockLayout.from_state_dict(layout.state_dict())
    other._cache["plans"][device, False] = plan
    for side in ("row", "col"):
        assert torch.equal(entry_bitmasks(other, device, side), entry_bitmasks(layout, torch.device("cpu"), side))


def test_large_layouts_of_full_blocks_are_planned_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    frame, gpu = Frame(1, 1, 65536, 65536, (128, 128)), torch.device("cuda", 0)
    monkeypatch.setattr(tracing, "runs_triton", lambda _: True)
    assert device_builder.suits(frame, 32768, 0, gpu) and device_builder.suits(frame, 2048, 0, gpu)
    # partial blocks; few blocks; the CPU; another block size; grids that are large for the number of blocks
    assert not device_builder.suits(frame, 32768, 1, gpu)
    assert not device_builder.suits(frame, 2047, 0, gpu)
    assert not device_builder.suits(frame, 32768, 0, torch.device("cpu"))
    assert not device_builder.suits(frame._replace(block_size=(64, 128)), 32768, 0, gpu)
    assert not device_builder.suits(frame._replace(q_len=1 << 20, kv_len=1 << 20), 32768, 0, gpu)
    assert not device_builder.suits(frame._replace(q_len=1 << 21), 1 << 20, 0, gpu)
    # 2^20 tile rows over all heads, and more
    assert device_builder.suits(frame._replace(heads=1 << 11), 1 << 20, 0, gpu)
    assert not device_builder.suits(frame._replace(heads=1 << 15), 1 << 24, 0, gpu)
    monkeypatch.setattr(tracing, "runs_triton", lambda _: False)
    assert not device_builder.suits(frame, 32768, 0, gpu)


def test_unused_entries_of_a_host_selection_are_not_planned(device: torch.device) -> None:
    indices = torch.tensor([[[[3, 3, -1], [0, 1, 1], [-1, -1, -1]]]])
    layout = BlockLayout.from_topk(indices, 300, 512, block_size=TILE)
    expected = BlockLayout.from_blocks([0, 1, 1], [3, 0, 1], 300, 512, block_size=TILE).plan("cpu")
    frame = Frame(*layout.shape, layout.block_size)
    plan = device_builder.build_plan_on_device(layout._rows(), frame, device, non_blocking=True)
    for name in ("row_records", "row_indices", "col_records", "col_indices"):
        assert torch.equal(getattr(plan, name).cpu(), getattr(expected, name)), name


def test_only_host_layouts_of_full_blocks_are_planned_by_kernels(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    calls: list[bool] = []

    def suits(*args: object) -> bool:
        calls.append(True)
        return args[2] == 0

    monkeypatch.setattr(device_builder, "suits", suits)
    layout = drawn(1, 1, 512, 640, 0.5)
    assert len(layout.plan(device).bitmasks) == 8 and calls == [True]
    assert len(masks.local(512, window=100).plan(device).bitmasks) != 8
    causal = layout.plan(device, causal=True)
    expected = (layout & masks.causal((512, 640))).plan(device)
    assert all(map(torch.equal, causal, expected))
