"""Every peer's block-mask format, in (`from_<peer>`) and out (`to_<peer>`).

Each function keeps a mask bit for bit, or refuses with a ValueError that says why and what to do instead.
`import blocksparse_flash` does not load this package, and this package loads no peer.
"""

from .flash_attention_4 import BlockSparseTensors, FlashAttention4Mask, from_flash_attention_4, to_flash_attention_4
from .flashmask import from_flashmask, to_flashmask
from .flex_attention import from_flex_attention, to_flex_attention
from .magi import MagiSlices, from_magi, to_magi

__all__ = [
    "BlockSparseTensors",
    "FlashAttention4Mask",
    "MagiSlices",
    "from_flash_attention_4",
    "from_flashmask",
    "from_flex_attention",
    "from_magi",
    "to_flash_attention_4",
    "to_flashmask",
    "to_flex_attention",
    "to_magi",
]
