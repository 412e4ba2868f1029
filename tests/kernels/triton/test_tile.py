"""tile.add_product sums many products with Kahan compensation; dropout takes a seed by value or by address."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402

from blocksparse_flash.kernels.inputs import BackwardInputs  # noqa: E402
from blocksparse_flash.kernels.triton import backward, forward  # noqa: E402
from blocksparse_flash.kernels.triton.tile import add_product  # noqa: E402


@triton.jit
def long_sum_kernel(x_ptr, out_ptr, n_steps, PRECISION: tl.constexpr, N: tl.constexpr):
    o_x = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_x = tl.load(x_ptr + o_x)
    b_sum, b_compensation = tl.zeros([N, N], tl.float32), tl.zeros([N, N], tl.float32)
    for _ in tl.range(0, n_steps):
        b_sum, b_compensation = add_product(b_x, b_x, b_sum, b_compensation, PRECISION)
    tl.store(out_ptr + o_x, b_sum)


def test_a_compensated_sum_of_ieee_products_is_off_by_about_one_rounding(device: torch.device) -> None:
    """300 plain additions lose ten times as much."""
    x = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)).to(device)
    found = torch.empty_like(x)
    long_sum_kernel[(1,)](x, found, 300, "ieee", 16)
    step = (x @ x).double()
    plain = torch.zeros_like(x)
    for _ in range(300):
        plain += step.float()
    errors = [((each.double() - 300 * step).abs() / (300 * step)).max() for each in (found, plain)]
    assert errors[0] < 3e-7 and errors[1] > 3e-6, errors


@pytest.mark.parametrize("seed", [7, -1, 0x299F31D0A4093822])
def test_a_seed_by_value_drops_the_pairs_of_the_same_seed_in_memory(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 70, 16, generator=generator).to(device) for _ in range(4))

    def results(dropout_seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = [], None, dropout_seed, 0.25, False, 0.5
        out, lse = forward.forward(q, k, v, *options)
        return out, *backward.backward(BackwardInputs(dout, None, q, k, v, out, lse), *options)

    by_value = results(torch.tensor([seed]))
    for module in (forward, backward):
        monkeypatch.setattr(module, "seed_arguments", lambda given, *_: (given, 0))
    for found, expected in zip(results(torch.tensor([seed], device=device)), by_value, strict=True):
        assert torch.equal(found, expected)


def test_dropout_without_a_seed_is_refused(device: torch.device) -> None:
    """Calls of the operator can omit it; those of `attention` cannot."""
    q = torch.randn(1, 1, 16, 16, device=device)
    with pytest.raises(AssertionError, match="dropout_p > 0 needs a seed"):
        forward.forward(q, q, q, [], None, None, 0.25, False, 0.5)
    with pytest.raises(AssertionError, match="seed must be int64"):
        forward.forward(q, q, q, [], None, torch.tensor([1.7]), 0.25, False, 0.5)
