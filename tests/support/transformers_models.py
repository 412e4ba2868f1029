"""Small models of transformers with random weights in float64, and masks spelled out pair by pair to compare them with.

transformers' eager attention takes its softmax in float32, its sdpa does not, so results are held to the closeness of
those types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout

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
# T5 passes its bias by distance beside a Mask, Swin and LayoutLM a float mask
T5 = "T5ForConditionalGeneration", {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
SWIN = "SwinForImageClassification", {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "drop_path_rate": 0.0, **UNDROPPED,
}  # fmt: skip
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
Attends = Callable[[int, int], bool]


def attends(q: int, kv: int) -> bool:
    """A mask without translation symmetry, with far pairs, near pairs and global keys."""
    return abs(q - kv) < 9 or kv < 3 or (5 * q + 3 * kv) % 13 == 0


def layout_of(function: Attends, length: int = LENGTH) -> BlockLayout:
    rows = [[function(q, kv) for kv in range(length)] for q in range(length)]
    return BlockLayout.from_dense(torch.tensor(rows), block_size=16)


LAYOUT = layout_of(attends)
LOCAL = "local(window=5, block_size=16)"


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


def padded(length: int = LENGTH, end: int = LENGTH - 2) -> Tensor:
    """bool (4, length): on the right, on the left, both (from `end` on) and between tokens, none."""
    is_token = torch.ones(4, length, dtype=torch.bool)
    is_token[0, 50:] = False
    is_token[1, :23] = False
    is_token[2, :5] = is_token[2, 30:37] = is_token[2, end:] = False
    return is_token


def positions(is_token: Tensor) -> Tensor:
    return (is_token.long().cumsum(1) - 1).clamp(min=0)
