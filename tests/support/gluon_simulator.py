"""A simulator, on the CPU, of the protocol of a warp-specialised Gluon kernel.

The source of a kernel runs as plain Python on the machine of gluon_machine.py: a product reads its operands until it
is waited for, a store its source until TMA has read it. Found are:
    deadlocks, wrong phases, phases that nobody waits for, too many arrivals, bytes that never come, products or
    stores left under way at the end
    shared memory written while something reads it, read while a copy lands in it, or not fenced before it is read
    and by comparison with a reference: wrong mathematics, wrong tiles, reading what was never written (it is full of
    NaN)
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from blocksparse_flash import kernels
from blocksparse_flash.runtime import launch, launcher
from tests.support.gluon_machine import CURRENT, Barrier, Barriers, Machine, Partition, ProtocolError, Shared, run_all

KERNELS = Path(kernels.__file__).parent
# modules with device functions, in the order of their imports
HELPERS = ("hopper.barriers", "hopper.tma", "hopper.bitmask", "hopper.registers", "hopper.work_tiles")


# ---- global memory ----


class Pointer:
    """A tensor's storage order and an offset, or a block of them."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        # of what autograd saved the numbers; of padded rows all
        tensor = tensor.detach()
        self.flat = (
            tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((len(tensor) * tensor.stride(0),), (1,))
        )
        self.offset = torch.as_tensor(offset)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + torch.as_tensor(other))

    def at(self, mask: Any = None) -> Tensor:
        """The offsets, masked ones 0, all within the tensor."""
        offset = self.offset if mask is None else torch.where(mask, self.offset, 0)
        if offset.numel() and not (0 <= int(offset.min()) and int(offset.max()) < len(self.flat)):
            raise ProtocolError(f"address out of range: up to {int(offset.max())} of {len(self.flat)}")
        return offset


def pointers(argument: Any) -> Any:
    """An argument of a launch, with a Pointer for each tensor, alone or in a named tuple."""
    if isinstance(argument, tuple):
        return type(argument)(*map(pointers, argument))
    return Pointer(argument) if isinstance(argument, Tensor) else argument


class Descriptor:
    """What TMA knows of a tensor. Past the end of any axis it reads zero and writes nothing."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any) -> None:
        # of memory from an address on: of padded rows the first columns
        self.base, self.block_shape, self.layout = base.as_strided(shape, strides), block_shape, layout

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        n_bytes = self.dtype.itemsize * torch.Size(self.block_shape).numel()
        return types.SimpleNamespace(shape=list(self.block_shape), nbytes=n_bytes)

    def inside(self, start: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the block at `start` that exists, and where in the block it lies."""
        first = [int(at) for at in start]
        assert all(at >= 0 for at in first), first
        spans = [
            (at, min(n, max(0, size - at)))
            for at, n, size in zip(first, self.block_shape, self.base.shape, strict=True)
        ]
        part = self.base[tuple(slice(at, at + n) for at, n in spans)]
        return part, tuple(slice(0, n) for _, n in spans)


# ---- the language ----


def mask_subtiles(values: Tensor, bits: Tensor, STRIDE: int, FILL: int) -> Tensor:
    """What the assembly of hopper.mask_subtiles does."""
    filling = torch.tensor(FILL, dtype=torch.int64).to(torch.int32).view(torch.float32)
    halves = [
        half if int(bits) >> i * STRIDE & 1 else torch.full_like(half, filling)
        for i, half in enumerate(values.split(64, 1))
    ]
    return torch.cat(halves, 1)


