"""Blocks selected by token, listed by key block, on a Hopper GPU: large calls, CUDA graphs, no synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from blocksparse_flash import ops, selected_attention_with_lse
from blocksparse_flash.kernels.hopper import selected_backward, selected_forward
from blocksparse_flash.kernels.selected_shapes import sizes_of
from blocksparse_flash.plan import selected_builder
from blocksparse_flash.plan_format import BY_KEY_BLOCK
from tests.kernels.hopper import test_selected as simulated
from tests.plan.test_selected_builder import limited
from tests.support.closeness import assert_as_accurate, buried_inputs
from tests.support.gpu import HAS_HOPPER, capture
from tests.support.no_waiting import no_waiting

pytestmark = pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")

NAMES = ("out", "lse", "dq", "dk", "dv")
IS_FASTER = selected_builder.is_faster


class Call(NamedTuple):
    """A causal call in which each KV head selects k key blocks for each query block of its query heads."""

    kv_heads: int = 4
    group: int = 16
    query_block: int = 1
    length: int = 8192
    block: int = 64
    k: int = 16
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"block_size": self.block, "query_block_size": self.query_block}

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def indices(self, device: str = "cuda") -> Tensor:
        """Random blocks: some repeated, some after the query, some unused."""
        shape = self.batch, self.kv_heads, -(-self.length // self.query_block), self.k
        return torch.randint(-1, -(-self.length // self.block), shape, device=device)

    def tensors(self, device: str = "cuda") -> list[Tensor]:
        """q, k, v and dout."""
        (dim, v_dim), heads = self.dims, self.kv_heads * self.group
        shapes = [(heads, dim), (self.kv_heads, dim), (self.kv_heads, v_dim), (heads, v_dim)]
        made = [torch.randn(self.batch, n, self.length, d, device=device, dtype=self.dtype) for n, d in shapes]
        return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def step(tensors: list[Tensor], indices: Tensor, backend: str = "hopper", **options: Any) -> list[Tensor]:
    """out, lse, dq, dk and dv; the gradient of lse is 1."""
    *leaves, dout = tensors
    out, lse = selected_attention_with_lse(*leaves, indices, backend=backend, **options)
    # that of an empty row would be -inf
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, finite), leaves, (dout, torch.ones_like(lse)))]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The plans of calls by key block, one for each forward; they have them where the kernels take them."""
    found: list[list[Tensor]] = []
    original = ops._kernels

    def kernels(backend: str, deterministic: bool, tile: int) -> Any:
        forward, backward = original(backend, deterministic, tile)

        def recorded(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], *arguments: Any, **options: Any) -> Any:
            if tile == BY_KEY_BLOCK:
                assert backend == "hopper"
                found.append(plan)
            return forward(q, k, v, plan, *arguments, **options)

        return recorded, backward

    monkeypatch.setattr(ops, "_kernels", kernels)
    monkeypatch.setattr(selected_builder, "is_faster", lambda *_: True)
    return found


# ---- large calls ----


# query blocks of 8, 16 and 32 rows, of one token and of several
CALLS = {
    "8 rows": Call(group=8, kv_heads=8),
    "16 rows": Call(),
    "16 rows, 128 keys": Call(block=128),
    "16 rows, 256 keys": Call(block=256, k=8),
    "32 rows": Call(group=32),
    "32 rows, 128 keys": Call(group=32, block=128, kv_heads=2),
    "8 tokens": Call(group=1, query_block=8, kv_heads=16),
    "4 tokens, 128 keys": Call(group=4, query_block=4, block=128),
    "16 tokens, 256 keys": Call(group=2, query_block=16, block=256, kv_heads=8),
    "padded groups": Call(group=12, dims=(64, 64), dtype=torch.float16),
    "64 columns": Call(dims=(64, 64), block=128),
    "64 and 128 columns": Call(dims=(64, 128), dtype=torch.float16),
    "128 and 64 columns": Call(dims=(128, 64), block=128, dtype=torch.float16),
    "80 columns": Call(dims=(80, 80), kv_heads=2),
    "ragged": Call(length=8111, batch=2, kv_heads=2),
    "rounds": Call(length=16384),
    "rounds, 128 keys": Call(length=16384, block=128),
    "rounds, 8 tokens": Call(length=32768, group=4, query_block=8, k=64, kv_heads=2),
}


