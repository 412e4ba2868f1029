"""Training follows its settings and resumes exactly after an interruption."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba", reason="needs the extra [lra]")
pytest.importorskip("lightning", reason="needs the extra [lra]")
pytest.importorskip("jsonargparse", reason="needs the extra [lra]")

import lightning
from lightning.pytorch import Callback

from benchmarks.lra import __main__ as command
from benchmarks.lra import listops, scoring, training
from benchmarks.lra.data import LraData
from benchmarks.lra.model import Architecture
from benchmarks.lra.tasks import Sizes
from benchmarks.lra.training import Experiment, Recipe, rate_at
from benchmarks.run import checkpoints
from blocksparse_flash.nn import EncoderBlock

ROOT = Path(__file__).parents[3]
TINY = {
    "embed_dim": 16,
    "num_heads": 1,
    "n_layers": 1,
    "hidden_dim": 16,
    "mask": "butterfly | global_tokens(tokens=16)",
    "block_size": 16,
    # dropout of both kinds: both streams of random numbers have to go on
    "dropout_p": 0.1,
    "attention_dropout_p": 0.1,
}


@pytest.fixture(autouse=True)
def lightning_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """seed_everything changes global streams; Ctrl-C makes Lightning ignore the next; it warns of other arguments."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.lra"])
    before = signal.getsignal(signal.SIGINT)
    with torch.random.fork_rng():
        yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated sets, for all tests."""
    return tmp_path_factory.mktemp("sets")


def run(folder: Path, root: Path, verb: str = "fit", *more: str, **changes: Any) -> None:
    settings = {
        "data": {
            "task": "listops-small",
            "source": "generated",
            "root": str(root),
            "batch_size": 4,
            "sizes": {"train": 20, "validation": 8, "test": 40},
            "workers": 0,
        },
        "model": {"architecture": TINY, "recipe": {"warmup": 2}},
        "checkpoint": {"every_n_train_steps": 3},
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 8,
            "val_check_interval": 4,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
        },
    }
    for name, change in changes.items():
        settings[name] = {**settings[name], **change}
    folder.mkdir(exist_ok=True)
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    command.main([verb, "--config", str(path), *more])


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, of all goes, later ones over earlier ones."""
    found = {}
    for path in sorted(folder.glob("version_*/metrics.csv")):
        with path.open() as lines:
            found.update({int(row["step"]): float(row["loss"]) for row in csv.DictReader(lines) if row["loss"]})
    return found


