"""Simulates the Hopper kernels and their synchronization on the CPU.

The kernels' sources run as plain Python: this file replaces the Gluon language, gluon_machine.py simulates the GPU. A
wgmma reads its operands until it is waited for and, since each warp waits for itself, until the warps meet at a
barrier; a TMA store reads its source until `store_wait`.

Raised as ProtocolError
    barriers       deadlocks, waits for a wrong phase, phases that nobody waits for, too many arrivals, missing bytes
    shared memory  written while wgmma or TMA reads it, read during a TMA load, read by wgmma or TMA without a fence
    at the end     wgmma or TMA transfers in flight
Found by comparison with the reference
    wrong arithmetic, wrong tiles, and reads of uninitialized shared memory, which is full of NaN
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from blocksparse_flash import kernels
from blocksparse_flash.runtime import launch, launcher
from tests.support.gluon_machine import CURRENT, Barrier, Barriers, Machine, Partition, ProtocolError, Shared, run_all

KERNELS = Path(kernels.__file__).parent
# modules that the kernels import, in import order
HELPERS = (
    "hopper.barriers", "hopper.tma", "hopper.bitmask", "hopper.registers", "hopper.work_tiles", "hopper.score_mods",
)  # fmt: skip


# ---- global memory ----


class Pointer:
    """A tensor as flat memory, and an offset into it or a tensor of offsets."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        # detached: autograd must not record loads. Padding of rows is part of the memory
        tensor = tensor.detach()
        self.flat = (
            tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((len(tensor) * tensor.stride(0),), (1,))
        )
        self.offset = torch.as_tensor(offset)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + torch.as_tensor(other))

    def at(self, mask: Any = None) -> Tensor:
        """The offsets, 0 where masked. Raises if one is out of bounds."""
        offset = self.offset if mask is None else torch.where(mask, self.offset, 0)
        if offset.numel() and not (0 <= int(offset.min()) and int(offset.max()) < len(self.flat)):
            raise ProtocolError(f"offset out of bounds: {int(offset.max())} in memory of {len(self.flat)} elements")
        return offset


def pointers(argument: Any) -> Any:
    """An argument of a launch, with a Pointer in place of each tensor, also inside named tuples."""
    if isinstance(argument, tuple):
        return type(argument)(*map(pointers, argument))
    return Pointer(argument) if isinstance(argument, Tensor) else argument


class Descriptor:
    """A TMA descriptor. Outside the tensor, TMA reads zeros and writes nothing."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.layout = block_shape, layout

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        n_bytes = self.dtype.itemsize * torch.Size(self.block_shape).numel()
        return types.SimpleNamespace(shape=list(self.block_shape), nbytes=n_bytes)

    def check(self, memory: Shared) -> None:
        """Raises ProtocolError if a block does not lie in shared memory as the descriptor says."""
        expected, found = ((each.dtype, each.layout) for each in (self, memory))
        if expected != found or self.block_shape != memory.shape:
            raise ProtocolError(f"TMA copies {self.block_shape} {expected}, shared memory has {memory.shape} {found}")

    def inside(self, start: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the block at `start` that is inside the tensor: as a view, and as slices of the block."""
        sides = [(int(i), n, size) for i, n, size in zip(start, self.block_shape, self.shape, strict=True)]
        # tiles that fill a step of a gathered plan lie before the tensor
        assert all(i >= 0 or i <= -n for i, n, _ in sides), sides
        spans = [(max(i, 0), min(n, max(0, size - i)) if i >= 0 else 0) for i, n, size in sides]
        # memory from the base's address on, whose shape may be another: a cached descriptor takes any tensor
        whole = self.base.as_strided(self.shape, self.strides)
        return whole[tuple(slice(i, i + n) for i, n in spans)], tuple(slice(0, n) for _, n in spans)


# ---- the language ----


