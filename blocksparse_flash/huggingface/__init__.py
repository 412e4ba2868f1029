"""How does a model of Hugging Face transformers attend with a layout? `register()`, then `attn_implementation="blocksparse"`.

Knows: the two functions that transformers looks up by that name, one for masks and one for attention; configs, padding masks,
cache positions; forward hooks, which report a layout that no attention of a model reads. Must not know: any model, backends, plans.

A mask is made once for each forward of a model, and goes through all of its layers. A place in its tensors is a slot. A
layout speaks of positions, which count tokens and not padding, so that a padded batch gives what each of its sequences alone
gives. transformers' own windows are as it has them, in slots.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import attention
from ..layout import BlockLayout
from . import layout_crops

# not "blocksparse_flash": transformers takes every name with "flash" in it for a build of the package flash-attn
NAME = "blocksparse"
# the attribute of a model's config that holds its layout
KEY = "attention_layout"
# names models that README.md lists as tested
_WAY_OUT = (
    "use a model that attends through transformers' attention interface, such as Llama, GPT-2 or BERT, or keep this model's "
    "own attention: attn_implementation='sdpa' or 'eager', with config.attention_layout = None"
)
# attributes of a watched model: that it has hooks, and the attn_implementation that its hooks have dealt with
_WATCHED = "_blocksparse_flash_watched"
_DEALT_WITH = "_blocksparse_flash_dealt_with"

MaskFunction = Callable[..., Tensor]

# passed to attention functions, and without a meaning for them
_HARMLESS = {
    "cache_position",
    "logits_to_keep",
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


class _Fields(NamedTuple):
    """The fields of `Mask`, which says what they are."""

    layout: BlockLayout | None
    is_causal: bool
    kind: str
    window: int | None = None
    kv_lengths: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    owner: str | None = None
    shape: tuple[int, ...] | None = None


class Mask(_Fields):
    """What goes through a model in the place of its attention mask.

    layout      of the queries and keys of this forward, causality included; None attends everywhere
    is_causal   True: also kv_pos <= q_pos + (kv_len - q_len); where there is a layout, it says so itself
    kind        what transformers asked for: "causal", "bidirectional" or "other"
    window      of sliding attention, as transformers counts it, or None
    kv_lengths  int64 (batch,): how many keys are tokens, which `order` brings to the front; None is all
    order       int64 (batch, kv_len): slots of the tokens, then those of the padding; None leaves them
    back        int64 (batch, q_len): where `order` has each slot, if queries have the same order; None leaves them
    owner       name of the class of the config that holds the layout
    shape       (batch, 1, q_len, kv_len), as of the mask of pairs that it stands for

    Where a model hands the mask to another, that one takes it for a mask of pairs, by `ndim` and `shape`, and keeps it. A
    model that computes with it gets an error that names the layer: its attributes are no tensor's, and torch and operators
    refuse it.
    """

    __slots__ = ()

    ndim = 4

    # hashable, although __eq__ is its own
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            raise TypeError(_computed_with("=="))
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(_computed_with(f"torch's {getattr(function, '__name__', function)}"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # hasattr must be able to say no
        raise AttributeError(_computed_with(f".{name}"))


def _computed_with(what: str) -> str:
    """The message of whatever takes a mask for a tensor."""
    return (
        f"{_place()} computes with the attention mask itself ({what}), but attn_implementation='{NAME}' has a Mask in its "
        f"place, which only its own attention reads: {_WAY_OUT}"
    )


def _refuses(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise TypeError(_computed_with(name))

    return refuse


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "and": "&", "or": "|", "xor": "^",
    "radd": "+", "rsub": "-", "rmul": "*", "rtruediv": "/", "rand": "&", "ror": "|", "rxor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "invert": "~", "getitem": "[...]",
}  # fmt: skip
for _name, _sign in _OPERATORS.items():
    setattr(Mask, f"__{_name}__", _refuses(_sign))


# ---- is the layout read? ----


class _Forward:
    """A running forward of a model whose config holds a layout; `read` are the configs that attention asked so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.read: set[str | None] = set()


