"""Memory of a call on a GPU, and what `explain` predicts of memory and time."""

from __future__ import annotations

import functools

import pytest
import torch

import masks
from benchmarks.run import measure, small
from blocksparse_flash import attention, explain
from tests.support.gpu import on_every_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_every_backend
def test_peak_memory_is_that_of_the_results(backend: str) -> None:
    """Outputs, gradients, lse, delta (float32 dq on `hopper`) and at most 2 % more: no N x N tensor, no copies."""
    length, heads, head_dim = 65536, 16, 64
    layout = masks.butterfly(length).to("cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (
        torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
    )
    dout = torch.randn_like(q)
    torch.autograd.grad(attention(q, k, v, layout, backend=backend), (q, k, v), dout)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(attention(q, k, v, layout, backend=backend), (q, k, v), dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    q_bytes, lse_bytes = q.nbytes, 4 * heads * length
    results = (4 if backend == "triton" else 6) * q_bytes + 2 * lse_bytes
    total = results + 4 * q_bytes
    print(
        f"peak {peak}, out + gradients + lse + delta {results}, over by {(peak - results) / total:.2%} of all tensors"
    )
    assert peak <= results + 0.02 * total
    assert len(grads) == 3


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("head_dim", [64, 80, 100, 128])
@pytest.mark.parametrize("block_size", [64, 128])
def test_explain_predicts_memory_and_time(backend: str, head_dim: int, block_size: int) -> None:
    """Bytes match the allocator; times are within a factor of 2 on GPUs that the model was fitted to."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.use_deterministic_algorithms(False)
    layout = masks.local(8192, window=512)
    if block_size == 64:
        layout = masks.random(8192, density=0.1, block_size=64, seed=0)
    q = torch.randn(1, 16, 8192, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 4, 8192, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    found = explain(q, k, v, layout, backend=backend)
    assert found.backend == backend and found.balance.n_sms is not None
    assert found.tile == ((64, 64) if block_size == 64 or backend == "triton" else (128, 128))

    out = attention(q, k, v, layout, backend=backend)
    dout = torch.randn_like(out)
    # larger than any L2 cache
    cache = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    calls = {
        "forward": lambda: attention(q, k, v, layout, backend=backend),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }
    for name, call in calls.items():
        call()
        expected = getattr(found, name)
        # the allocator rounds each tensor up to 512 bytes
        assert measure.peak_bytes(call) == pytest.approx(expected.writes + expected.workspace, rel=1e-3), name
        predicted = found.prediction
        if predicted is not None and not predicted.caveats:
            # of the GPU alone, for which a busy host does not count
            (times,) = small.take_turns([call], functools.partial(small.on_gpu, cache=cache), 15)
            ms = times["ms"]
            print(f"{backend} {head_dim} {name}: {ms:.3f} ms, predicted {getattr(predicted, f'{name}_ms'):.3f}")
            assert ms / 2 < getattr(predicted, f"{name}_ms") < 2 * ms, name
