"""masks.bigbird, longformer and pixelfly: the combinations of their papers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from tests.masks.test_butterfly import attends as meets_in_butterfly
from tests.masks.test_global_tokens import attends as attends_globally
from tests.masks.test_local import attends as attends_locally
from tests.masks.test_random import cols_of, drawn
from tests.support.double_loop import ANY_GRID, GRIDS, assert_attends, both


def bigbird_row(row: int, n_blocks: int, window: int, n_random: int, n_global: int, seed: int) -> list[int]:
    """The definition, one row at a time."""
    if row < n_global:
        return list(range(n_blocks))
    kept = [col for col in range(n_blocks) if abs(row - col) <= window // 2 or col < n_global]
    others = [col for col in range(n_blocks) if col not in kept]
    ranks = drawn(seed, row, len(others), min(n_random, len(others)))
    return sorted(kept + [others[rank] for rank in ranks])


@pytest.mark.parametrize("seed", [0, 99])
# grids smaller than the parts of the pattern, filled by them, and larger
@pytest.mark.parametrize("n_blocks", [1, 2, 5, 9, 16, 40])
@pytest.mark.parametrize(
    ("window", "n_random", "n_global"), [(3, 3, 2), (1, 0, 0), (1, 4, 0), (5, 1, 1), (3, 50, 1), (99, 2, 0), (3, 2, 60)]
)
def test_every_bigbird_row(n_blocks, window, n_random, n_global, seed):
    layout = masks.bigbird(
        n_blocks * 16 - 5,
        window_blocks=window,
        random_blocks=n_random,
        global_blocks=n_global,
        seed=seed,
        block_size=16,
    )
    expected = [bigbird_row(row, n_blocks, window, n_random, n_global, seed) for row in range(n_blocks)]
    assert cols_of(layout) == expected
    assert len(layout.bitmasks) == 0


@given(
    n_blocks=st.integers(1, 30),
    missing=st.integers(0, 15),
    n_side=st.integers(0, 4),
    n_random=st.integers(0, 20),
    n_global=st.integers(0, 5),
    seed=st.integers(0, 2**64 - 1),
    block_size=st.sampled_from([16, 48, 64, 128]),
)
@settings(deadline=None)
def test_any_bigbird(n_blocks, missing, n_side, n_random, n_global, seed, block_size):
    layout = masks.bigbird(
        n_blocks * block_size - missing,
        window_blocks=2 * n_side + 1,
        random_blocks=n_random,
        global_blocks=n_global,
        seed=seed,
        block_size=block_size,
    )
    expected = [bigbird_row(row, n_blocks, 2 * n_side + 1, n_random, n_global, seed) for row in range(n_blocks)]
    assert cols_of(layout) == expected
    assert len(layout.bitmasks) == 0


@given(
    length=st.integers(1, 250),
    share=st.floats(0, 1),
    n_side=st.integers(0, 1),
    n_random=st.integers(0, 3),
    n_global=st.integers(0, 1),
    seed=st.integers(0, 2**64 - 1),
    block_size=st.sampled_from([16, 48, 64, 128]),
)
@settings(deadline=None, max_examples=40)
def test_any_extended_bigbird(length, share, n_side, n_random, n_global, seed, block_size):
    """B(i, :) = B(:, i) = 1 for the extra tokens, and B(g + i, g + j) = A(i, j)."""
    # often a few, at times none or all
    extra = round(length * share**3)
    layout = masks.bigbird(
        length,
        window_blocks=2 * n_side + 1,
        random_blocks=n_random,
        global_blocks=n_global,
        extra_tokens=extra,
        seed=seed,
        block_size=block_size,
    )
    n_blocks = -(-(length - extra) // block_size)
    rows = [bigbird_row(row, n_blocks, 2 * n_side + 1, n_random, n_global, seed) for row in range(n_blocks)]

    def attends(q_pos: int, kv_pos: int) -> bool:
        if min(q_pos, kv_pos) < extra:
            return True
        return (kv_pos - extra) // block_size in rows[(q_pos - extra) // block_size]

    assert_attends(layout, attends)


def test_bigbird_has_the_blocks_its_paper_counts():
    # 64 blocks: 2 global rows; row 2 meets the global cols with its window; the last row's window is one short
    layout = masks.bigbird(8192, seed=4)
    assert layout.nnz == 2 * 64 + 62 * (2 + 3 + 3) - 1 - 1
    assert layout & masks.global_tokens(8192, tokens=256) == masks.global_tokens(8192, tokens=256)


def test_bigbird_golden_blocks():
    """Fixed results: if they change, every model trained on such a layout changes."""
    assert cols_of(masks.bigbird(2048, seed=0))[5:8] == GOLDEN_ROWS


GOLDEN_ROWS = [[0, 1, 2, 4, 5, 6, 9, 14], [0, 1, 3, 5, 6, 7, 10, 11], [0, 1, 3, 5, 6, 7, 8, 10]]


def test_bigbird_of_any_number_is_cropped_to_the_grid():
    for numbers in ({"window_blocks": 10**30 + 1}, {"random_blocks": 10**30}, {"global_blocks": 10**30}):
        assert masks.bigbird(1024, seed=0, **numbers).density == 1.0


def test_bigbird_same_seed_same_layout_other_seed_another():
    assert masks.bigbird(4096, seed=1) == masks.bigbird(4096, seed=1)
    assert masks.bigbird(4096, seed=1) != masks.bigbird(4096, seed=2)


def test_bigbird_takes_lengths_of_equally_many_blocks():
    assert cols_of(masks.bigbird((1000, 1024), seed=1)) == cols_of(masks.bigbird(1024, seed=1))
    layout = masks.bigbird((512, 1024), seed=1, block_size=(32, 64))
    assert cols_of(layout) == cols_of(masks.bigbird(1024, seed=1, block_size=64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": (512, 1024)}, ValueError, "length: expected as many block rows as block cols, got 4 x 8 from 512"),
        ({"length": 1024, "block_size": (64, 128)}, ValueError, "length: .* got 16 x 8 from 1024"),
        ({"window_blocks": 2}, ValueError, "window_blocks: expected an odd width, .* got 2"),
        ({"window_blocks": 0}, ValueError, "window_blocks: .* at least 1, got 0"),
        ({"window_blocks": 3.0}, TypeError, "window_blocks: .* got 3.0"),
        ({"random_blocks": -1}, ValueError, "random_blocks: .* got -1"),
        ({"random_blocks": None}, TypeError, "random_blocks: .* got None"),
        ({"global_blocks": -1}, ValueError, "global_blocks: .* got -1"),
        ({"global_blocks": True}, TypeError, "global_blocks: .* got True"),
        ({"extra_tokens": -1}, ValueError, "extra_tokens: .* from 0 to 1024, got -1"),
        ({"extra_tokens": 1025}, ValueError, "extra_tokens: .* from 0 to 1024, got 1025"),
        ({"extra_tokens": 2.0}, TypeError, "extra_tokens: .* got 2.0"),
        (
            {"length": (1000, 1024), "extra_tokens": 3},
            ValueError,
            "extra_tokens: expected 0 for 1000 queries and 1024 keys",
        ),
        ({"seed": -1}, ValueError, "seed: .* got -1"),
        ({"seed": 1.0}, TypeError, "seed: .* got 1.0"),
    ],
)
def test_refused_bigbird(arguments, error, message):
    arguments = {"length": 1024, "seed": 0, **arguments}
    length = arguments.pop("length")
    with pytest.raises(error, match=message):
        masks.bigbird(length, **arguments)


def test_bigbird_wants_a_seed():
    with pytest.raises(TypeError, match="seed"):
        masks.bigbird(1024)


@pytest.mark.parametrize(("length", "block_size"), GRIDS)
@pytest.mark.parametrize("window", [0, 20, (40, 0)])
@pytest.mark.parametrize("share", [0.1, [0.5, 0.99]])
def test_longformer_double_loop(length, block_size, window, share):
    q_len, kv_len = length
    tokens = [int(part * kv_len) for part in share] if isinstance(share, list) else round(share * kv_len)
    positions = set(tokens) if isinstance(tokens, list) else set(range(tokens))
    layout = masks.longformer(length, window=window, global_tokens=tokens, block_size=block_size)
    shift = kv_len - q_len

    def attends(q_pos: int, kv_pos: int) -> bool:
        is_near = attends_locally(q_pos + shift - kv_pos, window)
        return is_near or attends_globally(q_pos, kv_pos, shift, positions)

    assert_attends(layout, attends)


@given(grid=ANY_GRID, window=st.integers(0, 150), data=st.data())
@settings(deadline=None, max_examples=25)
def test_any_longformer(grid, window, data):
    q_len, kv_len = both(grid[0])
    tokens = data.draw(st.lists(st.integers(0, kv_len - 1), max_size=5), label="tokens")
    layout = masks.longformer(grid[0], window=window, global_tokens=tokens, block_size=grid[1])
    shift = kv_len - q_len
    assert_attends(
        layout,
        lambda q_pos, kv_pos: (
            abs(q_pos + shift - kv_pos) <= window or attends_globally(q_pos, kv_pos, shift, {*tokens})
        ),
    )


def test_longformer_needs_six_bitmasks_at_most():
    # the two edges of the window, a row, a column, their corner, and an edge that meets the column
    assert len(masks.longformer(1024, window=256, global_tokens=1).bitmasks) <= 6


def test_refused_longformer():
    with pytest.raises(ValueError, match=r"window: .* got -1"):
        masks.longformer(1024, window=-1, global_tokens=1)
    with pytest.raises(ValueError, match=r"^global_tokens: .* got 1025"):
        masks.longformer(1024, window=3, global_tokens=1025)
    with pytest.raises(ValueError, match=r"^global_tokens: .* got 1024"):
        masks.longformer(1024, window=3, global_tokens=torch.tensor([1024]))


@given(
    length=st.integers(1, 300),
    n_factors=st.integers(0, 4),
    global_blocks=st.integers(0, 6),
    block_size=st.sampled_from([16, 48, 64, 128]),
)
@settings(deadline=None, max_examples=30)
def test_any_pixelfly(length, n_factors, global_blocks, block_size):
    n_factors = min(n_factors, (-(-length // block_size) - 1).bit_length())
    layout = masks.pixelfly(length, n_factors=n_factors, global_blocks=global_blocks, block_size=block_size)

    def attends(q_pos: int, kv_pos: int) -> bool:
        row, col = q_pos // block_size, kv_pos // block_size
        return min(row, col) < global_blocks or meets_in_butterfly(row, col, n_factors)

    assert_attends(layout, attends)


def test_pixelfly_stretches_its_butterfly_and_not_its_global_blocks():
    layout = masks.pixelfly((512, 1024), n_factors=1, global_blocks=1, stretch=4)
    assert layout == masks.butterfly((512, 1024), n_factors=1, stretch=4) | masks.pixelfly(
        (512, 1024), n_factors=0, global_blocks=1, stretch=4
    )
    assert cols_of(layout) == [list(range(8)), [0, 1, 2, 3], [0, 4, 5, 6, 7], [0, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"global_blocks": -1}, ValueError, "global_blocks: .* got -1"),
        ({"global_blocks": 1.0}, TypeError, "global_blocks: .* got 1.0"),
        ({"n_factors": 9}, ValueError, "n_factors: .* from 0 to 3, got 9"),
        ({"stretch": 5}, ValueError, "stretch: .* got 5"),
    ],
)
def test_refused_pixelfly(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.pixelfly(1024, **arguments)
