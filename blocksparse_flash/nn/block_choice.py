"""Choice of blocks in causal layers that select them: the check of a block size, and the blocks that score best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..selection import has_blocks_of
from .arguments import positive_int


def check_block_size(block_size: int) -> None:
    """Refuse a size of blocks that `selected_attention` does not have."""
    if not has_blocks_of(positive_int("block_size", block_size)):
        raise ValueError(f"block_size must be 16, 32, 64 or a multiple of 128 tokens, got {block_size}")


def best_scores(scores: Tensor, is_always: Tensor, is_later: Tensor, n_blocks: int, n_cols: int) -> Tensor:
    """The blocks with the highest scores: int64 (..., n_blocks, or n_cols if that is less), -1 for unused entries.

    scores     (..., blocks seen so far), overwritten
    is_always  blocks that are selected whatever their score, broadcast to scores
    is_later   blocks that are never selected, broadcast to scores
    n_cols     blocks of the whole sequence
    """
    if scores.dtype == torch.float16:
        # products beyond its range would tie with the blocks that are always selected
        bounds = torch.finfo(scores.dtype)
        scores.clamp_(bounds.min, bounds.max)
    scores.masked_fill_(is_always, torch.inf).masked_fill_(is_later, -torch.inf)
    best = scores.topk(min(n_blocks, scores.shape[-1]), dim=-1)
    cols = best.indices.masked_fill_(best.values == -torch.inf, -1)
    return pad(cols, (0, min(n_blocks, n_cols) - cols.shape[-1]), value=-1)
