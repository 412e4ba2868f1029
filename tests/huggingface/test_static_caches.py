"""Generation with transformers' StaticCache, against one forward without a cache; compiled, one graph for all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blocksparse_flash import BlockLayout, huggingface
from tests.support.no_waiting import no_waiting
from tests.support.transformers_models import (
    GEMMA2,
    GPT_OSS,
    GROUPED,
    LAYOUT,
    LENGTH,
    LOCAL,
    ids,
    model,
    padded,
    positions,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")

WINDOW = "MistralForCausalLM", {**GROUPED, "sliding_window": 20}
GEMMA3 = (
    "Gemma3ForCausalLM",
    {**GROUPED, "head_dim": 4, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
)
FAMILIES = {
    "Llama": "Llama",
    "Qwen3": "Qwen3",
    "Mistral": WINDOW,
    "Gemma2": GEMMA2,
    "Gemma3": GEMMA3,
    "GptOss": GPT_OSS,
}
MOBA = {"kind": "moba", "k_blocks": 2, "block_size": 16}


def static(made: Any, length: int = LENGTH) -> Any:
    return transformers.StaticCache(config=made.config, max_cache_len=length)


def backend_of(graphs: list[Any]) -> Any:
    """A backend of torch.compile that lists its graphs. A function, since `generate` copies its options."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


@torch.no_grad()
def stepwise(made: Any, tokens: Tensor, is_token: Tensor | None, cache: Any, parts: list[int]) -> Tensor:
    """Logits of tokens that come in parts of these lengths."""
    done, found = 0, []
    for part in tokens.split(parts, dim=1):
        here = slice(done, done + part.shape[1])
        done = here.stop
        inputs = {} if is_token is None else {
            "attention_mask": is_token[:, :done], "position_ids": positions(is_token)[:, here]
        }  # fmt: skip
        found.append(made(part, past_key_values=cache, **inputs).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layout", [LAYOUT, LOCAL, None], ids=["layout", "local", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_is_one_forward(family: str, layout: Any, is_padded: bool) -> None:
    """Several tokens at once, then one by one, beyond the windows of the layers."""
    made = model(FAMILIES[family], "blocksparse", layout).eval()
    # its experts take no float64 without gradients
    tolerances = {"rtol": 1e-4, "atol": 1e-4} if family == "GptOss" else {}
    made = made.float() if tolerances else made
    is_token = padded() if is_padded else torch.ones(4, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        together = made(ids(4), attention_mask=is_token, position_ids=positions(is_token)).logits
    parts = [26, 7, *[1] * (LENGTH - 33)]
    said = stepwise(made, ids(4), is_token if is_padded else None, static(made), parts)
    torch.testing.assert_close(said[is_token], together[is_token], **tolerances)


@pytest.mark.parametrize("layout", [LAYOUT, [LOCAL, None], MOBA], ids=["layout", "layers", "moba"])
def test_generate_is_that_of_dynamic_caches(layout: Any) -> None:
    """Greedy, with a padded prompt, and with more room than tokens."""
    made = model("Llama", "blocksparse", layout).eval()
    prompt, mask = ids(2, 30), torch.ones(2, 30)
    mask[0, :7] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    dynamic, static = (
        made.generate(prompt, attention_mask=mask, cache_implementation=kind, pad_token_id=0, **options)
        for kind in ("dynamic", "static")
    )
    assert type(static.past_key_values) is transformers.StaticCache
    assert torch.equal(static.sequences, dynamic.sequences)
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(dynamic.logits))


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layout", [LAYOUT, LOCAL, None], ids=["layout", "local", "dense"])
def test_generate_compiles_one_graph_for_all_steps(layout: Any, is_padded: bool) -> None:
    made, graphs = model("Llama", "blocksparse", layout).eval(), []
    compiled = transformers.CompileConfig(fullgraph=True, backend=backend_of(graphs), mode=None)
    compiled._compile_all_devices = True
    prompt, mask = ids(2, 30), torch.ones(2, 30)
    mask[0, : 7 * is_padded] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = made.generate(prompt, cache_implementation="static", compile_config=compiled, **options)
    assert len(graphs) == 1
    assert torch.equal(found, made.generate(prompt, cache_implementation="dynamic", **options))


def test_a_step_compiles_with_its_mask() -> None:
    """A forward that makes its mask in the graph, without a layout: one graph for all steps."""
    made = model("Llama", "blocksparse").eval()
    cache, graphs = static(made), []
    with torch.no_grad():
        said = [made(ids()[:, :40], past_key_values=cache).logits]
        step = torch.compile(made, backend=backend_of(graphs), fullgraph=True)
        said += [step(ids()[:, i : i + 1], past_key_values=cache).logits for i in range(40, 50)]
        torch.testing.assert_close(torch.cat(said, dim=1), made(ids()[:, :50]).logits)
        assert len(graphs) == 1
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="several tokens continue it"):
            step(ids()[:, 50:53], past_key_values=cache)


