"""Token orders are permutations that keep neighbors together."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks

GRIDS = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


def row_major(grid, place):
    token = 0
    for side, coordinate in zip(grid, place, strict=True):
        token = token * side + coordinate
    return token


@given(grid=GRIDS, data=st.data())
@settings(deadline=None, max_examples=40)
def test_tiles_one_after_another(grid, data):
    tile = data.draw(st.tuples(*(st.integers(1, 6) for _ in grid)), label="tile")
    expected = []
    for corner in itertools.product(*(range(0, side, size) for side, size in zip(grid, tile, strict=True))):
        inside = (range(begin, min(begin + size, side)) for begin, size, side in zip(corner, tile, grid, strict=True))
        expected += [row_major(grid, place) for place in itertools.product(*inside)]
    order = masks.tile_order(grid, tile=tile)
    assert order.tolist() == expected
    assert order.dtype == torch.int64


def z_number(place, n_bits=4):
    bits = (format(coordinate, f"0{n_bits}b") for coordinate in place)
    return int("".join("".join(column) for column in zip(*bits, strict=True)), 2)


@given(grid=GRIDS)
@settings(deadline=None, max_examples=40)
def test_morton_sorts_interleaved_bits(grid):
    places = sorted(itertools.product(*(range(side) for side in grid)), key=z_number)
    assert masks.morton_order(grid).tolist() == [row_major(grid, place) for place in places]


@pytest.mark.parametrize("grid", [(40_000, 1, 1, 1), (1, 2, 1, 1, 17_000), (1,) * 30 + (9,)])
def test_morton_sorts_more_bits_than_a_number_has(grid):
    places = sorted(itertools.product(*(range(side) for side in grid)), key=lambda place: z_number(place, 17))
    assert masks.morton_order(grid).tolist() == [row_major(grid, place) for place in places]


def test_more_axes_than_tokens_fill_are_refused():
    with pytest.raises(ValueError, match="grid: expected at most 31 axes, got 65"):
        masks.hilbert_order((1,) * 65)


def hilbert_places(n_bits):
    """The plane curve by its recursive definition: four copies, the first and the last reflected."""
    if n_bits == 0:
        return [(0, 0)]
    half, smaller = 2 ** (n_bits - 1), hilbert_places(n_bits - 1)
    return (
        [(x, y) for y, x in smaller]
        + [(x, y + half) for x, y in smaller]
        + [(x + half, y + half) for x, y in smaller]
        + [(2 * half - 1 - x, half - 1 - y) for y, x in smaller]
    )


@pytest.mark.parametrize("n_bits", [0, 1, 2, 3, 4, 5])
def test_hilbert_of_the_plane_is_the_recursive_curve(n_bits):
    side = 2**n_bits
    tokens = masks.hilbert_order((side, side)).tolist()
    # which of its two axes the curve takes first alternates with the number of bits
    curves = [hilbert_places(n_bits), [(y, x) for x, y in hilbert_places(n_bits)]]
    assert tokens in [[x * side + y for x, y in curve] for curve in curves]


@pytest.mark.parametrize("grid", [(8,), (4, 4), (16, 16), (2, 2, 2), (8, 8, 8)])
def test_hilbert_takes_one_step_at_a_time(grid):
    tokens = masks.hilbert_order(grid)
    places = torch.stack(torch.unravel_index(tokens, grid))
    assert (places.diff(dim=1).abs().sum(0) == 1).all()


@given(grid=GRIDS)
@settings(deadline=None, max_examples=40)
def test_every_token_comes_once(grid):
    for order in (masks.morton_order(grid), masks.hilbert_order(grid)):
        assert sorted(order.tolist()) == list(range(math.prod(grid)))


@given(side=st.integers(1, 8), wide=st.integers(1, 8))
@settings(deadline=None, max_examples=20)
def test_other_grids_follow_the_curve_around_them(side, wide):
    """What lies beyond the grid is left out, the rest keeps its order."""
    for order_of in (masks.morton_order, masks.hilbert_order):
        around = 1 << (max(side, wide) - 1).bit_length()
        places = [divmod(token, around) for token in order_of((around, around)).tolist()]
        kept = [x * wide + y for x, y in places if x < side and y < wide]
        assert order_of((side, wide)).tolist() == kept


def test_argsort_is_the_way_back():
    order = masks.tile_order((8, 12), tile=(4, 4))
    tokens = torch.arange(96)
    assert tokens[order][torch.argsort(order)].equal(tokens)


def test_an_int_is_one_axis():
    for order in (masks.morton_order(10), masks.hilbert_order(10), masks.tile_order(10, tile=3)):
        assert order.tolist() == list(range(10))


@pytest.mark.parametrize("curve", ["morton", "hilbert"])
def test_a_curve_is_named_where_a_mask_takes_an_order(curve):
    grid, order = (16, 32), getattr(masks, f"{curve}_order")
    given = masks.neighborhood(grid, kernel=5, order=order(grid), block_size=64)
    assert masks.neighborhood(grid, kernel=5, order=curve, block_size=64) == given
    written = f"neighborhood(grid=(16, 32), kernel=5, order='{curve}')"
    assert masks.build(written, 16 * 32, block_size=64) == given
    assert given != masks.neighborhood(grid, kernel=5, block_size=64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: masks.neighborhood((4, 4), kernel=3, order="peano"),
            ValueError,
            "order: .* \"hilbert\" .* got 'peano'",
        ),
        (lambda: masks.tile_order((4, 4), tile=0), ValueError, "tile: .* at least 1, got 0"),
        (lambda: masks.tile_order((4, 4), tile=(2, 2, 2)), ValueError, "tile: .* each of 2 axes, got 3"),
        (lambda: masks.tile_order((4, 4), tile=1.0), TypeError, "tile: .* got 1.0"),
        (lambda: masks.morton_order((4, 0)), ValueError, "grid: .* at least 1, got 0"),
        (lambda: masks.hilbert_order([]), ValueError, "grid: .* got none"),
        (lambda: masks.hilbert_order("44"), TypeError, "grid: .* got '44'"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
