"""Names that other libraries and papers use for the masks of this package, and similar names for misspelled ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# what others call a mask: what makes it here
OTHER_NAMES = {
    "attention_sink": "sink_window(sinks, window)",
    "attention_sinks": "sink_window(sinks, window)",
    "band": "local(window)",
    "banded": "local(window)",
    "big_bird": "bigbird",
    "block_diagonal_causal": "block_causal",
    "block_local": "block_diagonal",
    "causal_local": "local(window=(left, 0))",
    "causal_sliding_window": "local(window=(left, 0))",
    "causal_window": "local(window=(left, 0))",
    "chunked": "block_causal or block_diagonal",
    "diagonal": "local(window=0)",
    "dilated": "dilated_window",
    "dilated_sliding_window": "dilated_window",
    "document": "documents",
    "document_mask": "documents",
    "full": "attention without a layout, which attends to everything",
    "global_attention": "global_tokens",
    "long_former": "longformer",
    "long_net": "longnet",
    "natten": "neighborhood",
    "neighborhood_attention": "neighborhood",
    "neighbourhood": "neighborhood",
    "packed": "documents",
    "packed_sequences": "documents",
    "prefix": "prefix_lm",
    "random_blocks": "random",
    "sliding_window": "local(window)",
    "sliding_window_causal": "local(window=(left, 0))",
    "sparse_transformer": "strided or fixed",
    "streaming_llm": "sink_window(sinks, window)",
    "topk": "top_k",
    "topp": "top_p",
    "tril": "causal",
    "varlen": "documents",
    "window": "local(window)",
    "windowed": "local(window)",
}


def close_names(word: str, names: Iterable[str]) -> str:
    """A sentence with a space in front, with the names spelt like a word; empty if there are none.

    >>> close_names("locl", ["local", "causal"])
    ' Did you mean local?'
    """
    close = difflib.get_close_matches(word, list(names))
    return f" Did you mean {' or '.join(close)}?" if close else ""


def meant_argument(word: str, names: Iterable[str], *, causal: str) -> str:
    """`close_names` for an argument that a mask does not have. causal: what makes the mask causal, combined with it.

    >>> meant_argument("causal", ["window"], causal="masks.causal(n)")
    ' Write `& masks.causal(n)` after the mask'
    """
    return f" Write `& {causal}` after the mask" if word == "causal" else close_names(word, names)


def close_masks(word: str, names: Iterable[str]) -> str:
    """`close_names` for the name of a mask, which may also be one of OTHER_NAMES.

    >>> close_masks("sliding_window", [])
    ' Did you mean local(window)?'
    """
    meant = OTHER_NAMES.get(word.lower())
    return close_names(word, names) if meant is None else f" Did you mean {meant}?"
