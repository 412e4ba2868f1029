"""Which layouts get another order of their tokens, and how many tiles that saves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks.reindexing import NONE
from blocksparse_flash.plan import reordering
from blocksparse_flash.plan_format import N_TILES, TILE

CPU = torch.device("cpu")
N = 8192
SOME = np.random.default_rng(0).choice(N, 500, replace=False)


def count(layout: BlockLayout) -> int:
    return int(layout.plan("cpu").row_records[..., N_TILES].sum())


# layout, whether queries and keys are reordered, and the tiles at most: bands and scattered tokens, each by themselves
SCATTERED: dict[str, tuple[Callable[[], BlockLayout], str, int]] = {
    # 64 rows: a window of 5 tiles, and 4 columns of tiles, half of them in the future
    "vertical-slash": (lambda: masks.vertical_slash(N, verticals=SOME, slashes=range(512)), "kv", 64 * (5 + 2) + 40),
    "fixed": (lambda: masks.fixed(N, stride=128, causal=True), "kv", 64 * 2),
    "fixed, more tokens": (lambda: masks.fixed(N, stride=256, summary=4), "kv", 64 * (2 + 1)),
    # 3 tiles of the window, a column and a row of global tokens
    "global": (lambda: masks.longformer(N, window=100, global_tokens=SOME[:60]), "q kv", 64 * (3 + 1 + 1) + 1),
    "dilated": (lambda: masks.dilated_window(N, window=100, dilation=8), "q kv", 64 * 3),
    # a tile has 16 neighbors in each of 8 strides
    "strided": (lambda: masks.strided(2 * N, stride=128, causal=True), "q kv", 128 * 19),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_tokens_share_tiles(name: str) -> None:
    build, axes, most = SCATTERED[name]
    layout = build()
    found = layout._reordered(CPU, False, 1)
    assert found is not None
    assert " ".join(axis for axis in ("q", "kv") if getattr(found, axis) is not None) == axes
    assert count(found.layout) <= most < 0.5 * count(layout)


def test_heads_of_a_group_have_one_order() -> None:
    layout = masks.vertical_slash(N, verticals=[SOME[:250], SOME[250:]] * 2, slashes=range(100))
    for kv_heads in (1, 2, 4):
        found = layout._reordered(CPU, False, kv_heads)
        assert found is not None and found.kv is not None and found.kv.order.shape[:2] == (1, kv_heads)


UNCHANGED: dict[str, Callable[[], BlockLayout]] = {
    "causal": lambda: masks.causal(N),
    "narrow window": lambda: masks.local(N, window=40),
    "window": lambda: masks.local(N, window=(1000, 0)),
    "documents": lambda: masks.documents([0, 50, 1000, 1100, 5000, N], causal=True),
    "butterfly": lambda: masks.butterfly(N) | masks.local(N, window=100),
    "random": lambda: masks.random(N, density=0.1, seed=0),
    "random, small blocks": lambda: masks.random(N, density=0.02, seed=0, block_size=32),
    "random pairs": lambda: masks.erdos_renyi(2048, density=0.01, seed=0),
    "bigbird": lambda: masks.bigbird(N, seed=0),
    "leading global tokens": lambda: masks.longformer(N, window=256, global_tokens=40),
    "attention sinks": lambda: masks.sink_window(N, sinks=4, window=1000),
    "ragged": lambda: masks.causal(1000),
    "neighborhood": lambda: masks.neighborhood((64, 64), kernel=7),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_layouts_keep_their_order(name: str) -> None:
    layout = UNCHANGED[name]()
    assert layout._reordered(CPU, False, 1) is None
    assert layout._reordered(CPU, True, 1) is None


def test_few_queries_keep_their_keys() -> None:
    layout = masks.vertical_slash((2 * TILE, N), verticals=SOME, slashes=range(100))
    assert layout._reordered(CPU, False, 1) is None
    assert masks.vertical_slash((8 * TILE, N), verticals=SOME[:100], slashes=[0])._reordered(CPU, False, 1) is not None


def test_layouts_without_bitmasks_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reordering, "find", None)
    monkeypatch.setattr(BlockLayout, "_rows", None)
    layout = BlockLayout.from_blocks([0, 1, 2, 3], [0, 1, 2, 3], 512, 512)
    assert layout._reordered(CPU, True, 1) is None


def test_places_of_tokens_that_move_are_empty() -> None:
    """Tokens that stay keep their place in their tile, so that tiles of windows stay what they were."""
    found = masks.vertical_slash(N, verticals=SOME, slashes=range(100))._reordered(CPU, False, 1)
    assert found is not None and found.kv is not None
    order = found.kv.order[0, 0]
    staying, last = order[:N], order[N:]
    assert len(order) % TILE == 0
    assert set(last[last != NONE].tolist()) <= set(SOME.tolist()) and (last == NONE).sum() < TILE
    assert torch.equal(staying[staying != NONE], torch.arange(N, dtype=torch.int32)[staying != NONE])


def test_an_order_is_made_once_and_goes_with_the_layout() -> None:
    layout = masks.fixed(2048, stride=64, causal=True)
    found = layout._reordered(CPU, False, 1)
    assert found is not None and layout._reordered(CPU, False, 8) is found
    meta = layout._reordered(torch.device("meta"), False, 1)
    assert meta is not None and meta.layout is found.layout and meta.kv is not None and meta.kv.order.is_meta
    assert layout.to("cpu")._reordered(CPU, False, 1) is found
