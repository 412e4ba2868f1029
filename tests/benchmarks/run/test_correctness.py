"""The correctness check accepts right results and names each wrong one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.run import attention as benchmark
from benchmarks.run import correctness, peers, sweeps
from benchmarks.run.peers import Shape
from tests.support.pattern_cases import CASES, DIM, HEADS, N, inputs, mask_of, plain


def spoiled(name: str) -> Any:
    """Attention of which one thing, of one token in the middle, is off by a twentieth of the largest."""

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, gradient):
            gradient = gradient.clone()
            gradient[0, 1, 100] += gradient.abs().max() / 20
            return gradient

    def call(q, k, v, mask):
        q, k, v = (Spoil.apply(x) if f"d{letter}" == name else x for letter, x in zip("qkv", (q, k, v), strict=True))
        out = plain(q, k, v, mask)
        return out + 0.05 * out.detach().abs().max() * (name == "out")

    return call


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_results_pass(case: sweeps.Case) -> None:
    tensors = tuple(x.bfloat16().requires_grad_() for x in inputs(batch=2))
    call = peers.ours("eager").prepare(case.pattern, Shape(2, HEADS, DIM, "cpu"))
    errors = correctness.worst_errors(call, tensors, case.pattern.attends)
    assert [*errors] == ["out", "dq", "dk", "dv"] and max(errors.values()) < correctness.TOLERANCE


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_each_wrong_result_is_named(name: str) -> None:
    pattern = CASES[1].pattern
    tensors = tuple(x.requires_grad_() for x in inputs())
    call = functools.partial(spoiled(name), mask=mask_of(pattern))
    errors = correctness.worst_errors(call, tensors, pattern.attends)
    assert [wrong for wrong, error in errors.items() if not error <= correctness.TOLERANCE] == [name]


def test_nan_is_wrong_and_an_output_without_gradients_is_compared_alone() -> None:
    pattern = CASES[0].pattern
    tensors = tuple(x.requires_grad_() for x in inputs())
    mask = mask_of(pattern)

    def errors_of(call: Any) -> dict[str, float]:
        return correctness.worst_errors(call, tensors, pattern.attends)

    assert [*errors_of(lambda q, k, v: plain(q, k, v, mask).detach())] == ["out"]
    errors = errors_of(lambda q, k, v: plain(q, k, v, mask) * float("nan"))
    assert not any(error <= correctness.TOLERANCE for error in errors.values())
    # of one head only, the first and the last
    for factors in ([float("nan"), 1.0], [1.0, float("nan")]):
        once = torch.tensor(factors)[:, None, None]
        found = errors_of(lambda q, k, v, once=once: plain(q, k, v, mask) * once)
        assert not found["out"] <= correctness.TOLERANCE


def test_a_mask_that_is_another_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, Path(), device="cpu")
    tensors, _ = benchmark.inputs(run, N)
    local, butterfly = (next(case.pattern for case in CASES if case.name == name) for name in ("butterfly", "random"))
    call = peers.ours("eager").prepare(local, run.shape)
    assert not correctness.is_right(call, tensors, butterfly.attends, "it")
    assert "it: WRONG, relative errors out" in capsys.readouterr().out
