"""Models of transformers with a layout, against their own attention with the same mask spelled out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, huggingface
from blocksparse_flash.huggingface import model_hooks
from tests.support.transformers_models import (
    FAMILIES,
    LAYOUT,
    LENGTH,
    PALIGEMMA,
    UNDROPPED,
    VOCABULARY,
    added,
    assert_equal,
    attends,
    ids,
    layout_of,
    logits_and_gradients,
    model,
    padded,
    spelled_out,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_those_of_the_mask(family: str, how: str) -> None:
    causal = FAMILIES[family][2]
    mask = spelled_out(attends, torch.ones(2, LENGTH, dtype=torch.bool), causal=causal)
    theirs = logits_and_gradients(model(family, how), input_ids=ids(), attention_mask=added(mask))
    ours = logits_and_gradients(model(family, "blocksparse", LAYOUT), input_ids=ids())
    assert_equal(ours, theirs, how)


def test_a_wrong_mask_is_seen() -> None:
    """The comparison fails if one pair of one query is missing."""
    mask = spelled_out(attends, torch.ones(2, LENGTH, dtype=torch.bool), causal=True)
    mask[1, 0, 60, 2] = False
    theirs = logits_and_gradients(model("Llama", "sdpa"), input_ids=ids(), attention_mask=added(mask))
    ours = logits_and_gradients(model("Llama", "blocksparse", LAYOUT), input_ids=ids())
    with pytest.raises(AssertionError, match="logits"):
        assert_equal(ours, theirs, "sdpa")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_layout_attention_is_the_models_own(family: str) -> None:
    theirs = logits_and_gradients(model(family, "sdpa"), input_ids=ids())
    ours = logits_and_gradients(model(family, "blocksparse"), input_ids=ids())
    assert_equal(ours, theirs, "sdpa")


def test_encoders_and_decoders_are_dense_over_what_is_no_padding() -> None:
    """BART has three attentions; keys of the cross-attention are padded, queries are not."""
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": VOCABULARY, "pad_token_id": 0}
    family = "BartForConditionalGeneration", {**sizes, "max_position_embeddings": LENGTH, "decoder_start_token_id": 2}
    inputs = {"input_ids": ids(4), "attention_mask": padded(), "decoder_input_ids": ids(4, 30)}
    theirs = logits_and_gradients(model(family, "sdpa"), **inputs)
    assert_equal(logits_and_gradients(model(family, "blocksparse"), **inputs), theirs, "sdpa")
    with pytest.raises(ValueError, match="does not say which attentions"):
        model(family, "blocksparse", LAYOUT)(**inputs)


def test_models_that_look_attention_up_are_known() -> None:
    """As the README says."""
    names = [name for name, _, _ in FAMILIES.values()] + ["ViTForImageClassification", "GptOssForCausalLM"]
    assert all(getattr(transformers, name).is_backend_compatible() for name in names)
    assert not transformers.XLNetLMHeadModel.is_backend_compatible()


def test_arguments_without_a_meaning_for_attention_pass() -> None:
    """GOT-OCR2 passes logits_to_keep to every layer."""
    made = model("Llama", "blocksparse", LAYOUT)
    assert torch.equal(made.model(ids(), logits_to_keep=0).last_hidden_state, made.model(ids()).last_hidden_state)


def test_a_forward_that_fails_keeps_its_error() -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    with pytest.raises(IndexError):
        made(ids() + VOCABULARY)
    assert not model_hooks._running.forwards
    made(ids())


def test_masks_that_one_model_hands_to_another_are_kept() -> None:
    """PaliGemma has a prefix whose tokens attend to all of it."""
    prefix = torch.ones(2, LENGTH, dtype=torch.long)
    prefix[:, :20] = 0
    mask = spelled_out(attends, torch.ones(2, LENGTH, dtype=torch.bool), causal=False)
    for q in range(LENGTH):
        mask[..., q, max(q + 1, 20 if q < 20 else 0) :] = False
    inputs = {"input_ids": ids().clamp(max=VOCABULARY - 2), "token_type_ids": prefix}
    theirs = logits_and_gradients(model(PALIGEMMA, "eager"), input_ids=inputs["input_ids"], attention_mask=added(mask))
    made = model(PALIGEMMA, "blocksparse")
    made.config.text_config.attention_layout = LAYOUT
    assert_equal(logits_and_gradients(made, **inputs), theirs, "eager")
    for length, batch in ((LENGTH - 1, 2), (LENGTH, 1)):
        with pytest.raises(ValueError, match=r"the mask that another model made, of \(2, 1, 72, 72\)"):
            huggingface.attention_mask(
                batch,
                length,
                length,
                mask_function=transformers.masking_utils.causal_mask_function,
                attention_mask=huggingface.Mask(None, True, "causal", shape=(2, 1, LENGTH, LENGTH)),
            )


def test_vision_transformers_have_a_layout_over_patches() -> None:
    """17 tokens: the class token, and 4 x 4 patches. ViT requests no mask."""
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8,
        "patch_size": 2, **UNDROPPED,
    }  # fmt: skip
    family = "ViTForImageClassification", sizes
    pictures = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = spelled_out(attends, torch.ones(1, 17, dtype=torch.bool), causal=False)

    dense = model(family, "sdpa")
    for module in dense.modules():
        if type(module).__name__ == "ViTAttention":
            module.register_forward_pre_hook(lambda module, arguments: (arguments[0], added(mask)))
    theirs = logits_and_gradients(dense, pixel_values=pictures)
    ours = logits_and_gradients(model(family, "blocksparse", layout_of(attends, 17)), pixel_values=pictures)
    assert_equal(ours, theirs, "sdpa")


def test_decoders_become_encoders_with_their_layout() -> None:
    mask = spelled_out(attends, torch.ones(2, LENGTH, dtype=torch.bool), causal=False)
    theirs = logits_and_gradients(model("Llama", "sdpa"), input_ids=ids(), attention_mask=added(mask))
    ours = logits_and_gradients(
        model("Llama", "blocksparse", LAYOUT), input_ids=ids(), is_causal=False, use_cache=False
    )
    assert_equal(ours, theirs, "sdpa")


def test_each_head_has_its_own_layout() -> None:
    """One mask per query head; two query heads share a KV head."""
    functions = [attends, lambda q, kv: q - kv < 5, lambda q, kv: kv % 3 == 0 or q == kv, lambda q, kv: True]
    layout = BlockLayout.stack_heads([layout_of(function) for function in functions])
    everywhere = torch.ones(1, LENGTH, dtype=torch.bool)
    mask = torch.cat([spelled_out(function, everywhere, causal=True) for function in functions], dim=1)
    theirs = logits_and_gradients(
        model("Llama", "sdpa"), input_ids=ids(), attention_mask=added(mask.expand(2, -1, -1, -1))
    )
    assert_equal(logits_and_gradients(model("Llama", "blocksparse", layout), input_ids=ids()), theirs, "sdpa")


def test_shorter_inputs_take_the_first_rows() -> None:
    mask = spelled_out(attends, torch.ones(2, 41, dtype=torch.bool), causal=True)
    theirs = logits_and_gradients(model("Llama", "sdpa"), input_ids=ids(2, 41), attention_mask=added(mask))
    assert_equal(logits_and_gradients(model("Llama", "blocksparse", LAYOUT), input_ids=ids(2, 41)), theirs, "sdpa")


def test_a_specification_is_built_for_the_longest_input() -> None:
    """The keys of a token do not depend on the input's length, not even for random."""
    text = "local(window=9, block_size=16) | random(density=0.3, seed=1, block_size=16)"
    made = model("Llama", "blocksparse", text)
    same = model("Llama", "blocksparse", masks.build(text, LENGTH))
    for length in (50, LENGTH):
        assert torch.equal(made(ids(1, length)).logits, same(ids(1, length)).logits)


def test_a_specification_is_saved_with_the_model(tmp_path: Any) -> None:
    """A model loaded without blocksparse attends to all keys and warns."""
    made = model("Llama", "blocksparse", "local(window=9, block_size=16)")
    made.save_pretrained(tmp_path)
    dense = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM ignores config\.attention_layout: its attn_implementation is 'sdpa'"
    ):
        dense(ids())
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="blocksparse", dtype=torch.float64
    )
    assert torch.equal(again(ids()).logits, made(ids()).logits)
