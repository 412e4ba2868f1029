"""What the tests on a GPU share: which backends a GPU has, and CUDA graphs of a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.no_waiting import no_waiting

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_every_backend = pytest.mark.parametrize(
    "backend", ["triton", "triton-64", *(["hopper", "hopper-64", "hopper-16"] if HAS_HOPPER else [])], indirect=True
)


def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of a step that does not synchronize, and the results that each replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def assert_a_graph_replays(call: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> None:
    """A CUDA graph of a deterministic call and its gradients follows new values of its inputs, bit for bit."""

    def step() -> tuple[Tensor, ...]:
        out = call(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, captured = capture(step)
    for _ in range(2):
        with torch.no_grad():
            for tensor in (*leaves, dout):
                tensor.normal_()
        graph.replay()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)
