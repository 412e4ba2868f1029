"""Attention over token-exact block-sparse masks, dense and sparse through one call."""

from .layout import BlockLayout

__all__ = ["BlockLayout"]
