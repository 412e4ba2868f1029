"""Reads the paper pairs of the Retrieval task (AAN), new_aan_pairs.{train,eval,test}.tsv."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .places import Example, Splits, find

FOLDERS = ("tsv_data", "aan", "aan/tsv_data")
COLUMNS = 5
# the original cuts texts before encoding
LONGEST_TEXT = 10_000


def load(root: Path, *, length: int = 4000) -> Splits[Example]:
    """Pairs of documents, label 1 if one cites the other: 147,086, 18,090 and 17,437 in the release."""
    folder = find(root, FOLDERS, "new_aan_pairs.train.tsv")
    return Splits(*(read(folder / f"new_aan_pairs.{split}.tsv", length=length) for split in ("train", "eval", "test")))


def read(path: Path, *, length: int = 4000) -> list[Example]:
    """Every pair of a file: two int16 (at most length,), byte + 1.

    raises  FileNotFoundError; ValueError with the number of a line with other columns, as in copies without texts
    """
    examples = []
    # bytes: texts may hold characters that text mode takes for line ends
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != COLUMNS:
                raise ValueError(
                    f"{path}: line {number} must have {COLUMNS} columns (label, two identifiers, two texts), got "
                    f"{len(columns)}. Copies with identifiers only have to be joined with the texts of the papers first"
                )
            label = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}.get(columns[0])
            if label is None:
                raise ValueError(f"{path}: line {number} must begin with the label 0.0 or 1.0, got {columns[0][:20]!r}")
            documents = (
                np.frombuffer(text[:LONGEST_TEXT][:length], dtype=np.uint8).astype(np.int16) + 1 for text in columns[3:]
            )
            examples.append(Example(tuple(documents), label))
    return examples
