"""Test cases of context parallelism on GPUs over NCCL. Every rank of a crew.Crew runs them.

Expected results are those of the reference in float64 on the whole sequence, computed by every rank, and for bitwise
comparison those of the same kernels in one process. Without GPUs the cases run over gloo.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import masks
from benchmarks.run import train_context_parallel
from blocksparse_flash import attention
from blocksparse_flash import distributed as bd
from blocksparse_flash.distributed import time_model
from tests.support import closeness, crew
from tests.support.context_cases import local_rows_separate, raised, slow_link
from tests.support.context_truth import NAMES, Whole, layout_of, orders, results_of_one_process, sharded
from tests.support.no_waiting import no_waiting

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
# 33 tiles, the last one ragged: no even number of ranks divides them. Large enough for one process and each rank to use
# TMA and to launch the same kernels
LENGTH = 4200 if IS_GPU else 1000
HEADS, HEAD_DIM = 4, 128 if IS_GPU else 8


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills torch.empty with NaN, so that reads of unwritten memory fail tests."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def whole(name: str, heads: tuple[int, int], length: int = LENGTH) -> Whole:
    """Inputs in bfloat16; `truth` in float64 from these inputs, `same` by the reference in bfloat16."""
    generator = torch.Generator().manual_seed(len(name) + heads[1])
    sizes = ((heads[0], HEAD_DIM), (heads[1], HEAD_DIM), (heads[1], HEAD_DIM), (heads[0], HEAD_DIM))
    q, k, v, dout = (torch.randn(1, n, length, dim, generator=generator).bfloat16().to(DEVICE) for n, dim in sizes)
    dlse = torch.randn(1, heads[0], length, generator=generator).to(DEVICE)
    layout = layout_of(name, length)
    wide = results_of_one_process(layout, [t.double() for t in (q, k, v)], [dout.double(), dlse.double()], "reference")
    plain = results_of_one_process(layout, [q, k, v], [dout, dlse], "reference")
    return Whole(q, k, v, dout, dlse, wide, plain)


def assert_as_one_process(
    plan: bd.ContextPlan, case: Whole, layout: str, bitwise: tuple[str, ...], backend: str = "auto", **options
) -> None:
    """Raises unless results are accurate, equal in two runs, and those named in `bitwise` equal to one process."""
    options["backend"] = backend
    # turns deterministic mode on, like the plan
    with poisoned():
        found = sharded(plan, case, **options)
        same = results_of_one_process(layout_of(layout, plan.length), list(case[:3]), list(case[3:5]), backend)
    for name, actual, truth, plain, one in zip(NAMES, found, case.truth, case.same, same, strict=True):
        if name in bitwise:
            assert torch.equal(actual, plan.shard(one, dim=2)), f"{name} differs bitwise from one process"
        if actual.numel():
            closeness.assert_as_accurate(actual, [plan.shard(plain, dim=2)], plan.shard(truth, dim=2), name=name)
    for name, first, second in zip(NAMES, found, sharded(plan, case, **options), strict=True):
        assert torch.equal(first, second), f"{name} differs between two runs"


def exchange_equals_one_process(layout: str, order: str, kv_heads: int, backend: str = "auto") -> None:
    order_of = orders(dist.get_world_size(), -(-LENGTH // 128))[order]
    options = {"order": order_of, "scheme": "exchange", "deterministic": True}
    with local_rows_separate():
        plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=(HEADS, kv_heads), **options)
    # one message: chunks of heads may be too small for TMA, which changes the order of sums
    case = whole(layout, (HEADS, kv_heads))
    assert_as_one_process(plan, case, layout, ("out", "lse", "dq"), backend=backend, chunks=1)


def uses_pass_q(layout: str, order: str, kv_heads: int) -> None:
    heads = HEADS, kv_heads
    with slow_link():
        plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, order=order, scheme="exchange")
    assert len(plan.layers[0].costs.pass_q_rows), "no row uses pass-Q: the check tests nothing"
    assert_as_one_process(plan, whole(layout, heads), layout, ())


def ulysses_equals_one_process(layout: str, order: str, kv_heads: int) -> None:
    order_of = orders(dist.get_world_size(), -(-LENGTH // 128))[order]
    heads = HEADS * dist.get_world_size(), kv_heads * dist.get_world_size()
    # "auto" may choose `hopper` for that many heads, whose dq is deterministic only on request
    options = {"order": order_of, "scheme": "ulysses", "deterministic": True}
    plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, **options)
    # into how many splits `hopper` divides the global rows and columns of bigbird depends on the heads of a process
    bitwise = () if layout == "bigbird" else NAMES
    assert_as_one_process(plan, whole(layout, heads), layout, bitwise, chunks=1)
    if order == "contiguous":
        # with few heads, tile columns are split to fill the GPU
        rows = tuple(name for name in bitwise if name not in ("dk", "dv"))
        with mock.patch.object(time_model, "DIRECT_MIN_BYTES", 1):
            assert_as_one_process(plan, whole(layout, heads), layout, rows, chunks=kv_heads)


def nothing_moves() -> None:
    """With a block-diagonal layout all messages are empty; they arrive."""
    layout = masks.local(LENGTH, window=0)
    plan = bd.plan(layout, dist.group.WORLD, heads=2, scheme="exchange", deterministic=True)
    assert not plan.layers[0].costs.received["exchange"].any()
    q, k, v = (torch.randn(1, 2, plan.local_length, 64, device=DEVICE).bfloat16().requires_grad_() for _ in "qkv")
    out = bd.attention(q, k, v, plan)
    assert torch.equal(out, v)
    assert torch.equal(torch.autograd.grad(out, v, q.detach())[0], q)


def runs_over_and_over(layout: str, group: int, n_runs: int) -> None:
    """Bitwise equal for any chunks and keep_received, while other tensors reuse freed memory."""
    length = 16384 if IS_GPU else LENGTH
    n_heads = 16 if IS_GPU else 4
    heads = n_heads, n_heads // group
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    expected = None
    for keep in (True, False):
        plan = bd.plan(
            layout_of(layout, length), dist.group.WORLD, heads=heads, scheme="exchange", deterministic=True,
            order="zigzag", keep_received=keep,
        )  # fmt: skip
        if expected is None:
            leaves = [
                torch.randn(1, n, plan.local_length, HEAD_DIM, generator=generator, device=DEVICE).bfloat16()
                for n in (heads[0], heads[1], heads[1])
            ]
            q, k, v = (leaf.requires_grad_() for leaf in leaves)
        for chunks in (1, None):
            for _ in range(n_runs):
                out = bd.attention(q, k, v, plan, chunks=chunks)
                # overwrites memory that was freed too early
                spoil = torch.full((1 << 24 if IS_GPU else 1 << 10,), torch.nan, device=DEVICE)
                del spoil
                found = out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())
                expected = found if expected is None else expected
                for name, first, second in zip(("out", "dq", "dk", "dv"), expected, found, strict=True):
                    assert torch.equal(first, second), (name, keep, chunks)


def never_waits_on_the_host(scheme: str) -> None:
    """After a first call, which compiles, neither forward nor backward synchronizes with the GPU."""
    heads = (HEADS, HEADS)
    with slow_link():
        plan = bd.plan(layout_of("bigbird", LENGTH), dist.group.WORLD, heads=heads, scheme=scheme, order="zigzag")
    case = whole("bigbird", heads)
    sharded(plan, case)
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in case[:3]]
    with no_waiting() if IS_GPU else contextlib.nullcontext():
        bd.attention(*leaves, plan).sum().backward()


@mock.patch.object(time_model, "DIRECT_MIN_BYTES", 1)
def compiles(scheme: str, backend: str) -> None:
    """Compiled in one graph, checkpointed or both: bitwise equal to the plain call."""
    heads = (HEADS, HEADS)
    plan = bd.plan(layout_of("butterfly", LENGTH), dist.group.WORLD, heads=heads, scheme=scheme, deterministic=True)
    case = whole("butterfly", heads)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # operations before and after, which a compiler fuses
        out, lse = bd.attention_with_lse(q * 2, k + k, v * 2, plan)
        return out * 2, lse * 2

    def found(call: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in case[:3]]
        out, lse = call(*leaves)
        grads = torch.autograd.grad([out, lse], leaves, [plan.shard(x, dim=2) for x in (case.dout, case.dlse)])
        return out.detach(), lse.detach(), *grads

    expected = found(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for name, call in {
        "compiled": compiled,
        "checkpointed": partial(checkpoint, layer, use_reentrant=False),
        "both": partial(checkpoint, compiled, use_reentrant=False),
    }.items():
        for result, actual, wanted in zip(NAMES, found(call), expected, strict=True):
            # all factors are powers of two, so nothing rounds
            assert torch.equal(actual, wanted), (result, name)


def takes_dtensors() -> None:
    n_ranks = dist.get_world_size()
    length, heads = 2048 * n_ranks, (HEADS, HEADS)
    mesh = init_device_mesh(DEVICE, (n_ranks,), mesh_dim_names=("context",))
    plan = bd.plan(layout_of("local", length), mesh["context"], heads=heads, deterministic=True)
    generator = torch.Generator(DEVICE).manual_seed(1)
    inputs = [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator, device=DEVICE).bfloat16() for _ in "qkv"]
    leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in inputs]
    out = bd.attention(*leaves, plan, chunks=1)
    grads = torch.autograd.grad(out, leaves, out.detach())
    plain = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = attention(*plain, layout_of("local", length))
    (dq,) = torch.autograd.grad(expected, plain[:1], expected.detach())
    assert torch.equal(out.full_tensor(), expected)
    assert torch.equal(grads[0].full_tensor(), dq)


def trains(arguments: str) -> None:
    """FSDP2 on a mesh (data, context): the loss falls, and is equal on all ranks."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train_context_parallel.train(train_context_parallel.parsed(arguments.split()))
    assert losses[-1] < 0.95 * losses[0], losses
    mine = torch.tensor(losses, device=DEVICE)
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, mine)


