"""The one tolerance of the test suite, for tensors (batch, heads, rows, columns) and lse (batch, heads, rows).

In every block of rows of every head a result must satisfy

    max |actual - float64|  <=  2 * max |plain - float64|  +  2 * eps(dtype) * max |float64|

where `plain` is PyTorch's plain computation in the same type. Below the smallest normal number, the last term uses that
number. Each block is judged by itself, so that one wrong tile among a thousand right ones fails.

In half types the error comes from rounding results, and every block of the plain computation has it. In float32 and
float64 it comes from the order of sums, and the errors of two valid orders differ up to tenfold within a block. There
the plain distance is the maximum over the whole tensor, a few millionths.

Gradients meet the tolerance if lse is not large. A backward computes p = exp(s - lse) with lse in float32. Up to four
roundings (the sum, to and from base 2, s - lse) each change p by a relative error of up to |lse| 2^-24:
    |lse| up to 4096    4 * 2^12 * 2^-24 = 2^-10: one rounding of float16, an eighth of one of bfloat16
    float32             a rounding is 2^-23, so plain.py computes gradients from a rounded lse too
    |lse| 1e6           up to about a quarter in any type
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

# rows judged together: few enough to expose one wrong tile, enough that the plain error is not a matter of chance
BLOCK_ROWS = 64


def assert_as_accurate(
    actual: Tensor,
    reference_same_dtype: Tensor | Sequence[Tensor],
    reference_float64: Tensor,
    *,
    block_rows: int = BLOCK_ROWS,
    name: str,
) -> None:
    """Raise AssertionError unless `actual` meets the tolerance of this file.

    actual                the result to test
    reference_same_dtype  the plain computation in actual's dtype (for lse float32, whatever the type of q), or several
                          valid ones; the one farthest from float64 counts
    reference_float64     the truth; where it is infinite, actual must be the same infinity
    name                  names the tensor in the error message
    """
    plains = [reference_same_dtype] if isinstance(reference_same_dtype, Tensor) else list(reference_same_dtype)
    dtype, shape = actual.dtype, tuple(reference_float64.shape)
    assert tuple(actual.shape) == shape, f"{name}: expected shape {shape}, got {tuple(actual.shape)}"
    assert reference_float64.dtype == torch.float64, f"{name}: the truth must be float64, got {reference_float64.dtype}"
    assert not reference_float64.isnan().any(), f"{name}: the float64 reference has NaN, so it proves nothing"
    for plain in plains:
        assert tuple(plain.shape) == shape, f"{name}: references of shapes {shape} and {tuple(plain.shape)}"
        assert dtype == plain.dtype, f"{name}: expected {plain.dtype}, got {dtype}"
        assert not plain.isnan().any(), f"{name}: the same-dtype reference has NaN, so it proves nothing"
    actual, truth = (t.detach().to(actual.device).double() for t in (actual, reference_float64))

    wrong = actual.isnan() | ((actual.isinf() | truth.isinf()) & (actual != truth))
    assert not wrong.any(), f"{name}: {_describe(wrong, actual, truth)} (NaN or infinity)"
    infinite = truth.isinf()
    actual, truth = (t.masked_fill(infinite, 0.0) for t in (actual, truth))

    # one at a time: there may be many, and large
    distance = torch.zeros_like(_block_max(truth, block_rows))
    for plain in plains:
        plain64 = plain.detach().to(actual.device).double().masked_fill(infinite, 0.0)
        distance = torch.maximum(distance, _block_max(plain64 - truth, block_rows))
    if dtype in (torch.float32, torch.float64) and distance.numel():
        distance = distance.amax()
    largest = _block_max(truth, block_rows)
    # below 6e-5 float16 has fixed steps; a block of zeros has no rounding
    rounded = largest.clamp(min=torch.finfo(dtype).smallest_normal).where(largest > 0, 0.0)
    allowed = 2 * distance + 2 * torch.finfo(dtype).eps * rounded
    off = _row_max(actual - truth)
    too_far = off > allowed.repeat_interleave(block_rows, dim=-1)[..., : off.shape[-1]]
    if too_far.any():
        worst = (_block_max(actual - truth, block_rows) / allowed).nan_to_num(0).max()
        row = tuple(int(i) for i in too_far.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(too_far.sum())} of {too_far.numel()} rows are too far from float64, the first at {row}: "
            f"off by {off[row]:.3g}; the worst block of {block_rows} rows is {worst:.3g} times as far as allowed "
            "(twice the same-dtype reference's distance plus two roundings)"
        )


def buried(tensor: Tensor, *, by_token: bool = True) -> Tensor:
    """The same values as a (batch, heads, length, dim) view of a buffer full of NaN.

    by_token  the buffer is (batch, length, heads, dim), else (batch, heads, length, dim)
    """
    batch, heads, length, dim = tensor.shape
    if by_token:
        buffer = tensor.new_full((batch + 1, length + 7, heads + 1, dim + 8), torch.nan)
        view = buffer[:batch, 3 : 3 + length, :heads, :dim].transpose(1, 2)
    else:
        buffer = tensor.new_full((batch + 1, heads + 1, length + 7, dim + 8), torch.nan)
        view = buffer[:batch, :heads, 3 : 3 + length, :dim]
    view.copy_(tensor)
    return view


def buried_inputs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`buried` for q, k, v and dout, whose memory orders depend on the sizes: over many calls, all combinations."""
    q, k = tensors["q"], tensors["k"]
    orders = random.Random(q.shape[2] + 1000 * k.shape[2] + q.shape[3] + q.shape[1]).choices([False, True], k=4)
    by_token = dict(zip(("q", "k", "v", "dout"), orders, strict=True))
    return {
        name: buried(tensor, by_token=by_token[name]).detach() if name in by_token else tensor
        for name, tensor in tensors.items()
    }


