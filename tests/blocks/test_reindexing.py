"""Shifted, permuted, cropped and padded layouts equal the same operations on dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from blocksparse_flash import BlockLayout
from blocksparse_flash.blocks import block_list
from tests.support import cases
from tests.support.dense_masks import Problem, problems
from tests.support.meaning import assert_means

# one unit; no divisor of a power of two; divisors; a tile; sides that differ
BLOCK_SIZES = [16, 48, 64, 128, (16, 128), (64, 48)]


def dense(mask: np.ndarray | torch.Tensor, block_size: int | tuple[int, int]) -> BlockLayout:
    return BlockLayout.from_dense(mask, block_size=block_size)


def moved_pairs(mask: np.ndarray, q: int, kv: int) -> np.ndarray:
    """Pair by pair, those that stay inside."""
    moved = np.zeros_like(mask)
    for batch, head, q_pos, kv_pos in np.argwhere(mask).tolist():
        if 0 <= q_pos + q < mask.shape[2] and 0 <= kv_pos + kv < mask.shape[3]:
            moved[batch, head, q_pos + q, kv_pos + kv] = True
    return moved


@given(problems())
def test_shifting_moves_every_pair(problem: Problem) -> None:
    layout, (q_len, kv_len) = dense(problem.mask, problem.block_size), problem.mask.shape[2:]
    q, kv = (int(problem.random.integers(-length - 20, length + 20)) for length in (q_len, kv_len))
    if problem.random.random() < 0.3:
        # whole blocks
        q, kv = q // 16 * 16, kv // 16 * 16
    shifted = layout.shift(q=q, kv=kv)
    assert_means(shifted, moved_pairs(problem.mask, q, kv))
    assert shifted == layout.shift(kv=kv).shift(q=q) == layout.T.shift(kv, q).T
    assert layout.shift() == layout


@pytest.mark.sweep
@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize(
    ("q", "kv"), [(1, 0), (0, -1), (16, 16), (-7, 130), (128, -48), (400, 0), (0, -301), (10**30, 0)]
)
def test_shifts_by_less_and_more_than_a_block(block_size: Any, q: int, kv: int) -> None:
    random = np.random.default_rng(0)
    mask = random.random((1, 2, 300, 260)) < 0.5
    mask[:, 0, 32:200, 64:260] = True
    assert_means(dense(mask, block_size).shift(q, kv), moved_pairs(mask, q, kv))


@given(problems())
def test_permuting_reorders_tokens(problem: Problem) -> None:
    mask, random = problem.mask, problem.random
    layout = dense(mask, problem.block_size)
    q_order, kv_order = (random.permutation(length) for length in mask.shape[2:])
    assert_means(layout.permute(q_order, torch.from_numpy(kv_order)), mask[:, :, q_order][..., kv_order])
    assert_means(layout.permute(q_order.tolist()), mask[:, :, q_order])
    assert_means(layout.permute(kv_order=kv_order), mask[..., kv_order])
    back = np.argsort(q_order), np.argsort(kv_order)
    assert layout.permute(q_order, kv_order).permute(*back) == layout == layout.permute()


def test_attention_commutes_with_a_permutation() -> None:
    """The sentence of the docstring."""
    from blocksparse_flash import attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 150, 16, dtype=torch.float64, generator=generator)
    layout = dense(torch.rand(150, 150, generator=generator) < 0.2, 16)
    order = torch.randperm(150, generator=generator)
    reordered = attention(q[:, :, order], k[:, :, order], v[:, :, order], layout.permute(order, order))
    torch.testing.assert_close(reordered, attention(q, k, v, layout)[:, :, order])


@given(problems())
def test_crops_and_pads_are_slices_and_borders(problem: Problem) -> None:
    mask, random = problem.mask, problem.random
    layout, (q_len, kv_len) = dense(mask, problem.block_size), mask.shape[2:]
    q_start, q_stop = sorted(random.integers(0, q_len + 1, 2).tolist())
    kv_start, kv_stop = sorted(random.integers(0, kv_len + 1, 2).tolist())
    cropped = layout.crop(q_start, q_stop, kv_start, kv_stop)
    assert_means(cropped, mask[:, :, q_start:q_stop, kv_start:kv_stop])
    assert_means(layout.crop(q_start, kv_stop=kv_stop), mask[:, :, q_start:, :kv_stop])
    # what was cut away comes back empty
    inside = np.zeros_like(mask)
    inside[:, :, q_start:q_stop, kv_start:kv_stop] = True
    padded = cropped.pad(q=(q_start, q_len - q_stop), kv=(kv_start, kv_len - kv_stop))
    assert padded == layout & dense(inside, problem.block_size)
    sides = random.integers(0, 70, (2, 2)).tolist()
    assert_means(layout.pad(*sides), np.pad(mask, ((0, 0), (0, 0), *sides)))
    assert layout.pad() == layout.crop() == layout


def test_a_crop_reads_its_rows_only() -> None:
    """A step of decoding takes one row of a long layout: it must not pay for the others."""
    random = np.random.default_rng(0)
    mask = random.random((2, 3, 300, 500)) < 0.3
    mask[..., 100:200] = True
    layout = dense(mask, (64, 32))
    spoilt = layout.indices.clone(), layout.bitmask_ids.clone()
    starts, stops = (layout.indptr[..., row].reshape(-1).tolist() for row in (2, 4))
    is_read = torch.zeros(layout.nnz, dtype=torch.bool)
    for start, stop in zip(starts, stops, strict=True):
        is_read[start:stop] = True
    for tensor in spoilt:
        tensor[~is_read] = 10**9
    other = BlockLayout._bare(layout.indptr, *spoilt, layout.bitmasks, *layout._frame[2:])
    for q_start, q_stop in ((130, 131), (128, 256), (150, 200), (129, 255)):
        assert_means(other.crop(q_start, q_stop, 32, 471), mask[:, :, q_start:q_stop, 32:471])


@given(problems())
def test_selecting_concatenates_blocks(problem: Problem) -> None:
    mask, random, (block_q, block_kv) = problem.mask, problem.random, problem.block_size
    layout = dense(mask, problem.block_size)
    chosen = []
    for length, side in zip(mask.shape[2:], problem.block_size, strict=True):
        n_whole, is_ragged = length // side, length % side > 0
        # any order, some twice, the ragged one last
        indices = random.integers(0, n_whole, random.integers(0, 6)).tolist() if n_whole else []
        chosen.append([*indices, n_whole] if is_ragged and random.random() < 0.5 else indices)
    rows, cols = chosen
    none = mask[:, :, :0]
    taken = np.concatenate([none, *(mask[:, :, row * block_q : (row + 1) * block_q] for row in rows)], 2)
    taken = np.concatenate([taken[..., :0], *(taken[..., col * block_kv : (col + 1) * block_kv] for col in cols)], 3)
    assert_means(layout.select(rows, torch.tensor(cols, dtype=torch.int64)), taken)
    assert layout.select() == layout == layout.select(slice(0, None), slice(None, layout.n_cols))
    assert layout.select(slice(1, 3)) == layout.crop(min(block_q, mask.shape[2]), min(3 * block_q, mask.shape[2]))


@given(problems())
def test_other_block_sizes_hold_the_same_pairs(problem: Problem) -> None:
    layout = dense(problem.mask, problem.block_size)
    other = layout.with_block_size(problem.new_block_size)
    assert other.block_size == problem.new_block_size
    assert_means(other, problem.mask)
    assert other == dense(problem.mask, problem.new_block_size)
    fine = layout.refine(16)
    assert fine == dense(problem.mask, 16) == fine.refine((16, 16))
    assert fine.coarsen(problem.block_size) == layout


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_equal_masks_are_equal_layouts_however_they_were_moved(case: cases.Case) -> None:
    layout = case.build()
    q_len, kv_len = layout.shape[2:]
    assert layout.pad(q=(5, 3), kv=(0, 40)).crop(5, 5 + q_len, 0, kv_len) == layout
    assert layout.pad(q=(0, 9)).shift(q=9).crop(q_start=9) == layout
    backwards = np.arange(q_len)[::-1]
    assert layout.permute(backwards).permute(backwards) == layout
    assert layout.shift(3, -2) == layout.pad(q=(3, 0), kv=(0, 2)).crop(0, q_len, 2, kv_len + 2)
    assert (layout ^ layout.shift(1)) == (layout - layout.shift(1)) | (layout.shift(1) - layout)
    assert hash(layout.with_block_size(48).with_block_size(layout.block_size)) == hash(layout)


@given(problems())
def test_small_parts_give_the_same_lists(problem: Problem) -> None:
    layout = dense(problem.mask, problem.block_size)
    order = problem.random.permutation(problem.mask.shape[2])

    def everything() -> list[BlockLayout]:
        return [layout.shift(-9, 21), layout.permute(order), layout.pad((17, 0), (1, 1))]

    whole = everything()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_list, "_CHUNK_BYTES", 3000)
        assert everything() == whole


def test_a_million_tokens_move_in_memory_for_their_blocks_only() -> None:
    """N x N bits would be 128 GiB, so finishing is the test; and bitmasks stay few."""
    length, block = 1 << 20, np.arange(8192)
    diagonal = BlockLayout.from_blocks(block, block, length, length, block_size=128)
    shifted = diagonal.shift(q=1000, kv=-24)
    # the four kinds of pieces that a block of 1000 - 128 * 7 and -24 + 128 tokens leaves, no more
    assert len(shifted.bitmasks) <= 4 and shifted.nnz <= 4 * 8192
    # evens, then odds: a row is half of two, and a block holds a checkered piece of each
    order = np.concatenate([np.arange(0, length, 2), np.arange(1, length, 2)])
    permuted = diagonal.permute(order, order)
    assert permuted.nnz == 2 * 8192 and len(permuted.bitmasks) == 1
    assert permuted.crop(0, 256, 0, 256).to_dense().sum() == 4 * 64 * 64


def test_moved_layouts_stay_on_their_device(device: torch.device) -> None:
    layout = cases.LAYOUTS[-1].build().to(device)
    every = [layout.shift(1), layout.permute(), layout.select([0]), layout.crop(1), layout.pad((1, 1)), layout ^ layout]
    every += [layout.refine(16), layout.head(0), layout.batch(0), BlockLayout.stack_heads([layout] * 2)]
    assert {other.device for other in every} == {device}


# ---- bad input

# three rows of 16, 16 and 8; three cols of 16, 16 and 11
_GOOD = BlockLayout.from_predicate(lambda q_pos, kv_pos: kv_pos <= q_pos, 40, 43, block_size=16)
_BACKWARDS = list(range(40))[::-1]

_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shift-float": (lambda: _GOOD.shift(1.0), TypeError, "q must be an int, got 1.0"),
    "shift-bool": (lambda: _GOOD.shift(kv=True), TypeError, "kv must be an int, got True"),
    "shift-tensor": (lambda: _GOOD.shift(kv=torch.tensor(1)), TypeError, "kv must be an int"),
    "order-short": (
        lambda: _GOOD.permute(_BACKWARDS[1:]),
        ValueError,
        r"q_order must name each of 40 tokens once, got 39 entries; crop\(\)",
    ),
    "order-of-the-other": (
        lambda: _GOOD.permute(kv_order=_BACKWARDS),
        ValueError,
        "kv_order must name each of 43 tokens once, got 40 entries",
    ),
    "order-again": (
        lambda: _GOOD.permute([5, *_BACKWARDS[:-1]]),
        ValueError,
        "q_order must list each token once, but token 5 is repeated",
    ),
    "order-negative": (
        lambda: _GOOD.permute([-1, *_BACKWARDS[1:]]),
        ValueError,
        "q_order must be in 0 .. length - 1 = 39, got -1 at 0",
    ),
    "order-large": (lambda: _GOOD.permute([40, *_BACKWARDS[1:]]), ValueError, "q_order must be in .* got 40 at 0"),
    "order-float": (lambda: _GOOD.permute(torch.rand(40)), ValueError, "q_order must be integers, got torch.float32"),
    "order-2-axes": (lambda: _GOOD.permute(torch.arange(40)[None]), ValueError, "q_order must have one axis"),
    "rows-large": (lambda: _GOOD.select([3]), ValueError, "rows must be in 0 .. n_rows - 1 = 2, got 3 at 0"),
    "rows-negative": (lambda: _GOOD.select([-1]), ValueError, "rows must be in .* got -1 at 0"),
    "rows-step": (
        lambda: _GOOD.select(slice(None, None, 0)),
        ValueError,
        "rows must be a slice with another step than 0",
    ),
    "rows-int": (lambda: _GOOD.select(1), ValueError, r"rows must have one axis, got shape \(\)"),
    "rows-bool": (lambda: _GOOD.select(np.ones(3, bool)), ValueError, "rows must be integers, got bool"),
    "rows-slice-of-strings": (
        lambda: _GOOD.select(slice("a")),
        TypeError,
        "rows: a bound of the slice must be an int, got 'a'",
    ),
    "rows-ragged-first": (
        lambda: _GOOD.select([2, 0]),
        ValueError,
        r"rows may name the ragged last block, 2 of 8 tokens, only at its end, got it at 0 of 2; pad\(\)",
    ),
    "cols-ragged-reversed": (
        lambda: _GOOD.select(cols=slice(None, None, -1)),
        ValueError,
        "cols may name the ragged last block, 2 of 11 tokens",
    ),
    "cols-string": (lambda: _GOOD.select(cols="all"), ValueError, "cols must be integers"),
    "crop-backwards": (
        lambda: _GOOD.crop(5, 4),
        ValueError,
        r"q_start and q_stop must be 0 <= q_start <= q_stop <= q_len = 40, got 5 and 4; pad\(\)",
    ),
    "crop-beyond": (
        lambda: _GOOD.crop(kv_stop=44),
        ValueError,
        "kv_start and kv_stop must be .* kv_len = 43, got 0 and 44",
    ),
    "crop-negative": (lambda: _GOOD.crop(-1), ValueError, "q_start and q_stop must be .* got -1 and 40"),
    "crop-float": (lambda: _GOOD.crop(0, 1.5), TypeError, "q_stop must be an int, got 1.5"),
    "crop-none": (lambda: _GOOD.crop(None), TypeError, "q_start must be an int, got None"),
    "pad-int": (lambda: _GOOD.pad(3), TypeError, r"q must be \(before, after\), two numbers of tokens, got 3"),
    "pad-three": (lambda: _GOOD.pad(kv=(1, 2, 3)), TypeError, r"kv must be \(before, after\)"),
    "pad-negative": (
        lambda: _GOOD.pad(kv=(0, -1)),
        ValueError,
        r"kv must be \(before, after\), at least 0 tokens each, got \(0, -1\); crop\(\)",
    ),
    "pad-float": (lambda: _GOOD.pad((0.5, 0)), TypeError, "q must be an int, got 0.5"),
    "pad-huge": (lambda: _GOOD.pad((0, 2**31)), ValueError, r"q_len \+ q must be in 0 .. 2\*\*31 - 1 tokens"),
    "block-size-20": (lambda: _GOOD.with_block_size(20), ValueError, "block_size must be a multiple of 16"),
    "refine-coarser": (
        lambda: _GOOD.refine(32),
        ValueError,
        r"block_size must divide \(16, 16\) to refine it, got \(32, 32\); with_block_size\(\)",
    ),
    "refine-one-side": (
        lambda: _GOOD.with_block_size(48).refine((48, 32)),
        ValueError,
        r"block_size must divide \(48, 48\)",
    ),
    "coarsen-finer": (
        lambda: _GOOD.with_block_size(64).coarsen(32),
        ValueError,
        r"block_size must be a multiple of \(64, 64\) to coarsen it, got \(32, 32\)",
    ),
    "coarsen-other": (
        lambda: _GOOD.with_block_size(32).coarsen(48),
        ValueError,
        r"block_size must be a multiple of \(32, 32\)",
    ),
    "coarsen-none": (lambda: _GOOD.coarsen(None), TypeError, "block_size must be an int"),
}


@pytest.mark.parametrize("name", _BAD)
def test_wrong_calls_are_refused_by_name(name: str) -> None:
    call, error, message = _BAD[name]
    with pytest.raises(error, match=message):
        call()
