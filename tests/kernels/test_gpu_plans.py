"""Layouts and their plans on a GPU: moved there in one copy, or made there by kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention
from blocksparse_flash.plan import block_selection, device_builder
from blocksparse_flash.plan_format import FINE_TILE, TILE
from tests.support.no_waiting import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("block_size", [(128, 128), (256, 64), (64, 64), (16, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
def test_a_selection_has_the_same_plan_as_on_the_cpu(block_size: tuple[int, int], causal: bool, tile: int) -> None:
    """With more entries than one thread block can sort, and with few."""
    for (batch, heads), q_len, kv_len, k in (((1, 1), 20_000, 20_000, 40), ((2, 3), 300, 700, 3)):
        n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
        generator = torch.Generator().manual_seed(0)
        indices = torch.randint(-1, n_cols, (batch, heads, n_rows, k), generator=generator)
        plans = []
        for device in ("cpu", "cuda"):
            layout = BlockLayout.from_topk(indices.to(device), q_len, kv_len, block_size=block_size)
            plans.append([tensor.cpu() for tensor in layout.plan(device, causal=causal, tile=tile)])
        n_tiles = int(plans[0][0][..., 2].sum())
        assert n_tiles
        # entries past n_tiles are undefined; bitmasks are compared through the tiles that use them
        for at in (0, 3):
            assert torch.equal(plans[0][at], plans[1][at])
            for more in (1, 2):
                assert torch.equal(plans[0][at + more][:n_tiles], plans[1][at + more][:n_tiles])
        used = plans[0][2][:n_tiles].long()
        assert torch.equal(plans[0][6][used], plans[1][6][used])


def test_a_layout_is_moved_in_one_copy() -> None:
    """Its tensors and those of its plan share one allocation, which each of them keeps alive."""
    layout = masks.local(3000, window=700) | masks.global_tokens(3000, tokens=5)
    moved = layout.to("cuda")
    assert moved == layout
    tensors = [*moved.plan("cuda"), *moved._tensors]
    wanted = [*layout.plan("cpu"), *layout._tensors]
    for tensor, expected in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor.cpu(), expected) and tensor.data_ptr() % 16 == 0 and tensor.storage_offset() == 0
    kept = moved.plan("cuda").bitmasks
    del layout, moved, tensors
    # would overwrite the memory if it had been freed
    junk = [torch.full((1 << 16,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
    assert torch.equal(kept.cpu(), wanted[6]) and len(junk) == 64


def test_each_plan_is_moved_in_one_copy_without_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial and full blocks (the GPU lists full ones itself); pinned memory is not reused before its copy has run."""
    monkeypatch.setattr(device_builder, "WORTH_SENDING", 1)
    layouts = []
    for seed in range(6):
        full = masks.random(128 * 128, density=1 / 8, seed=seed)
        layouts += [full, full & masks.local(128 * 128, window=1000 + seed)]

    def plans(layouts: list[BlockLayout]) -> list[list[Tensor]]:
        return [list(layout.plan("cuda", non_blocking=True)) for layout in layouts]

    # warm-up: compiles kernels and pins memory
    plans([copy.deepcopy(layout) for layout in layouts])
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(4):
            busy = busy @ busy
        found = plans(layouts)
    for layout, plan in zip(layouts, found, strict=True):
        expected = list(copy.deepcopy(layout).plan("cpu"))
        # bitmask ids may differ
        for at in (0, 1, 3, 4):
            assert torch.equal(plan[at].cpu(), expected[at])
        assert [len(ids) for ids in (plan[2], plan[5])] == [len(ids) for ids in (expected[2], expected[5])]


def test_a_selection_is_made_by_kernels_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by PyTorch operations, and without synchronization."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("PyTorch operations were used")

    monkeypatch.setattr(block_selection, "sorted_rows", refused)
    monkeypatch.setattr(block_selection, "_plan_by_operations", refused)
    scores = torch.rand(1, 2, 64, 64, device="cuda")
    cols = scores.topk(5, dim=3).indices

    def both(causal: bool) -> None:
        made = BlockLayout.from_scores(scores, 8192, 8192, k=5, causal=causal, block_size=128)
        for layout in (made, BlockLayout.from_topk(cols, 8192, 8192, block_size=128)):
            for tile in (TILE, FINE_TILE):
                layout.plan("cuda", causal=causal, tile=tile)

    for causal in (False, True):
        both(causal)
        with no_waiting():
            both(causal)


def test_a_host_layout_is_copied_once() -> None:
    layout = masks.local(512, window=9)
    q = torch.randn(1, 1, 512, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q, layout)
    assert layout.plan(q.device) is layout.plan(q.device)
