"""`register()`, which adds attn_implementation="blocksparse" to transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from ..layout import BlockLayout
from .attention import attention_function
from .mask_builder import attention_mask
from .model_hooks import watch_models
from .names import ATTENTION_NAME, CONFIG_KEY
from .saved_layouts import replaced, to_json


def _with_replaced(config: Any, function: Callable[[Any, str], Any]) -> Any:
    """A copy of a config and of its sub-configs, with `replaced` layouts."""
    from transformers import PreTrainedConfig

    changed = copy.copy(config)
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            vars(changed)[key] = _with_replaced(value, function)
        elif key == CONFIG_KEY:
            vars(changed)[key] = replaced(value, function)
    return changed


def _in_words(layout: Any, _: str) -> Any:
    """The first line of a layout's repr; the numbers of one that was saved and not used since."""
    if isinstance(layout, BlockLayout):
        return repr(layout).partition("\n")[0]
    return {key: value for key, value in layout.items() if not isinstance(value, dict)}


def _in_json(layout: Any, _: str) -> Any:
    return to_json(layout) if isinstance(layout, BlockLayout) else layout


@functools.cache
def _store_layouts() -> None:
    """Makes configs of transformers store BlockLayouts in JSON, and show them in words."""
    from transformers import PreTrainedConfig

    configs: Any = PreTrainedConfig
    as_string, to_file, as_text = configs.to_json_string, configs.to_json_file, configs.__repr__

    @functools.wraps(as_string)
    def to_json_string(self: Any, *args: Any, **kwargs: Any) -> str:
        return as_string(_with_replaced(self, _in_json), *args, **kwargs)

    @functools.wraps(to_file)
    def to_json_file(self: Any, json_file_path: Any, use_diff: bool = True) -> None:
        # raises before a file that is there is overwritten
        self.to_json_string(use_diff=use_diff)
        to_file(self, json_file_path, use_diff=use_diff)

    @functools.wraps(as_text)
    def in_words(self: Any) -> str:
        return as_text(_with_replaced(self, _in_words))

    configs.to_json_string, configs.to_json_file, configs.__repr__ = to_json_string, to_json_file, in_words


def register() -> None:
    """Registers `attn_implementation="blocksparse"` with transformers, for models that look up their attention.

    The layout is the model's `config.attention_layout`: a BlockLayout; a specification for `masks.build`, such as
    "butterfly | local(window=512)"; or None for attention to all keys. It is saved with the config. It covers
    positions 0 .. length - 1, and each forward uses the part it needs; a specification is built for
    config.max_position_embeddings if the config has it. The causality, windows and padding of the model apply as well.

    It may be a selection instead, {"kind": "moba", "k_blocks": 4, "block_size": 64}: causal attention of each query to
    the blocks that `blocksparse_flash.nn.mixture_of_block_attention` selects with these arguments, or `by_group` too.
    The kind "topk" selects as native sparse attention does, by the means of keys instead of learned compressions.

    Layers may differ: a list has a layout for each layer (config.num_hidden_layers), a dict one for each type in
    config.layer_types, such as {"full_attention": "butterfly", "sliding_attention": None}. Either is checked when the
    model is created.

    Call it before models are created or loaded. Models created later, or put into another module, report a layout that
    they would ignore: ValueError, at creation or at the first forward, if the model computes its own attention;
    UserWarning at the first forward, if its attn_implementation is another one, such as "sdpa".

    Calling it again changes nothing. Needs transformers (`pip install 'blocksparse_flash[huggingface]'`).

    >>> register()  # doctest: +SKIP
    >>> config = transformers.LlamaConfig(attention_layout="butterfly | local(window=512)")  # doctest: +SKIP
    >>> transformers.LlamaForCausalLM._from_config(config, attn_implementation="blocksparse")  # doctest: +SKIP
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "huggingface.register needs transformers: pip install 'blocksparse_flash[huggingface]'"
        ) from error
    AttentionInterface.register(ATTENTION_NAME, attention_function)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
    watch_models()
    _store_layouts()
