"""Positions: rotary tables, learned vectors, ALiBi slopes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..alibi import slopes_of
from .arguments import check_positions, positive_int, rotary_base


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes of ALiBi's authors for so many heads, for the `alibi_slopes` of attention: float32 (num_heads,), on the CPU.

    2 ** (-8 (h + 1) / num_heads) for a power of two; for another number those of the power of two below, then every other
    one of the power of two above (Press et al., arXiv:2108.12409, section 3, and the code published with it).

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    return torch.tensor(slopes_of(positive_int("num_heads", num_heads)), dtype=torch.float32, device="cpu")


class RotaryTable(NamedTuple):
    """How far the features of each token turn: what `rotary_table` returns.

    cos  float32 (length, head_dim / 2): cosines of the angles
    sin  as cos: their sines
    """

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, base: float, head_dim: int) -> RotaryTable:
    """By how much the features of a head turn at those positions, for the `positions` of SelfAttention and Encoder: computed
    once, where positions alone are turned into it by every layer of every call.

    positions  (length,) or (length, axes): where the tokens stand
    base       as the layers' rope
    head_dim   as the layers'

    A token at p turns the pair d, features d and d + head_dim / 2, by p * base ** (-2 d / head_dim), so that the score of a
    query and a key depends on their distance. With several axes the first of equal parts of the pairs turns by the first
    axis, and so on, each part as if it were all. Angles are float32: a half type cannot count tokens.
    """
    rotary_base("base", base)
    positive_int("head_dim", head_dim)
    check_positions(positions)
    places = positions[:, None] if positions.dim() == 1 else positions
    if places.dim() != 2 or not places.shape[1] or head_dim % (2 * places.shape[1]):
        raise ValueError(
            "positions must have shape (length,) or (length, axes), each axis turning pairs of features, so that head_dim is "
            f"a multiple of 2 axes, got {tuple(positions.shape)} and head_dim={head_dim}"
        )
    n_pairs, axes = head_dim // 2, places.shape[1]
    exponents = torch.arange(n_pairs // axes, device=places.device, dtype=torch.float32) * (axes / n_pairs)
    angles = (places.float()[:, :, None] * base**-exponents).flatten(1)
    return RotaryTable(angles.cos(), angles.sin())


def rotate(heads: Tensor, table: RotaryTable) -> Tensor:
    """Rotary positions: (batch, heads, length, head_dim), each token's features turned as the table says."""
    cos, sin = table.cos.to(heads.dtype), table.sin.to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotate_at(heads: Tensor, base: float, positions: Tensor) -> Tensor:
    """`rotate` by the table of those positions, (length, axes)."""
    return rotate(heads, rotary_table(positions, base, heads.shape[-1]))


class LearnedPositions(nn.Module):
    """A learned vector for each place, added to the token that stands there. weight (length, embed_dim).

    length     the longest sequence
    raises     TypeError, ValueError
    """

    def __init__(self, length: int, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positive_int("length", length), positive_int("embed_dim", embed_dim)))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, length, embed_dim) to the same shape."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[2] != self.weight.shape[1]:
            raise ValueError(
                f"x must have shape (batch, length, embed_dim={self.weight.shape[1]}), got {tuple(x.shape)}"
            )
        if x.shape[1] > len(self.weight):
            raise ValueError(f"x has {x.shape[1]} tokens, but there are positions for {len(self.weight)}")
        return x + self.weight[: x.shape[1]]
