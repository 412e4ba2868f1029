"""Token orders for grids: tiles and space-filling curves, as permutations of the row-major tokens.

Neighbors on the grid then share blocks; the masks of grid.py take such a permutation as `order=`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .canvas import MAX_TOKENS
from .checks import read_integer, read_integers
from .public import public

Grid = int | Sequence[int]

# with two tokens per axis, 31 axes reach MAX_TOKENS
MAX_AXES = 31


def read_grid(grid: Grid) -> tuple[int, ...]:
    """The sides of a grid, each at least 1; an int is a grid of one axis.

    >>> read_grid([4, 6])
    (4, 6)
    """
    sides = grid if isinstance(grid, Sequence) and not isinstance(grid, str | bytes) else (grid,)
    if not len(sides):
        raise ValueError("grid: expected the tokens along each axis, at least one axis, got none")
    if len(sides) > MAX_AXES:
        raise ValueError(f"grid: expected at most {MAX_AXES} axes, got {len(sides)}: leave out those of one token")
    read = tuple(read_integer("grid", side, at_least=1, unit="tokens") for side in sides)
    if math.prod(read) > MAX_TOKENS:
        raise ValueError(f"grid: expected at most {MAX_TOKENS} tokens, got {math.prod(read)}")
    return read


def read_per_axis(
    name: str, value: int | Sequence[int], grid: Sequence[int], *, at_least: int, unit: str = "tokens"
) -> tuple[int, ...]:
    """One int for each axis of the grid; a single int applies to all.

    >>> read_per_axis("kernel", 3, (4, 6), at_least=1)
    (3, 3)
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return (read_integer(name, value, at_least=at_least, unit=unit),) * len(grid)
    if len(value) != len(grid):
        raise ValueError(f"{name}: expected an int, or one for each of {len(grid)} axes, got {len(value)}: {value!r}")
    return tuple(read_integer(name, number, at_least=at_least, unit=unit) for number in value)


def read_order(order: torch.Tensor | np.ndarray | Sequence[int] | str | None, grid: Sequence[int]) -> np.ndarray | None:
    """A permutation of the tokens of the grid as int64 (tokens,), or None: row-major. A string names a curve."""
    if order is None:
        return None
    if isinstance(order, str):
        curves = {"morton": morton_order, "hilbert": hilbert_order}
        if order not in curves:
            raise ValueError(f'order: expected "morton", "hilbert" or the token at each position, got {order!r}')
        return curves[order](grid).numpy()
    tokens, n_tokens = read_integers("order", order), math.prod(grid)
    if tokens.size != n_tokens:
        raise ValueError(f"order: expected one token for each of {n_tokens} positions of the grid, got {tokens.size}")
    is_outside = (tokens < 0) | (tokens >= n_tokens)
    if is_outside.any():
        raise ValueError(f"order: expected tokens from 0 to {n_tokens - 1}, got {tokens[is_outside][0]}")
    counts = np.bincount(tokens, minlength=n_tokens)
    if (counts > 1).any():
        raise ValueError(f"order: expected every token once, got {counts.argmax()} {counts.max()} times")
    return tokens


def _places(grid: Sequence[int]) -> np.ndarray:
    """int64 (axes, tokens): the coordinates of the row-major tokens."""
    return np.indices(grid).reshape(len(grid), -1)


def _by_bits(places: np.ndarray, n_bits: int) -> np.ndarray:
    """int64 (tokens,): tokens sorted by the interleaved bits of their coordinates, highest bits first."""
    # all interleaved bits may exceed 64, so sort by several codes
    at_once = 62 // len(places)
    codes = []
    for stop in range(n_bits, 0, -at_once):
        code = np.zeros(places.shape[1], dtype=np.int64)
        for bit in range(stop - 1, max(0, stop - at_once) - 1, -1):
            for place in places:
                code = code << 1 | place >> bit & 1
        codes.append(code)
    # lexsort takes the most significant key last
    return np.lexsort(codes[::-1]) if codes else np.zeros(1, dtype=np.int64)


