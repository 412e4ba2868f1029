"""NaN and infinity in inputs and gradients reach only the results that `attention` documents, on every backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, attention_with_lse
from tests.test_zoo import BACKENDS as KERNELS

BACKENDS = (*KERNELS, "reference")
HEADS, LENGTH, DIM = 2, 270, 16
NAN, INF = float("nan"), float("inf")
# an infinite key has scores of inf - inf, for which NumPy warns in Triton's interpreter
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@lru_cache
def layout_of(dropped: int = -1) -> BlockLayout:
    """Some pairs in the tiles on the diagonal; none for query 40 and the `dropped` tile of keys."""

    def attends(i: Tensor, j: Tensor) -> Tensor:
        return (i // 128 == j // 128) & ((i + j) % 3 != 0) & (i != 40) & (j // 128 != dropped)

    return BlockLayout.from_predicate(attends, LENGTH, LENGTH, block_size=64)


def inputs(device: torch.device, batch: int = 1) -> dict[str, Tensor]:
    """q, k, v, dout, dlse in float16, which every backend supports."""
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(batch, HEADS, LENGTH, DIM, generator=draw) for name in ("q", "k", "v", "dout")}
    tensors = {name: tensor.half().to(device) for name, tensor in tensors.items()}
    return tensors | {"dlse": torch.randn(batch, HEADS, LENGTH, generator=draw).to(device)}


def put(tensors: dict[str, Tensor], names: str, place: Any, value: float) -> dict[str, Tensor]:
    """The inputs with one value replaced in some of the tensors."""
    changed = {name: tensors[name].clone() for name in names.split()}
    for tensor in changed.values():
        tensor[place] = value
    return tensors | changed


def run(backend: str, tensors: dict[str, Tensor], layout: BlockLayout | None, **options: Any) -> dict[str, Tensor]:
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    out, lse = attention_with_lse(*leaves, layout, backend=backend, deterministic=True, **options)
    grads = torch.autograd.grad((out, lse), leaves, (tensors["dout"], tensors["dlse"]))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


@lru_cache
def clean(backend: str, device: torch.device) -> dict[str, Tensor]:
    """The results for finite inputs."""
    return run(backend, inputs(device), layout_of())


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], place: Any = ...) -> None:
    for name, value in actual.items():
        assert torch.equal(value[place], expected[name][place]), name


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("mask", ["bits", "causal", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_reaches_out_and_lse_of_the_rows_that_attend_to_it(
    backend: str, mask: str, value: float, device: torch.device
) -> None:
    tensors, layout, causal = inputs(device), None if mask == "causal" else layout_of(), mask != "bits"
    attends = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if layout is None else layout.to_dense()[0, 0]
    keys = [20, 200]
    reached = (attends.tril() if causal else attends)[:, keys].any(-1).to(device)
    results = []
    for filling in (value, 0.0):
        changed = put(tensors, "k", (0, 1, keys), filling)
        results.append(attention_with_lse(*(changed[name] for name in "qkv"), layout, backend=backend, causal=causal))
    for found, expected in zip(*results, strict=True):
        assert found[0, 1, reached].isnan().all()
        assert torch.equal(found[0, 1, ~reached], expected[0, 1, ~reached])
        assert torch.equal(found[0, 0], expected[0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_beyond_kv_lengths_may_hold_anything(backend: str, device: torch.device) -> None:
    """Exact results; test_zoo.py has more such calls."""
    tensors, lengths = inputs(device, batch=2), torch.tensor([150, 0], dtype=torch.int32, device=device)
    missing = torch.arange(LENGTH, device=device) >= lengths[:, None]
    places = missing[:, None].expand(-1, HEADS, -1)
    found, expected = (
        run(backend, put(tensors, "k v", places, filling), layout_of(), kv_lengths=lengths) for filling in (NAN, 0.0)
    )
    assert_same(found, expected)
    assert not found["dk"][places].any() and not found["dv"][places].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tile_of_keys_that_no_query_attends_to_is_not_read(backend: str, device: torch.device) -> None:
    tensors, layout, unused = inputs(device), layout_of(dropped=1), (0, slice(None), slice(128, 256))
    found, expected = (run(backend, put(tensors, "k v", unused, filling), layout) for filling in (NAN, 0.0))
    assert_same(found, expected)
    assert not found["dk"][unused].any() and not found["dv"][unused].any()
    assert not found["out"][unused].any() and (found["lse"][unused] == -INF).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_head_and_its_tiles(backend: str, name: str, device: torch.device) -> None:
    found = run(backend, put(inputs(device), name, (0, 1, 140), NAN), layout_of())
    assert_same(found, clean(backend, device), (0, 0))
    # not in the reference, which multiplies whole rows and columns
    for elsewhere in (slice(0, 128), slice(256, None)) if backend != "reference" else ():
        assert_same(found, clean(backend, device), (0, 1, elsewhere))
    # results that depend on it are NaN
    reached = layout_of().to_dense()[0, 0][:, 140].to(device)
    if name in "kv":
        assert found["out"][0, 1, reached].isnan().all() and found["dq"][0, 1, reached].isnan().all()
    else:
        assert found["dq"][0, 1, 140].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lse_gradient_of_an_empty_row_is_ignored(backend: str, device: torch.device) -> None:
    found = run(backend, put(inputs(device), "dlse", (0, slice(None), 40), NAN), layout_of())
    assert_same(found, clean(backend, device))
    assert not found["dq"][0, :, 40].any()
