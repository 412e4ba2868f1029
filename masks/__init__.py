"""Which pattern of attention: functions that return a BlockLayout, one family a file.

Knows the names of the families, and of `build`, which reads them from a line of text.
Must not know anything else: patterns compose with | & ~ - of the layouts they return.
"""

from .alibi_windows import alibi_windows
from .block_diffusion import block_diffusion
from .build import build
from .butterfly import butterfly
from .content import top_k, top_p
from .documents import documents
from .erdos_renyi import erdos_renyi
from .expander import expander
from .global_tokens import global_tokens
from .local import causal, local
from .lsh import lsh
from .presets import bigbird, longformer
from .random import random
from .shared_prefix import shared_prefix
from .small_world import small_world
from .strided import strided
from .tree import tree
from .vertical_slash import vertical_slash

__all__ = [
    "alibi_windows",
    "bigbird",
    "block_diffusion",
    "build",
    "butterfly",
    "causal",
    "documents",
    "erdos_renyi",
    "expander",
    "global_tokens",
    "local",
    "longformer",
    "lsh",
    "random",
    "shared_prefix",
    "small_world",
    "strided",
    "top_k",
    "top_p",
    "tree",
    "vertical_slash",
]
