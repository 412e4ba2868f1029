"""Are lengths and block sizes read alike by every builder, and bad ones refused?"""

from __future__ import annotations

import numpy as np
import pytest

import masks
from masks.canvas import read_canvas

BUILDERS = {
    "butterfly": masks.butterfly,
    "local": lambda length, **block: masks.local(length, window=20, **block),
    "causal": masks.causal,
    "random": lambda length, **block: masks.random(length, density=0.5, seed=3, **block),
    "global_tokens": lambda length, **block: masks.global_tokens(length, tokens=0, **block),
    "strided": lambda length, **block: masks.strided(length, stride=10, **block),
    "bigbird": lambda length, **block: masks.bigbird(length, seed=3, **block),
    "longformer": lambda length, **block: masks.longformer(length, window=20, global_tokens=0, **block),
    "alibi_windows": lambda length, **block: masks.alibi_windows(length, slopes=[0.5], threshold=9.0, **block),
    "erdos_renyi": lambda length, **block: masks.erdos_renyi(length, density=0.5, seed=3, **block),
    "expander": lambda length, **block: masks.expander(length, degree=0, seed=3, **block),
    "small_world": lambda length, **block: masks.small_world(length, neighbors=0, rewire=0.5, seed=3, **block),
    "vertical_slash": lambda length, **block: masks.vertical_slash(length, verticals=[], slashes=[], **block),
}
# their length follows from something else, or is half of the layout's
WITHOUT_LENGTH = {"block_diffusion", "build", "documents", "lsh", "shared_prefix", "top_k", "top_p", "tree"}


def test_every_public_builder_is_here():
    assert {*BUILDERS} | WITHOUT_LENGTH == set(masks.__all__)


def test_blocks_are_counted_and_placed():
    canvas = read_canvas((100, 300), (32, 64))
    assert (canvas.n_rows, canvas.n_cols, canvas.shift) == (4, 5, 200)
    first, last = canvas.row_span(np.arange(4))
    # the last row has 4 queries
    assert first.tolist() == [200, 232, 264, 296]
    assert last.tolist() == [231, 263, 295, 299]
    lowest, highest = canvas.distances(np.array([0, 3]), np.array([0, 4]))
    # query 0 stands at 200: at most 200 + 31 from key 0, at least 200 from key 63
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
        (-1, ValueError, "length: expected int, a number of tokens, of at least 0, got -1"),
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
