"""benchmarks.run.overhead: finds the launch of a call and repeats it on the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.run import overhead
from blocksparse_flash import attention, ops

pytest.importorskip("triton", reason="needs Triton")


def test_the_launches_of_a_call_are_made_again_on_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from blocksparse_flash.runtime.launch import Launch

    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: made.append((self, *tensors)))
    first, second = object.__new__(Launch), object.__new__(Launch)
    x, y = torch.zeros(1), torch.zeros(2)

    def call() -> None:
        first(x, None)
        second(y)

    again = overhead.launches_of(call)
    assert made == [(first, x, None), (second, y)]
    made.clear()
    for launch in again:
        launch()
    assert made == [(first, x, None), (second, y)]
    # nothing more is noted
    call()
    assert len(again) == 2


def test_a_call_is_timed_by_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    seconds = iter([0.0, 1e-6, 0.0, 9e-6, 0.0, 3e-6])
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(seconds))
    calls: list[None] = []
    assert overhead.microseconds(lambda: calls.append(None), runs=3) == pytest.approx(3.0)
    assert len(waited) == 3 and len(calls) == 23


def test_the_parts_of_a_step_add_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that the parts set: each takes as long as is set for it."""
    now = [0.0]

    def after(seconds: float, result: Any) -> Any:
        now[0] += seconds
        return result

    x, dout = torch.zeros(1, 1, 16, 8, requires_grad=True), torch.zeros(1, 1, 16, 8)
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ops, "launch_backward", lambda *_: after(3e-6, (dout, dout, dout)))
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *at: after(5e-6, real(*(after(2e-6, each) for each in at))))
    found = overhead.parts_of_step(lambda *at: after(1e-6, attention(*at)), [x, x, x], dout, steps=3)
    assert found == pytest.approx(
        {
            "forward": 1.0,
            "until the backward begins": 6.0,
            "backward": 3.0,
            "until autograd returns": 5.0,
            "until all is freed": 0.0,
        }
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        overhead.main([])
