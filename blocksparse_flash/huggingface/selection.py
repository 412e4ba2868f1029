"""Attention to blocks that each query selects, as the config of a model describes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..nn.mixture_of_blocks import mixture_of_block_attention
from .mask import Mask
from .names import KEY, running_layer

EXAMPLE = "{'kind': 'moba', 'k_blocks': 4, 'block_size': 64}"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The arguments of `mixture_of_block_attention` that a config holds."""

    k_blocks: int
    block_size: int
    by_group: bool = False


def selection_of(given: dict[Any, Any], name: str) -> Selection:
    """The selection that a dict describes, checked; `name` is where in the config the dict is."""
    if given.get("kind") != "moba":
        kind = repr(given["kind"]) if "kind" in given else f"no 'kind' in {given}"
        raise ValueError(f"{name} must have the kind 'moba', got {kind}; an example is {EXAMPLE}")
    known = ["kind", *(field.name for field in dataclasses.fields(Selection))]
    for key in given:
        if key not in known:
            raise ValueError(f"{name} must have no keys but {', '.join(known)}, got {key!r}: remove it")
    _check(given, name, "k_blocks", "an int of 1 or more, the blocks of a query with its own", lambda n: n >= 1)
    sizes = "16, 32, 64 or a multiple of 128, the tokens of a block"
    _check(given, name, "block_size", sizes, lambda n: n in (16, 32, 64) or (n > 0 and n % 128 == 0))
    by_group = given.get("by_group", False)
    if not isinstance(by_group, bool):
        raise ValueError(
            f"{name}['by_group'] must be True or False, got {by_group!r}; True lets the query heads that share keys "
            "select together"
        )
    return Selection(given["k_blocks"], given["block_size"], by_group)


def _check(given: dict[Any, Any], name: str, key: str, expected: str, is_valid: Any) -> None:
    """ValueError if a number of a selection is missing or wrong."""
    number = given.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not is_valid(number):
        got = repr(number) if key in given else "none"
        raise ValueError(f"{name}[{key!r}] must be {expected}, got {got}; an example is {EXAMPLE}")


def _more_than_causal(mask: Mask) -> str | None:
    """What the mask of a layer has besides causality and the padding of whole sequences, or None."""
    if mask.window is not None:
        return f"a sliding window of {mask.window} tokens"
    if mask.kind == "bidirectional":
        return "queries that attend to later tokens"
    if mask.kind != "causal":
        return "packed sequences, or a mask of the model's own"
    return None if mask.layout is None else "padding, and a cache that several tokens continue"


def check_call(mask: Mask, dropout: float, s_aux: Tensor | None, softcap: float | None) -> None:
    """ValueError for what attention to selected blocks does not have; `mask` is that of the layer."""
    layer, selection = running_layer(), f"the selection in config.{KEY}"
    way_out = f"give this layer None or a layout, config.{KEY} = [...] with an entry for each layer"
    more = _more_than_causal(mask)
    if more is not None:
        raise ValueError(
            f"{selection} needs a causal attention_mask, with or without padding, but {layer} has {more}: pad "
            f"sequences instead of packing them, continue padded ones token by token, or {way_out}"
        )
    if dropout:
        raise ValueError(
            f"{selection} has no dropout, got dropout={dropout} in {layer}: set the attention dropout of the config, "
            "such as config.attention_dropout, to 0.0"
        )
    for name, value in (("sinks (s_aux)", s_aux), ("softcap", softcap)):
        if value is not None:
            raise ValueError(f"{selection} has no {name}, but {layer} has: {way_out}")


def attention_to_selection(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None, deterministic: bool | None
) -> Tensor:
    """Attention of one layer to the blocks that its queries select: (batch, heads, q_len, v_head_dim).

    q, k, v  tokens before padding
    """
    selection: Selection = mask.selection

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mixture_of_block_attention(
            q, k, v, scale=scale, deterministic=deterministic, **dataclasses.asdict(selection)
        )

    # padding behind all tokens is behind every query that is a token, and neither selected nor attended to
    if mask.kv_lengths is None or q.shape[2] == k.shape[2]:
        return attend(q, k, v)
    # one query for each sequence, its last token; at least one key, also for a sequence of padding alone
    lengths = mask.kv_lengths.clamp(min=1).tolist()
    rows = [attend(q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in enumerate(lengths)]
    return torch.cat(rows)
