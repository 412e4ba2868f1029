"""Batches of samples, and the samples of training step n.

The samples of a step are a function of (seed, step) alone, so an interrupted training resumes with the next samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .released import Example
from .sets import StoredSet
from .sources import PathfinderSource, Source


class Batch(NamedTuple):
    """Samples that are processed together.

    tokens   uint8 or int16 (batch, documents, length), padded with 0
    lengths  int32 (batch, documents)
    labels   int64 (batch,)
    places   int64 (batch,): indices of the samples
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    places: Tensor


def _batch(tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray, places: np.ndarray) -> Batch:
    return Batch(
        torch.from_numpy(np.ascontiguousarray(tokens)),
        torch.from_numpy(lengths.astype(np.int32)),
        torch.from_numpy(labels.astype(np.int64)),
        torch.from_numpy(places.astype(np.int64)),
    )


def from_records(records: np.ndarray, places: np.ndarray) -> Batch:
    """A batch of records with the field "image" or the fields "tokens" and "length"."""
    if "image" in (records.dtype.names or ()):
        tokens = records["image"].reshape(len(records), 1, -1)
        lengths = np.full(tokens.shape[:2], tokens.shape[2])
    else:
        tokens, lengths = records["tokens"][:, None], records["length"][:, None]
    return _batch(tokens, lengths, records["label"], places)


@dataclass(frozen=True)
class RecordRows:
    """Samples from stored records."""

    records: StoredSet | np.ndarray

    def __len__(self) -> int:
        return len(self.records)

    def take(self, places: np.ndarray) -> Batch:
        return from_records(self.records[places], places)


