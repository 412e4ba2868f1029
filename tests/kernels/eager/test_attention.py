"""The eager backend equals the reference, in bounded memory and deterministically."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blocksparse_flash import BlockLayout, attention_with_lse, reference
from blocksparse_flash import attention as attend
from blocksparse_flash.kernels.eager import attention
from blocksparse_flash.kernels.inputs import BackwardInputs
from tests.support import cases, plain
from tests.support.closeness import assert_as_accurate

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of a call besides its layout."""

    dtype: torch.dtype = torch.float64
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    v_head_dim: int = 16
    scale: float = 0.25
    causal: bool = False
    has_kv_lengths: bool = False
    dropout_p: float = 0.0
    q_len: int = 256
    kv_len: int = 256

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return " ".join(changed).replace("torch.", "") or "plain"


def _layout(name: str) -> BlockLayout:
    return next(case for case in cases.LAYOUTS if case.name == name).build()


def _inputs(call: Call) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k, v; gradients of out and lse; kv_lengths; seed."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(call.dtype)

    q = normal(2, call.heads, call.q_len, call.head_dim)
    k = normal(2, call.kv_heads, call.kv_len, call.head_dim)
    v = normal(2, call.kv_heads, call.kv_len, call.v_head_dim)
    dout = normal(2, call.heads, call.q_len, call.v_head_dim)
    dlse = torch.randn(2, call.heads, call.q_len, generator=draw).to(torch.promote_types(call.dtype, torch.float32))
    kv_lengths = torch.tensor([call.kv_len // 3, call.kv_len]) if call.has_kv_lengths else None
    seed = torch.tensor([2**40 + 7]) if call.dropout_p > 0 else None
    return [q, k, v], dout, dlse, kv_lengths, seed


def _expected(call: Call, layout: BlockLayout | None, dtype: torch.dtype) -> list[Tensor]:
    """out, lse, dq, dk, dv of the reference in a dtype."""
    qkv, dout, dlse, kv_lengths, seed = _inputs(call)
    qkv = [tensor.to(dtype).requires_grad_() for tensor in qkv]
    mask = None if layout is None else layout.to_dense()
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "dropout_p": call.dropout_p}
    out, lse = reference.attention(*qkv, mask, kv_lengths=kv_lengths, seed=seed, **options)
    grads = torch.autograd.grad((out, lse), qkv, (dout.to(dtype), dlse.to(lse.dtype)))
    return [out, lse, *grads]


def _actual(call: Call, layout: BlockLayout | None) -> list[Tensor]:
    (q, k, v), dout, dlse, kv_lengths, seed = _inputs(call)
    plan = [] if layout is None else list(layout.plan("cpu", causal=call.causal))
    rest = (plan, kv_lengths, seed, call.scale, call.causal and layout is None, call.dropout_p)
    out, lse = attention.forward(q, k, v, *rest)
    return [out, lse, *attention.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), *rest)]


def _check(call: Call, layout: BlockLayout | None) -> None:
    """Compares with the reference; a float64 result is rounded to float32 and judged by the float32 reference."""
    actual = _actual(call, layout)
    truth = _expected(call, layout, torch.float64)
    same_dtype = _expected(call, layout, torch.float32 if call.dtype == torch.float64 else call.dtype)
    for name, result, *references in zip(NAMES, actual, same_dtype, truth, strict=True):
        assert result.is_contiguous(), name
        assert_as_accurate(result.to(references[0].dtype), *references, name=name)


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_every_layout_equals_the_reference(case: cases.Case) -> None:
    layout = case.build()
    _check(Call(q_len=layout.q_len, kv_len=layout.kv_len), layout)


CALLS = [
    Call(kv_heads=2),
    Call(kv_heads=1, head_dim=1, v_head_dim=3),
    Call(head_dim=40, v_head_dim=24, scale=-0.3),
    Call(scale=0.0),
    # weights that underflow
    Call(scale=1e3),
    Call(causal=True),
    Call(has_kv_lengths=True),
    Call(dropout_p=0.3),
    Call(kv_heads=2, causal=True, has_kv_lengths=True, dropout_p=0.2),
]


@pytest.mark.sweep
@pytest.mark.parametrize("call", CALLS, ids=str)
# every kind of tile and ragged ends; empty rows; a layout per batch and head
@pytest.mark.parametrize("name", ["wide", "empty-rows", "per-batch-and-head"])
def test_every_option_equals_the_reference(call: Call, name: str) -> None:
    layout = _layout(name)
    _check(dataclasses.replace(call, q_len=layout.q_len, kv_len=layout.kv_len), layout)


