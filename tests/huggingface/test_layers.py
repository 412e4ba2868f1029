"""A layout for each layer, or for each type of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.transformers_models import (
    LAYOUT,
    LENGTH,
    LOCAL,
    SIZES,
    VOCABULARY,
    Attends,
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
    """One for each length. Regression: the second length raised an error without dynamic=False."""
    made = model("Llama", "blocksparse", [LAYOUT, LOCAL])
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for length in (LENGTH, 50):
        torch.testing.assert_close(compiled(ids(2, length)).logits, made(ids(2, length)).logits)


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
