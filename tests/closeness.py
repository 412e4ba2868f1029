"""When is a result right? The one tolerance of the whole test suite.

Knows tensors of shape (batch, heads, rows, columns), or (batch, heads, rows) for lse. Must not know which backend computed them.

A result must be, in every block of rows of every head, at most twice as far from float64 as PyTorch's plain computation in
the same type is, plus two roundings; a rounding is eps(dtype) * max |float64| of that block. Judging blocks one by one is
the point: one wrong tile among a thousand right ones fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

# rows judged together: few enough that a wrong tile cannot hide, enough that the reference's own error is not an accident
BLOCK_ROWS = 32


def assert_as_accurate(
    actual: Tensor,
    reference_same_dtype: Tensor,
    reference_float64: Tensor,
    *,
    block_rows: int = BLOCK_ROWS,
    name: str,
) -> None:
    """Raise AssertionError unless `actual` is as accurate as the tolerance of this file asks.

    actual                what is tested
    reference_same_dtype  the plain computation in actual's dtype (float32 for lse, whatever the type of q)
    reference_float64     the truth; where it is infinite, actual must be equally infinite
    name                  says in the message what was compared
    """
    shape = tuple(reference_float64.shape)
    assert tuple(actual.shape) == shape, f"{name}: expected shape {shape}, got {tuple(actual.shape)}"
    assert tuple(reference_same_dtype.shape) == shape, (
        f"{name}: references of shapes {shape} and {reference_same_dtype.shape}"
    )
    assert actual.dtype == reference_same_dtype.dtype, (
        f"{name}: expected {reference_same_dtype.dtype}, got {actual.dtype}"
    )
    assert reference_float64.dtype == torch.float64, f"{name}: the truth must be float64, got {reference_float64.dtype}"
    assert not reference_float64.isnan().any(), f"{name}: the float64 reference has NaN, so it proves nothing"
    assert not reference_same_dtype.isnan().any(), f"{name}: the same-dtype reference has NaN, so it proves nothing"
    eps = torch.finfo(actual.dtype).eps
    actual, plain, truth = (t.detach().cpu().double() for t in (actual, reference_same_dtype, reference_float64))

    wrong = actual.isnan() | ((actual.isinf() | truth.isinf()) & (actual != truth))
    assert not wrong.any(), f"{name}: {_describe(wrong, actual, truth)} (NaN or infinity)"
    plain, actual, truth = (t.masked_fill(truth.isinf(), 0.0) for t in (plain, actual, truth))

    rounding = eps * _block_max(truth, block_rows)
    allowed = 2 * _block_max(plain - truth, block_rows) + 2 * rounding
    too_far = _row_max(actual - truth) > allowed.repeat_interleave(block_rows, dim=-1)[..., : _row_max(truth).shape[-1]]
    if too_far.any():
        worst = (_block_max(actual - truth, block_rows) / allowed).max()
        row = tuple(int(i) for i in too_far.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(too_far.sum())} of {too_far.numel()} rows are too far from float64, the first at {row}: "
            f"off by {_row_max(actual - truth)[row]:.3g}; the worst block of {block_rows} rows is {worst:.3g} times as far "
            "as allowed (twice the same-dtype reference's distance plus two roundings)"
        )


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