@pytest.mark.parametrize("kv_offset", [0, 9])
@pytest.mark.parametrize("window", [None, 20])
def test_keys_of_a_step(window: int | None, kv_offset: int) -> None:
    """Which slots a query attends to in a cache with more room than the window, with padding."""
    is_token = padded()[:, :50]
    function = transformers.masking_utils.causal_mask_function
    if window is not None:
        function = transformers.masking_utils.sliding_window_causal_mask_function(window)
    mask = huggingface.attention_mask(
        4,
        1,
        60 - kv_offset,
        torch.tensor(49),
        kv_offset,
        mask_function=function,
        local_size=window,
        attention_mask=is_token,
    )
    assert mask.kv_lengths is not None and mask.order is not None
    for tokens, length, order in zip(is_token, mask.kv_lengths, mask.order, strict=True):
        expected = [slot - kv_offset for slot in range(kv_offset, 50) if tokens[slot] and slot > 49 - (window or 60)]
        assert order[:length].tolist() == expected


def test_room_for_more_tokens_than_the_layout_has_is_refused() -> None:
    made = model("Llama", "blocksparse", LAYOUT)
    cache = static(made, LENGTH + 1)
    made(ids(), past_key_values=cache)
    with pytest.raises(ValueError, match=f"the sequence has {LENGTH + 1} tokens, but"):
        made(ids(2, 1), past_key_values=cache)


def test_layouts_of_heads_are_refused() -> None:
    made = model("Llama", "blocksparse", BlockLayout.stack_heads([LAYOUT, ~LAYOUT] * 2))
    cache = static(made)
    made(ids()[:, :30], past_key_values=cache)
    with pytest.raises(ValueError, match=r"a static cache needs a layout that all heads share, .*'dynamic'"):
        made(ids(2, 1), past_key_values=cache)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "dense"])
def test_steps_never_wait_for_the_gpu(layout: Any) -> None:
    made = model("Llama", "blocksparse", layout).eval().bfloat16().cuda()
    cache, tokens = static(made), ids().cuda()
    with torch.no_grad():
        made(tokens[:, :30], past_key_values=cache)
        made(tokens[:, 30:31], past_key_values=cache)
        token = tokens[:, 31:32]
        with no_waiting():
            made(token, past_key_values=cache)


def test_position_biases_are_those_of_the_keys_that_are_there() -> None:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    sdpa = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ours = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="blocksparse").eval()
    ours.load_state_dict(sdpa.state_dict())
    tokens, prompt = torch.randint(1, 50, (1, 9)), torch.randint(1, 50, (1, 2))
    options = {"decoder_input_ids": prompt, "max_new_tokens": 4, "do_sample": False}
    expected = sdpa.generate(tokens, **options)
    assert torch.equal(ours.generate(tokens, **options, cache_implementation="static"), expected)
