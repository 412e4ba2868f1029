"""When is a result right? The one tolerance of the whole test suite.

Knows tensors of shape (batch, heads, rows, columns), or (batch, heads, rows) for lse. Must not know which backend computed
them.

A result must be, in every block of rows of every head, at most twice as far from float64 as PyTorch's plain computation in
the same type is, plus two roundings; a rounding is eps(dtype) * max |float64| of that block, below the smallest normal number
the step between two numbers, eps(dtype) times it. Judging blocks one by one is
the point: one wrong tile among a thousand right ones fails.

Half types are off by what storing a number costs, so each block of the plain computation shows it. In float32 and float64 all
that is off is the arithmetic, and how far a block is off is an accident of the order of its sums: two honest orders differ up
to tenfold in a block. There the plain distance is the largest of the whole tensor, some millionths.

Gradients are within it where lse is not large. A backward has p = exp(s - lse), and lse is float32: each rounding of it, of which
there are up to four (of the sum, out of base 2, into it, of s - lse), is up to |lse| 2^-24 and changes p by as much of itself.
    |lse| up to 4096: 4 * 2^12 * 2^-24 = 2^-10, one rounding of float16, an eighth of one of bfloat16
    float32: a rounding is 2^-23, so it is the plain computation by an lse (plain.py) that a result is measured with
    |lse| 1e6: up to 24 % in any type
test_scores.py holds every backend to the first and shows the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# rows judged together: few enough that a wrong tile cannot hide, enough that the reference's own error is not an accident
BLOCK_ROWS = 64


def assert_as_accurate(
    actual: Tensor,
    reference_same_dtype: Tensor | Sequence[Tensor],
    reference_float64: Tensor,
    *,
    block_rows: int = BLOCK_ROWS,
    name: str,
) -> None:
    """Raise AssertionError unless `actual` is as accurate as the tolerance of this file asks.

    actual                what is tested
    reference_same_dtype  the plain computation in actual's dtype (float32 for lse, whatever the type of q), or several of
                          equal standing, of which the farthest counts
    reference_float64     the truth; where it is infinite, actual must be equally infinite
    name                  says in the message what was compared
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

    # one after another: there may be many, of large tensors
    distance = torch.zeros_like(_block_max(truth, block_rows))
    for plain in plains:
        plain64 = plain.detach().to(actual.device).double().masked_fill(infinite, 0.0)
        distance = torch.maximum(distance, _block_max(plain64 - truth, block_rows))
    if dtype in (torch.float32, torch.float64) and distance.numel():
        distance = distance.amax()
    largest = _block_max(truth, block_rows)
    # numbers of float16 below 6e-5 do not come closer to each other; a block of zeros has nothing to round
    rounded = largest.clamp(min=torch.finfo(dtype).smallest_normal).where(largest > 0, 0.0)
    allowed = 2 * distance + 2 * torch.finfo(dtype).eps * rounded
    off = _row_max(actual - truth)
    too_far = off > allowed.repeat_interleave(block_rows, dim=-1)[..., : off.shape[-1]]
    if too_far.any():
        worst = (_block_max(actual - truth, block_rows) / allowed).nan_to_num(0).max()
        row = tuple(int(i) for i in too_far.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(too_far.sum())} of {too_far.numel()} rows are too far from float64, the first at {row}: "
            f"off by {off[row]:.3g}; the worst block of {block_rows} rows is {worst:.3g} times as far as allowed (twice the "
            "same-dtype reference's distance plus two roundings)"
        )


def buried(tensor: Tensor) -> Tensor:
    """The same values as a view (batch, heads, length, dim) of a buffer (batch, length, heads, dim) with NaN all around."""
    batch, heads, length, dim = tensor.shape
    buffer = tensor.new_full((batch + 1, length + 7, heads + 1, dim + 8), torch.nan)
    view = buffer[:batch, 3 : 3 + length, :heads, :dim].transpose(1, 2)
    view.copy_(tensor)
    return view


def as_rows(values: Tensor) -> Tensor:
    """A number a head or a block, as lse has one a row."""
    # a layout without tiles has no bias, and -1 of nothing could be any number
    return values.reshape(1, math.prod(values.shape[:-1]), values.shape[-1])


def _row_max(values: Tensor) -> Tensor:
    """The largest |value| of each row: (batch, heads, rows) from (batch, heads, rows, columns); lse has one value a row."""
    if values.dim() == 3:
        return values.abs()
    return values.abs().amax(dim=-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def _block_max(values: Tensor, block_rows: int) -> Tensor:
    """The largest |value| of each block of rows: (batch, heads, blocks)."""
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
