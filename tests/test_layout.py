"""Constructors, algebra, conversions and plans of BlockLayout, compared with boolean arithmetic on dense masks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import operator
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given

import masks
from blocksparse_flash import BlockLayout, attention, interop
from blocksparse_flash.blocks import predicates
from blocksparse_flash.blocks.stored_blocks import number_of, numbered
from tests.support import cases
from tests.support.dense_masks import Problem, problems
from tests.support.meaning import TENSORS, assert_means, assert_valid

_ROOT = Path(__file__).parents[1]


# ---- constructors


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
    diagonal = BlockLayout.from_blocks(range_list(n_blocks), range_list(n_blocks), length, length, block_size=128)

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


def range_list(stop: int) -> list[int]:
    return list(range(stop))


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


# ---- bad input

_GOOD = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 40, block_size=16)
_SIZES = {"q_len": 40, "kv_len": 40, "block_size": 16}
_ONES = torch.ones(40, 40, dtype=torch.bool)


def _direct(**changes: Any) -> BlockLayout:
    return BlockLayout(**(_GOOD.state_dict() | changes))


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _predicate(fn: Any = lambda q_pos, kv_pos: kv_pos <= q_pos, **changes: Any) -> BlockLayout:
    return BlockLayout.from_predicate(fn, **(_SIZES | changes))


def _by_index(rows: Any, cols: Any, **changes: Any) -> BlockLayout:
    return BlockLayout.from_blocks(rows, cols, **(_SIZES | changes))


def _sparse(matrix: Any) -> BlockLayout:
    return BlockLayout.from_scipy(matrix, **_SIZES)


def _eye(value: float = 1.0, size: int = 3) -> Any:
    return scipy.sparse.csr_array(value * np.eye(size))


def _twice() -> Any:
    return scipy.sparse.coo_array((np.ones(2), (np.zeros(2, int), np.zeros(2, int))), shape=(3, 3))


def _state(**changes: Any) -> BlockLayout:
    state = _GOOD.state_dict() | changes
    return BlockLayout.from_state_dict({name: value for name, value in state.items() if value is not None})


# name: (call, exception, pattern of its message)
_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "indptr-list": (lambda: _direct(indptr=[0, 1, 3, 6]), TypeError, "indptr"),
    "indptr-int64": (lambda: _direct(indptr=_GOOD.indptr.long()), ValueError, "indptr must be int32, got torch.int64"),
    "indptr-1-axis": (lambda: _direct(indptr=_GOOD.indptr[0, 0]), ValueError, "indptr must have shape"),
    "indptr-short": (lambda: _direct(indptr=_GOOD.indptr[..., :-1]), ValueError, "indptr must have shape"),
    "indptr-no-heads": (lambda: _direct(indptr=_GOOD.indptr[:, :0]), ValueError, "indptr must have shape"),
    "indptr-from-1": (lambda: _direct(indptr=_int32([[[1, 1, 3, 6]]])), ValueError, "indptr must start at 0"),
    "indptr-gap-between-heads": (
        lambda: _direct(indptr=_int32([[[0, 1, 1, 2], [3, 3, 3, 6]]])),
        ValueError,
        "indptr must start at 0, and each head",
    ),
    "indptr-falls": (
        lambda: _direct(indptr=_int32([[[0, 4, 3, 6]]])),
        ValueError,
        "indptr must not decrease, but row 1",
    ),
    "indptr-negative": (lambda: _direct(indptr=_int32([[[0, -4, 3, 6]]])), ValueError, "indptr must not decrease"),
    "indptr-ends-early": (lambda: _direct(indptr=_int32([[[0, 1, 3, 5]]])), ValueError, "indptr must end .* 6, got 5"),
    "indptr-ends-late": (lambda: _direct(indptr=_int32([[[0, 1, 3, 7]]])), ValueError, "indptr must end .* 6, got 7"),
    "indices-float": (lambda: _direct(indices=_GOOD.indices.float()), ValueError, "indices must be int32"),
    "indices-2-axes": (lambda: _direct(indices=_GOOD.indices[None]), ValueError, "indices must have one axis"),
    "indices-negative": (lambda: _direct(indices=_int32([-1, 0, 1, 0, 1, 2])), ValueError, "indices .* got -1 at 0"),
    "indices-large": (lambda: _direct(indices=_int32([0, 0, 1, 0, 1, 3])), ValueError, "indices .* got 3 at 5"),
    "indices-unsorted": (
        lambda: _direct(indices=_int32([0, 1, 0, 0, 1, 2])),
        ValueError,
        "indices must ascend .* row 1",
    ),
    "indices-twice": (lambda: _direct(indices=_int32([0, 0, 1, 0, 2, 2])), ValueError, "indices must ascend .* row 2"),
    "ids-bool": (lambda: _direct(bitmask_ids=_GOOD.bitmask_ids.bool()), ValueError, "bitmask_ids must be int32"),
    "ids-short": (lambda: _direct(bitmask_ids=_GOOD.bitmask_ids[1:]), ValueError, "bitmask_ids must have the shape"),
    "ids-low": (lambda: _direct(bitmask_ids=_int32([-2, -1, 0, -1, -1, 1])), ValueError, "bitmask_ids .* got -2 at 0"),
    "ids-high": (lambda: _direct(bitmask_ids=_int32([0, -1, 0, -1, -1, 2])), ValueError, "bitmask_ids .* got 2 at 5"),
    "bitmasks-int64": (lambda: _direct(bitmasks=_GOOD.bitmasks.long()), ValueError, "bitmasks must be int32"),
    "bitmasks-2-axes": (lambda: _direct(bitmasks=_GOOD.bitmasks[0]), ValueError, "bitmasks must have shape"),
    "bitmasks-wide": (lambda: _direct(bitmasks=_GOOD.bitmasks.repeat(1, 1, 2)), ValueError, "bitmasks must have shape"),
    "bitmasks-elsewhere": (
        lambda: _direct(bitmasks=_GOOD.bitmasks.to("meta")),
        ValueError,
        "bitmasks must be on indptr's",
    ),
    "dense-list": (lambda: BlockLayout.from_dense([[True]], block_size=16), TypeError, "mask must be a torch.Tensor"),
    "dense-float": (lambda: BlockLayout.from_dense(_ONES.float(), block_size=16), ValueError, "mask must be bool"),
    "dense-int8": (
        lambda: BlockLayout.from_dense(_ONES.numpy().astype(np.int8), block_size=16),
        ValueError,
        "mask must be bool",
    ),
    "dense-1-axis": (lambda: BlockLayout.from_dense(_ONES[0], block_size=16), ValueError, "mask must have 2, 3"),
    "dense-5-axes": (
        lambda: BlockLayout.from_dense(_ONES[None, None, None], block_size=16),
        ValueError,
        "mask must have",
    ),
    "dense-no-heads": (lambda: BlockLayout.from_dense(_ONES.expand(0, 40, 40), block_size=16), ValueError, "one head"),
    "predicate-none": (lambda: _predicate(None), TypeError, "fn must be a function"),
    "predicate-python-bool": (
        lambda: _predicate(lambda q_pos, kv_pos: True),
        TypeError,
        "fn must return a bool tensor",
    ),
    **{
        f"predicate-{name}": (functools.partial(_predicate, fn), ValueError, message)
        for name, fn, message in (
            ("and", lambda q_pos, kv_pos: q_pos >= kv_pos and kv_pos < 3, r"fn .* and, or, not, if.*use \(a\) & \(b\)"),
            ("if", lambda q_pos, kv_pos: q_pos < 3 if kv_pos < 3 else q_pos > 3, "fn .* torch.where"),
            ("chain", lambda q_pos, kv_pos: 0 <= q_pos - kv_pos < 5, r"fn .* \(0 <= d\) & \(d < 5\)"),
            ("max", lambda q_pos, kv_pos: max(q_pos, kv_pos) < 5, "fn .* torch.maximum"),
            ("int", lambda q_pos, kv_pos: int(q_pos) > 5, r"fn .* int\(\), float\(\)"),
            ("list", lambda q_pos, kv_pos: [True][q_pos], r"fn .* torch.as_tensor\(table\)"),
        )
    },
    "predicate-array": (
        lambda: _predicate(lambda q_pos, kv_pos: np.ones((40, 40), np.bool_)[q_pos, kv_pos]),
        TypeError,
        r"fn must return a bool tensor, got ndarray: .*torch.as_tensor\(table\)",
    ),
    "predicate-mask-mod": (
        lambda: _predicate(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
        TypeError,
        r"fn must take \(q_pos, kv_pos\), but <lambda> takes 4 arguments, as FlexAttention's mask_mod.*give heads=1",
    ),
    "predicate-2-of-4": (
        lambda: _predicate(heads=2),
        TypeError,
        r"fn must take \(batch, head, q_pos, kv_pos\), since heads= or batch= was given, but <lambda> takes 2",
    ),
    "predicate-1-argument": (
        lambda: _predicate(lambda q_pos: q_pos >= 0),
        TypeError,
        r"fn must take \(q_pos, kv_pos\): <lambda>",
    ),
    "predicate-int-tensor": (
        lambda: _predicate(lambda q_pos, kv_pos: q_pos * kv_pos),
        ValueError,
        "fn must return a bool tensor",
    ),
    "predicate-shape": (
        lambda: _predicate(lambda q_pos, kv_pos: _ONES),
        ValueError,
        "fn must return a tensor that broad",
    ),
    "heads-0": (lambda: _predicate(heads=0), ValueError, "heads must be at least 1"),
    "heads-float": (lambda: _predicate(heads=2.0), TypeError, "heads must be an int"),
    "heads-bool": (lambda: _predicate(heads=True), TypeError, "heads must be an int"),
    "batch-negative": (lambda: _predicate(batch=-1), ValueError, "batch must be at least 1"),
    "within-tensor": (lambda: _predicate(within=_ONES), TypeError, "within must be a BlockLayout"),
    "within-length": (
        lambda: _predicate(within=_GOOD, q_len=41),
        ValueError,
        "within: lengths must be equal, got 41 x 40 and 40 x 40",
    ),
    "within-blocks": (
        lambda: _predicate(within=_GOOD, block_size=32),
        ValueError,
        r"within: block_size must be equal, got \(32, 32\) and \(16, 16\)",
    ),
    "within-heads": (
        lambda: _predicate(heads=3, within=BlockLayout.from_dense(_ONES.expand(2, 40, 40), block_size=16)),
        ValueError,
        "within: batch and heads",
    ),
    "dedup-key-number": (lambda: _predicate(dedup_key=3), TypeError, "dedup_key must be a function"),
    "dedup-key-float": (
        lambda: _predicate(dedup_key=lambda row, col: row / 2),
        TypeError,
        "dedup_key must return integers",
    ),
    "dedup-key-shape": (
        lambda: _predicate(dedup_key=lambda row, col: row[1:]),
        ValueError,
        "dedup_key must return one number",
    ),
    "rows-float": (lambda: _by_index([0.0], [0]), ValueError, "rows must be integers, got float64"),
    "rows-bool": (lambda: _by_index(torch.tensor([True]), [0]), ValueError, "rows must be integers, got bool"),
    "rows-2-axes": (lambda: _by_index([[0]], [0]), ValueError, "rows must have one axis"),
    "rows-negative": (lambda: _by_index([0, -1], [0, 0]), ValueError, "rows must be .* got -1 at 1"),
    "rows-large": (lambda: _by_index([3], [0]), ValueError, "rows must be in 0 .. n_rows - 1 = 2, got 3"),
    "cols-string": (lambda: _by_index([0], ["0"]), ValueError, "cols must be integers"),
    "cols-large": (lambda: _by_index([0], [3]), ValueError, "cols must be in 0 .. n_cols - 1 = 2, got 3"),
    "cols-short": (lambda: _by_index([0, 1], [0]), ValueError, "rows and cols .* got 2 and 1"),
    "block-twice": (
        lambda: _by_index([2, 0, 2], [1, 0, 1]),
        ValueError,
        r"rows and cols .* block \(row 2, col 1\) is repeated",
    ),
    "no-such-block": (lambda: _by_index([0], [0], q_len=0), ValueError, "rows must be"),
    "first-length": (
        lambda: BlockLayout.from_ranges([0, 0], [1, 1, 1], **_SIZES),
        ValueError,
        "first must have one entry .* 3 rows",
    ),
    "first-negative": (
        lambda: BlockLayout.from_ranges([0, -1, 0], [1, 1, 1], **_SIZES),
        ValueError,
        "first must be .* got -1 at 1",
    ),
    "stop-large": (
        lambda: BlockLayout.from_ranges([0, 0, 0], [1, 4, 1], **_SIZES),
        ValueError,
        "stop must be .* got 4 at 1",
    ),
    "stop-float": (
        lambda: BlockLayout.from_ranges([0, 0, 0], [1.0, 2.0, 1.0], **_SIZES),
        ValueError,
        "stop must be integers",
    ),
    "block-mask-shape": (
        lambda: BlockLayout.from_block_mask(_ONES[:3, :4], **_SIZES),
        ValueError,
        r"mask must end in .* = \(3, 3\), got",
    ),
    "block-mask-of-tokens": (
        lambda: BlockLayout.from_block_mask(_ONES, **_SIZES),
        ValueError,
        r"mask must end in .*; BlockLayout.from_dense\(mask\) takes a mask of tokens",
    ),
    "block-mask-float": (
        lambda: BlockLayout.from_block_mask(torch.ones(3, 3), **_SIZES),
        ValueError,
        "mask must be bool",
    ),
    "scipy-array": (lambda: _sparse(np.eye(3)), TypeError, "matrix must be a scipy.sparse"),
    "scipy-shape": (lambda: _sparse(_eye(size=4)), ValueError, r"matrix must have shape .* \(3, 3\), got \(4, 4\)"),
    "scipy-of-tokens": (
        lambda: _sparse(_eye(size=40)),
        ValueError,
        r"matrix must have shape .*; blocksparse_flash.interop.from_scipy_csr\(matrix\) takes a matrix of tokens",
    ),
    "scipy-2": (lambda: _sparse(_eye(2.0)), ValueError, "matrix has a value 2"),
    "scipy-1-twice": (lambda: _sparse(_twice()), ValueError, "matrix has a value 2"),
    "scipy-of-partial": (lambda: _sparse(_GOOD.to_scipy()), ValueError, "matrix has a value 2"),
    "state-list": (lambda: BlockLayout.from_state_dict([]), TypeError, "state must be"),
    "state-missing": (lambda: _state(indices=None), ValueError, r"state .* missing \['indices'\]"),
    "state-unexpected": (lambda: _state(blocks=1), ValueError, r"state .* unexpected \['blocks'\]"),
    "state-corrupt": (lambda: _state(indices=_GOOD.indices + 1), ValueError, "indices must be in"),
    "state-number-tensor": (lambda: _state(q_len=torch.tensor(40.0)), TypeError, "q_len must be an int, got 40.0"),
    "state-size-tensor": (
        lambda: _state(block_size=torch.tensor([16, 16, 16])),
        ValueError,
        "block_size must be an int or",
    ),
    "state-length": (lambda: _state(q_len=400), ValueError, "indptr must have shape"),
    "head-large": (lambda: _GOOD.to_scipy(head=1), ValueError, "head must be in 0 .. 0"),
    "batch-float": (lambda: _GOOD.to_scipy(batch=0.0), TypeError, "batch must be an int"),
    "plan-causal": (
        lambda: _GOOD.plan("cpu", causal="no"),
        TypeError,
        r"causal must be True or False, got 'no' \(str\)",
    ),
    "plan-wait": (lambda: _GOOD.plan("cpu", non_blocking=1), TypeError, "non_blocking must be True or False, got 1"),
    "plan-tile": (lambda: _GOOD.plan("cpu", tile=32), ValueError, "tile must be 128, 64 or 16 tokens, got 32"),
    "plan-tile-long": (
        lambda: BlockLayout.from_blocks([0], [0], 2**30 + 1, 40, block_size=256).plan("cpu", tile=64),
        ValueError,
        r"tile must be 128 for more than 2\*\*30 tokens, got 64 for 1073741825 x 40",
    ),
    "to-causal": (lambda: _GOOD.to("cpu", causal=1), TypeError, "causal must be True or False, got 1"),
    "to-wait": (lambda: _GOOD.to("cpu", non_blocking="no"), TypeError, "non_blocking must be True or False, got 'no'"),
    "bias_index-causal": (
        lambda: _GOOD.bias_index("cpu", causal=None),
        TypeError,
        "causal must be True or False, got None",
    ),
    "q_len-negative": (lambda: _by_index([], [], q_len=-1), ValueError, "q_len must be in"),
    "q_len-float": (lambda: _by_index([], [], q_len=64.0), TypeError, "q_len must be an int, got 64.0"),
    "q_len-bool": (lambda: _by_index([], [], q_len=True), TypeError, "q_len must be an int"),
    "q_len-huge": (lambda: _by_index([], [], q_len=2**31), ValueError, "q_len must be in"),
    "kv_len-negative": (lambda: _by_index([], [], kv_len=-5), ValueError, "kv_len must be in .* got -5"),
    "kv_len-none": (lambda: _by_index([], [], kv_len=None), TypeError, "kv_len must be an int"),
}

_BAD_BLOCK_SIZES: list[tuple[Any, type[Exception]]] = [
    (20, ValueError),
    (0, ValueError),
    (8, ValueError),
    (-16, ValueError),
    (272, ValueError),
    ((16, 24), ValueError),
    ((512, 64), ValueError),
    ((16,), ValueError),
    ((16, 16, 16), ValueError),
    ((), ValueError),
    (True, TypeError),
    (1.5, TypeError),
    (64.0, TypeError),
    ((64, 64.0), TypeError),
    ((True, 64), TypeError),
    ("64", TypeError),
    (None, TypeError),
]


@pytest.mark.parametrize("name", _BAD)
def test_errors_name_the_wrong_argument(name: str) -> None:
    call, error, message = _BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("block_size", "error"), _BAD_BLOCK_SIZES, ids=str)
def test_every_constructor_refuses_bad_block_sizes(block_size: Any, error: type[Exception]) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: _direct(block_size=block_size),
        lambda: BlockLayout.from_dense(_ONES, block_size=block_size),
        lambda: _predicate(block_size=block_size),
        lambda: _by_index([0], [0], block_size=block_size),
        lambda: BlockLayout.from_ranges([], [], 40, 40, block_size=block_size),
        lambda: BlockLayout.from_block_mask(_ONES, 40, 40, block_size=block_size),
        lambda: BlockLayout.from_scipy(_eye(), 40, 40, block_size=block_size),
        lambda: _state(block_size=block_size) if block_size is not None else _direct(block_size=None),
    ]
    for call in calls:
        with pytest.raises(error, match="block_size must be"):
            call()


def test_errors_of_a_predicate_are_passed_on() -> None:
    def broken(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a fault of its own")

    with pytest.raises(RuntimeError, match=r"^a fault of its own$"):
        _predicate(broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        _predicate(lambda q_pos, kv_pos: q_pos + None)


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_a_long_evaluation_warns_and_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any, has_tqdm: bool
) -> None:
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(predicates, "MANY_PAIRS", 1000)
    monkeypatch.setattr(predicates, "_PAIRS_AT_ONCE", 256)
    caplog.set_level(logging.INFO, "blocksparse_flash")
    expected = (
        "from_predicate evaluates fn for 1,600 pairs; a builder of blocksparse_flash.masks, within= or dedup_key="
    )
    with pytest.warns(UserWarning, match=expected) as warned:
        layout = _predicate()
    assert len(warned) == 1 and warned[0].filename == __file__
    assert layout == BlockLayout.from_dense(_ONES.tril(), block_size=16)
    assert ("from_predicate" in capsys.readouterr().err) == has_tqdm
    assert ("from_predicate: 77 % of the pairs evaluated" in caplog.messages) == (not has_tqdm)


def test_within_dedup_key_and_few_pairs_avoid_the_warning(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _predicate()
    monkeypatch.setattr(predicates, "MANY_PAIRS", 1000)
    _predicate(within=_GOOD)
    _predicate(dedup_key=lambda row, col: row - col)
    _predicate(q_len=20)
    assert capsys.readouterr().err == ""


_IN_COMPILED_CODE: dict[str, Callable[[], BlockLayout]] = {
    "masks.local": lambda: masks.local(40, window=3, block_size=16),
    "masks.build": lambda: masks.build("butterfly | local(3)", 40, block_size=16),
    "from_predicate": _predicate,
    "from_dense": lambda: BlockLayout.from_dense(_ONES, block_size=16),
    "from_ranges": lambda: BlockLayout.from_ranges([0, 0, 0], [1, 2, 3], **_SIZES),
    "|": lambda: _GOOD | masks.local(40, window=3, block_size=16),
    "T": lambda: _GOOD.T,
    "stack_heads": lambda: BlockLayout.stack_heads([_GOOD, _GOOD]),
}


@pytest.mark.sweep(by=lambda name: {list(_IN_COMPILED_CODE).index(name) % 3})
@pytest.mark.parametrize("name", _IN_COMPILED_CODE)
def test_layouts_made_in_compiled_code_are_not_traced(name: str) -> None:
    """torch.compile breaks the graph there; with fullgraph=True its error says where to build the layout."""
    torch.compiler.reset()
    q = torch.randn(1, 2, 40, 16)

    def call(q: torch.Tensor) -> torch.Tensor:
        return attention(2 * q, q, q, _IN_COMPILED_CODE[name]()) + 1

    torch.testing.assert_close(torch.compile(call, backend="eager")(q), call(q))
    torch.compiler.reset()
    with pytest.raises(Exception, match="build this one outside the compiled function, once, and pass it in"):
        torch.compile(call, backend="eager", fullgraph=True)(q)


def test_no_mask_builder_is_traced() -> None:
    for name in masks.__all__:
        assert getattr(masks, name)._torchdynamo_disable, name
        assert pickle.loads(pickle.dumps(getattr(masks, name))) is getattr(masks, name)


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


def test_more_blocks_than_int32_counts_are_refused_before_they_are_made() -> None:
    """65536 x 65536 blocks are 2**32. Sizes are checked first, so this takes no time and no memory."""
    length = 1 << 20
    nothing = BlockLayout.from_blocks([], [], length, length, block_size=16)
    row = [0] * 65536
    diagonal = range_list(65536)
    wide = BlockLayout.from_blocks(diagonal, diagonal, length, length, block_size=16)
    per_head = BlockLayout.from_dense(torch.ones(2**16, 1, 1, dtype=torch.bool), block_size=16)
    per_batch = BlockLayout.from_dense(torch.ones(2**15, 1, 1, 1, dtype=torch.bool), block_size=16)
    for call in (
        lambda: ~nothing,
        lambda: ~wide,
        lambda: BlockLayout.from_ranges(row, [65536] * 65536, length, length, block_size=16),
        lambda: BlockLayout.from_predicate(lambda q_pos, kv_pos: q_pos == kv_pos, length, length, block_size=16),
        lambda: per_head | per_batch,
    ):
        with pytest.raises(ValueError, match=r"nnz must be below 2\*\*31"):
            call()


# ---- algebra


@pytest.mark.parametrize("op", [operator.or_, operator.and_, operator.sub], ids=lambda op: op.__name__)
@given(problem=problems(n_masks=2, axes_differ=True))
def test_operators_are_set_operations_on_pairs(op: Any, problem: Problem) -> None:
    block_size, (a, b) = problem.block_size, problem.masks
    expected = a & ~b if op is operator.sub else op(a, b)
    one, other = (BlockLayout.from_dense(mask, block_size=block_size) for mask in (a, b))
    found = op(one, other)
    assert_means(found, expected)
    direct = BlockLayout.from_dense(expected, block_size=block_size)
    assert found == direct and hash(found) == hash(direct)
    for layout, mask in ((one, a), (other, b)):
        assert_means(layout, mask)


@given(problems())
def test_complement_and_transpose_equal_those_of_the_mask(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    assert_means(~layout, ~mask)
    assert_means(layout.T, mask.swapaxes(2, 3))
    assert layout.T.block_size == block_size[::-1]
    assert ~~layout == layout.T.T == layout


@given(problems(n_masks=2, axes_differ=True))
def test_equal_means_equal_masks_over_equal_axes(problem: Problem) -> None:
    block_size, (a, b) = problem.block_size, problem.masks
    one, other = (BlockLayout.from_dense(mask, block_size=block_size) for mask in (a, b))
    assert (one == other) == np.array_equal(a, b)
    assert (one != other) == (not np.array_equal(a, b))
    if a.shape == b.shape:
        assert one == (one | other) & one == one - (other - one) == ~~one
        assert hash(one) == hash((one | other) & one)


def test_layouts_differ_if_axes_lengths_block_size_or_pairs_differ() -> None:
    mask = torch.ones(2, 2, 48, 48, dtype=torch.bool)
    layouts = [
        BlockLayout.from_dense(mask, block_size=16),
        BlockLayout.from_dense(mask[:1], block_size=16),
        BlockLayout.from_dense(mask[:, :1], block_size=16),
        BlockLayout.from_dense(mask[:1, :1], block_size=16),
        BlockLayout.from_dense(mask[0, 0], block_size=48),
        # one full block, with as many words per row of a bitmask as the one before
        BlockLayout.from_dense(mask[0, 0], block_size=(48, 64)),
        BlockLayout.from_dense(mask[0, 0], block_size=(16, 48)),
        BlockLayout.from_dense(mask[0, 0, :47], block_size=16),
        BlockLayout.from_dense(mask[0, 0, :, :47], block_size=16),
        BlockLayout.from_dense(mask[0, 0].triu(), block_size=16),
        BlockLayout.from_dense(mask[0, 0].tril(), block_size=16),
        BlockLayout.from_dense(mask[0, 0] & False, block_size=16),
    ]
    for i, one in enumerate(layouts):
        for j, other in enumerate(layouts):
            assert (one == other) == (i == j)
    assert len(set(layouts)) == len({hash(layout) for layout in layouts}) == len(layouts)
    assert layouts[0] != "a layout" and layouts[0] is not None


def test_incompatible_operands_are_refused() -> None:
    ones = torch.ones(2, 3, 48, 64, dtype=torch.bool)
    layout = BlockLayout.from_dense(ones, block_size=16)
    moved = BlockLayout._bare(*(getattr(layout, name).to("meta") for name in TENSORS), 48, 64, (16, 16))
    refused = [
        (BlockLayout.from_dense(ones[:, :, :47], block_size=16), "lengths must be equal, got 48 x 64 and 47 x 64"),
        (BlockLayout.from_dense(ones[..., :63], block_size=16), "lengths must be equal, got 48 x 64 and 48 x 63"),
        (BlockLayout.from_dense(ones, block_size=32), "block_size must be equal"),
        (BlockLayout.from_dense(ones[:, :2], block_size=16), "batch and heads must be equal or 1"),
        (BlockLayout.from_dense(ones[:1].expand(3, 3, 48, 64), block_size=16), "batch and heads must be equal or 1"),
        (moved, "both must be on one device, got cpu and meta"),
    ]
    for op, symbol in ((operator.or_, r"\|"), (operator.and_, "&"), (operator.sub, "-")):
        for other, message in refused:
            with pytest.raises(ValueError, match=f"layout {symbol} other: {message}"):
                op(layout, other)
        for foreign in (ones, 1, None):
            with pytest.raises(TypeError):
                op(layout, foreign)


# ---- other forms


def _through_a_file(layout: BlockLayout, name: str) -> BlockLayout:
    """Saves and loads the state dict as documented; on disk, since safetensors reads only files there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if path.suffix == ".pt":
            torch.save(layout.state_dict(), path)
            return BlockLayout.from_state_dict(torch.load(path, weights_only=True))
        safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
        safetensors.save_file({key: torch.as_tensor(value) for key, value in layout.state_dict().items()}, path)
        return BlockLayout.from_state_dict(safetensors.load_file(path))


