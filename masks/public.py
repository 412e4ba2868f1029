"""The decorator of the functions that `masks` exports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from blocksparse_flash.runtime import tracing

from .other_names import meant_argument

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def public(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`untraced`, with a TypeError for unknown keywords that says what to write instead.

    Masks are built on the host from the values of their arguments, outside of whatever traces or transforms the caller:
    they are constants of a graph.
    """
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                meant = meant_argument(name, known, causal="masks.causal(n)") or f" It takes {', '.join(known)}"
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{meant}")
        for name, value in (*zip(known, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor) and not tracing.can_be_read(value):
                raise ValueError(
                    f"{name}: expected values that can be read now, got a tensor that is fake, traced or transformed: "
                    "build the mask outside of the traced function, and pass it in"
                )
        with tracing.outside_transforms():
            return function(*args, **kwargs)

    return tracing.untraced(run)
