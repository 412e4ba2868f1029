"""masks.expander: the graph is regular, symmetric and well connected."""

from __future__ import annotations

import numpy as np
import pytest

import masks
from tests.masks.test_random import cols_of


def graph_of(layout) -> np.ndarray:
    assert len(layout.bitmasks) == 0
    return layout.to_scipy().toarray().astype(int)


def is_connected(graph: np.ndarray) -> bool:
    seen, front = {0}, [0]
    while front:
        front = [other for block in front for other in graph[block].nonzero()[0].tolist() if other not in seen]
        seen.update(front)
    return len(seen) == len(graph)


# every degree; from about n // 2 on, graphs are complements
@pytest.mark.parametrize("n_blocks", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 21])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_every_block_has_as_many_neighbors(n_blocks, seed):
    for degree in range(n_blocks):
        if degree % 2 and n_blocks % 2:
            continue
        graph = graph_of(masks.expander(16 * n_blocks - 5, degree=degree, seed=seed, block_size=16))
        assert (graph.sum(0) == degree).all() and (graph.sum(1) == degree).all()
        assert np.array_equal(graph, graph.T)
        assert not graph.diagonal().any()
        assert degree < 2 or is_connected(graph)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("seed", range(5))
def test_large_graphs_have_no_bottleneck(seed, block_size):
    random = np.random.default_rng(seed)
    n_blocks = 2 * int(random.integers(150, 250))
    degree = int(random.integers(3, 20))
    length = n_blocks * block_size - int(random.integers(0, block_size))
    graph = graph_of(masks.expander(length, degree=degree, seed=seed, block_size=block_size))
    assert (graph.sum(1) == degree).all() and np.array_equal(graph, graph.T)
    values = np.sort(np.abs(np.linalg.eigvalsh(graph)))
    assert values[-1] == pytest.approx(degree)
    # Friedman: random regular graphs come within any distance of Ramanujan's 2 * sqrt(degree - 1)
    assert values[-2] < 2 * np.sqrt(degree - 1) * 1.1


def test_golden_blocks():
    """Fixed results: if they change, every model trained on such a layout changes."""
    assert cols_of(masks.expander(2048, degree=5, seed=0))[:3] == GOLDEN_ROWS


GOLDEN_ROWS = [[1, 3, 6, 11, 14], [0, 2, 10, 11, 14], [1, 5, 9, 10, 12]]


def test_same_seed_same_graph_other_seed_another():
    layout = masks.expander(8192, degree=6, seed=7)
    assert layout == masks.expander(8192, degree=6, seed=7)
    assert layout != masks.expander(8192, degree=6, seed=8)


def test_orders_are_drawn_evenly():
    # each of 10 possible neighbors of block 0 in 600 graphs of degree 2: 120 times on average, deviation 9.8
    hits = sum(graph_of(masks.expander(176, degree=2, seed=seed, block_size=16))[0] for seed in range(600))
    assert abs(hits[1:] - 120).max() < 4.5 * 9.8


def test_nothing_has_no_blocks():
    assert masks.expander(0, degree=0, seed=0).nnz == 0
    assert masks.expander(1000, degree=0, seed=0).nnz == 0


@pytest.mark.parametrize(
    ("length", "arguments", "error", "message"),
    [
        (1024, {"degree": 8, "seed": 0}, ValueError, "degree: .* from 0 to 7, got 8"),
        (640, {"degree": 3, "seed": 0}, ValueError, "degree: expected an even number, as there are 5 blocks"),
        (1024, {"degree": 2.0, "seed": 0}, TypeError, "degree: .* got 2.0"),
        (1024, {"degree": 2, "seed": -1}, ValueError, "seed: .* got -1"),
        (1024, {"degree": 2}, TypeError, "seed"),
        ((1024, 512), {"degree": 2, "seed": 0}, ValueError, "length: expected as many block rows as block cols"),
    ],
)
def test_refused(length, arguments, error, message):
    with pytest.raises(error, match=message):
        masks.expander(length, **arguments)
