"""Training and compiling models with a layout: dropout, checkpoints, graphs of torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from blocksparse_flash.huggingface import attention, mask_builder
from tests.support.transformers_models import (
    LAYOUT,
    assert_equal,
    ids,
    layout_of,
    logits_and_gradients,
    model,
    padded,
    positions,
)

pytestmark = pytest.mark.usefixtures("registered")


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
