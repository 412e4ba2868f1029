"""The bytes that explain reports equal those that launchers allocate and those measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import masks
from blocksparse_flash import BlockLayout

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import lines as measurements
from benchmarks.report import pages
from benchmarks.run import calibrate, shapes
from blocksparse_flash import functional
from blocksparse_flash.explanation import memory
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.kernels.inputs import BackwardInputs
from blocksparse_flash.plan_format import ROW_LISTS
from blocksparse_flash.runtime import launch
from blocksparse_flash.score_mods import Scores
from blocksparse_flash.validation import ScoreOptions

pytest.importorskip("triton", reason="needs Triton")


class Allocations(TorchDispatchMode):
    """The peak of the memory that operators allocate, as the allocator of a GPU counts it.

    existing  tensors whose memory does not count
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.existing = {StorageWeakRef(tensor.untyped_storage()) for tensor in existing}
        self.nbytes_of: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.nbytes_of[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        # references are equal if they are of the same storage, and keep no memory alive
        live = {ref: nbytes for ref, nbytes in self.nbytes_of.items() if not ref.expired()}
        self.nbytes_of = live
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for ref, nbytes in live.items() if ref not in self.existing))
        return result

    def assert_reported(self, reported: memory.Moved, results: tuple[torch.Tensor, ...]) -> None:
        """What `explain` reports of a call with these results is exact."""
        assert reported.writes == sum(each.nbytes for each in results)
        assert reported.workspace == self.peak_bytes - reported.writes


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules with launchers, on a simulated GPU of 132 SMs; launches do nothing."""
    from blocksparse_flash.kernels.hopper import backward as hopper_backward
    from blocksparse_flash.kernels.hopper import backward_dq, fine_backward, fine_forward, wide_backward
    from blocksparse_flash.kernels.hopper import forward as hopper_forward
    from blocksparse_flash.kernels.triton import backward, forward

    modules = {
        "forward": forward,
        "backward": backward,
        "hopper_forward": hopper_forward,
        "hopper_backward": hopper_backward,
        "fine_forward": fine_forward,
        "fine_backward": fine_backward,
    }
    of_hopper = (hopper_forward, hopper_backward, backward_dq, wide_backward, fine_forward, fine_backward)
    cached = (
        forward.forward_launch,
        backward.backward_launches,
        hopper_forward.forward_launches,
        hopper_backward.backward_launches,
        wide_backward.backward_launches,
        fine_forward.forward_launches,
        fine_backward.backward_launches,
    )
    for launches_of in cached:
        launches_of.cache_clear()
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: None)
    for module in of_hopper:
        monkeypatch.setattr(module, "num_sms", lambda index: 132)
    monkeypatch.setattr(Call, "n_sms", 132)
    # TMA descriptors need memory of a GPU
    for module in of_hopper:
        monkeypatch.setattr(module, "DescriptorFactory", lambda spec, block: lambda tensor: tensor)
    yield modules
    for launches_of in cached:
        launches_of.cache_clear()


# (head_dim, v_head_dim): a multiple of 8; rows of v padded, or of all tensors; 96 columns in the Hopper backward; 192
# of both, or of q only; 128 beside 256
@pytest.mark.sweep
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 100), (64, 60), (36, 20), (72, 96), (192, 192), (192, 128), (80, 200)]
)
@pytest.mark.parametrize("backend", ["triton", "hopper", "hopper, deterministic"])
# split: a layout with a few long tile rows and columns; fine: layouts that `hopper` runs in tiles of 64 x 64
@pytest.mark.parametrize(
    "kind", ["plain", "layout", "few tiles", "long columns", "strided", "split", "fine layout", "fine split"]
)
def test_reported_bytes_are_those_that_launchers_allocate(
    launchers: dict[str, ModuleType],
    dims: tuple[int, int],
    backend: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # by the kind, not by the layout
    monkeypatch.setattr(
        "blocksparse_flash.explanation.call.fastest_tile", lambda *_, **__: 64 if kind.startswith("fine") else 128
    )
    batch, heads, kv_heads, q_len, kv_len = {
        # whole tiles of 128 x 128
        "layout": (2, 4, 2, 250, 380),
        "split": (1, 2, 1, 9000, 9050),
        "fine split": (1, 2, 1, 9000, 9050),
        # so few tiles per row that dq has a separate launch
        "few tiles": (32, 2, 1, 16384, 16384),
        # and where that of dk and dv sums over query heads
        "long columns": (1, 64, 4, 16384, 1024),
    }.get(kind, (2, 4, 2, 200, 300))
    q = torch.empty(batch, heads, q_len, dims[0], dtype=torch.bfloat16)
    k = torch.empty(batch, kv_heads, kv_len, dims[0], dtype=torch.bfloat16)
    v = torch.empty(batch, kv_heads, kv_len, dims[1], dtype=torch.bfloat16)
    if kind == "strided":
        # the address is not a multiple of 16 bytes
        k = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    layout = None
    if kind == "few tiles":
        layout = masks.block_diagonal(q_len, size=256)
    if kind == "long columns":
        layout = masks.random((q_len, kv_len), density=0.5, block_size=128, seed=0)
    if kind in ("layout", "split"):
        layout = masks.local((q_len, kv_len), window=1500, block_size=64)
    if kind in ("fine layout", "fine split"):
        layout = masks.local((q_len, kv_len), window=20, block_size=64)
    if kind in ("split", "fine split"):
        layout |= masks.global_tokens((q_len, kv_len), tokens=100, block_size=64)
    call = Call(q, k, v, layout, False, False, 0.0, "deterministic" in backend, q.dtype, backend.partition(",")[0])
    plan = [] if call.plan is None else list(call.plan)
    assert call.is_fine == (kind.startswith("fine") and max(dims) <= 128)

    prefix = "" if backend == "triton" else "fine_" if call.is_fine else "hopper_"
    forward: Callable[..., Any] = launchers[f"{prefix}forward"].forward
    backward: Callable[..., Any] = launchers[f"{prefix}backward"].backward
    with Allocations(q, k, v, *plan) as allocations:
        out, lse = forward(q, k, v, plan, None, None, 0.1, False, 0.0)
    reported = memory.forward(call)
    assert (memory._split_bytes(call, ROW_LISTS, 132) > 0) == kind.endswith("split")
    allocations.assert_reported(reported, (out, lse))

    dout = torch.empty_like(out)
    options = {"deterministic": True} if call.deterministic and not call.is_fine else {}
    with Allocations(q, k, v, out, lse, dout, *plan) as allocations:
        grads = backward(BackwardInputs(dout, None, q, k, v, out, lse), plan, None, None, 0.1, False, 0.0, **options)
    reported = memory.backward(call)
    allocations.assert_reported(reported, grads)
    # the Hopper backward iterates over tile columns; a separate launch for dq iterates over tile rows
    has_separate_dq = call.deterministic or max(dims) > 128
    has_separate_dq |= kind == "few tiles" and max(dims) <= 64
    # sums of 64 columns stay in L2
    has_separate_dq |= kind == "long columns" and max(dims) > 64
    is_one_kernel = backend == "hopper" and not call.is_fine
    uses_cols_only = is_one_kernel and not has_separate_dq
    lists = plan[3:] if uses_cols_only else plan
    assert reported.reads == sum(tensor.nbytes for tensor in (q, k, v, out, dout, lse, *lists))


@pytest.mark.parametrize(
    ("batch", "heads", "length", "causal", "has_kv_lengths", "expected"),
    [
        # one wave on 132 SMs; two, which are static unless lengths are on the GPU
        (1, 16, 1000, True, False, 0),
        (1, 32, 1000, False, False, 0),
        (1, 32, 1000, True, False, 0),
        (1, 32, 1000, False, True, 4),
        # two with several groups of heads, which begin with the longest tile rows again; three
        (1, 132, 200, True, False, 4),
        (1, 132, 200, False, False, 0),
        (1, 40, 1000, False, False, 4),
    ],
)
def test_the_reported_counter_of_a_plain_forward_is_the_one_that_it_allocates(
    launchers: dict[str, ModuleType],
    batch: int,
    heads: int,
    length: int,
    causal: bool,
    has_kv_lengths: bool,
    expected: int,
) -> None:
    q, k, v = (torch.empty(batch, heads, length, 128, dtype=torch.bfloat16) for _ in range(3))
    kv_lengths = torch.full((batch,), length, dtype=torch.int32) if has_kv_lengths else None
    call = Call(q, k, v, None, causal, has_kv_lengths, 0.0, False, q.dtype, "hopper")
    existing = [q, k, v] if kv_lengths is None else [q, k, v, kv_lengths]
    with Allocations(*existing) as allocations:
        results = launchers["hopper_forward"].forward(q, k, v, [], kv_lengths, None, 0.1, causal, 0.0)
    allocations.assert_reported(memory.forward(call), results)
    assert memory.forward(call).workspace == expected


# `hopper` leaves the gradient of slopes to `triton`
@pytest.mark.sweep
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (64, 60)])
@pytest.mark.parametrize("backend", ["triton", "hopper", "hopper, deterministic"])
@pytest.mark.parametrize("kind", ["plain", "layout", "fine layout"])
@pytest.mark.parametrize("trained", ["sinks", "slopes", "sinks and slopes"])
def test_reported_bytes_of_trained_sinks_and_slopes_are_those_that_launchers_allocate(
    launchers: dict[str, ModuleType],
    dims: tuple[int, int],
    backend: str,
    kind: str,
    trained: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_fine = kind.startswith("fine") and max(dims) <= 128 and (backend == "triton" or "slopes" not in trained)
    monkeypatch.setattr("blocksparse_flash.explanation.call.fastest_tile", lambda *_, **__: 64 if is_fine else 128)
    batch, heads, length = 2, 4, 500
    q, k, v = (torch.empty(batch, heads, length, dim, dtype=torch.bfloat16) for dim in (dims[0], *dims))
    layout = None if kind == "plain" else masks.local(length, window=150, block_size=64)
    sinks, slopes = (
        torch.zeros(heads, requires_grad=True) if name in trained else None for name in ("sinks", "slopes")
    )
    name, _, deterministic = backend.partition(", ")
    call = Call(
        q, k, v, layout, False, False, 0.0, bool(deterministic), q.dtype, name,
        scores=ScoreOptions(sinks, None, slopes, None),
    )  # fmt: skip
    plan = [] if call.plan is None else list(call.plan)
    assert call.is_fine == is_fine
    out, lse = torch.empty(batch, heads, length, dims[1], dtype=torch.bfloat16), torch.empty(batch, heads, length)
    dout, wanted = torch.empty_like(out), (sinks is not None, slopes is not None, False, False)
    inputs, scores = BackwardInputs(dout, None, q, k, v, out, lse), Scores(sinks, slopes, None, [], 0.0)
    prefix = "" if name == "triton" or slopes is not None else "fine_" if is_fine else "hopper_"
    backward: Callable[..., Any] = launchers[f"{prefix}backward"].backward
    keywords = {"deterministic": True} if deterministic and prefix == "hopper_" else {}
    options = [each for each in (sinks, slopes) if each is not None]
    with Allocations(q, k, v, out, lse, dout, *options, *plan) as allocations, torch.no_grad():
        grads = backward(inputs, plan, None, None, 0.1, False, 0.0, scores, wanted, **keywords)
    reported = memory.backward(call)
    allocations.assert_reported(reported, grads)


# few queries over many keys, whose splits write partial results
@pytest.mark.sweep(by=lambda dims, dtype, q_len, kind: {dims, dtype, (kind, q_len > 1), q_len})
@pytest.mark.parametrize("dims", [(64, 64), (128, 100), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 5, 64])
@pytest.mark.parametrize("kind", ["plain", "layout", "layout of each head", "many heads"])
def test_reported_bytes_of_few_queries_are_those_that_launchers_allocate(
    launchers: dict[str, ModuleType],
    dims: tuple[int, int],
    dtype: torch.dtype,
    q_len: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from blocksparse_flash.kernels.triton import split_kv

    monkeypatch.setattr(split_kv, "num_sms", lambda index: 132)
    split_kv.split_kv_launches.cache_clear()
    kv_len, (batch, heads, kv_heads) = 4000, (64, 32, 8) if kind == "many heads" else (2, 4, 2)
    q = torch.empty(batch, heads, q_len, dims[0], dtype=dtype)
    k, v = (torch.empty(batch, kv_heads, kv_len, dim, dtype=dtype) for dim in dims)
    layout = None
    if "layout" in kind:
        mask = torch.rand(1, heads if "head" in kind else 1, 1, -(-kv_len // 64)) < 0.7
        layout = BlockLayout.from_block_mask(mask, q_len, kv_len, block_size=64)
    call = Call(q, k, v, layout, False, False, 0.0, False, dtype, "triton")
    plan = [] if call.plan is None else list(call.plan)
    with Allocations(q, k, v, *plan) as allocations:
        out, lse = launchers["forward"].forward(q, k, v, plan, None, None, 0.1, False, 0.0)
    split_kv.split_kv_launches.cache_clear()
    reported = memory.forward(call)
    allocations.assert_reported(reported, (out, lse))
    assert (reported.workspace > 0) == (kind != "many heads")


def of_heads(length: int) -> BlockLayout:
    """Two heads with layouts of their own."""
    return BlockLayout.stack_heads([masks.local(length, window=window, block_size=128) for window in (300, 600)])


# kind -> ((batch, heads, KV heads, tokens), layout)
BIASED = {
    "layout": ((2, 4, 2, 500), lambda n: masks.local(n, window=150, block_size=128)),
    "layout of each head": ((2, 2, 1, 500), of_heads),
    "blocks of 256": ((2, 4, 2, 1000), lambda n: masks.local(n, window=150, block_size=256)),
    "split": (
        (1, 2, 1, 9000),
        lambda n: masks.local(n, window=500, block_size=128) | masks.global_tokens(n, tokens=100, block_size=128),
    ),
    # where dq has a separate launch even without a bias
    "few tiles": ((32, 2, 1, 16384), lambda n: masks.block_diagonal(n, size=256, block_size=128)),
    # and where that of dk and dv sums over query heads
    "long columns": ((1, 64, 4, 2048), lambda n: masks.random((n, n), density=0.9, block_size=128, seed=0)),
    "small blocks": ((2, 4, 2, 500), lambda n: masks.local(n, window=150, block_size=(16, 32))),
}

# `hopper` has a bias for blocks of multiples of 128 only
BACKENDS_OF_BIASED = [
    (backend, kind)
    for kind in BIASED
    for backend in ("triton", "hopper", "hopper, deterministic")
    if backend == "triton" or kind != "small blocks"
]


# padded rows, too; a softcap makes the steps of dq shorter
@pytest.mark.sweep
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (256, 256), (64, 60), (100, 36)])
@pytest.mark.parametrize(("backend", "kind"), BACKENDS_OF_BIASED)
@pytest.mark.parametrize(
    "bias", ["fixed", "trained", "trained, softcap", "trained, slopes", "trained, shared", "trained, bfloat16"]
)
def test_reported_bytes_of_a_block_bias_are_those_that_launchers_allocate(
    launchers: dict[str, ModuleType], dims: tuple[int, int], backend: str, kind: str, bias: str
) -> None:
    (batch, heads, kv_heads, length), make_layout = BIASED[kind]
    layout = make_layout(length)
    q = torch.empty(batch, heads, length, dims[0], dtype=torch.bfloat16)
    k = torch.empty(batch, kv_heads, length, dims[0], dtype=torch.bfloat16)
    v = torch.empty(batch, kv_heads, length, dims[1], dtype=torch.bfloat16)
    is_shared = "shared" in bias or layout.shape[:2] != (1, 1)
    block_bias = torch.zeros(*(() if is_shared else (batch, heads)), layout.capacity, requires_grad="trained" in bias)
    if "bfloat16" in bias:
        block_bias = block_bias.detach().to(torch.bfloat16).requires_grad_()
    softcap = 30.0 if "softcap" in bias else None
    slopes = torch.zeros(heads) if "slopes" in bias else None
    options = ScoreOptions(None, softcap, slopes, block_bias)
    name, _, deterministic = backend.partition(", ")
    call = Call(q, k, v, layout, False, False, 0.0, bool(deterministic), q.dtype, name, scores=options)
    assert call.plan is not None and call.tile == 128
    assert (memory._split_bytes(call, ROW_LISTS, 132) > 0) == (kind == "split")
    assert memory.sums_dkdv(call, 132) == (kind == "long columns" and backend == "hopper" and max(dims) <= 128)
    plan, index = list(call.plan), list(layout.bias_index("cpu"))

    prefix = "" if name == "triton" else "hopper_"
    forward: Callable[..., Any] = launchers[f"{prefix}forward"].forward
    backward: Callable[..., Any] = launchers[f"{prefix}backward"].backward
    existing = q, k, v, block_bias, *([] if slopes is None else [slopes]), *plan, *index
    with Allocations(*existing) as allocations, torch.no_grad():
        converted = functional._for_kernels(options, q).block_bias
        scores = Scores(None, slopes, converted, index, softcap or 0.0)
        out, lse = forward(q, k, v, plan, None, None, 0.1, False, 0.0, scores)
    reported = memory.forward(call)
    allocations.assert_reported(reported, (out, lse))
    assert converted is not None
    assert reported.reads == sum(each.nbytes for each in (q, k, v, *plan[:3], plan[6], converted, index[0]))

    dout, wanted = torch.empty_like(out), (False, False, block_bias.requires_grad, False)
    inputs = BackwardInputs(dout, None, q, k, v, out, lse)
    keywords = {"deterministic": True} if deterministic else {}
    with Allocations(*existing, converted, out, lse, dout) as allocations, torch.no_grad():
        grads = backward(inputs, plan, None, None, 0.1, False, 0.0, scores, wanted, **keywords)
    reported = memory.backward(call)
    allocations.assert_reported(reported, grads)
    # the kernel for dq alone iterates over tile rows
    assert memory.adds_dq(call) == (
        backend == "hopper" and max(dims) <= 128 and not (kind == "few tiles" and max(dims) <= 64)
    )
    lists = [*plan[3:], index[1]] if memory.adds_dq(call) else [*plan, *index[:2]]
    if block_bias.requires_grad:
        lists.append(index[3] if memory.adds_dq(call) else index[2])
    assert reported.reads == sum(each.nbytes for each in (q, k, v, out, dout, lse, converted, *lists))


# (query heads, KV heads, layout)
CALLS = {
    "dense": (16, 16, None),
    "groups": (16, 8, masks.butterfly(4096)),
    "long columns": (16, 16, masks.bigbird(4096, seed=0)),
    "few tiles": (256, 256, masks.block_diagonal(4096, size=256)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_reported_bytes_of_pre_and_postprocess_are_those_of_their_launches(
    launchers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    heads, kv_heads, layout = CALLS[kind]
    q = torch.empty(1, heads, 4096, 64, dtype=torch.bfloat16)
    k = torch.empty(1, kv_heads, 4096, 64, dtype=torch.bfloat16)
    call = Call(q, k, k, layout, False, False, 0.0, False, q.dtype, "hopper")
    plan = [] if call.plan is None else list(call.plan)
    launched: dict[str, Any] = {}
    monkeypatch.setattr(
        "blocksparse_flash.runtime.launch.Launch.__call__",
        lambda self, *tensors: launched.update({self._kernel.fn.__name__: self}),
    )
    lse = torch.empty(q.shape[:3])
    inputs = BackwardInputs(q, None, q, k, k, q, lse)
    launchers["hopper_backward"].backward(inputs, plan, None, None, 0.1, False, 0.0)
    reported, preprocess = memory.backward(call), launched["preprocess_kernel"]
    zeroed = q.numel() // 64 * preprocess._rest["CLEARED"] * 4
    # reads out, dout and lse; writes lse and delta
    lse_delta = 2 * q.nbytes + lse.nbytes + 2 * lse.nbytes
    if kind == "few tiles":
        # dq has a separate launch and hence no float32 sum
        assert "postprocess_kernel" not in launched and zeroed == 0
        assert reported.extra_bytes == lse_delta
        return
    # a program converts 64 x 32 values from float32 to 2 bytes
    converted = launched["postprocess_kernel"]._grid[0] * 64 * 32 * (4 + 2)
    assert reported.extra_bytes == lse_delta + zeroed + converted


def test_reported_bytes_are_the_peak_measured_on_a_gpu() -> None:
    """peak_bytes of a result is the peak of a call above the memory in use before it: its results and workspace."""
    groups = calibrate.usable(measurements.read(pages.RESULTS / "attention.jsonl"))
    lines = [line for group in groups.values() for line in group if line["bench"] == "attention"]
    assert lines
    for line in lines:
        call = calibrate.measured(line).call
        reported = memory.forward(call) if line["direction"] == "fwd" else memory.backward(call)
        assert reported.workspace is not None
        # the allocator rounds up to multiples of 512 bytes
        assert reported.writes + reported.workspace == pytest.approx(line["peak_bytes"], rel=1e-4), line


def test_reported_bytes_of_a_block_bias_are_the_peak_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "n_sms", 132)
    cases = {case.name: case for case in shapes.CASES}
    found = measurements.read(pages.RESULTS / "shapes.jsonl")
    found = found[found["provider"] == "blocksparse_flash"]
    lines = found[found["pattern"].str.contains("block_bias")].to_dict("records")
    assert {line["device"] for line in lines} == {"NVIDIA H200"} and len(lines) >= 4
    for line in lines:
        case = cases[line["pattern"]]
        q = torch.empty(1, case.heads, case.length, case.head_dim, dtype=torch.bfloat16)
        layout, bias = shapes.full_layout(case), shapes.values_of(case, "cpu")["block_bias"]
        options = ScoreOptions(None, None, None, bias)
        call = Call(q, q, q, layout, case.causal, False, 0.0, False, q.dtype, line["backend"], scores=options)
        reported = memory.forward(call) if line["direction"] == "fwd" else memory.backward(call)
        assert reported.workspace is not None
        assert reported.writes + reported.workspace == pytest.approx(line["peak_bytes"], rel=1e-4), line


def test_the_workspace_of_eager_is_unknown_and_an_empty_call_moves_nothing() -> None:
    q = torch.zeros(1, 2, 64, 16)
    call = Call(q, q, q, None, False, False, 0.0, False, q.dtype, "eager")
    assert memory.forward(call) == (3 * q.nbytes, q.nbytes + 4 * 2 * 64, None, 4 * q.nbytes + 4 * 2 * 64, 0)
    empty = Call(q[:0], q[:0], q[:0], None, False, False, 0.0, False, q.dtype, "triton")
    assert memory.forward(empty) == memory.backward(empty) == (0, 0, 0, 0, 0)
