"""Tensor specs as launch-cache keys: equal for equal metadata, different wherever a launch differs."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import attention
from blocksparse_flash.runtime.tensor_spec import TensorSpec, is_tma_loadable, spec_of, specs_of

HALF = torch.bfloat16


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0, dtype: torch.dtype = HALF
) -> torch.Tensor:
    return torch.zeros(5000, dtype=dtype).as_strided(shape, strides, start)


def test_equal_metadata_gives_the_same_specs() -> None:
    q, k = (strided((1, 2, 8, 64), (1024, 512, 64, 1)) for _ in "qk")
    assert specs_of(q, k) is specs_of(k, q)
    assert specs_of(q, k).tensors == (spec_of(q), spec_of(k)) == (TensorSpec(HALF, q.shape, q.stride(), True),) * 2
    assert spec_of(None) is None


@pytest.mark.parametrize(
    "other",
    [
        strided((1, 2, 9, 64), (1024, 512, 64, 1)),
        strided((1, 2, 8, 64), (1024, 64, 128, 1)),
        strided((1, 2, 8, 64), (1024, 512, 64, 1), start=1),
        strided((1, 2, 8, 64), (1024, 512, 64, 1), dtype=torch.float16),
    ],
    ids=["shape", "strides", "address", "dtype"],
)
def test_different_metadata_gives_different_specs(other: torch.Tensor) -> None:
    q = strided((1, 2, 8, 64), (1024, 512, 64, 1))
    assert specs_of(q, q) is not specs_of(q, other)
    assert specs_of(q, q) is not specs_of(q)


@pytest.mark.parametrize(
    ("tensor", "is_tma_loadable"),
    [
        (strided((1, 2, 8, 64), (1024, 512, 64, 1)), True),
        # strides that are multiples of 16 bytes; any stride of an axis of size 1
        (strided((1, 2, 8, 64), (3, 72, 144, 1)), True),
        (strided((1, 2, 8, 64), (1024, 512, 65, 1)), False),
        (strided((1, 2, 8, 64), (1024, 512, 64, 2)), False),
        (strided((1, 2, 8, 64), (1024, 512, 64, 1), start=1), False),
        (strided((1, 2, 8, 32), (512, 256, 32, 1), dtype=torch.float32), False),
    ],
    ids=["contiguous", "heads inside", "row", "last", "address", "dtype"],
)
def test_which_tensors_tma_can_load(tensor: torch.Tensor, is_tma_loadable: bool) -> None:
    good = strided((1, 2, 8, 64), (1024, 512, 64, 1))
    assert specs_of(good, tensor).is_tma_loadable is is_tma_loadable


@pytest.mark.parametrize("start", [0, 1])
def test_is_tma_loadable_compiles(start: int) -> None:
    """For inputs and intermediate tensors: distributed.attention calls it on a GPU with any backend."""

    def call(q: torch.Tensor) -> torch.Tensor:
        return q * 2 if is_tma_loadable(q) and is_tma_loadable(q + 1) else q * 3

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q = strided((1, 2, 8, 64), (1024, 512, 64, 1), start) + 1
    assert torch.equal(compiled(q), q * 2)
    q = strided((1, 2, 8, 64), (1024, 512, 65, 1), start)
    assert torch.equal(compiled(q), q * 3)


def test_a_call_sees_a_tensor_that_was_changed_in_place() -> None:
    """Specs are not cached per tensor: a tensor can get another shape, strides and memory."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    assert attention(q, k, v).shape == (1, 2, 8, 16)
    q.resize_(1, 2, 4, 16)
    assert attention(q, k, v).shape == (1, 2, 4, 16)
    k.set_(torch.randn(1, 2, 8, 8))
    with pytest.raises(ValueError, match="k must have q's head_dim 16, got 8"):
        attention(q, k, v)


def test_a_tensor_that_outlived_its_transform_is_accepted() -> None:
    """Such a tensor has no storage, so reading its address raises."""
    kept: list[torch.Tensor] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 1.0)
        return x.sum()

    x = torch.randn(1, 1, 16, 16)
    torch.func.grad(loss)(x)
    torch.testing.assert_close(attention(kept[0], x, x), attention(x, x, x))