def _n_bits(grid: Sequence[int]) -> int:
    # enough for the longest side
    return (max(grid) - 1).bit_length()


@public
def tile_order(grid: Grid, *, tile: int | Sequence[int]) -> torch.Tensor:
    """Token order by tiles: tiles in row-major order, and tokens in row-major order within each tile.

    The last tile of an axis may be smaller. If a tile holds a whole number of blocks, a mask of whole tiles, such as
    `sliding_tile`, has full blocks only.

    grid=(2, 4), tile=2 gives 0 1 4 5, then 2 3 6 7:
        0 1 | 2 3
        4 5 | 6 7

    grid     tokens along each axis
    tile     tokens of a tile along each axis; an int for all of them
    returns  int64 (tokens,): the row-major token at each position, so x[:, :, order] reorders a tensor and
             torch.argsort(order) restores it
    raises   ValueError if a side is less than 1, or tile does not have one entry per axis

    Zhang et al., "Fast Video Generation with Sliding Tile Attention", arXiv:2502.04507, section 3.

    >>> tile_order((2, 4), tile=2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    grid = read_grid(grid)
    tiles = np.array(read_per_axis("tile", tile, grid, at_least=1))[:, None]
    places = _places(grid)
    # most significant key last; lexsort is stable, so tokens of a tile stay row-major
    return torch.from_numpy(np.lexsort((places // tiles)[::-1]).astype(np.int64))


@public
def morton_order(grid: Grid) -> torch.Tensor:
    """Z-order (Morton) curve: squares within squares, on a grid with any sides.

    If both sides are the same power of two, every aligned run of 4**k positions is a square of 2**k by 2**k tokens.
    Other grids follow the curve of the enclosing power of two, and skip the tokens beyond the grid.

    grid=(4, 4), the position of each token:
        0  1  4  5
        2  3  6  7
        8  9 12 13
       10 11 14 15

    grid     tokens along each axis
    returns  int64 (tokens,): the row-major token at each position
    raises   ValueError if a side is less than 1

    Morton, "A Computer Oriented Geodetic Data Base", IBM, 1966.

    >>> morton_order((2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    grid = read_grid(grid)
    return torch.from_numpy(_by_bits(_places(grid), _n_bits(grid)))


@public
def hilbert_order(grid: Grid) -> torch.Tensor:
    """Hilbert curve: like the Z-order curve, but without jumps, on a grid with any sides.

    If all sides are the same power of two, consecutive positions are neighbors, so blocks of any size are compact.
    Other grids follow the curve of the enclosing power of two, and skip the tokens beyond the grid.

    grid=(4, 4), the position of each token:
        0  1 14 15
        3  2 13 12
        4  7  8 11
        5  6  9 10

    grid     tokens along each axis
    returns  int64 (tokens,): the row-major token at each position
    raises   ValueError if a side is less than 1

    Skilling, "Programming the Hilbert curve", AIP Conference Proceedings 707, 2004.

    >>> hilbert_order((2, 2)).tolist()
    [0, 1, 3, 2]
    """
    grid = read_grid(grid)
    places, n_bits = _places(grid), _n_bits(grid)
    # Skilling's transposed index: undo the rotation of each square from coarse to fine, then Gray-code
    for bit in range(n_bits - 1, 0, -1):
        below = (1 << bit) - 1
        for axis in range(len(grid)):
            is_high = (places[axis] >> bit & 1) == 1
            swapped = np.where(is_high, 0, (places[0] ^ places[axis]) & below)
            places[0] ^= np.where(is_high, below, swapped)
            places[axis] ^= swapped
    for axis in range(1, len(grid)):
        places[axis] ^= places[axis - 1]
    turns = np.zeros_like(places[0])
    for bit in range(n_bits - 1, 0, -1):
        turns ^= np.where(places[-1] >> bit & 1, (1 << bit) - 1, 0)
    return torch.from_numpy(_by_bits(places ^ turns, n_bits))
