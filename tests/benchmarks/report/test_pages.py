"""Generated pages and pictures show what was measured."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="needs the extra [bench]")

import pandas as pd

from benchmarks.report import attention, models, pages, plots, summaries, tables
from benchmarks.report import lines as measurements
from benchmarks.report.lines import frame
from benchmarks.report.markdown import replaced
from benchmarks.run import measure

OURS = "blocksparse_flash"
TRITON, FLEX, CUDNN = ("blocksparse_flash", "triton"), ("flex", "triton"), ("cudnn", "cudnn")


def line(**given: Any) -> dict[str, Any]:
    """A result line; what is not given is the same in all."""
    said = {
        "bench": "attention", "provider": "blocksparse_flash", "backend": "triton", "pattern": "local", "density": 0.1,
        "n": 1024, "batch": 1, "heads": 4, "head_dim": 64, "dtype": "bf16", "direction": "fwd", "ms": 2.0,
        "ms_p20": 1.9,
        "ms_p80": 2.1, "tflops": 100.0, "peak_bytes": 1_000_000, "setup_ms": 5.0, "device": "GPU", "torch": "2.11",
        "triton": "3.6", "commit": "abc",
    }  # fmt: skip
    assert set(said) == set(measure.KEYS)
    return {**said, **given}


def of(provider: tuple[str, str], **given: Any) -> dict[str, Any]:
    return line(provider=provider[0], backend=provider[1], **given)


def rows_of(text: str) -> list[str]:
    """The rows of all tables, without their heads."""
    lines = text.splitlines()
    return [
        row
        for row, after in zip(lines, [*lines[1:], ""], strict=True)
        if row.startswith("| ") and not after.startswith("|---")
    ]


# every sweep, a few lines of each
SWEPT = [
    of(provider, bench=bench, pattern=pattern, density=density, n=n, ms=ms, ms_p20=0.9 * ms, ms_p80=1.1 * ms,
       direction=direction)
    for provider, slow in ((TRITON, 1.0), (FLEX, 1.5))
    for bench, pattern, density, n, ms in (
        ("length", "local", 0.1, 2048, slow), ("length", "local", 0.05, 4096, 2 * slow),
        ("length", "dense", 1.0, 2048, 3 * slow), ("density", "random, 0.1", 0.1, 1024, slow),
        ("density", "random, 1", 1.0, 1024, 8 * slow), ("density", "dense", 1.0, 1024, 6 * slow),
        ("block-size", "random, 64", 0.1, 1024, 2 * slow), ("block-size", "random, 128", 0.1, 1024, slow),
        ("change", "same mask", 0.1, 1024, slow), ("change", "new mask", 0.1, 1024, 2 * slow),
    )
    for direction in (("step",) if bench == "change" else ("fwd", "bwd"))
]  # fmt: skip


# ---- pages ----


def test_other_gpus_have_their_own_rows() -> None:
    """Tables and pictures show the GPU with the most lines; the main benchmark on others has a section."""
    here = [of(one, pattern=name, ms=ms) for one, ms in ((TRITON, 2.0), (FLEX, 4.0)) for name in ("local", "random")]
    there = [{**one, "device": "other", "tflops": 90.0 if one["pattern"] == "local" else 110.0} for one in here[:3]]
    swept = [{**one, "device": "other"} for one in SWEPT[:2]]
    lines = frame([*there, *here, *SWEPT, *swept])
    assert attention.most(lines)["ms"].tolist() == [one["ms"] for one in [*here, *SWEPT]]
    assert rows_of(summaries.ranges(attention.other_gpus_values(lines), "measurement", "backend", "baseline")) == [
        "| speed-up on other | blocksparse_flash, triton | FlexAttention | 1 | 2.00 | 2.00 | 2.00 | 0 |",
    ]
    section = attention.other_gpus_section(lines)
    assert "One other, bf16" in section and "| local | 0.1 | 64 | 90 / - | 90 / - |" in section
    assert attention.other_gpus_values(frame(here)) == [] and attention.other_gpus_section(frame(here)) == ""
    assert attention.most(frame([])).empty and attention.other_gpus_section(frame([*here, *swept])) == ""


@pytest.mark.parametrize("page", pages.PAGES)
def test_pages_show_what_was_measured(page: str) -> None:
    """If this fails, `python -m benchmarks.report` writes the pages anew."""
    assert pages.written(pages.ROOT, pages.read(pages.RESULTS))[page] == (pages.ROOT / page).read_text(encoding="utf-8")


def test_every_result_page_is_up_to_date() -> None:
    expected = pages.result_pages(pages.read(pages.RESULTS))
    assert {name: (pages.RESULTS / name).read_text(encoding="utf-8") for name in expected} == expected
    assert sorted(path.name for path in pages.RESULTS.glob("*.md")) == sorted(expected)


def test_links_are_relative_to_their_page() -> None:
    text = "![a](benchmarks/results/a.png) [b](benchmarks/README.md#b)"
    assert pages.linked_from("README.md", text) == text
    assert pages.linked_from("docs/cost.md", text) == "![a](../benchmarks/results/a.png) [b](../benchmarks/README.md#b)"
    assert pages.linked_from("benchmarks/README.md", text) == "![a](results/a.png) [b](README.md#b)"


HOPPER, FLASH_4 = ("blocksparse_flash", "hopper"), ("flash_attention_4", "cute")


def test_the_readme_has_a_chart_and_four_statements() -> None:
    shown = [
        of(by, pattern=pattern, direction=direction, ms=ms, density=density)
        for by, pattern, ms, density in (
            (HOPPER, "bigbird", 0.25, 0.125), (HOPPER, "dense", 2.0, 1.0), (FLEX, "bigbird", 0.5, 0.125),
            (FLEX, "dense", 8.0, 1.0), (FLASH_4, "bigbird", 0.2, 0.125), (FLASH_4, "dense", 2.5, 1.0),
            (CUDNN, "dense", 3.0, 1.0), (TRITON, "dense", 4.0, 1.0),
        )
        for direction in ("fwd", "bwd")
    ]  # fmt: skip
    longer = [of(HOPPER, bench="length", n=n, ms=ms) for n, ms in ((16384, 1.0), (65536, 5.0))]
    assert attention.front_page(frame([*shown, *longer])).splitlines() == [
        "![TFLOP/s by mask, forward and backward](benchmarks/results/speed.png)",
        "",
        "One GPU, bf16, 1,024 tokens, batch 1, hidden size 256, PyTorch 2.11, Triton 3.6:",
        "",
        (
            "- Over the 2 masks of the chart, the backend for Hopper GPUs, `hopper`, is 2.00 to 4.00 times as fast as "
            "compiled FlexAttention (geometric mean 2.83). `triton`, which runs on other GPUs too, is 2.00 to 2.00 "
            "times as fast here (2.00). The masks consist of whole blocks of 128 x 128 pairs, except on the causal "
            "diagonal."
        ),
        (
            "- Compared with FlashAttention-4 on the same blocks, `hopper` is 0.80 to 1.25 times as fast (geometric "
            "mean 1.00); it is slower in 2 of 4 cases."
        ),
        (
            "- With a BigBird mask that stores 12.5% of the blocks, forward and backward take 0.5 ms together at head "
            "dimension 64; dense attention with cuDNN takes 6.0 ms."
        ),
        (
            "- With a fixed number of keys per query, 4 times as many tokens (65,536 instead of 16,384) take 5 to 5 "
            "times as long."
        ),
    ]
    # without a measurement there is no sentence
    few = attention.front_page(frame([of(TRITON)]))
    assert few.count("\n- ") == 0 and "speed.png" in few


def test_long_range_has_a_row_for_each_configuration(tmp_path: Path) -> None:
    said = {"task": "pathx", "mask": "butterfly | local(window=5)", "n": 2000, "accuracy": 0.5, "standard_error": 0.011,
            "floor": 0.25, "balanced": 0.375, "chance": 0.1, "device": "GPU", "test_seed": 0, "keys": 17.0,
            "samples": 2000, "samples_before": 0, "device_hours": 0.25, "device_hours_before": 0.0,
            "one_deep": None, "one_deep_balanced": None}  # fmt: skip
    dense = {**said, "mask": None, "samples_before": 500, "device_hours_before": 1.0}
    again = {**said, "test_seed": 1, "one_deep": 0.6, "one_deep_balanced": 0.4, "mask": ["a(b=5)", "c"]}
    for name, tests in (("pathx", [{**said, "accuracy": 0.1}, said, again]), ("dense", [dense])):
        (tmp_path / "ours" / name).mkdir(parents=True)
        (tmp_path / "ours" / name / "test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tests))
    assert rows_of(tables.long_range(tables.read_long_range(tmp_path))) == [
        f"| `ours/{run} | 50.0% ± 1.1% | 25.0% | 37.5% | 10.0% | {deep} |"
        for run, deep in (
            ("dense` | pathx | dense | 17 | 2,500 | 1.25 | 2,000", "-"),
            ("pathx` | pathx | butterfly \\| local | 17 | 2,000 | 0.25 | 2,000, **tested 2 times**", "-"),
            ("pathx` | pathx | a; c | 17 | 2,000 | 0.25 | 2,000", "60.0% (40.0%)"),
        )
    ]
    assert tables.long_range(tables.read_long_range(tmp_path / "missing")) == ""


def test_decoding_has_a_row_for_each_case() -> None:
    assert tables.decoding(frame([])) == "" == tables.decoding(frame([of(TRITON, direction="call", kv_heads=2)]))
    found = [
        of(by, bench="decode", pattern=pattern, direction="graph", kv_heads=2, q_len=q_len, ms=ms)
        for by, pattern, q_len, ms in (
            (TRITON, "sparse", 1, 0.01),
            (TRITON, "dense", 1, 0.5),
            (CUDNN, "dense", 16, 2.0),
        )
    ]
    section = tables.decoding(frame(found))
    assert "4 query heads and 2 KV heads of dimension 64" in section
    assert "stores 10.0% to 10.0% of the blocks" in section
    columns = ["keys", "batch", "queries", "blocksparse_flash, triton, sparse", "blocksparse_flash, triton, dense"]
    assert section.splitlines()[2] == f"| {' | '.join([*columns, 'cuDNN, dense'])} |"
    assert rows_of(section) == ["| 1,024 | 1 | 1 | 10 | 500 | - |", "| 1,024 | 1 | 16 | - | - | 2,000 |"]


def test_what_was_never_measured_has_no_lines(tmp_path: Path) -> None:
    for name in ("attention", "masks"):
        with pytest.raises(FileNotFoundError, match=name):
            pages.read(tmp_path)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(of(TRITON)))
    found = pages.read(tmp_path)
    assert {name: len(lines) for name, lines in found.items() if len(lines)} == {"attention": 1, "masks": 1}
    # folders that are not there
    assert tables.sparse_against_dense(found["lra"]) == tables.long_range(found["lra"]) == ""
    assert pages.language_models(tmp_path) == {}


def test_a_line_that_was_cut_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a traceback without the name of the file."""
    path = tmp_path / "attention.jsonl"
    path.write_text(f"{json.dumps(of(TRITON))}\n{json.dumps(of(FLEX))[:-20]}")
    with pytest.raises(ValueError, match=r"attention\.jsonl, line 2 is not JSON"):
        measurements.read(path)
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / "test.jsonl")
    with pytest.raises(ValueError, match=r"test\.jsonl, line 2 is not JSON"):
        tables.read_long_range(tmp_path)
    monkeypatch.setattr(pages, "main", lambda: measurements.read(tmp_path / "run" / "test.jsonl"))
    monkeypatch.setattr(sys, "argv", ["report"])
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.report: .*test\.jsonl, line 2 is not JSON"):
        runpy.run_module("benchmarks.report", run_name="__main__")


