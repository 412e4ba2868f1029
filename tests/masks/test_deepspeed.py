"""masks.deepspeed: configurations keep the blocks that DeepSpeed's keep, without the future."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import masks
from masks import deepspeed
from masks.deepspeed import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)
from tests.masks.test_random import drawn

SEEDS = range(24)
HEADS = 3


# ---- the rule of each configuration for one block, before the future is removed ----


def in_windows(row: int, col: int, sizes: list[int]) -> bool:
    begin = 0
    while True:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        if begin <= row < begin + size:
            return begin <= col < begin + size
        begin += size


def in_sliding(row: int, col: int, width: int) -> bool:
    return abs(row - col) <= width // 2


def fixed_globals(n_blocks: int, head: int, n_local: int, n_global: int, n_patterns: int) -> set[int]:
    """Global cols, window by window."""
    found = set()
    for begin in range(0, n_blocks, n_local):
        start = begin + n_local - (1 + head % n_patterns) * n_global
        if begin + n_local > n_blocks:
            start = max(0, min(start, n_blocks - n_global))
        found.update(range(start, start + n_global))
    return found


def given_globals(starts: list[int], ends: list[int] | None) -> set[int]:
    pairs = zip(starts, ends if ends is not None else [start + 1 for start in starts], strict=True)
    return {block for start, end in pairs for block in range(start, end)}


def in_random(row: int, col: int, n_blocks: int, count: int, seed: int, head: int, past_only: bool) -> bool:
    size = row + 1 if past_only else n_blocks
    return col in drawn(seed, head * 2**32 + row, size, min(count, size))


# ---- one test for all ----


def assert_keeps(config, n_blocks: int, ragged: int, keeps) -> None:
    """Head h of `config` keeps the blocks for which keeps(h, row, col), except the future."""
    length = n_blocks * config.block - ragged
    is_past = np.tril(np.ones((n_blocks, n_blocks), dtype=bool))
    expected = np.array(
        [
            [[keeps(head, row, col) for col in range(n_blocks)] for row in range(n_blocks)]
            for head in range(config.num_layout_heads)
        ],
        dtype=bool,
    ).reshape(-1, n_blocks, n_blocks)
    is_unidirectional = getattr(config, "attention", "bidirectional") == "unidirectional"
    if is_unidirectional:
        expected &= is_past

    layout = config.layout(length)
    assert layout.shape == (1, config.num_layout_heads, length, length)
    tokens = expected.repeat(config.block, 1).repeat(config.block, 2)[:, :length, :length]
    if is_unidirectional:
        tokens = np.tril(tokens)
    assert np.array_equal(layout.to_dense()[0].numpy(), tokens)

    made = config.make_layout(length)
    assert made.dtype == torch.int64
    shared = 1 if config.different_layout_per_head else HEADS
    assert np.array_equal(made.numpy(), np.repeat(expected, shared, 0).astype(np.int64))


def drawn_setting(seed: int) -> tuple[np.random.Generator, dict, int, int]:
    """A generator, the common arguments, the number of blocks, and the tokens missing in the last block."""
    random = np.random.default_rng(seed)
    block = [16, 48, 64, 128][seed % 4]
    shared = {"num_heads": HEADS, "block": block, "different_layout_per_head": bool(random.random() < 0.5)}
    return random, shared, int(random.integers(5, 14)), int(random.integers(0, block))


def some_globals(random: np.random.Generator) -> tuple[list[int], list[int] | None]:
    starts = random.integers(0, 16, random.integers(0, 4)).tolist()
    return starts, None if random.random() < 0.5 else [start + int(random.integers(1, 4)) for start in starts]


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("seed", SEEDS)
def test_fixed(seed, attention):
    random, shared, n_blocks, ragged = drawn_setting(seed)
    n_global = int(random.integers(1, 4))
    n_local = n_global * int(random.integers(1, 4))
    n_patterns = int(random.integers(1, n_local // n_global + 1)) if shared["different_layout_per_head"] else 1
    horizontal = attention == "bidirectional" and random.random() < 0.5
    config = FixedSparsityConfig(
        **shared,
        num_local_blocks=n_local,
        num_global_blocks=n_global,
        attention=attention,
        horizontal_global_attention=bool(horizontal),
        num_different_global_patterns=n_patterns,
    )

    def keeps(head: int, row: int, col: int) -> bool:
        lines = fixed_globals(n_blocks, head, n_local, n_global, n_patterns)
        return row // n_local == col // n_local or col in lines or (horizontal and row in lines)

    assert_keeps(config, n_blocks, ragged, keeps)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("seed", SEEDS)
def test_variable(seed, attention):
    random, shared, n_blocks, ragged = drawn_setting(seed)
    sizes = random.integers(1, 6, random.integers(1, 4)).tolist()
    starts, ends = some_globals(random)
    horizontal = attention == "bidirectional" and random.random() < 0.5
    n_random = int(random.integers(0, 4))
    config = VariableSparsityConfig(
        **shared,
        num_random_blocks=n_random,
        local_window_blocks=sizes,
        global_block_indices=starts,
        global_block_end_indices=ends,
        attention=attention,
        horizontal_global_attention=bool(horizontal),
        seed=seed,
    )
    lines = given_globals(starts, ends)

    def keeps(head: int, row: int, col: int) -> bool:
        is_global = col in lines or (horizontal and row in lines)
        is_random = in_random(row, col, n_blocks, n_random, seed, head, attention == "unidirectional")
        return is_global or is_random or in_windows(row, col, [*sizes])

    assert_keeps(config, n_blocks, ragged, keeps)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("seed", SEEDS)
def test_bigbird(seed, attention):
    random, shared, n_blocks, ragged = drawn_setting(seed)
    n_random, width, n_global = int(random.integers(0, 4)), int(random.integers(1, 6)), int(random.integers(0, 4))
    config = BigBirdSparsityConfig(
        **shared,
        num_random_blocks=n_random,
        num_sliding_window_blocks=width,
        num_global_blocks=n_global,
        attention=attention,
        seed=seed,
    )

    def keeps(head: int, row: int, col: int) -> bool:
        is_random = in_random(row, col, n_blocks, n_random, seed, head, attention == "unidirectional")
        return min(row, col) < n_global or is_random or in_sliding(row, col, width)

    assert_keeps(config, n_blocks, ragged, keeps)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("seed", SEEDS)
def test_longformer(seed, attention):
    random, shared, n_blocks, ragged = drawn_setting(seed)
    width, (starts, ends) = int(random.integers(1, 6)), some_globals(random)
    config = BSLongformerSparsityConfig(
        **shared,
        num_sliding_window_blocks=width,
        global_block_indices=starts,
        global_block_end_indices=ends,
        attention=attention,
    )
    lines = given_globals(starts, ends)

    def keeps(head: int, row: int, col: int) -> bool:
        return bool({row, col} & lines) or in_sliding(row, col, width)

    assert_keeps(config, n_blocks, ragged, keeps)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("seed", SEEDS)
def test_sliding_window(seed, attention):
    random, shared, n_blocks, ragged = drawn_setting(seed)
    width = int(random.integers(1, 6))
    config = LocalSlidingWindowSparsityConfig(
        HEADS, shared["block"], num_sliding_window_blocks=width, attention=attention
    )
    assert_keeps(config, n_blocks, ragged, lambda head, row, col: in_sliding(row, col, width))


def test_dense():
    for different in (False, True):
        assert_keeps(DenseSparsityConfig(HEADS, 48, different), 5, 7, lambda head, row, col: True)


# ---- as a drop-in ----


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Dense", "num_heads, block=16, different_layout_per_head=False"),
        (
            "Fixed",
            (
                "num_heads, block=16, different_layout_per_head=False, num_local_blocks=4, num_global_blocks=1, "
                "attention='bidirectional', horizontal_global_attention=False, num_different_global_patterns=1"
            ),
        ),
        (
            "Variable",
            (
                "num_heads, block=16, different_layout_per_head=False, num_random_blocks=0, local_window_blocks=(4,), "
                "global_block_indices=(0,), global_block_end_indices=None, attention='bidirectional', "
                "horizontal_global_attention=False, seed=None"
            ),
        ),
        (
            "BigBird",
            (
                "num_heads, block=16, different_layout_per_head=False, num_random_blocks=1, "
                "num_sliding_window_blocks=3, "
                "num_global_blocks=1, attention='bidirectional', seed=None"
            ),
        ),
        (
            "BSLongformer",
            (
                "num_heads, block=16, different_layout_per_head=False, num_sliding_window_blocks=3, "
                "global_block_indices=(0,), global_block_end_indices=None, attention='bidirectional'"
            ),
        ),
        ("LocalSlidingWindow", "num_heads, block=16, num_sliding_window_blocks=3, attention='unidirectional'"),
    ],
)
def test_arguments_are_those_of_deepspeed(name, arguments):
    signature = inspect.signature(getattr(deepspeed, f"{name}SparsityConfig"))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({arguments})"


def test_unidirectional_sees_no_future_where_deepspeed_does():
    """Two global blocks at the end of windows of four: in DeepSpeed row 2 sees block 3, and row 6 sees block 7."""
    config = FixedSparsityConfig(1, num_global_blocks=2, attention="unidirectional")
    assert not config.make_layout(160).triu(1).any()
    assert (config.layout(160) - masks.causal(160, block_size=16)).nnz == 0


def test_a_long_sequence_is_never_a_square():
    # 65,536 x 65,536 blocks would be 4 GiB
    config = BSLongformerSparsityConfig(1, attention="unidirectional")
    assert config.layout(1_048_576).nnz == 65_536 * 3 - 3


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("Dense", {"num_heads": 0}, ValueError, "num_heads: .* at least 1"),
        ("Dense", {"block": 20}, ValueError, "block_size: expected multiples of 16"),
        ("Dense", {"block": 512}, ValueError, "block: .* from 16 to 256, got 512"),
        ("Dense", {"different_layout_per_head": 1}, TypeError, "different_layout_per_head: expected a bool"),
        ("Fixed", {"num_global_blocks": 3}, ValueError, "num_global_blocks: expected a divisor of num_local_blocks, 4"),
        ("Fixed", {"num_local_blocks": 2**70}, ValueError, "num_local_blocks: .* from 1 to 2147483647"),
        ("Fixed", {"attention": "causal"}, ValueError, "attention: .* got 'causal'"),
        (
            "Fixed",
            {"attention": "unidirectional", "horizontal_global_attention": True},
            ValueError,
            "horizontal_global_attention: global rows see the future",
        ),
        ("Fixed", {"num_different_global_patterns": 2}, ValueError, "num_different_global_patterns: expected 1 when"),
        ("Fixed", {"num_different_global_patterns": 5}, ValueError, "num_different_global_patterns: .* from 1 to 4"),
        ("Variable", {"num_random_blocks": 2}, ValueError, "seed: expected an int, as num_random_blocks is 2"),
        ("Variable", {"local_window_blocks": []}, ValueError, "local_window_blocks: expected sizes"),
        ("Variable", {"global_block_indices": [-1]}, ValueError, "got -1 and 0 at index 0"),
        ("Variable", {"global_block_end_indices": [1, 2]}, ValueError, "one for each of 1 global_block_indices, got 2"),
        ("BSLongformer", {"global_block_end_indices": [0]}, ValueError, "got 0 and 0 at index 0"),
        ("BigBird", {}, ValueError, "seed: expected an int"),
        ("BigBird", {"seed": -1}, ValueError, "seed: .* got -1"),
        (
            "LocalSlidingWindow",
            {"num_sliding_window_blocks": 0},
            ValueError,
            "num_sliding_window_blocks: .* at least 1",
        ),
    ],
)
def test_refused(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(deepspeed, f"{name}SparsityConfig")(**{"num_heads": 2, **arguments})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VariableSparsityConfig(1, num_random_blocks=5, seed=0), "num_random_blocks: expected at most .* 4, got 5"),
        (BigBirdSparsityConfig(1, num_random_blocks=0, num_global_blocks=5), "num_global_blocks: .* got 5"),
        (BSLongformerSparsityConfig(1, num_sliding_window_blocks=5), "num_sliding_window_blocks: .* got 5"),
        (LocalSlidingWindowSparsityConfig(1, num_sliding_window_blocks=5), "num_sliding_window_blocks: .* got 5"),
    ],
)
def test_a_sequence_too_short_is_refused_as_in_deepspeed(config, message):
    with pytest.raises(ValueError, match=message):
        config.make_layout(64)
    with pytest.raises(TypeError, match="seq_len"):
        config.layout(64.0)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        deepspeed.SparsityConfig(2)


def test_a_configuration_keeps_no_list_of_its_caller():
    sizes, ends = [1, 2], [1]
    config = VariableSparsityConfig(num_heads=1, local_window_blocks=sizes, global_block_end_indices=ends)
    before = config.layout(160)
    sizes[0], ends[0] = 0, -5
    assert config.layout(160) == before
    assert hash(config) == hash(
        VariableSparsityConfig(num_heads=1, local_window_blocks=(1, 2), global_block_end_indices=[1])
    )


def test_no_tokens_and_windows_beyond_all_blocks():
    assert DenseSparsityConfig(num_heads=2).make_layout(0).shape == (2, 0, 0)
    assert VariableSparsityConfig(num_heads=1, local_window_blocks=[2**62, 2**62]).layout(64).density == 1.0
    with pytest.raises(ValueError, match="attention: expected"):
        FixedSparsityConfig(num_heads=1, attention=np.array(["a", "b"]))
