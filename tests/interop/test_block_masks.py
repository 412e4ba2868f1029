"""interop/block_masks.py: Block-Sparse-Attention, DeepSpeed and xFormers, against loops over their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout
from blocksparse_flash.interop import (
    from_block_sparse_attention,
    from_deepspeed,
    from_xformers,
    to_block_sparse_attention,
    to_deepspeed,
    to_xformers,
)

seeds = st.integers(0, 2**32 - 1)


def causal(q_len: int, kv_len: int) -> np.ndarray:
    return np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len


def spread(blocks: np.ndarray, side: int, q_len: int, kv_len: int) -> np.ndarray:
    """The token mask of a block mask."""
    return blocks.repeat(side, -2).repeat(side, -1)[..., :q_len, :kv_len]


# ---------------------------------------------------------------------------------------------- Block-Sparse-Attention


def one_call(
    base: np.ndarray, types: list[int], info: list[int], q_len: int, kv_len: int, is_causal: bool, exact: bool
) -> np.ndarray:
    """bool (batch, heads, q_len, kv_len) of Block-Sparse-Attention's own reference, head by head and row by row."""
    n_rows, n_cols = -(-q_len // 128), -(-kv_len // 128)
    mask = np.zeros((len(base), len(types), q_len, kv_len), np.bool_)
    for b, h in np.ndindex(mask.shape[:2]):
        sink, local = info[2 * h], info[2 * h + 1]
        if types[h] == 0:
            mask[b, h] = True
        elif types[h] == 1:
            mask[b, h] = spread(base[b, types[:h].count(1)], 128, q_len, kv_len)
        elif exact:
            for i, j in np.ndindex(q_len, kv_len):
                last = i + kv_len - q_len
                mask[b, h, i, j] = j <= last and not (j < last - (local - 1) and j >= sink)
        else:
            rows = np.zeros((n_rows, n_cols), np.bool_)
            start = max((q_len - kv_len) // 128, 0) if is_causal else 0
            for i in range(start, n_rows):
                stop = n_cols
                if is_causal:
                    stop = -(-max(kv_len - q_len, 0) // 128) + 1 + i - start
                rows[i, min(max(stop - local, 0), n_cols) : min(stop, n_cols)] = True
                rows[i, :sink] = True
            mask[b, h] = spread(rows, 128, q_len, kv_len)
        if is_causal:
            mask[b, h] &= causal(q_len, kv_len)
    return mask


@given(seeds)
def test_from_block_sparse_attention_is_one_call(seed: int) -> None:
    random = np.random.default_rng(seed)
    is_causal, exact = random.random() < 0.6, random.random() < 0.4
    exact &= is_causal
    q_len, kv_len = (int(random.integers(1, 200 if exact else 700)) for _ in range(2))
    types = random.choice([0, 1, -1], int(random.integers(1, 4))).tolist()
    base = random.random((int(random.choice([1, 2])), types.count(1), -(-q_len // 128), -(-kv_len // 128))) < 0.5
    top = 200 if exact else 5
    info = [int(random.integers(0, top)) for _ in range(2 * len(types))]
    found = from_block_sparse_attention(
        torch.from_numpy(base),
        types,
        q_len,
        kv_len,
        streaming_info=info,
        causal=bool(is_causal),
        exact_streaming=bool(exact),
    )
    expected = one_call(base, types, info, q_len, kv_len, bool(is_causal), bool(exact))
    assert found == BlockLayout.from_dense(expected, block_size=128)


@pytest.mark.parametrize(("q_len", "kv_len"), [(400, 400), (130, 600), (600, 130), (1, 500), (640, 255)])
@pytest.mark.parametrize(("sink", "local"), [(0, 1), (3, 100), (128, 129), (130, 256), (0, 257), (500, 1)])
def test_tokens_of_a_streaming_head(q_len: int, kv_len: int, sink: int, local: int) -> None:
    """Sinks and windows that end before, at and after the end of a block."""
    found = from_block_sparse_attention(
        None, [-1], q_len, kv_len, streaming_info=[sink, local], causal=True, exact_streaming=True
    )
    last, key = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)
    assert found == BlockLayout.from_dense((key <= last) & ((key < sink) | (last - key < local)), block_size=128)


@given(seeds)
def test_block_sparse_attention_and_back(seed: int) -> None:
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(random.integers(0, 600)) for _ in range(2))
    is_causal = bool(random.random() < 0.5)
    shape = int(random.choice([1, 2])), int(random.choice([1, 3]))
    blocks = random.random((*shape, -(-q_len // 128), -(-kv_len // 128))) < 0.5
    mask = spread(blocks, 128, q_len, kv_len) & (causal(q_len, kv_len) | (not is_causal))
    # the layout's own blocks may be finer: only the mask counts
    layout = BlockLayout.from_dense(mask, block_size=int(random.choice([16, 64, 128, 256])))
    found = to_block_sparse_attention(layout, batch=2, heads=3, causal=is_causal)
    assert found.base_blockmask.dtype == torch.bool
    assert found.base_blockmask.is_contiguous()
    assert (found.head_mask_type.tolist(), found.head_mask_type.dtype) == ([1, 1, 1], torch.int32)
    again = from_block_sparse_attention(*found, q_len, kv_len, causal=is_causal)
    assert again == BlockLayout.from_dense(np.broadcast_to(mask, (2, 3, q_len, kv_len)), block_size=128)
    assert to_block_sparse_attention(layout, causal=is_causal).base_blockmask.shape[:2] == shape


# ----------------------------------------------------------------------------------------------- DeepSpeed and xFormers


@given(seeds)
def test_deepspeed_and_xformers_and_back(seed: int) -> None:
    random = np.random.default_rng(seed)
    side, n = int(random.choice([16, 48, 64, 128])), int(random.integers(0, 6))
    tensor = torch.from_numpy(random.integers(0, 2, (int(random.choice([1, 3])), n, n)))
    length = n * side
    mask = spread(tensor.numpy() == 1, side, length, length)[None]
    layout = BlockLayout.from_dense(mask, block_size=side)
    assert from_deepspeed(tensor, block=side) == layout == from_xformers(tensor, block_size=side)
    for found in (to_deepspeed(layout), to_xformers(layout)):
        torch.testing.assert_close(found, tensor)
    # the layout may have another block size
    torch.testing.assert_close(to_deepspeed(BlockLayout.from_dense(mask, block_size=(16, 32)), block=side), tensor)
    below = BlockLayout.from_dense(mask & causal(length, length), block_size=side)
    assert from_xformers(tensor, block_size=side, causal=True) == below
    torch.testing.assert_close(to_xformers(below, causal=True), tensor * torch.ones(n, n, dtype=torch.int64).tril())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.uint8], ids=str)
def test_masks_are_of_any_type_that_has_0_and_1(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[1, 0], [1, 1]]])
    assert from_deepspeed(mask.to(dtype), block=16) == from_deepspeed(mask, block=16)
    base = from_block_sparse_attention(mask[None].to(dtype), [1], 256, 256)
    assert base == from_block_sparse_attention(mask[None], [1], 256, 256)


# ---------------------------------------------------------------------------------------------------------- wrong calls

BASE = torch.ones(1, 1, 2, 2, dtype=torch.bool)


def layout_of(mask: np.ndarray, block_size: Any = 128) -> BlockLayout:
    return BlockLayout.from_dense(mask, block_size=block_size)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: to_block_sparse_attention(layout_of(causal(256, 256))),
            ValueError,
            r"takes whole 128 x 128 blocks: block \(row 0, col 0\) of batch 0, head 0 attends in part",
        ),
        (
            lambda: to_block_sparse_attention(layout_of(np.tri(256, k=-1) > 0), causal=True),
            ValueError,
            r"blocks cut by the causal diagonal alone: block \(row 0, col 0\)",
        ),
        (
            lambda: to_block_sparse_attention(layout_of(np.ones((256, 256), np.bool_)), causal=True),
            ValueError,
            r"cut by the causal diagonal alone: block \(row 0, col 0\)",
        ),
        (
            lambda: to_block_sparse_attention(layout_of(np.ones((2, 128, 128), np.bool_)), heads=4),
            ValueError,
            "heads must be that of the layout, 2, or None, got 4",
        ),
        (lambda: to_block_sparse_attention(BASE), TypeError, "layout must be a BlockLayout, got Tensor"),
        (
            lambda: from_block_sparse_attention(BASE, [1, 2], 256, 256),
            ValueError,
            r"head_mask_type must be 0 \(dense\), 1 \(block-sparse\) or -1 \(streaming\) for each head, got \[1, 2\]",
        ),
        (
            lambda: from_block_sparse_attention(BASE, [1, 1], 256, 256),
            ValueError,
            r"base_blockmask must have shape \(batch, 2 heads of type 1, 2, 2\), got \(1, 1, 2, 2\)",
        ),
        (lambda: from_block_sparse_attention(BASE, [1], 257, 256), ValueError, r"heads of type 1, 3, 2\), got"),
        (lambda: from_block_sparse_attention(BASE * 2, [1], 256, 256), ValueError, "base_blockmask must hold 0"),
        (
            lambda: from_block_sparse_attention(None, [1], 256, 256),
            ValueError,
            "base_blockmask must be given: 1 heads are of type 1",
        ),
        (
            lambda: from_block_sparse_attention(None, [-1], 256, 256),
            ValueError,
            "streaming_info must be given: sink and local of each head",
        ),
        (
            lambda: from_block_sparse_attention(None, [-1], 256, 256, streaming_info=[1]),
            ValueError,
            "streaming_info must hold sink and local",
        ),
        (
            lambda: from_block_sparse_attention(None, [-1], 256, 256, streaming_info=[1, -1]),
            ValueError,
            "streaming_info must hold sink and local, not negative",
        ),
        (
            lambda: from_block_sparse_attention(None, [-1], 256, 256, streaming_info=[1, 1], exact_streaming=True),
            ValueError,
            "exact_streaming must come with causal=True",
        ),
        (
            lambda: from_block_sparse_attention(None, [0], 256, 256, causal="no"),
            TypeError,
            "causal must be True or False, got 'no'",
        ),
        (
            lambda: from_block_sparse_attention(None, [0], 256, 256, causal=True, exact_streaming=1),
            TypeError,
            "exact_streaming must be True or False, got 1",
        ),
        (
            lambda: to_block_sparse_attention(layout_of(causal(256, 256)), causal="no"),
            TypeError,
            "causal must be True or False, got 'no'",
        ),
        (
            lambda: from_xformers(torch.ones(1, 2, 2), block_size=16, causal="no"),
            TypeError,
            "causal must be True or False, got 'no'",
        ),
        (
            lambda: to_xformers(layout_of(causal(32, 32), 16), causal="no"),
            TypeError,
            "causal must be True or False, got 'no'",
        ),
        (
            lambda: from_deepspeed(torch.ones(2, 3, 4), block=16),
            ValueError,
            r"sparsity_layout must have shape \(heads, n, n\), got \(2, 3, 4\)",
        ),
        (
            lambda: from_deepspeed(torch.full((2, 3, 3), 2), block=16),
            ValueError,
            r"sparsity_layout must hold 0 \(masked\) and 1 \(attends\) only, got 2 at \(0, 0, 0\)",
        ),
        (lambda: from_deepspeed(torch.ones(2, 3, 3), block=8), ValueError, "block must be a multiple of 16, got 8"),
        (
            lambda: from_deepspeed(torch.ones(2, 3, 3), block=2**30),
            ValueError,
            r"block must give fewer than 2\*\*31 tokens, got 3 blocks of 1073741824",
        ),
        (
            lambda: to_deepspeed(layout_of(causal(32, 32), 16), block=8),
            ValueError,
            "^block must be a multiple of 16 from 16 to 256 on each side, got 8",
        ),
        (
            lambda: to_xformers(layout_of(causal(32, 32), 16), block_size=1.5),
            TypeError,
            "block_size must be an int, got 1.5",
        ),
        (
            lambda: from_xformers(torch.ones(1, 4, 4), block_size=-1),
            ValueError,
            "block_size must be a multiple of 16, got -1",
        ),
        (lambda: from_xformers([[1]], block_size=16), TypeError, "sparsity_layout must be a torch.Tensor, got list"),
        (
            lambda: to_deepspeed(layout_of(np.ones((32, 48), np.bool_), 16)),
            ValueError,
            "cannot be given to DeepSpeed, which takes one mask for the batch.*got batch 1, 32 x 48 tokens",
        ),
        (
            lambda: to_deepspeed(layout_of(np.ones((40, 40), np.bool_), 16)),
            ValueError,
            "whole square blocks: got batch 1, 40 x 40 tokens in blocks of .16, 16.",
        ),
        (lambda: to_deepspeed(layout_of(np.ones((2, 1, 32, 32), np.bool_), 16)), ValueError, "got batch 2"),
        (lambda: to_deepspeed(layout_of(np.ones((32, 32), np.bool_), (16, 32))), ValueError, "whole square blocks"),
        (
            lambda: to_xformers(layout_of(causal(32, 32), 16)),
            ValueError,
            r"cannot be given to xFormers, which takes whole 16 x 16 blocks: block \(row 0, col 0\)",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