def test_every_picture_that_is_named_exists() -> None:
    lines = pages.read(pages.RESULTS)
    assert [name for name in plots.figures(lines) if not (pages.RESULTS / f"{name}.png").exists()] == []


def test_markers_must_be_there_once() -> None:
    marked = "<!-- begin x: by hand -->\nold\nlines\n<!-- end x -->"
    assert replaced(f"a\n{marked}\nb", {"x": "new"}) == "a\n<!-- begin x: by hand -->\nnew\n<!-- end x -->\nb"
    # written twice, or with nothing, it is the same
    assert replaced(replaced(marked, {"x": ""}), {"x": "old\nlines"}) == marked
    for text in ("", marked + "\n" + marked):
        with pytest.raises(ValueError, match="one pair of markers"):
            replaced(text, {"x": "new"})


# ---- tables ----


def test_a_cell_is_forward_and_backward_of_its_provider() -> None:
    found = [of(TRITON, tflops=101), of(TRITON, tflops=51, direction="bwd"), of(CUDNN, pattern="dense", tflops=300)]
    assert attention.speed_table(frame(found)).splitlines() == [
        "| pattern | density | head_dim | blocksparse_flash, triton | cuDNN |",
        "|---|---|---|---|---|",
        "| local | 0.1 | 64 | 101 / 51 | - |",
        "| dense | 0.1 | 64 | - | 300 / - |",
    ]


