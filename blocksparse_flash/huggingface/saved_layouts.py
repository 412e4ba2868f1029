"""BlockLayouts in the JSON of a config: each is a dict of numbers, and of tensors compressed to text."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..layout import BlockLayout
from ..runtime import tracing
from .names import CONFIG_KEY

# the "kind" of such a dict, beside those of selections
KIND = "layout"


def is_saved(given: Any) -> bool:
    """Whether an entry of config.attention_layout is a layout as `to_json` writes it."""
    return isinstance(given, dict) and given.get("kind") == KIND


def replaced(given: Any, function: Callable[[Any, str], Any], name: str = f"config.{CONFIG_KEY}") -> Any:
    """What a config holds, with function(layout, name) in place of each BlockLayout and of each saved one.

    name  where `given` is, for messages
    """
    if isinstance(given, BlockLayout) or is_saved(given):
        return function(given, name)
    if isinstance(given, list | tuple):
        return [replaced(layout, function, f"{name}[{index}]") for index, layout in enumerate(given)]
    # a dict with a kind is a selection
    if isinstance(given, dict) and "kind" not in given:
        return {kind: replaced(layout, function, f"{name}[{kind!r}]") for kind, layout in given.items()}
    return given


def to_json(layout: BlockLayout) -> dict[str, Any]:
    """A dict that JSON can store, read by `from_json`; the device is not stored."""
    state = layout.state_dict()
    return {"kind": KIND} | {
        name: _packed(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


@tracing.untraced
def from_json(saved: dict[str, Any], name: str) -> BlockLayout:
    """The layout of `to_json`, on the CPU; `name` is where in the config it is.

    raises  ValueError if it was changed
    """
    try:
        state = {key: _unpacked(value) if isinstance(value, dict) else value for key, value in saved.items()}
        del state["kind"]
        return BlockLayout.from_state_dict(state)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{name} must be a layout as save_pretrained wrote it, but the file was changed ({error}): save the model "
            "again, or set it to a BlockLayout"
        ) from error


def _packed(tensor: torch.Tensor) -> dict[str, Any]:
    """An int32 tensor: its shape, and its values, little-endian, compressed by zlib, in base64."""
    values = tensor.cpu().numpy().astype("<i4").tobytes()
    return {"shape": list(tensor.shape), "zlib": base64.b64encode(zlib.compress(values, 9)).decode()}


def _unpacked(packed: dict[str, Any]) -> torch.Tensor:
    shape = packed["shape"]
    n_bytes = 4 * math.prod(shape)
    # no more than the shape says, whatever the text would decompress to
    values = zlib.decompressobj().decompress(base64.b64decode(packed["zlib"], validate=True), n_bytes + 1)
    if len(values) != n_bytes:
        raise ValueError(f"the values of a tensor of shape {tuple(shape)} are not {n_bytes} bytes")
    return torch.from_numpy(np.frombuffer(values, "<i4").astype(np.int32).reshape(shape))
