"""Choice of the backend on several ranks, and other checks that need one rank only."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import masks
from blocksparse_flash import BlockLayout, dispatch, distributed
from blocksparse_flash.distributed import functional as shared

LENGTH, HEADS, DIM = 512, (2, 1), 16


def test_several_ranks_choose_by_the_size_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit: list[str | None] = []

    def choose(*arguments: Any) -> str:
        unfit.append(arguments[3])
        return "eager"

    monkeypatch.setattr(dispatch, "choose", choose)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS)
        q, k = (torch.zeros(1, heads, LENGTH, DIM) for heads in HEADS)
        # like a rank that holds half of the tokens
        halved = dataclasses.replace(plan, length=2 * LENGTH)
        for asked, enough in ((plan, sum(HEADS) * LENGTH * DIM), (halved, sum(HEADS) * 2 * LENGTH * DIM)):
            for worth in (enough + 1, enough):
                monkeypatch.setattr(dispatch, "MIN_HOPPER_ELEMENTS", worth)
                shared._checked(q, k, k, asked, 0, None, None, "auto")
        shared._checked(q, k, k, plan, 0, None, None, "hopper")
    finally:
        dist.destroy_process_group()
    assert unfit == [dispatch.SMALL, None, dispatch.SMALL, None, None]


@pytest.fixture
def alone() -> Iterator[distributed.ContextPlan]:
    """A plan of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_are_refused(alone: distributed.ContextPlan) -> None:
    """Their tangents would be lost: the operators between ranks have no forward-mode derivative."""
    q, k = (torch.zeros(1, heads, LENGTH, DIM) for heads in HEADS)

    def attend(q: Tensor) -> Tensor:
        return distributed.attention(q, k, k, alone)

    def gather(q: Tensor) -> Tensor:
        return alone.gather(q, 2)

    for call in (attend, gather):
        for transform in (
            lambda call: torch.func.jvp(call, (q,), (q,)),
            lambda call: torch.func.vmap(call)(q[None]),
            lambda call: torch.func.grad(lambda q: call(q).sum())(q),
        ):
            with pytest.raises(RuntimeError, match=r"cannot be transformed by torch\.func"):
                transform(call)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="do not support forward-mode"):
            call(forward_ad.make_dual(q, q))
        with forward_ad.dual_level():
            # without a tangent
            call(q)


def test_a_layer_checks_its_sizes(alone: distributed.ContextPlan) -> None:
    for layer in (1, "a", True):
        with pytest.raises(ValueError, match=r"layer must be 0 \.\. 0"):
            distributed.SelfAttention(32, alone, layer=layer)
    with pytest.raises(TypeError, match=r"embed_dim must be an int, got 32\.0"):
        distributed.SelfAttention(32.0, alone)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of the plan's 2 query heads, got 33"):
        distributed.SelfAttention(33, alone)
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 512: take more heads"):
        distributed.SelfAttention(1024, alone)
    with pytest.raises(ValueError, match="rope rotates pairs of features, so head_dim must be even, got 5"):
        distributed.SelfAttention(10, alone, rope=100.0)
    layer = distributed.SelfAttention(32, alone)
    for x, error, message in (
        (None, TypeError, "x must be a torch.Tensor, got NoneType"),
        (torch.ones(1, LENGTH, 32, dtype=torch.int64), (TypeError, ValueError), "x must "),
    ):
        with pytest.raises(error, match=message):
            layer(x)


def test_a_copy_of_a_layer_shares_its_plan(alone: distributed.ContextPlan) -> None:
    """As of torch.optim.swa_utils.AveragedModel."""
    layer = distributed.SelfAttention(32, alone)
    copied = copy.deepcopy(layer)
    assert copied.plan is alone and copied.qkv.weight is not layer.qkv.weight
    x = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(copied(x), layer(x))


def test_a_dtensor_needs_a_plan_too(alone: distributed.ContextPlan) -> None:
    mesh = init_device_mesh("cpu", (1,))
    q = distribute_tensor(torch.zeros(1, 2, LENGTH, DIM), mesh, [Shard(2)])
    with pytest.raises(TypeError, match=r"plan must be a ContextPlan, as distributed\.plan makes it, got NoneType"):
        distributed.attention(q, q, q, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "said", "wrong"),
    [
        (TypeError, "scale must be", {"scale": True}),
        (TypeError, "chunks must be", {"chunks": True}),
        (TypeError, "chunks must be", {"chunks": 1.0}),
        (TypeError, "chunks must be", {"chunks": [1]}),
        (ValueError, "layer must be", {"layer": False}),
        (ValueError, "layer must be", {"layer": -1}),
        (ValueError, "backend must be", {"backend": "eagre"}),
        (TypeError, "backend must be", {"backend": ["eager"]}),
    ],
    ids=str,
)
def test_what_equals_an_argument_that_was_taken_is_refused(
    alone: distributed.ContextPlan, kind: type[Exception], said: str, wrong: dict[str, Any]
) -> None:
    q, k = (torch.zeros(1, heads, LENGTH, DIM) for heads in HEADS)
    taken: dict[str, Any] = {"layer": 0, "scale": 1.0, "chunks": 1, "backend": "eager"}
    for _ in range(2):
        distributed.attention(q, k, k, alone, **taken)
        with pytest.raises(kind, match=said):
            distributed.attention(q, k, k, alone, **(taken | wrong))
    with pytest.raises(ValueError, match="q's device"):
        distributed.attention(q, k.to("meta"), k, alone, **taken)


@pytest.mark.parametrize("scheme", ["exchange", "all_gather", "ulysses"])
@pytest.mark.usefixtures("alone")
def test_a_layout_of_another_batch_is_refused(scheme: str) -> None:
    """Its tile lists would be read out of bounds."""
    layout = BlockLayout.stack_batches([masks.local(LENGTH, window=64), masks.local(LENGTH, window=32)])
    plan = distributed.plan(layout, dist.group.WORLD, heads=HEADS, scheme=scheme)
    q, k = (torch.zeros(3, heads, LENGTH, DIM) for heads in HEADS)
    assert distributed.attention(q[:2], k[:2], k[:2], plan).shape == q[:2].shape
    for n in (1, 3):
        with pytest.raises(ValueError, match=f"must have batch 1 or q's {n}, got 2"):
            distributed.attention(q[:n], k[:n], k[:n], plan)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
@pytest.mark.usefixtures("alone")
def test_gradients_have_no_gradients(scheme: str) -> None:
    plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS, scheme=scheme)
    q, k = (torch.ones(1, heads, LENGTH, DIM, requires_grad=True) for heads in HEADS)
    (grad,) = torch.autograd.grad(distributed.attention(q, k, k, plan).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of distributed attention are not supported"):
        grad.sum().backward()