@pytest.mark.parametrize("scale", [2e38, -2e38])
def test_a_huge_scale_does_not_overflow_where_the_scores_do_not(scale: float) -> None:
    """Regression: NaN, since the scale was applied to the keys."""
    q, k, v = torch.zeros(1, 1, 4, 8), torch.full((1, 1, 4, 8), 3.0), torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(attend(q, k, v, scale=scale), v.mean(2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("call", [Call(), CALLS[0], Call(causal=True), CALLS[-1]], ids=str)
# no tail; both tails ragged; fewer keys than a tile; fewer queries than keys; a diagonal that masks one pair of a tile;
# one that keeps one pair
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(256, 256), (300, 203), (130, 64), (64, 300), (20, 146), (20, 147), (128, 129)]
)
def test_dense_and_causal_need_no_plan(call: Call, q_len: int, kv_len: int) -> None:
    _check(dataclasses.replace(call, q_len=q_len, kv_len=kv_len), None)


# head_dim 64 and many keys per row, so that the rounding of a single product does not dominate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["full", "window", None])
def test_lower_precision_is_as_accurate_as_the_reference(dtype: torch.dtype, name: str | None) -> None:
    layout = None if name is None else _layout(name)
    q_len, kv_len = (256, 256) if layout is None else (layout.q_len, layout.kv_len)
    _check(Call(dtype, head_dim=64, v_head_dim=64, scale=0.125, q_len=q_len, kv_len=kv_len), layout)


@pytest.mark.sweep
@pytest.mark.parametrize("tiles_at_once", [1, 2, 3])
@pytest.mark.parametrize("name", ["window-and-global", "empty-rows", "per-head", "blocks-of-48x80"])
def test_results_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, tiles_at_once: int, name: str) -> None:
    """Long tile rows are processed in spans of tiles; the first key of a row may come in a later span, or never."""
    layout = _layout(name)
    call = Call(q_len=layout.q_len, kv_len=layout.kv_len, kv_heads=2, has_kv_lengths=True, dropout_p=0.2)
    monkeypatch.setattr(attention, "TILES_PER_THREAD", tiles_at_once)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    _check(call, layout)
    _check(dataclasses.replace(call, causal=True), None)


def test_nan_beyond_a_length_does_not_leak() -> None:
    layout = _layout("wide")
    call = Call(q_len=layout.q_len, kv_len=layout.kv_len, has_kv_lengths=True)
    expected = _actual(call, layout)
    (q, k, v), dout, dlse, kv_lengths, seed = _inputs(call)
    assert kv_lengths is not None
    is_missing = (torch.arange(layout.kv_len) >= kv_lengths[:, None])[:, None, :, None]
    k, v = k.masked_fill(is_missing, torch.nan), v.masked_fill(is_missing, torch.nan)
    rest = (list(layout.plan("cpu")), kv_lengths, seed, call.scale, False, 0.0)
    out, lse = attention.forward(q, k, v, *rest)
    actual = [out, lse, *attention.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), *rest)]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_empty_rows_give_zeros_even_if_the_gradient_of_lse_is_nan() -> None:
    layout = _layout("empty-rows")
    call = Call(q_len=layout.q_len, kv_len=layout.kv_len)
    (q, k, v), dout, dlse, _, _ = _inputs(call)
    rest = (list(layout.plan("cpu")), None, None, call.scale, False, 0.0)
    out, lse = attention.forward(q, k, v, *rest)
    is_empty = ~layout.to_dense().any(-1).expand(2, 4, -1)
    assert torch.equal(lse == -torch.inf, is_empty) and not out[is_empty].any()
    dlse = dlse.masked_fill(is_empty, torch.nan)
    grads = attention.backward(BackwardInputs(dout, dlse, q, k, v, out, lse), *rest)
    assert not grads[0][is_empty].any()
    assert all(grad.isfinite().all() for grad in grads)


