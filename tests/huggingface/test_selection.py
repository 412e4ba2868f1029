"""Models of transformers whose layers select blocks, against the definition of the selection, query by query.

The definition runs as an attention function of transformers, in float64, so that both models have the same weights.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import huggingface
from tests.support.transformers_models import padded, positions

transformers = pytest.importorskip("transformers", reason="needs transformers")

LENGTH = 90
MOBA = {"kind": "moba", "k_blocks": 2, "block_size": 16}
GROUPED = {**MOBA, "k_blocks": 3, "by_group": True}
TOPK = {"kind": "topk", "k_blocks": 4, "block_size": 16}
SELECTIONS = {"moba": MOBA, "by_group": GROUPED, "topk": TOPK, "one layer": [None, MOBA]}
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 100, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 100, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 4}),
    "GPT2": ("GPT2LMHeadModel", GPT2),
}
WINDOW: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 20,
}  # fmt: skip


def importance(together: Tensor, keys: Tensor, t: int, size: int) -> list[float]:
    """Of each block up to that of query t: weights of means of 32 keys, one every 16, by overlap in pieces of 16."""
    found = [0.0] * (t // size + 1)
    starts = range(0, t - 30, 16)
    for q in together:
        scores = [float(keys[start : start + 32].mean(0) @ q) / math.sqrt(len(q)) for start in starts]
        for start, weight in zip(starts, torch.tensor(scores, dtype=torch.float64).softmax(0).tolist(), strict=True):
            for piece in (start, start + 16):
                found[piece // size] += weight
    return found


def chosen(q: Tensor, k: Tensor, selection: dict[str, Any] | None) -> Tensor:
    """bool (batch, heads, length, length) of the keys that each query attends to, block by block; None is all."""
    (batch, heads, length, _), group = q.shape, q.shape[1] // k.shape[1]
    mask = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            first = h // group * group
            for t in range(length):
                if selection is None:
                    mask[b, h, t, : t + 1] = True
                    continue
                size, keys, together = selection["block_size"], k[b, h // group], q[b, first : first + group, t]
                own = t // size
                if selection["kind"] == "topk":
                    scores, always = importance(together, keys, t, size), {0, max(own - 1, 0), own}
                else:
                    judge = together.sum(0) if selection.get("by_group") else q[b, h, t]
                    scores = [float(keys[i * size : (i + 1) * size].mean(0) @ judge) for i in range(own)]
                    always = {own}
                others = sorted({*range(own)} - always, key=scores.__getitem__)[::-1]
                for block in [*always, *others[: selection["k_blocks"] - len(always)]]:
                    mask[b, h, t, block * size : min((block + 1) * size, t + 1)] = True
    return mask


def definition(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float | None, **_: Any
) -> tuple[Tensor, None]:
    """The attention function of the definition, for sequences without padding."""
    selected = module.config.selection
    if isinstance(selected, list):
        selected = selected[module.layer_idx]
    attends = chosen(query.detach(), key.detach(), selected)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
    weights = (query @ key.mT * scale).masked_fill(~attends, -torch.inf).softmax(3)
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def definition_registered(registered: None) -> None:
    transformers.AttentionInterface.register("definition", definition)
    transformers.AttentionMaskInterface.register("definition", lambda *_, **__: None)


def model(family: str | tuple[str, dict[str, Any]], selection: Any, how: str = "blocksparse", **changes: Any) -> Any:
    """A model in float64 with the same weights for every attention."""
    name, sizes = FAMILIES[family] if isinstance(family, str) else family
    kind = getattr(transformers, name)
    held = {"attention_layout": selection} if how == "blocksparse" else {"selection": selection}
    config = kind.config_class(**{**sizes, **changes, **held})
    config._attn_implementation = how
    torch.manual_seed(0)
    made = kind(config).double()
    for parameter in made.parameters():
        # zero biases would hide errors
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return made


def ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 40, (batch, length), generator=torch.Generator().manual_seed(2))


def logits_and_gradients(made: Any, where: Tensor | None = None, **inputs: Any) -> list[Tensor]:
    logits = made(**inputs).logits
    logits = logits if where is None else logits[where]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), list(made.parameters()))]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 10
    for one, other in zip(ours, theirs, strict=True):
        # relative to the largest value
        torch.testing.assert_close(one / other.abs().max(), other / other.abs().max())


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_those_of_the_definition(family: str, selection: Any) -> None:
    theirs = logits_and_gradients(model(family, selection, "definition"), input_ids=ids())
    assert_equal(logits_and_gradients(model(family, selection), input_ids=ids()), theirs)
    # and of no other selection
    dense = model(family, None)(ids()).logits
    assert (dense - theirs[0]).abs().max() > 1e-3


def test_layers_differ_by_type_and_from_layouts() -> None:
    by_type = model("Qwen3", {"full_attention": MOBA, "sliding_attention": None}, **WINDOW)(ids()).logits
    windowed = model("Qwen3", [MOBA, "local(window=(19, 0), block_size=16)"])(ids()).logits
    torch.testing.assert_close(by_type, windowed)


@pytest.mark.parametrize("selection", [GROUPED, TOPK], ids=["by_group", "topk"])
def test_a_padded_batch_gives_what_each_sequence_alone_gives(selection: Any) -> None:
    made, is_token = model("Llama", selection), padded(LENGTH, end=68)
    inputs = {"input_ids": ids(4), "attention_mask": is_token, "position_ids": positions(is_token)}
    together = made(**inputs).logits
    alone = [made(one[tokens][None]).logits[0] for one, tokens in zip(ids(4), is_token, strict=True)]
    torch.testing.assert_close(together[is_token], torch.cat(alone))
    weights = torch.randn(together[is_token].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = list(made.parameters())
    ours = torch.autograd.grad((together[is_token] * weights).sum(), parameters)
    assert_equal(list(ours), list(torch.autograd.grad((torch.cat(alone) * weights).sum(), parameters)))


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_token_by_token_is_one_forward(selection: Any) -> None:
    made = model("Llama", selection)
    cache, parts = transformers.DynamicCache(config=made.config), []
    # several at once, then one by one
    for part in ids(2).split([20, 50, *[1] * (LENGTH - 70)], dim=1):
        parts.append(made(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), made(ids(2)).logits)


def test_token_by_token_with_padding_is_one_forward() -> None:
    """Also for a sequence of padding alone, whose numbers mean nothing but are finite."""
    made = model("Llama", [MOBA, TOPK])
    is_token = torch.cat([padded(LENGTH, end=68), torch.zeros(1, LENGTH, dtype=torch.bool)])
    together = made(ids(5), attention_mask=is_token, position_ids=positions(is_token)).logits
    cache, done = transformers.DynamicCache(config=made.config), 0
    for part in ids(5).split([60, *[1] * (LENGTH - 60)], dim=1):
        here = slice(done, done + part.shape[1])
        done = here.stop
        inputs = {"attention_mask": is_token[:, :done], "position_ids": positions(is_token)[:, here]}
        said = made(part, past_key_values=cache, **inputs).logits
        assert said.isfinite().all()
        torch.testing.assert_close(said[is_token[:, here]], together[:, here][is_token[:, here]])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate_from_a_padded_batch_is_generate_from_each(options: dict[str, Any]) -> None:
    made = model("Llama", MOBA)
    is_token = torch.ones(2, 40, dtype=torch.long)
    is_token[0, :11] = 0
    options = {**options, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    together = made.generate(ids(2, 40), attention_mask=is_token, **options)
    for one, tokens, said in zip(ids(2, 40), is_token.bool(), together, strict=True):
        alone = made.generate(one[tokens][None], attention_mask=torch.ones(1, int(tokens.sum())), **options)[0]
        assert torch.equal(said[-12:], alone[-12:])


def test_a_selection_is_saved_with_the_model(tmp_path: Any) -> None:
    for selection in (GROUPED, [TOPK, MOBA]):
        made = model("Llama", selection)
        made.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["attention_layout"] == selection
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="blocksparse", dtype=torch.float64
        )
        assert again.config.attention_layout == selection
        assert torch.equal(again(ids()).logits, made(ids()).logits)


def test_checkpointed_gradients_are_the_same() -> None:
    made = model("Llama", MOBA)
    expected = logits_and_gradients(made, input_ids=ids())
    # the older name, in transformers 5.16
    (getattr(made.train(), "activation_checkpointing_enable", None) or made.gradient_checkpointing_enable)()
    assert_equal(logits_and_gradients(made, input_ids=ids(), use_cache=False), expected)


@pytest.mark.thorough
def test_compiled_models_are_the_same() -> None:
    made = model("Llama", [MOBA, TOPK])
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        expected = made(ids()).logits
        torch.testing.assert_close(compiled(ids(), attention_mask=torch.ones(1, LENGTH)).logits, expected)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({**MOBA, "kind": "nsa"}, r"attention_layout must have the kind 'moba' or 'topk', got 'nsa'; an example is \{"),
        ({**MOBA, "kblocks": 2}, "no keys but kind, k_blocks, block_size, by_group, got 'kblocks': remove it"),
        ({"kind": "moba", "k_blocks": 2}, r"\['block_size'\] must be 16, 32, 64 or a multiple of 128.*got none; an ex"),
        ({**MOBA, "block_size": 48}, r"attention_layout\['block_size'\] must be 16, 32, 64 or .*got 48; an example"),
        ({**MOBA, "block_size": -128}, r"\['block_size'\] must be 16, .*got -128"),
        ({**MOBA, "k_blocks": 0}, r"attention_layout\['k_blocks'\] must be an int of 1 or more, .*got 0; an example"),
        ({**MOBA, "k_blocks": "4"}, r"\['k_blocks'\] must be an int of 1 or more, .*got '4'"),
        ({**MOBA, "k_blocks": True}, r"\['k_blocks'\] must be an int of 1 or more, .*got True"),
        ({**MOBA, "by_group": 1}, r"attention_layout\['by_group'\] must be True or False, got 1; True lets"),
        ({**TOPK, "by_group": True}, "no keys but kind, k_blocks, block_size, got 'by_group': remove it"),
        ({**TOPK, "k_blocks": 2}, "must be an int of 3 or more, counting blocks always selected, got 2"),
        ([None, {**MOBA, "k_blocks": 0}], r"attention_layout\[1\]\['k_blocks'\] must be an int of 1 or more"),
        ([None, {"k_blocks": 2}], r"\[1\] must have the kind 'moba' or 'topk', got no 'kind' in \{'k_blocks': 2"),
        ({"k_blocks": 2, "block_size": 16}, "got a dict by layer type, .*'k_blocks'.*; a selection is a dict with a k"),
    ],
)
def test_wrong_selections_are_refused_when_the_model_is_made(selection: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model("Llama", selection)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_packed_sequences_equal_each_of_them_alone(selection: Any, family: str) -> None:
    """Documents begin where position_ids restart, and select among their own blocks; also with several in a batch."""
    made, tokens = model(family, selection), ids(2)
    lengths = [[37, 1, 52], [80, 10]]
    places = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    together = made(tokens, position_ids=places, use_cache=False).logits
    alone = torch.stack(
        [
            torch.cat([made(part[None], use_cache=False).logits[0] for part in row.split(sizes)])
            for row, sizes in zip(tokens, lengths, strict=True)
        ]
    )
    torch.testing.assert_close(together, alone)
    weights, parameters = torch.randn(alone.shape, dtype=alone.dtype), list(made.parameters())
    grads, others = (torch.autograd.grad((logits * weights).sum(), parameters) for logits in (together, alone))
    for one, other in zip(grads, others, strict=True):
        torch.testing.assert_close(one, other)


GPT_OSS = "GptOssForCausalLM", {
    **SIZES, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2,
}  # fmt: skip
GEMMA2 = "Gemma2ForCausalLM", {**SIZES, "head_dim": 4, "layer_types": ["full_attention"] * 2}
BERT = "BertForMaskedLM", {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
PACKED = {"position_ids": torch.cat([torch.arange(30), torch.arange(LENGTH - 30)])[None], "use_cache": False}


@pytest.mark.parametrize(
    ("family", "changes", "inputs", "message"),
    [
        ("Qwen3", WINDOW, {}, r"needs a causal attention_mask.*Qwen3Attention of Qwen3\w+ has a sliding window of 20"),
        (("MistralForCausalLM", {**SIZES, "sliding_window": 999}), {}, {}, "MistralAttention .* sliding window of 999"),
        (GPT_OSS, {}, {}, r"no sinks \(s_aux\), but GptOssAttention of GptOssForCausalLM has: give this layer None or"),
        (GEMMA2, {}, {}, "no softcap, but Gemma2Attention of Gemma2ForCausalLM has"),
        (BERT, {}, {}, "BertSelfAttention of BertForMaskedLM has queries that attend to later tokens"),
        ("Llama", {"attention_dropout": 0.1}, {}, r"no dropout, got dropout=0\.1 in LlamaAttention of .*to 0\.0"),
        ("Qwen3", WINDOW, PACKED, "Qwen3Attention of .* has .* packed sequences with padding or with a window: give"),
    ],
    ids=["sliding", "all sliding", "sinks", "softcap", "bidirectional", "dropout", "packed"],
)
def test_what_a_selection_lacks_is_refused_by_name(
    family: str | tuple[str, dict[str, Any]], changes: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    made = model(family, MOBA, **changes).train()
    with pytest.raises(ValueError, match=message):
        made(ids(), **inputs)


def test_padded_sequences_continue_token_by_token_only() -> None:
    made, is_token = model("Llama", MOBA), padded(LENGTH, end=68)
    cache = transformers.DynamicCache(config=made.config)
    made(ids(4)[:, :40], attention_mask=is_token[:, :40], past_key_values=cache)
    with pytest.raises(ValueError, match=r"has padding, and a cache that several tokens continue: .*token by token"):
        made(ids(4)[:, 40:43], attention_mask=is_token[:, :43], past_key_values=cache)


def test_layers_without_a_mask_need_as_many_queries_as_keys() -> None:
    module = torch.nn.Module()
    module.config = transformers.LlamaConfig(attention_layout=MOBA, **SIZES)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="4 queries and 5 keys, but the model made no mask"):
        huggingface.attention_function(module, q, k, k, None)
    assert huggingface.attention_function(module, q, q, q, None)[0].shape == (1, 4, 2, 8)
