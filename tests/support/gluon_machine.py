"""A machine on the CPU with mbarriers, named barriers and shared memory, on which partitions of programs run.

Each partition is a thread; one runs at a time, of all programs, and a seed chooses which, at every operation on
barriers, shared
memory, copies, counters and products. A copy lands when the seed says so.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ProtocolError(AssertionError):
    """What a GPU would answer with wrong numbers, or not at all."""


class Stop(BaseException):
    """Ends the threads of the other partitions after an error."""


# ---- who runs when ----

# of each thread, the partition that it is
CURRENT = threading.local()


class Partition:
    """One partition of a program: a thread that runs when it is written to."""

    def __init__(self, machine: Machine, name: str, warps: int, call: Callable[[], None]) -> None:
        self.machine, self.name, self.warps, self._call = machine, name, warps, call
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its start"
        self.is_done = False
        self.error: BaseException | None = None
        self.products: list[Any] = []
        # read by TMA, in order
        self.stores: list[Shared] = []
        self.weight = machine.random.choice([0.1, 1.0, 1.0, 8.0])
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        CURRENT.partition = self
        self.go.acquire()
        try:
            if self.machine.error is None:
                self._call()
                if self.products or self.stores:
                    raise ProtocolError(f"{self.name} ends with products or stores under way")
        except Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the scheduler
            self.error = error
        self.is_done = True
        self.machine.back.release()

    def pause(self, waits_for: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run until this one is chosen and ready."""
        self.waits_for, self.ready = waits_for, ready
        self.machine.back.release()
        self.go.acquire()
        if self.machine.error is not None:
            raise Stop


class Machine:
    """One program: its partitions, barriers and copies under way."""

    def __init__(self, seed: int, program: int, n_programs: int) -> None:
        self.random = random.Random(f"{seed} {program}")
        self.program, self.n_programs = program, n_programs
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.partitions: list[Partition] = []
        # into shared memory, and from there to global memory
        self.copies: list[Callable[[], None]] = []
        self.writes: list[Callable[[], None]] = []
        self.copy_weight = self.random.choice([0.1, 1.0, 8.0])
        self.barriers: list[Barrier] = []
        self.unfenced: list[Tensor] = []
        self.named: dict[int, list[Partition]] = {}
        self.generation: dict[int, int] = {}

    def begin(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int]) -> None:
        """The partitions, of so many warps, which run from now on."""
        for i, ((function, arguments), n_warps) in enumerate(zip(calls, warps, strict=True)):
            name = f"partition {i} ({function.__name__}) of program {self.program}"
            self.partitions.append(Partition(self, name, n_warps, lambda f=function, a=arguments: f(*a)))
        for partition in self.partitions:
            partition.thread.start()

    @property
    def is_done(self) -> bool:
        return not (self.copies or self.writes) and all(partition.is_done for partition in self.partitions)

    def stop(self, error: BaseException | None) -> None:
        """Ends the partitions, after an error or because they have come to their end."""
        self.error = error
        for partition in self.partitions:
            partition.go.release()
            partition.thread.join()

    def step(self) -> bool:
        """One of what can come next; False: there is nothing."""
        able = [p for p in self.partitions if not p.is_done and p.ready()]
        choices: list[Any] = [*able, *self.copies, *self.writes]
        if not choices:
            return False
        weights = [p.weight for p in able] + [self.copy_weight] * (len(self.copies) + len(self.writes))
        (chosen,) = self.random.choices(choices, weights)
        if not isinstance(chosen, Partition):
            (self.copies if chosen in self.copies else self.writes).remove(chosen)
            chosen()
            return True
        chosen.go.release()
        self.back.acquire()
        if chosen.error is not None:
            raise chosen.error
        return True

    def stuck(self) -> str:
        return "; ".join(f"{p.name} waits for {p.waits_for}" for p in self.partitions if not p.is_done)

    def check_end(self) -> None:
        left = {number: len(who) for number, who in self.named.items() if who}
        if left:
            raise ProtocolError(f"named barriers end with arrivals that nobody met: {left}")
        if any(barrier.bytes for barrier in self.barriers):
            raise ProtocolError("a barrier ends waiting for bytes")


