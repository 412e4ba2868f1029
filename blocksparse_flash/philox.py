"""The dropout mask: the counter-based generator Philox 4x32 and the counter of each attention weight.

7 rounds are the fewest that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Every
backend uses the same counters, so the mask depends only on the seed and the position, not on tiles or backends:

    key      (seed's low 32 bits, seed's high 32 bits)
    counter  (kv_pos // 64 * 8 + kv_pos % 8, q_pos // 16 * 8 + q_pos % 8, head, batch)       head counts query heads
    word     2 * (q_pos // 8 % 2) + kv_pos // 8 % 2 of the counter's four words
    value    11 bits of the word, the first of them bit 31 - 7 * (kv_pos // 16 % 4)
    kept     value >= threshold(dropout_p)

After wgmma or mma.sync one thread holds all 16 pairs of a counter (four of them in a transposed tile), so each thread
uses what it draws and nothing goes through shared memory.

The last 4 bits of a value are the first 4 of the next value in its word. They decide only where the first 7 bits are
those of the threshold, so two keys 16 apart are almost independent: their correlation is below 1/128.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF
VALUE_BITS = 11
VALUES = 1 << VALUE_BITS
# distance in bits between the values of a word
VALUE_DISTANCE = 7


def threshold(dropout_p: float) -> int:
    """The smallest value that is kept: round(dropout_p * 2048), at most 2047, and at least 1 unless dropout_p is 0.

    >>> threshold(0.25)
    512
    """
    return min(max(round(dropout_p * VALUES), int(dropout_p > 0)), VALUES - 1)


def kept_share(dropout_p: float) -> float:
    """The probability of being kept, 1 - dropout_p to the nearest multiple of 1/2048.

    Kept weights are divided by it to preserve the mean.

    >>> kept_share(0.25)
    0.75
    """
    return 1 - threshold(dropout_p) / VALUES


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
        # a 64-bit product wraps around to the right bits; the mask drops the sign bits of the shift
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
    dropout_p  the probability of dropping, 0 <= dropout_p < 1
    returns    bool, of the shape to which the four positions broadcast
    """
    seed = seed.reshape(())
    key = (seed & LOW_32, (seed >> 32) & LOW_32)
    of_kv, of_q = (kv_pos >> 6 << 3) + (kv_pos & 7), (q_pos >> 4 << 3) + (q_pos & 7)
    word_0, word_1, word_2, word_3 = philox_4x32((of_kv, of_q, head_idx, batch_idx), key)
    is_later_kv, is_later_q = (kv_pos & 8).bool(), (q_pos & 8).bool()
    word = torch.where(is_later_q, torch.where(is_later_kv, word_3, word_2), torch.where(is_later_kv, word_1, word_0))
    below = (32 - VALUE_BITS) - VALUE_DISTANCE * ((kv_pos >> 4) & 3)
    value = (word >> below) & (VALUES - 1)
    return value >= threshold(dropout_p)
