"""How does a Hugging Face model attend with a layout? `register()`, then `attn_implementation="blocksparse"`.

Knows: the two functions that transformers looks up by that name, one for masks and one for attention; configs, padding masks
and cache positions. Must not know: models, backends, plans' contents.

A mask is made once for each forward of the model, and passed to all of its layers. Positions in the tensors are slots;
a token's position is how many tokens stand before it, padding not counted, and that is what a layout speaks of: a padded
batch gives what each of its sequences alone gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .functional import attention, attention_with_lse
from .layout import BlockLayout

# not "blocksparse_flash": transformers takes every name with "flash" in it for a build of the package flash-attn, and looks for that
NAME = "blocksparse"
# the attribute of a model's config that holds its layout
KEY = "attention_layout"
# block size of what is not given as a layout
BLOCK = 128

# passed to every attention function, and without a meaning for it
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
    "softcap": "the scores would be capped; a config whose attn_logit_softcapping is None does without",
    "position_bias": "the scores would be biased",
    "output_attentions": "attention weights are never stored; ask for attn_implementation='eager'",
    "cache": "continuous batching has a cache of pages; call model.generate",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "packed sequences are told by position_ids that restart, or by a layout such as documents(cu_seqlens=...)",
    ),
}


class Mask(NamedTuple):
    """What passes through a model in the place of its attention mask.

    layout      of the queries and keys of this forward, causality included; None attends everywhere
    is_causal   True: also kv_pos <= q_pos + (kv_len - q_len); where there is a layout, it says so itself
    kind        "causal", "bidirectional", or "other": what transformers asked for
    window      of sliding attention, as transformers counts it, or None
    kv_lengths  int64 (batch,): tokens among the keys, which come first in `order`; None is all of them
    order       int64 (batch, kv_len): slots of the tokens, then those of the padding; None is as they stand
    back        int64 (batch, q_len): where in `order` each slot is, if it is that of the queries too
    """

    layout: BlockLayout | None
    is_causal: bool
    kind: str
    window: int | None = None
    kv_lengths: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None


# ---- layouts, on the host ----

# what a config holds, the length for which it is built, and bounds: -left <= kv_pos - q_pos <= right, None is none
Wanted = tuple[BlockLayout | str | None, int, int | None, int | None]


@functools.lru_cache(maxsize=16)
def _built(layout: BlockLayout | str | None, length: int, left: int | None, right: int | None) -> BlockLayout:
    """The whole layout, length x length."""
    if isinstance(layout, str):
        import masks

        layout = masks.build(layout, length)
    if layout is None:
        row = torch.arange(-(-length // BLOCK), device="cpu")
        first = torch.zeros_like(row) if left is None else (row * BLOCK - left).clamp(min=0) // BLOCK
        last = length - 1 if right is None else ((row + 1) * BLOCK - 1 + right).clamp(max=length - 1)
        layout = BlockLayout.from_ranges(
            first, last // BLOCK + torch.ones_like(row), length, length, block_size=BLOCK
        )

    def attends(q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        is_late_enough = kv_pos >= (0 if left is None else q_pos - left)
        return is_late_enough & (kv_pos <= (length if right is None else q_pos + right))

    if left is None and right is None:
        return layout
    block_q, block_kv = layout.block_size
    return BlockLayout.from_predicate(
        attends,
        length,
        length,
        block_size=layout.block_size,
        within=layout,
        looks=lambda row, col: row * block_q - col * block_kv,
    )


@functools.lru_cache(maxsize=256)
def _cropped(
    layout: BlockLayout | str | None,
    length: int,
    left: int | None,
    right: int | None,
    q_start: int,
    q_len: int,
    kv_start: int,
    kv_len: int,
    device: torch.device,
) -> BlockLayout:
    """The part of a layout that a forward needs, planned on its device."""
    built = _built(layout, length, left, right)
    if (q_start, q_len, kv_start, kv_len) != (0, length, 0, length):
        built = built.crop(q_start, q_start + q_len, kv_start, kv_start + kv_len)
    built.plan(device)
    return built


# layouts that compiled graphs hold, by id: torch.compile reads them from here, and cannot read an lru_cache
_COMPILED: dict[int, BlockLayout] = {}


def _compiled(*arguments: Any) -> int:
    """The key of a crop among those above."""
    layout = _cropped(*arguments)
    _COMPILED[id(layout)] = layout
    return id(layout)


# torch.compile would trace how a layout is made; this way the key is a constant of the graph
_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _crop(*arguments: Any) -> BlockLayout:
    """`_cropped`, also while torch.compile traces."""
    return _COMPILED[_compiled(*arguments)] if torch.compiler.is_compiling() else _cropped(*arguments)


def _in_slots(built: BlockLayout, is_token: Tensor, q_offset: int, q_len: int, kv_offset: int) -> BlockLayout:
    """The layout of one sequence, in which positions count tokens, for slots, some of which are padding.

    is_token  bool (slots,), on the host; queries are slots q_offset .. q_offset + q_len - 1, keys those from kv_offset on
    """
    n_slots, n_tokens = len(is_token), int(is_token.sum())
    behind = (0, n_slots - n_tokens)
    # tokens in their order, then padding
    position = torch.where(is_token, is_token.cumsum(0) - 1, n_tokens + (~is_token).cumsum(0) - 1)
    if is_token[q_offset : q_offset + q_len].all():
        first = int(position[q_offset])
        moved = built.crop(first, first + q_len, 0, n_tokens).pad(kv=behind).permute(kv_order=position)
        return moved.crop(kv_start=kv_offset)
    moved = built.crop(0, n_tokens, 0, n_tokens).pad(behind, behind).permute(position, position)
    return moved.crop(q_offset, q_offset + q_len, kv_offset)


# ---- what transformers asks for ----


def _is_same(a: Any, b: Any) -> bool:
    """Whether two functions are the same code over the same values: transformers makes its masks as closures."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a is b or (a.__code__ is b.__code__ and _is_same(*map(tuple, cells)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and isinstance(a, int) and a == b