def test_costs_are_columns_of_their_own() -> None:
    found = [of(TRITON), of(TRITON, direction="mask", ms=7.0, tflops=None)]
    *_, row = attention.cost_table(frame(found), 400.0).splitlines()
    assert (
        row == "| local | 64 | blocksparse_flash, triton | fwd | 2.000 (1.900 to 2.100) | 100 | 25% | 1 | 7.0 | 5.0 |"
    )


def test_a_later_measurement_replaces_an_earlier_one(tmp_path: Path) -> None:
    said = [of(TRITON, ms=1.0), of(FLEX), of(TRITON, ms=3.0, commit="later")]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    found = measurements.read(tmp_path / "lines.jsonl")
    assert [*zip(found["backend"], found["ms"], strict=True)] == [("triton", 3.0), ("triton", 2.0)]


def test_a_matrix_product_stands_beside_what_its_own_run_measured(tmp_path: Path) -> None:
    said = [of(("torch", "cublas"), bench="matmul", tflops=rate, commit=run) for rate, run in ((700, "a"), (800, "b"))]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    lines = measurements.read(tmp_path / "lines.jsonl")
    assert [measurements.matmul_rate(lines, frame([of(TRITON, commit=run)])) for run in "abc"] == [700, 800, None]
    assert measurements.matmul_rate(lines, frame([of(TRITON, commit="a"), of(FLEX, commit="b")])) is None


