"""What a config holds: one layout or selection for all layers, one for each layer, or one for each type of layer."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import BlockLayout
from .names import CONFIG_KEY, running_layer
from .saved_layouts import from_json, is_saved, replaced
from .selection import EXAMPLE, Selection, selection_of

Layout = BlockLayout | str | None
Entry = Layout | Selection


def layouts_of(config: Any) -> Entry | tuple[Entry, ...]:
    """The layout or selection of a config, or a tuple with one for each layer, checked.

    Layouts that the config was loaded with become BlockLayouts, in the config too.
    """
    given = getattr(config, CONFIG_KEY, None)
    if given is None:
        return None
    if _has_saved(given):
        given = replaced(given, _restored)
        setattr(config, CONFIG_KEY, given)
    found: Entry | tuple[Entry, ...]
    if isinstance(given, list | tuple):
        found = _of_list(given, config)
    elif isinstance(given, dict) and "kind" not in given:
        found = _of_types(given, config)
    else:
        found = _checked(given, f"config.{CONFIG_KEY}")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"config.{CONFIG_KEY} does not say which attentions of a model with cross-attention it applies to: set it "
            "to None, which makes all of them dense"
        )
    return found


def _has_saved(given: Any) -> bool:
    """Whether the config holds a layout as JSON stores it."""
    if isinstance(given, dict) and "kind" not in given:
        given = list(given.values())
    return any(map(is_saved, given)) if isinstance(given, list | tuple) else is_saved(given)


def _restored(layout: Any, name: str) -> BlockLayout:
    return layout if isinstance(layout, BlockLayout) else from_json(layout, name)


def _checked(layout: Any, name: str) -> Entry:
    """The layout or selection for `name`."""
    if isinstance(layout, dict):
        return selection_of(layout, name)
    if layout is not None and not isinstance(layout, BlockLayout | str):
        several = ", or a list or dict of these" if name == f"config.{CONFIG_KEY}" else ""
        raise TypeError(
            f"{name} must be a BlockLayout, a specification such as 'butterfly | local(window=512)', a dict with the "
            f"kind of a selection, or None for attention to all{several}, got {type(layout).__name__}"
        )
    if isinstance(layout, BlockLayout) and (layout.q_len != layout.kv_len or layout.shape[0] != 1):
        raise ValueError(
            f"{name} must have shape (1, heads | 1, length, length), of which each forward uses a part, got "
            f"{layout.shape}"
        )
    return layout


def _of_list(given: list[Any] | tuple[Any, ...], config: Any) -> tuple[Entry, ...]:
    n_layers = getattr(config, "num_hidden_layers", None)
    if len(given) != n_layers:
        raise ValueError(
            f"config.{CONFIG_KEY} must be a list with one layout for each of the {n_layers} layers "
            f"(config.num_hidden_layers), got {len(given)}; None is attention to all"
        )
    return tuple(_checked(layout, f"config.{CONFIG_KEY}[{index}]") for index, layout in enumerate(given))


def _of_types(given: dict[Any, Any], config: Any) -> tuple[Entry, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:
        raise ValueError(
            f"config.{CONFIG_KEY} must be one layout, or a list of config.num_hidden_layers layouts, since "
            f"{type(config).__name__} has no layer_types, got a dict by layer type, {sorted(map(str, given))}; a "
            f"selection is a dict with a kind, such as {EXAMPLE}"
        )
    if set(given) != set(types):
        raise ValueError(
            f"config.{CONFIG_KEY} must have a layout for each type in config.layer_types, {sorted(set(types))}, got "
            f"{sorted(map(str, given))}; None is attention to all, and a selection is a dict with a kind, such as "
            f"{EXAMPLE}"
        )
    checked = {kind: _checked(layout, f"config.{CONFIG_KEY}[{kind!r}]") for kind, layout in given.items()}
    return tuple(checked[kind] for kind in types)


def of_layer(each: tuple[Any, ...], module: torch.nn.Module) -> Any:
    """The entry for the layer to which an attention belongs, of a tuple with one for each layer."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(
            f"config.{CONFIG_KEY} has a layout for each layer, but {running_layer()} has no layer_idx, which says "
            "which layer it is: give the model one layout for all layers"
        )
    # Zamba 2 has -1, since all its layers share one attention
    if not 0 <= index < len(each):
        raise ValueError(
            f"config.{CONFIG_KEY} has a layout for each of {len(each)} layers (config.num_hidden_layers), but "
            f"{running_layer()} has layer_idx={index}, which is none of them: give the model one layout for all layers"
        )
    return each[index]
