"""How do masks of one head each become one mask with a head axis?

Knows the tensors of a layout.
Must not know any pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blocksparse_flash import BlockLayout


def stack_heads(layouts: Sequence[BlockLayout]) -> BlockLayout:
    """Head h of the result is layouts[h].

    layouts  at least one, each of shape (1, 1, q_len, kv_len), of equal lengths and block sizes
    returns  BlockLayout of shape (1, len(layouts), q_len, kv_len)

    >>> block = BlockLayout.from_blocks([0], [0], 64, 64, block_size=32)
    >>> stack_heads([block, ~block]).shape
    (1, 2, 64, 64)
    """
    assert {layout.shape for layout in layouts} == {(1, 1, layouts[0].q_len, layouts[0].kv_len)}
    assert {layout.block_size for layout in layouts} == {layouts[0].block_size}
    indptr, bitmask_ids = [], []
    nnz = n_bitmasks = 0
    for layout in layouts:
        indptr.append(layout.indptr[0] + nnz)
        bitmask_ids.append(torch.where(layout.bitmask_ids >= 0, layout.bitmask_ids + n_bitmasks, -1))
        nnz, n_bitmasks = nnz + layout.nnz, n_bitmasks + len(layout.bitmasks)
    return BlockLayout(
        torch.stack(indptr, dim=1),
        torch.cat([layout.indices for layout in layouts]),
        torch.cat(bitmask_ids).to(torch.int32),
        torch.cat([layout.bitmasks for layout in layouts]),
        q_len=layouts[0].q_len,
        kv_len=layouts[0].kv_len,
        block_size=layouts[0].block_size,
    )
