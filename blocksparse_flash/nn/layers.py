"""Self-attention over a layout, pre-norm encoder blocks, and a stack of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

# imports the compiler at the first call; torch.compiler.disable would import it here, which takes seconds
from torch._compile import _disable_dynamo

from .. import packed
from ..blocks.checks import boolean, listed
from ..functional import attention
from ..layout import BlockLayout
from ..runtime import tracing
from ..validation import check_device, checked_softcap
from .arguments import (
    Heads,
    Layout,
    check_input,
    check_positions,
    checked_alibi,
    checked_layout,
    positive_int,
    probability,
)
from .document_blocks import document_table
from .kv_cache import KVCache, check_is_cache, check_layout, layout_of_step
from .layout_buffers import HoldsLayout
from .positions import RotaryTable, alibi_slopes, rotary_table, rotate
from .projections import heads_of


class SelfAttention(HoldsLayout):
    """Multi-head self-attention over a layout: `attention` between projections without bias.

    embed_dim  features per token, a multiple of num_heads unless head_dim is given
    num_heads  query heads
    layout     BlockLayout of length x length; a specification such as "local(window=256)", from which a LayoutByLength
               builds the layout of each length; another function from a length to a layout; or None: every token
               attends to every token
    kv_heads   key and value heads, each shared by neighboring query heads; None means num_heads
    causal     True keeps only kv_pos <= q_pos
    rope       base of rotary positions, such as 10000.0, for an even head_dim; None adds no positions. The position of
               a token is its index, unless `positions` are passed to forward
    dropout_p  probability of dropping an attention weight in training; drawn as with `seed=None` of `attention`
    head_dim   features per head; None means embed_dim // num_heads
    sinks      True learns a sink logit per head, the parameter `sinks` (num_heads,): one more term in the softmax
               denominator, without a value. It starts at 0 (the Zero Sink of Xiao et al. 2024, section 3.3; gpt-oss
               learns it)
    softcap    c > 0: a score s becomes c * tanh(s / c) (Gemma 2, section 2); None means no cap
    alibi      True subtracts slope * |q_pos - kv_pos| from the scores, in token indices, with the slopes
               `alibi_slopes(num_heads)`; a list of numbers has other slopes, one for each head. Slopes are not learned
               and stay float32
    raises     TypeError, ValueError

    The `state_dict` holds the projections and sinks but not the layout, so it loads into a module with another layout
    or length. Copies, pickles and `torch.save(module)` keep the layout. The constructor and `module.to(device)` move it
    to the weights' device and plan it there, so the module can be compiled. If `layout` is a function, let it return
    planned layouts, `layout.to(device, causal=...)`.

    A causal layer decodes with a KVCache: make `cache = layer.new_cache(batch, max_length)` and call
    `layer(x, cache=cache)` for the prompt and each step. Together the outputs equal those of one call with all tokens.

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
        alibi: bool | Sequence[float] = False,
    ) -> None:
        super().__init__()
        sizes = Heads.of(embed_dim, num_heads, kv_heads, head_dim, rope)
        self.embed_dim, self.num_heads, self.kv_heads, self.head_dim, self.rope = sizes
        self.causal, self.dropout_p = boolean(causal, "causal"), probability("dropout_p", dropout_p, below_one=True)
        self.layout = checked_layout(layout)
        if isinstance(layout, BlockLayout) and (layout.q_len != layout.kv_len or layout.shape[1] not in (1, num_heads)):
            raise ValueError(
                f"layout must have as many queries as keys, and 1 head or num_heads={num_heads}, got shape "
                f"{layout.shape}"
            )
        # one projection for queries, keys and values
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias=False)
        learns_sinks = boolean(sinks, "sinks", "a layout of first tokens that all attend to is masks.sink_window")
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if learns_sinks else None
        self.softcap = checked_softcap(softcap)
        self.alibi = checked_alibi(alibi, num_heads)
        # a buffer, so that it moves with the weights
        self.register_buffer("alibi_slopes", self._slopes(), persistent=False)
        self._keep_layout_placed()

    def _place_layout(self) -> None:
        """Also restores the slopes, which a dtype conversion rounds and `to_empty` discards."""
        super()._place_layout()
        # slopes made in inference mode could not be used in training
        with tracing.outside_transforms():
            slopes = self._slopes()
            if slopes is not None:
                kept, weight = self.get_buffer("alibi_slopes"), self._weight()
                device = kept.device if weight is None else weight.device
                self.alibi_slopes = kept if device.type == "meta" else slopes.to(device)

    def _slopes(self) -> Tensor | None:
        """The slopes of the heads, on the CPU."""
        if isinstance(self.alibi, bool):
            return alibi_slopes(self.num_heads) if self.alibi else None
        return torch.tensor(self.alibi, dtype=torch.float32, device="cpu")

    def _table(self, rope: float, positions: Tensor | RotaryTable | None, x: Tensor, first: int) -> RotaryTable:
        """The rotary table of the input, after checks."""
        length = x.shape[1]
        parts = positions if isinstance(positions, RotaryTable) else () if positions is None else (positions,)
        for part in parts:
            check_positions(part)
            check_device("positions", part, x)
        if isinstance(positions, RotaryTable):
            if positions.cos.shape != (length, self.head_dim // 2) or positions.sin.shape != positions.cos.shape:
                raise ValueError(
                    f"positions must be a RotaryTable of shape (length={length}, head_dim / 2={self.head_dim // 2}), "
                    f"got {tuple(positions.cos.shape)}: rotary_table(positions, rope, head_dim) makes it"
                )
            return positions
        if positions is None:
            positions = torch.arange(first, first + length, device=x.device)
        table = rotary_table(positions, rope, self.head_dim)
        if table.cos.shape[0] != length:
            raise ValueError(
                f"positions must have shape (length={length},) or (length={length}, axes), got {tuple(positions.shape)}"
            )
        return table

    def project(
        self,
        x: Tensor,
        positions: Tensor | RotaryTable | None = None,
        *,
        first: int = 0,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """First step of forward: queries, keys and values, (batch, heads, length, head_dim).

        x          (batch, length, embed_dim)
        positions  as forward
        first      position of the first token if positions is None
        cu_seqlens  (documents + 1,) or (batch, documents + 1): boundaries of packed documents, in each of which
                   positions restart if positions is None
        """
        if positions is not None and self.rope is None:
            raise ValueError("positions were given, but rope is None and would not use them: rope=10000.0 does")
        check_input(x, self.embed_dim)
        q, k, v = heads_of(self.qkv(x), (self.num_heads, self.kv_heads, self.kv_heads), self.head_dim)
        if self.rope is None:
            return q, k, v
        if cu_seqlens is not None and positions is None:
            table = document_table(cu_seqlens, x, self.rope, self.head_dim)
        else:
            table = self._table(self.rope, positions, x, first)
        return rotate(q, table), rotate(k, table), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv_lengths: Tensor | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """Second step of forward: attention, (batch, heads, length, head_dim).

        q, k, v     (batch, heads, length, head_dim), from `project`
        kv_lengths, cache  as forward
        """
        if cache is None:
            swapped = "looks like (length, batch, embed_dim); use x.transpose(0, 1)"
            layout = self.layout_for(q.shape[2], q.shape[0], swapped)
            return self._attention(q, k, v, layout, self.causal, kv_lengths)
        if kv_lengths is not None:
            raise ValueError(
                "kv_lengths must be None with a cache, whose sequences all have the same number of tokens: decode "
                "prompts of different lengths in batches of one length"
            )
        if torch.compiler.is_compiling():
            return self._attend_outside_graphs(q, k, v, cache)
        return self._attend_to_cache(q, k, v, cache)

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Tensor:
        """Appends k and v to the cache, and attends to all of it."""
        cache.check(k, v)
        cache.check_gradient("q", q)
        cache.check_gradient("sinks", self.sinks)
        layout = self.layout_for(cache.max_length)
        layout, causal = layout_of_step(layout, cache, q.shape[2], q.device, causal=self.causal)
        with cache.restored_on_error():
            cache.claim(self)
            return self._attention(q, *cache.append(k, v), layout, causal, None)

    # each step has another length and another layout, which the host makes: a graph would fit one step only
    _attend_outside_graphs = _disable_dynamo(_attend_to_cache)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | None, causal: bool, kv_lengths: Tensor | None
    ) -> Tensor:
        slopes: Tensor | None = self.alibi_slopes
        # those of a layer that was built on the meta device keep their values, on the CPU
        if slopes is not None and q.is_meta:
            slopes = slopes.to(q.device)
        mods: dict[str, Any] = {"sinks": self.sinks, "softcap": self.softcap, "alibi_slopes": slopes}
        dropout_p = self.dropout_p if self.training else 0.0
        return attention(q, k, v, layout, causal=causal, kv_lengths=kv_lengths, dropout_p=dropout_p, **mods)

    def unite(self, heads: Tensor) -> Tensor:
        """Third step of forward: heads (batch, heads, length, head_dim) to (batch, length, embed_dim)."""
        return self.out(rearrange(heads, "batch heads length d -> batch length (heads d)"))

    def new_cache(self, batch: int, max_length: int, *, dtype: torch.dtype | None = None) -> KVCache:
        """An empty KVCache for this layer, on the device of its weights.

        batch       sequences
        max_length  tokens that fit; at most the length of the layout, if that is a BlockLayout. A function as layout
                    is called with max_length, and each step uses a part of that layout
        dtype       None is that of the first parameter of floats; under autocast give its dtype. Without parameters,
                    PyTorch's default device and dtype are taken
        raises      ValueError if the layer is not causal, or the layout is too short
        """
        weight = self._weight()
        weight = torch.empty(0) if weight is None else weight
        dtype = weight.dtype if dtype is None else dtype
        cache = KVCache(batch, max_length, self.kv_heads, self.head_dim, device=weight.device, dtype=dtype)
        if self.layout is None or isinstance(self.layout, BlockLayout):
            check_layout(self.layout, cache, causal=self.causal)
        return cache

    def forward(
        self,
        x: Tensor,
        kv_lengths: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        A jagged tensor x (torch.nested, layout=torch.jagged) is computed as one packed sequence without padding, in
        which each sequence attends to itself; it needs a layer without a layout.

        kv_lengths  int32 or int64 (batch,): tokens from kv_lengths[b] on are padding: no token attends to them, and
                    their outputs are meaningless. x must be finite there, since NaN would reach the gradients
        positions   positions for rope: numbers (length,) or (length, axes), such as rows and columns of pixels, in any
                    unit; or their rotary_table, which layers can share; None means 0, 1, 2, ..., with a cache
                    continued from the tokens in it
        cache       KVCache of this layer: x holds the tokens after those in the cache, and attends to those too. Needs
                    a causal layer, and no gradients. Under torch.compile, attention with a cache runs outside the
                    compiled graph (a graph break)
        """
        if packed.is_jagged(x):
            return self._forward_jagged(x, kv_lengths, positions, cache)
        if cache is None:
            return self.unite(self.attend(*self.project(x, positions), kv_lengths))
        check_is_cache(cache)
        q, k, v = self.project(x, positions, first=cache.length)
        with cache.restored_on_error():
            return self.unite(self.attend(q, k, v, kv_lengths, cache=cache))

    def _forward_jagged(
        self, x: Tensor, kv_lengths: Tensor | None, positions: Tensor | RotaryTable | None, cache: KVCache | None
    ) -> Tensor:
        for name, value in (("kv_lengths", kv_lengths), ("cache", cache), ("the layer's layout", self.layout)):
            if value is not None:
                raise ValueError(
                    f"{name} must be None for a nested tensor, whose sequences attend to themselves, got "
                    f"{type(value).__name__}; torch.nested.to_padded_tensor(x, 0.0) pads the sequences"
                )
        packed.check_jagged("x", x, sizes="batch, tokens, embed_dim", ragged=1)
        values, offsets = x.values()[None], packed.offsets_of(x)
        if positions is None and self.rope is not None:
            positions = packed.jagged_positions(offsets, values.shape[1])
        n_tokens = values.shape[1]
        layout = packed.jagged_layout(x, x, n_tokens, n_tokens, causal=self.causal, names=("x", "x"))
        heads = self._attention(*self.project(values, positions), layout, False, None)
        return torch.nested.nested_tensor_from_jagged(self.unite(heads)[0], offsets)

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


class EncoderBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + dense(norm(x)), two linear layers with GELU between.

    attention   SelfAttention, or a module with an embed_dim and forward(x, kv_lengths, positions), which returns the
                shape of x, (batch, length, embed_dim)
    hidden_dim  features between the dense layers; None is 4 embed_dim
    dropout_p   probability, 0 to 1, of dropping a hidden feature or a feature of either residual branch in training
    raises      TypeError, ValueError
    """

    def __init__(self, attention: SelfAttention, *, hidden_dim: int | None = None, dropout_p: float = 0.0) -> None:
        super().__init__()
        is_other = isinstance(attention, nn.MultiheadAttention)
        if not isinstance(attention, nn.Module) or not hasattr(attention, "embed_dim") or is_other:
            raise TypeError(
                "attention must be a module with an embed_dim that takes (x, kv_lengths, positions), such as "
                f"SelfAttention, got {type(attention).__name__}"
            )
        embed_dim, dropout_p = attention.embed_dim, probability("dropout_p", dropout_p)
        hidden_dim = 4 * embed_dim if hidden_dim is None else positive_int("hidden_dim", hidden_dim)
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
        # before the norm computes
        check_input(x, self.attention.embed_dim, may_be_jagged=True)
        x = x + self.dropout(self.attention(self.attention_norm(x), kv_lengths, positions))
        return x + self.dropout(self.dense(self.dense_norm(x)))


def check_widths(blocks: Sequence[Any]) -> None:
    """ValueError for blocks whose attention differs in embed_dim."""
    widths = [block.attention.embed_dim for block in blocks]
    if len(set(widths)) > 1:
        raise ValueError(f"blocks must have the same embed_dim, got {widths}")


class Encoder(nn.Module):
    """A stack of blocks with a final norm.

    blocks  each takes (x, kv_lengths, positions), as EncoderBlock; masks may differ from block to block

    >>> blocks = [EncoderBlock(SelfAttention(64, 2, rope=10.0)) for _ in range(2)]
    >>> pixels = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    >>> Encoder(blocks)(torch.zeros(1, 256, 64), positions=pixels).shape
    torch.Size([1, 256, 64])
    """

    def __init__(self, blocks: Iterable[EncoderBlock]) -> None:
        super().__init__()
        found: list[Any] = listed(blocks, nn.Module, "blocks")
        for block in found:
            if not hasattr(block, "attention"):
                raise TypeError(f"blocks must have an attention, as EncoderBlock has, got {type(block).__name__}")
        check_widths(found)
        self.blocks = nn.ModuleList(found)
        self.norm = nn.LayerNorm(found[0].attention.embed_dim)

    def forward(
        self, x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape; kv_lengths and positions as SelfAttention."""
        for block in self.blocks:
            x = block(x, kv_lengths, positions)
        return self.norm(x)
