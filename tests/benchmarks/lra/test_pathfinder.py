"""Pathfinder images: ink to the byte, published statistics, correct labels."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import paddles, pathfinder, snakes
from masks.random import _mix


def nearest_byte(ink: np.ndarray) -> list[list[int]]:
    return np.rint(np.maximum(ink, 0) * 255).astype(int).tolist()


def byte_below(ink: np.ndarray) -> list[list[int]]:
    return np.floor(np.maximum(ink, 0) * 255).astype(int).tolist()


def numbers(text: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in text.split("/")]


# ---- ink, measured on released images ----


@pytest.mark.parametrize(
    ("radius", "rows"),
    [
        (3.0, ("0 3 0 56 136 158 103 5 0 1 0 / 3 0 56 235 245 236 255 158 0 1 0 / 3 0 136 245 218 224 224 228 28 0 1"
         " / 1 0 158 236 224 226 225 226 58 0 2")),
        (2.5, ("0 1 0 0 27 56 2 0 1 0 0 / 0 1 0 151 221 218 210 57 0 3 0 / 1 0 27 221 223 215 242 131 0 3 0"
         " / 2 0 56 218 215 213 226 153 0 1 0")),
    ],
)  # fmt: skip
def test_markers_have_the_ink_of_another_implementation(radius: float, rows: str) -> None:
    marker = paddles.marker(radius)
    center = marker.shape[0] // 2
    assert nearest_byte(marker[center - 3 : center + 1, center - 5 : center + 6]) == numbers(rows)


def test_markers_have_the_released_ink() -> None:
    """A disc of a released image of 128 pixels, without the ringing around it, where other ink may be brighter."""
    released = numbers("56 135 157 103 / 234 245 235 254 / 245 218 223 224 / 235 223 225 225")
    marker = paddles.marker(3.0)
    center = marker.shape[0] // 2
    ours = [byte_below(marker)[center - 3 + row][center - 2 :][:4] for row in range(4)]
    assert ours[0] == released[0]
    # the one brightest pixel is 254 there
    assert np.abs(np.array(ours) - released).max() <= 1


@pytest.mark.parametrize(
    ("resolution", "margin", "corner", "rows"),
    [
        (128, 2, (-1, -2), "0 0 35 49 46 46 48 41 / 2 0 158 220 206 207 215 182 / 0 0 35 49 46 46 48 41"),
        (64, 1, (0, -2), "2 0 127 176 165 166 171 151 2 / 0 0 50 70 65 66 68 60 0"),
    ],
)
def test_dashes_have_the_released_ink(resolution: int, margin: int, corner: tuple[int, int], rows: str) -> None:
    rules = pathfinder.preset(resolution)
    # paddle 180 points along 0 degrees, to the right
    ink = pathfinder._tables(rules, margin).lines[180] * np.float32(rules.target_level)
    expected = np.array(numbers(rows))
    y, x = (ink.shape[0] // 2 + offset for offset in corner)
    assert byte_below(ink[y : y + expected.shape[0], x : x + expected.shape[1]]) == expected.tolist()


@pytest.mark.parametrize(
    ("resolution", "margin", "usable", "continuations"),
    [(32, 1, 30, 18), (64, 1, 95, 38), (128, 2, 354, 41), (128, 3, 360, 49), (256, 3, 360, 49)],
)
def test_orientations_are_those_of_the_original(resolution: int, margin: int, usable: int, continuations: int) -> None:
    tables = pathfinder._tables(pathfinder.preset(resolution), margin)
    assert (tables.footprint_sizes > 0).sum() == usable
    assert len(tables.heads) == continuations


def test_a_step_along_an_axis_is_straight() -> None:
    """ceil(distance * sin(pi)) is 1: added to a coordinate, as the original does, the float's last bit vanishes."""
    tables = pathfinder._tables(pathfinder.preset(128), 2)
    directions = {0: (0, -9), 90: (-9, 0), 180: (0, 9), 270: (9, 0)}
    assert all(tuple(tables.steps[paddle]) == step for paddle, step in directions.items())


# ---- statistics ----