class StopAt(Callback):
    """Stops the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


def last(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {
                "data": {
                    "source": "fresh",
                    "rules": {"stages": [{"samples": 16, "changes": {"max_depth": 3, "min_length": 5}}]},
                }
            },
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"model": {"architecture": TINY, "recipe": {"warmup": 2, "objective": "guess"}}},
            marks=pytest.mark.thorough,
        ),
        {"trainer": {"callbacks": [{"class_path": "EMAWeightAveraging", "init_args": {"decay": 0.5}}]}},
        pytest.param(
            {"data": {"task": "pathfinder32", "rules": {"contour_length": 6}, "augmentation": "symmetries"}},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["classify", "fresh", "guess", "averaged", "augmented"],
)
def test_an_interrupted_run_has_the_loss_curve_of_a_whole_one(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """5 steps an epoch: interrupted in the second epoch, after a validation, taken up at step 3 of 8."""
    run(tmp_path / "whole", root, **changes)

    def interrupt(experiment: Experiment, batch: object, batch_idx: int) -> None:
        if experiment.global_step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "on_train_batch_start", interrupt)
        with pytest.raises(SystemExit):
            run(tmp_path / "parts", root, **changes)
    assert max(losses(tmp_path / "parts")) == 4
    assert last(tmp_path / "parts")["global_step"] == 3
    run(tmp_path / "parts", root, "fit", "--ckpt_path", "last", **changes)
    whole = losses(tmp_path / "whole")
    assert sorted(whole) == list(range(8))
    assert losses(tmp_path / "parts") == whole
    ends = [last(tmp_path / name) for name in ("whole", "parts")]
    assert [end["global_step"] for end in ends] == [8, 8]
    assert all(torch.equal(ends[0]["state_dict"][name], weight) for name, weight in ends[1]["state_dict"].items())


STAGED = {
    "data": {
        "source": "fresh",
        "n_together": 3,
        "rules": {"stages": [{"samples": 16, "batch_size": 8, "changes": {"max_depth": 3, "min_length": 5}}]},
    }
}
AVERAGED = {"class_path": "EMAWeightAveraging", "init_args": {"decay": 0.5}}


STOP = "tests.benchmarks.lra.test_training.StopAt"


def test_a_stopped_run_resumes_as_if_it_had_not_stopped(tmp_path: Path, root: Path) -> None:
    """Averaged weights are for tests; training resumes with the trained weights. The run stops within three steps drawn
    together, after a stage with another batch size."""
    more = {"default_root_dir": str(tmp_path / "whole"), "callbacks": [AVERAGED]}
    run(tmp_path / "whole", root, **STAGED, trainer=more)
    stop = {"class_path": STOP, "init_args": {"step": 5}}
    more = {"default_root_dir": str(tmp_path / "parts"), "callbacks": [AVERAGED, stop]}
    run(tmp_path / "parts", root, **STAGED, trainer=more)
    assert last(tmp_path / "parts")["global_step"] == 5
    more["callbacks"] = [AVERAGED]
    run(tmp_path / "parts", root, "fit", "--ckpt_path", "last", **STAGED, trainer=more)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ends = [last(tmp_path / name) for name in ("whole", "parts")]
    for state in ("state_dict", "current_model_state"):
        assert all(torch.equal(ends[0][state][name], weight) for name, weight in ends[1][state].items())


def test_a_test_prints_accuracy_floor_and_balanced_accuracy(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, root)
    run(tmp_path, root, "test", "--ckpt_path", str(tmp_path / "checkpoints" / "last.ckpt"))
    printed = capsys.readouterr().out
    assert "listops-small: accuracy" in printed
    assert re.search(r"\(root operator alone\), one operator deep \d+\.\d% \(balanced .*\), balanced accuracy", printed)
    assert "40 samples, generated by the published rules, not the released files" in printed
    line = json.loads((tmp_path / "test.jsonl").read_text())
    assert [*line] == scoring.TEST_KEYS
    assert (line["task"], line["is_lra"], line["steps"], line["mask"]) == ("listops-small", False, 8, TINY["mask"])
    # 8 steps of 4
    assert (line["samples"], line["samples_before"], line["seed"], line["test_seed"]) == (32, 0, 0, 0)
    assert line["device_hours"] > 0 and line["recipe"]["warmup"] == 2
    stored = LraData("listops-small", root=root, sizes=Sizes(20, 8, 40)).stored("test")[:]
    samples = [listops.Sample(row["tokens"][: row["length"]].tobytes(), int(row["label"])) for row in stored]
    assert line["one_deep"] == listops.oracle_accuracy(samples, depth=1)
    # labels differ in number: each pair of a root operator and a label has the same weight
    groups = {(sample.tokens[0], sample.label): [] for sample in samples}
    for sample in samples:
        groups[sample.tokens[0], sample.label].append(listops.evaluate(sample.tokens, depth=1) == sample.label)
    assert line["one_deep_balanced"] == pytest.approx(
        sum(sum(each) / len(each) for each in groups.values()) / len(groups)
    )


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_the_last_checkpoint_must_exist(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(LraData, "prepare_data", lambda _: pytest.fail("data are made first"))
    with pytest.raises(SystemExit, match=f"no checkpoint in {re.escape(str(tmp_path / 'checkpoints'))}: run `fit` f"):
        run(tmp_path, root, verb, "--ckpt_path", "last")
    assert not (tmp_path / "test.jsonl").exists()


def test_the_result_of_an_untrained_model_is_not_written(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, root, "test")
    assert not (tmp_path / "test.jsonl").exists()
    printed = capsys.readouterr().out
    assert "listops-small: accuracy" in printed
    assert f"no line in {tmp_path / 'test.jsonl'}: the model is not trained" in printed


@pytest.mark.parametrize("source", ["fresh", "generated"])
def test_only_a_test_makes_the_test_set(source: str, tmp_path: Path) -> None:
    data = {"source": source, "root": str(tmp_path / "sets")}
    run(tmp_path / "run", tmp_path / "sets", data={**data, "task": "listops-small"})
    (folder,) = (tmp_path / "sets").iterdir()
    expected = {"validation"} if source == "fresh" else {"validation", "train"}
    assert {path.name for path in folder.iterdir()} == expected
    run(tmp_path / "run", tmp_path / "sets", "test", "--ckpt_path", "last", data=data)
    assert {path.name for path in folder.iterdir()} == expected | {"test"}


def test_a_time_limit_is_of_training(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # temporary files may be on another disk, from which a checkpoint cannot be renamed
    monkeypatch.setattr(tempfile, "tempdir", "missing")
    with pytest.raises(SystemExit) as stop, monkeypatch.context() as patch:
        patch.setattr(Experiment, "validation_step", lambda *_: pytest.fail("a validation comes before the checkpoint"))
        run(tmp_path, root, "fit", "--minutes", "0")
    assert stop.value.code == 75
    assert "stopped by --minutes after step 1 of 8; --ckpt_path last continues" in capsys.readouterr().err
    assert last(tmp_path)["global_step"] == 1
    with pytest.raises(SystemExit, match="minutes limits `fit` only: test cannot"):
        run(tmp_path, root, "test", "--ckpt_path", "last", "--minutes", "1")
    # in time: nothing is left to do
    run(tmp_path, root, "fit", "--ckpt_path", "last", "--minutes", "60")
    assert last(tmp_path)["global_step"] == 8


@pytest.mark.parametrize("minutes", ["-1", ".nan"])
def test_a_time_limit_is_checked_before_the_training(tmp_path: Path, root: Path, minutes: str) -> None:
    """Regression: -1 was taken for 0, and NaN for no limit."""
    with pytest.raises(SystemExit, match=r"fit: minutes must be 0 or more, got (-1\.0|nan)"):
        run(tmp_path, root, "fit", "--minutes", minutes)
    assert not (tmp_path / "checkpoints").exists()


def interrupted(at: dict[int, int], number: signal.Signals = signal.SIGINT) -> Any:
    """An Experiment.on_train_batch_start that interrupts the process before steps: step -> how often."""

    def interrupt(experiment: Experiment, batch: object, batch_idx: int) -> None:
        for _ in range(at.get(experiment.global_step, 0)):
            signal.raise_signal(number)

    return interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_step(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """At once a second time, as a terminal and `recipe` send it: still the same interrupt.

    Regression: after SIGTERM, which schedulers send, no step was saved, and the exit status was 0.
    """
    run(tmp_path / "whole", root)
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Experiment, "on_train_batch_start", interrupted({4: 2}, number))
        patch.setattr(Experiment, "validation_step", lambda *_: None)
        run(tmp_path / "parts", root)
    assert stop.value.code == 130 and signal.getsignal(number) is handler
    said = capsys.readouterr().err
    assert said.count("interrupted: this step is the last, and is saved; a second time ends it at once") == 1
    assert "interrupted after step 5 of 8; --ckpt_path last continues" in said
    # checkpoints are due after every third step
    assert last(tmp_path / "parts")["global_step"] == 5
    run(tmp_path / "parts", root, "fit", "--ckpt_path", "last")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_an_interrupt_does_not_end_workers_that_load_samples(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal sends it to them too, and the last step needs their samples."""
    end, trainer = training.EarlyEnd(math.inf), lightning.Trainer(logger=False)
    end.setup(trainer, None, "fit")
    worker = multiprocessing.get_context("fork").Process(target=interrupt_twice)
    worker.start()
    worker.join()
    end.teardown(trainer, None, "fit")
    assert worker.exitcode == 0 and not end.is_interrupted
    assert "interrupted" not in capfd.readouterr().err


