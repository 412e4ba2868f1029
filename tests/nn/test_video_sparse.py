"""Video sparse attention equals its definition in float64, forward and backward, in cubes of any grid."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash.nn import SelfAttention, VideoSparseAttention, rotary_table, video_sparse_attention
from tests.support.closeness import assert_as_accurate


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def expected(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, *, k_blocks: int, block: int) -> Tensor:
    """Block by block, head by head."""
    batch, heads, q_len, dim = q.shape
    group, kv_len = heads // k.shape[1], k.shape[2]
    out = []
    for b in range(batch):
        for h in range(heads):
            rows = []
            keys, values = k[b, h // group], v[b, h // group]
            spans = [slice(first, min(first + block, kv_len)) for first in range(0, kv_len, block)]
            means = torch.stack([keys[span].mean(0) for span in spans])
            value_means = torch.stack([values[span].mean(0) for span in spans])
            for first in range(0, q_len, block):
                queries = q[b, h, first : first + block]
                scores = means @ queries.mean(0) / math.sqrt(dim)
                selected = scores.topk(min(k_blocks, len(spans))).indices.sort().values.tolist()
                some_keys = torch.cat([keys[spans[i]] for i in selected])
                some_values = torch.cat([values[spans[i]] for i in selected])
                fine = (queries @ some_keys.T / math.sqrt(dim)).softmax(-1) @ some_values
                coarse = scores.softmax(0) @ value_means
                rows.append((fine, coarse.expand_as(fine)))
            fine, coarse = (torch.cat(each) for each in zip(*rows, strict=True))
            out.append(fine if gate is None else fine + gate[b, h] * coarse)
    return torch.stack(out).unflatten(0, (batch, heads))


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block", "k_blocks", "kv_heads"),
    [(128, 128, 16, 3, 4), (128, 128, 16, 100, 2), (250, 330, 64, 2, 1), (40, 100, 128, 1, 4), (200, 64, 32, 1, 2)],
)
def test_it_is_the_definition(
    q_len: int, kv_len: int, block: int, k_blocks: int, kv_heads: int, has_gate: bool
) -> None:
    q, k, v = drawn(2, 4, q_len, 24), drawn(2, kv_heads, kv_len, 24, seed=1), drawn(2, kv_heads, kv_len, 16, seed=2)
    gate = drawn(2, 4, q_len, 16, seed=3) if has_gate else None
    leaves = [q, k, v] + ([gate] if gate is not None else [])
    out = video_sparse_attention(q, k, v, k_blocks=k_blocks, block_size=block, coarse_gate=gate)
    truth = expected(q, k, v, gate, k_blocks=k_blocks, block=block)
    torch.testing.assert_close(out, truth)
    dout = drawn(*out.shape, seed=4).detach()
    found = torch.autograd.grad(out, leaves, dout)
    for name, one, other in zip("qkvg", found, torch.autograd.grad(truth, leaves, dout), strict=False):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("backend_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_as_accurate_as_pytorch(backend_dtype: torch.dtype, device: torch.device) -> None:
    """The selected blocks are those of float64, since the means are far apart."""
    shape, block = (1, 2, 256, 32), 64
    q, k, v, gate = (drawn(*shape, seed=seed).detach() for seed in range(4))
    shift = 4 * torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q, k = (x + shift.repeat_interleave(block)[:, None] for x in (q, k))
    low = [x.to(backend_dtype) for x in (q, k, v, gate)]
    truth = expected(*(x.double() for x in low), k_blocks=2, block=block)
    same = expected(*low, k_blocks=2, block=block)
    q, k, v, gate = (x.to(device) for x in low)
    found = video_sparse_attention(q, k, v, k_blocks=2, block_size=block, coarse_gate=gate)
    assert_as_accurate(found.cpu(), [same], truth, name="out")


@pytest.mark.parametrize(
    ("grid", "cube"),
    [((4, 4, 8), (2, 2, 4)), ((3, 5, 8), (2, 2, 4)), ((8, 16), (4, 4)), ((130,), (16,))],
    ids=["whole cubes", "ragged grid", "image", "line"],
)
def test_a_layer_attends_to_cubes(grid: tuple[int, ...], cube: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = VideoSparseAttention(32, 4, grid, k_blocks=2, cube=cube, kv_heads=2).double()
    torch.nn.init.normal_(layer.coarse_gate.weight)
    x = drawn(2, math.prod(grid), 32)
    order = masks.tile_order(grid, tile=cube)
    q, k, v = layer.projections.project(x[:, order])
    gate = layer.coarse_gate(x[:, order]).unflatten(2, (4, 8)).transpose(1, 2)
    attended = expected(q, k, v, gate, k_blocks=2, block=math.prod(cube))
    found, truth = layer(x), torch.empty_like(x)
    truth[:, order] = layer.projections.unite(attended)
    torch.testing.assert_close(found, truth)
    leaves = [x, *layer.parameters()]
    dout = drawn(*x.shape, seed=1).detach()
    grads, true_grads = (torch.autograd.grad(out, leaves, dout) for out in (found, truth))
    for one, other in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_new_layer_is_a_dense_one_if_all_cubes_are_selected() -> None:
    """Also with rotary positions by axis, and with weights from a dense layer."""
    torch.manual_seed(0)
    # an order that is not its own inverse
    grid = (2, 4, 24)
    dense = SelfAttention(48, 2, rope=100.0).double()
    layer = VideoSparseAttention(48, 2, grid, k_blocks=12, cube=(1, 4, 4), rope=100.0).double()
    layer.projections.load_state_dict(dense.state_dict())
    x = drawn(1, 192, 48)
    torch.testing.assert_close(layer(x), dense(x))
    axes = torch.cartesian_prod(*map(torch.arange, grid))
    torch.testing.assert_close(layer(x, axes), dense(x, positions=axes))


def test_layers_are_saved_and_loaded() -> None:
    layer = VideoSparseAttention(32, 2, (2, 4, 4), k_blocks=1, cube=(1, 4, 4))
    assert set(layer.state_dict()) == {
        "projections.qkv.weight",
        "projections.out.weight",
        "coarse_gate.weight",
        "coarse_gate.bias",
    }
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = torch.randn(1, 32, 32)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(layer)):
        assert torch.equal(other(x), layer(x))
    assert "32 tokens, k_blocks=1, block_size=16" in repr(layer)


def test_layers_made_on_the_meta_device_get_their_order_back() -> None:
    """Regression: to_empty left the order of the cubes uninitialized, and no state dict has it."""
    arguments: dict[str, Any] = {"grid": (2, 4, 4), "k_blocks": 1, "cube": (1, 4, 4)}
    layer, x = VideoSparseAttention(32, 2, **arguments), torch.randn(1, 32, 32)
    with torch.device("meta"):
        other = VideoSparseAttention(32, 2, **arguments)
    for emptied in (other.to_empty(device="cpu"), copy.deepcopy(layer).to("meta").to_empty(device="cpu")):
        emptied.load_state_dict(layer.state_dict())
        assert torch.equal(emptied.order, layer.order) and torch.equal(emptied(x), layer(x))
    # indices on the meta device gave values without meaning
    emptied = copy.deepcopy(layer).to("meta")
    emptied.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(emptied(x), layer(x))


def test_scores_beyond_the_range_of_float16_are_scaled_in_time() -> None:
    """Regression: the coarse branch was NaN."""
    q = torch.full((1, 1, 64, 64), 40.0).half()
    out = video_sparse_attention(q, q, q, k_blocks=1, block_size=16, coarse_gate=torch.ones(()).half())
    assert torch.equal(out, 2 * q)


def test_an_exported_graph_cannot_hold_it() -> None:
    layer = VideoSparseAttention(16, 2, (4, 4, 4), k_blocks=1)
    with pytest.raises(
        RuntimeError, match=r"video_sparse_attention cannot be in a graph of torch\.export or torch\.jit"
    ):
        torch.export.export(layer, (torch.randn(1, 64, 16),))


def test_compilers_leave_it_out() -> None:
    """Regression: with fullgraph=True the error asked for a plan of a layout that is made inside."""
    q = drawn(1, 2, 64, 16).detach()

    def function(q: Tensor) -> Tensor:
        return video_sparse_attention(q * 2, q, q, k_blocks=2, block_size=16).sin()

    with pytest.raises(Exception, match=r"function <function video_sparse_attention at .* since it was wrapped"):
        torch.compile(function, backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(torch.compile(function, backend="eager")(q), function(q))


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 40, 40), (2, 0, 40), (2, 40, 0)])
def test_of_nothing_there_is_nothing(batch: int, q_len: int, kv_len: int) -> None:
    q, k = drawn(batch, 4, q_len, 8), drawn(batch, 2, kv_len, 8)
    out = video_sparse_attention(q, k, k, k_blocks=1, block_size=16, coarse_gate=torch.ones((), dtype=q.dtype))
    assert out.shape == q.shape and not out.any()
    for grad in torch.autograd.grad(out.sum(), (q, k)):
        assert not grad.any()


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "k_blocks must be 1 or more, got 0", lambda q: video_sparse_attention(q, q, q, k_blocks=0)),
        (TypeError, "q must be a torch.Tensor", lambda q: video_sparse_attention(3, q, q, k_blocks=1)),
        (ValueError, "k must have the 4 dimensions", lambda q: video_sparse_attention(q, q[0], q, k_blocks=1)),
        (ValueError, "head_dim", lambda q: video_sparse_attention(q, q[..., :8], q, k_blocks=1)),
        (TypeError, "coarse_gate", lambda q: video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=1.0)),
        (
            ValueError,
            r"coarse_gate must broadcast to the shape of the result, \(1, 2, 64, 16\), got \(1, 3, 1, 1\)",
            lambda q: video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=torch.ones(1, 3, 1, 1)),
        ),
        (
            ValueError,
            "heads",
            lambda q: video_sparse_attention(q, torch.ones(1, 3, 64, 16), torch.ones(1, 3, 64, 16), k_blocks=1),
        ),
        (
            ValueError,
            r"block_size must be one of \(16, 32, 64, 128, 256\) tokens, got 48",
            lambda q: video_sparse_attention(q, q, q, k_blocks=1, block_size=48),
        ),
        (
            ValueError,
            r"x must have shape \(batch, 32 tokens of the grid, embed_dim\), got \(1, 64, 32\)",
            lambda q: VideoSparseAttention(32, 2, (2, 4, 4), k_blocks=1, cube=(1, 4, 4))(torch.ones(1, 64, 32)),
        ),
        (
            ValueError,
            r"the product of cube must be one of \(16, 32, 64, 128, 256\) tokens, got 8",
            lambda q: VideoSparseAttention(32, 2, (2, 4, 4), k_blocks=1, cube=(2, 2, 2)),
        ),
        (TypeError, "grid must have the tokens along each axis", lambda q: VideoSparseAttention(32, 2, 32, k_blocks=1)),
        (
            ValueError,
            r"positions must have shape \(32,\) or \(32, axes\), a row for each token of the grid, got \(33,\)",
            lambda q: VideoSparseAttention(32, 2, (32,), k_blocks=1, cube=(16,), rope=10.0)(
                torch.ones(1, 32, 32), torch.arange(33)
            ),
        ),
        (
            ValueError,
            "x must be a dense tensor, got a nested one",
            lambda q: VideoSparseAttention(32, 2, (32,), k_blocks=1, cube=(16,))(
                torch.nested.nested_tensor([torch.ones(32, 32)], layout=torch.jagged)
            ),
        ),
        (
            TypeError,
            "positions must be a tensor of numbers, got RotaryTable, whose rows",
            lambda q: VideoSparseAttention(32, 2, (32,), k_blocks=1, cube=(16,), rope=10.0)(
                torch.ones(1, 32, 32), rotary_table(torch.arange(32), 10.0, 16)
            ),
        ),
        (
            ValueError,
            "coarse_gate must be on q's device cpu, got meta",
            lambda q: video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=q.to("meta")),
        ),
        (
            ValueError,
            "coarse_gate must be floating point, got torch.complex64",
            lambda q: video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=q * 1j),
        ),
        (
            ValueError,
            "cube must have one size for each of the 3 axes",
            lambda q: VideoSparseAttention(32, 2, (2, 4, 4), k_blocks=1, cube=(4, 4)),
        ),
        (
            ValueError,
            "positions were given, but rope is None",
            lambda q: VideoSparseAttention(32, 2, (32,), k_blocks=1, cube=(16,))(
                torch.ones(1, 32, 32), torch.arange(32)
            ),
        ),
    ],
)
def test_wrong_arguments_are_named(error: type[Exception], message: str, call) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(1, 2, 64, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_gate_of_another_dtype_does_not_change_that_of_the_result(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 64, 16)
    out = video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=torch.ones(1, 1, 1, 1, dtype=dtype))
    torch.testing.assert_close(out, video_sparse_attention(q, q, q, k_blocks=1, coarse_gate=torch.ones(())))


def test_no_heads_have_no_result() -> None:
    q, k = torch.zeros(1, 0, 64, 16), torch.zeros(1, 2, 64, 16)
    assert video_sparse_attention(q, k, k, k_blocks=1, coarse_gate=torch.ones(())).shape == q.shape
