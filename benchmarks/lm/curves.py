"""Results of a run: run.json has its settings, metrics.csv a line for each validation."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..run import measure, saved
from .model import Settings

Point = dict[str, Any]


def parts_of(length: int) -> list[tuple[int, int]]:
    """Parts of a window: 0 to 1,024 (an eighth of windows shorter than 8,192), then ends that double, to the end."""
    ends = [min(1024, -(-length // 8))]
    while 2 * ends[-1] < length:
        ends.append(2 * ends[-1])
    return list(pairwise([0, *ends, length]))


def point_of(
    settings: Settings, *, step: int, seconds: float, train_loss: float, losses: list[Tensor], peak_bytes: int = 0
) -> Point:
    """A line of metrics.csv.

    seconds     of training, without validations
    train_loss  mean since the previous line
    losses      losses of the tokens of the validation windows, (batch, length) each. loss_late is the mean over the
                second half of each context of dense-short, the same tokens in every arm
    peak_bytes  peak GPU memory in training and validation; 0 on a CPU
    """
    by_position = torch.cat(losses).double().mean(dim=0)
    means = {f"loss_part_{i}": by_position[a:b].mean().item() for i, (a, b) in enumerate(parts_of(settings.length), 1)}
    late = torch.arange(settings.length, device=by_position.device) % settings.short >= settings.short // 2
    return {
        "step": step, "tokens": step * settings.batch_size * settings.length, "seconds": round(seconds, 3),
        "train_loss": train_loss, "validation_loss": by_position.mean().item(), **means,
        "loss_late": by_position[late].mean().item(), "peak_bytes": peak_bytes,
    }  # fmt: skip


def write_points(folder: Path, points: list[Point]) -> None:
    text = io.StringIO()
    lines = csv.DictWriter(text, points[0], lineterminator="\n")
    lines.writeheader()
    lines.writerows(points)
    with saved.replacing(folder / "metrics.csv") as unfinished:
        unfinished.write_text(text.getvalue(), encoding="utf-8")


def facts_of_start(folder: Path) -> dict[str, Any]:
    """What run.json says of the run with whose weights another one begins.

    raises  ValueError without the weights of a finished run
    """
    if not (folder / "weights.pt").exists() or (folder / "last.ckpt").exists():
        raise ValueError(f"start must be the folder of a finished run, which has weights.pt, got {folder}")
    facts, points = read_run(folder)
    found = {name: facts[name] for name in ("arm", "seed", "corpus_sha256")}
    found |= {name: points[-1][name] for name in ("tokens", "seconds", "validation_loss")}
    return {**found, "sha256": hashlib.sha256((folder / "weights.pt").read_bytes()).hexdigest()}


def identity_of(settings: Settings, corpus_sha256: str) -> dict[str, Any]:
    """The settings and checksums that a run keeps when it is resumed. Not the path of the run that it begins with."""
    found = {**asdict(settings), "corpus_sha256": corpus_sha256}
    del found["start"]
    if settings.start:
        found["start"] = facts_of_start(Path(settings.start))
    return found


def write_run(folder: Path, identity: dict[str, Any], model: nn.Module, device: torch.device) -> None:
    """identity: from identity_of."""
    weights = sum(weight.numel() for weight in model.parameters())
    facts = {**identity, "weights": weights, **measure.environment(device)}
    with saved.replacing(folder / "run.json") as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_run(folder: Path) -> tuple[dict[str, Any], list[Point]]:
    """run.json, and the lines of metrics.csv as numbers, one or more; ValueError if a file is not whole."""
    path = folder / "metrics.csv"
    try:
        with path.open(encoding="utf-8") as file:
            points = [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    # a line that is cut off has None for its last columns
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the metrics.csv of a run ({error}): copy it again, or remove it") from None
    if not points:
        raise ValueError(f"{path} is not the metrics.csv of a run (it has no lines): copy it again, or remove it")
    return saved.read_json(folder / "run.json", ("arm", "seed", "corpus_sha256"), "the run.json of a run"), points
