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


def test_a_launch_that_fails_restores_the_language() -> None:
    before = tl.load, tl.range
    with pytest.raises(Exception, match="power of 2"):
        launch(torch.ones(2, 7))
    assert (tl.load, tl.range) == before
    assert launch(torch.ones(2, 8)).tolist() == [1.125, 1.125]
