"""Models of transformers with a layout, against their eager attention with the same mask as a dense additive mask.

Every mask is spelled out pair by pair, in Python. Models are small and randomly initialized, in float64; transformers'
eager attention takes its softmax in float32, its sdpa does not, so the two are held to the closeness of those types.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import masks
from blocksparse_flash import BlockLayout, huggingface, layout_crops, packed
from blocksparse_flash.huggingface import attention, mask_builder, model_hooks
from blocksparse_flash.packed import PackedLayout

transformers = pytest.importorskip("transformers", reason="needs transformers")

LENGTH = 72
VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

# model, config, is causal
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, True),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 4}, True),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": None}, True),
    "GPT2": ("GPT2LMHeadModel", GPT2, True),
    "Bert": ("BertForMaskedLM", {**SIZES, **UNDROPPED}, False),
    "ModernBert": ("ModernBertForMaskedLM", {**SIZES, "pad_token_id": 0, "local_attention": 2 * LENGTH}, False),
}
# with sinks, and windows in some of their layers
WINDOWS = {**GROUPED, "sliding_window": 20}
GPT_OSS = "GptOssForCausalLM", {**WINDOWS, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
GRANITE_SWA = "GraniteSWAForCausalLM", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}
# with capped scores
GEMMA2 = "Gemma2ForCausalLM", {**WINDOWS, "head_dim": 4, "attn_logit_softcapping": 0.02}
Attends = Callable[[int, int], bool]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    huggingface.register()
    yield
    transformers.logging.set_verbosity(level)


def attends(q: int, kv: int) -> bool:
    """A mask without translation symmetry, with far pairs, near pairs and global keys."""
    return abs(q - kv) < 9 or kv < 3 or (5 * q + 3 * kv) % 13 == 0


def layout_of(function: Attends, length: int = LENGTH) -> BlockLayout:
    rows = [[function(q, kv) for kv in range(length)] for q in range(length)]
    return BlockLayout.from_dense(torch.tensor(rows), block_size=16)


LAYOUT = layout_of(attends)


def spelled_out(
    function: Attends, is_token: Tensor, *, causal: bool, window: int | None = None, both: int | None = None
) -> Tensor:
    """bool (batch, 1, slots, slots): positions count tokens, windows count slots."""
    batch, slots = is_token.shape
    mask = torch.zeros(batch, 1, slots, slots, dtype=torch.bool)
    for b in range(batch):
        position = [int(is_token[b, :slot].sum()) for slot in range(slots)]
        for q in range(slots):
            for kv in range(slots):
                mask[b, 0, q, kv] = (
                    bool(is_token[b, q])
                    and bool(is_token[b, kv])
                    and function(position[q], position[kv])
                    and (kv <= q or not causal)
                    and (window is None or q - kv < window)
                    and (both is None or abs(q - kv) <= both)
                )
    return mask


def model(family: str | tuple[str, dict[str, Any]], how: str, layout: Any = None, **changes: Any) -> Any:
    """A model in float64 with the weights of its family, with attn_implementation `how`."""
    name, sizes = FAMILIES[family][:2] if isinstance(family, str) else family
    kind = getattr(transformers, name)
    config = kind.config_class(**{**sizes, **changes})
    config.attention_layout = layout
    config._attn_implementation = how
    torch.manual_seed(0)
    made = kind(config).double()
    for parameter in made.parameters():
        # zero biases would hide errors
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return made


def ids(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


def added(mask: Tensor) -> Tensor:
    """The additive mask that transformers' eager attention takes."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def logits_and_gradients(made: Any, where: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
    """Results by name. Only logits `where` there is a token count, for gradients too."""
    logits = made(**inputs).logits
    logits = logits if where is None else logits[where]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    (logits * weights).sum().backward()
    return {
        "logits": logits.detach(),
        **{name: p.grad for name, p in made.named_parameters() if p.grad is not None},
    }


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], how: str) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, expected in theirs.items():
        # relative to the largest value, in the dtype of the reference
        scale = max(float(expected.abs().max()), 1.0)
        dtype = torch.float32 if how == "eager" else torch.float64
        torch.testing.assert_close(
            (ours[name] / scale).to(dtype), (expected / scale).to(dtype), msg=lambda said, name=name: f"{name}: {said}"
        )


