"""Conversion from (`from_<library>`) and to (`to_<library>`) the mask formats of other libraries.

A conversion is exact, or raises a ValueError that says why it is impossible and what to do instead. None of the
libraries is imported unless its own classes are needed.
"""

from .attention_masks import from_huggingface, kv_lengths_from_huggingface, to_huggingface
from .block_masks import (
    BlockSparseAttentionMask,
    from_block_sparse_attention,
    from_deepspeed,
    from_xformers,
    to_block_sparse_attention,
    to_deepspeed,
    to_xformers,
)
from .bsr import (
    FlashInferBsr,
    from_flashinfer,
    from_scipy_bsr,
    from_scipy_csr,
    from_torch_sparse,
    to_flashinfer,
    to_scipy_bsr,
    to_scipy_csr,
    to_torch_sparse,
)
from .cudnn import CudnnLists, from_cudnn, to_cudnn
from .flash_attention_4 import BlockSparseTensors, FlashAttention4Mask, from_flash_attention_4, to_flash_attention_4
from .flashmask import from_flashmask, to_flashmask
from .flex_attention import from_flex_attention, to_flex_attention
from .magi import MagiSlices, from_magi, to_magi

__all__ = [
    "BlockSparseAttentionMask",
    "BlockSparseTensors",
    "CudnnLists",
    "FlashAttention4Mask",
    "FlashInferBsr",
    "MagiSlices",
    "from_block_sparse_attention",
    "from_cudnn",
    "from_deepspeed",
    "from_flash_attention_4",
    "from_flashinfer",
    "from_flashmask",
    "from_flex_attention",
    "from_huggingface",
    "from_magi",
    "from_scipy_bsr",
    "from_scipy_csr",
    "from_torch_sparse",
    "from_xformers",
    "kv_lengths_from_huggingface",
    "to_block_sparse_attention",
    "to_cudnn",
    "to_deepspeed",
    "to_flash_attention_4",
    "to_flashinfer",
    "to_flashmask",
    "to_flex_attention",
    "to_huggingface",
    "to_magi",
    "to_scipy_bsr",
    "to_scipy_csr",
    "to_torch_sparse",
    "to_xformers",
]
