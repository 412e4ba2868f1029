"""Allocators return the same tensors as PyTorch."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash.runtime import launch
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


def test_tma_padded_memory_has_padding_after_the_last_row() -> None:
    """TMA stores dq, dk and dv in padded rows."""
    hopper = pytest.importorskip("blocksparse_flash.kernels.hopper.tma", reason="needs Gluon")
    for head_dim, row in ((60, 64), (64, 64), (1, 8)):
        memory = hopper.tma_padded_memory(torch.float32, (2, 3, 5, head_dim))
        made = torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype)
        assert made.stride() == (15 * row, 5 * row, row, 1)
        assert made.untyped_storage().nbytes() == 4 * 30 * row