class FreshRows:
    """An endless stream of samples, drawn on demand.

    stages  (samples, sources): that many samples, in order, taken from the sources in turn; the last stage never ends
    stream  another number gives other samples
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[Source]]], *, stream: int = 0) -> None:
        if not stages or not all(sources for _, sources in stages):
            raise ValueError("stages must not be empty, and each needs at least one source")
        self.sources = [sources for _, sources in stages]
        # no run takes so many samples
        self.first_number = stream * 2**40
        # first place of each next stage
        self.ends = np.cumsum([samples for samples, _ in stages])[:-1]

    def __len__(self) -> int:
        raise TypeError("a fresh stream has no length")

    def take(self, places: np.ndarray) -> Batch:
        stages = np.searchsorted(self.ends, places, side="right")
        batches = []
        for stage in np.unique(stages):
            sources = self.sources[stage]
            for turn, source in enumerate(sources):
                members = places[(stages == stage) & (places % len(sources) == turn)]
                if len(members):
                    batches.append(from_records(source.draw("fresh", self.first_number + members), members))
        return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


@dataclass(frozen=True)
class PairRows:
    """Counterfactual pairs of `count` images: sample 4 n + v is test image n with its v-th pair of markers."""

    source: PathfinderSource
    count: int

    def __len__(self) -> int:
        return 4 * self.count

    def take(self, places: np.ndarray) -> Batch:
        images, where = np.unique(places // 4, return_inverse=True)
        return from_records(self.source.draw_pairs("test", images)[where, places % 4], places)


@dataclass(frozen=True)
class ExampleRows:
    """Examples of released files or stand-ins, padded or cut to `length` tokens."""

    examples: Sequence[Example]
    length: int

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, places: np.ndarray) -> Batch:
        examples = [self.examples[int(place)] for place in places]
        n_documents, dtype = len(examples[0].documents), examples[0].documents[0].dtype
        tokens = np.zeros((len(examples), n_documents, self.length), dtype=dtype)
        lengths = np.zeros((len(examples), n_documents), dtype=np.int32)
        for row, example in enumerate(examples):
            for column, document in enumerate(example.documents):
                kept = document[: self.length]
                tokens[row, column, : len(kept)], lengths[row, column] = kept, len(kept)
        return _batch(tokens, lengths, np.array([example.label for example in examples]), places)


SYMMETRIES = 8


def _symmetries(side: int) -> np.ndarray:
    """(8, side * side): where each pixel of a square image comes from, for quarter turns of it and of its transpose."""
    pixels = np.arange(side * side).reshape(side, side)
    return np.stack([np.rot90(way, turns).reshape(-1) for way in (pixels, pixels.T) for turns in range(4)])


@dataclass(frozen=True)
class SymmetricRows:
    """Square images in their eight symmetries: sample len(rows) v + n is sample n of rows in its v-th; v = 0 leaves it.

    rows  images of side x side pixels, whose labels do not depend on direction
    """

    rows: RecordRows | ExampleRows
    side: int
    _sources: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sources", _symmetries(self.side))

    def __len__(self) -> int:
        return SYMMETRIES * len(self.rows)

    def take(self, places: np.ndarray) -> Batch:
        """Places of the batch are those in rows."""
        versions, places = np.divmod(places, len(self.rows))
        batch = self.rows.take(places)
        tokens = np.take_along_axis(batch.tokens.numpy(), self._sources[versions][:, None], axis=2)
        return batch._replace(tokens=torch.from_numpy(tokens))


# samples that are read in batches
Rows = RecordRows | FreshRows | PairRows | ExampleRows | SymmetricRows


@dataclass(frozen=True)
class _Groups(Dataset[list[Batch]]):
    """The batches of a group of steps: samples sorted by length, divided among the steps in random order.

    cut  columns of padding are dropped in multiples of it; 0 keeps all
    """

    rows: Rows
    cut: int

    def _narrowed(self, batch: Batch) -> Batch:
        if self.cut == 0:
            return batch
        longest = -(-int(batch.lengths.max()) // self.cut) * self.cut
        return batch._replace(tokens=batch.tokens[:, :, :longest].contiguous())

    def __getitem__(self, steps: list[list[int]]) -> list[Batch]:
        together = self.rows.take(np.concatenate(steps))
        if len(steps) == 1:
            return [self._narrowed(together)]
        by_length = together.lengths.sum(dim=1).sort(stable=True).indices
        shuffled = torch.randperm(len(steps), generator=torch.Generator().manual_seed(steps[0][0])).tolist()
        dealt = dict(zip(shuffled, by_length.split([len(steps[step]) for step in shuffled]), strict=True))
        return [self._narrowed(Batch(*(part[dealt[step]] for part in together))) for step in range(len(steps))]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Places of the samples of step first_step, first_step + 1, ... without end.

    n           samples, each once per epoch in a random order; None: 0, 1, 2, ... without end
    n_versions  of each of the n samples: an epoch has a random one of each. Version v of sample i is at n v + i
    batch_size  samples of a step, of all processes together
    stages      (samples, batch_size) of the first steps, where n is None: samples in steps of another size
    rank, world  index and number of processes; each takes every world-th sample of a step
    """

    n: int | None
    batch_size: int
    seed: int
    n_versions: int = 1
    first_step: int = 0
    stages: Sequence[tuple[int, int]] = ()
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for size in (self.batch_size, *(size for _, size in self.stages)):
            if size % self.world:
                raise ValueError(f"batch_size must be a multiple of the {self.world} processes, got {size}")
        if self.n is not None and self.n < self.batch_size:
            raise ValueError(f"batch_size must be at most the {self.n} samples, got {self.batch_size}")
        for samples, size in self.stages:
            if samples % size:
                raise ValueError(f"samples of a stage must be a multiple of its batch_size {size}, got {samples}")

    def samples(self, step: int) -> int:
        """Number of samples of all processes before a step."""
        before = 0
        for samples, size in self.stages:
            if step < samples // size:
                return before + step * size
            before, step = before + samples, step - samples // size
        return before + step * self.batch_size

    def _fresh(self, step: int) -> range:
        """Numbers of the samples of a step, in an endless stream."""
        return range(self.samples(step), self.samples(step + 1))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Places of all steps of an epoch."""
        assert self.n is not None
        stream = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.n, generator=stream)
        if self.n_versions > 1:
            order += self.n * torch.randint(self.n_versions, (self.n,), generator=stream)
        return [places.tolist() for places in order.split(self.batch_size)][: self.n // self.batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of this process."""
        if self.n is None:
            steps: Iterator[Sequence[int]] = map(self._fresh, itertools.count(self.first_step))
        else:
            epoch, n_done = divmod(self.first_step, self.n // self.batch_size)
            steps = itertools.chain.from_iterable(map(self._epoch, itertools.count(epoch)))
            steps = itertools.islice(steps, n_done, None)
        return (list(places[self.rank :: self.world]) for places in steps)


def _apart(_: int) -> None:
    """Keeps signals to the process group of a training from a worker: the step that is saved needs its samples."""
    os.setpgrp()


def _loader(dataset: _Groups, groups: Iterable[list[list[int]]], *, workers: int, **options: Any) -> DataLoader[Any]:
    # its own generator: a loader without one draws from the global stream, which training uses
    prefetch, is_pinned = 4 if workers else None, torch.cuda.is_available()
    return DataLoader(
        dataset, sampler=groups, batch_size=None, num_workers=workers, prefetch_factor=prefetch, pin_memory=is_pinned,
        generator=torch.Generator(), worker_init_fn=_apart, **options,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingLoader:
    """An endless stream of the batches of the steps.

    cut         columns of padding are dropped in multiples of it; 0 keeps all
    n_together  steps whose samples are drawn at once and divided by length, so that batches have little padding; step n
                has the same samples wherever the steps begin
    """

    rows: Rows
    steps: Steps
    cut: int = 0
    workers: int = 0
    n_together: int = 1

    def __post_init__(self) -> None:
        if self.n_together < 1:
            raise ValueError(f"n_together must be 1 or more, got {self.n_together}")

    def __iter__(self) -> Iterator[Batch]:
        n_skipped = self.steps.first_step % self.n_together
        steps = iter(dataclasses.replace(self.steps, first_step=self.steps.first_step - n_skipped))
        groups = iter(lambda: list(itertools.islice(steps, self.n_together)), [])
        loader = _loader(_Groups(self.rows, self.cut), groups, workers=self.workers)
        return itertools.islice(itertools.chain.from_iterable(loader), n_skipped, None)


def evaluation_loader(
    rows: Rows, batch_size: int, *, cut: int = 0, workers: int = 0, rank: int = 0, world: int = 1
) -> DataLoader[Batch]:
    """Every sample once, in order; each process takes every world-th one."""
    mine = range(rank, len(rows), world)
    groups = [[list(mine[begin : begin + batch_size])] for begin in range(0, len(mine), batch_size)]
    return _loader(_Groups(rows, cut), groups, workers=workers, collate_fn=operator.itemgetter(0))
