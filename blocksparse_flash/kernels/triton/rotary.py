"""Rotary positions in one pass. PyTorch operations read and write each tensor some nine times, in its own type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.tensor_spec import new_in_order_of

# elements per program
ELEMENTS = 4096


# fmt: off
@triton.jit(do_not_specialize=["n_tokens", "n_heads"])
def rotary_kernel(
    # x and out (batch, heads, n_tokens, 2 HALF) with a last stride of 1; float32 cos, sin (batch | 1, n_tokens, HALF)
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_strides, out_strides, table_batches, n_tokens, n_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SIGN: tl.constexpr,
):
    """Rotates by SIGN (1 or -1) times the angles."""
    # heads of a token are neighbors: they share cos and sin
    i_head = (tl.program_id(0) % n_heads).to(tl.int64)
    n_blocks = tl.cdiv(n_tokens, ROWS)
    i_block = tl.program_id(0) // n_heads % n_blocks
    i_batch = (tl.program_id(0) // n_heads // n_blocks).to(tl.int64)
    o_token = i_block * ROWS + tl.arange(0, ROWS)
    o_pair = tl.arange(0, BLOCK)
    mask = (o_token < n_tokens)[:, None] & (o_pair < HALF)[None, :]
    o_token = o_token.to(tl.int64)[:, None]
    o_table = (i_batch * table_batches + o_token) * HALF + o_pair[None, :]
    b_cos = tl.load(cos_ptr + o_table, mask=mask, other=0.0)
    b_sin = tl.load(sin_ptr + o_table, mask=mask, other=0.0) * SIGN
    p_x = x_ptr + i_batch * x_strides[0] + i_head * x_strides[1] + o_token * x_strides[2] + o_pair[None, :]
    b_left = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_right = tl.load(p_x + HALF, mask=mask, other=0.0).to(tl.float32)
    p_out = out_ptr + i_batch * out_strides[0] + i_head * out_strides[1] + o_token * out_strides[2] + o_pair[None, :]
    tl.store(p_out, (b_left * b_cos - b_right * b_sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(p_out + HALF, (b_right * b_cos + b_left * b_sin).to(out_ptr.dtype.element_ty), mask=mask)
# fmt: on


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_inverse: bool) -> torch.Tensor:
    """x (batch, heads, length, head_dim) rotated by the angles, or back.

    cos, sin  float32 (length, head_dim / 2) or (batch | 1, 1, length, head_dim / 2)
    returns   a tensor in the memory order of x
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, heads, length, head_dim = x.shape
    half = head_dim // 2
    out = new_in_order_of(x, head_dim)
    if out.numel():
        block = triton.next_power_of_2(half)
        rows = max(1, min(ELEMENTS // (2 * block), triton.next_power_of_2(length)))
        rotary_kernel[(batch * heads * triton.cdiv(length, rows),)](
            x_ptr=x,
            cos_ptr=cos,
            sin_ptr=sin,
            out_ptr=out,
            x_strides=x.stride()[:3],
            out_strides=out.stride()[:3],
            table_batches=length if cos.dim() == 4 and cos.shape[0] > 1 else 0,
            n_tokens=length,
            n_heads=heads,
            HALF=half,
            BLOCK=block,
            ROWS=rows,
            SIGN=-1 if is_inverse else 1,
            num_warps=4,
        )
    return out
