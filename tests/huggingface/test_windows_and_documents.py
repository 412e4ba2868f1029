"""Sliding windows, packed documents and mask functions of models, beside a layout."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import BlockLayout, layout_crops, packed
from blocksparse_flash.huggingface import mask_builder
from blocksparse_flash.packed import PackedLayout
from tests.support.transformers_models import (
    FAMILIES,
    LAYOUT,
    LENGTH,
    added,
    assert_equal,
    attends,
    ids,
    logits_and_gradients,
    model,
    padded,
    positions,
    spelled_out,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_sliding_windows_are_kept(layout: BlockLayout | None, is_padded: bool) -> None:
    """Layout and window are intersected; padding between tokens counts for the window, as in transformers."""
    is_token = padded() if is_padded else torch.ones(4, LENGTH, dtype=torch.bool)
    function = attends if layout is not None else lambda q, kv: True
    inputs = {"input_ids": ids(4), "position_ids": positions(is_token)}
    mask = spelled_out(function, is_token, causal=True, window=20)
    theirs = logits_and_gradients(model("Mistral", "sdpa"), is_token, **inputs, attention_mask=mask)
    made = model("Mistral", "blocksparse", layout, sliding_window=20)
    assert_equal(logits_and_gradients(made, is_token, **inputs, attention_mask=is_token), theirs, "sdpa")


def test_windows_are_known_and_built_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built once, not pair by pair in each forward."""
    monkeypatch.setattr(mask_builder, "_by_pairs", lambda *arguments: pytest.fail("pairs were looked up"))
    layout_crops.built.cache_clear()
    made = model("Mistral", "blocksparse", sliding_window=20)
    cache = transformers.DynamicCache(config=made.config)
    for part in ids(1, 40).split([30, *[1] * 10], dim=1):
        made(part, past_key_values=cache)
    assert layout_crops.built.cache_info().misses == 1


def test_windows_in_some_layers_only() -> None:
    """The second layer has a window: one-sided in Qwen3, two-sided in ModernBERT."""
    everywhere = torch.ones(2, LENGTH, dtype=torch.bool)
    changes = {
        "Qwen3": {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "ModernBert": {"local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]},
    }
    for family, said in changes.items():
        both = 8 if family == "ModernBert" else None
        causal = FAMILIES[family][2]
        mapping = {
            "full_attention": spelled_out(attends, everywhere, causal=causal),
            "sliding_attention": spelled_out(
                attends, everywhere, causal=causal, window=None if both else 20, both=both
            ),
        }
        theirs = logits_and_gradients(model(family, "sdpa", **said), input_ids=ids(), attention_mask=mapping)
        ours = logits_and_gradients(model(family, "blocksparse", LAYOUT, **said), input_ids=ids())
        assert_equal(ours, theirs, "sdpa")


def test_token_by_token_where_the_cache_forgets() -> None:
    """Mistral's cache keeps only the last keys of its window."""
    made = model("Mistral", "blocksparse", LAYOUT, sliding_window=20)
    cache, parts = transformers.DynamicCache(config=made.config), []
    for part in ids().split([30, 5, *[1] * (LENGTH - 35)], dim=1):
        parts.append(made(part, past_key_values=cache).logits)
    assert cache.layers[0].keys.shape[2] < 30
    torch.testing.assert_close(torch.cat(parts, dim=1), made(ids()).logits)


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
def test_token_by_token_where_the_cache_forgets_padding(layout: BlockLayout | None) -> None:
    made, is_token = model("Mistral", "blocksparse", layout, sliding_window=20), padded()
    together = made(ids(4), attention_mask=is_token, position_ids=positions(is_token)).logits
    cache, done = transformers.DynamicCache(config=made.config), 0
    for part in ids(4).split([26, 7, *[1] * (LENGTH - 33)], dim=1):
        here = slice(done, done + part.shape[1])
        done = here.stop
        options = {"attention_mask": is_token[:, :done], "position_ids": positions(is_token)[:, here]}
        said = made(part, past_key_values=cache, **options).logits
        torch.testing.assert_close(said[is_token[:, here]], together[:, here][is_token[:, here]])


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
def test_packed_sequences_stay_apart(layout: BlockLayout | None) -> None:
    """Documents begin where position_ids restart; the layout covers the whole pack."""
    begins = [0, 20, 45]
    place = torch.tensor([[slot - max(b for b in begins if b <= slot) for slot in range(LENGTH)]] * 2)
    document = [max(b for b in begins if b <= slot) for slot in range(LENGTH)]

    def within(q: int, kv: int) -> bool:
        return document[q] == document[kv] and (layout is None or attends(q, kv))

    inputs = {"input_ids": ids(), "position_ids": place, "use_cache": False}
    mask = spelled_out(within, torch.ones(2, LENGTH, dtype=torch.bool), causal=True)
    theirs = logits_and_gradients(model("Llama", "sdpa"), **inputs, attention_mask=added(mask))
    ours = logits_and_gradients(model("Llama", "blocksparse", layout), **inputs)
    assert_equal(ours, theirs, "sdpa")


@pytest.mark.parametrize("is_on_device", [False, True], ids=["host", "kernels"])
def test_packed_sequences_need_no_pairs_on_the_host(is_on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in layers with a sliding window; each document gives what it gives alone."""
    monkeypatch.setattr(mask_builder, "_by_pairs", lambda *_: pytest.fail("pairs were evaluated"))
    made_by: list[PackedLayout] = []
    if is_on_device:
        pytest.importorskip("triton", reason="needs Triton")
        if torch.cuda.is_available():
            pytest.skip("needs Triton's interpreter: the tensors are on the CPU")
        monkeypatch.setattr(packed, "can_build", lambda _: True)
        make = PackedLayout.of
        monkeypatch.setattr(PackedLayout, "of", lambda *arguments: made_by.append(make(*arguments)) or made_by[-1])
    lengths = [20, 25, LENGTH - 45]
    place = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = ids(1)
    made = model("Mistral", "blocksparse", sliding_window=16)
    together = made(tokens, position_ids=place, use_cache=False).logits
    alone = [made(part, use_cache=False).logits for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))
    # one mask for all layers
    assert len(made_by) == (1 if is_on_device else 0)


def test_masks_that_functions_add_are_looked_up_pair_by_pair() -> None:
    """An or_mask_function may take one pair at a time."""
    from transformers.masking_utils import create_causal_mask

    made = model("Llama", "blocksparse", LAYOUT)
    mask = create_causal_mask(
        made.config,
        torch.zeros(2, LENGTH, 16),
        padded()[:2],
        None,
        # works for one pair only: for many, .max() would mix them
        or_mask_function=lambda batch, head, q, kv: (torch.stack([q, kv]).amax() < 40) & (batch == 1),
    )

    def spoken(b: int, q: int, kv: int) -> bool:
        return kv <= q or (b == 1 and q < 40 and kv < 40)

    everything = spelled_out(attends, padded()[:2], causal=False)
    expected = [[[spoken(b, q, kv) for kv in range(LENGTH)] for q in range(LENGTH)] for b in range(2)]
    found = mask.layout.to_dense() & padded()[:2, None, :, None]
    assert torch.equal(found, everything & torch.tensor(expected)[:, None])
