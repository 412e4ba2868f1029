"""Small language models on long text: `python -m benchmarks.lm COMMAND --help`

corpus   makes the corpus from the Python sources of the installed packages, or from any folder of text
train    trains one arm; run it again to resume after an interruption or --minutes
figure   trains all arms of a figure, skipping those that have finished, then writes its report
steps    times training steps of arms and implementations of attention
report   writes a table and a plot of the runs
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..run import measure
from . import corpus
from .model import ARMS, IMPLEMENTATIONS, SIZES, TINY, Settings

OUT = Path("out/lm")
# arms compared in docs/does_it_help.md
COMPARED = ("dense", "hybrid", "hybrid-local", "local", "dense-short")


class Plan(NamedTuple):
    """The runs of a figure: an arm and a seed each.

    base  settings of a run for each seed, with whose weights all arms of the seed begin; None for random weights
    """

    settings: Settings
    arms: Sequence[str]
    seeds: Sequence[int]
    base: Settings | None = None


SMALL = replace(Settings(), **SIZES["small"])
# demo is for a CPU; a run of the others takes minutes on a GPU
FIGURES = {
    "demo": Plan(TINY, COMPARED, (0,)),
    "small": Plan(SMALL, COMPARED, (0, 1, 2)),
    "extended": Plan(
        replace(SMALL, steps=1200, learning_rate=3e-4), COMPARED, (0, 1, 2),
        replace(SMALL, arm="dense-short", steps=6000, validate_every=600),
    ),
    "medium": Plan(Settings(), COMPARED, (0, 1, 2)),
    "selected": Plan(
        replace(Settings(), length=8192, batch_size=8, n_validation=128), ("dense", "local", "nsa", "moba"), (0,)
    ),
}  # fmt: skip
# exit codes: after an interruption, and after --minutes
INTERRUPTED, STOPPED = 130, 75


def minutes(text: str) -> float:
    """The type of an option: a time of 0 or more."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm", description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    # without abbreviations, which the defaults of --tiny would not see
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    make, train, figure, steps, report = map(add, ("corpus", "train", "figure", "steps", "report"))
    site = Path(sysconfig.get_path("purelib"))
    make.add_argument("--folder", type=Path, default=site, help="each entry is a package; default: installed packages")
    make.add_argument("--suffix", default=".py", help="suffix of the files; default .py")
    make.add_argument("--max-bytes", type=int, default=200_000_000, help="size of the corpus; default 200,000,000")
    what = "written, with a manifest beside it; no other corpus is replaced"
    make.add_argument("--out", type=Path, default=OUT / "corpus.bin", help=what)
    for command in (train, figure):
        command.add_argument("--corpus", type=Path, default=OUT / "corpus.bin", help="written by the command `corpus`")
        what = f"stop after the last validation within this time, with exit code {STOPPED}; default: no limit"
        command.add_argument("--minutes", type=minutes, default=math.inf, help=what)
    train.add_argument("--tiny", action="store_true", help="other defaults: about a minute on a CPU")
    train.add_argument("--out", type=Path, help="folder of the run; default out/lm/runs/ARM")
    for name, default in asdict(TINY if "--tiny" in arguments else Settings()).items():
        option = f"--{name.replace('_', '-')}"
        train.add_argument(option, type=type(default), default=default, help=f"default {default}")
    figure.add_argument("name", choices=FIGURES, help="demo: minutes on a CPU; the others need a GPU")
    figure.add_argument("--out", type=Path, help="folder of runs and report; default out/lm/NAME")
    figure.add_argument("--arms", nargs="+", choices=ARMS, help="default: those of the figure")
    figure.add_argument("--seeds", nargs="+", type=int, help="default: those of the figure")
    for name in ("steps", "validate_every"):
        figure.add_argument(f"--{name.replace('_', '-')}", type=int, help="for each run; default: as in the figure")
    steps.add_argument("--size", choices=SIZES, default="medium", help="of the model; default medium")
    steps.add_argument("--arms", nargs="+", choices=ARMS, default=["dense", "hybrid", "local"])
    steps.add_argument("--attention", nargs="+", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    count, lengths = measure.multiple_of(1), [65536, 131072]
    steps.add_argument("--lengths", nargs="+", type=count, default=lengths, help="tokens; default 65536 131072")
    steps.add_argument("--keys", type=int, default=Settings().keys, help=f"default {Settings().keys}")
    steps.add_argument("--rounds", type=count, default=7, help="timed steps of each variant; default 7")
    results = "benchmarks/results/lm_steps.jsonl"
    steps.add_argument("--out", type=measure.appendable, default=results, help="appended to")
    report.add_argument("--runs", type=Path, default=OUT / "runs", help="folder with a folder for each run")
    report.add_argument("--out", type=Path, default=OUT / "report", help="folder of report.md and curves.png")
    return parser.parse_args(arguments)


def _figure(options: argparse.Namespace, deadline: float) -> bool:
    """Trains the unfinished runs of a figure and writes its report. Returns whether all runs have finished.

    Seed by seed, so that an interruption leaves whole seeds.
    """
    plan = FIGURES[options.name]
    given: dict[str, Any] = {"steps": options.steps, "validate_every": options.validate_every}
    settings = replace(plan.settings, **{name: value for name, value in given.items() if value is not None})
    # without repeats, which would be counted as runs of their own
    arms, seeds = (list(dict.fromkeys(given)) for given in (options.arms or plan.arms, options.seeds or plan.seeds))
    out = OUT / options.name if options.out is None else options.out
    print(f"{options.name}: {len(arms) * len(seeds)} runs of {settings.steps} steps in {out}", flush=True)
    data = corpus.Corpus(options.corpus, settings.length)
    train_all = importlib.import_module("benchmarks.lm.training").train_all
    # not in `out`, whose runs are compared
    base_folder = out.with_name(f"{out.name}-base")
    n_runs, n_finished = (len(arms) + (plan.base is not None)) * len(seeds), 0
    for seed in seeds:
        start = ""
        if plan.base is not None:
            base = replace(plan.base, seed=seed)
            start = str(base_folder / f"{base.name}-seed{seed}")
            print(f"seed {seed}: first the run with whose weights the others begin, {base.steps} steps", flush=True)
            if not train_all([base], data, base_folder, deadline):
                continue
            n_finished += 1
        runs = [replace(settings, arm=arm, seed=seed, start=start) for arm in arms]
        n_finished += train_all(runs, data, out, deadline)
    print(f"{n_finished} of {n_runs} runs have finished", flush=True)
    if any(out.rglob("metrics.csv")):
        path = importlib.import_module("benchmarks.lm.report").report(out, out)
        print(f"{path.read_text(encoding='utf-8')}\n{path}")
    return n_finished == n_runs


def _run(options: argparse.Namespace) -> bool:
    """Runs the command. Returns False if --minutes stopped it."""
    if options.command == "corpus":
        made = corpus.make(options.folder, options.out, suffix=options.suffix, max_bytes=options.max_bytes)
        print(f"{options.out}: {made['train_bytes']:,} bytes to train, {made['validation_bytes']:,} to validate")
        if left_out := made["left_out"]:
            print(f"{len(left_out)} of {len(left_out) + len(made['packages'])} packages left out: see the manifest")
    elif options.command == "report":
        print(importlib.import_module("benchmarks.lm.report").report(options.runs, options.out))
    elif options.command == "steps":
        base = replace(Settings(), keys=options.keys, **SIZES[options.size])
        sizes = {"arms": options.arms, "implementations": options.attention, "lengths": options.lengths}
        measured = importlib.import_module("benchmarks.lm.steps").measured
        print(measured(options.size, base, rounds=options.rounds, out=options.out, **sizes))
    else:
        deadline = time.monotonic() + 60 * options.minutes
        if options.command == "figure":
            return _figure(options, deadline)
        settings = Settings(**{name: getattr(options, name) for name in asdict(TINY)})
        folder = OUT / "runs" / settings.name if options.out is None else options.out
        train = importlib.import_module("benchmarks.lm.training").train
        return bool(train(settings, corpus.Corpus(options.corpus, settings.length), folder, deadline))
    return True


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, INTERRUPTED or STOPPED."""
    options = parsed(sys.argv[1:] if given is None else given)
    try:
        if _run(options):
            return 0
    except ModuleNotFoundError as error:
        sys.exit(f"python -m benchmarks.lm {options.command} needs {error.name}: pip install '.[lra]'")
    except (OSError, ValueError) as error:
        sys.exit(f"python -m benchmarks.lm {options.command}: {error}")
    # Lightning exits when it is interrupted
    except (KeyboardInterrupt, SystemExit):
        print("\ninterrupted; the same command continues from the last validation", file=sys.stderr)
        return INTERRUPTED
    print("stopped by --minutes; the same command continues", file=sys.stderr)
    return STOPPED


if __name__ == "__main__":
    sys.exit(main())