def _meaning(
    mask_function: Callable[..., Tensor], local_size: int | None, batch: int, length: int
) -> tuple[str, int | None]:
    """(kind, window) of a mask function of transformers' own, as in `Mask`; ("other", None) of all else.

    batch, length  of the queries
    """
    from transformers import masking_utils as known

    meanings: dict[tuple[str, int | None], Callable[..., Tensor]] = {
        ("causal", None): known.causal_mask_function,
        ("bidirectional", None): known.bidirectional_mask_function,
    }
    if local_size is not None:
        meanings["causal", local_size] = known.sliding_window_causal_mask_function(local_size)
        meanings["bidirectional", local_size] = known.sliding_window_bidirectional_mask_function(local_size)
    one_sequence = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.arange(length).expand(batch, -1)
    for meaning, function in meanings.items():
        # while torch.compile traces, transformers takes every batch for a packed one
        packed = known.packed_sequence_compatibility_function(function, positions, one_sequence)
        if _is_same(mask_function, function) or _is_same(mask_function, packed):
            return meaning
    return "other", None


def _wanted(config: Any) -> BlockLayout | str | None:
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
            f"config.{KEY} must be of one length, shared by the batch, got shape {layout.shape}: (1, heads | 1, length, "
            "length) is cropped to what each forward needs"
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"config.{KEY} cannot say which attentions of a model with cross-attention it is for: set it to None, and "
            "all of them are dense"
        )
    return layout


