"""Generated data sets: made once by many workers, stored on disk, verified by checksum.

A set is a folder of parts of 1,000 records, NumPy files that are memory-mapped. Parts are written under a temporary
name and then renamed, so every part is complete: interrupted runs make the missing parts, concurrent runs do not
interfere, and a larger set reuses the parts of a smaller one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..run import saved
from .sources import Source

PART = 1000
# seconds after which a part under its temporary name is one of a killed process: none takes as long to write
ABANDONED = 3600
# name of the source -> split-count -> SHA-256
RECORDED = Path(__file__).with_name("digests.json")


def _read_part(file: Path) -> np.ndarray:
    """The records of a part, mapped into memory."""
    try:
        part = np.load(file, mmap_mode="r")
        problem = None if part.shape == (PART,) else f"of shape {part.shape}, not {(PART,)}"
    except (EOFError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(f"{file} is no part of a set: {problem}. Remove it, and the same command makes it anew")
    return part


class StoredSet:
    """Records (count,) on disk: indexed by a number, a slice, or an array of numbers; iterates in parts."""

    def __init__(self, files: list[Path], count: int) -> None:
        self.count = count
        self._parts = [_read_part(file) for file in files]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[np.ndarray]:
        for index, part in enumerate(self._parts):
            yield part[: self.count - index * PART]

    def __getitem__(self, places: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.count))
        places = np.asarray(places)
        if places.size and not (0 <= places.min() and places.max() < self.count):
            raise IndexError(f"places must be 0 .. {self.count - 1}, got {places.min()} .. {places.max()}")
        records = np.empty(places.shape, dtype=self._parts[0].dtype if self._parts else None)
        for index in np.unique(places // PART):
            is_here = places // PART == index
            records[is_here] = self._parts[index][places[is_here] % PART]
        return records

    def digest(self) -> str:
        """SHA-256 of all records on disk, in order."""
        found = hashlib.sha256()
        for part in self:
            found.update(part.tobytes())
        return found.hexdigest()


def _make_part(source: Source, split: str, file: Path) -> None:
    index = int(file.stem)
    records = source.draw(split, np.arange(index * PART, (index + 1) * PART))
    # other processes may make the same part
    with saved.replacing(file, uuid.uuid4().hex) as unfinished, unfinished.open("wb") as stream:
        np.save(stream, records)


def _remove_abandoned(folder: Path) -> None:
    """Removes the parts under temporary names that killed processes left."""
    for unfinished in folder.glob(".*.part"):
        # another process may remove or rename it
        with contextlib.suppress(FileNotFoundError):
            if time.time() - unfinished.stat().st_mtime > ABANDONED:
                unfinished.unlink()


def _end_with_parent() -> None:
    """Ends this worker when the process that started it has ended; after a kill it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _make_parts(source: Source, split: str, files: list[Path], workers: int) -> Iterator[None]:
    work = functools.partial(_make_part, source, split)
    if workers == 1:
        yield from map(work, files)
        return
    # forking a process with threads may hang
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(workers, len(files)), context, _end_with_parent) as pool:
            yield from pool.map(work, files)
    except BrokenProcessPool:
        raise ChildProcessError(
            f"a worker was killed, perhaps for lack of memory: run the same command again, with fewer workers than "
            f"{workers}"
        ) from None


def make(source: Source, split: str, count: int, *, root: Path, workers: int = 1) -> StoredSet:
    """The first `count` samples of a split, read from `root`; missing parts are generated first.

    root     a folder with a folder for each source
    workers  processes that generate; 1 generates in this process. The result is the same
    raises   ValueError if the checksum of the set differs from the recorded one
    """
    if count < 1:
        raise ValueError(f"count must be 1 or more, got {count}")
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, got {workers}")
    folder = root / source.name / split
    files = [folder / f"{index:06d}.npy" for index in range(-(-count // PART))]
    missing = [file for file in files if not file.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        n_done, title = len(files) - len(missing), f"{source.name} {split}"
        with tqdm(total=len(files) * PART, initial=n_done * PART, desc=title, unit=" samples") as bar:
            for _ in _make_parts(source, split, missing, workers):
                bar.update(PART)
    stored = StoredSet(files, count)
    # existing parts may have changed
    check(source, split, stored, root=root)
    return stored


def check(source: Source, split: str, stored: StoredSet, *, root: Path) -> bool:
    """Compares a set with its recorded checksum; returns whether there is one. Reads the whole set each time.

    raises  ValueError if the checksums differ
    """
    digests: dict[str, dict[str, str]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    expected = digests.get(source.name, {}).get(f"{split}-{len(stored)}")
    if expected is None:
        return False
    found = stored.digest()
    if found != expected:
        raise ValueError(
            f"{source.name} {split} of {len(stored)} has SHA-256 {found}, but {expected} was recorded: accuracies on "
            f"it cannot be compared with others. Delete {root / source.name / split} and make the set again, with "
            "the package versions of .ci/constraints.txt"
        )
    return True
