"""Padding is as if it were not there, with a layout and without."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import BlockLayout
from tests.support.transformers_models import (
    FAMILIES,
    LAYOUT,
    assert_equal,
    attends,
    ids,
    logits_and_gradients,
    model,
    padded,
    positions,
    spelled_out,
)

pytestmark = pytest.mark.usefixtures("registered")


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
