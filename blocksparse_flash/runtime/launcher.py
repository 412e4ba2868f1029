"""Cached launcher: repeats the launch of a compiled kernel with new addresses.

Triton's launcher expands each argument (a descriptor becomes a tensor map, sizes and strides) and passes them to a
compiled function. Here it expands them once; later launches call that function with other addresses in the same slots.

launch.py decides which launches may be repeated. This relies on internals of the launchers of Triton 3.6 to 3.9. Any
other launcher is called the usual way.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from triton import knobs
from triton.runtime import driver

Arguments = Sequence[Any]
# tensor maps cached per argument, one for each address
MAX_TENSOR_MAPS = 256
# parameters of Triton's launcher before those of the kernel
LAUNCHER_PARAMETERS = ["self", "gridX", "gridY", "gridZ", "stream", "function"]


def described(arguments: Arguments, descriptor_factories: Arguments) -> list[Any]:
    """The arguments, with each tensor that has a descriptor factory replaced by its descriptor."""
    return [
        each if factory is None else factory.describe(each)
        for each, factory in zip(arguments, descriptor_factories, strict=True)
    ]


def is_hooked() -> bool:
    """Whether a launch hook is installed, for example by a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # either a chain of hooks, which may be empty, or a single hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def innermost(launcher: Any) -> Any:
    """The compiled function under the wrapper that expands descriptors."""
    called = launcher.launch
    return inspect.getclosurevars(called).nonlocals.get("launcher") if inspect.isfunction(called) else called


def is_known(launcher: Any) -> bool:
    """Whether a launcher has the expected internals and allocates no scratch memory for the kernel."""
    called = vars(type(launcher)).get("__call__")
    return (
        inspect.isfunction(called)
        and list(inspect.signature(called).parameters)[: len(LAUNCHER_PARAMETERS)] == LAUNCHER_PARAMETERS
        and hasattr(sys.modules[type(launcher).__module__], "wrap_handle_tensordesc")
        and getattr(launcher, "global_scratch_size", None) == 0
        and getattr(launcher, "profile_scratch_size", None) == 0
        and not getattr(launcher, "gsan_enabled", False)
        and callable(innermost(launcher))
    )


def expander(compiled: Any) -> Any:
    """A copy of Triton's launcher that only expands: its output goes to the list passed as the stream."""
    launcher = copy.copy(compiled.run)
    wrap = sys.modules[type(launcher).__module__].wrap_handle_tensordesc
    maps = getattr(compiled.metadata, "tensordesc_meta", None)
    launcher.launch = wrap(lambda *expanded: expanded[3].extend(expanded), dict(compiled.src.signature), maps)
    return launcher


def mark_of(argument: Any) -> Any:
    """A unique object in place of an argument, by which it is found in the expanded arguments; None for None."""
    if isinstance(argument, tuple):
        # a named tuple stays one
        marks = map(mark_of, argument)
        return type(argument)._make(marks) if hasattr(argument, "_make") else tuple(marks)
    return None if argument is None else object()


class Bound:
    """A compiled kernel with cached expanded arguments; a call fills in addresses and integers.

    Call it with arguments whose specs equal those it was bound with. An argument may be a tuple of tensors and None.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Arguments,
        descriptor_factories: Arguments,
        values: Arguments,
    ) -> None:
        self._compiled, self._grid, self._factories, self._values = compiled, grid, descriptor_factories, tuple(values)
        self._launch = innermost(compiled.run)
        self._device, self._stream_of = driver.active.get_current_device(), driver.active.get_current_stream
        # unique objects, located in the expanded arguments: one tensor may be passed twice
        is_described = [factory is not None for factory in descriptor_factories]
        marks = [each if has else mark_of(each) for each, has in zip(arguments, is_described, strict=True)]
        self._expander = expander(compiled)
        expanded = self._expand(marks)
        # Triton 3.7 and later pass the arguments of the kernel as one list
        self._nests = hasattr(compiled.run, "kernel_signature")
        self._head = expanded[4:-1] if self._nests else ()
        self._given = list(expanded[-1] if self._nests else expanded[4:])
        # (slot, argument) of addresses, tuples and integers; (slot, argument, maps by address) of tensor maps
        place = {id(value): slot for slot, value in enumerate(self._given)}
        plain = [i for i, mark in enumerate(marks) if mark is not None and not is_described[i]]
        self._tuples = [(place[id(marks[i])], i) for i in plain if isinstance(arguments[i], tuple)]
        self._pointers = [(place[id(marks[i])], i) for i in plain if not isinstance(arguments[i], (int, tuple))]
        self._numbers = [(place[id(marks[i])], i) for i in plain if isinstance(arguments[i], int)]
        mapped = [i for i, has in enumerate(is_described) if has]
        maps = [slot for slot, value in enumerate(self._given) if type(value).__name__ == "PyCUtensorMap"]
        self._maps = [(slot, i, dict[int, Any]()) for slot, i in zip(maps, mapped, strict=True)]

    def __call__(self, arguments: Arguments) -> None:
        if is_hooked():
            self._compiled[self._grid](*described(arguments, self._factories), *self._values)
            return
        given = self._given.copy()
        for slot, i in self._pointers:
            given[slot] = arguments[i].data_ptr()
        for slot, i in self._tuples:
            given[slot] = tuple([None if each is None else each.data_ptr() for each in arguments[i]])
        for slot, i in self._numbers:
            given[slot] = arguments[i]
        for slot, i, made in self._maps:
            address = arguments[i].data_ptr()
            given[slot] = made.get(address) or self._make(arguments)[slot]
        stream = self._stream_of(self._device)
        if self._nests:
            self._launch(*self._grid, stream, *self._head, given)
        else:
            self._launch(*self._grid, stream, *given)

    def _expand(self, arguments: Arguments) -> list[Any]:
        """The expanded arguments, without hooks and their metadata."""
        expanded: list[Any] = []
        ours, metadata = self._compiled, (None, None, None)
        given = described(arguments, self._factories)
        self._expander(*self._grid, expanded, ours.function, ours.packed_metadata, *metadata, *given, *self._values)
        assert (*expanded[:3], expanded[4]) == (*self._grid, ours.function) and expanded[3] is expanded
        # breaks the reference cycle, which would keep the tensors alive
        expanded[3] = None
        return expanded

    def _make(self, arguments: Arguments) -> Arguments:
        """The expanded arguments; caches their tensor maps by address, which alone differs within a spec."""
        expanded = self._expand(arguments)
        given: Arguments = expanded[-1] if self._nests else expanded[4:]
        for slot, i, made in self._maps:
            if len(made) >= MAX_TENSOR_MAPS:
                made.clear()
            made[arguments[i].data_ptr()] = given[slot]
        return given


def bind(
    compiled: Any, grid: tuple[int, ...], arguments: Arguments, descriptor_factories: Arguments, values: Arguments
) -> Callable[[Arguments], None]:
    """A function of `arguments` that launches like compiled[grid](*arguments, *values), hooks included.

    arguments  tensors, None, and integers for which the kernel is not specialized
    descriptor_factories  one per argument; None passes the argument as it is
    values     the arguments that stay the same
    """
    run = compiled[grid]
    if is_known(compiled.run):
        return Bound(compiled, grid, arguments, descriptor_factories, values)
    return lambda arguments: run(*described(arguments, descriptor_factories), *values)
