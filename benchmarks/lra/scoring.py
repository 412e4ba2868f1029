"""Scores predictions on a test set: accuracy, the shortcut's accuracy, balanced accuracy."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..run import measure, saved
from . import floors, listops, pathfinder
from .batches import ExampleRows, RecordRows
from .data import LraData
from .tasks import LRA

# file in the folder of a run
TEST = "test.jsonl"
# keys of a line of `test`. is_lra: comparable with published numbers, see belongs. keys: keys per query, see
# keys_per_query. start: `digest` of the checkpoint with the initial weights. checkpoint: of the one that was tested
# (null in lines from before it was recorded). steps, samples, device_hours: of the training, including validations
# and compilation; ..._before: of its earlier stages
TEST_KEYS = [
    *("bench", "task", "is_lra", "source", "data", "mask", "keys", "n_layers", "embed_dim", "weights", "recipe"),
    *("seed", "start", "checkpoint", "steps", "batch_size", "samples", "device_hours"),
    *("samples_before", "device_hours_before"),
    *("n", "test_seed", "accuracy", "standard_error", "floor", "floor_name", "one_deep", "balanced", "chance"),
    *("one_deep_balanced", "pair_accuracy", "device", "torch", "commit"),
]
# training samples of the marker reader; images that are searched for markers at once
MAX_READ, AT_ONCE = 60_000, 500


@dataclass(frozen=True)
class Result:
    """Result of a test; accuracies are shares of 1.

    floor     accuracy of the shortcut on the same samples
    balanced  accuracy with weights under which the shortcut has accuracy `chance`
    n         samples
    data      their origin
    pair_accuracy  on counterfactual pairs, or None
    one_deep, one_deep_balanced  accuracies of a reader of ListOps that looks one operator deep, or None
    """

    task: str
    accuracy: float
    floor: float
    floor_name: str
    balanced: float
    chance: float
    n: int
    data: str
    pair_accuracy: float | None = None
    one_deep: float | None = None
    one_deep_balanced: float | None = None

    @property
    def standard_error(self) -> float:
        return (self.accuracy * (1 - self.accuracy) / self.n) ** 0.5

    def __str__(self) -> str:
        pairs = "" if self.pair_accuracy is None else f", pairs {self.pair_accuracy:.1%}"
        deeper = "" if self.one_deep is None else f", one operator deep {self.one_deep:.1%}"
        if self.one_deep_balanced is not None:
            deeper += f" (balanced {self.one_deep_balanced:.1%})"
        return (
            f"{self.task}: accuracy {self.accuracy:.1%} (+- {self.standard_error:.1%}), "
            f"floor {self.floor:.1%} ({self.floor_name}){deeper}, "
            f"balanced accuracy {self.balanced:.1%} (chance {self.chance:.0%}){pairs}; {self.n} samples, {self.data}"
        )


def digest(path: Path) -> str:
    """The beginning of the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def trained_steps(checkpoint: Path) -> int:
    """Steps of a checkpoint; 0 if there is none. ValueError if the file is not a whole checkpoint."""
    if not checkpoint.exists():
        return 0
    return int(saved.load(checkpoint, ("global_step",), mmap=True)["global_step"])


def append_test(folder: Path, result: Result, **facts: Any) -> None:
    """Appends the line of a test to the folder of its run. facts: the keys of TEST_KEYS that Result lacks."""
    known = {**asdict(result), "standard_error": result.standard_error}
    known |= {"torch": torch.__version__, "commit": measure.commit()}
    measure.append(folder / TEST, {"bench": "lra", **known, **facts}, TEST_KEYS)


def check_is_whole(limit: float) -> None:
    """Raises a ValueError unless trainer.limit_test_batches is 1.0, all batches; the integer 1 is one batch."""
    if isinstance(limit, int) or limit != 1:
        raise ValueError(
            f"a test needs every sample of its set, got limit_test_batches={limit}: set data.sizes.test instead "
            "(released test sets are always tested whole), without trainer.limit_test_batches and trainer.fast_dev_run"
        )


def belongs(data: LraData) -> bool:
    """Whether a test set is Long Range Arena's, released or made by its rules: complete and hard."""
    if data.task.name not in LRA or data.source == "stand-in":
        return False
    return data.rules.are_published and (data.source == "official" or data.sizes.test >= data.task.sizes.test)


