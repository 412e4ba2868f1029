"""benchmarks.run.overhead: finds the launch of a call and repeats it on the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.run import overhead

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        overhead.main([])
