"""Constructors of BlockLayout, compared with dense masks; plan/test_block_selection.py has those that select blocks."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout, interop
from tests.support.dense_masks import Problem, problems
from tests.support.meaning import TENSORS, assert_means


@given(problems())
def test_from_dense_and_to_dense_are_inverse(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    layout = BlockLayout.from_dense(torch.from_numpy(mask), block_size=block_size)
    assert_means(layout, mask)
    assert layout == BlockLayout.from_dense(mask, block_size=block_size)
    assert (layout.n_rows, layout.n_cols) == (-(-mask.shape[2] // block_size[0]), -(-mask.shape[3] // block_size[1]))
    assert layout.nnz == layout.capacity == len(layout.indices) == len(layout.bitmask_ids)
    n_blocks = mask.shape[0] * mask.shape[1] * layout.n_rows * layout.n_cols
    assert layout.density == (layout.nnz / n_blocks if n_blocks else 0.0)


def test_from_dense_puts_missing_axes_first() -> None:
    mask = torch.rand(3, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    assert BlockLayout.from_dense(mask, block_size=16).shape == (1, 3, 40, 50)
    assert BlockLayout.from_dense(mask[0], block_size=16).shape == (1, 1, 40, 50)
    assert BlockLayout.from_dense(mask[None], block_size=16) == BlockLayout.from_dense(mask, block_size=(16, 16))
    # any strides
    expanded = mask[:1].expand(4, 40, 50)
    assert BlockLayout.from_dense(expanded, block_size=16) == BlockLayout.from_dense(expanded.clone(), block_size=16)
    assert BlockLayout.from_dense(mask[0].T, block_size=16) == BlockLayout.from_dense(mask[0], block_size=16).T


@given(problems())
def test_from_predicate_evaluates_every_pair(problem: Problem) -> None:
    block_size, array = problem.block_size, problem.mask
    mask = torch.from_numpy(array)
    batch, heads, q_len, kv_len = mask.shape
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_size": block_size}
    with pytest.MonkeyPatch.context() as patch:
        blocks_at_once = int(problem.random.integers(1, 10))
        patch.setattr(
            "blocksparse_flash.blocks.predicates._PAIRS_AT_ONCE", blocks_at_once * block_size[0] * block_size[1]
        )
        if problem.random.random() < 0.3 or batch * heads > 1:
            # indexing also checks that positions are int64 and exist
            layout = BlockLayout.from_predicate(lambda b, h, q, k: mask[b, h, q, k], batch=batch, heads=heads, **sizes)
        else:
            layout = BlockLayout.from_predicate(lambda q, k: mask[0, 0, q, k], **sizes)
    assert_means(layout, array)


@given(problems(n_masks=2, axes_differ=True))
def test_from_predicate_within_is_the_intersection(problem: Problem) -> None:
    """With batch and head axes of the predicate, of the other layout, or of both."""
    block_size, (inner, outer) = problem.block_size, problem.masks
    within = BlockLayout.from_dense(outer, block_size=block_size)
    mask = torch.from_numpy(inner)
    batch, heads, q_len, kv_len = mask.shape
    found = BlockLayout.from_predicate(
        lambda b, h, q, k: mask[b, h, q, k],
        q_len,
        kv_len,
        block_size=block_size,
        batch=batch,
        heads=heads,
        within=within,
    )
    assert_means(found, inner & outer)
    assert found == BlockLayout.from_dense(mask, block_size=block_size) & within


def test_from_predicate_within_evaluates_only_stored_blocks() -> None:
    length, evaluated = 1 << 20, []
    n_blocks = length // 128
    diagonal = BlockLayout.from_blocks(list(range(n_blocks)), list(range(n_blocks)), length, length, block_size=128)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        evaluated.append(torch.broadcast_shapes(q_pos.shape, kv_pos.shape).numel())
        return kv_pos <= q_pos

    layout = BlockLayout.from_predicate(attends, length, length, block_size=128, within=diagonal)
    assert sum(evaluated) == n_blocks * 128 * 128
    # a predicate's temporaries stay small at any length
    assert max(evaluated) <= 1 << 22
    assert (layout.nnz, len(layout.bitmasks)) == (n_blocks, 1)
    evaluated.clear()
    key = {"dedup_key": lambda row, col: row - col}
    assert BlockLayout.from_predicate(attends, length, length, block_size=128, within=diagonal, **key) == layout
    assert sum(evaluated) == 128 * 128


@given(problems())
def test_dedup_key_changes_only_how_often_the_predicate_is_called(problem: Problem) -> None:
    block_size, outer = problem.block_size, problem.mask
    width = int(problem.random.integers(0, 60))
    within = BlockLayout.from_dense(outer, block_size=block_size) if problem.random.random() < 0.7 else None
    sizes = {"q_len": outer.shape[2], "kv_len": outer.shape[3], "block_size": block_size, "within": within}

    def window(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (q_pos - kv_pos).abs() <= width

    def steps(batch: torch.Tensor, head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (q_pos - kv_pos).abs() <= width * head

    def distance(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return row * block_size[0] - col * block_size[1]

    assert BlockLayout.from_predicate(window, dedup_key=distance, **sizes) == BlockLayout.from_predicate(
        window, **sizes
    )
    # keys too far apart for an array of all values between
    apart = BlockLayout.from_predicate(window, dedup_key=lambda row, col: distance(row, col) * 2**50, **sizes)
    assert apart == BlockLayout.from_predicate(window, **sizes)
    if outer.shape[1] in (1, 3):
        one = BlockLayout.from_predicate(steps, dedup_key=distance, heads=3, **sizes)
        assert one == BlockLayout.from_predicate(steps, heads=3, **sizes)


def test_dedup_key_evaluates_one_block_of_each_key() -> None:
    calls: list[int] = []

    def fn(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        calls.append(len(q_pos))
        return q_pos >= kv_pos

    layout = BlockLayout.from_predicate(fn, 256, 256, block_size=64, dedup_key=lambda row, col: row - col)
    assert layout == BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos >= kv_pos, 256, 256, block_size=64)
    # one block of each of the 7 diagonals
    assert calls == [7]


def test_dedup_key_may_give_any_int64() -> None:
    """Keys 2**62 apart stay distinct; multiplied by 4, for the edge kinds, both would be 0 in 64 bits."""

    def is_off_diagonal(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return np.where(row == col, 0, 2**62)

    def diagonal(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return q_pos == kv_pos

    layout = BlockLayout.from_predicate(diagonal, 64, 64, block_size=16, dedup_key=is_off_diagonal)
    assert layout == BlockLayout.from_dense(torch.eye(64, dtype=torch.bool), block_size=16)


@given(problems())
def test_full_blocks_by_index_by_mask_and_by_scipy_agree(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    q_len, kv_len = mask.shape[2:]
    n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    chosen = problem.random.random((*mask.shape[:2], n_rows, n_cols)) < 0.4
    dense = chosen.repeat(block_size[0], 2).repeat(block_size[1], 3)[..., :q_len, :kv_len]
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_size": block_size}
    layout = BlockLayout.from_block_mask(torch.from_numpy(chosen), **sizes)
    assert_means(layout, dense)
    assert len(layout.bitmasks) == 0
    assert layout == BlockLayout.from_block_mask(chosen, **sizes)
    first = BlockLayout.from_block_mask(chosen[0, 0], **sizes)
    rows, cols = chosen[0, 0].nonzero()
    order = problem.random.permutation(len(rows))
    for convert in (torch.from_numpy, np.asarray, lambda values: values.astype(np.int32), np.ndarray.tolist):
        assert BlockLayout.from_blocks(convert(rows[order]), convert(cols[order]), **sizes) == first
    for form in (scipy.sparse.csr_array, scipy.sparse.coo_matrix, scipy.sparse.csc_array, scipy.sparse.lil_array):
        assert BlockLayout.from_scipy(form(chosen[0, 0].astype(np.float32)), **sizes) == first
        assert BlockLayout.from_scipy(form(chosen[0, 0]), **sizes) == first
    for batch, head in np.ndindex(mask.shape[:2]):
        matrix = layout.to_scipy(batch, head)
        assert isinstance(matrix, scipy.sparse.csr_array) and matrix.dtype == np.int8
        np.testing.assert_array_equal(matrix.toarray(), chosen[batch, head])


def test_to_scipy_marks_partial_blocks_by_2() -> None:
    layout = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 48, 48, block_size=16)
    assert layout.to_scipy().toarray().tolist() == [[2, 0, 0], [1, 2, 0], [1, 1, 2]]


def test_from_scipy_ignores_stored_zeros_and_leaves_the_matrix_alone() -> None:
    matrix = scipy.sparse.csr_array((np.array([1.0, 0.0, 5.0]), np.array([1, 0, 1]), np.array([0, 2, 3])), shape=(2, 2))
    before = matrix.copy()
    layout = BlockLayout.from_scipy(matrix, 32, 32, block_size=16)
    assert layout.to_scipy().toarray().tolist() == [[0, 1], [0, 1]]
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(matrix, name), getattr(before, name))


def test_from_scipy_counts_duplicates_of_narrow_types() -> None:
    places = np.zeros(256, int)
    matrix = scipy.sparse.coo_array((np.ones(256, np.uint8), (places, places)), shape=(1, 1))
    assert BlockLayout.from_scipy(matrix, 128, 128).nnz == 1


@given(problems())
def test_from_ranges_gives_each_row_one_interval(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    q_len, kv_len = mask.shape[2:]
    n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
    first, stop = problem.random.integers(0, n_cols + 1, (2, n_rows))
    cols = np.arange(n_cols)
    expected = (first[:, None] <= cols) & (cols < stop[:, None])
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_size": block_size}
    layout = BlockLayout.from_ranges(first, torch.from_numpy(stop), **sizes)
    assert layout == BlockLayout.from_block_mask(expected, **sizes)
    assert layout == BlockLayout.from_ranges(first.tolist(), stop.tolist(), **sizes)


def test_the_direct_constructor_canonicalizes() -> None:
    """Bitmasks of ones become full blocks, empty ones are dropped, equal ones merged, bits past the end ignored."""
    bitmasks = torch.zeros(6, 16, 1, dtype=torch.int32)
    bitmasks[1] = -1
    bitmasks[2, 3] = bitmasks[4, 3] = 5
    # only pairs that do not exist: keys from 4 on in the last col
    bitmasks[3] = 0xFFF0
    bitmasks[5] = 0xF
    layout = BlockLayout(
        torch.tensor([[[0, 4, 7]]], dtype=torch.int32),
        torch.tensor([0, 1, 2, 3, 0, 1, 3], dtype=torch.int32),
        torch.tensor([0, 4, 1, 3, 2, -1, 5], dtype=torch.int32),
        bitmasks,
        q_len=32,
        kv_len=52,
        block_size=16,
    )
    assert layout.indptr.tolist() == [[[0, 2, 5]]]
    assert layout.indices.tolist() == [1, 2, 0, 1, 3]
    assert layout.bitmask_ids.tolist() == [0, -1, 0, -1, -1]
    assert torch.equal(layout.bitmasks, bitmasks[2:3])


def test_tensors_of_the_caller_are_copied() -> None:
    mask = np.ones((32, 32), np.bool_)
    mask[0, 0] = False
    layout = BlockLayout.from_dense(mask, block_size=16)
    tensors = [getattr(layout, name).clone() for name in TENSORS]
    direct = BlockLayout(*tensors, q_len=32, kv_len=32, block_size=16)
    state = layout.state_dict()
    loaded = BlockLayout.from_state_dict(state)
    mask[:] = False
    for tensor in [*tensors, *(state[name] for name in TENSORS)]:
        tensor.zero_()
    assert direct == loaded == layout
    assert layout.to_dense().sum() == 32 * 32 - 1
    rows = np.array([0, 1])
    by_index = BlockLayout.from_blocks(rows, rows, 32, 32, block_size=16)
    rows[:] = 0
    assert by_index.indices.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_blocks_have_128_tokens_by_default() -> None:
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    scores = torch.zeros(1, 1, 2, 2)
    made = [
        BlockLayout.from_dense(mask),
        BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos >= kv_pos, 256, 256),
        BlockLayout.from_blocks([0], [0], 256, 256),
        BlockLayout.from_ranges([0, 0], [1, 2], 256, 256),
        BlockLayout.from_block_mask(torch.ones(2, 2, dtype=torch.bool), 256, 256),
        BlockLayout.from_scipy(scipy.sparse.eye_array(2), 256, 256),
        BlockLayout.from_topk(torch.zeros(1, 1, 2, 1, dtype=torch.int64), 256, 256),
        BlockLayout.from_scores(scores, 256, 256, k=1),
        interop.from_huggingface(mask[None, None]),
        interop.from_scipy_csr(scipy.sparse.csr_array(mask.numpy())),
        interop.from_torch_sparse(mask.to_sparse_csr()),
        interop.from_magi([[0, 256]], [[0, 256]], None, 256, 256),
        interop.from_flashmask(torch.full((1, 1, 256, 1), 256), 256, causal=True),
    ]
    assert {layout.block_size for layout in made} == {(128, 128)}
