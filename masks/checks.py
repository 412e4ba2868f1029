"""Checks of integers, fractions, switches and lists of integers given by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
import torch


def type_name(value: object) -> str:
    """The type of a refused value, as an error message names it.

    >>> type_name(1.5)
    'float'
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype}"
    return type(value).__name__


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """ValueError for a tensor whose numbers cannot be read: nested, sparse, or on the meta device.

    >>> check_dense("tokens", torch.tensor([0, 5]))
    """
    if tensor.is_meta:
        raise ValueError(f"{name}: expected numbers, got a tensor on the meta device, which has none")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name}: expected a dense tensor, got a {kind} one")


def read_integer(name: str, value: object, *, at_least: int, at_most: int | None = None, unit: str = "") -> int:
    """`value` as an int, or an error that names the argument, the accepted range and the value.

    name      name of the argument, for the message
    at_least  smallest accepted value
    at_most   largest accepted value; None means no limit
    unit      unit of the number, for the message: "tokens", "blocks"
    raises    TypeError if the type is not an integer type or is bool, ValueError if the value is out of range

    >>> read_integer("window", 64, at_least=0)
    64
    """
    counted = f"int, a number of {unit}" if unit else "int"
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {counted}, got {value!r} ({type_name(value)})")
    number = int(value)
    if number < at_least or (at_most is not None and number > at_most):
        limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name}: expected {counted}, {limits}, got {number}")
    return number


def read_fraction(name: str, value: object) -> float:
    """`value` as a float from 0 to 1, or an error that names the argument and the value.

    >>> read_fraction("density", 0.25)
    0.25
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number from 0 to 1, got {value!r} ({type_name(value)})")
    # also refuses nan; compared before float(), which no int above 1e308 becomes
    if value < 0.0 or not value <= 1.0:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


def read_integers(name: str, values: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    """A sequence, array or tensor of integers as int64 (count,), on the host.

    raises  TypeError if an entry is not an integer by type, ValueError unless there is exactly one axis

    >>> read_integers("tokens", [0, 5, 9]).tolist()
    [0, 5, 9]
    """
    if isinstance(values, torch.Tensor):
        check_dense(name, values)
        array = values.detach().cpu().numpy() if values.dtype != torch.bfloat16 else np.empty(0)
    elif isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a plain array, got a masked one; its compressed() has the valid entries")
    elif isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for place, value in enumerate(values):
            if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
                raise TypeError(f"{name}: expected ints, got {value!r} ({type_name(value)}) at index {place}")
        # np.asarray([]) would be float64
        array = np.asarray(values) if len(values) else np.empty(0, dtype=np.int64)
    else:
        raise TypeError(f"{name}: expected ints in a sequence, array or tensor, got {values!r} ({type_name(values)})")
    # NumPy gives a list of ints another type only if one is too large for 64 bits
    is_too_large = isinstance(values, Sequence) and array.dtype.kind not in "iu"
    if array.dtype.kind not in "iu" and not is_too_large:
        raise TypeError(f"{name}: expected ints, got {type_name(values)}")
    if is_too_large or (array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max):
        raise ValueError(f"{name}: expected ints from -2**63 to 2**63 - 1, got larger ones")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one axis, got shape {tuple(array.shape)}")
    return array.astype(np.int64)


def read_switch(name: str, value: object) -> bool:
    """`value` as a bool, or a TypeError that names the argument.

    >>> read_switch("causal", True)
    True
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: expected a bool, got {value!r} ({type_name(value)})")
    return bool(value)
