"""masks.alibi_windows: each head keeps the pairs whose penalty is at most the threshold."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import masks
from tests.support.double_loop import assert_heads_attend

# from the paper: slopes of 8 heads start at 1/2, of 16 at 2**-0.5; 12 heads use those of 8 and every other one of 16
EIGHT = [2.0**-power for power in range(1, 9)]
TWELVE = EIGHT + [2.0 ** -(power / 2) for power in (1, 3, 5, 7)]


def attends(q_pos: int, kv_pos: int, shift: int, slope: float, threshold: float, causal: bool) -> bool:
    distance = q_pos + shift - kv_pos
    is_kept = Fraction(slope) * abs(distance) <= Fraction(threshold)
    return is_kept and (distance >= 0 or not causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_double_loop(seed, block_size, causal):
    random = np.random.default_rng(seed)
    q_len, kv_len = (int(length) for length in random.integers(1, 130, 2))
    slopes, threshold = random.uniform(0.01, 2.0, 3).tolist(), float(random.uniform(0.1, 8.0))
    layout = masks.alibi_windows(
        (q_len, kv_len), slopes=slopes, threshold=threshold, causal=causal, block_size=block_size
    )
    heads = [lambda q, kv, slope=slope: attends(q, kv, kv_len - q_len, slope, threshold, causal) for slope in slopes]
    assert_heads_attend(layout, heads)


@pytest.mark.parametrize(("heads", "slopes"), [(8, EIGHT), (12, TWELVE), (1, [2.0**-8])])
def test_heads_have_the_slopes_of_the_paper(heads, slopes):
    by_heads = masks.alibi_windows(700, heads=heads, threshold=3.0)
    assert by_heads == masks.alibi_windows(700, slopes=slopes, threshold=3.0)


def test_a_head_is_a_window():
    layout = masks.alibi_windows(1000, slopes=[0.1, 0.5], threshold=20, causal=True)
    # 20 / 0.1 is a little less than 200, as 0.1 is a little more than a tenth
    for head, window in enumerate([199, 40]):
        assert torch.equal(layout.to_dense()[0, head], masks.local(1000, window=(window, 0)).to_dense()[0, 0])


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_slopes_come_in_any_container(make):
    assert masks.alibi_windows(300, slopes=make([0.5, 0.25]), threshold=8.0) == masks.alibi_windows(
        300, slopes=[0.5, 0.25], threshold=8.0
    )


@pytest.mark.parametrize("number", [np.float32, np.float16, np.float64, Fraction])
def test_numbers_of_any_type(number):
    found = masks.alibi_windows(300, slopes=[number(0.5)], threshold=number(8))
    assert found == masks.alibi_windows(300, slopes=[0.5], threshold=8.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 1.0}, ValueError, "heads, slopes: expected exactly one of the two, got neither"),
        ({"threshold": 1.0, "heads": 2, "slopes": [1.0]}, ValueError, "exactly one of the two, got both"),
        ({"threshold": 0.0, "heads": 2}, ValueError, "threshold: expected a positive number, got 0.0"),
        ({"threshold": float("nan"), "heads": 2}, ValueError, "threshold: .* got nan"),
        ({"threshold": 10**400, "heads": 2}, ValueError, "threshold: expected a positive number, got 1000"),
        ({"threshold": "1", "heads": 2}, TypeError, "threshold: .* got '1'"),
        ({"threshold": 1.0, "heads": 0}, ValueError, "heads: .* from 1 to 65536, got 0"),
        ({"threshold": 1.0, "heads": 2**31}, ValueError, "heads: .* from 1 to 65536, got 2147483648"),
        ({"threshold": 1.0, "slopes": torch.ones(2, device="meta")}, ValueError, "slopes: expected numbers, .* meta"),
        ({"threshold": 1.0, "slopes": []}, ValueError, "slopes: expected at least one head"),
        ({"threshold": 1.0, "slopes": [0.5, -1]}, ValueError, r"slopes\[1\]: .* got -1"),
        ({"threshold": 1.0, "slopes": 0.5}, TypeError, "slopes: expected numbers in a sequence"),
        ({"threshold": 1.0, "heads": 2, "causal": 1}, TypeError, "causal: expected a bool"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        masks.alibi_windows(100, **arguments)