def assert_in_input_order(inputs: Sequence[Tensor], out: Tensor, grads: Sequence[Tensor]) -> None:
    """Raises unless out lies in memory as q does, and dq, dk and dv as q, k and v. inputs: q, k and v."""
    for name, like, made in zip(("out", "dq", "dk", "dv"), (inputs[0], *inputs), (out, *grads), strict=True):
        assert_in_order_of(like, made, name)


def assert_in_order_of(like: Tensor, made: Tensor, name: str) -> None:
    """Raises unless a result lies in memory as an input does, heads of a token together or not, without gaps."""
    by_token = like.shape[1] > 1 and like.shape[2] > 1 and 0 < like.stride(1) < like.stride(2)
    whole = made.transpose(1, 2) if by_token else made
    assert whole.is_contiguous(), f"{name} of strides {made.stride()} for strides {like.stride()}"


def as_rows(values: Tensor) -> Tensor:
    """One value per head or block, reshaped like lse to (batch, heads, rows)."""
    # not reshape(1, -1, n): -1 is ambiguous for an empty tensor
    return values.reshape(1, math.prod(values.shape[:-1]), values.shape[-1])


def _row_max(values: Tensor) -> Tensor:
    """max |value| per row: (batch, heads, rows) from (batch, heads, rows, columns) or lse."""
    if values.dim() == 3:
        return values.abs()
    return values.abs().amax(dim=-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def _block_max(values: Tensor, block_rows: int) -> Tensor:
    """max |value| per block of rows: (batch, heads, blocks)."""
    rows = _row_max(values)
    n_blocks = -(-rows.shape[-1] // block_rows)
    padded = torch.nn.functional.pad(rows, (0, n_blocks * block_rows - rows.shape[-1]))
    return padded.reshape(*rows.shape[:-1], n_blocks, block_rows).amax(dim=-1)


def _describe(wrong: Tensor, actual: Tensor, truth: Tensor) -> str:
    where = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {where}: "
        f"{actual[where].item():.9g}, expected {truth[where].item():.9g}"
    )
