"""How does a model of Hugging Face transformers attend with a layout? `register()`, then `attn_implementation="blocksparse"`.

Knows: the two functions that transformers looks up by that name, one for masks and one for attention; configs, padding masks,
cache positions. Must not know: any model, backends, plans.

A mask is made once for each forward of a model, and goes through all of its layers. A place in its tensors is a slot. A
layout speaks of positions, which count tokens and not padding, so that a padded batch gives what each of its sequences alone
gives. transformers' own windows are as it has them, in slots.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import crops
from .functional import attention
from .layout import BlockLayout

# not "blocksparse_flash": transformers takes every name with "flash" in it for a build of the package flash-attn
NAME = "blocksparse"
# the attribute of a model's config that holds its layout
KEY = "attention_layout"

MaskFunction = Callable[..., Tensor]

# passed to attention functions, and without a meaning for them
_HARMLESS = {
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
}
_WAYS_OUT = {
    "position_bias": "a bias of pairs has no place in blocks",
    "output_attentions": "attention weights are never stored",
    "cache": "continuous batching keeps its cache in pages; model.generate does not",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "packed sequences are told apart by position_ids that restart, where there is no attention_mask",
    ),
}
_STATIC = (
    "past_key_values is a static cache, with room for keys to come and a length that only the device knows, but a layout is "
    "chosen on the host: use DynamicCache, in generate cache_implementation='dynamic'"
)


class Mask(NamedTuple):
    """What goes through a model in the place of its attention mask.

    layout      of the queries and keys of this forward, causality included; None attends everywhere
    is_causal   True: also kv_pos <= q_pos + (kv_len - q_len); where there is a layout, it says so itself
    kind        what transformers asked for: "causal", "bidirectional" or "other"
    window      of sliding attention, as transformers counts it, or None
    kv_lengths  int64 (batch,): how many keys are tokens, which `order` brings to the front; None is all
    order       int64 (batch, kv_len): slots of the tokens, then those of the padding; None leaves them
    back        int64 (batch, q_len): where `order` has each slot, if queries have the same order; None leaves them
    """

    layout: BlockLayout | None
    is_causal: bool
    kind: str
    window: int | None = None
    kv_lengths: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None


# ---- what does transformers ask for? ----


def _is_same(a: Any, b: Any) -> bool:
    """Whether two functions are the same code over the same values: transformers makes its masks as closures."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        held = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (a, b)]
        return a.__code__ is b.__code__ and _is_same(*held)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and isinstance(a, int) and a == b


def _packed_alone(function: MaskFunction, batch: int, q_len: int) -> MaskFunction:
    """What transformers makes of a mask function where each pack holds one document, as while torch.compile traces."""
    from transformers import masking_utils

    known: Any = masking_utils
    document = torch.zeros(batch, q_len, dtype=torch.int64, device="cpu")
    if not hasattr(known, "packed_sequence_compatibility_function"):
        # transformers 5.10 to 5.16
        return known.and_masks(function, known.packed_sequence_mask_function(document))
    return known.packed_sequence_compatibility_function(
        function, torch.arange(q_len, device="cpu").expand(batch, -1), document
    )


def _meaning(mask_function: MaskFunction, local_size: int | None, batch: int, q_len: int) -> tuple[str, int | None]:
    """(kind, window), as in `Mask`, of a mask function of transformers' own; ("other", None) of all else."""
    from transformers import masking_utils

    # whose annotations speak of single numbers
    known: Any = masking_utils
    meanings: dict[tuple[str, int | None], MaskFunction] = {
        ("causal", None): known.causal_mask_function,
        ("bidirectional", None): known.bidirectional_mask_function,
    }
    if local_size is not None:
        meanings["causal", local_size] = known.sliding_window_causal_mask_function(local_size)
        meanings["bidirectional", local_size] = known.sliding_window_bidirectional_mask_function(local_size)
    for meaning, function in meanings.items():
        if _is_same(mask_function, function) or _is_same(mask_function, _packed_alone(function, batch, q_len)):
            return meaning
    return "other", None


def _layout_of(config: Any) -> BlockLayout | str | None:
    """What a config holds, checked."""
    layout = getattr(config, KEY, None)
    if layout is None:
        return None
    if not isinstance(layout, BlockLayout | str):
        raise TypeError(
            f"config.{KEY} must be a BlockLayout, a specification such as 'butterfly | local(window=512)', or None for "
            f"attention to all, got {type(layout).__name__}"
        )
    if isinstance(layout, BlockLayout) and (layout.q_len != layout.kv_len or layout.shape[0] != 1):
        raise ValueError(
            f"config.{KEY} must have shape (1, heads | 1, length, length), of which each forward takes what it needs, got "
            f"{layout.shape}"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"config.{KEY} cannot say for which attentions of a model with cross-attention it is: set it to None, and all "
            "of them are dense"
        )
    return layout


