"""Choice of blocks in causal layers that select them: the check of a block size, and the blocks that score best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan import block_selection
from ..runtime import tracing
from ..selection import is_key_block_size
from .arguments import positive_int

# scores in memory at a time, for all heads: 256 MB as float32
MAX_SCORES_PER_CHUNK = 1 << 26
# no sequence that fits into memory is longer
MAX_BLOCK_SIZE = 1 << 26


def check_block_size(block_size: int) -> None:
    """Refuse a size of blocks that `selected_attention` does not have."""
    if not is_key_block_size(positive_int("block_size", block_size)):
        raise ValueError(f"block_size must be 16, 32, 64 or a multiple of 128 tokens, got {block_size}")
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE} tokens, got {block_size}")


def choose_best(
    cols: Tensor,
    scores: Tensor,
    own: Tensor,
    earliest: Tensor,
    first_row: int,
    *,
    n_seen: int,
    always: tuple[int, int] = (0, 1),
    strides: tuple[int, int] | None = None,
) -> None:
    """Write the blocks with the highest scores into rows of cols, -1 for unused entries.

    cols       int64 (batch, heads, all queries, blocks per query)
    scores     (batch, heads, queries, n) of blocks, or with `strides` weights of compressed keys. May be overwritten
    own, earliest  blocks of these queries, see block_ranges: a query may select the blocks from earliest to own, and
               keys that begin before the block `earliest` do not count
    first_row  row of cols for the first query
    n_seen     blocks up to the last query's own; scores of blocks have as many, or more
    strides    (strides per block, strides per key): a compressed key i covers strides i .. i + per_key - 1
    always     blocks that are selected whatever their score: the first ones, and the last ones up to the query's own
    """
    n_rows, n_chosen = scores.shape[2], cols.shape[3]
    if block_selection.is_on_gpu(scores):
        from ..kernels.triton import block_choice

        # a block is its own only key
        kernel_strides = strides or (1, 1)
        if block_choice.can_choose(scores, n_chosen, kernel_strides):
            with tracing.on_device(scores.device):
                block_choice.choose_blocks(
                    scores, own, earliest, cols, first_row, always=always, strides=kernel_strides
                )
            return
    if strides is not None:
        per_block, _ = strides
        scores.masked_fill_(torch.arange(scores.shape[3], device=scores.device) < earliest * per_block, 0)
        scores = block_importance(scores, n_seen, *strides)
    # NaN and infinities, such as products beyond the range of float16, would tie with the marks below
    largest = torch.finfo(scores.dtype).max
    scores.nan_to_num_(nan=largest, posinf=largest, neginf=-largest)
    col = torch.arange(scores.shape[3], device=scores.device)
    is_always = (col < earliest + always[0]) | (col > own - always[1])
    scores.masked_fill_(is_always, torch.inf).masked_fill_((col > own) | (col < earliest), -torch.inf)
    best = scores.topk(min(n_chosen, scores.shape[3]), dim=-1)
    chosen = best.indices.masked_fill_(best.values == -torch.inf, -1)
    cols[:, :, first_row : first_row + n_rows] = pad(chosen, (0, n_chosen - chosen.shape[3]), value=-1)


def block_importance(weights: Tensor, n_blocks: int, per_block: int, per_key: int) -> Tensor:
    """Importance of blocks (..., n_blocks) from weights of keys (..., n): sums over strides of the sequence.

    A stride is a group of consecutive tokens: from the first token of a compressed key to that of the next. A block has
    per_block strides, and key i has per_key, the first of which is stride i. Each key counts once for every stride that
    it shares with a block.
    """
    n_strides = n_blocks * per_block
    padded = pad(weights, (per_key - 1, n_strides - weights.shape[-1]))
    # stride i is in the keys i - per_key + 1 .. i
    strides = padded[..., :n_strides].clone()
    for shift in range(1, per_key):
        strides += padded[..., shift : shift + n_strides]
    return strides.unflatten(-1, (n_blocks, per_block)).sum(-1)
