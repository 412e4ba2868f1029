"""Layouts for Hugging Face transformers: `register()`, then attn_implementation="blocksparse"."""

from .attention import attention_function
from .mask import Mask
from .mask_builder import attention_mask
from .names import KEY, NAME
from .registration import register

__all__ = ["KEY", "NAME", "Mask", "attention_function", "attention_mask", "register"]