class _Asked(NamedTuple):
    """What transformers asks of a mask, but for the padding; `part` is of slots."""

    kind: str
    window: int | None
    config: Any
    batch: int
    part: crops.Part

    @property
    def q_stop(self) -> int:
        return self.part.q_start + self.part.q_len

    @property
    def kv_stop(self) -> int:
        return self.part.kv_start + self.part.kv_len

    @property
    def is_square(self) -> bool:
        return self.part.q_start == self.part.kv_start == 0 and self.part.q_len == self.part.kv_len

    def whole(self) -> crops.Whole | None:
        """The layout to be built; None where there is neither layout nor window."""
        layout = _layout_of(self.config)
        if layout is None and self.window is None:
            return None
        length = self._length(layout)
        if self.kind == "causal":
            return crops.Whole(layout, length, None if self.window is None else self.window - 1, 0)
        return crops.Whole(layout, length, self.window, self.window)

    def _length(self, layout: BlockLayout | str | None) -> int:
        """For which a layout is built: the same for every input, so that what a token attends to is the same too."""
        needed = max(self.q_stop, self.kv_stop)
        longest = getattr(self.config, "max_position_embeddings", None)
        if isinstance(layout, BlockLayout):
            length, whose = layout.q_len, f"config.{KEY} is of"
        elif isinstance(longest, int) and (layout is not None or longest >= needed):
            length, whose = longest, f"config.{KEY} is built for config.max_position_embeddings ="
        elif layout is None or self.is_square:
            return needed
        else:
            raise ValueError(
                f"config.{KEY} is built for config.max_position_embeddings, which this config lacks: give it a BlockLayout "
                "of the longest sequence"
            )
        if needed > length:
            raise ValueError(f"the sequence has {needed} tokens, but {whose} {length}: make that longer")
        return length


# ---- the mask of a forward ----


