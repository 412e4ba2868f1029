"""Trains configurations together with the stages whose weights they begin with, and resumes where it stopped."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..run import measure, saved
from . import reporting, tasks
from .reporting import RUNS
from .scoring import TEST, digest, trained_steps

CONFIGS = Path(__file__).with_name("configs")
# other folders of CONFIGS -> configurations of `ours` that are trained together with theirs
GROUPS = {"ablation": ("pathx",)}
REPORT = Path("out/lra/report")
# has the folders of RUNS, with the tests of each and, of some, the weights that `keep` wrote
RESULTS, WEIGHTS = Path("benchmarks/results/lra"), "weights.ckpt"
# share of the loss of a guess from which on a stage counts as one that has learned nothing
GUESS = 0.99
# seconds in which a stage imports, compiles and trains a step
SET_UP = 90
# exit statuses after a time limit (EX_TEMPFAIL of sysexits.h) and after Ctrl-C: run the same command again
LATER, INTERRUPTED = 75, 130


@dataclass(frozen=True)
class Stage:
    """A configuration, the folder of its run, its last step, and the checkpoint it begins with, if any.

    test_seed  seed of the test set in the configuration
    test_size  its samples; None if the configuration leaves them open
    seed       seed of the training
    """

    config: Path
    root: Path
    steps: int
    start: Path | None
    test_seed: int
    test_size: int | None = None
    seed: int = 0

    @classmethod
    def read(cls, config: Path) -> Stage:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        trainer, data, start = settings["trainer"], settings["data"], settings["model"].get("start")
        start = None if start is None else Path(start)
        root, test_seed = Path(trainer["default_root_dir"]), data.get("test_seed", data.get("seed", 0))
        test_size = data.get("sizes", {}).get("test")
        return cls(config, root, trainer["max_steps"], start, test_seed, test_size)

    def seeded(self, seed: int) -> Stage:
        """The same stage with another seed, in a folder of its own."""
        if seed == 0:
            return self
        start = None if self.start is None else self.start.parents[1] / f"seed-{seed}" / "checkpoints" / "last.ckpt"
        return replace(self, root=self.root / f"seed-{seed}", start=start, seed=seed)

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoints" / "last.ckpt"

    def kept(self, results: Path) -> Path:
        """The file of its kept weights in a folder of results, whether or not there is one."""
        return results / self.root.relative_to(RUNS) / WEIGHTS

    def trained_steps(self) -> int:
        """Steps of the checkpoint; 0 without one."""
        return trained_steps(self.checkpoint)

    def is_tested(self, test_seed: int) -> bool:
        """Whether test.jsonl has a line of the checkpoint on this test set, of the configuration's size."""
        path, tested = self.root / TEST, (self.steps, test_seed)
        if not path.exists():
            return False
        # lines of earlier versions do not name their checkpoint
        checkpoints = {None, digest(self.checkpoint) if self.checkpoint.exists() else None}
        return any(
            (line["steps"], line["test_seed"]) == tested
            and self.test_size in (None, line["n"])
            and line.get("checkpoint") in checkpoints
            for line in measure.read(path)
        )

    def check_settings(self) -> None:
        """ValueError if the checkpoint was trained with other settings than the configuration names."""
        model = yaml.safe_load(self.config.read_text(encoding="utf-8"))["model"]
        given = {**model.get("architecture", {}), **model.get("recipe", {})}
        known = saved.load(self.checkpoint).get("settings", {})
        odd = [
            f"{name} {known[name]!r}, not {value!r}"
            for name, value in given.items()
            if name in known and _plain(known[name]) != _plain(value)
        ]
        if odd:
            raise ValueError(
                f"{self.checkpoint} was trained with other settings than {self.config} has: {'; '.join(odd)}. Set "
                "these, or choose another trainer.default_root_dir, or remove the checkpoint to begin anew"
            )

    def command(self, name: str, *arguments: str) -> None:
        """Run a command of `python -m benchmarks.lra` in its own process; exits with its exit code if it fails."""
        command = [sys.executable, "-m", "benchmarks.lra", name, "--config", str(self.config), *arguments]
        if self.seed:
            command += ["--seed_everything", str(self.seed), "--trainer.default_root_dir", str(self.root)]
            command += [] if self.start is None else ["--model.start", str(self.start)]
        code = _run(command)
        if code:
            why = {LATER: "reached the time limit and saved its last step"}
            why |= {INTERRUPTED: "was interrupted and saved its last step", -signal.SIGINT: "was interrupted"}
            problem = why.get(code, f"{name} failed")
            print(f"{self.config.stem}: {problem}; run the same command again to continue", file=sys.stderr)
            sys.exit(INTERRUPTED if code == -signal.SIGINT else code)


def _run(command: Sequence[str]) -> int:
    """The exit status of a command. An interrupt is passed on: training then ends after a step, which it saves."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)


def _warn_if_at_chance(stage: Stage) -> None:
    """Warns if the last validation loss of a stage is that of a guess: the next stage would begin with such weights."""
    task = yaml.safe_load(stage.config.read_text(encoding="utf-8"))["data"]["task"]
    losses, n_classes = reporting.validations(stage.root, "validation_loss"), tasks.find(task).n_classes
    if losses and losses[max(losses)] >= GUESS * math.log(n_classes):
        print(
            f"{stage.config.stem} ended with a validation loss of {losses[max(losses)]:.3f}, which a guess between "
            f"{n_classes} classes has too, so the next stage begins with weights that have learned nothing. Another "
            "seed, or more steps of this stage or of one before it, may help",
            file=sys.stderr,
        )


def _plain(value: Any) -> Any:
    """A value of a configuration in a form that can be compared: YAML reads 1e-3 as text, and tuples as lists."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return value