# ---- layouts ----


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


BLOOM = "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 4}
MPT = "MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 1, "n_heads": 4, "max_seq_len": 64}


@pytest.mark.parametrize(
    ("family", "where"),
    [
        (BLOOM, r"BloomAttention of BloomForCausalLM .*\(torch's softmax\)"),
        (MPT, r"MptModel of MptForCausalLM .*\(\.to\)"),
        (("MegatronBertModel", SIZES), r"MegatronBertSelfAttention of MegatronBertModel .*\(torch's softmax\)"),
        (("MPNetModel", SIZES), r"MPNetSelfAttention of MPNetModel .*\(torch's softmax\)"),
    ],
    ids=["Bloom", "Mpt", "MegatronBert", "MPNet"],
)
def test_models_that_compute_with_the_mask_are_refused_by_name(family: tuple[str, dict[str, Any]], where: str) -> None:
    """If BLOOM or MPT ever look up their attention by name, this fails, and their ALiBi slopes must be read."""
    for layout in (LAYOUT, None):
        with pytest.raises((AttributeError, TypeError), match=rf"{where}.*attn_implementation='sdpa' or 'eager'"):
            model(family, "blocksparse", layout)(ids(1, 30), attention_mask=torch.ones(1, 30))


OPENAI_GPT = "OpenAIGPTLMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 4}
XLNET = "XLNetModel", {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 1, "n_head": 4, "d_inner": 24}
DEBERTA = "DebertaV2Model", SIZES


# transformers 5.10 scripts parts of DeBERTa when it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", [OPENAI_GPT, XLNET, DEBERTA], ids=["OpenAIGPT", "XLNet", "DebertaV2"])
def test_models_that_ignore_the_layout_are_refused_by_name(family: tuple[str, dict[str, Any]]) -> None:
    """At the first forward: a layout may be set before the model is made and after."""
    for early, late in ((LAYOUT, LAYOUT), (None, LAYOUT)):
        made = model(family, "blocksparse", early).eval()
        made.config.attention_layout = late
        message = r"\w+ ignored config\.attention_layout: none of its layers called.*attn_implementation='sdpa'"
        with pytest.raises(ValueError, match=message):
            made(ids(1, 30))
        made.config.attention_layout = None
        made(ids(1, 30))


def test_compiled_models_that_ignore_the_layout_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"OpenAIGPTModel ignored config\.attention_layout"):
        torch.compile(model(OPENAI_GPT, "blocksparse", LAYOUT), backend="eager")(ids(1, 30))


@pytest.mark.parametrize(
    ("family", "where"),
    [
        (("GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 1, "num_heads": 4,
            "attention_types": [[["global"], 1]]}), "GPTNeoModel .*GPT_NEO_ATTENTION_CLASSES, of eager"),
        (("FalconForCausalLM", SIZES), "FalconModel .*FALCON_ATTENTION_CLASSES, of eager, sdpa"),
    ],
    ids=["GPTNeo", "Falcon"],
)  # fmt: skip
def test_models_that_choose_among_attentions_of_their_own_are_refused_by_name(
    family: tuple[str, dict[str, Any]], where: str
) -> None:
    with pytest.raises(ValueError, match=rf"{where}.*attn_implementation='sdpa' or 'eager'"):
        model(family, "blocksparse")
    model(family, "eager")(ids(1, 30))


