"""Which pattern of attention: functions that return a BlockLayout, one family a file.

Knows the names of the families.
Must not know anything else: patterns compose with | & ~ - of the layouts they return.
"""

from .butterfly import butterfly
from .documents import documents
from .global_tokens import global_tokens
from .local import causal, local
from .presets import bigbird, longformer
from .random import random
from .strided import strided

__all__ = [
    "bigbird",
    "butterfly",
    "causal",
    "documents",
    "global_tokens",
    "local",
    "longformer",
    "random",
    "strided",
]
