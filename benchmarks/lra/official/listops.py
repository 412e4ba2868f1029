"""Reads and writes the released ListOps files, basic_{train,val,test}.tsv."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .. import listops
from .places import Splits, find

FOLDERS = ("listops-1000", "listops", "listops/listops-1000")
HEADER = "Source\tTarget"


def load(root: Path) -> Splits[listops.Sample]:
    """The three splits: 96,000, 2,000 and 2,000 samples in the release."""
    folder = find(root, FOLDERS, "basic_train.tsv")
    return Splits(*(read(folder / f"basic_{split}.tsv") for split in ("train", "val", "test")))


def read(path: Path) -> list[listops.Sample]:
    """Every sample of a file, in its order.

    raises  FileNotFoundError; ValueError that names the line if it is not an expression and a digit
    """
    samples = []
    with path.open(encoding="utf-8") as lines:
        header = next(lines, "").rstrip("\r\n")
        if header != HEADER:
            raise ValueError(f"{path}: line 1 must be {HEADER!r}, got {header[:80]!r}")
        for number, line in enumerate(lines, start=2):
            source, tab, target = line.rstrip("\r\n").partition("\t")
            if not tab or not (target.isdecimal() and len(target) == 1):
                raise ValueError(f"{path}: line {number} must be an expression, a tab and a digit, got {line[:80]!r}")
            try:
                samples.append(listops.Sample(listops.parse(source), int(target)))
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
    return samples


def _with_parentheses(tokens: bytes) -> str:
    """The binary tree of the release: operators take one argument at a time, from the left."""
    open_trees: list[str] = []
    tree = ""
    for token in tokens:
        symbol = listops.SYMBOLS[token - 1]
        if listops.FIRST_OPERATOR <= token < listops.CLOSE:
            open_trees.append(symbol)
            continue
        tree = f"( {open_trees.pop()} ] )" if token == listops.CLOSE else symbol
        if open_trees:
            open_trees[-1] = f"( {open_trees[-1]} {tree} )"
    return tree


def write(path: Path, samples: Iterable[listops.Sample]) -> None:
    """Writes a file in the format of the release."""
    with path.open("w", encoding="utf-8") as lines:
        lines.write(HEADER + "\n")
        for sample in samples:
            lines.write(f"{_with_parentheses(sample.tokens)}\t{sample.label}\n")
