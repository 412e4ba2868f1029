"""Layouts of several heads from one builder per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from blocksparse_flash import BlockLayout

from .checks import read_integer

# far more than any model has; refused before memory runs out
MAX_HEADS = 2**16

Setting = TypeVar("Setting")


def read_heads(heads: int | None) -> int | None:
    """`heads` as an int of at least 1, or None: one mask shared by every head."""
    return None if heads is None else read_integer("heads", heads, at_least=1, at_most=MAX_HEADS, unit="heads")


def by_head(build: Callable[[Setting], BlockLayout], settings: Sequence[Setting]) -> BlockLayout:
    """The layout whose head h is build(settings[h]); equal settings are built once.

    build    returns a layout of shape (1, 1, q_len, kv_len), with the same lengths and block size for every setting
    returns  BlockLayout of shape (1, len(settings), q_len, kv_len)
    """
    built = {setting: build(setting) for setting in dict.fromkeys(settings)}
    return BlockLayout.stack_heads(built[setting] for setting in settings)