# T5 passes its bias by distance beside a Mask, Swin and LayoutLM a float mask
T5 = "T5ForConditionalGeneration", {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
SWIN = "SwinForImageClassification", {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "drop_path_rate": 0.0, **UNDROPPED,
}  # fmt: skip


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


def test_keys_that_the_model_adds_are_refused_by_name() -> None:
    """DeepSeek V4 also attends to summaries, but requests a 4 x 4 mask."""
    q, mask = torch.zeros(1, 1, 4, 8), huggingface.Mask(None, True, "causal", shape=(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"with 4 queries to 5 keys, but its model asked for a mask of 4 x 4"):
        huggingface.attention_function(torch.nn.Module(), q, q.new_zeros(1, 1, 5, 8), q.new_zeros(1, 1, 5, 8), mask)
    with pytest.raises(
        ValueError, match=r"attends with keys of 1 heads and 4 positions, but values of 2 and 4: use a model"
    ):
        huggingface.attention_function(torch.nn.Module(), q, q, q.new_zeros(1, 2, 4, 8), mask)


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_model_made_before_and_wrapped_later_is_seen() -> None:
    made = model(DEBERTA, "blocksparse", LAYOUT)
    for module in made.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
        vars(module).pop("_blocksparse_flash_watched", None)
    made(ids(1, 30))
    torch.nn.Sequential(made)
    with pytest.raises(ValueError, match="DebertaV2Model ignored"):
        made(ids(1, 30))


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_layout_that_another_attention_ignores_is_warned_of_once(how: str, recwarn: pytest.WarningsRecorder) -> None:
    made = model("Llama", how, LAYOUT)
    assert not recwarn
    message = rf"LlamaForCausalLM ignores config.attention_layout: its attn_implementation is '{how}'.*_layout = None"
    with pytest.warns(UserWarning, match=message) as said:
        made(ids())
    assert len(said) == 1
    made(ids())
    made.config.attention_layout = None
    made(ids())
    assert not recwarn
    made.config.attention_layout = LAYOUT
    made.set_attn_implementation("blocksparse")
    assert torch.equal(made(ids()).logits, model("Llama", "blocksparse", LAYOUT)(ids()).logits)
    assert not recwarn


def test_one_graph_without_the_layout_is_refused() -> None:
    made = model("Llama", "sdpa", LAYOUT, num_hidden_layers=1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"config\.attention_layout is ignored"):
        torch.compile(made, backend="eager", fullgraph=True)(ids())


# the outer model builds the mask and passes it to Gemma
PICTURES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
}
PALIGEMMA = (
    "PaliGemmaForConditionalGeneration",
    {
        "text_config": {"model_type": "gemma", **GROUPED, "head_dim": 4},
        "vision_config": {"model_type": "siglip_vision_model", **PICTURES, "patch_size": 4},
        "image_token_index": VOCABULARY - 1,
    },
)


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


def test_a_layout_in_the_config_of_the_wrong_part_is_refused() -> None:
    inputs = ids().clamp(max=VOCABULARY - 2)
    with pytest.raises(
        ValueError, match=r"is in its PaliGemmaConfig.*reads GemmaConfig; set config\.text_config\.attention_layout"
    ):
        model(PALIGEMMA, "blocksparse", LAYOUT)(inputs)
    made = model(PALIGEMMA, "blocksparse")
    made.model.vision_tower = torch.nn.Identity()
    made.config.vision_config.attention_layout = LAYOUT
    with pytest.raises(
        ValueError, match=r"ignores config\.vision_config\.attention_layout: no module of it has a Siglip"
    ):
        made(inputs)
    made = model(PALIGEMMA, "sdpa")
    made.config.text_config.attention_layout = LAYOUT
    with pytest.warns(UserWarning, match=r"GemmaModel ignores config\.attention_layout"):
        made(inputs)


def test_masks_are_no_tensors() -> None:
    """Every computation with a Mask raises; passing it on does not."""
    mask, scores = huggingface.Mask(None, True, "causal", shape=(2, 1, 4, 4)), torch.zeros(4, 4)
    wrong: list[Callable[[], Any]] = [
        lambda: scores + mask, lambda: mask + scores, lambda: mask + 1.0, lambda: scores.long()[None, None] + mask,
        lambda: scores[None, None].add(mask, alpha=2), lambda: scores[None, None].add_(mask),
        lambda: 1.0 - mask, lambda: mask * -1e9, lambda: ~mask,
        lambda: mask == 0,
        lambda: scores == mask, lambda: mask != 0, lambda: mask < 0, lambda: mask[:, None], lambda: mask[0],
        lambda: scores.masked_fill(mask, 0.0), lambda: torch.where(mask, scores, scores), lambda: scores.add_(mask),
        lambda: mask.to(scores), lambda: mask.dim, lambda: mask.dtype, lambda: mask.size(-1),
        lambda: mask.masked_fill(mask, 0),
        lambda: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
        lambda: torch.cat([scores, mask]), lambda: torch.ones_like(mask),
    ]  # fmt: skip
    for number, do in enumerate(wrong):
        with pytest.raises((AttributeError, TypeError), match="computes with the attention mask itself"):
            pytest.fail(f"{number}: {do()!r}")
    assert (mask.ndim, mask.shape) == (4, (2, 1, 4, 4)) and not hasattr(mask, "to") and not hasattr(mask, "meaning")
    assert copy.deepcopy(mask) == mask and mask in [mask] and hash(mask) == hash(copy.copy(mask))
    assert torch.utils._pytree.tree_map(lambda leaf: leaf, mask) == mask


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


@pytest.mark.parametrize("layout", [LAYOUT, [LAYOUT, None]])
def test_a_layout_that_cannot_be_saved_gets_a_hint(layout: Any, tmp_path: Any) -> None:
    explained = transformers.PreTrainedConfig.to_json_string
    huggingface.register()
    assert transformers.PreTrainedConfig.to_json_string is explained
    config = transformers.LlamaConfig(**GROUPED, attention_layout=layout)
    message = r"^config\.attention_layout has a BlockLayout, .* set it to a specification for masks\.build, .* to None"
    for fails in (lambda: config.save_pretrained(tmp_path), config.to_json_string):
        with pytest.raises(TypeError, match=message):
            fails()
    config.attention_layout = {1, 2}
    with pytest.raises(TypeError, match=r"^Object of type set is not JSON serializable"):
        config.to_json_string()


# ---- padding ----


def padded() -> Tensor:
    """bool (4, LENGTH): on the right, on the left, both and between tokens, none."""
    is_token = torch.ones(4, LENGTH, dtype=torch.bool)
    is_token[0, 50:] = False
    is_token[1, :23] = False
    is_token[2, :5] = is_token[2, 30:37] = is_token[2, 70:] = False
    return is_token


def positions(is_token: Tensor) -> Tensor:
    return (is_token.long().cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 4)], ids=["right", "everywhere"])
