"""The report shows its lines and never labels a stand-in as Long Range Arena."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")
pytest.importorskip("pandas", reason="needs the extra [lra]")

from benchmarks.lra import __main__ as command
from benchmarks.lra import recipe, reporting, scoring, speed, tables
from benchmarks.lra.data import LraData, Rules
from benchmarks.lra.published import STEPS
from benchmarks.lra.scoring import Result
from benchmarks.lra.tasks import Sizes

RESULT = Result("pathx", 0.70, 0.54, "positions of the markers", 0.66, 0.5, 20_000, "generated", 0.6)
FACTS = {
    "is_lra": True, "source": "generated", "mask": "butterfly | local(window=128)", "n_layers": 6, "embed_dim": 128,
    "weights": 10, "steps": 6000, "batch_size": 64, "device": "cpu", "keys": 1979.0, "recipe": {}, "seed": 0,
    "start": None, "checkpoint": None, "samples": 384_000, "samples_before": 16_000, "device_hours": 0.5,
    "device_hours_before": 0.25, "test_seed": 0,
}  # fmt: skip


def timing(**changes: Any) -> dict[str, Any]:
    line = {**dict.fromkeys(speed.KEYS), **speed.untimed("ok")}
    line |= {"bench": "lra_speed", "direction": "step", "pattern": "dense", "provider": "materialized"}
    line |= {"device": "a GPU", "documents": 1, "dropout_p": 0.1}
    return {**line, "n": 1024, "batch": 32, "ms": 10.0, **changes}


def runtime(**changes: Any) -> dict[str, Any]:
    size = {"batch": 16, "heads": 8, "head_dim": 64}
    return timing(bench="lra_runtime", direction="fwd+bwd", peak_bytes=2**30, **{**size, **changes})


def sized(task: str, **changes: Any) -> dict[str, Any]:
    """Of the published size, which is 1024 tokens only here and there."""
    batch, documents, n = STEPS[task]
    return timing(task=task, **{"batch": batch, "documents": documents, "n": n, **changes})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: one of Path-X, tested twice and taken up once, one of a stand-in."""
    folder = tmp_path / "runs"
    scoring.append_test(folder / "ours" / "pathx", Result(**{**vars(RESULT), "accuracy": 0.123}), **FACTS)
    scoring.append_test(folder / "ours" / "pathx", RESULT, **FACTS)
    text = Result("text", 0.9, 0.89, "most frequent label", 0.5, 0.5, 100, "synthetic stand-in, not Long Range Arena")
    scoring.append_test(folder / "toy", text, **{**FACTS, "is_lra": False, "source": "stand-in", "mask": None})
    for run, source, version, rows in [
        ("ours/pathx", "fresh", 0, "loss,step,validation_accuracy\n0.7,5,\n,9,0.5\n,19,0.1\n"),
        ("ours/pathx", "fresh", 1, "loss,step,validation_accuracy\n,19,0.6\n"),
        ("toy", "stand-in", 0, "step,validation_accuracy\n9,0.8\n"),
    ]:
        log = folder / run / f"version_{version}"
        log.mkdir(parents=True)
        (log / "metrics.csv").write_text(rows)
        (log / "config.yaml").write_text(json.dumps({"data": {"task": "pathx", "source": source}}))
    return folder


