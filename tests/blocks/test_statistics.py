"""Statistics of a layout compared with counts, searches and eigenvalues of the dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks import block_list, statistics
from tests.support import cases
from tests.support.dense_masks import Problem, problems


def blocks_of(mask: np.ndarray, block_size: tuple[int, int]) -> np.ndarray:
    """How many pairs attend in each block, and how many exist: int (2, batch, heads, n_rows, n_cols)."""
    n_rows, n_cols = (-(-length // side) for length, side in zip(mask.shape[2:], block_size, strict=True))
    counts = np.zeros((2, *mask.shape[:2], n_rows, n_cols), int)
    for row, col in np.ndindex(n_rows, n_cols):
        block = mask[:, :, row * block_size[0] :, col * block_size[1] :][..., : block_size[0], : block_size[1]]
        counts[0, :, :, row, col], counts[1, :, :, row, col] = block.sum((2, 3)), block[0, 0].size
    return counts


def hops_of(joined: np.ndarray) -> int | None:
    """Powers of a bool matrix until they are full; None if they stop growing before."""
    reached, hops = np.eye(len(joined), dtype=bool), 0
    while not reached.all():
        further = reached | (reached.astype(int) @ joined.astype(int) > 0)
        if (further == reached).all():
            return None
        reached, hops = further, hops + 1
    return hops


def gap_of(joined: np.ndarray) -> float:
    """From the definition, by dense eigenvalues of the Laplacian."""
    either = (joined | joined.T).astype(float)
    if len(either) == 1:
        return 1.0
    if hops_of(either > 0) is None:
        return 0.0
    degree = either.sum(1)
    laplacian = np.eye(len(either)) - either / np.sqrt(np.outer(degree, degree))
    return float(np.sort(np.linalg.eigvalsh(laplacian))[1])


@given(problems())
def test_numbers_are_those_of_the_mask(problem: Problem) -> None:
    mask, (block_q, block_kv) = problem.mask, problem.block_size
    layout = BlockLayout.from_dense(mask, block_size=problem.block_size)
    found = layout.describe(head_dim=24, element_bytes=4)
    attending, existing = blocks_of(mask, problem.block_size)
    is_stored = attending > 0
    nnz, n_blocks = int(is_stored.sum()), is_stored.size
    assert (found.batch, found.heads, found.q_len, found.kv_len) == mask.shape == layout.shape
    assert (found.nnz, found.density, found.pairs) == (nnz, layout.density, mask.sum())
    assert found.pair_density == pytest.approx(mask.mean() if mask.size else 0.0)
    assert found.full_share == pytest.approx((attending == existing)[is_stored].mean() if nnz else 0.0)
    assert found.distinct_bitmasks == len(layout.bitmasks)
    tensors = (layout.indptr, layout.indices, layout.bitmask_ids, layout.bitmasks)
    assert found.metadata_bytes == sum(tensor.nbytes for tensor in tensors)
    # two products of a multiplication and an addition for each pair and number
    assert found.flops == nnz * block_q * block_kv * 24 * 2 * 2
    assert found.dense_flops == n_blocks * block_q * block_kv * 24 * 2 * 2
    # queries and outputs; keys and values
    ends = 2 * mask[..., 0].size if mask.shape[3] else 2 * mask.shape[0] * mask.shape[1] * mask.shape[2]
    assert found.bytes == 24 * 4 * (ends + 2 * nnz * block_kv)
    assert found.dense_bytes == 24 * 4 * (ends + 2 * n_blocks * block_kv)
    for side, work in ((found.rows, is_stored.sum(3)), (found.cols, is_stored.sum(2))):
        assert side.most == work.max(initial=0) and side.idle == (work == 0).sum()
        assert side.mean == pytest.approx(work.mean() if work.size else 0.0)
        assert side.imbalance == pytest.approx(work.max() / work.mean() if work.any() else 1.0)
    assert found.idle_queries == (~mask.any(3)).sum() and found.idle_keys == (~mask.any(2)).sum()
    assert str(found).count("\n") == 8


@given(problems())
def test_small_chunks_give_the_same_description(problem: Problem) -> None:
    layout = BlockLayout.from_dense(problem.mask, block_size=problem.block_size)
    whole = layout.describe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_list, "_CHUNK_BYTES", 500)
        assert layout.describe() == whole


@pytest.mark.parametrize("case", [case for case in cases.LAYOUTS if case.build().q_len == case.build().kv_len], ids=str)
def test_mixing_is_that_of_the_worst_batch(case: cases.Case) -> None:
    layout = case.build()
    mixing = layout.describe().mixing
    assert mixing is not None and not mixing.is_sampled
    # unequal sides become squares of the longer one
    side = max(layout.block_size)
    attending = blocks_of(layout.to_dense().numpy(), (side, side))[0]
    graphs = (attending > 0).any(axis=1)
    every = [hops_of(graph) for graph in graphs]
    assert mixing.hops == (None if None in every else max(every))
    assert mixing.gap == pytest.approx(min(map(gap_of, graphs)), abs=1e-12)


def ring(n_blocks: int, *far: int) -> BlockLayout:
    """Each block joined to itself, its neighbors and those `far` away, on a ring."""
    rows = np.arange(n_blocks)
    cols = np.concatenate([(rows + step) % n_blocks for step in sorted({0, 1, -1, *far})])
    return BlockLayout.from_blocks(
        np.tile(rows, len(cols) // n_blocks), cols, 16 * n_blocks, 16 * n_blocks, block_size=16
    )


@pytest.mark.parametrize(("n_blocks", "restarts"), [(8, 100), (64, 100), (65, 100), (100, 1), (400, 100), (400, 1)])
def test_known_graphs(monkeypatch: pytest.MonkeyPatch, n_blocks: int, restarts: int) -> None:
    """A ring of n is n // 2 hops wide, and its eigenvalues are (1 + 2 cos(2 pi k / n)) / 3.

    64 and 65: all eigenvalues, and two by Lanczos. One restart: Lanczos gives way to the inverse.
    """
    monkeypatch.setattr(statistics, "_LANCZOS_RESTARTS", restarts)
    mixing = ring(n_blocks).describe().mixing
    assert (mixing.hops, mixing.is_sampled) == (n_blocks // 2, False)
    assert mixing.gap == pytest.approx((2 - 2 * np.cos(2 * np.pi / n_blocks)) / 3, rel=1e-6)


def test_many_links_make_few_hops_and_a_wide_gap() -> None:
    everything = BlockLayout.from_dense(np.ones((2048, 2048), bool), block_size=16).describe().mixing
    assert everything.hops == 1 and everything.gap == pytest.approx(1)
    near, far = ring(100).describe().mixing, ring(100, 10, -10).describe().mixing
    assert far.hops < near.hops and far.gap > near.gap


def test_heads_mix_together_and_batches_do_not() -> None:
    upper = BlockLayout.from_blocks([0, 0], [0, 1], 32, 32, block_size=16)
    assert upper.describe().mixing.hops is None
    assert BlockLayout.stack_heads([upper, upper.T]).describe().mixing.hops == 1
    assert BlockLayout.stack_batches([upper, upper | upper.T]).describe().mixing.hops is None
    assert BlockLayout.stack_batches([upper | upper.T, upper | upper.T]).describe().mixing.hops == 1


def test_what_is_not_square_does_not_mix() -> None:
    assert BlockLayout.from_blocks([0], [0], 32, 48, block_size=16).describe().mixing is None
    assert BlockLayout.from_blocks([], [], 0, 0, block_size=16).describe().mixing == (0, False, 1.0)


def test_large_graphs_are_sampled_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ring(100)
    monkeypatch.setattr(statistics, "_SEARCH_EDGES", 3 * 400)
    monkeypatch.setattr(statistics, "_LARGE_GRAPH", 99)
    found = layout.describe()
    assert found.mixing == (50, True, None)
    assert str(found).endswith(
        "every block reaches every other in at least 50 hops; spectral gap not computed, the graph is too large"
    )
    # whether there is a way at all is always exact
    diagonal = BlockLayout.from_blocks(range(100), range(100), 1600, 1600, block_size=16)
    assert diagonal.describe().mixing == (None, False, 0.0)


def test_the_report_names_what_it_counts() -> None:
    layout = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 256, 256, block_size=64)
    assert str(layout.describe(head_dim=64)).splitlines() == [
        "layout    256 x 256 tokens, blocks of 64 x 64, batch 1, heads 1",
        "blocks    10 stored, density 0.625; 60.0% of them full",
        "pairs     32896 attend, density 0.502",
        "bitmasks  1 distinct; metadata 612 B",
        "forward   10.5 MFLOP (0.625 of dense), 229 kB moved (0.7 of dense) at head_dim 64",
        "rows      4 blocks at most, 2.5 on average, imbalance 1.6; 0 empty",
        "cols      4 blocks at most, 2.5 on average, imbalance 1.6; 0 empty",
        "tokens    0 queries without a key, 0 keys without a query",
        "mixing    some block never reaches another; spectral gap 1",
    ]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"head_dim": 64.0}, TypeError, "head_dim must be an int, got 64.0"),
        ({"element_bytes": -2}, ValueError, "element_bytes must be at least 1, got -2"),
        ({"element_bytes": torch.bfloat16}, TypeError, "element_bytes must be an int, got torch.bfloat16"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_by_name(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ring(4).describe(**wrong)