@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
def test_padding_is_as_if_it_were_not_there(family: str, rows: slice, layout: BlockLayout | None) -> None:
    is_token, causal = padded()[rows], FAMILIES[family][2]
    function = attends if layout is not None else lambda q, kv: True
    inputs = {"input_ids": ids(len(is_token)), "position_ids": positions(is_token)}
    mask = spelled_out(function, is_token, causal=causal)
    theirs = logits_and_gradients(model(family, "sdpa"), is_token, **inputs, attention_mask=mask)
    ours = logits_and_gradients(
        model(family, "blocksparse", layout), is_token, **inputs, attention_mask=is_token.long()
    )
    assert_equal(ours, theirs, "sdpa")


def test_a_padded_batch_gives_what_each_sequence_alone_gives() -> None:
    is_token = padded()
    made = model("Llama", "blocksparse", LAYOUT)
    together = made(ids(4), attention_mask=is_token, position_ids=positions(is_token)).logits
    for one, tokens, logits in zip(ids(4), is_token, together, strict=True):
        torch.testing.assert_close(logits[tokens], made(one[tokens][None]).logits[0])


def test_a_sequence_of_padding_alone_gives_numbers() -> None:
    is_token = padded()
    is_token[1] = False
    ours = logits_and_gradients(model("Llama", "blocksparse", LAYOUT), input_ids=ids(4), attention_mask=is_token)
    assert all(tensor.isfinite().all() for tensor in ours.values())


