"""Gathered plans list the tiles of a mask as Plan documents; compared with a loop over the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse_flash import BlockLayout
from blocksparse_flash.plan import gathered_builder
from blocksparse_flash.plan_format import N_LONG, N_PARTIAL, N_TILES, SPLIT_SHARE, Plan, loads_per_step
from tests.plan.test_host_builder import drawn
from tests.support import cases


def tiles_of(mask: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """(row, col) -> 64 x 16 pairs of each tile that is not empty; pairs past the end are False."""
    q_len, kv_len = mask.shape
    padded = np.zeros((-(-q_len // 64) * 64, -(-kv_len // 16) * 16), bool)
    padded[:q_len, :kv_len] = mask
    tiles = padded.reshape(len(padded) // 64, 64, -1, 16).swapaxes(1, 2)
    return {(row, col): tiles[row, col] for row, col in zip(*tiles.any(axis=(2, 3)).nonzero(), strict=True)}


def check_side(plan: Plan, masks: np.ndarray, *, of_rows: bool) -> None:
    """Checks one direction of a plan against masks (batch, heads, lines, others)."""
    records_of, indices, ids = (tensor.numpy() for tensor in (plan[:3] if of_rows else plan[3:6]))
    words = plan.bitmasks.numpy().view(np.uint32)
    assert np.array_equal(words >> 16, words & 0xFFFF) and not words[0].any()
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(len(words), 64, 32)[:, :, :16]
    batch_heads = masks.reshape(-1, *masks.shape[2:])
    n_lines, n_loads, begin = -(-batch_heads.shape[1] // 64), indices.shape[1], 0
    assert n_loads == loads_per_step(plan)[not of_rows] and ids.shape[1] == 4
    steps = records_of.reshape(len(batch_heads), n_lines, 8)[:, :, N_TILES]
    over = steps * steps.size > 2 * steps.sum()
    for mask, records in zip(batch_heads, records_of.reshape(len(batch_heads), n_lines, 8), strict=True):
        expected, found = tiles_of(mask), {}
        assert (np.diff(records[:, N_TILES]) <= 0).all()
        assert (records[:, N_LONG] == min(over.sum(1).max(initial=0), n_lines - 1)).all()
        for line in range(n_lines):
            number, first, n_steps, n_partial, _, _, *rest = records[records[line, 4]].tolist()
            assert (number, first, rest) == (line, begin, [0, 0]) and 0 <= n_partial <= n_steps
            n_empty = 0
            for i_step in range(n_steps):
                listed = indices[first + i_step]
                minors = listed if n_loads == 4 else 4 * listed[0] + np.arange(4)
                of_step = [bits[i].astype(bool) for i in ids[first + i_step]]
                assert (i_step < n_partial) == (not all(tile.all() for tile in of_step))
                for minor, i, tile in zip(minors.tolist(), ids[first + i_step], of_step, strict=True):
                    if i == 0:
                        n_empty += 1
                        assert n_loads == 1 or (minor == -1 and i_step == 0)
                    else:
                        assert (line, minor) not in found
                        found[line, minor] = tile
            assert n_loads == 1 or n_empty < 4
            begin += n_steps
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], tile) for key, tile in expected.items())
    is_split = (over & (steps * SPLIT_SHARE > steps.sum(1, keepdims=True))).sum(1).max(initial=0)
    assert (plan.n_split_rows if of_rows else plan.n_split_cols) == is_split
    assert len(indices) % 8 == 1 and len(indices) > begin
    assert len(ids) == len(indices) + 8 * is_split + (2 if of_rows else 4)


def check(plan: Plan, masks: np.ndarray) -> None:
    assert plan.tile == 16
    check_side(plan, masks, of_rows=True)
    check_side(plan, masks.swapaxes(2, 3), of_rows=False)


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (1, 3), (2, 2)]),
    st.sampled_from([100, 128, 576, 700]),
    st.sampled_from([100, 192, 384, 1000]),
    st.sampled_from([128, 64, 16, (32, 256)]),
    st.sampled_from([0.0, 1.25, 100.0]),
)
def test_both_directions_list_the_tiles_of_the_mask(
    seed: int, axes: tuple[int, int], q_len: int, kv_len: int, block_size: int | tuple[int, int], of_step: float
) -> None:
    """Gathered, as it pays, and by neighbors."""
    masks = drawn(seed, axes, q_len, kv_len)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gathered_builder, "GATHERED_STEP", of_step)
        plan = BlockLayout.from_dense(masks, block_size=block_size).plan("cpu", tile=16)
    # without a pair there is no step in either form
    assert of_step == 1.25 or not masks.any() or loads_per_step(plan) == ((1, 1) if of_step else (4, 4))
    check(plan, masks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_plans_of_the_zoo_list_the_tiles_of_the_mask(case: cases.Case, causal: bool) -> None:
    layout = case.build()
    masks = layout.to_dense().numpy()
    if causal:
        masks = masks & np.tri(layout.q_len, layout.kv_len, layout.kv_len - layout.q_len, dtype=bool)
    check(layout.plan("cpu", causal=causal, tile=16), masks)


@pytest.mark.parametrize(
    ("block_size", "expected"), [(16, (4, 4)), ((64, 16), (4, 1)), ((16, 64), (1, 4)), (64, (1, 1))]
)
def test_neighbors_are_loaded_at_once_where_that_is_faster(block_size: int, expected: tuple[int, int]) -> None:
    sides = (block_size, block_size) if isinstance(block_size, int) else block_size
    chosen = torch.rand(1, 1, *(2048 // side for side in sides), generator=torch.Generator().manual_seed(0)) < 0.1
    plan = BlockLayout.from_block_mask(chosen, 2048, 2048, block_size=sides).plan("cpu", tile=16)
    assert loads_per_step(plan) == expected


def test_a_long_tile_row_is_split() -> None:
    blocks = torch.rand((1, 2, 80, 96), generator=torch.Generator().manual_seed(0)) < 0.02
    blocks[0, 1, 12:16] = blocks[0, 1, :, 20:24] = True
    layout = BlockLayout.from_block_mask(blocks, 80 * 16, 96 * 16, block_size=16)
    plan = layout.plan("cpu", tile=16)
    assert plan.n_split_rows == plan.n_split_cols == 1 and plan.row_records[0, 1, 0, N_PARTIAL] == 0
    check(plan, layout.to_dense().numpy())