class _Running(threading.local):
    """The running forwards of this thread, outermost first."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


class _Last:
    """Whether attention was called since a forward with a layout began: all that torch.compile can trace of this file.

    It is written before it is read, so that it is a constant of most graphs and guards nothing.
    """

    attended = False


_running = _Running()
_last = _Last()


def _owner_of(config: Any) -> str | None:
    """How a config is called in messages, and told from the other configs of a model."""
    return None if config is None else type(config).__name__


def _attended(owner: str | None) -> None:
    """Called by each attention of a layer, with the owner of the config that it asked for a layout."""
    _last.attended = True
    if not torch.compiler.is_compiling():
        for forward in _running.forwards:
            forward.read.add(owner)


def _place() -> str:
    """The layer and the model whose forwards are running, innermost and outermost, as messages name them."""
    if torch.compiler.is_compiling():
        return "this model"
    names = []
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, torch.nn.Module):
            names.append(type(module).__name__)
        frame = frame.f_back
    if not names:
        return "this code"
    return names[0] if names[0] == names[-1] else f"{names[0]} of {names[-1]}"


def _ignored(model: torch.nn.Module, read: set[str | None]) -> ValueError:
    """The error of a forward in which no attention read the layout of the model's config."""
    name, config = type(model).__name__, _owner_of(model.config)
    if not read:
        return ValueError(
            f"{name} ignored config.{KEY}: none of its layers called attn_implementation='{NAME}', since it computes its own "
            f"attention, or has none; {_WAY_OUT}"
        )
    others = sorted(other for other in read if other is not None)
    keys = [
        key for key in getattr(model.config, "sub_configs", {}) if _owner_of(getattr(model.config, key, None)) in others
    ]
    if keys:
        where = " or ".join(f"config.{key}.{KEY}" for key in keys)
        return ValueError(
            f"{name} ignored config.{KEY}: it is in its {config}, but its attention reads {' and '.join(others)}; set "
            f"{where} instead, and config.{KEY} = None"
        )
    said = " and ".join(others) if others else "no config"
    return ValueError(f"{name} ignored config.{KEY}: it is in its {config}, but its attention reads {said}; {_WAY_OUT}")


@torch.compiler.disable(
    reason=f"config.{KEY} is ignored, since attn_implementation is not '{NAME}': set config.{KEY} = None for attention to all, "
    f"or model.set_attn_implementation('{NAME}')"
)
def _warn(model: torch.nn.Module) -> None:
    """Once for each model and attn_implementation."""
    config: Any = model.config
    how = config._attn_implementation
    for module in model.modules():
        if getattr(module, "config", None) is config and hasattr(module, _WATCHED):
            setattr(module, _DEALT_WITH, how)
    warnings.warn(
        f"{type(model).__name__} ignores config.{KEY}: its attn_implementation is {how!r}, and attends to all. For the layout "
        f"load or make the model with attn_implementation='{NAME}', or call model.set_attn_implementation('{NAME}'); if "
        f"{how!r} is meant, as to compare, config.{KEY} = None says so",
        UserWarning,
        stacklevel=2,
    )


def _check_parts(model: torch.nn.Module) -> None:
    """ValueError for a layout in the config of a part that no module of the model has for its config."""
    config: Any = model.config
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if getattr(part, KEY, None) is None:
            continue
        if not any(_owner_of(getattr(module, "config", None)) == _owner_of(part) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} ignores config.{key}.{KEY}: no module of it has a {_owner_of(part)}; set it in the "
                f"config of the part that attends, and config.{key}.{KEY} = None"
            )


def _before(model: torch.nn.Module, _: Any) -> None:
    """Forward pre-hook."""
    config: Any = model.config
    if not torch.compiler.is_compiling():
        _check_parts(model)
    if getattr(config, KEY, None) is None:
        return
    how = config._attn_implementation
    if how != NAME:
        if getattr(model, _DEALT_WITH, None) != how:
            _warn(model)
        return
    _last.attended = False
    if not torch.compiler.is_compiling():
        _running.forwards = [forward for forward in _running.forwards if forward.model is not model]
        _running.forwards.append(_Forward(model))