class Swizzle(NamedTuple):
    """The layout in shared memory of rows of this many bytes, or of a multiple: the memory itself is not swizzled."""

    n_bytes: int

    @classmethod
    def of(cls, block: Sequence[int], dtype: torch.dtype) -> Swizzle:
        row = int(block[-1]) * dtype.itemsize
        return cls(next((n_bytes for n_bytes in (128, 64, 32) if row % n_bytes == 0), 0))


class Token:
    """An asynchronous matrix product: the operands that it reads and its result."""

    def __init__(self, operands: list[Shared], value: Tensor) -> None:
        self.operands, self.value = operands, value


class Constant(int):
    """A compile-time integer."""

    @property
    def value(self) -> int:
        return int(self)


def _pair(left: Any, right: Any) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(left), torch.as_tensor(right)


class Language:
    """Replaces gl, tl, mbarrier and tma in the kernels' sources. Operations act on the machine that runs now."""

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    # torch cannot multiply unsigned integers
    uint32 = uint64 = torch.int64
    static_range = range

    def __init__(self) -> None:
        # runs the part of a kernel before its partitions begin
        self.starting: Machine = Machine(0, 0, 1)

    @property
    def _partition(self) -> Partition:
        return CURRENT.partition

    @property
    def machine(self) -> Machine:
        return CURRENT.partition.machine if hasattr(CURRENT, "partition") else self.starting

    # layouts distribute values over threads, which are not simulated
    def _no_layout(self, *arguments: Any, **named: Any) -> None:
        return None

    DistributedLinearLayout = NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = (
        SwizzledSharedLayout
    ) = _no_layout
    NVMMASharedLayout = types.SimpleNamespace(get_default_for=Swizzle.of)

    # values

    def cast(self, value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value).to(dtype)

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.machine.program)

    def num_programs(self, axis: int) -> int:
        return self.machine.n_programs

    def num_warps(self) -> int:
        return CURRENT.partition.warps if hasattr(CURRENT, "partition") else 4

    def arange(self, start: int, end: int, layout: Any = None) -> Tensor:
        return torch.arange(start, end)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.zeros([int(n) for n in shape], dtype=dtype)

    def full(self, shape: list[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.full([int(n) for n in shape], value, dtype=dtype)

    def where(self, condition: Any, left: Any, right: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), left, right)

    def maximum(self, left: Any, right: Any) -> Tensor:
        return torch.maximum(*_pair(left, right))

    def minimum(self, left: Any, right: Any) -> Tensor:
        return torch.minimum(*_pair(left, right))

    def cdiv(self, left: Any, right: Any) -> Any:
        return -(-left // right)

    def max(self, values: Tensor, axis: int) -> Tensor:
        return values.amax(axis)

    def sum(self, values: Tensor, axis: int) -> Tensor:
        return values.sum(axis)

    def expand_dims(self, values: Tensor, axis: int) -> Tensor:
        return values.unsqueeze(axis)

    def convert_layout(self, values: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
        return values

    abs = staticmethod(torch.abs)
    exp2 = staticmethod(torch.exp2)
    log2 = staticmethod(torch.log2)

    # global memory

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Tensor:
        values = pointer.flat[pointer.at(mask)]
        return values if mask is None else torch.where(mask, values, other)

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        offset = pointer.at(mask)
        if mask is not None:
            offset, values = offset[mask], values[mask]
        pointer.flat[offset] = values.to(pointer.flat.dtype)

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "acq_rel") -> Tensor:
        self._partition.pause("an atomic add")
        before = self.load(pointer).clone()
        pointer.flat[pointer.at()] += value
        return before

    # shared memory and barriers

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        shape = [int(n) for n in shape]
        if layout is Barrier:
            return Barrier(self.machine) if len(shape) == 1 else Barriers(self.machine, shape[0])
        values = torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype)
        return Shared.allocate(self.machine, values, layout)

    def static_assert(self, condition: bool, message: str) -> None:
        if not condition:
            raise ProtocolError(message)

    MBarrierLayout = staticmethod(lambda: Barrier)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def thread_barrier(self) -> None:
        self._partition.pause("a barrier of its threads")
        self._partition.meet()

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        # Triton lets the threads of the partition meet before one of them arrives
        self._partition.pause("an arrival")
        self._partition.meet()
        if pred:
            barrier.arrive(count)

    def expect(self, barrier: Barrier, n_bytes: int, *, pred: Any = True) -> None:
        if not pred:
            return
        self._partition.pause("an arrival that expects bytes")
        barrier.arrive(1, n_bytes)

    def wait(self, barrier: Barrier, phase: Any, *, pred: Any = True) -> None:
        if not pred:
            return
        parity = int(phase)
        assert parity in (0, 1), parity
        self._partition.pause(f"phase {parity} of an mbarrier", lambda: barrier.phase != parity)
        barrier.has_unwaited_phase = False

    def named_barrier(self, verb: str, number: int, warpgroups: int = 2) -> None:
        partition, machine = self._partition, self.machine
        partition.pause(f"its arrival at named barrier {number}")
        partition.meet()
        arrived = machine.named.setdefault(number, [])
        if partition in arrived:
            raise ProtocolError(f"{partition.name} arrives twice at named barrier {number}, which is not complete")
        arrived.append(partition)
        if len(arrived) == warpgroups:
            arrived.clear()
            machine.generation[number] = machine.generation.get(number, 0) + 1
        elif verb == "sync":
            before = machine.generation.get(number, 0)
            partition.pause(f"named barrier {number}", lambda: machine.generation.get(number, 0) > before)

    def fence_async_shared(self) -> None:
        # before the partitions begin there is nothing to fence
        if self.machine.partitions:
            writer = 1 + self.machine.partitions.index(self._partition)
            for marks in self.machine.unfenced:
                marks.masked_fill_(marks == writer, 0)

    # TMA

    def tma_load(
        self, descriptor: Descriptor, start: list[Any], barrier: Barrier, target: Shared, *, pred: Any = True
    ) -> None:
        if not pred:
            return
        self._partition.pause("the issue of a TMA load")
        descriptor.check(target)
        target.begin_load()
        barrier.has_loads = True

        def complete() -> None:
            view, slices = descriptor.inside(start)
            target.values.zero_()
            target.values[slices] = view
            target.end_load()
            barrier.bytes -= descriptor.block_type.nbytes
            barrier.complete_phase()

        self.machine.tma_loads.append(complete)

    def tma_store(self, descriptor: Descriptor, start: list[Any], source: Shared, *, add: bool = False) -> None:
        partition = self._partition
        partition.pause("the issue of a TMA store")
        descriptor.check(source)
        source.begin_read()
        view, slices = descriptor.inside(start)
        values = source.values[slices].clone()

        def complete() -> None:
            view.copy_(view + values if add else values)

        partition.stores.append(source)
        self.machine.tma_stores.append(complete)

    def tma_reduce_add(self, descriptor: Descriptor, start: list[Any], source: Shared) -> None:
        self.tma_store(descriptor, start, source, add=True)

    def atomic_add_sum(self, pointer: Pointer, values: Tensor) -> None:
        self._partition.pause("an atomic add")
        pointer = pointer + torch.arange(len(values))
        pointer.flat[pointer.at()] += values

    def store_wait(self, n_pending: int) -> None:
        partition = self._partition
        partition.pause("TMA stores")
        while len(partition.stores) > n_pending:
            partition.stores.pop(0).end_read()

    # matrix products

    def warpgroup_mma(
        self, left: Any, right: Shared, accumulator: Tensor | Token, *, use_acc: bool = True, is_async: bool = False
    ) -> Token:
        assert is_async
        partition = self._partition
        partition.pause("the issue of a wgmma")
        if isinstance(accumulator, Token):
            # wgmma on the same registers complete in order; the last one issued may be added to while in flight
            assert partition.products[-1] is accumulator, "the accumulator is the result of a wgmma in flight"
            accumulator = accumulator.value
        operands = [operand for operand in (left, right) if isinstance(operand, Shared)]
        for operand in operands:
            operand.begin_read()
        values = (left.values if isinstance(left, Shared) else left).float() @ right.values.float()
        assert values.shape == accumulator.shape, (values.shape, accumulator.shape)
        token = Token(operands, values + accumulator if use_acc else values)
        partition.products.append(token)
        return token

    def warpgroup_mma_wait(self, n_pending: int, deps: tuple[Token, ...]) -> Any:
        partition = self._partition
        partition.pause("wgmma")
        while len(partition.products) > n_pending:
            # each warp waits for itself: others may still read the operands
            partition.read.extend(partition.products.pop(0).operands)
        if any(token in partition.products for token in deps):
            raise ProtocolError(f"{partition.name} uses the result of a wgmma in flight")
        values = tuple(token.value for token in deps)
        return values if len(values) > 1 else values[0]

    def warp_specialize(self, calls: list[Any], warps: list[int], registers: list[int]) -> None:
        self.starting.begin(calls, [4, *warps])


# ---- kernels as Python ----


class Change(NamedTuple):
    """A replacement of `old`, which occurs exactly once in the source of a kernel module, by `new`."""

    module: str
    old: str
    new: str


# without both caches a Simulation takes 0.1 s to make, six times as long
compiled = functools.lru_cache(maxsize=256)(compile)
find_lines = inspect.getsourcelines
known_lines: dict[tuple[str, int], tuple[list[str], int]] = {}


def lines_of(function: Any) -> tuple[list[str], int]:
    """inspect.getsourcelines, which triton.jit calls for each kernel and helper. Files do not change."""
    place = function.__code__.co_filename, function.__code__.co_firstlineno
    if place not in known_lines:
        known_lines[place] = find_lines(function)
    return known_lines[place]


class Simulation:
    """The Hopper kernels' modules, executed on the simulator. `forward` and `backward` are the launchers.

    seed     chooses the order of events
    changes  applied to the sources first
    n_sms    SMs of the simulated GPU
    """

    def __init__(self, seed: int = 0, changes: Sequence[Change] = (), n_sms: int = 2) -> None:
        self.seed, self.changes = seed, changes
        self.language = Language()
        names = ["named_barrier", "fence_async_shared", "tma_load", "tma_store", "tma_reduce_add"]
        names += ["atomic_add_sum", "warpgroup_mma", "warpgroup_mma_wait"]
        # replaces the global of the same name in every module
        self.simulated: dict[str, Any] = {
            **{name: getattr(self.language, name) for name in names},
            **dict.fromkeys(("gl", "mbarrier", "tma"), self.language),
            "pin": lambda values: values,
            "rescale": lambda out, decay: out * decay,
            "load_words": lambda pointers, count: tuple(self.language.load(pointers + i) for i in range(count)),
            "mask_by_bits": lambda scores, bits, bit: torch.where((bits & bit) != 0, scores, float("-inf")),
            # layouts of values over threads are not simulated, and those in shared memory only compared
            "dq_layout": lambda: None,
            "reinterpret": lambda tile, shape, layout, dtype: tile.reinterpret(shape, layout, dtype),
            "opaque": lambda i: i,
            "tanh": torch.tanh,
            "thread_barrier": self.language.thread_barrier,
            "bits_of": lambda dtype: 8 * dtype.itemsize,
            "round_p_ds": lambda p, dp, delta, dtype: (p.to(dtype), (p * (dp - delta)).to(dtype)),
            "accumulator": lambda columns: None,
            "row_sum_layout": lambda: None,
            "value_per_warp": lambda: None,
            "TensorDescriptor": Descriptor,
            "Launch": self._launch,
            "num_sms": lambda index: n_sms,
        }
        # and the functions of modules loaded so far, which later modules import
        self.imports = dict(self.simulated)
        self._load("triton.tile", {"tl": self.language})
        for name in HELPERS:
            self._load(name)
        self._load("hopper.forward_producer")
        self._load("hopper.softmax")
        self.forward_consumer = self._load("hopper.forward_consumer")
        self.hopper_forward = self._load("hopper.forward")
        self.hopper_dq = self._load("hopper.backward_dq")
        # after the forward, since they define functions with the same names as its producer and consumers
        self._load("hopper.backward_producer")
        self._load("hopper.backward_consumer")
        self._load("hopper.backward_postprocess")
        self._load("hopper.wide_dkdv")
        self.imports["wide_backward"] = self._load("hopper.wide_backward")
        self.hopper_backward = self._load("hopper.backward")
        self._load("hopper.fine_tiles")
        self.fine_forward = self._load("hopper.fine_forward")
        self.fine_backward = self._load("hopper.fine_backward")
        self._load("hopper.selected_tiles")
        self.selected_forward = self._load("hopper.selected_forward")
        self.selected_backward = self._load("hopper.selected_backward")
        self.forward = self.hopper_forward.forward
        self.backward = self.hopper_backward.backward

    def _load(self, name: str, more: dict[str, Any] | None = None) -> Any:
        """The module, executed from its source, with kernels as plain functions and the language replaced.

        more  further globals to replace
        """
        path = KERNELS / f"{name.replace('.', '/')}.py"
        source = path.read_text(encoding="utf-8")
        for change in self.changes:
            if change.module == name:
                # not an AssertionError, which the tests would take for a detected fault
                if source.count(change.old) != 1:
                    raise ValueError(f"{change.old!r} occurs {source.count(change.old)} times in {path.name}, not once")
                source = source.replace(change.old, change.new)
        # dataclasses look up their module by its name
        full_name = importlib.import_module(f"blocksparse_flash.kernels.{name}").__name__
        module = types.ModuleType(full_name)
        module.__package__ = full_name.rpartition(".")[0]
        with mock.patch.object(inspect, "getsourcelines", lines_of):
            exec(compiled(source, str(path), "exec"), vars(module))
        for key, value in list(vars(module).items()):
            function = getattr(value, "fn", None)
            is_kernel = name == "triton.tile" or (isinstance(value, JITFunction) and value.is_gluon())
            if is_kernel and inspect.isfunction(function) and function.__module__ == full_name:
                vars(module)[key] = self.simulated.get(key, function)
            elif key in self.imports:
                vars(module)[key] = self.imports[key]
            elif isinstance(getattr(value, "value", None), (int, float)):
                vars(module)[key] = Constant(value.value) if isinstance(value.value, int) else value.value
        vars(module).update(more or {})
        if name in (
            "triton.tile",
            *HELPERS,
            "hopper.forward_producer",
            "hopper.softmax",
            "hopper.forward_consumer",
            "hopper.backward_producer",
            "hopper.backward_consumer",
            "hopper.backward_postprocess",
            "hopper.fine_tiles",
            "hopper.selected_tiles",
            "hopper.wide_dkdv",
            "hopper.backward_dq",
        ):
            exported = {
                key: value
                for key, value in vars(module).items()
                if inspect.isfunction(value) or key == "DescriptorFactory"
            }
            self.imports.update(exported)
        return module

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        rest: dict[str, Any],
        descriptor_factories: dict[str, Any] | None = None,
    ) -> Callable[..., None]:
        if not inspect.isfunction(kernel):
            return launch.Launch(kernel, grid, rest, descriptor_factories)
        names = list(inspect.signature(kernel).parameters)
        options = {name: value for name, value in rest.items() if name in names}

        def run(*tensors: Any) -> None:
            factories = [(descriptor_factories or {}).get(name) for name in names[: len(tensors)]]
            arguments = [pointers(each) for each in launcher.described(tensors, factories)]

            machines = []
            for program in range(grid[0]):
                self.language.starting = machine = Machine(self.seed, program, grid[0])
                call = functools.partial(kernel, **dict(zip(names, arguments, strict=False)), **options)
                if "warp_specialize" in kernel.__code__.co_names:
                    call()
                else:
                    machine.begin([(call, ())], [4])
                machines.append(machine)
            run_all(machines, self.seed)

        return run
