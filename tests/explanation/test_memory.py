"""Bytes that explain reports, against what the launchers allocate and what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import masks

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import lines as measurements
from benchmarks.report import pages
from benchmarks.run import calibrate
from blocksparse_flash.explanation import memory
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.kernels.inputs import BackwardInputs
from blocksparse_flash.runtime import launch

pytest.importorskip("triton", reason="needs Triton")


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operator makes."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in given}
        # held, so that no address comes twice
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.known.add(tensor.untyped_storage().data_ptr())
                self.made.append(tensor)
        return result

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.made)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The files that launch, none of whose kernels runs."""
    from blocksparse_flash.kernels.hopper import backward as hopper_backward
    from blocksparse_flash.kernels.hopper import forward as hopper_forward
    from blocksparse_flash.kernels.triton import backward, forward

    found = {
        "forward": forward,
        "backward": backward,
        "hopper_forward": hopper_forward,
        "hopper_backward": hopper_backward,
    }
    cached = (
        forward.forward_launch,
        backward.backward_launches,
        hopper_forward.forward_launches,
        hopper_backward.backward_launches,
    )
    for launches_of in cached:
        launches_of.cache_clear()
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *tensors: None)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "num_sms", lambda index: 132)
    monkeypatch.setattr(Call, "n_sms", 132)
    # no stand-in for a descriptor of memory on the host
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "DescriptorFactory", lambda seen, block: lambda tensor: tensor)
    yield found
    for launches_of in cached:
        launches_of.cache_clear()


# head dimensions: whole rows of 16 bytes; rows that are padded, of one side and of both; wider than hopper's backward
@pytest.mark.parametrize("dims", [(64, 64), (128, 100), (64, 60), (36, 20), (192, 192)])
@pytest.mark.parametrize("backend", ["triton", "hopper", "hopper, deterministic"])
# split: a layout of a few long rows, and columns
@pytest.mark.parametrize("kind", ["plain", "layout", "few tiles", "strided", "split"])
def test_what_launchers_allocate(
    launchers: dict[str, ModuleType], dims: tuple[int, int], backend: str, kind: str
) -> None:
    batch, heads, kv_heads, q_len, kv_len = {
        "split": (1, 2, 1, 9000, 9050),
        # so many queries that dq has a launch of its own
        "few tiles": (32, 2, 1, 16384, 16384),
    }.get(kind, (2, 4, 2, 200, 300))
    q = torch.empty(batch, heads, q_len, dims[0], dtype=torch.bfloat16)
    k = torch.empty(batch, kv_heads, kv_len, dims[0], dtype=torch.bfloat16)
    v = torch.empty(batch, kv_heads, kv_len, dims[1], dtype=torch.bfloat16)
    if kind == "strided":
        # an address that is no multiple of 16 bytes
        k = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    layout = None
    if kind == "few tiles":
        layout = masks.block_diagonal(q_len, size=256)
    if kind in ("layout", "split"):
        layout = masks.local((q_len, kv_len), window=50, block_size=64)
    if kind == "split":
        layout |= masks.global_tokens((q_len, kv_len), tokens=100, block_size=64)
    call = Call(q, k, v, layout, False, False, 0.0, "deterministic" in backend, q.dtype, backend.partition(",")[0])
    plan = [] if call.plan is None else list(call.plan)

    prefix = "" if backend == "triton" else "hopper_"
    forward: Callable[..., Any] = launchers[f"{prefix}forward"].forward
    backward: Callable[..., Any] = launchers[f"{prefix}backward"].backward
    with Allocations(q, k, v, *plan) as made:
        out, lse = forward(q, k, v, plan, None, None, 0.1, False, 0.0)
    said = memory.forward(call)
    assert (memory._parts(call, 0, 132) > 0) == (kind == "split")
    assert said.writes == out.nbytes + lse.nbytes
    assert said.workspace == made.nbytes - said.writes

    dout = torch.empty_like(out)
    options = {"deterministic": True} if call.deterministic else {}
    with Allocations(q, k, v, out, lse, dout, *plan) as made:
        grads = backward(BackwardInputs(dout, None, q, k, v, out, lse), plan, None, None, 0.1, False, 0.0, **options)
    said = memory.backward(call)
    assert said.writes == sum(grad.nbytes for grad in grads)
    assert said.workspace == made.nbytes - said.writes
    lists = [] if call.plan is None else call.plan
    is_apart = kind == "few tiles" and max(dims) <= 64
    walked = lists[3:] if backend == "hopper" and memory.uses_hopper_backward(call) and not is_apart else lists
    assert said.reads == sum(tensor.nbytes for tensor in (q, k, v, out, dout, lse, *walked))