_COPIES: dict[str, Callable[[BlockLayout], BlockLayout]] = {
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "state-dict": lambda layout: BlockLayout.from_state_dict(layout.state_dict()),
    "torch-load": lambda layout: _through_a_file(layout, "layout.pt"),
    "safetensors": lambda layout: _through_a_file(layout, "layout.safetensors"),
    "module": lambda layout: copy.deepcopy(_Holder(layout)).layout,
    "replace": dataclasses.replace,
}


class _Holder(torch.nn.Module):
    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout = layout


@pytest.mark.parametrize("way", _COPIES)
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_copies_are_equal_and_hash_alike(case: cases.Case, way: str) -> None:
    layout = case.build()
    number = hash(layout)
    layout.plan("cpu")
    copied = _COPIES[way](layout)
    assert copied is not layout and copied == layout and hash(copied) == number
    assert_valid(copied)
    # caches stay behind
    assert copied._cache.keys() == {
        "plans",
        "bias_indices",
        "gather_indices",
        "orders",
        "axes",
        "rows",
        "number",
        "hash",
    }
    assert number_of(copied) != number_of(layout) and numbered(number_of(copied)) is copied
    assert not copied._cache["plans"] and not copied._cache["bias_indices"]
    assert (copied | layout) == layout


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_zoo_layouts_survive_other_block_sizes(case: cases.Case) -> None:
    layout = case.build()
    for block_size in (128, 16, (48, 80)):
        other = layout.with_block_size(block_size)
        assert other == BlockLayout.from_dense(layout.to_dense(), block_size=block_size)
        assert other.with_block_size(layout.block_size) == layout


