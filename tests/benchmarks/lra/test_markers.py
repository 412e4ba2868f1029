"""Markers are found where they were drawn."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import markers, pathfinder


@pytest.mark.parametrize(("resolution", "count"), [(32, 600), (64, 100), (128, 40), (256, 30)])
def test_markers_are_found_to_the_pixel(resolution: int, count: int) -> None:
    rules = pathfinder.preset(resolution, contour_length=9)
    drawn = pathfinder.generate(rules, range(count), seed=0)
    found, truth = markers.find(drawn.images[:, 0], radius=rules.marker_radius), drawn.markers[:, 0]
    # which of the two is the origin cannot be seen
    distance = np.minimum(*(np.abs(order - truth).max(axis=(1, 2)) for order in (found, found[:, ::-1])))
    assert (distance == 0).mean() > 0.98
    assert (distance <= 1).mean() > 0.99
