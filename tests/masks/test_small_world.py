"""masks.small_world: edges are rewired as Watts and Strogatz rewire them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import masks
from tests.masks.test_random import cols_of, mix


def graph(n_blocks: int, neighbors: int, rewire: float, seed: int) -> list[set[int]]:
    """The procedure, edge by edge, on sets of neighbors."""
    joined = [set() for _ in range(n_blocks)]
    for step in range(1, neighbors // 2 + 1):
        for block in range(n_blocks):
            joined[block].add((block + step) % n_blocks)
            joined[(block + step) % n_blocks].add(block)
    for step in range(1, neighbors // 2 + 1):
        for block in range(n_blocks):
            number, other = (step - 1) * n_blocks + block, (block + step) % n_blocks
            if (mix(mix(mix(seed) ^ 0) ^ number) >> 11) * 2.0**-53 >= rewire or len(joined[block]) == n_blocks - 1:
                continue
            words = (mix(mix(mix(seed) ^ (number + 1)) ^ draw) for draw in itertools.count())
            ends = ((word >> 32) * n_blocks >> 32 for word in words)
            end = next(end for end in ends if end != block and end not in joined[block])
            for one, another in ((block, other), (other, block)):
                joined[one].discard(another)
            joined[block].add(end)
            joined[end].add(block)
    return joined


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("seed", range(12))
def test_every_graph_is_the_procedure(seed, block_size):
    random = np.random.default_rng([seed, block_size])
    # few blocks, so that far ends are tried many times and some blocks are joined to all
    n_blocks = int(random.integers(1, [8, 40, 120][seed % 3]))
    neighbors = 2 * int(random.integers(0, (n_blocks - 1) // 2 + 1))
    rewire = float(random.choice([0.0, 0.1, 0.5, 1.0]))
    length = n_blocks * block_size - int(random.integers(0, block_size))
    layout = masks.small_world(length, neighbors=neighbors, rewire=rewire, seed=seed, block_size=block_size)
    assert cols_of(layout) == [sorted(others) for others in graph(n_blocks, neighbors, rewire, seed)]
    assert len(layout.bitmasks) == 0
    assert layout.nnz == n_blocks * neighbors


def test_a_share_of_the_edges_moves():
    # 512 blocks with 2048 edges, a fifth rewired: 410, deviation 18
    ring = masks.small_world(65536, neighbors=8, rewire=0.0, seed=0)
    world = masks.small_world(65536, neighbors=8, rewire=0.2, seed=0)
    n_moved = (world - ring).nnz // 2
    assert abs(n_moved - 410) < 5 * 18
    assert cols_of(ring)[0] == [1, 2, 3, 4, 508, 509, 510, 511]


def test_golden_blocks():
    """Fixed results: if they change, every model trained on such a layout changes."""
    assert cols_of(masks.small_world(2048, neighbors=4, rewire=0.5, seed=0))[:3] == GOLDEN_ROWS


GOLDEN_ROWS = [[2, 4, 10, 14], [3, 13], [0, 3, 4, 6]]


def test_nothing_has_no_blocks():
    assert masks.small_world(0, neighbors=0, rewire=0.5, seed=0).nnz == 0
    assert masks.small_world(1, neighbors=0, rewire=1.0, seed=0).nnz == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"neighbors": 3}, ValueError, "neighbors: expected an even number, .* got 3"),
        ({"neighbors": 8}, ValueError, "neighbors: .* from 0 to 7, got 8"),
        ({"neighbors": 2.0}, TypeError, "neighbors: .* got 2.0"),
        ({"rewire": 1.1}, ValueError, "rewire: .* got 1.1"),
        ({"rewire": True}, TypeError, "rewire: .* got True"),
        ({"seed": -1}, ValueError, "seed: .* got -1"),
        ({"length": (1024, 512)}, ValueError, "length: expected as many block rows"),
    ],
)
def test_refused(arguments, error, message):
    arguments = {"length": 1024, "neighbors": 2, "rewire": 0.1, "seed": 0, **arguments}
    with pytest.raises(error, match=message):
        masks.small_world(arguments.pop("length"), **arguments)