def test_hashes_are_the_same_in_another_process() -> None:
    program = (
        "from blocksparse_flash import BlockLayout; "
        "print(hash(BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 40, block_size=16)))"
    )
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=_ROOT)
    assert int(other.stdout) == hash(_GOOD)


def test_layouts_are_frozen() -> None:
    layout = BlockLayout.from_blocks([0], [0], 64, 64, block_size=64)
    for name in (*TENSORS, "q_len", "kv_len", "block_size", "anything"):
        with pytest.raises(AttributeError):
            setattr(layout, name, 1)
    with pytest.raises(AttributeError):
        del layout.indices


@given(problems())
def test_repr_has_counts_and_a_picture(problem: Problem) -> None:
    block_size, mask = problem.block_size, problem.mask
    layout = BlockLayout.from_dense(mask, block_size=block_size)
    lines = repr(layout).splitlines()
    assert f"{layout.q_len} x {layout.kv_len} tokens" in lines[0] and str(layout.block_size) in lines[0]
    assert f"nnz={layout.nnz}," in lines[1] and f" {len(layout.bitmasks)} distinct bitmasks" in lines[1]
    symbols = {0: ".", 1: "#", 2: "+"}
    rows = ["".join(symbols[value] for value in row) for row in layout.to_scipy().toarray().tolist()]
    assert lines[3:] == (rows if layout.n_cols else [])


