"""The prediction model: its definition, its error on every measurement, and its fit."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import masks

pytest.importorskip("pandas", reason="needs the extra [bench]")

from benchmarks.report import lines as measurements
from benchmarks.report import pages
from benchmarks.run import calibrate, measure
from blocksparse_flash.explanation import cost, memory, prediction, scheduling
from blocksparse_flash.explanation.call import Call
from blocksparse_flash.explanation.prediction import Calibration, Device, Kernel, Rates
from blocksparse_flash.explanation.scheduling import Lines, Sides
from blocksparse_flash.kernels.schedule import WHOLE, padded_dim

# largest relative error of a prediction
MAX_ERROR = 0.20
DEVICE = Device("GPU", (9, 0), 4, 2000.0, 1000.0)
RATES = Rates((Kernel("rows", 1, 2.0), Kernel("cols", 2, 6.0)), program=1.0, masking=0.5, alone=1.5, launch_us=7.0)


def calibration(**changes: Any) -> Calibration:
    default = Calibration(DEVICE, "triton", 64, "fwd", RATES, 6, ("attention",), ("abc",), 0.02, 0.05, 0.1)
    return default._replace(**changes)


@pytest.fixture(scope="module")
def groups() -> dict[tuple[str, str, int, str], list[measurements.Line]]:
    return calibrate.usable(measurements.read(pages.RESULTS / "attention.jsonl"))


# ---- errors on measurements ----


def test_every_measurement_is_predicted(groups: dict[Any, list[measurements.Line]]) -> None:
    """The committed table predicts every measurement of the grid and the sweeps within MAX_ERROR.

    If this fails, fit the table again: `python -m benchmarks.run.calibrate`.
    """
    assert groups
    sizes, bad = [], []
    for (device, backend, head_dim, direction), lines in groups.items():
        found = prediction.find(prediction.calibrations(), calibrate.DEVICES[device], backend, head_dim, direction)
        assert found is not None and found.head_dim == head_dim, (backend, head_dim, direction)
        for line in lines:
            (error,) = calibrate.errors([calibrate.measured(line)], found.rates)
            sizes.append(abs(error))
            if abs(error) >= MAX_ERROR:
                bad.append((backend, line["bench"], line["pattern"], line["n"], head_dim, direction, f"{error:+.0%}"))
    print(f"{len(sizes)} lines: off by {statistics.median(sizes):.1%} in the median, {max(sizes):.1%} at most")
    assert bad == []


def test_another_gpu_is_predicted_by_scaling() -> None:
    """Measurements of GPUs to which the model is not fitted. With fewer tokens the host dominates (H100: 0.13 ms)."""
    lines = measurements.read(pages.RESULTS / "attention.jsonl")
    groups, every = calibrate.usable(lines[lines["n"] * lines["batch"] >= 8192], calibrate.SCALED), []
    # the kernels for smaller tiles were measured on an H200 only
    assert {key[1:] for key in groups} == {key for key in calibrate.KERNELS if not key[0].endswith("-64")}
    for (device, *rest), found in groups.items():
        scaled = calibrate.SCALED[device]
        near = prediction.find(prediction.calibrations(), scaled, *rest)
        assert near is not None and near.device != scaled
        rates, _ = prediction.on_device(near, scaled)
        sizes = [abs(error) for error in calibrate.errors([*map(calibrate.measured, found)], rates)]
        # the mean, not the median, which half of the lines may exceed by any amount
        assert statistics.mean(sizes) < 0.035 and max(sizes) < 0.12, (device, rest, sizes)
        every += sizes
    print(f"{len(every)} lines: off by {statistics.median(every):.1%} in the median, {max(every):.1%} at most")


def test_the_table_records_what_it_was_fitted_to(groups: dict[Any, list[measurements.Line]]) -> None:
    table = {(one.device.name, one.backend, one.head_dim, one.direction): one for one in prediction.calibrations()}
    assert table.keys() == groups.keys()
    for key, lines in groups.items():
        assert table[key].n_lines == len(lines) and set(table[key].commits) == {line["commit"] for line in lines}
        off = [abs(error) for error in calibrate.errors([*map(calibrate.measured, lines)], table[key].rates)]
        assert table[key].worst_error == pytest.approx(max(off))
        assert table[key].median_error == pytest.approx(statistics.median(off))


def test_long_lines_are_predicted_as_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile column that all queries of 4 heads attend to is split on `hopper`, but not on `triton`."""
    monkeypatch.setattr(Call, "has_kernels", True)
    q = torch.empty(1, 16, 65536, 128, dtype=torch.bfloat16, device="meta")
    k = q[:, :4]
    layout = masks.bigbird(65536, seed=0)
    calls = [Call(q, k, k, layout, False, False, 0.0, False, q.dtype, backend) for backend in ("hopper", "triton")]
    device = calibrate.DEVICES["NVIDIA H200"]
    split, whole = (cost.balance(call, device, prediction.calibrations()).backward for call in calls)
    assert split is not None and whole is not None and split < 1.2 < 1.6 < whole
    found, _ = cost.predict(calls[0], device, prediction.calibrations())
    monkeypatch.setattr(memory, "split_of", lambda *_: WHOLE)
    slow, _ = cost.predict(calls[0], device, prediction.calibrations())
    assert found is not None and slow is not None
    # H200: 4.1 and 9.7 ms
    assert found.backward_ms == pytest.approx(4.08, rel=0.2) and slow.backward_ms > 2 * found.backward_ms


