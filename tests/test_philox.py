"""Is dropout's generator the published one, and is its mask a function of the position alone?"""

from __future__ import annotations

import pytest
import torch

from blocksparse_flash import philox

# the known-answer vectors published with Random123 for philox4x32-10
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
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
def test_known_answers(name):
    counter, key, expected = KNOWN_ANSWERS[name]
    words = philox.philox_4x32(as_int64(*counter), as_int64(*key))
    assert tuple(word.item() for word in words) == expected


def test_counter_and_word_are_those_of_the_docstring():
    seed, batch, head, q_pos, kv_pos = 0x299F31D0A4093822, 3, 5, 1_000_003, 4 * 77 + 2
    words = philox.philox_4x32(as_int64(77, q_pos, head, batch), as_int64(0xA4093822, 0x299F31D0))
    word = words[2].item()
    kept_below = philox.keep_mask(
        torch.tensor([seed]), *as_int64(batch, head, q_pos, kv_pos), dropout_p=(word - 1) / 2**32
    )
    kept_at = philox.keep_mask(torch.tensor([seed]), *as_int64(batch, head, q_pos, kv_pos), dropout_p=word / 2**32)
    kept_above = philox.keep_mask(
        torch.tensor([seed]), *as_int64(batch, head, q_pos, kv_pos), dropout_p=(word + 1) / 2**32
    )
    assert (kept_below.item(), kept_at.item(), kept_above.item()) == (True, True, False)


@pytest.mark.parametrize("residue", range(4))
def test_each_residue_of_the_key_position_uses_its_own_word(residue):
    words = philox.philox_4x32(as_int64(9, 2, 1, 0), as_int64(7, 0))
    expected = words[residue].item() >= 2**31
    assert philox.keep_mask(torch.tensor(7), *as_int64(0, 1, 2, 4 * 9 + residue), dropout_p=0.5).item() == expected


def test_a_negative_seed_is_its_two_complement_bits():
    words = philox.philox_4x32(as_int64(0, 0, 0, 0), as_int64(0xFFFFFFFF, 0xFFFFFFFF))
    for kv_pos, word in enumerate(words):
        kept = philox.keep_mask(torch.tensor([-1]), *as_int64(0, 0, 0, kv_pos), dropout_p=0.5)
        assert kept.item() == (word.item() >= 2**31)


def test_mask_of_a_part_is_the_part_of_the_mask():
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


def test_neighbours_are_uncorrelated():
    signs = keep(2024, 1, 1, 512, 512, dropout_p=0.5)[0, 0].double() * 2 - 1
    for shifted, original in ((signs[1:], signs[:-1]), (signs[:, 1:], signs[:, :-1]), (signs[:, 4:], signs[:, :-4])):
        assert abs((shifted * original).mean().item()) < 6 / original.numel() ** 0.5


def test_threshold_fits_32_bits():
    assert philox.threshold(0.0) == 0
    assert philox.threshold(0.5) == 2**31
    assert philox.threshold(1 - 2**-53) == 2**32 - 1


def test_dropout_of_zero_keeps_everything():
    assert keep(3, 1, 1, 64, 64, dropout_p=0.0).all()
