"""GPU tests: offsets past 2^31, memory, bitwise reproducibility, CUDA graphs, no synchronization.

On a machine with a GPU, the zoo of layouts (test_zoo.py) and the operators (test_ops.py) run there too.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from benchmarks.run import measure, small
from blocksparse_flash import (
    BlockLayout,
    attention,
    attention_with_lse,
    dispatch,
    explain,
    nn,
    paged,
    paged_attention,
    paged_attention_with_lse,
    selected_attention,
)
from blocksparse_flash.kernels.schedule import sums_over_heads
from blocksparse_flash.plan import block_selection, device_builder
from blocksparse_flash.plan_format import FINE_TILE, PIECE, TILE
from tests import test_zoo as zoo
from tests.support import cases
from tests.support.closeness import assert_as_accurate
from tests.support.no_waiting import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

Predicate = Callable[[Tensor, Tensor], Tensor]
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_every_backend = pytest.mark.parametrize(
    "backend", ["triton", "triton-64", *(["hopper", "hopper-64", "hopper-16"] if HAS_HOPPER else [])], indirect=True
)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend with tiles of 128 x 128, or with the suffix "-64" of 64 x 64, with "-16" gathered ones."""
    name, _, tile = request.param.partition("-")
    # a call with dropout runs on `triton`, which has no gathered tiles
    side = int(tile or TILE)
    monkeypatch.setattr(dispatch, "tile_of", lambda by, *_, **__: TILE if (by, side) == ("triton", PIECE) else side)
    return str(name)