def predicted(call: Call) -> prediction.Prediction:
    """The prediction for the GPU of the measurements."""
    found, why = cost.predict(call, calibrate.DEVICES["NVIDIA H200"], prediction.calibrations())
    assert found is not None, why
    return found


# split lines too
@pytest.mark.parametrize(("pattern", "heads"), [("butterfly", 16), ("bigbird", 16), ("bigbird", 2)])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_the_fit_predicts_as_explain_does(
    monkeypatch: pytest.MonkeyPatch, backend: str, pattern: str, heads: int
) -> None:
    """Calibration uses meta tensors; splits and bytes must be the same as on the GPU."""
    monkeypatch.setattr(Call, "has_kernels", True)
    for direction in ("fwd", "bwd"):
        measurement = line(backend=backend, pattern=pattern, n=65536, heads=heads, direction=direction)
        (used,) = [one for one in prediction.calibrations() if one[1:4] == (backend, 128, direction)]
        one = calibrate.measured(measurement)
        found = predicted(one.call)
        ms = found.forward_ms if direction == "fwd" else found.backward_ms
        assert calibrate.predicted(one, used.rates) == pytest.approx(ms)


def test_the_dense_prediction_equals_that_of_the_call_without_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the bytes and the lines of the dense call."""
    monkeypatch.setattr(Call, "has_kernels", True)
    call = calibrate.measured(line(backend="hopper", pattern="butterfly", n=16384)).call
    dense = predicted(dataclasses.replace(call, layout=None))
    found = predicted(call)
    assert (found.dense_forward_ms, found.dense_backward_ms) == (dense.forward_ms, dense.backward_ms)


def test_calibrated_kernels_equal_the_launch_tables() -> None:
    """The side of each kernel and its programs per line, compared with the launch tables of sm90.

    The joint launch of dk, dv and dq counts as two launches in sequence.
    """
    pytest.importorskip("triton", reason="needs Triton")
    from blocksparse_flash.kernels.arguments import Tuning
    from blocksparse_flash.kernels.triton import backward, forward

    for dim in (64, 128):
        made = Tuning(dim, 2, 9, True, False, 232448)
        rows, cols = forward.config(made).block_q, backward.config_keys(made).block_kv
        queries = backward.config_queries(made).block_q
        if dim == 128:
            joint_keys, joint_queries = backward.config_joint(made)
            assert (joint_keys.block_kv, joint_queries.block_q) == (cols, queries)
        tile = scheduling.TILE
        assert [kernel[:2] for kernel in calibrate.KERNELS["triton", dim, "fwd"]] == [("rows", tile // rows)]
        assert [kernel[:2] for kernel in calibrate.KERNELS["triton", dim, "bwd"]] == [
            ("cols", tile // cols),
            ("rows", tile // queries),
        ]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("triton", [16, 16, 32, 64, 128, 128, 256, 256]), ("hopper", [64, 64, 64, 64, 128, 128, 256, 256])],
)
def test_head_dims_are_padded_by_backend(backend: str, expected: list[int]) -> None:
    assert [padded_dim(backend, head_dim) for head_dim in (1, 16, 17, 64, 65, 128, 200, 256)] == expected


# ---- the model ----


def sides(rows: list[int], cols: list[int], partial: int = 0) -> Sides:
    of_rows, of_cols = (Lines(np.array(tiles), np.full(len(tiles), partial)) for tiles in (rows, cols))
    return Sides(of_rows, of_cols)


def test_a_direction_is_the_sum_of_its_parts() -> None:
    # 1 kB a nanosecond. rows: 8 programs of 1 + 3 tiles on 4 SMs, 2 us a tile: 2 waves of 8 us
    # cols: 8 programs of 1 + 6 / 2 tiles, 6 us a tile: 2 waves of 24 us
    took = prediction.direction_ms(RATES, sides([3] * 8, [6] * 4), DEVICE, main_bytes=0, extra_bytes=5_000_000)
    assert took == pytest.approx(1e-3 * (7.0 + 5.0 + 2 * 8 + 2 * 24))
    # masking costs half a tile each: rows 2 of 3, cols 2 of 6
    took = prediction.direction_ms(RATES, sides([3] * 8, [6] * 4, 2), DEVICE, main_bytes=0, extra_bytes=0)
    assert took == pytest.approx(1e-3 * (7.0 + 2 * 10 + 2 * 27))
    # these bytes take longer than the tiles
    took = prediction.direction_ms(RATES, sides([3] * 8, [6] * 4), DEVICE, main_bytes=10**9, extra_bytes=0)
    assert took == pytest.approx(1e-3 * (7.0 + 1e6 * 1e-3))
    assert prediction.direction_ms(RATES, sides([], []), DEVICE, main_bytes=0, extra_bytes=0) == pytest.approx(7e-3)


def test_a_lone_program_is_slower_per_tile() -> None:
    one = RATES._replace(kernels=(Kernel("rows", 1, 2.0),))
    # 99 tiles and the cost of a program, 1.5 times 2 us each; all other programs ended long before
    assert prediction.kernel_us(one.kernels[0], one, sides([99, 1, 1, 1, 1], []), 4) == pytest.approx(1.5 * 2.0 * 100)


def test_even_work_has_no_loss() -> None:
    assert prediction.loss(RATES._replace(alone=1.0), sides([3] * 8, [6] * 4), 4) == pytest.approx(1.0)
    one = RATES._replace(kernels=(Kernel("rows", 1, 2.0),), alone=1.0)
    # 5 programs on 4 SMs: two waves instead of 1.25
    assert prediction.loss(one, sides([3] * 5, []), 4) == pytest.approx(2 / 1.25)
    assert prediction.loss(one, sides([], []), 4) == 1.0


def test_calibrations_survive_json() -> None:
    table = [calibration(), calibration(direction="bwd", device=DEVICE._replace(name="other"))]
    assert prediction.from_json(prediction.to_json(table)) == table
    assert prediction.to_json(list(prediction.calibrations())) == prediction.CALIBRATION.read_text(encoding="utf-8")


# ---- the choice of a calibration ----


def test_another_architecture_has_no_calibration() -> None:
    table = (calibration(),)
    assert prediction.find(table, DEVICE, "triton", 64, "fwd") == table[0]
    assert prediction.find(table, DEVICE._replace(capability=(8, 0)), "triton", 64, "fwd") is None
    assert prediction.find(table, DEVICE, "hopper", 64, "fwd") is None
    assert prediction.find(table, DEVICE, "triton", 128, "fwd") is None
    assert prediction.caveats(table[0], DEVICE, 64) == ()


def test_another_gpu_of_the_same_architecture_is_scaled_with_a_caveat() -> None:
    smaller = Device("smaller", (9, 0), 2, 1000.0, 500.0)
    table = (calibration(), calibration(head_dim=128, device=smaller))
    # a calibration of the same GPU comes first, even if it is for a larger head_dim
    assert prediction.find(table, smaller, "triton", 64, "fwd") == table[1]
    assert prediction.find(table[:1], smaller, "triton", 64, "fwd") == table[0]
    scaled, kept = prediction.on_device(table[0], smaller)
    assert [kernel.tile_us for kernel in scaled.kernels] == [4.0, 12.0] and scaled.launch_us == RATES.launch_us
    assert prediction.on_device(table[0], DEVICE) == (RATES, DEVICE) and kept is smaller
    (caveat,) = prediction.caveats(table[0], smaller, 64)
    assert "the model was not fitted to this smaller: scaled from GPU by 2 SMs at 1000 MHz" in caveat
    assert "a head dimension of 32 was not measured: taken as 64" in prediction.caveats(table[0], DEVICE, 32)
    # a GPU with fewer SMs is another GPU
    assert prediction.caveats(table[0], DEVICE._replace(n_sms=1), 64) != ()


# ---- the fit ----


def line(**changes: Any) -> measurements.Line:
    values = {
        "bench": "attention", "provider": "blocksparse_flash", "backend": "triton", "pattern": "local",
        "density": 268 / 1024, "n": 4096, "batch": 1, "heads": 16, "head_dim": 128, "dtype": "bf16", "direction": "fwd",
        "ms": 1.0, "ms_p20": 1.0, "ms_p80": 1.0, "tflops": 1.0, "peak_bytes": 0, "setup_ms": 1.0,
        "device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "abc",
    }  # fmt: skip
    assert set(values) == set(measure.KEYS)
    if changes.keys() & {"bench", "pattern", "n"} and "density" not in changes:
        pattern, _ = calibrate.asked(*({**values, **changes}[key] for key in ("bench", "pattern", "n")))
        values["density"] = pattern.density
    return {**values, **changes}


TRUE = Rates((Kernel("rows", 1, 3.0),), program=2.0, masking=0.3, alone=1.2, launch_us=12.0)


def made_lines(*patterns: tuple[str, int]) -> list[calibrate.Measured]:
    """Lines without noise, made from the TRUE rates."""
    found = [calibrate.measured(line(pattern=pattern, n=n)) for pattern, n in patterns]
    return [one._replace(line={**one.line, "ms": calibrate.predicted(one, TRUE)}) for one in found]


def test_the_fit_recovers_the_true_rates() -> None:
    # short sequences determine launch_us, many short programs the cost of a program, long sequences tile_us
    lines = made_lines(("local", 512), ("local", 8192), ("butterfly", 8192), ("dense", 4096), ("dense", 8192))
    rates = calibrate.fit(lines, (Kernel("rows", 1, 1.0),), "triton")
    assert rates.kernels[0].tile_us == pytest.approx(3.0, rel=0.05)
    assert rates.program == pytest.approx(2.0, rel=0.2)
    assert max(map(abs, calibrate.errors(lines, rates))) < 0.03


def test_two_kernels_keep_their_measured_ratio() -> None:
    """Lines have only the sum of both; noise must not shift time from one kernel to the other."""
    kernels = calibrate.KERNELS["triton", 128, "bwd"]
    true = TRUE._replace(kernels=tuple(kernel._replace(tile_us=1.3 * kernel.tile_us) for kernel in kernels))
    lines = []
    for index, (pattern, n) in enumerate([("local", 512), ("local", 8192), ("butterfly", 8192), ("dense", 4096)]):
        one = calibrate.measured(line(pattern=pattern, n=n, direction="bwd"))
        noise = 1.05 if index % 2 else 0.95
        lines.append(one._replace(line={**one.line, "ms": noise * calibrate.predicted(one, true)}))
    keys, queries = calibrate.fit(lines, kernels, "triton").kernels
    assert keys.tile_us / queries.tile_us == pytest.approx(kernels[0].tile_us / kernels[1].tile_us, rel=0.1)
    assert keys.tile_us == pytest.approx(1.3 * kernels[0].tile_us, rel=0.1)


def test_a_fit_to_one_line_keeps_the_prior() -> None:
    (one,) = made_lines(("dense", 4096))
    rates = calibrate.fit([one], (Kernel("rows", 1, 1.0),), "triton")
    assert max(map(abs, calibrate.errors([one], rates))) < 0.02
    assert rates.masking == pytest.approx(calibrate.MASKING.value) and 1.0 <= rates.alone < 2.0
    assert all(math.isfinite(value) for value in rates[1:])


def test_only_own_lines_of_a_single_direction_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line(), line(direction="mask"), line(provider="flex"), line(bench="change", direction="step", density=0.1),
        line(dtype="fp32"), line(device="another"), line(backend="eager"),
    ]  # fmt: skip
    assert calibrate.usable(measurements.frame(lines)) == {("NVIDIA H200", "triton", 128, "fwd"): [lines[0]]}
    output = capsys.readouterr().out
    assert "another is not in DEVICES" in output and "eager" in output
    with pytest.raises(ValueError, match="no pattern spiral of 4096 tokens in attention"):
        calibrate.measured(line(pattern="spiral", density=0.1))
    with pytest.raises(ValueError, match=r"has density 0.26\d*, but a line says 0.3: .* measure it again"):
        calibrate.measured(line(density=0.3))


# the smallest line of each sweep that times single directions
@pytest.mark.parametrize(
    ("bench", "pattern", "n", "density"),
    [
        ("attention", "neighborhood", 2048, 9 / 16),
        ("length", "local", 4096, 268 / 1024),
        ("length", "local", 512, 1.0),
        ("density", "random, 0.2", 2048, 3 / 16),
        ("block-size", "random, 32", 2048, 1 / 8),
    ],
)
def test_lines_of_sweeps_give_their_layouts(bench: str, pattern: str, n: int, density: float) -> None:
    layout = calibrate.measured(line(bench=bench, pattern=pattern, n=n, density=density)).call.layout
    assert layout is not None and layout.q_len == n and layout.density == pytest.approx(density)


def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [one.line for one in made_lines(("local", 4096), ("dense", 4096))]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    out = tmp_path / "table.json"
    calibrate.main(["--lines", str(tmp_path / "lines.jsonl"), "--out", str(out)])
    (found,) = prediction.from_json(out.read_text(encoding="utf-8"))
    assert (found.backend, found.head_dim, found.direction, found.n_lines) == ("triton", 128, "fwd", 2)
    assert found.worst_error < 0.02 and "worst in cross-validation" in capsys.readouterr().out
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no line"):
        calibrate.main(["--lines", str(tmp_path / "none.jsonl"), "--out", str(out)])


def test_lines_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.LINES == pages.RESULTS / "attention.jsonl"
    with pytest.raises(SystemExit, match="2"):
        calibrate.main(["--lines", str(tmp_path / "nothing.jsonl")])
    assert "--lines: there is no file" in capsys.readouterr().err
