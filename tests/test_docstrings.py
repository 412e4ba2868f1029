"""Does every public name say what it takes? The reference (`make docs`) has nothing but docstrings to show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import blocksparse_flash
import masks
from blocksparse_flash import distributed, huggingface, interop, nn
from masks import deepspeed

MODULES = (blocksparse_flash, interop, nn, distributed, huggingface, masks, deepspeed)


def public(module: ModuleType) -> dict[str, Any]:
    """What `__all__` gives out; without one, what the module itself defines."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    }


def documented(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """(name, object) of a function, or of a class, its methods and its properties."""
    yield name, thing
    if inspect.isclass(thing):
        for inner in vars(thing):
            member = inspect.getattr_static(thing, inner)
            if not inner.startswith("_") and isinstance(member, Callable | property | classmethod | staticmethod):
                yield f"{name}.{inner}", member if isinstance(member, property) else getattr(thing, inner)


def unsaid(thing: Any) -> list[str]:
    """The parameters that a docstring does not name, or that there is none."""
    said = inspect.getdoc(thing)
    # a dataclass and a named tuple without one are given their signature for one
    if not said or (inspect.isclass(thing) and said.startswith(f"{thing.__name__}(")):
        return ["a docstring"]
    if isinstance(thing, property):
        return []
    return [
        name
        for name, parameter in inspect.signature(thing).parameters.items()
        # *arguments and **named have no names of their own
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name != "self"
        and not re.search(rf"\b{name}\b", said)
    ]


CASES = {
    f"{module.__name__}.{name}": thing
    for module in MODULES
    for first, value in public(module).items()
    for name, thing in documented(first, value)
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_named(name: str) -> None:
    assert unsaid(CASES[name]) == []


def test_there_are_names_to_check() -> None:
    """One function, one class, one method and one property of those that must be among them."""
    expected = {
        "blocksparse_flash.attention",
        "blocksparse_flash.BlockLayout.from_dense",
        "blocksparse_flash.BlockLayout.nnz",
        "blocksparse_flash.nn.SelfAttention.forward",
        "blocksparse_flash.distributed.ContextPlan",
        "blocksparse_flash.huggingface.register",
        "blocksparse_flash.interop.from_magi",
        "masks.local",
    }
    assert expected <= CASES.keys()


def test_what_is_missing_is_found() -> None:
    def bare(window):
        pass

    def told(window, block_size):
        """Of windows: window is in tokens."""

    class Bare(NamedTuple):
        window: int

    assert unsaid(bare) == unsaid(Bare) == ["a docstring"]
    assert unsaid(told) == ["block_size"]
