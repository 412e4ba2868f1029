"""Gather of tokens by an order of each head: target[b, h, i] = source[b, h, order[b, g, i]], or 0 where that is -1.

Heads share the orders evenly: g = h * groups // heads. One launch reads and writes each token once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, axis_strides
from ...runtime.tensor_spec import TensorSpecs, new_in_order_of, specs_of
from .gather_scatter import ELEMENTS, load_rows, locate, store_rows
from .tile import head_base


# fmt: off
@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_heads", "heads_of_order"])
def gather_kernel(
    # inputs, order int32
    source_ptr, order_ptr,
    # output
    target_ptr,
    # in elements: (batch, head, row, first feature), and (batch, group) of the order, 0 where shared
    source_strides, order_strides, target_strides,
    n_rows, n_blocks, n_heads, heads_of_order,
    # compile time
    FEATURES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):
    i_batch, i_head, o_row, m_row = locate(n_rows, n_blocks, n_heads, ROWS)
    p_order = head_base(order_ptr, order_strides, i_batch, i_head // heads_of_order)
    o_from = tl.load(p_order + o_row, mask=m_row, other=-1)
    b_rows = load_rows(source_ptr, source_strides, i_batch, i_head, o_from.to(tl.int64), o_from >= 0, FEATURES, DIM)
    store_rows(target_ptr, target_strides, i_batch, i_head, o_row.to(tl.int64), m_row, b_rows, FEATURES, DIM)
# fmt: on


@functools.lru_cache(maxsize=1024)
def _gather_launch(specs: TensorSpecs, device: torch.device) -> Launch:  # noqa: ARG001  cache key of the device
    """specs: of source, order and target."""
    source, order, target = specs.tensors
    batch, heads, n_rows, features = target.shape
    dim = triton.next_power_of_2(features)
    rows = max(1, min(ELEMENTS // dim, 128))
    n_blocks = -(-n_rows // rows)
    strides = {
        "source_strides": (*source.strides[:3], 0),
        "order_strides": axis_strides(order.shape),
        "target_strides": (*target.strides[:3], 0),
    }
    sizes = {"n_rows": n_rows, "n_blocks": n_blocks, "n_heads": heads, "heads_of_order": heads // order.shape[1]}
    constants = {"FEATURES": features, "DIM": dim, "ROWS": rows, "num_warps": 8}
    return Launch(gather_kernel, (n_blocks * batch * heads,), strides | sizes | constants)


def gather_tokens(source: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tokens of a tensor in another order, in its memory order.

    source  (batch, heads, length, features)
    order   int32 (batch | 1, groups, new length), contiguous: the token of each place, -1 for zeros; groups divides
            heads
    """
    target = new_in_order_of(source, source.shape[3], order.shape[2])
    if source.stride(3) != 1:
        source = source.contiguous()
    _gather_launch(specs_of(source, order, target), source.device)(source, order, target)
    return target
