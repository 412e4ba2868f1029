"""Trains a configuration together with the stages whose weights it begins with, and resumes where it stopped."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from ..run import measure
from .scoring import TEST

CONFIGS = Path(__file__).with_name("configs") / "ours"


@dataclass(frozen=True)
class Stage:
    """A configuration, the folder of its run, its last step, and the checkpoint it begins with, if any."""

    config: Path
    root: Path
    steps: int
    start: Path | None

    @classmethod
    def read(cls, config: Path) -> Stage:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        trainer, start = settings["trainer"], settings["model"].get("start")
        root = Path(trainer["default_root_dir"])
        return cls(config, root, trainer["max_steps"], None if start is None else Path(start))

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoints" / "last.ckpt"

    def trained_steps(self) -> int:
        """Steps of the checkpoint; 0 without one."""
        if not self.checkpoint.exists():
            return 0
        return int(torch.load(self.checkpoint, map_location="cpu", weights_only=True)["global_step"])

    def is_tested(self) -> bool:
        """Whether test.jsonl has a line of the last step."""
        path = self.root / TEST
        return path.exists() and any(line["steps"] == self.steps for line in measure.read(path))

    def command(self, name: str, *arguments: str) -> None:
        """Run a command of `python -m benchmarks.lra` in its own process; exits with its exit code if it fails."""
        command = [sys.executable, "-m", "benchmarks.lra", name, "--config", str(self.config), *arguments]
        code = subprocess.run(command, check=False).returncode
        if code:
            print(f"{self.config.stem}: {name} failed; run the same command again to continue", file=sys.stderr)
            sys.exit(code)


def stages(name: str) -> list[Stage]:
    """The stages of configs/ours/NAME.yaml, first to last: each begins with the weights of the one before.

    raises  ValueError for a name without a configuration, or a start that no configuration trains
    """
    known = {path.stem: Stage.read(path) for path in sorted(CONFIGS.glob("*.yaml"))}
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}, got {name!r}")
    of_checkpoint = {stage.checkpoint: stage for stage in known.values()}
    found = [known[name]]
    while (start := found[0].start) is not None:
        if start not in of_checkpoint:
            raise ValueError(f"{found[0].config} starts from {start}, which no configuration of {CONFIGS} trains")
        found.insert(0, of_checkpoint[start])
    return found


def run(name: str) -> None:
    """Train a configuration of configs/ours and the stages it begins with, then test it. Run it again to resume.

    Args:
        name: pathx, path256, or any other configuration of configs/ours
    """
    chain = stages(name)
    for number, stage in enumerate(chain, 1):
        steps = stage.trained_steps()
        print(f"stage {number} of {len(chain)}, {stage.config.stem}: {steps:,} of {stage.steps:,} steps", flush=True)
        if steps < stage.steps:
            stage.command("fit", *(["--ckpt_path", "last"] if steps else []))
            if stage.trained_steps() < stage.steps:
                sys.exit(f"{stage.config.stem} stopped before its last step; run the same command again to continue")
    if not chain[-1].is_tested():
        chain[-1].command("test", "--ckpt_path", "last")
    print(f"{name} is trained and tested: {chain[-1].root / TEST}")
