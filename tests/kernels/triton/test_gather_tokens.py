"""Tokens are gathered by an order of each head, -1 as zeros; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from blocksparse_flash.kernels.triton.gather_tokens import gather_tokens
from tests.support.closeness import assert_in_order_of


def order_of(batch: int, groups: int, n_old: int, n_new: int) -> Tensor:
    order = torch.randint(-1, n_old, (batch, groups, n_new), generator=torch.Generator().manual_seed(0))
    order[..., :2] = torch.tensor([n_old - 1, -1])
    return order.to(torch.int32)


@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("features", [1, 24, 128, 256])
@pytest.mark.parametrize("is_strided", [False, True])
def test_each_head_has_its_order(
    batch: int, groups: int, features: int, is_strided: bool, device: torch.device
) -> None:
    source = torch.randn(2, 4, 200, features, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    if is_strided:
        # (batch, length, heads, features), the last stride not 1 either
        source = source.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    order = order_of(batch, groups, 200, 300).to(device)
    found = gather_tokens(source, order)
    by_head = order.long().repeat_interleave(4 // groups, dim=1).expand(2, 4, -1)
    padded = torch.nn.functional.pad(source, (0, 0, 0, 1))
    expected = padded[torch.arange(2)[:, None, None], torch.arange(4)[:, None], by_head]
    assert torch.equal(found, expected)
    assert_in_order_of(source, found, "tokens")


def test_expanded_tokens_are_gathered(device: torch.device) -> None:
    """As gradients of out.sum() are."""
    source = torch.ones((), device=device).expand(2, 4, 200, 16)
    order = order_of(1, 1, 200, 100).to(device)
    assert torch.equal(gather_tokens(source, order), (order >= 0).float()[..., None].expand(2, 4, 100, 16))