class Token:
    """A product under way."""

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
    """What a kernel's source calls gl, tl, mbarrier, tma and so on, on the machine that runs now."""

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    # which torch does not multiply
    uint32 = uint64 = torch.int64
    static_range = range

    def __init__(self) -> None:
        # the program whose partitions do not run yet
        self.begun: Machine = Machine(0, 0, 1)

    @property
    def _who(self) -> Partition:
        return CURRENT.partition

    @property
    def machine(self) -> Machine:
        return CURRENT.partition.machine if hasattr(CURRENT, "partition") else self.begun

    # layouts say which thread holds what: nothing that is simulated
    def _nothing(self, *arguments: Any, **named: Any) -> None:
        return None

    DistributedLinearLayout = NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = (
        SwizzledSharedLayout
    ) = _nothing
    NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *arguments: None)

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

    exp2 = staticmethod(torch.exp2)
    log2 = staticmethod(torch.log2)

    # global memory

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Tensor:
        values = pointer.flat[pointer.at(mask)]
        return values if mask is None else torch.where(mask, values, other)

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        at = pointer.at(mask)
        if mask is not None:
            at, values = at[mask], values[mask]
        pointer.flat[at] = values.to(pointer.flat.dtype)

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "acq_rel") -> Tensor:
        self._who.pause("an atomic addition")
        before = self.load(pointer).clone()
        pointer.flat[pointer.at()] += value
        return before

    # shared memory and barriers

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        shape = [int(n) for n in shape]
        if layout is Barrier:
            return Barrier(self.machine) if len(shape) == 1 else Barriers(self.machine, shape[0])
        values = torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype)
        return Shared.allocate(self.machine, values)

    MBarrierLayout = staticmethod(lambda: Barrier)

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        self._who.pause("an arrival")
        barrier.arrive(count)

    def expect(self, barrier: Barrier, n_bytes: int) -> None:
        self._who.pause("an arrival with bytes")
        barrier.arrive(1, n_bytes)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(phase)
        assert parity in (0, 1), parity
        self._who.pause(f"a barrier, phase {parity}", lambda: barrier.phase != parity)
        barrier.is_missed = False

    def named_barrier(self, verb: str, number: int, warpgroups: int = 2) -> None:
        who, machine = self._who, self.machine
        who.pause(f"arrival at named barrier {number}")
        arrived = machine.named.setdefault(number, [])
        if who in arrived:
            raise ProtocolError(f"{who.name} arrives twice at named barrier {number}, where nobody met it")
        arrived.append(who)
        if len(arrived) == warpgroups:
            arrived.clear()
            machine.generation[number] = machine.generation.get(number, 0) + 1
        elif verb == "sync":
            before = machine.generation.get(number, 0)
            who.pause(f"named barrier {number}", lambda: machine.generation.get(number, 0) > before)

    def fence_async_shared(self) -> None:
        # before the partitions start there is nothing to fence
        if self.machine.partitions:
            mine = 1 + self.machine.partitions.index(self._who)
            for part in self.machine.unfenced:
                part[part == mine] = 0

    # copies

    def tma_load(self, descriptor: Descriptor, start: list[Any], barrier: Barrier, target: Shared) -> None:
        who, machine = self._who, self.machine
        who.pause("the issue of a copy")
        assert descriptor.block_shape == target.shape and descriptor.dtype == target.dtype
        target.begin_landing()

        def land() -> None:
            part, where = descriptor.inside(start)
            target.values.zero_()
            target.values[where] = part
            target.end_landing()
            barrier.bytes -= descriptor.block_type.nbytes
            barrier.settle()

        machine.copies.append(land)

    def tma_store(self, descriptor: Descriptor, start: list[Any], source: Shared, *, add: bool = False) -> None:
        who, machine = self._who, self.machine
        who.pause("the issue of a store")
        assert descriptor.block_shape == source.shape and descriptor.dtype == source.dtype
        source.begin_read()
        part, where = descriptor.inside(start)
        values = source.values[where].clone()

        def land() -> None:
            part.copy_(part + values if add else values)

        who.stores.append(source)
        machine.writes.append(land)

    def tma_reduce_add(self, descriptor: Descriptor, start: list[Any], source: Shared) -> None:
        self.tma_store(descriptor, start, source, add=True)

    def atomic_add_sum(self, pointer: Pointer, values: Tensor) -> None:
        self._who.pause("an addition")
        pointer = pointer + torch.arange(len(values))
        pointer.flat[pointer.at()] += values

    def store_wait(self, n_pending: int) -> None:
        who = self._who
        who.pause("stores")
        while len(who.stores) > n_pending:
            who.stores.pop(0).end_read()

    # products

    def warpgroup_mma(
        self, left: Any, right: Shared, total: Tensor, *, use_acc: bool = True, is_async: bool = False
    ) -> Token:
        assert is_async and isinstance(total, Tensor), "a sum that is still under way"
        who = self._who
        who.pause("the issue of a product")
        operands = [operand for operand in (left, right) if isinstance(operand, Shared)]
        for operand in operands:
            operand.begin_read()
        values = (left.values if isinstance(left, Shared) else left).float() @ right.values.float()
        assert values.shape == total.shape, (values.shape, total.shape)
        token = Token(operands, values + total if use_acc else values)
        who.products.append(token)
        return token

    def warpgroup_mma_wait(self, n_pending: int, deps: tuple[Token, ...]) -> Tensor:
        who = self._who
        who.pause("products")
        while len(who.products) > n_pending:
            for operand in who.products.pop(0).operands:
                operand.end_read()
        (token,) = deps
        if token in who.products:
            raise ProtocolError(f"{who.name} uses a product which it has not waited for")
        return token.value

    def warp_specialize(self, calls: list[Any], warps: list[int], registers: list[int]) -> None:
        self.begun.begin(calls, [4, *warps])


# ---- kernels as Python ----


