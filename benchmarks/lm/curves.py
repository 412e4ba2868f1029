"""Results of a run: run.json has its settings, metrics.csv a line for each validation."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from ..run import measure
from .model import Settings

# parts of a window, as shares of its length
PARTS = ((0, 1 / 8), (1 / 8, 1 / 4), (1 / 4, 1 / 2), (1 / 2, 1))

Point = dict[str, float]


def point_of(settings: Settings, *, step: int, seconds: float, train_loss: float, losses: list[Tensor]) -> Point:
    """A line of metrics.csv.

    seconds     of training, without validations
    train_loss  mean since the line before
    losses      (batch, length) each: of the validation windows
    """
    by_position = torch.cat(losses).double().mean(dim=0)
    parts = [by_position[int(a * settings.length) : int(b * settings.length)].mean().item() for a, b in PARTS]
    return {
        "step": step, "tokens": step * settings.batch_size * settings.length, "seconds": round(seconds, 3),
        "train_loss": train_loss, "validation_loss": by_position.mean().item(),
        **{f"loss_part_{number}": loss for number, loss in enumerate(parts, 1)},
    }  # fmt: skip


def write_points(folder: Path, points: list[Point]) -> None:
    with (folder / "metrics.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, points[0], lineterminator="\n")
        lines.writeheader()
        lines.writerows(points)


def write_run(folder: Path, settings: Settings, model: nn.Module, corpus_sha256: str, device: torch.device) -> None:
    weights = sum(weight.numel() for weight in model.parameters())
    facts = {**asdict(settings), "weights": weights, "corpus_sha256": corpus_sha256, **measure.environment(device)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
