"""Index lists of cuDNN and FastVideo: to lists and back, and the mask that the lists mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, interop


def mask_of(lists: interop.CudnnLists, q_len: int, kv_len: int, side: int) -> torch.Tensor:
    """bool (batch, heads, q_len, kv_len), entry by entry."""
    batch, heads, n_rows, _ = lists.q2k_block_index.shape
    mask = torch.zeros(batch, heads, n_rows * side, len(lists.block_sizes) * side, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for row in range(n_rows):
                for col in lists.q2k_block_index[b, h, row, : int(lists.q2k_block_nums[b, h, row])].tolist():
                    width = int(lists.block_sizes[col])
                    mask[b, h, row * side : (row + 1) * side, col * side : col * side + width] = True
    return mask[:, :, :q_len, :kv_len]


def ragged(side: int = 64) -> BlockLayout:
    """Rows of 0 to 3 blocks; the last row and col are shorter."""
    return BlockLayout.from_blocks([0, 2, 2, 2, 3], [4, 0, 2, 4, 1], 4 * side - 9, 5 * side - 30, block_size=side)


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize("axes", [(None, None), (2, 3)])
def test_lists_are_the_mask(side: int, axes: tuple[int | None, int | None]) -> None:
    layout = ragged(side)
    lists = interop.to_cudnn(layout, batch=axes[0], heads=axes[1])
    expected = layout.to_dense().expand(axes[0] or 1, axes[1] or 1, -1, -1)
    assert torch.equal(mask_of(lists, layout.q_len, layout.kv_len, side), expected)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in lists)
    assert lists.block_sizes.tolist() == [side] * 4 + [side - 30]


@pytest.mark.parametrize("build", [ragged, lambda: masks.random(640, density=0.3, seed=0, block_size=64)])
def test_layouts_return_from_lists(build: Callable[[], BlockLayout]) -> None:
    layout = build()
    lists = interop.to_cudnn(layout)
    found = interop.from_cudnn(
        lists.q2k_block_index, layout.q_len, layout.kv_len, q2k_block_nums=lists.q2k_block_nums, block_size=64
    )
    assert found == layout


def test_without_counts_all_entries_count() -> None:
    index = torch.tensor([[[[0, 2], [1, 0], [2, 1]]]])
    expected = BlockLayout.from_blocks([0, 0, 1, 1, 2, 2], [0, 2, 0, 1, 1, 2], 192, 192, block_size=64)
    assert interop.from_cudnn(index, 192, 192) == expected
    counts = torch.tensor([[[1, 0, 2]]])
    fewer = BlockLayout.from_blocks([0, 2, 2], [0, 1, 2], 192, 192, block_size=64)
    assert interop.from_cudnn(index, 192, 192, q2k_block_nums=counts) == fewer


@pytest.mark.parametrize("n_rows", [3, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_indices_of_narrow_types(dtype: torch.dtype, n_rows: int) -> None:
    index = torch.full((1, 1, n_rows, 2), 2, dtype=dtype)
    counts = torch.ones(1, 1, n_rows, dtype=torch.int32)
    found = interop.from_cudnn(index, 64 * n_rows, 64 * n_rows, q2k_block_nums=counts)
    assert found.indices[: found.nnz].tolist() == [2] * n_rows


INDEX = torch.zeros(1, 1, 2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "full blocks only, got 1 partial", lambda: interop.to_cudnn(masks.causal(64, block_size=64))),
        (ValueError, "square blocks", lambda: interop.to_cudnn(ragged().with_block_size((64, 32)))),
        (ValueError, "heads must be that of the layout, 2", lambda: interop.to_cudnn(two_heads(), heads=3)),
        (TypeError, "layout must be a BlockLayout", lambda: interop.to_cudnn(INDEX)),
        (
            ValueError,
            r"q2k_block_nums must have shape \(1, 1, 2\).*got \(2,\)",
            lambda: interop.from_cudnn(INDEX, 128, 128, q2k_block_nums=INDEX[0, 0, :, 0]),
        ),
        (
            ValueError,
            "q2k_block_nums must be integers, got torch.float32",
            lambda: interop.from_cudnn(INDEX, 128, 128, q2k_block_nums=torch.ones(1, 1, 2)),
        ),
        (
            ValueError,
            r"q2k_block_nums must be 0 \.\. 1, the entries per row of q2k_block_index, got 2 \.\. 2",
            lambda: interop.from_cudnn(INDEX, 128, 128, q2k_block_nums=torch.full((1, 1, 2), 2)),
        ),
        (
            ValueError,
            r"q2k_block_nums must be 0 \.\. 1, .*got -1 \.\. 1",
            lambda: interop.from_cudnn(INDEX, 128, 128, q2k_block_nums=torch.tensor([[[-1, 1]]])),
        ),
        (TypeError, "q2k_block_index", lambda: interop.from_cudnn([[0]], 128, 128, q2k_block_nums=INDEX)),
        (TypeError, "^q2k_block_index must be a torch.Tensor", lambda: interop.from_cudnn([[0]], 128, 128)),
        (ValueError, r"^q2k_block_index must be -1 .* got -2", lambda: interop.from_cudnn(INDEX - 2, 128, 128)),
        (ValueError, "^batch must be in 1 ..", lambda: interop.to_cudnn(ragged(), batch=2**63)),
    ],
)
def test_wrong_arguments_are_named(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def two_heads() -> BlockLayout:
    return BlockLayout.stack_heads([ragged(), ragged()])
