"""Locates the two markers of a Pathfinder image from its pixels.

The floor of the released test set needs the marker positions, which the released files lack.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import paddles

# images per batch
AT_ONCE = 500


def _misfit(images: Tensor, disc: Tensor) -> Tensor:
    """Mean squared difference to the disc at each pixel: (n, 1, H, W) to (n, H, W). Outside the image is black."""
    is_ink = (disc > 0.5).float()
    half = disc.shape[0] // 2
    # an even kernel, whose centre is pixel (half, half)
    padded = F.pad(images, (half, half - 1, half, half - 1))
    squares = F.conv2d(padded**2, is_ink[None, None])
    products = F.conv2d(padded, (is_ink * disc)[None, None])
    return ((squares - 2 * products + (is_ink * disc**2).sum()) / is_ink.sum())[:, 0]


def find(images: np.ndarray, *, radius: float) -> np.ndarray:
    """int16 (n, 2, 2): positions (y, x) of the markers in images uint8 (n, H, W), the better match first.

    radius  of a marker, see pathfinder.PRESETS
    """
    disc = torch.from_numpy(paddles.marker(radius))
    places = [
        _find(torch.from_numpy(images[begin : begin + AT_ONCE]), disc) for begin in range(0, len(images), AT_ONCE)
    ]
    return torch.cat(places).short().numpy()


def _find(images: Tensor, disc: Tensor) -> Tensor:
    misfit = _misfit(images[:, None] / 255, disc)
    height, width = misfit.shape[1:]
    y, x = torch.arange(height)[:, None], torch.arange(width)
    found = []
    for _ in range(2):
        best = misfit.flatten(1).argmin(dim=1)
        place = torch.stack([best // width, best % width], dim=1)
        found.append(place)
        # excludes shifted matches of the same disc
        distance = (y - place[:, 0, None, None]) ** 2 + (x - place[:, 1, None, None]) ** 2
        misfit = misfit.masked_fill(distance <= (disc.shape[0] / 2 - 4) ** 2, torch.inf)
    return torch.stack(found, dim=1)
