"""The sum of three tensors weighted by gates, and its gradients, in one pass each.

out = g0 x0 + g1 x1 + g2 x2        dx_i = g_i dout        dg_i = sum over features of dout x_i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

# elements of a tensor per program
ELEMENTS = 2048


# fmt: off
@triton.jit
def offset_of(strides, i_batch, i_head, o_token):
    """Offsets of tokens in a tensor (batch, heads, tokens, ...), as a column."""
    return i_batch * strides[0] + i_head * strides[1] + o_token[:, None] * strides[2]


@triton.jit(do_not_specialize=["n_tokens", "n_heads"])
def gated_sum_kernel(
    # (batch, heads, n_tokens, FEATURES) with a last stride of 1; gates (batch, heads, n_tokens, 3); dout or None
    x_0_ptr, x_1_ptr, x_2_ptr, gates_ptr, dout_ptr,
    # out; with dout, the gradients of the tensors, with the strides of out, and of the gates instead
    out_ptr, dx_0_ptr, dx_1_ptr, dx_2_ptr, dgates_ptr,
    x_0_strides, x_1_strides, x_2_strides, gates_strides, dout_strides, out_strides, dgates_strides,
    n_tokens, n_heads,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    i_head = (tl.program_id(0) % n_heads).to(tl.int64)
    n_blocks = tl.cdiv(n_tokens, ROWS)
    i_block = tl.program_id(0) // n_heads % n_blocks
    i_batch = (tl.program_id(0) // n_heads // n_blocks).to(tl.int64)
    o_token = (i_block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_feature = tl.arange(0, BLOCK)[None, :]
    m_token = o_token < n_tokens
    mask = m_token[:, None] & (o_feature < FEATURES)
    o_out = offset_of(out_strides, i_batch, i_head, o_token) + o_feature
    b_x_0 = tl.load(x_0_ptr + offset_of(x_0_strides, i_batch, i_head, o_token) + o_feature, mask=mask, other=0.0)
    b_x_1 = tl.load(x_1_ptr + offset_of(x_1_strides, i_batch, i_head, o_token) + o_feature, mask=mask, other=0.0)
    b_x_2 = tl.load(x_2_ptr + offset_of(x_2_strides, i_batch, i_head, o_token) + o_feature, mask=mask, other=0.0)
    p_gates = gates_ptr + offset_of(gates_strides, i_batch, i_head, o_token)
    b_gate_0 = tl.load(p_gates, mask=m_token[:, None], other=0.0).to(tl.float32)
    b_gate_1 = tl.load(p_gates + gates_strides[3], mask=m_token[:, None], other=0.0).to(tl.float32)
    b_gate_2 = tl.load(p_gates + 2 * gates_strides[3], mask=m_token[:, None], other=0.0).to(tl.float32)
    if dout_ptr is None:
        b_out = b_x_0.to(tl.float32) * b_gate_0 + b_x_1.to(tl.float32) * b_gate_1 + b_x_2.to(tl.float32) * b_gate_2
        tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        p_dout = dout_ptr + offset_of(dout_strides, i_batch, i_head, o_token) + o_feature
        b_dout = tl.load(p_dout, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_0_ptr + o_out, (b_dout * b_gate_0).to(dx_0_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_1_ptr + o_out, (b_dout * b_gate_1).to(dx_1_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_2_ptr + o_out, (b_dout * b_gate_2).to(dx_2_ptr.dtype.element_ty), mask=mask)
        p_dgates = dgates_ptr + i_batch * dgates_strides[0] + i_head * dgates_strides[1] + o_token * dgates_strides[2]
        dtype = dgates_ptr.dtype.element_ty
        tl.store(p_dgates, tl.sum(b_dout * b_x_0.to(tl.float32), 1).to(dtype), mask=m_token)
        tl.store(p_dgates + dgates_strides[3], tl.sum(b_dout * b_x_1.to(tl.float32), 1).to(dtype), mask=m_token)
        tl.store(p_dgates + 2 * dgates_strides[3], tl.sum(b_dout * b_x_2.to(tl.float32), 1).to(dtype), mask=m_token)
# fmt: on


def _launch(
    tensors: Sequence[torch.Tensor],
    gates: torch.Tensor,
    dout: torch.Tensor | None,
    out: torch.Tensor | None,
    grads: Sequence[torch.Tensor | None],
    dgates: torch.Tensor | None,
) -> None:
    batch, heads, length, features = tensors[0].shape
    like = out if out is not None else grads[0]
    assert like is not None
    if not like.numel():
        return
    block = triton.next_power_of_2(features)
    rows = max(1, min(ELEMENTS // block, triton.next_power_of_2(length)))
    gated_sum_kernel[(batch * heads * triton.cdiv(length, rows),)](
        *tensors,
        gates,
        dout,
        out,
        *grads,
        dgates,
        *(tensor.stride()[:3] for tensor in tensors),
        gates.stride(),
        None if dout is None else dout.stride()[:3],
        like.stride()[:3],
        None if dgates is None else dgates.stride(),
        length,
        heads,
        FEATURES=features,
        BLOCK=block,
        ROWS=rows,
        num_warps=4,
    )


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor like x (batch, heads, tokens, ...), in memory (batch, tokens, heads, ...)."""
    batch, heads, tokens, features = x.shape
    return x.new_empty(batch, tokens, heads, features).transpose(1, 2)


class GatedSum(torch.autograd.Function):
    """out (batch, heads, tokens, features) of gates (batch, heads, tokens, 3) and three tensors like out.

    In memory, out has tokens before heads, as the projection that follows reads it.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        tensors = tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
        ctx.save_for_backward(gates, *tensors)
        out = _tokens_first(tensors[0])
        _launch(tensors, gates, None, out, (None, None, None), None)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return _Gradients.apply(dout, *ctx.saved_tensors)


class _Gradients(torch.autograd.Function):
    """The gradients of GatedSum, which have none."""

    @staticmethod
    def forward(ctx: Any, dout: torch.Tensor, gates: torch.Tensor, *tensors: torch.Tensor) -> Any:  # noqa: ARG004
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dgates = _tokens_first(gates)
        # attention reads them head by head
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        _launch(tensors, gates, dout, None, grads, dgates)
        return dgates, *grads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        # anything else would be a silent wrong gradient
        raise RuntimeError("second derivatives of gated sums are not supported, as those of attention are not")
