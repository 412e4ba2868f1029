"""Does attention shared by several ranks equal that of one process? Runs context_cases.py on 2, 3 and 4 ranks, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import context_ranks

ROOT = Path(__file__).resolve().parents[1]


@cache
def said(n_ranks: int) -> dict[str, list[str]]:
    """Case -> error of each rank, of all cases on so many ranks: they start once."""
    command = [sys.executable, "-m", "tests.context_ranks", str(n_ranks)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=context_ranks.DEADLINE + 60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_every_case_holds_on_every_rank(n_ranks: int) -> None:
    """They run in order, until one fails; the first one is told."""
    for name, errors in said(n_ranks).items():
        for rank, error in enumerate(errors):
            assert not error, f"on rank {rank} of {n_ranks}, {name}:\n{error}"
