"""torch.nn modules over a layout: self-attention, encoders, decoders, selected blocks, and torch.nn's own modules."""

from .decoder import Decoder, DecoderBlock
from .kv_cache import KVCache
from .layers import Encoder, EncoderBlock, SelfAttention
from .layout_by_length import LayoutByLength
from .mixture_of_blocks import MixtureOfBlockAttention, mixture_of_block_attention
from .native_sparse import NativeSparseAttention, native_sparse_attention
from .positions import LearnedPositions, RotaryTable, alibi_slopes, rotary_table
from .shared_index import SharedIndexAttention, shared_index_attention
from .torch_modules import MultiheadAttention, TransformerEncoderLayer
from .video_sparse import VideoSparseAttention, video_sparse_attention

__all__ = [
    "Decoder",
    "DecoderBlock",
    "Encoder",
    "EncoderBlock",
    "KVCache",
    "LayoutByLength",
    "LearnedPositions",
    "MixtureOfBlockAttention",
    "MultiheadAttention",
    "NativeSparseAttention",
    "RotaryTable",
    "SelfAttention",
    "SharedIndexAttention",
    "TransformerEncoderLayer",
    "VideoSparseAttention",
    "alibi_slopes",
    "mixture_of_block_attention",
    "native_sparse_attention",
    "rotary_table",
    "shared_index_attention",
    "video_sparse_attention",
]
