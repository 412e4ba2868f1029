"""benchmarks.run.io: parsing of ncu output, bounds, and the report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pandas", reason="needs the extra [bench]")

import pandas as pd

from benchmarks.report import io as report
from benchmarks.report import plots
from benchmarks.report.lines import frame
from benchmarks.run import io, measure, patterns
from blocksparse_flash import attention

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid '
    'Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)
SPIN = "spin_kernel(long)"


def row(index: int, kernel: str, metric: str, unit: str, value: str) -> str:
    return (
        f'"{index}","4711","python3.12","127.0.0.1","{kernel}","1","7","(128, 1, 1)","(2048, 1, 1)","0","9.0",'
        f'"Command line profiler metrics","{metric}","{unit}","{value}"'
    )


def log(*kernels: tuple[str, dict[str, tuple[str, str]]]) -> str:
    """What `ncu --csv --log-file` leaves: kernels by launch, their metrics by name."""
    rows = [
        row(index, kernel, metric, unit, value)
        for index, (kernel, metrics) in enumerate(kernels)
        for metric, (unit, value) in sorted(metrics.items())
    ]
    before = [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "spin_kernel" - 0: 0%....100% - 1 pass',
    ]
    return "\n".join([*before, HEAD, *rows, "==PROF== Disconnected from process 4711"]) + "\n"


def counted(
    read: str, write: str, l2: str, sectors: str | None = None, unit: str = "byte"
) -> dict[str, tuple[str, str]]:
    found = {
        "dram__bytes_read.sum": (unit, read),
        "dram__bytes_write.sum": (unit, write),
        "lts__t_bytes.sum": (unit, l2),
    }
    return found if sectors is None else {**found, "lts__t_sectors_srcnode_gpc.sum": ("sector", sectors)}


IGNORED = counted("9", "9", "9", "9")
# one case: its forward is one kernel, its backward three
LOG = log(
    (SPIN, IGNORED),
    ("forward_kernel", counted("12,582,912", "4,259,840", "90,000,000", "1,000,000")),
    (SPIN, IGNORED),
    ("statistics_kernel", counted("100", "10", "1,000", "20")),
    ("keys_kernel", counted("2,000", "200", "30,000", "400")),
    ("queries_kernel", counted("30,000", "3,000", "500,000", "6,000")),
)
ONE = ["--heads", "2", "--head-dims", "64", "--densities", "0.25", "--length", "1024"]
WHERE = {"shared_memory": 232448, "device": "GPU", "torch": "2.11", "triton": "3.6", "commit": "abc"}


# ---- what ncu says ----


def test_the_kernels_of_each_call_are_summed() -> None:
    forward, backward = io.lines_of(LOG, io.parsed(ONE), WHERE)
    assert set(forward) == set(io.KEYS)
    assert [(line["direction"], line["n_kernels"]) for line in (forward, backward)] == [("fwd", 1), ("bwd", 3)]
    assert (forward["dram_read_bytes"], forward["dram_write_bytes"]) == (12_582_912, 4_259_840)
    assert (forward["l2_bytes"], forward["sm_bytes"]) == (90_000_000, 32_000_000)
    assert (backward["dram_read_bytes"], backward["dram_write_bytes"]) == (32_100, 3_210)
    assert (backward["l2_bytes"], backward["sm_bytes"]) == (531_000, 32 * 6_420)
    assert (forward["pattern"], forward["density"], forward["heads"], forward["head_dim"]) == (
        "random, 0.25",
        0.25,
        2,
        64,
    )


def test_cases_are_identified_by_their_order() -> None:
    options = io.parsed(["--heads", "1", "2", "--head-dims", "64", "128", "--densities", "0.5", "1", "--length", "512"])
    kernels = []
    for index in range(16):
        kernels += [(SPIN, IGNORED), (f"kernel {index}", counted(str(index), "0", "0"))]
    found = [*io.lines_of(log(*kernels), options, WHERE)]
    found_cases = [(line["heads"], line["head_dim"], line["density"], line["direction"]) for line in found]
    expected = [
        (heads, dim, density, direction)
        for heads in (1, 2)
        for dim in (64, 128)
        for density in (0.5, 1.0)
        for direction in ("fwd", "bwd")
    ]
    assert found_cases == expected and [line["dram_read_bytes"] for line in found] == [*range(16)]
    # nothing is said of what was not counted
    assert {line["sm_bytes"] for line in found} == {None}


def test_the_order_of_rows_does_not_matter() -> None:
    text = log((SPIN, IGNORED), ("a", counted("1500", "2", "3")), ("b", counted("4", "0", "1")))
    # launches 2, 1, 0
    lines = text.splitlines()
    text = "\n".join([lines[2], *reversed(lines[3:-1])])
    assert io.kernels(text)["Kernel Name"].tolist() == [SPIN, "a", "b"]
    (call,) = io.calls(text)
    assert (call["dram_read_bytes"], call["n_kernels"]) == (1504, 2)


def test_a_counter_that_a_kernel_lacks_is_not_summed() -> None:
    (call,) = io.calls(log((SPIN, IGNORED), ("a", counted("1", "2", "3", "4")), ("b", counted("1", "2", "3"))))
    assert (call["l2_bytes"], call["sm_bytes"]) == (6, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access the counters", "ERR_NVGPUCTRPERM"),
        ("==PROF== Connected\n==WARNING== No kernels were profiled.", "no kernel was profiled"),
        (log(("forward_kernel", IGNORED)), "before any call began"),
        (log((SPIN, IGNORED), ("forward_kernel", IGNORED)), "ncu profiled 1 calls, expected 2"),
        (log((SPIN, counted("n/a", "1", "1"))), "ncu gave n/a byte as dram__bytes_read.sum of spin_kernel"),
        (log((SPIN, counted("1", "1", "1", unit="furlong"))), "ncu gave 1 furlong as .*; expected bytes"),
    ],
    ids=["permission", "nothing", "no-marker", "too-few", "no-value", "unit"],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        [*io.lines_of(text, io.parsed(ONE), WHERE)]


# ---- the command ----


def test_without_ncu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="there is no command elsewhere/ncu; --ncu says where"):
        io.main(["--ncu", "elsewhere/ncu"])


def test_tiles_and_standard_attention_have_lines_of_their_own() -> None:
    options = io.parsed([*ONE, "--tiles", "32", "128", "--standard"])
    kernels = []
    for index in range(4):
        kernels += [(SPIN, IGNORED), (f"kernel {index}", counted(str(index), "0", "0"))]
    found = [*io.lines_of(log(*kernels), options, WHERE)]
    keys = ("bench", "provider", "direction", "density", "tile", "dram_read_bytes")
    assert [tuple(line[key] for key in keys) for line in found] == [
        ("io_tiles", "standard", "fwd", 1.0, None, 0),
        ("io_tiles", "standard", "bwd", 1.0, None, 1),
        ("io_tiles", "blocksparse_flash", "fwd", 0.25, 32, 2),
        ("io_tiles", "blocksparse_flash", "fwd", 0.25, 128, 3),
    ]
    page = report.section(frame(found))
    assert "| 1,024 | 2 | 64 | fwd | blocksparse_flash | 0.25 | 128 | 49 | 0 | - |" in page
    # measured beside the others, they do not change their table
    assert report.section(frame([*MEASURED, *found])) == f"{report.section(frame(MEASURED))}\n\n{page}"
    assert report.everything(frame([*MEASURED, *found])) == report.everything(frame(MEASURED))


@pytest.mark.parametrize("tile", [16, 128])
def test_the_forward_uses_the_tile_that_is_set(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(io.forward, "config", io.forward.config)
    launch = io.forward.forward_launch
    io.set_tile(tile)
    try:
        layout = patterns.random(256, density=0.5).layout()
        q, k, v = torch.randn(3, 1, 1, 256, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        given: list[Any] = []
        monkeypatch.setattr(io.forward, "forward_launch", lambda *args: given.append(launch(*args)) or given[-1])
        out = attention(q, k, v, layout, backend="triton")
        (blocks,) = {(made._rest["C"].BLOCK_Q, made._rest["C"].BLOCK_KV) for _, _, made in given}
        assert blocks == (tile, min(tile, 64))
        torch.testing.assert_close(out, attention(q, k, v, layout, backend="reference"), rtol=1e-4, atol=1e-4)
    finally:
        launch.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tiles", "48"],
        ["--tiles", "64", "--backend", "hopper"],
        ["--length", "100"],
        ["--densities", "0"],
        ["--densities", "1.5"],
        ["--backend", "eager"],
    ],
)
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        io.parsed(wrong)
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("has_sectors", [False, True])
def test_the_command_writes_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_sectors: bool) -> None:
    """ncu by a stand-in, which writes where it should."""
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        ran.append(command)
        if "--query-metrics" in command:
            listed = ["dram__bytes_read", "lts__t_bytes", *["lts__t_sectors_srcnode_gpc"] * has_sectors]
            return SimpleNamespace(stdout="\n".join(f"{name}   Counter   byte   # of bytes" for name in listed))
        Path(command[command.index("--log-file") + 1]).write_text(LOG)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(io.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(shared_memory_per_block_optin=232448)
    )
    monkeypatch.setattr(
        measure, "environment", lambda: {key: WHERE[key] for key in ("device", "torch", "triton", "commit")}
    )
    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "io.jsonl"
    io.main([*ONE, "--out", str(out)])
    assert [json.loads(line)["direction"] for line in out.read_text().splitlines()] == ["fwd", "bwd"]
    (_, command) = ran
    assert command[command.index("--clock-control") + 1] == "none"
    assert ("srcnode_gpc" in command[command.index("--metrics") + 1]) == has_sectors
    # the process that is profiled has the same cases
    inside = io.parsed(command[command.index("benchmarks.run.io") + 1 :])
    assert inside.profiled and io.cases(inside) == io.cases(io.parsed(ONE))


def test_what_ncu_says_of_a_failure_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(shared_memory_per_block_optin=232448)
    )
    monkeypatch.setattr(measure, "environment", dict)
    failed = SimpleNamespace(returncode=9, stdout="==ERROR== what went wrong", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(SystemExit, match="no kernel was profiled\nncu ended with 9:\n==ERROR== what went wrong"):
        io.main(ONE)


# ---- what it is compared with ----


def line(**given: Any) -> dict[str, Any]:
    said = {
        "bench": "io", "provider": "blocksparse_flash", "backend": "triton", "pattern": "random, 0.25",
        "density": 0.25, "n": 1024,
        "batch": 1, "heads": 2, "head_dim": 64, "dtype": "bf16", "direction": "fwd", "dram_read_bytes": 1_000_000,
        "dram_write_bytes": 500_000, "l2_bytes": 9_000_000, "sm_bytes": 6_000_000, "n_kernels": 1, "tile": None,
        **WHERE,
    }  # fmt: skip
    assert set(said) == set(io.KEYS)
    return {**said, **given}


def test_the_bound_is_that_of_the_proposition() -> None:
    # 2 heads, 2 bytes a number, M = 232448 / 2 numbers
    found = report.counted(frame([line(), line(density=0.5, sm_bytes=None)]))
    assert found["bound"][0] == pytest.approx(2 * 2 * (1024 * 64 + 0.25 * 1024**2 * 64**2 / 116224))
    assert found["on_chip"].tolist() == [6_000_000, 9_000_000] and found["memory"][0] == 1_500_000


def loaded_by_loop(backend: str, direction: str, n: int, dim: int, blocks: np.ndarray) -> int:
    """Bytes of one head, program by program and tile by tile."""
    owned = {
        "triton": {
            ("fwd", 64): [("q", 128)],
            ("bwd", 64): [("k", 64), ("q", 128)],
            ("bwd", 128): [("k", 64), ("q", 64)],
        }
    }
    owned["hopper"] = {("bwd", 128): [("k", 128)]}
    total = 0
    for side, rows in owned[backend][direction, dim]:
        grid = blocks if side == "q" else blocks.T
        for start in range(0, n, rows):
            n_tiles = int(grid[start // 128].sum())
            if direction == "fwd":
                total += 2 * rows * dim + 2 * rows * dim + 4 * rows  # q, out, lse
                total += n_tiles * 2 * (2 * 128 * dim)  # k, v
            elif side == "k":
                total += 4 * (2 * rows * dim)  # k, v, dk, dv
                total += n_tiles * (2 * (2 * 128 * dim) + 2 * 4 * 128)  # q, dout, lse, delta
                total += n_tiles * 4 * 128 * dim if backend == "hopper" else 0  # dq, added
            else:
                total += 3 * (2 * rows * dim) + 2 * 4 * rows  # q, dout, dq, lse, delta
                total += n_tiles * 2 * (2 * 128 * dim)  # k, v
    if direction == "bwd":
        # out, dout, lse are read, lse and delta written
        total += 2 * (2 * n * dim) + 4 * n + 8 * n
        # the sum of dq is zeroed, read, and written as dq
        total += n * dim * (4 + 4 + 2) if backend == "hopper" else 0
    return total


@pytest.mark.parametrize(
    ("backend", "direction", "dim"),
    [("triton", "fwd", 64), ("triton", "bwd", 64), ("triton", "bwd", 128), ("hopper", "bwd", 128)],
)
def test_what_tiles_load_is_counted_program_by_program(backend: str, direction: str, dim: int) -> None:
    blocks = np.random.default_rng(0).random((8, 8)) < 0.4
    given = line(backend=backend, direction=direction, head_dim=dim, density=blocks.mean(), heads=3)
    assert report.of_tiles(given) == 3 * loaded_by_loop(backend, direction, 1024, dim, blocks)


def test_a_straight_line_is_found() -> None:
    densities = pd.Series([0.1, 0.25, 0.5, 1.0])
    assert report.straight_line(densities, 1e6 + 4e7 * densities) == pytest.approx((1e6, 4e7, 1.0))
    *_, fit = report.straight_line(densities, 1e6 * densities**3)
    assert fit < 0.95


# ---- the report ----


MEASURED = [
    line(direction=direction, head_dim=dim, density=density, sm_bytes=round(1e6 + 4e7 * density), backend=backend)
    for backend in ("triton", "hopper")
    for direction in ("fwd", "bwd")
    for dim in (64, 128)
    for density in (0.25, 0.5, 1.0)
]


def test_the_page_shows_bytes() -> None:
    said = report.section(frame(MEASURED))
    assert said.count("| 1 + 40 s MB, R^2 1.0000 |") == 8 and "results/io.png" in said
    assert report.section(frame([])) == report.section(frame([line()])) == ""
    assert report.everything(frame(MEASURED)).count("\n| ") == 1 + len(MEASURED)
    assert "| - |" in report.everything(frame([line(sm_bytes=None)]))


def test_bytes_are_drawn() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    figure = plots.bytes_moved(frame(MEASURED))
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"L2 to SMs, blocksparse_flash, triton", "bound, blocksparse_flash, hopper"} <= shown
    assert len(figure.axes) == 4
