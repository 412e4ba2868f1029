"""Compares outputs and gradients of sampled rows with float32, before anything is timed.
The incoming gradient is zero in all other rows, so the sampled rows determine dq, dk and dv, and memory stays
O(length).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .patterns import Pattern

# relative to the largest value; bfloat16 rounds by 1/256, and gradients sum products of rounded numbers
TOLERANCE = 0.02


def relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """The largest difference, relative to the largest expected value; NaN if there is one."""
    return (found.float() - expected).abs().max() / expected.abs().max()


def worst_errors(
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    pattern: Pattern,
    *,
    n_rows: int = 64,
) -> dict[str, float]:
    """Relative error of out, and of dq, dk and dv if the output has gradients, over n_rows rows.

    call    q, k, v (batch, heads, length, head_dim) -> out of the same shape
    inputs  q, k, v, which require gradients
    """
    q, k, v = inputs
    batch, heads, length, _ = q.shape
    out = call(q, k, v)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(length, generator=generator)[:n_rows].to(q.device)
    mask = torch.from_numpy(pattern.blocks).to(q.device)[rows // pattern.block_size]
    mask = mask.repeat_interleave(pattern.block_size, dim=1)
    if pattern.causal:
        mask &= torch.arange(length, device=q.device) <= rows[:, None]
    dout = torch.zeros_like(out)
    drawn = torch.randn(out[:, :, rows].shape, generator=generator)
    dout[:, :, rows] = drawn.to(out)
    found = {"out": out.detach()[:, :, rows]}
    if out.requires_grad:
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs, dout), strict=True))
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    # one head at a time: a million keys of all heads in float32 would not fit
    for index in [(b, h) for b in range(batch) for h in range(heads)]:
        expected = _expected((q[index], k[index], v[index]), dout[index], rows, mask)
        for name in found:
            errors[name].append(relative_error(found[name][index], expected[name]))
    # Python's max() may drop a NaN
    return {name: torch.stack(each).max().item() for name, each in errors.items()}


def _expected(inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Output of the rows and all gradients of one head in float32; dout (length, head_dim), mask (rows, length)."""
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    scores = q[rows] @ k.T / math.sqrt(q.shape[1])
    out = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[rows].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
