"""Scores predictions on a test set: accuracy, the shortcut's accuracy, balanced accuracy."""

from __future__ import annotations

import numpy as np

from . import floors, listops, markers, pathfinder
from .batches import ExampleRows, RecordRows
from .data import LraData
from .floors import Result
from .tasks import LRA

# training samples that the reader of markers learns from
MOST_READ = 60_000


def belongs(data: LraData) -> bool:
    """Whether a test set is one of Long Range Arena, released or made by its rules: its task, whole and hard."""
    if data.task.name not in LRA or data.source == "stand-in":
        return False
    return data.source == "official" or (data.rules.are_published and data.sizes.test >= data.task.sizes.test)


def _labels(data: LraData, split: str) -> np.ndarray:
    rows = data.rows[split]
    if isinstance(rows, RecordRows):
        return rows.records[np.arange(len(rows))]["label"].astype(np.int64)
    assert isinstance(rows, ExampleRows)
    return np.array([example.label for example in rows.examples])


def _majority(is_right: np.ndarray, labels: np.ndarray, data: LraData) -> Result:
    """The most frequent label is the floor, every label weighs the same."""
    _, cell, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return Result(
        task=data.task.name,
        accuracy=float(is_right.mean()),
        floor=float(counts.max() / len(labels)),
        floor_name="most frequent label",
        balanced=floors.weighted_accuracy(is_right, 1.0 / counts[cell]),
        chance=1 / len(counts),
        n=len(labels),
        data=data.description,
    )


def _roots(data: LraData) -> np.ndarray:
    """First token of each expression of the test set."""
    rows = data.rows["test"]
    return np.concatenate(
        [
            rows.take(np.arange(begin, min(begin + 1000, len(rows)))).tokens[:, 0, 0].numpy()
            for begin in range(0, len(rows), 1000)
        ]
    )


def _listops(is_right: np.ndarray, labels: np.ndarray, data: LraData) -> Result:
    roots = _roots(data)
    samples = [listops.Sample(bytes([root]), int(label)) for root, label in zip(roots, labels, strict=True)]
    return Result(
        task=data.task.name,
        accuracy=float(is_right.mean()),
        floor=listops.root_operator_floor(samples),
        floor_name="root operator alone",
        balanced=floors.weighted_accuracy(is_right, floors.root_operator_weights(roots, labels)),
        chance=1 / listops.N_CLASSES,
        n=len(labels),
        data=data.description,
    )


def _markers(data: LraData, split: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Markers (n, 2, 2) and labels (n,) of the first samples of a split; of released images, as they are found there."""
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
    # a fresh stream has no set to read
    learnt_from = "validation" if data.source == "fresh" else "train"
    seen, truth = _markers(data, learnt_from, MOST_READ)
    reader = floors.fit_marker_reader(seen, truth, size=data.task.grid[0])
    probabilities = floors.marker_probabilities(reader, _markers(data, "test", len(labels))[0])
    return Result(
        task=data.task.name,
        accuracy=float(is_right.mean()),
        floor=floors.marker_floor(probabilities, labels),
        floor_name=f"places of the markers, learnt from {len(truth)} samples",
        balanced=floors.weighted_accuracy(is_right, floors.marker_weights(probabilities, labels)),
        chance=1 / pathfinder.N_CLASSES,
        n=len(labels),
        data=data.description,
    )


def score(data: LraData, guesses: np.ndarray) -> Result:
    """guesses (n,): labels, one for each sample of the test set, in its order."""
    labels = _labels(data, "test")
    is_right = guesses == labels
    if data.task.name.startswith("listops"):
        return _listops(is_right, labels, data)
    if data.task.name.startswith("path"):
        return _pathfinder(is_right, labels, data)
    return _majority(is_right, labels, data)


def shortcuts(data: LraData) -> list[str]:
    """What readers of a generated task's shortcut get on its test set, one line each."""
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