def _labels(data: LraData, split: str) -> np.ndarray:
    rows = data.rows[split]
    if isinstance(rows, RecordRows):
        return rows.records[np.arange(len(rows))]["label"].astype(np.int64)
    assert isinstance(rows, ExampleRows)
    return np.array([example.label for example in rows.examples])


def _tokens(data: LraData, split: str, most: int) -> list[np.ndarray]:
    """Tokens of the first documents of a split, in parts."""
    rows = data.rows[split]
    places = np.arange(min(most, len(rows)))
    return [rows.take(part).tokens[:, 0].numpy() for part in np.array_split(places, -(-len(places) // AT_ONCE))]


def _markers(data: LraData, split: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Markers (n, 2, 2) and labels (n,) of the first samples of a split; in released images they are searched."""
    rows, labels = data.rows[split], _labels(data, split)[:most]
    if isinstance(rows, RecordRows):
        return rows.records[np.arange(len(labels))]["markers"], labels
    assert data.task.grid is not None
    radius = pathfinder.PRESETS[data.task.grid[0]].marker_radius
    images = (tokens.reshape(-1, *data.task.grid) for tokens in _tokens(data, split, most))
    return np.concatenate([floors.find_markers(part, radius=radius) for part in images]), labels


def _shortcut(data: LraData, labels: np.ndarray) -> tuple[str, float, np.ndarray]:
    """Name and accuracy of a task's shortcut on its test set, and the weights of the balanced accuracy."""
    if data.task.name.startswith("listops"):
        roots = np.concatenate([tokens[:, 0] for tokens in _tokens(data, "test", len(labels))])
        return "root operator alone", *floors.best_guess(roots, labels)
    if not data.task.name.startswith("path"):
        return "most frequent label", *floors.best_guess(np.zeros_like(labels), labels)
    assert data.task.grid is not None
    # a fresh stream has no stored training set
    seen, truth = _markers(data, "validation" if data.source == "fresh" else "train", MAX_READ)
    reader = floors.fit_marker_reader(seen, truth, size=data.task.grid[0])
    probabilities = floors.marker_probabilities(reader, _markers(data, "test", len(labels))[0])
    name = f"positions of the markers, learned from {len(truth):,} samples"
    return name, float(((probabilities > 0.5) == labels).mean()), floors.marker_weights(probabilities, labels)


def _deep_reader(data: LraData, labels: np.ndarray, weights: np.ndarray, *, depth: int = 1) -> tuple[float, float]:
    """Accuracy and balanced accuracy of a reader of ListOps that looks `depth` operators deep."""
    rows = data.rows["test"]
    batch = rows.take(np.arange(len(labels)))
    documents = zip(batch.tokens[:, 0].tolist(), batch.lengths[:, 0].tolist(), strict=True)
    guesses = np.array([listops.evaluate(tokens[:length], depth=depth) for tokens, length in documents])
    return float((guesses == labels).mean()), float(np.average(guesses == labels, weights=weights))


def score(data: LraData, guesses: np.ndarray) -> Result:
    """The result of a test. guesses (n,): a label for each sample of the test set, in order."""
    labels = _labels(data, "test")
    is_right = guesses == labels
    name, floor, weights = _shortcut(data, labels)
    balanced, chance = float(np.average(is_right, weights=weights)), 1 / data.task.n_classes
    accuracy, n = float(is_right.mean()), len(labels)
    result = Result(data.task.name, accuracy, floor, name, balanced, chance, n, data.description)
    if not data.task.name.startswith("listops"):
        return result
    one_deep, one_deep_balanced = _deep_reader(data, labels, weights)
    return replace(result, one_deep=one_deep, one_deep_balanced=one_deep_balanced)


def shortcuts(data: LraData) -> list[str]:
    """Accuracies of the shortcuts of a generated task on its test set, a line each."""
    data.rows["test"] = RecordRows(data.stored("test"))
    labels = _labels(data, "test")
    if data.task.name.startswith("path"):
        data.rows["train"] = RecordRows(data.stored("train"))
    name, floor, weights = _shortcut(data, labels)
    lines = [f"{name} {floor:.1%}"]
    if data.task.name.startswith("listops"):
        for depth in (1, 2, 3):
            accuracy, balanced = _deep_reader(data, labels, weights, depth=depth)
            lines.append(f"{depth} operator(s) deep {accuracy:.1%} (balanced {balanced:.1%})")
    return [f"{data.task.name}: {line} of {len(labels)} test samples, {data.description}" for line in lines]
