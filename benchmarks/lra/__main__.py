"""Long Range Arena: `python -m benchmarks.lra COMMAND --help`

generate   makes the sets of a task by its rules, with many workers; resumes after an interruption
floors     accuracy of a task's shortcut on its generated test set
recipe     trains a configuration of configs/ours (such as path256) and its earlier stages, for one or several seeds,
           tests it and writes a report; `recipe ablation` compares masks. Resumes; --minutes limits the time of a call
keep       keeps the weights of a trained run beside its results, for tests and later stages
fit, validate, test   train and test a model: --config benchmarks/lra/configs/ours/pathx.yaml
speed      times training steps of the tasks, and attention alone at 128 to 65,536 tokens, with several implementations
report     tables and plots of the results of `test` and `speed`

Exit status 75: a time limit (--minutes of fit and recipe) ended the training after saving its last step. Exit status
130: an interrupt (Ctrl-C or SIGTERM) did. The same command continues it; for fit, add --ckpt_path last.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import itertools
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import LraData

# what the extra [lra] installs
PACKAGES = ("jsonargparse", "lightning", "matplotlib", "numba", "pandas", "PIL", "torchmetrics", "tqdm", "yaml")
ROOT = Path("out/lra")
SMALL_BATCH = 4
TRAINER_COMMANDS = ("fit", "validate", "test")


def generate(
    task: str,
    *,
    root: Path = ROOT,
    splits: Sequence[str] = ("test", "validation", "train"),
    workers: int | None = None,
    seed: int = 0,
    contour_length: int = 14,
) -> None:
    """Make the sets of a task by its rules. Run it again after an interruption: existing parts are kept.

    Args:
        task: listops, listops-small, pathfinder32, pathfinder64, pathx or path256
        root: folder of generated sets
        splits: splits to make
        workers: processes; default one per core
        seed: seed of the sets
        contour_length: of Pathfinder: 14 (hard), 9 or 6
    """
    from . import data, sets, tasks

    found = tasks.find(task)
    tasks.check_seed("seed", seed)
    if not splits:
        raise ValueError("splits must name one split or more, got none")
    source = data.generator_of(found, data.Rules(contour_length), seed=seed)
    for split in splits:
        if split not in data.SPLITS:
            raise ValueError(f"splits must be of {data.SPLITS}, got {split!r}")
    workers = os.cpu_count() or 1 if workers is None else workers
    for split in splits:
        count = getattr(found.sizes, split)
        stored = sets.make(source, split, count, root=root, workers=workers)
        known = "as recorded" if sets.check(source, split, stored, root=root) else "of which none is recorded"
        print(f"{source.name} {split}: {len(stored)} samples, SHA-256 {stored.digest()}, {known}")


def floors(
    task: str,
    *,
    root: Path = ROOT,
    train: int = 60_000,
    test: int | None = None,
    workers: int | None = None,
    seed: int = 0,
) -> None:
    """Accuracy of a task's shortcut on its test set, which is generated first if it is missing.

    Args:
        task: listops, listops-small, pathfinder32, pathfinder64, pathx or path256
        root: folder of generated sets
        train: training samples of the reader of Pathfinder's markers
        test: samples of the test set; default all
        workers: processes that generate; default one per core
        seed: of the sets
    """
    from . import data, scoring, tasks

    found = tasks.find(task)
    count = found.sizes.test if test is None else test
    sizes = tasks.Sizes(train=train, validation=1, test=count)
    workers = os.cpu_count() or 1 if workers is None else workers
    module = data.LraData(task, root=root, sizes=sizes, workers=workers, seed=seed)
    for line in scoring.shortcuts(module):
        print(line)


def speed(
    *,
    tasks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    providers: Sequence[str] | None = None,
    mask: str = "butterfly",
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Times training steps and attention alone, with several implementations and the FlashAttention paper's figures.

    Args:
        tasks: whose training steps are timed, with and without attention dropout; default all
        lengths: tokens of attention alone, powers of two; default 128 to 65,536. [] times no attention alone
        providers: blocksparse_flash, materialized, sdpa, flex; default all
        mask: mask of the block-sparse training steps, a specification for masks.build
        quick: tiny sizes, to check that everything runs
        out: appended to; default benchmarks/results/lra_speed.jsonl, with quick out/lra/quick.jsonl
    """
    import torch

    import masks

    from ..run import measure
    from . import published, tables
    from . import speed as steps
    from .peers import PROVIDERS

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shown = PROVIDERS if providers is None else providers
    path = out if out is not None else ROOT / "quick.jsonl" if quick else steps.RESULTS
    sizes = {"length": 64, "batch": 2, "block_size": 16} if quick else {}
    tiny, repeats, warmup = ({"batch": 1, "heads": 2}, 1, 1) if quick else ({}, 20, 5)
    found = []
    named = published.STEPS if tasks is None else tasks
    if unknown := [task for task in named if task not in published.STEPS]:
        raise ValueError(f"tasks must be among {', '.join(published.STEPS)}, got {unknown[0]!r}")
    default = (128, 256) if quick else published.LENGTHS
    alone = default if lengths is None else lengths
    # before anything is measured
    for length in alone:
        steps.check_length(length)
    masks.build(mask, 64, block_size=16)
    measure.check_can_append(path)
    for task, each, has_dropout in itertools.product(named, (None, mask), (True, False)):
        case = steps.case_of(task, mask=each, has_dropout=has_dropout, **sizes)
        lines = steps.run(case, device, providers=shown, warmup=warmup, n_steps=repeats)
        found += measure.appended(path, lines, steps.KEYS)
    for length in alone:
        shape = steps.Shape(length, **tiny)
        lines = steps.run_alone(shape, device, providers=shown, n_calls=repeats)
        found += measure.appended(path, lines, steps.KEYS)
    print("", *tables.speed_sections(found), sep="\n\n")


