"""Generated sets are the same for any number of workers and interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs the extra [lra]")

from benchmarks.lra import data, sets, tasks
from benchmarks.lra.__main__ import generate

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Squares:
    """Sample n of a split is n * n; can be interrupted."""

    interrupted_at: int = 10**9
    name: str = "squares"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([("square", "<i8"), ("label", "u1")])

    def draw(self, split: str, places: np.ndarray) -> np.ndarray:
        if self.interrupted_at in places:
            raise KeyboardInterrupt
        records = np.zeros(len(places), dtype=self.dtype)
        records["square"], records["label"] = places**2, len(split)
        return records


def test_records_are_found_by_number_slice_and_array(tmp_path: Path) -> None:
    stored = sets.make(Squares(), "test", 2500, root=tmp_path)
    assert len(stored) == 2500
    assert stored[1999]["square"] == 1999**2
    assert stored[990:1010]["square"].tolist() == [n * n for n in range(990, 1010)]
    places = np.array([[2499, 0], [1000, 999]])
    assert (stored[places]["square"] == places**2).all()
    assert sum(len(part) for part in stored) == 2500
    with pytest.raises(IndexError, match=r"places must be 0 \.\. 2499, got 3 \.\. 2500"):
        stored[np.array([3, 2500])]


def test_an_interrupted_set_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        sets.make(Squares(interrupted_at=2100), "test", 4000, root=tmp_path)
    files = sorted(tmp_path.rglob("*"))
    assert [file.name for file in files if file.is_file()] == ["000000.npy", "000001.npy"]
    before = [file.stat().st_mtime_ns for file in files if file.is_file()]
    stored = sets.make(Squares(), "test", 4000, root=tmp_path)
    assert [file.stat().st_mtime_ns for file in files if file.is_file()] == before
    assert (stored[:]["square"] == np.arange(4000) ** 2).all()


@pytest.mark.parametrize(
    ("kept", "message"), [(0, "No data left"), (100, "is no part of a set"), (-1, r"of shape \(7,\), not \(1000,\)")]
)
def test_a_part_that_is_not_whole_is_named(kept: int, message: str, tmp_path: Path) -> None:
    """As a full disk or a broken copy leaves it. Without it the same call makes the set again."""
    sets.make(Squares(), "test", 2000, root=tmp_path)
    (file,) = tmp_path.rglob("000001.npy")
    if kept < 0:
        np.save(file, np.load(file)[:7])
    else:
        file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"000001\.npy is no part of a set: .*Remove it") as refused:
        sets.make(Squares(), "test", 2000, root=tmp_path)
    refused.match(message)
    file.unlink()
    assert sets.make(Squares(), "test", 2000, root=tmp_path)[1999]["square"] == 1999**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be 1 or more, got 0"),
        ({"workers": 1, "splits": ("test", "tset")}, "splits must be of .* got 'tset'"),
    ],
)
def test_generate_refuses_before_it_makes_anything(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """0 workers were taken for one for each core, and a wrong split was met when those before it were made."""
    with pytest.raises(ValueError, match=message):
        generate("listops-small", root=tmp_path, **options)
    assert not list(tmp_path.rglob("*"))


MAKE = """
import sys
from pathlib import Path
from benchmarks.lra import listops, sets, sources
source = sources.ListOpsSource(listops.PRESETS["small"])
sets.make(source, "test", 10_000_000, root=Path(sys.argv[1]), workers=2)
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Regression: they waited for work for ever."""
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, **options) as process:
        try:
            end = time.monotonic() + 120
            while not list(tmp_path.rglob("000000.npy")) and time.monotonic() < end:
                time.sleep(0.1)
            process.kill()
            # until nobody has the other end of the pipe
            process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_worker_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a traceback."""

    def broken(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(sets.ProcessPoolExecutor, "map", broken)
    with pytest.raises(OSError, match=r"a worker was killed, .* run the same command again, with fewer .* than 2"):
        sets.make(Squares(), "test", 2000, root=tmp_path, workers=2)


def test_parts_of_killed_processes_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "squares" / "test"
    folder.mkdir(parents=True)
    for name, hours in (("old", 2), ("new", 0)):
        (folder / f".{name}.part").write_bytes(b"half")
        at = time.time() - 3600 * hours
        os.utime(folder / f".{name}.part", (at, at))
    sets.make(Squares(), "test", 2000, root=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".new.part", "000000.npy", "000001.npy"]


def test_a_part_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: NumPy says on a full disk how many records it wrote, but neither where nor why."""

    def full(stream: Any, records: np.ndarray) -> None:
        stream.write(b"half")
        raise OSError("1000 requested and 522 written")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(
        OSError, match=r"000000\.npy cannot be written, with [\d.,]+ MB free on its disk: 1000 requested"
    ):
        sets.make(Squares(), "test", 2000, root=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_larger_set_keeps_the_parts_of_a_smaller_one(tmp_path: Path) -> None:
    sets.make(Squares(), "test", 1500, root=tmp_path)
    # a part that exists is not drawn again
    stored = sets.make(Squares(interrupted_at=1999), "test", 3000, root=tmp_path)
    assert len(stored) == 3000


@pytest.mark.thorough
def test_workers_make_what_one_process_makes(tmp_path: Path) -> None:
    alone = sets.make(Squares(), "train", 3000, root=tmp_path / "alone")
    together = sets.make(Squares(), "train", 3000, root=tmp_path / "together", workers=2)
    assert alone.digest() == together.digest()


def test_the_digest_is_that_of_the_records(tmp_path: Path) -> None:
    stored = sets.make(Squares(), "test", 1200, root=tmp_path)
    again = sets.make(Squares(), "test", 1200, root=tmp_path / "again")
    assert stored.digest() == again.digest()
    assert stored.digest() != sets.make(Squares(), "test", 1201, root=tmp_path).digest()


def test_a_set_that_differs_from_the_recorded_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sets.make(Squares(), "test", 1000, root=tmp_path / "first").digest()
    table = tmp_path / "digests.json"
    monkeypatch.setattr(sets, "RECORDED", table)
    table.write_text(json.dumps({"squares": {"test-1000": digest}}))
    sets.make(Squares(), "test", 1000, root=tmp_path / "second")
    table.write_text(json.dumps({"squares": {"test-1000": "0" * 64}}))
    with pytest.raises(ValueError, match="cannot be compared"):
        sets.make(Squares(), "test", 1000, root=tmp_path / "third")
    # nothing is recorded of another number of samples
    assert not sets.check(Squares(), "test", sets.make(Squares(), "test", 999, root=tmp_path), root=tmp_path)


@dataclass(frozen=True)
class Cubes(Squares):
    """Squares as another version of a package would make them."""

    def draw(self, split: str, places: np.ndarray) -> np.ndarray:
        records = super().draw(split, places)
        records["square"] *= places
        return records


@pytest.fixture
def squares_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sets.make(Squares(), "test", 2000, root=tmp_path / "first").digest()
    monkeypatch.setattr(sets, "RECORDED", tmp_path / "digests.json")
    sets.RECORDED.write_text(json.dumps({"squares": {"test-2000": digest}}))


@pytest.mark.usefixtures("squares_are_recorded")
def test_a_refused_set_stays_refused_until_its_folder_is_deleted(tmp_path: Path) -> None:
    """Its parts were there the second time, and nobody looked at them."""
    folder = tmp_path / "squares" / "test"
    for _ in range(3):
        with pytest.raises(ValueError, match=f"Delete {re.escape(str(folder))} and make the set again"):
            sets.make(Cubes(), "test", 2000, root=tmp_path)
    with pytest.raises(ValueError, match="cannot be compared"):
        sets.make(Squares(), "test", 2000, root=tmp_path)
    shutil.rmtree(folder)
    assert sets.make(Squares(), "test", 2000, root=tmp_path)[1999]["square"] == 1999**2


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)


@pytest.mark.usefixtures("squares_are_recorded")
def test_a_flipped_bit_in_a_complete_set_is_noticed(tmp_path: Path) -> None:
    sets.make(Squares(), "test", 2000, root=tmp_path)
    # one of a set that nothing is known of
    sets.make(Squares(), "test", 1500, root=tmp_path)
    file = tmp_path / "squares" / "test" / "000001.npy"
    flip_a_bit(file)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"but .* was recorded"):
            sets.make(Squares(), "test", 2000, root=tmp_path)
    file.unlink()
    assert len(sets.make(Squares(), "test", 2000, root=tmp_path)) == 2000


@pytest.mark.usefixtures("squares_are_recorded")
def test_generate_says_as_recorded_of_what_it_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "generator_of", lambda *_, seed: Squares())
    monkeypatch.setattr(tasks, "find", lambda task: tasks.Task("squares", 256, 9, 1, tasks.Sizes(1000, 1000, 2000)))
    options: dict[str, Any] = {"root": tmp_path, "workers": 1}
    generate("squares", splits=("test", "validation"), **options)
    test, validation = capsys.readouterr().out.splitlines()
    assert test.endswith(", as recorded")
    assert validation.endswith(", of which none is recorded")
    flip_a_bit(tmp_path / "squares" / "test" / "000000.npy")
    with pytest.raises(ValueError, match="was recorded"):
        generate("squares", splits=("test",), **options)
    assert not capsys.readouterr().out


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count must be 1 or more, got 0"):
        sets.make(Squares(), "test", 0, root=tmp_path)
    with pytest.raises(ValueError, match="workers must be 1 or more, got 0"):
        sets.make(Squares(), "test", 10, root=tmp_path, workers=0)
