"""A Crew of ranks, one process per GPU or a few on the CPU, that run checks by name.

A check is a function of a module, called on every rank with the same arguments. Ranks that answer too late are killed.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# seconds in which a rank imports torch and joins the group, on a busy machine
START = 60


class Answer(NamedTuple):
    """Result of a check on one rank; said: "" if it passed, else a traceback or how the process ended."""

    said: str
    seconds: float


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def _rank(rank: int, n_ranks: int, device: str, port: int, timeout: float, log: str, pipe: Connection) -> None:
    """Process of a rank: joins the group, then runs one check after another."""
    sys.stderr = Path(log).open("w", buffering=1)  # noqa: SIM115  for as long as the process lives
    os.dup2(sys.stderr.fileno(), 2)
    # no core dumps of processes that NCCL aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    is_cuda = device == "cuda"
    if not is_cuda:
        # checks choose the device by torch.cuda
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # otherwise PyTorch waits up to a minute for debug dumps before it aborts a rank that timed out
    dumps = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
    os.environ |= dumps | {"LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=n_ranks,
        timeout=datetime.timedelta(seconds=timeout), device_id=torch.device("cuda", rank) if is_cuda else None,
    )  # fmt: skip
    pipe.send("")
    while True:
        module, function, arguments = pipe.recv()
        try:
            getattr(importlib.import_module(module), function)(*arguments)
            if is_cuda:
                torch.cuda.synchronize()
            pipe.send("")
        except Exception:  # noqa: BLE001  any error is reported
            pipe.send(traceback.format_exc())


class Crew:
    """Ranks of one group, on "cuda" or "cpu". `timeout` is that of the group: seconds a rank waits for another."""

    def __init__(self, n_ranks: int, device: str, timeout: float, folder: Path) -> None:
        # CUDA does not survive a fork
        spawn = multiprocessing.get_context("spawn")
        port, self.logs = free_port(), [folder / f"rank{rank}.stderr" for rank in range(n_ranks)]
        self.pipes, self.processes = [], []
        for rank, log in enumerate(self.logs):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_rank, args=(rank, n_ranks, device, port, timeout, str(log), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, answer in enumerate(self._answers(START)):
            if answer.said:
                self.end()
                raise RuntimeError(f"rank {rank} did not start: {answer.said}")

    def _answers(self, seconds: float, n_awaited: int | None = None) -> list[Answer]:
        begin, found = time.monotonic(), []
        for pipe, process, log in [*zip(self.pipes, self.processes, self.logs, strict=True)][:n_awaited]:
            if not pipe.poll(max(0.0, begin + seconds - time.monotonic())):
                said = f"gave no answer within {seconds:.0f} s: {log.read_text()[-2000:]}"
            else:
                try:
                    said = pipe.recv()
                except EOFError:
                    process.join(5)
                    said = f"ended with exit code {process.exitcode}: {log.read_text()[-4000:]}"
            found.append(Answer(said, time.monotonic() - begin))
        return found

    def run(
        self, module: str, function: str, *arguments: Any, seconds: float, n_awaited: int | None = None
    ) -> list[Answer]:
        """Run a check and return the answers of the first n_awaited ranks, None: of all.

        If it fails on one rank, the ranks may be out of step, so all of them are ended.
        """
        for pipe in self.pipes:
            pipe.send((module, function, arguments))
        found = self._answers(seconds, n_awaited)
        if any(answer.said for answer in found):
            self.end()
        return found

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


def kill_this_rank() -> None:
    """Sends this process SIGKILL, like the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
