"""Which attention weights does dropout keep?

Knows the counter-based generator Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and the
counter layout which every backend shares, so that the mask depends on nothing but the seed and the element's position:

    key      (seed's low 32 bits, seed's high 32 bits)
    counter  (kv_pos // 4, q_pos, head, batch)       head counts query heads
    word     kv_pos % 4 of the four which one counter gives
    kept     word >= threshold(dropout_p), compared as unsigned numbers

Must not know tiles, layouts or backends: that is what makes the mask independent of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """The smallest 32-bit word that is kept: round(dropout_p * 2**32), and at most 2**32 - 1, so that it fits 32 bits.

    >>> threshold(0.25) == 2**30
    True
    """
    return min(round(dropout_p * 2**32), LOW_32)


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of a counter, as int64 tensors in 0 .. 2**32 - 1.

    counter  four int64 tensors that broadcast, each in 0 .. 2**32 - 1
    key      two such tensors
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        # a 64-bit product wraps around to the right bits, and the mask drops the sign which the shift copied
        product_0, product_2 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0, word_1, word_2, word_3 = (
            ((product_2 >> 32) & LOW_32) ^ word_1 ^ key_0,
            product_2 & LOW_32,
            ((product_0 >> 32) & LOW_32) ^ word_3 ^ key_1,
            product_0 & LOW_32,
        )
        key_0, key_1 = (key_0 + KEY_STEPS[0]) & LOW_32, (key_1 + KEY_STEPS[1]) & LOW_32
    return word_0, word_1, word_2, word_3


def keep_mask(
    seed: Tensor, batch_idx: Tensor, head_idx: Tensor, q_pos: Tensor, kv_pos: Tensor, dropout_p: float
) -> Tensor:
    """True where the attention weight of (batch, head, q_pos, kv_pos) survives dropout.

    seed       int64, one element
    batch_idx, head_idx, q_pos, kv_pos  int64 tensors that broadcast, on seed's device; heads are query heads
    dropout_p  the probability to drop, 0 <= dropout_p < 1
    returns    bool, of the shape to which the four positions broadcast
    """
    seed = seed.reshape(())
    key = (seed & LOW_32, (seed >> 32) & LOW_32)
    word_0, word_1, word_2, word_3 = philox_4x32((kv_pos >> 2, q_pos, head_idx, batch_idx), key)
    # even positions use words 0 and 2, odd ones 1 and 3
    is_odd, is_upper = (kv_pos & 1).bool(), (kv_pos & 2).bool()
    word = torch.where(is_upper, torch.where(is_odd, word_3, word_2), torch.where(is_odd, word_1, word_0))
    return word >= threshold(dropout_p)
