"""Dense and block-sparse attention, with masks exact to the token."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .explanation import Explanation
from .functional import attention, attention_with_lse, explain
from .layout import BlockLayout
from .merging import merge
from .paged.attention import paged_attention, paged_attention_with_lse
from .selection import selected_attention, selected_attention_with_lse

if TYPE_CHECKING:
    from . import diffusers as diffusers
    from . import distributed as distributed
    from . import huggingface as huggingface
    from . import interop as interop
    from . import masks as masks
    from . import nn as nn
else:
    # imported when they are first used
    _LAZY = ("diffusers", "distributed", "huggingface", "interop", "masks", "nn")

    def __getattr__(name: str) -> ModuleType:
        if name in _LAZY:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})


__all__ = [
    "BlockLayout",
    "Explanation",
    "attention",
    "attention_with_lse",
    "explain",
    "merge",
    "paged_attention",
    "paged_attention_with_lse",
    "selected_attention",
    "selected_attention_with_lse",
]

__version__ = "0.1.0"
