"""The layouts that a config holds: one for all layers, one for each layer, or one for each type of layer."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import BlockLayout
from .names import KEY, running_layer

Layout = BlockLayout | str | None


def layouts_of(config: Any) -> Layout | tuple[Layout, ...]:
    """The layout of a config, or a tuple with one for each layer, checked."""
    given = getattr(config, KEY, None)
    if given is None:
        return None
    found: Layout | tuple[Layout, ...] = given
    if isinstance(given, list | tuple):
        found = _of_list(given, config)
    elif isinstance(given, dict):
        found = _of_types(given, config)
    else:
        _check(given, f"config.{KEY}")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"config.{KEY} cannot say for which attentions of a model with cross-attention it is: set it to None, and "
            "all of them are dense"
        )
    return found


def _check(layout: Any, name: str) -> None:
    """Raises if `layout` is not one for `name`."""
    if layout is not None and not isinstance(layout, BlockLayout | str):
        several = ", or a list or dict of these" if name == f"config.{KEY}" else ""
        raise TypeError(
            f"{name} must be a BlockLayout, a specification such as 'butterfly | local(window=512)', or None for "
            f"attention to all{several}, got {type(layout).__name__}"
        )
    if isinstance(layout, BlockLayout) and (layout.q_len != layout.kv_len or layout.shape[0] != 1):
        raise ValueError(
            f"{name} must have shape (1, heads | 1, length, length), for each forward to use a part of, got "
            f"{layout.shape}"
        )


def _of_list(given: list[Any] | tuple[Any, ...], config: Any) -> tuple[Layout, ...]:
    n_layers = getattr(config, "num_hidden_layers", None)
    if len(given) != n_layers:
        raise ValueError(
            f"config.{KEY} must be a list with one layout for each of the {n_layers} layers (config.num_hidden_layers),"
            f" got {len(given)}; None is attention to all"
        )
    for index, layout in enumerate(given):
        _check(layout, f"config.{KEY}[{index}]")
    return tuple(given)


def _of_types(given: dict[Any, Any], config: Any) -> tuple[Layout, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:
        raise ValueError(
            f"config.{KEY} must be one layout, or a list of config.num_hidden_layers layouts, since "
            f"{type(config).__name__} has no layer_types, got a dict by layer type"
        )
    if set(given) != set(types):
        raise ValueError(
            f"config.{KEY} must have a layout for each type in config.layer_types, {sorted(set(types))}, got "
            f"{sorted(map(str, given))}; None is attention to all"
        )
    for kind, layout in given.items():
        _check(layout, f"config.{KEY}[{kind!r}]")
    return tuple(given[kind] for kind in types)


def index_of(module: torch.nn.Module) -> int:
    """The index of the layer to which an attention belongs."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(
            f"config.{KEY} has a layout for each layer, but {running_layer()} has no layer_idx, which says which layer "
            "it is: give the model one layout for all layers"
        )
    return index