def interrupt_twice() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def test_a_second_interrupt_ends_the_training_at_once(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAME_INTERRUPT", -1.0)
    monkeypatch.setattr(Experiment, "on_train_batch_start", interrupted({4: 2}))
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, root)
    assert stop.value.code == 1
    assert last(tmp_path)["global_step"] == 3


def test_of_several_processes_only_the_main_one_exits_with_75(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning kills all processes if one of the others exits with a status before the main one has ended."""
    monkeypatch.setattr(lightning.Trainer, "is_global_zero", property(lambda _: False))
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, root, "fit", "--minutes", "0")
    assert stop.value.code == 0


def test_a_folder_is_trained_by_one_process(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise ValueError(f"process 123 trains in {folder}")

    monkeypatch.setattr(checkpoints, "locked", refuse)
    with pytest.raises(SystemExit, match=f"process 123 trains in {re.escape(str(tmp_path))}"):
        run(tmp_path, root)


def test_weights_that_are_not_finite_replace_no_checkpoint(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the training went on to its end, and later stages began with them."""

    def diverge(experiment: Experiment, batch: object, batch_idx: int) -> None:
        if experiment.global_step == 5:
            next(experiment.parameters()).data.fill_(math.nan)

    monkeypatch.setattr(Experiment, "on_train_batch_start", diverge)
    with pytest.raises(SystemExit, match="fit: the weights are not finite after step 6, and are not saved: a lower"):
        run(tmp_path, root)
    end = last(tmp_path)
    assert end["global_step"] == 3 and all(weight.isfinite().all() for weight in end["state_dict"].values())


def test_a_test_is_of_the_model_that_was_trained(tmp_path: Path, root: Path) -> None:
    """Regression: the line named a mask or a task with which the weights had not been trained."""
    run(tmp_path, root, "fit", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
    tested, before = ("test", "--ckpt_path", "last"), sorted(root.rglob("*"))
    for option, value, said in (
        ("--model.architecture.mask", "butterfly", "mask 'butterfly | .*', not 'butterfly'"),
        ("--model.architecture.embed_dim", "32", "embed_dim 16, not 32"),
        ("--data.task", "listops", "task 'listops-small', not 'listops'"),
    ):
        with pytest.raises(SystemExit, match=rf"test: the checkpoint to test .* other settings: {said}\. Set these"):
            run(tmp_path, root, *tested, option, value)
    assert not (tmp_path / "test.jsonl").exists()
    # a regression: it made 6,000 samples of the other task first
    assert sorted(root.rglob("*")) == before
    # of no consequence in a test
    run(tmp_path, root, *tested, "--model.architecture.dropout_p", "0.5")
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 1


def test_what_is_no_checkpoint_of_a_training_is_named(tmp_path: Path, root: Path) -> None:
    """Regression: tracebacks of PyTorch and Lightning without the name of the file."""
    run(tmp_path, root, "fit", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
    path = tmp_path / "checkpoints" / "last.ckpt"
    kept = torch.load(path, weights_only=True)
    for odd in ({**kept, "streams": None}, {"state_dict": {}}):
        torch.save({name: value for name, value in odd.items() if value is not None}, path)
        with pytest.raises(
            SystemExit, match=r"fit: (ckpt_path must be .*, got kept weights|.*last\.ckpt is not a whole)"
        ):
            run(tmp_path, root, "fit", "--ckpt_path", "last", "--trainer.max_steps", "1")
    for content in (b"", b"text"):
        path.write_bytes(content)
        for verb, option in (("fit", "last"), ("test", "last"), ("test", str(path))):
            with pytest.raises(SystemExit, match=rf"{verb}: .*last\.ckpt is not a whole checkpoint"):
                run(tmp_path, root, verb, "--ckpt_path", option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.default_root_dir", "FILE"], "fit: .*File exists: '.*file'"),
        (["--trainer.accelerator", "cuda"], "fit: .*accelerator"),
        (["--data.seed", "-1"], r"fit: seed must be from 0 to 2\*\*32 - 1, got -1"),
        (["--data.test_seed", str(2**32)], r"fit: test_seed must be from 0 to 2\*\*32 - 1, got 4294967296"),
        (["--data.workers", "-1"], "fit: workers must be 0 or more, got -1"),
    ],
)
def test_a_wrong_option_ends_in_one_line(
    tmp_path: Path, root: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a traceback, or a training whose test failed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=message):
        run(tmp_path / "run", root, "fit", *(str(tmp_path / "file") if each == "FILE" else each for each in options))


def test_a_training_goes_on_only_with_the_same_augmentation(tmp_path: Path, root: Path) -> None:
    images = {"task": "pathfinder32", "rules": {"contour_length": 6}}
    limited = {"max_steps": 1, "limit_val_batches": 0}
    run(tmp_path, root, data=images, trainer=limited)
    with pytest.raises(SystemExit, match=r"in its 1 steps: augmentation None, not 'symmetries'\. Set these"):
        run(
            tmp_path, root, "fit", "--ckpt_path", "last", data={**images, "augmentation": "symmetries"}, trainer=limited
        )


def test_a_training_neither_replaces_another_nor_continues_one_with_other_settings(tmp_path: Path, root: Path) -> None:
    """A short trial in the folder of a long training, and a training begun anew by mistake."""
    trial = {"batch_size": 2, "sizes": {"train": 20, "validation": 8, "test": 40}}
    run(tmp_path, root, "fit", "--trainer.max_steps", "3", data=trial)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()
    with pytest.raises(SystemExit, match=r"checkpoints has a checkpoint: add --ckpt_path last to continue, or remove"):
        run(tmp_path, root)
    with pytest.raises(SystemExit, match=r"in its 3 steps: last_step 3, not 8; .*samples 6, not 12\. Set"):
        run(tmp_path, root, "fit", "--ckpt_path", "last")
    other = {"architecture": {**TINY, "mask": "butterfly"}, "recipe": {"warmup": 2}}
    with pytest.raises(SystemExit, match=r"steps: mask 'butterfly .*', not 'butterfly'; last_step"):
        run(tmp_path, root, "fit", "--ckpt_path", "last", model=other)
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before
    # the number of GPUs and of accumulated batches may change
    run(
        tmp_path,
        root,
        "fit",
        "--ckpt_path",
        "last",
        "--trainer.max_steps",
        "3",
        "--data.batch_size",
        "1",
        "--trainer.accumulate_grad_batches",
        "2",
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--data.seed", "5", "data_seed 0, not 5"),
        ("--data.source", "fresh", "source 'generated', not 'fresh'"),
        ("--data.n_together", "2", "n_together 1, not 2"),
        ("--data.rules.changes", "{max_depth: 3}", "rules .*'max_depth': 3"),
        ("--data.sizes.train", "48", "training_samples 20, not 48"),
        ("--trainer.gradient_clip_val", "0.1", "gradient_clip_val 1.0, not 0.1"),
    ],
)
def test_a_training_continues_on_the_same_samples_only(
    tmp_path: Path, root: Path, option: str, value: str, message: str
) -> None:
    run(tmp_path, root, "fit", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0")
    before = sorted(root.rglob("*"))
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, root, "fit", "--ckpt_path", "last", "--trainer.max_steps", "1", option, value)
    assert sorted(root.rglob("*")) == before


def test_seeds_change_weights_and_order_and_a_test_seed_the_test_set(tmp_path: Path, root: Path) -> None:
    found = []
    for name, seed in (("zero", 0), ("one", 1), ("again", 1)):
        run(tmp_path / name, root, "fit", "--seed_everything", str(seed))
        found.append(losses(tmp_path / name))
    assert found[0] != found[1] == found[2]
    assert last(tmp_path / "again")["record"]["seed"] == 1
    for source in ("generated", "fresh"):
        drawn = []
        for seed in (0, 1):
            data = LraData("listops-small", source, root=root, sizes=Sizes(32, 8, 40), order_seed=seed, workers=0)
            data.setup("fit")
            drawn.append(next(iter(data.train_dataloader())).tokens)
        assert drawn[0].shape != drawn[1].shape or not torch.equal(*drawn)
    with pytest.raises(ValueError, match="seed_everything must be a number, which the results name, got True"):
        command.order_seed(seed=True)
    sets = [LraData("listops-small", root=root, sizes=Sizes(20, 8, 40), test_seed=seed) for seed in (None, 1)]
    tests, validations = ([each.stored(split)[:].tobytes() for each in sets] for split in ("test", "validation"))
    assert tests[0] != tests[1] and validations[0] == validations[1]
    with pytest.raises(ValueError, match=r"test_seed is only for generated test sets, not for released ones, got 1"):
        LraData("image", "official", test_seed=1)
    with pytest.raises(SystemExit, match=r"last_step must be at least trainer\.max_steps, 8, got 7"):
        run(tmp_path / "short", root, model={"architecture": TINY, "recipe": {"last_step": 7}})


@pytest.mark.parametrize("option", ["--trainer.limit_test_batches=1", "--trainer.limit_test_batches=0.5"])
def test_a_part_of_a_test_set_is_refused_before_the_test(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(Experiment, "test_step", lambda *_: pytest.fail("the test has begun"))
    with pytest.raises(SystemExit, match=r"got limit_test_batches=.*: set data\.sizes\.test instead"):
        run(tmp_path, root, "test", option)
    scoring.check_is_whole(1.0)


def test_training_on_a_cpu_names_the_options_of_a_short_trial(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"max_steps": 1, "limit_val_batches": 0}
    run(tmp_path / "small", root, trainer=short)
    assert "on a CPU" not in capsys.readouterr().out
    more = {**STAGED["data"], "batch_size": 8}
    run(tmp_path, root, data=more, trainer=short)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "on a CPU" in line)
    # the options are real ones
    options = shlex.split(line.partition(": ")[2])
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, root, "fit", *options, "--print_config", data=more)
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    # in another folder than a recipe's
    assert "max_steps: 20" in printed and "default_root_dir: out/lra/runs/trial" in printed