def _folder(root: str | None, name: str = "") -> str:
    return str((ROOT / "runs" if root is None else Path(root)) / name)


def cpu_hint(data: LraData, *, is_compiled: bool, is_graphed: bool = False) -> str:
    """The options of a short trial on a CPU; empty for a run that is one."""
    if data.batch_size <= SMALL_BATCH and not (is_compiled or is_graphed):
        return ""
    # in a folder of its own, from whose checkpoint no recipe continues
    options = f"--trainer.default_root_dir {ROOT / 'runs' / 'trial'}"
    options += f" --model.is_compiled false --data.batch_size {SMALL_BATCH} --trainer.max_steps 20"
    if is_graphed:
        options += " --model.is_graphed false"
    # stages have batch sizes of their own
    if data.rules.stages:
        options += ' --data.rules.stages "[]"'
    options += ' --data.sizes "{train: 400, validation: 40, test: 200}"'
    return f"this configuration may take hours on a CPU; a short trial on a CPU: {options}"


def order_seed(seed: bool | int) -> int:
    """The seed of the order of samples, which is that of the weights."""
    if isinstance(seed, bool):
        raise ValueError(f"seed_everything must be a number, which the results name, got {seed}")
    from .tasks import check_seed

    check_seed("seed_everything", seed)
    return seed


