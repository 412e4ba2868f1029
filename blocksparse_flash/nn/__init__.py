"""torch.nn modules over a layout: self-attention, encoders, decoders, and replacements for modules of torch.nn."""

from .decoder import Decoder, DecoderBlock
from .kv_cache import KVCache
from .layers import Encoder, EncoderBlock, SelfAttention
from .layout_by_length import LayoutByLength
from .positions import LearnedPositions, RotaryTable, alibi_slopes, rotary_table
from .torch_modules import MultiheadAttention, TransformerEncoderLayer

__all__ = [
    "Decoder",
    "DecoderBlock",
    "Encoder",
    "EncoderBlock",
    "KVCache",
    "LayoutByLength",
    "LearnedPositions",
    "MultiheadAttention",
    "RotaryTable",
    "SelfAttention",
    "TransformerEncoderLayer",
    "alibi_slopes",
    "rotary_table",
]