# ---- failures ----


def differences_are_named() -> None:
    """A plan or call that differs on one rank raises on every rank, and the group still works."""
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    window = 101 if rank == odd else 100
    message = raised(ValueError, lambda: bd.plan(masks.local(LENGTH, window=window), dist.group.WORLD, heads=2))
    assert "differs in layouts" in message
    plan = bd.plan(layout_of("butterfly", LENGTH), dist.group.WORLD, heads=2, scheme="exchange", check_calls=True)
    q, k, v = (torch.randn(1, 2, plan.local_length, 64, device=DEVICE).bfloat16() for _ in "qkv")
    short = q[:, :, 1:] if rank == odd else q
    message = raised(ValueError, lambda: bd.attention(short, k, v, plan))
    assert f"tokens of rank {odd}" in message, message
    assert bd.attention(q, k, v, plan).isfinite().all()


def misses_a_rank(what: str) -> None:
    """The last rank fails as `what` says ("nothing": no rank). The others must end with an error."""
    odd = dist.get_world_size() - 1
    plan = bd.plan(layout_of("butterfly", LENGTH), dist.group.WORLD, heads=HEADS, scheme="exchange")
    q, k, v = (torch.randn(1, HEADS, plan.local_length, HEAD_DIM, device=DEVICE).bfloat16() for _ in "qkv")
    # opens connections and compiles kernels
    bd.attention(q, k, v, plan)
    if what == "nothing":
        return
    if dist.get_rank() == odd:
        if what == "killed":
            crew.kill_this_rank()
        if what == "never comes":
            time.sleep(600)
        # "wrong length": raises before anything is sent
        bd.attention(q[:, :, 1:], k, v, plan)
    bd.attention(q, k, v, plan)
    if IS_GPU:
        torch.cuda.synchronize()
