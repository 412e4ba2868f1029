"""Mutation testing: `python -m tests.support.mutants --only masks --jobs 2`.

MUTANTS lists single-line faults by area, each with the tests that must fail. Faults are made in a copy of the tree. A
fault that no test can detect has a reason (`why`). The run fails if such a fault is killed, if one without a reason
survives, if a selection of tests fails without a fault, or if fewer than MIN_KILLED of all are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# everything that the tests read
COPIED = ("blocksparse_flash", "masks", "benchmarks", "tests", "pyproject.toml", "README.md")
MIN_KILLED = 0.95
# time limits in seconds: LONGEST for tests without a fault that take t, SPARE + SLOWER * t with a fault
LONGEST, SPARE, SLOWER = 600, 60, 5

KILLED, SURVIVED, BROKEN, TIMEOUT = "killed", "survived", "broken", "killed (timeout)"


class Result(NamedTuple):
    """Outcome of a fault, and the end of pytest's output."""

    outcome: str
    seconds: float
    output: str

    @property
    def is_killed(self) -> bool:
        return self.outcome in (KILLED, TIMEOUT)


# ---- the form of the table ----


def wrong_entries(mutants: dict[str, list[Mutant]], root: Path = ROOT) -> list[str]:
    """One sentence for each invalid entry of the table; runs nothing."""
    found, seen = [], set()
    for area, mutant in ((area, mutant) for area, listed in mutants.items() for mutant in listed):
        name = f"{area}: {mutant}"
        if not (root / mutant.file).is_file():
            found.append(f"{name}: there is no such file")
            continue
        count = (root / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if count != 1 or not mutant.old.strip():
            found.append(f"{name}: the old text must occur once, and occurs {count} times")
        if "\n" in mutant.old + mutant.new or mutant.old == mutant.new:
            found.append(f"{name}: one line must become another")
        if (mutant.file, mutant.old, mutant.new) in seen:
            found.append(f"{name}: listed twice")
        seen.add((mutant.file, mutant.old, mutant.new))
        files = [part.split("::")[0] for part in shlex.split(mutant.tests) if part.startswith("tests/")]
        if not files:
            found.append(f"{name}: no test is named")
        found += [f"{name}: there is no {file}" for file in files if not (root / file).is_file()]
    return found


# ---- running ----


def copied(folder: Path) -> Path:
    """A copy of the tree to make faults in."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy2(source, target)
    # bytecode validated by hash: a fault may leave size and modification time of a file unchanged
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
    subprocess.run(compiled, cwd=folder, check=True)
    where = "import blocksparse_flash, masks; print(blocksparse_flash.__file__, masks.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=folder, capture_output=True, text=True, check=True).stdout
    if found.split() != [str(folder / name / "__init__.py") for name in ("blocksparse_flash", "masks")]:
        raise SystemExit(f"tests of the copy in {folder} would import {found}")
    return folder


class Server:
    """A process that has imported slow packages and runs pytest in forks of itself, one at a time.

    It and every fork start a new process session, so that processes started by tests end with them.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.mutants import serve; serve()"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, *request: object) -> int | None:
        """The exit code of pytest, or None after a timeout; `request` as `serve` reads it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Answers each line [folder, pytest arguments, output file, seconds] with an exit code, or null after a timeout."""
    # not Triton, which reads environment variables when imported, and nothing from the tree under test
    import numpy  # noqa: F401
    import scipy.sparse  # noqa: F401
    import torch  # noqa: F401

    for line in sys.stdin:
        folder, arguments, output, seconds = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for stream, target in ((0, os.devnull), (1, output), (2, output)):
                os.dup2(os.open(target, os.O_RDWR | os.O_APPEND), stream)
            os.chdir(folder)
            sys.path.insert(0, folder)
            # drop the checkout's tests package
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            code = pytest.main(arguments)
            sys.stdout.flush()
            os._exit(int(code))
        print(json.dumps(_ended(pid, seconds)), flush=True)


def _ended(pid: int, seconds: float) -> int | None:
    """Exit code of a fork, negative for a signal, None for a timeout; kills its whole process session."""
    end, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < end:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if found else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


class Worker(NamedTuple):
    """A copy of the tree and the server that runs tests in it."""

    folder: Path
    server: Server


def run_tests(worker: Worker, tests: str, seconds: float) -> Result:
    """Run a selection of tests in a copy of the tree until the first failure."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    begin = time.monotonic()
    # a file, since leftover processes of tests could keep a pipe open
    with tempfile.NamedTemporaryFile() as output:
        code = worker.server.ask(str(worker.folder), arguments, output.name, seconds)
        text = output.read().decode(errors="replace")
    outcome = {None: TIMEOUT, 0: SURVIVED, 1: KILLED}.get(code, KILLED if code is not None and code < 0 else BROKEN)
    # an import error does not count as killed
    outcome = BROKEN if "ERROR collecting" in text else outcome
    return Result(outcome, time.monotonic() - begin, text[-2000:])


def run_mutant(worker: Worker, mutant: Mutant, seconds: float) -> Result:
    """Run the tests of a fault in a copy of the tree, and undo the fault."""
    file = worker.folder / mutant.file
    whole = file.read_text(encoding="utf-8")
    try:
        file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
        return run_tests(worker, mutant.tests, seconds)
    finally:
        file.write_text(whole, encoding="utf-8")


class Workers:
    """Copies of the tree, each used by one thread at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.free: queue.Queue[Worker] = queue.Queue()
        self.all = [Worker(copied(folder / f"copy-{job}"), Server()) for job in range(jobs)]
        for worker in self.all:
            self.free.put(worker)
        self.jobs, self.lock, self.n_done = jobs, threading.Lock(), 0

    def each(self, name: str, tasks: Iterable[object], work: Callable[[Worker, object], Result]) -> list[Result]:
        """The result of each task, in order; prints a line when a task ends."""
        listed, self.n_done = list(tasks), 0

        def one(task: object) -> Result:
            worker = self.free.get()
            try:
                result = work(worker, task)
            finally:
                self.free.put(worker)
            with self.lock:
                self.n_done += 1
                where = f"[{name} {self.n_done}/{len(listed)}]"
                print(f"{where} {result.outcome:9} {result.seconds:6.1f} s  {task}", flush=True)
            return result

        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(one, listed))


