"""The tanh of the Hopper kernels, whose PTX has no simulation: its polynomials, and the text."""

from __future__ import annotations

import itertools
import re

import numpy as np

from blocksparse_flash.kernels.hopper import score_mods

LARGEST_ERROR = 4e-7


def polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Horner's rule with fused multiply-add, in float32."""
    square, result = x * x, np.full_like(x, coefficients[0])
    for each in coefficients[1:]:
        result = (result.astype(np.float64) * square + np.float32(each)).astype(np.float32)
    return result


def relative_errors(found: np.ndarray, x: np.ndarray) -> np.ndarray:
    expected = np.tanh(x.astype(np.float64))
    return np.abs(found - expected) / np.abs(expected)


def test_both_fits_of_tanh_are_accurate() -> None:
    near = np.linspace(1e-6, score_mods.NEAR, 200_001, dtype=np.float32)
    cubic = polynomial(near, score_mods.NEAR_P) * (near * near)
    assert relative_errors((near.astype(np.float64) * cubic + near).astype(np.float32), near).max() < LARGEST_ERROR
    every = np.linspace(1e-6, 20.0, 400_001, dtype=np.float32)
    far = np.minimum(every, np.float32(score_mods.FAR))
    quotient = far * polynomial(far, score_mods.FAR_P) * (np.float32(1) / polynomial(far, score_mods.FAR_Q))
    assert relative_errors(quotient, every).max() < LARGEST_ERROR


def test_the_factor_of_a_scale_far_above_the_softcap_is_finite_in_float32() -> None:
    """Regression: it was infinite, and NaN times scores of 0."""
    for scale, is_forward in itertools.product((1e9, -1e9), (False, True)):
        factor = score_mods.ModSpecs(softcap=1e-30).arguments(scale, is_forward=is_forward)["scale_log2"]
        assert np.float32(factor) == np.sign(scale) * np.finfo(np.float32).max
    assert score_mods.ModSpecs(softcap=4.0).arguments(-2.0, is_forward=True)["scale_log2"] == -0.5


def test_the_assembly_writes_each_result_in_both_branches() -> None:
    text, n_values = score_mods.TANH.value, score_mods.TANH_VALUES.value
    far, near = text.split("@p bra NEAR;")[1].split("NEAR:")
    for branch in (far, near):
        written = re.findall(r"(?:mul\.f32|fma\.rn\.f32) \$(\d+),", branch)
        assert [*map(int, written)] == [*range(n_values)]
    assert len(score_mods.TANH_CONSTRAINTS.value.split(",")) == 2 * n_values
