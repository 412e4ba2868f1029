"""Data module: every source gives the splits of a task, and scores come with their floor."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")

from benchmarks.lra import __main__ as command
from benchmarks.lra import listops, pathfinder, scoring, sources, weights
from benchmarks.lra.data import LraData, Rules, Stage, generator_of
from benchmarks.lra.tasks import TASKS, Sizes, find

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated sets, for all tests."""
    return tmp_path_factory.mktemp("sets")


def data(task: str, root: Path, source: Any = "generated", **more: Any) -> LraData:
    module = LraData(task, source, root=root, batch_size=4, sizes=Sizes(1000, 500, 1000), workers=0, **more)
    module.prepare_data()
    module.setup("test")
    return module


@pytest.mark.parametrize(("n_devices", "expected"), [(None, 15), (1, 15), (4, 3), (32, 0)])
def test_the_processes_of_a_machine_share_its_cores(
    n_devices: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    module, chosen = LraData("pathfinder32"), LraData("pathfinder32", workers=2)
    for each in (module, chosen):
        each.trainer = None if n_devices is None else SimpleNamespace(num_devices=n_devices)
    assert (module.workers, chosen.workers) == (expected, 2)


def put_pathfinder(folder: Path, count: int) -> sources.PathfinderSource:
    """Images of contours of 6, in the format of the release."""
    source = sources.PathfinderSource(pathfinder.preset(32, contour_length=6))
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for index, record in enumerate(source.draw("train", np.arange(count))):
        Image.fromarray(record["image"]).save(folder / "imgs" / "0" / f"sample_{index}.png")
        lines.append(f"imgs/0 sample_{index}.png {index} {record['label']} 1.0 6 2 2 0.5 1 1\n")
    (folder / "metadata" / "0.npy").write_text("".join(lines))
    return source


def test_generated_splits_are_those_of_the_source(root: Path) -> None:
    module = data("listops-small", root)
    source = generator_of(find("listops-small"), Rules())
    assert [len(module.rows[split]) for split in ("train", "validation", "test")] == [1000, 500, 1000]
    batch = next(iter(module.val_dataloader()))
    expected = source.draw("validation", np.arange(4))
    assert (batch.tokens[:, 0].numpy() == expected["tokens"][:, : batch.tokens.shape[2]]).all()
    assert next(iter(module.train_dataloader())).labels.shape == (4,)


def test_fresh_samples_go_through_the_stages(root: Path) -> None:
    rules = Rules(contour_length=6, stages=[Stage(6, {"seed_distances": [3, 10], "is_central": False})])
    module = data("pathfinder32", root, "fresh", rules=rules)
    loader = iter(module.train_dataloader())
    first, second = next(loader), next(loader)
    task = generator_of(find("pathfinder32"), rules).draw("fresh", np.arange(8))["image"].reshape(8, 1, -1)
    assert not (first.tokens.numpy() == task[:4]).all(axis=(1, 2)).any()
    assert (second.tokens.numpy() == task[4:]).all(axis=(1, 2)).tolist() == [False, False, True, True]


def test_a_stage_may_mix_rules(root: Path) -> None:
    mixture = [{"contour_length": 3}, {"contour_length": 5, "distractor_dashes": 0}]
    module = data("pathfinder32", root, "fresh", rules=Rules(stages=[Stage(4, {"is_central": False}, mixture=mixture)]))
    batch = next(iter(module.train_dataloader()))
    task = generator_of(find("pathfinder32"), Rules())
    assert isinstance(task, sources.PathfinderSource)
    for place, image in zip(batch.places.tolist(), batch.tokens[:, 0].numpy(), strict=True):
        rules = dataclasses.replace(task.rules, is_central=False, **mixture[place % 2])
        drawn = sources.PathfinderSource(rules).draw("fresh", np.array([place]))
        assert (image == drawn["image"].reshape(-1)).all()
    with pytest.raises(ValueError, match=r"stages: changes must be fields of .*, got \['contour'\]"):
        data("pathfinder32", root, "fresh", rules=Rules(stages=[Stage(4, {}, mixture=[{"contour": 3}])]))


def test_a_changed_task_is_changed_in_every_split_and_not_long_range_arena(root: Path) -> None:
    rules = Rules(contour_length=6, changes={"distractor_dashes": 0, "margins": [2]})
    module = data("pathfinder32", root, "fresh", rules=rules)
    preset = dataclasses.replace(pathfinder.preset(32, contour_length=6), distractor_dashes=0, margins=(2,))
    for split, loader in (("fresh", module.train_dataloader()), ("validation", module.val_dataloader())):
        expected = sources.PathfinderSource(preset).draw(split, np.arange(4))["image"]
        assert (next(iter(loader)).tokens[:, 0].numpy() == expected.reshape(4, -1)).all()
    assert Rules().are_published
    assert not Rules(changes={"margins": [2]}).are_published


def augmented(source: str, root: Path, folder: Path) -> LraData:
    """Data whose training images are flipped and turned; the released files are of contours of 6."""
    if source == "generated":
        return data("pathfinder32", root, rules=Rules(contour_length=6), augmentation="symmetries")
    put_pathfinder(folder / "pathfinder32" / "curv_contour_length_14", 100)
    module = LraData("pathfinder32", "official", root=folder, batch_size=4, workers=0, augmentation="symmetries")
    module.setup("fit")
    return module


@pytest.mark.parametrize("source", ["generated", "official"])
def test_only_training_images_are_flipped_and_turned(source: str, root: Path, tmp_path: Path) -> None:
    module = augmented(source, root, tmp_path)
    n, rows = len(module.rows["train"]), module.rows["train"]
    batches = list(itertools.islice(module.train_dataloader(), n // 4))
    places = np.concatenate([batch.places.numpy() for batch in batches])
    # an epoch: no stored image twice
    assert len(set(places.tolist())) == n // 4 * 4
    versions = []
    for batch in batches[:20]:
        stored = rows.take(batch.places.numpy())
        assert torch.equal(batch.labels, stored.labels)
        for changed, image in zip(batch.tokens.view(-1, 32, 32), stored.tokens.view(-1, 32, 32), strict=True):
            ways = [torch.rot90(way, turns) for way in (image, image.T) for turns in range(4)]
            (version,) = (version for version, way in enumerate(ways) if torch.equal(way, changed))
            versions.append(version)
    assert len(set(versions)) == 8
    for split, loaders in (("validation", [module.val_dataloader()]), ("test", module.test_dataloader())):
        for batch in itertools.islice(loaders[0], 5):
            assert torch.equal(batch.tokens, module.rows[split].take(batch.places.numpy()).tokens)
    assert module.description.endswith("; training images flipped and turned")


def test_released_files_are_read(tmp_path: Path) -> None:
    samples = listops.generate(30, listops.PRESETS["small"], seed=0)
    for place, split in enumerate(("train", "val", "test")):
        path = tmp_path / "listops-1000" / f"basic_{split}.tsv"
        path.parent.mkdir(exist_ok=True)
        part = samples[10 * place : 10 * place + 10]
        lines = [f"{listops.to_text(sample.tokens)}\t{sample.label}\n" for sample in part]
        path.write_text("".join(["Source\tTarget\n", *lines]))
    module = data("listops", tmp_path, "official")
    batch = next(iter(module.test_dataloader()[0]))
    assert [
        listops.evaluate(row[:length].tolist())
        for row, length in zip(batch.tokens[:, 0], batch.lengths[:, 0], strict=True)
    ] == batch.labels.tolist()
    result = scoring.score(module, np.array([sample.label for sample in samples[20:]]))
    assert (result.accuracy, result.balanced) == (1.0, 1.0)
    assert result.data == "official release"


def test_making_stand_ins_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LraData("image", "stand-in", root=tmp_path, sizes=Sizes(1000, 20, 30), workers=0).setup("fit")
    said = capsys.readouterr().out
    assert said == "making stand-in data of image: 1,000 train, 20 validation, 30 test; data.sizes changes this\n"


def test_stand_ins_are_never_called_long_range_arena(tmp_path: Path) -> None:
    for task in ("text", "retrieval", "image"):
        module = LraData(task, "stand-in", root=tmp_path, batch_size=2, sizes=Sizes(4, 4, 4), workers=0)
        module.setup("fit")
        assert next(iter(module.train_dataloader())).tokens.shape[1] == TASKS[task].n_documents
        assert "not Long Range Arena" in str(scoring.score(module, np.zeros(4, dtype=np.int64)))


def test_a_guess_of_one_label_has_the_balanced_accuracy_of_chance(tmp_path: Path) -> None:
    module = LraData("image", "stand-in", root=tmp_path, sizes=Sizes(2, 2, 200), workers=0)
    module.setup("fit")
    labels = np.concatenate([batch.labels.numpy() for batch in module.test_dataloader()[0]])
    most = np.bincount(labels).argmax()
    result = scoring.score(module, np.full(200, most))
    assert result.accuracy == result.floor
    assert result.balanced == pytest.approx(0.1)


def test_pathfinder_is_scored_beside_its_markers(root: Path) -> None:
    module = data("pathfinder32", root, rules=Rules(contour_length=6))
    truth = module.stored("test")[:]["label"].astype(np.int64)
    right = scoring.score(module, truth)
    assert (right.accuracy, right.balanced) == (1.0, 1.0)
    # of 1,000 samples a reader learns less than there is to know, 0.741
    assert 0.55 < right.floor < 0.76
    assert "learned from 1,000 samples" in str(right)


def test_the_floor_of_released_images_is_found_in_their_pixels(tmp_path: Path) -> None:
    put_pathfinder(tmp_path / "pathfinder32" / "curv_contour_length_14", 1000)
    module = LraData("pathfinder32", "official", root=tmp_path, workers=0)
    module.setup("test")
    result = scoring.score(module, np.zeros(100, dtype=np.int64))
    assert result.n == 100
    assert 0.4 < result.floor < 0.9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LraData("listop"), "task must be one of listops, "),
        (lambda: generator_of(find("text"), Rules()), 'cannot be generated: source="official" reads its files'),
        (lambda: LraData("listops", rules=Rules(stages=[Stage(1, {})])), 'source="fresh" uses them'),
        (
            lambda: LraData("image", "official", augmentation="symmetries"),
            "augmentation is only for Pathfinder, .*'image'",
        ),
        (
            lambda: LraData("pathx", "fresh", augmentation="symmetries"),
            "augmentation is only for stored training images",
        ),
        (lambda: LraData("pathx", augmentation="flips"), "augmentation must be 'symmetries' or None, got 'flips'"),
        (lambda: LraData("listops-small", "official").setup("fit"), "has no released files"),
        (lambda: LraData("listops", "stand-in").setup("fit"), "has no stand-in"),
        (
            lambda: data("listops-small", Path(), "fresh", rules=Rules(stages=[Stage(1, {"depth": 3})])),
            r"changes must be fields of .* got \['depth'\]",
        ),
        (
            lambda: generator_of(find("listops"), Rules(changes={"depth": 3})),
            r"rules: changes must be .* got \['depth'\]",
        ),
        (
            lambda: command.generate("listops-small", contour_length=9),
            "contour_length is only for Pathfinder, got task='listops-small'",
        ),
        (lambda: command.generate("listops-small", splits=()), "splits must name one split or more, got none"),
        (lambda: command.generate("listops-small", seed=-1), r"seed must be from 0 to 2\*\*32 - 1, got -1"),
        (lambda: command.generate("listops-small", seed=2**32), r"seed must be from 0 to 2\*\*32 - 1, got 4294967296"),
        (lambda: weights.keep("listops", seed=-1), r"seed must be from 0 to 2\*\*32 - 1, got -1"),
        (lambda: weights.keep("listops", seed=3), r'train it with `recipe listops --seeds "\[3\]"`'),
        (lambda: command.order_seed(-3), r"seed_everything must be from 0 to 2\*\*32 - 1, got -3"),
        (lambda: command.floors("listops-small", seed=-1), r"seed must be from 0 to 2\*\*32 - 1, got -1"),
        (lambda: LraData("pathx", test_seed=-1), r"test_seed must be from 0 to 2\*\*32 - 1, got -1"),
        (lambda: LraData("pathx", workers=-1), "workers must be 0 or more, got -1"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    make: Any, message: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=message):
        make()


# ---- commands ----


def test_generate_says_what_it_made(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "listops-small", "--root", str(root), "--splits", '["test"]', "--workers", "1"]
    command.main(arguments)
    first = capsys.readouterr().out
    assert "test: 1000 samples, SHA-256 " in first
    command.main(arguments)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "listops-small", "--root", "file", "--splits", '["test"]', "--workers", "1"],
        # before anything is measured
        ["speed", "--quick", "true", "--out", "folder"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Regression: a traceback, of `speed` after the measurement."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match=r"(generate|speed): .*(file|folder)"):
        command.main(arguments)
    assert capsys.readouterr().out == ""


def test_an_interrupted_command_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(task: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "generate", interrupted)
    with pytest.raises(SystemExit, match="130"):
        command.main(["generate", "listops"])
    assert "run the same command again to continue" in capsys.readouterr().err


def test_a_scheduler_interrupts_as_a_terminal_does(tmp_path: Path) -> None:
    """It sends SIGTERM, after which nothing was said."""
    options = ["generate", "listops", "--root", str(tmp_path), "--splits", '["train"]', "--workers", "1"]
    arguments = [sys.executable, "-m", "benchmarks.lra", *options]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not list(tmp_path.rglob("train")) and time.monotonic() < end:
            time.sleep(0.1)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.endswith("interrupted; run the same command again to continue\n")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_floors_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["floors", "listops-small", "--root", str(root), "--workers", "1"])
    printed = capsys.readouterr().out
    assert "root operator alone" in printed
    assert "1 operator(s) deep" in printed


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--help"])
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("batch_size", [0, -4])
def test_batches_hold_something(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size must be 1 or more, got {batch_size}"):
        LraData("listops-small", batch_size=batch_size)