def test_repr_of_a_large_layout_is_small() -> None:
    """4096 tokens in blocks of 16 are 256 x 256 blocks; a character stands for 8 x 8 of them."""
    rows = range_list(256)
    layout = BlockLayout.from_ranges(
        [0] * 256, [min(8 * (row // 8) + 9, 256) for row in rows], 4096, 4096, block_size=16
    )
    lines = repr(layout).splitlines()
    assert "a character is 8 x 8 blocks" in lines[2]
    assert lines[3:] == ["#" * (row + 1) + "+" * (row < 31) + "." * (30 - row) for row in range(32)]


# ---- plans and devices


@pytest.mark.parametrize("tile", [128, 64])
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_the_causal_plan_equals_that_of_the_causal_mask(case: cases.Case, tile: int) -> None:
    layout = case.build()
    mask = layout.to_dense()
    mask &= torch.ones(mask.shape[2:], dtype=torch.bool).tril(layout.kv_len - layout.q_len)
    expected = BlockLayout.from_dense(mask, block_size=layout.block_size).plan("cpu", tile=tile)
    for one, other in zip(layout.plan("cpu", causal=True, tile=tile), expected, strict=True):
        assert torch.equal(one, other)
    again = copy.copy(layout).plan(torch.device("cpu"), tile=tile)
    for one, other in zip(layout.plan("cpu", tile=tile), again, strict=True):
        assert torch.equal(one, other)


def test_plans_are_cached() -> None:
    layout = cases.LAYOUTS[0].make()
    plan, causal = layout.plan("cpu"), layout.plan("cpu", causal=True)
    assert layout.plan(torch.device("cpu")) is plan and layout.plan("cpu", causal=True) is causal
    assert causal is not plan
    fine = layout.plan("cpu", tile=64)
    assert layout.plan(torch.device("cpu"), tile=64) is fine and layout.plan("cpu", tile=128) is plan
    assert (plan.tile, fine.tile) == (128, 64)
    # nothing is beyond the diagonal, so the causal plan is the plan
    diagonal = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 200, 200, block_size=64)
    assert diagonal.plan("cpu", causal=True) is diagonal.plan("cpu")
    assert diagonal.plan("cpu", causal=True, tile=64) is diagonal.plan("cpu", tile=64)


def test_moving_keeps_the_plans_of_every_tile(device: torch.device) -> None:
    layout = copy.copy(cases.LAYOUTS[-1].build())
    causal, fine = (layout.plan("meta", **options) for options in ({"causal": True}, {"tile": 64}))
    moved = layout.to("meta")
    assert moved.plan("meta", causal=True) is causal and moved.plan("meta", tile=64) is fine and fine.tile == 64
    # a plan of the other tile is not taken for it
    assert layout.plan(device).tile == 128 and layout.plan(device, tile=64).tile == 64
    assert layout.plan(device, tile=64, causal=True).tile == 64


def test_torch_compile_needs_the_plan_of_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout.from_blocks([0, 0], [0, 1], 256, 256, block_size=128)
    layout.plan("cpu")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    message = r"no plan with tile=64 for cpu and torch.compile cannot make one: call layout.plan\(q.device, tile=64"
    with pytest.raises(ValueError, match=message + r"\) before"):
        layout.plan("cpu", tile=64)
    with pytest.raises(ValueError, match=message + r", causal=True\) before"):
        layout.plan("cpu", tile=64, causal=True)
    with pytest.raises(ValueError, match=r"no plan for cpu and .*: call layout\.to\(q\.device, causal=True\) before"):
        layout.plan("cpu", causal=True)


def test_to_moves_tensors_and_plan(device: torch.device) -> None:
    layout = copy.copy(cases.LAYOUTS[-1].build())
    moved = layout.to(device)
    assert all(getattr(moved, name).device == moved.device == device for name in TENSORS)
    assert (device, False, 128) in moved._cache["plans"]
    assert all(tensor.device == device for tensor in moved.plan(device))
    assert moved == layout and hash(moved) == hash(layout)
    assert moved.to("cpu") == layout and layout.to("cpu") is layout
    assert (moved | moved).device == moved.T.device == (~moved).device == moved.to_dense().device == device
    assert BlockLayout.from_state_dict(moved.state_dict()).device == device


# ---- scale


def test_a_million_tokens_need_memory_only_for_their_blocks() -> None:
    """8192 block rows: butterfly, window and first tokens. N x N bits would be 128 GiB, so finishing is the test."""
    length = 1 << 20
    rows = np.arange(length // 128)
    partners = np.stack([rows, *(rows ^ (1 << factor) for factor in range(13))], axis=1)
    butterfly = BlockLayout.from_blocks(rows.repeat(14), partners.reshape(-1), length, length, block_size=128)
    band = BlockLayout.from_ranges(
        np.maximum(rows - 2, 0), np.minimum(rows + 3, len(rows)), length, length, block_size=128
    )
    local = BlockLayout.from_predicate(
        lambda q_pos, kv_pos: (q_pos - kv_pos).abs() <= 200,
        length,
        length,
        block_size=128,
        within=band,
        dedup_key=lambda row, col: row - col,
    )
    layout = butterfly | local | local.T
    assert butterfly.nnz == 14 * 8192 and layout.nnz > butterfly.nnz
    assert len(local.bitmasks) == 4
    assert layout - local == butterfly - local
    assert (layout & local) == local
    assert layout.T == layout
    assert len(repr(layout)) < 2000
