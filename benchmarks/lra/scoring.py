"""Scores predictions on a test set: accuracy, the shortcut's accuracy, balanced accuracy."""

from __future__ import annotations

import numpy as np

from . import floors, listops, markers, pathfinder
from .batches import ExampleRows, RecordRows
from .data import LraData
from .floors import Result
from .tasks import LRA

# training samples of the marker reader
MOST_READ = 60_000


def belongs(data: LraData) -> bool:
    """Whether a test set is Long Range Arena's, released or made by its rules: complete and hard."""
    if data.task.name not in LRA or data.source == "stand-in":
        return False
    return data.source == "official" or (data.rules.are_published and data.sizes.test >= data.task.sizes.test)


def _labels(data: LraData, split: str) -> np.ndarray:
    rows = data.rows[split]
    if isinstance(rows, RecordRows):
        return rows.records[np.arange(len(rows))]["label"].astype(np.int64)
    assert isinstance(rows, ExampleRows)
    return np.array([example.label for example in rows.examples])


def _result(
    data: LraData, is_right: np.ndarray, floor: float, floor_name: str, weights: np.ndarray, chance: float
) -> Result:
    accuracy, balanced = float(is_right.mean()), floors.weighted_accuracy(is_right, weights)
    return Result(data.task.name, accuracy, floor, floor_name, balanced, chance, n=len(is_right), data=data.description)


def _majority(is_right: np.ndarray, labels: np.ndarray, data: LraData) -> Result:
    """Result whose floor is the most frequent label; labels have equal weight in the balanced accuracy."""
    _, cell, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return _result(
        data, is_right, float(counts.max() / len(labels)), "most frequent label", 1.0 / counts[cell], 1 / len(counts)
    )


def _roots(data: LraData) -> np.ndarray:
    """First token of each expression of the test set."""
    rows = data.rows["test"]
    parts = np.array_split(np.arange(len(rows)), -(-len(rows) // 1000))
    return np.concatenate([rows.take(part).tokens[:, 0, 0].numpy() for part in parts])


def _listops(is_right: np.ndarray, labels: np.ndarray, data: LraData) -> Result:
    roots = _roots(data)
    samples = [listops.Sample(bytes([root]), int(label)) for root, label in zip(roots, labels, strict=True)]
    return _result(
        data,
        is_right,
        listops.root_operator_floor(samples),
        "root operator alone",
        floors.root_operator_weights(roots, labels),
        1 / listops.N_CLASSES,
    )


def _markers(data: LraData, split: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Markers (n, 2, 2) and labels (n,) of the first samples of a split; in released images they are searched."""
    rows = data.rows[split]
    places = np.arange(min(most, len(rows)))
    if isinstance(rows, RecordRows):
        records = rows.records[places]
        return records["markers"], records["label"].astype(np.int64)
    assert data.task.grid is not None
    parts = [rows.take(part) for part in np.array_split(places, -(-len(places) // 1000))]
    radius = pathfinder.PRESETS[data.task.grid[0]].marker_radius
    found = [markers.find(part.tokens.numpy().reshape(-1, *data.task.grid), radius=radius) for part in parts]
    return np.concatenate(found), np.concatenate([part.labels.numpy() for part in parts])


def _pathfinder(is_right: np.ndarray, labels: np.ndarray, data: LraData) -> Result:
    assert data.task.grid is not None
    # a fresh stream has no stored training set
    learnt_from = "validation" if data.source == "fresh" else "train"
    seen, truth = _markers(data, learnt_from, MOST_READ)
    reader = floors.fit_marker_reader(seen, truth, size=data.task.grid[0])
    probabilities = floors.marker_probabilities(reader, _markers(data, "test", len(labels))[0])
    return _result(
        data,
        is_right,
        floors.marker_floor(probabilities, labels),
        f"places of the markers, learnt from {len(truth)} samples",
        floors.marker_weights(probabilities, labels),
        1 / pathfinder.N_CLASSES,
    )


def score(data: LraData, guesses: np.ndarray) -> Result:
    """The result of a test. guesses (n,): a label for each sample of the test set, in order."""
    labels = _labels(data, "test")
    is_right = guesses == labels
    if data.task.name.startswith("listops"):
        return _listops(is_right, labels, data)
    if data.task.name.startswith("path"):
        return _pathfinder(is_right, labels, data)
    return _majority(is_right, labels, data)


def shortcuts(data: LraData) -> list[str]:
    """Accuracies of the shortcuts of a generated task on its test set, a line each."""
    name = data.task.name
    data.rows["test"] = RecordRows(data.stored("test"))
    labels = _labels(data, "test")
    if name.startswith("listops"):
        records = data.stored("test")[:]
        samples = [listops.Sample(row["tokens"][: row["length"]].tobytes(), int(row["label"])) for row in records]
        lines = [f"root operator alone {listops.root_operator_floor(samples):.1%}"]
        lines += [
            f"{depth} operator(s) deep {listops.oracle_accuracy(samples, depth=depth):.1%}" for depth in (1, 2, 3)
        ]
    else:
        data.rows["train"] = RecordRows(data.stored("train"))
        result = _pathfinder(np.ones(len(labels), dtype=bool), labels, data)
        lines = [f"{result.floor_name} {result.floor:.1%}"]
    return [f"{name}: {line} of {len(labels)} test samples, {data.description}" for line in lines]
