"""Deterministic calls without a layout: tile columns add to dQ in a fixed order, so each run has the same bits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocksparse_flash import dispatch, ops
from blocksparse_flash.kernels import schedule
from tests import test_zoo as zoo
from tests.kernels.hopper.test_protocol import Simulation
from tests.support.gluon_simulator import Change

CPU = torch.device("cpu")
CALL = zoo.Call(head_dim=64, dtype=torch.bfloat16)
# lengths, call, SMs, heads in turn
CASES = {
    "dense": ((300, 400), CALL, 3, 1),
    "eight columns": ((128, 1024), CALL, 4, 1),
    "eight columns, causal": ((1024, 1024), dataclasses.replace(CALL, causal=True), 4, 2),
    "dense, 128 columns": ((200, 300), dataclasses.replace(CALL, head_dim=128), 2, 1),
    "causal": ((400, 400), dataclasses.replace(CALL, causal=True), 3, 2),
    "causal, 128 columns, grouped": (
        (300, 300),
        dataclasses.replace(CALL, head_dim=128, causal=True, kv_heads=1),
        2,
        1,
    ),
    "causal, more keys": ((130, 400), dataclasses.replace(CALL, causal=True), 4, 3),
    "causal, more queries": ((400, 130), dataclasses.replace(CALL, causal=True, kv_heads=1), 2, 1),
    "lengths": ((130, 400), dataclasses.replace(CALL, has_kv_lengths=True), 3, 1),
    "causal, lengths": ((300, 400), dataclasses.replace(CALL, has_kv_lengths=True, causal=True, kv_heads=1), 3, 2),
    "softcap, slopes": (
        (300, 300),
        dataclasses.replace(CALL, softcap=2.0, has_slopes=True, are_slopes_fixed=True, causal=True),
        2,
        1,
    ),
}


@pytest.fixture
def dq_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """dq of a case, with events in an order that a seed chooses. Checks accuracy, and that additions are ordered."""

    def dq_of(name: str, seed: int, *changes: Change, n_free: int | None = None) -> Tensor:
        lengths, call, n_sms, n_in_turn = CASES[name]
        simulation = Simulation(seed=seed, n_sms=n_sms, changes=changes, n_free=n_free)
        monkeypatch.setattr(schedule, "ORDERED_HEADS_IN_TURN", n_in_turn)
        # these columns are too few and too short for it to pay
        monkeypatch.setattr(schedule, "ORDERED_TILES", 0)
        ordered = []
        adds = simulation.hopper_backward.is_dq_ordered
        monkeypatch.setattr(
            simulation.hopper_backward, "is_dq_ordered", lambda *a, **k: ordered.append(adds(*a, **k)) or ordered[-1]
        )
        kernels = simulation.forward, functools.partial(simulation.backward, deterministic=True)
        monkeypatch.setattr(ops, "_kernels", lambda *_: kernels)
        monkeypatch.setattr(dispatch, "choose", lambda *_: "hopper")
        found = zoo.run("hopper", lengths, call, zoo.inputs(lengths, call), CPU)
        zoo.assert_accurate(found, lengths, call, CPU)
        assert ordered == [True]
        return found[zoo.NAMES.index("dq")]

    return dq_of


@pytest.mark.parametrize("name", CASES)
def test_every_order_of_events_gives_the_same_bits(dq_of: Callable[..., Tensor], name: str) -> None:
    first = dq_of(name, 0)
    assert all(torch.equal(dq_of(name, seed), first) for seed in range(1, 4))


TAKEN_BY_NUMBER = Change(
    "hopper.backward_producer",
    "    ORDERED: gl.constexpr = ptrs.semaphores_ptr is not None and ptrs.tile_counter_ptr is not None\n",
    "    ORDERED: gl.constexpr = False\n",
)


@pytest.mark.parametrize("n_free", [1, 2, 3])
@pytest.mark.parametrize("name", ["eight columns", "eight columns, causal"])
def test_programs_that_do_not_run_hold_no_tile_column(dq_of: Callable[..., Tensor], name: str, n_free: int) -> None:
    """Regression: programs waited for columns of programs for which other kernels had left no SM."""
    assert torch.equal(dq_of(name, 0, n_free=n_free), dq_of(name, 0))
    if name == "eight columns" and n_free == 3:
        with pytest.raises(AssertionError, match=r"deadlock.* waits for a semaphore"):
            dq_of(name, 0, TAKEN_BY_NUMBER, n_free=n_free)


FAULTS = {
    "semaphore not waited for": Change(
        "hopper.backward",
        "                wait_for_semaphore(ptrs.semaphores_ptr + i_semaphore, count, work_tile.kv_start // TILE)\n",
        "                pass\n",
    ),
    "additions before this one left out": Change("hopper.backward", "work_tile.kv_start // TILE)", "0)"),
    "semaphore incremented before TMA has added": Change(
        "hopper.backward",
        "release_semaphore(ptrs.semaphores_ptr + sums.i_semaphore)\n            dq_tile",
        "ptrs.semaphores_ptr\n            dq_tile",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(dq_of: Callable[..., Tensor], fault: str) -> None:
    found = []
    with pytest.raises(AssertionError):
        for seed in range(12):
            found.append(dq_of("dense", seed, FAULTS[fault]))
            assert torch.equal(found[0], found[-1])
