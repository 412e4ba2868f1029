"""Generation with a layout: token by token with a cache, padded batches, and beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blocksparse_flash import BlockLayout, layout_crops
from tests.support.transformers_models import LAYOUT, LENGTH, ids, model, padded, positions

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3"])
def test_token_by_token_is_one_forward(family: str) -> None:
    made = model(family, "blocksparse", LAYOUT)
    cache, parts = transformers.DynamicCache(config=made.config), []
    # several at once, then one by one
    for part in ids().split([20, 7, *[1] * (LENGTH - 27)], dim=1):
        parts.append(made(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), made(ids()).logits)


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