def test_what_was_not_timed_in_turns_is_named() -> None:
    old = measurements.ONE_BY_ONE[0]
    turns = [of(one, direction=way) for one in (TRITON, FLEX) for way in ("fwd", "bwd")]
    assert measurements.order_of_timing(frame(turns)) == "Timing was interleaved across libraries."
    cudnn, new = of(CUDNN, commit=old), turns[0]["commit"]
    among = "Timing was interleaved across the libraries that the same commit measured"
    ours = f"{new}: blocksparse_flash triton (2), FlexAttention (2)"
    assert measurements.order_of_timing(frame([*turns, cudnn])) == (
        f"{among}, except cuDNN. Number of figures by commit: {ours}; {old}: cuDNN (1)."
    )
    assert measurements.order_of_timing(frame([*turns, cudnn, of(FLEX, commit=old, pattern="random")])) == (
        f"{among}, except 1 of 3 figures of FlexAttention and cuDNN. Number of figures by commit: {ours}; {old}: "
        "FlexAttention (1), cuDNN (1)."
    )
    assert measurements.order_of_timing(frame([cudnn])) == "The libraries were timed one after another."


def test_ratios_across_commits_are_counted() -> None:
    found = [of(HOPPER, direction=way) for way in ("fwd", "bwd")]
    flex = [of(FLEX, direction=way, commit=commit) for way, commit in (("fwd", found[0]["commit"]), ("bwd", "other"))]
    assert attention._across_runs(frame([*found, *flex]), attention.FLEX) == (
        " 1 of 2 ratios compare runs of different commits."
    )
    assert attention._across_runs(frame([*found, flex[0]]), attention.FLEX) == ""


def test_speedups_are_over_what_both_measured() -> None:
    found = [of(TRITON, ms=1.0), of(TRITON, ms=2.0, direction="bwd"), of(TRITON, ms=9.0, pattern="dense")]
    found += [of(FLEX, ms=2.0), of(FLEX, ms=16.0, direction="bwd"), of(FLEX, ms=1.0, direction="mask")]
    found += [of(CUDNN, ms=3.0, pattern="dense")]
    assert rows_of(summaries.ranges(summaries.speedups(frame(found)), "backend", "baseline")) == [
        "| blocksparse_flash, triton | FlexAttention | 2 | 2.00 | 4.00 | 8.00 | 0 |",
        "| blocksparse_flash, triton | cuDNN | 1 | 0.33 | 0.33 | 0.33 | 1 |",
    ]
    assert summaries.ranges(summaries.speedups(frame(found[:3])), "backend", "baseline") == ""


@pytest.mark.parametrize(
    ("dense", "expected"),
    [(3.0, 0.75), (4.0, 1.0), (0.5, 0.25), (5.0, None)],
    ids=["between", "last", "first", "never"],
)
def test_break_even_is_where_the_curves_cross(dense: float, expected: float | None) -> None:
    assert measurements.break_even([0.25, 0.5, 1.0], [1.0, 2.0, 4.0], dense) == expected


def test_sweeps_have_pictures_and_tables() -> None:
    section = attention.sweeps_section(frame(SWEPT))
    # 6 ms lie between 1 ms at density 0.1 and 8 ms at 1
    dense = "blocksparse_flash, triton | dense blocksparse_flash, triton"
    assert f"| {summaries.BREAK_EVEN} | {dense} | forward | 1 | 0.74 | 0.74 | 0.74 |" in section
    assert all(f"results/{name}.png" in section for name in attention.SWEEPS)
    # 2 ms with a new mask, 1 ms with the same one: the change costs 1 ms, and theirs 1.5 ms
    assert "| blocksparse_flash, triton | new mask | 64 | 2.00 (1.80 to 2.20) | 1.00 | 5.0 |" in section
    assert "| FlexAttention | new mask | 64 | 3.00 (2.70 to 3.30) | 1.50 | 5.0 |" in section
    # a table for each length, the larger first
    fine = [
        of(provider, bench="fine", pattern=pattern, density=0.1, n=n, ms=ms, tflops=100 / ms)
        for provider, ms in ((TRITON, 1.0), (FLEX, 2.5))
        for pattern, n in (("random, 64, 10%", 2048), ("random, 32, 5%", 2048), ("random, 64, 10%", 5120))
    ]
    section = attention.sweeps_section(frame([*SWEPT, *fine]))
    assert section.count("| random, 64, 10% | 0.1 | 64 | 100 / - | 40 / - |") == 2
    assert (
        section.count("`python -m benchmarks.run.attention --sweep fine`") == 2 == section.count("2,048 tokens, b") + 1
    )
    assert "| blocksparse_flash, triton | FlexAttention | forward | 2 | 2.50 | 2.50 | 2.50 | 0 |" in section
    assert attention.sweeps_section(frame([])) == ""
    assert attention.everything(frame(SWEPT)).count("## ") == 5
    longer = [of(FLEX, bench="length", n=n) for n in (8192, 1024)]
    text = attention.everything(frame([*SWEPT, *longer]))
    places = [text.index(f"## length, {n:,} tokens, batch 1, GPU") for n in (1024, 2048, 4096, 8192)]
    assert places == sorted(places)
    commands = [f"`python -m benchmarks.run.attention --sweep {name}`" for name in attention.SWEEPS]
    assert all(command in attention.everything(frame(SWEPT)) for command in commands)


