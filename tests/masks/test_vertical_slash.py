"""masks.vertical_slash: the chosen columns and diagonals only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import masks
from tests.support.double_loop import assert_attends, assert_heads_attend


def attends(q_pos: int, kv_pos: int, shift: int, verticals: set[int], slashes: set[int]) -> bool:
    distance = q_pos + shift - kv_pos
    return distance >= 0 and (kv_pos in verticals or distance in slashes)


def some(random: np.random.Generator, limit: int, n_runs: int) -> list[int]:
    """Single numbers and consecutive runs, in any order, with repeats."""
    found = []
    for _ in range(n_runs):
        begin = int(random.integers(0, limit))
        found += range(begin, min(limit, begin + int(random.choice([1, 1, 3, 20]))))
    random.shuffle(found)
    return found


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, (32, 64), (64, 48)])
@pytest.mark.parametrize("seed", range(8))
def test_double_loop(seed, block_size):
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(length) for length in random.integers(1, 260, 2))
    if seed % 3 == 0:
        q_len = kv_len
    verticals, slashes = some(random, kv_len, seed % 4), some(random, kv_len, (seed + 1) % 5)
    layout = masks.vertical_slash((q_len, kv_len), verticals=verticals, slashes=slashes, block_size=block_size)
    assert_attends(layout, lambda q, kv: attends(q, kv, kv_len - q_len, set(verticals), set(slashes)))


# shifts with which the diagonal masks one pair of a block, or none
@pytest.mark.parametrize("length", [(50, 64), (49, 64)])
def test_verticals_about_the_edges_of_blocks(length):
    verticals = set(range(64))
    layout = masks.vertical_slash(length, verticals=sorted(verticals), slashes=[], block_size=16)
    assert_attends(layout, lambda q, kv: attends(q, kv, length[1] - length[0], verticals, set()))


@pytest.mark.parametrize("nested", ["both", "verticals", "slashes"])
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_every_head_has_its_own(nested, make):
    verticals, slashes = [[0, 5], [100, 101], [7, 7]], [[0, 1], [0, 90], [33, 34]]
    given = {
        "verticals": make(verticals) if nested != "slashes" else verticals[0],
        "slashes": make(slashes) if nested != "verticals" else slashes[0],
    }
    layout = masks.vertical_slash((130, 150), **given, block_size=32)
    heads = [
        lambda q, kv, head=head: attends(
            q, kv, 20, set(verticals[head * (nested != "slashes")]), set(slashes[head * (nested != "verticals")])
        )
        for head in range(3)
    ]
    assert_heads_attend(layout, heads)


def test_it_is_a_window_and_sinks():
    window = masks.vertical_slash(1000, verticals=range(4), slashes=range(100))
    sinks = masks.global_tokens(1000, tokens=4) & masks.causal(1000)
    assert window == masks.local(1000, window=(99, 0)) | (
        sinks & masks.vertical_slash(1000, verticals=range(4), slashes=[])
    )
    assert masks.vertical_slash(1000, verticals=range(1000), slashes=[]) == masks.causal(1000)
    assert masks.vertical_slash(1000, verticals=[], slashes=range(1000)) == masks.causal(1000)


def test_a_column_begins_at_its_own_query():
    # the last query of row 0 is the first that sees key 31
    layout = masks.vertical_slash(64, verticals=[31], slashes=[], block_size=32)
    assert_attends(layout, lambda q, kv: kv == 31 and q >= 31)


def test_nothing_named_is_nothing_kept():
    assert masks.vertical_slash(500, verticals=[], slashes=[]).nnz == 0
    assert masks.vertical_slash(0, verticals=[], slashes=[]).nnz == 0
    assert masks.vertical_slash(500, verticals=[[], []], slashes=[]).shape == (1, 2, 500, 500)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"verticals": [100]}, ValueError, "verticals: expected numbers from 0 to 99, .* got 100 at index 0"),
        ({"verticals": [3, -1]}, ValueError, "verticals: .* got -1 at index 1"),
        ({"slashes": [[0], [3, 200]]}, ValueError, r"slashes\[1\]: .* got 200 at index 1"),
        ({"slashes": [0.5]}, TypeError, r"slashes: expected ints, got 0\.5"),
        ({"slashes": 5}, TypeError, "slashes: expected ints in a sequence"),
        ({"verticals": [[0], 1]}, TypeError, r"verticals\[1\]: expected ints"),
        ({"verticals": [[0], [1]], "slashes": [[0]] * 3}, ValueError, "equally many heads, .* got 2 and 3"),
        ({"verticals": torch.zeros(0, 3, dtype=torch.int64)}, ValueError, "verticals: expected at least one head"),
        ({"block_size": 20}, ValueError, "block_size"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.vertical_slash(100, **{"verticals": [0], "slashes": [0], **arguments})
