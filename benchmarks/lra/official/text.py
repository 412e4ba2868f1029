"""Reads the IMDB reviews of the Text task, aclImdb/{train,test}/{pos,neg}/*.txt, as bytes or characters.

Long Range Arena reads bytes; S4 and fly read characters. The validation set is the test set, as in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .places import Example, Splits, find

FOLDERS = ("aclImdb", "imdb/aclImdb", "imdb", "text/aclImdb")
PAD, UNKNOWN, END = 0, 1, 2
FIRST_CHARACTER = 3
# threshold of the vocabulary in S4
LEAST_FREQUENT = 15


def load(root: Path, *, encoding: str = "bytes", length: int = 1000) -> Splits[Example]:
    """Reviews, label 1 for a good one.

    encoding  "bytes": byte + 1, vocabulary 257 with the padding; "characters": those that occur 15 times or more in the
              training set, by frequency, after padding, unknown and end; a review ends with "end"
    length    reviews are cut to this length, the end included
    """
    if encoding not in ("bytes", "characters"):
        raise ValueError(f'encoding must be "bytes" or "characters", got {encoding!r}')
    folder = find(root, FOLDERS, "train/pos")
    train, test = (
        [*_reviews(folder / split / "neg", 0), *_reviews(folder / split / "pos", 1)] for split in ("train", "test")
    )
    if encoding == "bytes":
        parts = [[Example((as_bytes(text, length),), label) for text, label in split] for split in (train, test)]
    else:
        ids = vocabulary(text for text, _ in train)
        parts = [
            [Example((as_characters(text, ids, length),), label) for text, label in split] for split in (train, test)
        ]
    return Splits(parts[0], parts[1], parts[1])


def _reviews(folder: Path, label: int) -> list[tuple[str, int]]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} was not found: the release has the folders pos and neg in train and in test")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{folder} has no file *.txt")
    return [(file.read_bytes().decode(), label) for file in files]


def as_bytes(text: str, length: int) -> np.ndarray:
    """int16 (at most length,): bytes of UTF-8, plus one."""
    return np.frombuffer(text.encode()[:length], dtype=np.uint8).astype(np.int16) + 1


def vocabulary(texts: Iterable[str]) -> dict[str, int]:
    """Ids of frequent characters, most frequent first, ties by code point."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    frequent = [character for character, count in counts.items() if count >= LEAST_FREQUENT]
    frequent.sort(key=lambda character: (-counts[character], character))
    return {character: FIRST_CHARACTER + place for place, character in enumerate(frequent)}


def as_characters(text: str, ids: dict[str, int], length: int) -> np.ndarray:
    """int16 (at most length,)."""
    known = [ids.get(character, UNKNOWN) for character in text[: length - 1]]
    return np.array([*known, END], dtype=np.int16)