# ---- generation ----


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3"])
def test_token_by_token_is_one_forward(family: str) -> None:
    made = model(family, "blocksparse", LAYOUT)
    cache, parts = transformers.DynamicCache(config=made.config), []
    # several at once, then one by one
    for part in ids().split([20, 7, *[1] * (LENGTH - 27)], dim=1):
        parts.append(made(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), made(ids()).logits)


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


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
def test_token_by_token_with_padding_is_one_forward(layout: BlockLayout | None) -> None:
    made, is_token = model("Llama", "blocksparse", layout), padded()
    together = made(ids(4), attention_mask=is_token, position_ids=positions(is_token)).logits
    cache, done = transformers.DynamicCache(config=made.config), 0
    # of the seven in the second part, some are padding
    for part in ids(4).split([26, 7, *[1] * (LENGTH - 33)], dim=1):
        here = slice(done, done + part.shape[1])
        done = here.stop
        said = made(
            part,
            past_key_values=cache,
            attention_mask=is_token[:, :done],
            position_ids=positions(is_token)[:, here],
        ).logits
        torch.testing.assert_close(said[is_token[:, here]], together[:, here][is_token[:, here]])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_from_a_padded_batch_is_generate_from_each(options: dict[str, Any]) -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    is_token = torch.ones(2, 30, dtype=torch.long)
    is_token[0, :11] = 0
    options = {**options, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    together = made.generate(ids(2, 30), attention_mask=is_token, **options)
    for one, tokens, said in zip(ids(2, 30), is_token.bool(), together, strict=True):
        alone = made.generate(one[tokens][None], attention_mask=torch.ones(1, int(tokens.sum())), **options)[0]
        assert torch.equal(said[-16:], alone[-16:])


def test_generate_is_the_most_likely_token_of_a_full_forward() -> None:
    made = model("GPT2", "blocksparse", LAYOUT)
    said = made.generate(
        ids(1, 30), attention_mask=torch.ones(1, 30), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert torch.equal(said[0, 30:], made(said).logits[0, 29:-1].argmax(dim=-1))


def test_crops_are_made_once_for_all_layers_and_calls() -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    layout_crops._cropped.cache_clear()
    for _ in range(3):
        made(ids(1, 37))
    assert layout_crops._cropped.cache_info().misses == 1


# ---- windows, documents, sinks ----


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


# ---- training, compiling ----


def test_dropout_and_scale_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return real(*arguments, **options)

    real = attention.attention
    monkeypatch.setattr(attention, "attention", spy)
    made = model("Llama", "blocksparse", LAYOUT, attention_dropout=0.3)
    for layer in made.model.layers:
        layer.self_attn.scaling = 0.125
    made.train()(ids())
    made.eval()(ids())
    assert [options["dropout_p"] for options in asked] == [0.3, 0.3, 0.0, 0.0]
    assert {options["scale"] for options in asked} == {0.125}


def test_checkpointed_training_with_dropout_has_the_same_gradients() -> None:
    plain = model("Llama", "blocksparse", LAYOUT, attention_dropout=0.3).train()
    saving = copy.deepcopy(plain)
    # the older name, in transformers 5.16
    (getattr(saving, "activation_checkpointing_enable", None) or saving.gradient_checkpointing_enable)()
    found = []
    for made in (plain, saving):
        torch.manual_seed(5)
        found.append(logits_and_gradients(made, input_ids=ids(), use_cache=False))
    assert_equal(*found, "sdpa")


@pytest.mark.parametrize("family", ["Llama", pytest.param("Bert", marks=pytest.mark.thorough)])
def test_models_compile_in_one_graph(family: str) -> None:
    """With and without padding; the compiled model reorders tokens on the device."""
    is_token, one_layer = padded(), {"num_hidden_layers": 1}
    for tokens in (torch.ones_like(is_token), is_token):
        inputs = {"input_ids": ids(4), "attention_mask": tokens.long(), "position_ids": positions(tokens)}
        expected = logits_and_gradients(model(family, "blocksparse", LAYOUT, **one_layer), tokens, **inputs)
        compiled = torch.compile(model(family, "blocksparse", LAYOUT, **one_layer), backend="aot_eager", fullgraph=True)
        found = logits_and_gradients(compiled, tokens, **inputs)
        assert_equal({name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}, expected, "sdpa")


def test_a_compiled_model_follows_its_layout() -> None:
    """A new layout of the same shape in the config replaces the compiled one."""
    inputs = {"input_ids": ids(4), "attention_mask": padded().long(), "position_ids": positions(padded())}
    made = model("Llama", "blocksparse", LAYOUT, num_hidden_layers=1)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    before = compiled(**inputs).logits[padded()]
    made.config.attention_layout = LAYOUT & layout_of(lambda q, kv: q - kv < 9)
    after, expected = compiled(**inputs).logits[padded()], made(**inputs).logits[padded()]
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(before, after)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_one_graph_cannot_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding mask and cache transformers takes a traced batch for packed; a graph break builds the mask."""
    made, looked = model("Llama", "blocksparse", LAYOUT, num_hidden_layers=1), []
    expected = made(ids(), use_cache=False).logits
    monkeypatch.setattr(mask_builder, "_by_pairs", lambda *arguments: looked.append(arguments))
    torch.testing.assert_close(torch.compile(made, backend="aot_eager")(ids(), use_cache=False).logits, expected)
    assert not looked
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"attention_mask=torch\.ones_like"):
        torch.compile(made, backend="aot_eager", fullgraph=True)(ids(), use_cache=False)


# ---- refusals ----


def forward(made: Any, **inputs: Any) -> Any:
    return made(**{"input_ids": ids(), **inputs})


@pytest.mark.parametrize(
    ("family", "changes", "inputs", "error", "message"),
    [
        ("Llama", {}, {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH) > 0}, TypeError, "from_huggingface"),
        ("Llama", {}, {"position_bias": 30.0}, TypeError, "pair_bias must be a float tensor .* got float"),
        ("Llama", {}, {"cu_seq_lens_q": torch.tensor([0, 9])}, ValueError,
         r"cu_seq_lens_q, which is a tensor of shape \(2,\).*position_ids that restart"),
        ("Llama", {}, {"bias_of_next_year": 1}, ValueError, "bias_of_next_year, which is 1: its meaning is unknown"),
        ("Llama", {"layout": 7}, {}, TypeError, r"config\.attention_layout must be a BlockLayout.*got int"),
        ("Llama", {"layout": "lokal(window=5)"}, {}, ValueError, "local"),
        ("Llama", {"layout": layout_of(attends, 40)}, {}, ValueError,
         "has 72 tokens, but config.attention_layout is of 40"),
        ("Llama", {"layout": "local(window=5)", "max_position_embeddings": 40}, {}, ValueError,
         "built for config.max_position_embeddings = 40"),
        ("Llama", {"layout": LAYOUT.crop(0, 40)}, {}, ValueError,
         r"\(1, heads \| 1, length, length\).*got \(1, 1, 40, 72\)"),
        ("GPT2", {"layout": LAYOUT, "add_cross_attention": True}, {}, ValueError, "which attentions of a model"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    family: str, changes: dict[str, Any], inputs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        forward(model(family, "blocksparse", **changes), **inputs)


@pytest.mark.parametrize("shape", [(3, 30), (1, 30), (2, 30, 30), (30,)])
def test_masks_of_other_sequences_are_refused(shape: tuple[int, ...]) -> None:
    """Regression: without padding they were taken for no mask at all."""
    made = model("Llama", "blocksparse", LAYOUT)
    for value in (0, 1):
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, length\), .* with batch 2 as"):
            huggingface.attention_mask(
                2,
                30,
                30,
                mask_function=transformers.masking_utils.causal_mask_function,
                attention_mask=torch.full(shape, value, dtype=torch.bool),
                config=made.config,
            )


def test_a_mask_and_a_layer_that_contradict_each_other_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 8)
    mask = huggingface.Mask(None, True, "causal")
    with pytest.raises(ValueError, match="is_causal=False contradicts the mask that the model made, which is causal"):
        huggingface.attention_function(torch.nn.Module(), q, q, q, mask, is_causal=False)
    module = torch.nn.Module()
    module.config = transformers.LlamaConfig(attention_layout="causal", **SIZES)
    with pytest.raises(ValueError, match="4 queries and 5 keys, but the model made no mask"):
        huggingface.attention_function(module, q, q.new_zeros(1, 1, 5, 8), q.new_zeros(1, 1, 5, 8), None)


def test_attention_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="attn_implementation"):
        model("Llama", "blocksparse", LAYOUT)(ids(), output_attentions=True)


def test_a_window_that_only_the_layer_knows_is_refused() -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    with pytest.raises(ValueError, match="sliding_window=20 contradicts"):
        made(ids(), sliding_window=20)
    made(ids(), sliding_window=LENGTH)


# ---- layers that differ ----


def by_layer(functions: list[Attends], is_token: Tensor) -> list[Tensor]:
    return [spelled_out(function, is_token, causal=True) for function in functions]


def local(q: int, kv: int) -> bool:
    return abs(q - kv) <= 5


def replaced_layer_by_layer(made: Any, masks_of_layers: list[Tensor]) -> Any:
    """A model of transformers' own attention whose layers get different dense masks."""
    for layer, mask in zip(made.model.layers, masks_of_layers, strict=True):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    return made


LOCAL = "local(window=5, block_size=16)"


@pytest.mark.parametrize("layouts", [[LAYOUT, LOCAL], [LOCAL, None], [LOCAL, LOCAL]], ids=["both", "one", "equal"])
def test_each_layer_has_its_own_layout(layouts: list[Any]) -> None:
    known: dict[Any, Attends] = {LAYOUT: attends, LOCAL: local, None: lambda q, kv: True}
    everywhere = torch.ones(2, LENGTH, dtype=torch.bool)
    dense = by_layer([known[layout] for layout in layouts], everywhere)
    theirs = logits_and_gradients(replaced_layer_by_layer(model("Llama", "sdpa"), dense), input_ids=ids())
    assert_equal(logits_and_gradients(model("Llama", "blocksparse", layouts), input_ids=ids()), theirs, "sdpa")


def test_each_type_of_layer_has_its_own_layout() -> None:
    """Also with padding, and with the window of one type."""
    types = ["full_attention", "sliding_attention"]
    said = {"use_sliding_window": True, "sliding_window": 20, "layer_types": types}
    is_token = padded()
    inputs = {"input_ids": ids(4), "position_ids": positions(is_token)}
    mapping = {
        "full_attention": spelled_out(local, is_token, causal=True),
        "sliding_attention": spelled_out(attends, is_token, causal=True, window=20),
    }
    theirs = logits_and_gradients(model("Qwen3", "sdpa", **said), is_token, **inputs, attention_mask=mapping)
    for layouts in ({"full_attention": LOCAL, "sliding_attention": LAYOUT}, [LOCAL, LAYOUT]):
        made = model("Qwen3", "blocksparse", layouts, **said)
        assert_equal(logits_and_gradients(made, is_token, **inputs, attention_mask=is_token), theirs, "sdpa")


def test_layers_that_differ_are_token_by_token_one_forward() -> None:
    made = model("Llama", "blocksparse", [LAYOUT, LOCAL])
    cache = transformers.DynamicCache(config=made.config)
    parts = [made(part, past_key_values=cache).logits for part in ids(2, 40).split([30, *[1] * 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), made(ids(2, 40)).logits)


def test_layers_that_differ_compile_in_one_graph() -> None:
    made = model("Llama", "blocksparse", [LAYOUT, LOCAL])
    expected = made(ids()).logits
    torch.testing.assert_close(torch.compile(made, backend="eager", fullgraph=True)(ids()).logits, expected)


@pytest.mark.parametrize(
    "layouts", [[LOCAL, None], {"full_attention": LOCAL, "sliding_attention": None}], ids=["list", "dict"]
)
def test_layouts_of_layers_are_saved_with_the_model(layouts: Any, tmp_path: Any) -> None:
    said = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}
    made = model("Qwen3", "blocksparse", layouts, **said)
    made.save_pretrained(tmp_path)
    again = transformers.Qwen3ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="blocksparse", dtype=torch.float64
    )
    assert again.config.attention_layout == layouts
    assert torch.equal(again(ids()).logits, made(ids()).logits)
    assert not torch.equal(made(ids()).logits, model("Qwen3", "blocksparse", **said)(ids()).logits)


TYPES = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 20}


