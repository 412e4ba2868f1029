"""Attention of a layer under `use` on a GPU: accuracy with and without text, no synchronization, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, reference
from blocksparse_flash.diffusers import top_blocks, top_p
from blocksparse_flash.diffusers.using import Use, _Layer
from tests.support.closeness import assert_as_accurate
from tests.support.no_waiting import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = "cuda"
GRID, TILE, N_TEXT = (8, 16, 16), (4, 8, 8), 77
ORDER = masks.tile_order(GRID, tile=TILE)
LAYOUTS: dict[str, Callable[[], Any]] = {
    "dense": lambda: None,
    "sliding_tile": lambda: masks.sliding_tile(GRID, kernel=(4, 8, 16), tile=TILE, order=ORDER),
    "top_blocks": lambda: top_blocks(0.2),
    "top_p": lambda: top_p(0.4),
}


def attention_of(kind: str, text: str | None) -> tuple[Callable[..., Tensor], Use]:
    layer = _Layer("layer", Use(LAYOUTS[kind](), ORDER, "auto"), text)
    return lambda q, k, v, mask=None: layer.use._attend(q, k, v, mask, None, layer), layer.use


def inputs(text: str | None, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v as diffusers has them."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    shape = 2, 2048 + (N_TEXT if text else 0), 4, head_dim
    drawn = [torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator) for _ in range(3)]
    return [tensor.transpose(1, 2) for tensor in drawn]


def mask_of(use: Use, text: str | None, q: Tensor, k: Tensor) -> Tensor:
    """bool (batch | 1, heads | 1, length, length), in the order of the model."""
    begin = N_TEXT if text == "first" else 0
    own = (ORDER + begin).to(DEVICE)
    rest = torch.arange(N_TEXT if text else 0, device=DEVICE) + (0 if text == "first" else 2048)
    everything = torch.cat([own, rest])
    layout = use._layout
    if layout is None:
        return torch.ones(1, 1, len(everything), len(everything), dtype=torch.bool, device=DEVICE)
    if not isinstance(layout, BlockLayout):
        layout = layout(q[:, :, own], k[:, :, everything])
    chosen = layout.to_dense().to(DEVICE)
    mask = torch.ones(*chosen.shape[:2], len(everything), len(everything), dtype=torch.bool, device=DEVICE)
    keys = everything[: chosen.shape[3]]
    mask[:, :, own[:, None], keys] = chosen
    return mask


def references(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    """Attention with a mask in the type of q and in float64."""
    types = q.dtype, torch.float64
    return [reference.attention(*(tensor.to(dtype) for tensor in (q, k, v)), mask)[0] for dtype in types]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("text", [None, "first", "last"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layers_are_accurate(kind: str, text: str | None, head_dim: int) -> None:
    attend, use = attention_of(kind, text)
    q, k, v = inputs(text, head_dim)
    mask = mask_of(use, text, q, k)
    padding = None
    if text:
        padding = torch.ones(2, 1, 1, q.shape[2], dtype=torch.bool, device=DEVICE)
        end = N_TEXT if text == "first" else q.shape[2]
        padding[1, ..., end - 20 : end] = False
        mask = mask & padding
    plain, truth = references(q, k, v, mask)
    assert_as_accurate(attend(q, k, v, padding), plain, truth, name=f"{kind}, text {text}")


@pytest.mark.parametrize("text", [None, "first"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_later_calls_never_wait_for_the_gpu(kind: str, text: str | None) -> None:
    attend, _ = attention_of(kind, text)
    q, k, v = inputs(text, 64)
    expected = attend(q, k, v)
    with no_waiting():
        again = attend(q, k, v)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layers_compile(kind: str) -> None:
    attend, use = attention_of(kind, "last")
    q, k, v = inputs("last", 64)
    with torch.no_grad():
        mask = mask_of(use, "last", q, k)
        attend(q, k, v)
        # blocks that are chosen in each call break the graph
        out = torch.compile(attend, fullgraph=kind not in ("top_blocks", "top_p"))(q, k, v)
    plain, truth = references(q, k, v, mask)
    assert_as_accurate(out, plain, truth, name=kind)
