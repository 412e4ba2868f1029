"""merge: combines attention over disjoint sets of keys into attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks.checks import check_tensor
from .runtime import tracing
from .validation import DTYPES


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in named.items():
        check_tensor(name, tensor)
        found = tracing.unsupported_tensor(name, tensor)
        # merge works on DTensors, if all four are
        if found is not None and not (found[0] == "a DTensor" and all(type(t) is type(tensor) for t in named.values())):
            raise ValueError(f"{name} must be a dense, strided tensor as the others are, got {found[0]}; {found[1]}")
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be floating point, float16, bfloat16, float32 or float64, got {tensor.dtype}; "
                f"pass {name}.float()"
            )
        if tensor.device != out_a.device:
            raise ValueError(f"{name} must be on out_a's device {out_a.device}, got {tensor.device}: use .to(device)")
    if out_a.dim() != 4:
        raise ValueError(f"out_a must have shape (batch, heads, q_len, v_head_dim), got {tuple(out_a.shape)}")
    for name, tensor, expected in (
        ("out_b", out_b, out_a.shape),
        ("lse_a", lse_a, out_a.shape[:3]),
        ("lse_b", lse_b, out_a.shape[:3]),
    ):
        if tensor.shape != expected:
            raise ValueError(f"{name} must have shape {tuple(expected)}, to match out_a, got {tuple(tensor.shape)}")
    if out_b.dtype != out_a.dtype:
        raise ValueError(f"out_b must have out_a's dtype {out_a.dtype}, got {out_b.dtype}: use .to(dtype)")
    if lse_b.dtype != lse_a.dtype:
        raise ValueError(f"lse_b must have lse_a's dtype {lse_a.dtype}, got {lse_b.dtype}: use .to(dtype)")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of a and b together, from the results over each. Differentiable.

    out_a, out_b  (batch, heads, q_len, v_head_dim)
    lse_a, lse_b  (batch, heads, q_len), as attention_with_lse returns them; -inf for a row without keys
    returns       (out, lse) as attention_with_lse returns them for all keys, in the dtypes of out_a and lse_a. A key in
                  both sets would count twice, and so would sinks: give them to one of the two calls. A row without keys
                  in both stays 0 and -inf, and its gradients are 0
    raises        TypeError, ValueError for tensors that do not fit together

    Associative and commutative, up to rounding. Kernels combine tiles by the same rule (FlashAttention, section 3.1).

    >>> out, lse = merge(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), -torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), round(lse.item(), 3)
    ([0.0, 0.0], 0.693)
    """
    _check(out_a, lse_a, out_b, lse_b)
    highest = torch.maximum(lse_a, lse_b).detach()
    # a row without keys keeps -inf; a finite pivot avoids -inf - (-inf) = nan
    pivot = torch.where(highest == -torch.inf, 0.0, highest)
    weight_a, weight_b = (lse_a - pivot).exp(), (lse_b - pivot).exp()
    total = weight_a + weight_b
    is_empty = total == 0
    # empty rows divide by 1: the quotient and its gradient are 0
    divisor = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, -torch.inf, pivot + divisor.log())
    share_a, share_b = (weight_a / divisor)[..., None], (weight_b / divisor)[..., None]
    return (share_a * out_a + share_b * out_b).to(out_a.dtype), lse
