"""masks/chunks.py: equal numbers mean chunks in equal places."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from masks.canvas import read_canvas
from masks.chunks import chunks_in, read_size


@pytest.mark.parametrize("lengths", [(200, 200), (70, 200), (200, 70), (1, 1)], ids=str)
@pytest.mark.parametrize("block_size", [(16, 16), (32, 48)], ids=str)
@pytest.mark.parametrize("size", [1, 5, 16, 31, 40, 64, 300])
def test_equal_numbers_equal_places(lengths, block_size, size):
    canvas = read_canvas(lengths, block_size)
    blocks = list(itertools.product(range(canvas.n_rows), range(canvas.n_cols)))
    row, col = (np.array(side) for side in zip(*blocks, strict=True))
    chunks = chunks_in(canvas, size, row, col)
    seen = {}
    for place, (i_row, i_col) in enumerate(blocks):
        queries = (np.arange(canvas.block_q) + i_row * canvas.block_q + canvas.shift) // size
        keys = (np.arange(canvas.block_kv) + i_col * canvas.block_kv) // size
        apart = keys[None] - queries[:, None]
        assert chunks.is_apart[place] == (apart != 0).all()
        assert chunks.is_inside[place] == (apart == 0).all()
        # keys in an earlier, the same or a later chunk
        numbers = tuple(int(part[place]) for part in (chunks.queries, chunks.keys, chunks.chunk_distance))
        assert np.array_equal(seen.setdefault(numbers, np.sign(apart)), np.sign(apart))


def test_a_size_beyond_all_tokens_is_capped():
    canvas = read_canvas((30, 50), 16)
    assert read_size("size", 7, canvas) == 7
    assert read_size("size", 10**30, canvas) == 80
    assert read_size("size", 5, read_canvas(0, 16)) == 1
    with pytest.raises(ValueError, match=r"chunk: .* at least 1, got 0"):
        read_size("chunk", 0, canvas)
