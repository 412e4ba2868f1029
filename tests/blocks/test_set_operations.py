"""Stacking, picking and assert_causal of layouts; test_layout.py has the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks import set_operations
from tests.support import cases
from tests.support.dense_masks import Problem, problems
from tests.support.meaning import assert_means


def dense(mask: np.ndarray | torch.Tensor, block_size: int | tuple[int, int] = 16) -> BlockLayout:
    return BlockLayout.from_dense(mask, block_size=block_size)


@given(problems(n_masks=2, axes_differ=True))
def test_xor_is_that_of_sets_of_pairs(problem: Problem) -> None:
    a, b = problem.masks
    one, other = dense(a, problem.block_size), dense(b, problem.block_size)
    assert_means(one ^ other, a ^ b)
    assert one ^ other == (one | other) - (one & other) == other ^ one
    if a.shape == b.shape:
        assert (one ^ other) ^ other == one and (one ^ one).nnz == 0


@given(problems(n_masks=3, axes_differ=True))
def test_stacks_are_concatenations(problem: Problem) -> None:
    masks, block_size = problem.masks, problem.block_size
    layouts = [dense(mask, block_size) for mask in masks]
    for axis, stack in ((1, BlockLayout.stack_heads), (0, BlockLayout.stack_batches)):
        other = 1 - axis
        shared = max(mask.shape[other] for mask in masks)
        repeated = [mask if mask.shape[other] == shared else mask.repeat(shared, other) for mask in masks]
        expected = np.concatenate(repeated, axis)
        stacked = stack(layouts)
        assert_means(stacked, expected)
        assert stacked == dense(expected, block_size) == stack(layout for layout in layouts)


@given(problems())
def test_heads_and_batches_taken_apart_stack_up_again(problem: Problem) -> None:
    layout = dense(problem.mask, problem.block_size)
    for index in range(layout.shape[1]):
        assert_means(layout.head(index), problem.mask[:, index : index + 1])
    for index in range(layout.shape[0]):
        assert_means(layout.batch(index), problem.mask[index : index + 1])
    assert BlockLayout.stack_heads(layout.head(i) for i in range(layout.shape[1])) == layout
    assert BlockLayout.stack_batches(layout.batch(i) for i in range(layout.shape[0])) == layout


@given(problems())
def test_counts_are_those_of_the_pairs(problem: Problem) -> None:
    layout = dense(problem.mask, problem.block_size)
    found, frame = layout._block_list(), layout._frame
    assert set_operations.counts_of_pairs(found, frame).sum() == problem.mask.sum()
    if problem.mask.any():
        assert set_operations.first_pair(found, frame) == tuple(np.argwhere(problem.mask)[0].tolist())


def first_leak(mask: np.ndarray) -> list[int] | None:
    """One pair at a time, in the order in which they are named."""
    batch, heads, q_len, kv_len = mask.shape
    for b in range(batch):
        for h in range(heads):
            for q in range(q_len):
                for kv in range(kv_len):
                    if mask[b, h, q, kv] and kv > q + kv_len - q_len:
                        return [b, h, q, kv]
    return None


@given(problems())
def test_assert_causal_names_the_first_leak(problem: Problem) -> None:
    layout, leak = dense(problem.mask, problem.block_size), first_leak(problem.mask)
    layout._causal().assert_causal()
    if leak is None:
        layout.assert_causal()
        return
    batch, head, query, key = leak
    with pytest.raises(ValueError, match=f"in batch {batch}, head {head} query {query} attends to key {key}, "):
        layout.assert_causal()


@pytest.mark.parametrize(("q_len", "kv_len"), [(48, 48), (40, 100), (100, 40), (1, 33)])
def test_one_pair_too_many_is_seen(q_len: int, kv_len: int) -> None:
    """The first key of the future of every query in turn, aligned bottom-right."""
    mask = torch.ones(2, 3, q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    dense(mask).assert_causal()
    for query in range(q_len - 1):
        leaking = mask.clone()
        key = max(0, query + 1 + kv_len - q_len)
        leaking[1, 2, query, key] = True
        with pytest.raises(ValueError, match=f"in batch 1, head 2 query {query} attends to key {key}, "):
            dense(leaking).assert_causal()


# shifts with which the diagonal masks one pair of a block, none, or all but one
@pytest.mark.parametrize("lengths", [(50, 64), (49, 64), (48, 65), (64, 50), (70, 203)])
@pytest.mark.parametrize("block_size", [16, (32, 16)])
def test_the_causal_part_is_that_of_the_pairs(lengths: tuple[int, int], block_size: int | tuple[int, int]) -> None:
    below = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
    assert dense(torch.ones(lengths, dtype=torch.bool), block_size)._causal() == dense(below, block_size)


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_zoo_layouts_stack(case: cases.Case) -> None:
    layout = case.build()
    both = BlockLayout.stack_heads([layout, ~layout])
    assert_means(both, torch.cat([layout.to_dense(), ~layout.to_dense()], 1).numpy())
    assert both.head(0) == layout.head(0) and both.head(layout.shape[1]) == ~layout.head(0)


_ONES = torch.ones(2, 3, 40, 40, dtype=torch.bool)
_GOOD = dense(_ONES)
_META = BlockLayout._bare(
    *(getattr(_GOOD, name).to("meta") for name in ("indptr", "indices", "bitmask_ids", "bitmasks")), 40, 40, (16, 16)
)

_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "stack-nothing": (
        lambda: BlockLayout.stack_heads([]),
        ValueError,
        "layouts must hold at least one BlockLayout, got none",
    ),
    "stack-number": (lambda: BlockLayout.stack_heads(3), TypeError, "layouts must be BlockLayouts in a list, got int"),
    "stack-one": (
        lambda: BlockLayout.stack_batches(_GOOD),
        TypeError,
        "layouts must be BlockLayouts in a list, got BlockLayout",
    ),
    "stack-mask": (lambda: BlockLayout.stack_batches([_GOOD, _ONES]), TypeError, "layouts must be .* got Tensor"),
    "stack-lengths": (
        lambda: BlockLayout.stack_heads([_GOOD, dense(_ONES[..., 1:])]),
        ValueError,
        "layouts: lengths must be equal, got 40 x 40 and 40 x 39",
    ),
    "stack-block-sizes": (
        lambda: BlockLayout.stack_heads([_GOOD, dense(_ONES, 32)]),
        ValueError,
        r"layouts: block_size must be equal, got \(16, 16\) and \(32, 32\): use .with_block_size",
    ),
    "stack-devices": (
        lambda: BlockLayout.stack_heads([_GOOD, _META]),
        ValueError,
        "layouts: both must be on one device, got cpu and meta",
    ),
    "stack-heads-of-other-batches": (
        lambda: BlockLayout.stack_heads([_GOOD, dense(_ONES.repeat(2, 1, 1, 1))]),
        ValueError,
        r"layouts: batch and heads must be equal or 1, got \(batch, heads\) \(2, 1\) and \(4, 1\)",
    ),
    "stack-batches-of-other-heads": (
        lambda: BlockLayout.stack_batches([_GOOD, dense(_ONES[:, :2])]),
        ValueError,
        r"layouts: batch and heads .* \(1, 3\) and \(1, 2\)",
    ),
    "head-large": (
        lambda: _GOOD.head(3),
        ValueError,
        r"index must be in 0 .. 2, got 3; the layout has shape \(2, 3, 40, 40\)",
    ),
    "head-negative": (lambda: _GOOD.head(-1), ValueError, "index must be in 0 .. 2, got -1"),
    "head-slice": (lambda: _GOOD.head(slice(1)), TypeError, "index must be an int, got slice"),
    "batch-large": (lambda: _GOOD.batch(2), ValueError, "index must be in 0 .. 1, got 2"),
    "batch-bool": (lambda: _GOOD.batch(True), TypeError, "index must be an int, got True"),
    "xor-lengths": (lambda: _GOOD ^ dense(_ONES[:, :, 1:]), ValueError, r"layout \^ other: lengths must be equal"),
    "xor-tensor": (lambda: _GOOD ^ _ONES, TypeError, "unsupported operand"),
}


@pytest.mark.parametrize("name", _BAD)
def test_wrong_calls_are_refused_by_name(name: str) -> None:
    call, error, message = _BAD[name]
    with pytest.raises(error, match=message):
        call()
