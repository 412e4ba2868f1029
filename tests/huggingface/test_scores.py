"""Numbers that models add to scores, sinks, and capped scores, with a layout and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocksparse_flash import BlockLayout, huggingface
from tests.support.transformers_models import (
    GEMMA2,
    GPT_OSS,
    GRANITE_SWA,
    LAYOUT,
    LENGTH,
    SIZES,
    SWIN,
    T5,
    UNDROPPED,
    added,
    assert_equal,
    attends,
    ids,
    layout_of,
    logits_and_gradients,
    model,
    positions,
    spelled_out,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("family", [T5, SWIN], ids=["T5", "Swin"])
def test_numbers_that_models_add_to_scores_are_added(family: tuple[str, dict[str, Any]]) -> None:
    """With padding on the left of one sequence, and on the right of the other."""
    inputs: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64)}
    if family is T5:
        where = torch.ones(2, 50, dtype=torch.int64)
        where[0, :9] = where[1, 40:] = 0
        inputs = {"input_ids": ids(2, 50), "attention_mask": where, "decoder_input_ids": ids(2, 30)}
    theirs = logits_and_gradients(model(family, "eager"), **inputs)
    assert any("bias" in name and "relative" in name for name in theirs)
    assert_equal(logits_and_gradients(model(family, "blocksparse"), **inputs), theirs, "eager")


def test_a_bias_that_a_model_adds_to_its_mask_is_added_to_the_scores_of_a_layout() -> None:
    """BEiT has one for all layers, and one more for each. 17 tokens: the class token, and 4 x 4 patches."""
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
        "patch_size": 2, "use_relative_position_bias": True, "use_shared_relative_position_bias": True,
        "drop_path_rate": 0.0, **UNDROPPED,
    }  # fmt: skip
    family, layout = ("BeitModel", sizes), layout_of(attends, 17)
    pictures = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = spelled_out(attends, torch.ones(1, 17, dtype=torch.bool), causal=False)
    theirs = model(family, "sdpa")(pictures, attention_mask=added(mask)).last_hidden_state
    ours = model(family, "blocksparse", layout)(pictures).last_hidden_state
    # interpolated biases are float32
    torch.testing.assert_close(ours.float(), theirs.float())


def test_a_bias_that_a_model_adds_to_masks_that_differ_by_layer_is_added_in_each() -> None:
    generator, module = torch.Generator().manual_seed(5), torch.nn.Module()
    q, bias = (torch.randn(1, 2, 4, width, generator=generator, dtype=torch.float64) for width in (8, 4))
    dense = huggingface.Mask(None, False, "bidirectional")
    for layer, causal in enumerate((False, True)):
        module.layer_idx = layer
        mask = dense._replace(of_layers=(dense, huggingface.Mask(None, True, "causal")))
        ours, _ = huggingface.attention_function(module, q, q, q, bias / 2 + mask + bias / 2)
        attends_to = torch.ones(4, 4, dtype=torch.bool).tril(0 if causal else 4)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, bias.masked_fill(~attends_to, -torch.inf))
        torch.testing.assert_close(ours.transpose(1, 2), theirs)


def test_t5_generates_what_it_generates_with_its_own_attention() -> None:
    found = [
        model(T5, how).eval().generate(ids(2, 40), max_new_tokens=5, do_sample=False)
        for how in ("eager", "blocksparse")
    ]
    assert torch.equal(*found)


def test_a_float_mask_is_added_to_the_scores_of_a_layout() -> None:
    """LayoutLM makes a mask of keys, a model of mine one of pairs."""
    where = torch.ones(1, LENGTH, dtype=torch.int64)
    where[0, 50:] = 0
    for mask in (where, added(spelled_out(attends, where.bool(), causal=True))):
        family = ("LayoutLMModel", {**SIZES, **UNDROPPED}) if mask is where else "Llama"
        results = [model(family, how)(ids(1), attention_mask=mask)[0][:, :50] for how in ("sdpa", "blocksparse")]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
@pytest.mark.parametrize("family", [GPT_OSS, GEMMA2], ids=["GptOss", "Gemma2"])
def test_sinks_and_capped_scores_token_by_token(family: tuple[str, dict[str, Any]], layout: BlockLayout | None) -> None:
    """Left padding and a cache that drops keys outside the window give the result of each sequence alone."""
    made = model(family, "blocksparse", layout).float().eval()
    tokens, is_token = ids(2, 50), torch.ones(2, 50, dtype=torch.bool)
    is_token[0, :9] = False
    cache, parts = transformers.DynamicCache(config=made.config), []
    for begin, end in [(0, 30), *((at, at + 1) for at in range(30, 50))]:
        place = positions(is_token)[:, begin:end]
        inputs = {"attention_mask": is_token[:, :end], "position_ids": place, "past_key_values": cache}
        parts.append(made(tokens[:, begin:end], **inputs).logits)
    together = torch.cat(parts, dim=1)
    for batch, first in enumerate((9, 0)):
        alone = made(tokens[batch : batch + 1, first:], attention_mask=torch.ones(1, 50 - first)).logits[0]
        torch.testing.assert_close(together[batch, first:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [GPT_OSS, GRANITE_SWA], ids=["GptOss", "GraniteSWA"])
def test_sinks_take_their_share(family: tuple[str, dict[str, Any]]) -> None:
    """They have a sink logit per head, and a window in the first layer."""
    if not hasattr(transformers, family[0]):
        pytest.skip(f"needs a transformers that has {family[0]}")
    everywhere = torch.ones(2, LENGTH, dtype=torch.bool)
    mapping = {
        "full_attention": added(spelled_out(attends, everywhere, causal=True)).float().clamp(min=-1e30),
        "sliding_attention": added(spelled_out(attends, everywhere, causal=True, window=20)).float().clamp(min=-1e30),
    }
    # experts have no float64
    theirs = logits_and_gradients(model(family, "eager").float(), input_ids=ids(), attention_mask=mapping)
    ours = logits_and_gradients(model(family, "blocksparse", LAYOUT).float(), input_ids=ids())
    sinks = [gradient for name, gradient in ours.items() if "sinks" in name]
    assert len(sinks) == 2 and all(gradient.any() for gradient in sinks)
    assert_equal(ours, theirs, "eager")


def test_scores_are_capped() -> None:
    """Gemma 2 caps scores in all layers."""
    family = GEMMA2
    everywhere = torch.ones(2, LENGTH, dtype=torch.bool)
    mapping = {
        "full_attention": added(spelled_out(attends, everywhere, causal=True)),
        "sliding_attention": added(spelled_out(attends, everywhere, causal=True, window=20)),
    }
    theirs = logits_and_gradients(model(family, "eager"), input_ids=ids(), attention_mask=mapping)
    ours = logits_and_gradients(model(family, "blocksparse", LAYOUT), input_ids=ids())
    assert_equal(ours, theirs, "eager")
    uncapped = model(family, "blocksparse", LAYOUT, attn_logit_softcapping=None)
    assert not torch.allclose(logits_and_gradients(uncapped, input_ids=ids())["logits"], ours["logits"])
