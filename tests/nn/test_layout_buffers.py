"""Layers with a layout that are copied, loaded, wrapped and moved as PyTorch's own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masks
from blocksparse_flash.nn import Encoder, EncoderBlock, MultiheadAttention, SelfAttention, TransformerEncoderLayer

LAYOUT = masks.local(96, window=20, block_size=32)
X = torch.randn(2, 96, 32)


def saved_and_loaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def attends(module: nn.Module) -> Tensor:
    return module(X, X, X, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(X)


def is_compiled_as(module: nn.Module, expected: Tensor) -> None:
    """Without a graph break: the layout has a plan."""
    torch.compiler.reset()
    compiled = torch.compile(attends, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(module), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved_and_loaded])
@pytest.mark.parametrize("made", [SelfAttention, MultiheadAttention])
def test_copies_compile(made: Any, copied: Callable[[nn.Module], nn.Module]) -> None:
    """Regression: their layouts had no plan, and the error told to move a layout."""
    options = {"batch_first": True} if made is MultiheadAttention else {}
    module = made(32, 4, layout=LAYOUT, **options)
    is_compiled_as(copied(module), attends(module))
    assert copied(module).layout == LAYOUT


def test_layers_that_torch_copies_compile_and_export() -> None:
    layer = TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, layout=LAYOUT)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    is_compiled_as(encoder, encoder(X))
    exported = torch.export.export(copy.deepcopy(SelfAttention(32, 4, LAYOUT)), (X,))
    assert exported.module()(X).shape == X.shape


@pytest.mark.parametrize("made", [SelfAttention, MultiheadAttention])
def test_weights_assigned_to_a_module_on_the_meta_device_bring_the_layout(made: Any) -> None:
    options = {"batch_first": True} if made is MultiheadAttention else {"alibi": True}
    module = made(32, 4, layout=LAYOUT, **options)
    # a layout of its own, since layouts keep their plans
    layout = masks.local(96, window=20, block_size=32)
    with torch.device("meta"):
        loaded = made(32, 4, layout=layout, **options)
    loaded.load_state_dict(module.state_dict(), assign=True)
    is_compiled_as(loaded, attends(module))


def test_a_layer_without_parameters_moves_and_makes_caches() -> None:
    """As FSDP's first version and dynamic quantization leave it. Regression: StopIteration."""
    module = SelfAttention(32, 4, LAYOUT, causal=True, alibi=True)
    expected = module(X)
    for linear in (module.qkv, module.out):
        weight = linear.weight.detach()
        del linear.weight
        linear.weight = weight
    assert torch.equal(module.to("cpu")(X), expected)
    assert module.new_cache(2, 96).k.dtype == torch.float32


class Adapted(nn.Module):
    """A linear layer and an update of low rank, without a weight of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("alibi", [False, True])
def test_a_wrapped_projection_moves_and_makes_caches(alibi: bool) -> None:
    """Regression: AttributeError in the middle of the move, which left some layers converted."""
    model = Encoder([EncoderBlock(SelfAttention(32, 4, LAYOUT, causal=True, alibi=alibi)) for _ in range(2)])
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
    assert {each.dtype for each in model.double().parameters()} == {torch.float64}
    assert model.blocks[0].attention.new_cache(2, 96).k.dtype == torch.float64
    assert model(X.double()).dtype == torch.float64


def test_a_layer_moved_in_inference_mode_trains() -> None:
    """Regression: its slopes became inference tensors."""
    module = SelfAttention(32, 4, LAYOUT, causal=True, alibi=True)
    with torch.inference_mode():
        module.to("cpu")
    module(X).sum().backward()
    assert module.qkv.weight.grad is not None