def test_a_report_has_the_last_test_of_each_run_beside_its_floor(runs: Path, tmp_path: Path) -> None:
    speed = tmp_path / "speed.jsonl"
    speed.write_text(json.dumps(runtime()) + "\n" + json.dumps(runtime(batch=1)) + "\n")
    reporting.report(runs=runs, speed=speed, out=tmp_path / "out")
    written = [*(tmp_path / "out").iterdir()]
    assert sorted(path.name for path in written) == [
        *("accuracy.png", "learning-curves.png", "length-a-gpu-1-8-64.png", "length-a-gpu-16-8-64.png", "report.md")
    ]
    assert all(path.stat().st_size for path in written)
    text = (tmp_path / "out" / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| pathx"))
    assert "| 384,000 (with earlier stages 400,000) | 0.50 (with earlier stages 0.75) |" in row
    best = "S5 98.6; Mega 98.0; Transformer, self-pretrained 93.0"
    shown = f"| 70.0% ± 0.3% | 54.0%, positions of the markers | 16.0 | 66.0% (50%) | 60.0% | {best} "
    shown += "| 20,000, seed 0, **tested 2 times** |"
    assert shown in row
    assert "| ours/path256 | not run |" in text and "| ours/pathx | not run |" not in text
    assert "butterfly \\| local" in row and "12.3%" not in text
    # once for times, once for memory, and not beside another batch
    assert text.count("| PyTorch, A100 (paper) | 3.67 |") == text.count("| PyTorch, A100 (paper) | 1,184 |") == 1
    assert text.count("| materialized, dense | 1,024 |") == 2


def begun(
    folder: Path, *, logged: int | None = None, checkpoint: int | None = None, max_steps: int | None = None
) -> None:
    """The folder of a run without a test. logged, checkpoint: steps in its log and of its checkpoint."""
    if logged is not None:
        log = folder / "version_0"
        log.mkdir(parents=True)
        (log / "metrics.csv").write_text(f"loss,step,validation_accuracy\n0.7,{logged - 1},\n")
        if max_steps is not None:
            limit = {"minutes": 5} if checkpoint else {}
            settings = {"data": {"task": "pathx"}, "trainer": {"max_steps": max_steps}, **limit}
            (log / "config.yaml").write_text(json.dumps(settings))
    if checkpoint is not None:
        (folder / "checkpoints").mkdir(parents=True)
        torch.save({"global_step": checkpoint}, folder / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("size", [0, 100, 1000, None], ids=str)
def test_a_checkpoint_that_is_cut_off_is_named(runs: Path, tmp_path: Path, size: int | None) -> None:
    begun(runs / "mine", logged=20, checkpoint=19, max_steps=60)
    path = runs / "mine" / "checkpoints" / "last.ckpt"
    if size is None:
        torch.save({"weights": {}}, path)
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"last\.ckpt is not a whole checkpoint \(.*\): copy it again, or remove it"):
        reporting.report(runs=runs, speed=None, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.csv", b"", None),
        ("metrics.csv", b"loss,step,validation_accuracy\n0.7,", None),
        (
            "metrics.csv",
            b"loss,step\n0.7,5\n0.7,5,5,5\n",
            r"metrics\.csv is not a log \(.*\): copy it again, or remove",
        ),
        ("metrics.csv", b"\xff\xfe", r"metrics\.csv is not a log \(.*\): copy it again, or remove"),
        ("config.yaml", b"", r"config\.yaml is not a configuration: copy it again, or remove it"),
        ("config.yaml", b"data: [", r"config\.yaml is not a configuration: copy it again, or remove it"),
        ("../test.jsonl", b'{"task": "pa', r"test\.jsonl, line 1 is not JSON .*: remove this line"),
    ],
)
def test_files_of_a_run_that_was_killed_are_read_or_named(
    runs: Path, tmp_path: Path, name: str, content: bytes, message: str | None
) -> None:
    """Regression: an empty log, which a kill leaves, and others ended the report without the name of the file."""
    (runs / "toy" / "version_0" / name).write_bytes(content)
    options: dict[str, Any] = {"runs": runs, "speed": None, "out": tmp_path / "out"}
    if message is None:
        reporting.report(**options)
        assert (tmp_path / "out" / "report.md").exists()
        return
    with pytest.raises(ValueError, match=message):
        reporting.report(**options)