def test_growth_is_between_the_shortest_and_the_longest_of_each_direction() -> None:
    found = [of(TRITON, bench="length", n=n, ms=ms) for n, ms in ((8192, 1.0), (16384, 2.0), (65536, 9.0))]
    found += [of(TRITON, bench="length", n=65536, direction="bwd"), of(FLEX, bench="length", n=16384)]
    # a backward of one length, FlexAttention's lines and launch-bound lengths say nothing about growth
    (value,) = summaries.growth(frame(found))
    assert value[1:] == ("blocksparse_flash, triton", "16,384 tokens", "forward", "64", 4.5)
    assert value.measurement.startswith("time at 65,536 tokens / time at 16,384 tokens")


def test_small_blocks_are_compared_with_those_of_a_tile() -> None:
    found = [
        of(TRITON, bench="block-size", pattern=f"random, {side}", ms=ms, direction=direction)
        for direction, slow in (("fwd", 1.0), ("bwd", 2.0))
        for side, ms in ((16, 8.0 * slow**2), (64, 3.0 * slow), (128, slow), (256, slow))
    ]
    peer = of(FLEX, bench="block-size", pattern="random, 64", ms=99.0)
    assert rows_of(summaries.ranges(summaries.small_blocks(frame([*found, peer])), "measurement", "baseline")) == [
        "| time in blocks of 64, random | blocks of 128 | 2 | 3.00 | 3.00 | 3.00 |",
        "| time in blocks of 16, random | blocks of 128 | 2 | 8.00 | 11.31 | 16.00 |",
    ]
    # without blocks of 128 there is no baseline
    assert summaries.small_blocks(frame(one for one in found if one["pattern"] != "random, 128")) == []
    # a peer is compared in the sizes that it was measured in
    peers = [peer, of(FLEX, bench="block-size", pattern="random, 128", ms=7.0)]
    values = summaries.small_block_speedups(frame([*found, *peers]))
    assert rows_of(summaries.ranges(values, "measurement", "baseline")) == [
        "| speed-up in blocks of 64, random | FlexAttention | 1 | 33.00 | 33.00 | 33.00 | 0 |"
    ]


def test_determinism_is_compared_where_both_ways_were_measured() -> None:
    equal = ("blocksparse_flash", "triton, deterministic")
    found = [
        of(by, bench="deterministic", direction="bwd", pattern=pattern, ms=ms)
        for by, pattern, ms in (
            (TRITON, "dense", 2.0),
            (equal, "dense", 2.5),
            (TRITON, "local", 1.0),
            (equal, "local", 1.1),
        )
    ]
    other = of(TRITON, bench="deterministic", direction="bwd", head_dim=128)
    values = summaries.deterministic(frame([*found, other]))
    assert [(value.backend, value.head_dim, value.value) for value in values] == [
        ("blocksparse_flash, triton", "64", 1.25),
        ("blocksparse_flash, triton", "64", 1.1),
    ]
    assert summaries.deterministic(frame([of(TRITON, bench="deterministic", direction="bwd")])) == []


def test_a_density_sweep_that_ended_early_tells_no_break_even() -> None:
    early = frame(one for one in SWEPT if one["bench"] == "density" and one["pattern"] != "random, 1")
    assert attention.swept(early, "density").empty
    assert "results/density.png" not in attention.sweeps_section(early)
    # the table of all measurements has it
    assert "| random, 0.1 |" in attention.everything(early)


def test_a_break_even_is_at_most_the_highest_density_measured() -> None:
    swept = [one for one in SWEPT if one["bench"] == "density" and one["direction"] == "fwd"]
    ours = [
        {**one, "backend": "hopper", "ms": one["ms"] / 2} for one in swept if one["provider"] == "blocksparse_flash"
    ]
    few, dense = ours[0], ours[-1]
    assert (few["pattern"], dense["pattern"]) == ("random, 0.1", "dense")

    def densities(*added: dict[str, Any]) -> list[float]:
        found = summaries.break_evens(frame([*swept, *added]))
        return [value.value for value in found if value.backend == "blocksparse_flash, hopper"]

    assert densities(few, dense) == [0.1]
    # a dense call alone crosses nothing
    assert densities(dense) == []


def test_the_summary_has_a_row_for_each_benchmark() -> None:
    equal = [
        of(("blocksparse_flash", name), bench="deterministic", direction="bwd", ms=ms)
        for name, ms in (("triton", 1.0), ("triton, deterministic", 1.2))
    ]
    longer = [
        of(TRITON, bench="length", n=n, direction=way, ms=n / 1024 + 8 * (way == "bwd"))
        for n in (16384, 32768)
        for way in ("fwd", "bwd")
    ]
    name = "blocksparse_flash, triton"
    lines = {"attention": frame([*SWEPT, *longer, *equal]), "small": frame([])}
    flex = f"| {name} | FlexAttention |"
    assert rows_of(pages.highlights(lines)) == [
        (
            f"| time at 32,768 tokens / time at 16,384 tokens, at a fixed number of keys per query | {name} "
            "| 16,384 tokens | 2 | 1.67 | 1.83 | 2.00 | - |"
        ),
        f"| {summaries.BREAK_EVEN} | {name} | dense {name} | 2 | 0.74 | 0.74 | 0.74 | - |",
        f"| time in blocks of 64, random | {name} | blocks of 128 | 2 | 2.00 | 2.00 | 2.00 | - |",
        f"| speed-up in blocks of 64, random {flex} 2 | 1.50 | 1.50 | 1.50 | 0 |",
        f"| backward time, deterministic=True | {name} | deterministic=False | 1 | 1.20 | 1.20 | 1.20 | - |",
        f"| {name} | new mask | 1.00 |",
        "| FlexAttention | new mask | 1.50 |",
    ]
    assert pages.highlights({"attention": frame([]), "small": frame([])}) == ""