def run_all(machines: list[Machine], seed: int) -> None:
    """Run programs, whose partitions have begun, to their end, or raise what one of them did wrong."""
    chance = random.Random(seed)
    running = [(machine, chance.choice([0.1, 1.0, 8.0])) for machine in machines]
    error: BaseException | None = None
    try:
        while running:
            # in random order, until one can do something
            order = sorted(running, key=lambda each: -(chance.random() ** (1 / each[1])))
            chosen = next((each for each in order if each[0].is_done or each[0].step()), None)
            if chosen is None:
                raise ProtocolError(f"deadlock: {'; '.join(machine.stuck() for machine, _ in running)}")
            if chosen[0].is_done:
                running.remove(chosen)
                chosen[0].stop(None)
                chosen[0].check_end()
    except BaseException as raised:
        error = raised
        raise
    finally:
        for machine, _ in running:
            machine.stop(error)


# ---- shared memory ----


class Shared:
    """A view of shared memory: its values, and for the place of each who wrote it unfenced, how many read it,
    whether a copy lands.

    place  of each value in the marks of what was allocated
    """

    def __init__(self, machine: Machine, values: Tensor, place: Tensor, marks: tuple[Tensor, Tensor, Tensor]) -> None:
        self.machine, self.values, self.place, self._marks = machine, values, place, marks
        self.unfenced, self.readers, self.landing = marks

    @classmethod
    def allocate(cls, machine: Machine, values: Tensor) -> Shared:
        marks = (torch.zeros(values.numel(), dtype=kind) for kind in (torch.int8, torch.int8, torch.bool))
        shared = cls(machine, values, torch.arange(values.numel()).view(values.shape), tuple(marks))
        machine.unfenced.append(shared.unfenced)
        return shared

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def _view(self, change: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(self.machine, change(self.values), change(self.place), self._marks)

    def index(self, i: Any) -> Shared:
        return self._view(lambda part: part[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._view(lambda part: part.narrow(dim, int(start), int(length)))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda part: part.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(lambda part: part.view([int(n) for n in shape]))

    def reinterpret(self, shape: list[int], dtype: torch.dtype) -> Shared:
        """The first of the same bytes as values of a type no wider."""
        n_values = torch.Size(shape).numel()
        place = self.place.view(-1).repeat_interleave(self.dtype.itemsize // dtype.itemsize)
        values = self.values.view(-1).view(dtype)
        return Shared(self.machine, values[:n_values].view(shape), place[:n_values].view(shape), self._marks)

    def load(self, layout: Any) -> Tensor:
        CURRENT.partition.pause("a load")
        self._check(self.landing, "read while a copy lands in it")
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        who = CURRENT.partition
        who.pause("a store")
        self._check(self.readers, "written while something reads it")
        self._check(self.landing, "written while a copy lands in it")
        assert values.shape == self.values.shape and values.dtype == self.values.dtype, (values.shape, self.shape)
        self.values.copy_(values)
        self.unfenced[self.place] = 1 + self.machine.partitions.index(who)

    def _check(self, marks: Tensor, fault: str) -> None:
        if marks[self.place].any():
            raise ProtocolError(f"{CURRENT.partition.name}: shared memory is {fault}")

    def begin_read(self) -> None:
        """An asynchronous operation reads it from now on."""
        self._check(self.landing, "read while a copy lands in it")
        self._check(self.unfenced, "read by TMA or a product without a fence after it was written")
        self.readers[self.place] += 1

    def end_read(self) -> None:
        self.readers[self.place] -= 1

    def begin_landing(self) -> None:
        """A copy into it is issued: what was there is gone."""
        self._check(self.readers, "overwritten by a copy while something reads it")
        self._check(self.landing, "overwritten by a copy while another lands in it")
        self._check(self.unfenced, "overwritten by a copy without a fence after it was written")
        self.values.fill_(torch.nan)
        self.landing[self.place] = True

    def end_landing(self) -> None:
        self.landing[self.place] = False


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.count = self.pending = self.phase = self.bytes = 0
        # whether a phase has ended which nobody has waited for yet
        self.is_missed = False
        machine.barriers.append(self)

    def index(self, i: Any) -> Barrier:
        assert int(i) == 0
        return self

    def arrive(self, count: int, n_bytes: int = 0) -> None:
        if self.pending < count:
            raise ProtocolError(f"{CURRENT.partition.name} arrives at a barrier more often than it counts")
        self.pending -= count
        self.bytes += n_bytes
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            if self.is_missed:
                raise ProtocolError("a phase of a barrier ends, and nobody has waited for the one before")
            self.is_missed = True
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """A ring of mbarriers."""

    def __init__(self, machine: Machine, length: int) -> None:
        self._all = [Barrier(machine) for _ in range(length)]

    def index(self, i: Any) -> Barrier:
        return self._all[int(i)]