def timed(workers: Workers, mutants: Iterable[Mutant]) -> dict[str, float]:
    """Seconds of each selection of tests without a fault; exits if one fails."""
    selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
    results = workers.each("without faults", selections, lambda at, tests: run_tests(at, str(tests), LONGEST))
    for tests, result in zip(selections, results, strict=True):
        if result.outcome != SURVIVED:
            raise SystemExit(f"pytest {tests}: {result.outcome} without any fault\n{result.output}")
    return {tests: result.seconds for tests, result in zip(selections, results, strict=True)}


# ---- reporting ----


def contradiction(mutant: Mutant, result: Result) -> str:
    """How a result contradicts the table, or ""."""
    if result.outcome == BROKEN:
        return f"{mutant}: the tests cannot be run with it\n{result.output}"
    if result.is_killed and mutant.why:
        last = re.findall(r"^(?:FAILED|E  ).*", result.output, re.MULTILINE)[-1:]
        return f"{mutant}: no test was expected to detect it, and was killed: {' '.join(last)}"
    if result.outcome == SURVIVED and not mutant.why:
        return f"{mutant}: survived {mutant.tests}: add a test that detects it, or give a reason why none can"
    return ""


def table(rows: dict[str, list[tuple[Mutant, Result]]]) -> str:
    """Counts for each area and in total."""
    lines = [f"{'area':14}{'mutants':>9}{'killed':>9}{'survived':>10}{'explained':>11}"]
    for area, of_area in [*rows.items(), ("all", [pair for pairs in rows.values() for pair in pairs])]:
        killed = sum(result.is_killed for _, result in of_area)
        explained = sum(bool(mutant.why) and result.outcome == SURVIVED for mutant, result in of_area)
        lines.append(f"{area:14}{len(of_area):9}{killed:9}{len(of_area) - killed:10}{explained:11}")
    return "\n".join(lines)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="AREA", choices=MUTANTS, action="append", help=f"of {', '.join(MUTANTS)}")
    parser.add_argument("--file", default="", help="only faults in files whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, help="pytest processes at once")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = parsed(arguments)
    if problems := wrong_entries(MUTANTS):
        print("\n".join(problems))
        return 1
    picked = {
        area: [mutant for mutant in listed if chosen.file in mutant.file]
        for area, listed in MUTANTS.items()
        if area in (chosen.only or MUTANTS)
    }
    every = [mutant for listed in picked.values() for mutant in listed]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = Workers(Path(folder), max(1, chosen.jobs))
        try:
            seconds = timed(workers, every)

            def tried(at: Worker, task: object) -> Result:
                assert isinstance(task, Mutant)
                return run_mutant(at, task, SPARE + SLOWER * seconds[task.tests])

            results = iter(workers.each("mutant", every, tried))
        finally:
            for worker in workers.all:
                worker.server.end()
    rows = {area: [(mutant, next(results)) for mutant in listed] for area, listed in picked.items()}
    pairs = [pair for of_area in rows.values() for pair in of_area]
    problems = [problem for problem in (contradiction(*pair) for pair in pairs) if problem]
    for mutant, result in pairs:
        if mutant.why and result.outcome == SURVIVED:
            print(f"survives: {mutant}: {mutant.why}")
    print("\n".join(problems))
    share = sum(result.is_killed for _, result in pairs) / max(1, len(pairs))
    print(f"{table(rows)}\n{share:.1%} killed; at least {MIN_KILLED:.0%} must be")
    return int(bool(problems) or share < MIN_KILLED)


if __name__ == "__main__":
    sys.exit(main())
