"""A simulated GPU for warp-specialized kernels: mbarriers, named barriers, shared memory and TMA, on the CPU.

Each partition (the warps of one entry point of gl.warp_specialize) is a thread. Over all programs, one partition runs
at a time. At every operation on a barrier, shared memory, TMA, an atomic or a matrix product it yields to the
scheduler, which uses the seed to choose what happens next: another partition resumes or a TMA transfer completes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ProtocolError(AssertionError):
    """A fault that gives wrong results or a hang on a GPU."""


class Stop(BaseException):
    """Ends the threads of the other partitions after an error."""


# ---- scheduling ----

# CURRENT.partition is the partition that a thread runs
CURRENT = threading.local()


def locked() -> Any:
    """A lock that is held. Handing one back and forth takes half the time that a semaphore does."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Partition:
    """One partition of a program: a thread that runs only when the scheduler resumes it."""

    def __init__(self, machine: Machine, name: str, warps: int, call: Callable[[], None]) -> None:
        self.machine, self.name, self.warps, self._call = machine, name, warps, call
        self.resume = locked()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = "its start"
        self.is_done = False
        self.error: BaseException | None = None
        # asynchronous operations in flight, in order of issue: matrix products, and the buffers that TMA stores read
        self.products: list[Any] = []
        # operands of products that have been waited for, which other warps of the partition may still read
        self.read: list[Shared] = []
        self.stores: list[Shared] = []
        # how likely the scheduler resumes it
        self.weight = machine.random.choice([0.1, 1.0, 1.0, 8.0])
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        CURRENT.partition = self
        self.resume.acquire()
        try:
            if self.machine.error is None:
                self._call()
                if self.products or self.stores:
                    raise ProtocolError(f"{self.name} ends with matrix products or TMA stores in flight")
        except Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the scheduler
            self.error = error
        self.is_done = True
        # after an error the scheduler waits no more
        if self.machine.error is None:
            self.machine.yielded.release()

    def meet(self) -> None:
        """The threads of the partition meet: each has waited for the products."""
        while self.read:
            self.read.pop().end_read()

    def pause(self, waits_for: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Yields to the scheduler, which resumes this partition at some time after `ready` holds."""
        self.waits_for, self.ready = waits_for, ready
        self.machine.yielded.release()
        self.resume.acquire()
        if self.machine.error is not None:
            raise Stop


class Machine:
    """The state of one program: partitions, barriers, shared memory, TMA transfers in flight."""

    def __init__(self, seed: int, program: int, n_programs: int) -> None:
        self.random = random.Random(f"{seed} {program}")
        self.program, self.n_programs = program, n_programs
        # released by a partition that yields to the scheduler or ends
        self.yielded = locked()
        self.error: BaseException | None = None
        self.partitions: list[Partition] = []
        # TMA transfers in flight; calling one completes it
        self.tma_loads: list[Callable[[], None]] = []
        self.tma_stores: list[Callable[[], None]] = []
        self.tma_weight = self.random.choice([0.1, 1.0, 8.0])
        self.barriers: list[Barrier] = []
        # per allocation of shared memory, see Marks
        self.unfenced: list[Tensor] = []
        # by number of a named barrier: partitions that have arrived, and how often it has completed
        self.named: dict[int, list[Partition]] = {}
        self.generation: dict[int, int] = {}

    def begin(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int]) -> None:
        """Starts the partitions: (function, arguments) and number of warps of each."""
        for i, ((function, arguments), n_warps) in enumerate(zip(calls, warps, strict=True)):
            name = f"partition {i} ({getattr(function, '__name__', 'the kernel')}) of program {self.program}"
            self.partitions.append(Partition(self, name, n_warps, lambda f=function, a=arguments: f(*a)))
        for partition in self.partitions:
            partition.thread.start()

    @property
    def is_done(self) -> bool:
        return not (self.tma_loads or self.tma_stores) and all(partition.is_done for partition in self.partitions)

    def stop(self, error: BaseException | None) -> None:
        """Ends the threads, after an error or after all partitions are done."""
        self.error = error
        for partition in self.partitions:
            partition.resume.release()
            partition.thread.join()

    def step(self) -> bool:
        """Resumes a partition or completes a TMA transfer, at random; False if neither is possible."""
        runnable = [p for p in self.partitions if not p.is_done and p.ready()]
        choices: list[Any] = [*runnable, *self.tma_loads, *self.tma_stores]
        if not choices:
            return False
        weights = [p.weight for p in runnable] + [self.tma_weight] * (len(self.tma_loads) + len(self.tma_stores))
        (chosen,) = self.random.choices(choices, weights)
        if not isinstance(chosen, Partition):
            (self.tma_loads if chosen in self.tma_loads else self.tma_stores).remove(chosen)
            chosen()
            return True
        chosen.resume.release()
        self.yielded.acquire()
        if chosen.error is not None:
            raise chosen.error
        return True

    def waiting(self) -> str:
        """What each unfinished partition waits for."""
        return "; ".join(f"{p.name} waits for {p.waits_for}" for p in self.partitions if not p.is_done)

    def check_end(self) -> None:
        """Raises if the program has ended with barriers in the middle of a phase."""
        left = {number: len(arrived) for number, arrived in self.named.items() if arrived}
        if left:
            raise ProtocolError(f"named barriers are left with arrivals, by number: {left}")
        if any(barrier.bytes for barrier in self.barriers):
            raise ProtocolError("an mbarrier is left with expected bytes that never arrived")
        if any(barrier.has_loads and barrier.has_unwaited_phase for barrier in self.barriers):
            raise ProtocolError("a TMA load may still be in flight at the end: nobody has waited for it")


def run_all(machines: list[Machine], seed: int) -> None:
    """Runs programs whose partitions have begun to their end. Raises the first error of any of them."""
    scheduler = random.Random(seed)
    running = [(machine, scheduler.choice([0.1, 1.0, 8.0])) for machine in machines]
    error: BaseException | None = None
    try:
        while running:
            # the first program in a weighted random order that can make a step
            order = sorted(running, key=lambda each: -(scheduler.random() ** (1 / each[1])))
            chosen = next((each for each in order if each[0].is_done or each[0].step()), None)
            if chosen is None:
                raise ProtocolError(f"deadlock: {'; '.join(machine.waiting() for machine, _ in running)}")
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


class Marks(NamedTuple):
    """One mark per byte of shared memory, of accesses that other accesses may conflict with.

    unfenced  1 + the partition that wrote the byte and has not fenced it since; 0: none
    readers   asynchronous operations (wgmma, TMA stores) that still read it
    loading   whether a TMA load that will write it is in flight
    """

    unfenced: Tensor
    readers: Tensor
    loading: Tensor


class Shared:
    """A view of a shared-memory allocation: its values, and the same view of its marks, with the bytes as last axis.

    layout  how the allocation is swizzled; recorded only
    """

    def __init__(self, machine: Machine, values: Tensor, marks: Marks, layout: Any) -> None:
        self.machine, self.values, self.marks, self.layout = machine, values, marks, layout

    @classmethod
    def allocate(cls, machine: Machine, values: Tensor, layout: Any) -> Shared:
        shape = (*values.shape, values.itemsize)
        marks = Marks(*(torch.zeros(shape, dtype=dtype) for dtype in (torch.int8, torch.int8, torch.bool)))
        machine.unfenced.append(marks.unfenced)
        return cls(machine, values, marks, layout)

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def _view(self, view_of: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(self.machine, view_of(self.values), Marks(*map(view_of, self.marks)), self.layout)

    def index(self, i: Any) -> Shared:
        return self._view(lambda tensor: tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return self._view(lambda tensor: tensor.narrow(dim, int(start), int(length)))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda tensor: tensor.permute(*order, *range(len(order), tensor.dim())))

    def reshape(self, shape: list[int]) -> Shared:
        n_axes, sides = self.values.dim(), [int(n) for n in shape]
        return self._view(lambda tensor: tensor.view(*sides, *tensor.shape[n_axes:]))

    def reinterpret(self, shape: list[int], layout: Any, dtype: torch.dtype) -> Shared:
        """The first bytes as a tensor of this shape and dtype, whose elements are at most as wide."""
        n_values = torch.Size(shape).numel()
        values = self.values.view(-1).view(dtype)[:n_values].view(shape)
        n_bytes = n_values * dtype.itemsize
        marks = Marks(*(marks.view(-1)[:n_bytes].view(*shape, dtype.itemsize) for marks in self.marks))
        return Shared(self.machine, values, marks, layout)

    def load(self, layout: Any) -> Tensor:
        CURRENT.partition.pause("a load from shared memory")
        self._check(self.marks.loading, "read during a TMA load")
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        partition = CURRENT.partition
        partition.pause("a store to shared memory")
        # Triton puts a barrier before
        partition.meet()
        self._check(self.marks.readers, "written while wgmma or TMA reads it")
        self._check(self.marks.loading, "written during a TMA load")
        assert values.shape == self.values.shape and values.dtype == self.values.dtype, (values.shape, self.shape)
        self.values.copy_(values)
        self.marks.unfenced.fill_(1 + self.machine.partitions.index(partition))

    def _check(self, marks: Tensor, fault: str) -> None:
        if marks.any():
            raise ProtocolError(f"{CURRENT.partition.name}: shared memory is {fault}")

    def begin_read(self) -> None:
        """A wgmma or TMA store that reads the view is issued."""
        self._check(self.marks.loading, "read during a TMA load")
        self._check(self.marks.unfenced, "read by wgmma or TMA without a proxy fence after the last write")
        self.marks.readers.add_(1)

    def end_read(self) -> None:
        self.marks.readers.sub_(1)

    def begin_load(self) -> None:
        """A TMA load into the view is issued; the old values are lost."""
        self._check(self.marks.readers, "overwritten by a TMA load while wgmma or TMA reads it")
        self._check(self.marks.loading, "overwritten by a TMA load during another one")
        self._check(self.marks.unfenced, "overwritten by a TMA load without a proxy fence after the last write")
        self.values.fill_(torch.nan)
        self.marks.loading.fill_(True)

    def end_load(self) -> None:
        self.marks.loading.fill_(False)


class Barrier:
    """An mbarrier: a phase completes after `count` arrivals and all expected bytes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.count = self.pending = self.phase = self.bytes = 0
        # whether a phase has completed and nobody has waited for it yet
        self.has_unwaited_phase = False
        # whether TMA loads report to it
        self.has_loads = False
        machine.barriers.append(self)

    def index(self, i: Any) -> Barrier:
        assert int(i) == 0
        return self

    def arrive(self, count: int, n_bytes: int = 0) -> None:
        if self.pending < count:
            raise ProtocolError(f"{CURRENT.partition.name}: an mbarrier gets more arrivals than its count")
        self.pending -= count
        self.bytes += n_bytes
        self.complete_phase()

    def complete_phase(self) -> None:
        """Completes the phase if no arrival and no byte is pending."""
        if self.pending == 0 and self.bytes == 0:
            if self.has_unwaited_phase:
                raise ProtocolError("a phase of an mbarrier completes before anybody has waited for the previous one")
            self.has_unwaited_phase = True
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """An array of mbarriers."""

    def __init__(self, machine: Machine, length: int) -> None:
        self._all = [Barrier(machine) for _ in range(length)]

    def index(self, i: Any) -> Barrier:
        return self._all[int(i)]
