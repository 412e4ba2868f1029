"""Block-sparse self-attention in models of Hugging Face diffusers: `use(pipe, layout)`."""

from __future__ import annotations

from .selecting import top_blocks, top_p
from .using import Use, use

__all__ = ["Use", "top_blocks", "top_p", "use"]
