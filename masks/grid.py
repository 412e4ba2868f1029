"""Masks on a grid of pixels or of frames and pixels: neighborhoods, windows, tiles and axes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .boxes import Axis, boxes
from .canvas import BlockSize, Canvas, read_canvas
from .checks import read_integers, read_switch
from .orders import Grid, read_grid, read_order, read_per_axis
from .public import public

PerAxis = int | Sequence[int]
Order = torch.Tensor | np.ndarray | Sequence[int] | str


def _canvas(grid: Sequence[int], block_size: BlockSize) -> Canvas:
    return read_canvas(math.prod(grid), block_size)


def _read_causal(causal: bool | Sequence[bool], grid: Sequence[int]) -> tuple[bool, ...]:
    if not isinstance(causal, Sequence):
        return (read_switch("causal", causal),) * len(grid)
    if len(causal) != len(grid) or isinstance(causal, str | bytes):
        raise ValueError(f"causal: expected a bool, or one for each of {len(grid)} axes, got {causal!r}")
    return tuple(read_switch("causal", switch) for switch in causal)


def _neighborhood(side: int, *, kernel: int, dilation: int, stride: int, causal: bool) -> Axis:
    coordinate = np.arange(side)
    # every dilation-th coordinate forms a sequence of its own, with places 0 to size - 1
    group, place = coordinate % dilation, coordinate // dilation
    size = -(-(side - group) // dilation)
    group_of_stride = place // stride * stride
    if causal:
        leader = np.minimum(group_of_stride + stride - 1, size - 1)
        low, high = np.maximum(leader - kernel + 1, 0), place
    else:
        leader = np.minimum(group_of_stride + stride // 2, size - 1)
        low = np.clip(leader - kernel // 2, 0, size - kernel)
        high = low + kernel - 1
    return Axis(low * dilation + group, high * dilation + group, dilation if kernel > 1 else 1)


@public
def neighborhood(
    grid: Grid,
    *,
    kernel: PerAxis,
    dilation: PerAxis = 1,
    stride: PerAxis = 1,
    causal: bool | Sequence[bool] = False,
    order: Order | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to the nearest `kernel` tokens along every axis, as many at the edges as in the interior.

    Along an axis of n tokens without dilation, token x sees kernel tokens from clamp(leader - kernel // 2, 0, n -
    kernel) on. The leader is x, or the middle one of the `stride` tokens that share a window. Along a causal axis, x
    sees the tokens leader - kernel + 1 to x, fewer at the beginning, and the leader is the last token of its group.
    With dilation, this applies to the sequence of every dilation-th token. A pair attends if it attends along every
    axis.

    grid=5, kernel=3, then also stride=2, or causal:
        1 1 1 0 0     1 1 1 0 0     1 0 0 0 0
        1 1 1 0 0     1 1 1 0 0     1 1 0 0 0
        0 1 1 1 0     0 0 1 1 1     1 1 1 0 0
        0 0 1 1 1     0 0 1 1 1     0 1 1 1 0
        0 0 1 1 1     0 0 1 1 1     0 0 1 1 1

    grid        tokens along each axis, (height, width) or (frames, height, width), row-major; an int is one axis
    kernel      tokens seen along each axis; an int for all of them
    dilation    distance between these tokens; kernel * dilation is at most the side
    stride      number of neighboring tokens that share a window, 1 to kernel
    causal      bool, or one for each axis: True sees no later token along the axis
    order       int64 (tokens,): the token at each position, as from `tile_order`; or "morton" or "hilbert". None is
                row-major
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, tokens, tokens), shared by every head, exact to the token
    raises      ValueError if a number is out of range, or a sequence does not have one entry per axis

    Hassani et al., "Neighborhood Attention Transformer", arXiv:2204.07143, section 3.1; dilation arXiv:2209.15001,
    causal axes arXiv:2403.04690, stride "Generalized Neighborhood Attention", arXiv:2504.16922, section 3.

    >>> neighborhood((64, 64), kernel=7).density
    0.15234375
    """
    grid = read_grid(grid)
    canvas, token_order = _canvas(grid, block_size), read_order(order, grid)
    kernels = read_per_axis("kernel", kernel, grid, at_least=1)
    dilations = read_per_axis("dilation", dilation, grid, at_least=1)
    strides = read_per_axis("stride", stride, grid, at_least=1)
    switches = _read_causal(causal, grid)
    axes = []
    for side, size, step, shared, switch in zip(grid, kernels, dilations, strides, switches, strict=True):
        if size * step > side:
            raise ValueError(
                f"kernel, dilation: expected kernel * dilation of at most the side, {side} tokens, got {size} * {step}"
            )
        if shared > size:
            raise ValueError(f"stride: expected at most the kernel, {size} tokens, got {shared}")
        axes.append(_neighborhood(side, kernel=size, dilation=step, stride=shared, causal=switch))
    return boxes(canvas, grid, axes, token_order)


