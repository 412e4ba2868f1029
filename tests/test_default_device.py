"""Calls on CPU tensors do not depend on PyTorch's default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, attention, interop, layout_crops, paged_attention
from blocksparse_flash.diffusers.using import _checked_order

CPU = torch.device("cpu")


@pytest.fixture
def layout() -> BlockLayout:
    return masks.local(64, window=5, block_size=16)


@pytest.fixture
def elsewhere() -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Results of a call with the CPU as the default device, and with another one, whose tensors have no values."""

    def both(call: Callable[[], Any]) -> tuple[Any, Any]:
        expected = call()
        with torch.device("meta"):
            return expected, call()

    return both


def test_attention(elsewhere: Any, layout: BlockLayout) -> None:
    q = torch.randn(1, 2, 64, 16)
    assert torch.equal(*elsewhere(lambda: attention(q, q, q, layout)))


def test_pages(elsewhere: Any) -> None:
    q, pages = torch.randn(1, 1, 2, 8), torch.randn(2, 1, 16, 8)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20])
    for window in (None, 5):
        assert torch.equal(*elsewhere(lambda at=window: paged_attention(q, pages, pages, table, lengths, window=at)))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("kind", [torch.sparse_bsr, torch.sparse_csr])
def test_sparse_tensors(elsewhere: Any, layout: BlockLayout, kind: torch.layout) -> None:
    expected, found = elsewhere(lambda: interop.to_torch_sparse(layout, sparse_layout=kind))
    assert found.device == CPU and torch.equal(found.to_dense(), expected.to_dense())


def test_rows_of_a_static_cache(elsewhere: Any, layout: BlockLayout) -> None:
    full, position = layout_crops.FullLayout(layout, 64, None, 0), torch.tensor([5])

    def attended() -> Any:
        layout_crops.rows.cache_clear()
        return layout_crops.rows(full, CPU).attended(position)

    assert torch.equal(*elsewhere(attended))


def test_order_of_tokens(elsewhere: Any) -> None:
    order = torch.arange(4).flip(0)
    assert torch.equal(*elsewhere(lambda: _checked_order(order, None)))
