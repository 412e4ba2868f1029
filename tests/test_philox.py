"""Philox gives the published answers, and the dropout mask depends on the position alone."""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import philox

# the known-answer vectors published with Random123 for philox4x32-7
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
}


def as_int64(*words: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(word, dtype=torch.int64) for word in words)


def keep(seed: int, batch: int, heads: int, q_len: int, kv_len: int, dropout_p: float) -> torch.Tensor:
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    sizes = (batch, heads, q_len, kv_len)
    positions = [torch.arange(size).reshape(shape) for size, shape in zip(sizes, shapes, strict=True)]
    return philox.keep_mask(torch.tensor([seed]), *positions, dropout_p)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(name):
    counter, key, expected = KNOWN_ANSWERS[name]
    words = philox.philox_4x32(as_int64(*counter), as_int64(*key))
    assert tuple(word.item() for word in words) == expected


def test_counter_word_and_value_are_as_documented():
    # group 77 of 64 keys and of them 48 to 63, group 41 of 16 queries; the later 8 queries and the earlier 8 keys
    seed, batch, head, q_pos, kv_pos = 0x299F31D0A4093822, 3, 5, 16 * 41 + 8 + 5, 64 * 77 + 48 + 6
    words = philox.philox_4x32(as_int64(8 * 77 + 6, 8 * 41 + 5, head, batch), as_int64(0xA4093822, 0x299F31D0))
    # bits 10 to 0
    value = words[2].item() % 2**11
    place = as_int64(batch, head, q_pos, kv_pos)
    kept = [
        philox.keep_mask(torch.tensor([seed]), *place, dropout_p=(value + more) / 2**11).item() for more in (-1, 0, 1)
    ]
    assert kept == [True, True, False]


@pytest.mark.parametrize("of_16", [0, 5, 8, 15])
@pytest.mark.parametrize("of_64", range(64))
def test_each_pair_uses_its_own_value(of_64, of_16):
    words = philox.philox_4x32(as_int64(8 * 9 + of_64 % 8, 8 * 3 + of_16 % 8, 1, 0), as_int64(7, 0))
    bits = f"{words[2 * (of_16 // 8) + of_64 // 8 % 2].item():032b}"
    first = 7 * (of_64 // 16)
    value = int(bits[first : first + 11], 2)
    place = as_int64(0, 1, 16 * 3 + of_16, 64 * 9 + of_64)
    at, above = (philox.keep_mask(torch.tensor(7), *place, dropout_p=(value + more) / 2**11).item() for more in (0, 1))
    assert (at, above) == (True, False)


def test_a_negative_seed_is_its_two_complement_bits():
    words = philox.philox_4x32(as_int64(0, 0, 0, 0), as_int64(0xFFFFFFFF, 0xFFFFFFFF))
    for number, word in enumerate(words):
        place = as_int64(0, 0, 8 * (number // 2), 8 * (number % 2))
        kept = philox.keep_mask(torch.tensor([-1]), *place, dropout_p=0.5)
        assert kept.item() == (word.item() >= 2**31)


def test_the_mask_of_a_part_is_that_part_of_the_whole_mask():
    whole = keep(11, 2, 3, 64, 96, dropout_p=0.4)
    q_pos, kv_pos = torch.arange(17, 50)[:, None], torch.arange(30, 91)[None, :]
    part = philox.keep_mask(torch.tensor([11]), torch.tensor(1), torch.tensor(2), q_pos, kv_pos, 0.4)
    assert torch.equal(part, whole[1, 2, 17:50, 30:91])


def test_seeds_batches_heads_and_rows_differ():
    mask = keep(11, 2, 2, 2, 512, dropout_p=0.5)
    rows = mask.reshape(-1, 512)
    assert len({tuple(row.tolist()) for row in [*rows, *keep(12, 2, 2, 2, 512, dropout_p=0.5).reshape(-1, 512)]}) == 16


# 6 standard deviations: one failure in 10**9 seeds, and the seed is fixed
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_kept_share_is_one_minus_dropout_p(dropout_p):
    mask = keep(2024, 2, 2, 256, 256, dropout_p=dropout_p)
    deviation = (dropout_p * (1 - dropout_p) / mask.numel()) ** 0.5
    assert abs(mask.double().mean().item() - (1 - dropout_p)) < 6 * deviation


@pytest.mark.parametrize("distance", [1, 2, 8, 16, 32])
def test_neighbors_are_uncorrelated(distance):
    signs = keep(2024, 1, 1, 512, 512, dropout_p=0.5)[0, 0].double() * 2 - 1
    for shifted, original in ((signs[distance:], signs[:-distance]), (signs[:, distance:], signs[:, :-distance])):
        assert abs((shifted * original).mean().item()) < 6 / original.numel() ** 0.5


def test_values_that_share_bits_are_almost_independent():
    mask = keep(2024, 1, 1, 512, 1024, dropout_p=0.1)[0, 0].double() - 0.9
    before, after = mask[:, :-16], mask[:, 16:]
    correlation = (before * after).mean().item() / 0.09
    assert abs(correlation) < 1 / 128 + 6 / before.numel() ** 0.5


def test_threshold_has_11_bits_and_kept_share_follows_it():
    assert philox.threshold(0.0) == 0
    assert philox.threshold(0.5) == 2**10
    assert philox.threshold(1 - 2**-53) == 2**11 - 1
    assert philox.kept_share(1 - 2**-53) == 2**-11
    assert philox.kept_share(0.1) == 1 - 205 / 2**11


def test_a_small_probability_is_not_ignored():
    assert philox.threshold(1e-9) == 1
    assert philox.kept_share(1e-9) == 1 - 2**-11


def test_dropout_of_zero_keeps_everything():
    assert keep(3, 1, 1, 64, 64, dropout_p=0.0).all()
