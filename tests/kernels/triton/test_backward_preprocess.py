"""The preprocess of all backwards."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from blocksparse_flash.kernels.triton.backward_preprocess import preprocess_launch
from blocksparse_flash.runtime.launch import contiguous


def test_a_batch_may_have_more_heads_than_cuda_allows_programs_along_the_second_axis() -> None:
    dout = contiguous(torch.bfloat16, 4096, 32, 130, 64).spec
    launch = preprocess_launch(dout, dout.strides[:3], 256)
    assert launch._grid == (4096 * 32 * 8, 1, 1)
