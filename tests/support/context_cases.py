"""Test cases of context parallelism, by name: functions that context_ranks.py runs on every rank.

`cases` computes all expected results (context_truth.py) before the ranks are forked.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import itertools
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import masks
from benchmarks.run import train_context_parallel
from blocksparse_flash import BlockLayout, attention_with_lse
from blocksparse_flash import distributed as bd
from blocksparse_flash.distributed import exchange_plan, time_model
from blocksparse_flash.distributed.exchange_plan import unflatten
from blocksparse_flash.nn import SelfAttention
from tests.support import closeness
from tests.support.context_truth import (
    HEAD_DIM,
    LAYOUTS,
    LENGTH,
    NAMES,
    V_HEAD_DIM,
    Traffic,
    assert_equal_to_one_process,
    by_head,
    in_half,
    interpreted,
    layout_by_head,
    layout_of,
    orders,
    results_of_one_process,
    sharded,
    uneven,
    whole,
)

Cases = dict[str, Callable[[], None]]


def local_rows_separate() -> contextlib.AbstractContextManager[object]:
    """Makes ranks compute local rows separately, even if they are few."""
    return mock.patch.object(time_model, "SPLITTING", -1.0)


def equals_one_process(layout: str, order: str, kv_heads: int, scheme: str) -> None:
    n_ranks, heads = dist.get_world_size(), (4, kv_heads)
    order_of = orders(n_ranks, -(-LENGTH // 128))[order]
    with local_rows_separate():
        plan = bd.plan(
            layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, order=order_of, scheme=scheme, deterministic=True
        )
    case = whole(layout, LENGTH, heads)
    assert_equal_to_one_process(plan, case, has_exact_rows=True, repeats=order == "zigzag")


def sums_gradients_in_place(layout: str, kv_heads: int) -> None:
    """Gradients summed in place equal those of one process, and bitwise those that are not summed in place."""
    heads = (4, kv_heads)
    plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, scheme="exchange", deterministic=True)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, plan.layers[0].counts[-1])
    assert max(counts) >= 0, "no rank sums in place: the case tests nothing"
    case = whole(layout, LENGTH, heads)
    with mock.patch.object(exchange_plan, "MAX_SHARED_SHARE", -1.0):
        other = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, scheme="exchange", deterministic=True)
    assert other.layers[0].counts[-1] == -1
    assert_equal_to_one_process(plan, case, has_exact_rows=True)
    for chunks in (1, kv_heads):
        found, expected = (sharded(one, case, chunks=chunks) for one in (plan, other))
        for name, actual, wanted in zip(NAMES, found, expected, strict=True):
            assert torch.equal(actual, wanted), (name, chunks)


def slow_link() -> contextlib.AbstractContextManager[object]:
    """Makes the number of received bytes decide the scheme."""
    return mock.patch.multiple(time_model, LINK=1e3, ULYSSES_COPIES=0, EXCHANGE_COPIES=0, DIRECT_COPIES=0)


def uses_pass_q(layout: str, order: str, kv_heads: int) -> None:
    """Pass-Q for rows that reach most tiles: results within tolerance, and fewer bytes for the busiest rank."""
    n_ranks, heads = dist.get_world_size(), (4, kv_heads)
    n_tiles = -(-LENGTH // 128)
    # "alone": the first rank holds only the first tile
    order_of = [0, *[1] * (n_tiles - 1)] if order == "alone" else orders(n_ranks, n_tiles)[order]
    with slow_link():
        plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, order=order_of, scheme="exchange")
    costs = plan.layers[0].costs
    assert len(costs.pass_q_rows), "no row uses pass-Q: the case tests nothing"
    assert costs.received["exchange"].max() < costs.bound.max()
    assert_equal_to_one_process(plan, whole(layout, LENGTH, heads), has_exact_rows=False)


def sends_the_lower_bound(layout: str, order: str, n_chunks: int) -> None:
    """One message per chunk in each direction, with exactly the bytes that a double loop counts."""
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    order_of = orders(n_ranks, -(-LENGTH // 128))[order]
    found = layout_of(layout, LENGTH)
    plan = bd.plan(found, dist.group.WORLD, heads=(4, 2), order=order_of, scheme="exchange", deterministic=True)
    owner = torch.empty(LENGTH, dtype=torch.long)
    owner[plan.gather(plan.positions, dim=0)] = plan.gather(torch.full((plan.local_length,), rank), dim=0)
    mask = found.to_dense()[0, 0]
    # a rank needs a tile of keys if one of its queries attends to one of them
    sent = 0
    for first in range(0, LENGTH, 128):
        tile = slice(first, first + 128)
        needs = set(owner[mask[:, tile].any(dim=1)].tolist()) - {rank}
        sent += len(needs) * len(owner[tile]) * int(owner[first] == rank)
    case = whole(layout, LENGTH, (4, 2))
    expected = sent * 2 * (HEAD_DIM + V_HEAD_DIM) * 8
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
    with Traffic() as forward:
        out = bd.attention(*leaves, plan, chunks=n_chunks)
    with Traffic() as backward:
        out.sum().backward()
    assert (forward.n_bytes, forward.n_calls) == (expected, n_chunks)
    # gradients of received keys and values are sent back
    received = int(plan.layers[0].costs.bound[rank]) // 2 * (HEAD_DIM + V_HEAD_DIM) * 8
    assert (backward.n_bytes, backward.n_calls) == (received, n_chunks)
    total = torch.tensor([forward.n_bytes, backward.n_bytes])
    dist.all_reduce(total)
    assert total[0] == total[1]


def gathers_every_key(order: str, n_chunks: int) -> None:
    """Each message has the rank's own keys, padded to the longest share; gradients return to the owners."""
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    order_of = orders(n_ranks, -(-LENGTH // 128))[order]
    plan = bd.plan(layout_of("bigbird", LENGTH), dist.group.WORLD, heads=(4, 2), order=order_of, scheme="all_gather")
    assert plan.layers[0].scheme == "all_gather"
    case = whole("bigbird", LENGTH, (4, 2))
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
    with Traffic() as forward:
        out = bd.attention(*leaves, plan, chunks=n_chunks)
    with Traffic() as backward:
        out.sum().backward()
    token = 2 * (HEAD_DIM + V_HEAD_DIM) * 8
    assert (forward.n_bytes, forward.n_calls) == (max(plan.sizes) * token, n_chunks)
    received = int(plan.layers[0].costs.received["all_gather"][rank]) // 2 * (HEAD_DIM + V_HEAD_DIM) * 8
    assert (backward.n_bytes, backward.n_calls) == (received, n_chunks)
    # an empty batch, and other strides
    none = [leaf.detach()[:0].requires_grad_() for leaf in leaves]
    bd.attention(*none, plan, chunks=n_chunks).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in none)
    strided = [leaf.detach().transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]
    assert torch.equal(bd.attention(*strided, plan, chunks=n_chunks), plan.shard(case.same[0], dim=2))


def as_if_fitted() -> contextlib.AbstractContextManager[object]:
    """Makes the time model treat the ranks as GPUs to which it was fitted."""
    return mock.patch.object(time_model, "no_prediction_reason", lambda machines: "")


def plans_predict_speed_ups() -> None:
    """Bigbird on two GPUs is slower than on one: the first rank warns once. On CPUs nothing is predicted."""
    rank = dist.get_rank()
    layouts, heads = [masks.bigbird(16384, seed=0), masks.local(16384, window=512)], (4, 4)
    # the default filters of Python and torch
    with warnings.catch_warnings(record=True) as warned, as_if_fitted():
        plan = bd.plan(layouts, dist.group.WORLD, heads=heads)
        q, k, v = (torch.zeros(1, 4, plan.local_length, 8) for _ in range(3))
        for _ in range(2):
            bd.attention(q, k, v, plan, layer=1)
    assert [warning.category for warning in warned] == [UserWarning] * (rank == 0), [str(w.message) for w in warned]
    slow, other = plan.speedups
    assert slow is not None and other is not None and slow < 1
    assert f"predicted {slow:.2f} times as fast as one NVIDIA H200" in str(plan) and f"({slow:.2f} times" in repr(plan)
    if rank == 0:
        message = str(warned[0].message)
        assert f'layer 0 ("{plan.layers[0].scheme}") {slow:.2f} times' in message and warned[0].filename == __file__
        for hint in ("Fewer ranks", "longer sequence", 'order="tuned"'):
            assert hint in message, message
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        plan = bd.plan(layouts, dist.group.WORLD, heads=heads)
    assert not warned and plan.speedups == (None, None)
    assert (
        "no speed-up over one GPU is predicted: the model is fitted to up to 4 NVIDIA H200 of one host, not to cpu"
        in str(plan)
    )
    assert "predicted" not in repr(plan)


def options_change_no_bit(layout: str, scheme: str) -> None:
    """chunks and keep_received change no bit; lse may be unused, k and v may be frozen."""
    heads, group = (4, 2), dist.group.WORLD
    case = whole(layout, LENGTH, heads)
    plans = [
        bd.plan(layout_of(layout, LENGTH), group, heads=heads, scheme=scheme, deterministic=True, keep_received=keep)
        for keep in (True, False)
    ]
    expected = sharded(plans[0], case, chunks=1)
    for plan, chunks in ((plans[0], 2), (plans[0], None), (plans[1], 1), (plans[1], 2)):
        for name, actual, wanted in zip(NAMES, sharded(plan, case, chunks=chunks), expected, strict=True):
            assert torch.equal(actual, wanted), (name, chunks, plan.keeps_received)
    q, k, v = (plans[0].shard(tensor, dim=2) for tensor in (case.q, case.k, case.v))
    out = bd.attention(q.requires_grad_(), k, v, plans[0])
    out.backward(plans[0].shard(case.dout, dim=2))
    assert torch.equal(out, expected[0])
    assert q.grad is not None and k.grad is None


def ulysses_equals_one_process(layout: str, order: str) -> None:
    """All results are bitwise equal, dk and dv too, since one rank computes each head."""
    n_ranks = dist.get_world_size()
    heads = (2 * n_ranks, n_ranks)
    order_of = orders(n_ranks, -(-LENGTH // 128))[order]
    plan = bd.plan(layout_of(layout, LENGTH), dist.group.WORLD, heads=heads, order=order_of, scheme="ulysses")
    case = whole(layout, LENGTH, heads)
    # packed messages, and direct ones where possible
    for min_bytes in (1 << 40, 1):
        with mock.patch.object(time_model, "DIRECT_MIN_BYTES", min_bytes):
            assert_equal_to_one_process(plan, case, has_exact_rows=True)
            for name, actual, same in zip(NAMES, sharded(plan, case), case.same, strict=True):
                assert torch.equal(actual, plan.shard(same, dim=2)), name


@mock.patch.object(time_model, "DIRECT_MIN_BYTES", 1)
def ulysses_uses_chunks(order: str) -> None:
    """Bitwise equal to one process for any number of messages, which hold only q, k, v, out and their gradients."""
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    heads = (4 * n_ranks, 2 * n_ranks)
    # contiguous, with unequal numbers of tiles
    order_of = sorted(uneven(n_ranks, -(-LENGTH // 128))) if order == "uneven" else order
    plan = bd.plan(layout_of("butterfly", LENGTH), dist.group.WORLD, heads=heads, order=order_of, scheme="ulysses")
    case = whole("butterfly", LENGTH, heads)
    for chunks in (1, 2, None):
        for name, actual, same in zip(NAMES, sharded(plan, case, chunks=chunks), case.same, strict=True):
            assert torch.equal(actual, plan.shard(same, dim=2)), (name, chunks)
    # two sequences
    leaves = [plan.shard(tensor, dim=2).expand(2, -1, -1, -1) * 1 for tensor in (case.q, case.k, case.v)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, lse = bd.attention_with_lse(*leaves, plan, chunks=2)
    douts = [plan.shard(x, dim=2).expand_as(like) for x, like in ((case.dout, out), (case.dlse, lse))]
    found = out, lse, *torch.autograd.grad([out, lse], leaves, douts)
    for name, actual, same in zip(NAMES, found, case.same, strict=True):
        assert torch.equal(actual, plan.shard(same, dim=2).expand_as(actual)), name
    # a rank has 2 KV heads, which 4 chunks would divide
    assert "2 KV heads of a rank" in raised(ValueError, lambda: sharded(plan, case, chunks=4))
    mine, others = plan.sizes[rank] * (n_ranks - 1), LENGTH - plan.sizes[rank]
    to_heads, to_tokens = 4 * HEAD_DIM + 2 * (HEAD_DIM + V_HEAD_DIM), 4 * V_HEAD_DIM
    leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
    with Traffic() as forward:
        out = bd.attention(*leaves, plan, chunks=2)
    with Traffic() as backward:
        out.sum().backward()
    assert forward.n_bytes == 8 * (mine * to_heads + others * to_tokens)
    assert backward.n_bytes == 8 * (mine * to_tokens + others * to_heads)
    # other strides, and the gradient of lse alone
    strided = [leaf.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for leaf in leaves]
    out, lse = bd.attention_with_lse(*strided, plan)
    assert torch.equal(out, plan.shard(case.same[0], dim=2))
    lse.sum().backward()
    assert not strided[2].grad.any()
    assert torch.equal(bd.attention(*(leaf.detach() for leaf in leaves), plan), out)
    # an empty batch
    none = [leaf.detach()[:0].requires_grad_() for leaf in leaves]
    out, lse = bd.attention_with_lse(*none, plan, chunks=2)
    assert (out.shape, lse.shape) == ((0, *leaves[0].shape[1:3], V_HEAD_DIM), (0, *leaves[0].shape[1:3]))
    (out.sum() + lse.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in none)


def auto_chooses_the_scheme_with_less_traffic() -> None:
    """If only received bytes count."""
    n_ranks = dist.get_world_size()
    layouts = [layout_of("local", LENGTH), BlockLayout.from_dense(torch.ones(LENGTH, LENGTH).bool(), block_size=128)]
    # for a dense layout, ulysses receives less than exchange from 3 ranks on
    with slow_link():
        plan = bd.plan(layouts, dist.group.WORLD, heads=n_ranks)
        assert [layer.scheme for layer in plan.layers] == ["exchange", "ulysses" if n_ranks > 2 else "exchange"]
        plan = bd.plan(layouts, dist.group.WORLD, heads=(2 * n_ranks, 1))
    assert [layer.scheme for layer in plan.layers] == ["exchange", "exchange"]
    assert "do not divide" in str(plan) and "lower bound" in str(plan)
    case = whole("local", LENGTH, (2 * n_ranks, 1))
    first = sharded(plan, case, layer=0)
    assert torch.allclose(first[0], plan.shard(case.truth[0], dim=2), rtol=1e-12)
    dense = sharded(plan, case, layer=1)[0]
    assert torch.allclose(dense, plan.shard(attention_with_lse(case.q, case.k, case.v)[0], dim=2), rtol=1e-10)


def layouts_per_head_and_batch() -> None:
    n_ranks = dist.get_world_size()
    heads = (2 * n_ranks, n_ranks)
    layout = layout_by_head(heads[0])
    for scheme in ("exchange", "ulysses", "all_gather"):
        plan = bd.plan(layout, dist.group.WORLD, heads=heads, scheme=scheme, order="zigzag", deterministic=True)
        assert_equal_to_one_process(plan, by_head(n_ranks), has_exact_rows=True)
        if scheme == "exchange":
            # each chunk uses the plan of its own query heads
            one, two = (sharded(plan, by_head(n_ranks), chunks=chunks) for chunks in (1, 2))
            for name, actual, wanted in zip(NAMES, two, one, strict=True):
                assert torch.equal(actual, wanted), name


@mock.patch.object(time_model, "DIRECT_MIN_BYTES", 1)
def half_types(scheme: str) -> None:
    """bfloat16 is sent as it is; sums over ranks are float32, with pass-KV and pass-Q."""
    n_ranks = dist.get_world_size()
    heads = (n_ranks, n_ranks)
    with slow_link():
        plan = bd.plan(layout_of("global", LENGTH), dist.group.WORLD, heads=heads, scheme=scheme)
    assert scheme != "exchange" or len(plan.layers[0].costs.pass_q_rows)
    case = in_half("global", heads)
    for name, actual, truth, same in zip(NAMES, sharded(plan, case), case.truth, case.same, strict=True):
        wide = plan.shard(truth, dim=2)
        closeness.assert_as_accurate(actual, [plan.shard(same, dim=2)], wide, name=name)


def kernels_equal_one_process() -> None:
    """Triton kernels in the interpreter: out, lse and dq are bitwise equal. Rank 0 computes local rows separately."""
    case = interpreted("narrow", 560)
    for scheme in ("exchange", "all_gather"):
        with local_rows_separate():
            plan = bd.plan(layout_of("narrow", 560), dist.group.WORLD, heads=(2, 1), scheme=scheme, deterministic=True)
        _, local = unflatten(plan.layers[0].tensors, plan.layers[0].counts, 2)
        is_separate = scheme == "exchange" and dist.get_rank() == 0
        assert bool(local) == is_separate, "only rank 0 computes local rows separately"
        for name, actual, same in zip(NAMES, sharded(plan, case, backend="triton"), case.same, strict=True):
            mine = plan.shard(same, dim=2)
            if name in ("out", "lse", "dq"):
                assert torch.equal(actual, mine), (scheme, name)
            assert torch.allclose(actual, mine, rtol=1e-4, atol=1e-5), (scheme, name)


def kernels_use_pass_q() -> None:
    """The Triton kernels merge pass-Q rows; dout may have stride 0."""
    length, layout = 300, layout_of("wide", 300)
    with slow_link():
        plan = bd.plan(layout, dist.group.WORLD, heads=(2, 1), order=[1, 0, 0], scheme="exchange")
    assert len(plan.layers[0].costs.pass_q_rows) == 1
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(1, n, length, 8, generator=generator).requires_grad_() for n in (2, 1, 1)]
    leaves = [plan.shard(tensor, dim=2).detach().requires_grad_() for tensor in wholes]
    expected, expected_lse = attention_with_lse(*wholes, layout, backend="eager")
    expected.sum().backward()
    out, lse = bd.attention_with_lse(*leaves, plan, backend="triton")
    out.sum().backward()
    pairs = [(out, expected), (lse, expected_lse), *((x.grad, y.grad) for x, y in zip(leaves, wholes, strict=True))]
    for name, (actual, wanted) in zip(NAMES, pairs, strict=True):
        assert torch.allclose(actual, plan.shard(wanted, dim=2), rtol=1e-4, atol=1e-5), name


def autocast_converts() -> None:
    """Inputs are cast as in one process; gradients have the dtype of the inputs."""
    case = whole("local", LENGTH, (4, 1))
    plan = bd.plan(layout_of("local", LENGTH), dist.group.WORLD, heads=(4, 1))
    leaves = [plan.shard(x.float(), dim=2).requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = bd.attention(*leaves, plan)
        expected, _ = attention_with_lse(case.q.float(), case.k.float(), case.v.float(), layout_of("local", LENGTH))
    assert out.dtype == torch.bfloat16 and torch.equal(out, plan.shard(expected, dim=2))
    out.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)
    # in bfloat16 the message of a head is too small to be sent directly, and packed messages have no chunks
    n_ranks = dist.get_world_size()
    plan = bd.plan(layout_of("local", LENGTH), dist.group.WORLD, heads=2 * n_ranks, scheme="ulysses")
    leaves = [torch.randn(1, 2 * n_ranks, plan.local_length, HEAD_DIM) for _ in range(3)]
    with mock.patch.object(time_model, "DIRECT_MIN_BYTES", LENGTH // n_ranks * HEAD_DIM * 4):
        assert bd.attention(*leaves, plan, chunks=2).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "sent together" in raised(ValueError, lambda: bd.attention(*leaves, plan, chunks=2))


def gather_inverts_shard() -> None:
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(2.0 * LENGTH).reshape(2, LENGTH)
    for order in orders(n_ranks, -(-LENGTH // 128)).values():
        plan = bd.plan(layout_of("local", LENGTH), dist.group.WORLD, heads=1, order=order)
        assert torch.equal(plan.shard(x, dim=1), x[:, plan.positions])
        mine = plan.shard(x, dim=-1).requires_grad_()
        whole_x = plan.gather(mine, dim=-1)
        assert torch.equal(whole_x, x)
        # the gradient is summed over the ranks
        (whole_x * (rank + 1) * x).sum().backward()
        assert torch.equal(mine.grad, plan.shard(x, dim=1) * (n_ranks * (n_ranks + 1) // 2))
        assert torch.equal(plan.gather(plan.shard(x[0] > 7, dim=0), dim=0), x[0] > 7)
        assert "dim must be an axis of x, -2 .. 1, got 2" in raised(ValueError, lambda plan=plan: plan.shard(x, dim=2))


@mock.patch.object(time_model, "DIRECT_MIN_BYTES", 1)
def compiles_and_checkpoints(scheme: str) -> None:
    """Compiled and checkpointed calls are bitwise equal to plain ones; of three ranks one holds no token."""
    n_ranks = dist.get_world_size()
    heads = (n_ranks, n_ranks)
    order = "contiguous" if n_ranks == 2 else uneven(n_ranks, -(-LENGTH // 128))
    plan = bd.plan(
        layout_of("butterfly", LENGTH), dist.group.WORLD, heads=heads, order=order, scheme=scheme, deterministic=True
    )
    case = whole("butterfly", LENGTH, heads)
    expected = sharded(plan, case)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return bd.attention_with_lse(q, k, v, plan)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (compiled, partial(checkpoint, layer, use_reentrant=False)):
        leaves = [plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v)]
        out, lse = call(*leaves)
        douts = [plan.shard(case.dout, dim=2), plan.shard(case.dlse, dim=2).masked_fill(lse == -torch.inf, 0)]
        grads = torch.autograd.grad([out, lse], leaves, douts)
        for name, actual, wanted in zip(NAMES, (out, lse, *grads), expected, strict=True):
            assert torch.equal(actual, wanted), (name, call)


def takes_dtensors() -> None:
    n_ranks = dist.get_world_size()
    length = 256 * n_ranks
    mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("context",))
    plan = bd.plan(layout_of("local", length), mesh["context"], heads=(4, 2), deterministic=True)
    case = whole("local", length, (4, 2))
    leaves = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in (case.q, case.k, case.v)]
    calls = [bd.attention]
    # compiling takes seconds; one number of ranks is enough
    if n_ranks == 2:
        calls.append(torch.compile(bd.attention, fullgraph=True, backend="aot_eager"))
    for call in calls:
        out = call(*leaves, plan)
        grads = torch.autograd.grad(out, leaves, distribute_tensor(case.dout, mesh, [Shard(2)]))
        expected = results_of_one_process(
            layout_of("local", length), list(case[:3]), [case.dout, torch.zeros_like(case.dlse)], "eager"
        )
        assert torch.equal(out.full_tensor(), expected[0])
        for actual, wanted in zip(grads, expected[2:], strict=True):
            assert torch.allclose(actual.full_tensor(), wanted, rtol=1e-12, atol=1e-14)
    # shards in another order than the plan's would give silently wrong results
    zigzag = bd.plan(layout_of("local", length), mesh["context"], heads=(4, 2), order="zigzag")
    assert "in order" in raised(ValueError, lambda: bd.attention(*leaves, zigzag))
    heads = [distribute_tensor(x, mesh, [Replicate()]) for x in (case.q, case.k, case.v)]
    assert "Shard(2)" in raised(ValueError, lambda: bd.attention(*heads, plan))
    raised(TypeError, lambda: bd.attention(leaves[0], case.k, case.v, plan))
    # attention in one process refuses DTensors
    for name in "qkv":
        mixed = dict(zip("qkv", case[:3], strict=True))
        mixed[name] = heads["qkv".index(name)]
        assert f"{name}.to_local()" in raised(ValueError, lambda call=mixed: attention_with_lse(**call))
    assert "blocksparse_flash.distributed" in raised(ValueError, lambda: attention_with_lse(*heads))
    sinks = distribute_tensor(torch.zeros(4, dtype=case.q.dtype), mesh, [Replicate()])
    assert "sinks.to_local()" in raised(ValueError, lambda: attention_with_lse(*case[:3], sinks=sinks))


def takes_dtensors_on_other_axes() -> None:
    """A batch that ranks do not divide keeps its shape; heads of q and k that do not belong together are refused."""
    n_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n_ranks, 1), mesh_dim_names=("other", "context"))
    case, layout = whole("local", LENGTH, (4, 2)), layout_of("local", LENGTH)
    plan = bd.plan(layout, mesh["context"], heads=(4, 2))
    batch = 2 * n_ranks - 1
    inputs = [x.repeat(batch, 1, 1, 1) * torch.arange(1, batch + 1)[:, None, None, None] for x in case[:3]]
    shared = [distribute_tensor(x, mesh, [Shard(0), Shard(2)]).requires_grad_() for x in inputs]
    out, lse = bd.attention_with_lse(*shared, plan)
    expected, expected_lse = attention_with_lse(*inputs, layout, backend="eager")
    for found, wanted in ((out, expected), (lse, expected_lse)):
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
        assert torch.equal(found.full_tensor(), wanted)
    grads = torch.autograd.grad(out.sum(), shared)
    leaves = [x.requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(attention_with_lse(*leaves, layout, backend="eager")[0].sum(), leaves)
    for one, other in zip(grads, wanted, strict=True):
        assert torch.allclose(one.full_tensor(), other, rtol=1e-12, atol=1e-14)

    # under tensor parallelism, with all heads of k on every rank
    q, k, v = (distribute_tensor(x.repeat(1, n_ranks, 1, 1), mesh, [Shard(1), Shard(2)]) for x in case[:3])
    grouped = attention_with_lse(*(x.repeat(1, n_ranks, 1, 1) for x in case[:3]), layout, backend="eager")[0]
    assert torch.equal(bd.attention(q, k, v, plan).full_tensor(), grouped)
    everywhere = [distribute_tensor(x, mesh, [Replicate(), Shard(2)]) for x in case[1:3]]
    said = raised(ValueError, lambda: bd.attention(q, *everywhere, plan))
    assert "k must have q's placements and mesh, (Shard(dim=1), Shard(dim=2))" in said, said
    # queries would attend to other KV heads: ranks have equally many query heads, but the last has one KV head, not two
    kv_heads = 2 * n_ranks - 1
    q, k = (
        distribute_tensor(torch.zeros(1, n, LENGTH, 8), mesh, [Shard(1), Shard(2)])
        for n in (2 * n_ranks * kv_heads, kv_heads)
    )
    plan = bd.plan(layout, mesh["context"], heads=(2 * kv_heads, k.to_local().shape[1]))
    said = raised(ValueError, lambda: bd.attention(q, k, k, plan))
    assert f"k must have a multiple of {n_ranks} heads" in said, said


def a_pickled_plan_is_for_its_rank() -> None:
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    case = whole("local", LENGTH, (4, 1))
    plan = bd.plan(layout_of("local", LENGTH), dist.group.WORLD, heads=(4, 1), order="zigzag", deterministic=True)
    expected = sharded(plan, case)
    pickled = [b""] * n_ranks
    dist.all_gather_object(pickled, pickle.dumps(plan))
    for name, actual, wanted in zip(NAMES, sharded(pickle.loads(pickled[rank]), case), expected, strict=True):
        assert torch.equal(actual, wanted), name
    other = (rank + 1) % n_ranks
    message = raised(ValueError, lambda: pickle.loads(pickled[other]))
    assert f"must be loaded by rank {other} of process group" in message and f"got rank {rank} of" in message, message
    # a group of the same name that has other members
    alone = [dist.new_group([one]) for one in range(n_ranks)][rank]
    plan = bd.plan(layout_of("local", LENGTH), alone, heads=(4, 1))
    state = plan.__getstate__()
    assert state["group"] == [rank] and pickle.loads(pickle.dumps(plan)).group is alone
    message = raised(ValueError, lambda: copy.copy(plan).__setstate__(state | {"group": [n_ranks]}))
    assert f"of the global ranks [{n_ranks}], got rank 0 of the global ranks [{rank}]" in message, message


def a_plan_ends_with_its_group() -> None:
    """After the group is made again with its ranks reversed, the plan would mix up their tokens."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    case, layout = whole("local", LENGTH, (4, 1)), layout_of("local", LENGTH)
    plan = bd.plan(layout, dist.group.WORLD, heads=(4, 1))
    q, k, v = (plan.shard(tensor, dim=2) for tensor in (case.q, case.k, case.v))
    assert torch.equal(bd.attention(q, k, v, plan), plan.shard(case.same[0], dim=2))
    calls = (
        lambda: bd.attention(q, k, v, plan),
        lambda: bd.attention(q, k, v, plan, scale=1.0),
        lambda: plan.gather(q, dim=2),
        lambda: plan.shard(case.q, dim=2),
    )
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder[0]}/store", n_ranks)
    dist.init_process_group("gloo", store=store, rank=n_ranks - 1 - rank, world_size=n_ranks)
    for call in calls:
        assert "was destroyed, and another group has this name now" in raised(ValueError, call)
    other = bd.plan(layout, dist.group.WORLD, heads=(4, 1))
    assert torch.equal(sharded(other, case)[0], other.shard(case.same[0], dim=2))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def layer_equals_that_of_one_process() -> None:
    """bd.SelfAttention loads the weights of nn.SelfAttention; their gradients, summed over ranks, are equal."""
    layout = layout_of("causal", LENGTH)
    torch.manual_seed(0)
    one = SelfAttention(16, 4, layout, kv_heads=2, rope=100.0).double()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    expected = one(x)
    expected.sin().sum().backward()
    for order in ("contiguous", "zigzag"):
        plan = bd.plan(layout, dist.group.WORLD, heads=(4, 2), order=order)
        layer = bd.SelfAttention(16, plan, rope=100.0).double()
        layer.load_state_dict(one.state_dict())
        out = layer(plan.shard(x, dim=1))
        assert torch.allclose(out, plan.shard(expected, dim=1), rtol=1e-12, atol=1e-13)
        out.sin().sum().backward()
        for (name, weight), wanted in zip(layer.named_parameters(), one.parameters(), strict=True):
            dist.all_reduce(weight.grad)
            assert torch.allclose(weight.grad, wanted.grad, rtol=1e-10, atol=1e-11), (order, name)
    for option in ({"sinks": True}, {"softcap": 3.0}, {"alibi": True}):
        (name,) = option
        assert f"{name} must be" in raised(ValueError, lambda option=option: bd.SelfAttention(16, plan, **option))


def trains_with_fsdp(n_context: int) -> None:
    """Gradients equal those of the mean loss over all tokens in one process.

    Weights are sharded over all ranks, sequences over n_context of them, in uneven shards.
    """
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n_ranks // n_context, n_context), mesh_dim_names=("data", "context"))
    everyone = init_device_mesh("cpu", (n_ranks,))
    alone = [dist.new_group([one]) for one in range(n_ranks)][rank]
    layout = layout_of("causal", LENGTH)
    models = []
    for group in (alone, mesh["context"]):
        plan = bd.plan(layout, group, heads=(4, 2), scheme="exchange")
        torch.manual_seed(0)
        models.append((train_context_parallel.Model(16, 1, plan).double(), plan))
    (one, _), (model, plan) = models
    n_rows = n_ranks // n_context
    sequences = [next(train_context_parallel.batches(LENGTH, 1, 5, seed=row)) for row in range(n_rows)]
    tokens, labels = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    torch.nn.functional.cross_entropy(one(tokens).flatten(0, 1), labels.flatten()).backward()

    fully_shard(model, mesh=everyone)
    row = mesh["data"].get_local_rank()
    mine, mine_labels = (plan.shard(sequence, dim=1) for sequence in sequences[row])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(mine)
    train_context_parallel.scaled_loss(logits, mine_labels, n_rows * LENGTH, n_ranks).backward()
    for (name, weight), wanted in zip(model.named_parameters(), one.parameters(), strict=True):
        # the loss is float32
        assert torch.allclose(weight.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-8), name


def the_example_trains() -> None:
    arguments = "--context 2 --length 300 --window 32 --embed-dim 16 --blocks 1 --steps 4 --learning-rate 0.03"
    with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train_context_parallel.train(train_context_parallel.parsed(arguments.split()))
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert dist.get_rank() or "step    0: loss" in output.getvalue()


def raised(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> str:
    """The message of the error that `call` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind}, but nothing was raised")


def plan_names_the_argument_that_differs() -> None:
    """For every argument of plan, every rank raises before anything is sent; the group still works afterwards."""
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    usual = {"layouts": layout_of("local", LENGTH), "group": dist.group.WORLD, "heads": 2}
    changes = {
        "layouts": masks.local(LENGTH, window=101),
        "heads": (4, 2),
        "order": "zigzag",
        "scheme": "exchange",
        "deterministic": True,
        "keep_received": False,
        "check_calls": True,
    }
    for name, value in changes.items():
        arguments = {**usual, name: value} if rank == odd else usual
        message = raised(ValueError, lambda arguments=arguments: bd.plan(**arguments))
        # of two ranks either may be the one that differs
        assert f"differs in {name}" in message and (f"rank {odd} " in message or odd == 1), message
    refused = {"order": "sideways", "scheme": "ring", "heads": (3, 2), "layouts": [], "deterministic": 1}
    for name, value in refused.items():
        arguments = {**usual, name: value} if rank == odd else usual
        message = raised((ValueError, TypeError), lambda arguments=arguments: bd.plan(**arguments))
        assert name in message and (rank == odd or f"rank {odd} refused" in message), message
    assert bd.plan(**usual).length == LENGTH


def check_calls_names_what_differs() -> None:
    """With check_calls=True all ranks raise if one call differs, and the next call works."""
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    plan, other = (
        bd.plan(layout_of(name, LENGTH), dist.group.WORLD, heads=(4, 1), check_calls=True)
        for name in ("local", "causal")
    )
    case = whole("local", LENGTH, (4, 1))
    inputs = [plan.shard(tensor, dim=2) for tensor in (case.q, case.k, case.v)]
    q, k, v = inputs
    calls = {
        "tokens": lambda: bd.attention(q[:, :, 1:], k, v, plan),
        "batch": lambda: bd.attention(*(tensor.expand(2, -1, -1, -1) for tensor in inputs), plan),
        "dtype": lambda: bd.attention(*(tensor.float() for tensor in inputs), plan),
        "head dimensions": lambda: bd.attention(q, k, k, plan),
        "scale": lambda: bd.attention(q, k, v, plan, scale=1.0),
        "requires_grad": lambda: bd.attention(q.clone().requires_grad_(), k, v, plan),
        "function": lambda: bd.attention_with_lse(q, k, v, plan),
        "plan": lambda: bd.attention(q, k, v, other),
        "torch.func": lambda: torch.func.grad(lambda q: bd.attention(q, k, v, plan).sum())(q),
    }
    for name, call in calls.items():
        message = raised((ValueError, RuntimeError), call if rank == odd else lambda: bd.attention(q, k, v, plan))
        assert name in message, message
    gathers = {
        "tokens along dim": lambda: plan.gather(q[:, :, 1:], dim=2),
        "dim": lambda: plan.gather(q.movedim(2, 0), dim=0),
        "shape": lambda: plan.gather(q[:, 1:], dim=2),
        "dtype": lambda: plan.gather(q.view(torch.int64), dim=2),
        "requires_grad": lambda: plan.gather(q.clone().requires_grad_(), dim=2),
        "plan": lambda: other.gather(q, dim=2),
    }
    for name, call in gathers.items():
        message = raised(ValueError, call if rank == odd else lambda: plan.gather(q, dim=2))
        assert "gather: " in message or rank == odd, message
        assert f"differs in {name}" in message or name in message.split(":")[-1], message
    assert torch.equal(plan.gather(q, dim=2), case.q)
    assert torch.equal(bd.attention(q, k, v, plan), plan.shard(case.same[0], dim=2))


# seconds: timeout of a group with a missing rank, and a margin for a busy machine
PATIENCE, GRACE = 3, 20


def a_missing_rank_is_an_error(what: str) -> None:
    """On every rank, within the timeout: one passes a wrong length, runs no backward, is late, or never calls."""
    rank, odd = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(timeout=datetime.timedelta(seconds=PATIENCE))
    # every rank needs keys of every other rank
    plan = bd.plan(layout_of("butterfly", LENGTH), group, heads=(4, 1), order="zigzag", scheme="exchange")
    case = whole("butterfly", LENGTH, (4, 1))
    q, k, v = (plan.shard(tensor, dim=2).requires_grad_() for tensor in (case.q, case.k, case.v))
    begin = time.monotonic()
    if what == "wrong length":
        if rank == odd:
            assert f"tokens of rank {odd}" in raised(ValueError, lambda: bd.attention(q[:, :, 1:], k, v, plan))
        else:
            raised(RuntimeError, lambda: bd.attention(q, k, v, plan))
    elif what == "no backward":
        out = bd.attention(q, k, v, plan)
        if rank != odd:
            raised(RuntimeError, lambda: out.sum().backward())
    elif what == "late":
        if rank == odd:
            time.sleep(2 * PATIENCE)
        raised(RuntimeError, lambda: bd.attention(q, k, v, plan))
    elif what == "no plan" and rank != odd:
        raised(RuntimeError, lambda: bd.plan(layout_of("local", LENGTH), group, heads=1))
    assert time.monotonic() - begin < 2 * PATIENCE + GRACE
    # other ranks may still wait
    dist.barrier()


def cases(n_ranks: int, has_kernels: bool = True) -> Cases:
    """has_kernels: with the cases that run kernels in the interpreter, whose truth takes seconds."""
    found: Cases = {}
    n_tiles = -(-LENGTH // 128)
    for i, (layout, order) in enumerate(itertools.product(LAYOUTS, orders(n_ranks, n_tiles))):
        # alternates, so that each layout and each order has both with some number of ranks
        kv_heads = (4, 1)[(i + n_ranks) % 2]
        whole(layout, LENGTH, (4, kv_heads))
        found[f"exchange equals one process: {layout}, {order}, 4 on {kv_heads} heads"] = partial(
            equals_one_process, layout, order, kv_heads, "exchange"
        )
    for i, layout in enumerate(LAYOUTS):
        order, kv_heads = [*orders(n_ranks, n_tiles)][(i + n_ranks) % 5], (1, 4)[(i + n_ranks) % 2]
        whole(layout, LENGTH, (4, kv_heads))
        found[f"all-gather equals one process: {layout}, {order}, 4 on {kv_heads} heads"] = partial(
            equals_one_process, layout, order, kv_heads, "all_gather"
        )
    whole("bigbird", LENGTH, (4, 2))
    for order, n_chunks in (("contiguous", 1), ("zigzag", 2), ("uneven", 1)):
        found[f"gathers every key: {order}"] = partial(gathers_every_key, order, n_chunks)
    if n_ranks == 2:
        found["plans predict speed-ups"] = plans_predict_speed_ups
    found["sums gradients in place"] = partial(sums_gradients_in_place, "documents", 4)
    for order, kv_heads in (("contiguous", 4), ("zigzag", 2)):
        whole("global", LENGTH, (4, kv_heads))
        found[f"uses pass-Q: {order}, {kv_heads}"] = partial(uses_pass_q, "global", order, kv_heads)
    if n_ranks == 2:
        whole("elsewhere", LENGTH, (4, 4))
        found["uses pass-Q for rows without a key on their rank"] = partial(uses_pass_q, "elsewhere", "alone", 4)
    for layout, order, n_chunks in (("local", "contiguous", 1), ("butterfly", "zigzag", 2), ("random", "uneven", 2)):
        whole(layout, LENGTH, (4, 2))
        found[f"sends the lower bound: {layout}, {order}"] = partial(sends_the_lower_bound, layout, order, n_chunks)
    for layout, order in (("causal", "zigzag"), ("butterfly", "uneven")):
        whole(layout, LENGTH, (2 * n_ranks, n_ranks))
        found[f"ulysses equals one process: {layout}, {order}"] = partial(ulysses_equals_one_process, layout, order)
    whole("butterfly", LENGTH, (4 * n_ranks, 2 * n_ranks))
    for order in ("contiguous", "uneven"):
        found[f"ulysses uses chunks: {order}"] = partial(ulysses_uses_chunks, order)
    whole("local", LENGTH, (2 * n_ranks, 1))
    found["auto chooses the scheme with less traffic"] = auto_chooses_the_scheme_with_less_traffic
    if n_ranks == 2:
        by_head(n_ranks)
        found["layouts per head and batch"] = layouts_per_head_and_batch
    whole("bigbird", LENGTH, (4, 2))
    for scheme in ("exchange", "all_gather"):
        found[f"options change no bit: {scheme}"] = partial(options_change_no_bit, "bigbird", scheme)
    in_half("global", (n_ranks, n_ranks))
    for scheme in ("exchange", "ulysses", "all_gather"):
        found[f"half types: {scheme}"] = partial(half_types, scheme)
    if n_ranks == 2 and has_kernels:
        interpreted("narrow", 560)
        found["kernels equal one process"] = kernels_equal_one_process
        found["kernels use pass-Q"] = kernels_use_pass_q
    whole("local", LENGTH, (4, 1))
    found["autocast converts"] = autocast_converts
    found["gather inverts shard"] = gather_inverts_shard
    whole("butterfly", LENGTH, (n_ranks, n_ranks))
    for scheme in {2: ("exchange", "ulysses"), 3: ("exchange", "all_gather"), 4: ()}[n_ranks]:
        found[f"compiles and checkpoints: {scheme}"] = partial(compiles_and_checkpoints, scheme)
    whole("local", 256 * n_ranks, (4, 2))
    found["takes DTensors"] = takes_dtensors
    whole("local", LENGTH, (4, 2))
    found["takes DTensors on other axes"] = takes_dtensors_on_other_axes
    found["layer equals that of one process"] = layer_equals_that_of_one_process
    found["trains with FSDP: one mesh"] = partial(trains_with_fsdp, n_ranks)
    if n_ranks == 4:
        found["trains with FSDP: two by two"] = partial(trains_with_fsdp, 2)
        found["the example trains"] = the_example_trains
    found["plan names the argument that differs"] = plan_names_the_argument_that_differs
    whole("local", LENGTH, (4, 1))
    found["check_calls names what differs"] = check_calls_names_what_differs
    found["a pickled plan is for its rank"] = a_pickled_plan_is_for_its_rank
    whole("butterfly", LENGTH, (4, 1))
    # slow, and the number of ranks does not matter
    for what in ("wrong length", "no backward", "late", "no plan") if n_ranks == 3 else ():
        found[f"a missing rank is an error: {what}"] = partial(a_missing_rank_is_an_error, what)
    # the last, since it replaces the group
    found["a plan ends with its group"] = a_plan_ends_with_its_group
    return found
