"""Which tokens belong to the same continuation of a shared prefix?

Knows packed continuations: one prefix (a question, a system prompt), then texts that see it but not each other.
Must not know how documents are kept apart, beyond calling `documents`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocksparse_flash import BlockLayout

from .canvas import BlockSize
from .documents import documents


def shared_prefix(
    cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor, *, causal: bool = True, block_size: BlockSize = 128
) -> BlockLayout:
    """Each token attends to its own document and to the first one, which is the prefix of all others.

    Documents are packed end to end, as for `documents`; document 0 is the prefix (the shared question of several
    answers). The prefix attends to itself only.

    cu_seqlens=[0, 2, 4, 6], causal and not:
        1 0 0 0 0 0     1 1 0 0 0 0
        1 1 0 0 0 0     1 1 0 0 0 0
        1 1 1 0 0 0     1 1 1 1 0 0
        1 1 1 1 0 0     1 1 1 1 0 0
        1 1 0 0 1 0     1 1 0 0 1 1
        1 1 0 0 1 1     1 1 0 0 1 1

    cu_seqlens  int (documents + 1,): starts at 0, never decreases, ends at the length; cu_seqlens[1] is the length of
                the prefix
    causal      True keeps kv_pos <= q_pos only
    block_size  tokens per side of a block, a multiple of 16, or (block_q, block_kv)
    returns     BlockLayout of shape (1, 1, length, length), length = cu_seqlens[-1], shared by every head,
                exact to the token
    raises      ValueError if cu_seqlens is empty, starts elsewhere or decreases, TypeError unless all are ints or
                causal is no bool

    Wang et al., "FlashMask", arXiv:2410.01359, section 3 (share question mask).

    >>> shared_prefix([0, 256, 512, 1024]).density
    0.4375
    """
    own = documents(cu_seqlens, causal=causal, block_size=block_size)
    length, prefix = own.kv_len, int(cu_seqlens[1]) if len(cu_seqlens) > 1 else 0
    n_full_cols = prefix // own.block_size[1]
    block_q = own.block_size[0]
    # rows that hold a query behind the prefix
    rows = np.arange(own.n_rows)
    stop = np.where((rows + 1) * block_q > prefix, -(-prefix // own.block_size[1]), 0)

    def attends(q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        return (q_pos >= prefix) & (kv_pos < prefix)

    def looks(row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return 2 * (row * block_q >= prefix) + (col < n_full_cols)

    within = BlockLayout.from_ranges(np.zeros_like(rows), stop, length, length, block_size=own.block_size)
    return own | BlockLayout.from_predicate(
        attends, length, length, block_size=own.block_size, within=within, dedup_key=looks
    )