@public
def swin(
    grid: Grid, *, window: PerAxis, shift: PerAxis = 0, order: Order | None = None, block_size: BlockSize = 128
) -> BlockLayout:
    """Each token attends to the tokens of its own window; windows tile the grid, offset by `shift`.

    Along each axis, the window of token x is (x - shift) // window: tokens before the shift form a window, and the last
    window may be smaller. Masked attention on a cyclically shifted feature map keeps the same pairs.

    grid=5, window=2, and with shift=1:
        1 1 0 0 0     1 0 0 0 0
        1 1 0 0 0     0 1 1 0 0
        0 0 1 1 0     0 1 1 0 0
        0 0 1 1 0     0 0 0 1 1
        0 0 0 0 1     0 0 0 1 1

    grid        tokens along each axis, row-major; an int is one axis
    window      tokens of a window along each axis; an int for all of them
    shift       offset of the windows along each axis, 0 to window - 1; the paper uses window // 2 in every other layer
    order       int64 (tokens,): the token at each position, as from `tile_order`; or "morton" or "hilbert". None is
                row-major
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, tokens, tokens), shared by every head, exact to the token
    raises      ValueError if a number is out of range, or a sequence does not have one entry per axis

    Liu et al., "Swin Transformer", arXiv:2103.14030, section 3.2.

    >>> swin((64, 64), window=8).density
    0.125
    >>> from masks import tile_order
    >>> swin((64, 64), window=8, order=tile_order((64, 64), tile=8), block_size=64).density
    0.015625
    """
    grid = read_grid(grid)
    canvas, token_order = _canvas(grid, block_size), read_order(order, grid)
    windows = read_per_axis("window", window, grid, at_least=1)
    shifts = read_per_axis("shift", shift, grid, at_least=0)
    axes = []
    for side, size, ahead in zip(grid, windows, shifts, strict=True):
        if ahead >= size:
            raise ValueError(f"shift: expected less than the window, {size} tokens, got {ahead}")
        # larger shifts and windows have no effect
        first = min(ahead, side)
        width = min(size, side + first + 1)
        begin = (np.arange(side) - first) // width * width + first
        axes.append(Axis(np.maximum(begin, 0), np.minimum(begin + width, side) - 1))
    return boxes(canvas, grid, axes, token_order)