@pytest.mark.sweep(by=lambda resolution, contour_length, **_: {resolution, ("length", contour_length)})
@pytest.mark.parametrize(
    ("resolution", "contour_length", "count", "mean", "deviation", "above_20", "attempts"),
    [
        (32, 14, 3000, 19.4, 49.6, 0.153, 291),
        (32, 9, 3000, 14.8, 44.6, 0.115, 64),
        (32, 6, 3000, 12.4, 41.7, 0.095, 21),
        (64, 9, 1200, 14.6, 42.4, 0.129, 176),
        (64, 6, 1500, 14.2, 41.7, 0.125, 11),
        (128, 14, 150, 9.50, 36.3, 0.082, 340),
        (128, 9, 300, 9.15, 35.7, 0.079, 11),
        (128, 6, 300, 8.86, 35.2, 0.076, 2),
        (256, 14, 300, 2.46, 20.5, 0.017, 8),
        (256, 6, 300, 1.94, 18.3, 0.013, 2),
    ],
)
def test_images_have_the_statistics_of_another_implementation(
    resolution: int, contour_length: int, count: int, mean: float, deviation: float, above_20: float, attempts: float
) -> None:
    """That implementation was calibrated with released images of 64 and 128 pixels."""
    drawn = pathfinder.generate(pathfinder.preset(resolution, contour_length=contour_length), range(count), seed=7)
    images = drawn.images.astype(np.float32)
    assert images.mean() == pytest.approx(mean, rel=0.02)
    assert images.std() == pytest.approx(deviation, rel=0.01)
    # the reference has three decimals
    assert (images > 20).mean() == pytest.approx(above_20, rel=0.02, abs=0.0006)
    # attempts are geometric: their deviation is their mean
    assert drawn.attempts.mean() == pytest.approx(attempts, rel=0.05 + 4 / count**0.5)
    assert drawn.labels.mean() == pytest.approx(0.5, abs=4 * 0.5 / count**0.5)


def test_path_x_has_the_brightness_of_the_released_images() -> None:
    drawn = pathfinder.generate(pathfinder.preset(128), range(150), seed=11)
    bright = drawn.images[drawn.images > 60]
    assert np.percentile(bright, [10, 25, 50, 75, 90, 95]) == pytest.approx([80, 127, 156, 194, 215, 223], abs=1)


@pytest.mark.parametrize(("resolution", "distance"), [(32, 7), (64, 12), (128, 20), (256, 27)])
def test_snakes_begin_the_seed_distance_apart_and_end_inside(resolution: int, distance: int) -> None:
    rules = pathfinder.preset(resolution, contour_length=6)
    tips = pathfinder.generate(rules, range(300), seed=3).tips.astype(float)
    apart = np.linalg.norm(tips[:, 0, 0] - tips[:, 0, 1], axis=-1)
    # both coordinates are rounded
    assert np.abs(apart - distance).max() <= 0.5**0.5
    assert tips.min() >= 0
    assert tips.max() < resolution


# ---- what an image promises ----


def test_labels_say_whether_the_markers_share_a_snake() -> None:
    drawn = pathfinder.generate(pathfinder.preset(32, contour_length=6), range(200), seed=0)
    markers, tips = drawn.markers[:, 0], drawn.tips
    is_first_origin = (tips[:, 0, 0] == markers[:, 0]).all(-1)
    is_first_terminal = (tips[:, 1, 0] == markers[:, 1]).all(-1)
    is_second_terminal = (tips[:, 1, 1] == markers[:, 1]).all(-1)
    assert (is_first_terminal | is_second_terminal).all()
    assert (drawn.labels[:, 0] == np.where(is_first_origin, is_first_terminal, is_second_terminal)).all()


def test_markers_are_drawn_where_they_are_said_to_be() -> None:
    rules = pathfinder.preset(128, contour_length=6)
    drawn = pathfinder.generate(rules, range(30), seed=0)
    disc = paddles.marker(rules.marker_radius)
    half = disc.shape[0] // 2
    for image, ends in zip(drawn.images[:, 0], drawn.markers[:, 0], strict=True):
        for y, x in ends:
            ink = np.pad(image, half)[y : y + 2 * half, x : x + 2 * half]
            is_inside = np.pad(np.ones_like(image), half)[y : y + 2 * half, x : x + 2 * half] == 1
            assert (ink >= np.floor(disc * np.float32(255)))[is_inside].all()


