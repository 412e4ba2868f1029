"""How does attention become a layer?

Knows: torch.nn modules, projections, head splits, rotary positions, and where a layout lives. Must not know: backends, plans,
patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .functional import attention
from .layout import BlockLayout

Layout = BlockLayout | Callable[[int], BlockLayout] | None


def _positive(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int, got {number!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def _rotated(heads: Tensor, base: float) -> Tensor:
    """Rotary positions: (batch, heads, length, head_dim), feature d turns with feature d + head_dim / 2.

    Token p turns the pair d by p * base ** (-2 d / head_dim), so that the score of a query and a key depends on their
    distance. Angles are float32: a half type cannot count tokens.
    """
    length, head_dim = heads.shape[-2:]
    exponents = torch.arange(0, head_dim, 2, device=heads.device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=heads.device, dtype=torch.float32)[:, None] * base**-exponents
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class SelfAttention(nn.Module):
    """Multi-head self-attention over a layout: projections without bias around `attention`, which chooses the backend.

    embed_dim  features of a token, a multiple of num_heads
    num_heads  query heads; head_dim = embed_dim // num_heads
    layout     which queries attend to which keys: a BlockLayout of length x length; a function from a length to one, for
               inputs of several lengths (let it remember what it has built); or None, where every token attends to all
    kv_heads   key and value heads, which neighbouring query heads share; None is num_heads
    causal     keeps kv_pos <= q_pos, also where the layout attends
    rope       base of rotary positions by token index, such as 10000.0, for an even head_dim; None adds no positions
    dropout_p  probability to drop an attention weight while training; drawn from PyTorch's CPU generator
    raises     TypeError, ValueError

    The layout is no weight: `state_dict` holds the projections only, so that they load into a module with another layout
    or length. Copies, pickles and `torch.save(module)` keep it. `module.to(device)` moves it along and plans it there, as
    does the constructor, so that the module can be compiled; a function's layouts are the function's business (to compile,
    it returns planned ones: `layout.to(device)`).

    >>> SelfAttention(64, 4, kv_heads=2, rope=10000.0)(torch.zeros(2, 256, 64)).shape
    torch.Size([2, 256, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layout: Layout = None,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        rope: float | None = None,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dim = _positive("embed_dim", embed_dim)
        self.num_heads = _positive("num_heads", num_heads)
        self.kv_heads = num_heads if kv_heads is None else _positive("kv_heads", kv_heads)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")
        self.head_dim = embed_dim // num_heads
        if rope is not None and self.head_dim % 2:
            raise ValueError(
                f"rope turns features in pairs, so head_dim must be even, got {embed_dim} // {num_heads} = {self.head_dim}"
            )
        if rope is not None and not rope > 0:
            raise ValueError(f"rope must be a base above 0, such as 10000.0, or None, got {rope}")
        if not 0 <= dropout_p < 1:
            raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
        if layout is not None and not isinstance(layout, BlockLayout) and not callable(layout):
            raise TypeError(
                f"layout must be a BlockLayout, a function from a length to one, or None, got {type(layout).__name__}"
            )
        self.causal, self.rope, self.dropout_p = causal, rope, dropout_p
        self.layout: Layout = layout
        # one product for queries, keys and values
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)
        self._place_layout()

    def _place_layout(self) -> None:
        """Moves the layout to the weights' device and plans it there; a function's layouts are left to the function."""
        device = self.out.weight.device
        if isinstance(self.layout, BlockLayout) and device.type != "meta":
            self.layout = self.layout.to(device)
            self.layout.plan(device, causal=self.causal)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelfAttention:
        super()._apply(fn, recurse)
        self._place_layout()
        return self

    def forward(self, x: Tensor, kv_lengths: Tensor | None = None) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        kv_lengths  int32 or int64 (batch,): tokens at and beyond kv_lengths[b] are padding, which nothing attends to;
                    what comes out at those places means nothing
        """
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must have shape (batch, length, embed_dim={self.embed_dim}), got {tuple(x.shape)}")
        heads = rearrange(self.qkv(x), "batch length (heads d) -> batch heads length d", d=self.head_dim)
        q, k, v = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        if self.rope is not None:
            q, k = _rotated(q, self.rope), _rotated(k, self.rope)
        layout = self.layout
        if layout is not None and not isinstance(layout, BlockLayout):
            layout = layout(x.shape[1])
        dropout_p = self.dropout_p if self.training else 0.0
        out = attention(q, k, v, layout, causal=self.causal, kv_lengths=kv_lengths, dropout_p=dropout_p)
        return self.out(rearrange(out, "batch heads length d -> batch length (heads d)"))

    def extra_repr(self) -> str:
        if isinstance(self.layout, BlockLayout):
            layout = f"{self.layout.q_len} x {self.layout.kv_len}, density {self.layout.density:.3g}"
        else:
            layout = "every pair" if self.layout is None else getattr(self.layout, "__name__", repr(self.layout))
        return (
            f"{self.embed_dim}, {self.num_heads}, layout={layout}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"rope={self.rope}, dropout_p={self.dropout_p}"
        )
