"""Every public docstring names every parameter; the API reference (`make docs`) is generated from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import blocksparse_flash
import masks
from blocksparse_flash import diffusers, distributed, huggingface, interop, nn, paged, vllm_omni
from masks import deepspeed

MODULES = (blocksparse_flash, interop, nn, paged, distributed, diffusers, huggingface, vllm_omni, masks, deepspeed)


def public(module: ModuleType) -> dict[str, Any]:
    """The names in `__all__`, or those that the module defines itself."""
    if hasattr(module, "__all__"):
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    }


def documented(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """(name, object) for a function, or for a class, its methods and its properties."""
    # constants have no signature
    if callable(thing) or isinstance(thing, property):
        yield name, thing
    if inspect.isclass(thing):
        for inner in vars(thing):
            member = inspect.getattr_static(thing, inner)
            if not inner.startswith("_") and isinstance(member, Callable | property | classmethod | staticmethod):
                yield f"{name}.{inner}", member if isinstance(member, property) else getattr(thing, inner)


def undocumented(thing: Any) -> list[str]:
    """The parameters missing from a docstring; ["a docstring"] if there is none."""
    text = inspect.getdoc(thing)
    # dataclasses and named tuples get their signature as a default docstring
    if not text or (inspect.isclass(thing) and text.startswith(f"{thing.__name__}(")):
        return ["a docstring"]
    if isinstance(thing, property):
        return []
    return [
        name
        for name, parameter in inspect.signature(thing).parameters.items()
        # the names of *args and **kwargs do not matter to callers
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name != "self"
        and not re.search(rf"\b{name}\b", text)
    ]


CASES = {
    f"{module.__name__}.{name}": thing
    for module in MODULES
    for first, value in public(module).items()
    for name, thing in documented(first, value)
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_named(name: str) -> None:
    assert undocumented(CASES[name]) == []


def test_there_are_names_to_check() -> None:
    """A sample of functions, classes, methods and properties that must be collected."""
    expected = {
        "blocksparse_flash.attention",
        "blocksparse_flash.BlockLayout.from_dense",
        "blocksparse_flash.BlockLayout.nnz",
        "blocksparse_flash.nn.SelfAttention.forward",
        "blocksparse_flash.distributed.ContextPlan",
        "blocksparse_flash.diffusers.use",
        "blocksparse_flash.huggingface.register",
        "blocksparse_flash.interop.from_magi",
        "masks.local",
    }
    assert expected <= CASES.keys()


def test_a_missing_parameter_is_found() -> None:
    def bare(window):
        pass

    def partly_documented(window, block_size):
        """The window is in tokens."""

    class Bare(NamedTuple):
        window: int

    assert undocumented(bare) == undocumented(Bare) == ["a docstring"]
    assert undocumented(partly_documented) == ["block_size"]
