"""Rotary positions and gated sums in one pass equal PyTorch's operations; on a CPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from blocksparse_flash.nn import positions
from blocksparse_flash.nn.positions import RotaryTable, rotary_table
from tests.support.closeness import assert_in_order_of

pytest.importorskip("triton")

from blocksparse_flash.kernels.triton.gated_sum import GatedSum

# batch, heads, length, features: ragged blocks of rows, features that are no power of two, nothing
SHAPES = [(2, 3, 70, 12), (1, 2, 300, 64), (2, 1, 1, 2), (1, 2, 0, 8)]


def drawn(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def plain(x: Tensor) -> Tensor:
    return x


def tokens_first(x: Tensor) -> Tensor:
    """The same values, as a projection leaves them: tokens before heads, between other features."""
    batch, heads, length, features = x.shape
    memory = torch.full((batch, length, heads, features + 4), torch.nan, dtype=x.dtype, device=x.device)
    memory[..., :features] = x.transpose(1, 2)
    return memory[..., :features].transpose(1, 2)


def rotated(x: Tensor, table: RotaryTable) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = table.cos.to(x.dtype), table.sin.to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [plain, tokens_first])
@pytest.mark.parametrize("has_batches", [False, True])
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "operator"])
def test_rotary_positions(
    shape: tuple[int, ...],
    change: Callable[[Tensor], Tensor],
    has_batches: bool,
    is_direct: bool,
    device: torch.device,
) -> None:
    batch, _, length, features = shape
    table = rotary_table(torch.arange(batch * length, device=device), 100.0, features)
    if has_batches:
        # positions of each batch
        table = RotaryTable(*(each.view(batch, 1, length, features // 2) for each in table))
    else:
        table = RotaryTable(*(each[:length] for each in table))
    x, grad, second = (drawn(*shape, device=device, seed=seed) for seed in range(3))
    x.requires_grad_()
    grad.requires_grad_()
    truth = rotated(x, table)
    (dx,) = torch.autograd.grad(truth, x, grad, create_graph=True)
    (dgrad,) = torch.autograd.grad(dx, grad, second)
    mine, mine_grad = (change(each.detach().float()).requires_grad_() for each in (x, grad))
    options = (True,) if is_direct else ()
    apply = positions.Rotary.apply if is_direct else torch.ops.blocksparse_flash.rotate
    out = apply(mine, table.cos, table.sin, False, *options)
    assert_in_order_of(mine, out, "out")
    torch.testing.assert_close(out, truth.float())
    (found,) = torch.autograd.grad(out, mine, mine_grad, create_graph=True)
    assert_in_order_of(mine_grad, found, "dx")
    torch.testing.assert_close(found, dx.float())
    (found,) = torch.autograd.grad(found, mine_grad, change(second.float()))
    torch.testing.assert_close(found, dgrad.float())


@pytest.mark.parametrize("change", [plain, tokens_first])
def test_compiled_rotary_positions_are_one_operator(
    change: Callable[[Tensor], Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward and in the backward, whose results have the strides that the compiler was told."""
    monkeypatch.setattr(positions, "_takes_operator", lambda _: torch.compiler.is_compiling())
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    table = rotary_table(torch.arange(20, device=device), 100.0, 8)
    x, grad = (change(drawn(2, 3, 20, 8, device=device, seed=seed).float()) for seed in range(2))
    x.requires_grad_()
    truth = rotated(x.double(), table)
    (dx,) = torch.autograd.grad(truth, x, grad.double())
    # other results would have other strides than the fake tensors
    call = torch.compile(positions.rotate, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    out = call(x, table)
    (found,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(out, truth.float())
    torch.testing.assert_close(found, dx.float())
    for graph, result in zip(graphs, (out, found), strict=True):
        (node,) = [node for node in graph.graph.nodes if node.target is torch.ops.blocksparse_flash.rotate.default]
        assert node.meta["val"].stride() == result.stride()
        assert not [node for node in graph.graph.nodes if node.target is torch.ops.aten.mul.Tensor]


def test_fake_cuda_tensors_are_rotated_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode():
        x, table = torch.empty(1, 2, 20, 8, device="cuda"), torch.empty(20, 4, device="cuda")
        assert positions.rotate(x, RotaryTable(table, table)).shape == x.shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [plain, tokens_first])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_gated_sums(
    shape: tuple[int, ...], change: Callable[[Tensor], Tensor], gate_dtype: torch.dtype, device: torch.device
) -> None:
    gates = drawn(*shape[:3], 3, device=device).to(gate_dtype).double().requires_grad_()
    tensors = [drawn(*shape, device=device, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    dout = drawn(*shape, device=device, seed=4)
    truth = sum(gate[..., None] * each for gate, each in zip(gates.unbind(3), tensors, strict=True))
    expected = torch.autograd.grad(truth, [gates, *tensors], dout)
    mine = [change(each.detach().float()).requires_grad_() for each in tensors]
    my_gates = change(gates.detach().to(gate_dtype)).requires_grad_()
    out = GatedSum.apply(my_gates, *mine)
    torch.testing.assert_close(out, truth.float())
    found = torch.autograd.grad(out, [my_gates, *mine], change(dout.float()))
    assert [each.dtype for each in found] == [gate_dtype, *[torch.float32] * 3]
    for mine_grad, grad in zip(found, expected, strict=True):
        torch.testing.assert_close(mine_grad, grad.to(mine_grad.dtype))


def test_second_derivatives_of_gated_sums_are_refused(device: torch.device) -> None:
    gates, *tensors = (drawn(1, 1, 4, 3, device=device).float().requires_grad_() for _ in range(4))
    (grad,) = torch.autograd.grad(GatedSum.apply(gates, *tensors).sum(), gates, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of gated sums"):
        grad.sum().backward()


def test_positions_keep_their_gradient(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "runs_kernels", lambda _: True)
    at = torch.arange(20.0, device=device).requires_grad_()
    x = drawn(1, 2, 20, 8, device=device).float()
    (grad,) = torch.autograd.grad(positions.rotate(x, rotary_table(at, 100.0, 8)).square()[..., :4].sum(), at)
    assert grad.abs().sum() > 0


def test_tables_of_another_length_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "runs_kernels", lambda _: True)
    x = drawn(1, 2, 20, 8, device=device).float()
    with pytest.raises(RuntimeError, match="size"):
        positions.rotate(x, rotary_table(torch.arange(19, device=device), 100.0, 8))
