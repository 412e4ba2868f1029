"""The error of a config that cannot be saved, since it holds a BlockLayout."""

from __future__ import annotations

import functools
from typing import Any

from ..layout import BlockLayout
from .names import KEY

_explaining: list[Any] = []


def explain_unsaved_layouts() -> None:
    """Makes configs of transformers say what to do about a BlockLayout, which JSON cannot store."""
    from transformers import PreTrainedConfig

    configs: Any = PreTrainedConfig
    plain = configs.to_json_string
    if plain in _explaining:
        return

    @functools.wraps(plain)
    def to_json_string(self: Any, *args: Any, **kwargs: Any) -> str:
        try:
            return plain(self, *args, **kwargs)
        except TypeError as error:
            if BlockLayout.__name__ not in str(error):
                raise
            raise TypeError(
                f"config.{KEY} has a BlockLayout, which JSON cannot store: set it to a specification for masks.build, "
                "such as 'butterfly | local(window=512)', which is saved; or to None before saving, and to the layout "
                "again after loading"
            ) from error

    _explaining.append(to_json_string)
    configs.to_json_string = to_json_string
