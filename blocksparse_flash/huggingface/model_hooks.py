"""Forward hooks that report a layout which no attention of the model reads, and recognize packed sequences."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config_layouts import layouts_of
from .names import ATTENTION_NAME, CONFIG_KEY, HINT, owner_of

# attributes of a watched model: whether it has hooks, and the attn_implementation that its hooks have checked
_WATCHED = "_blocksparse_flash_watched"
_CHECKED = "_blocksparse_flash_checked"


class _Forward(NamedTuple):
    """A running forward of a model.

    read          names of the configs that attention has read
    position_ids  those given to the forward
    documents     int64 (batch or 1, q_len): document of each token if the sequences are packed, otherwise None
    """

    model: torch.nn.Module
    read: set[str | None]
    position_ids: Any
    documents: Tensor | None


class _Running(threading.local):
    """The running forwards of this thread with our attention, outermost first."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


class _Last:
    """Whether attention was called since the last forward with a layout began. torch.compile traces only this.

    It is written before it is read, so most graphs treat it as a constant and need no guard.
    """

    attended = False


_running = _Running()
_last = _Last()


def record_attention(owner: str | None) -> None:
    """Called by the attention of each layer, with the owner of the config whose layout it read."""
    _last.attended = True
    if not torch.compiler.is_compiling():
        for forward in _running.forwards:
            forward.read.add(owner)


def _documents(given: dict[str, Any]) -> Tensor | None:
    """The packed documents of a forward, from its arguments; waits for the device of position_ids.

    transformers itself recognizes packed documents only without a cache, and only in models that pass position_ids to
    its mask functions.
    """
    place = given.get("position_ids")
    if not isinstance(place, Tensor) or given.get("attention_mask") is not None:
        return None
    if _running.forwards and _running.forwards[-1].position_ids is place:
        return _running.forwards[-1].documents
    if place.ndim == 3 and len(place) == 4:
        # in the sequence; the others are time, height and width in images
        place = place[0]
    if place.ndim != 2 or place.shape[1] == 1:
        return None
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(place)


def packed_documents(batch: int, q_len: int) -> Tensor | None:
    """int64 (batch, q_len): document of each token of the running forward; None if its sequences are not packed."""
    if torch.compiler.is_compiling() or not _running.forwards:
        return None
    found = _running.forwards[-1].documents
    return None if found is None or found.shape[1] != q_len else found.expand(batch, -1)


def _ignored(model: torch.nn.Module, read: set[str | None]) -> ValueError:
    """The error if no attention of a forward read the layout of the model's config."""
    name, config = type(model).__name__, owner_of(model.config)
    if not read:
        return ValueError(
            f"{name} ignored config.{CONFIG_KEY}: none of its layers called attn_implementation='{ATTENTION_NAME}', "
            f"since it computes its own attention, or has none; {HINT}"
        )
    others = sorted(other for other in read if other is not None)
    parts = getattr(model.config, "sub_configs", {})
    keys = [f"config.{key}.{CONFIG_KEY}" for key in parts if owner_of(getattr(model.config, key, None)) in others]
    hint = f"set {' or '.join(keys)} instead, and config.{CONFIG_KEY} = None" if keys else HINT
    said = " and ".join(others) or "no config"
    return ValueError(
        f"{name} ignored config.{CONFIG_KEY}: it is in its {config}, but its attention reads {said}; {hint}"
    )


@torch.compiler.disable(
    reason=f"config.{CONFIG_KEY} is ignored, since attn_implementation is not '{ATTENTION_NAME}': set "
    f"config.{CONFIG_KEY} = None for attention to all, or model.set_attn_implementation('{ATTENTION_NAME}')"
)
def _warn(model: torch.nn.Module) -> None:
    """Once for each model and attn_implementation."""
    config: Any = model.config
    implementation = config._attn_implementation
    for module in model.modules():
        if getattr(module, "config", None) is config and hasattr(module, _WATCHED):
            setattr(module, _CHECKED, implementation)
    warnings.warn(
        f"{type(model).__name__} ignores config.{CONFIG_KEY}: its attn_implementation is {implementation!r}, and "
        f"attends to all. For the layout load or make the model with attn_implementation='{ATTENTION_NAME}', or call "
        f"model.set_attn_implementation('{ATTENTION_NAME}'); if you want {implementation!r}, for example to compare, "
        f"set config.{CONFIG_KEY} = None",
        UserWarning,
        stacklevel=2,
    )


