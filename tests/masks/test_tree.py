"""masks.tree: every node sees its ancestors and the prompt only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import masks
from tests.support.double_loop import assert_attends


def is_ancestor(parents: list[int], old: int, young: int) -> bool:
    """Whether a is b or an ancestor of b."""
    while young > old:
        young = parents[young]
    return young == old


def drawn_tree(random: np.random.Generator, n_nodes: int, reach: int) -> list[int]:
    """Random parents: one of the `reach` nodes before each node, or a root."""
    return [
        int(random.integers(max(-1, node - reach), node)) if random.random() < 0.95 else -1 for node in range(n_nodes)
    ]


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64)])
@pytest.mark.parametrize("seed", range(8))
def test_double_loop(seed, block_size):
    random = np.random.default_rng(seed)
    parents = drawn_tree(random, int(random.integers(1, 260)), reach=[1, 3, 40, 1000][seed % 4])
    prompt = int(random.integers(0, 150)) * (seed % 2)
    layout = masks.tree(parents, prompt=prompt, block_size=block_size)
    assert layout.shape == (1, 1, len(parents), prompt + len(parents))
    assert_attends(layout, lambda q, kv: kv < prompt or is_ancestor(parents, kv - prompt, q))


@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("prompt", [16 * k + more for k in (1, 3, 4) for more in (-1, 0, 1)])
def test_a_prompt_that_ends_about_the_edge_of_a_block(prompt, block_size):
    # the first half are roots, which do not see each other
    parents = [*[-1] * 20, *range(20)]
    layout = masks.tree(parents, prompt=prompt, block_size=block_size)
    assert_attends(layout, lambda q, kv: kv < prompt or is_ancestor(parents, kv - prompt, q))


def test_a_chain_is_causal_and_roots_are_alone():
    assert masks.tree(range(-1, 299), prompt=70) == masks.causal((300, 370))
    assert masks.tree([-1] * 300, block_size=64) == masks.local(300, window=0, block_size=64)


def test_nothing_drafted():
    assert masks.tree([]).shape == (1, 1, 0, 0)
    assert masks.tree([], prompt=100).shape == (1, 1, 0, 100)


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_parents_come_in_any_container(make):
    assert masks.tree(make([-1, 0, 0, 2])) == masks.tree([-1, 0, 0, 2])


def test_a_wide_forest_on_a_long_prompt_is_built_quickly_and_small():
    # 1 M keys and 4,096 nodes are 4 G pairs
    parents = [(node - 1) // 8 for node in range(4096)]
    parents[0] = -1
    layout = masks.tree(parents, prompt=1_000_000)
    assert 32 * 7812 < layout.nnz < 32 * 7812 + 32 * 34


@pytest.mark.parametrize(
    ("parents", "arguments", "error", "message"),
    [
        ([-1, 1], {}, ValueError, "parents: .* 0 to 0, got 1 for node 1. List every node after its parent"),
        ([-1, 0, -2], {}, ValueError, "parents: .* got -2 for node 2"),
        ([0], {}, ValueError, "parents: .* got 0 for node 0"),
        ([-1.0], {}, TypeError, r"parents: expected ints, got -1\.0"),
        ([-1], {"prompt": -1}, ValueError, "prompt: .* from 0 to 2147483646, got -1"),
        ([-1, 0], {"prompt": 2**31}, ValueError, "prompt: .* from 0 to 2147483645, got 2147483648"),
        ([-1], {"prompt": 1.5}, TypeError, "prompt: .* got 1.5"),
        ([-1], {"block_size": 8}, ValueError, "block_size: .* got 8"),
    ],
)
def test_refused(parents, arguments, error, message):
    with pytest.raises(error, match=message):
        masks.tree(parents, **arguments)
