"""interop/attention_masks.py: dense masks of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout, attention, reference
from blocksparse_flash.interop import from_huggingface, kv_lengths_from_huggingface, to_huggingface
from tests.support.dense_masks import Problem, problems

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(problems())
def test_huggingface_and_back(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    attends = torch.from_numpy(problem.mask)
    torch.testing.assert_close(to_huggingface(layout), attends)
    assert from_huggingface(to_huggingface(layout), block_size=problem.block_size) == layout
    dtype = FLOATS[int(problem.random.integers(0, 4))]
    added = to_huggingface(layout, dtype=dtype)
    assert added.dtype == dtype
    assert bool(((added == 0) == attends).all())
    assert from_huggingface(added, block_size=problem.block_size) == layout
    # both masked values at once
    minus_infinity = torch.zeros_like(added).masked_fill(~attends, -torch.inf)
    mixed = torch.where(torch.from_numpy(problem.random.random(attends.shape) < 0.5), added, minus_infinity)
    assert from_huggingface(mixed, block_size=problem.block_size) == layout


def test_added_to_the_scores_it_is_the_same_attention() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 50, 16, generator=random)
    mask = torch.rand(2, 1, 50, 50, generator=random) < 0.4
    mask |= torch.eye(50, dtype=torch.bool)
    layout = from_huggingface(
        torch.zeros(2, 1, 50, 50).masked_fill(~mask, torch.finfo(torch.float32).min), block_size=16
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=to_huggingface(layout, dtype=q.dtype)
    )
    torch.testing.assert_close(attention(q, k, v, layout), expected)


def test_kv_lengths_of_a_padding_mask() -> None:
    lengths = torch.tensor([5, 0, 7, 3], dtype=torch.int32)
    padding = torch.arange(7) < lengths[:, None]
    for mask in (padding, padding.long(), padding.to(torch.uint8)):
        found = kv_lengths_from_huggingface(mask)
        torch.testing.assert_close(found, lengths)
    assert kv_lengths_from_huggingface(torch.ones(2, 0, dtype=torch.bool)).tolist() == [0, 0]
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 2, 7, 16, generator=random)
    expected, _ = reference.attention(q, k, v, padding[:, None, None].expand(4, 1, 7, 7))
    torch.testing.assert_close(attention(q, k, v, kv_lengths=lengths), expected)


def wrong(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mask = torch.zeros(1, 1, 4, 5, dtype=dtype)
    mask[0, 0, 2, 3] = value
    return mask


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: from_huggingface(wrong(-1e4), block_size=16),
            ValueError,
            r"got -10000.0 at \(0, 0, 2, 3\): that is a bias, not a mask",
        ),
        (lambda: from_huggingface(wrong(1), block_size=16), ValueError, r"got 1.0 at \(0, 0, 2, 3\): that is a bias"),
        (lambda: from_huggingface(wrong(float("nan")), block_size=16), ValueError, r"got nan at \(0, 0, 2, 3\)"),
        (lambda: from_huggingface(wrong(float("inf")), block_size=16), ValueError, "got inf at"),
        # the lowest number of another dtype is a bias
        (lambda: from_huggingface(wrong(-65504.0), block_size=16), ValueError, "got -65504.0 at"),
        (
            lambda: from_huggingface(torch.ones(1, 1, 4, 5, dtype=torch.long), block_size=16),
            ValueError,
            "must be bool, or floating and added to the scores, got torch.int64",
        ),
        (
            lambda: from_huggingface(torch.ones(2, 5, dtype=torch.long), block_size=16),
            ValueError,
            "kv_lengths=kv_lengths_from_huggingface",
        ),
        (
            lambda: from_huggingface(torch.ones(2, 5, 5, dtype=torch.bool), block_size=16),
            ValueError,
            r"must have shape \(batch, 1 \| heads, q_len, kv_len\), got \(2, 5, 5\)",
        ),
        (
            lambda: from_huggingface(np.ones((1, 1, 5, 5), np.bool_), block_size=16),
            TypeError,
            "attention_mask must be a torch.Tensor, got ndarray",
        ),
        (lambda: to_huggingface(torch.ones(4, 4)), TypeError, "layout must be a BlockLayout, got Tensor"),
        (
            lambda: to_huggingface(from_huggingface(wrong(0), block_size=16), dtype=torch.int64),
            ValueError,
            "dtype must be torch.bool or a floating type of 16 bits or more, got torch.int64",
        ),
        (
            lambda: to_huggingface(from_huggingface(wrong(0), block_size=16), dtype=torch.float8_e4m3fn),
            ValueError,
            "dtype must be torch.bool or a floating type of 16 bits or more, got torch.float8_e4m3fn",
        ),
        (
            lambda: kv_lengths_from_huggingface(torch.tensor([[1, 1, 0], [0, 1, 1]])),
            ValueError,
            "must be padded on the right, but sequence 1 has padding before a token",
        ),
        (
            lambda: kv_lengths_from_huggingface(torch.tensor([[1, 1, 0], [1, 0, 1]])),
            ValueError,
            "must be padded on the right, but sequence 1 has padding before a token",
        ),
        (
            lambda: kv_lengths_from_huggingface(torch.tensor([[1, 2, 0]])),
            ValueError,
            r"must hold 0 .* and 1 .* only, got 2 at \(0, 1\)",
        ),
        (
            lambda: kv_lengths_from_huggingface(torch.ones(2, 3)),
            ValueError,
            r"must be bool or integers \(batch, kv_len\), got torch.float32 \(2, 3\)",
        ),
        (
            lambda: kv_lengths_from_huggingface(torch.ones(2, 1, 3, 3, dtype=torch.bool)),
            ValueError,
            r"must be bool or integers \(batch, kv_len\)",
        ),
        (lambda: kv_lengths_from_huggingface([[1, 0]]), TypeError, "attention_mask must be a torch.Tensor, got list"),
    ],
)
def test_wrong_calls_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
