"""Models that compute with the mask, or ignore their layout, are refused or warned of by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocksparse_flash import huggingface
from tests.support.transformers_models import LAYOUT, PALIGEMMA, SIZES, VOCABULARY, ids, model

pytestmark = pytest.mark.usefixtures("registered")

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