def test_the_guide_names_every_command_and_a_trial_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs" / "lra.md").read_text(encoding="utf-8")
    for name in ("generate", "floors", "recipe", "fit", "test", "speed", "report"):
        assert re.search(rf"^\| `{name}\b", guide, re.MULTILINE), name
    (trial,) = (each for each in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) if "is_compiled false" in each)
    _, _, _, *arguments = shlex.split(trial.replace("\\\n", " "))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments, "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "\n  batch_size: 4\n" in printed
    assert "\n  is_compiled: false\n" in printed


@pytest.mark.thorough
def test_accumulated_gradients_make_one_step(tmp_path: Path, root: Path) -> None:
    """Steps of two batches of 4: a stopped run resumes with the next batch, and a test reports batches of 8."""
    stop = {"class_path": STOP, "init_args": {"step": 2}}
    more: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 2}
    for name, callbacks in (("whole", []), ("parts", [stop])):
        folder = tmp_path / name
        run(folder, root, trainer={**more, "callbacks": callbacks, "default_root_dir": str(folder)})
    assert last(folder)["global_step"] == 2
    more["default_root_dir"] = str(folder)
    run(folder, root, "fit", "--ckpt_path", "last", trainer=more)
    # Lightning numbers the steps differently after resuming
    assert [*losses(folder).values()] == [*losses(tmp_path / "whole").values()]
    ends = [last(tmp_path / name)["state_dict"] for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], weight) for name, weight in ends[1].items())
    run(folder, root, "test", "--ckpt_path", str(folder / "checkpoints" / "last.ckpt"), trainer=more)
    line = json.loads((folder / "test.jsonl").read_text())
    assert (line["steps"], line["batch_size"]) == (4, 8)


