"""Accuracy on a GPU: calls too large for the interpreter, offsets past 2^31, tile shapes of long calls only.

The zoo of layouts (test_zoo.py) and the operators (test_ops.py) run there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, attention, attention_with_lse, nn
from blocksparse_flash.kernels.schedule import sums_over_heads
from tests import test_zoo as zoo
from tests.support import cases
from tests.support.closeness import assert_as_accurate
from tests.support.gpu import HAS_HOPPER, on_every_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
Predicate = Callable[[Tensor, Tensor], Tensor]


def rows_of_out_and_dq(
    rows: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, attends: Predicate, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out and dq of the given rows, computed in `dtype`."""
    mask = attends(rows[:, None], torch.arange(k.shape[2], device=k.device)[None, :])
    picked = q[:, :, rows].detach().to(dtype).requires_grad_()
    scores = picked @ k.detach().to(dtype).transpose(-1, -2) * q.shape[3] ** -0.5
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.detach().to(dtype)
    (dq,) = torch.autograd.grad(out, picked, dout[:, :, rows].to(dtype))
    return out.detach(), dq


def cols_of_dk_and_dv(
    cols: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, attends: Predicate,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv of the given columns, computed in `dtype` from out and lse."""
    mask = attends(torch.arange(q.shape[2], device=q.device)[None, :], cols[:, None])
    scale = q.shape[3] ** -0.5
    q, dout, out = (t.detach().to(dtype) for t in (q, dout, out))
    picked_k, picked_v = (t[:, :, cols].detach().to(dtype) for t in (k, v))
    p = (picked_k @ q.transpose(-1, -2) * scale - lse[:, :, None].to(dtype)).exp().masked_fill(~mask, 0)
    delta = (dout * out).sum(-1)[:, :, None]
    ds = p * (picked_v @ dout.transpose(-1, -2) - delta)
    return scale * ds @ q, p @ dout


def check_sampled(
    layout: BlockLayout, attends: Predicate, *, heads: int, head_dim: int, checked: list[int], backend: str
) -> None:
    """Run forward and backward at full size; check out and dq of sampled rows, dk and dv of sampled columns."""
    length = layout.q_len
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
    )
    dout = torch.randn_like(q)
    # True, the default under poisoned memory, selects another backward of `hopper`
    out, lse = attention_with_lse(q, k, v, layout, deterministic=False, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sampled = torch.cat([torch.randint(length, (30,)), torch.tensor([0, 127, length - 128, length - 1])]).cuda()
    for head in checked:
        one = slice(head, head + 1)
        inputs = [t.detach()[:, one] for t in (q, k, v, dout)]
        found = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        wanted: dict[torch.dtype, dict[str, Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float64):
            expected = rows_of_out_and_dq(sampled, *inputs, attends, dtype)
            forward = (out.detach()[:, one], lse.detach()[:, one])
            expected += cols_of_dk_and_dv(sampled, *inputs, *forward, attends, dtype)
            wanted[dtype] = dict(zip(found, expected, strict=True))
        for name, tensor in found.items():
            actual = tensor.detach()[:, one, sampled]
            assert_as_accurate(actual, wanted[torch.bfloat16][name], wanted[torch.float64][name], name=name)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_sums_over_query_heads_with_a_layout_are_accurate(head_dim: int) -> None:
    """Each query head of a group has tile columns of its own, 64 heads on 4."""
    lengths, heads, kv_heads = (16384, 1024), 64, 4

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        return kv_pos * 16 + 31 <= q_pos

    layout = BlockLayout.from_predicate(attends, *lengths, block_size=128)
    torch.manual_seed(0)
    shapes = [(heads, lengths[0]), (kv_heads, lengths[1]), (kv_heads, lengths[1]), (heads, lengths[0])]
    q, k, v, dout = (torch.randn(1, *shape, head_dim, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = list(layout.plan("cuda"))
    assert sums_over_heads(plan, tuple(q.shape), tuple(k.shape), False, n_sms, deterministic=False)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = attention_with_lse(*leaves, layout, deterministic=False, backend="hopper")
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    rows = torch.cat([torch.randint(31, lengths[0], (30,)), torch.tensor([31, lengths[0] - 1])]).cuda()
    cols = torch.cat([torch.randint(lengths[1], (30,)), torch.tensor([0, lengths[1] - 2])]).cuda()
    for kv_head in (0, 3):
        of_group = slice(kv_head * 16, kv_head * 16 + 16)
        inputs = [q.detach()[:, of_group], *(t.detach()[:, kv_head, None] for t in (k, v)), dout[:, of_group]]
        forward = out.detach()[:, of_group], lse.detach()[:, of_group]
        wanted: dict[torch.dtype, list[Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float64):
            sums = [each.sum(1, keepdim=True) for each in cols_of_dk_and_dv(cols, *inputs, *forward, attends, dtype)]
            wanted[dtype] = [*rows_of_out_and_dq(rows, *inputs, attends, dtype), *sums]
        found = [
            forward[0][:, :, rows],
            dq[:, of_group][:, :, rows],
            *(t[:, kv_head, None][:, :, cols] for t in (dk, dv)),
        ]
        for name, actual, *others in zip(("out", "dq", "dk", "dv"), found, *wanted.values(), strict=True):
            assert_as_accurate(actual, *others, name=name)


@on_every_backend
def test_butterfly_of_65536_tokens_is_accurate(backend: str) -> None:
    layout = masks.butterfly(65536)

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        stride = (q_pos // 128) ^ (kv_pos // 128)
        return (stride & (stride - 1)) == 0

    check_sampled(layout, attends, heads=4, head_dim=64, checked=[0, 3], backend=backend)


@on_every_backend
def test_a_million_tokens_with_offsets_past_2_to_the_31_are_accurate(backend: str) -> None:
    """18 heads of 1,048,576 x 128: 2.4e9 elements a tensor; the last head lies past 2^31."""
    length, heads, head_dim = 1 << 20, 18, 128
    assert (heads - 1) * length * head_dim > 2**31
    layout = masks.local(length, window=500)

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        return (q_pos - kv_pos).abs() <= 500

    check_sampled(layout, attends, heads=heads, head_dim=head_dim, checked=[0, 17], backend=backend)


def test_a_pair_bias_with_offsets_past_2_to_the_31_equals_that_of_one_head() -> None:
    """9 heads of 16,384 x 16,384: 2.4e9 elements; the last head lies past 2^31. In memory, keys come before queries."""
    length, heads = 16384, 9
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16).mT
    layout = masks.local(length, window=1000)

    def results(part: slice) -> list[Tensor]:
        leaves = [tensor[:, part].detach().requires_grad_() for tensor in (q, k, v, bias)]
        out = attention(*leaves[:3], layout, pair_bias=leaves[3], backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, part])]

    for whole, one in zip(results(slice(0, heads)), results(slice(heads - 1, heads)), strict=True):
        assert torch.equal(whole[:, -1:], one)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_block_bias_of_long_rows_is_accurate_on_hopper(head_dim: int, deterministic: bool) -> None:
    """Rows of up to 20 tiles, of blocks of 128 and of 256 x 128; the rows and columns of the first tokens are split."""
    device, length = torch.device("cuda"), 2560
    for block_size in (128, (256, 128)):
        layout = cases.Case(
            f"long-rows-{block_size}",
            lambda block_size=block_size: (
                masks.local(length, window=500, block_size=block_size)
                | masks.global_tokens(length, tokens=9, block_size=block_size)
            ),
        )
        for options in (
            {"causal": True, "kv_heads": 1},
            {"softcap": 3.0, "has_slopes": True, "are_slopes_fixed": True},
        ):
            call = zoo.Call(head_dim=head_dim, bias="heads", dtype=torch.bfloat16, **options)
            zoo.assert_backend_is_accurate("hopper", layout, call, device, deterministic=deterministic)


def test_a_compiled_layer_with_rotary_positions_equals_the_layer() -> None:
    """torch.compile rotates by an operator of our own, within one graph, and its layout needs no copy."""
    torch.manual_seed(0)
    layer = nn.SelfAttention(256, 4, rope=10000.0).to("cuda", torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x, dout = (torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def step(call: Any) -> list[Tensor]:
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]

    for found, expected in zip(step(compiled), step(layer), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 5e-3


def test_weights_of_more_heads_than_a_grid_axis_has_programs_are_accurate() -> None:
    from blocksparse_flash.kernels.triton.group_weights import group_weights

    torch.manual_seed(0)
    q, k = torch.randn(1, 70_000, 1, 2, 16, device="cuda"), torch.randn(1, 70_000, 3, 16, device="cuda")
    lse = torch.zeros(1, 70_000, 1, 2, device="cuda")
    # queries 4 and 5 see the keys that end at tokens 1, 3 and 5
    seen = torch.tensor([[True, True, False], [True, True, True]], device="cuda")
    expected = (0.25 * q[:, :, 0] @ k.transpose(-1, -2)).exp() * seen
    torch.testing.assert_close(group_weights(q, k, lse, 4, 0.25, 2, 2), expected, rtol=1e-4, atol=1e-4)


def test_kv_lengths_on_the_gpu_are_clamped() -> None:
    q, k, v = (torch.randn(3, 1, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    wild, clamped = (torch.tensor(values, device="cuda") for values in ([-5, 10**6, 70], [0, 300, 70]))
    for layout in (None, masks.local(300, window=9)):
        actual = attention(q, k, v, layout, kv_lengths=wild)
        assert torch.equal(actual, attention(q, k, v, layout, kv_lengths=clamped))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize(
    "call",
    [
        zoo.Call(head_dim=64, dtype=torch.bfloat16),
        zoo.Call(head_dim=64, dtype=torch.float16, causal=True, kv_heads=1),
        zoo.Call(head_dim=40, v_dim=16, dtype=torch.bfloat16, scale=-0.3),
        zoo.Call(head_dim=64, dtype=torch.bfloat16, causal=True, scale=1.0),
    ],
    ids=str,
)
# less than one tile row of 192 queries, exactly two, one query more or less than whole rows, many; more or fewer keys
@pytest.mark.parametrize("lengths", [(65, 65), (384, 256), (193, 700), (575, 130), (3001, 3001)], ids=str)
def test_rows_of_192_queries_are_accurate(
    lengths: tuple[int, int], call: zoo.Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced, since only long sequences use them."""
    from blocksparse_flash.kernels.hopper import forward as hopper_forward

    monkeypatch.setattr(hopper_forward, "three_warpgroups_pay", lambda *_, causal: True)
    hopper_forward.forward_launches.cache_clear()
    try:
        zoo.assert_backend_is_accurate("hopper", lengths, call, torch.device("cuda"))
    finally:
        hopper_forward.forward_launches.cache_clear()


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "scale"), [(128, 0.7), (256, 0.5)])
@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=str)
def test_maxima_that_grow_around_the_rescale_threshold_are_accurate(
    layout: cases.Case, head_dim: int, scale: float, dtype: torch.dtype
) -> None:
    """Scores have a standard deviation of 11.4 in base 2; the rescale threshold is 8."""
    call = zoo.Call(head_dim=head_dim, dtype=dtype, scale=scale)
    zoo.assert_backend_is_accurate("hopper", layout, call, torch.device("cuda"))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("lengths", [(700, 700), (300, 2049)], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        zoo.Call(head_dim=192, scale=0.6, dtype=torch.bfloat16),
        zoo.Call(head_dim=192, scale=0.6, causal=True, kv_heads=2, dtype=torch.float16),
        zoo.Call(head_dim=256, scale=0.5, has_kv_lengths=True, dtype=torch.bfloat16),
        zoo.Call(head_dim=256, scale=0.5, has_kv_lengths=True, causal=True, kv_heads=2, dtype=torch.float16),
        zoo.Call(head_dim=256, scale=0.5, softcap=60.0, has_sinks=True, dtype=torch.bfloat16),
        zoo.Call(head_dim=256, scale=0.5, has_slopes=True, are_slopes_fixed=True, causal=True, dtype=torch.float16),
    ],
    ids=str,
)
def test_maxima_around_the_threshold_without_a_layout_are_accurate(lengths: tuple[int, int], call: zoo.Call) -> None:
    zoo.assert_backend_is_accurate("hopper", lengths, call, torch.device("cuda"))
