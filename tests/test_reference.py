"""The reference equals results computed by hand and a double loop; it is never compared with a backend."""

from __future__ import annotations

import math

import pytest
import torch

from blocksparse_flash import philox, reference
from tests.support.closeness import assert_as_accurate


def random_inputs(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 5,
    kv_len: int = 7,
    head_dim: int = 3,
    v_dim: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_dim))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def double_loop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one query at a time, in Python's floats; mask is (batch, heads, q_len, kv_len)."""
    batch, heads, q_len, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                keys = [j for j in range(k.shape[2]) if mask[b, h, i, j]]
                if not keys:
                    continue
                scores = [scale * float(q[b, h, i] @ k[b, h // group, j]) for j in keys]
                total = math.fsum(math.exp(score) for score in scores)
                lse[b, h, i] = math.log(total)
                for j, score in zip(keys, scores, strict=True):
                    out[b, h, i] += math.exp(score) / total * v[b, h // group, j]
    return out, lse


def test_three_keys_by_hand():
    """Scores log 1, log 2, log 5: weights 1/8, 2/8, 5/8, and lse log 8."""
    q = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    k = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().reshape(1, 1, 3, 1)
    v = torch.tensor([[8.0, 0.0], [0.0, 8.0], [16.0, 8.0]], dtype=torch.float64).reshape(1, 1, 3, 2)
    out, lse = reference.attention(q, k, v, scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([11.0, 7.0], dtype=torch.float64))
    torch.testing.assert_close(lse.item(), math.log(8))


def test_the_mask_removes_keys_by_hand():
    """Without the middle key: weights 1/6 and 5/6."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().reshape(1, 1, 3, 1)
    v = torch.tensor([6.0, 600.0, 12.0], dtype=torch.float64).reshape(1, 1, 3, 1)
    out, lse = reference.attention(q, k, v, torch.tensor([True, False, True]), scale=1.0)
    torch.testing.assert_close((out.item(), lse.item()), (11.0, math.log(6)))


@pytest.mark.parametrize("scale", [None, 0.3, 1, 0.0, -0.7])
def test_equals_the_double_loop(scale):
    q, k, v = random_inputs()
    mask = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[0, 1, 3] = False
    out, lse = reference.attention(q, k, v, mask, scale=scale)
    expected_out, expected_lse = double_loop(q, k, v, mask, 3**-0.5 if scale is None else scale)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (4, 5, 7), (2, 1, 1, 7)])
def test_a_mask_broadcasts(shape):
    q, k, v = random_inputs()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    out, lse = reference.attention(q, k, v, mask)
    expected_out, expected_lse = double_loop(q, k, v, mask.expand(2, 4, 5, 7), 3**-0.5)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


# bottom-right: the last query attends to every key, whichever side is longer
CAUSAL_PICTURES = {
    (3, 3): ["100", "110", "111"],
    (2, 5): ["11110", "11111"],
    (5, 2): ["00", "00", "00", "10", "11"],
}


@pytest.mark.parametrize("lengths", CAUSAL_PICTURES, ids=str)
def test_causal_is_aligned_bottom_right(lengths):
    q_len, kv_len = lengths
    picture = torch.tensor([[key == "1" for key in row] for row in CAUSAL_PICTURES[lengths]])
    q, k, v = random_inputs(q_len=q_len, kv_len=kv_len)
    out, lse = reference.attention(q, k, v, causal=True)
    expected_out, expected_lse = reference.attention(q, k, v, picture)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_causal_and_a_mask_attend_where_both_do():
    q, k, v = random_inputs(q_len=6, kv_len=6)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    out, _ = reference.attention(q, k, v, mask, causal=True)
    torch.testing.assert_close(out, reference.attention(q, k, v, mask & torch.ones(6, 6).tril().bool())[0])


def test_empty_rows_give_zero_output_and_zero_gradients():
    q, k, v = (t.requires_grad_() for t in random_inputs())
    mask = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    mask[:, :, 2] = False
    mask[1] = False
    out, lse = reference.attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all() and (out[1] == 0).all()
    assert (lse[:, :, 2] == -math.inf).all() and (lse[1] == -math.inf).all()
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert (q.grad[:, :, 2] == 0).all() and (q.grad[0, :, 1] != 0).any()
    for grad in (q.grad, k.grad, v.grad):
        assert grad.isfinite().all() and (grad[1] == 0).all() and (grad[0] != 0).any()


def test_the_lse_gradient_of_an_empty_row_is_ignored():
    q, k, v = (t.requires_grad_() for t in random_inputs())
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out, lse = reference.attention(q, k, v, mask)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    assert q.grad.isfinite().all() and (q.grad[:, :, 2] == 0).all() and k.grad.isfinite().all()


def test_neighboring_query_heads_share_a_kv_head():
    q, k, v = random_inputs(heads=6, kv_heads=2)
    out, lse = reference.attention(q, k, v)
    for head in range(6):
        alone = reference.attention(q[:, [head]], k[:, [head // 3]], v[:, [head // 3]])
        torch.testing.assert_close(out[:, [head]], alone[0])
        torch.testing.assert_close(lse[:, [head]], alone[1])


def test_keys_beyond_kv_lengths_are_ignored_even_if_nan():
    q, k, v = random_inputs(batch=3)
    lengths = torch.tensor([7, 4, 0])
    clean = reference.attention(q, k, v, (torch.arange(7) < lengths[:, None])[:, None, None])
    for batch, length in enumerate(lengths):
        k[batch, :, length:] = math.nan
        v[batch, :, length:] = math.inf
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = reference.attention(q, k, v, kv_lengths=lengths)
    torch.testing.assert_close(out, clean[0])
    torch.testing.assert_close(lse, clean[1])
    (out.sum() + lse[:2].sum()).backward()
    for grad in (q.grad, k.grad, v.grad):
        assert grad.isfinite().all()
    assert (k.grad[1, :, 4:] == 0).all() and (v.grad[1, :, 4:] == 0).all() and (q.grad[2] == 0).all()


def test_kv_lengths_do_not_move_the_causal_diagonal():
    q, k, v = random_inputs(batch=1, q_len=4, kv_len=4)
    out, lse = reference.attention(q, k, v, causal=True, kv_lengths=torch.tensor([2]))
    mask = torch.ones(4, 4).tril().bool() & (torch.arange(4) < 2)
    expected_out, expected_lse = reference.attention(q, k, v, mask)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_pass_gradcheck(causal):
    q, k, v = (t.requires_grad_() for t in random_inputs(batch=2, heads=2, kv_heads=1, q_len=3, kv_len=4, v_dim=2))
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()

    def call(q, k, v):
        out, lse = reference.attention(
            q,
            k,
            v,
            mask,
            causal=causal,
            scale=-0.8,
            kv_lengths=torch.tensor([4, 3]),
            dropout_p=0.3,
            seed=torch.tensor([5]),
        )
        # -inf - (-inf) would be NaN in the finite differences of the rows without keys
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_dropout_drops_weights_and_scales_the_others():
    """With values one-hot by key, the output is the matrix of weights itself."""
    q, k, _ = random_inputs(kv_heads=4, q_len=6, kv_len=9)
    v = torch.eye(9, dtype=torch.float64).expand(2, 4, 9, 9)
    weights, lse = reference.attention(q, k, v)
    dropped, lse_of_dropped = reference.attention(q, k, v, dropout_p=0.4, seed=torch.tensor([17]))
    kept = torch.stack(
        [
            torch.stack(
                [
                    philox.keep_mask(
                        torch.tensor([17]),
                        torch.tensor(b),
                        torch.tensor(h),
                        torch.arange(6)[:, None],
                        torch.arange(9),
                        0.4,
                    )
                    for h in range(4)
                ]
            )
            for b in range(2)
        ]
    )
    torch.testing.assert_close(dropped, torch.where(kept, weights / philox.kept_share(0.4), 0.0))
    torch.testing.assert_close(lse_of_dropped, lse)


def test_dropout_keeps_the_mean():
    """Uniform weights over 64 keys of value 1: each output is a share kept / 0.75, the mean of 4096 of them is 1."""
    zeros = torch.zeros(2, 8, 256, 4, dtype=torch.float64)
    keys, values = torch.zeros(2, 8, 64, 4, dtype=torch.float64), torch.ones(2, 8, 64, 1, dtype=torch.float64)
    out, _ = reference.attention(zeros, keys, values, dropout_p=0.25, seed=torch.tensor([1]))
    deviation = (0.25 / 0.75 / 64) ** 0.5
    assert abs(out.mean().item() - 1) < 6 * deviation / out.numel() ** 0.5
    assert abs(out.std().item() / deviation - 1) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_have_the_documented_dtypes(dtype):
    q, k, v = random_inputs(q_len=64, kv_len=80, head_dim=16, dtype=dtype)
    out, lse = reference.attention(q, k, v)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    out_64, lse_64 = reference.attention(q.double(), k.double(), v.double())
    _, lse_32 = reference.attention(q.float(), k.float(), v.float())
    assert (out.double() - out_64).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()
    assert_as_accurate(lse, lse_32.to(lse.dtype), lse_64, name="lse")


def test_large_scores_do_not_overflow():
    q, k, v = random_inputs(dtype=torch.float32)
    out, lse = reference.attention(q * 1000, k, v, scale=1.0)
    assert out.isfinite().all() and lse.isfinite().all() and lse.abs().max() > 500


def test_autocast_of_the_caller_changes_nothing():
    q, k, v = random_inputs(dtype=torch.float32)
    expected = reference.attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = reference.attention(q, k, v)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


# (batch, heads, kv_heads, q_len, kv_len), one of them zero
@pytest.mark.parametrize("sizes", [(0, 4, 2, 5, 7), (2, 0, 0, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0), (2, 0, 2, 5, 7)])
def test_empty_inputs_give_zeros(sizes):
    batch, heads, kv_heads, q_len, kv_len = sizes
    q, k, v = (
        t.requires_grad_()
        for t in random_inputs(batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len)
    )
    out, lse = reference.attention(q, k, v, causal=True)
    assert out.shape == (batch, heads, q_len, 4) and (out == 0).all()
    assert lse.shape == (batch, heads, q_len) and (lse == -math.inf).all()
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    for t in (q, k, v):
        assert t.grad.shape == t.shape and (t.grad == 0).all()
