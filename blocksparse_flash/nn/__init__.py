"""How does attention become a layer, and layers an encoder?

Knows: torch.nn modules, projections, head splits, rotary positions, what changes scores, and where a layout lives. Must not
know: backends, plans, patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ..functional import attention
from ..layout import BlockLayout
from ..score_mods import slopes_of
from ..validation import MAX_HEAD_DIM, checked_softcap
from .layout_buffers import HoldsLayout, Layout, checked_causal, checked_layout, checked_probability
from .torch_modules import MultiheadAttention, TransformerEncoderLayer

__all__ = [
    "Encoder",
    "EncoderBlock",
    "LearnedPositions",
    "MultiheadAttention",
    "RotaryTable",
    "SelfAttention",
    "TransformerEncoderLayer",
    "alibi_slopes",
    "rotary_table",
]


def _positive(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int, got {number!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def _base(name: str, base: Any) -> float:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise TypeError(f"{name} must be a number, a base such as 10000.0, got {base!r} ({type(base).__name__})")
    if not 0 < base < math.inf:
        raise ValueError(f"{name} must be a base above 0, such as 10000.0, got {base}")
    return base


def _check_positions(positions: Any) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"positions must be a tensor of numbers, got {type(positions).__name__}; torch.as_tensor(positions) makes one"
        )
    if positions.is_complex():
        raise ValueError(f"positions must be real numbers, got {positions.dtype}")
    if positions.dtype == torch.bool:
        raise ValueError(
            "positions must be real numbers, got torch.bool, which is a mask; positions.cumsum(0) counts, and kv_lengths= "
            "says how much of a padded batch exists"
        )


def _share(name: str, value: Any) -> float:
    """The probability to drop a feature, which may be 1, as in nn.Dropout."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}); 0.0 drops nothing")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}; 0.0 drops nothing")
    return value


def _switch(name: str, value: Any, way_out: str) -> bool:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__}); {way_out}")
    return value


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes of ALiBi's authors for so many heads, for the `alibi_slopes` of attention: float32 (num_heads,), on the CPU.

    2 ** (-8 (h + 1) / num_heads) for a power of two; for another number those of the power of two below, then every other
    one of the power of two above (Press et al., arXiv:2108.12409, section 3, and the code published with it).

    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    return torch.tensor(slopes_of(_positive("num_heads", num_heads)), dtype=torch.float32, device="cpu")


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
    _base("base", base)
    _positive("head_dim", head_dim)
    _check_positions(positions)
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


def turned(heads: Tensor, table: RotaryTable) -> Tensor:
    """Rotary positions: (batch, heads, length, head_dim), each token's features turned as the table says."""
    cos, sin = table.cos.to(heads.dtype), table.sin.to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def rotated(heads: Tensor, base: float, positions: Tensor) -> Tensor:
    """`turned` by the table of those positions, (length, axes)."""
    return turned(heads, rotary_table(positions, base, heads.shape[-1]))