def test_counterfactuals_are_one_image_with_four_pairs_of_markers() -> None:
    rules = pathfinder.preset(64, contour_length=6)
    plain = pathfinder.generate(rules, range(20), seed=5)
    pairs = pathfinder.generate(rules, range(20), seed=5, is_counterfactual=True)
    assert (plain.tips == pairs.tips).all()
    assert (pairs.labels == [1, 0, 0, 1]).all()
    for n in range(20):
        version = [(ends == plain.markers[n, 0]).all() for ends in pairs.markers[n]].index(True)
        assert (pairs.images[n, version] == plain.images[n, 0]).all()
        assert pairs.labels[n, version] == plain.labels[n, 0]
        for version, (origin, terminal) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
            ends = pairs.tips[n, 0, origin], pairs.tips[n, 1, terminal]
            assert (pairs.markers[n, version] == ends).all()


def test_an_image_is_a_function_of_its_number() -> None:
    rules = pathfinder.preset(128, contour_length=6)
    together = pathfinder.generate(rules, range(12), seed=9)
    apart = pathfinder.generate(rules, [7, 3, 2**63], seed=9)
    for field, other in zip(together, apart, strict=True):
        assert (field[[7, 3]] == other[:2]).all()
    other_seed = pathfinder.generate(rules, range(12), seed=10)
    assert not (together.images == other_seed.images).all(axis=(1, 2, 3)).any()
    assert len({image.tobytes() for image in together.images}) == 12


def test_images_of_path_x_have_either_margin() -> None:
    rules = pathfinder.preset(128, contour_length=6)
    drawn = pathfinder.generate(rules, range(40), seed=0)
    for margin in (2, 3):
        one = pathfinder.generate(dataclasses.replace(rules, margins=(margin,)), range(40), seed=0)
        share = (one.images == drawn.images).all(axis=(1, 2, 3)).mean()
        assert 0.2 < share < 0.8


def test_words_are_those_of_the_masks() -> None:
    words = np.arange(5, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    assert (snakes.mix(words) == _mix(words)).all()
    assert [int(pathfinder.snakes.mix(word)) for word in words] == _mix(words).tolist()


@pytest.mark.parametrize(
    ("resolution", "digest"),
    [(32, "d8d585f177c0878e"), (64, "1895ed03261faf0b"), (128, "7beb543750f5bfb2"), (256, "9ff718e9d38a2a14")],
)
def test_images_are_the_same_on_every_machine(resolution: int, digest: str) -> None:
    drawn = pathfinder.generate(pathfinder.preset(resolution), range(3), seed=0)
    assert hashlib.sha256(drawn.images.tobytes()).hexdigest()[:16] == digest


# ---- settings ----


def test_settings_are_those_published() -> None:
    placed = {resolution: pathfinder.preset(resolution).n_distractors for resolution in pathfinder.PRESETS}
    assert placed == {32: 5, 64: 11, 128: 17, 256: 7}


def test_a_curriculum_may_move_the_snakes_anywhere() -> None:
    rules = dataclasses.replace(pathfinder.preset(32, contour_length=3), seed_distances=(3, 10), is_central=False)
    tips = pathfinder.generate(rules, range(500), seed=0).tips.astype(float)
    apart = np.linalg.norm(tips[:, 0, 0] - tips[:, 0, 1], axis=-1)
    assert set(np.rint(apart)) == set(range(3, 11))
    assert tips[:, 0, 0].min() < 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed_distances": (0, 7)}, "1 <= least <= most"),
        ({"seed_distances": (7, 6)}, "1 <= least <= most"),
        ({"seed_distances": (7, 9)}, "size must be more than 36 pixels"),
        ({"contour_length": 2}, "contour_length must be 3 dashes or more, got 2"),
        ({"margins": ()}, "margins must be 1 pixel or more"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(pathfinder.preset(32), **changes)


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(ValueError, match="resolution must be one of"):
        pathfinder.preset(48)


def test_rules_without_room_are_refused() -> None:
    rules = dataclasses.replace(pathfinder.preset(32), contour_length=300)
    with pytest.raises(ValueError, match="leaves no room for two snakes"):
        pathfinder.generate(rules, [0], seed=0)


def test_rules_without_room_are_refused_after_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw(*arguments: Any) -> None:
        keys, attempts = arguments[2], arguments[-1]
        drawn.append(len(keys))
        attempts[:] = 0

    monkeypatch.setattr(snakes, "draw", draw)
    with pytest.raises(ValueError, match="leaves no room for two snakes"):
        pathfinder.generate(pathfinder.preset(128), range(100), seed=0)
    assert drawn == [1]
