"""The mask function of transformers: builds the Mask that all layers of one forward share.

A slot is a position in the tensors of a forward, padding included. A layout counts tokens only, so each sequence of a
padded batch gives the same result as on its own. The sliding windows of transformers count slots, as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import layout_crops
from ..blocks.stored_blocks import number_of
from ..layout import BlockLayout
from ..packed import layout_on_host, packed_layout
from ..plan.packed_builder import Documents
from .config_layouts import Layout, layouts_of, of_layer
from .mask import Mask
from .model_hooks import packed_documents
from .names import CONFIG_KEY, owner_of, running_layer
from .selection import Selection

MaskFunction = Callable[..., Tensor]

STATIC_CACHE = (
    "past_key_values is a static cache, whose length only the device knows, but torch.compile(fullgraph=True) traces a "
    "forward in which several tokens continue it: continue it token by token, or without torch.compile"
)


def _tensors_in(a: Any, b: Any) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors that two functions hold in the same places; None if the functions differ otherwise.

    Compares code and closure values: transformers builds its masks as closures.
    """
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        held = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (a, b)]
        return _tensors_in(*held) if a.__code__ is b.__code__ else None
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        found = [_tensors_in(*pair) for pair in zip(a, b, strict=True)]
        return None if None in found else [pair for pairs in found for pair in pairs or ()]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [(a, b)] if a.shape == b.shape else None
    return [] if type(a) is type(b) and isinstance(a, int) and a == b else None


def _is_same(a: MaskFunction, b: MaskFunction) -> bool:
    """Whether two functions compute the same; waits for the device of the tensors that they hold."""
    found = _tensors_in(a, b)
    return found is not None and all(torch.equal(one.cpu(), other.cpu()) for one, other in found)


def _packed(function: MaskFunction, document: Tensor) -> MaskFunction:
    """The mask function that transformers makes for packed documents: document (batch, q_len) of each token."""
    from transformers import masking_utils

    known: Any = masking_utils
    batch, q_len = document.shape
    if not hasattr(known, "packed_sequence_compatibility_function"):
        # transformers 5.10 to 5.16
        return known.and_masks(function, known.packed_sequence_mask_function(document))
    return known.packed_sequence_compatibility_function(
        function, torch.arange(q_len, device="cpu").expand(batch, -1), document
    )


def _counts_within_documents(mask_function: Any) -> bool:
    """Whether transformers made a mask function for packed documents, where positions restart in each one."""
    from transformers import masking_utils

    if isinstance(mask_function, tuple):
        return any(map(_counts_within_documents, mask_function))
    # transformers 5.10 to 5.16 have no such functions: there, chunks are counted across documents
    remap: Any = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if not isinstance(mask_function, FunctionType) or remap is None:
        return False
    if mask_function.__code__ is remap(None, None).__code__:
        return True
    return any(_counts_within_documents(cell.cell_contents) for cell in mask_function.__closure__ or ())


def _meaning(
    mask_function: MaskFunction, local_size: int | None, batch: int, q_len: int
) -> tuple[str, int | None, Tensor | None]:
    """(kind, window, documents) of a mask function of transformers; ("other", None, None) for any other function.

    kind, window  see `Mask`
    documents     integers (batch, q_len), the document of each token; None if each sequence is one document
    """
    from transformers import masking_utils

    # Any, since the annotations of transformers allow single numbers only
    known: Any = masking_utils
    meanings: dict[tuple[str, int | None], MaskFunction] = {
        ("causal", None): known.causal_mask_function,
        ("bidirectional", None): known.bidirectional_mask_function,
    }
    if local_size is not None:
        meanings["causal", local_size] = known.sliding_window_causal_mask_function(local_size)
        meanings["bidirectional", local_size] = known.sliding_window_bidirectional_mask_function(local_size)
    # as when torch.compile traces
    alone = torch.zeros(batch, q_len, dtype=torch.int64, device="cpu")
    for (kind, window), function in meanings.items():
        packed_alone = _packed(function, alone)
        if _is_same(mask_function, function) or _is_same(mask_function, packed_alone):
            return kind, window, None
        for documents, other in _tensors_in(mask_function, packed_alone) or ():
            if other is alone:
                return kind, window, documents
    return "other", None, None


