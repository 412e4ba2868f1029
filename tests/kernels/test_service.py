"""Which head groups overlap their pre- and postprocess with the columns, and that no program waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import masks
from blocksparse_flash.kernels.schedule import WHOLE, Split
from blocksparse_flash.kernels.service import Service, n_counts, service_of

CPU = torch.device("cpu")
# a plan of which only the lengths of the lists are read; no long columns
PLAN = (torch.empty(0),) * 7


def ask(
    heads: int, length: int, *, batch: int = 1, plan: tuple[torch.Tensor, ...] = PLAN, split: Split = WHOLE
) -> Service | None:
    shape = (batch, heads, length, 128)
    return service_of(plan, shape, shape, split, 132)


@pytest.mark.parametrize(
    ("heads", "length", "expected"),
    [
        # 128 columns a section: 132 programs begin in two, and are in at most three when a section is done
        (16, 16384, Service(2, 4, 15)),
        (2, 16384, Service(2, 2, 1)),
        (1, 16384, None),
        # 1,024: a section outlasts what is under way
        (16, 131072, Service(1, 2, 15)),
        # 8: the last 16 sections are walked at the same time
        (64, 1024, Service(17, 34, 48)),
        (16, 1024, None),
        (16, 0, None),
    ],
)
def test_sections(heads, length, expected):
    assert ask(heads, length) == expected
    assert ask(2, length, batch=heads // 2) == (expected if heads > 1 else None)


@pytest.mark.parametrize("length", [2048, 16384, 131072])
def test_dense_and_causal_calls_overlap_nothing(length):
    assert ask(64, length) is not None
    assert ask(64, length, plan=()) is None


def test_neither_parts_nor_long_columns():
    assert ask(16, 16384, split=Split(128, 2)) is None
    assert ask(16, 16384, plan=masks.butterfly(16384, block_size=128).plan(CPU)) is not None
    assert ask(16, 16384, plan=masks.bigbird(16384, block_size=128, seed=0).plan(CPU)) is None


def items(service: Service, n_batch_heads: int) -> list[tuple[str, int]]:
    """As kernels/hopper_service.py says: sections in the order in which they are cleared and converted."""
    order = [("clear", section) for section in range(service.n_cleared, service.n_ahead)]
    for section in range(service.n_converted):
        order.append(("convert", section))
        if section + service.n_ahead < n_batch_heads:
            order.append(("clear", section + service.n_ahead))
    return order


GRID = list(itertools.product((2, 3, 5, 16, 40), (1, 2, 7, 128), (1, 3, 8, 132)))


@pytest.mark.parametrize(("n_batch_heads", "n_lines", "n_programs"), GRID)
def test_each_section_is_cleared_once_and_converted_at_most_once(n_batch_heads, n_lines, n_programs):
    shape = (1, n_batch_heads, 128 * n_lines, 64)
    service = service_of(PLAN, shape, shape, WHOLE, n_programs)
    if service is None:
        assert n_batch_heads * n_lines <= n_programs or n_batch_heads == 1
        return
    order = items(service, n_batch_heads)
    cleared = [section for what, section in order if what == "clear"]
    assert [*range(service.n_cleared), *cleared] == list(range(n_batch_heads))
    assert [section for what, section in order if what == "convert"] == list(range(service.n_converted))
    assert service.n_converted < n_batch_heads < n_counts(n_batch_heads)
    # columns are taken from a queue
    assert n_batch_heads * n_lines > n_programs


class Run:
    """Programs and warps that serve, as kernels/hopper_service.py has them wait for each other; chance says who goes
    on."""

    def __init__(self, n_batch_heads: int, n_lines: int, service: Service, n_programs: int) -> None:
        self.n_lines, self.n_cols, self.service = n_lines, n_batch_heads * n_lines, service
        self.order, self.n_items, self.n_taken = items(service, n_batch_heads), 0, 0
        self.is_cleared = [section < service.n_cleared for section in range(n_batch_heads)]
        self.n_computed = [0] * n_batch_heads
        # of each program, its column and whether it has begun; of each warp, its item
        self.programs: list[tuple[int, bool] | None] = [None] * n_programs
        self.warps: list[int | None] = [None] * n_programs
        self.converted: list[int] = []

    def run_columns(self, i: int) -> bool:
        """Whether a program can go on."""
        held = self.programs[i]
        if held is not None and not held[1]:
            if self.is_cleared[held[0] // self.n_lines]:
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

    def serve(self, i: int) -> bool:
        item = self.warps[i]
        if item is None:
            if self.n_items == len(self.order):
                return False
            self.warps[i], self.n_items = self.n_items, self.n_items + 1
            return True
        what, section = self.order[item]
        if what == "clear":
            self.is_cleared[section] = True
        elif self.n_computed[section] == self.n_lines:
            self.converted.append(section)
        else:
            return False
        self.warps[i] = None
        return True


@pytest.mark.parametrize(
    ("n_batch_heads", "n_lines", "n_programs"), [case for case in GRID if case[2] < 132 and case[1] < 128]
)
def test_nothing_waits_in_a_circle(n_batch_heads, n_lines, n_programs):
    """Whatever the order, and with fewer programs than the service was made for."""
    shape = (1, n_batch_heads, 128 * n_lines, 64)
    service = service_of(PLAN, shape, shape, WHOLE, n_programs)
    if service is None:
        return
    for seed, n_running in itertools.product(range(5), {1, n_programs}):
        chance = random.Random(seed)
        run = Run(n_batch_heads, n_lines, service, n_running)
        moves = [(go, i) for go in (run.run_columns, run.serve) for i in range(n_running)]
        weights = [chance.choice([0.001, 1.0, 1000.0]) for _ in moves]
        while True:
            (first,) = chance.choices(range(len(moves)), weights)
            if not any(go(i) for go, i in [*moves[first:], *moves[:first]]):
                break
        assert run.n_computed == [n_lines] * n_batch_heads
        assert sorted(run.converted) == list(range(service.n_converted))


def test_the_launch_of_the_statistics_clears_each_count():
    """Short sequences of one query head a key head have the fewest programs; one count more than they clear is
    refused."""
    statistics = pytest.importorskip("blocksparse_flash.kernels.triton.backward_preprocess", reason="needs Triton")
    tensor_spec = pytest.importorskip("blocksparse_flash.runtime.tensor_spec", reason="needs Triton")
    for batch, heads, q_len in itertools.product((1, 2), (1, 2, 5), (1, 128, 129)):
        dout, n_padded = tensor_spec.spec_of(torch.empty(batch, heads, q_len, 8, device="meta")), -(-q_len // 128) * 128
        statistics.prepare_statistics(dout, n_padded, n_counts=n_counts(batch * heads))
        with pytest.raises(AssertionError):
            statistics.prepare_statistics(dout, n_padded, n_counts=n_padded * batch * heads + 1)
    # few heads, of few sections that are prepared before
    for n_batch_heads, n_lines in itertools.product((2, 40, 1000, 100000), (1, 8, 128)):
        shape = (1, n_batch_heads, 128 * n_lines, 64)
        service = service_of(PLAN, shape, shape, WHOLE, 132)
        if service is not None:
            assert n_counts(n_batch_heads) <= 128 * n_lines * service.n_cleared or n_batch_heads > 5000
