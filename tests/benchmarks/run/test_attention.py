"""benchmarks.run.attention: the cases of each sweep, and one line per figure."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.run import attention as benchmark
from benchmarks.run import measure, patterns, peers, sweeps
from benchmarks.run.peers import Peer, Shape
from tests.support.pattern_cases import CASES, DIM, HEADS, N

TIMES = dict.fromkeys(("ms", "ms_p20", "ms_p80"), 2.0)
# of steps with changing masks: one waited for, and three in a row
ROUNDS = 1 + 3


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made, not timed: there is no GPU."""

    def called(call: Any, **options: Any) -> dict[str, float]:
        for _ in range(options.get("warmup", 0) + options.get("runs", 1)):
            call()
        return TIMES

    monkeypatch.setattr(measure, "milliseconds", called)
    monkeypatch.setattr(measure, "milliseconds_in_turns", lambda calls: [called(call) for call in calls])
    monkeypatch.setattr(measure, "wall_milliseconds", called)
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda call: call() is None or 1.0)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call() is None or 7)
    monkeypatch.setattr(measure, "joules", lambda call, ms: call() is None or 0.5)
    monkeypatch.setattr(measure, "environment", lambda: dict.fromkeys(("device", "torch", "triton", "commit"), "here"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---- cases ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flops_count_stored_blocks(case: sweeps.Case) -> None:
    pattern, counted = case.pattern, 0
    for row in range(len(pattern.blocks)):
        for col in range(len(pattern.blocks)):
            # q k^T and p v: 128 x 128 x head_dim multiplications and additions each
            counted += 2 * 2 * 128 * 128 * DIM if pattern.blocks[row, col] else 0
    assert pattern.flops(3, HEADS, DIM) == 3 * HEADS * counted and pattern.length == N


@pytest.mark.parametrize("length", [512, 2048, 4096])
def test_neighborhoods_are_those_of_the_definition(length: int) -> None:
    """A window of 9 blocks around each block, moved inside at the ends; all of a sequence that is shorter."""
    blocks = patterns.neighborhood(length).blocks
    n_blocks = length // 128
    for row in range(n_blocks):
        nearest = sorted(range(n_blocks), key=lambda col: (abs(col - row), col))
        window = {col for col in nearest if abs(col - row) <= 4} | set(nearest[: min(9, n_blocks)])
        assert set(np.flatnonzero(blocks[row])) == window


def test_sweeps_hold_fixed_what_they_say() -> None:
    by_length = [case for case in sweeps.over_length(16384) if case.name == "local"]
    assert [case.pattern.length for case in by_length] == [2048, 4096, 8192, 16384]
    # 9 blocks of keys, but near the ends
    assert all(case.pattern.blocks.sum(1).max() == 9 for case in by_length)
    assert max(case.pattern.length for case in sweeps.over_length(2**18) if case.name == "dense") == sweeps.DENSE_UP_TO
    densities = [case.pattern.density for case in sweeps.over_density(16384)]
    assert densities[0] == 1 and np.allclose(densities[1:], sweeps.DENSITIES, atol=1 / 128 / 2)
    for case in sweeps.over_block_size(4096):
        assert case.name.endswith(f", {case.pattern.block_size}") and case.pattern.length == 4096
        assert abs(case.pattern.density - sweeps.FIXED_DENSITY) < 0.07
    regrouped = [*sweeps.over_regrouping(2048)]
    for case, whole in zip(regrouped, [c.pattern for c in regrouped[::5] for _ in range(5)], strict=True):
        each_side = whole.block_size // case.pattern.block_size
        inside = case.pattern.blocks.reshape(16, each_side, 16, each_side).sum(axis=(1, 3))
        stored = (0.8 if "80%" in case.name else 1.0) * each_side**2
        assert np.all(inside[~whole.blocks] == 0) and np.all(np.abs(inside[whole.blocks] - stored) < 1)
        assert case.pattern.nnz == round(stored * whole.nnz)
    assert not np.array_equal(sweeps.changing(4096, seed=0).blocks, sweeps.changing(4096, seed=1).blocks)


def test_no_two_cases_share_a_line() -> None:
    for sweep in (None, *sweeps.NAMES):
        names = [(case.bench, case.name, case.pattern.length) for case in sweeps.cases(sweep, 2048)]
        assert len(names) == len(set(names)) and {bench for bench, *_ in names} == {sweep or "attention"}


# ---- lines ----


@pytest.mark.usefixtures("untimed")
def test_a_line_is_written_for_each_figure(tmp_path: Path) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    case = next(case for case in CASES if case.name == "bigbird")
    benchmark.compare(case, [peers.ours("eager"), peers.sdpa("math", "sdpa", "MATH")], run)
    lines = written(run.out)
    keys = {"fwd": measure.KEYS_WITH_ENERGY, "bwd": measure.KEYS_WITH_ENERGY}
    assert all([*line] == keys.get(line["direction"], measure.KEYS) for line in lines)
    # math has no block layouts
    assert [(line["provider"], line["direction"]) for line in lines] == [
        ("blocksparse_flash", direction) for direction in ("mask", "fwd", "bwd")
    ]
    flops = case.pattern.flops(1, HEADS, DIM)
    assert [line["tflops"] for line in lines] == pytest.approx([None, flops * 0.5e-9, 2.5 * flops * 0.5e-9])


@pytest.mark.usefixtures("untimed")
def test_both_ways_of_a_backend_have_lines_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    attention = peers.attention

    def noted(*tensors: Any, deterministic: bool, **options: Any) -> Any:
        asked.append(deterministic)
        return attention(*tensors, deterministic=deterministic, **options)

    monkeypatch.setattr(peers, "attention", noted)
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    (case,) = (case for case in sweeps.cases("deterministic", N) if case.name == "butterfly")
    ways = [peers.ours("eager", deterministic=each) for each in (False, True)]
    for way, deterministic in zip(ways, (False, True), strict=True):
        asked.clear()
        benchmark.compare(case, [way], run)
        assert asked and set(asked) == {deterministic}
    lines = written(run.out)
    assert [(line["bench"], line["backend"], line["direction"]) for line in lines] == [
        ("deterministic", backend, direction)
        for backend in ("eager", "eager, deterministic")
        for direction in ("mask", "fwd", "bwd")
    ]


def test_no_shapes_share_the_limit_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(benchmark, "compare", lambda case, among, run: done.append(case.name))
    run = benchmark.Run(1, HEADS * DIM, DIM, Path(), device="cpu")
    benchmark.compare_all(sweeps.over_length(4096), [], run)
    assert done == ["reset", "local", "dense", "reset", "local", "dense"]


@pytest.mark.usefixtures("untimed")
def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")

    def failing(error: Exception, provider: str = "someone") -> Peer:
        def prepare(pattern: patterns.Pattern, shape: Shape) -> Any:
            raise error

        return Peer(provider, "theirs", lambda pattern, shape: None, prepare)

    among = [
        failing(RuntimeError("no such head_dim\nat line 7")),
        failing(torch.OutOfMemoryError("full")),
        peers.ours("eager"),
    ]
    benchmark.compare(CASES[0], among, run)
    said = capsys.readouterr().out
    assert "refused, RuntimeError: no such head_dim; not timed" in said and "out of memory; not timed" in said
    assert {line["provider"] for line in written(run.out)} == {"blocksparse_flash"}
    with pytest.raises(ValueError, match="ours has no excuse"):
        benchmark.compare(CASES[0], [failing(ValueError("ours has no excuse"), "blocksparse_flash")], run)


@pytest.mark.usefixtures("untimed")
def test_changing_masks_are_timed_three_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    prepared: list[bytes] = []
    eager = peers.ours("eager")

    def prepare(pattern: patterns.Pattern, shape: Shape) -> Any:
        prepared.append(pattern.blocks.tobytes())
        return eager.prepare(pattern, shape)

    no_gradients = Peer(
        "forward", "only", lambda pattern, shape: None, lambda pattern, shape: lambda q, k, v: q.detach()
    )
    benchmark.change([no_gradients, eager._replace(prepare=prepare)], run, 1024, steps=4)
    lines = written(run.out)
    ways = ["same mask", "new mask from the host", "new mask selected on the GPU"]
    # waited for, and in a row
    assert [(line["pattern"], line["direction"]) for line in lines] == [
        (way, direction) for way in ways for direction in ("step", "steps")
    ]
    # one for all, and of each round every step another
    assert len(prepared) == 1 + ROUNDS * 4 and len(set(prepared)) == 4
    assert "has no gradients; not timed" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.usefixtures("untimed")
def test_rebuilds_of_a_mask_are_checked_and_timed_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that has no room, and one that is wrong, are said to be so; the others have lines."""
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    eager, made = peers.ours("eager"), []

    def rebuild(pattern: patterns.Pattern, shape: Shape) -> Any:
        made.append(pattern.blocks.tobytes())
        return eager.prepare(pattern, shape)

    def large(pattern: patterns.Pattern, shape: Shape) -> Any:
        raise torch.OutOfMemoryError("full")

    def wrong(pattern: patterns.Pattern, shape: Shape) -> Any:
        return eager.prepare(patterns.dense(pattern.length), shape)

    theirs = eager._replace(provider="theirs", rebuilds={"right": rebuild, "large": large, "wrong": wrong}, select=None)
    benchmark.change([theirs], run, 1024, steps=4)
    found = [line["pattern"] for line in written(run.out)]
    assert found == [way for way in ("same mask", "new mask from the host", "right") for _ in range(2)]
    # the first call and the check, then of each round every step another
    assert len(made) == 2 + ROUNDS * 4 and len(set(made)) == 4
    said = [line for line in capsys.readouterr().out.splitlines() if "not timed" in line]
    assert ["large" in said[0], "out of memory" in said[0], "wrong" in said[1], "WRONG" in said[1]] == [True] * 4


@pytest.mark.usefixtures("untimed")
def test_the_matrix_product_is_a_line(tmp_path: Path) -> None:
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    benchmark.matmul(run, side=64)
    (line,) = written(run.out)
    assert [*line] == measure.KEYS and line["tflops"] == pytest.approx(2 * 64**3 * 0.5e-9)


def test_calls_take_turns_in_drawn_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def timed(call: Any, **options: Any) -> list[float]:
        call()
        return [float(len(done))]

    monkeypatch.setattr(measure, "runs_on_gpu", timed)
    monkeypatch.setattr(measure, "orders", lambda n_calls, n_rounds: [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]])
    found = measure.milliseconds_in_turns([lambda name=name: done.append(name) for name in "abc"], n_rounds=4)
    assert "".join(done) == "abcbcacababc"
    # a was the first, sixth, eighth and tenth
    assert found[0] == pytest.approx({"ms": 7.0, "ms_p20": 4.0, "ms_p80": 8.8})


@pytest.mark.parametrize("n_calls", range(3, 9))
def test_no_call_always_follows_the_same_one(n_calls: int) -> None:
    orders = measure.orders(n_calls, 5)
    assert orders == measure.orders(n_calls, 5)
    assert all(sorted(order) == list(range(n_calls)) for order in orders)
    row = [which for order in orders for which in order]
    for which in range(n_calls):
        assert len({before for before, after in itertools.pairwise(row) if after == which}) > 1


class Counter:
    """An energy counter: 3 joules per call, but it changes only every `step` joules."""

    def __init__(self, step: float) -> None:
        self.step, self.used, self.now = step, 7.0, 0.0

    def call(self) -> None:
        self.used += 3.0
        self.now += 0.01

    def read(self) -> float:
        return self.used // self.step * self.step


@pytest.mark.parametrize("step", [1.0, 30.0])
def test_energy_is_measured_between_changes_of_the_counter(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    counter = Counter(step)
    monkeypatch.setattr(measure, "energy_counter", lambda: counter.read)
    monkeypatch.setattr("time.perf_counter", lambda: counter.now)
    # batches of one call: without a beginning at a change, 30 joules would be missing or too many
    assert measure.joules(counter.call, 10.0, seconds=2.0) == pytest.approx(3.0, rel=1e-9)
    assert counter.now >= 2.0


def test_a_counter_that_stands_still_gives_no_energy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = Counter(1e9)
    monkeypatch.setattr(measure, "energy_counter", lambda: counter.read)
    monkeypatch.setattr("time.perf_counter", lambda: counter.now)
    assert measure.joules(counter.call, 10.0) is None
    assert "the counter of NVML stands still" in capsys.readouterr().out
    monkeypatch.setattr(measure, "energy_counter", lambda: None)
    assert measure.joules(counter.call, 10.0) is None


def test_the_counter_is_that_of_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetTotalEnergyConsumption = {"GPU-abc": 5000}.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    properties = {3: types.SimpleNamespace(uuid="abc")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    # cached: each of the following calls would find the first counter
    find = measure.energy_counter.__wrapped__
    read = find()
    assert read is not None and read() == 5.0

    def refuse(handle: str) -> int:
        raise nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert find() is None
    assert "no energy is measured: Not Supported" in capsys.readouterr().out
    # None in sys.modules: an import fails
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find() is None


def test_wall_clock_is_median_and_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 1.0, 5.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda call: next(times))
    calls: list[int] = []
    found = measure.wall_milliseconds(lambda: calls.append(1), warmup=3, runs=6)
    assert calls == [1, 1, 1] and found == {"ms_p20": 2.0, "ms": 3.5, "ms_p80": 5.0}


def test_results_are_lines_of_these_keys() -> None:
    path = Path(benchmark.__file__).parents[1] / "results" / "attention.jsonl"
    assert all([*line] in (measure.KEYS, measure.KEYS_WITH_ENERGY) for line in written(path))


@pytest.mark.usefixtures("untimed")
def test_an_interrupted_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case that has only the line of its mask was interrupted. Lines of other head dimensions are other cases."""
    run = benchmark.Run(1, HEADS * DIM, DIM, tmp_path / "lines.jsonl", device="cpu")
    among, names = [peers.ours("eager")], ["local", "bigbird"]
    cases = [case for case in CASES if case.name in names]
    benchmark.compare_all(cases[:1], among, run, resume=True)
    first = written(run.out)
    mask = next(line for line in first if line["direction"] == "mask")
    with run.out.open("a") as file:
        file.write(json.dumps({**mask, "pattern": cases[1].name}) + "\n")
    benchmark.compare_all(cases, among, run, resume=True)
    found = [(line["pattern"], line["direction"]) for line in written(run.out)[len(first) + 1 :]]
    assert found == [(cases[1].name, direction) for direction in ("mask", "fwd", "bwd")]
    assert capsys.readouterr().out.count("measured before; skipped") == 1
    benchmark.compare_all(cases, among, run._replace(hidden=2 * HEADS * DIM), resume=True)
    assert len(written(run.out)) == 3 + 1 + 3 + 6


# ---- the command ----


def test_defaults_are_what_the_help_says() -> None:
    options = benchmark.parsed([])
    assert (options.sweep, options.length, options.head_dims) == (None, 16384, [128, 64])
    assert benchmark.parsed(["--sweep", "length"]).length == 1_048_576
    assert benchmark.parsed(["--sweep", "length", "--length", "65536"]).length == 65_536


@pytest.mark.parametrize(
    "arguments",
    [
        ["--length", "1000"], ["--head-dims", "128", "96"], ["--patterns", "spiral"], ["--sweep", "moon"],
        ["--providers", "flex", "--sweep", "deterministic"],
        ["--resume", "--sweep", "change"],
        ["--patterns", "random", "--sweep", "change"], ["--patterns", "butterfly", "--sweep", "density"],
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parsed(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda package: False)
    assert [peer.backend for peer in benchmark.chosen(["blocksparse_flash"], (8, 0))] == ["triton"]
    said = capsys.readouterr().out
    assert all(f"not installed, so not compared: {peer.provider} ({peer.package})" in said for peer in peers.PACKAGES)
    for name, why in (("natten", "is not installed"), ("nobody", "is not known")):
        with pytest.raises(SystemExit, match=f"{name} {why}"):
            benchmark.chosen([name], (8, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        benchmark.main([])