def experiment(arguments: Sequence[str] | None, began: float) -> None:
    """Lightning's commands fit, validate and test. None reads the command line; began: from when --minutes counts."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.trainer.states import TrainerFn

    from ..run.checkpoints import WholeCheckpoints, locked
    from .data import LraData
    from .recipe import INTERRUPTED, LATER
    from .scoring import TEST, append_test, check_is_whole
    from .training import EarlyEnd, Experiment

    checkpoints = functools.partial(_folder, name="checkpoints")

    class Command(LightningCLI):
        def before_fit(self) -> None:
            hint = cpu_hint(self.datamodule, is_compiled=self.model.is_compiled, is_graphed=self.model.is_graphed)
            if self.trainer.strategy.root_device.type == "cpu" and self.trainer.is_global_zero and hint:
                print(hint, flush=True)
            minutes = self._get(self.config_init, "minutes")
            if minutes is not None and not minutes >= 0:
                raise ValueError(f"minutes must be 0 or more, got {minutes}")
            if self.trainer.is_global_zero:
                held.enter_context(locked(Path(self.trainer.default_root_dir)))
            self.trainer.strategy.checkpoint_io = WholeCheckpoints(["record"])
            if self._get(self.config_init, "ckpt_path") is None and self._last():
                folder = self._keepers()[0].dirpath
                sys.exit(f"{folder} has a checkpoint: add --ckpt_path last to continue, or remove it to begin anew")
            self._check_checkpoint(TrainerFn.FITTING)
            self._end = EarlyEnd(math.inf if minutes is None else began + 60 * minutes)
            self.trainer.callbacks.insert(0, self._end)  # type: ignore[attr-defined]

        def after_fit(self) -> None:
            is_early = self._end.is_late or self._end.is_interrupted
            if is_early and self.trainer.global_step < self.trainer.max_steps:
                # Lightning kills the main process when one of the others exits with another status than 0
                if not self.trainer.is_global_zero:
                    sys.exit(0)
                where = f"step {self.trainer.global_step} of {self.trainer.max_steps}"
                why, code = "stopped by --minutes", LATER
                if self._end.is_interrupted:
                    why, code = "interrupted", INTERRUPTED
                print(f"{why} after {where}; --ckpt_path last continues", file=sys.stderr)
                sys.exit(code)

        def before_validate(self) -> None:
            if self._get(self.config_init, "minutes") is not None:
                sys.exit(f"minutes limits `fit` only: {self.subcommand} cannot continue where it stopped")
            # Lightning would only warn, and go on with untrained weights
            if self._get(self.config_init, "ckpt_path") == "last" and not self._last():
                sys.exit(f"no checkpoint in {self._keepers()[0].dirpath}: run `fit` first")
            self.trainer.strategy.checkpoint_io = WholeCheckpoints(["record"])

        def before_test(self) -> None:
            self.before_validate()
            check_is_whole(self.trainer.limit_test_batches)
            self._check_checkpoint(TrainerFn.TESTING)

        def after_test(self) -> None:
            if not self.trainer.is_global_zero:
                return
            folder = Path(self.trainer.default_root_dir)
            if self.model.trained_steps:
                append_test(folder, self.model.result, **self.model.test_facts())
            else:
                print(f"no line in {folder / TEST}: the model is not trained; `--ckpt_path last` tests the trained one")

        def _parse_ckpt_path(self) -> None:
            """Lightning reads settings of the model here, which our checkpoints lack, and whose errors name no file."""

        def _keepers(self) -> list[ModelCheckpoint]:
            return [each for each in self.trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]

        def _last(self) -> set[str]:
            return set().union(*(keeper._find_last_checkpoints(self.trainer) for keeper in self._keepers()))

        def _check_checkpoint(self, stage: TrainerFn) -> None:
            """Refuses one of other settings before sets are made, which may take minutes; Lightning loads it later."""
            given = self._get(self.config_init, "ckpt_path")
            path = max(self._last(), key=os.path.getmtime, default=None) if given == "last" else given
            # of one that is not there, Lightning says so
            if path is not None and Path(path).exists():
                self.model.trainer = self.datamodule.trainer = self.trainer
                checkpoint = self.trainer.strategy.checkpoint_io.load_checkpoint(path)
                self.model.check_checkpoint(checkpoint, self.datamodule, stage)

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_argument("--minutes", type=float | None, help="stop after this time with exit status 75")
            parser.link_arguments("data.task", "model.task")
            parser.link_arguments("seed_everything", "data.order_seed", compute_fn=order_seed)
            parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
            # a fixed place, so that `--ckpt_path last` finds the checkpoint of an interrupted run
            parser.link_arguments("trainer.default_root_dir", "checkpoint.dirpath", compute_fn=checkpoints)
            parser.set_defaults(
                {
                    "checkpoint.every_n_train_steps": 500,
                    "checkpoint.save_last": True,
                    "checkpoint.enable_version_counter": False,
                    "trainer.logger": {"class_path": "CSVLogger", "init_args": {"save_dir": ROOT / "runs", "name": ""}},
                }
            )
            parser.link_arguments("trainer.default_root_dir", "trainer.logger.init_args.save_dir", compute_fn=_folder)

    # Lightning recommends loader processes that are not needed, and uses names that PyTorch and jsonargparse deprecate
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # tests use the averaged weights, which are the checkpoint's state_dict
    warnings.filterwarnings("ignore", ".*WeightAveraging callback, but loading a checkpoint outside the 'fit' stage.*")
    warnings.filterwarnings("ignore", "Checkpoint directory .* is not empty")
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(lightning|jsonargparse)\b")
    with contextlib.ExitStack() as held:
        Command(
            Experiment,
            LraData,
            args=arguments if arguments is None else list(arguments),
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "max_epochs": -1,
                # streams are endless: validate by steps
                "check_val_every_n_epoch": None,
                "num_sanity_val_steps": 0,
                # batches are already divided among processes
                "use_distributed_sampler": False,
                "gradient_clip_val": 1.0,
                # steps are so short that several GPUs gain nothing, see README.md
                "devices": 1,
            },
        )


def main(given: Sequence[str] | None = None) -> None:
    # before the imports below, which take seconds
    began = time.monotonic()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            sys.exit(f"python -m benchmarks.lra needs {package}: pip install '.[lra]'")
    arguments = sys.argv[1:] if given is None else given
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    import jsonargparse
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from . import recipe, reporting, weights

    own: dict[str, Any] = {"generate": generate, "floors": floors, "speed": speed}
    own |= {"recipe": recipe.run, "keep": weights.keep, "report": reporting.report}
    commands = [*own, *TRAINER_COMMANDS]
    if arguments[0] not in commands and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], commands, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.exit(f"unknown command {arguments[0]!r}{hint}\ncommands: {', '.join(commands)}")
    try:
        if arguments[0] in own:
            jsonargparse.auto_cli(own, args=list(arguments), prog="python -m benchmarks.lra")
        else:
            experiment(given, began)
    except (OSError, ValueError, MisconfigurationException) as error:
        sys.exit(f"{arguments[0]}: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        sys.exit(recipe.INTERRUPTED)


if __name__ == "__main__":
    # schedulers end a job so: workers are ended, and a training saves its step, as after Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
