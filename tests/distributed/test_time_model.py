"""The time model against times measured on H200s (benchmarks/results/context_parallel.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.run import context_choices
from benchmarks.run.patterns import patterns
from blocksparse_flash.distributed import cost_model, time_model
from blocksparse_flash.distributed.cost_model import Costs
from blocksparse_flash.distributed.ownership import Pairs
from blocksparse_flash.distributed.time_model import Call, Work


def costs_of(name: str, length: int, kv_heads: int, n_ranks: int, *, requested: str = "auto") -> Costs:
    (pattern,) = (pattern for pattern in patterns(length) if pattern.name == name)
    n_tiles = length // 128
    owner = np.arange(n_tiles) * n_ranks // n_tiles
    pairs = Pairs(*np.nonzero(pattern.blocks))
    return cost_model.costs_of(pairs, owner, length, (16, kv_heads), n_ranks, requested=requested, without_pass_q=False)


def chunks(found: Costs, kv_heads: int) -> int:
    return time_model.best_chunks(found.work, Call(1, 16, 16 // kv_heads, 128, 2), kv_heads)


@pytest.mark.parametrize(
    ("name", "length", "kv_heads", "expected"),
    [("local", 65536, 16, 1), ("local", 65536, 4, 1), ("butterfly", 65536, 4, 1), ("bigbird", 65536, 4, 1)],
)
def test_short_messages_and_long_rows_use_one_chunk(name: str, length: int, kv_heads: int, expected: int) -> None:
    assert chunks(costs_of(name, length, kv_heads, 2, requested="exchange"), kv_heads) == expected


def test_long_messages_are_split_by_divisors_of_the_heads() -> None:
    work = Work(received=4 << 20, tiles=12288, row=12, column=12)
    call = Call(1, 16, 1, 128, 2)
    assert time_model.best_chunks(work, call, 16) > 1
    assert time_model.best_chunks(work, call, 7) == 1
    assert time_model.best_chunks(work, call, 3) in (1, 3)
    # every chunk takes at least the time of the longest row
    assert time_model.best_chunks(work._replace(row=1 << 17), call, 16) == 1
    # of batches too
    small = work._replace(received=1 << 15, tiles=96)
    assert time_model.best_chunks(small, call, 16) == 1 < time_model.best_chunks(small, call._replace(batch=128), 16)


# (name, tokens, KV heads, exchange, all-gather): ms of a step on four GPUs
MEASURED = [
    ("butterfly", 262144, 16, 14.690, 22.561),
    ("random", 262144, 16, 123.487, 127.305),
    ("butterfly", 262144, 4, 8.292, 10.483),
    ("random", 262144, 4, 118.318, 118.511),
    ("random", 65536, 16, 9.304, 10.190),
    ("butterfly", 65536, 16, 3.713, 5.593),
    ("bigbird", 65536, 4, 2.627, 2.872),
]


@pytest.mark.parametrize(("name", "length", "kv_heads", "exchanges", "gathers"), MEASURED)
def test_what_was_faster_is_taken(name: str, length: int, kv_heads: int, exchanges: float, gathers: float) -> None:
    """Of exchange and the all-gather, without pass-Q rows; the prediction is close to the measurement."""
    assert exchanges < gathers
    found = costs_of(name, length, kv_heads, 4, requested="exchange")
    assert not len(found.pass_q_rows)
    predicted = time_model.pass_kv(found.work, Call(1, 16, 16 // kv_heads, 128, 2), chunks(found, kv_heads))
    assert predicted == pytest.approx(exchanges / 1e3, rel=0.21)


@pytest.mark.parametrize(
    ("length", "kv_heads", "pass_q", "pass_kv"),
    [(262144, 16, 10.802, 16.217), (262144, 4, 6.747, 10.085), (65536, 16, 3.194, 4.987), (65536, 4, 2.644, 2.581)],
)
def test_heavy_rows_use_pass_q_if_it_was_faster(length: int, kv_heads: int, pass_q: float, pass_kv: float) -> None:
    """bigbird on four GPUs, ms of a step."""
    found = costs_of("bigbird", length, kv_heads, 4, requested="exchange")
    assert (len(found.pass_q_rows) == 2) == (pass_q < pass_kv)


@pytest.mark.parametrize(("name", "measured"), [("local", 27.354e-3), ("butterfly", 30.330e-3), ("random", 253.9e-3)])
def test_ulysses_takes_about_what_was_measured(name: str, measured: float) -> None:
    """Packed messages: several sequences, or shards with gaps."""
    found = costs_of(name, 262144, 16, 2)
    whole = Work(int(found.received["ulysses"].max()), int(found.tiles.sum()), 1, 1)
    assert time_model.packed_ulysses(whole, Call(1, 16, 1, 128, 2), 2) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "length", "kv_heads", "scheme"),
    [
        ("local", 262144, 16, "exchange"), ("butterfly", 262144, 16, "ulysses"), ("bigbird", 262144, 16, "ulysses"),
        ("butterfly", 262144, 4, "exchange"), ("bigbird", 262144, 4, "exchange"), ("local", 65536, 16, "exchange"),
        ("butterfly", 65536, 16, "exchange"), ("butterfly", 65536, 4, "exchange"),
    ],
)  # fmt: skip
def test_ulysses_is_chosen_where_most_keys_are_needed(name: str, length: int, kv_heads: int, scheme: str) -> None:
    """With a KV head per query head, and direct messages, which shards with gaps do not allow."""
    assert costs_of(name, length, kv_heads, 4).scheme == scheme
    (pattern,) = (pattern for pattern in patterns(length) if pattern.name == name)
    with_gaps = np.arange(length // 128) % 4
    pairs = Pairs(*np.nonzero(pattern.blocks))
    found = cost_model.costs_of(pairs, with_gaps, length, (16, kv_heads), 4, requested="auto", without_pass_q=False)
    packed = time_model.packed_ulysses(
        Work(int(found.received["ulysses"].max()), len(pairs.row), 1, 1), Call(1, 16, 16 // kv_heads, 128, 2), 4
    )
    assert found.scheme == "exchange" or f"{1e3 * packed:.3g} ms by ulysses" in found.reason


@pytest.fixture(scope="module")
def cells() -> Any:
    found = context_choices.cells()
    assert len(found) == 32
    return found


@pytest.fixture
def measured(cells: Any) -> list[Any]:
    """Rows of the cells, which begin with the number of GPUs, the length, the KV heads and the pattern."""
    return [*cells.itertuples(index=False)]


def test_auto_takes_what_was_fastest_or_nearly(cells: Any, measured: list[Any]) -> None:
    """The fastest in 26 of 32 cells; the largest loss is 12.7 % (bigbird, 65,536 tokens, 4 KV heads, 4 GPUs)."""
    print(context_choices.report(cells))
    losses = sorted(cell.loss for cell in measured)
    assert sum(cell.chosen == cell.best for cell in measured) == 26
    assert np.mean(losses) < 1.009 and losses[-1] < 1.13 and losses[-2] < 1.04
    assert all(cell.is_as_measured for cell in measured), "what was measured is not what would run"
    gathered = {cell[:4] for cell in measured if cell.chosen == "all_gather"}
    assert gathered == {(2, length, kv_heads, "bigbird") for length in (65536, 262144) for kv_heads in (4, 16)}


def test_the_speed_up_is_about_what_was_measured(measured: list[Any]) -> None:
    """Below 1 only where measured below 1: bigbird of 16 KV heads on two GPUs. At most 23 % off.

    Except bigbird of 4 KV heads on two GPUs, up to 32 % off: its kernels did not yet split long rows.
    """
    slower = {cell[:4] for cell in measured if cell.speedup < 1}
    assert slower == {(2, 65536, 16, "bigbird"), (2, 262144, 16, "bigbird")}
    for cell in measured:
        predicted = cell.costs.speedup
        assert predicted is not None and (predicted < 1) == (cell[:4] in slower), cell[:4]
        is_older = cell.ranks == 2 and cell.kv_heads == 4 and cell.pattern == "bigbird"
        assert (0.68 if is_older else 0.77) < predicted / cell.speedup < 1.2, (cell[:4], predicted, cell.speedup)


@pytest.mark.parametrize("scheme", ["exchange", "ulysses", "all_gather"])
def test_what_was_never_timed_is_not_predicted(scheme: str) -> None:
    """Exchange of few rows that reach most keys, on two ranks: not chosen by auto, and by name without a speed-up."""
    found = costs_of("bigbird", 65536, 16, 2, requested=scheme)
    assert (found.speedup is None) == (scheme == "exchange")
    assert "was not timed on 2 ranks" in found.reason and found.reason.startswith("requested by name; ")
    assert costs_of("bigbird", 65536, 16, 4, requested=scheme).speedup is not None


def test_other_machines_are_not_predicted() -> None:
    here = (time_model.GPU, "host")
    assert not time_model.no_prediction_reason([here] * 2) and not time_model.no_prediction_reason([here] * 4)
    assert "not to 8" in time_model.no_prediction_reason([here] * 8)
    assert "not to a link between 2 hosts" in time_model.no_prediction_reason([here, (time_model.GPU, "other")])
    assert "not to NVIDIA H100 80GB HBM3" in time_model.no_prediction_reason([here, ("NVIDIA H100 80GB HBM3", "host")])


def test_a_name_is_obeyed() -> None:
    for scheme in ("ulysses", "all_gather"):
        assert costs_of("local", 65536, 16, 2, requested=scheme).scheme == scheme
    assert "ulysses" in costs_of("local", 65536, 16, 2).reason


def test_a_slow_link_uses_pass_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_model, "LINK", 1e3)
    assert len(costs_of("bigbird", 65536, 16, 2, requested="exchange").pass_q_rows) == 2


def test_much_is_computed_apart_and_little_at_once() -> None:
    assert time_model.splitting_pays(262144 // 2, 16, 128, 2) and time_model.splitting_pays(262144 // 4, 16, 128, 2)
    assert not time_model.splitting_pays(65536 // 4, 16, 128, 2) and not time_model.splitting_pays(
        65536 // 2, 4, 128, 2
    )
