"""Inputs and layouts that a model cannot take, and those that contradict each other, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocksparse_flash import huggingface
from tests.support.transformers_models import LAYOUT, LENGTH, SIZES, attends, ids, layout_of, model

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")


def test_keys_that_the_model_adds_are_refused_by_name() -> None:
    """DeepSeek V4 also attends to summaries, but requests a 4 x 4 mask."""
    q, mask = torch.zeros(1, 1, 4, 8), huggingface.Mask(None, True, "causal", shape=(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"with 4 queries to 5 keys, but its model asked for a mask of 4 x 4"):
        huggingface.attention_function(torch.nn.Module(), q, q.new_zeros(1, 1, 5, 8), q.new_zeros(1, 1, 5, 8), mask)
    with pytest.raises(
        ValueError, match=r"attends with keys of 1 heads and 4 positions, but values of 2 and 4: use a model"
    ):
        huggingface.attention_function(torch.nn.Module(), q, q, q.new_zeros(1, 2, 4, 8), mask)


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


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_attention_weights_are_refused(family: str) -> None:
    """Regression: models such as GPT-2, which do not pass the argument to attention, returned none."""
    message = "output_attentions must be False with attn_implementation='blocksparse', got True"
    with pytest.raises(ValueError, match=message):
        model(family, "blocksparse", LAYOUT)(ids(), output_attentions=True)
    with pytest.raises(ValueError, match=message):
        model(family, "blocksparse", LAYOUT, output_attentions=True)(ids())


def test_a_window_that_only_the_layer_knows_is_refused() -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    with pytest.raises(ValueError, match="sliding_window=20 contradicts"):
        made(ids(), sliding_window=20)
    made(ids(), sliding_window=LENGTH)
