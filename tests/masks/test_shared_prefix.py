"""masks.shared_prefix: a continuation sees the prefix and itself only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import masks
from tests.masks.test_documents import document_of
from tests.support.double_loop import assert_attends


def attends(q_pos: int, kv_pos: int, cu_seqlens: list[int], causal: bool) -> bool:
    is_seen = document_of(cu_seqlens, kv_pos) in (0, document_of(cu_seqlens, q_pos))
    # the prefix comes before its continuations, so it does not see them
    return is_seen and (kv_pos <= q_pos or not causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64)])
@pytest.mark.parametrize("seed", range(5))
def test_double_loop(seed, block_size, causal):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 70, 1 + seed)
    # a prefix of nothing, of less than a block, of several
    lengths[0] = [0, 5, 64, 100, 150][seed]
    cu_seqlens = [0, *np.cumsum(lengths).tolist()]
    layout = masks.shared_prefix(cu_seqlens, causal=causal, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q, kv, cu_seqlens, causal))


@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("prefix", [16 * k + more for k in (1, 3, 4) for more in (-1, 0, 1)])
def test_a_prefix_that_ends_about_the_edge_of_a_block(prefix, block_size):
    cu_seqlens = [0, prefix, prefix + 20, 130]
    layout = masks.shared_prefix(cu_seqlens, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q, kv, cu_seqlens, True))


def test_without_continuations_it_is_the_prefix():
    assert masks.shared_prefix([0, 300]) == masks.causal(300)
    assert masks.shared_prefix([0]).shape == (1, 1, 0, 0)
    assert masks.shared_prefix(torch.tensor([0, 100, 300])) == masks.shared_prefix([0, 100, 300])


@pytest.mark.parametrize(
    ("cu_seqlens", "arguments", "error", "message"),
    [
        ([], {}, ValueError, "cu_seqlens: expected at least one entry"),
        ([1, 5], {}, ValueError, "cu_seqlens: expected 0 as the first entry, got 1"),
        ([0, 5, 3], {}, ValueError, "cu_seqlens: expected entries that never decrease"),
        ([0, 5.0], {}, TypeError, "cu_seqlens: expected ints"),
        # of one sequence only
        (torch.tensor([[0, 2, 4]]), {}, ValueError, r"cu_seqlens: expected one axis, got shape \(1, 3\)"),
        ([[0, 2, 4]], {}, TypeError, r"cu_seqlens: expected ints, got \[0, 2, 4\]"),
        ([0, 5], {"causal": "no"}, TypeError, "causal: expected a bool"),
    ],
)
def test_refused(cu_seqlens, arguments, error, message):
    with pytest.raises(error, match=message):
        masks.shared_prefix(cu_seqlens, **arguments)
