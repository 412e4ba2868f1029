"""Attention to blocks that each query selects, as the config of a model describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import attention_with_lse
from ..nn.document_blocks import DocumentBlocks
from ..nn.mixture_of_blocks import mixture_of_block_attention
from ..nn.native_sparse import compressed_layout, compressed_layout_in_documents, most_important_blocks
from ..runtime import tracing
from ..selection import is_key_block_size, selected_attention
from .mask import Mask
from .names import CONFIG_KEY, running_layer

EXAMPLE = "{'kind': 'moba', 'k_blocks': 4, 'block_size': 64}"
# keys of each kind; by_group is optional
_KEYS = {"moba": ("kind", "k_blocks", "block_size", "by_group"), "topk": ("kind", "k_blocks", "block_size")}
# first blocks, and last blocks up to the query's own, that "topk" always selects
_ALWAYS = 1, 2
# "topk" selects by the means of 32 keys, one every 16, as native sparse attention does
_POOLED, _STRIDE = 32, 16


@dataclasses.dataclass(frozen=True)
class Selection:
    """The dict of a config, checked."""

    kind: str
    k_blocks: int
    block_size: int
    by_group: bool = False


def selection_of(given: dict[Any, Any], name: str) -> Selection:
    """The selection that a dict describes, checked; `name` is where in the config the dict is."""
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        got = repr(kind) if "kind" in given else f"no 'kind' in {given}"
        raise ValueError(f"{name} must have the kind 'moba' or 'topk', got {got}; an example is {EXAMPLE}")
    for key in given:
        if key not in _KEYS[kind]:
            raise ValueError(f"{name} must have no keys but {', '.join(_KEYS[kind])}, got {key!r}: remove it")
    fewest = 1 if kind == "moba" else sum(_ALWAYS)
    counts = f"an int of {fewest} or more, counting blocks always selected"
    _check(given, name, "k_blocks", counts, lambda n: n >= fewest)
    sizes = "16, 32, 64 or a multiple of 128, the tokens of a block"
    _check(given, name, "block_size", sizes, is_key_block_size)
    if not isinstance(given.get("by_group", False), bool):
        raise ValueError(
            f"{name}['by_group'] must be True or False, got {given['by_group']!r}; True lets the query heads that "
            "share keys select together"
        )
    return Selection(**given)


def _check(given: dict[Any, Any], name: str, key: str, expected: str, is_valid: Callable[[int], bool]) -> None:
    """ValueError if a number of a selection is missing or wrong."""
    number = given.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not is_valid(number):
        got = repr(number) if key in given else "none"
        raise ValueError(f"{name}[{key!r}] must be {expected}, got {got}; an example is {EXAMPLE}")


def _more_than_causal(mask: Mask) -> tuple[str, str] | None:
    """What the mask of a layer has besides causality and the padding of whole sequences, and a hint, or None."""
    if mask.window is not None:
        return f"a sliding window of {mask.window} tokens", ""
    if mask.kind == "bidirectional":
        return "queries that attend to later tokens", ""
    if mask.kind != "causal":
        return "a mask of the model's own, or packed sequences with padding or with a window", ""
    if mask.layout is not None:
        return "padding, and a cache that several tokens continue", "continue padded sequences token by token, or "
    return None


def check_call(
    mask: Mask, dropout: float, s_aux: Tensor | None, softcap: float | None, bias: Tensor | None = None
) -> None:
    """ValueError for what attention to selected blocks does not have; `mask` is that of the layer."""
    layer, selection = running_layer(), f"the selection in config.{CONFIG_KEY}"
    hint = f"give this layer None or a layout, config.{CONFIG_KEY} = [...] with an entry for each layer"
    more = _more_than_causal(mask)
    if more is not None:
        raise ValueError(f"{selection} needs a causal attention_mask, but {layer} has {more[0]}: {more[1]}{hint}")
    if dropout:
        raise ValueError(
            f"{selection} has no dropout, got dropout={dropout} in {layer}: set the attention dropout of the config, "
            "such as config.attention_dropout, to 0.0"
        )
    for name, value in (("sinks (s_aux)", s_aux), ("softcap", softcap), ("bias of pairs", bias)):
        if value is not None:
            raise ValueError(f"{selection} has no {name}, but {layer} has: {hint}")


@tracing.untraced
def top_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_blocks: int,
    block_size: int,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Causal attention to the blocks that matter most: the selected branch of native sparse attention, with mean keys.

    q, k, v, block_size, cu_seqlens, scale, deterministic  as `mixture_of_block_attention`
    k_blocks  blocks for each query and head of keys, the first and the last two up to the query's own included

    The importance of a block is the attention weight of the key means (32 keys, one every 16) that overlap it, summed
    over the query heads that share keys. There are no parameters, and the selection has no gradient.
    """
    documents = None
    if cu_seqlens is not None:
        documents = DocumentBlocks.of(cu_seqlens, q, k, block_size)
        q, k, v = (documents.apart(tensor) for tensor in (q, k, v))
    queries, keys = q.detach(), k.detach()
    (kv_len, head_dim), q_start = k.shape[2:], k.shape[2] - q.shape[2]
    layout = None
    if kv_len < _POOLED:
        means = keys.new_empty(*k.shape[:2], 0, head_dim)
    else:
        means = keys.unfold(2, _POOLED, _STRIDE).mean(4).to(q.dtype)
        if documents is not None:
            layout = compressed_layout_in_documents(documents, block_size, _POOLED, _STRIDE)
        # the last token sees all means
        elif q.shape[2] > 1:
            layout = compressed_layout(kv_len, _POOLED, _STRIDE).crop(q_start)
    with torch.no_grad():
        _, lse = attention_with_lse(queries, means, means, layout, scale=scale)
    sizes: dict[str, Any] = {"compressed_size": _POOLED, "stride": _STRIDE, "always": _ALWAYS, "q_start": q_start}
    sizes |= {"k_blocks": k_blocks, "block_size": block_size}
    indices = most_important_blocks(queries, means, lse, **sizes, scale=scale, documents=documents)
    out = selected_attention(q, k, v, indices, block_size=block_size, scale=scale, deterministic=deterministic)
    return out if documents is None else documents.together(out)


def attention_to_selection(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None, deterministic: bool | None
) -> Tensor:
    """Attention of one layer to the blocks that its queries select: (batch, heads, q_len, v_head_dim).

    q, k, v  tokens before padding
    """
    chosen: Selection = mask.selection
    options: dict[str, Any] = {"k_blocks": chosen.k_blocks, "block_size": chosen.block_size}
    options |= {"scale": scale, "deterministic": deterministic, "cu_seqlens": mask.cu_seqlens}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if chosen.kind == "moba":
            return mixture_of_block_attention(q, k, v, by_group=chosen.by_group, **options)
        return top_block_attention(q, k, v, **options)

    # padding after the tokens comes after every real query, so causality excludes it
    if mask.kv_lengths is None or q.shape[2] == k.shape[2]:
        return attend(q, k, v)
    # one query for each sequence, its last token; at least one key, also for a sequence of padding alone
    lengths = mask.kv_lengths.clamp(min=1).tolist()
    rows = [attend(q[b, None], k[b, None, :, :n], v[b, None, :, :n]) for b, n in enumerate(lengths)]
    return torch.cat(rows)
