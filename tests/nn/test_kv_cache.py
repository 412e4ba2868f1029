"""Decoding with a KVCache, against one forward of all tokens, in float64."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout
from blocksparse_flash.nn import KVCache, LayoutByLength, SelfAttention
from blocksparse_flash.nn import kv_cache as room

LENGTH, WIDTH = 90, 32


def layer(layout: Any = None, **changes: Any) -> SelfAttention:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"kv_heads": 2, "rope": 100.0, "causal": True, **changes}
    return SelfAttention(WIDTH, 4, layout, **arguments).double()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def decoded(made: SelfAttention, x: Tensor, parts: list[int], max_length: int = LENGTH) -> Tensor:
    cache = made.new_cache(x.shape[0], max_length)
    with torch.no_grad():
        outs = [made(part, cache=cache) for part in x.split(parts, dim=1)]
    assert cache.length == sum(parts)
    return torch.cat(outs, dim=1)


def by_head(length: int) -> BlockLayout:
    windows = [masks.local(length, window=window, block_size=16) for window in (3, 20, 40, 89)]
    return BlockLayout.stack_heads(windows)


LAYOUTS: dict[str, Callable[[int], BlockLayout | None]] = {
    "dense": lambda length: None,
    "local": lambda length: masks.local(length, window=20, block_size=16),
    "longformer": lambda length: masks.longformer(length, window=12, global_tokens=[0, 1, 50], block_size=16),
    "sinks": lambda length: masks.sink_window(length, sinks=3, window=17, block_size=32),
    "heads": by_head,
}
PARTS = [[60, *[1] * 30], [1, 63, 5, 5, 16], [90], [17] * 5 + [5]]


@pytest.mark.parametrize("parts", PARTS, ids=["steps", "mixed", "at once", "chunks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding_is_one_forward(name: str, parts: list[int]) -> None:
    made, x = layer(LAYOUTS[name](LENGTH)), tokens()
    torch.testing.assert_close(decoded(made, x, parts), made(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": None, "kv_heads": None},
        {"kv_heads": 1},
        {"sinks": True, "softcap": 2.0, "alibi": True},
        {"head_dim": 10},
    ],
    ids=str,
)
def test_every_option_of_the_layer_decodes(changes: dict[str, Any]) -> None:
    made, x = layer(LAYOUTS["local"](LENGTH), **changes), tokens()
    if made.sinks is not None:
        torch.nn.init.normal_(made.sinks)
    torch.testing.assert_close(decoded(made, x, [50, 1, 1, 38]), made(x), rtol=1e-10, atol=1e-10)


def test_a_causal_layout_needs_no_causal_layer() -> None:
    made, x = layer(LAYOUTS["sinks"](LENGTH), causal=False), tokens()
    torch.testing.assert_close(decoded(made, x, [60, 1, 29]), made(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", [LayoutByLength("local(window=20)"), LAYOUTS["local"]], ids=["spec", "function"])
def test_a_function_is_called_with_the_length_of_the_cache(layout: Any) -> None:
    made, x = layer(layout), tokens()
    torch.testing.assert_close(decoded(made, x, [60, 1, 29], max_length=200), made(x), rtol=1e-10, atol=1e-10)


def test_a_cache_may_be_shorter_than_the_layout() -> None:
    """The keys of the first tokens are those of a crop."""
    made, x = layer(LAYOUTS["local"](300)), tokens()
    expected = layer(LAYOUTS["local"](300).crop(q_stop=LENGTH, kv_stop=LENGTH))(x)
    torch.testing.assert_close(decoded(made, x, [80, 1, 9]), expected, rtol=1e-10, atol=1e-10)


def test_positions_may_be_those_of_the_next_tokens() -> None:
    made, x, positions = layer(), tokens(), 3 * torch.arange(LENGTH)
    cache = made.new_cache(2, LENGTH)
    with torch.no_grad():
        outs = [made(x[:, part], positions=positions[part], cache=cache) for part in (slice(0, 40), slice(40, LENGTH))]
    torch.testing.assert_close(torch.cat(outs, dim=1), made(x, positions=positions), rtol=1e-10, atol=1e-10)


def test_a_truncated_cache_forgets() -> None:
    made, x = layer(LAYOUTS["longformer"](LENGTH)), tokens()
    cache = made.new_cache(2, LENGTH)
    with torch.no_grad():
        made(x[:, :50], cache=cache)
        made(torch.randn_like(x[:, :20]), cache=cache)
        cache.truncate(50)
        rest = made(x[:, 50:], cache=cache)
        torch.testing.assert_close(rest, made(x)[:, 50:], rtol=1e-10, atol=1e-10)
        cache.truncate()
        torch.testing.assert_close(made(x, cache=cache), made(x), rtol=1e-10, atol=1e-10)


def test_copies_go_on_apart_and_pickles_go_on() -> None:
    made, x = layer(), tokens()
    cache = made.new_cache(2, LENGTH)
    with torch.inference_mode():
        made(x[:, :50], cache=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        made(torch.randn_like(x[:, :20]), cache=cache)
        for copied in copies:
            rest = made(x[:, 50:], cache=copied)
            torch.testing.assert_close(rest, made(x)[:, 50:], rtol=1e-10, atol=1e-10)
    assert cache.length == 70


def test_a_shallow_copy_has_memory_of_its_own() -> None:
    """Regression: it shared the memory but not the length, and overwrote tokens of the original."""
    made, x = layer(), tokens()
    cache = made.new_cache(2, LENGTH)
    with torch.inference_mode():
        made(x[:, :50], cache=cache)
        copied = copy.copy(cache)
        made(x[:, 50:60], cache=cache)
        made(torch.randn_like(x[:, :10]), cache=copied)
        torch.testing.assert_close(made(x[:, 60:], cache=cache), made(x)[:, 60:], rtol=1e-10, atol=1e-10)


def test_trained_sinks_need_gradients_too() -> None:
    made = SelfAttention(8, 2, causal=True, sinks=True)
    made.qkv.requires_grad_(False)
    cache = made.new_cache(2, 10)
    with pytest.raises(ValueError, match="a cache holds no gradients, but gradients are enabled and sinks needs one"):
        made(torch.randn(2, 3, 8), cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_made_in_inference_mode_go_on_outside_it(copied: Callable[[Any], Any]) -> None:
    made, x = layer(), tokens()
    cache = made.new_cache(2, LENGTH)
    with torch.inference_mode():
        made(x[:, :50], cache=cache)
        other = copied(cache)
    with torch.no_grad():
        torch.testing.assert_close(made(x[:, 50:], cache=other), made(x)[:, 50:], rtol=1e-10, atol=1e-10)


def test_a_copy_of_a_layer_and_its_cache_goes_on() -> None:
    made, x = layer(), tokens()
    cache = made.new_cache(2, LENGTH)
    with torch.no_grad():
        made(x[:, :50], cache=cache)
        copied, of_copy = copy.deepcopy((made, cache))
        assert torch.equal(copied(x[:, 50:70], cache=of_copy), made(x[:, 50:70], cache=copy.deepcopy(cache)))
        with pytest.raises(ValueError, match="the keys of another layer"):
            made(x[:, 70:], cache=of_copy)


def test_crops_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = []
    crop = BlockLayout.crop
    monkeypatch.setattr(BlockLayout, "crop", lambda self, *stops: crops.append(stops) or crop(self, *stops))
    made, other, x = layer(LAYOUTS["local"](77)), layer(LAYOUTS["local"](77)), tokens()
    for each in (made, other):
        decoded(each, x[:, :70], [60, *[1] * 10], max_length=77)
    assert len(crops) == 11


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (BlockLayout.stack_batches([masks.causal(LENGTH)] * 3), "layout must have batch 1 or q's 2"),
        (lambda length: BlockLayout.stack_heads([masks.causal(length)] * 3), "heads"),
    ],
    ids=["batches", "heads"],
)
def test_a_refused_layout_leaves_the_cache_as_it_was(layout: Any, message: str) -> None:
    made = layer(layout)
    cache = made.new_cache(2, LENGTH)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        made(tokens(), cache=cache)
    assert cache.length == 0
    # of no layer yet
    cache.claim(object)


def test_the_cache_says_what_it_holds() -> None:
    made = layer().bfloat16()
    cache = made.new_cache(3, 20)
    assert (cache.batch, cache.length, cache.max_length) == (3, 0, 20)
    with torch.no_grad():
        made(torch.zeros(3, 7, WIDTH, dtype=torch.bfloat16), cache=cache)
    assert cache.k.shape == cache.v.shape == (3, 2, 7, 8) and cache.k.dtype == torch.bfloat16
    assert repr(cache) == (
        "KVCache(length=7, batch=3, max_length=20, kv_heads=2, head_dim=8, device='cpu', dtype=torch.bfloat16)"
    )


def test_autocast_needs_a_cache_of_its_type() -> None:
    made, x = layer().float(), tokens().float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"new_cache\(batch, max_length, dtype=torch.bfloat16\)"):
            made(x, cache=made.new_cache(2, LENGTH))
        cache = made.new_cache(2, LENGTH, dtype=torch.bfloat16)
        outs = torch.cat([made(part, cache=cache) for part in x.split([80, 10], dim=1)], dim=1)
        torch.testing.assert_close(outs, made(x), rtol=0.02, atol=0.02)


@pytest.mark.sweep(by=lambda layout: {"one"})
@pytest.mark.parametrize(
    "layout", [LAYOUTS["sinks"](LENGTH), None, LayoutByLength("local(window=20)")], ids=["layout", "dense", "spec"]
)
def test_a_compiled_layer_decodes_with_few_graphs(layout: Any) -> None:
    """Not one graph for each step."""
    made, x = layer(layout), tokens()
    expected = made(x)
    torch._dynamo.utils.counters.clear()
    compiled, cache = torch.compile(made, backend="eager"), made.new_cache(2, LENGTH)
    with torch.no_grad():
        outs = [compiled(part, cache=cache) for part in x.split([60, *[1] * 30], dim=1)]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-10, atol=1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 10


# ---- what is refused ----


def used(length: int = 80) -> tuple[SelfAttention, KVCache]:
    made = layer()
    cache = made.new_cache(2, LENGTH)
    with torch.no_grad():
        made(tokens(length=length), cache=cache)
    return made, cache


def step(x: Any = None, layer: SelfAttention | None = None, **call: Any) -> None:
    made, cache = used()
    before = cache.k.clone()
    with torch.no_grad():
        try:
            (layer or made)(tokens(length=1) if x is None else x, **{"cache": cache, **call})
        finally:
            assert torch.equal(cache.k, before)


def with_gradients() -> None:
    made = layer()
    made(tokens(), cache=made.new_cache(2, LENGTH))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: step(tokens(length=11)), ValueError, "room for max_length=90 tokens and holds 80, but got 11 more"),
    (lambda: step(tokens(3, 1)), ValueError, r"the cache is for batch=2, got an input of batch 3: .*new_cache\(3"),
    (lambda: step(tokens(0, 1)), ValueError, "got an input of batch 0, which needs no cache"),
    (lambda: step(kv_lengths=torch.tensor([1, 1])), ValueError, "kv_lengths must be None with a cache"),
    (lambda: step(layer=layer()), ValueError, "holds the keys of another layer"),
    (lambda: step(layer=layer(kv_heads=4)), ValueError, r"k must have shape \(batch=2, kv_heads=2, tokens, head_dim=8"),
    (lambda: step(layer=layer().float(), x=tokens(2, 1).float()), ValueError, "k must be torch.float64 on cpu"),
    (lambda: step(cache=[]), TypeError, "cache must be a KVCache, as layer.new_cache"),
    (with_gradients, ValueError, r"holds no gradients, but gradients are enabled and k needs one: .*torch.no_grad\(\)"),
    (lambda: layer(causal=False).new_cache(1, 5), ValueError, "needs a causal layer, .*layout is None"),
    (
        lambda: layer(LAYOUTS["longformer"](LENGTH), causal=False).new_cache(1, 5),
        ValueError,
        "a cache needs a causal layer, .*query 0 attends to key 1, .*causal=True",
    ),
    (
        lambda: decoded(layer(LAYOUTS["local"], causal=False), tokens(), [LENGTH]),
        ValueError,
        "a cache needs a causal layer, .*query 0 attends to key 1",
    ),
    (lambda: layer(LAYOUTS["local"](50)).new_cache(1, 51), ValueError, "layout must cover all 51 tokens.*got 50 x 50"),
    (lambda: KVCache(0, 5, 1, 8), ValueError, "batch must be 1 or more, got 0"),
    (lambda: KVCache(1, 5.0, 1, 8), TypeError, "max_length must be an int, got 5.0"),  # type: ignore[arg-type]
    (lambda: KVCache(1, 5, 1, 8, dtype=torch.int32), TypeError, "dtype must be a floating torch.dtype"),
    (lambda: used()[1].truncate(81), ValueError, "length must be from 0 to 80, the tokens in the cache, got 81"),
    (lambda: used()[1].truncate(True), TypeError, "length must be an int, got True"),
    (
        lambda: KVCache(1, 5, 1, 8).append(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 3, 8)),
        ValueError,
        "k and v must have one shape",
    ),
    (lambda: KVCache(1, 5, 1, 8).append([0.0], None), TypeError, "k must be a torch.Tensor, got list"),  # type: ignore
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Before the cache changes."""
    with pytest.raises(error) as said:
        call()
    assert re.search(message, str(said.value), flags=re.DOTALL), said.value


def test_layouts_on_a_device_are_cropped_on_the_host() -> None:
    layout = LAYOUTS["local"](LENGTH)
    assert layout is not None and room._on_host(layout) == layout and room._on_host(layout).device.type == "cpu"