def _after(model: torch.nn.Module, _: Any, output: Any) -> None:
    """Forward hook that is always called: after an error, which is not to be hidden by another, `output` is None."""
    config: Any = model.config
    read: set[str | None] = set()
    if not torch.compiler.is_compiling() and _running.forwards and _running.forwards[-1].model is model:
        read = _running.forwards.pop().read
    if output is None or getattr(config, KEY, None) is None or config._attn_implementation != NAME:
        return
    # a forward that was traced only in part knows no more than whether attention was called
    was_read = _owner_of(config) in read if read else _last.attended
    if torch.compiler.is_compiling():
        if not was_read:
            raise _ignored(model, read)
    elif was_read:
        setattr(model, _DEALT_WITH, NAME)
    # a model that has attended may have forwards in which all of its attentions are dropped
    elif getattr(model, _DEALT_WITH, None) != NAME:
        raise _ignored(model, read)


def _refuse_tables(model: Any) -> None:
    """Adds an entry that raises ValueError to the tables {attn_implementation: class of attention} beside a model's class.

    Falcon, GPT-Neo and others choose their attention so, and would end in KeyError: 'blocksparse'.
    """
    for name, table in list(vars(sys.modules[type(model).__module__]).items()):
        if (
            isinstance(table, dict)
            and "eager" in table
            and NAME not in table
            and all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in table.values())
        ):

            def refuse(*_: Any, name: str = name, known: tuple[str, ...] = tuple(table), **__: Any) -> None:
                raise ValueError(
                    f"{type(model).__name__} has no attn_implementation='{NAME}': it computes its own attention, which it "
                    f"chooses from {name}, of {', '.join(known)}; {_WAY_OUT}"
                )

            table[NAME] = refuse


def _watch(module: Any, _: str, child: Any) -> None:
    """Hook of torch that is called for each module which becomes part of another, before it does."""
    from transformers import PreTrainedModel

    for model in (module, child):
        if isinstance(model, PreTrainedModel) and not hasattr(model, _WATCHED):
            setattr(model, _WATCHED, True)
            _refuse_tables(model)
            model.register_forward_pre_hook(_before)
            model.register_forward_hook(_after, always_call=True)


_handles: list[Any] = []


def _start_watching() -> None:
    """Gives hooks to every model of transformers that is made from now on, or becomes part of another module."""
    if not _handles:
        _handles.append(torch.nn.modules.module.register_module_module_registration_hook(_watch))


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
    part: layout_crops.Part

    @property
    def q_stop(self) -> int:
        return self.part.q_start + self.part.q_len

    @property
    def kv_stop(self) -> int:
        return self.part.kv_start + self.part.kv_len

    @property
    def is_square(self) -> bool:
        return self.part.q_start == self.part.kv_start == 0 and self.part.q_len == self.part.kv_len

    def whole(self) -> layout_crops.Whole | None:
        """The layout to be built; None where there is neither layout nor window."""
        layout = _layout_of(self.config)
        if layout is None and self.window is None:
            return None
        length = self._length(layout)
        if self.kind == "causal":
            return layout_crops.Whole(layout, length, None if self.window is None else self.window - 1, 0)
        return layout_crops.Whole(layout, length, self.window, self.window)

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
            return Mask(layout_crops.cropped(whole, part), False, kind, window)
        is_aligned = kind == "bidirectional" or asked.kv_stop == asked.q_stop
        return Mask(None, kind == "causal", kind) if is_aligned else None
    is_last = part.q_len == 1 and asked.q_stop == asked.kv_stop
    if whole is None and (kind == "bidirectional" or is_last):
        return _with_padding(asked, None, is_token[:, part.kv_start :], moves_queries=False)
    if asked.is_square and (window is None or not _has_gaps(is_token)):
        layout = None if whole is None else layout_crops.cropped(whole, part)
        return _with_padding(asked, layout, is_token, moves_queries=True)
    return None