def _check_parts(model: torch.nn.Module) -> None:
    """ValueError for a layout in a sub-config that no module of the model uses."""
    config: Any = model.config
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if getattr(part, CONFIG_KEY, None) is None:
            continue
        if not any(owner_of(getattr(module, "config", None)) == owner_of(part) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} ignores config.{key}.{CONFIG_KEY}: no module of it has a {owner_of(part)}; "
                f"set it in the config of the part that attends, and config.{key}.{CONFIG_KEY} = None"
            )


def _before(model: torch.nn.Module, positional: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Forward pre-hook; `positional` and `given` are the arguments of the forward."""
    config: Any = model.config
    if not torch.compiler.is_compiling():
        _check_parts(model)
    has_layout = getattr(config, CONFIG_KEY, None) is not None
    implementation = config._attn_implementation
    if implementation != ATTENTION_NAME:
        if has_layout and getattr(model, _CHECKED, None) != implementation:
            _warn(model)
        return
    if has_layout:
        _last.attended = False
    # input_ids or the like alone need no names
    if len(positional) > 1 and not torch.compiler.is_compiling():
        given = dict(zip(inspect.signature(model.forward).parameters, positional, strict=False)) | given
    # several models do not pass this on to attention
    if given.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            f"output_attentions must be False with attn_implementation='{ATTENTION_NAME}', got True: attention weights "
            "are never stored; attn_implementation='eager' returns them"
        )
    if not torch.compiler.is_compiling():
        _running.forwards = [forward for forward in _running.forwards if forward.model is not model]
        forward = _Forward(model, set(), given.get("position_ids"), _documents(given))
        _running.forwards.append(forward)


def _after(model: torch.nn.Module, _: Any, output: Any) -> None:
    """Forward hook. After an error `output` is None, and nothing is raised that would hide it."""
    config: Any = model.config
    read: set[str | None] = set()
    if not torch.compiler.is_compiling() and _running.forwards and _running.forwards[-1].model is model:
        read = _running.forwards.pop().read
    if output is None or getattr(config, CONFIG_KEY, None) is None or config._attn_implementation != ATTENTION_NAME:
        return
    # in a partly traced forward `read` is empty, and only _last is known
    was_read = owner_of(config) in read if read else _last.attended
    if torch.compiler.is_compiling():
        if not was_read:
            raise _ignored(model, read)
    elif was_read:
        setattr(model, _CHECKED, ATTENTION_NAME)
    # a model that attended before may have forwards that drop all attention layers
    elif getattr(model, _CHECKED, None) != ATTENTION_NAME:
        raise _ignored(model, read)


def _refuse_tables(model: Any) -> None:
    """Adds an entry that raises ValueError to the tables {attn_implementation: class} in a model's module.

    Falcon, GPT-Neo and others choose their attention from such a table, and would raise KeyError: 'blocksparse'.
    """
    for name, table in list(vars(sys.modules[type(model).__module__]).items()):
        if (
            isinstance(table, dict)
            and "eager" in table
            and ATTENTION_NAME not in table
            and all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in table.values())
        ):

            def refuse(*_: Any, name: str = name, known: tuple[str, ...] = tuple(table), **__: Any) -> None:
                raise ValueError(
                    f"{type(model).__name__} has no attn_implementation='{ATTENTION_NAME}': it computes its own "
                    f"attention, which it chooses from {name}, of {', '.join(known)}; {HINT}"
                )

            table[ATTENTION_NAME] = refuse


def _watch(kind: Any, module: Any, _: str, child: Any) -> None:
    """Module registration hook of torch, called before `child` becomes part of `module`. kind: PreTrainedModel."""
    for model in (module, child):
        if isinstance(model, kind) and not hasattr(model, _WATCHED):
            setattr(model, _WATCHED, True)
            _refuse_tables(model)
            if isinstance(getattr(model.config, CONFIG_KEY, None), list | tuple | dict):
                layouts_of(model.config)
            model.register_forward_pre_hook(_before, with_kwargs=True)
            model.register_forward_hook(_after, always_call=True)


@functools.cache
def watch_models() -> None:
    """Adds hooks to every transformers model that is created from now on, or becomes part of another module."""
    # not in the hook, which torch.compile traces where a forward registers modules: torch 2.11 cannot trace the import
    from transformers import PreTrainedModel

    torch.nn.modules.module.register_module_module_registration_hook(functools.partial(_watch, PreTrainedModel))
