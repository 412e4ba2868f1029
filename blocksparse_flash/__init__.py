"""Dense and block-sparse attention, with masks exact to the token."""

from .explanation import Explanation
from .functional import attention, attention_with_lse, explain
from .layout import BlockLayout
from .merging import merge

__all__ = ["BlockLayout", "Explanation", "attention", "attention_with_lse", "explain", "merge"]

__version__ = "0.1.0"