# ---- pictures ----


def test_every_sweep_is_drawn_with_everything_in_it() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    lines = {**dict.fromkeys(pages.FILES, frame([])), "masks": measurements.read(pages.RESULTS / "masks.jsonl")}
    drawn = plots.figures({**lines, "attention": frame([of(TRITON), of(FLEX), *SWEPT])})
    assert [*drawn] == ["speed", *attention.SWEEPS, "masks"]
    for name, figure in drawn.items():
        shown = {text.get_text() for text in figure.legends[0].get_texts()}
        assert any("blocksparse_flash" in text for text in shown), name
        assert name == "masks" or any("FlexAttention" in text for text in shown), name


def test_a_changed_mask_has_a_cost_for_each_length_and_clock() -> None:
    longer = [{**one, "n": 4096, "ms": 10 * one["ms"]} for one in SWEPT if one["bench"] == "change"]
    rows = [{**one, "direction": "steps", "ms": 1 + (one["ms"] - 1) / 4} for one in longer]
    section = attention.change_section(frame([*longer, *rows]))
    assert section.index("A synchronized step:") < section.index("One of many steps in a row:")
    assert "One of many steps in a row:" not in attention.change_section(frame(longer))
    assert attention.sweeps_section(frame([*SWEPT, *longer])).count("--sweep change`") == 2
    shown = [one for one in SWEPT if one["bench"] == "change"]
    table = summaries.changes(frame([*shown, *longer, *rows]))
    assert table.splitlines()[0] == (
        "| library | change | 1,024 tokens, a synchronized step | 4,096 tokens, a synchronized step "
        "| 4,096 tokens, one of many steps in a row |"
    )
    assert rows_of(table)[0].startswith("| blocksparse_flash, triton | new mask | 1.00 |")


def test_a_cost_within_the_spread_of_the_steps_is_an_upper_bound() -> None:
    same, new = (of(TRITON, bench="change", direction="step", pattern=name) for name in ("same mask", "new mask"))
    # the second step seems shorter with a new mask
    steps = [same, *({**new, "ms": ms} for ms in (2.1, 1.9, 3.0))]
    assert summaries.change_costs(frame(steps)) == ["-", "< 0.20", "< 0.20", "1.00"]
    assert summaries.change_costs(frame([new])) == ["-"]


def test_every_provider_has_a_name_and_a_color() -> None:
    assert [*measurements.LABELS.values()] == [*plots.COLORS]
    assert measurements.providers(frame([of(("someone", "new")), of(TRITON)])) == [
        "blocksparse_flash, triton",
        "someone, new",
    ]


@pytest.mark.parametrize(("count", "expected"), [(2048, "2K"), (1 << 20, "1M"), (1000, "1000"), (1536, "1536")])
def test_counts_are_short(count: int, expected: str) -> None:
    assert plots.short(count) == expected


def test_shapes_are_compared_with_the_best_of_the_others() -> None:
    found = [
        of(provider, bench="shapes", pattern=case, direction=way, tflops=rate)
        for provider, case, way, rate in (
            (("blocksparse_flash", "hopper"), "causal", "fwd", 600.0), (TRITON, "tiny", "fwd", 90.0),
            (("blocksparse_flash", "hopper"), "causal", "bwd", 500.0), (FLEX, "causal", "fwd", 300.0),
            (CUDNN, "causal", "fwd", 400.0), (FLEX, "causal", "bwd", 1000.0),
        )
    ]  # fmt: skip
    found.append(of(TRITON, bench="shapes", pattern="8 packed documents, causal", direction="plan", ms=0.123))
    section = models.shapes(frame([*found, of(("torch", "cublas"), bench="matmul", tflops=700)]))
    assert rows_of(section) == [
        "| causal | `hopper` | 600 / 500 | 300 / 1000 | 400 / - | 1.50 / 0.50 |",
        "| tiny | `triton` | 90 / - | - | - | - |",
    ]
    assert "A matrix product of 8192 x 8192 x 8192 ran at 700 TFLOP/s." in section
    assert "from their boundaries there, took the GPU 0.12 ms (8 packed documents): " in section
    assert "joules" not in section
    assert models.shapes(frame([])) == ""
    for each, energy in zip(found, (3.0, 1.0, 4.0, 6.0, 5.0, None), strict=False):
        each["joules"] = energy
    section = models.shapes(frame(found))
    assert "| joules, ours / least of the others |" in section
    assert [row.split(" | ")[-1] for row in rows_of(section)] == ["0.60 / - |", "- |"]


