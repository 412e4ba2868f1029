"""A small language model on long text: `python -m benchmarks.lm COMMAND --help`

corpus   makes the corpus from the Python sources of the installed packages, or from any folder of text
train    trains an arm: dense, local, hybrid, nsa or moba; the same command resumes an interrupted run
report   writes a table and a plot of the runs
"""

from __future__ import annotations

import argparse
import importlib
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from . import corpus
from .model import TINY, Settings

OUT = Path("out/lm")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lm", description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    make, train, report = (commands.add_parser(name) for name in ("corpus", "train", "report"))
    site = Path(sysconfig.get_path("purelib"))
    make.add_argument("--folder", type=Path, default=site, help="each entry is a package; default: installed packages")
    make.add_argument("--suffix", default=".py", help="of the files; default .py")
    make.add_argument("--max-bytes", type=int, default=20_000_000, help="of the corpus; default 20,000,000")
    make.add_argument("--out", type=Path, default=OUT / "corpus.bin", help="written, with a manifest beside it")
    train.add_argument("--tiny", action="store_true", help="other defaults: about a minute on a CPU")
    train.add_argument("--corpus", type=Path, default=OUT / "corpus.bin", help="written by the command `corpus`")
    train.add_argument("--out", type=Path, help="folder of the run; default out/lm/runs/ARM")
    for name, default in asdict(TINY if "--tiny" in arguments else Settings()).items():
        option = f"--{name.replace('_', '-')}"
        train.add_argument(option, type=type(default), default=default, help=f"default {default}")
    report.add_argument("--runs", type=Path, default=OUT / "runs", help="folder with a folder for each run")
    report.add_argument("--out", type=Path, default=OUT / "report", help="folder of report.md and curves.png")
    return parser.parse_args(arguments)


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: 130 after an interruption."""
    options = parsed(sys.argv[1:] if given is None else given)
    try:
        if options.command == "corpus":
            made = corpus.make(options.folder, options.out, suffix=options.suffix, max_bytes=options.max_bytes)
            print(f"{options.out}: {made['train_bytes']:,} bytes to train, {made['validation_bytes']:,} to validate")
        elif options.command == "report":
            print(importlib.import_module("benchmarks.lm.report").report(options.runs, options.out))
        else:
            settings = Settings(**{name: getattr(options, name) for name in asdict(TINY)})
            training = importlib.import_module("benchmarks.lm.training")
            folder = OUT / "runs" / settings.arm if options.out is None else options.out
            training.train(settings, corpus.Corpus(options.corpus, settings.length), folder)
    except ModuleNotFoundError as error:
        sys.exit(f"python -m benchmarks.lm {options.command} needs {error.name}: pip install '.[lra]'")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"python -m benchmarks.lm {options.command}: {error}")
    # Lightning exits when it is interrupted
    except (KeyboardInterrupt, SystemExit):
        print("\ninterrupted; the same command goes on from the last validation", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
