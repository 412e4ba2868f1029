"""Sources: sample n is always the same and belongs to one split."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import listops, pathfinder, sources
from benchmarks.lra.sources import ListOpsSource, PathfinderSource, Source

TINY = listops.Preset(max_depth=3, max_args=3, min_length=3, max_length=12)
SOURCES = [ListOpsSource(TINY), PathfinderSource(pathfinder.preset(32, contour_length=6))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("split", sorted(sources.FIRST_NUMBER))
def test_a_sample_is_a_function_of_its_place(source: Source, split: str) -> None:
    together = source.draw(split, np.arange(20))
    assert together.dtype == source.dtype
    assert (source.draw(split, np.array([13, 2])) == together[[13, 2]]).all()


def test_splits_of_listops_share_no_expression() -> None:
    """Of expressions of at most 11 tokens, so few exist that independent splits would share hundreds."""
    source = ListOpsSource(TINY)
    seen = {
        split: {record["tokens"].tobytes() for record in source.draw(split, np.arange(400))}
        for split in sources.FIRST_NUMBER
    }
    assert not seen["test"] & seen["validation"]
    assert not (seen["test"] | seen["validation"]) & (seen["train"] | seen["fresh"])
    assert len(seen["train"]) < 400


def test_splits_of_pathfinder_share_no_image() -> None:
    source = SOURCES[1]
    images = [
        record["image"].tobytes() for split in sources.FIRST_NUMBER for record in source.draw(split, np.arange(200))
    ]
    assert len(set(images)) == 800


def test_records_of_listops_are_its_samples() -> None:
    source = ListOpsSource(listops.PRESETS["small"], seed=3)
    for record in source.draw("train", np.arange(50)):
        length = record["length"]
        assert listops.evaluate(record["tokens"][:length].tolist()) == record["label"]
        assert not record["tokens"][length:].any()
        assert record["tokens"][:length].all()


def test_the_split_of_an_expression_does_not_bend_its_distribution() -> None:
    """One in eight, and lengths and labels as without splits."""
    samples = listops.generate(4000, listops.PRESETS["small"], seed=0)
    for split, share in (("test", 1 / 8), ("validation", 1 / 8), ("train", 6 / 8)):
        members = [sample for sample in samples if sources.split_of(sample.tokens) == split]
        assert len(members) / 4000 == pytest.approx(share, abs=0.025)
        lengths = np.array([len(sample.tokens) for sample in members])
        everyone = np.array([len(sample.tokens) for sample in samples])
        assert lengths.mean() == pytest.approx(everyone.mean(), abs=4 * everyone.std() / len(members) ** 0.5)


def test_names_tell_settings_and_seeds_apart() -> None:
    rules = pathfinder.preset(32)
    several: list[Source] = [
        PathfinderSource(rules),
        PathfinderSource(rules, seed=1),
        PathfinderSource(dataclasses.replace(rules, distractor_dashes=40)),
        ListOpsSource(TINY),
        ListOpsSource(TINY, seed=1),
    ]
    assert len({source.name for source in several}) == 5


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of"):
        SOURCES[1].draw("dev", np.arange(2))
