"""Sources of generated samples: functions from sample numbers to records.

Sample n does not depend on the samples requested with it, so many workers can make a set, an interrupted one resumes,
and an endless stream has a position.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import listops, pathfinder

# first number of each split; train is the finite set of Long Range Arena, fresh is endless
FIRST_NUMBER = {"test": 0, "validation": 2**32, "train": 2**33, "fresh": 2**34}
# part of the names of files; increased when the samples change
VERSION = 1

ORIGIN = "generated (by the published rules), not the official release"


def _named(kind: str, rules: pathfinder.Preset | listops.Preset, seed: int) -> str:
    """The kind with a digest of the settings."""
    settings = {"rules": dataclasses.asdict(rules), "seed": seed, "version": VERSION}
    return f"{kind}-{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]}"


def numbers(split: str, places: np.ndarray) -> np.ndarray:
    """uint64 numbers of the samples at those places of a split, counted from 0."""
    if split not in FIRST_NUMBER:
        raise ValueError(f"split must be one of {sorted(FIRST_NUMBER)}, got {split!r}")
    return np.asarray(places, dtype=np.uint64) + np.uint64(FIRST_NUMBER[split])


@dataclass(frozen=True)
class PathfinderSource:
    """Pathfinder images.

    Records: image uint8 (size, size); label, 1 where the markers are on one snake; markers int16 (2, 2), the marked
    origin and terminal, each (y, x).
    """

    rules: pathfinder.Preset
    seed: int = 0

    @property
    def name(self) -> str:
        return _named(f"pathfinder{self.rules.size}-{self.rules.contour_length}", self.rules, self.seed)

    @property
    def dtype(self) -> np.dtype[Any]:
        size = self.rules.size
        return np.dtype([("image", "u1", (size, size)), ("label", "u1"), ("markers", "<i2", (2, 2))])

    def draw(self, split: str, places: np.ndarray) -> np.ndarray:
        return self._records(split, places, is_counterfactual=False)[:, 0]

    def draw_pairs(self, split: str, places: np.ndarray) -> np.ndarray:
        """(n, 4): each image with all four pairs of markers, see pathfinder.generate."""
        return self._records(split, places, is_counterfactual=True)

    def _records(self, split: str, places: np.ndarray, *, is_counterfactual: bool) -> np.ndarray:
        names = numbers(split, places)
        drawn = pathfinder.generate(self.rules, names, seed=self.seed, is_counterfactual=is_counterfactual)
        records = np.empty(drawn.labels.shape, dtype=self.dtype)
        records["image"], records["label"], records["markers"] = drawn.images, drawn.labels, drawn.markers
        return records


@dataclass(frozen=True)
class ListOpsSource:
    """ListOps expressions. Records: tokens uint8 (padded_length,), padded with 0; length; label.

    Splits share no expression: the checksum of an expression determines its split.

    padded_length  None is the rules' max_length
    """

    rules: listops.Preset = listops.PRESETS["lra"]
    seed: int = 0
    padded_length: int | None = None

    @property
    def name(self) -> str:
        return _named(f"listops{self._width}", self.rules, self.seed)

    @property
    def _width(self) -> int:
        return self.rules.max_length if self.padded_length is None else self.padded_length

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([("tokens", "u1", (self._width,)), ("length", "<i4"), ("label", "u1")])

    def draw(self, split: str, places: np.ndarray) -> np.ndarray:
        records = np.zeros(len(places), dtype=self.dtype)
        for record, number in zip(records, numbers(split, places), strict=True):
            sample = self._sample(split, int(number))
            record["tokens"][: len(sample.tokens)] = np.frombuffer(sample.tokens, dtype=np.uint8)
            record["length"], record["label"] = len(sample.tokens), sample.label
        return records

    def _sample(self, split: str, number: int) -> listops.Sample:
        attempt = 0
        while True:
            word = hashlib.sha256(f"{self.seed} {number} {attempt}".encode()).digest()[:8]
            sample = listops.generate(1, self.rules, seed=int.from_bytes(word, "little"))[0]
            if split_of(sample.tokens) == ("train" if split == "fresh" else split):
                return sample
            attempt += 1


# name: folder name; dtype: of a record, with a field "label"; draw: int (n,) to records (n,)
Source = PathfinderSource | ListOpsSource


def split_of(tokens: bytes) -> str:
    """The split of an expression: an eighth are test, an eighth validation."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(tokens) % 8, "train")
