"""Token orders of shift, crop, pad, permute and select, with the checks of their arguments.

An order is int64 (new length,): the token that comes to each position, NONE for a new token. reindexing.py applies it.
"""

from __future__ import annotations

import numpy as np
import torch

from . import checks
from .block_list import Array, Size
from .reindexing import NONE

# blocks of one axis: a slice, or indices in any order
Blocks = slice | list[int] | Array | torch.Tensor


def _window(start: int, stop: int, length: int) -> Array:
    """Tokens start .. stop - 1; NONE outside the sequence."""
    order: Array = np.arange(start, stop)
    order[(order < 0) | (order >= length)] = NONE
    return order


def shifted(length: int, by: object, name: str) -> Array:
    """The order that moves every token by `by` positions toward the end, dropping those beyond it."""
    # clamped: `by` may be any int
    far = max(-length, min(checks.integer(by, name), length))
    return _window(-far, length - far, length)


def cropped(length: int, start: object, stop: object, name: str) -> Size:
    """(start, stop), checked; a stop of None is the end."""
    first = checks.integer(start, f"{name}_start")
    last = length if stop is None else checks.integer(stop, f"{name}_stop")
    if not 0 <= first <= last <= length:
        raise ValueError(
            f"{name}_start and {name}_stop must be 0 <= {name}_start <= {name}_stop <= {name}_len = {length}, "
            f"got {first} and {last}; pad() adds tokens"
        )
    return first, last


def padded(length: int, sides: object, name: str) -> Array:
    """The order with sides = (before, after) new tokens at the ends."""
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"{name} must be (before, after), two numbers of tokens, got {sides!r}")
    before, after = (checks.integer(side, name) for side in sides)
    if before < 0 or after < 0:
        raise ValueError(
            f"{name} must be (before, after), at least 0 tokens each, got {sides!r}; crop() removes tokens"
        )
    checks.length(length + before + after, f"{name}_len + {name}")
    return _window(-before, length + after, length)


def permuted(length: int, order: object, name: str) -> Array:
    """The order, checked to be a permutation; the identity for None."""
    if order is None:
        return np.arange(length)
    values = checks.integers(order, name)
    if len(values) != length:
        raise ValueError(
            f"{name} must name each of {length} tokens once, got {len(values)} entries; crop(), select() and pad() "
            "change lengths"
        )
    checks.check_range(values, length, name, "length")
    seen = np.bincount(values, minlength=length)
    if (seen > 1).any():
        raise ValueError(f"{name} must list each token once, but token {int((seen > 1).argmax())} is repeated")
    return values


def selected(length: int, side: int, chosen: object, name: str) -> Array:
    """The tokens of the chosen blocks of `side` tokens, concatenated."""
    n_blocks = -(-length // side)
    if isinstance(chosen, slice):
        for bound in (chosen.start, chosen.stop, chosen.step):
            checks.integer(0 if bound is None else bound, f"{name}: a bound of the slice")
        if chosen.step == 0:
            raise ValueError(f"{name} must be a slice with another step than 0, got {chosen}")
        values = np.arange(n_blocks)[chosen]
    else:
        values = checks.integers(chosen, name)
        checks.check_range(values, n_blocks, name, f"n_{name}")
    is_ragged = (values == n_blocks - 1) & (length % side != 0)
    if is_ragged[:-1].any():
        raise ValueError(
            f"{name} may name the ragged last block, {n_blocks - 1} of {length % side} tokens, only at its end, "
            f"got it at {int(is_ragged.argmax())} of {len(values)}; pad() completes the block"
        )
    checks.length(len(values) * side, f"{name} in tokens,")
    tokens = (values[:, None] * side + np.arange(side)).reshape(-1)
    # drops the missing tokens of a ragged last block
    return tokens[tokens < length]