class _Request(NamedTuple):
    """The mask that transformers requests, without padding; `crop` counts slots."""

    kind: str
    window: int | None
    config: Any
    batch: int
    crop: layout_crops.Crop
    layout: Layout
    # how queries choose blocks, in place of a layout
    selection: Selection | None = None
    # slot of the only query, if keys after it are unused room of a static cache; int64 () if only the device knows it
    position: int | Tensor | None = None

    @property
    def q_stop(self) -> int:
        return self.crop.q_start + self.crop.q_len

    @property
    def kv_stop(self) -> int:
        return self.crop.kv_start + self.crop.kv_len

    @property
    def is_square(self) -> bool:
        return self.crop.q_start == self.crop.kv_start == 0 and self.crop.q_len == self.crop.kv_len

    def full_layout(self) -> layout_crops.FullLayout | None:
        """The layout to build; None if there is neither a layout nor a window."""
        layout = self.layout
        if layout is None and self.window is None:
            return None
        length = self._length(layout)
        if self.kind == "causal":
            return layout_crops.FullLayout(layout, length, None if self.window is None else self.window - 1, 0)
        return layout_crops.FullLayout(layout, length, self.window, self.window)

    def _length(self, layout: BlockLayout | str | None) -> int:
        """Length of the full layout: the same for every input, so that a token always attends to the same keys."""
        needed = max(self.q_stop, self.kv_stop)
        longest = getattr(self.config, "max_position_embeddings", None)
        if isinstance(layout, BlockLayout):
            length, whose = layout.q_len, f"config.{CONFIG_KEY} is of"
        elif isinstance(longest, int) and (layout is not None or longest >= needed):
            length, whose = longest, f"config.{CONFIG_KEY} is built for config.max_position_embeddings ="
        elif layout is None or self.is_square:
            return needed
        else:
            raise ValueError(
                f"config.{CONFIG_KEY} is built for config.max_position_embeddings, which this config lacks: give it a "
                "BlockLayout of the longest sequence"
            )
        if needed > length:
            raise ValueError(f"the sequence has {needed} tokens, but {whose} {length}: make that longer")
        return length


