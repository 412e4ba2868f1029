"""masks/checks.py: integers are accepted by type, not by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from masks.checks import read_fraction, read_integer, read_integers, read_switch


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7)])
def test_every_integer_type_becomes_an_int(value):
    assert type(read_integer("n", value, at_least=0)) is int
    assert read_integer("n", value, at_least=7, at_most=7) == 7


@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.float64(7), "7", None, [7], torch.tensor(7)], ids=repr)
def test_anything_else_is_refused(value):
    with pytest.raises(TypeError, match="n: expected int, a number of tokens, got"):
        read_integer("n", value, at_least=0, unit="tokens")


def test_errors_name_the_range():
    with pytest.raises(ValueError, match="n: expected int, of at least 1, got 0"):
        read_integer("n", 0, at_least=1)
    with pytest.raises(ValueError, match="n: expected int, a number of blocks, from 1 to 5, got 6"):
        read_integer("n", 6, at_least=1, at_most=5, unit="blocks")


def test_fractions():
    assert read_fraction("density", 1) == 1.0
    for value in (-0.1, 1.1, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="density: expected a number from 0 to 1, got"):
            read_fraction("density", value)
    for value in (True, "0.5", None, 1j):
        with pytest.raises(TypeError, match="density: expected a number from 0 to 1, got"):
            read_fraction("density", value)


@pytest.mark.parametrize(
    "values",
    [
        [0, 3, 9],
        (0, 3, 9),
        range(0, 10, 3),
        np.array([0, 3, 9], dtype=np.int32),
        np.array([0, 3, 9], dtype=np.uint64),
        torch.tensor([0, 3, 9]),
        torch.tensor([0, 3, 9], dtype=torch.int32),
        [np.int64(0), 3, np.uint8(9)],
    ],
    ids=repr,
)
def test_every_container_of_integers_becomes_one_array(values):
    expected = [0, 3, 6, 9] if isinstance(values, range) else [0, 3, 9]
    read = read_integers("tokens", values)
    assert read.dtype == np.int64
    assert read.tolist() == expected


def test_an_empty_list_is_accepted():
    assert read_integers("tokens", []).tolist() == []


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([0, True], TypeError, r"tokens: expected ints, got True \(bool\) at index 1"),
        ([0, 1.0], TypeError, r"tokens: expected ints, got 1.0 \(float\) at index 1"),
        ([[0, 1]], TypeError, "tokens: expected ints, got .* at index 0"),
        ("012", TypeError, "tokens: expected ints in a sequence, array or tensor, got '012'"),
        ({0, 1}, TypeError, "tokens: expected ints in a sequence, array or tensor, got"),
        (np.ma.array([1, 2], mask=[0, 1]), TypeError, "tokens: expected a plain array, got a masked one"),
        (np.array([0.0]), TypeError, "tokens: expected ints, got ndarray of float64"),
        (np.array([True]), TypeError, "tokens: expected ints, got ndarray of bool"),
        (torch.tensor([0.0]), TypeError, "tokens: expected ints, got Tensor of torch.float32"),
        (torch.tensor([0.0], dtype=torch.bfloat16), TypeError, "tokens: expected ints, got Tensor of torch.bfloat16"),
        (torch.tensor([True]), TypeError, "tokens: expected ints, got Tensor of torch.bool"),
        ([0, 2**63], ValueError, r"tokens: expected ints from -2\*\*63 to 2\*\*63 - 1, got larger ones"),
        ([0, -(10**30)], ValueError, "tokens: expected ints from .* got larger ones"),
        (np.array([2**63], dtype=np.uint64), ValueError, "tokens: expected ints from .* got larger ones"),
        (np.zeros((2, 2), dtype=int), ValueError, r"tokens: expected one axis, got shape \(2, 2\)"),
        (torch.tensor(3), ValueError, r"tokens: expected one axis, got shape \(\)"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            ValueError,
            "tokens: expected numbers, got a tensor on the meta",
        ),
    ],
    ids=repr,
)
def test_refused_integers(values, error, message):
    with pytest.raises(error, match=message):
        read_integers("tokens", values)


def test_switches():
    assert read_switch("causal", np.True_) is True
    for value in (0, 1, None, "False"):
        with pytest.raises(TypeError, match="causal: expected a bool, got"):
            read_switch("causal", value)
