"""How do the masks of single heads become one layout?

Knows layouts of one head each, and how their lists of blocks are laid one after another.
Must not know any pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from blocksparse_flash import BlockLayout

from .checks import read_integer

Setting = TypeVar("Setting")


def read_heads(heads: int | None) -> int | None:
    """`heads` as an int of at least 1, or None: one mask shared by every head."""
    return None if heads is None else read_integer("heads", heads, at_least=1, unit="heads")


def by_head(build: Callable[[Setting], BlockLayout], settings: Sequence[Setting]) -> BlockLayout:
    """The layout whose head h is build(settings[h]); equal settings are built once.

    build    gives a layout of shape (1, 1, q_len, kv_len), of the same lengths and block size for every setting
    returns  BlockLayout of shape (1, len(settings), q_len, kv_len)
    """
    built = {setting: build(setting) for setting in dict.fromkeys(settings)}
    layouts = [built[setting] for setting in settings]
    # where the bitmasks of each distinct setting begin among all of them
    begins, n_bitmasks = {}, 0
    for setting, layout in built.items():
        begins[setting] = n_bitmasks
        n_bitmasks += len(layout.bitmasks)
    ids = [
        torch.where(layout.bitmask_ids < 0, layout.bitmask_ids, layout.bitmask_ids + begins[setting])
        for setting, layout in zip(settings, layouts, strict=True)
    ]
    indptr, nnz = [], 0
    for layout in layouts:
        indptr.append(layout.indptr[0, 0] + nnz)
        nnz += layout.nnz
    return BlockLayout(
        torch.stack(indptr)[None],
        torch.cat([layout.indices for layout in layouts]),
        torch.cat(ids),
        torch.cat([layout.bitmasks for layout in built.values()]),
        q_len=layouts[0].q_len,
        kv_len=layouts[0].kv_len,
        block_size=layouts[0].block_size,
    )