def _of_many(mask_function: MaskFunction) -> MaskFunction:
    """Vectorizes a mask function of one pair."""

    def of_many(*places: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        together = torch.broadcast_tensors(*places)
        # lets the function index a tensor under vmap
        with TransformGetItemToIndex():
            return torch.vmap(mask_function)(*(place.reshape(-1) for place in together)).reshape(together[0].shape)

    return of_many


def _has_gaps(is_token: Tensor) -> bool:
    """Whether a sequence has padding between its tokens; waits for the device."""
    begins = (is_token[:, 1:] & ~is_token[:, :-1]).sum(dim=1) + is_token[:, 0]
    return bool((begins > 1).any())


def _with_padding(request: _Request, layout: BlockLayout | None, is_key: Tensor, *, moves_queries: bool) -> Mask:
    """The mask that moves tokens to the front. Under torch.compile also if they are there already."""
    is_causal = layout is None and request.kind == "causal"
    order = back = None
    if torch.compiler.is_compiling() or bool((is_key[:, 1:] & ~is_key[:, :-1]).any()):
        order = torch.argsort(~is_key, dim=1, stable=True)
        back = torch.argsort(order, dim=1) if moves_queries else None
    return Mask(layout, is_causal, request.kind, request.window, is_key.sum(dim=1), order, back)


def _without_full(is_token: Tensor | None) -> Tensor | None:
    """None if there is no padding; waits for the device, unless torch.compile traces."""
    if is_token is None or torch.compiler.is_compiling() or not bool(is_token.all()):
        return is_token
    return None


def _of_step(request: _Request, position: int | Tensor, is_token: Tensor | None) -> Mask:
    """The mask of one query in a static cache, as tensors alone: one compiled graph works at every position.

    Where some of the earlier keys are not attended, the others are moved to the front in each layer.
    """
    crop, window = request.crop, request.window
    slots = torch.arange(request.kv_stop, device=crop.device)
    if is_token is not None and _without_full(is_token | (slots > position)) is None:
        is_token = None
    attends = (slots <= position).expand(request.batch, -1)
    n_keys = crop.kv_len
    if is_token is not None:
        attends = attends & is_token
    # a cache no longer than the window holds its keys alone
    if window is not None and crop.kv_len > window:
        attends = attends & (slots > position - window)
    is_prefix = is_token is None and request.layout is None and (window is None or crop.kv_len <= window)
    if request.layout is not None:
        kept, most = _kept_by_layout(request, position, is_token)
        attends, n_keys = attends & kept, min(n_keys, most)
    attends = attends[:, crop.kv_start :]
    order = None if is_prefix else torch.argsort(~attends, dim=1, stable=True)[:, :n_keys]
    return Mask(None, False, request.kind, window, attends.sum(1), order)


@torch.compiler.disable(
    reason="a layout and a static cache break the graph where it makes the mask; generate makes masks outside the graph"
)
def _kept_by_layout(request: _Request, position: int | Tensor, is_token: Tensor | None) -> tuple[Tensor, int]:
    """The slots that the layout keeps for one query, bool (batch | 1, kv_stop), and the most that it keeps anywhere."""
    full = request.full_layout()
    assert full is not None
    device = request.crop.device
    rows = layout_crops.rows(full, device)
    slot = torch.as_tensor(position, device=device).reshape(1)
    if is_token is None:
        return rows.attended(slot)[:, : request.kv_stop], rows.most
    # positions count tokens
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    last = positions.gather(1, slot.expand(len(positions), 1))[:, 0]
    return rows.attended(last).gather(1, positions), rows.most


def _by_rule(request: _Request, is_token: Tensor | None) -> Mask | None:
    """The mask as a layout, lengths and an order; None if pairs must be evaluated."""
    kind, window, crop = request.kind, request.window, request.crop
    if kind == "other":
        return None
    if kind == "causal" and request.position is not None:
        return _of_step(request, request.position, is_token)
    if kind == "causal" and request.kv_stop > request.q_stop:
        used = request.q_stop - crop.kv_start
        request = request._replace(crop=crop._replace(kv_len=used))
        mask = _by_rule(request, _without_full(None if is_token is None else is_token[:, : request.q_stop]))
        return None if mask is None else mask._replace(kv_len=used)
    full = request.full_layout()
    if is_token is None:
        if full is not None:
            return Mask(layout_crops.cropped(full, crop), False, kind, window)
        is_aligned = kind == "bidirectional" or request.kv_stop == request.q_stop
        return Mask(None, kind == "causal", kind) if is_aligned else None
    is_last = crop.q_len == 1 and request.q_stop == request.kv_stop
    if full is None and (kind == "bidirectional" or is_last):
        return _with_padding(request, None, is_token[:, crop.kv_start :], moves_queries=False)
    if request.is_square and (window is None or not _has_gaps(is_token)):
        layout = None if full is None else layout_crops.cropped(full, crop)
        return _with_padding(request, layout, is_token, moves_queries=True)
    return None


def _by_documents(request: _Request, documents: Tensor) -> Mask:
    """The mask of packed documents without padding; made on the device if there is no layout.

    Layers that select blocks get only the boundaries of the documents.
    """
    kind, window, q_len = request.kind, request.window, request.crop.q_len
    left, right = (window, window) if kind == "bidirectional" or window is None else (window - 1, 0)
    right = 0 if kind == "causal" else right
    # where each document begins, without waiting for their number: those that do not exist are empty
    documents = torch.nn.functional.pad((documents.diff() != 0).cumsum(1), (1, 0))
    numbers = torch.arange(q_len + 1, device=documents.device)
    begins = torch.searchsorted(documents.contiguous(), numbers.expand(len(documents), -1).contiguous())
    if request.selection is not None and kind == "causal" and window is None:
        # waits for the device, so that only documents that exist get room for incomplete blocks
        n_documents = int(documents[:, -1].max()) + 1
        return Mask(None, True, kind, cu_seqlens=begins[:, : n_documents + 1])
    packs = Documents(begins, None, q_len, q_len, left, right, None)
    full = None if request.layout is None else request.full_layout()
    if full is None:
        layout = packed_layout(packs, (layout_crops.BLOCK, layout_crops.BLOCK))
    else:
        within = layout_crops.cropped(full, request.crop)
        layout = layout_on_host(packs, within.block_size) & within.to("cpu")
    layout._plan_all(request.crop.device)
    return Mask(layout, False, "other")


def _by_pairs(request: _Request, is_token: Tensor | None, mask_function: MaskFunction) -> Mask:
    """The mask from evaluated pairs, per batch on the host: O(blocks of the layout), or all blocks without one."""
    kind, window, crop, full = request.kind, request.window, request.crop, request.full_layout()
    within = None
    if is_token is not None:
        is_token = is_token.cpu()
    if full is not None and is_token is None:
        within = layout_crops.cropped(full, crop)
    elif full is not None and is_token is not None:
        # slots between two tokens are at least as many as positions, so no pair of a window in slots is lost
        layout = layout_crops.built(full)
        within = BlockLayout.stack_batches([layout_crops.in_slots(layout, tokens, crop) for tokens in is_token])
        if kind != "other" and (window is None or not _has_gaps(is_token)):
            within._plan_all(crop.device)
            return Mask(within, False, kind, window)

    def attends(batch: Tensor, head: Tensor, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        pairs = batch, head, q_pos + crop.q_start, kv_pos + crop.kv_start
        # the function may index tensors on that device
        said = mask_function(*(place.to(crop.device) for place in pairs)).cpu()
        return said if is_token is None else said & is_token[batch, pairs[3]]

    block_size = layout_crops.BLOCK if within is None else within.block_size
    sizes = crop.q_len, crop.kv_len
    layout = BlockLayout.from_predicate(attends, *sizes, block_size=block_size, within=within, batch=request.batch)
    layout._plan_all(crop.device)
    return Mask(layout, False, kind, window)


@torch.compiler.disable(
    reason="windows, packed sequences and padding in a cache make a mask on the host: compile without fullgraph=True. "
    "If you use none of these, pass attention_mask=torch.ones_like(input_ids)"
)
def _on_the_host(
    request: _Request,
    is_token: Tensor | None,
    mask_function: MaskFunction,
    local_size: int | None,
    takes_pairs: bool,
    packed: Tensor | None,
) -> Mask:
    kind, window, documents = request.kind, request.window, None
    if kind == "other":
        kind, window, documents = _meaning(mask_function, local_size, request.batch, request.crop.q_len)
        if request.position is not None and kind != "causal":
            position = int(request.position)
            request = request._replace(crop=request.crop._replace(q_start=position), position=None)
    known = request._replace(kind=kind, window=window)
    if packed is not None and documents is None:
        if kind == "other" and not _counts_within_documents(mask_function):
            raise ValueError(
                f"position_ids restart, as those of packed sequences, but the mask of {running_layer()} is for one "
                "sequence: pass use_cache=False, with transformers 5.23 or later; if the sequences are not packed, "
                "pass attention_mask=torch.ones_like(input_ids)"
            )
        documents = packed if kind == "causal" else None
    # with a custom mask function, a document may continue after another one; with those of transformers it never does
    if documents is not None and is_token is None and request.is_square and not bool((documents.diff() < 0).any()):
        return _by_documents(known, documents)
    if documents is None and request.kind == "other":
        request = known
        mask = _by_rule(request, is_token)
        if mask is not None:
            return mask
    return _by_pairs(request, is_token, _of_many(mask_function) if takes_pairs else mask_function)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
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
    """The mask function of transformers, with its argument names: the Mask of one forward.

    batch_size, q_length, kv_length  sequences, queries and keys of this forward
    q_offset, kv_offset  first slot of the queries and of the keys; q_offset is a tensor with a static cache, of which
                    the slots after the queries are unused
    mask_function   mask_function(batch, head, q_slot, kv_slot) -> bool: the mask of the model, applied together with
                    the layout
    attention_mask  bool (batch, slots), True for a token, False for padding anywhere; None means no padding
    config          of the model; its `attention_layout` is a BlockLayout, a specification, a selection, or None, or a
                    list or dict of these for different layers
    device          of the queries
    local_size      window size in tokens if mask_function has one
    use_vmap        True: mask_function takes one pair at a time
    raises          TypeError, ValueError
    """
    # names of the module: torch.compile of torch 2.11 cannot trace an import from the package, which is loaded lazily
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    # Any, since the annotations of transformers allow single numbers only
    function: Any = mask_function
    kind = "other"
    if function is causal_mask_function:
        kind = "causal"
    elif function is bidirectional_mask_function:
        kind = "bidirectional"
    shape = (batch_size, 1, q_length, kv_length)
    if isinstance(attention_mask, Mask):
        if attention_mask.shape != shape:
            raise ValueError(
                "attention_mask must be (batch, length), got the mask that another model made, of "
                f"{attention_mask.shape} where {shape} is needed"
            )
        return attention_mask
    position: int | Tensor | None = None
    has_room = isinstance(q_offset, Tensor) or kv_offset + kv_length > q_offset + 1
    if q_length == 1 and kind != "bidirectional" and has_room:
        position, q_offset = q_offset, kv_offset + kv_length - 1
    elif isinstance(q_offset, Tensor):
        if torch.compiler.is_compiling():
            raise ValueError(STATIC_CACHE)
        q_offset = int(q_offset)
    crop = layout_crops.Crop(q_offset, q_length, kv_offset, kv_length, torch.device(device))
    layouts = layouts_of(config)
    request = _Request(kind, None, config, batch_size, crop, None, None, position)
    is_token = attention_mask
    if is_token is not None:
        if is_token.ndim != 2 or is_token.shape[0] != batch_size:
            raise ValueError(
                f"attention_mask must be (batch, length), 1 for a token and 0 for padding, with batch {batch_size} as "
                f"the inputs have, got shape {tuple(is_token.shape)}"
            )
        missing = max(0, request.kv_stop - is_token.shape[1])
        is_token = torch.nn.functional.pad(is_token, (0, missing))[:, : request.kv_stop]
        is_token = _without_full(is_token)
    packed = kv_len = None
    if is_token is None and kind != "bidirectional" and kv_length >= q_length:
        packed = packed_documents(batch_size, q_length)
    if packed is not None and not request.is_square:
        if crop.q_start or crop.kv_start:
            raise ValueError(
                "position_ids restart, as those of packed sequences, which must be whole, but past_key_values has "
                f"{crop.q_start} tokens before them: pass all tokens at once; if they are of one sequence, pass "
                f"attention_mask=torch.ones({batch_size}, {request.q_stop})"
            )
        # the rest is unused room of a static cache
        kv_len = q_length
        request = request._replace(crop=crop._replace(kv_len=kv_len))
    listed = layouts if isinstance(layouts, tuple) else (layouts,)
    keys = [number_of(layout) if isinstance(layout, BlockLayout) else layout for layout in listed]
    # layers with one layout share its mask
    made: dict[Any, Mask] = {}
    for key, layout in zip(keys, listed, strict=True):
        if key not in made:
            selection = layout if isinstance(layout, Selection) else None
            one = request._replace(layout=None if isinstance(layout, Selection) else layout, selection=selection)
            mask = _by_rule(one, is_token) if packed is None else None
            if mask is None:
                mask = _on_the_host(one, is_token, mask_function, local_size, use_vmap, packed)
            mask = mask if kv_len is None else mask._replace(kv_len=kv_len)
            made[key] = mask._replace(owner=owner_of(config), shape=shape, selection=selection)
    first = made[keys[0]]
    return first._replace(of_layers=tuple(made[key] for key in keys)) if isinstance(layouts, tuple) else first


def mask_of_layer(
    module: torch.nn.Module, q_len: int, kv_len: int, is_causal: bool | None, device: torch.device
) -> Mask:
    """The mask for a model that requests none, such as ViT."""
    if is_causal is None:
        # the default of transformers
        is_causal = bool(getattr(module, "is_causal", True))
    kind = "causal" if is_causal else "bidirectional"
    crop = layout_crops.Crop(0, q_len, 0, kv_len, device)
    config = getattr(module, "config", None)
    layouts, owner = layouts_of(config), owner_of(config)
    layout = of_layer(layouts, module) if isinstance(layouts, tuple) else layouts
    selection = layout if isinstance(layout, Selection) else None
    request = _Request(kind, None, config, 1, crop, None if isinstance(layout, Selection) else layout)
    full = request.full_layout()
    if full is None and selection is None:
        return Mask(None, is_causal, kind, owner=owner)
    if not request.is_square:
        raise ValueError(
            f"config.{CONFIG_KEY} needs the positions of {q_len} queries and {kv_len} keys, but the model made no mask"
        )
    if full is None:
        return Mask(None, is_causal, kind, owner=owner, selection=selection)
    return Mask(layout_crops.cropped(full, crop), False, kind, owner=owner)
