"""Packed and padded batches of many models of transformers, against one sequence at a time with their own attention.

Logits and the gradients of all parameters must be equal. Most models compute norms and rotary positions in float32, and
the softmax of eager attention is in float32, so results are held to the closeness of float32.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from tests.support.transformers_models import (
    GPT2,
    GRANITE_SWA,
    GROUPED,
    LENGTH,
    SIZES,
    SWIN,
    T5,
    UNDROPPED,
    VOCABULARY,
    assert_equal,
    model,
    positions,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")

# tokens of each sequence, and of what a decoder adds to an encoded one
LENGTHS = (5, 13, 22)
TARGET_LENGTHS = (9, 4, 6)


class Family(NamedTuple):
    """kind, sizes  class in transformers, and its config
    own        attention of transformers that it is compared with
    first      position of a sequence's first token
    is_double  False: its experts have no float64
    since      version of transformers in which it calls the registered attention
    """

    kind: str
    sizes: dict[str, Any]
    own: str = "sdpa"
    first: int = 0
    is_double: bool = True
    since: str = "5.10"


HEADS: dict[str, Any] = {**GROUPED, "head_dim": 4}
UNPADDED: dict[str, Any] = {**GROUPED, "pad_token_id": 0}
WINDOW: dict[str, Any] = {**HEADS, "sliding_window": 7}
BOTH: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {
    **HEADS, "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
# values narrower than keys
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": LENGTH, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "dropout": 0.0,
    "attention_dropout": 0.0, "max_position_embeddings": LENGTH,
}  # fmt: skip
ENCODER: dict[str, Any] = {**SIZES, **UNDROPPED, "pad_token_id": 0}
SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
    "max_position_embeddings": LENGTH, "dropout": 0.0, "decoder_start_token_id": 2, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
FRAMES = 8
WHISPER: dict[str, Any] = {
    **SEQUENCES, "num_mel_bins": 4, "max_source_positions": FRAMES // 2, "max_target_positions": LENGTH,
}  # fmt: skip
PICTURES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 2, **UNDROPPED,
}  # fmt: skip
BEIT: dict[str, Any] = {
    **PICTURES, "use_relative_position_bias": True, "use_shared_relative_position_bias": True, "drop_path_rate": 0.0,
}  # fmt: skip

DECODERS = {
    "Llama": Family("LlamaForCausalLM", GROUPED),
    "Mistral": Family("MistralForCausalLM", WINDOW),
    "Mixtral": Family("MixtralForCausalLM", EXPERTS, is_double=False),
    "Qwen 2": Family("Qwen2ForCausalLM", GROUPED),
    "Qwen 2 MoE": Family("Qwen2MoeForCausalLM", EXPERTS, is_double=False),
    "Qwen 3": Family("Qwen3ForCausalLM", {**BOTH, "use_sliding_window": True}),
    "Qwen 3 MoE": Family("Qwen3MoeForCausalLM", EXPERTS, is_double=False),
    "Gemma": Family("GemmaForCausalLM", HEADS),
    "Gemma 2": Family("Gemma2ForCausalLM", {**BOTH, "attn_logit_softcapping": 2.0}, "eager"),
    "Gemma 3": Family("Gemma3ForCausalLM", BOTH),
    "GPT-2": Family("GPT2LMHeadModel", GPT2),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", SIZES),
    "GPT-OSS": Family("GptOssForCausalLM", {**BOTH, **EXPERTS}, "eager", is_double=False),
    "GPTBigCode": Family("GPTBigCodeForCausalLM", GPT2),
    "Phi": Family("PhiForCausalLM", {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi-3": Family("Phi3ForCausalLM", {**UNPADDED, "sliding_window": 7}),
    "OLMo 2": Family("Olmo2ForCausalLM", GROUPED),
    "OLMo 3": Family("Olmo3ForCausalLM", BOTH),
    "OLMoE": Family("OlmoeForCausalLM", EXPERTS, is_double=False),
    "Cohere": Family("CohereForCausalLM", GROUPED),
    "Cohere 2": Family("Cohere2ForCausalLM", BOTH),
    "StableLM": Family("StableLmForCausalLM", GROUPED),
    "Starcoder 2": Family("Starcoder2ForCausalLM", {**WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "SmolLM 3": Family("SmolLM3ForCausalLM", UNPADDED),
    "Granite": Family("GraniteForCausalLM", GROUPED),
    "Granite SWA": Family(*GRANITE_SWA, "eager", since="5.16"),
    "OPT": Family("OPTForCausalLM", OPT),
    "BioGPT": Family("BioGptForCausalLM", {**ENCODER, "activation_dropout": 0.0}),
    "Llama 4": Family("Llama4ForCausalLM", {**EXPERTS, "intermediate_size_mlp": 24, "attention_chunk_size": 8}),
    "DeepSeek V2": Family("DeepseekV2ForCausalLM", LATENT, is_double=False),
    "DeepSeek V3": Family("DeepseekV3ForCausalLM", LATENT, is_double=False),
    "GLM": Family("GlmForCausalLM", {**HEADS, "pad_token_id": 0}),
    "GLM 4": Family("Glm4ForCausalLM", {**HEADS, "pad_token_id": 0}),
    "ERNIE 4.5": Family("Ernie4_5ForCausalLM", HEADS),
    "Helium": Family("HeliumForCausalLM", HEADS),
    "BitNet": Family("BitNetForCausalLM", GROUPED),
    "EXAONE 4": Family("Exaone4ForCausalLM", {**BOTH, "sliding_window_pattern": 2}),
    "Nemotron": Family("NemotronForCausalLM", HEADS, since="5.16"),
    "Apertus": Family("ApertusForCausalLM", GROUPED),
    "Seed-OSS": Family("SeedOssForCausalLM", {**HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0}),
}
ENCODERS = {
    "BERT": Family("BertForMaskedLM", ENCODER),
    "RoBERTa": Family("RobertaForMaskedLM", ENCODER, first=1),
    "DistilBERT": Family("DistilBertForMaskedLM", DISTILBERT),
    "ALBERT": Family("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}),
    "ELECTRA": Family("ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        {**SIZES, "pad_token_id": 0, "local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "EuroBERT": Family("EuroBertForMaskedLM", UNPADDED),
    "ESM": Family("EsmForMaskedLM", {**ENCODER, "position_embedding_type": "rotary", "token_dropout": False}),
    "CLIP text": Family("CLIPTextModel", {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
}
ENCODER_DECODERS = {
    "T5": Family(*T5, "eager", since="5.16"),
    "BART": Family("BartForConditionalGeneration", SEQUENCES),
    "Whisper": Family("WhisperForConditionalGeneration", WHISPER),
}
VISION = {
    "ViT": Family("ViTForImageClassification", PICTURES),
    "CLIP vision": Family("CLIPVisionModel", PICTURES),
    "SigLIP vision": Family("SiglipVisionModel", PICTURES),
    "DINOv2": Family("Dinov2Model", {**PICTURES, "mlp_ratio": 2}),
    "BEiT": Family("BeitForImageClassification", BEIT),
    "Swin": Family(*SWIN, "eager"),
}
MODELS = {**DECODERS, **ENCODERS, **ENCODER_DECODERS, **VISION}

CACHED = [name for name in DECODERS if name != "Llama 4"]
CASES = [
    *((name, "packed") for name in DECODERS),
    *((name, "packed with a cache") for name in CACHED),
    *((name, f"padded on the {side}") for name in (*DECODERS, *ENCODERS) for side in ("left", "right")),
    *((name, "padded on the right") for name in ENCODER_DECODERS),
    *((name, "images") for name in VISION),
]


def made(name: str, how: str) -> Any:
    family = MODELS[name]
    if Version(transformers.__version__) < Version(family.since):
        pytest.skip(f"{family.kind} needs transformers {family.since}")
    found = model((family.kind, family.sizes), how).train()
    return found if family.is_double else found.float()


def drawn(seed: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def tokens() -> list[Tensor]:
    return [drawn(i, length) for i, length in enumerate(LENGTHS)]


def targets() -> list[Tensor]:
    return [drawn(10 + i, length) for i, length in enumerate(TARGET_LENGTHS)]


def sounds() -> Tensor:
    return torch.randn(len(LENGTHS), 4, FRAMES, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def images(name: str) -> Tensor:
    side = MODELS[name].sizes["image_size"]
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def outputs(found: Any, **inputs: Any) -> Tensor:
    output = found(**inputs)
    return output.last_hidden_state if getattr(output, "logits", None) is None else output.logits


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """The batch, and its attention_mask."""
    both = [
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_side=side)
        for each in (sequences, [torch.ones_like(sequence) for sequence in sequences])
    ]
    return both[0], both[1]


def results(found: Any, by_sequence: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, and the gradients of their sum with fixed weights."""
    together = torch.cat(by_sequence)
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (together * weights.to(together.dtype)).sum().backward()
    return {
        "logits": together.detach(),
        **{name: p.grad for name, p in found.named_parameters() if p.grad is not None},
    }