def _length(config: Any, layout: BlockLayout | str | None, n_slots: int) -> int:
    """Tokens for which a layout is built: the same for every input, so that what a token attends to is the same too."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(layout, BlockLayout):
        length, why = layout.q_len, f"config.{KEY} is of"
    elif isinstance(longest, int) and (layout is not None or longest >= n_slots):
        length, why = longest, "config.max_position_embeddings, for which the specification is built, is"
    else:
        return n_slots
    if n_slots > length:
        raise ValueError(f"the sequence has {n_slots} tokens, but {why} {length}: make that longer")
    return length


def _is_contiguous(is_token: Tensor) -> bool:
    """Whether no sequence has padding between its tokens; waits for the device."""
    begins = is_token[:, 1:] & ~is_token[:, :-1]
    return bool((begins.sum(dim=1) + is_token[:, 0] <= 1).all())


# ---- the mask of a forward ----


class _Asked(NamedTuple):
    """What transformers asks a mask of, but for the padding. Slots: queries from q_offset on, keys from kv_offset on."""

    mask_function: Callable[..., Tensor]
    kind: str
    window: int | None
    config: Any
    batch: int
    q_offset: int
    q_len: int
    kv_offset: int
    kv_len: int
    device: torch.device
    use_vmap: bool

    @property
    def is_square(self) -> bool:
        return self.q_offset == self.kv_offset == 0 and self.q_len == self.kv_len

    @property
    def is_aligned(self) -> bool:
        """Whether the last query is the last key."""
        return self.q_offset + self.q_len == self.kv_offset + self.kv_len

    def wanted(self) -> Wanted | None:
        """What is to be built, None if nothing is: attention to all, or to all before."""
        layout = _wanted(self.config)
        if layout is None and self.window is None:
            return None
        length = _length(self.config, layout, max(self.q_offset + self.q_len, self.kv_offset + self.kv_len))
        if self.kind == "causal":
            return layout, length, None if self.window is None else self.window - 1, 0
        return layout, length, self.window, self.window


def _with_padding(asked: _Asked, layout: BlockLayout | None, is_key: Tensor, moves_queries: bool) -> Mask:
    """A mask that brings the tokens to the front, on the device."""
    is_causal = layout is None and asked.kind == "causal" and moves_queries
    order = torch.argsort(~is_key, dim=1, stable=True)
    back = torch.argsort(order, dim=1) if moves_queries else None
    if not torch.compiler.is_compiling() and not bool((is_key[:, 1:] & ~is_key[:, :-1]).any()):
        # on the right already
        order, back = None, None
    return Mask(layout, is_causal, asked.kind, asked.window, is_key.sum(dim=1), order, back)


def _known(asked: _Asked, is_token: Tensor | None) -> Mask | None:
    """The mask, if it takes nothing but a layout, lengths and an order; None if pairs have to be looked at."""
    if asked.kind == "other":
        return None
    wanted = asked.wanted()
    spans = asked.q_offset, asked.q_len, asked.kv_offset, asked.kv_len, asked.device
    if is_token is None:
        if wanted is not None:
            return Mask(_crop(*wanted, *spans), False, asked.kind, asked.window)
        is_causal = asked.kind == "causal"
        return Mask(None, is_causal, asked.kind) if asked.is_aligned or not is_causal else None
    if wanted is None and (asked.kind == "bidirectional" or (asked.q_len == 1 and asked.is_aligned)):
        return _with_padding(asked, None, is_token[:, asked.kv_offset :], moves_queries=False)
    if asked.is_square and (asked.window is None or _is_contiguous(is_token)):
        layout = None if wanted is None else _crop(*wanted, *spans)
        return _with_padding(asked, layout, is_token, moves_queries=True)
    return None


def _looked_at(asked: _Asked, is_token: Tensor | None) -> Mask:
    """The mask from what transformers' function says of each pair, on the host: O(blocks of the layout), if there is one."""
    wanted, within, window = asked.wanted(), None, asked.window
    is_token = None if is_token is None else is_token.cpu()
    q_len, kv_len, q_offset, kv_offset = asked.q_len, asked.kv_len, asked.q_offset, asked.kv_offset
    if wanted is not None and is_token is None:
        within = _cropped(*wanted, q_offset, q_len, kv_offset, kv_len, asked.device)
    elif wanted is not None:
        assert is_token is not None
        is_said = asked.kind != "other" and bool(is_token[:, q_offset : q_offset + q_len].all())
        is_said = is_said and (window is None or _is_contiguous(is_token))
        # tokens are as near by position as by slot, or nearer: bounds of positions lose no pair within those of slots
        built = _built(*wanted)
        within = BlockLayout.stack_batches(
            [_in_slots(built, tokens, q_offset, q_len, kv_offset) for tokens in is_token]
        )
        if is_said:
            within.plan(asked.device)
            return Mask(within, False, asked.kind, window)

    def attends(batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        places = batch, head, q_pos + q_offset, kv_pos + kv_offset
        said = _one_by_one(asked.mask_function, *places) if asked.use_vmap else asked.mask_function(*places)
        return said.cpu() if is_token is None else said.cpu() & is_token[batch, places[3]]

    block = BLOCK if within is None else within.block_size
    layout = BlockLayout.from_predicate(attends, q_len, kv_len, block_size=block, within=within, batch=asked.batch)
    layout.plan(asked.device)
    return Mask(layout, False, asked.kind, window)


def _one_by_one(mask_function: Callable[..., Tensor], *places: Tensor) -> Tensor:
    """What a function of single pairs says of many."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    together = torch.broadcast_tensors(*places)
    with TransformGetItemToIndex():
        return torch.vmap(mask_function)(*(place.reshape(-1) for place in together)).reshape(together[0].shape)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Mask:
    """The mask function of transformers: what the layers of one forward attend to.

    mask_function   mask_function(batch, head, q_slot, kv_slot) -> bool, what the model asks for
    attention_mask  bool (batch, slots), True for a token, False for padding wherever it is; None is no padding
    config          of the model; config.attention_layout is the layout
    local_size      tokens of a window, where there is one
    use_vmap        True: mask_function takes one pair at a time
    raises          TypeError, ValueError naming what cannot be
    """
    from transformers import masking_utils

    if isinstance(q_offset, Tensor):
        raise ValueError(
            "past_key_values is a static cache, whose length only the device knows, but a layout is chosen on the host: "
            "use DynamicCache, in generate cache_implementation='dynamic'"
        )
    kind: str
    if mask_function is masking_utils.causal_mask_function:
        kind, window = "causal", None
    elif mask_function is masking_utils.bidirectional_mask_function:
        kind, window = "bidirectional", None
    else:
        kind, window = "other", None
    asked = _Asked(
        mask_function,
        kind,
        window,
        config,
        batch_size,
        q_offset,
        q_length,
        kv_offset,
        kv_length,
        torch.device(device),
        use_vmap,
    )
    is_token = attention_mask
    if is_token is not None:
        n_slots = kv_offset + kv_length
        is_token = torch.nn.functional.pad(is_token, (0, max(0, n_slots - is_token.shape[1])))[:, :n_slots]
        if not torch.compiler.is_compiling() and bool(is_token.all()):
            is_token = None
    mask = _known(asked, is_token)
    if mask is not None:
        return mask
    return _general(asked, is_token, local_size)


@torch.compiler.disable(
    reason="masks with windows, packed sequences or padding in a cache are made on the host: compile without fullgraph=True; "
    "where none of these is meant, attention_mask=torch.ones_like(input_ids) says so"
)
def _general(asked: _Asked, is_token: Tensor | None, local_size: int | None) -> Mask:
    if asked.kind == "other":
        kind, window = _meaning(asked.mask_function, local_size, asked.batch, asked.q_len)
        asked = asked._replace(kind=kind, window=window)
        mask = _known(asked, is_token)
        if mask is not None:
            return mask
    return _looked_at(asked, is_token)


# ---- attention of a layer ----


def _refuse(unread: dict[str, Any]) -> None:
    """ValueError for what would change the result, and for what is not known."""
    for name, value in unread.items():
        if value is None or name in _HARMLESS or (name == "output_attentions" and not value):
            continue
        way_out = _WAYS_OUT.get(name, "it is not known what that means; attn_implementation='eager' may know")
        raise ValueError(f"attn_implementation='{NAME}' cannot compute attention with {name}={value!r}: {way_out}")


def _unasked(module: torch.nn.Module, q_len: int, kv_len: int, is_causal: bool | None, device: torch.device) -> Mask:
    """The mask of a model that makes none, such as ViT."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    asked = _Asked(
        None, "causal" if is_causal else "bidirectional", None, getattr(module, "config", None), 0, 0, q_len, 0, kv_len,
        device, False,
    )  # fmt: skip
    wanted = asked.wanted()
    if wanted is None:
        return Mask(None, is_causal, asked.kind)
    if not asked.is_square:
        raise ValueError(
            f"config.{KEY} is for self-attention, but the layer gave {q_len} queries and {kv_len} keys without a mask"
        )
    return Mask(_crop(*wanted, 0, q_len, 0, kv_len, device), False, asked.kind)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    **unread: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: `attention` with the mask that `attention_mask` made.

    query           (batch, heads, q_len, head_dim)
    key, value      (batch, kv_heads, kv_len, ...), not repeated for grouped heads
    s_aux           (heads,): logits of sinks, to which a query may attend for nothing
    returns         (batch, q_len, heads, v_head_dim), and no weights
    raises          ValueError for every argument that would change the result otherwise, by name
    """
    _refuse(unread)
    mask = attention_mask
    if mask is None:
        mask = _unasked(module, query.shape[2], key.shape[2], is_causal, query.device)
    elif not isinstance(mask, Mask):
        raise TypeError(
            f"attention_mask must be 2-D, (batch, length), or what transformers makes of it, got {type(mask).__name__}"
            f" of shape {tuple(getattr(mask, 'shape', ()))}: for a mask of pairs set config.{KEY} = "
            "blocksparse_flash.interop.from_huggingface(mask, block_size=128)"
        )
    elif is_causal is not None and mask.kind != "other" and is_causal != (mask.kind == "causal"):
        raise ValueError(f"is_causal={is_causal} contradicts the mask that the model made, which is {mask.kind}")
    if sliding_window is not None and mask.kind != "other" and mask.window is None and key.shape[2] > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} contradicts the mask that the model made, which has no window and "
            f"{key.shape[2]} keys"
        )
    if mask.order is not None:
        order = mask.order[:, None, :, None]
        key, value = (torch.take_along_dim(tensor, order, dim=2) for tensor in (key, value))
        if mask.back is not None:
            query = torch.take_along_dim(query, order, dim=2)
    options = {"causal": mask.is_causal, "scale": scaling, "kv_lengths": mask.kv_lengths, "dropout_p": float(dropout)}
    if s_aux is None:
        out = attention(query, key, value, mask.layout, deterministic=deterministic, **options)
    else:
        out, lse = attention_with_lse(query, key, value, mask.layout, deterministic=deterministic, **options)
        # one more logit in the sum, and nothing more in the mean
        out = (out * torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None])[..., None]).to(out.dtype)
    if mask.back is not None:
        out = torch.take_along_dim(out, mask.back[:, None, :, None], dim=2)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes `attn_implementation="blocksparse"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, attention_mask)
