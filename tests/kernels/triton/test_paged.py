"""The keys of a batch are divided among splits in proportion to its lengths, on the device."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402

from blocksparse_flash.kernels.triton.paged import shared_splits, splits_of  # noqa: E402


@triton.jit
def splits_kernel(lengths_ptr, splits_ptr, n_batch, q_len, kv_len, n_listed, window, n_shared, BATCH: tl.constexpr):
    o_batch, b_splits = splits_of(lengths_ptr, n_batch, q_len, kv_len, n_listed, window, n_shared, BATCH, 64, 2)
    tl.store(splits_ptr + o_batch, b_splits, mask=o_batch < n_batch)


@pytest.mark.parametrize(
    ("lengths", "n_shared", "n_listed", "window", "expected"),
    [
        # equal lengths: 49 splits for 8 sequences
        ([131_072] * 8, 49, None, None, [6] * 8),
        # a long sequence among short ones, and unused rows of the batch
        ([131_072, 2000, 2000, 0, 0], 49, None, None, [47, 1, 1, 1, 1]),
        # no more splits than pairs of steps, also past 2^31 in products
        ([100, 129, 300, 0], 200, None, None, [1, 2, 3, 1]),
        ([2**30, 2**29], 396, None, None, [264, 132]),
        # fewer splits than sequences
        ([5000] * 7, 3, None, None, [1] * 7),
        # out of range, as only a GPU accepts
        ([-5, 2**40], 10, None, None, [1, 10]),
        # a selection and a window have equally many steps for all sequences that are long enough
        ([131_072, 500, 0], 20, 6400, None, [10, 10, 1]),
        ([131_072, 500, 40], 20, None, 1000, [8, 4, 1]),
    ],
)
def test_longer_sequences_have_more_splits(
    lengths: list[int],
    n_shared: int,
    n_listed: int | None,
    window: int | None,
    expected: list[int],
    device: torch.device,
) -> None:
    found = torch.empty(len(lengths), dtype=torch.int32, device=device)
    tensor = torch.tensor(lengths, device=device)
    sizes = len(lengths), 1, 2**30, n_listed, window, n_shared
    splits_kernel[(1,)](tensor, found, *sizes, BATCH=triton.next_power_of_2(len(lengths)))
    assert found.tolist() == expected
    assert sum(expected) <= n_shared + len(lengths)


@pytest.mark.parametrize(
    ("n_batch", "n_programs", "expected"),
    # 8 KV heads on 132 SMs; one KV head; more programs than there is room for
    [(8, 8, 49), (1, 1, 256), (2, 1, 396), (64, 500, 0)],
)
def test_shared_splits_fill_the_gpu(n_batch: int, n_programs: int, expected: int) -> None:
    assert shared_splits(n_batch, n_programs, 132) == expected
