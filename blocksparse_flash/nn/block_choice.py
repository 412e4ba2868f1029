"""Choice of blocks in causal layers that select them: the check of a block size, and the blocks that score best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan import block_selection
from ..runtime import tracing
from ..selection import is_key_block_size
from .arguments import positive_int


def check_block_size(block_size: int) -> None:
    """Refuse a size of blocks that `selected_attention` does not have."""
    if not is_key_block_size(positive_int("block_size", block_size)):
        raise ValueError(f"block_size must be 16, 32, 64 or a multiple of 128 tokens, got {block_size}")


def choose_best(
    cols: Tensor,
    scores: Tensor,
    own: Tensor,
    earliest: Tensor,
    first_row: int,
    *,
    n_seen: int,
    always: tuple[int, int] = (0, 1),
    pieces: tuple[int, int] | None = None,
) -> None:
    """Write the blocks with the highest scores into rows of cols, -1 for unused entries.

    cols       int64 (batch, heads, all queries, blocks per query)
    scores     (batch, heads, queries, n) of blocks, or with `pieces` weights of keys. May be overwritten
    own, earliest  blocks of these queries, see block_ranges: a query may select the blocks from earliest to own, and
               keys that begin before the block `earliest` do not count
    first_row  row of cols for the first query
    n_seen     blocks up to the last query's own; scores of blocks have as many, or more
    pieces     per_block and per_key of block_importance
    always     blocks that are selected whatever their score: the first ones, and the last ones up to the query's own
    """
    n_rows, n_chosen = scores.shape[2], cols.shape[3]
    if block_selection.is_on_gpu(scores):
        from ..kernels.triton import block_choice

        # a block is its own only key
        of_kernel = pieces or (1, 1)
        if block_choice.can_choose(scores, n_chosen, of_kernel):
            with tracing.on_device(scores.device):
                block_choice.choose_blocks(scores, own, earliest, cols, first_row, always=always, pieces=of_kernel)
            return
    if pieces is not None:
        per_block, _ = pieces
        scores.masked_fill_(torch.arange(scores.shape[3], device=scores.device) < earliest * per_block, 0)
        scores = block_importance(scores, n_seen, *pieces)
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
    """Importance of blocks (..., n_blocks) from weights of keys (..., n): sums over pieces of the sequence.

    A block has per_block pieces, and key i has per_key pieces, the first of which is piece i. Each key counts once for
    every piece that it has in common with a block.
    """
    n_pieces = n_blocks * per_block
    padded = pad(weights, (per_key - 1, n_pieces - weights.shape[-1]))
    # piece p is in the keys p - per_key + 1 .. p
    pieces = padded[..., :n_pieces].clone()
    for shift in range(1, per_key):
        pieces += padded[..., shift : shift + n_pieces]
    return pieces.unflatten(-1, (n_blocks, per_block)).sum(-1)
