"""Runs cases of context_cases.py on N forked ranks: `python -m tests.support.context_ranks N WHICH`.

WHICH is all, slow (cases that compile or run kernels in the interpreter), quick (all others), or part of a name.

This process imports torch once and forks the ranks, which join their group through a file. It prints one JSON object:
case -> the error of each rank, "" for none. Waits for a message end after TIMEOUT, the whole run after DEADLINE.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# seconds that a rank waits for another one on a busy machine, and that all cases may take
TIMEOUT = 60
DEADLINE = 1200

Cases = dict[str, Callable[[], None]]
# names of cases that take seconds begin so
SLOW = ("compiles and", "kernels ")


def _rank(rank: int, n_ranks: int, folder: str, cases: Cases, timeout: float) -> None:
    errors: dict[str, str] = {}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", n_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=n_ranks, timeout=datetime.timedelta(seconds=timeout)
    )
    for name, case in cases.items():
        begin = time.perf_counter()
        try:
            case()
            errors[name] = ""
        except Exception:  # noqa: BLE001  any error is reported
            errors[name] = traceback.format_exc()
        Path(f"{folder}/{rank}.json").write_text(json.dumps(errors))
        if "-v" in sys.argv and rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.2f} s {errors[name]}", file=sys.stderr, flush=True)
        if errors[name]:
            # the ranks may be out of step, so later cases would prove nothing
            break
    dist.destroy_process_group()


def run(n_ranks: int, cases: Cases, timeout: float = TIMEOUT) -> dict[str, list[str]]:
    """Case -> error of each rank, "" for none. Cases run in their order, until one fails."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=_rank, args=(rank, n_ranks, folder, cases, timeout), daemon=True)
            for rank in range(n_ranks)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + DEADLINE
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        for process in ranks:
            process.kill()
        files = [Path(f"{folder}/{rank}.json") for rank in range(n_ranks)]
        errors = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return {name: [of_rank.get(name, "the case was not reached") for of_rank in errors] for name in cases}


if __name__ == "__main__":
    # read when Triton is imported: runs its kernels without a GPU
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support import context_cases, interpreter

    interpreter.speed_up_interpreter()

    n_ranks = int(sys.argv[1])
    which = sys.argv[2] if len(sys.argv) > 2 and sys.argv[2] != "-v" else "all"
    known: Cases = context_cases.cases(n_ranks, has_kernels=which != "quick")
    slow = {name for name in known if name.startswith(SLOW)}
    names = {"all": set(known), "slow": slow, "quick": set(known) - slow}.get(which, {n for n in known if which in n})
    chosen = {name: case for name, case in known.items() if name in names}
    print(json.dumps(run(n_ranks, chosen)))
