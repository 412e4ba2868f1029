"""The faster interpreter (interpreter.py) gives the same results and restores `triton.language` after each launch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter, which a GPU replaces")


@triton.jit
def halved(x):
    return x / 2


@triton.jit
def sums_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i_row = tl.program_id(0)
    x = tl.load(x_ptr + i_row * N + tl.arange(0, N))
    for _ in range(3):
        x = halved(x)
    # helpers from Triton's own files
    tl.store(out_ptr + i_row, tl.sum(x) + tl.max(x))


def launch(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0])
    sums_kernel[(x.shape[0],)](x, out, x.shape[1])
    return out


def test_jitted_helpers_give_correct_results() -> None:
    x = torch.arange(40.0).reshape(5, 8)
    assert torch.equal(launch(x), (x.sum(dim=1) + x.amax(dim=1)) / 8)


def test_a_launch_patches_the_language_once_and_restores_it() -> None:
    # other tests call helpers without a launch, which leaves patches behind: a launch removes them
    launch(torch.ones(1, 8))
    before = tl.load, tl.range
    counts = []
    for n_programs in (1, 5):
        with mock.patch.object(interpreter, "_patch_builtin", wraps=interpreter._patch_builtin) as patch:
            launch(torch.ones(n_programs, 8))
        counts.append(patch.call_count)
        assert (tl.load, tl.range) == before
    assert counts[0] == counts[1] > 0


@triton.jit
def operands_kernel(x_ptr, out_ptr, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    for step in tl.static_range(3):
        # numbers that are equal but differ in type
        tl.store(out_ptr + 4 * step * N + at, at * 1 // 2)
        tl.store(out_ptr + (4 * step + 1) * N + at, at * 1.0 / 2)
        # blocks of other shapes, a scalar on either side
        tl.store(out_ptr + (4 * step + 2) * N + at, tl.sum(x[:, None] * at[None, :], 0) - scale * x)
        tl.store(out_ptr + (4 * step + 3) * N + at, tl.where(at > 1, x - scale, scale - 1))


def test_operands_are_converted_alike_every_time() -> None:
    x, at = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.arange(4)
    out = torch.empty(12, 4)
    operands_kernel[(1,)](x, out, 0.5, 4)
    mixed = torch.where(at > 1, x - 0.5, -0.5)
    expected = torch.stack([at // 2, at / 2, 15 * at - 0.5 * x, mixed])
    assert torch.equal(out, expected.repeat(3, 1))


@triton.jit
def there_and_back_kernel(x_ptr, wide_ptr, back_ptr, N: tl.constexpr):
    wide = tl.load(x_ptr + tl.arange(0, N)).to(tl.float32)
    tl.store(wide_ptr + tl.arange(0, N), wide)
    tl.store(back_ptr + tl.arange(0, N), (wide * 1.00390625).to(tl.bfloat16))


def test_bfloat16_is_converted_bit_by_bit() -> None:
    """Up by exactly, down by truncation, as the interpreter does."""
    x = torch.tensor([1.0, -0.0, 3.140625, -1e30, torch.inf, -torch.inf, 2.0**-126, torch.nan], dtype=torch.bfloat16)
    wide, back = torch.empty(8), torch.empty_like(x)
    there_and_back_kernel[(1,)](x, wide, back, 8)
    assert torch.equal(wide[:7], x[:7].float()) and wide[7].isnan() and back[7].isnan()
    # one bit more than bfloat16 holds
    product = (x.float() * 1.00390625).view(torch.int32) >> 16
    assert torch.equal(back[:7].view(torch.int16).int(), product[:7].short().int())


def test_a_launch_that_fails_restores_the_language() -> None:
    before = tl.load, tl.range
    with pytest.raises(Exception, match="power of 2"):
        launch(torch.ones(2, 7))
    assert (tl.load, tl.range) == before
    assert launch(torch.ones(2, 8)).tolist() == [1.125, 1.125]
