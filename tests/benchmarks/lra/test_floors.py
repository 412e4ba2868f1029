"""Floors: shortcuts have their published accuracy, and chance accuracy once balanced."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import floors, listops, pathfinder, scoring
from benchmarks.lra.sources import PathfinderSource


@pytest.fixture(scope="module")
def marked() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Markers, labels and probabilities of 6,000 images of 32 pixels with contours of 6."""
    source = PathfinderSource(pathfinder.preset(32, contour_length=6))
    train, test = source.draw("train", np.arange(16_000)), source.draw("test", np.arange(6_000))
    reader = floors.fit_marker_reader(train["markers"], train["label"], size=32)
    return test["markers"], test["label"], floors.marker_probabilities(reader, test["markers"])


@pytest.mark.thorough
def test_markers_alone_are_worth_what_another_implementation_found(marked: tuple) -> None:
    """0.741 for contours of 6 in 32 x 32."""
    _, labels, probabilities = marked
    assert ((probabilities > 0.5) == labels).mean() == pytest.approx(0.741, abs=0.02)


def test_balancing_takes_the_worth_of_the_markers_away(marked: tuple) -> None:
    _, labels, probabilities = marked
    weights = floors.marker_weights(probabilities, labels)
    is_right = (probabilities > 0.5) == labels
    # a reader of 16,000 samples is a little too sure
    assert np.average(is_right, weights=weights) == pytest.approx(0.5, abs=0.05)
    # both labels weigh the same
    assert np.average(labels == 1, weights=weights) == pytest.approx(0.5, abs=0.05)


def test_weights_balance_exactly_what_is_known_exactly() -> None:
    """Of markers with p = 0.8, 8 of 10 samples are positive: 8 * 0.25 against 2 * 1."""
    labels = np.array([1] * 8 + [0] * 2)
    weights = floors.marker_weights(np.full(10, 0.8), labels)
    assert weights[:8] == pytest.approx([0.25] * 8)
    assert weights[8:] == pytest.approx([1.0] * 2)
    assert np.average(labels == 1, weights=weights) == pytest.approx(0.5)


def test_the_reader_does_not_know_which_marker_is_the_origin(marked: tuple) -> None:
    torch.manual_seed(0)
    reader = floors.MarkerReader(32)
    markers = marked[0][:50]
    found, swapped = (floors.marker_probabilities(reader, each) for each in (markers, markers[:, ::-1]))
    np.testing.assert_allclose(found, swapped, rtol=1e-6)


def test_fitting_leaves_the_global_stream_alone(marked: tuple) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again = (floors.fit_marker_reader(marked[0][:600], marked[1][:600], size=32) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))


def test_the_root_operator_is_worth_chance_once_balanced() -> None:
    samples = listops.generate(3000, listops.PRESETS["small"], seed=0)
    roots = np.array([sample.tokens[0] for sample in samples])
    labels = np.array([sample.label for sample in samples])
    floor, weights = floors.best_guess(roots, labels)
    guesses = {root: np.bincount(labels[roots == root]).argmax() for root in np.unique(roots)}
    is_right = np.array([guesses[root] for root in roots]) == labels
    assert is_right.mean() == pytest.approx(floor)
    # short expressions never have one of the 40 pairs of an operator and a label
    n_pairs = len(set(zip(roots.tolist(), labels.tolist(), strict=True)))
    assert np.average(is_right, weights=weights) == pytest.approx(4 / n_pairs)
    assert n_pairs == 39
    assert np.average(np.ones(3000), weights=weights) == pytest.approx(1.0)


@pytest.mark.parametrize(("resolution", "count"), [(32, 600), (64, 100), (128, 40), (256, 30)])
def test_markers_are_found_to_the_pixel(resolution: int, count: int) -> None:
    rules = pathfinder.preset(resolution, contour_length=9)
    drawn = pathfinder.generate(rules, range(count), seed=0)
    found, truth = floors.find_markers(drawn.images[:, 0], radius=rules.marker_radius), drawn.markers[:, 0]
    # which of the two is the origin cannot be seen
    distance = np.minimum(*(np.abs(order - truth).max(axis=(1, 2)) for order in (found, found[:, ::-1])))
    assert (distance == 0).mean() > 0.98
    assert (distance <= 1).mean() > 0.99


def test_pairs_are_right_when_positives_score_higher() -> None:
    scores = np.array([[2.0, 1.0, 0.0, 3.0], [0.0, 1.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    # all four pairs; none; four ties
    assert floors.pair_accuracy(scores) == pytest.approx((4 + 0 + 2) / 12)


def test_a_result_is_never_an_accuracy_alone() -> None:
    result = scoring.Result("pathfinder32", 0.8, 0.656, "marker geometry", 0.71, 0.5, 2500, "generated", 0.75)
    assert str(result) == (
        "pathfinder32: accuracy 80.0% (+- 0.8%), floor 65.6% (marker geometry), balanced accuracy 71.0% (chance 50%), "
        "pairs 75.0%; 2500 samples, generated"
    )