class SelfAttention(HoldsLayout):
    """Multi-head self-attention over a layout: projections without bias around `attention`, which chooses the backend.

    embed_dim  features of a token, a multiple of num_heads unless head_dim is given
    num_heads  query heads
    layout     which queries attend to which keys: a BlockLayout of length x length; a function from a length to one, for
               inputs of several lengths (let it remember what it has built); or None, where every token attends to all
    kv_heads   key and value heads, which neighbouring query heads share; None is num_heads
    causal     keeps kv_pos <= q_pos, also where the layout attends
    rope       base of rotary positions, such as 10000.0, for an even head_dim; None adds no positions. A token stands at its
               index, or where `positions` of a call say: pixels of a grid, seconds
    dropout_p  probability to drop an attention weight while training; drawn from PyTorch's CPU generator
    head_dim   features of a head; None is embed_dim // num_heads
    sinks      True learns one more logit a row for each head, of a key without a value, which takes what a query wants of
               nothing: the parameter `sinks` (num_heads,), which starts at 0: the softmax whose denominator has 1 more (the
               Zero Sink of Xiao et al. 2024, section 3.3; gpt-oss learns it). -inf is no sink, and would never learn
    softcap    c > 0: a score s becomes c * tanh(s / c) (Gemma 2, section 2); None caps nothing
    alibi      True then takes slope * |q_pos - kv_pos| from it, of token indices whatever `positions` are, by
               `alibi_slopes(num_heads)`, which are no weights and stay float32
    raises     TypeError, ValueError

    The layout is no weight: `state_dict` holds the projections and the sinks only, so that they load into a module with
    another layout or length. Copies, pickles and `torch.save(module)` keep it. `module.to(device)` moves it along and plans
    it there, as does the constructor, so that the module can be compiled; a function's layouts are the function's business
    (to compile, it returns planned ones: `layout.to(device)`).

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
        head_dim: int | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        self.embed_dim = _positive("embed_dim", embed_dim)
        self.num_heads = _positive("num_heads", num_heads)
        self.kv_heads = num_heads if kv_heads is None else _positive("kv_heads", kv_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads unless head_dim is given, got {embed_dim} and {num_heads}"
            )
        if num_heads % self.kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")
        self.head_dim = embed_dim // num_heads if head_dim is None else _positive("head_dim", head_dim)
        if rope is not None and self.head_dim % 2:
            raise ValueError(f"rope turns features in pairs, so head_dim must be even, got {self.head_dim}")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}: take more heads")
        self.rope = None if rope is None else _base("rope", rope)
        self.causal, self.dropout_p = checked_causal(causal), checked_probability("dropout_p", dropout_p)
        self.layout = checked_layout(layout)
        if isinstance(layout, BlockLayout) and (layout.q_len != layout.kv_len or layout.shape[1] not in (1, num_heads)):
            raise ValueError(
                f"layout must have as many queries as keys, and 1 head or num_heads={num_heads}, got shape {layout.shape}"
            )
        # one product for queries, keys and values
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias=False)
        learns_sinks = _switch("sinks", sinks, "a layout of first tokens that all attend to is masks.sink_window")
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if learns_sinks else None
        self.softcap = checked_softcap(softcap)
        self.alibi = _switch("alibi", alibi, "slopes of your own are for `attention`")
        # a buffer, which whatever moves weights moves along
        self.register_buffer("alibi_slopes", alibi_slopes(num_heads) if alibi else None, persistent=False)
        self._place_layout()

    def _place_layout(self) -> None:
        """Fills in the slopes as well: a conversion has rounded them, `to_empty` has left nothing of them."""
        super()._place_layout()
        device = self.qkv.weight.device
        if self.alibi and device.type != "meta":
            self.alibi_slopes = alibi_slopes(self.num_heads).to(device)

    def _table(self, rope: float, positions: Tensor | RotaryTable | None, x: Tensor) -> RotaryTable:
        """How far each token's features turn, checked."""
        length = x.shape[1]
        if isinstance(positions, RotaryTable):
            if positions.cos.shape != (length, self.head_dim // 2) or positions.sin.shape != positions.cos.shape:
                raise ValueError(
                    f"positions must be a RotaryTable of shape (length={length}, head_dim / 2={self.head_dim // 2}), "
                    f"got {tuple(positions.cos.shape)}: rotary_table(positions, rope, head_dim) makes it"
                )
            return positions
        if positions is None:
            return rotary_table(torch.arange(length, device=x.device), rope, self.head_dim)
        _check_positions(positions)
        if positions.dim() not in (1, 2) or positions.shape[0] != length:
            raise ValueError(
                f"positions must have shape (length={length},) or (length={length}, axes), got {tuple(positions.shape)}"
            )
        axes = 1 if positions.dim() == 1 else positions.shape[1]
        if not axes or self.head_dim % (2 * axes):
            raise ValueError(
                f"positions have {axes} axes, each of which turns pairs of features, so head_dim must be a "
                f"multiple of {2 * axes}, got {self.head_dim}"
            )
        return rotary_table(positions, rope, self.head_dim)

    def project(self, x: Tensor, positions: Tensor | RotaryTable | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The first of the three parts of forward: queries, keys and values, (batch, heads, length, head_dim).

        x          (batch, length, embed_dim)
        positions  as forward
        """
        if positions is not None and self.rope is None:
            raise ValueError("positions were given, but rope is None and would not use them: rope=10000.0 does")
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must have shape (batch, length, embed_dim={self.embed_dim}), got {tuple(x.shape)}")
        heads = rearrange(self.qkv(x), "batch length (heads d) -> batch heads length d", d=self.head_dim)
        q, k, v = heads.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        if self.rope is None:
            return q, k, v
        table = self._table(self.rope, positions, x)
        return turned(q, table), turned(k, table), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv_lengths: Tensor | None = None) -> Tensor:
        """The second part of forward: what the queries attend to, (batch, heads, length, head_dim).

        q, k, v     (batch, heads, length, head_dim), as `project` gives them; the layout is the one of that length
        kv_lengths  as forward
        """
        dropout_p = self.dropout_p if self.training else 0.0
        layout = self.layout_for(q.shape[2])
        return attention(
            q,
            k,
            v,
            layout,
            causal=self.causal,
            kv_lengths=kv_lengths,
            dropout_p=dropout_p,
            sinks=self.sinks,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
        )

    def unite(self, heads: Tensor) -> Tensor:
        """The third part of forward: heads (batch, heads, length, head_dim) to (batch, length, embed_dim)."""
        return self.out(rearrange(heads, "batch heads length d -> batch length (heads d)"))

    def forward(
        self, x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        kv_lengths  int32 or int64 (batch,): tokens at and beyond kv_lengths[b] are padding, which nothing attends to;
                    what comes out at those places means nothing
        positions   where the tokens stand, for rope: numbers (length,), or (length, axes), such as rows and columns of
                    pixels, in any unit; None is 0, 1, 2, ...; or their rotary_table, which layers can share
        """
        return self.unite(self.attend(*self.project(x, positions), kv_lengths))

    def extra_repr(self) -> str:
        if isinstance(self.layout, BlockLayout):
            layout = f"{self.layout.q_len} x {self.layout.kv_len}, density {self.layout.density:.3g}"
        else:
            layout = "every pair" if self.layout is None else getattr(self.layout, "__name__", repr(self.layout))
        return (
            f"{self.embed_dim}, {self.num_heads}, layout={layout}, kv_heads={self.kv_heads}, causal={self.causal}, "
            f"rope={self.rope}, dropout_p={self.dropout_p}, head_dim={self.head_dim}, sinks={self.sinks is not None}, "
            f"softcap={self.softcap}, alibi={self.alibi}"
        )


class LearnedPositions(nn.Module):
    """A learned vector for each place, added to the token that stands there. weight (length, embed_dim).

    length     the longest sequence
    raises     TypeError, ValueError
    """

    def __init__(self, length: int, embed_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(_positive("length", length), _positive("embed_dim", embed_dim)))
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


class EncoderBlock(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + dense(norm(x)) with two layers and GELU between.

    attention   a layer from (batch, length, embed_dim) to the same, such as SelfAttention
    hidden_dim  features between the dense layers; None is 4 embed_dim
    dropout_p   probability to drop a feature of what is added, and of the hidden features, while training; 0 to 1
    raises      TypeError, ValueError
    """

    def __init__(self, attention: SelfAttention, *, hidden_dim: int | None = None, dropout_p: float = 0.0) -> None:
        super().__init__()
        if not isinstance(attention, nn.Module) or not hasattr(attention, "embed_dim"):
            raise TypeError(
                f"attention must be a module with an embed_dim, such as SelfAttention, got {type(attention).__name__}"
            )
        embed_dim, dropout_p = attention.embed_dim, _share("dropout_p", dropout_p)
        hidden_dim = 4 * embed_dim if hidden_dim is None else _positive("hidden_dim", hidden_dim)
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = attention
        self.dense_norm = nn.LayerNorm(embed_dim)
        self.dense = nn.Sequential(
            nn.Linear(embed_dim, hidden_dim), nn.GELU(), nn.Dropout(dropout_p), nn.Linear(hidden_dim, embed_dim)
        )
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self, x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape; kv_lengths and positions as SelfAttention."""
        x = x + self.dropout(self.attention(self.attention_norm(x), kv_lengths, positions))
        return x + self.dropout(self.dense(self.dense_norm(x)))


class Encoder(nn.Module):
    """A stack of blocks, and a norm at its end.

    blocks  each takes (x, kv_lengths, positions), as EncoderBlock; masks may differ from block to block

    >>> blocks = [EncoderBlock(SelfAttention(64, 2, rope=10.0)) for _ in range(2)]
    >>> pixels = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    >>> Encoder(blocks)(torch.zeros(1, 256, 64), positions=pixels).shape
    torch.Size([1, 256, 64])
    """

    def __init__(self, blocks: Iterable[EncoderBlock]) -> None:
        super().__init__()
        listed = list(blocks)
        if not listed:
            raise ValueError("blocks must be one or more, got none")
        for block in listed:
            if not hasattr(block, "attention"):
                raise TypeError(f"blocks must have an attention, as EncoderBlock has, got {type(block).__name__}")
        self.blocks = nn.ModuleList(listed)
        self.norm = nn.LayerNorm(listed[0].attention.embed_dim)

    def forward(
        self, x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape; kv_lengths and positions as SelfAttention."""
        for block in self.blocks:
            x = block(x, kv_lengths, positions)
        return self.norm(x)
