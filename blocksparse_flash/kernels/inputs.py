"""The tensors of a backward call and of a call on paged keys, the same for every backend."""

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


class Pages(NamedTuple):
    """Which keys of a paged cache each sequence has, and which of them its queries attend to.

    table       int32 (batch, max_pages): ids of the pages of each sequence, in order
    kv_lengths  integers (batch,): keys of each sequence, those of the queries last
    selected    integers (batch, 1 | kv_heads | heads, k): numbers of pages in their sequence, each counted once; others
                than 0 .. max_pages - 1 are ignored. None is all pages
    window      keys up to and with that of a query that it attends to; None is all
    """

    table: Tensor
    kv_lengths: Tensor
    selected: Tensor | None
    window: int | None
