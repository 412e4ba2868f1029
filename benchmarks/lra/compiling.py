"""Compilation of the layers of a model whose inputs vary in length."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse_flash.nn import EncoderBlock, RotaryTable


def compile_around_attention(block: EncoderBlock) -> None:
    """Compiles a layer before and after its attention, once for all lengths; the layout of attention has one length."""
    attention = block.attention

    def before(x: Tensor, positions: Tensor | RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        return attention.project(block.attention_norm(x), positions)

    def after(x: Tensor, heads: Tensor) -> Tensor:
        x = x + block.dropout(attention.unite(heads))
        return x + block.dropout(block.dense(block.dense_norm(x)))

    fused_before, fused_after = torch.compile(before, dynamic=True), torch.compile(after, dynamic=True)

    def forward(x: Tensor, kv_lengths: Tensor | None = None, positions: Tensor | RotaryTable | None = None) -> Tensor:
        return fused_after(x, attention.attend(*fused_before(x, positions), kv_lengths))

    block.forward = forward  # type: ignore[method-assign]
