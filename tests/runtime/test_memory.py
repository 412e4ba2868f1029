"""Allocators return the same tensors as PyTorch."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash.runtime import launch, tensor_spec
from blocksparse_flash.runtime.tensor_spec import spec_of

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (1, 1, 7, 1), (4, 2, 9)], ids=str)
def test_memory_is_contiguous(shape: tuple[int, ...], device: torch.device) -> None:
    memory = launch.contiguous(torch.bfloat16, *shape)
    like = torch.empty(1, device=device)
    # in deterministic mode new memory is filled, which only PyTorch's own allocator does
    before = torch.are_deterministic_algorithms_enabled()
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
        try:
            made = launch.allocator(like)(*memory)
        finally:
            torch.use_deterministic_algorithms(before, warn_only=True)
        expected = torch.empty(shape, dtype=torch.bfloat16, device=device)
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert made.device == like.device and not made.requires_grad
        assert memory.spec == spec_of(made)
        assert not is_deterministic or bool(made.isnan().all())


def test_rows_are_padded(device: torch.device) -> None:
    memory = launch.contiguous(torch.float16, 2, 3, 5, 60, row=64)
    made = launch.allocator(torch.empty(1, device=device))(*memory)
    expected = torch.empty(2, 3, 5, 64)[..., :60]
    assert (made.shape, made.stride()) == (expected.shape, expected.stride())
    assert memory.spec == spec_of(made)
    # every element is writable
    assert made.fill_(1.0).sum() == made.numel()


def orders() -> dict[str, torch.Tensor]:
    """Tensors (2, 3, 5, 8), and whether each lies in memory as (batch, length, heads, head_dim)."""
    by_token = torch.zeros(2, 5, 3, 8).transpose(1, 2)
    return {
        "heads first": torch.zeros(2, 3, 5, 8),
        "by token": by_token,
        "with gaps": torch.zeros(3, 9, 4, 16)[:2, :5, :3, :8].transpose(1, 2),
        "batch inside": torch.zeros(5, 2, 3, 8).permute(1, 2, 0, 3),
        "expanded heads": by_token[:, :1].expand(-1, 3, -1, -1),
        "one head": by_token[:, :1],
        "one token": by_token[:, :, :1],
    }


@pytest.mark.parametrize("name", orders())
def test_results_lie_in_memory_as_their_inputs(name: str) -> None:
    """Without gaps; a head or a token alone, and expanded heads, have the order of contiguous tensors."""
    like = orders()[name]
    is_by_token = name in ("by token", "with gaps", "batch inside")
    assert tensor_spec.is_token_major(like.shape, like.stride()) == is_by_token
    batch, heads, length, _ = like.shape
    expected = torch.zeros(batch, heads, length, 4)
    if is_by_token:
        expected = torch.zeros(batch, length, heads, 4).transpose(1, 2)
    (spec,) = tensor_spec.specs_of(like).tensors
    memory = launch.memory_in_order_of(spec, 4)
    assert (memory.shape, memory.strides) == (expected.shape, expected.stride())
    assert tensor_spec.new_in_order_of(like, 4).stride() == expected.stride()
    assert tensor_spec.new_in_order_of(like, 4, 7).shape == (batch, heads, 7, 4)
    values = torch.rand(batch, heads, length, 4)
    ordered = tensor_spec.in_order_of(like, values)
    assert ordered.stride() == expected.stride() and torch.equal(ordered, values)
    # rows that are padded to 8 elements have the same order
    assert launch.memory_in_order_of(spec, 4, row=8).strides == (*(2 * stride for stride in memory.strides[:3]), 1)


def test_tma_padded_memory_has_padding_after_the_last_row() -> None:
    """TMA stores dq, dk and dv in padded rows."""
    hopper = pytest.importorskip("blocksparse_flash.kernels.hopper.tma", reason="needs Gluon")
    for head_dim, row in ((60, 64), (64, 64), (1, 8)):
        memory = hopper.tma_padded_memory(launch.contiguous(torch.float32, 2, 3, 5, head_dim).spec)
        made = torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype)
        assert made.stride() == (15 * row, 5 * row, row, 1)
        assert made.untyped_storage().nbytes() == 4 * 30 * row
