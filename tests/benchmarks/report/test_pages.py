"""Generated pages and pictures show what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import context_parallel, findings, pages, plots
from benchmarks.report import lines as measurements
from benchmarks.report import small as small_report
from benchmarks.run import measure

TRITON, FLEX, CUDNN = ("blocksparse_flash", "triton"), ("flex", "triton"), ("cudnn", "cudnn")


def line(**given: Any) -> dict[str, Any]:
    """A result line; what is not given is the same in all."""
    said = {
        "bench": "attention", "provider": "blocksparse_flash", "backend": "triton", "pattern": "local", "density": 0.1,
        "n": 1024, "batch": 1, "heads": 4, "head_dim": 64, "dtype": "bf16", "direction": "fwd", "ms": 2.0, "ms_p20": 1.9,
        "ms_p80": 2.1, "tflops": 100.0, "peak_bytes": 1_000_000, "setup_ms": 5.0, "device": "GPU", "torch": "2.11",
        "triton": "3.6", "commit": "abc",
    }  # fmt: skip
    assert set(said) == set(measure.KEYS)
    return {**said, **given}


def of(provider: tuple[str, str], **given: Any) -> dict[str, Any]:
    return line(provider=provider[0], backend=provider[1], **given)


# every sweep, a few lines of each
SWEPT = [
    of(provider, bench=bench, pattern=pattern, density=density, n=n, ms=ms, ms_p20=0.9 * ms, ms_p80=1.1 * ms, direction=direction)
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


# ---- the README ----


def test_other_gpus_stand_apart() -> None:
    """Tables and pictures are of the GPU with the most lines; of the others the main benchmark is told, beside that one."""
    here = [of(one, pattern=name, ms=ms) for one, ms in ((TRITON, 2.0), (FLEX, 4.0)) for name in ("local", "random")]
    there = [{**one, "device": "other", "tflops": 90.0 if one["pattern"] == "local" else 110.0} for one in here[:3]]
    swept = [{**one, "device": "other"} for one in SWEPT[:2]]
    lines = [*there, *here, *SWEPT, *swept]
    assert pages.most(lines) == [*here, *SWEPT]
    (point,) = pages.elsewhere_points(lines)
    assert point == (
        "- On an other `triton` runs at 0.90 to 1.10 of its rate on an GPU. `triton` is 2.00 to 2.00 times as fast as FlexAttention, "
        "2.00 in the geometric mean of 1 measurements."
    )
    said = pages.elsewhere_section(lines)
    assert "One other, bf16" in said and "| local | 0.1 | 64 | 90 / - | 90 / - |" in said
    assert pages.elsewhere_points(here) == [] == pages.most([]) and pages.elsewhere_section(here) == ""
    assert pages.elsewhere_section([*here, *swept]) == ""


def test_the_readme_says_what_was_measured() -> None:
    """If this fails, `python -m benchmarks.report` writes the README anew."""
    lines = pages.read(pages.RESULTS)
    text = pages.README.read_text(encoding="utf-8")
    assert pages.replaced(text, pages.sections(lines)) == text
    page = pages.PAGE.read_text(encoding="utf-8")
    assert pages.replaced(page, pages.page_sections(lines)) == page
    assert (pages.RESULTS / "attention.md").read_text(encoding="utf-8") == pages.everything(lines["attention"])
    written = pages.RESULTS / "io.md"
    assert written.exists() == bool(lines["io"])
    if lines["io"]:
        assert written.read_text(encoding="utf-8") == pages.every_byte(lines["io"])
    written, small = pages.RESULTS / "small.md", lines["small"]
    assert written.exists() == bool(small)
    if small:
        assert written.read_text(encoding="utf-8") == small_report.everything(small)
    written, context = pages.RESULTS / "context_parallel.md", lines["context_parallel"]
    assert written.exists() == bool(context)
    if context:
        assert written.read_text(encoding="utf-8") == context_parallel.everything(context)


def test_what_was_never_measured_has_no_lines(tmp_path: Path) -> None:
    for name in ("attention", "masks"):
        with pytest.raises(FileNotFoundError, match=name):
            pages.read(tmp_path)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(of(TRITON)))
    found = pages.read(tmp_path)
    assert {name: len(lines) for name, lines in found.items() if lines} == {"attention": 1, "masks": 1}


def test_every_picture_that_is_named_exists() -> None:
    lines = pages.read(pages.RESULTS)
    named = [*plots.figures(lines["attention"], lines["masks"]), *(["io"] if lines["io"] else [])]
    assert [name for name in named if not (pages.RESULTS / f"{name}.png").exists()] == []


def test_markers_must_be_there_once() -> None:
    marked = "<!-- begin x: by hand -->\nold\nlines\n<!-- end x -->"
    assert pages.replaced(f"a\n{marked}\nb", {"x": "new"}) == "a\n<!-- begin x: by hand -->\nnew\n<!-- end x -->\nb"
    # written twice, or with nothing, it is the same
    assert pages.replaced(pages.replaced(marked, {"x": ""}), {"x": "old\nlines"}) == marked
    for text in ("", marked + "\n" + marked):
        with pytest.raises(ValueError, match="one pair of markers"):
            pages.replaced(text, {"x": "new"})


# ---- tables ----


def test_a_cell_is_forward_and_backward_of_its_provider() -> None:
    found = [of(TRITON, tflops=101), of(TRITON, tflops=51, direction="bwd"), of(CUDNN, pattern="dense", tflops=300)]
    assert pages.speed_table(found).splitlines() == [
        "| pattern | density | head_dim | blocksparse_flash, triton | cuDNN |",
        "|---|---|---|---|---|",
        "| local | 0.1 | 64 | 101 / 51 | - |",
        "| dense | 0.1 | 64 | - | 300 / - |",
    ]


def test_costs_are_columns_of_their_own() -> None:
    found = [of(TRITON), of(TRITON, direction="mask", ms=7.0, tflops=None)]
    *_, row = pages.cost_table(found, 400.0).splitlines()
    assert (
        row == "| local | 64 | blocksparse_flash, triton | fwd | 2.000 (1.900 to 2.100) | 100 | 25% | 1 | 7.0 | 5.0 |"
    )


def test_a_later_measurement_replaces_an_earlier_one(tmp_path: Path) -> None:
    said = [of(TRITON, ms=1.0), of(FLEX), of(TRITON, ms=3.0, commit="later")]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    assert [(one["backend"], one["ms"]) for one in measurements.read(tmp_path / "lines.jsonl")] == [
        ("triton", 3.0),
        ("triton", 2.0),
    ]


def test_a_matrix_product_stands_beside_what_its_own_run_measured(tmp_path: Path) -> None:
    said = [of(("torch", "cublas"), bench="matmul", tflops=rate, commit=run) for rate, run in ((700, "a"), (800, "b"))]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    lines = measurements.read(tmp_path / "lines.jsonl")
    assert [measurements.matmul_rate(lines, [of(TRITON, commit=run)]) for run in "abc"] == [700, 800, None]
    assert measurements.matmul_rate(lines, [of(TRITON, commit="a"), of(FLEX, commit="b")]) is None


def test_speedup_is_over_what_both_measured() -> None:
    found = [of(TRITON, ms=1.0), of(TRITON, ms=2.0, direction="bwd"), of(TRITON, ms=9.0, pattern="dense")]
    found += [of(FLEX, ms=2.0), of(FLEX, ms=16.0, direction="bwd"), of(FLEX, ms=1.0, direction="mask")]
    ratio = measurements.speedup(found, TRITON, FLEX)
    assert (
        ratio is not None
        and (ratio.least, ratio.most, ratio.n_cases) == (2.0, 8.0, 2)
        and math.isclose(ratio.mean, 4.0)
    )
    assert measurements.speedup(found, TRITON, CUDNN) is None


@pytest.mark.parametrize(
    ("dense", "expected"),
    [(3.0, 0.75), (4.0, 1.0), (0.5, 0.25), (5.0, None)],
    ids=["between", "last", "first", "never"],
)
def test_break_even_is_where_the_curves_cross(dense: float, expected: float | None) -> None:
    assert measurements.break_even([0.25, 0.5, 1.0], [1.0, 2.0, 4.0], dense) == expected


def test_sweeps_are_told_with_their_break_even() -> None:
    said = pages.sweeps_section(SWEPT)
    # 6 ms lie between 1 ms at density 0.1 and 8 ms at 1
    assert (
        "blocksparse_flash, triton, forward, head_dim 64, beside dense blocksparse_flash, triton: level at density 0.74"
        in said
    )
    assert (
        all(f"results/{name}.png" in said for name in plots.SWEEPS) and "| FlexAttention | new mask | 64 | 3.00" in said
    )
    # 2 ms with a new mask, 1 ms with the same one: the change costs 1 ms, and theirs 1.5 ms
    assert "| blocksparse_flash, triton | new mask | 64 | 2.00 (1.80 to 2.20) | 1.00 | 5.0 |" in said
    assert (
        "- blocksparse_flash, triton, head_dim 64, new mask: 1.00 ms for the change; "
        "FlexAttention, new mask, takes 1.50 ms, 1.5 times as much." in said
    )
    assert pages.sweeps_section([]) == ""
    assert pages.everything(SWEPT).count("## ") == 5
    assert all(
        f"`python -m benchmarks.run.attention --sweep {name}`" in pages.everything(SWEPT) for name in plots.SWEEPS
    )


def test_growth_is_between_the_shortest_and_the_longest_of_each_direction() -> None:
    found = [of(TRITON, bench="length", n=n, ms=ms) for n, ms in ((8192, 1.0), (16384, 2.0), (65536, 9.0))]
    found += [of(TRITON, bench="length", n=65536, direction="bwd"), of(FLEX, bench="length", n=16384)]
    # a backward of one length, FlexAttention's lines and what launches take say nothing of growth
    assert findings.growth(found) == (
        "- blocksparse_flash, triton, forward, head_dim 64: 4 times the tokens, 16,384 to 65,536, take 4.5 times as long."
    )


def test_small_blocks_are_told_beside_those_of_a_tile() -> None:
    found = [
        of(TRITON, bench="block-size", pattern=f"random, {side}", ms=ms, direction=direction)
        for direction, slow in (("fwd", 1.0), ("bwd", 2.0))
        for side, ms in ((16, 8.0 * slow**2), (64, 3.0 * slow), (128, slow), (256, slow))
    ]
    assert findings.small_blocks([*found, of(FLEX, bench="block-size", pattern="random, 64", ms=99.0)]) == (
        "- Finer blocks, random, our backends: times the time in blocks of 128, 3.00 to 3.00 in blocks of 64, 8.00 to 16.00 in blocks of 16."
    )
    # without blocks of 128 there is nothing to compare with
    assert findings.small_blocks([one for one in found if one["pattern"] != "random, 128"]) == ""


def test_equal_bits_are_told_where_both_ways_were_measured() -> None:
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
    said = findings.equal_bits([*found, of(TRITON, bench="deterministic", direction="bwd", head_dim=128)])
    assert said == (
        "- blocksparse_flash, triton, backward, head_dim 64, `deterministic=True`: 1.10 to 1.25 times as long, over dense 1.25, "
        "local 1.10."
    )
    assert findings.equal_bits([of(TRITON, bench="deterministic", direction="bwd")]) == ""


def test_a_density_sweep_that_ended_early_tells_no_break_even() -> None:
    early = [one for one in SWEPT if one["bench"] == "density" and one["pattern"] != "random, 1"]
    assert plots.swept(early, "density") == [] and "results/density.png" not in pages.sweeps_section(early)
    # what was measured stands in the table of everything
    assert "| random, 0.1 |" in pages.everything(early)


def test_a_provider_is_told_up_to_where_it_was_measured_itself() -> None:
    swept = [one for one in SWEPT if one["bench"] == "density" and one["direction"] == "fwd"]
    ours = [{**one, "backend": "hopper", "ms": one["ms"] / 2} for one in swept if measurements.provider_of(one) == TRITON]
    few, dense = ours[0], ours[-1]
    assert (few["pattern"], dense["pattern"]) == ("random, 0.1", "dense")

    def told(*added: dict[str, Any]) -> list[str]:
        return [said for said in findings.break_evens([*swept, *added]) if said.startswith("blocksparse_flash, hopper")]

    (said,) = told(few, dense)
    assert said.endswith("faster at every density measured, up to 0.10")
    # a dense call alone crosses nothing
    assert told(dense) == []


def test_a_change_within_the_noise_has_no_ratio() -> None:
    found = [
        of(by, bench="change", pattern=pattern, ms=ms, direction="step")
        for by, pattern, ms in ((TRITON, "same mask", 2.0), (TRITON, "new mask", 2.1), (FLEX, "same mask", 2.0), (FLEX, "new mask", 9.0))
    ]  # fmt: skip
    assert pages.change_ratios(found) == (
        "- blocksparse_flash, triton, head_dim 64, new mask: 0.10 ms for the change, less than the 0.20 ms by which its steps vary."
    )
    found[1]["ms"], found[3]["ms"] = 3.0, 2.1
    assert pages.change_ratios(found).endswith("takes 0.10 ms, less than the 0.20 ms by which its steps vary.")


def test_the_readme_has_a_point_for_each_benchmark() -> None:
    equal = [
        of(("blocksparse_flash", name), bench="deterministic", direction="bwd", ms=ms)
        for name, ms in (("triton", 1.0), ("triton, deterministic", 1.2))
    ]
    longer = [of(TRITON, bench="length", n=n, direction=way, ms=n / 1024 + 8 * (way == "bwd")) for n in (16384, 32768) for way in ("fwd", "bwd")]  # fmt: skip
    said = pages.highlights({"attention": [*SWEPT, *longer, *equal], "small": []}).split("\n")
    assert said == [
        "- Length: at a fixed number of keys for each query 2 times the tokens, 16,384 to 32,768, take 2 to 2 times as long.",
        "- Density: faster than the fastest dense attention are `triton` up to 74% to 74% of all blocks.",
        "- Finer blocks, random, our backends: times the time in blocks of 128, 2.00 to 2.00 in blocks of 64.",
        (
            "- A mask that changes at each step, 1,024 tokens, adds to a step that is waited for: with blocksparse_flash, triton, 1.00 ms (new mask); "
            "with FlexAttention, 1.50 ms (new mask)."
        ),
        "- Equal bits in every run: a backward takes 1.20 to 1.20 times the time of blocksparse_flash, triton, head_dim 64.",
    ]
    assert pages.highlights({"attention": [], "small": []}) == ""


# ---- pictures ----


def test_every_sweep_is_drawn_with_everything_in_it() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    drawn = plots.figures([of(TRITON), of(FLEX), *SWEPT], measurements.read(pages.RESULTS / "masks.jsonl"))
    assert [*drawn] == ["speed", *plots.SWEEPS, "masks"]
    for name, figure in drawn.items():
        shown = {text.get_text() for text in figure.legends[0].get_texts()}
        assert any("blocksparse_flash" in text for text in shown), name
        assert name == "masks" or any("FlexAttention" in text for text in shown), name


def test_what_a_change_costs_is_told_for_each_length() -> None:
    longer = [{**one, "n": 4096, "ms": 10 * one["ms"]} for one in SWEPT if one["bench"] == "change"]
    said = pages.sweeps_section([*SWEPT, *longer])
    assert "new mask: 1.00 ms for the change" in said and "new mask: 10.00 ms for the change" in said
    assert said.count("--sweep change`") == 2
    # without the same mask beside it nothing is told, and where the clock shows no difference nothing is compared
    assert pages.change_ratios([one for one in longer if one["pattern"] != "same mask"]) == ""
    same = pages.change_ratios([{**one, "ms": 1.0} for one in longer])
    assert "new mask: 0.00 ms for the change, less than" in same and "FlexAttention" not in same
    faster = [
        {**one, "ms": 1.0} if one["provider"] == "flex" and one["pattern"] != "same mask" else one for one in longer
    ]
    assert "FlexAttention" not in pages.change_ratios(faster)
    # steps in a row have a table of their own, beside nothing but each other
    rows = [{**one, "direction": "steps", "ms": 1 + (one["ms"] - 1) / 4} for one in longer]
    said = pages.change_section([*longer, *rows])
    assert said.index("A step that is waited for:") < said.index("A step of many in a row:")
    assert "new mask: 10.00 ms for the change" in said and "new mask: 2.50 ms for the change" in said
    assert "A step of many in a row:" not in pages.change_section(longer)
    # a step that seems shorter with a new mask, by less than such steps vary
    noisy = [
        {**one, "ms": 0.9, "ms_p20": 0.8, "ms_p80": 1.0} if one["pattern"] == "new mask" else one for one in longer
    ]
    assert pages.change_ratios(noisy).endswith("less than the 0.20 ms by which its steps vary.")
    assert "less than the 0.20 ms by which steps vary (new mask)" in findings.changes(noisy)[0]
    points = findings.changes([*longer, *rows])
    assert [point.split(" adds to ")[1].split(":")[0] for point in points] == [*measurements.TIMED.values()]


def test_every_provider_has_a_name_and_a_colour() -> None:
    assert measurements.LABELS.keys() == plots.COLOURS.keys()
    assert measurements.label(("someone", "new")) == "someone, new"


@pytest.mark.parametrize(("count", "expected"), [(2048, "2K"), (1 << 20, "1M"), (1000, "1000"), (1536, "1536")])
def test_counts_are_short(count: int, expected: str) -> None:
    assert plots.short(count) == expected
