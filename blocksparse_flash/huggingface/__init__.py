"""Layouts for Hugging Face transformers: `register()`, then attn_implementation="blocksparse"."""

from __future__ import annotations

import warnings

from .attention import attention_function
from .mask import Mask
from .mask_builder import attention_mask
from .names import ATTENTION_NAME, CONFIG_KEY
from .registration import register

__all__ = ["ATTENTION_NAME", "CONFIG_KEY", "Mask", "attention_function", "attention_mask", "register"]

# names of earlier versions, for one release
_FORMER = {"KEY": "CONFIG_KEY", "NAME": "ATTENTION_NAME"}


def __getattr__(name: str) -> str:
    if name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_FORMER[name]}", DeprecationWarning, stacklevel=2)
    return str(globals()[_FORMER[name]])
