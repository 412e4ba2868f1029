"""Batches: step n has the samples of step n, wherever training starts."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import batches, listops, pathfinder
from benchmarks.lra.batches import ExampleRows, FreshRows, PairRows, RecordRows, Steps, SymmetricRows
from benchmarks.lra.released import Example
from benchmarks.lra.sources import ListOpsSource, PathfinderSource

SMALL = ListOpsSource(listops.PRESETS["small"])


def first(steps: Steps, count: int) -> list[list[int]]:
    return list(itertools.islice(steps, count))


def test_an_epoch_sees_every_sample_once_in_an_order_of_its_own() -> None:
    steps = first(Steps(n=12, batch_size=4, seed=0), 6)
    epochs = [sum(steps[:3], []), sum(steps[3:], [])]  # noqa: RUF017 - a dozen numbers
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    assert first(Steps(n=12, batch_size=4, seed=1), 6) != steps


@pytest.mark.parametrize("n", [12, 13, None])
def test_steps_go_on_anywhere(n: int | None) -> None:
    whole = first(Steps(n=n, batch_size=4, seed=3), 10)
    for begin in (1, 3, 7):
        assert first(Steps(n=n, batch_size=4, seed=3, first_step=begin), 10 - begin) == whole[begin:]


@pytest.mark.parametrize("n", [12, None])
def test_processes_share_a_step(n: int | None) -> None:
    whole = first(Steps(n=n, batch_size=4, seed=3), 5)
    shares = [first(Steps(n=n, batch_size=4, seed=3, rank=rank, world=2), 5) for rank in range(2)]
    for step, *parts in zip(whole, *shares, strict=True):
        assert [len(part) for part in parts] == [2, 2]
        assert sorted(sum(parts, [])) == sorted(step)  # noqa: RUF017


class Groups:
    """Samples whose label is the process group of the process that loads them."""

    def take(self, places: np.ndarray) -> batches.Batch:
        size, labels = (len(places), 1), np.full(len(places), os.getpgrp())
        return batches._batch(np.zeros((*size, 8), np.uint8), np.full(size, 8), labels, places)


def test_workers_get_no_signals_that_a_training_gets_with_its_group() -> None:
    """Regression: SIGTERM, which `timeout` and schedulers send to all of it, ended them before the step was saved."""
    steps = Steps(n=None, batch_size=2, seed=0)
    for workers in (0, 1):
        batch = next(iter(batches.TrainingLoader(rows=Groups(), steps=steps, workers=workers)))
        assert (batch.labels == os.getpgrp()).all() == (workers == 0)


def test_batches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be a multiple of the 2 processes, got 5"):
        Steps(n=10, batch_size=5, seed=0, world=2)
    with pytest.raises(ValueError, match="batch_size must be at most the 10 samples, got 16"):
        Steps(n=10, batch_size=16, seed=0)


def test_stages_have_steps_of_their_own_size() -> None:
    stages = [(8, 4), (6, 2)]
    whole = first(Steps(n=None, batch_size=3, seed=0, stages=stages), 7)
    assert [len(step) for step in whole] == [4, 4, 2, 2, 2, 3, 3]
    assert sum(whole, []) == list(range(20))  # noqa: RUF017 - a dozen numbers
    for begin in (1, 2, 4, 6):
        assert first(Steps(n=None, batch_size=3, seed=0, stages=stages, first_step=begin), 7 - begin) == whole[begin:]
    with pytest.raises(ValueError, match="samples of a stage must be a multiple of its batch_size 4, got 6"):
        Steps(n=None, batch_size=3, seed=0, stages=[(6, 4)])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_like_lengths_come_together(workers: int) -> None:
    """Every sample once, in batches whose lengths do not overlap; the same batches wherever they begin."""
    rows = FreshRows([(0, [SMALL])])

    def loaded(begin: int, count: int) -> list[batches.Batch]:
        steps = Steps(n=None, batch_size=6, seed=0, first_step=begin, stages=[(8, 4)])
        loader = batches.TrainingLoader(rows=rows, steps=steps, cut=16, n_together=4, workers=workers)
        return list(itertools.islice(loader, count))

    whole = loaded(0, 8)
    assert [len(batch.labels) for batch in whole] == [4, 4, *[6] * 6]
    assert sorted(place for batch in whole[:4] for place in batch.places.tolist()) == list(range(20))
    spans = sorted((int(batch.lengths.min()), int(batch.lengths.max())) for batch in whole[4:])
    assert all(longest <= shortest for (_, longest), (shortest, _) in itertools.pairwise(spans))
    # not the short ones first
    assert spans != [(int(batch.lengths.min()), int(batch.lengths.max())) for batch in whole[4:]]
    for batch in whole:
        assert batch.tokens.shape[2] == -(-int(batch.lengths.max()) // 16) * 16
        drawn = SMALL.draw("fresh", batch.places.numpy())
        assert (drawn["label"] == batch.labels.numpy()).all()
        assert (drawn["tokens"][:, : batch.tokens.shape[2]] == batch.tokens[:, 0].numpy()).all()
    for begin in (1, 4, 6):
        for one, other in zip(loaded(begin, 8 - begin), whole[begin:], strict=True):
            assert all(torch.equal(*parts) for parts in zip(one, other, strict=True))
    with pytest.raises(ValueError, match="n_together must be 1 or more, got 0"):
        batches.TrainingLoader(rows=rows, steps=Steps(n=None, batch_size=6, seed=0), n_together=0)


def test_records_become_batches() -> None:
    source = PathfinderSource(pathfinder.preset(32, contour_length=6))
    records = source.draw("train", np.arange(6))
    batch = RecordRows(records).take(np.array([4, 1]))
    assert batch.tokens.shape == (2, 1, 1024)
    assert (batch.tokens[1, 0].numpy() == records[1]["image"].reshape(-1)).all()
    assert batch.lengths.tolist() == [[1024], [1024]]
    assert batch.labels.tolist() == records["label"][[4, 1]].tolist()
    assert batch.places.tolist() == [4, 1]
    expressions = SMALL.draw("train", np.arange(3))
    assert RecordRows(expressions).take(np.arange(3)).lengths[:, 0].tolist() == expressions["length"].tolist()


def test_pairs_are_four_versions_of_one_image() -> None:
    source = PathfinderSource(pathfinder.preset(32, contour_length=6))
    rows = PairRows(source, 5)
    assert len(rows) == 20
    batch = rows.take(np.array([7, 0, 4, 3]))
    versions = source.draw_pairs("test", np.arange(2))
    expected = [versions[1, 3], versions[0, 0], versions[1, 0], versions[0, 3]]
    assert all(
        (row[0].view(32, 32).numpy() == one["image"]).all() for row, one in zip(batch.tokens, expected, strict=True)
    )
    assert batch.labels.tolist() == [1, 1, 1, 1]
    assert rows.take(np.array([1, 2])).labels.tolist() == [0, 0]


def test_a_fresh_stream_goes_through_its_stages() -> None:
    easy = ListOpsSource(listops.Preset(3, 4, 3, 20), padded_length=257)
    rows = FreshRows([(5, [easy]), (0, [SMALL])])
    whole = rows.take(np.arange(12))
    assert (whole.tokens[:5, 0].numpy() == easy.draw("fresh", np.arange(5))["tokens"]).all()
    assert (whole.tokens[5:, 0].numpy() == SMALL.draw("fresh", np.arange(5, 12))["tokens"]).all()
    for field, other in zip(rows.take(np.arange(3, 8)), whole, strict=True):
        assert torch.equal(field, other[3:8])
    with pytest.raises(TypeError, match="has no length"):
        len(rows)
    for none in ([], [(5, [])]):
        with pytest.raises(ValueError, match="stages must not be empty, and each needs at least one source"):
            FreshRows(none)


def test_samples_of_a_mixture_come_from_its_sources_in_turn() -> None:
    easy = ListOpsSource(listops.Preset(3, 4, 3, 20), padded_length=257)
    rows = FreshRows([(5, [easy, SMALL]), (0, [SMALL, SMALL, easy])])
    whole = rows.take(np.arange(12))
    order = whole.places.argsort()
    expected = [easy, SMALL, easy, SMALL, easy, easy, SMALL, SMALL, easy, SMALL, SMALL, easy]
    for place, source in enumerate(expected):
        assert (whole.tokens[order][place, 0].numpy() == source.draw("fresh", np.array([place]))["tokens"][0]).all()
    # wherever a batch begins and ends
    part = rows.take(np.arange(4, 7))
    assert torch.equal(part.tokens[part.places.argsort()], whole.tokens[order][4:7])


def test_an_epoch_has_each_sample_in_one_random_version() -> None:
    """The order of the samples is the same as without versions."""
    plain, steps = (Steps(n=400, batch_size=100, seed=3, n_versions=versions) for versions in (1, 8))
    epochs = [np.array(first(steps, 8)).reshape(2, 400), np.array(first(plain, 8)).reshape(2, 400)]
    versions = epochs[0] // 400
    assert (epochs[0] % 400 == epochs[1]).all()
    # 50 of each are expected, with a standard deviation of 6.6
    assert all((np.bincount(epoch, minlength=8) > 20).all() and len(np.bincount(epoch)) == 8 for epoch in versions)
    # other versions of the same samples in the next epoch: an eighth agree by chance
    assert 20 < (versions[0][epochs[1][0].argsort()] == versions[1][epochs[1][1].argsort()]).sum() < 90
    assert first(Steps(n=400, batch_size=100, seed=3, n_versions=8, first_step=5), 3) == first(steps, 8)[5:]
    assert first(Steps(n=400, batch_size=100, seed=4, n_versions=8), 8) != first(steps, 8)


def test_versions_of_an_image_are_the_symmetries_of_the_square() -> None:
    records = PathfinderSource(pathfinder.preset(32, contour_length=6)).draw("train", np.arange(3))
    rows = SymmetricRows(RecordRows(records), 32)
    assert len(rows) == 24
    batch = rows.take(np.arange(24))
    image = records[1]["image"]
    found = [batch.tokens[3 * version + 1, 0].view(32, 32).numpy() for version in range(8)]
    expected = [np.rot90(way, turns) for way in (image, image.T) for turns in range(4)]
    assert (found[0] == image).all() and all((one == other).all() for one, other in zip(found, expected, strict=True))
    assert len({version.tobytes() for version in found}) == 8
    assert batch.labels.tolist() == records["label"].tolist() * 8
    # places and lengths are those of the stored samples
    assert batch.places.tolist() == [0, 1, 2] * 8
    assert batch.tokens.shape == (24, 1, 1024) and batch.tokens.dtype == torch.uint8
    assert batch.lengths.tolist() == [[1024]] * 24


def test_examples_are_padded_and_cut() -> None:
    pair = Example((np.arange(1, 4, dtype=np.int16), np.arange(1, 9, dtype=np.int16)), 1)
    batch = ExampleRows([pair, pair], 5).take(np.array([1]))
    assert batch.tokens.tolist() == [[[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]]
    assert batch.lengths.tolist() == [[3, 5]]
    assert batch.labels.tolist() == [1]


def test_padding_beyond_the_longest_document_is_dropped_in_steps() -> None:
    examples = [Example((np.ones(length, dtype=np.int16),), 0) for length in (3, 70, 129)]
    rows = ExampleRows(examples, 512)
    loader = batches.evaluation_loader(rows, 2, cut=64)
    assert [batch.tokens.shape for batch in loader] == [(2, 1, 128), (1, 1, 192)]
    assert [batch.tokens.shape[2] for batch in batches.evaluation_loader(rows, 2)] == [512, 512]


def test_evaluation_sees_every_sample_once_in_order() -> None:
    rows = ExampleRows([Example((np.ones(2, dtype=np.int16),), 0)] * 7, 4)
    places = [batch.places.tolist() for batch in batches.evaluation_loader(rows, 3)]
    assert places == [[0, 1, 2], [3, 4, 5], [6]]
    shares = [
        [place for batch in batches.evaluation_loader(rows, 3, rank=rank, world=2) for place in batch.places.tolist()]
        for rank in range(2)
    ]
    assert shares == [[0, 2, 4, 6], [1, 3, 5]]


def test_loaders_leave_the_global_stream_alone() -> None:
    rows = ExampleRows([Example((np.ones(2, dtype=np.int16),), 0)] * 8, 4)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(batches.TrainingLoader(rows=rows, steps=Steps(n=8, batch_size=2, seed=0))))
    list(batches.evaluation_loader(rows, 2))
    assert torch.equal(torch.rand(1), expected)