def sampled_pairs(call: Call, indices: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether some queries attend to some keys, bool (queries, keys). indices: of one KV head."""
    n_cols = -(-call.length // call.block)
    chosen = torch.zeros(len(indices), n_cols + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(1, indices % (n_cols + 1), True)
    return chosen[(queries // call.query_block)[:, None], keys // call.block] & (keys <= queries[:, None])


def rows_of(
    call: Call, tensors: list[Tensor], indices: Tensor, rows: Tensor, head: int, dtype: torch.dtype
) -> list[Tensor]:
    """out, lse and dq of some queries of a head of the last batch, computed in `dtype`."""
    kv_head = head // call.group
    q, dout = (tensor.detach()[-1, head, rows].to(dtype) for tensor in (tensors[0], tensors[3]))
    k, v = (tensor.detach()[-1, kv_head].to(dtype) for tensor in tensors[1:3])
    mask = sampled_pairs(call, indices[-1, kv_head], rows, torch.arange(call.length, device=q.device))
    scores = (q @ k.mT * call.scale).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.nan_to_num(neginf=0.0)[:, None]).exp()
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1)[:, None] + 1)
    return [out, lse, ds @ k * call.scale]


def cols_of(
    call: Call, tensors: list[Tensor], indices: Tensor, results: list[Tensor], cols: Tensor, kv_head: int,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """dk and dv of some keys of a KV head of the last batch, computed in `dtype` from out and lse."""
    heads = slice(kv_head * call.group, (kv_head + 1) * call.group)
    q, dout, out, lse = (
        tensor.detach()[-1, heads].to(dtype) for tensor in (tensors[0], tensors[3], results[0], results[1])
    )
    k, v = (tensor.detach()[-1, kv_head, cols].to(dtype) for tensor in tensors[1:3])
    mask = sampled_pairs(call, indices[-1, kv_head], torch.arange(call.length, device=q.device), cols)
    p = (q @ k.mT * call.scale - lse.nan_to_num(neginf=0.0)[..., None]).exp().masked_fill(~mask, 0.0)
    ds = p * (dout @ v.mT - (dout * out).sum(-1)[..., None] + 1)
    return [(ds.mT @ q).sum(0) * call.scale, (p.mT @ dout).sum(0)]


def assert_samples_are_accurate(call: Call, tensors: list[Tensor], indices: Tensor, results: list[Tensor]) -> None:
    """Compares some queries and some keys of the first and the last head with float64."""
    ends = torch.tensor([0, 1, call.length // 2, call.length - 1])
    sampled = torch.cat([torch.randint(call.length, (60,)), ends]).to(indices.device)
    for head, kv_head in ((0, 0), (call.kv_heads * call.group - 1, call.kv_heads - 1)):
        same, single, exact = (
            [
                *rows_of(call, tensors, indices, sampled, head, dtype),
                *cols_of(call, tensors, indices, results, sampled, kv_head, dtype),
            ]
            for dtype in (call.dtype, torch.float32, torch.float64)
        )
        same[1] = single[1]
        for i, (name, axis) in enumerate(zip(NAMES, (head, head, head, kv_head, kv_head), strict=True)):
            actual = results[i][-1, axis, sampled][None, None]
            assert_as_accurate(actual, same[i][None, None], exact[i][None, None], name=name)


@pytest.mark.parametrize("name", CALLS)
def test_samples_of_large_calls_are_accurate(name: str, plans: list[list[Tensor]]) -> None:
    call = CALLS[name]
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    results = step(tensors, indices, **call.options)
    assert len(plans) == 1
    assert (len(sizes_of(plans[0], call.length).rounds) > 1) or not name.startswith("rounds")
    assert_samples_are_accurate(call, tensors, indices, results)


@pytest.mark.parametrize("name", ["8 rows", "16 rows, 128 keys", "16 rows, 256 keys", "8 tokens", "rounds"])
def test_all_of_a_large_call_agrees_with_triton_in_float32(name: str, plans: list[list[Tensor]]) -> None:
    """A wrong block would be off by more than a 256th of the largest value."""
    call = CALLS[name]._replace(dtype=torch.float16, kv_heads=2)
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    results = step(tensors, indices, **call.options)
    assert len(plans) == 1
    wide = [tensor.detach().float().requires_grad_(i < 3) for i, tensor in enumerate(tensors)]
    for one, found, truth in zip(NAMES, results, step(wide, indices, "triton", **call.options), strict=True):
        is_finite = truth.isfinite()
        assert torch.equal(is_finite, found.isfinite()), one
        difference = (found.float() - truth).masked_fill(~is_finite, 0.0)
        assert difference.abs().max() <= 2**-8 * truth[is_finite].abs().max(), one
    assert len(plans) == 1


def test_offsets_past_2_to_the_31_are_accurate(plans: list[list[Tensor]]) -> None:
    """48 query heads of 1,048,576 x 64: 3.2e9 elements; the last head lies past 2^31."""
    call = Call(kv_heads=3, length=1 << 20, dims=(64, 64), k=3)
    assert 47 * call.length * 64 > 2**31
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    results = step(tensors, indices, **call.options)
    assert len(plans) == 1 and len(sizes_of(plans[0], call.length).rounds) > 4
    sampled = torch.cat([torch.randint(call.length, (60,)), torch.tensor([0, call.length - 1])]).cuda()
    same, single, exact = (
        rows_of(call, tensors, indices, sampled, 47, dtype) for dtype in (call.dtype, torch.float32, torch.float64)
    )
    same[1] = single[1]
    for name, result, *references in zip(NAMES, results, same, exact, strict=False):
        actual, *others = (each[None, None] for each in (result[-1, 47, sampled], *references))
        assert_as_accurate(actual, *others, name=name)


# ---- every option ----


@pytest.fixture
def in_rounds() -> Iterator[Any]:
    """`limited`, with launches for its rounds and work items."""
    caches = selected_forward.forward_launches, selected_backward.backward_launches
    for cache in caches:
        cache.cache_clear()
    yield limited
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", simulated.CASES)
def test_the_cases_of_the_simulator_are_accurate(
    name: str, dtype: torch.dtype, plans: list[list[Tensor]], in_rounds: Any
) -> None:
    case = simulated.CASES[name]._replace(dtype=dtype)
    *tensors, dlse = (tensor.cuda() for tensor in case.tensors())
    q, k, v, dout = buried_inputs(dict(zip(("q", "k", "v", "dout"), tensors, strict=True))).values()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bounds = None if case.documents is None else torch.tensor(case.documents, device="cuda")
    options: dict[str, Any] = {"block_size": case.block, "query_block_size": case.query_block, "causal": case.causal}
    options |= {"scale": case.scale, "cu_seqlens": bounds, "backend": "hopper"}
    with in_rounds(round_rows=case.round_rows, item_rows=case.item_rows):
        out, lse = selected_attention_with_lse(*leaves, case.indices.cuda(), **options)
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    assert plans or case.n_selections == 1 or case.shared
    for name, result, references in zip(NAMES, (out, lse, *grads), simulated.expected(case), strict=True):
        assert_as_accurate(result.cpu(), *references, name=name)


@pytest.mark.parametrize(
    "changes", [{"block": 16}, {"block": 32}, {"dims": (136, 64)}, {"group": 4}, {"query_block": 4}], ids=str
)
def test_other_calls_have_plans_of_tiles(changes: dict[str, Any], plans: list[list[Tensor]]) -> None:
    """Query blocks of 4 and of 64 rows, among others."""
    call = Call(length=1000)._replace(**changes)
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    results = step(tensors, indices, **call.options)
    assert not plans
    assert_samples_are_accurate(call, tensors, indices, results)


def test_auto_takes_plans_by_key_block_where_they_pay(
    plans: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_builder, "is_faster", IS_FASTER)
    for call, expected in ((Call(), 1), (Call(length=1000), 0)):
        plans.clear()
        step(call.tensors(), call.indices(), "auto", **call.options)
        assert len(plans) == expected


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_profiled_calls_run_the_same_kernels(backend: str, plans: list[list[Tensor]]) -> None:
    """Through the operator, on the heads in place."""
    call = Call()
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    direct = step(tensors, indices, backend, **call.options)
    # otherwise it warns that it clears events
    with torch.profiler.profile(acc_events=True) as profiler:
        profiled = step(tensors, indices, backend, **call.options)
    assert len(plans) == 2 and all(map(torch.equal, direct, profiled))
    names = [event.name for event in profiler.events()]
    assert any("attention_backward" in name for name in names) and not any("_GroupHeads" in name for name in names)


# ---- reproducibility, CUDA graphs, synchronization ----


@pytest.mark.parametrize("name", ["8 rows", "16 rows, 128 keys", "32 rows", "64 columns", "rounds", "ragged"])
def test_runs_are_bitwise_equal(name: str, plans: list[list[Tensor]]) -> None:
    call = CALLS[name]
    torch.manual_seed(0)
    tensors, indices = call.tensors(), call.indices()
    first = step(tensors, indices, **call.options)
    for _ in range(10):
        # freed memory is reused: no kernel may rely on zeros
        torch.full((1 << 28,), torch.nan, device="cuda")
        assert all(map(torch.equal, first, step(tensors, indices, **call.options)))
    assert len(plans) == 11


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("n_documents", [0, 9])
@pytest.mark.parametrize("name", ["8 rows", "16 rows, 128 keys", "16 tokens, 256 keys", "32 rows"])
def test_a_cuda_graph_replays_selection_attention_and_backward(
    name: str, n_documents: int, plans: list[list[Tensor]]
) -> None:
    """With other indices and documents, without synchronization; work items differ in number from replay to replay."""
    call = CALLS[name]._replace(length=4100, batch=2)
    torch.manual_seed(0)
    tensors, scores = call.tensors(), torch.empty(*call.indices().shape[:3], -(-call.length // call.block)).cuda()
    boundaries = torch.zeros(2, n_documents + 1, dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, ...]:
        indices = scores.topk(call.k, dim=-1).indices
        bounds = boundaries if n_documents else None
        return tuple(step(tensors, indices, **call.options, cu_seqlens=bounds))

    def draw(bias: float) -> None:
        # a large bias concentrates the selections on the first blocks
        scores.normal_().sub_(bias * torch.arange(scores.shape[-1], device="cuda"))
        if n_documents:
            inner = torch.randint(0, call.length, (2, n_documents)).sort(1).values
            boundaries.copy_(torch.nn.functional.pad(inner, (1, 0)))

    draw(0.0)
    graph, captured = capture(run)
    for bias in (1.0, 0.0, 0.01):
        draw(bias)
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
        graph.replay()
        for replayed, expected in zip(captured, run(), strict=True):
            assert torch.equal(replayed, expected)
    # the step before the capture, its repetition, the capture, and three more
    assert len(plans) == 6


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("name", ["16 rows", "16 tokens, 256 keys", "rounds"])
def test_a_call_never_waits_for_the_gpu(name: str, has_documents: bool, plans: list[list[Tensor]]) -> None:
    call = CALLS[name]
    tensors, indices = call.tensors(), call.indices()
    bounds = torch.tensor([0, 100, 3000, 8000], dtype=torch.int32, device="cuda") if has_documents else None
    step(tensors, indices, **call.options, cu_seqlens=bounds)
    with no_waiting():
        step(tensors, indices, **call.options, cu_seqlens=bounds)
    assert len(plans) == 2
