"""Packed continuations of one shared prefix, which see the prefix but not each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize
from .documents import documents, read_bounds
from .public import public


@public
def shared_prefix(
    cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor, *, causal: bool = True, block_size: BlockSize = 128
) -> BlockLayout:
    """Each token attends to its own document and to the first document, the prefix shared by all others.

    Documents are packed end to end, as for `documents`. Document 0 is the prefix, for example a question with several
    answers, and attends to itself only.

    cu_seqlens=[0, 2, 4, 6], causal and not causal:
        1 0 0 0 0 0     1 1 0 0 0 0
        1 1 0 0 0 0     1 1 0 0 0 0
        1 1 1 0 0 0     1 1 1 1 0 0
        1 1 1 1 0 0     1 1 1 1 0 0
        1 1 0 0 1 0     1 1 0 0 1 1
        1 1 0 0 1 1     1 1 0 0 1 1

    cu_seqlens  int (documents + 1,): starts at 0, never decreases, ends at the length; cu_seqlens[1] is the length of
                the prefix. A tensor on a GPU is copied to the host
    causal      True also requires kv_pos <= q_pos
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, length, length), length = cu_seqlens[-1], shared by every head,
                exact to the token
    raises      ValueError if cu_seqlens is empty, has more than one axis, does not start at 0 or decreases; TypeError
                unless all are ints and causal is a bool

    Wang et al., "FlashMask", arXiv:2410.01359, section 3 (share question mask).

    >>> shared_prefix([0, 256, 512, 1024]).density
    0.4375
    """
    bounds = read_bounds(cu_seqlens, "cu_seqlens")
    own = documents(bounds, causal=causal, block_size=block_size)
    length, prefix = own.kv_len, int(bounds[1]) if len(bounds) > 1 else 0
    n_full_cols = prefix // own.block_size[1]
    block_q = own.block_size[0]
    # rows with a query after the prefix attend to its cols
    rows = np.arange(own.n_rows)
    stop = np.where((rows + 1) * block_q > prefix, -(-prefix // own.block_size[1]), 0)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (q_pos >= prefix) & (kv_pos < prefix)

    def dedup_key(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return 2 * (row * block_q >= prefix) + (col < n_full_cols)

    within = BlockLayout.from_ranges(np.zeros_like(rows), stop, length, length, block_size=own.block_size)
    return own | BlockLayout.from_predicate(
        attends, length, length, block_size=own.block_size, within=within, dedup_key=dedup_key
    )
