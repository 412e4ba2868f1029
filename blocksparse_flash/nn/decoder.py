"""Pre-norm decoder blocks, and a stack of them with a KV cache for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.checks import listed
from ..layout import BlockLayout
from .arguments import check_input, positive_int, probability
from .kv_cache import KVCache, check_is_cache
from .layers import SelfAttention, check_widths
from .positions import RotaryTable


class DecoderBlock(nn.Module):
    """Pre-norm block of a decoder: x + attention(norm(x)), then x + dense(norm(x)), as in Llama.

    Both norms are RMSNorm; the dense layers are gated, down(silu(gate(x)) * up(x)), without bias (Shazeer,
    arXiv:2002.05202, SwiGLU).

    attention   SelfAttention with causal=True or a causal layout
    hidden_dim  features between the dense layers; None is 4 embed_dim
    dropout_p   probability, 0 to 1, of dropping a hidden feature or a feature of either residual branch in training;
                default 0.0
    raises      TypeError, ValueError. If the layout is a function, it is checked at the first call with a cache

    >>> block = DecoderBlock(SelfAttention(64, 4, kv_heads=2, rope=10000.0, causal=True))
    >>> block(torch.zeros(2, 256, 64)).shape
    torch.Size([2, 256, 64])
    """

    def __init__(self, attention: SelfAttention, *, hidden_dim: int | None = None, dropout_p: float = 0.0) -> None:
        super().__init__()
        if not isinstance(attention, SelfAttention):
            raise TypeError(f"attention must be a SelfAttention, got {type(attention).__name__}")
        if not attention.causal:
            if attention.layout is None:
                raise ValueError("attention must be causal in a decoder: SelfAttention(..., causal=True)")
            if isinstance(attention.layout, BlockLayout):
                attention.layout.assert_causal()
        embed_dim, dropout_p = attention.embed_dim, probability("dropout_p", dropout_p)
        hidden_dim = 4 * embed_dim if hidden_dim is None else positive_int("hidden_dim", hidden_dim)
        self.attention_norm = nn.RMSNorm(embed_dim)
        self.attention = attention
        self.dense_norm = nn.RMSNorm(embed_dim)
        # gate and up in one product
        self.gate_up = nn.Linear(embed_dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, embed_dim, bias=False)
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self,
        x: Tensor,
        kv_lengths: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape; kv_lengths, positions and cache as SelfAttention."""
        # before the norm computes
        check_input(x, self.attention.embed_dim, may_be_jagged=True)
        if cache is None:
            return self._transform(x, kv_lengths, positions, None)
        check_is_cache(cache)
        with cache.restored_on_error():
            return self._transform(x, kv_lengths, positions, cache)

    def _transform(
        self, x: Tensor, kv_lengths: Tensor | None, positions: Tensor | RotaryTable | None, cache: KVCache | None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), kv_lengths, positions, cache=cache))
        gate, up = self.gate_up(self.dense_norm(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(self.dropout(nn.functional.silu(gate) * up)))


class Decoder(nn.Module):
    """A stack of decoder blocks with a final RMSNorm.

    blocks  DecoderBlock each; layouts may differ from block to block
    raises  TypeError, ValueError

    >>> decoder = Decoder(DecoderBlock(SelfAttention(64, 4, rope=10000.0, causal=True)) for _ in range(2))
    >>> caches = decoder.new_caches(batch=1, max_length=100)
    >>> with torch.no_grad():
    ...     prompt = decoder(torch.zeros(1, 80, 64), caches=caches)
    ...     step = decoder(torch.zeros(1, 1, 64), caches=caches)
    >>> prompt.shape, step.shape, caches[0].length
    (torch.Size([1, 80, 64]), torch.Size([1, 1, 64]), 81)
    """

    def __init__(self, blocks: Iterable[DecoderBlock]) -> None:
        super().__init__()
        found: list[Any] = listed(blocks, DecoderBlock, "blocks")
        check_widths(found)
        self.blocks = nn.ModuleList(found)
        self.norm = nn.RMSNorm(found[0].attention.embed_dim)

    def new_caches(self, batch: int, max_length: int, *, dtype: torch.dtype | None = None) -> list[KVCache]:
        """An empty KVCache for each block.

        batch, max_length, dtype  as `SelfAttention.new_cache`
        """
        attentions: list[Any] = [block.attention for block in self.blocks]
        return [attention.new_cache(batch, max_length, dtype=dtype) for attention in attentions]

    def forward(
        self,
        x: Tensor,
        kv_lengths: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """x (batch, length, embed_dim) to the same shape.

        kv_lengths, positions  as SelfAttention
        caches  one for each block, from `new_caches`; x then are the tokens after those in the caches. If the call
                raises, the caches hold the tokens from before it
        """
        if caches is None:
            for block in self.blocks:
                x = block(x, kv_lengths, positions)
            return self.norm(x)
        self._check_caches(caches)
        with ExitStack() as restored:
            for cache in caches:
                restored.enter_context(cache.restored_on_error())
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, kv_lengths, positions, cache=cache)
            return self.norm(x)

    def _check_caches(self, caches: Sequence[KVCache]) -> None:
        if not isinstance(caches, Sequence):
            raise TypeError(
                f"caches must be a list of one KVCache for each block, got {type(caches).__name__}: "
                "decoder.new_caches(batch, max_length) makes them"
            )
        if len(caches) != len(self.blocks):
            raise ValueError(
                f"caches must be one for each of the {len(self.blocks)} blocks, got {len(caches)}: "
                "decoder.new_caches(batch, max_length) makes them"
            )
        for i, cache in enumerate(caches):
            check_is_cache(cache, f"caches[{i}]")
        places = {id(cache): i for i, cache in enumerate(caches)}
        for i, cache in enumerate(caches):
            if (last := places[id(cache)]) != i:
                # blocks may share a layer, whose cache would then accept the keys of both
                raise ValueError(
                    f"caches must be one for each block, but caches[{i}] and caches[{last}] are the same: "
                    "decoder.new_caches(batch, max_length) makes them"
                )
        lengths = [cache.length for cache in caches]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"caches must hold the same tokens, got {lengths} tokens: cache.truncate({min(lengths)}) of each keeps "
                "those that all hold"
            )
