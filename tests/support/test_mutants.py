"""Every fault of the mutation table can be made, and the files of its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import mutants
from tests.support.mutant_table import MUTANTS, Mutant


def test_every_fault_of_the_table_can_be_made() -> None:
    assert mutants.wrong_entries(MUTANTS) == []
    assert sum(map(len, MUTANTS.values())) >= 60
    assert MUTANTS.keys() == {
        "masks",
        "blocks",
        "plan",
        "eager",
        "kernels",
        "interop",
        "distributed",
        "models",
        "paged",
    }


GOOD = Mutant("code.py", "a < b", "a <= b", "tests/test_code.py -k less")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"file": "none.py"}, "there is no such file"),
        ({"old": "a > b"}, "must occur once, and occurs 0 times"),
        ({"old": "a"}, "must occur once, and occurs 2 times"),
        ({"new": "a < b"}, "one line must become another"),
        ({"old": "a < b\n"}, "one line must become another"),
        ({"tests": "tests/test_none.py"}, "there is no tests/test_none.py"),
        ({"tests": "-k less"}, "no test is named"),
    ],
)
def test_a_fault_that_cannot_be_made_is_named(change: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_code.py").touch()
    (tmp_path / "code.py").write_text("a < b\nc = a\n")
    found = mutants.wrong_entries({"area": [GOOD._replace(**change)]}, tmp_path)
    assert message in "".join(found) and bool(found) == bool(message)


def test_a_fault_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_code.py").touch()
    (tmp_path / "code.py").write_text("a < b\n")
    (found,) = mutants.wrong_entries({"one": [GOOD], "other": [GOOD]}, tmp_path)
    assert "listed twice" in found


@pytest.mark.parametrize(
    ("outcome", "why", "message"),
    [
        (mutants.KILLED, "", ""),
        (mutants.TIMEOUT, "", ""),
        (mutants.SURVIVED, "", "add a test that detects it"),
        (mutants.SURVIVED, "the same by another way", ""),
        (mutants.KILLED, "the same by another way", "and was killed"),
        (mutants.BROKEN, "", "the tests cannot be run"),
        (mutants.BROKEN, "the same by another way", "the tests cannot be run"),
    ],
)
def test_results_that_contradict_the_table_are_reported(outcome: str, why: str, message: str) -> None:
    found = mutants.contradiction(GOOD._replace(why=why), mutants.Result(outcome, 1.0, ""))
    assert message in found and bool(found) == bool(message)
