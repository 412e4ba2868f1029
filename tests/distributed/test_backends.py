"""Choice of the backend on several ranks, and other checks that need one rank only."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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


def saved_and_loaded(layer: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [lambda layer: pickle.loads(pickle.dumps(layer)), saved_and_loaded])
def test_a_pickled_layer_has_a_plan_of_the_same_group(alone: distributed.ContextPlan, copied: Callable) -> None:
    layer, x = distributed.SelfAttention(32, alone), torch.randn(1, LENGTH, 32)
    # calls keep schemes, which hold the group
    expected = layer(x)
    assert alone.layers[0].cache
    again = copied(layer)
    assert again.plan is not alone and again.plan.group is alone.group and not again.plan.layers[0].cache
    assert torch.equal(again(x), expected) and str(again) == str(layer)
    assert torch.equal(again.plan.gather(again.plan.shard(x, 1), 1), x)


def test_a_pickled_plan_needs_its_group(alone: distributed.ContextPlan) -> None:
    """context_cases.py tests other ranks."""
    pickled = pickle.dumps(distributed.SelfAttention(32, alone))
    dist.destroy_process_group()
    try:
        with pytest.raises(ValueError, match=r'a pickled plan must be .* group "0" .*got no group of this name; make'):
            pickle.loads(pickled)
        with pytest.raises(
            ValueError, match='plan must belong to a process group that exists, got one whose group "0"'
        ):
            pickle.dumps(alone)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert pickle.loads(pickled).plan.group is dist.group.WORLD


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("check_calls", [False, True])
@pytest.mark.usefixtures("alone")
def test_a_plan_of_a_destroyed_group_is_refused(is_replaced: bool, check_calls: bool) -> None:
    """Before anything is computed. A new group of the same name may have other ranks, or the same in another order."""
    plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS, check_calls=check_calls)
    layer, x = distributed.SelfAttention(32, plan), torch.zeros(1, LENGTH, 32)
    q, k = (torch.zeros(1, heads, LENGTH, DIM) for heads in HEADS)
    calls = (
        lambda: distributed.attention(q, k, k, plan),
        lambda: distributed.attention_with_lse(q, k, k, plan),
        lambda: layer(x),
        lambda: plan.shard(x, 1),
        lambda: plan.gather(x, 1),
        lambda: distributed.SelfAttention(32, plan),
    )
    for call in calls:
        call()
    layer.qkv.register_forward_hook(lambda *_: pytest.fail("the projection was computed"))
    dist.destroy_process_group()
    try:
        if is_replaced:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        replaced = ", and another group has this name now" if is_replaced else ""
        for call in calls:
            with pytest.raises(
                ValueError,
                match=r"plan must belong to a process group that exists, got one whose group \"0\" was destroyed"
                rf"{replaced}; make it again with distributed\.plan",
            ):
                call()
    finally:
        if not is_replaced:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("alone")
def test_a_plan_needs_a_group_that_exists() -> None:
    layout = masks.local(LENGTH, window=64)
    group = dist.new_group([0])
    meshes = [init_device_mesh("cpu", (1,)), DeviceMesh.from_group(group, "cpu")]
    assert distributed.plan(layout, group, heads=1).gather(torch.ones(LENGTH), 0).all()
    dist.destroy_process_group(group)
    gone = "group must be a process group that exists, got one that was destroyed"
    for each in (group, meshes[1]):
        with pytest.raises(ValueError, match=gone):
            distributed.plan(layout, each, heads=1)
    dist.destroy_process_group()
    try:
        with pytest.raises(ValueError, match=gone):
            distributed.plan(layout, meshes[0], heads=1)
        # as on ranks that are not in a group, and before init_process_group
        for each in (dist.GroupMember.NON_GROUP_MEMBER, dist.group.WORLD):
            with pytest.raises(TypeError, match="WORLD is one after init_process_group, and new_group returns one to"):
                distributed.plan(layout, each, heads=1)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses"])
@pytest.mark.usefixtures("alone")
def test_a_plan_made_in_inference_mode_trains(scheme: str) -> None:
    with torch.inference_mode():
        plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS, scheme=scheme)
    x = torch.ones(1, LENGTH, 32, requires_grad=True)
    plan.gather(distributed.SelfAttention(32, plan, rope=100.0)(plan.shard(x, 1)), 1).sum().backward()
    assert x.grad is not None and x.grad.any()


def test_tokens_must_be_a_dense_tensor(alone: distributed.ContextPlan) -> None:
    x, mesh = torch.ones(1, LENGTH, 32), init_device_mesh("cpu", (1,))
    for placement in (Shard(1), Replicate()):
        shared = distribute_tensor(x, mesh, [placement])
        with pytest.raises(ValueError, match=r"x must be .*, got a DTensor; x\.full_tensor\(\) has the whole sequence"):
            alone.shard(shared, 1)
        with pytest.raises(ValueError, match=r"x must be .*, got a DTensor; x\.to_local\(\) has the part of this rank"):
            alone.gather(shared, 1)
        with pytest.raises(ValueError, match=r"x must be .*, got a DTensor; x\.to_local\(\) has the part of this rank"):
            distributed.SelfAttention(32, alone)(shared)
    for wrong, kind in (
        (torch.nested.nested_tensor([x[0]], layout=torch.jagged), "a nested tensor"),
        (x[0].to_sparse(), "a torch.sparse_coo tensor"),
    ):
        for call in (alone.shard, alone.gather):
            with pytest.raises(ValueError, match=f"x must be a dense, strided tensor, got {kind}; "):
                call(wrong, 0)


def test_a_layer_takes_another_plan(alone: distributed.ContextPlan) -> None:
    layer, x = distributed.SelfAttention(32, alone), torch.ones(1, LENGTH, 32)
    expected = layer(x)
    layer.plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=HEADS)
    assert torch.equal(layer(x), expected)
    layer.plan = distributed.plan(masks.local(LENGTH, window=64), dist.group.WORLD, heads=(4, 2))
    with pytest.raises(ValueError, match=r"q and k must have the plan's heads \(4, 2\), got \(2, 1\)"):
        layer(x)


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