def rows_of_out_and_dq(
    rows: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attends: Predicate, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out and dq of the given rows, computed in `dtype`."""
    mask = attends(rows[:, None], torch.arange(k.shape[2], device=k.device)[None, :])
    picked = q[:, :, rows].detach().to(dtype).requires_grad_()
    scores = picked @ k.detach().to(dtype).transpose(-1, -2) * q.shape[3] ** -0.5
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.detach().to(dtype)
    (dq,) = torch.autograd.grad(out, picked, dout[:, :, rows].to(dtype))
    return out.detach(), dq


def cols_of_dk_and_dv(
    cols: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, attends: Predicate,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv of the given columns, computed in `dtype` from out and lse."""
    mask = attends(torch.arange(q.shape[2], device=q.device)[None, :], cols[:, None])
    scale = q.shape[3] ** -0.5
    q, dout, out = (t.detach().to(dtype) for t in (q, dout, out))
    picked_k, picked_v = (t[:, :, cols].detach().to(dtype) for t in (k, v))
    p = (picked_k @ q.transpose(-1, -2) * scale - lse[:, :, None].to(dtype)).exp().masked_fill(~mask, 0)
    delta = (dout * out).sum(-1)[:, :, None]
    ds = p * (picked_v @ dout.transpose(-1, -2) - delta)
    return scale * ds @ q, p @ dout


def check_sampled(
    layout: BlockLayout, attends: Predicate, *, heads: int, head_dim: int, checked: list[int], backend: str
) -> None:
    """Run forward and backward at full size; check out and dq of sampled rows, dk and dv of sampled columns."""
    length = layout.q_len
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
    )
    dout = torch.randn_like(q)
    # True, the default under poisoned memory, selects another backward of `hopper`
    out, lse = attention_with_lse(q, k, v, layout, deterministic=False, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sampled = torch.cat([torch.randint(length, (30,)), torch.tensor([0, 127, length - 128, length - 1])]).cuda()
    for head in checked:
        one = slice(head, head + 1)
        inputs = [t.detach()[:, one] for t in (q, k, v, dout)]
        found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        wanted: dict[torch.dtype, dict[str, Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float64):
            expected = rows_of_out_and_dq(sampled, *inputs, attends, dtype)
            forward = (out.detach()[:, one], lse.detach()[:, one])
            expected += cols_of_dk_and_dv(sampled, *inputs, *forward, attends, dtype)
            wanted[dtype] = dict(zip(found, expected, strict=True))
        for name, tensor in found.items():
            actual = tensor.detach()[:, one, sampled]
            assert_as_accurate(actual, wanted[torch.bfloat16][name], wanted[torch.float64][name], name=name)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_sums_over_query_heads_with_a_layout_are_accurate(head_dim: int) -> None:
    """Each query head of a group has tile columns of its own, 64 heads on 4."""
    lengths, heads, kv_heads = (16384, 1024), 64, 4

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        return kv_pos * 16 + 31 <= q_pos

    layout = BlockLayout.from_predicate(attends, *lengths, block_size=128)
    torch.manual_seed(0)
    shapes = [(heads, lengths[0]), (kv_heads, lengths[1]), (kv_heads, lengths[1]), (heads, lengths[0])]
    q, k, v, dout = (torch.randn(1, *shape, head_dim, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = list(layout.plan("cuda"))
    assert sums_over_heads(plan, tuple(q.shape), tuple(k.shape), False, n_sms, deterministic=False)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = attention_with_lse(*leaves, layout, deterministic=False, backend="hopper")
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    rows = torch.cat([torch.randint(31, lengths[0], (30,)), torch.tensor([31, lengths[0] - 1])]).cuda()
    cols = torch.cat([torch.randint(lengths[1], (30,)), torch.tensor([0, lengths[1] - 2])]).cuda()
    for kv_head in (0, 3):
        of_group = slice(kv_head * 16, kv_head * 16 + 16)
        inputs = [q.detach()[:, of_group], *(t.detach()[:, kv_head, None] for t in (k, v)), dout[:, of_group]]
        forward = out.detach()[:, of_group], lse.detach()[:, of_group]
        wanted: dict[torch.dtype, list[Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float64):
            sums = [each.sum(1, keepdim=True) for each in cols_of_dk_and_dv(cols, *inputs, *forward, attends, dtype)]
            wanted[dtype] = [*rows_of_out_and_dq(rows, *inputs, attends, dtype), *sums]
        found = [
            forward[0][:, :, rows],
            dq[:, of_group][:, :, rows],
            *(t[:, kv_head, None][:, :, cols] for t in (dk, dv)),
        ]
        for name, actual, *others in zip(("out", "dq", "dk", "dv"), found, *wanted.values(), strict=True):
            assert_as_accurate(actual, *others, name=name)


@on_every_backend
def test_butterfly_of_65536_tokens_is_accurate(backend: str) -> None:
    layout = masks.butterfly(65536)

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        stride = (q_pos // 128) ^ (kv_pos // 128)
        return (stride & (stride - 1)) == 0

    check_sampled(layout, attends, heads=4, head_dim=64, checked=[0, 3], backend=backend)


@on_every_backend
def test_a_million_tokens_with_offsets_past_2_to_the_31_are_accurate(backend: str) -> None:
    """18 heads of 1,048,576 x 128: 2.4e9 elements a tensor; the last head lies past 2^31."""
    length, heads, head_dim = 1 << 20, 18, 128
    assert (heads - 1) * length * head_dim > 2**31
    layout = masks.local(length, window=500)

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        return (q_pos - kv_pos).abs() <= 500

    check_sampled(layout, attends, heads=heads, head_dim=head_dim, checked=[0, 17], backend=backend)


@on_every_backend
@pytest.mark.parametrize("head_dim", [64, 128])
def test_three_runs_are_bitwise_equal(head_dim: int, backend: str) -> None:
    length = 2000
    layout = masks.bigbird(length, seed=1) | masks.local(length, window=77)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    dout = torch.randn_like(q)
    dropout: dict[str, Any] = {"dropout_p": 0.1, "seed": 3} if backend == "triton" else {}

    def run() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attention_with_lse(*inputs, layout, deterministic=True, backend=backend, **dropout)
        return [out, lse, *torch.autograd.grad((out * dout).sum() + lse.sum(), inputs)]

    first = run()
    for _ in range(2):
        for again, before in zip(run(), first, strict=True):
            assert torch.equal(again, before)


# ten parts, so that test processes compile in parallel
@pytest.mark.parametrize("part", range(10))
@on_every_backend
def test_ten_thousand_launches_with_random_layouts_are_bitwise_reproducible(backend: str, part: int) -> None:
    """50 layouts per part, 20 runs each: none hangs, all are bitwise equal; dq only if summed in a fixed order."""
    numbers = random.Random(part)
    differing = torch.zeros(5, dtype=torch.int64, device="cuda")
    for seed in range(50 * part, 50 * (part + 1)):
        q_len, kv_len = (numbers.randint(1, 1500) for _ in range(2))
        heads, group, head_dim = (
            numbers.choice([1, 2, 6]),
            numbers.choice([1, 2]),
            numbers.choice([64, 96, 128, 192, 256]),
        )
        block_size, deterministic = numbers.choice([16, 64, 128]), seed % 3 == 0
        layout = masks.random((q_len, kv_len), density=numbers.random(), block_size=block_size, seed=seed).to("cuda")
        is_dq_ordered = deterministic or backend != "hopper" or head_dim > 128
        is_ordered = torch.tensor([True, True, is_dq_ordered, True, True], device="cuda")
        q, k, v, dout = (
            torch.randn(2, n_heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n_heads, length in ((heads * group, q_len), (heads, kv_len), (heads, kv_len), (heads * group, q_len))
        )
        first: list[Tensor] = []
        for _ in range(20):
            # freed memory is reused: no kernel may rely on zeros
            torch.full((1 << 20,), torch.nan, device="cuda")
            out, lse = attention_with_lse(
                q, k, v, layout, causal=seed % 2 == 0, backend=backend, deterministic=deterministic
            )
            found = [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]
            first = first or found
            differing += is_ordered * torch.stack([(a != b).sum() for a, b in zip(found, first, strict=True)])
    assert differing.tolist() == [0] * 5


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (32, 64)])
@pytest.mark.parametrize("causal", [False, True])
@on_every_backend
def test_deterministic_gradients_beyond_the_l2_cache_are_bitwise_reproducible(
    backend: str, causal: bool, heads: int, head_dim: int
) -> None:
    """Additions to a sum in device memory can overtake each other where those to a sum in L2 do not (TUNING.md)."""
    q, k, v, dout = (
        torch.randn(4, heads, 4096, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)
    )
    out = attention(q, k, v, causal=causal, backend=backend, deterministic=True)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    differing = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(100):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        differing += torch.stack([(a != b).sum() for a, b in zip(found, first, strict=True)])
    assert differing.tolist() == [0] * 3


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


# leaves are created on another stream than the capture; nothing accumulates into them
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@on_every_backend
def test_a_cuda_graph_replays_forward_and_backward(backend: str) -> None:
    length = 1000
    layout = masks.longformer(length, window=100, global_tokens=3).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, seed = torch.randn_like(q), torch.tensor([7], device="cuda")

    dropout: dict[str, Any] = {"dropout_p": 0.2, "seed": seed} if backend == "triton" else {}

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, layout, backend=backend, deterministic=True, **dropout)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    for turn in (8, 9):
        with torch.no_grad():
            for tensor in (q, k, v, dout):
                tensor.normal_()
            seed.fill_(turn)
        graph.replay()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
# PyTorch captures an empty graph first
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["captured", "compiled"])
def test_replays_of_a_cuda_graph_drop_other_pairs(is_compiled: bool) -> None:
    """With v and dout of unit rows, out and dv show which pairs were kept; forward and backward must agree."""
    q, k = (torch.zeros(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in "qk")
    v = torch.eye(256, 64, device="cuda", dtype=torch.bfloat16).expand(1, 2, -1, -1).clone().requires_grad_()
    dout = torch.eye(256, 64, device="cuda", dtype=torch.bfloat16).expand(1, 2, -1, -1)

    call = torch.compile(attention, mode="reduce-overhead", fullgraph=True) if is_compiled else attention

    def step() -> tuple[Tensor, ...]:
        out = call(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, v, dout)

    found = []
    graph, captured = (None, ()) if is_compiled else capture(step)
    # compiled calls are captured in their second or third turn
    for _ in range(6):
        if graph is None:
            torch.compiler.cudagraph_mark_step_begin()
            captured = step()
        else:
            graph.replay()
        found.append([each.clone() for each in captured])
    for out, dv in found:
        # the pairs of the first 64 queries and keys, in both directions
        assert torch.equal(out[..., :64, :] > 0, (dv[..., :64, :] > 0).mT)
    outs = [out for out, _ in found]
    for turn, out in enumerate(outs):
        assert all(not torch.equal(out, other) for other in outs[:turn])


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


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("axes", [(1, 1), (2, 4)], ids=["shared", "per head"])
@pytest.mark.parametrize("mode", ["dense", "layout"])
def test_a_cuda_graph_replays_a_pair_bias_and_its_gradient(mode: str, axes: tuple[int, int]) -> None:
    length = 1000
    layout = None if mode == "dense" else masks.longformer(length, window=100, global_tokens=3).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    bias, dout = torch.randn(*axes, length, length, device="cuda").requires_grad_(), torch.randn_like(q)

    call = functools.partial(attention, layout=layout, deterministic=True)
    assert_a_graph_replays(lambda q, k, v, bias: call(q, k, v, pair_bias=bias), (q, k, v, bias), dout)


def test_a_pair_bias_with_offsets_past_2_to_the_31_equals_that_of_one_head() -> None:
    """9 heads of 16,384 x 16,384: 2.4e9 elements; the last head lies past 2^31. In memory, keys come before queries."""
    length, heads = 16384, 9
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16).mT
    layout = masks.local(length, window=1000)

    def results(part: slice) -> list[Tensor]:
        leaves = [tensor[:, part].detach().requires_grad_() for tensor in (q, k, v, bias)]
        out = attention(*leaves[:3], layout, pair_bias=leaves[3], backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, part])]

    for whole, one in zip(results(slice(0, heads)), results(slice(heads - 1, heads)), strict=True):
        assert torch.equal(whole[:, -1:], one)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_block_bias_of_long_rows_is_accurate_on_hopper(head_dim: int, deterministic: bool) -> None:
    """Rows of up to 20 tiles, of blocks of 128 and of 256 x 128; the rows and columns of the first tokens are split."""
    device, length = torch.device("cuda"), 2560
    for block_size in (128, (256, 128)):
        layout = cases.Case(
            f"long-rows-{block_size}",
            lambda block_size=block_size: (
                masks.local(length, window=500, block_size=block_size)
                | masks.global_tokens(length, tokens=9, block_size=block_size)
            ),
        )
        for options in (
            {"causal": True, "kv_heads": 1},
            {"softcap": 3.0, "has_slopes": True, "are_slopes_fixed": True},
        ):
            call = zoo.Call(head_dim=head_dim, bias="heads", dtype=torch.bfloat16, **options)
            zoo.assert_backend_is_accurate("hopper", layout, call, device, deterministic=deterministic)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("axes", [(), (4,), (2, 4)], ids=["shared", "per head", "per batch"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_cuda_graph_replays_a_block_bias_and_its_gradient(head_dim: int, axes: tuple[int, ...]) -> None:
    length = 2000
    layout = masks.longformer(length, window=100, global_tokens=3, block_size=128).to("cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    bias, dout = torch.randn(*axes, layout.capacity, device="cuda").requires_grad_(), torch.randn_like(q)

    call = functools.partial(attention, layout=layout, deterministic=True, backend="hopper")
    assert_a_graph_replays(lambda q, k, v, bias: call(q, k, v, block_bias=bias), (q, k, v, bias), dout)


@pytest.mark.parametrize("case", ["dense", "layout", "lengths", "dropout"])
@on_every_backend
def test_a_call_never_waits_for_the_gpu(case: str, backend: str) -> None:
    length = 1000
    dropout_p = 0.5 * (case == "dropout")
    # `hopper` has no dropout
    backend = "auto" if dropout_p else backend
    layout = masks.local(length, window=100).to("cuda") if case != "dense" else None
    q, k, v = (torch.randn(2, 2, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    lengths = torch.tensor([1000, 5], device="cuda") if case == "lengths" else None
    dout = torch.randn_like(q)

    def step() -> None:
        out = attention(
            q, k, v, layout, kv_lengths=lengths, dropout_p=dropout_p, causal=case == "dense", backend=backend
        )
        torch.autograd.grad(out, (q, k, v), dout)

    step()
    with no_waiting():
        step()


@pytest.mark.parametrize("block_size", [(128, 128), (256, 64), (64, 64), (16, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [TILE, FINE_TILE])
def test_a_selection_has_the_same_plan_as_on_the_cpu(block_size: tuple[int, int], causal: bool, tile: int) -> None:
    """With more entries than one thread block can sort, and with few."""
    for (batch, heads), q_len, kv_len, k in (((1, 1), 20_000, 20_000, 40), ((2, 3), 300, 700, 3)):
        n_rows, n_cols = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
        generator = torch.Generator().manual_seed(0)
        indices = torch.randint(-1, n_cols, (batch, heads, n_rows, k), generator=generator)
        plans = []
        for device in ("cpu", "cuda"):
            layout = BlockLayout.from_topk(indices.to(device), q_len, kv_len, block_size=block_size)
            plans.append([tensor.cpu() for tensor in layout.plan(device, causal=causal, tile=tile)])
        n_tiles = int(plans[0][0][..., 2].sum())
        assert n_tiles
        # entries past n_tiles are undefined; bitmasks are compared through the tiles that use them
        for at in (0, 3):
            assert torch.equal(plans[0][at], plans[1][at])
            for more in (1, 2):
                assert torch.equal(plans[0][at + more][:n_tiles], plans[1][at + more][:n_tiles])
        used = plans[0][2][:n_tiles].long()
        assert torch.equal(plans[0][6][used], plans[1][6][used])


def test_a_layout_is_moved_in_one_copy() -> None:
    """Its tensors and those of its plan share one allocation, which each of them keeps alive."""
    layout = masks.local(3000, window=700) | masks.global_tokens(3000, tokens=5)
    moved = layout.to("cuda")
    assert moved == layout
    tensors = [*moved.plan("cuda"), *moved._tensors]
    wanted = [*layout.plan("cpu"), *layout._tensors]
    for tensor, expected in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor.cpu(), expected) and tensor.data_ptr() % 16 == 0 and tensor.storage_offset() == 0
    kept = moved.plan("cuda").bitmasks
    del layout, moved, tensors
    # would overwrite the memory if it had been freed
    junk = [torch.full((1 << 16,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
    assert torch.equal(kept.cpu(), wanted[6]) and len(junk) == 64


def test_each_plan_is_moved_in_one_copy_without_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial and full blocks (the GPU lists full ones itself); pinned memory is not reused before its copy has run."""
    monkeypatch.setattr(device_builder, "WORTH_SENDING", 1)
    layouts = []
    for seed in range(6):
        full = masks.random(128 * 128, density=1 / 8, seed=seed)
        layouts += [full, full & masks.local(128 * 128, window=1000 + seed)]

    def plans(layouts: list[BlockLayout]) -> list[list[Tensor]]:
        return [list(layout.plan("cuda", non_blocking=True)) for layout in layouts]

    # warm-up: compiles kernels and pins memory
    plans([copy.deepcopy(layout) for layout in layouts])
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(4):
            busy = busy @ busy
        found = plans(layouts)
    for layout, plan in zip(layouts, found, strict=True):
        expected = list(copy.deepcopy(layout).plan("cpu"))
        # bitmask ids may differ
        for at in (0, 1, 3, 4):
            assert torch.equal(plan[at].cpu(), expected[at])
        assert [len(ids) for ids in (plan[2], plan[5])] == [len(ids) for ids in (expected[2], expected[5])]


def test_a_selection_is_made_by_kernels_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by PyTorch operations, and without synchronization."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("PyTorch operations were used")

    monkeypatch.setattr(block_selection, "sorted_rows", refused)
    monkeypatch.setattr(block_selection, "_plan_by_operations", refused)
    scores = torch.rand(1, 2, 64, 64, device="cuda")
    cols = scores.topk(5, dim=3).indices

    def both(causal: bool) -> None:
        made = BlockLayout.from_scores(scores, 8192, 8192, k=5, causal=causal, block_size=128)
        for layout in (made, BlockLayout.from_topk(cols, 8192, 8192, block_size=128)):
            for tile in (TILE, FINE_TILE):
                layout.plan("cuda", causal=causal, tile=tile)

    for causal in (False, True):
        both(causal)
        with no_waiting():
            both(causal)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("mean_length", [60, 1000])
def test_a_cuda_graph_captures_packed_documents_and_their_attention(mean_length: int) -> None:
    """A CUDA graph of layout, plan, forward and backward follows new boundaries, without synchronization."""
    length, n_documents = 3000, 3000 // mean_length
    torch.manual_seed(0)
    q, key, v = (torch.randn(1, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, boundaries = torch.randn_like(q), torch.zeros(n_documents + 1, dtype=torch.int32, device="cuda")
    prefixes = torch.arange(n_documents, device="cuda") % 200

    def new_boundaries(end: int) -> None:
        inner = torch.randint(0, end, (n_documents - 1,)).sort().values
        boundaries.copy_(torch.cat([torch.tensor([0]), inner, torch.tensor([end])]))

    def step(causal: bool) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"causal": True, "prefix": prefixes} if causal else {"window": 700}
        layout = masks.documents(boundaries, length=length, **options)
        out = attention(q, key, v, layout, deterministic=True)
        return out, *torch.autograd.grad(out, (q, key, v), dout)

    for causal in (False, True):
        new_boundaries(length)
        graph, captured = capture(functools.partial(step, causal))
        for end in (length, length - 500):
            with torch.no_grad():
                for tensor in (q, key, v, dout):
                    tensor.normal_()
            new_boundaries(end)
            graph.replay()
            # tests/plan/test_packed_builder.py compares such plans with the host's
            for replayed, expected in zip(captured, step(causal), strict=True):
                assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_a_cuda_graph_captures_a_selection_and_its_attention() -> None:
    """A CUDA graph of selection, plan, forward and backward follows new scores, without synchronization."""
    length, block_size, k = 1100, 64, 4
    n_rows = -(-length // block_size)
    torch.manual_seed(0)
    q, key, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    dout, scores = torch.randn_like(q), torch.randn(2, 4, n_rows, n_rows, device="cuda")

    def step(causal: bool) -> tuple[Tensor, ...]:
        layout = BlockLayout.from_scores(scores, length, length, k=k, causal=causal, block_size=block_size)
        out = attention(q, key, v, layout, causal=causal)
        return out, *torch.autograd.grad(out, (q, key, v), dout)

    for causal in (False, True):
        graph, captured = capture(functools.partial(step, causal))
        for _ in range(2):
            with torch.no_grad():
                for tensor in (q, key, v, dout, scores):
                    tensor.normal_()
            graph.replay()
            on_host = BlockLayout.from_scores(
                scores.cpu(), length, length, k=k, causal=causal, block_size=block_size
            ).to("cuda")
            out = attention(q, key, v, on_host, causal=causal)
            for replayed, expected in zip(captured, (out, *torch.autograd.grad(out, (q, key, v), dout)), strict=True):
                assert torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize(("group", "query_block_size"), [(1, 64), (4, 1), (16, 1)])
def test_a_cuda_graph_captures_a_selection_in_packed_documents(group: int, query_block_size: int) -> None:
    """A CUDA graph of selection, plan, forward and backward follows new boundaries, without synchronization."""
    length, block_size = 1100, 64
    n_rows, n_cols = -(-length // query_block_size), -(-length // block_size)
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (2 * group, 2, 2)
    ]
    dout, indices = torch.randn_like(leaves[0]), torch.zeros(2, 2, n_rows, 6, dtype=torch.int64, device="cuda")
    boundaries = torch.zeros(2, 9, dtype=torch.int32, device="cuda")

    def step(tensors: list[Tensor], causal: bool, backend: str = "auto") -> list[Tensor]:
        options: dict[str, Any] = {"block_size": block_size, "query_block_size": query_block_size, "backend": backend}
        out = selected_attention(*tensors, indices, causal=causal, cu_seqlens=boundaries, **options)
        return [out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))]

    def draw() -> None:
        indices.copy_(torch.randint(-1, n_cols, indices.shape))
        inner = torch.randint(0, length - 50, (2, 7)).sort(1).values
        boundaries.copy_(torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=length - 50))

    for causal in (False, True):
        draw()
        graph, captured = capture(lambda causal=causal: tuple(step(leaves, causal)))
        for _ in range(2):
            draw()
            graph.replay()
            exact = step([tensor.detach().double().requires_grad_() for tensor in leaves], causal, "reference")
            same = step(leaves, causal, "reference")
            for name, replayed, other, truth in zip(("out", "dq", "dk", "dv"), captured, same, exact, strict=True):
                assert_as_accurate(replayed, [other], truth, name=name)


@pytest.mark.parametrize(
    "make",
    [nn.MixtureOfBlockAttention, nn.NativeSparseAttention, nn.SharedIndexAttention],
    ids=lambda kind: kind.__name__,
)
def test_layers_that_select_blocks_never_wait_for_the_boundaries_of_packed_documents(make: Any) -> None:
    torch.manual_seed(0)
    sizes = {"block_size": 64, **({} if make is nn.NativeSparseAttention else {"k_blocks": 3})}
    layer = make(256, 4, kv_heads=1, rope=10000.0, **sizes).to("cuda", torch.bfloat16)
    x = torch.randn(1, 1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 300, 317, 900, 900], dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        found = layer(x, cu_seqlens=cu_seqlens)
        out, loss = found if isinstance(found, tuple) else (found, found.sum())
        torch.autograd.grad(out.sum() + loss, [x, *layer.parameters()])
        return out.detach()

    step()
    with no_waiting():
        together = step()
    for first, stop in ((0, 300), (300, 317), (317, 900)):
        alone = layer(x[:, first:stop])
        alone = alone[0] if isinstance(alone, tuple) else alone
        torch.testing.assert_close(together[:, first:stop], alone.detach(), rtol=2e-2, atol=2e-2)


def test_a_compiled_layer_with_rotary_positions_equals_the_layer() -> None:
    """torch.compile rotates by an operator of our own, within one graph, and its layout needs no copy."""
    torch.manual_seed(0)
    layer = nn.SelfAttention(256, 4, rope=10000.0).to("cuda", torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x, dout = (torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def step(call: Any) -> list[Tensor]:
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]

    for found, expected in zip(step(compiled), step(layer), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 5e-3


def test_weights_of_more_heads_than_a_grid_axis_has_programs_are_accurate() -> None:
    from blocksparse_flash.kernels.triton.group_weights import group_weights

    torch.manual_seed(0)
    q, k = torch.randn(1, 70_000, 1, 2, 16, device="cuda"), torch.randn(1, 70_000, 3, 16, device="cuda")
    lse = torch.zeros(1, 70_000, 1, 2, device="cuda")
    # queries 4 and 5 see the keys that end at tokens 1, 3 and 5
    seen = torch.tensor([[True, True, False], [True, True, True]], device="cuda")
    expected = (0.25 * q[:, :, 0] @ k.transpose(-1, -2)).exp() * seen
    torch.testing.assert_close(group_weights(q, k, lse, 4, 0.25, 2, 2), expected, rtol=1e-4, atol=1e-4)


def test_kv_lengths_on_the_gpu_are_clamped() -> None:
    q, k, v = (torch.randn(3, 1, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    wild, clamped = (torch.tensor(values, device="cuda") for values in ([-5, 10**6, 70], [0, 300, 70]))
    for layout in (None, masks.local(300, window=9)):
        actual = attention(q, k, v, layout, kv_lengths=wild)
        assert torch.equal(actual, attention(q, k, v, layout, kv_lengths=clamped))


def test_a_host_layout_is_copied_once() -> None:
    layout = masks.local(512, window=9)
    q = torch.randn(1, 1, 512, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q, layout)
    assert layout.plan(q.device) is layout.plan(q.device)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(
    "call",
    [
        zoo.Call(head_dim=64, dtype=torch.bfloat16),
        zoo.Call(head_dim=64, dtype=torch.float16, causal=True, kv_heads=1),
        zoo.Call(head_dim=40, v_dim=16, dtype=torch.bfloat16, scale=-0.3),
        zoo.Call(head_dim=64, dtype=torch.bfloat16, causal=True, scale=1.0),
    ],
    ids=str,
)
# less than one tile row of 192 queries, exactly two, one query more or less than whole rows, many; more or fewer keys
@pytest.mark.parametrize("lengths", [(65, 65), (384, 256), (193, 700), (575, 130), (3001, 3001)], ids=str)
def test_rows_of_192_queries_are_accurate(
    lengths: tuple[int, int], call: zoo.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced, since only long sequences use them."""
    from blocksparse_flash.kernels.hopper import forward as hopper_forward

    monkeypatch.setattr(hopper_forward, "three_warpgroups_pay", lambda *_: True)
    hopper_forward.forward_launches.cache_clear()
    try:
        zoo.assert_backend_is_accurate("hopper", lengths, call, torch.device("cuda"))
    finally:
        hopper_forward.forward_launches.cache_clear()


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=str)
def test_maxima_that_grow_around_the_rescale_threshold_are_accurate(layout: cases.Case, dtype: torch.dtype) -> None:
    """Scores have a standard deviation of 11.4 in base 2; the rescale threshold is 8."""
    call = zoo.Call(head_dim=128, dtype=dtype, scale=0.7)
    zoo.assert_backend_is_accurate("hopper", layout, call, torch.device("cuda"))


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


# ---- decoding: few queries, split-KV ----


def decoding(
    q_len: int, kv_len: int, *, batch: int = 1, heads: int = 32, kv_heads: int = 8, head_dim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, q_len, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    return q, k, v


def sparse(q_len: int, kv_len: int) -> BlockLayout:
    """Partial blocks at the sinks, at both edges of the window and on the diagonal; random full blocks."""
    lengths = q_len, kv_len
    return (
        masks.sink_window(lengths, sinks=20, window=1000) | masks.random(lengths, density=0.1, seed=0)
    ) & masks.causal(lengths)


def assert_heads_are_accurate(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | None,
    sampled: list[tuple[int, int]],
) -> None:
    mask = None if layout is None else layout.to_dense()[0, 0].cuda()
    group = q.shape[1] // k.shape[1]
    for batch, head in sampled:
        found = {}
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            one_q = q[batch, head].to(dtype)
            one_k, one_v = (t[batch, head // group].to(dtype) for t in (k, v))
            scores = (one_q @ one_k.T) * q.shape[3] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            found[dtype] = scores.softmax(-1) @ one_v, scores.logsumexp(-1)
        half, single, truth = (found[dtype] for dtype in (torch.bfloat16, torch.float32, torch.float64))
        one = (slice(batch, batch + 1), slice(head, head + 1))
        assert_as_accurate(out[one], half[0][None, None], truth[0][None, None], name=f"out of head {head}")
        assert_as_accurate(lse[one], single[1][None, None], truth[1][None, None], name=f"lse of head {head}")


@pytest.mark.parametrize("q_len", [1, 3, 16, 64])
@pytest.mark.parametrize("case", ["sparse", "dense"])
def test_decoding_over_131072_keys_is_accurate(q_len: int, case: str) -> None:
    q, k, v = decoding(q_len, 1 << 17, batch=2)
    layout = sparse(q_len, 1 << 17) if case == "sparse" else None
    out, lse = attention_with_lse(q, k, v, layout, backend="triton")
    assert_heads_are_accurate(out, lse, q, k, v, layout, [(0, 0), (0, 13), (1, 31)])


def test_decoding_with_offsets_past_2_to_the_31_is_accurate() -> None:
    """17 KV heads of 1,048,576 x 128: 2.3e9 elements; the last head lies past 2^31."""
    q, k, v = decoding(1, 1 << 20, heads=34, kv_heads=17)
    assert k[0, :16].numel() >= 2**31
    layout = sparse(1, 1 << 20)
    out, lse = attention_with_lse(q, k, v, layout, backend="triton")
    assert_heads_are_accurate(out, lse, q, k, v, layout, [(0, 0), (0, 33)])


@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_is_bitwise_reproducible(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in decoding(2, 20_000, batch=3, head_dim=head_dim))
    lengths = torch.tensor([20_000, 0, 777], device="cuda")
    layout = sparse(2, 20_000)
    first = attention_with_lse(q, k, v, layout, kv_lengths=lengths, deterministic=True, backend="triton")
    assert not first[0][1].any() and first[1][1].isneginf().all()
    for _ in range(20):
        again = attention_with_lse(q, k, v, layout, kv_lengths=lengths, deterministic=True, backend="triton")
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("case", ["sparse", "dense"])
def test_a_cuda_graph_replays_decoding(case: str) -> None:
    """The graph reads kv_lengths at every replay, as a cache with spare room needs; the call does not synchronize."""
    q, k, v = decoding(1, 30_000, batch=2)
    layout = sparse(1, 30_000).to("cuda") if case == "sparse" else None
    lengths = torch.tensor([30_000, 20], device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        return attention_with_lse(q, k, v, layout, kv_lengths=lengths, backend="triton")

    graph, captured = capture(step)
    for turn in (1, 2):
        for tensor in (q, k, v):
            tensor.normal_()
        lengths.copy_(torch.tensor([turn * 1000, 30_000 - turn]))
        graph.replay()
        assert all(map(torch.equal, captured, step()))


def test_gradients_of_a_single_query_are_accurate() -> None:
    q, k, v = (t.requires_grad_() for t in decoding(1, 5000, heads=4, kv_heads=2, head_dim=64))
    layout = sparse(1, 5000)
    dout = torch.randn_like(q)
    found = torch.autograd.grad(attention(q, k, v, layout, backend="triton"), (q, k, v), dout)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    for name, actual, plain, truth in zip(
        ("dq", "dk", "dv"),
        found,
        torch.autograd.grad(attention(q, k, v, layout, backend="reference"), (q, k, v), dout),
        torch.autograd.grad(attention(*wide, layout, backend="reference"), wide, dout.double()),
        strict=True,
    ):
        assert_as_accurate(actual, plain, truth, name=name)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("heads_of_a_group", [1, 4, 16])
def test_a_cuda_graph_captures_selections_by_token(heads_of_a_group: int) -> None:
    """It follows new indices, without synchronization. Tiles of 64 x 64 give equal bits."""
    length, block_size, kv_heads = 1100, 64, 16 // heads_of_a_group
    torch.manual_seed(0)
    q = torch.randn(1, 16, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    k, v = (torch.randn(1, kv_heads, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "kv")
    dout = torch.randn_like(q)
    indices = torch.randint(-1, 18, (1, kv_heads, length, 4), device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = selected_attention(q, k, v, indices, block_size=block_size)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, captured = capture(step)
    for _ in range(2):
        with torch.no_grad():
            indices.random_(-1, 18)
        graph.replay()
        for replayed, expected in zip(captured, step(), strict=True):
            assert torch.equal(replayed, expected)


# ---- decoding: keys in pages ----


def in_pages(cache: Tensor, table: Tensor, n_pages: int, page: int, order: str) -> Tensor:
    """A contiguous cache (batch, kv_heads, length, dim) in the pages of a table, NaN in all others."""
    _, kv_heads, length, dim = cache.shape
    shape = (n_pages, kv_heads, page, dim) if order == "hnd" else (n_pages, page, kv_heads, dim)
    pages = torch.full(shape, torch.nan, device="cuda", dtype=cache.dtype)
    pages = pages if order == "hnd" else pages.transpose(1, 2)
    pages[table.long()] = cache.unflatten(2, (length // page, page)).transpose(1, 2)
    return pages


@pytest.mark.parametrize("order", ["hnd", "nhd"])
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 3, 16, 64])
def test_decoding_from_pages_is_accurate(q_len: int, page: int, order: str) -> None:
    """131,072 keys, and a sequence of fewer; both are accurate."""
    kv_len = 1 << 17
    q, k, v = decoding(q_len, kv_len, batch=2)
    n_pages = 2 * kv_len // page + 3
    table = torch.randperm(n_pages, device="cuda")[: 2 * kv_len // page].reshape(2, -1).int()
    pages = [in_pages(cache, table, n_pages, page, order) for cache in (k, v)]
    out, lse = paged_attention_with_lse(q, *pages, table, torch.tensor([kv_len, 50_000], device="cuda"))
    assert_heads_are_accurate(out, lse, q, k, v, masks.causal((q_len, kv_len)), [(0, 0), (0, 13)])
    shorter = [tensor[1:, :, :50_000] for tensor in (k, v)]
    assert_heads_are_accurate(out[1:], lse[1:], q[1:], *shorter, masks.causal((q_len, 50_000)), [(0, 13)])


def test_pages_with_offsets_past_2_to_the_31_are_accurate() -> None:
    """40,000 pages of 64 keys for 8 heads of 128: 2.6e9 elements; the sequence is in the last ones."""
    q, k, v = decoding(1, 4096)
    pages = torch.full((40_000, 8, 64, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert pages[:32_768].numel() >= 2**31
    table = torch.arange(39_999, 39_999 - 128, -1, device="cuda").int()[None]
    for cache, ids in ((k, table[:, :64]), (v, table[:, 64:])):
        pages[ids.long()] = cache.unflatten(2, (64, 64)).transpose(1, 2)
    lengths = torch.tensor([4096], device="cuda")
    # one tensor holds both, 64 pages apart
    out, lse = paged_attention_with_lse(q, pages[64:], pages[:-64], table[:, :64] - 64, lengths)
    assert_heads_are_accurate(out, lse, q, k, v, None, [(0, 0), (0, 31)])


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("select", ["all", "means", "bounds"])
def test_a_cuda_graph_captures_decoding_from_pages(select: str, page: int) -> None:
    """Appending, selection and attention follow new tokens, tables and lengths, without synchronization."""
    batch, max_pages, n_pages = 4, 40, 200
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, 1, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    k_pages, v_pages = (torch.randn(n_pages, 8, page, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    table = torch.zeros(batch, max_pages, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        paged.append_to_pages(k, v, k_pages, v_pages, table, lengths)
        selected = None
        if select != "all":
            summaries = (paged.page_means if select == "means" else paged.page_bounds)(k_pages)
            scores = paged.score_pages(q, summaries, table)
            selected = paged.select_pages(scores, lengths, k=7, page_size=page, always=(1, 2))
        return paged_attention_with_lse(q, k_pages, v_pages, table, lengths, selected=selected)

    graph, captured = capture(step)
    for turn in range(3):
        for tensor in (q, k, v):
            tensor.normal_()
        table.copy_(torch.randperm(n_pages)[: batch * max_pages].reshape(batch, max_pages))
        lengths.copy_(torch.tensor([max_pages * page - turn, 1 + turn, 0, 17 * page + turn]))
        graph.replay()
        assert all(map(torch.equal, captured, step()))
        assert not captured[0][2].any() and captured[1][2].isneginf().all() and captured[0][3].any()


def test_wrong_numbers_of_pages_on_the_gpu_read_nothing_outside() -> None:
    """Lengths are clamped, selected pages that do not exist ignored, ids of pages clamped."""
    q, k, v = decoding(2, 512, batch=3)
    table = torch.randperm(96, device="cuda").reshape(3, 32).int()
    pages = [in_pages(cache, table, 96, 16, "hnd") for cache in (k, v)]
    wild, clamped = (torch.tensor(values, device="cuda") for values in ([-5, 10**6, 70], [0, 512, 70]))
    first = paged_attention_with_lse(q, *pages, table, wild)
    assert all(map(torch.equal, first, paged_attention_with_lse(q, *pages, table, clamped)))
    selected = torch.randint(0, 32, (3, 8, 6), device="cuda")
    padded = torch.cat(
        [selected, selected[..., :2], selected.new_tensor([-1, 32, 2**40, -(2**40)]).expand(3, 8, -1)], -1
    )
    found = (paged_attention_with_lse(q, *pages, table, clamped, selected=each) for each in (selected, padded))
    torch.testing.assert_close(*found)
    # without NaN the results of wrong ids are numbers
    for cache in pages:
        cache.nan_to_num_(0.0)
    wrong = torch.full_like(table, 2**31 - 1)
    wrong[1] = -(2**31)
    assert paged_attention(q, *pages, wrong, clamped).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decoding_from_pages_is_bitwise_reproducible(head_dim: int) -> None:
    q, k, v = decoding(2, 20_480, batch=3, head_dim=head_dim)
    table = torch.randperm(3 * 1280, device="cuda").reshape(3, 1280).int()
    pages = [in_pages(cache, table, 3 * 1280, 16, "nhd") for cache in (k, v)]
    lengths = torch.tensor([20_480, 0, 777], device="cuda")
    selected = torch.randint(-1, 1280, (3, 8, 200), device="cuda")
    first = paged_attention_with_lse(q, *pages, table, lengths, selected=selected)
    for _ in range(20):
        again = paged_attention_with_lse(q, *pages, table, lengths, selected=selected)
        assert all(map(torch.equal, first, again))
