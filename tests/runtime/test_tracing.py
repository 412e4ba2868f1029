"""Planning and attention give the same result in every PyTorch context: modes, tracers, transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import masks
from blocksparse_flash import (
    BlockLayout,
    attention,
    attention_with_lse,
    explain,
    nn,
    paged_attention,
    selected_attention,
)
from blocksparse_flash.blocks import transfer
from blocksparse_flash.runtime.tensor_spec import is_tma_loadable
from masks import deepspeed
from tests.support.tracers import MAKE_FX

SHAPE = 2, 2, 40, 8
# these tensors are on the CPU, where `triton` runs in the interpreter: never beside a GPU, see conftest.py
INTERPRETED = [] if torch.cuda.is_available() else ["triton"]


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=draw, requires_grad=True) for _ in range(3)]


def host_layout() -> BlockLayout:
    return BlockLayout.from_predicate(lambda q_pos, kv_pos: (q_pos + kv_pos) % 3 != 0, 40, 40, block_size=16)


def selected() -> BlockLayout:
    cols = torch.tensor([[[[0, 2], [1, -1], [2, 0]]]], device="cpu")
    return BlockLayout.from_topk(cols, 40, 40, block_size=16)


LAYOUTS = pytest.mark.parametrize("make", [host_layout, selected])


@LAYOUTS
@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_layout_planned_in_inference_mode_is_trained(
    make: Callable[[], BlockLayout], is_made_inside: bool, causal: bool
) -> None:
    """As in a model that is validated before its first training step."""
    layout, (q, k, v) = make(), tensors()
    with torch.inference_mode():
        if is_made_inside:
            layout = make()
        bias = torch.zeros(layout.capacity)
        attention(q, k, v, layout, causal=causal, block_bias=bias)
    bias = torch.zeros(layout.capacity, requires_grad=True)
    attention(q, k, v, layout, causal=causal, block_bias=bias).sum().backward()
    assert bias.grad is not None and q.grad is not None
    moved = layout.to("cpu").plan("cpu", causal=causal)
    assert not any(tensor.is_inference() for tensor in moved)


@LAYOUTS
@pytest.mark.parametrize("causal", [False, True])
def test_meta_tensors_give_shapes_and_leave_no_meta_plan(make: Callable[[], BlockLayout], causal: bool) -> None:
    layout = make()
    q, k, v = (tensor.detach().to("meta").requires_grad_() for tensor in tensors())
    out = attention(q, k, v, layout, causal=causal)
    assert out.is_meta and out.shape == SHAPE
    out.sum().backward()
    assert q.grad is not None and q.grad.is_meta
    assert not layout.plan("cpu", causal=causal).bitmasks.is_meta
    real = [tensor.detach() for tensor in tensors()]
    assert torch.equal(attention(*real, layout, causal=causal), attention(*real, make(), causal=causal))


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_default_device_changes_nothing(backend: str, seed: int | None) -> None:
    layout, (q, k, v) = host_layout(), tensors()

    def attend(draw: int) -> Tensor:
        torch.manual_seed(draw)
        return attention(q, k, v, layout, dropout_p=0.5, seed=seed, backend=backend)

    expected = attend(0)
    with torch.device("meta"):
        inside = attend(0)
    assert torch.equal(inside, expected)


@pytest.mark.parametrize("spec", ["longnet(segments=(16, 32), dilations=(1, 2))", "butterfly | local(window=9)"])
def test_masks_ignore_the_default_device(spec: str) -> None:
    expected = masks.build(spec, 64, block_size=16)
    with torch.device("meta"):
        layout = masks.build(spec, 64, block_size=16)
    assert layout == expected


def test_deepspeed_layouts_ignore_the_default_device() -> None:
    config = deepspeed.FixedSparsityConfig(num_heads=2, block=16)
    expected = config.make_layout(128)
    with torch.device("meta"):
        actual = config.make_layout(128)
    assert torch.equal(actual, expected)


def test_packing_ignores_the_default_device() -> None:
    arrays = [torch.arange(3, dtype=torch.int32), torch.arange(5, dtype=torch.int32)]
    with torch.device("meta"):
        packed, places = transfer.pack(arrays)
    assert all(map(torch.equal, transfer.unpack(packed, places), arrays))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda of: of.__name__)
@LAYOUTS
def test_torch_func_is_refused_except_by_the_reference(
    make: Callable[[], BlockLayout], transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    layout, (q, k, v) = make(), (tensor.detach() for tensor in tensors())

    def transformed(backend: str, sinks: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return transform(lambda row: attention(q + row, k, v, layout, backend=backend, sinks=sinks).sum())

    row = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r'torch\.func.*backend="reference"'):
        transformed("eager")(row)
    with pytest.raises(RuntimeError, match=r'torch\.func.*backend="reference"'):
        transformed("eager", torch.zeros(2))(row)
    assert transformed("reference")(row).shape == (8,)


@LAYOUTS
def test_attention_that_is_independent_of_the_transformed_input_is_computed(make: Callable[[], BlockLayout]) -> None:
    """As in a frozen encoder. The plan cached by the call has no tensor of the transform."""
    layout, (q, k, v) = make(), (tensor.detach() for tensor in tensors())
    expected = attention(q, k, v, make())
    # 1 * q is a tensor of the transform, but does not depend on what it differentiates
    found = torch.func.grad(lambda weight: (attention(1 * q, 1 * k, 1 * v, layout) * weight).sum())(torch.ones(SHAPE))
    torch.testing.assert_close(found, expected)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in layout.plan("cpu"))


# ---- fake tensors and tracers that use them ----

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, lengths": {"causal": True, "kv_lengths": torch.tensor([3, 40], device="cpu")},
    "dropout": {"dropout_p": 0.3},
    "seed": {"dropout_p": 0.3, "seed": 5},
    "scores": {"sinks": torch.zeros(2, device="cpu"), "block_bias": torch.zeros(9, device="cpu")},
    "pairs": {"pair_bias": torch.zeros(1, 2, 40, 40, device="cpu")},
}


def facts_of(tensors: list[Tensor], *, has_strides: bool) -> list[Any]:
    return [(t.shape, t.stride() if has_strides else None, t.dtype, t.device) for t in tensors]


def results(call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    out, lse = call(*inputs)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["auto", *INTERPRETED, "reference"])
def test_fake_tensors_have_the_shapes_of_real_ones(backend: str, options: str) -> None:
    layout = host_layout().to("cpu")

    def call(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return attention_with_lse(q, k, v, layout, backend=backend, **kwargs)

    def inputs() -> list[Tensor]:
        # (batch, length, heads, head_dim) in memory, as from a projection; two query heads per KV head
        q = torch.randn(2, 40, 2, 8).transpose(1, 2)
        return [q.requires_grad_(), *(torch.randn(2, 1, 40, width).requires_grad_() for width in (8, 16))]

    real = inputs()
    # the reference runs PyTorch's own operators, whose strides may differ
    facts = functools.partial(facts_of, has_strides=backend != "reference")
    expected = facts(results(lambda *x: call(*x, **OPTIONS[options]), *real))
    mode = FakeTensorMode()
    fake_options = {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else value
        for name, value in OPTIONS[options].items()
    }
    fake = [mode.from_tensor(tensor) for tensor in real]
    with mode:
        assert facts(results(lambda *x: call(*x, **fake_options), *fake)) == expected
    # also outside of their mode
    found = results(lambda *x: call(*x, **fake_options), *fake)
    assert facts(found) == expected and all(isinstance(tensor, FakeTensor) for tensor in found)


@LAYOUTS
def test_a_plan_made_for_fake_tensors_is_real(make: Callable[[], BlockLayout]) -> None:
    layout, real = make(), [tensor.detach() for tensor in tensors()]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in real]
        attention(*fake, layout, causal=True, block_bias=torch.zeros(layout.capacity))
        attention(*fake, layout, backend="reference")
        assert explain(*fake, layout).backend == "eager"
        assert nn.SelfAttention(16, 2, layout, rope=1e4)(torch.zeros(2, 40, 16)).shape == (2, 40, 16)
    assert not any(isinstance(tensor, FakeTensor) for tensor in layout.plan("cpu", causal=True))
    assert torch.equal(attention(*real, layout, causal=True), attention(*real, make(), causal=True))


# PyTorch's own, when it makes the first dual tensor
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("call", ["attention", "layout", "sinks", "selected", "paged"])
def test_forward_mode_differentiation_is_refused(call: str) -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    indices = torch.zeros(1, 1, 40, 1, dtype=torch.int64)
    pages, table = torch.zeros(2, 2, 16, 8), torch.zeros(2, 1, dtype=torch.int32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        sinks = forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        calls: dict[str, Callable[[], Any]] = {
            "attention": lambda: attention(dual, k, v),
            "layout": lambda: attention(dual, k, v, host_layout()),
            "sinks": lambda: attention(q, k, v, sinks=sinks),
            "selected": lambda: selected_attention(dual, k, v, indices, block_size=16),
            "paged": lambda: paged_attention(dual[:, :, :1], pages, pages, table, torch.tensor([3, 4])),
        }
        with pytest.raises((RuntimeError, ValueError), match="forward"):
            calls[call]()
        assert forward_ad.unpack_dual(attention(q, k, v)).tangent is None
        of_reference = forward_ad.unpack_dual(attention(dual, k, v, backend="reference"))
    assert of_reference.tangent is not None


def test_layouts_are_built_of_real_values_in_a_fake_mode() -> None:
    mask, order = torch.ones(64, 64, dtype=torch.bool), torch.arange(64).flip(0)
    layout = masks.local(64, window=3)
    full, expected = BlockLayout.from_dense(mask), layout.permute(order)
    with FakeTensorMode():
        assert BlockLayout.from_dense(mask) == full
        assert layout.permute(order) == expected
        assert BlockLayout.from_state_dict(layout.state_dict()) == layout
    assert not any(isinstance(tensor, FakeTensor) for tensor in layout.state_dict().values())


def fake_tensors() -> dict[str, Tensor]:
    """Those of a layout of one full block of 9 tokens."""
    shapes = {"indptr": (1, 1, 2), "indices": (1,), "bitmask_ids": (1,), "bitmasks": (0, 128, 4)}
    return {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("mask", lambda: BlockLayout.from_dense(torch.ones(64, 64, dtype=torch.bool))),
        ("rows", lambda: BlockLayout.from_blocks(torch.tensor([0]), [0], 64, 64)),
        ("q_order", lambda: masks.local(64, window=3).permute(torch.arange(64))),
        ("indptr", lambda: BlockLayout.from_state_dict({**masks.causal(9).state_dict(), **fake_tensors()})),
    ],
)
def test_values_that_cannot_be_read_are_refused(name: str, build: Callable[[], Any]) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=f"{name} must have values that can be read now"):
        build()


@pytest.mark.sweep
@pytest.mark.parametrize("options", ["plain", "causal, lengths", "seed", "scores", "pairs"])
@pytest.mark.parametrize("backend", ["auto", *INTERPRETED])
def test_aot_function_traces_forward_and_backward(backend: str, options: str) -> None:
    layout, inputs, graphs = host_layout().to("cpu"), tensors(), []

    def call(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, *values = args
        return attention_with_lse(q, k, v, layout, backend=backend, **names_of(values))

    def names_of(values: list[Any]) -> dict[str, Any]:
        return dict(zip(OPTIONS[options], values, strict=True))

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph)

    traced, values = aot_function(call, fw_compiler=keep, bw_compiler=keep), list(OPTIONS[options].values())
    actual = results(lambda *x: traced(*x, *values), *inputs)
    torch.testing.assert_close(actual, results(lambda *x: call(*x, *values), *inputs), rtol=0, atol=0)
    assert "attention_forward" in graphs[0] and "attention_backward" in graphs[1]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_lengths_and_layouts(mode: str) -> None:
    layout, inputs, lengths = host_layout(), [tensor.detach() for tensor in tensors()], torch.tensor([3, 40])
    traced = make_fx(lambda *x: attention(*x[:3], layout, kv_lengths=x[3]), tracing_mode=mode)(*inputs, lengths)
    torch.testing.assert_close(traced(*inputs, lengths), attention(*inputs, layout, kv_lengths=lengths))


SCORES = torch.randn(2, 1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
BOUNDS = torch.tensor([0, 9, 40])
TOKENS = torch.tensor([9])
SELECTED: dict[str, tuple[Callable[[Tensor], BlockLayout], Tensor, Tensor]] = {
    "scores": (lambda x: BlockLayout.from_scores(x, 40, 40, k=2, block_size=16), SCORES[0], SCORES[1]),
    "cols": (
        lambda x: BlockLayout.from_topk(x, 40, 40, block_size=16),
        SCORES[0].topk(2).indices,
        SCORES[1].topk(2).indices,
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("options", MAKE_FX, ids=str)
def test_make_fx_traces_selected_layouts(options: dict[str, Any], name: str, causal: bool) -> None:
    """The graph takes another selection."""
    make, first, second = SELECTED[name]
    q, k, v = (tensor.detach() for tensor in tensors())

    def call(q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
        return attention(q, k, v, make(selected), causal=causal)

    traced = make_fx(call, **options)(q, k, v, first)
    torch.testing.assert_close(traced(q, k, v, second), call(q, k, v, second))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.documents([0, 9, 40]),
        lambda: masks.documents(BOUNDS),
        lambda: masks.local(40, window=9, block_size=16) | masks.butterfly(40, block_size=16),
        lambda: masks.longformer(40, window=9, global_tokens=TOKENS, block_size=16),
    ],
    ids=["list", "tensor", "union", "global tokens"],
)
def test_masks_built_while_make_fx_traces_are_constants(make: Callable[[], BlockLayout], mode: str) -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    traced = make_fx(lambda q, k, v: attention(q, k, v, make()), tracing_mode=mode)(q, k, v)
    torch.testing.assert_close(traced(k, v, q), attention(k, v, q, make()))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_masks_of_traced_values_are_refused(mode: str) -> None:
    """They would silently be constants of the graph."""
    with pytest.raises(ValueError, match="cu_seqlens: expected values that can be read now"):
        make_fx(lambda bounds: masks.documents(bounds).density, tracing_mode=mode)(BOUNDS)
    with pytest.raises(ValueError, match="scores: expected values that can be read now"):
        torch.func.vmap(lambda scores: masks.top_k(scores, 40, 40, k=1, block_size=16).density)(SCORES[0])


def test_fake_cuda_tensors_work_without_a_gpu() -> None:
    if torch.cuda.is_available():
        return
    layout = host_layout()
    with FakeTensorMode():
        q = torch.zeros(SHAPE, device="cuda")
        assert attention(q, q, q, layout).device.type == "cuda"
        with pytest.raises(ValueError, match="this machine has no CUDA device"):
            attention(q, q, q, layout, backend="triton")


def test_is_tma_loadable_does_not_read_the_address_of_a_fake_tensor() -> None:
    with FakeTensorMode():
        assert is_tma_loadable(torch.zeros(SHAPE, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["k", "kv_lengths", "seed", "sinks"])
@pytest.mark.parametrize("is_fake", [False, True])
def test_fake_and_real_tensors_together_are_refused(name: str, is_fake: bool) -> None:
    """Either kind may be the odd one out."""
    q, k, v = (tensor.detach() for tensor in tensors())
    call = {
        "q": q,
        "k": k,
        "v": v,
        "kv_lengths": torch.tensor([3, 4]),
        "seed": torch.tensor([3]),
        "sinks": torch.zeros(2),
    }
    mode = FakeTensorMode()
    mixed = {of: mode.from_tensor(value) if (of == name) == is_fake else value for of, value in call.items()}
    with pytest.raises(ValueError, match=f"{name} must be of q's kind"):
        attention(**mixed, dropout_p=0.5)


@pytest.mark.parametrize("name", ["kv_lengths", "seed"])
def test_vmap_over_an_option_is_refused(name: str) -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    values = {"kv_lengths": torch.tensor([[3, 4], [5, 6]]), "seed": torch.tensor([[3], [4]])}[name]
    with pytest.raises(RuntimeError, match=r'torch\.func\.vmap.*backend="reference"'):
        torch.func.vmap(lambda value: attention(q, k, v, dropout_p=0.5, **{name: value}))(values)
