"""Which attention weights does dropout keep?

Knows the counter-based generator Philox 4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), and the counter layout which every backend shares, so that the mask depends on
nothing but the seed and the element's position:

    key      (seed's low 32 bits, seed's high 32 bits)
    counter  (kv_pos // 32 * 8 + kv_pos % 8, q_pos // 16 * 8 + q_pos % 8, head, batch)       head counts query heads
    word     2 * (q_pos // 8 % 2) + kv_pos // 8 % 2 of the four which one counter gives
    half     the lower 16 bits of the word where kv_pos // 16 is even, the upper ones where it is odd
    kept     half >= threshold(dropout_p)

The eight pairs of a counter are pairs which one thread holds of a tile of scores that wgmma or mma.sync has computed (four of
them where the tile is transposed): what it draws it uses, and nothing goes through shared memory.

Must not know tiles, layouts or backends: that is what makes the mask independent of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_32 = 0xFFFFFFFF
# halves of words
VALUES = 1 << 16


def threshold(dropout_p: float) -> int:
    """The smallest half of a word that is kept: round(dropout_p * 2**16), and at most 2**16 - 1, so that some are.

    >>> threshold(0.25) == 2**14
    True
    """
    return min(round(dropout_p * VALUES), VALUES - 1)


def kept_share(dropout_p: float) -> float:
    """The probability to be kept, 1 - dropout_p but for 2**-17: what is kept is divided by it, so that the mean is right.

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
    of_kv, of_q = (kv_pos >> 5 << 3) + (kv_pos & 7), (q_pos >> 4 << 3) + (q_pos & 7)
    word_0, word_1, word_2, word_3 = philox_4x32((of_kv, of_q, head_idx, batch_idx), key)
    is_later_kv, is_later_q = (kv_pos & 8).bool(), (q_pos & 8).bool()
    word = torch.where(is_later_q, torch.where(is_later_kv, word_3, word_2), torch.where(is_later_kv, word_1, word_0))
    half = torch.where((kv_pos & 16).bool(), word >> 16, word & (VALUES - 1))
    return half >= threshold(dropout_p)
