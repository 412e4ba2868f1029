"""Layouts chosen in each call, from the means of queries and keys over blocks of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..nn.video_sparse import block_means

# q (batch, heads, tokens, head_dim) and k (batch, kv_heads, tokens + text, head_dim) in the order of `use`, to a layout
# of tokens x (tokens + text)
Choice = Callable[[Tensor, Tensor], BlockLayout]


def _share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number above 0 and at most 1, got {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}: 1 keeps every block")
    return float(value)


def _side(block_size: int) -> int:
    if not isinstance(block_size, int) or block_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"block_size must be 16, 32, 64, 128 or 256 tokens, got {block_size!r}")
    return block_size


def _scores(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """Scaled products of block means (batch, heads, rows, cols), of the tokens that have queries."""
    rows, cols = block_means(q.detach(), block_size), block_means(k.detach()[:, :, : q.shape[2]], block_size)
    cols = cols.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return rows.float() @ cols.float().mT / math.sqrt(q.shape[3])


def _layout(cols: Tensor, q: Tensor, k: Tensor, block_size: int) -> BlockLayout:
    """The layout of chosen cols (batch, heads, rows, n), -1 for none, and of every block that has text."""
    tokens, kv_len = q.shape[2], k.shape[2]
    if kv_len > tokens:
        text = torch.arange(tokens // block_size, -(-kv_len // block_size), device=q.device)
        cols = torch.cat([cols, text.expand(*cols.shape[:3], -1)], dim=3)
    return BlockLayout.from_topk(cols, tokens, kv_len, block_size=block_size)


def top_blocks(density: float, *, block_size: int = 64) -> Choice:
    """Selects for each head and block of queries the share `density` of key blocks with the highest pooled scores.

    density     share of the blocks, above 0 and at most 1; their number is rounded up
    block_size  tokens of a block: 16, 32, 64, 128 or 256. With order=tile_order(grid, tile=(4, 4, 4)), blocks of 64
                tokens are cubes
    returns     a layout for `use`
    raises      TypeError, ValueError

    This is the selection of video sparse attention, see `blocksparse_flash.nn.video_sparse_attention`, without its
    coarse branch. The layout is made on the device, without synchronization.

    Zhang et al., "Faster Video Diffusion with Trainable Sparse Attention" (VSA), arXiv:2505.13389, section 2.
    """
    density, block_size = _share("density", density), _side(block_size)

    def choose(q: Tensor, k: Tensor) -> BlockLayout:
        scores = _scores(q, k, block_size)
        # rounded, since 1 - 0.7 is a little more than 0.3
        cols = scores.topk(math.ceil(round(density * scores.shape[3], 9)), dim=3, sorted=False).indices
        return _layout(cols, q, k, block_size)

    return choose


def top_p(p: float, *, block_size: int = 128) -> Choice:
    """Selects for each head and block of queries the fewest key blocks whose pooled weights sum to at least p.

    The weights are the softmax of the scores of `top_blocks`. Heads with concentrated attention get few blocks, others
    many.

    p           sum of weights, above 0 and at most 1
    block_size  as `top_blocks`
    returns     a layout for `use`
    raises      TypeError, ValueError

    The layout is made on the device, without synchronization, and has room for all blocks.

    Xu et al., "XAttention", arXiv:2503.16428, section 2.2 (threshold block selection).
    """
    p, block_size = _share("p", p), _side(block_size)

    def choose(q: Tensor, k: Tensor) -> BlockLayout:
        weights, cols = _scores(q, k, block_size).softmax(3).sort(dim=3, descending=True)
        # weights of a block and all smaller ones; unlike the sum of those before it, exact where it is small
        rest = weights.flip(3).cumsum(3).flip(3)
        is_chosen = rest > 1 - p if p < 1 else torch.ones_like(rest, dtype=torch.bool)
        # even if rounding makes p too large
        is_chosen[..., 0] = True
        return _layout(cols.masked_fill(~is_chosen, -1), q, k, block_size)

    return choose