# heads (query, key) and layout. 16 heads: overlapped; dense: never; two query heads per key head: groups of twice
# as many rows; one: no later column to overlap with; bigbird: long columns, with which no preprocess overlaps; few
# tiles per row: no sum at all
SUMS = {
    "overlapped": (16, 16, masks.butterfly(4096)),
    "dense": (16, 16, None),
    "groups": (16, 8, masks.butterfly(4096)),
    "one head": (1, 1, masks.butterfly(4096)),
    "long columns": (16, 16, masks.bigbird(4096, seed=0)),
    "few tiles": (256, 256, masks.block_diagonal(4096, size=256)),
}


# 32 tile columns: too few for LSE and delta to overlap, and enough
@pytest.mark.parametrize("min_columns", [33, 32])
@pytest.mark.parametrize("kind", SUMS)
def test_what_is_overlapped_is_what_the_launcher_leaves_out_around(
    launchers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, kind: str, min_columns: int
) -> None:
    """The overlapped bytes are those that the preprocess and postprocess launches leave out."""
    heads, kv_heads, layout = SUMS[kind]
    q = torch.empty(1, heads, 4096, 64, dtype=torch.bfloat16)
    k = torch.empty(1, kv_heads, 4096, 64, dtype=torch.bfloat16)
    call = Call(q, k, k, layout, False, False, 0.0, False, q.dtype, "hopper")
    plan = [] if call.plan is None else list(call.plan)
    written: dict[str, Any] = {}
    grids: dict[str, tuple[int, ...]] = {}

    def record(self: Any, *tensors: Any) -> None:
        written[self._kernel.fn.__name__], grids[self._kernel.fn.__name__] = self._rest, self._grid

    monkeypatch.setattr("blocksparse_flash.runtime.launch.Launch.__call__", record)
    monkeypatch.setattr("blocksparse_flash.kernels.overlap_schedule.MIN_LSE_DELTA_COLUMNS", min_columns)
    lse = torch.empty(q.shape[:3])
    inputs = BackwardInputs(q, None, q, k, k, q, lse)
    launchers["hopper_backward"].backward(inputs, plan, None, None, 0.1, False, 0.0)
    said = memory.backward(call)
    statistics = 2 * q.nbytes + lse.nbytes + 2 * lse.nbytes
    if "postprocess_kernel" not in written:
        assert kind == "few tiles" and said.overlapped == 0 and said.passes == statistics + 2 * lse.nbytes
        return
    # float32, read again and written in two bytes
    cleared = written["preprocess_kernel"]["n_cleared"] * 4096 * 64 * 4
    before = statistics // heads * grids["preprocess_kernel"][1]
    # steps of 512 values
    converted = (q.numel() - written["postprocess_kernel"]["first"] * 512) * (4 + 2)
    assert said.passes == before + cleared + converted
    assert said.overlapped + said.passes == statistics + q.numel() * (4 + 4 + 2)
    assert (said.overlapped > 0) == (kind not in ("one head", "dense"))
    assert (before < statistics) == (min_columns == 32 and kind in ("overlapped", "groups"))


def test_what_was_allocated_on_a_gpu() -> None:
    """Result lines hold the peak of each call over what was there before: what it writes, and its workspace."""
    groups = calibrate.usable(measurements.read(pages.RESULTS / "attention.jsonl"))
    lines = [line for group in groups.values() for line in group if line["bench"] == "attention"]
    assert lines
    for line in lines:
        call = calibrate.measured(line).call
        said = memory.forward(call) if line["direction"] == "fwd" else memory.backward(call)
        assert said.workspace is not None
        # the allocator gives out multiples of 512 bytes
        assert said.writes + said.workspace == pytest.approx(line["peak_bytes"], rel=1e-4), line


def test_nothing_is_known_of_what_pytorchs_operators_allocate() -> None:
    q = torch.zeros(1, 2, 64, 16)
    call = Call(q, q, q, None, False, False, 0.0, False, q.dtype, "eager")
    assert memory.forward(call) == (3 * q.nbytes, q.nbytes + 4 * 2 * 64, None, 4 * q.nbytes + 4 * 2 * 64, 0, 0)
    empty = Call(q[:0], q[:0], q[:0], None, False, False, 0.0, False, q.dtype, "triton")
    assert memory.forward(empty) == memory.backward(empty) == (0, 0, 0, 0, 0, 0)
