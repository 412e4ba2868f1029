"""Stand-ins have the shapes of their tasks and can be learned."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lra import stand_ins
from benchmarks.lra.released import Example
from benchmarks.lra.tasks import find


def maker(name: str, length: int) -> Callable[[str, int], list[Example]]:
    return functools.partial(stand_ins.load, dataclasses.replace(find(name), length=length))


# maker, documents, numbers possible, labels, shortest and longest document
TASKS = [
    (maker("text", 200), 1, 257, 2, 100, 200),
    (maker("retrieval", 100), 2, 257, 2, 100, 100),
    (maker("image", 1024), 1, 256, 10, 1024, 1024),
]


@pytest.mark.parametrize(("make", "documents", "numbers", "labels", "shortest", "longest"), TASKS)
def test_examples_have_the_shapes_of_the_task(
    make: Callable[[str, int], list[Example]], documents: int, numbers: int, labels: int, shortest: int, longest: int
) -> None:
    examples = make("train", 120)
    assert {len(example.documents) for example in examples} == {documents}
    everything = [document for example in examples for document in example.documents]
    assert all(0 <= document.min() and document.max() < numbers for document in everything)
    lengths = [len(document) for document in everything]
    assert shortest <= min(lengths) <= max(lengths) <= longest
    counts = Counter(example.label for example in examples)
    assert sorted(counts) == list(range(labels))
    assert min(counts.values()) > 0.4 * 120 / labels


@pytest.mark.parametrize("make", [task[0] for task in TASKS])
def test_examples_follow_from_split_and_place(make: Callable[[str, int], list[Example]]) -> None:
    few, many, other = make("train", 3), make("train", 6), make("test", 3)
    for short, long in zip(few, many[:3], strict=True):
        assert short.label == long.label
        assert all((one == two).all() for one, two in zip(short.documents, long.documents, strict=True))
    assert not any(
        one.documents[0].tobytes() == two.documents[0].tobytes() for one, two in zip(few, other, strict=True)
    )


def test_the_chains_can_be_told_apart() -> None:
    """By counting which letter follows which three: else there would be nothing to learn."""
    train, test = maker("text", 1000)("train", 60), maker("text", 1000)("test", 40)
    counts = np.ones((2, 16**4))
    for example in train:
        np.add.at(counts[example.label], fours(example), 1)
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    guesses = [int(logs[1][fours(example)].sum() > logs[0][fours(example)].sum()) for example in test]
    assert np.mean([guess == example.label for guess, example in zip(guesses, test, strict=True)]) > 0.9


def fours(example: Example) -> np.ndarray:
    letters = example.documents[0].astype(np.int64) - stand_ins.FIRST_LETTER
    return ((letters[:-3] * 16 + letters[1:-2]) * 16 + letters[2:-1]) * 16 + letters[3:]


def test_they_say_what_they_are_not() -> None:
    assert "not Long Range Arena" in stand_ins.WARNING