def _of_many(mask_function: MaskFunction) -> MaskFunction:
    """The function of many pairs that says of each what a function of one pair says."""

    def of_many(*places: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        together = torch.broadcast_tensors(*places)
        # a function of one pair may look it up in a tensor, which vmap allows in this context only
        with TransformGetItemToIndex():
            return torch.vmap(mask_function)(*(place.reshape(-1) for place in together)).reshape(together[0].shape)

    return of_many


def _has_gaps(is_token: Tensor) -> bool:
    """Whether a sequence has padding between its tokens; waits for the device."""
    begins = (is_token[:, 1:] & ~is_token[:, :-1]).sum(dim=1) + is_token[:, 0]
    return bool((begins > 1).any())


def _with_padding(asked: _Asked, layout: BlockLayout | None, is_key: Tensor, *, moves_queries: bool) -> Mask:
    """The mask that brings tokens to the front; while torch.compile traces also where they are there already."""
    is_causal = layout is None and asked.kind == "causal"
    order = back = None
    if torch.compiler.is_compiling() or bool((is_key[:, 1:] & ~is_key[:, :-1]).any()):
        order = torch.argsort(~is_key, dim=1, stable=True)
        back = torch.argsort(order, dim=1) if moves_queries else None
    return Mask(layout, is_causal, asked.kind, asked.window, is_key.sum(dim=1), order, back)


def _by_rule(asked: _Asked, is_token: Tensor | None) -> Mask | None:
    """The mask, if it takes no more than a layout, lengths and an order; None if pairs have to be looked at."""
    kind, window, part = asked.kind, asked.window, asked.part
    if kind == "other":
        return None
    if kind == "causal" and asked.kv_stop > asked.q_stop:
        raise ValueError(_STATIC)
    whole = asked.whole()
    if is_token is None:
        if whole is not None:
            return Mask(crops.cropped(whole, part), False, kind, window)
        is_aligned = kind == "bidirectional" or asked.kv_stop == asked.q_stop
        return Mask(None, kind == "causal", kind) if is_aligned else None
    is_last = part.q_len == 1 and asked.q_stop == asked.kv_stop
    if whole is None and (kind == "bidirectional" or is_last):
        return _with_padding(asked, None, is_token[:, part.kv_start :], moves_queries=False)
    if asked.is_square and (window is None or not _has_gaps(is_token)):
        layout = None if whole is None else crops.cropped(whole, part)
        return _with_padding(asked, layout, is_token, moves_queries=True)
    return None


def _by_pairs(asked: _Asked, is_token: Tensor | None, mask_function: MaskFunction) -> Mask:
    """The mask made of blocks, batch by batch, on the host: O(blocks of the layout), or of all blocks without one."""
    kind, window, part, whole = asked.kind, asked.window, asked.part, asked.whole()
    within = None
    if is_token is not None:
        is_token = is_token.cpu()
    if whole is not None and is_token is None:
        within = crops.cropped(whole, part)
    elif whole is not None and is_token is not None:
        # between tokens there are as many positions as slots, or fewer: bounds on positions lose no pair of a window
        layout = crops.built(whole)
        within = BlockLayout.stack_batches([crops.in_slots(layout, tokens, part) for tokens in is_token])
        if kind != "other" and (window is None or not _has_gaps(is_token)):
            within.plan(part.device)
            return Mask(within, False, kind, window)

    def attends(batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        pairs = batch, head, q_pos + part.q_start, kv_pos + part.kv_start
        # where the tensors are that the function looks things up in
        said = mask_function(*(place.to(part.device) for place in pairs)).cpu()
        return said if is_token is None else said & is_token[batch, pairs[3]]

    layout = BlockLayout.from_predicate(
        attends,
        part.q_len,
        part.kv_len,
        block_size=crops.BLOCK if within is None else within.block_size,
        within=within,
        batch=asked.batch,
    )
    layout.plan(part.device)
    return Mask(layout, False, kind, window)


@torch.compiler.disable(
    reason="windows, packed sequences and padding in a cache make a mask on the host: compile without fullgraph=True. Where "
    "none of these is meant, attention_mask=torch.ones_like(input_ids) says so"
)
def _on_the_host(
    asked: _Asked, is_token: Tensor | None, mask_function: MaskFunction, local_size: int | None, takes_pairs: bool
) -> Mask:
    if asked.kind == "other":
        kind, window = _meaning(mask_function, local_size, asked.batch, asked.part.q_len)
        asked = asked._replace(kind=kind, window=window)
        mask = _by_rule(asked, is_token)
        if mask is not None:
            return mask
    return _by_pairs(asked, is_token, _of_many(mask_function) if takes_pairs else mask_function)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Mask:
    """The mask function of transformers: what the layers of one forward attend to. Its names are theirs.

    batch_size, q_length, kv_length  sequences, queries and keys of this forward
    q_offset, kv_offset  the first slot of the queries, of the keys
    mask_function   mask_function(batch, head, q_slot, kv_slot) -> bool: what the model asks for; the layout is kept as well
    attention_mask  bool (batch, slots), True for a token, False for padding, wherever it is; None is no padding
    config          of the model; its `attention_layout` is a BlockLayout, a specification, or None
    device          of the queries
    local_size      tokens of a window, where mask_function has one
    use_vmap        True: mask_function takes one pair at a time
    raises          TypeError, ValueError naming what cannot be
    """
    # names of the module: torch.compile of torch 2.11 cannot trace an import from the package, which is loaded lazily
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if isinstance(q_offset, Tensor):
        raise ValueError(_STATIC)
    # whose annotations speak of single numbers
    function: Any = mask_function
    kind = "other"
    if function is causal_mask_function:
        kind = "causal"
    elif function is bidirectional_mask_function:
        kind = "bidirectional"
    part = crops.Part(q_offset, q_length, kv_offset, kv_length, torch.device(device))
    asked = _Asked(kind, None, config, batch_size, part)
    is_token = attention_mask
    if is_token is not None:
        if is_token.ndim != 2 or is_token.shape[0] != batch_size:
            raise ValueError(
                f"attention_mask must be (batch, length), 1 for a token and 0 for padding, with batch {batch_size} as the "
                f"inputs have, got shape {tuple(is_token.shape)}"
            )
        missing = max(0, asked.kv_stop - is_token.shape[1])
        is_token = torch.nn.functional.pad(is_token, (0, missing))[:, : asked.kv_stop]
        if not torch.compiler.is_compiling() and bool(is_token.all()):
            is_token = None
    mask = _by_rule(asked, is_token)
    return _on_the_host(asked, is_token, mask_function, local_size, use_vmap) if mask is None else mask


# ---- the attention of a layer ----


def _refuse(unread: dict[str, Any]) -> None:
    """ValueError for what would change the result, and for what is not known."""
    for name, value in unread.items():
        if value is not None and value is not False and name not in _HARMLESS:
            way_out = _WAYS_OUT.get(name, "it is not known what that means")
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"attn_implementation='{NAME}' cannot attend with {name}, which is {given}: {way_out}; "
                "attn_implementation='eager' is transformers' own"
            )


def _of_layer(module: torch.nn.Module, q_len: int, kv_len: int, is_causal: bool | None, device: torch.device) -> Mask:
    """The mask of a model that makes none, such as ViT."""
    if is_causal is None:
        # what transformers assumes
        is_causal = bool(getattr(module, "is_causal", True))
    kind = "causal" if is_causal else "bidirectional"
    part = crops.Part(0, q_len, 0, kv_len, device)
    asked = _Asked(kind, None, getattr(module, "config", None), 1, part)
    whole = asked.whole()
    if whole is None:
        return Mask(None, is_causal, kind)
    if not asked.is_square:
        raise ValueError(
            f"config.{KEY} needs to know which positions {q_len} queries and {kv_len} keys have, but the model made no mask"
        )
    return Mask(crops.cropped(whole, part), False, kind)


def _check(mask: Any, kv_len: int, is_causal: bool | None, sliding_window: int | None) -> None:
    """Whether a mask is ours, and does not contradict what its layer says."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"attention_mask must be (batch, length), of which transformers makes what layers take, got "
            f"{type(mask).__name__} of shape {tuple(getattr(mask, 'shape', ()))}: a mask of pairs is a layout, config.{KEY} = "
            "blocksparse_flash.interop.from_huggingface(mask, block_size=128)"
        )
    if mask.kind == "other":
        return
    if is_causal is not None and is_causal != (mask.kind == "causal"):
        raise ValueError(f"is_causal={is_causal} contradicts the mask that the model made, which is {mask.kind}")
    if sliding_window is not None and mask.window is None and kv_len > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} contradicts the mask that the model made, which has no window over its "
            f"{kv_len} keys"
        )


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    **unread: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: `attention`, with the mask that `attention_mask` made. Its names are theirs.

    module      the layer, whose config is asked where there is no mask
    query       (batch, heads, q_len, head_dim)
    key, value  (batch, kv_heads, kv_len, ...), as the cache keeps them, not repeated for grouped heads
    attention_mask  what `attention_mask` made; None where transformers asked for none
    dropout, scaling, deterministic  dropout_p, scale and deterministic of `attention`
    is_causal, sliding_window  must agree with the mask
    s_aux, softcap  sinks and softcap of `attention`
    returns     (batch, q_len, heads, v_head_dim), and no weights
    raises      ValueError for every argument among `unread` that would change the result, by name
    """
    _refuse(unread)
    mask = attention_mask
    if mask is None:
        mask = _of_layer(module, query.shape[2], key.shape[2], is_causal, query.device)
    _check(mask, key.shape[2], is_causal, sliding_window)
    if mask.order is not None:
        order = mask.order[:, None, :, None]
        key, value = torch.take_along_dim(key, order, dim=2), torch.take_along_dim(value, order, dim=2)
        if mask.back is not None:
            query = torch.take_along_dim(query, order, dim=2)
    out = attention(
        query,
        key,
        value,
        mask.layout,
        causal=mask.is_causal,
        scale=scaling,
        kv_lengths=mask.kv_lengths,
        dropout_p=dropout,
        deterministic=deterministic,
        sinks=s_aux,
        softcap=softcap,
    )
    if mask.back is not None:
        out = torch.take_along_dim(out, mask.back[:, None, :, None], dim=2)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes `attn_implementation="blocksparse"` known to transformers, for every model that looks its attention up by name.

    The model's config says what is attended to, in `attention_layout`: a BlockLayout; a specification for `masks.build`, such
    as "butterfly | local(window=512)", which is saved with the config; or None, for attention to all. It is over positions
    0 .. length - 1, of which each forward takes those it has; a specification is built for config.max_position_embeddings
    where there is such a number. What the model asks for, causality, windows and padding, holds as well.

    Calling it again changes nothing. Needs transformers (`pip install 'blocksparse_flash[huggingface]'`).

    >>> register()  # doctest: +SKIP
    >>> config = transformers.LlamaConfig(attention_layout="butterfly | local(window=512)")  # doctest: +SKIP
    >>> transformers.LlamaForCausalLM._from_config(config, attn_implementation="blocksparse")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, attention_mask)
