"""support/double_loop.py detects one wrong pair."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import BlockLayout
from tests.support.double_loop import assert_attends, assert_heads_attend, mask_of


def test_mask_of_equals_the_predicate():
    expected = torch.tensor([[True, False, False], [True, True, False]])
    assert torch.equal(mask_of(lambda q_pos, kv_pos: kv_pos <= q_pos, 2, 3), expected)


@pytest.mark.parametrize("pair", [(0, 0), (17, 40), (49, 69)])
def test_one_wrong_pair_is_detected(pair):
    mask = torch.ones(50, 70, dtype=torch.bool)
    assert_attends(BlockLayout.from_dense(mask, block_size=16), lambda q_pos, kv_pos: True)
    mask[pair] = False
    with pytest.raises(AssertionError, match=f"query {pair[0]}, key {pair[1]}, which should attend"):
        assert_attends(BlockLayout.from_dense(mask, block_size=16), lambda q_pos, kv_pos: True)


def test_a_mask_per_head_is_detected():
    layout = BlockLayout.from_dense(torch.ones(2, 32, 32, dtype=torch.bool), block_size=16)
    with pytest.raises(AssertionError, match="all batches and heads"):
        assert_attends(layout, lambda q_pos, kv_pos: True)


def test_a_wrong_pair_of_one_head_is_detected():
    mask = torch.ones(2, 32, 40, dtype=torch.bool)
    everything = [lambda q_pos, kv_pos: True] * 2
    assert_heads_attend(BlockLayout.from_dense(mask, block_size=16), everything)
    mask[1, 20, 39] = False
    with pytest.raises(AssertionError, match="query 20, key 39, of head 1, which should attend"):
        assert_heads_attend(BlockLayout.from_dense(mask, block_size=16), everything)
    with pytest.raises(AssertionError, match="3 heads expected"):
        assert_heads_attend(BlockLayout.from_dense(mask, block_size=16), [*everything, everything[0]])
