"""Geometry of Pathfinder dashes ("paddles"): shapes, margins and continuations, as tables over orientations.

Pixels are whole numbers (y, x), y down; the angle t points along (sin t, cos t). A step along an angle rounds up on
both axes, as the original does. Source: D. Linsley et al., "Learning long-range spatial dependencies with horizontal
gated recurrent units", arXiv:1805.08315, and its generator snakes2, which Long Range Arena used.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

# factor of supersampling
FINE = 2
N_DEGREES = 360
# integer weights give equal draws on every machine
WEIGHT_ONE = 2**16
# a coordinate in the middle of an image
SOMEWHERE = 64
OPAQUE = 255


class Tables(NamedTuple):
    """Tables over paddles.

    Paddles 0 .. 359 start a snake; they are placed by their tail and point along paddle - 180 degrees. Paddles 360 ..
    359 + K continue a snake; they are placed by their head.

    lines      float32 (360 + K, side, side): ink, centered on the placing pixel; ringing exceeds 0 .. 1
    rooms      uint8 (360 + K, side, side): the dash and `margin` pixels around it; 255 is fully occupied
    steps      int64 (360 + K, 2): from a paddle's pivot to the pivot of the next one
    weights    int64 (360 + K, K): weight of each continuation of a paddle, 0 .. 65536
    heads      int64 (K, 2): from a pivot to the head of each continuation
    seed_heads, seed_pivots  int64 (360, 2): from a first paddle's tail to its head and its pivot
    footprints int64 (360, most, 2): pixels that must be free around the tail of a first paddle
    footprint_sizes  int64 (360,): their number, -1 for an orientation that never fits
    disc       int64 (pixels, 2): the disc of radius `margin`
    """

    lines: np.ndarray
    rooms: np.ndarray
    steps: np.ndarray
    weights: np.ndarray
    heads: np.ndarray
    seed_heads: np.ndarray
    seed_pivots: np.ndarray
    footprints: np.ndarray
    footprint_sizes: np.ndarray
    disc: np.ndarray


def _disc(radius: int) -> np.ndarray:
    """bool (2 radius + 1, 2 radius + 1): pixels at most `radius` away from the center."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return y * y + x * x <= radius * radius


def _along(angle: float, distance: float, start: int) -> tuple[int, int]:
    """Offset along `angle`, rounded up on both axes; adding `start` absorbs the rounding error of sin(pi)."""
    y, x = (math.ceil(start + distance * part) - start for part in (math.sin(angle), math.cos(angle)))
    return y, x


def _turned_back(angle: float) -> float:
    """The opposite direction, within (-pi, pi]."""
    return angle - math.pi if angle >= 0 else angle + math.pi


def _draw(angle: float, length: int, thickness: float, margin: int) -> tuple[np.ndarray, np.ndarray]:
    """Ink (float32) and room (uint8) of the dash from the center along `angle`."""
    side = 2 * (length + math.ceil(thickness) + margin) + 1
    center = (side - 1) // 2 * FINE
    dy, dx = _along(angle, length * FINE, center)
    fine = Image.new("L", ((side - 1) * FINE + 1,) * 2, 0)
    ends = [(center, center), (center + dx, center + dy)]
    ImageDraw.Draw(fine).line(ends, fill=OPAQUE, width=round(thickness * FINE))
    dilated = ndimage.grey_dilation(np.asarray(fine), footprint=_disc(margin * FINE), mode="constant")
    room = Image.fromarray(dilated)
    # float, since bytes would clip the ringing
    ink = fine.convert("F").resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(ink) / np.float32(OPAQUE), np.asarray(room.resize((side, side), Image.Resampling.LANCZOS))


def _continuations(reach: int) -> np.ndarray:
    """int64 (K, 2): distinct pixels of the circle with that radius."""
    angles = np.arange(0, 360, 360 / (2 * reach * np.pi)) * np.pi / 180
    places = np.floor(reach * np.stack([np.sin(angles), np.cos(angles)], axis=1))
    return np.unique(places.astype(np.int64), axis=0)


def _footprint(room: np.ndarray, reach: int) -> np.ndarray:
    """int64 (pixels, 2): fully occupied pixels, shifted down and right by one as in the original."""
    offsets = np.argwhere(room == OPAQUE) - room.shape[0] // 2 + 1
    return offsets[(np.abs(offsets) <= reach).all(axis=1)]


def _finds_a_place(footprint: np.ndarray) -> bool:
    """Whether some of the footprint is inside at every pixel; otherwise the original finds no place."""
    y, x = footprint[:, 0], footprint[:, 1]
    return all(((vertical * y >= 0) & (horizontal * x >= 0)).any() for vertical in (1, -1) for horizontal in (1, -1))


@functools.cache
def tables(*, length: int, thickness: float, margin: int, continuity: float) -> Tables:
    """The tables of dashes of that length and thickness, `margin` pixels apart from everything else.

    continuity  how stiff a snake is: a turn by a costs cos(min(continuity * a, pi / 2)) ** 2
    """
    reach = length + margin
    # not math.radians: the last bit decides whether 2 sin(30 degrees) rounds up to 1 or to 2
    seed_angles = [(degree - 180) * math.pi / 180 for degree in range(N_DEGREES)]
    heads = _continuations(reach)
    angles = [math.atan2(y, x) for y, x in heads]
    # a paddle that continues is drawn from its head back to the pivot
    drawn = [_draw(angle, length, thickness, margin) for angle in seed_angles]
    drawn += [_draw(_turned_back(angle), length, thickness, margin) for angle in angles]
    rooms = np.stack([room for _, room in drawn])
    turns = np.abs(np.array(seed_angles + angles)[:, None] - np.array(angles))
    turns = np.minimum(turns, 2 * np.pi - turns)
    weights = np.cos(np.minimum(continuity * turns, np.pi / 2)) ** 2
    footprints = [_footprint(room, reach) for room in rooms[:N_DEGREES]]
    sizes = [len(footprint) if _finds_a_place(footprint) else -1 for footprint in footprints]
    padded = np.zeros((N_DEGREES, max(map(len, footprints)), 2), dtype=np.int64)
    for place, footprint in zip(padded, footprints, strict=True):
        place[: len(footprint)] = footprint
    seed_heads = np.array([_along(angle, length, SOMEWHERE) for angle in seed_angles])
    behind = np.array([_along(_turned_back(angle), reach, SOMEWHERE) for angle in seed_angles])
    return Tables(
        lines=np.stack([ink for ink, _ in drawn]),
        rooms=rooms,
        steps=np.array([_along(angle, length + 2 * margin, SOMEWHERE) for angle in seed_angles + angles]),
        weights=np.rint(weights * WEIGHT_ONE).astype(np.int64),
        heads=heads,
        seed_heads=seed_heads,
        seed_pivots=seed_heads + behind,
        footprints=padded,
        footprint_sizes=np.array(sizes),
        disc=np.argwhere(_disc(margin)) - margin,
    )


@functools.cache
def marker(radius: float) -> np.ndarray:
    """float32 (2 n, 2 n): the marker disc, centered at pixel (n, n), with maximum 1."""
    half = math.ceil(radius) + 4
    y, x = np.mgrid[-half * FINE : half * FINE, -half * FINE : half * FINE]
    fine = np.where(y * y + x * x <= (radius * FINE) ** 2, np.float32(OPAQUE), np.float32(0))
    disc = np.asarray(Image.fromarray(fine).resize((2 * half, 2 * half), Image.Resampling.LANCZOS))
    return disc / disc.max()
