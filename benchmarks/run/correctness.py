"""Compares outputs and gradients of sampled rows with float32, before anything is timed.

The incoming gradient is zero in all other rows, so the sampled rows determine dq, dk and dv, and memory stays
O(length).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocksparse_flash import BlockLayout

# relative to the largest value; bfloat16 rounds by 1/256, and gradients sum products of rounded numbers
TOLERANCE = 0.02

# queries, int64 (rows,) -> the keys they attend to, bool (rows, kv_len); None is all keys
Mask = Callable[[Tensor], Tensor] | None


def mask_of(layout: BlockLayout | None) -> Mask:
    """The mask of the first batch and head of a layout, read row by row."""
    if layout is None:
        return None
    return lambda rows: torch.cat([layout.crop(row, row + 1).to_dense()[0, 0] for row in rows.tolist()])


def relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """The largest difference, relative to the largest expected value; NaN if there is one."""
    return (found.float() - expected).abs().max() / expected.abs().max()


def worst_errors(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], mask: Mask, *, n_rows: int = 64
) -> dict[str, float]:
    """Relative error of out, and of dq, dk and dv if the output has gradients, over the first, the last and other rows.

    call    q, k, v (batch, heads, length, head_dim) -> out as q
    inputs  q, k, v; k and v may have fewer heads if the output has no gradients
    """
    q, k, v = inputs
    batch, heads, q_len, _ = q.shape
    out = call(q, k, v)
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.tensor([0, q_len - 1]), torch.randperm(q_len, generator=generator)])
    rows = torch.unique(rows[:n_rows]).to(q.device)
    attends = torch.ones(len(rows), k.shape[2], dtype=torch.bool) if mask is None else mask(rows)
    dout = torch.zeros_like(out)
    dout[:, :, rows] = torch.randn(out[:, :, rows].shape, generator=generator).to(out)
    found = {"out": out.detach()[:, :, rows]}
    if out.requires_grad:
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    # one head at a time: a million keys of all heads in float32 would not fit
    for b, head in [(b, head) for b in range(batch) for head in range(heads)]:
        kv_head = head * k.shape[1] // heads
        tensors = q[b, head], k[b, kv_head], v[b, kv_head]
        expected = _expected(tensors, dout[b, head], rows, attends.to(q.device))
        for name in found:
            errors[name].append(relative_error(found[name][b, head], expected[name]))
    # Python's max() may drop a NaN
    return {name: torch.stack(each).max().item() for name, each in errors.items()}


def _expected(inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, rows: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Output of the rows and all gradients of one head in float32; dout (length, head_dim), mask (rows, length)."""
    with torch.enable_grad():
        q, k, v = (x.detach().float().requires_grad_() for x in inputs)
        scores = q[rows] @ k.T / math.sqrt(q.shape[1])
        out = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout[rows].float())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def is_right(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor], mask: Mask, label: str
) -> bool:
    """Whether output and gradients are right; prints their errors if not."""
    errors = worst_errors(call, inputs, mask)
    if all(error <= TOLERANCE for error in errors.values()):
        return True
    found = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    print(f"{label}: WRONG, relative errors {found}; not timed", flush=True)
    return False