def test_selection_is_compared_with_tiles_dense_attention_and_fla() -> None:
    def of_case(provider: str, direction: str, ms: float, plan: str | None = "key blocks", n: int = 8192) -> Any:
        facts = {"kv_heads": 1, "block_size": 128, "plan": plan, "host_us": 250.0 if direction == "plan" else None}
        sizes = {"peak_bytes": 2_000_000_000, "tflops": 300.0, "pattern": "random", "n": n}
        return {**of((provider, "hopper"), bench="selection", direction=direction, ms=ms, **sizes), **facts}

    calls = [
        of_case(name, direction, factor * ms, plan)
        for name, plan, factor in (
            (OURS, "key blocks", 1), (f"{OURS} tiles", "tiles", 2), ("dense", None, 4), ("fla", None, 6),
        )
        for direction, ms in (("fwd", 3.0), ("bwd", 8.0))
    ]  # fmt: skip
    calls += [of_case(OURS, "plan", 0.5), of_case(OURS, "fwd", 1.0, "tiles", 4096)]
    layers = [
        of((OURS, "auto"), bench="selection", direction="layer", pattern=name, ms=ms, n=n) | {"kv_heads": 1}
        for name, n, ms in (
            ("SelfAttention", 8192, 60.0), ("NativeSparseAttention", 8192, 20.0), ("NativeSparseAttention", 4096, 9.0),
        )
    ]  # fmt: skip
    both = models.selection(frame([*calls, *layers]))
    times = "3.0 / 8.0 | 6.0 / 16.0 | 12.0 / 32.0 | 18.0 / 48.0"
    rest = "300 / 300 | 2.0 / 2.0 | 2.0 / 2.0 | 0.50 (250 us)"
    of_calls = [
        "| 4,096 | 4/1 | 64 | 128 | random | tiles | 1.0 / - | - | - | - | 300 / - | 2.0 / - | - | - |",
        f"| 8,192 | 4/1 | 64 | 128 | random | key blocks | {times} | {rest} |",
    ]
    of_layers = ["| 4,096 | - | 9.0 |", "| 8,192 | 60.0 | 20.0 (3.00) |"]
    assert rows_of(both) == [*of_calls, *of_layers]
    # either part alone
    assert rows_of(models.selection(frame(calls))) == of_calls
    assert rows_of(models.selection(frame(layers))) == of_layers
    assert models.selection(frame([])) == ""


def test_steps_of_long_range_arena_are_those_of_the_latest_run() -> None:
    def steps(*lines: tuple[str, float, float, str], direction: str = "step") -> list[dict[str, Any]]:
        facts = {"bench": "lra_speed", "task": "text", "pattern": "dense", "direction": direction}
        return [
            of((provider, ""), **facts, dropout_p=dropout, ms=ms, commit=commit)
            for provider, dropout, ms, commit in lines
        ]

    launched = steps(
        ("materialized", 0.1, 50.0, "old"), ("blocksparse_flash", 0.1, 8.0, "new"), ("sdpa", 0.1, 6.0, "new"),
        ("flex", 0.1, 10.0, "new"), ("blocksparse_flash", 0.0, 4.0, "new"),
    )  # fmt: skip
    assert rows_of(tables.long_range_steps(frame(launched))) == [
        "| text | dense | 0.1 | 8.0 | 6.0 | 10.0 | 0.75 |", "| text | dense | 0 | 4.0 | - | - | - |",
    ]  # fmt: skip
    assert "graph" not in tables.long_range_steps(frame(launched))
    captured = steps(("blocksparse_flash", 0.1, 2.0, "new"), ("sdpa", 0.1, 3.0, "new"), direction="captured step")
    both = tables.long_range_steps(frame([*launched, *captured]))
    assert rows_of(both) == [
        "| text | dense | 0.1 | 8.0 | 6.0 | 10.0 | 0.75 | 2.0 | 3.0 | - | 1.50 |",
        "| text | dense | 0 | 4.0 | - | - | - | - | - | - | - |",
    ]
    assert "sdpa, graph" in both
    assert tables.long_range_steps(frame([])) == ""


def test_pipelines_are_compared_with_their_own_attention() -> None:
    found = [
        {**of((provider, ""), bench="pipelines", model=model, pattern=pattern, n=n, ms=ms), "diffusers": "0.42"}
        for provider, pattern, model, n, ms in (
            ("diffusers", "dense", "wan", 32760, 1200.0), ("blocksparse_flash", "sliding_tile", "wan", 32760, 600.0),
            ("diffusers", "dense", "flux", 16384, 900.0),
        )
    ]  # fmt: skip
    assert rows_of(models.pipelines(frame(found))) == [
        "| diffusers | dense | 1,200 (1.00) | 900 (1.00) |", "| blocksparse_flash | `sliding_tile` | 600 (2.00) | - |",
    ]  # fmt: skip
    assert models.pipelines(frame([])) == ""


