"""Which head groups overlap their pre- and postprocess with the tile columns, and that no program deadlocks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import masks
from blocksparse_flash.kernels.overlap_schedule import OverlapSchedule, n_counters, overlap_schedule_of
from blocksparse_flash.kernels.schedule import WHOLE, Split

CPU = torch.device("cpu")
# a plan of which only the lengths of the lists are read; no long columns
PLAN = (torch.empty(0),) * 7


def ask(
    heads: int, length: int, *, batch: int = 1, plan: tuple[torch.Tensor, ...] = PLAN, split: Split = WHOLE
) -> OverlapSchedule | None:
    shape = (batch, heads, length, 128)
    return overlap_schedule_of(plan, shape, shape, split, 132)


@pytest.mark.parametrize(
    ("heads", "length", "expected"),
    [
        # 128 tile columns per group: 132 programs begin in two, and are in at most three when a group is finished
        (16, 16384, OverlapSchedule(2, 4, 15)),
        (2, 16384, OverlapSchedule(2, 2, 1)),
        (1, 16384, None),
        # 1,024: a group takes longer than what is running
        (16, 131072, OverlapSchedule(1, 2, 15)),
        # 8: the last 16 head groups are computed at the same time
        (64, 1024, OverlapSchedule(17, 34, 48)),
        (16, 1024, None),
        (16, 0, None),
    ],
)
def test_head_groups(heads, length, expected):
    assert ask(heads, length) == expected
    assert ask(2, length, batch=heads // 2) == (expected if heads > 1 else None)


@pytest.mark.parametrize("length", [2048, 16384, 131072])
def test_dense_and_causal_calls_overlap_nothing(length):
    assert ask(64, length) is not None
    assert ask(64, length, plan=()) is None


def test_splits_and_long_columns():
    assert ask(16, 16384, split=Split(128, 2)) is None
    assert ask(16, 16384, plan=masks.butterfly(16384, block_size=128).plan(CPU)) is not None
    assert ask(16, 16384, plan=masks.bigbird(16384, block_size=128, seed=0).plan(CPU)) is None


def items(schedule: OverlapSchedule, n_batch_heads: int) -> list[tuple[str, int]]:
    """Passes over head groups in the order of kernels/hopper/overlapped_passes.py."""
    order = [("preprocess", group) for group in range(schedule.n_preprocessed, schedule.n_ahead)]
    for group in range(schedule.n_postprocessed):
        order.append(("postprocess", group))
        if group + schedule.n_ahead < n_batch_heads:
            order.append(("preprocess", group + schedule.n_ahead))
    return order


GRID = list(itertools.product((2, 3, 5, 16, 40), (1, 2, 7, 128), (1, 3, 8, 132)))


@pytest.mark.parametrize(("n_batch_heads", "n_lines", "n_programs"), GRID)
def test_each_group_is_preprocessed_once_and_postprocessed_at_most_once(n_batch_heads, n_lines, n_programs):
    shape = (1, n_batch_heads, 128 * n_lines, 64)
    schedule = overlap_schedule_of(PLAN, shape, shape, WHOLE, n_programs)
    if schedule is None:
        assert n_batch_heads * n_lines <= n_programs or n_batch_heads == 1
        return
    order = items(schedule, n_batch_heads)
    preprocessed = [group for what, group in order if what == "preprocess"]
    assert [*range(schedule.n_preprocessed), *preprocessed] == list(range(n_batch_heads))
    assert [group for what, group in order if what == "postprocess"] == list(range(schedule.n_postprocessed))
    assert schedule.n_postprocessed < n_batch_heads < n_counters(n_batch_heads)
    # columns are taken from a queue
    assert n_batch_heads * n_lines > n_programs


class Run:
    """Programs and the warps of the overlapped passes, which wait as kernels/hopper/overlapped_passes.py says.

    Chance chooses who goes on.
    """

    def __init__(self, n_batch_heads: int, n_lines: int, schedule: OverlapSchedule, n_programs: int) -> None:
        self.n_lines, self.n_cols, self.schedule = n_lines, n_batch_heads * n_lines, schedule
        self.order, self.n_items, self.n_taken = items(schedule, n_batch_heads), 0, 0
        self.is_preprocessed = [group < schedule.n_preprocessed for group in range(n_batch_heads)]
        self.n_computed = [0] * n_batch_heads
        # of each program, its column and whether it has begun; of each warp, its item
        self.programs: list[tuple[int, bool] | None] = [None] * n_programs
        self.warps: list[int | None] = [None] * n_programs
        self.postprocessed: list[int] = []

    def run_columns(self, i: int) -> bool:
        """Whether a program can go on."""
        held = self.programs[i]
        if held is not None and not held[1]:
            if self.is_preprocessed[held[0] // self.n_lines]:
                self.programs[i] = held[0], True
                return True
            return False
        if held is not None:
            # counted when the next one is taken
            self.n_computed[held[0] // self.n_lines] += 1
            self.programs[i] = None
        if self.n_taken < self.n_cols:
            self.programs[i] = self.n_taken, False
            self.n_taken += 1
            return True
        return held is not None

    def run_passes(self, i: int) -> bool:
        item = self.warps[i]
        if item is None:
            if self.n_items == len(self.order):
                return False
            self.warps[i], self.n_items = self.n_items, self.n_items + 1
            return True
        what, group = self.order[item]
        if what == "preprocess":
            self.is_preprocessed[group] = True
        elif self.n_computed[group] == self.n_lines:
            self.postprocessed.append(group)
        else:
            return False
        self.warps[i] = None
        return True


@pytest.mark.parametrize(
    ("n_batch_heads", "n_lines", "n_programs"), [case for case in GRID if case[2] < 132 and case[1] < 128]
)
def test_no_deadlock(n_batch_heads, n_lines, n_programs):
    """In any order, and with fewer programs than the schedule was made for."""
    shape = (1, n_batch_heads, 128 * n_lines, 64)
    schedule = overlap_schedule_of(PLAN, shape, shape, WHOLE, n_programs)
    if schedule is None:
        return
    for seed, n_running in itertools.product(range(5), {1, n_programs}):
        chance = random.Random(seed)
        run = Run(n_batch_heads, n_lines, schedule, n_running)
        moves = [(go, i) for go in (run.run_columns, run.run_passes) for i in range(n_running)]
        weights = [chance.choice([0.001, 1.0, 1000.0]) for _ in moves]
        while True:
            (first,) = chance.choices(range(len(moves)), weights)
            if not any(go(i) for go, i in [*moves[first:], *moves[:first]]):
                break
        assert run.n_computed == [n_lines] * n_batch_heads
        assert sorted(run.postprocessed) == list(range(schedule.n_postprocessed))


def test_the_preprocess_launch_zeroes_every_counter():
    """Short sequences of one query head a key head have the fewest programs; one count more than they clear is
    refused."""
    preprocess = pytest.importorskip("blocksparse_flash.kernels.triton.backward_preprocess", reason="needs Triton")
    tensor_spec = pytest.importorskip("blocksparse_flash.runtime.tensor_spec", reason="needs Triton")
    for batch, heads, q_len in itertools.product((1, 2), (1, 2, 5), (1, 128, 129)):
        dout, n_padded = tensor_spec.spec_of(torch.empty(batch, heads, q_len, 8, device="meta")), -(-q_len // 128) * 128
        preprocess.preprocess_launch(dout, n_padded, n_counts=n_counters(batch * heads))
        with pytest.raises(AssertionError):
            preprocess.preprocess_launch(dout, n_padded, n_counts=n_padded * batch * heads + 1)
    # few heads, of few head groups that the preprocess launch handles
    for n_batch_heads, n_lines in itertools.product((2, 40, 1000, 100000), (1, 8, 128)):
        shape = (1, n_batch_heads, 128 * n_lines, 64)
        schedule = overlap_schedule_of(PLAN, shape, shape, WHOLE, 132)
        if schedule is not None:
            assert n_counters(n_batch_heads) <= 128 * n_lines * schedule.n_preprocessed or n_batch_heads > 5000