def _by_pairs(asked: _Asked, is_token: Tensor | None, mask_function: MaskFunction) -> Mask:
    """The mask made of blocks, batch by batch, on the host: O(blocks of the layout), or of all blocks without one."""
    kind, window, part, whole = asked.kind, asked.window, asked.part, asked.whole()
    within = None
    if is_token is not None:
        is_token = is_token.cpu()
    if whole is not None and is_token is None:
        within = layout_crops.cropped(whole, part)
    elif whole is not None and is_token is not None:
        # between tokens there are as many positions as slots, or fewer: bounds on positions lose no pair of a window
        layout = layout_crops.built(whole)
        within = BlockLayout.stack_batches([layout_crops.in_slots(layout, tokens, part) for tokens in is_token])
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
        block_size=layout_crops.BLOCK if within is None else within.block_size,
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
    part = layout_crops.Part(q_offset, q_length, kv_offset, kv_length, torch.device(device))
    asked = _Asked(kind, None, config, batch_size, part)
    shape = (batch_size, 1, q_length, kv_length)
    if isinstance(attention_mask, Mask):
        if attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask must be (batch, length), got the mask that another model made, of {attention_mask.shape} "
                f"where {shape} is needed"
            )
        return attention_mask
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
    if mask is None:
        mask = _on_the_host(asked, is_token, mask_function, local_size, use_vmap)
    return mask._replace(owner=_owner_of(config), shape=shape)


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
    part = layout_crops.Part(0, q_len, 0, kv_len, device)
    config = getattr(module, "config", None)
    asked, owner = _Asked(kind, None, config, 1, part), _owner_of(config)
    whole = asked.whole()
    if whole is None:
        return Mask(None, is_causal, kind, owner=owner)
    if not asked.is_square:
        raise ValueError(
            f"config.{KEY} needs to know which positions {q_len} queries and {kv_len} keys have, but the model made no mask"
        )
    return Mask(layout_crops.cropped(whole, part), False, kind, owner=owner)


def _check(mask: Any, q_len: int, kv_len: int, is_causal: bool | None, sliding_window: int | None) -> None:
    """Whether a mask is ours, and does not contradict what its layer says."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"attention_mask must be (batch, length), of which transformers makes what layers take, but "
            f"{_place()} attends with a {type(mask).__name__} of shape {tuple(getattr(mask, 'shape', ()))}: a mask of "
            f"pairs is a layout, config.{KEY} = blocksparse_flash.interop.from_huggingface(mask, block_size=128); if none was "
            f"given, the model makes a mask of its own: {_WAY_OUT}"
        )
    if mask.shape is not None and mask.shape[2:] != (q_len, kv_len):
        raise ValueError(
            f"{_place()} attends with {q_len} queries to {kv_len} keys, but its model asked for a mask of "
            f"{mask.shape[2]} x {mask.shape[3]}, in which the others have no position: {_WAY_OUT}"
        )
    if mask.kind == "other":
        return
    if is_causal is not None and is_causal != (mask.kind == "causal"):
        raise ValueError(
            f"is_causal={is_causal} contradicts the mask that the model made, which is {mask.kind}, in {_place()}: "
            f"{_WAY_OUT}"
        )
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
    _check(mask, query.shape[2], key.shape[2], is_causal, sliding_window)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{_place()} attends with keys of {key.shape[1]} heads and {key.shape[2]} positions, but values of "
            f"{value.shape[1]} and {value.shape[2]}: {_WAY_OUT}"
        )
    _attended(mask.owner)
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

    Call it before models are made or loaded: those made from now on, or put into another module, report a layout that they
    would ignore. ValueError, when one is made or at its first forward, if it computes its own attention; UserWarning at its
    first forward, if its attn_implementation is another, such as "sdpa".

    Calling it again changes nothing. Needs transformers (`pip install 'blocksparse_flash[huggingface]'`).

    >>> register()  # doctest: +SKIP
    >>> config = transformers.LlamaConfig(attention_layout="butterfly | local(window=512)")  # doctest: +SKIP
    >>> transformers.LlamaForCausalLM._from_config(config, attn_implementation="blocksparse")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, attention_mask)
    _start_watching()
