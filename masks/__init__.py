"""Which pattern of attention: functions that return a BlockLayout, one family a file, and orders of the tokens.

Knows the names of the families.
Must not know anything else: patterns compose with | & ~ - of the layouts they return.
"""

from .block_diagonal import block_causal, block_diagonal
from .butterfly import butterfly
from .dilated import dilated_window
from .documents import documents
from .global_tokens import global_tokens
from .grid import axial, neighborhood, sliding_tile, swin
from .hierarchical import hierarchical
from .local import causal, local
from .longnet import longnet
from .orders import hilbert_order, morton_order, tile_order
from .prefix import prefix_lm
from .presets import bigbird, longformer, pixelfly
from .random import random
from .sinks import a_shape, sink_window, tri_shape
from .sparse_transformer import fixed
from .strided import strided

__all__ = [
    "a_shape",
    "axial",
    "bigbird",
    "block_causal",
    "block_diagonal",
    "butterfly",
    "causal",
    "dilated_window",
    "documents",
    "fixed",
    "global_tokens",
    "hierarchical",
    "hilbert_order",
    "local",
    "longformer",
    "longnet",
    "morton_order",
    "neighborhood",
    "pixelfly",
    "prefix_lm",
    "random",
    "sink_window",
    "sliding_tile",
    "strided",
    "swin",
    "tile_order",
    "tri_shape",
]