@public
def sliding_tile(
    grid: Grid, *, kernel: PerAxis, tile: PerAxis, order: Order | None = None, block_size: BlockSize = 128
) -> BlockLayout:
    """Each tile of tokens attends to the nearest tiles along every axis: `neighborhood` with tiles instead of tokens.

    Along an axis of n tiles, tile t sees m = kernel // tile tiles from clamp(t - m // 2, 0, n - m) on. A pair attends
    if its tiles do so along all axes. With order=tile_order(grid, tile=tile) and tiles of one or more whole blocks,
    every block is full or empty; in row-major order most blocks are partial.

    grid=6, kernel=4, tile=2:
        1 1 1 1 0 0
        1 1 1 1 0 0
        1 1 1 1 0 0
        1 1 1 1 0 0
        0 0 1 1 1 1
        0 0 1 1 1 1

    grid        tokens along each axis, row-major; an int is one axis
    kernel      tokens seen along each axis, a multiple of the tile; an int for all of them
    tile        tokens of a tile along each axis; the last tile of an axis may be smaller
    order       int64 (tokens,): the token at each position, as from `tile_order`; or "morton" or "hilbert". None is
                row-major
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, tokens, tokens), shared by every head, exact to the token
    raises      ValueError if kernel is not a multiple of tile or exceeds the grid, if a number is out of range, or if a
                sequence does not have one entry per axis

    Zhang et al., "Fast Video Generation with Sliding Tile Attention", arXiv:2502.04507, section 3.

    >>> from masks import tile_order
    >>> layout = sliding_tile((48, 48), kernel=24, tile=8, order=tile_order((48, 48), tile=8), block_size=64)
    >>> layout.density, len(layout.bitmasks)
    (0.25, 0)
    """
    grid = read_grid(grid)
    canvas, token_order = _canvas(grid, block_size), read_order(order, grid)
    kernels = read_per_axis("kernel", kernel, grid, at_least=1)
    tiles = read_per_axis("tile", tile, grid, at_least=1)
    axes = []
    for side, size, tile_side in zip(grid, kernels, tiles, strict=True):
        n_tiles, n_seen = -(-side // tile_side), size // tile_side
        if size % tile_side or n_seen > n_tiles:
            raise ValueError(
                f"kernel: expected a multiple of the tile, {tile_side} tokens, of at most {n_tiles} tiles, got {size}"
            )
        low = np.clip(np.arange(side) // tile_side - n_seen // 2, 0, n_tiles - n_seen) * tile_side
        axes.append(Axis(low, np.minimum(low + size, side) - 1))
    return boxes(canvas, grid, axes, token_order)


@public
def axial(
    grid: Grid,
    *,
    axes: Sequence[int] | None = None,
    causal: bool = False,
    order: Order | None = None,
    block_size: BlockSize = 128,
) -> BlockLayout:
    """Each token attends to itself and to the tokens that differ from it along a single axis.

    The mask is the union over `axes`. Axial Transformers alternate axes=[0] and axes=[1] from layer to layer.

    grid=(2, 3), all axes, and axes=[1]:
        1 1 1 1 0 0     1 1 1 0 0 0
        1 1 1 0 1 0     1 1 1 0 0 0
        1 1 1 0 0 1     1 1 1 0 0 0
        1 0 0 1 1 1     0 0 0 1 1 1
        0 1 0 1 1 1     0 0 0 1 1 1
        0 0 1 1 1 1     0 0 0 1 1 1

    grid        tokens along each axis, row-major; an int is one axis
    axes        axes to attend along, from 0; None means all
    causal      True sees no later token along the axis
    order       int64 (tokens,): the token at each position, as from `tile_order`; or "morton" or "hilbert". None is
                row-major
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, tokens, tokens), shared by every head, exact to the token
    raises      ValueError if an axis does not exist or axes is empty

    Ho et al., "Axial Attention in Multidimensional Transformers", arXiv:1912.12180, section 3.

    >>> axial((64, 64), axes=[1]).density, axial((64, 64), axes=[0]).density
    (0.03125, 1.0)
    """
    grid = read_grid(grid)
    canvas, token_order = _canvas(grid, block_size), read_order(order, grid)
    causal = read_switch("causal", causal)
    chosen = np.arange(len(grid)) if axes is None else read_integers("axes", axes)
    if not chosen.size:
        raise ValueError("axes: expected at least one axis, got none")
    is_outside = (chosen < 0) | (chosen >= len(grid))
    if is_outside.any():
        raise ValueError(f"axes: expected axes from 0 to {len(grid) - 1}, got {chosen[is_outside][0]}")
    places = [np.arange(side) for side in grid]
    points = [Axis(place, place) for place in places]
    layouts = []
    for line in sorted(set(chosen.tolist())):
        ends = places[line] if causal else np.full_like(places[line], grid[line] - 1)
        seen = [*points[:line], Axis(np.zeros_like(ends), ends), *points[line + 1 :]]
        layouts.append(boxes(canvas, grid, seen, token_order))
    return functools.reduce(operator.or_, layouts)