def test_two_runs_are_bitwise_equal() -> None:
    layout = _layout("random-fine-blocks")
    call = Call(q_len=layout.q_len, kv_len=layout.kv_len, kv_heads=2, dropout_p=0.1)
    assert all(torch.equal(a, b) for a, b in zip(_actual(call, layout), _actual(call, layout), strict=True))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_tokens_not_with_pairs(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Both cases have long tile rows: the first one with global tokens, the last ones with causal attention."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    length = 8192
    row, col = torch.arange(64)[:, None], torch.arange(64)
    near = BlockLayout.from_block_mask((row - col).abs() <= 1, length, length, block_size=128)
    first = BlockLayout.from_predicate(lambda q, k: (q < 5) | (k < 5), length, length, block_size=128)
    q, k, v = torch.randn(3, 1, 1, length, 8)
    rest: tuple[Any, ...] = ([] if causal else list((near | first).plan("cpu")), None, None, 1.0, causal, 0.0)
    with LargestTensor() as largest:
        out, lse = attention.forward(q, k, v, *rest)
        attention.backward(BackwardInputs(out, None, q, k, v, out, lse), *rest)
    assert largest.numel <= 2 * attention.TILES_PER_THREAD * attention.TILE**2 < length**2 / 32


@pytest.mark.parametrize("shape", [(0, 4, 128, 128), (1, 0, 128, 128), (1, 4, 0, 128), (1, 4, 128, 0)])
def test_empty_inputs_give_zeros(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    q, k, v = (
        torch.randn(batch, heads, q_len, 8),
        torch.randn(batch, heads, kv_len, 8),
        torch.randn(batch, heads, kv_len, 4),
    )
    rest: tuple[Any, ...] = ([], None, None, 1.0, False, 0.0)
    out, lse = attention.forward(q, k, v, *rest)
    assert out.shape == (batch, heads, q_len, 4) and not out.any() and (lse == -torch.inf).all()
    grads = attention.backward(BackwardInputs(out, None, q, k, v, out, lse), *rest)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape] and not any(grad.any() for grad in grads)


def test_gradients_pass_gradcheck() -> None:
    """Forward and backward agree with each other, not only with the reference."""
    window = BlockLayout.from_predicate(lambda q, k: (q - k).abs() < 3, 20, 20, block_size=16)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = attention.forward(q, k, v, list(window.plan("cpu")), None, None, 0.7, False, 0.0)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            inputs = BackwardInputs(dout, dlse, *ctx.saved_tensors)
            return attention.backward(inputs, list(window.plan("cpu")), None, None, 0.7, False, 0.0)

    draw = torch.Generator().manual_seed(1)
    qkv = [torch.randn(1, 1, 20, 3, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(Attention.apply, qkv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n_keys", "tiles_at_once"), [(1, 32), (2, 32), (2, 1)])
def test_rows_of_one_or_two_keys_are_accurate(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n_keys: int, tiles_at_once: int
) -> None:
    """With one key, dq and dk are exactly 0; delta from a rounded out would leave the rounding error in them."""
    monkeypatch.setattr(attention, "TILES_PER_THREAD", tiles_at_once)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # the second key is in another tile
    layout = BlockLayout.from_predicate(lambda i, j: j % 128 == i, 4, 128 * n_keys, block_size=64)
    draw = torch.Generator().manual_seed(0)
    shapes = [(12, 2, length, 64) for length in (4, layout.kv_len, layout.kv_len, 4)]
    q, k, v, dout = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    inputs = (q, k, v, dout, torch.zeros(12, 2, 4))
    rest = (list(layout.plan("cpu")), None, None, 0.125, False, 0.0)
    out, lse = attention.forward(q, k, v, *rest)
    actual = [out, lse, *attention.backward(BackwardInputs(dout, None, q, k, v, out, lse), *rest)]
    if n_keys == 1:
        assert not actual[2].any() and not actual[3].any()
    same_dtype = plain.results(*inputs, layout.to_dense(), scale=0.125)
    truths = plain.truths(*inputs, layout.to_dense(), scale=0.125)
    for name, result, plains, truth in zip(NAMES, actual, same_dtype, truths, strict=True):
        assert_as_accurate(result, plains, truth, name=name)


@pytest.mark.parametrize("length", [96, 128, 129])
@pytest.mark.parametrize("method", ["detach_", "squeeze_"])
def test_methods_in_place_work_on_the_output_of_any_length(length: int, method: str) -> None:
    """Regression: the output was a view of tiles where nothing had to be converted or cut."""
    q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    for result in attention_with_lse(q, k, v, backend="eager"):
        getattr(result, method)()
