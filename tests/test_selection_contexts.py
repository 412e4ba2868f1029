"""selected_attention and layers that select blocks: tracers, fake tensors, transforms, and inputs of any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from blocksparse_flash import attention, nn, selected_attention
from tests.support.tracers import MAKE_FX

LENGTH, BLOCK = 64, 16


def tensors(heads: int = 4, dtype: torch.dtype = torch.float32, head_dim: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, heads, LENGTH, head_dim), (1, 1, LENGTH, head_dim), (1, 1, LENGTH, head_dim))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def first_blocks() -> Tensor:
    return torch.zeros(1, 1, LENGTH, 1, dtype=torch.int64)


def own_blocks() -> Tensor:
    return (torch.arange(LENGTH) // BLOCK).view(1, 1, LENGTH, 1)


def call(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, **options: Any) -> Tensor:
    return selected_attention(q, k, v, indices, block_size=BLOCK, **options)


# ---- tracers ----


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", MAKE_FX, ids=str)
def test_a_graph_of_make_fx_has_the_selection_as_an_input(options: dict[str, Any], backend: str) -> None:
    q, k, v = tensors()
    graph = make_fx(lambda *x: call(*x, backend=backend), **options)(q, k, v, first_blocks())
    torch.testing.assert_close(graph(q, k, v, own_blocks()), call(q, k, v, own_blocks(), backend=backend))


def test_a_functionalized_graph_has_the_selection_as_an_input() -> None:
    q, k, v = tensors()
    graph = make_fx(torch.func.functionalize(lambda *x: call(*x, causal=True)))(q, k, v, first_blocks())
    torch.testing.assert_close(graph(q, k, v, own_blocks()), call(q, k, v, own_blocks()))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_selection_made_before_is_a_constant_of_the_graph(mode: str) -> None:
    (q, k, v), indices = tensors(), own_blocks()
    graph = make_fx(lambda *x: call(*x, indices), tracing_mode=mode)(q, k, v)
    torch.testing.assert_close(graph(q, k, v), call(q, k, v, indices))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_traces_packed_documents(mode: str) -> None:
    q, k, v = tensors()
    bounds = torch.tensor([0, 10, LENGTH])

    def packed(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return call(q, k, v, own_blocks(), cu_seqlens=bounds)

    graph = make_fx(packed, tracing_mode=mode)(q, k, v, torch.tensor([0, 30, LENGTH]))
    torch.testing.assert_close(graph(q, k, v, bounds), packed(q, k, v, bounds))


def test_aot_function_traces_the_gradient() -> None:
    q, k, v = tensors()
    q.requires_grad_()
    compiled = aot_function(call, fw_compiler=lambda graph, _: make_boxed_func(graph))
    compiled(q, k, v, first_blocks())
    traced, expected = (of(q, k, v, own_blocks()) for of in (compiled, call))
    torch.testing.assert_close(traced, expected)
    of_traced, of_expected = (torch.autograd.grad(out.sum(), q)[0] for out in (traced, expected))
    torch.testing.assert_close(of_traced, of_expected)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "moba": lambda: nn.MixtureOfBlockAttention(64, 4, k_blocks=2, block_size=16, by_group=True, kv_heads=1),
    "video": lambda: nn.VideoSparseAttention(64, 4, (4, 4, 4), k_blocks=2, cube=(2, 2, 4)),
    "shared index": lambda: nn.SharedIndexAttention(64, 4, k_blocks=2, block_size=16, kv_heads=1),
    "native": lambda: nn.NativeSparseAttention(
        64, 4, kv_heads=1, k_blocks=3, block_size=16, compressed_size=16, stride=8
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_of_a_layer_selects_for_its_input(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x, other = torch.randn(1, LENGTH, 64), torch.randn(1, LENGTH, 64)
    with torch.no_grad():
        traced = make_fx(layer)(x)(other)
        torch.testing.assert_close(traced, layer(other))


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return call(*inputs)

    with pytest.raises(Exception, match=r"selected_attention .*(cannot be in a graph|torch\.compiler\.disable)"):
        torch.export.export(Layer(), (*tensors(), own_blocks()), strict=strict)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"selected_attention cannot be in a graph of torch\.export or torch\.jit"):
        torch.jit.trace(call, (*tensors(), own_blocks()))


def test_attention_before_dispatch_is_traced_as_its_operator() -> None:
    q, k, v = tensors(1)
    graph = make_fx(lambda *x: attention(*x, causal=True), pre_dispatch=True)(q, k, v)
    assert any("attention_forward" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(k, q, v), attention(k, q, v, causal=True))


# ---- fake tensors and transforms ----


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("has_real_indices", [False, True])
def test_fake_tensors_have_the_shape_of_real_ones(has_real_indices: bool, is_inside: bool, backend: str) -> None:
    mode = FakeTensorMode()
    q, k, v, indices = map(mode.from_tensor, (*tensors(), own_blocks()))
    if has_real_indices:
        indices = own_blocks()
    bounds = mode.from_tensor(torch.tensor([0, LENGTH]))
    if is_inside:
        with mode:
            assert call(q, k, v, indices, backend=backend).shape == q.shape
            assert call(q, k, v, indices, backend=backend, cu_seqlens=bounds).shape == q.shape
    else:
        assert call(q, k, v, indices, backend=backend).shape == q.shape


@pytest.mark.parametrize("name", ["indices", "cu_seqlens"])
def test_real_queries_refuse_fake_selections(name: str) -> None:
    mode, (q, k, v) = FakeTensorMode(), tensors()
    given = {"indices": own_blocks(), "cu_seqlens": torch.tensor([0, LENGTH])}
    given[name] = mode.from_tensor(given[name])
    with pytest.raises(ValueError, match=f"{name} must be of q's kind"):
        selected_attention(q, k, v, **given, block_size=BLOCK)


@pytest.mark.parametrize("name", [*LAYERS, "window"])
@pytest.mark.parametrize("context", ["fake", "grad", "vmap"])
def test_the_first_call_of_a_layer_may_be_in_any_context(context: str, name: str) -> None:
    """Its layouts are made then, and kept."""
    layer = nn.SelfAttention(64, 4, "local(window=9)") if name == "window" else LAYERS[name]()
    x = torch.randn(1, LENGTH, 64)

    def out() -> Tensor:
        found = layer(x)
        return found[0] if isinstance(found, tuple) else found

    if context == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert out().shape == x.shape
    elif context == "grad":
        torch.func.grad(lambda factor: (factor * out().detach()).sum())(torch.ones(()))
    else:
        torch.func.vmap(lambda factor: factor * out())(torch.ones(2))
    assert out().isfinite().all()


@pytest.mark.parametrize("name", ["q", "indices"])
def test_vmap_is_refused(name: str) -> None:
    q, k, v = tensors()
    inputs = {"q": q, "k": k, "v": v, "indices": own_blocks()}

    def of_one(one: Tensor) -> Tensor:
        return call(**{**inputs, name: one})

    with pytest.raises(RuntimeError, match=r'backend "auto" cannot be transformed by torch.*backend="reference"'):
        torch.func.vmap(of_one)(torch.stack([inputs[name]] * 2))


@pytest.mark.parametrize("name", LAYERS)
def test_vmap_over_a_layer_is_refused(name: str) -> None:
    # layers have no backend= that would support it
    with pytest.raises(RuntimeError, match=r"this function cannot be transformed by torch.*batch or heads$"):
        torch.func.vmap(LAYERS[name]())(torch.randn(2, 1, LENGTH, 64))


@pytest.mark.parametrize("name", ["q", "gates"])
def test_vmap_over_native_sparse_attention_is_refused(name: str) -> None:
    q, k, v = tensors()
    inputs = {"q": q, "gates": torch.rand(*q.shape[:3], 3)}

    def of_one(one: Tensor) -> Tensor:
        given = {**inputs, name: one}
        compressed, branch = (k[:, :, : LENGTH // 16], v[:, :, : LENGTH // 16]), (k, v)
        sizes = {"k_blocks": 3, "block_size": 16, "compressed_size": 16, "stride": 16}
        return nn.native_sparse_attention(given["q"], compressed, branch, branch, given["gates"], **sizes)

    assert of_one(inputs[name]).shape == q.shape
    with pytest.raises(RuntimeError, match="cannot be transformed by torch"):
        torch.func.vmap(of_one)(torch.stack([inputs[name]] * 2))


# ---- strides ----


def columns(head_dim: int, of: int) -> list[Tensor]:
    """Tensors that are views of wider ones, whose rows begin at multiples of 16 bytes."""
    return [tensor[..., :head_dim] for tensor in tensors(dtype=torch.float16, head_dim=of)]


def with_batch_stride() -> list[Tensor]:
    """A batch of 1 has any stride."""
    q, k, v = tensors(dtype=torch.float16)
    return [q.as_strided(q.shape, (3, *q.stride()[1:])), k, v]


def after_an_odd_offset() -> list[Tensor]:
    q, k, v = tensors(dtype=torch.float16)
    return [torch.cat([q.new_zeros(7), q.flatten()])[7:].view(q.shape), k, v]


@pytest.mark.parametrize(
    "make",
    [lambda: columns(10, 16), lambda: columns(2, 8), with_batch_stride, after_an_odd_offset],
    ids=["10 of 16 columns", "2 of 8 columns", "batch stride 3", "offset 7"],
)
def test_half_types_have_any_strides(make: Callable[[], list[Tensor]]) -> None:
    strided = [tensor.requires_grad_() for tensor in make()]
    plain = [tensor.detach().contiguous().clone().requires_grad_() for tensor in strided]
    for ours, expected in zip(
        *([out, *torch.autograd.grad(out.sum(), inputs)]
          for inputs in (strided, plain) for out in [call(*inputs, own_blocks())]), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, expected)


def test_gradients_of_half_types_may_be_negated_or_strided() -> None:
    q, k, v = tensors(dtype=torch.float16)
    q.requires_grad_()
    out = call(q, k, v, own_blocks())
    dout = torch.randn(out.shape).half()
    (expected,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    for same in (torch._neg_view(-dout), dout.as_strided(dout.shape, (1281, *dout.stride()[1:]))):
        torch.testing.assert_close(torch.autograd.grad(out, q, same, retain_graph=True)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_several_gradients_at_once_are_refused(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    q.requires_grad_()
    out = call(q, k, v, own_blocks())
    with pytest.raises(RuntimeError, match="takes one gradient at a time"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape, dtype=dtype), is_grads_batched=True)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.NativeSparseAttention(16, 2),
        lambda: nn.MixtureOfBlockAttention(16, 2, k_blocks=2, block_size=16),
        lambda: nn.SharedIndexAttention(16, 2, k_blocks=2, block_size=16),
        lambda: nn.VideoSparseAttention(16, 2, (4, 4, 4), k_blocks=1),
    ],
    ids=["native", "mixture", "shared index", "video"],
)
def test_inputs_without_values_are_refused_by_name(layer: Callable[[], torch.nn.Module]) -> None:
    with pytest.raises(ValueError, match="q is on the meta device, which holds no data"):
        layer().to("meta")(torch.zeros(2, 64, 16, device="meta"))