class Change(NamedTuple):
    """A text to be replaced in the source of a kernel module, where it is once."""

    module: str
    old: str
    new: str


class Simulation:
    """The modules of the Hopper kernels, on the simulator. `forward` and `backward` are their launchers.

    seed      chooses the order of events
    changes   made in the source first
    programs  SMs of the machine
    """

    def __init__(self, seed: int = 0, changes: Sequence[Change] = (), programs: int = 2) -> None:
        self.seed, self.changes = seed, changes
        self.language = Language()
        names = ["named_barrier", "fence_async_shared", "tma_load", "tma_store", "tma_reduce_add"]
        names += ["atomic_add_sum", "warpgroup_mma", "warpgroup_mma_wait"]
        self.known: dict[str, Any] = {
            **{name: getattr(self.language, name) for name in names},
            **dict.fromkeys(("gl", "mbarrier", "tma"), self.language),
            "pin": lambda values: values,
            "rescale": lambda out, decay: out * decay,
            "load_words": lambda pointers, count: tuple(self.language.load(pointers + i) for i in range(count)),
            "mask_subtiles": mask_subtiles,
            "mask_by_bits": lambda scores, bits, bit: torch.where((bits & bit) != 0, scores, float("-inf")),
            # where in a buffer, or in which thread, values lie is not simulated
            "dq_layout": lambda: None,
            "reinterpret": lambda tile, shape, layout, dtype: tile.reinterpret(shape, dtype),
            "opaque": lambda i: i,
            "bits_of": lambda dtype: 8 * dtype.itemsize,
            "round_p_ds": lambda p, dp, delta, dtype: (p.to(dtype), (p * (dp - delta)).to(dtype)),
            "accumulator": lambda columns: None,
            "row_sum_layout": lambda: None,
            "TensorDescriptor": Descriptor,
            "Launch": self._launch,
            "num_sms": lambda index: programs,
        }
        # what the simulator gives, and below what a module has defined for those that import it
        self.given = dict(self.known)
        self._load("triton.tile", {"tl": self.language})
        for name in HELPERS:
            self._load(name)
        self._load("hopper.forward_producer")
        self._load("hopper.softmax")
        self.hopper_forward = self._load("hopper.forward")
        # some names are those of the forward's producer, which is loaded before
        self._load("hopper.backward_producer")
        self._load("hopper.backward_postprocess")
        self.hopper_backward = self._load("hopper.backward")
        self.forward = self.hopper_forward.forward
        self.backward = self.hopper_backward.backward

    def _load(self, name: str, more: dict[str, Any] | None = None) -> Any:
        """The module from its source, kernels as plain functions, the language replaced."""
        path = KERNELS / f"{name.replace('.', '/')}.py"
        source = path.read_text(encoding="utf-8")
        for change in self.changes:
            if change.module == name:
                # not an AssertionError, which would pass for a fault that was seen
                if source.count(change.old) != 1:
                    raise ValueError(f"{change.old!r} is {source.count(change.old)} times in {path.name}")
                source = source.replace(change.old, change.new)
        # dataclasses look their module up
        full_name = importlib.import_module(f"blocksparse_flash.kernels.{name}").__name__
        module = types.ModuleType(full_name)
        module.__package__ = full_name.rpartition(".")[0]
        exec(compile(source, str(path), "exec"), vars(module))
        for key, value in list(vars(module).items()):
            function = getattr(value, "fn", None)
            is_kernel = name == "triton.tile" or (isinstance(value, JITFunction) and value.is_gluon())
            if is_kernel and inspect.isfunction(function) and function.__module__ == full_name:
                vars(module)[key] = self.given.get(key, function)
            elif key in self.known:
                vars(module)[key] = self.known[key]
            elif isinstance(getattr(value, "value", None), (int, float)):
                vars(module)[key] = Constant(value.value) if isinstance(value.value, int) else value.value
        vars(module).update(more or {})
        if name in (
            "triton.tile",
            *HELPERS,
            "hopper.forward_producer",
            "hopper.softmax",
            "hopper.backward_producer",
            "hopper.backward_postprocess",
        ):
            # for the modules that import them
            shared = {
                key: value
                for key, value in vars(module).items()
                if inspect.isfunction(value) or key == "DescriptorFactory"
            }
            self.known.update(shared)
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
            of_each = [(descriptor_factories or {}).get(name) for name in names[: len(tensors)]]
            given = [pointers(each) for each in launcher.described(tensors, of_each)]

            machines = []
            for program in range(grid[0]):
                self.language.begun = Machine(self.seed, program, grid[0])
                kernel(**dict(zip(names, given, strict=False)), **options)
                machines.append(self.language.begun)
            run_all(machines, self.seed)

        return run