@pytest.mark.parametrize(
    ("family", "layouts", "changes", "error", "message"),
    [
        ("Llama", [LOCAL] * 3, {}, ValueError, "one layout for each of the 2 layers .*got 3"),
        ("Llama", [LOCAL, 7], {}, TypeError, r"config\.attention_layout\[1\] must be a BlockLayout.*got int"),
        ("Llama", [LAYOUT.crop(0, 40), None], {}, ValueError, r"attention_layout\[0\] must have shape .*\(1, 1, 40"),
        ("Llama", {"full_attention": None}, {}, ValueError, "LlamaConfig has no layer_types, got a dict"),
        ("Qwen3", {"full_attention": LOCAL}, TYPES, ValueError, r"\['full_attention', 'sliding_attention'\], got \["),
        ("Qwen3", {**dict.fromkeys(TYPES["layer_types"]), "x": None}, TYPES, ValueError, "got .*'x'"),
        ("Qwen3", dict.fromkeys(TYPES["layer_types"], 7), TYPES, TypeError, r"\['full_attention'\] must be a Block"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_layouts_of_layers_are_checked_when_the_model_is_made(
    family: str, layouts: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model(family, "blocksparse", layouts, **changes)


def test_layers_without_an_index_cannot_differ() -> None:
    family = "ViTForImageClassification", {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"ViT\w+ of ViTForImageClassification has no layer_idx, which says which layer"
    ):
        model(family, "blocksparse", [None, LOCAL])(torch.zeros(1, 3, 16, 16, dtype=torch.float64))


BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": LENGTH,
    "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip
ZAMBA2 = {
    **SIZES, "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 2, "use_mamba_kernels": False, "chunk_size": 8,
    "layer_types": ["mamba", "hybrid"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "index"),
    [(("BartForCausalLM", BART), 2), (("Zamba2ForCausalLM", ZAMBA2), -1)],
    ids=["more layers than the config says", "layers that share one attention"],
)
def test_layers_with_an_index_of_no_layout_are_refused(family: tuple[str, dict[str, Any]], index: int) -> None:
    with pytest.raises(ValueError, match=rf"Attention of {family[0]} has layer_idx={index}, which is none of them"):
        model(family, "blocksparse", [None, LOCAL]).float()(ids(), use_cache=False)