def test_weights_go_from_one_resolution_to_the_next(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Self-pretraining at 32 pixels, then classification at 64, with the pixels' units kept."""
    start = tmp_path / "small" / "checkpoints" / "last.ckpt"
    sizes = {"train": 4, "validation": 2, "test": 2}

    def fit(folder: str, task: str, objective: str, *more: str, steps: int = 1) -> None:
        run(
            tmp_path / folder,
            root,
            "fit",
            *(["--model.start", str(start)] if folder == "large" else []),
            *more,
            data={"task": task, "source": "fresh", "rules": {"contour_length": 6}, "sizes": sizes, "batch_size": 2},
            model={
                "architecture": {**TINY, "mask": "butterfly", "block_size": 128},
                "recipe": {"warmup": 1, "objective": objective, "schedule": "constant"},
            },
            checkpoint={"every_n_train_steps": 1},
            trainer={"max_steps": steps, "limit_val_batches": 0},
        )

    fit("small", "pathfinder32", "guess")
    whole = start.read_bytes()
    start.write_bytes(whole[:1000])
    with pytest.raises(SystemExit, match=r"last\.ckpt is not a whole checkpoint"):
        fit("large", "pathfinder64", "classify")
    start.write_bytes(whole)
    fit("large", "pathfinder64", "classify")
    assert "of pathfinder32; new: none" in capsys.readouterr().out
    assert last(tmp_path / "large")["task"] == "pathfinder64"
    # going on begins with what was reached: the first weights are not asked for again
    start.unlink()
    fit("large", "pathfinder64", "classify", "--ckpt_path", "last", steps=2)
    assert last(tmp_path / "large")["global_step"] == 2


def test_rates_follow_their_schedules() -> None:
    cosine = Recipe(warmup=10, schedule="cosine")
    assert [rate_at(step, cosine, 110) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert rate_at(60, cosine, 110) == pytest.approx(0.5)
    assert rate_at(110, cosine, 110) == pytest.approx(0.0)
    linear = Recipe(warmup=10, schedule="linear")
    assert rate_at(85, linear, 110) == pytest.approx(0.25)
    # Long Range Arena: rate * min(1, step / warmup) / sqrt(max(step, warmup)), steps from 1; for ListOps 1.58e-3 at
    # most
    rsqrt = Recipe(warmup=1000, schedule="rsqrt", learning_rate=0.05)
    assert 0.05 * rate_at(999, rsqrt, -1) == pytest.approx(1.58e-3, rel=0.01)
    assert rate_at(3999, rsqrt, -1) == pytest.approx(1 / math.sqrt(4000))
    assert rate_at(499, rsqrt, -1) == pytest.approx(0.5 / math.sqrt(1000))
    trapezoid = Recipe(warmup=10, cooldown=20, schedule="trapezoid")
    found = [rate_at(step, trapezoid, 110) for step in (0, 9, 50, 90, 100, 110)]
    assert found == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.5, 0.0])
    constant = Recipe(warmup=0, schedule="constant")
    assert [rate_at(step, constant, -1) for step in (0, 5, 10**6)] == [1.0, 1.0, 1.0]


