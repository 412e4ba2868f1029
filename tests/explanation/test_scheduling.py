"""Lines (tile rows and columns) in launch order equal the tiles of a mask; the makespan equals a simulation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from blocksparse_flash import BlockLayout
from blocksparse_flash.explanation import scheduling
from tests.support import cases

TILE = scheduling.TILE


def tiles_by_loop(mask: torch.Tensor) -> np.ndarray:
    """(tile rows, tile columns) of one head: 2 for a full tile, 1 for a partial one, 0 for an empty one."""
    q_len, kv_len = mask.shape
    rows, cols = range(0, q_len, TILE), range(0, kv_len, TILE)
    found = np.zeros((len(rows), len(cols)), dtype=int)
    for (i, q), (j, kv) in itertools.product(enumerate(rows), enumerate(cols)):
        tile = mask[q : q + TILE, kv : kv + TILE]
        found[i, j] = 2 if int(tile.sum()) == TILE * TILE else 1 if tile.any() else 0
    return found


def launched(lines: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """The launch order of lines: those longer than twice the mean of all heads come first, then head after head.

    lines  (tiles, ...) of each line of each head. Every head has as many first lines as the head with most long ones
    """
    longest_first = [sorted(head, key=lambda line: -line[0]) for head in lines]
    every = [line[0] for head in lines for line in head]
    n_long = max(sum(tiles > 2 * sum(every) / len(every) for tiles, *_ in head) for head in lines)
    n_long = min(n_long, len(lines[0]) - 1)
    first = [head[place] for place in range(n_long) for head in longest_first]
    return first + [line for head in longest_first for line in head[n_long:]]


# ---- lines ----


@pytest.mark.parametrize("case", cases.LAYOUTS, ids=str)
def test_lines_of_a_plan_equal_those_of_its_mask(case: cases.Case) -> None:
    layout = case.build()
    batch, heads = 2, 4
    plan = layout.plan("cpu")
    masks = layout.to_dense().expand(batch, heads, layout.q_len, layout.kv_len).flatten(0, 1)
    for items, sides in ((plan.row_records, masks), (plan.col_records, masks.mT)):
        found = scheduling.of_records(items.numpy(), batch=batch, heads=heads)
        grids = [tiles_by_loop(mask) for mask in sides]
        expected = launched([[(int((row > 0).sum()), int((row == 1).sum())) for row in grid] for grid in grids])
        # lines with equally many tiles may come in any order
        assert found.tiles.tolist() == [tiles for tiles, *_ in expected]
        assert sorted(zip(*map(np.ndarray.tolist, found), strict=True)) == sorted(expected)


def test_long_lines_of_all_heads_come_first() -> None:
    """Two heads of 16 tile rows in different orders: 16, 12 and 1 tiles; 14 and 10 (its own block and nine others)."""
    blocks = torch.eye(16, dtype=torch.bool).repeat(2, 1, 1)
    blocks[0, 3], blocks[0, 5, :12], blocks[1, 9, :14], blocks[1, 2, 7:] = True, True, True, True
    plan = BlockLayout.from_block_mask(blocks, 2048, 2048, block_size=128).plan("cpu")
    found = scheduling.of_records(plan.row_records.numpy(), batch=1, heads=2)
    assert found.tiles[:4].tolist() == [16, 14, 12, 10] and found.tiles[4:].tolist() == [1] * 28
    expected = launched([[(int(row.sum()), 0) for row in head] for head in blocks])
    assert found.tiles.tolist() == [tiles for tiles, _ in expected] and not found.partial.any()


@pytest.mark.parametrize("group", [2, 4])
def test_a_key_head_sums_the_columns_of_its_query_heads(group: int) -> None:
    """Heads with different orders: the sum is by column, not by position."""
    layout = next(case for case in cases.LAYOUTS if case.name == "per-head").build()
    grids = [(tiles_by_loop(mask) > 0).sum(axis=0) for mask in layout.to_dense()[0]]
    summed = [np.sum(grids[first : first + group], axis=0).tolist() for first in range(0, 4, group)]
    found = scheduling.of_records(layout.plan("cpu").col_records.numpy(), batch=3, heads=4, group=group)
    assert sorted(found.tiles.tolist()) == sorted(3 * list(itertools.chain(*summed)))


# 1 and 127: less than a tile; 128 and 384: no tail; 300 and 513: tails; either length is the larger one
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [*itertools.product([1, 127, 128, 300, 384], [1, 128, 384, 513])])
def test_lines_without_a_layout_equal_those_of_the_mask(q_len: int, kv_len: int, causal: bool) -> None:
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    grid = tiles_by_loop(mask.tril(kv_len - q_len) if causal else mask)
    sides = scheduling.without_layout(q_len, kv_len, causal=causal, n_batch_heads=4, n_kv_batch_heads=2)
    assert sides.rows.tiles.tolist() == 4 * (grid > 0).sum(axis=1)[::-1].tolist()
    assert sides.cols.tiles.tolist() == 2 * (2 * (grid > 0).sum(axis=0)).tolist()
    if q_len % TILE == 0 and kv_len % TILE == 0:
        assert sides.rows.partial.tolist() == 4 * (grid == 1).sum(axis=1)[::-1].tolist()
        assert sides.cols.partial.tolist() == 2 * (2 * (grid == 1).sum(axis=0)).tolist()
    assert (sides.rows.partial <= sides.rows.tiles).all() and (sides.cols.partial <= sides.cols.tiles).all()


# ---- the simulation ----


def finished_at(work: list[int], servers: int) -> int:
    """Tick by tick: an idle server takes the next program; each tick does one unit of every running program."""
    waiting, running, ticks = list(work), [], 0
    while waiting or running:
        while waiting and len(running) < servers:
            running.append(waiting.pop(0))
        ticks += 1
        running = [left - 1 for left in running if left > 1]
    return ticks


@pytest.mark.parametrize("servers", [1, 3, 7])
@pytest.mark.parametrize("seed", range(12))
def test_the_makespan_equals_a_simulation_by_ticks(servers: int, seed: int) -> None:
    generator = random.Random(seed)
    work = [generator.choice([1, 2, 3, 40]) for _ in range(generator.randrange(1, 40))]
    if seed % 2:
        work.sort(reverse=True)
    assert scheduling.makespan(np.array(work, dtype=float), servers) == finished_at(work, servers)


def test_one_long_program_determines_the_makespan() -> None:
    # 8 units of work on 4 servers, 5 of them in one program; started last, it ends even later
    assert scheduling.makespan(np.array([5.0, 1.0, 1.0, 1.0]), 4) == 5.0
    assert scheduling.makespan(np.array([1.0, 1.0, 1.0, 1.0, 5.0]), 4) == 6.0
    assert scheduling.makespan(np.array([]), 4) == 0.0


def test_of_many_programs_only_the_last_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    work = np.sort(np.random.default_rng(0).integers(1, 30, 3000))[::-1].astype(float)
    exact = scheduling.makespan(work, 13)
    monkeypatch.setattr(scheduling, "SIMULATED", 200)
    assert scheduling.makespan(work, 13) == pytest.approx(exact, rel=0.002)
    # an early program that is longer than all others still counts
    assert scheduling.makespan(np.append(1e6, work), 13) == pytest.approx(1e6)


def test_lines_of_dense_attention_equal_those_of_a_full_layout() -> None:
    plan = BlockLayout.from_blocks([0, 0, 1, 1], [0, 1, 0, 1], 256, 256, block_size=128).plan("cpu")
    sides = scheduling.without_layout(256, 256, causal=False, n_batch_heads=3, n_kv_batch_heads=3)
    for side, items in zip(sides, (plan.row_records, plan.col_records), strict=True):
        listed = scheduling.of_records(items.numpy(), batch=3, heads=1)
        assert np.array_equal(side.tiles, listed.tiles) and np.array_equal(side.partial, listed.partial)
