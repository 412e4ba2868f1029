"""LayoutByLength builds, keeps and forgets layouts, and travels with modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import masks
from blocksparse_flash.nn import LayoutByLength, MultiheadAttention, SelfAttention

SPEC = "sink_window(sinks=2, window=20)"


def test_every_length_has_its_layout() -> None:
    layout = LayoutByLength(SPEC, block_size=32)
    for length in (40, 100, 40):
        assert layout(length) == masks.build(SPEC, length, block_size=32)
    assert LayoutByLength(SPEC)(40).block_size == (128, 128)


def test_the_layouts_used_last_are_kept() -> None:
    layout = LayoutByLength(SPEC, maxsize=2)
    first = layout(40)
    layout(50)
    assert layout(40) is first
    layout(60)  # drops 50
    assert layout(40) is first
    assert layout._kept.cache_info().misses == 3
    layout(50)
    assert layout._kept.cache_info().misses == 4 and layout._kept.cache_info().currsize == 2


def test_pickles_and_copies_are_equal() -> None:
    layout = LayoutByLength(SPEC, block_size=(32, 64), maxsize=3)
    layout(40)
    for other in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert other == layout and hash(other) == hash(layout) and other.maxsize == 3
        assert other(40) == layout(40)
    assert layout != LayoutByLength(SPEC) and layout != SPEC
    assert repr(layout) == f"LayoutByLength('{SPEC}', block_size=(32, 64))"


@pytest.mark.parametrize("kind", [SelfAttention, MultiheadAttention])
def test_layers_take_it_and_are_saved_with_it(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(32, 4, layout=LayoutByLength(SPEC))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for length in (30, 70):
        x = torch.randn(length, 2, 32) if kind is MultiheadAttention else torch.randn(2, length, 32)
        inputs = (x,) * 3 if kind is MultiheadAttention else (x,)
        fixed = copy.deepcopy(layer)
        fixed.layout = masks.build(SPEC, length)
        expected = fixed(*inputs)
        for each in (layer, again):
            torch.testing.assert_close(each(*inputs), expected)
    assert SPEC in repr(SelfAttention(32, 4, layout=LayoutByLength(SPEC)))


def test_a_list_of_block_sizes_can_be_hashed() -> None:
    made, same = (LayoutByLength("causal", block_size=size) for size in ([16, 32], (16, 32)))
    assert hash(made) == hash(same) and made == same and made(64) == same(64)  # type: ignore[arg-type]


def test_layouts_follow_the_attributes() -> None:
    layout = LayoutByLength("causal", block_size=64)
    assert layout(64) == masks.causal(64, block_size=64)
    layout.spec, layout.block_size = "local(window=1)", 32
    assert layout(64) == masks.local(64, window=1, block_size=32)
    assert layout([64, 128]) == masks.local((64, 128), window=1, block_size=32)


@pytest.mark.parametrize("block_size", [17, "x", (16, 32, 64), torch.tensor(16)], ids=str)
def test_wrong_block_sizes_are_refused_at_once(block_size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_size must be"):
        LayoutByLength("causal", block_size=block_size)


def test_what_is_no_specification_is_refused() -> None:
    with pytest.raises(TypeError, match=r"spec must be a str .*got BlockLayout"):
        LayoutByLength(masks.causal(50))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="maxsize must be 1 or more, got 0"):
        LayoutByLength(SPEC, maxsize=0)
    with pytest.raises(ValueError, match="butterfly"):
        LayoutByLength("buterfly")(50)


def test_a_graph_is_refused_with_a_hint() -> None:
    layer = SelfAttention(32, 4, layout=LayoutByLength(SPEC))
    with pytest.raises(Exception, match=r"layout must be a BlockLayout while torch\.compile traces"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.zeros(1, 50, 32))


@pytest.mark.parametrize("wrong", [200.0, True, {}, (200, 200.0), torch.tensor([200, 200])], ids=str)
def test_lengths_are_checked_before_the_layouts_that_are_kept(wrong: Any) -> None:
    layout = LayoutByLength("local(window=3)")
    for length in (200, 1, (200, 200)):
        layout(length)
    with pytest.raises((TypeError, ValueError), match="length must be"):
        layout(wrong)
