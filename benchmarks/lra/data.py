"""Lightning data module: generated sets, fresh streams with a curriculum, released files, stand-ins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning
from torch.utils.data import DataLoader

from . import batches, listops, pathfinder, released, sets, sources, stand_ins
from .batches import SYMMETRIES, Batch, ExampleRows, FreshRows, PairRows, RecordRows, Rows, SymmetricRows
from .tasks import Sizes, Task, check_seed, find

SPLITS = ("train", "validation", "test")
# columns of padding are dropped in multiples of this, the default block size
CUT = 128


@dataclass(frozen=True)
class Stage:
    """A stage of a curriculum: `samples` from easier rules.

    changes     fields of the generator's preset, for Pathfinder such as {contour_length: 6, is_central: false,
                seed_distances: [3, 10]}, for ListOps {max_depth: 5, min_length: 50, max_length: 300}
    batch_size  None is that of the data
    mixture     alternatives of further changes, such as [{contour_length: 3}, {contour_length: 4}], through which the
                samples cycle
    """

    samples: int
    changes: dict[str, Any]
    batch_size: int | None = None
    mixture: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Rules:
    """Rules of the generators.

    contour_length  Pathfinder, generated or released: 14 (hard), 9 (intermediate), 6 (easy)
    changes         other fields of the generator's preset, for all splits: then the task is not Long Range Arena's
    stages          stages of a fresh stream before the task itself
    """

    contour_length: int = 14
    changes: dict[str, Any] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    @property
    def are_published(self) -> bool:
        """Whether the rules are those of Long Range Arena."""
        return self.contour_length == Rules.contour_length and not self.changes


def _changed(source: sources.Source, changes: dict[str, Any], name: str) -> sources.Source:
    """The source with changed fields of its rules."""
    known = {each.name for each in dataclasses.fields(source.rules)}
    if unknown := set(changes) - known:
        raise ValueError(f"{name}: changes must be fields of {sorted(known)}, got {sorted(unknown)}")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    return dataclasses.replace(source, rules=dataclasses.replace(source.rules, **fields))  # type: ignore[arg-type]


def check_contour_length(task: Task, rules: Rules) -> None:
    if rules.contour_length != Rules.contour_length and not task.name.startswith("path"):
        raise ValueError(f"rules.contour_length is only for Pathfinder, got task={task.name!r}")


def generator_of(task: Task, rules: Rules, *, seed: int = 0) -> sources.Source:
    """The generator of a task."""
    check_contour_length(task, rules)
    source: sources.Source
    if task.name.startswith("listops"):
        source = sources.ListOpsSource(listops.PRESETS["small" if task.name == "listops-small" else "lra"], seed)
    elif task.name.startswith("path") and task.grid is not None:
        preset = pathfinder.preset(task.grid[0], contour_length=rules.contour_length)
        source = sources.PathfinderSource(preset, seed)
    else:
        raise ValueError(
            f'task {task.name!r} cannot be generated: source="official" reads its files, "stand-in" plays it'
        )
    return _changed(source, rules.changes, "rules")


def stage_sources(source: sources.Source, stage: Stage, length: int) -> list[sources.Source]:
    """The source with the rules of a stage, once for each member of its mixture, and records of the same length."""
    changed = [_changed(source, {**stage.changes, **more}, "stages") for more in stage.mixture or [{}]]
    return [
        dataclasses.replace(each, padded_length=length) if isinstance(each, sources.ListOpsSource) else each
        for each in changed
    ]


class LraData(lightning.LightningDataModule):
    """The splits of a task, in batches.

    task        a name in tasks.TASKS
    source      "generated": sets of Long Range Arena's sizes, made once by its rules and stored; "fresh": an endless
                stream of training samples, validation and test as "generated"; "official": the released files;
                "stand-in": synthetic data with the shape of Text, Retrieval or Image, which is not Long Range Arena
    root        folder of the released files or of the generated sets
    batch_size  samples of a step, of all GPUs together
    sizes       samples of the splits; None is those of Long Range Arena, or of the files
    seed        seed of the generators
    test_seed   seed of the test set; None is `seed`. Another number gives a new test set
    order_seed  seed of the order of stored training samples, or of the samples of a fresh stream; set by Lightning's
                seed_everything
    workers     processes that draw or read samples, for each GPU; None: the cores available to this process divided by
                the GPUs, less one for each GPU
    reading     how the released files are read
    n_together  steps whose training samples are drawn at once and divided by length: batches with less padding
    augmentation  "symmetries": each epoch flips and turns every stored training image of Pathfinder at random, into one
                of the eight symmetries of the square. Validation and test images are left as they are
    """

    def __init__(
        self,
        task: str,
        source: Literal["generated", "fresh", "official", "stand-in"] = "generated",
        *,
        root: Path = Path("out/lra"),
        batch_size: int = 32,
        sizes: Sizes | None = None,
        seed: int = 0,
        test_seed: int | None = None,
        order_seed: int = 0,
        rules: Rules | None = None,
        reading: released.Reading | None = None,
        workers: int | None = None,
        n_together: int = 1,
        augmentation: Literal["symmetries"] | None = None,
    ) -> None:
        super().__init__()
        self.task, self.source, self.root, self.seed = find(task), source, Path(root), seed
        check_seed("seed", seed)
        if test_seed is not None:
            check_seed("test_seed", test_seed)
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        if workers is not None and workers < 0:
            raise ValueError(f"workers must be 0 or more, got {workers}")
        self.batch_size = batch_size
        self.test_seed, self.order_seed = seed if test_seed is None else test_seed, order_seed
        if source == "official" and self.test_seed != seed:
            raise ValueError(f"test_seed is only for generated test sets, not for released ones, got {test_seed}")
        self.sizes = self.task.sizes if sizes is None else sizes
        self.rules = Rules() if rules is None else rules
        if self.rules.stages and source != "fresh":
            raise ValueError(f'stages are of a fresh stream, got source={source!r}: source="fresh" uses them')
        has_generator, is_path = source in ("generated", "fresh"), self.task.name.startswith("path")
        if self.rules.changes and not has_generator:
            raise ValueError(f"rules.changes are only for generated data, got source={source!r}")
        check_contour_length(self.task, self.rules)
        if reading is not None and source != "official":
            raise ValueError(f'reading is only for released files (source="official"), got source={source!r}')
        self.reading = released.Reading() if reading is None else reading
        if augmentation not in (None, "symmetries"):
            raise ValueError(f"augmentation must be 'symmetries' or None, got {augmentation!r}")
        if augmentation is not None and not is_path:
            raise ValueError(
                f"augmentation is only for Pathfinder, whose labels do not depend on direction, got task={task!r}"
            )
        if augmentation is not None and source == "fresh":
            raise ValueError('augmentation is only for stored training images, got source="fresh", which repeats none')
        self.augmentation = augmentation
        self._given_workers = workers
        self.n_together = n_together
        self.rows: dict[str, Rows] = {}

    @property
    def workers(self) -> int:
        if self._given_workers is not None:
            return self._given_workers
        n_devices = 1 if self.trainer is None else self.trainer.num_devices
        # the process may be restricted to some cores; macOS has no sched_getaffinity
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(0, n_cores // n_devices - 1)

    @property
    def description(self) -> str:
        """Description of the data in results."""
        described = {
            "generated": sources.ORIGIN,
            "fresh": f"trained on samples drawn during training; all data {sources.ORIGIN}",
            "official": ", ".join(["official release", *(f"{key}={to}" for key, to in self.reading.changes.items())]),
            "stand-in": stand_ins.WARNING,
        }[self.source]
        return described if self.augmentation is None else f"{described}; training images flipped and turned"

    def _generator(self, split: str) -> sources.Source:
        return generator_of(self.task, self.rules, seed=self.test_seed if split == "test" else self.seed)

    def stored(self, split: str) -> sets.StoredSet:
        """A generated split, made now if it is missing."""
        count = getattr(self.sizes, split)
        return sets.make(self._generator(split), split, count, root=self.root, workers=max(1, self.workers))

    def _released(self) -> released.Splits:
        return released.load(self.task, self.root, self.reading, contour_length=self.rules.contour_length)

    def _splits_kept(self, stage: str | None = None) -> tuple[str, ...]:
        """Stored splits that a stage of Lightning reads; None: all. Training need not wait for a test set."""
        kept = {"generated": SPLITS, "fresh": SPLITS[1:]}.get(self.source, ())
        return kept[:-1] if stage in ("fit", "validate") else kept

    def prepare_data(self) -> None:
        for split in self._splits_kept(None if self.trainer is None else self.trainer.state.fn):
            self.stored(split)

    def setup(self, stage: str) -> None:
        for split in self._splits_kept(stage):
            if split not in self.rows:
                self.rows[split] = RecordRows(self.stored(split))
        if "pairs" not in self.rows and self.sizes.pairs and "test" in self._splits_kept(stage):
            tested = self._generator("test")
            if isinstance(tested, sources.PathfinderSource):
                self.rows["pairs"] = PairRows(tested, self.sizes.pairs)
        if "train" in self.rows:
            return
        if self.source == "official":
            for split, examples in zip(SPLITS, self._released(), strict=True):
                self.rows[split] = ExampleRows(examples, self.task.length)
        elif self.source == "stand-in":
            if self._place()["rank"] == 0:
                counts = ", ".join(f"{getattr(self.sizes, split):,} {split}" for split in SPLITS)
                print(f"making stand-in data of {self.task.name}: {counts}; data.sizes changes this", flush=True)
            for split in SPLITS:
                examples = stand_ins.load(self.task, split, getattr(self.sizes, split), seed=self.seed)
                self.rows[split] = ExampleRows(examples, self.task.length)
        elif self.source == "fresh":
            last = self._generator("train")
            stages = [(each.samples, stage_sources(last, each, self.task.length)) for each in self.rules.stages]
            self.rows["train"] = FreshRows([*stages, (0, [last])], stream=self.order_seed)

    def _place(self) -> dict[str, int]:
        """Index and number of processes."""
        if self.trainer is None:
            return {"rank": 0, "world": 1}
        return {"rank": self.trainer.global_rank, "world": self.trainer.world_size}

    @property
    def cut(self) -> int:
        """Images have no padding; pairs of documents are cut to one length."""
        return 0 if self.task.grid is not None else CUT

    def _sizes_of_stages(self) -> list[tuple[int, int]]:
        """(samples, batch_size) of the stages up to the last one with a batch size of its own."""
        stages = self.rules.stages
        own = [index for index, stage in enumerate(stages) if stage.batch_size is not None]
        sized = stages[: own[-1] + 1] if own else []
        return [(each.samples, self.batch_size if each.batch_size is None else each.batch_size) for each in sized]

    def _steps(self, first_step: int) -> batches.Steps:
        """The samples of every batch. first_step counts steps of the trainer, which may accumulate batches."""
        accumulated = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        rows = self.rows.get("train")
        n = None if self.source == "fresh" else self.sizes.train if rows is None else len(rows)
        return batches.Steps(
            n=n, batch_size=self.batch_size, seed=self.order_seed, first_step=first_step * accumulated,
            stages=self._sizes_of_stages(), n_versions=1 if self.augmentation is None else SYMMETRIES, **self._place(),
        )  # fmt: skip

    def samples(self, steps: int) -> int:
        """Training samples in the first steps, repeated ones counted each time."""
        at = self._steps(steps)
        return at.samples(at.first_step)

    def train_dataloader(self) -> Iterable[Batch]:
        steps = self._steps(0 if self.trainer is None else self.trainer.global_step)
        rows = self.rows["train"]
        if self.augmentation is not None:
            assert self.task.grid is not None and isinstance(rows, RecordRows | ExampleRows)
            rows = SymmetricRows(rows, self.task.grid[0])
        return batches.TrainingLoader(
            rows=rows, steps=steps, cut=self.cut, workers=self.workers, n_together=self.n_together
        )

    def _evaluation(self, split: str) -> DataLoader[Batch]:
        # reading from disk is fast; processes would be started at every validation
        workers = 0 if isinstance(self.rows[split], RecordRows) else self.workers
        return batches.evaluation_loader(
            self.rows[split], self.batch_size, cut=self.cut, workers=workers, **self._place()
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation("validation")

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """The test set, and the counterfactual pairs if there are any."""
        return [self._evaluation(split) for split in ("test", "pairs") if split in self.rows]
