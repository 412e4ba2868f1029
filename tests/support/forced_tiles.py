"""Plans in tiles that a test chooses, not those that dispatch would choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from blocksparse_flash import dispatch, functional


def force_tile(patch: pytest.MonkeyPatch, tile: int | Callable[..., int]) -> None:
    """Make every plan in tiles of this side, or of that which a function in place of dispatch.fastest_tile returns."""
    patch.setattr(dispatch, "fastest_tile", tile if callable(tile) else lambda *_, **__: tile)
    # a layout keeps the plan of each kind of call, which may be in other tiles
    patch.setattr(functional, "_prepared", functional._prepare)


@contextlib.contextmanager
def forced_tile(tile: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        force_tile(patch, tile)
        yield
