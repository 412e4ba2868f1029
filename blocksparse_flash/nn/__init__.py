"""torch.nn modules over a layout: self-attention, encoders, and drop-in replacements for the modules of torch.nn."""

from .layers import Encoder, EncoderBlock, SelfAttention
from .positions import LearnedPositions, RotaryTable, alibi_slopes, rotary_table
from .torch_modules import MultiheadAttention, TransformerEncoderLayer

__all__ = [
    "Encoder",
    "EncoderBlock",
    "LearnedPositions",
    "MultiheadAttention",
    "RotaryTable",
    "SelfAttention",
    "TransformerEncoderLayer",
    "alibi_slopes",
    "rotary_table",
]