@functools.cache
def one_at_a_time(name: str) -> dict[str, Tensor]:
    """With transformers' own attention."""
    found = made(name, MODELS[name].own)
    if name in VISION:
        inputs: list[dict[str, Any]] = [{"pixel_values": image[None]} for image in images(name)]
    elif name in ENCODER_DECODERS:
        keys = ("input_features", sounds()) if name == "Whisper" else ("input_ids", tokens())
        inputs = [
            {keys[0]: source[None], "decoder_input_ids": target[None]}
            for source, target in zip(keys[1], targets(), strict=True)
        ]
    else:
        inputs = [{"input_ids": sequence[None]} for sequence in tokens()]
    return results(found, [outputs(found, **each)[0] for each in inputs])


def packed(name: str, **options: Any) -> dict[str, Tensor]:
    """As `DataCollatorWithFlattening` packs them, without its labels."""
    batch = transformers.DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": each} for each in tokens()])
    del batch["labels"]
    found = made(name, "blocksparse")
    return results(found, list(outputs(found, **batch, **options)[0].split(LENGTHS)))


def in_a_batch(name: str, way: str) -> dict[str, Tensor]:
    """With our attention."""
    if way.startswith("packed"):
        if name == "Llama 4" and Version(transformers.__version__) < Version("5.23"):
            pytest.skip("in transformers before 5.23 chunks count the tokens of all documents; refused")
        return packed(name, use_cache=way == "packed with a cache")
    found, side = made(name, "blocksparse"), way.rpartition(" ")[2]
    if way == "images":
        return results(found, list(outputs(found, pixel_values=images(name))))
    batch, is_token = padded(tokens(), side)
    inputs: dict[str, Any] = {"input_ids": batch, "attention_mask": is_token}
    if name not in ENCODER_DECODERS:
        inputs["position_ids"] = positions(is_token) + MODELS[name].first
    else:
        if name == "Whisper":
            inputs = {"input_features": sounds()}
        inputs["decoder_input_ids"], is_token = padded(targets(), side)
        inputs["decoder_attention_mask"] = is_token
    logits = outputs(found, **inputs)
    return results(found, [each[where.bool()] for each, where in zip(logits, is_token, strict=True)])


