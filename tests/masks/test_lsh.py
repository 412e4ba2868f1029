"""masks.lsh: a pair attends if and only if its buckets are equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import masks
from tests.support.double_loop import assert_attends, assert_heads_attend


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64)])
@pytest.mark.parametrize("seed", range(6))
def test_double_loop(seed, block_size):
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(length) for length in random.integers(1, 260, 2))
    # few large or many small buckets; sorted or not; some without queries or without keys
    n_buckets = [1, 4, 60][seed % 3]
    queries, keys = random.integers(-3, n_buckets, q_len), random.integers(-2, n_buckets + 2, kv_len)
    if seed % 2:
        queries, keys = np.sort(queries), np.sort(keys)
    layout = masks.lsh(torch.from_numpy(queries), keys, block_size=block_size)
    assert_attends(layout, lambda q, kv: queries[q] == keys[kv])


@pytest.mark.parametrize("of_queries", [1, 3])
@pytest.mark.parametrize("of_keys", [1, 3])
def test_every_head_has_its_own(of_queries, of_keys):
    random = np.random.default_rng(0)
    queries, keys = random.integers(0, 9, (of_queries, 90)), random.integers(0, 9, (of_keys, 120))
    layout = masks.lsh(queries, torch.from_numpy(keys), block_size=32)
    heads = [
        lambda q, kv, head=head: queries[head % of_queries, q] == keys[head % of_keys, kv]
        for head in range(max(of_queries, of_keys))
    ]
    assert_heads_attend(layout, heads)


def test_without_keys_queries_are_their_own():
    buckets = torch.randint(0, 5, (2, 200), generator=torch.Generator().manual_seed(0))
    assert masks.lsh(buckets) == masks.lsh(buckets, buckets)
    assert masks.lsh(buckets[0].int()) == masks.lsh(buckets[0], buckets[0])


def test_sorted_buckets_are_documents():
    buckets = np.repeat([7, -2, 9], [100, 128, 50])
    assert masks.lsh(buckets) == masks.documents([0, 100, 228, 278])


def test_sorting_makes_it_blocky():
    buckets = np.random.default_rng(0).integers(0, 64, 16_384)
    layout = masks.lsh(np.sort(buckets))
    # 64 buckets of two blocks each: the buckets, and where they meet
    assert layout.density < 0.04
    assert masks.lsh(buckets).density > 0.9


def test_nothing_has_no_blocks():
    assert masks.lsh(np.empty(0, dtype=np.int64)).shape == (1, 1, 0, 0)
    assert masks.lsh(np.zeros(100, dtype=np.int64), np.ones(50, dtype=np.int64)).nnz == 0


@pytest.mark.parametrize(
    ("buckets", "error", "message"),
    [
        (([1, 2],), TypeError, "q_buckets: expected ints in an array or tensor, got list"),
        ((np.zeros(4),), TypeError, "q_buckets: expected ints, got ndarray of float64"),
        ((torch.zeros(4).bool(),), TypeError, "q_buckets: expected ints, got Tensor of torch.bool"),
        ((torch.zeros(1, 2, 3).int(),), ValueError, r"q_buckets: expected shape \(length,\) or \(heads, length\), got"),
        ((torch.zeros(0, 3).int(),), ValueError, "q_buckets: expected shape"),
        ((np.zeros(4, int), np.zeros(4)), TypeError, "kv_buckets: expected ints"),
        ((np.zeros((2, 4), int), np.zeros((3, 4), int)), ValueError, "equally many heads, .* got 2 and 3"),
    ],
)
def test_refused(buckets, error, message):
    with pytest.raises(error, match=message):
        masks.lsh(*buckets)