def test_a_schedule_that_ends_needs_an_end(tmp_path: Path, root: Path) -> None:
    with pytest.raises(SystemExit, match=r"set trainer\.max_steps"):
        run(tmp_path, root, trainer={"max_steps": -1, "max_epochs": 1})


def test_trained_weights_are_kept_where_no_checkpoint_came_before(tmp_path: Path, root: Path) -> None:
    run(
        tmp_path,
        root,
        checkpoint={"every_n_train_steps": 100},
        trainer={"max_steps": 3, "callbacks": [AVERAGED], "default_root_dir": str(tmp_path)},
    )
    end = last(tmp_path)
    assert end["global_step"] == 3
    assert any(not torch.equal(end["state_dict"][name], weight) for name, weight in end["current_model_state"].items())


@pytest.mark.thorough
def test_layers_are_compiled_once_each_when_asked(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without changing the code, so that a run has the losses of one that is not compiled: bit for bit."""
    asked = []

    def noted(function: Any, **options: Any) -> Any:
        asked.append((function.__name__, options))
        return function

    architecture = {**TINY, "n_layers": 2, "repeats": 2}
    run(tmp_path / "as-it-is", root, model={"architecture": architecture})
    monkeypatch.setattr(torch, "compile", noted)
    run(tmp_path / "compiled", root, model={"architecture": architecture, "is_compiled": True})
    assert asked == [("before", {"dynamic": True}), ("after", {"dynamic": True})] * 2
    assert losses(tmp_path / "compiled") == losses(tmp_path / "as-it-is")


def test_layers_of_images_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(EncoderBlock, "compile", lambda block, **options: asked.append(options))
    experiment = Experiment("pathfinder32", Architecture(embed_dim=8, num_heads=1, n_layers=2, repeats=2, hidden_dim=8))
    experiment.is_compiled = True
    experiment.on_fit_start()
    assert asked == [{"dynamic": False}] * 2


def test_answers_are_in_the_order_of_the_samples() -> None:
    answers = torch.tensor([[4.0, 0.0, 1.0], [2.0, 3.0, 2.0], [0.0, 5.0, 1.0]])
    assert training.in_order(answers).tolist() == [[5.0, 1.0], [3.0, 2.0], [0.0, 1.0]]


def test_pathfinder_is_tested_on_counterfactual_pairs_too(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "data": {
            "task": "pathfinder32",
            "rules": {"contour_length": 6},
            "sizes": {"train": 40, "validation": 2, "test": 40, "pairs": 3},
            "batch_size": 8,
        },
        "model": {"architecture": {**TINY, "block_size": 128}},
    }
    run(tmp_path, root, "test", **settings)
    printed = capsys.readouterr().out
    assert "pathfinder32: accuracy" in printed
    assert re.search(r"floor .* balanced accuracy .* pairs \d+\.\d%; 40 samples", printed)


def test_a_mistyped_command_lists_all_commands() -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["reprot"])
    message = str(stop.value.code)
    assert message.startswith("unknown command 'reprot'; did you mean report?")
    for name in ("generate", "floors", "recipe", "fit", "validate", "test", "speed", "report"):
        assert name in message.splitlines()[1]
    with pytest.raises(SystemExit, match="unknown command 'xyz'\ncommands: "):
        command.main(["xyz"])


GRAPHED: dict[str, Any] = {
    "data": {
        "task": "pathfinder32",
        "rules": {"contour_length": 6},
        "sizes": {"train": 40, "validation": 6, "test": 4},
        "batch_size": 4,
    },
    "model": {"architecture": {**TINY, "block_size": 128, "dropout_p": 0.0, "attention_dropout_p": 0.0}},
    "trainer": {"max_steps": 4, "val_check_interval": 2},
}


def test_a_graph_is_captured_for_the_batches_of_training(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training alone: the last batch of a validation is smaller. With the trained weights, not with copies."""
    replays = []

    def capture(model: torch.nn.Module, sample: tuple[torch.Tensor, ...]) -> None:
        forward, has_been = model.forward, model.training

        def replay(*batch: torch.Tensor) -> torch.Tensor:
            if model.training != has_been:
                return forward(*batch)
            assert [(each.shape, each.dtype) for each in batch] == [(each.shape, each.dtype) for each in sample]
            assert all(each.device == other.device for each, other in zip(batch, sample, strict=True))
            replays.append(batch)
            return forward(*batch)

        assert not torch.is_autocast_cache_enabled()
        monkeypatch.setattr(model, "forward", replay)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(Experiment, "_check_can_be_graphed", lambda _: None)
    run(tmp_path / "launched", root, **GRAPHED)
    run(tmp_path / "graphed", root, **(GRAPHED | {"model": {**GRAPHED["model"], "is_graphed": True}}))
    assert len(replays) == 4
    assert losses(tmp_path / "graphed") == losses(tmp_path / "launched")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "got cpu device; set --model.is_graphed false"),
        ({"trainer": {"accumulate_grad_batches": 2}}, "cpu device, trainer.accumulate_grad_batches > 1;"),
        ({"model": {"recipe": {"objective": "guess"}}}, "objective='guess'"),
        ({"data": {"task": "listops-small", "rules": {}}}, "task listops-small, whose batches differ in length"),
        (
            {"data": {"source": "fresh", "rules": {"stages": [{"samples": 8, "batch_size": 2, "changes": {}}]}}},
            "stages with a batch_size of their own",
        ),
    ],
)
def test_what_cannot_be_graphed_is_refused(changes: dict[str, Any], said: str, tmp_path: Path, root: Path) -> None:
    settings = {part: {**GRAPHED[part], **changes.get(part, {})} for part in GRAPHED}
    settings["model"]["is_graphed"] = True
    with pytest.raises(SystemExit, match=f"is_graphed needs one CUDA GPU, batches of a fixed shape.*{said}"):
        run(tmp_path, root, **settings)
    assert not losses(tmp_path)


def test_a_trial_on_a_cpu_leaves_out_graphs() -> None:
    data = LraData("pathfinder32", batch_size=4)
    assert command.cpu_hint(data, is_compiled=False) == ""
    hint = command.cpu_hint(data, is_compiled=False, is_graphed=True)
    assert "--model.is_graphed false" in hint
    assert "is_graphed" not in command.cpu_hint(data, is_compiled=True)