def test_packed_steps_are_compared_with_ours() -> None:
    found = [
        {**of((provider, ""), bench="huggingface", model="llama", pattern=pattern, ms=ms), "transformers": "5"}
        for provider, pattern, ms in (
            ("blocksparse_flash", "packed, 8 documents", 100.0), ("torch varlen_attn", "packed, 8 documents", 125.0),
            ("blocksparse_flash", "packed, 64 documents", 80.0),
        )
    ]  # fmt: skip
    assert rows_of(models.packed_steps(frame(found))) == [
        "| blocksparse_flash | 100.0 (1.00) | 80.0 (1.00) |", "| torch varlen_attn | 125.0 (1.25) | - |",
    ]  # fmt: skip
    assert models.packed_steps(frame([])) == models.training_steps(frame(found)) == ""


def test_video_is_compared_with_dense_attention() -> None:
    found = [
        of(provider, bench="video", pattern=pattern, n=n, density=density, ms=ms)
        for n, factor in ((1000, 1.0), (2000, 2.0))
        for provider, pattern, density, ms in (
            (CUDNN, "dense", 1.0, 8 * factor), (TRITON, "dense", 1.0, 10 * factor),
            (TRITON, "top_p", 0.4 / factor, 4.0),
        )
    ]  # fmt: skip
    assert rows_of(models.video(frame(found)))[:2] == [
        "| cuDNN | dense | 100% | 8.0 (1.0) | 16.0 (1.0) |",
        "| blocksparse_flash | dense | 100% | 10.0 (0.8) | 20.0 (0.8) |",
    ]
    assert rows_of(models.video(frame(found)))[-1] == (
        "| blocksparse_flash | `top_p(0.5)` | 20% to 40% | 4.0 (2.0) | 4.0 (4.0) |"
    )
    assert models.video(frame([])) == ""


# ---- models ----


def test_training_steps_have_a_row_for_each_case_and_mask() -> None:
    def of_model(provider: str, pattern: str, ms: float, model: str = "gpt2") -> dict[str, Any]:
        return line(
            provider=provider,
            backend=None,
            pattern=pattern,
            ms=ms,
            model=model,
            transformers="5.1",
            peak_bytes=ms * 1e9,
        )

    shown = frame(
        [
            *(of_model("transformers sdpa", pattern, ms) for pattern, ms in (("causal", 3.0), ("local", 6.0))),
            *(of_model("blocksparse_flash", pattern, ms) for pattern, ms in (("causal", 4.0), ("local", 2.0))),
            of_model("transformers eager", "local", 10.0),
            # the same mask and length of another model
            of_model("transformers sdpa", "dense", 9.0, "bert-large"),
            of_model("blocksparse_flash", "local", 3.0, "bert-large"),
        ]
    )  # fmt: skip
    page = models.training_steps(shown)
    assert rows_of(page) == [
        "| gpt2 | 1,024 | 1 | `causal` | 0.1 | 4.0 | 4.0 | 3.0 | 0.75 | 3.0 | - | - | - | 0.75 |",
        "| gpt2 | 1,024 | 1 | `local` | 0.1 | 2.0 | 2.0 | 6.0 | 3.00 | 6.0 | 10.0 | 5.00 | 10.0 | 1.50 |",
        "| bert-large | 1,024 | 1 | `local` | 0.1 | 3.0 | 3.0 | - | - | - | - | - | - | 3.00 |",
    ]
    assert "3x for gpt2 at 1,024 tokens over Hugging Face" in page
    assert models.training_steps(frame([])) == ""


def test_memory_is_compared_with_a_score_matrix() -> None:
    said = {"bench": "lra_speed", "pattern": "dense", "direction": "fwd+bwd", "task": None, "status": "ok", "n": 4096}
    ours = [
        line(**said, backend=backend, peak_bytes=size) for backend, size in (("triton", 10**9), ("hopper", 2 * 10**9))
    ]
    standard = line(**said, provider="materialized", backend=None, peak_bytes=3 * 10**10)
    # a training step of a task, another mask, and a length without a peer
    others = [{**standard, "task": "text", "peak_bytes": 1}, {**standard, "pattern": "local"}, {**ours[0], "n": 65536}]
    page = models.memory(frame([*others, *ours, standard]))
    assert rows_of(page) == ["| 4,096 | 30,000 | 1,000 (30.0) | 2,000 (15.0) | 20.4 |"]
    assert models.memory(frame(ours)) == ""


def test_sparse_models_are_compared_with_their_dense_pair() -> None:
    said = {"n": 2000, "standard_error": 0.01, "floor": 0.25, "balanced": 0.5}
    pair = [{**said, "configuration": "ours/listops", "accuracy": 0.61}]
    pair += [{**said, "configuration": "ours/listops-dense", "accuracy": 0.625, "balanced": 0.48}]
    alone = {**said, "configuration": "ours/pathfinder32", "accuracy": 0.9}
    rows = rows_of(tables.sparse_against_dense(pd.DataFrame([*pair, alone])))
    assert rows == ["| ListOps | 2,000 | 61.0% ± 1.0% | 62.5% ± 1.0% | -1.5 | +2.0 | 25.0% |"]
    assert tables.sparse_against_dense(pd.DataFrame([alone])) == ""