# transformers 5.10 and 5.16 script parts of GPTBigCode when it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_batch_gives_what_one_sequence_at_a_time_gives(name: str, way: str) -> None:
    assert_equal(in_a_batch(name, way), one_at_a_time(name), "eager")


def begun_early(place: Tensor) -> Tensor:
    return (torch.arange(place.shape[1])[None] >= LENGTHS[0] - 1).long() + (place == 0).cumsum(1)


def test_a_token_of_another_sequence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if one sequence begins a token early."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", begun_early)
    with pytest.raises(AssertionError, match="logits"):
        assert_equal(packed("GPT-OSS"), one_at_a_time("GPT-OSS"), "eager")


def test_packed_sequences_whose_masks_are_for_one_sequence_are_refused() -> None:
    """With a cache, transformers makes Llama 4's chunks as if there were one sequence."""
    with pytest.raises(
        ValueError, match=r"position_ids restart.*of Llama4TextModel .*use_cache=False.*torch\.ones_like\(input_ids"
    ):
        packed("Llama 4", use_cache=True)


@pytest.mark.parametrize("use_cache", [False, True])
def test_positions_that_restart_under_an_attention_mask_are_one_sequence(use_cache: bool) -> None:
    """As in transformers' own attention."""
    place = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = {"input_ids": torch.cat(tokens())[None], "attention_mask": torch.ones_like(place), "position_ids": place}
    ours, theirs = (
        results(found, [outputs(found, **inputs, use_cache=use_cache)[0]])
        for found in (made("Llama", how) for how in ("blocksparse", "sdpa"))
    )
    assert_equal(ours, theirs, "eager")


