"""Does it matter within which of PyTorch's contexts a layout is planned, or attention is called?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, packing
from masks import deepspeed

SHAPE = 2, 2, 40, 8


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=draw, requires_grad=True) for _ in range(3)]


def of_host() -> BlockLayout:
    return BlockLayout.from_predicate(lambda q_pos, kv_pos: (q_pos + kv_pos) % 3 != 0, 40, 40, block_size=16)


def selected() -> BlockLayout:
    cols = torch.tensor([[[[0, 2], [1, -1], [2, 0]]]], device="cpu")
    return BlockLayout.from_topk(cols, 40, 40, block_size=16)


LAYOUTS = pytest.mark.parametrize("made", [of_host, selected])


@LAYOUTS
@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_inference_has_planned_is_trained(
    made: Callable[[], BlockLayout], is_made_inside: bool, causal: bool
) -> None:
    """As of a model that is validated before its first step."""
    layout, (q, k, v) = made(), tensors()
    with torch.inference_mode():
        if is_made_inside:
            layout = made()
        bias = torch.zeros(layout.capacity)
        attention(q, k, v, layout, causal=causal, block_bias=bias)
    bias = torch.zeros(layout.capacity, requires_grad=True)
    attention(q, k, v, layout, causal=causal, block_bias=bias).sum().backward()
    assert bias.grad is not None and q.grad is not None
    moved = layout.to("cpu").plan("cpu", causal=causal)
    assert not any(tensor.is_inference() for tensor in moved)


@LAYOUTS
@pytest.mark.parametrize("causal", [False, True])
def test_tensors_on_the_meta_device_have_shapes_and_leave_no_plan_of_shapes(
    made: Callable[[], BlockLayout], causal: bool
) -> None:
    layout = made()
    q, k, v = (tensor.detach().to("meta").requires_grad_() for tensor in tensors())
    out = attention(q, k, v, layout, causal=causal)
    assert out.is_meta and out.shape == SHAPE
    out.sum().backward()
    assert q.grad is not None and q.grad.is_meta
    assert not layout.plan("cpu", causal=causal).words.is_meta
    real = [tensor.detach() for tensor in tensors()]
    assert torch.equal(attention(*real, layout, causal=causal), attention(*real, made(), causal=causal))


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_default_device_changes_nothing(backend: str, seed: int | None) -> None:
    layout, (q, k, v) = of_host(), tensors()

    def dropped(draw: int) -> Tensor:
        torch.manual_seed(draw)
        return attention(q, k, v, layout, dropout_p=0.5, seed=seed, backend=backend)

    expected = dropped(0)
    with torch.device("meta"):
        inside = dropped(0)
    assert torch.equal(inside, expected)


@pytest.mark.parametrize("spec", ["longnet(segments=(16, 32), dilations=(1, 2))", "butterfly | local(window=9)"])
def test_masks_are_built_whatever_the_default_device(spec: str) -> None:
    expected = masks.build(spec, 64, block_size=16)
    with torch.device("meta"):
        layout = masks.build(spec, 64, block_size=16)
    assert layout == expected


def test_deepspeed_layouts_are_made_whatever_the_default_device() -> None:
    config = deepspeed.FixedSparsityConfig(num_heads=2, block=16)
    expected = config.make_layout(128)
    with torch.device("meta"):
        made = config.make_layout(128)
    assert torch.equal(made, expected)


def test_packing_is_on_the_host_whatever_the_default_device() -> None:
    given = [torch.arange(3, dtype=torch.int32), torch.arange(5, dtype=torch.int32)]
    with torch.device("meta"):
        packed, places = packing.pack(given)
    assert all(map(torch.equal, packing.unpack(packed, places), given))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda of: of.__name__)
@LAYOUTS
def test_transforms_of_torch_func_are_refused_and_the_reference_takes_them(
    made: Callable[[], BlockLayout], transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    layout, (q, k, v) = made(), (tensor.detach() for tensor in tensors())

    def by(backend: str, sinks: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return transform(lambda row: attention(q + row, k, v, layout, backend=backend, sinks=sinks).sum())

    row = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r'torch\.func.*backend="reference"'):
        by("eager")(row)
    with pytest.raises(RuntimeError, match=r'torch\.func.*backend="reference"'):
        by("eager", torch.zeros(2))(row)
    assert by("reference")(row).shape == (8,)


@LAYOUTS
def test_what_does_not_depend_on_what_is_transformed_is_computed(made: Callable[[], BlockLayout]) -> None:
    """As of a frozen encoder; and the plan which that caches is no tensor of the transform."""
    layout, (q, k, v) = made(), (tensor.detach() for tensor in tensors())
    expected = attention(q, k, v, made())
    # products within are tensors of the transform, which do not depend on what it differentiates
    found = torch.func.grad(lambda weight: (attention(1 * q, 1 * k, 1 * v, layout) * weight).sum())(torch.ones(SHAPE))
    torch.testing.assert_close(found, expected)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in layout.plan("cpu"))
