"""The decorator of the functions that `masks` exports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from blocksparse_flash.runtime.tracing import untraced

from .other_names import meant_argument

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def public(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`untraced`, with a TypeError for unknown keywords that says what to write instead."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                meant = meant_argument(name, known, causal="masks.causal(n)") or f" It takes {', '.join(known)}"
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{meant}")
        return function(*args, **kwargs)

    return untraced(run)
