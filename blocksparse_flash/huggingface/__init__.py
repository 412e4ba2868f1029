"""Layouts for Hugging Face transformers: `register()`, then attn_implementation="blocksparse"."""

from __future__ import annotations

from .attention import attention_function
from .mask import Mask
from .mask_builder import attention_mask
from .names import ATTENTION_NAME, CONFIG_KEY
from .registration import register

__all__ = ["ATTENTION_NAME", "CONFIG_KEY", "Mask", "attention_function", "attention_mask", "register"]
