"""Mask builders: functions that return a BlockLayout, one family per file, and token orders for grids.

Layouts compose with | & ^ ~ -, and `build` reads such an expression from text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .alibi_windows import alibi_windows
from .block_diagonal import block_causal, block_diagonal
from .block_diffusion import block_diffusion
from .build import build
from .butterfly import butterfly
from .content import top_k, top_p
from .dilated import dilated_window
from .documents import documents
from .erdos_renyi import erdos_renyi
from .expander import expander
from .global_tokens import global_tokens
from .grid import axial, neighborhood, sliding_tile, swin
from .hierarchical import hierarchical
from .local import causal, local
from .longnet import longnet
from .lsh import lsh
from .orders import hilbert_order, morton_order, tile_order
from .other_names import close_masks as _close_masks
from .prefix import prefix_lm
from .presets import bigbird, longformer, pixelfly
from .random import random
from .shared_prefix import shared_prefix
from .sinks import a_shape, sink_window, tri_shape
from .small_world import small_world
from .sparse_transformer import fixed
from .strided import strided
from .tree import tree
from .vertical_slash import vertical_slash

__all__ = [
    "a_shape",
    "alibi_windows",
    "axial",
    "bigbird",
    "block_causal",
    "block_diagonal",
    "block_diffusion",
    "build",
    "butterfly",
    "causal",
    "dilated_window",
    "documents",
    "erdos_renyi",
    "expander",
    "fixed",
    "global_tokens",
    "hierarchical",
    "hilbert_order",
    "local",
    "longformer",
    "longnet",
    "lsh",
    "morton_order",
    "neighborhood",
    "pixelfly",
    "prefix_lm",
    "random",
    "shared_prefix",
    "sink_window",
    "sliding_tile",
    "small_world",
    "strided",
    "swin",
    "tile_order",
    "top_k",
    "top_p",
    "tree",
    "tri_shape",
    "vertical_slash",
]

# hidden from type checkers, which would take any name
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """AttributeError that says what a mask is called here."""
        meant = "" if name.startswith("_") else _close_masks(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{meant}")
