"""Tensors packed into one copy arrive unchanged, each with its own storage."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masks
from blocksparse_flash.blocks import transfer
from blocksparse_flash.plan.host_builder import order_of
from blocksparse_flash.plan_format import Plan


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6))
def test_what_is_packed_is_unpacked(shapes: list[list[int]]) -> None:
    tensors = [torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for shape in shapes]
    packed, places = transfer.pack(tensors)
    copies = transfer.unpack(packed, places)
    start = packed.data_ptr()
    del packed
    # only what is new: a full collection looks at every object of the test process, half a second for each example
    gc.collect(0)
    for tensor, found in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, found) and found.dtype == torch.int32 and found.is_contiguous()
        # kernels are compiled for 16-byte aligned pointers; torch.compile knows no offsets
        assert found.storage_offset() == 0 and (not found.numel() or (found.data_ptr() - start) % 128 == 0)


def test_one_of_many_is_stored_alone() -> None:
    """As views, pickle would write the whole packed tensor for each."""
    large, small = transfer.unpack(*transfer.pack([torch.ones(10_000, dtype=torch.int32), torch.arange(3).int()]))
    assert small.untyped_storage().nbytes() == 12 and len(pickle.dumps(small)) < 2000
    assert torch.equal(pickle.loads(pickle.dumps(small)), small) and large.sum() == 10_000


def test_other_types_are_not_packed() -> None:
    with pytest.raises(AssertionError, match="int64"):
        transfer.pack([torch.zeros(2, dtype=torch.int64)])


def test_arrays_are_sent_one_right_after_the_other() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int32), np.array([7], np.int32)]
    assert transfer.sent_flat(arrays, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_plans_packed_are_plans() -> None:
    plan = masks.local(1000, window=200).plan("cpu")
    for tensor, found in zip(plan, Plan(*transfer.unpack(*transfer.pack(plan))), strict=True):
        assert torch.equal(tensor, found)


@given(st.lists(st.integers(0, 2**34 - 1)), st.sampled_from([3, 2**16, 2**16 + 1, 2**34]))
def test_tiles_are_ordered_as_by_a_stable_sort(values: list[int], limit: int) -> None:
    array = np.array(values, dtype=np.int64) % limit
    position = np.arange(len(array))
    assert np.array_equal(position[order_of(array, limit)], np.argsort(array, kind="stable"))
