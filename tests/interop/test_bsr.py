"""interop/bsr.py: FlashInfer, SciPy and torch.sparse, against loops over their arrays, and against SciPy and torch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout
from blocksparse_flash.interop import (
    FlashInferBsr,
    from_flashinfer,
    from_scipy_bsr,
    from_scipy_csr,
    from_torch_sparse,
    to_flashinfer,
    to_scipy_bsr,
    to_scipy_csr,
    to_torch_sparse,
)
from tests.support.dense_masks import Problem, problems


@pytest.fixture(autouse=True)
def sparse_tensors_are_in_beta() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta state")
        yield


def one_of(problem: Problem) -> tuple[BlockLayout, int, int, np.ndarray]:
    """(layout, batch, head, mask) for a random head."""
    batch, head = (int(problem.random.integers(0, size)) for size in problem.mask.shape[:2])
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    return layout, batch, head, problem.mask[batch, head]


def as_layout(mask: np.ndarray, block_size: Any) -> BlockLayout:
    return BlockLayout.from_dense(np.ascontiguousarray(mask), block_size=block_size)


# ---------------------------------------------------------------------------------------------------------- FlashInfer


def flashinfer(bsr: FlashInferBsr) -> np.ndarray:
    """bool (M, N): the pairs of FlashInfer's block rows, one pair at a time.

    A packed mask is read as FlashInfer flattens it: in a block row the queries one after another, each with all keys
    of the row's blocks; bit i of byte n is element 8 n + i.
    """
    mask = np.zeros((-(-bsr.M // bsr.R) * bsr.R, bsr.N), np.bool_)
    for row in range(len(bsr.indptr) - 1):
        begin, end = int(bsr.indptr[row]), int(bsr.indptr[row + 1])
        for i, n in np.ndindex(bsr.R, end - begin):
            for j in range(bsr.C):
                attends = True
                if bsr.mask is not None:
                    attends = bool(bsr.mask[begin + n, i, j])
                if bsr.packed_mask is not None:
                    element = begin * bsr.R * bsr.C + (i * (end - begin) + n) * bsr.C + j
                    attends = bool(bsr.packed_mask[element // 8] >> element % 8 & 1)
                mask[row * bsr.R + i, int(bsr.indices[begin + n]) * bsr.C + j] = attends
    return mask[: bsr.M]


def whole_keys(mask: np.ndarray, block_kv: int) -> np.ndarray:
    """A mask whose keys are a multiple of block_kv, the added ones masked."""
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % block_kv)])


@pytest.mark.thorough
@given(problems())
def test_flashinfer_and_back(problem: Problem) -> None:
    padded = whole_keys(problem.mask, problem.block_size[1])[..., :96, :]
    if padded.shape[-1] > 512:
        # the oracle takes a microsecond per pair
        return
    layout = as_layout(padded, problem.block_size)
    batch, head = (int(problem.random.integers(0, size)) for size in padded.shape[:2])
    packed = bool(problem.random.random() < 0.5)
    found = to_flashinfer(layout, batch, head, packed=packed)
    assert found.mask is None or not packed
    small = found.M * found.N < 20_000
    if small:
        np.testing.assert_array_equal(flashinfer(found), padded[batch, head])
    again = from_flashinfer(
        found.indptr,
        found.indices,
        found.M,
        found.N,
        block_size=(found.R, found.C),
        mask=found.mask,
        packed_mask=found.packed_mask,
    )
    assert again == as_layout(padded[batch, head], problem.block_size)


def test_flashinfer_takes_cols_in_any_order() -> None:
    random = np.random.default_rng(0)
    pairs = random.random((3, 16, 32)) < 0.5
    bsr = FlashInferBsr(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), 23, 96, 16, 32, torch.from_numpy(pairs))
    found = from_flashinfer(bsr.indptr, bsr.indices, 23, 96, block_size=(16, 32), mask=bsr.mask)
    assert found == as_layout(flashinfer(bsr), (16, 32))
    full = from_flashinfer(bsr.indptr, bsr.indices, 23, 96, block_size=(16, 32))
    assert full == as_layout(flashinfer(bsr._replace(mask=None)), (16, 32))
    assert to_flashinfer(full).mask is None
    # packed for 23 queries, or for all of the last block row
    every_bit = np.packbits(
        np.concatenate([pairs[:2].swapaxes(0, 1).reshape(-1), pairs[2].reshape(-1)]), bitorder="little"
    )
    for octets in (every_bit, every_bit[: (16 * 64 + 7 * 32) // 8]):
        packed = from_flashinfer(
            bsr.indptr, bsr.indices, 23, 96, block_size=(16, 32), packed_mask=torch.from_numpy(octets)
        )
        assert packed == found


# --------------------------------------------------------------------------------------------------------------- SciPy


@given(problems())
def test_scipy_and_back(problem: Problem) -> None:
    layout, batch, head, mask = one_of(problem)
    expected = as_layout(mask, problem.block_size)
    bsr, csr = to_scipy_bsr(layout, batch, head), to_scipy_csr(layout, batch, head)
    np.testing.assert_array_equal(bsr.toarray()[: mask.shape[0], : mask.shape[1]], mask)
    assert bsr.sum() == csr.sum() == mask.sum()
    np.testing.assert_array_equal(csr.toarray(), mask)
    assert from_scipy_bsr(bsr, q_len=problem.q_len, kv_len=problem.kv_len) == expected
    assert from_scipy_csr(csr, block_size=problem.block_size) == expected
    assert from_scipy_csr(scipy.sparse.coo_array(mask), block_size=problem.new_block_size) == as_layout(
        mask, problem.new_block_size
    )


def test_scipy_adds_what_is_stored_twice() -> None:
    twice = scipy.sparse.coo_array((np.array([1, 1, 1, -1]), ([0, 0, 1, 1], [0, 3, 2, 2])), shape=(4, 5))
    assert from_scipy_csr(twice, block_size=16).to_dense()[0, 0].nonzero().tolist() == [[0, 0], [0, 3]]
    assert twice.nnz == 4
    with pytest.raises(ValueError, match=r"matrix must hold 0 \(masked\) and 1 \(attends\) only, got 2.0"):
        from_scipy_csr(scipy.sparse.csr_array(np.eye(4)) * 2, block_size=16)


def test_many_times_the_same_pair_is_not_once() -> None:
    """In int8 the sum of 257 ones wraps to 1, and of 256 ones to 0."""
    for count in (256, 257):
        ones, nowhere = np.ones(count, np.int8), np.zeros(count, np.int64)
        pairs = scipy.sparse.coo_array((ones, (nowhere, nowhere)), shape=(3, 3))
        whole = scipy.sparse.bsr_array((np.ones((count, 16, 16), np.int8), nowhere, [0, count]), shape=(16, 16))
        with pytest.raises(ValueError, match=f"only, got {count} at"):
            from_scipy_csr(pairs, block_size=16)
        with pytest.raises(ValueError, match=f"only, got {count} at"):
            from_scipy_bsr(whole)


# -------------------------------------------------------------------------------------------------------- torch.sparse


@pytest.mark.parametrize("col", [-1, 4])
def test_keys_that_do_not_exist_are_refused(col: int) -> None:
    """PyTorch and SciPy check indices on request only."""
    indptr, cols = [0, 1, 1, 1, 1], [col]
    tensor = torch.sparse_csr_tensor(indptr, cols, [1.0], (4, 4), check_invariants=False)
    matrix = scipy.sparse.csr_array((4, 4), dtype=np.int8)
    matrix.data, matrix.indices, matrix.indptr = np.ones(1, np.int8), np.array(cols), np.array(indptr)
    for call in (from_torch_sparse, from_scipy_csr):
        with pytest.raises(ValueError, match=f"indices must be in 0 .. n_cols - 1 = 3, got {col} at 0"):
            call(tensor if call is from_torch_sparse else matrix, block_size=16)


@given(problems())
def test_torch_sparse_and_back(problem: Problem) -> None:
    layout, batch, head, mask = one_of(problem)
    if not mask.size:
        # torch has no sparse tensors with an empty axis
        return
    expected = as_layout(mask, problem.block_size)
    bsr = to_torch_sparse(layout, batch, head)
    csr = to_torch_sparse(layout, batch, head, sparse_layout=torch.sparse_csr)
    assert (bsr.layout, csr.layout) == (torch.sparse_bsr, torch.sparse_csr)
    np.testing.assert_array_equal(bsr.to_dense().numpy()[: mask.shape[0], : mask.shape[1]], mask)
    np.testing.assert_array_equal(csr.to_dense().numpy(), mask)
    assert from_torch_sparse(bsr, q_len=problem.q_len, kv_len=problem.kv_len) == expected
    assert from_torch_sparse(csr, block_size=problem.block_size) == expected


def test_torch_makes_the_same_tensors_itself() -> None:
    mask = torch.rand(96, 128, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[:32, 64:] = False
    expected = BlockLayout.from_dense(mask, block_size=(32, 64))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        assert from_torch_sparse(mask.to(dtype).to_sparse_bsr((32, 64))) == expected
        assert from_torch_sparse(mask.to(dtype).to_sparse_csr(), block_size=(32, 64)) == expected
    found = to_torch_sparse(expected)
    theirs = mask.float().to_sparse_bsr((32, 64))
    torch.testing.assert_close(found.crow_indices(), theirs.crow_indices())
    torch.testing.assert_close(found.col_indices(), theirs.col_indices())
    torch.testing.assert_close(found.values(), theirs.values() == 1)


# ---------------------------------------------------------------------------------------------------------- wrong calls

ONE = torch.ones(1, 16, 16, dtype=torch.bool)
BSR = scipy.sparse.bsr_array(np.ones((32, 32), np.int8), blocksize=(16, 16))


def rows(indptr: list[int], indices: list[int], **options: Any) -> BlockLayout:
    return from_flashinfer(torch.tensor(indptr), torch.tensor(indices), 32, 32, **{"block_size": 16} | options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rows([0, 1], [0]),
            ValueError,
            r"indptr must have n_rows \+ 1 = 3 entries that ascend from 0 to len\(indices\) = 1, got 2",
        ),
        (lambda: rows([0, 2, 1], [0]), ValueError, "indptr must have n_rows"),
        (lambda: rows([0, 1, 1], [2]), ValueError, "indices must be in 0 .. n_cols - 1 = 1, got 2 at 0"),
        (
            lambda: rows([0, 2, 2], [1, 1]),
            ValueError,
            r"indices must list each block once, but block \(row 0, col 1\) is repeated",
        ),
        (lambda: rows([0, 1, 1], [0], block_size=1), ValueError, "block_size must be a multiple of 16"),
        (
            lambda: rows([0, 1, 1], [0], mask=ONE, packed_mask=torch.zeros(32, dtype=torch.uint8)),
            ValueError,
            "must not both be given",
        ),
        (
            lambda: rows([0, 1, 1], [0], mask=ONE.int()),
            ValueError,
            r"mask must be bool \(nnz, R, C\) = \(1, 16, 16\), got torch.int32",
        ),
        (
            lambda: rows([0, 1, 1], [0], mask=ONE.repeat(2, 1, 1)),
            ValueError,
            r"mask must be bool .* got torch.bool \(2, 16, 16\)",
        ),
        (
            lambda: rows([0, 1, 1], [0], packed_mask=torch.zeros(31, dtype=torch.uint8)),
            ValueError,
            "packed_mask must be uint8 with 32 entries",
        ),
        (
            lambda: to_flashinfer(as_layout(np.ones((30, 30), np.bool_), 16)),
            ValueError,
            "has 30 keys, but FlashInfer takes multiples of block_kv = 16 only: pad the keys",
        ),
        (
            lambda: to_flashinfer(as_layout(np.ones((32, 32), np.bool_), 16), head=1),
            ValueError,
            "head must be in 0 .. 0",
        ),
        (
            lambda: to_flashinfer(as_layout(np.ones((32, 32), np.bool_), 16), packed="no"),
            TypeError,
            "packed must be True or False, got 'no'",
        ),
        (lambda: rows([0, 1, 1], [0], mask=ONE.numpy()), TypeError, "mask must be a torch.Tensor, got ndarray"),
        (lambda: rows([0, 1, 1], [0], packed_mask=[0]), TypeError, "packed_mask must be a torch.Tensor, got list"),
        (
            lambda: from_flashinfer(torch.ones(3).bfloat16(), torch.ones(1), 32, 32, block_size=16),
            ValueError,
            "indptr must be integers, got torch.bfloat16",
        ),
        (
            lambda: from_scipy_csr(scipy.sparse.coo_array(np.ones(3)), block_size=16),
            ValueError,
            r"matrix must have two axes \(q_len, kv_len\), got shape \(3,\)",
        ),
        (lambda: to_scipy_bsr(3), TypeError, "layout must be a BlockLayout, got int"),
        (
            lambda: from_scipy_bsr(BSR.tocsr()),
            TypeError,
            "must be a scipy.sparse BSR matrix, got csr_array: use from_scipy_csr",
        ),
        (lambda: from_scipy_bsr(BSR, q_len=16), ValueError, r"q_len must end in the last block, in 17 .. 32, got 16"),
        (
            lambda: from_scipy_bsr(BSR, kv_len=31),
            ValueError,
            "must be 0 beyond q_len x kv_len = 32 x 31, but a pair there is 1",
        ),
        (
            lambda: from_scipy_bsr(BSR * 2),
            ValueError,
            r"must hold 0 \(masked\) and 1 \(attends\) only, got 2 at \(0, 0, 0\)",
        ),
        (
            lambda: from_scipy_csr(np.ones((4, 4)), block_size=16),
            TypeError,
            "matrix must be a scipy.sparse matrix or array, got ndarray",
        ),
        (
            lambda: from_torch_sparse(torch.ones(4, 4)),
            ValueError,
            r"must be torch.sparse_bsr or torch.sparse_csr with two axes, got torch.strided",
        ),
        (
            lambda: from_torch_sparse(torch.ones(4, 4).to_sparse_csr(), block_size=16, q_len=5),
            ValueError,
            "q_len must be the length of the CSR tensor, 4, or None, got 5",
        ),
        (
            lambda: from_torch_sparse(torch.ones(32, 32).to_sparse_bsr((16, 16)), block_size=32),
            ValueError,
            r"block_size must be the tensor's own, \(16, 16\), or None",
        ),
        (
            lambda: from_torch_sparse((torch.ones(4, 4) * 0.5).to_sparse_csr(), block_size=16),
            ValueError,
            "only, got 0.5 at",
        ),
        (lambda: from_torch_sparse([[1]]), TypeError, "tensor must be a sparse torch.Tensor, got list"),
        (
            lambda: to_torch_sparse(as_layout(np.ones((32, 32), np.bool_), 16), sparse_layout=torch.sparse_coo),
            ValueError,
            "sparse_layout must be torch.sparse_bsr or torch.sparse_csr, got torch.sparse_coo",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
