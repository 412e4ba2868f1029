"""The tolerance of the test suite accepts valid results and rejects wrong ones."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.closeness import BLOCK_ROWS, assert_as_accurate

BATCH, HEADS, ROWS, COLUMNS = 2, 3, 20 * BLOCK_ROWS + 5, 16


def results(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An accurate result, the plain one in the same type (each off by at most two roundings), and the float64 truth."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(BATCH, HEADS, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    plain, actual = (
        (truth * (1 + eps * (2 * torch.rand(truth.shape, generator=generator, dtype=torch.float64) - 1))).to(dtype)
        for _ in range(2)
    )
    return actual, plain, truth


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_accurate_result_passes(dtype):
    assert_as_accurate(*results(dtype), name="out")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_result_itself_passes(dtype):
    _, plain, truth = results(dtype)
    assert_as_accurate(plain, plain, truth, name="out")


def test_one_nan_fails():
    actual, plain, truth = results(torch.float32)
    actual[1, 2, 77, 3] = torch.nan
    with pytest.raises(AssertionError, match=r"out: 1 of .* first at \(1, 2, 77, 3\): nan.*NaN"):
        assert_as_accurate(actual, plain, truth, name="out")


def test_a_nan_in_the_truth_is_an_error():
    actual, plain, truth = results(torch.float32)
    truth[0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="proves nothing"):
        assert_as_accurate(actual, plain, truth, name="out")


def test_a_nan_in_the_plain_result_is_an_error():
    actual, plain, truth = results(torch.float32)
    plain[0, 0, :BLOCK_ROWS] = torch.nan
    with pytest.raises(AssertionError, match="same-dtype reference has NaN"):
        assert_as_accurate(actual, plain, truth, name="out")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinity_fails(value):
    actual, plain, truth = results(torch.float32)
    actual[0, 0, 0, 0] = value
    with pytest.raises(AssertionError, match="infinity"):
        assert_as_accurate(actual, plain, truth, name="out")


def test_infinite_truth_needs_the_same_infinity():
    lse = torch.zeros(1, 1, 64, dtype=torch.float64)
    lse[..., 5] = -torch.inf
    assert_as_accurate(lse.float(), lse.float(), lse, name="lse")
    for wrong in (0.0, torch.inf, -1e30):
        actual = lse.float().clone()
        actual[..., 5] = wrong
        with pytest.raises(AssertionError, match=r"lse: 1 of 64 .* expected -inf"):
            assert_as_accurate(actual, lse.float(), lse, name="lse")


@pytest.mark.parametrize("shape", [(BATCH, HEADS, ROWS), (BATCH, HEADS, ROWS, 1), (BATCH, HEADS, COLUMNS, ROWS)])
def test_a_wrong_shape_fails(shape):
    actual, plain, truth = results(torch.float32)
    with pytest.raises(AssertionError, match="expected shape"):
        assert_as_accurate(actual.flatten()[: torch.Size(shape).numel()].reshape(shape), plain, truth, name="out")


def test_a_wrong_dtype_fails():
    actual, plain, truth = results(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"expected torch.bfloat16, got torch.float32"):
        assert_as_accurate(actual.float(), plain, truth, name="out")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swapped_rows_fail(dtype):
    actual, plain, truth = results(dtype)
    actual[0, 1, [8, 9]] = actual[0, 1, [9, 8]]
    with pytest.raises(AssertionError, match=r"first at \(0, 1, 8"):
        assert_as_accurate(actual, plain, truth, name="out")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", [0, 7 * BLOCK_ROWS, 20 * BLOCK_ROWS])
def test_one_bad_block_among_many_good_ones_fails(dtype, row):
    """A block of small numbers, each off by 40 roundings (in float32 and float64 by a thousandth).

    In half types this error is smaller than the largest one of the whole tensor.
    """
    actual, plain, truth = results(dtype)
    is_half = dtype in (torch.float16, torch.bfloat16)
    block = (1, 1, slice(row, row + BLOCK_ROWS))
    small = 1e-2 * truth[block]
    truth[block], plain[block] = small, small.to(dtype)
    actual[block] = (small * (1 + (40 * torch.finfo(dtype).eps if is_half else 1e-3))).to(dtype)
    assert not is_half or (actual.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max()
    with pytest.raises(AssertionError, match=r"first at \(1, 1, "):
        assert_as_accurate(actual, plain, truth, name="out")


def test_a_block_of_zeros_fails_where_the_truth_is_not_zero():
    actual, plain, truth = results(torch.bfloat16)
    actual[0, 2, BLOCK_ROWS : 2 * BLOCK_ROWS] = 0
    with pytest.raises(AssertionError, match=rf"{BLOCK_ROWS} of .* rows are too far"):
        assert_as_accurate(actual, plain, truth, name="dq")


def test_noise_where_the_truth_is_zero_fails():
    actual, plain, truth = results(torch.bfloat16)
    for tensor in (actual, plain, truth):
        tensor[0, 0, :BLOCK_ROWS] = 0
    actual[0, 0, 3, 3] = 1e-30
    with pytest.raises(AssertionError, match=r"1 of .* first at \(0, 0, 3\)"):
        assert_as_accurate(actual, plain, truth, name="dk")


@pytest.mark.parametrize(("steps", "is_right"), [(998, True), (1002, True), (997, False), (1003, False)])
def test_below_the_smallest_normal_number_the_tolerance_is_in_fixed_steps(steps, is_right):
    """float16 has steps of 2**-24 there."""
    truth = torch.full((1, 1, 64, 8), 1000 * 2.0**-24, dtype=torch.float64)
    actual = torch.full_like(truth, steps * 2.0**-24).half()
    with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="too far"):
        assert_as_accurate(actual, truth.half(), truth, name="out")


def test_the_last_axis_of_lse_is_rows():
    """A bad block of rows fails, although other rows have larger values."""
    truth = torch.full((1, 2, 4 * BLOCK_ROWS), 100.0, dtype=torch.float64)
    truth[0, 1, :BLOCK_ROWS] = 1e-3
    actual = truth.float()
    actual[0, 1, 4] += 1e-6
    with pytest.raises(AssertionError, match=r"lse: 1 of .* first at \(0, 1, 4\)"):
        assert_as_accurate(actual, truth.float(), truth, name="lse")


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_compare_passes(shape):
    empty = torch.zeros(shape)
    assert_as_accurate(empty, empty, empty.double(), name="out")


def test_the_farthest_of_several_plain_results_counts():
    actual, plain, truth = results(torch.bfloat16)
    actual = (truth * (1 + 8 * torch.finfo(torch.bfloat16).eps)).bfloat16()
    with pytest.raises(AssertionError, match="too far"):
        assert_as_accurate(actual, [plain, truth.bfloat16()], truth, name="out")
    assert_as_accurate(actual, [plain, actual, truth.bfloat16()], truth, name="out")


def test_an_exact_block_of_a_float32_plain_result_does_not_tighten_the_tolerance():
    actual, plain, truth = results(torch.float32)
    plain[0, 0, :BLOCK_ROWS] = truth[0, 0, :BLOCK_ROWS].float()
    actual[0, 0, :BLOCK_ROWS] = (truth[0, 0, :BLOCK_ROWS] + 3e-7).float()
    assert_as_accurate(actual, plain, truth, name="out")
    actual[0, 0, 7] += 1e-5
    with pytest.raises(AssertionError, match=r"1 of .* first at \(0, 0, 7\)"):
        assert_as_accurate(actual, plain, truth, name="out")