def test_a_run_without_a_test_says_how_far_it_is_and_how_to_continue(runs: Path, tmp_path: Path) -> None:
    begun(runs / "ours" / "pathx-mixed", logged=730, checkpoint=500)
    begun(runs / "ours" / "pathx-64", logged=50)
    begun(runs / "ours" / "listops" / "seed-2", checkpoint=1000)
    begun(runs / "ours" / "image", checkpoint=recipe.stages("image")[0].steps)
    begun(runs / "ablation" / "pathx-random", checkpoint=4000)
    begun(runs / "mine", logged=20, checkpoint=19, max_steps=60)
    begun(runs / "endless", logged=20, max_steps=-1)
    begun(runs / "unknown", logged=20)
    # a stage of other runs, and a run whose test is in the report
    begun(runs / "ours" / "path256-128", checkpoint=recipe.stages("path256")[3].steps)
    begun(runs / "ours" / "pathx" / "seed-1", checkpoint=10)
    scoring.append_test(runs / "ours" / "pathx" / "seed-1", RESULT, **FACTS)
    reporting.report(runs=runs, speed=None, out=tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    after = text.split("## Not finished")[1]
    assert after.split("## Not run")[0].split() == " ".join([
        tables.UNFINISHED,
        "| run | state | to continue |",
        "|---|---|---|",
        "| ablation/pathx-random | interrupted after step 4,000 of 6,200; checkpoint of step 4,000 |",
        "`python -m benchmarks.lra recipe ablation/pathx-random` |",
        "| endless | interrupted after step 20; no checkpoint: begins anew |",
        f"`python -m benchmarks.lra fit --config {runs}/endless/version_0/config.yaml` |",
        "| mine | interrupted after step 20 of 60; checkpoint of step 19 |",
        f"`python -m benchmarks.lra fit --config {runs}/mine/version_0/config.yaml --ckpt_path last --minutes null` |",
        "| ours/image | trained (20,000 of 20,000 steps), not tested | `python -m benchmarks.lra recipe image` |",
        "| ours/listops/seed-2 | interrupted after step 1,000 of 24,000; checkpoint of step 1,000 |",
        '`python -m benchmarks.lra recipe listops --seeds "[2]"` |',
        "| ours/pathx-64 | interrupted after step 50 of 13,996; no checkpoint: begins anew |",
        "`python -m benchmarks.lra recipe pathx-64` |",
        "| ours/pathx-mixed | interrupted after step 730 of 7,000; checkpoint of step 500 |",
        "`python -m benchmarks.lra recipe pathx-mixed` |",
        "| unknown | interrupted after step 20; no checkpoint: begins anew |  |",
    ]).split()  # fmt: skip
    # of no seed
    assert "| ours/text | not run |" in after
    for name in ("ours/pathx-mixed", "ours/listops", "ours/image", "ablation/pathx-random", "ours/pathx"):
        assert f"| {name} | not run |" not in after


def test_a_run_with_a_checkpoint_alone_is_reported(tmp_path: Path) -> None:
    begun(tmp_path / "runs" / "ours" / "pathx", checkpoint=500)
    reporting.report(runs=tmp_path / "runs", speed=None, out=tmp_path / "out")
    assert "| ours/pathx | interrupted after step 500 of 6,200;" in (tmp_path / "out" / "report.md").read_text()


def test_a_stand_in_is_never_called_long_range_arena(runs: Path, tmp_path: Path) -> None:
    reporting.report(runs=runs, speed=tmp_path / "none.jsonl", out=tmp_path / "out")
    before, after = (tmp_path / "out" / "report.md").read_text().split("## NOT Long Range Arena")
    assert "| toy |" in after and "| toy |" not in before
    assert "**no**" in after
    figure = reporting.learning_curves(reporting.curves_of(runs), reporting.tests_of(runs))
    assert [axes.get_title() for axes in figure.axes] == [
        "pathx, fresh data",
        "pathx, stand-in data: NOT Long Range Arena",
    ]


def test_released_files_and_generated_data_have_tables_of_their_own() -> None:
    both = [line_of("r", source=source) for source in ("official", "generated")]
    titles = [section for section in tables.accuracy_sections(both) if section.startswith("##")]
    assert titles == [
        "## Accuracy on the released files of Long Range Arena",
        "## Accuracy on data made by the rules of Long Range Arena",
        "## Published accuracies, in percent",
    ]


def line_of(run: str = "ours/pathx", **changes: Any) -> dict[str, Any]:
    return {**vars(RESULT), **FACTS, "standard_error": 0.01, "run": run, "tests": 1, **changes}


def test_the_better_shortcut_counts() -> None:
    """2,000 samples of ListOps: the distance to the root operator would be 26 points."""
    deep = {"one_deep": 0.6, "one_deep_balanced": 0.494, "floor": 0.373, "accuracy": 0.634, "task": "listops"}
    (_, text, *_) = tables.accuracy_sections([line_of(**deep)])
    assert "| 37.3%, positions of the markers; 60.0%, one operator deep | 3.4 |" in text
    assert "| 66.0% (50%; one operator deep 49.4%) |" in text
    assert "**no**" in tables.accuracy_sections([line_of(**deep, standard_error=0.02)])[1]


def test_runs_that_differ_in_their_seed_have_a_mean() -> None:
    found = [line_of(accuracy=0.7), line_of("ours/pathx/seed-1", accuracy=0.8), line_of("ours/path256")]
    row = "| ours/pathx | 20,000, seed 0 | 2 | 75.0% ± 7.1% |"
    assert tables.seeds_table(found).splitlines()[2:] == [row]
    assert tables.seeds_table([found[0], {**found[1], "test_seed": 1}]) == ""


def test_masks_are_compared_at_equal_keys_from_one_checkpoint() -> None:
    found = [line_of("ours/pathx", start="abc"), line_of("ablation/pathx-local", start="abc", keys=1984.0)]
    title, table, *more = tables.ablation_section(found)
    assert title == "## Masks at equal keys, all from the checkpoint abc" and more == []
    assert table.count("\n") == 3
    for odd in ({"keys": 1900.0}, {"start": "other"}):
        other = line_of("ablation/pathx-random", **{"start": "abc", **odd})
        _, table, said = tables.ablation_section([*found, other])
        assert "pathx-random" not in table
        assert said.startswith("Not compared, since keys or checkpoint differ: ablation/pathx-random (")
    assert tables.ablation_section(found[:1]) == []


@pytest.mark.parametrize(
    ("task", "source", "changes", "is_lra"),
    [
        ("pathx", "generated", {}, True),
        ("pathx", "fresh", {}, True),
        ("text", "official", {}, True),
        ("text", "stand-in", {}, False),
        ("listops-small", "generated", {}, False),
        ("pathfinder64", "generated", {}, False),
        ("pathx", "generated", {"rules": Rules(contour_length=6)}, False),
        ("pathx", "generated", {"rules": Rules(changes={"distractor_dashes": 35})}, False),
        ("pathx", "generated", {"sizes": Sizes(10, 10, 19_999)}, False),
    ],
)
def test_what_is_long_range_arena(task: str, source: Any, changes: dict[str, Any], is_lra: bool) -> None:
    assert scoring.belongs(LraData(task, source, **changes)) == is_lra


def test_a_run_that_was_taken_up_has_one_curve(runs: Path) -> None:
    assert reporting.curves_of(runs)[0] == reporting.Curve("ours/pathx", "pathx, fresh data", True, {9: 0.5, 19: 0.6})


@pytest.mark.parametrize(
    "data",
    [
        {"task": "listops-small"},
        {"task": "pathx", "rules": {"contour_length": 6}},
        {"task": "text", "source": "stand-in"},
    ],
)
def test_a_curve_says_what_is_not_long_range_arena(data: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "version_0"
    log.mkdir()
    (log / "metrics.csv").write_text("step,validation_accuracy\n9,0.8\n")
    (log / "config.yaml").write_text(json.dumps({"data": data}))
    curve = reporting.curve_of(tmp_path, "run")
    assert curve is not None and not curve.is_lra
    assert reporting.learning_curves([curve], []).axes[0].get_title().endswith(": NOT Long Range Arena")


def test_the_geometric_mean_is_over_dense_attention_with_its_scores_in_memory() -> None:
    ours = {"provider": "blocksparse_flash", "backend": "triton"}
    found = [sized(task) for task in tables.TASKS]
    # 2, 2, 2, 2, 32: 2 * 16 ** (1 / 5) = 3.48
    found += [sized(task, ms=10 / 32 if task == "text" else 5.0, **ours) for task in tables.TASKS]
    found += [sized(task, ms=4.0, pattern="butterfly", **ours) for task in tables.TASKS]
    rows = {row.split(" | ")[0][2:]: row for row in tables.steps_table(tables.frame(found)).splitlines()}
    assert rows["blocksparse_flash (triton), dense"].endswith(
        "| 0.312 (32.00x) | 5 (2.00x) | 5 (2.00x) | 5 (2.00x) | **3.48x** | 2.4x |"
    )
    assert rows["blocksparse_flash (triton), butterfly"].endswith("| **2.50x** | 2.8x |")
    assert rows["materialized, dense"].endswith("| **1.00x** |  |")


def test_what_was_not_timed_has_no_share_in_a_mean() -> None:
    found = [sized(task) for task in tables.TASKS]
    ours = [sized(task, ms=5.0, provider="sdpa") for task in tables.TASKS]
    missing = {**ours[0], **speed.untimed("out of memory")}
    other_size = {**ours[0], "batch": 16}
    for odd in (missing, other_size):
        lines_of_steps = tables.frame([*found, odd, *ours[1:]])
        gained = tables.speedups(lines_of_steps).dropna(subset="gain")
        assert {*gained.loc[gained["provider"] == "sdpa", "task"]} == {*tables.TASKS[1:]}
        assert "**2.00x**" not in tables.steps_table(lines_of_steps)
    assert "| out of memory |" in tables.steps_table(tables.frame([*found, missing, *ours[1:]]))


def test_the_paper_stands_beside_its_own_sizes_only() -> None:
    found = [
        sized(task, provider=provider) for task in tables.TASKS for provider in ("materialized", "blocksparse_flash")
    ]
    tiny = [{**line, "n": 256} for line in found]
    assert "2.4x" in tables.steps_table(tables.frame(found)) and "2.4x" not in tables.steps_table(tables.frame(tiny))
    assert tables.speed_sections(found)[0] == "## Training steps on a GPU"
    assert tables.speed_sections(tiny)[0] == "## Training steps on a GPU, NOT the sizes of Long Range Arena"


def test_steps_with_and_without_dropout_have_rows_of_their_own() -> None:
    """All over the same step: dense, with a score matrix and dropout."""
    found = [sized(task) for task in tables.TASKS]
    for provider in ("blocksparse_flash", "flex"):
        for ms, dropout_p in ((5.0, 0.1), (4.0, 0.0)):
            found += [sized(task, provider=provider, ms=ms, dropout_p=dropout_p) for task in tables.TASKS]
    rows = {row.split(" | ")[0][2:]: row for row in tables.steps_table(tables.frame(found)).splitlines()}
    for name, end in (
        ("blocksparse_flash, dense", "**2.00x** | 2.4x |"),
        ("blocksparse_flash, dense, without attention dropout", "**2.50x** |  |"),
        ("flex, dense, dropout before the softmax", "**2.00x** |  |"),
        ("flex, dense, without attention dropout", "**2.50x** |  |"),
    ):
        assert rows[name].endswith(end)


def test_runs_that_are_not_there_replace_no_report(tmp_path: Path) -> None:
    (tmp_path / "speed.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"runs must be a folder, got .*typo, which is none"):
        reporting.report(runs=tmp_path / "typo", speed=tmp_path / "speed.jsonl", out=tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to report: no test\.jsonl, metrics\.csv or last\.ckpt"):
        reporting.report(runs=tmp_path, speed=tmp_path / "speed.jsonl", out=tmp_path / "out")


def test_the_command_says_what_it_wrote(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command.main(["report", "--runs", str(runs), "--speed", str(tmp_path / "none.jsonl"), "--out", str(out)])
    assert str(out / "report.md") in capsys.readouterr().out
