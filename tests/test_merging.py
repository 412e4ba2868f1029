"""merge equals attention over all keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention_with_lse, merge

LENGTH = 200


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, LENGTH, 24, generator=generator).to(dtype).requires_grad_() for _ in "qkv"]


def parts() -> tuple[BlockLayout, BlockLayout]:
    """Disjoint masks. Rows 0 .. 31 have no key in either; 32 .. 63 in the second alone, 64 .. 95 in the first alone."""
    q_pos, kv_pos = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    near = (q_pos - kv_pos).abs() < 40
    first = near & (q_pos >= 64)
    second = ~near & (q_pos >= 32) & ~((q_pos >= 64) & (q_pos < 96))
    return tuple(BlockLayout.from_dense(mask, block_size=32) for mask in (first, second))  # type: ignore[return-value]


def test_two_merged_parts_equal_the_whole_with_gradients() -> None:
    first, second = parts()
    assert (first & second).nnz == 0 and not (first | second).to_dense()[0, 0, :32].any()
    generator = torch.Generator().manual_seed(1)
    results = []
    for is_merged in (True, False):
        tensors = inputs(torch.float64)
        if is_merged:
            out, lse = merge(*attention_with_lse(*tensors, first), *attention_with_lse(*tensors, second))
        else:
            out, lse = attention_with_lse(*tensors, first | second)
        generator.manual_seed(1)
        dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (out.shape, lse.shape))
        has_keys = lse != -torch.inf
        loss = (out * dout).sum() + torch.where(has_keys, lse * dlse, 0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, tensors)])
    merged, whole = results
    assert (merged[0][:, :, :32] == 0).all() and (merged[1][:, :, :32] == -torch.inf).all()
    assert (merged[2][:, :, :32] == 0).all()
    for actual, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_gradients_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "ab"]
    lses = [torch.randn(1, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "ab"]
    assert torch.autograd.gradcheck(merge, (outs[0], lses[0], outs[1], lses[1]))
    assert torch.autograd.gradgradcheck(merge, (outs[0], lses[0], outs[1], lses[1]))


@pytest.mark.parametrize("empty", ["a", "b", "both"])
def test_an_empty_side_leaves_the_other_bitwise_unchanged(empty: str) -> None:
    out = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    lse = torch.linspace(-300, 300, 5)[None, None]
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    arguments = {"a": (*nothing, out, lse), "b": (out, lse, *nothing), "both": (*nothing, *nothing)}[empty]
    tensors = [t.clone().requires_grad_() for t in arguments]
    merged = merge(*tensors)
    for actual, expected in zip(merged, nothing if empty == "both" else (out, lse), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    for gradient in torch.autograd.grad(merged[0].float().sum() + merged[1].nan_to_num(neginf=0).sum(), tensors):
        assert gradient.isfinite().all()


def test_lse_far_apart_neither_overflow_nor_underflow() -> None:
    out = torch.tensor([[[[1.0], [2.0]]]])
    merged, lse = merge(out, torch.tensor([[[500.0, -500.0]]]), -out, torch.tensor([[[-500.0, -500.0]]]))
    assert torch.equal(merged, torch.tensor([[[[1.0], [0.0]]]]))
    torch.testing.assert_close(lse, torch.tensor([[[500.0, -500.0 + 0.6931472]]]))


def test_merge_compiles_into_one_graph() -> None:
    first, second = (layout.to("cpu") for layout in parts())
    tensors = [t.detach() for t in inputs(torch.float32)]
    pair = (*attention_with_lse(*tensors, first), *attention_with_lse(*tensors, second))
    compiled = torch.compile(merge, fullgraph=True, backend="eager")(*pair)
    for actual, expected in zip(compiled, merge(*pair), strict=True):
        torch.testing.assert_close(actual, expected)


def test_many_parts_merge_in_any_order() -> None:
    tensors = [t.detach() for t in inputs(torch.float64)]
    layout = masks.causal(LENGTH, block_size=32)
    bounds = [0, 50, 64, 130, LENGTH]
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        keys = [tensors[0], *(t[:, :, start:stop] for t in tensors[1:])]
        pieces.append(attention_with_lse(*keys, layout.crop(kv_start=start, kv_stop=stop)))
    expected = attention_with_lse(*tensors, layout)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        merged = pieces[order[0]]
        for index in order[1:]:
            merged = merge(*merged, *pieces[index])
        for actual, wanted in zip(merged, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
WRONG_CALLS: list[tuple[int, Any, type[Exception], str]] = [
    (0, None, TypeError, "out_a must be a torch.Tensor, got NoneType"),
    (
        1,
        OUT[..., 0].to_sparse(),
        ValueError,
        r"lse_a must be a dense, strided tensor .* torch.sparse_coo tensor; lse_a.to_dense",
    ),
    (2, OUT.to_sparse(), ValueError, "out_b must be a dense, strided tensor"),
    (0, OUT.to(torch.float8_e4m3fn), ValueError, "out_a must be floating point, .* got torch.float8_e4m3fn"),
    (0, OUT.long(), ValueError, "out_a must be floating point, .* got torch.int64"),
    (0, OUT[0], ValueError, r"out_a must have shape \(batch, heads, q_len, v_head_dim\), got \(2, 3, 4\)"),
    (1, LSE[..., None], ValueError, r"lse_a must have shape \(1, 2, 3\), to match out_a, got \(1, 2, 3, 1\)"),
    (2, OUT[:, :1], ValueError, r"out_b must have shape \(1, 2, 3, 4\), to match out_a, got \(1, 1, 3, 4\)"),
    (2, OUT.half(), ValueError, "out_b must have out_a's dtype torch.float32, got torch.float16"),
    (2, OUT.to("meta"), ValueError, "out_b must be on out_a's device cpu, got meta"),
    (3, LSE[:, :, :2], ValueError, r"lse_b must have shape \(1, 2, 3\), to match out_a, got \(1, 2, 2\)"),
    (3, LSE.double(), ValueError, "lse_b must have lse_a's dtype torch.float32, got torch.float64"),
]


@pytest.mark.parametrize(("place", "value", "exception", "message"), WRONG_CALLS)
def test_errors_name_the_wrong_argument(place: int, value: Any, exception: type[Exception], message: str) -> None:
    arguments: list[Any] = [OUT, LSE, OUT, LSE]
    arguments[place] = value
    with pytest.raises(exception, match=message):
        merge(*arguments)
