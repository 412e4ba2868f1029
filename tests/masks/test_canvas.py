"""masks/canvas.py: every builder reads lengths and block sizes alike, and refuses bad ones."""

from __future__ import annotations

import numpy as np
import pytest

import masks
from masks.canvas import blocks_between, distinct_blocks, read_canvas

BUILDERS = {
    "butterfly": masks.butterfly,
    "local": lambda length, **block: masks.local(length, window=20, **block),
    "causal": masks.causal,
    "random": lambda length, **block: masks.random(length, density=0.5, seed=3, **block),
    "global_tokens": lambda length, **block: masks.global_tokens(length, tokens=0, **block),
    "strided": lambda length, **block: masks.strided(length, stride=10, **block),
    "bigbird": lambda length, **block: masks.bigbird(length, seed=3, **block),
    "longformer": lambda length, **block: masks.longformer(length, window=20, global_tokens=0, **block),
    "pixelfly": masks.pixelfly,
    "prefix_lm": lambda length, **block: masks.prefix_lm(length, prefix=0, **block),
    "sink_window": lambda length, **block: masks.sink_window(length, sinks=4, window=20, **block),
    "a_shape": masks.a_shape,
    "tri_shape": masks.tri_shape,
    "block_diagonal": lambda length, **block: masks.block_diagonal(length, size=30, **block),
    "block_causal": lambda length, **block: masks.block_causal(length, size=30, **block),
    "fixed": lambda length, **block: masks.fixed(length, stride=30, **block),
    "dilated_window": lambda length, **block: masks.dilated_window(length, window=3, dilation=5, **block),
    "longnet": lambda length, **block: masks.longnet(length, segments=[30, 90], dilations=[1, 4], **block),
    "hierarchical": lambda length, **block: masks.hierarchical(length, size=16, **block),
    "alibi_windows": lambda length, **block: masks.alibi_windows(length, slopes=[0.5], threshold=9.0, **block),
    "erdos_renyi": lambda length, **block: masks.erdos_renyi(length, density=0.5, seed=3, **block),
    "expander": lambda length, **block: masks.expander(length, degree=0, seed=3, **block),
    "small_world": lambda length, **block: masks.small_world(length, neighbors=0, rewire=0.5, seed=3, **block),
    "vertical_slash": lambda length, **block: masks.vertical_slash(length, verticals=[], slashes=[], **block),
}
# builders without a length, or with half of the layout's: sequences, scores, grids, token orders, text
OTHERS = {
    *("axial", "block_diffusion", "build", "documents", "hilbert_order", "lsh", "morton_order", "neighborhood"),
    *("shared_prefix", "sliding_tile", "swin", "tile_order", "top_k", "top_p", "tree"),
}


def test_every_public_builder_is_here():
    assert {*BUILDERS} | OTHERS == set(masks.__all__)


def test_blocks_are_counted_and_placed():
    canvas = read_canvas((100, 300), (32, 64))
    assert (canvas.n_rows, canvas.n_cols, canvas.shift) == (4, 5, 200)
    first, last = canvas.row_span(np.arange(4))
    # the last row has 4 queries
    assert first.tolist() == [200, 232, 264, 296]
    assert last.tolist() == [231, 263, 295, 299]
    lowest, highest = canvas.distances(np.array([0, 3]), np.array([0, 4]))
    # query 0 is at key position 200
    assert lowest.tolist() == [200 - 63, 296 - 256 - 63]
    assert highest.tolist() == [231, 296 - 256 + 31]


@pytest.mark.parametrize("builder", BUILDERS)
def test_shape_and_block_size_are_those_asked_for(builder):
    layout = BUILDERS[builder](200, block_size=48)
    assert layout.shape == (1, 1, 200, 200)
    assert layout.block_size == (48, 48)
    assert BUILDERS[builder]((200, 200), block_size=(48, 48)) == layout
    assert BUILDERS[builder](np.int64(200), block_size=np.int32(48)) == layout
    assert BUILDERS[builder](300).block_size == (128, 128)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("length", "error", "message"),
    [
        (-1, ValueError, "length: expected int, a number of tokens, from 0 to 2147483647, got -1"),
        (10**30, ValueError, "length: expected int, a number of tokens, from 0 to 2147483647, got 10"),
        ((64, -5), ValueError, "length: .* got -5"),
        ((64, 64, 64), ValueError, "length: .* got 3 entries"),
        (64.0, TypeError, r"length: .* got 64.0 \(float\)"),
        (True, TypeError, "length: .* got True"),
        ("64", TypeError, "length: .* got '64'"),
        (None, TypeError, "length: .* got None"),
    ],
    ids=str,
)
def test_refused_length(builder, length, error, message):
    with pytest.raises(error, match=message):
        BUILDERS[builder](length)


@pytest.mark.parametrize("builder", [*BUILDERS, "documents"])
@pytest.mark.parametrize(
    ("block_size", "error", "message"),
    [
        (0, ValueError, "block_size: .* from 16 to 256, got 0"),
        (8, ValueError, "block_size: .* from 16 to 256, got 8"),
        (272, ValueError, "block_size: .* from 16 to 256, got 272"),
        (24, ValueError, "block_size: expected multiples of 16 from 16 to 256, got 24"),
        ((64, 40), ValueError, r"block_size: .* got \(64, 40\)"),
        ((64, 64, 64), ValueError, "block_size: .* got 3 entries"),
        (64.0, TypeError, "block_size: .* got 64.0"),
        (True, TypeError, "block_size: .* got True"),
        (None, TypeError, "block_size: .* got None"),
    ],
    ids=str,
)
def test_refused_block_size(builder, block_size, error, message):
    build = BUILDERS.get(builder, lambda length, **block: masks.documents([0, length], **block))
    with pytest.raises(error, match=message):
        build(64, block_size=block_size)


def test_blocks_between_lists_every_block_of_its_ranges_once():
    generator = np.random.default_rng(0)
    for _ in range(200):
        n_stretches = int(generator.integers(1, 6))
        canvas = read_canvas((int(generator.integers(1, 200)), int(generator.integers(1, 200))), (16, 32))
        # beyond both ends, empty, overlapping, contained, in any order
        first = generator.integers(-50, 250, (canvas.n_rows, n_stretches))
        last = first + generator.integers(-20, 100, first.shape)
        expected = [
            (row, col)
            for row in range(canvas.n_rows)
            for col in range(canvas.n_cols)
            if any(
                begin <= end and begin < (col + 1) * 32 and end >= col * 32
                for begin, end in zip(first[row], last[row], strict=True)
            )
        ]
        rows, cols = blocks_between(canvas, first, last)
        assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == expected


def test_distinct_blocks_of_few_and_of_many():
    generator = np.random.default_rng(0)
    canvas = read_canvas((1000, 700), (16, 32))
    for count in (0, 1, 50, 100_000):
        rows, cols = generator.integers(0, canvas.n_rows, count), generator.integers(0, canvas.n_cols, count)
        expected = sorted(set(zip(rows.tolist(), cols.tolist(), strict=True)))
        found = distinct_blocks(canvas, rows, cols)
        assert list(zip(*(side.tolist() for side in found), strict=True)) == expected
