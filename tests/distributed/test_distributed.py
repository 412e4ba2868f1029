"""Attention shared by 2, 3 and 4 ranks over gloo equals that of one process: runs context_cases.py.

Also tests that need their own processes: a compiler, and a rank that is killed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import context_ranks
from tests.support.crew import Crew

ROOT = Path(__file__).resolve().parents[2]


@cache
def said(n_ranks: int, which: str) -> dict[str, list[str]]:
    """Case -> error of each rank, for the cases on n_ranks ranks, which start once."""
    command = [sys.executable, "-m", "tests.support.context_ranks", str(n_ranks), which]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=context_ranks.DEADLINE + 60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# most cases are those of two ranks with more of them
@pytest.mark.parametrize(
    ("n_ranks", "which"),
    [
        (2, "quick"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((2, "slow"), (3, "all"), (4, "all"))),
    ],
)
def test_every_case_holds_on_every_rank(n_ranks: int, which: str) -> None:
    """Cases run in order until one fails, which is reported."""
    of_cases = said(n_ranks, which)
    assert of_cases
    for name, errors in of_cases.items():
        for rank, error in enumerate(errors):
            assert not error, f"on rank {rank} of {n_ranks}, {name}:\n{error}"


CASES = "tests.support.context_gpu_cases"
# seconds: of a group in which a rank is killed; what a busy machine may add
PATIENCE, GRACE = 10, 60


# context_cases.py compiles both schemes too, without inductor
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
def test_inductor_compiles_it_into_one_graph(scheme: str, tmp_path: Path) -> None:
    crew = Crew(2, "cpu", PATIENCE + GRACE, tmp_path)
    try:
        answers = crew.run(CASES, "compiles", scheme, "inductor", seconds=4 * GRACE)
    finally:
        crew.end()
    for rank, answer in enumerate(answers):
        assert not answer.said, f"on rank {rank}:\n{answer.said}"


@pytest.mark.thorough
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_killed_rank_is_an_error_on_the_others(n_ranks: int, tmp_path: Path) -> None:
    """The others fail while they wait for its message."""
    crew = Crew(n_ranks, "cpu", PATIENCE, tmp_path)
    try:
        *others, killed = crew.run(CASES, "misses_a_rank", "killed", seconds=PATIENCE + GRACE)
    finally:
        crew.end()
    assert "exit code -9" in killed.said
    for rank, answer in enumerate(others):
        assert "RuntimeError" in answer.said and answer.seconds < PATIENCE + GRACE, f"rank {rank}: {answer}"