def stages(name: str, seed: int = 0) -> list[Stage]:
    """The stages of a configuration, first to last: each begins with the weights of the one before.

    name    a configuration of configs/ours, or GROUP/NAME
    raises  ValueError for a name without a configuration, or a start that no configuration trains
    """
    known = {path.stem: Stage.read(path) for path in _members("ours")}
    known |= {f"{group}/{path.stem}": Stage.read(path) for group in GROUPS for path in _members(group)}
    if name not in known:
        groups = f"recipe also takes {', '.join(GROUPS)}"
        raise ValueError(f"name must be one of {', '.join(known)} ({groups}), got {name!r}")
    of_checkpoint = {stage.checkpoint: stage for stage in known.values()}
    found = [known[name]]
    while (start := found[0].start) is not None:
        if start not in of_checkpoint:
            raise ValueError(f"{found[0].config} starts from {start}, which no configuration of {CONFIGS} trains")
        found.insert(0, of_checkpoint[start])
    return [stage.seeded(seed) for stage in found]


def _members(group: str) -> list[Path]:
    return sorted((CONFIGS / group).glob("*.yaml"))


def _copy_kept_weights(chain: Sequence[Stage], results: Path) -> None:
    """Copies the kept weights of the last earlier stage that has some to its run, unless that has a checkpoint."""
    kept = [stage for stage in chain[:-1] if stage.kept(results).exists()]
    if not kept:
        names = ", ".join(stage.config.stem for stage in chain[:-1])
        raise ValueError(
            f"from_kept_weights needs a {WEIGHTS} of an earlier stage of {chain[-1].config.stem} with seed "
            f"{chain[-1].seed} in {results}, got none of {names or 'any, since it has no earlier stage'}; leave it out "
            "to train from random weights"
        )
    if not kept[-1].checkpoint.exists():
        with saved.replacing(kept[-1].checkpoint) as unfinished:
            shutil.copyfile(kept[-1].kept(results), unfinished)


def _train(chain: Sequence[Stage], end: float | None, *, is_first: bool) -> bool:
    """Trains the stages from the last one that has a checkpoint: those before it are no longer needed.

    is_first  whether this call has trained nothing yet: then a stage begins in any case, or no call would get further
    returns   whether a stage was trained
    """
    trained = [stage.trained_steps() for stage in chain]
    first = max((place for place, steps in enumerate(trained) if steps), default=0)
    for number, (stage, steps) in enumerate(zip(chain[first:], trained[first:], strict=True), first + 1):
        of_seed = f" (seed {stage.seed})" if stage.seed else ""
        where = f"stage {number} of {len(chain)}, {stage.config.stem}{of_seed}"
        print(f"{where}: {steps:,} of {stage.steps:,} steps", flush=True)
        if steps:
            stage.check_settings()
        if steps < stage.steps:
            if end is not None and not is_first and end - time.monotonic() < SET_UP:
                print(f"less than {SET_UP} s are left: run the same command again to continue", file=sys.stderr)
                sys.exit(LATER)
            is_first = False
            limit = [] if end is None else ["--minutes", f"{max(0.0, end - time.monotonic()) / 60:.3f}"]
            stage.command("fit", *(["--ckpt_path", "last"] if steps else []), *limit)
            if stage.trained_steps() < stage.steps:
                sys.exit(f"{stage.config.stem} stopped before its last step; run the same command again to continue")
            if stage is not chain[-1]:
                _warn_if_at_chance(stage)
    return not is_first


def run(
    name: str,
    *,
    seeds: Sequence[int] = (0,),
    test_seed: int | None = None,
    minutes: float | None = None,
    from_kept_weights: bool = False,
    results: Path = RESULTS,
) -> None:
    """Train configurations and the stages they begin with, test them, and write a report. Run it again to resume.

    Args:
        name: a configuration of configs/ours such as pathx, or "ablation" for pathx and all of configs/ablation
        seeds: for each seed in turn, all stages are trained; runs of seeds other than 0 are in folders seed-N
        test_seed: seed of the generated test set; default as in the configuration. A new number gives a new set
        minutes: training stops after this time with exit status 75; the same command continues it
        from_kept_weights: whether the weights of the last earlier stage that are kept in the folder of results replace
            the training of the stages up to it, except where a run has a checkpoint
        results: the folder of results
    """
    if not seeds:
        raise ValueError("seeds must be one number or more, got none")
    for seed in seeds:
        tasks.check_seed("seeds", seed)
    if test_seed is not None:
        tasks.check_seed("test_seed", test_seed)
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"minutes must be 0 or more, got {minutes}")
    end = None if minutes is None or minutes == math.inf else time.monotonic() + 60 * minutes
    names = [*GROUPS.get(name, (name,)), *(f"{name}/{path.stem}" for path in _members(name) if name in GROUPS)]
    is_first = True
    for seed in seeds:
        for each in names:
            chain = stages(each, seed)
            if from_kept_weights:
                _copy_kept_weights(chain, results)
            is_first = not _train(chain, end, is_first=is_first)
            option = [] if test_seed is None else ["--data.test_seed", str(test_seed)]
            if not chain[-1].is_tested(chain[-1].test_seed if test_seed is None else test_seed):
                chain[-1].command("test", "--ckpt_path", "last", *option)
            print(f"{each} is trained and tested: {chain[-1].root / TEST}")
    reporting.report(runs=RUNS, speed=None, out=REPORT)
