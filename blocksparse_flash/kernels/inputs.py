"""The tensors of a backward call, the same for every backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BackwardInputs(NamedTuple):
    """The gradients of out and lse, and the inputs and results of the forward.

    dout     (batch, heads, q_len, v_head_dim)
    dlse     (batch, heads, q_len); None for zeros
    q, k, v  (batch, heads | kv_heads, q_len | kv_len, head_dim | v_head_dim)
    out      as dout
    lse      (batch, heads, q_len), float32, or float64 with float64 inputs
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
