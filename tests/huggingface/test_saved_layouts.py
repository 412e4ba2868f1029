"""Layouts that are saved with the config of a model, loaded, and shown."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from typing import Any

import pytest
import torch

import masks
from blocksparse_flash import BlockLayout, huggingface
from blocksparse_flash.huggingface.saved_layouts import from_json, to_json
from tests.support.transformers_models import GROUPED, LAYOUT, LENGTH, PALIGEMMA, ids, model

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.usefixtures("registered")

HEADS = BlockLayout.stack_heads([LAYOUT, masks.build("local(window=9, block_size=16)", LENGTH)] * 2)


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, HEADS, [LAYOUT, "causal(block_size=16)"], (None, HEADS), {"full_attention": LAYOUT}],
    ids=["one", "heads", "list", "tuple", "dict"],
)
def test_block_layouts_are_saved_with_the_model(layout: Any, tmp_path: Any) -> None:
    said = {"layer_types": ["full_attention"] * 2} if isinstance(layout, dict) else {}
    made = model("Qwen3" if said else "Llama", "blocksparse", layout, **said)
    made.save_pretrained(tmp_path)
    assert made.config.attention_layout is layout
    again = type(made).from_pretrained(tmp_path, attn_implementation="blocksparse", dtype=torch.float64)
    assert again.config.attention_layout == (list(layout) if isinstance(layout, tuple) else layout)
    assert torch.equal(again(ids()).logits, made(ids()).logits)
    again.save_pretrained(tmp_path / "again")
    # without a model, it is as JSON has it, and is saved as it is
    config = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert "zlib" not in repr(config)
    config.save_pretrained(tmp_path / "config")
    assert (tmp_path / "config" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


def test_block_layouts_of_parts_of_a_model_are_saved(tmp_path: Any) -> None:
    made = model(PALIGEMMA, "blocksparse")
    made.config.text_config.attention_layout = [LAYOUT, None]
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path, attn_implementation="blocksparse")
    assert again.config.text_config.attention_layout == [LAYOUT, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_len": 300}, "indptr"),
        ({"block_size": None}, "block_size"),
        ({"indices": {"shape": [3], "zlib": "?"}}, "base64"),
        ({"indices": {"shape": [3], "zlib": "AAAA"}}, "decompress"),
        ({"bitmask_ids": {"shape": [3]}}, "zlib"),
        ({"extra": 1}, "extra"),
    ],
    ids=str,
)
def test_a_changed_layout_is_refused(change: dict[str, Any], message: str, tmp_path: Any) -> None:
    made = model("Llama", "blocksparse", [None, LAYOUT])
    made.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["attention_layout"][1] |= change
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=rf"^config\.attention_layout\[1\] must be a layout as .*{message}.*save the"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="blocksparse")


def test_values_beyond_the_shape_are_not_decompressed() -> None:
    saved = to_json(LAYOUT)
    bomb = {"shape": saved["indices"]["shape"], "zlib": base64.b64encode(zlib.compress(bytes(1 << 26), 9)).decode()}
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^here must be .*not \d+ bytes"):
        from_json(saved | {"indices": bomb}, "here")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_registering_again_changes_nothing() -> None:
    stored = transformers.PreTrainedConfig.to_json_string
    huggingface.register()
    assert transformers.PreTrainedConfig.to_json_string is stored


def test_what_json_cannot_store_is_refused(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    config.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    config.attention_layout = {1, 2}
    for fails in (config.to_json_string, lambda: config.save_pretrained(tmp_path)):
        with pytest.raises(TypeError, match=r"^Object of type set is not JSON serializable"):
            fails()
    # a regression: it was empty
    assert (tmp_path / "config.json").read_text() == saved


@pytest.mark.parametrize("layout", [LAYOUT, [LAYOUT, None], {"full_attention": LAYOUT}])
def test_configs_show_their_layouts(layout: Any) -> None:
    """Not the text that JSON has of them."""
    config = model(PALIGEMMA, "blocksparse").config
    config.text_config.attention_layout = layout
    assert '"BlockLayout(72 x 72 tokens, block_size=(16, 16), batch=1, heads=1)"' in repr(config)
    assert config.text_config.attention_layout is layout
