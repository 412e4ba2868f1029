"""How is a compiled kernel launched again, without what Triton's launcher would work out to be the same?

The launcher expands the arguments (a descriptor into a tensor map, lengths and strides) and hands them to a compiled
function. Here it expands them once; afterwards that function is called with other addresses in the same places.

Knows: how the launchers of Triton 3.6 to 3.9 are made, which nothing promises: one that does not look like them launches by
itself. Does not know: what a kernel computes.
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
# tensor maps that are kept of each argument, one an address
KEPT = 256
# what a launcher takes before the arguments of the kernel
TAKEN = ["self", "gridX", "gridY", "gridZ", "stream", "function"]


def described(arguments: Arguments, descriptor_factories: Arguments) -> list[Any]:
    """Arguments for Triton: the descriptor of a tensor where there is a factory, not None."""
    return [
        each if factory is None else factory.describe(each)
        for each, factory in zip(arguments, descriptor_factories, strict=True)
    ]


def is_hooked() -> bool:
    """Whether somebody, such as a profiler, wants to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # a chain of hooks, which may be empty, or a hook that was put in its place
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def innermost(launcher: Any) -> Any:
    """The compiled function that a launcher calls, below the one that expands descriptors."""
    called = launcher.launch
    return inspect.getclosurevars(called).nonlocals.get("launcher") if inspect.isfunction(called) else called


def is_known(launcher: Any) -> bool:
    """Whether a launcher is made as those are for which this file was written, and gives the kernel no memory of its own."""
    called = vars(type(launcher)).get("__call__")
    return (
        inspect.isfunction(called)
        and list(inspect.signature(called).parameters)[: len(TAKEN)] == TAKEN
        and hasattr(sys.modules[type(launcher).__module__], "wrap_handle_tensordesc")
        and getattr(launcher, "global_scratch_size", None) == 0
        and getattr(launcher, "profile_scratch_size", None) == 0
        and not getattr(launcher, "gsan_enabled", False)
        and callable(innermost(launcher))
    )


def expander(compiled: Any) -> Any:
    """Triton's launcher of a compiled kernel, which only expands: what it would hand on goes to the list given as its stream."""
    launcher = copy.copy(compiled.run)
    wrap = sys.modules[type(launcher).__module__].wrap_handle_tensordesc
    maps = getattr(compiled.metadata, "tensordesc_meta", None)
    launcher.launch = wrap(lambda *handed: handed[3].extend(handed), dict(compiled.src.signature), maps)
    return launcher


class Bound:
    """A compiled kernel whose expanded arguments are known but for the addresses of tensors, and for numbers among them.

    Called with arguments of the same kinds as those it was bound with.
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
        # found again among what is handed on: one argument may be given twice
        is_described = [factory is not None for factory in descriptor_factories]
        marks = [each if each is None or has else object() for each, has in zip(arguments, is_described, strict=True)]
        self._expander = expander(compiled)
        handed = self._expand(marks)
        # Triton 3.7 and later hand on the arguments of the kernel as one
        self._nests = hasattr(compiled.run, "kernel_signature")
        self._head = handed[4:-1] if self._nests else ()
        self._given = list(handed[-1] if self._nests else handed[4:])
        # (where it goes, which argument it is of): addresses, numbers, and tensor maps with those that were made, by address
        place = {id(value): slot for slot, value in enumerate(self._given)}
        plain = [i for i, mark in enumerate(marks) if mark is not None and not is_described[i]]
        self._pointers = [(place[id(marks[i])], i) for i in plain if not isinstance(arguments[i], int)]
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
        """What Triton's launcher would hand on, but hooks and what they are told."""
        handed: list[Any] = []
        ours, metadata = self._compiled, (None, None, None)
        given = described(arguments, self._factories)
        self._expander(*self._grid, handed, ours.function, ours.packed_metadata, *metadata, *given, *self._values)
        assert (*handed[:3], handed[4]) == (*self._grid, ours.function) and handed[3] is handed
        # a list which held itself would hold the tensors until garbage is collected
        handed[3] = None
        return handed

    def _make(self, arguments: Arguments) -> Arguments:
        """The expanded arguments; keeps their tensor maps, in which the address is all that tells tensors of a kind apart."""
        handed = self._expand(arguments)
        given: Arguments = handed[-1] if self._nests else handed[4:]
        for slot, i, made in self._maps:
            if len(made) >= KEPT:
                made.clear()
            made[arguments[i].data_ptr()] = given[slot]
        return given


def bind(
    compiled: Any, grid: tuple[int, ...], arguments: Arguments, descriptor_factories: Arguments, values: Arguments
) -> Callable[[Arguments], None]:
    """What launches `compiled` on other such arguments as compiled[grid](*arguments, *values) would, hooks included.

    arguments   tensors, None, and integers for which the kernel is not specialised
    descriptor_factories  what makes a descriptor of each; None: it is handed on as it is
    values      what stays the same
    """
    run = compiled[grid]
    if is_known(compiled.run):
        return Bound(compiled, grid, arguments, descriptor_factories, values)
    return lambda arguments: run(*described(arguments, descriptor_factories), *values)