@pytest.mark.parametrize("room", [0, 1, 20])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_packed_sequences_stay_apart_in_a_static_cache(name: str, room: int) -> None:
    """Regression: with room for more tokens, they attended to each other. Gemma 3 has windows in some layers."""
    cache = transformers.StaticCache(config=made(name, "blocksparse").config, max_cache_len=sum(LENGTHS) + room)
    assert_equal(packed(name, past_key_values=cache), one_at_a_time(name), "eager")


def test_packed_sequences_that_continue_a_cache_are_refused() -> None:
    """Regression: they were taken for one sequence."""
    found = made("Llama", "blocksparse")
    cache = transformers.DynamicCache(config=found.config)
    found(tokens()[0][None], past_key_values=cache)
    inputs = {"input_ids": tokens()[1][None], "past_key_values": cache}
    inputs["position_ids"] = torch.cat([torch.arange(5, 10), torch.arange(8)])[None]
    with pytest.raises(
        ValueError, match=r"position_ids restart.* past_key_values has 5 tokens.* attention_mask=torch\.ones\(1, 18\)"
    ):
        found(**inputs)
    found(**inputs, attention_mask=torch.ones(1, 18))


def test_packed_sequences_are_recognized_in_arguments_without_names() -> None:
    """Regression: position_ids were not, and an attention_mask without a name was taken for none."""
    found, place = made("Llama", "blocksparse").model, torch.cat([torch.arange(length) for length in LENGTHS])[None]
    together, ones = torch.cat(tokens())[None], torch.ones_like(place)
    apart = found(input_ids=together, position_ids=place, use_cache=False)[0]
    torch.testing.assert_close(found(together, None, place)[0], apart)
    whole = found(input_ids=together, attention_mask=ones, position_ids=place)[0]
    torch.testing.assert_close(found(together, ones, position_ids=place)[0], whole)
    assert not torch.allclose(apart, whole)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_of_a_model_with_positions_in_images_stay_apart(use_cache: bool) -> None:
    """Regression: with a cache, they attended to each other."""
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 10000.0}
    text = {**GROUPED, "rope_parameters": rope, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, attn_implementation="blocksparse")
    found = transformers.Qwen2VLForConditionalGeneration(config).double()
    parts = [(each, torch.arange(len(each)).expand(4, 1, -1)) for each in tokens()]
    alone = [found(input_ids=each[None], position_ids=place).logits for each, place in parts]
    place = torch.cat([place for _, place in parts], 2)
    together = found(input_ids=torch.cat(tokens())[None], position_ids=place, use_cache=use_cache).logits
    torch.testing.assert_close(together, torch.cat(alone, 1))


def test_the_documentation_lists_these_models() -> None:
    text = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    table = re.search(r"\| Models \| A batch .*?\n\n", text, re.DOTALL)
    assert table is not None
    rows = (row.strip("| ").split(" | ") for row in table[0].strip().splitlines()[2:])
    assert {(name, way) for names, ways in rows for name in names.split(", ") for way in ways.split("; ")} == {*CASES}
