"""LayoutByLength: a mask specification as a function from a length to a layout."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..blocks import checks
from ..layout import BlockLayout
from .arguments import positive_int


def _build(spec: str, length: int | tuple[int, int], block_size: int | tuple[int, int]) -> BlockLayout:
    from .. import masks

    return masks.build(spec, length, block_size=block_size)


class LayoutByLength:
    """Builds the layout of a mask specification for each length, and keeps those used last.

    The `layout` of layers whose inputs differ in length. Unlike a lambda it can be pickled and copied, and saved with
    the module; the layouts are built again where it is loaded.

    spec        text for `masks.build`, such as "sink_window(sinks=4, window=256) | butterfly"
    block_size  tokens per side of a block, or (queries, keys), for masks that do not set their own; default 128
    maxsize     lengths whose layouts are kept; beyond them the layout used longest ago is dropped; default 16
    raises      TypeError, ValueError if spec is not a string or block_size no size of blocks. A wrong word in spec
                raises an error of `masks.build` at the first call

    torch.compile cannot build layouts: compile a module that has the BlockLayout of one length.

    >>> layout = LayoutByLength("local(window=64)", block_size=64)
    >>> layout(256).shape, layout(256) is layout(256)
    ((1, 1, 256, 256), True)
    """

    def __init__(self, spec: str, *, block_size: int | tuple[int, int] = 128, maxsize: int = 16) -> None:
        if not isinstance(spec, str):
            raise TypeError(
                f"spec must be a str such as 'butterfly | local(window=512)', got {type(spec).__name__}; a BlockLayout "
                "or a function of the length is a layout= itself"
            )
        self.spec = spec
        checks.sides(block_size)
        # hashable
        self.block_size = tuple(block_size) if isinstance(block_size, list) else block_size
        self.maxsize = positive_int("maxsize", maxsize)
        # by all that the layout depends on, since attributes can be assigned
        self._kept = functools.lru_cache(maxsize=maxsize)(_build)

    def __call__(self, length: int) -> BlockLayout:
        """The layout of shape (1, heads | 1, length, length), on the CPU.

        length  tokens; also (queries, keys)
        """
        if torch.compiler.is_compiling():
            raise ValueError(
                f"layout must be a BlockLayout while torch.compile traces, got {self!r}: give the module "
                f"layout={self!r}(length), of one length, before compiling it"
            )
        # before the cache, which takes 200.0 for 200
        if isinstance(length, (tuple, list)):
            return self._kept(self.spec, tuple(checks.length(each, "length") for each in length), self.block_size)
        return self._kept(self.spec, checks.length(length, "length"), self.block_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.spec, self.block_size, self.maxsize)

    def __eq__(self, other: object) -> bool:
        """The same specification and block size."""
        if not isinstance(other, LayoutByLength):
            return NotImplemented
        return (self.spec, self.block_size) == (other.spec, other.block_size)

    def __hash__(self) -> int:
        return hash((self.spec, self.block_size))

    def __repr__(self) -> str:
        more = "" if self.block_size == 128 else f", block_size={self.block_size}"
        return f"LayoutByLength({self.spec!r}{more})"


def _restored(spec: str, block_size: int | tuple[int, int], maxsize: int) -> LayoutByLength:
    """A pickled or copied LayoutByLength. Pickles name this function, so its name and module stay."""
    return LayoutByLength(spec, block_size=block_size, maxsize=maxsize)
